-- The bodies of the triggers. The migrations create the triggers, and schema.sql shows them: the rows that each one fires
-- for. A migration is applied together with the functions that its header names: a body here may use only the columns
-- that exist after the first migration that names it.


-- Where a row stands, computed whenever its status or its time changes, whoever changes it. Not fired by a
-- heartbeat and not by wake, which only clears blocked_on. A finished job that somebody puts back by a plain UPDATE is
-- to run: with a fresh budget of attempts, and without the cancellation that had ended it. What that UPDATE sets
-- itself stands. A job that has ended has a finished_at, also when its service left it null: retention goes by that.
CREATE OR REPLACE FUNCTION dl_jobs_place() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'UPDATE' AND NEW.status = 'queued' AND OLD.status NOT IN ('queued', 'running') THEN
    NEW.attempt := CASE WHEN NEW.attempt = OLD.attempt THEN 0 ELSE NEW.attempt END;
    NEW.cancel_requested := NEW.cancel_requested AND NOT OLD.cancel_requested;
    NEW.cancel_forced := false;
    NEW.finished_at := NULL;
  END IF;
  NEW.blocked_on := CASE WHEN NEW.status = 'queued' AND NEW.available_at > now() THEN 'time' END;
  IF NEW.status <> 'running' THEN
    NEW.claimed_by := NULL;
    NEW.claimed_pid := NULL;
    NEW.claimed_backend_start := NULL;
  END IF;
  IF NEW.status NOT IN ('queued', 'running') THEN
    NEW.finished_at := coalesce(NEW.finished_at, now());
  END IF;
  RETURN NEW;
END
$$;


-- A row may be claimable now or will be at a known time: notify the workers of its queue, also of a future row, for an
-- idle worker sleeps until the due time that it knows. Inserts notify once a statement, updates once a row.
CREATE OR REPLACE FUNCTION notify_job_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_LEVEL = 'STATEMENT' THEN
    PERFORM pg_notify('dl_jobs', queue) FROM (SELECT DISTINCT queue FROM added WHERE status = 'queued') told;
  ELSIF NEW.status = 'queued' THEN
    PERFORM pg_notify('dl_jobs', NEW.queue);
  END IF;
  RETURN NULL;
END
$$;


-- A key became free: notify the queues in which hot rows of its key_hash wait. Bound to this schema, because a foreign
-- worker may finish a job with another search_path.
CREATE OR REPLACE FUNCTION dl_jobs_notify_key() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM dl_tell_waiters(ARRAY[hashtext(NEW.lock_key)]);
  RETURN NULL;
END
$$;


-- The journal of other services' steps: our statements write their own rows and count them in `journaled`.
-- Deferred to the commit, for a service may write its own journal row after its step: then the trigger adds none.
-- With the owner's rights, for a producer may have none on the journal; so the function trusts no search_path, nor
-- pg_temp. Bound to this schema by its text, so that each session plans it once, and to dl_jobs: the owner of another
-- table could write any row by it. Without sequential scans, for a session keeps the plan of a short journal while the
-- journal grows. The row leaves the error out: only our workers mask secrets in their texts.
DO $bound$ BEGIN EXECUTE format($function$
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
$function$, current_schema(), format('%I.dl_jobs', current_schema())); END $bound$;


-- Delete the journal of deleted jobs, as a foreign key would, but without its cost for each row of the journal: with
-- the owner's rights, as a cascade has them; bound as dl_jobs_journal.
DO $bound$ BEGIN EXECUTE format($function$
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
  format('DELETE FROM %I.dl_job_events WHERE job_id IN (SELECT job_id FROM gone)', current_schema())); END $bound$;
