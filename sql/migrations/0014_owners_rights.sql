-- What runs with the owner's rights does so for the one table that it was made for, and needs no parameter of its own: only
-- a superuser may bind one to a function. Who may call which function is said by rights.sql, after functions.sql.
-- oldest code: 1

-- The journal of what others do, as before, but for dl_jobs alone: a role that could put it on a table of its own would
-- write what it liked. (CREATE TRIGGER asks for EXECUTE, which PUBLIC has no more; this is the second wall.)
DO $bound$
BEGIN
  EXECUTE format($function$
    CREATE OR REPLACE FUNCTION dl_jobs_journal() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
    DECLARE
      step text := CASE NEW.status WHEN 'running' THEN 'picked' WHEN 'succeeded' THEN 'done'
                                   WHEN 'queued' THEN CASE TG_OP WHEN 'INSERT' THEN 'queued' ELSE 'requeue' END
                                   ELSE NEW.status::text END;
    BEGIN
      IF TG_RELID <> %2$L::regclass THEN
        RAISE insufficient_privilege USING MESSAGE = 'dl_jobs_journal is for dl_jobs';
      END IF;
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
    $function$, current_schema(), format('%I.dl_jobs', current_schema()));

  -- Which journal it deletes from is in its text, and no more taken from the table that it is called for.
  EXECUTE format($function$
    CREATE OR REPLACE FUNCTION dl_jobs_forget() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
      IF TG_RELID <> %2$L::regclass THEN
        RAISE insufficient_privilege USING MESSAGE = 'dl_jobs_forget is for dl_jobs';
      END IF;
      EXECUTE %3$L;
      RETURN NULL;
    END
    $$
    $function$, current_schema(), format('%I.dl_jobs', current_schema()),
    format('DELETE FROM %I.dl_job_events WHERE job_id IN (SELECT job_id FROM gone)', current_schema()));
END
$bound$;

-- A key becomes free: who journals the step itself (dl_finish, dl_lose) tells the waiters itself. A crash that is settled
-- between this and the new functions.sql tells only its own queue; what waits in another looks again within DL_CLAIM_BACKOFF_SEC.
CREATE OR REPLACE TRIGGER dl_jobs_notify_key AFTER UPDATE OF status ON dl_jobs
  FOR EACH ROW WHEN (OLD.status = 'running' AND NEW.status <> 'running' AND NEW.journaled = OLD.journaled)
  EXECUTE FUNCTION dl_jobs_notify_key();
