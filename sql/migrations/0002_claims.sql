-- What a claim needs beside the contract's columns, and the triggers that keep it true for every producer,
-- plain ones too. New columns have constant defaults: no table is rewritten.
-- oldest code: 1
-- was: af05ed139053c91321bf2e9240d1f4c7167abd15e0a7abe23d2cf69da94ade68
-- functions: dl_jobs_place, notify_job_ready

ALTER TABLE dl_jobs
  ADD COLUMN blocked_on text,                        -- why a queued row may not be claimed: 'time'
  ADD COLUMN hot boolean NOT NULL DEFAULT false,     -- a claim once found its key busy
  ADD COLUMN backoffs int NOT NULL DEFAULT 0,        -- refusals in a row of a key that no visible job holds
  ADD COLUMN claimed_by text,                        -- host:pid:boot of the worker that runs it
  ADD COLUMN claimed_pid int,                        -- that worker's backend, with its start: what may still
  ADD COLUMN claimed_backend_start timestamptz,      -- hold the key's advisory lock when the worker is gone
  ADD COLUMN cancel_forced boolean NOT NULL DEFAULT false;  -- see 0005; dl_jobs_place sets it

-- Room on each page for the new versions of its rows, so that heartbeats stay heap-only (HOT) updates.
ALTER TABLE dl_jobs SET (fillfactor = 70);

COMMENT ON COLUMN dl_jobs.blocked_on IS 'why a queued row may not be claimed (time), null when it may';
COMMENT ON COLUMN dl_jobs.hot IS 'a claim once found this row''s key busy';
COMMENT ON COLUMN dl_jobs.backoffs IS 'refusals in a row of a key that no visible job holds';
COMMENT ON COLUMN dl_jobs.claimed_by IS 'host:pid:boot of the worker that runs the job';
COMMENT ON COLUMN dl_jobs.claimed_pid IS 'backend of that worker''s session';
COMMENT ON COLUMN dl_jobs.claimed_backend_start IS 'start of that backend: pids are used again';

DROP TRIGGER IF EXISTS dl_jobs_notify_ins ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_notify_upd ON dl_jobs;

CREATE TRIGGER dl_jobs_place BEFORE INSERT OR UPDATE OF status, available_at ON dl_jobs
  FOR EACH ROW EXECUTE FUNCTION dl_jobs_place();
CREATE TRIGGER dl_jobs_notify_ins AFTER INSERT ON dl_jobs
  FOR EACH ROW EXECUTE FUNCTION notify_job_ready();
CREATE TRIGGER dl_jobs_notify_upd AFTER UPDATE OF status, available_at ON dl_jobs
  FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_job_ready();
