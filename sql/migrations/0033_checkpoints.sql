-- How far the runs of jobs have come: a table of its own, so that a job without checkpoints costs nothing more.
-- oldest code: 1

CREATE TABLE dl_checkpoints (
  job_id uuid PRIMARY KEY,
  claim int NOT NULL,
  checkpoint jsonb,
  target_claim bigint NOT NULL,
  target_number int NOT NULL,
  spares_attempt boolean NOT NULL,
  saved_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_checkpoints IS 'how far the runs of jobs have come';
COMMENT ON COLUMN dl_checkpoints.claim IS 'dl_jobs.claims of the run that has come so far';
