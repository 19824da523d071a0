-- What pipelines have returned: a table of its own, so that a job without a result costs nothing more.
-- oldest code: 1

CREATE TABLE dl_results (
  job_id uuid PRIMARY KEY,
  claim int NOT NULL,
  result jsonb NOT NULL
);
COMMENT ON TABLE dl_results IS 'what the pipelines of jobs have returned';
COMMENT ON COLUMN dl_results.claim IS 'dl_jobs.claims of the run; it is the result only of a job that has succeeded by this claim';
