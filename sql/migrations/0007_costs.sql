-- What a job costs: triggers fire only where they have something to do, inserts are told of once a statement, the
-- journal's rows are not checked against the jobs', and the tables are vacuumed by the number of changes.
-- oldest code: 1
-- was: a5be9f7468f40e0b9292b340a14d82f9ed396f2a4f4f5aa579661ebc0cdf98f1
-- functions: notify_job_ready, dl_jobs_forget

CREATE OR REPLACE TRIGGER dl_jobs_notify_ins AFTER INSERT ON dl_jobs
  REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION notify_job_ready();

-- A foreign key would read and lock the job for each row of its journal. What it did for a deleted job, a trigger does:
-- with the owner's rights, as a cascade has them.
DO $drop$
DECLARE
  name text;
BEGIN
  FOR name IN SELECT conname FROM pg_constraint WHERE conrelid = 'dl_job_events'::regclass AND contype = 'f' LOOP
    EXECUTE format('ALTER TABLE dl_job_events DROP CONSTRAINT %I', name);
  END LOOP;
END
$drop$;
CREATE TRIGGER dl_jobs_forget AFTER DELETE ON dl_jobs
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION dl_jobs_forget();

-- A queue's rows die young: by default a vacuum would wait for a fifth of the history. Freezing goes with it.
ALTER TABLE dl_jobs SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
                         autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 1);
ALTER TABLE dl_job_events SET (autovacuum_vacuum_insert_scale_factor = 0.1);
