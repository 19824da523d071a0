-- The errors of jobs in groups: which one a job's error belongs to, and what people have written about a group.
-- oldest code: 1
-- functions: dl_error_group

ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS error_group text;
COMMENT ON COLUMN dl_jobs.error_group IS 'the error without what differs from job to job; null: no error, or dl_error_group tells it';
CREATE TABLE IF NOT EXISTS dl_error_notes (
  task text NOT NULL,
  error_group text NOT NULL,
  note text NOT NULL,
  by text NOT NULL,
  at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (task, error_group)
);
COMMENT ON TABLE dl_error_notes IS 'what people have written about an error group';
