-- The adoption of the contract's tables beside other services; everything may run again after a failure (migrations.py).

-- name: tables
-- Is there a table dl_jobs, and has `begin` been there?
SELECT count(*) > 0 AS there, count(*) FILTER (WHERE attname = 'blocked_on') > 0 AS begun
  FROM pg_attribute WHERE attrelid = to_regclass(quote_ident(current_schema()) || '.dl_jobs') AND NOT attisdropped;

-- name: begin
-- After `columns` of schema.sql and dl_jobs_place, and before `checks`, in one transaction: each row takes its place. The old
-- claim index serves until ours is built.
CREATE TRIGGER dl_jobs_place BEFORE INSERT OR UPDATE OF status, available_at ON dl_jobs
  FOR EACH ROW EXECUTE FUNCTION dl_jobs_place();
ALTER INDEX IF EXISTS ix_dl_jobs_claim RENAME TO ix_dl_jobs_claim_old;

-- name: misplaced
-- In the place of {misplaced}: a row of before that is not ready yet, has ended without a time, or has a time and goes on.
(status = 'queued' AND blocked_on IS NULL AND available_at > clock_timestamp()
 OR (status IN ('queued', 'running')) = (finished_at IS NOT NULL))

-- name: unplaced
SELECT job_id FROM dl_jobs WHERE {misplaced};

-- name: place
-- A job has ended, as far as is known, with its last sign of life. No trigger is fired.
WITH done AS (
  UPDATE dl_jobs SET
         blocked_on = CASE WHEN status = 'queued' AND available_at > clock_timestamp() THEN 'time' END,
         finished_at = CASE WHEN status NOT IN ('queued', 'running')
                            THEN coalesce(finished_at, greatest(created_at, started_at, heartbeat_at)) END
   WHERE job_id IN (SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND {misplaced} FOR NO KEY UPDATE SKIP LOCKED)
  RETURNING job_id)
SELECT (SELECT array_agg(job_id) FROM done) AS done,
       (SELECT array_agg(job_id) FROM dl_jobs
         WHERE job_id = ANY (%(job_ids)s) AND {misplaced} AND job_id NOT IN (SELECT job_id FROM done)) AS locked;

-- name: finish
-- Before `triggers` of schema.sql, in one transaction. A foreign key would read and lock the job for each row of its
-- journal.
DO $adopt$
DECLARE
  name text;
BEGIN
  DROP TRIGGER IF EXISTS dl_jobs_place ON dl_jobs;
  DROP TRIGGER IF EXISTS dl_jobs_notify_ins ON dl_jobs;
  DROP TRIGGER IF EXISTS dl_jobs_notify_upd ON dl_jobs;
  FOR name IN SELECT conname FROM pg_constraint WHERE conrelid = 'dl_job_events'::regclass AND contype = 'f' LOOP
    EXECUTE format('ALTER TABLE dl_job_events DROP CONSTRAINT %I', name);
  END LOOP;
END
$adopt$;

-- name: old_indexes
-- The contract's indexes that ours replace: with the lease in an index no heartbeat could be a heap-only (HOT) update. And
-- the index of idempotency keys that has given way to the other one, or was not finished.
SELECT relname FROM pg_class
 WHERE relnamespace = quote_ident(current_schema())::regnamespace
   AND (relname IN ('ix_dl_jobs_claim_old', 'ix_dl_jobs_running_lease', 'ix_dl_jobs_status_queue', 'dl_jobs_unique')
        OR relname = 'ix_dl_jobs_idempotency'
           AND EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'dl_jobs'::regclass AND conname = 'dl_jobs_idempotency_key_key'));

-- name: has_unique
-- Whether the contract's UNIQUE is there, on which other services' `ON CONFLICT (idempotency_key)` depends.
SELECT EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'dl_jobs'::regclass AND conname = 'dl_jobs_idempotency_key_key');

-- name: unique
-- The contract's UNIQUE in the place of our index, which old_indexes drops. The code of 0.2.0 needs the UNIQUE.
DROP INDEX CONCURRENTLY IF EXISTS dl_jobs_unique;
CREATE UNIQUE INDEX CONCURRENTLY dl_jobs_unique ON dl_jobs (idempotency_key);
ALTER TABLE dl_jobs ADD CONSTRAINT dl_jobs_idempotency_key_key UNIQUE USING INDEX dl_jobs_unique;
UPDATE dl_migrations SET oldest_code = 1 WHERE number = 1;

-- name: no_unique
-- And back.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_idempotency;
CREATE UNIQUE INDEX CONCURRENTLY ix_dl_jobs_idempotency ON dl_jobs (idempotency_key) WHERE idempotency_key IS NOT NULL;
UPDATE dl_migrations SET oldest_code = 2 WHERE number = 1;
ALTER TABLE dl_jobs DROP CONSTRAINT dl_jobs_idempotency_key_key;

-- name: unfit
-- Rows that break a check: pages and indexes rely on the checks, which are triggers and hold for what is written from now on.
SELECT job_id FROM dl_jobs WHERE ({fields.unfit});

-- name: fit
-- Mend some of these rows, unless others have them locked. A text that is too long is cut; a hash at its end keeps different
-- keys different.
WITH done AS (
  UPDATE dl_jobs SET
         {fields.cut}
   WHERE job_id IN (SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND ({fields.unfit}) FOR NO KEY UPDATE SKIP LOCKED)
  RETURNING job_id)
SELECT (SELECT array_agg(job_id) FROM done) AS done,
       (SELECT array_agg(job_id) FROM dl_jobs
         WHERE job_id = ANY (%(job_ids)s) AND ({fields.unfit}) AND job_id NOT IN (SELECT job_id FROM done)) AS locked;
