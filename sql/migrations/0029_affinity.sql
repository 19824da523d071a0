-- The heavy resource that a job needs, and the args from which a pipeline takes it where the producer does not name it.
-- oldest code: 1

ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS affinity_key text;
COMMENT ON COLUMN dl_jobs.affinity_key IS 'the heavy resource that the job needs; null: none';
ALTER TABLE dl_tasks ADD COLUMN IF NOT EXISTS affinity text[];
COMMENT ON COLUMN dl_tasks.affinity IS 'args of which the first fit one is the affinity_key of a job whose producer gives none; null: none';
