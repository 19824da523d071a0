-- What runs write: a line a row, in partitions by day, which the reaper makes ahead and drops. The default partition takes
-- what has no day of its own, so that no insert fails.
-- oldest code: 1

CREATE TABLE dl_job_logs (
  job_id uuid NOT NULL,
  claim int NOT NULL,
  attempt int NOT NULL,
  line int NOT NULL,
  at timestamptz NOT NULL,
  level text NOT NULL,
  source text NOT NULL,
  text text NOT NULL
) PARTITION BY RANGE (at);
COMMENT ON TABLE dl_job_logs IS 'what runs write, a line a row';
COMMENT ON COLUMN dl_job_logs.claim IS 'dl_jobs.claims of the run: attempts that did not count come again';
COMMENT ON COLUMN dl_job_logs.line IS 'from 1 in each run; a gap is what was left out';
COMMENT ON COLUMN dl_job_logs.source IS 'log, stdout or stderr';
CREATE INDEX ix_dl_job_logs_line ON dl_job_logs (job_id, claim, line);
CREATE TABLE dl_job_logs_rest PARTITION OF dl_job_logs DEFAULT;
