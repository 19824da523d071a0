-- The heavy resource that a job needs.
-- oldest code: 1

ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS affinity_key text;
