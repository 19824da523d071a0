-- The journal of what others do is planned once a session: planning had been most of what a producer's commit cost. And
-- the waiters of a key are told by one function, whoever ends its job.
-- oldest code: 1

-- With the owner's rights, for a producer may have none on the journal; so it trusts no search_path, nor pg_temp.
-- Bound to this schema by its text instead. Without sequential scans, for the plan of a short journal would be kept while
-- it grows.
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

-- As in functions.sql, which comes a moment later; until then the trigger needs it.
CREATE OR REPLACE FUNCTION dl_tell_waiters(p_slots int[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  waiting text;
BEGIN
  SELECT min(queue) INTO waiting FROM dl_jobs WHERE status = 'queued' AND blocked_on IS NULL AND hot;
  WHILE waiting IS NOT NULL LOOP
    IF EXISTS (SELECT FROM dl_jobs WHERE queue = waiting AND hashtext(lock_key) = ANY (p_slots)
                  AND status = 'queued' AND blocked_on IS NULL AND hot) THEN
      PERFORM pg_notify('dl_jobs', waiting);
    END IF;
    SELECT min(queue) INTO waiting FROM dl_jobs
     WHERE status = 'queued' AND blocked_on IS NULL AND hot AND queue > waiting;
  END LOOP;
END
$$;

-- A key became free: tell the queues in which hot rows of its slot wait. Bound to this schema, because a foreign
-- worker may finish a job from another search_path.
CREATE OR REPLACE FUNCTION dl_jobs_notify_key() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM dl_tell_waiters(ARRAY[hashtext(NEW.lock_key)]);
  RETURN NULL;
END
$$;
