-- The journal of what others do. Our statements write their own journal rows and say so by `journaled`; for every
-- other session that changes a job's status a trigger writes what is missing. Constant default: no table is rewritten.
-- oldest code: 1

ALTER TABLE dl_jobs ADD COLUMN journaled int NOT NULL DEFAULT 0;  -- steps that their writer put into the journal
COMMENT ON COLUMN dl_jobs.journaled IS 'changes of status that their writer put into the journal itself';

-- Deferred to the commit, for a service may write its own journal row after its step: then there is nothing to add.
-- With the owner's rights, for a producer may have none on the journal; so it trusts no search_path, nor pg_temp.
-- The error stays out of it: only our workers' texts have their secrets masked.
CREATE FUNCTION dl_jobs_journal() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  kind text := CASE NEW.status WHEN 'running' THEN 'picked' WHEN 'succeeded' THEN 'done'
                               WHEN 'queued' THEN CASE TG_OP WHEN 'INSERT' THEN 'queued' ELSE 'requeue' END
                               ELSE NEW.status::text END;
BEGIN
  EXECUTE format($insert$
    INSERT INTO %1$I.dl_job_events (job_id, queue, kind, payload)
    SELECT job_id, queue, $2, jsonb_strip_nulls(jsonb_build_object(
             'attempt', $3, 'by', 'another service', 'user', session_user,
             'application', nullif(current_setting('application_name'), '')))
      FROM %1$I.dl_jobs WHERE job_id = $1  -- it may be deleted by now
       AND NOT EXISTS (SELECT FROM %1$I.dl_job_events e
                        WHERE e.job_id = $1 AND e.kind = $2 AND (e.ts = now() OR e.xmin = pg_current_xact_id()::xid))
    $insert$, TG_TABLE_SCHEMA)
  USING NEW.job_id, kind, NEW.attempt;
  RETURN NULL;
END
$$;

CREATE CONSTRAINT TRIGGER dl_jobs_journal_ins AFTER INSERT ON dl_jobs DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.journaled = 0) EXECUTE FUNCTION dl_jobs_journal();
CREATE CONSTRAINT TRIGGER dl_jobs_journal_upd AFTER UPDATE OF status ON dl_jobs DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.status <> OLD.status AND NEW.journaled = OLD.journaled) EXECUTE FUNCTION dl_jobs_journal();
