-- What canceled jobs have left behind, as their checkpoints say: the reaper adds jobs that clean up.
-- oldest code: 1
-- with rights

CREATE TABLE IF NOT EXISTS dl_cleanups (
  job_id uuid PRIMARY KEY
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_cleanups IS 'jobs whose checkpoints ask for a cleanup should the job be canceled';
