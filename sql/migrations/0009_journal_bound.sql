-- The journal of what others do is planned once a session: planning had been most of what a producer's commit cost.
-- oldest code: 1

-- With the owner's rights, for a producer may have none on the journal; so it trusts no search_path, nor pg_temp.
-- Bound to this schema by its text instead.
DO $bound$
BEGIN
  EXECUTE format($function$
    CREATE OR REPLACE FUNCTION dl_jobs_journal() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
      step text := CASE NEW.status WHEN 'running' THEN 'picked' WHEN 'succeeded' THEN 'done'
                                   WHEN 'queued' THEN CASE TG_OP WHEN 'INSERT' THEN 'queued' ELSE 'requeue' END
                                   ELSE NEW.status::text END;
    BEGIN
      INSERT INTO %1$I.dl_job_events (job_id, queue, kind, payload)
      SELECT job_id, queue, step, jsonb_strip_nulls(jsonb_build_object(
               'attempt', NEW.attempt, 'by', 'another service', 'user', session_user,
               'application', nullif(current_setting('application_name'), '')))
        FROM %1$I.dl_jobs WHERE job_id = NEW.job_id  -- it may be deleted by now
         AND NOT EXISTS (
           SELECT FROM %1$I.dl_job_events e
            WHERE e.job_id = NEW.job_id AND e.kind = step AND (e.ts = now() OR e.xmin = pg_current_xact_id()::xid));
      RETURN NULL;
    END
    $$
    $function$, current_schema());
END
$bound$;
