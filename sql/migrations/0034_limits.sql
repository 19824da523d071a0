-- Limits for the whole fleet: the names that a job has, and what each name allows.
-- oldest code: 1

ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS limits text[];
COMMENT ON COLUMN dl_jobs.limits IS 'the limits that the job''s runs count for; null: none';
COMMENT ON COLUMN dl_jobs.blocked_on IS 'why a queued row is not ready (time, key, limit:NAME), null when it is';
ALTER TABLE dl_tasks ADD COLUMN IF NOT EXISTS limits text[];
COMMENT ON COLUMN dl_tasks.limits IS 'the limits of a job whose producer names none; null: none';
CREATE TABLE IF NOT EXISTS dl_limits (
  name text PRIMARY KEY,
  most int,
  per_minute float8,
  burst int NOT NULL DEFAULT 1,
  empty_at timestamptz NOT NULL DEFAULT '-infinity',
  changed_by text,
  changed_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT dl_limits_chk CHECK (most >= 0 AND per_minute BETWEEN 0.001 AND 1000000 AND burst BETWEEN 1 AND 1000000
                                  AND (most IS NOT NULL OR per_minute IS NOT NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_limits IS 'how many jobs of a limit may run at once, and start in a minute, on all hosts together';
