-- What a job costs: triggers fire only where they have something to do, inserts are told of once a statement, the
-- journal's rows are not checked against the jobs', and the tables are vacuumed by the number of changes.
-- oldest code: 1

CREATE OR REPLACE TRIGGER dl_jobs_place BEFORE UPDATE OF status, available_at ON dl_jobs
  FOR EACH ROW WHEN (NEW.status = 'queued' OR NEW.blocked_on IS NOT NULL
                     OR NEW.status <> 'running' AND NEW.claimed_by IS NOT NULL)
  EXECUTE FUNCTION dl_jobs_place();
CREATE OR REPLACE TRIGGER dl_jobs_place_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.status = 'queued' AND NEW.available_at > now()) EXECUTE FUNCTION dl_jobs_place();

-- Something may be claimable now or will be at a known time: tell the sleepers of its queue. Future rows are
-- told as well, so that whoever sleeps learns of an earlier due time. Inserts once a statement, updates once a row.
CREATE OR REPLACE FUNCTION notify_job_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_LEVEL = 'STATEMENT' THEN
    PERFORM pg_notify('dl_jobs', queue) FROM (SELECT DISTINCT queue FROM added WHERE status = 'queued') told;
  ELSIF NEW.status = 'queued' THEN
    PERFORM pg_notify('dl_jobs', NEW.queue);
  END IF;
  RETURN NULL;
END
$$;
CREATE OR REPLACE TRIGGER dl_jobs_notify_ins AFTER INSERT ON dl_jobs
  REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION notify_job_ready();

-- Not for dl_finish, which tells the waiters of all its ends at once.
CREATE OR REPLACE TRIGGER dl_jobs_notify_key AFTER UPDATE OF status ON dl_jobs
  FOR EACH ROW WHEN (OLD.status = 'running' AND NEW.status <> 'running'
                     AND current_setting('dataloader.tells', true) IS DISTINCT FROM 'waiters')
  EXECUTE FUNCTION dl_jobs_notify_key();

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
CREATE FUNCTION dl_jobs_forget() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  EXECUTE format('DELETE FROM %I.dl_job_events WHERE job_id IN (SELECT job_id FROM gone)', TG_TABLE_SCHEMA);
  RETURN NULL;
END
$$;
CREATE TRIGGER dl_jobs_forget AFTER DELETE ON dl_jobs
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION dl_jobs_forget();

-- A queue's rows die young: by default a vacuum would wait for a fifth of the history. Freezing goes with it.
ALTER TABLE dl_jobs SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
                         autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 1);
ALTER TABLE dl_job_events SET (autovacuum_vacuum_insert_scale_factor = 0.1);
