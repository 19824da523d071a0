-- Rows of before take their place, then the indexes of the claim, without blocking anybody. The triggers of 0002
-- hold already, so nothing new can slip by while this runs. Every statement may be run again after a failure.
-- oldest code: 1
-- was: 06a09b51e4e86bb8ef28d048f3da706aef942b2b17661159262d1009dcb9fec2
-- outside a transaction

-- Listed at one instant, so none is missed because it moves, and all are read once. Then batch by batch; rows that
-- somebody holds are passed over and asked for again, with no lock held meanwhile and none waited for.
DO $fill$
DECLARE
  batch uuid[];
BEGIN
  FOR batch IN
    SELECT array_agg(job_id) FROM (
      SELECT job_id, row_number() OVER () / 500 AS number FROM dl_jobs
       WHERE status = 'queued' AND blocked_on IS NULL AND available_at > clock_timestamp()) future
     GROUP BY number
  LOOP
    LOOP
      UPDATE dl_jobs SET blocked_on = 'time' WHERE job_id IN (
        SELECT job_id FROM dl_jobs
         WHERE job_id = ANY (batch) AND status = 'queued' AND blocked_on IS NULL AND available_at > clock_timestamp()
           FOR NO KEY UPDATE SKIP LOCKED);
      COMMIT;
      EXIT WHEN NOT EXISTS (
        SELECT FROM dl_jobs
         WHERE job_id = ANY (batch) AND status = 'queued' AND blocked_on IS NULL AND available_at > clock_timestamp());
      PERFORM pg_sleep(0.1);
    END LOOP;
  END LOOP;
END
$fill$;

-- The normal case: claimable rows in the order of the claim.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_cold;
CREATE INDEX CONCURRENTLY ix_dl_jobs_cold ON dl_jobs (queue, priority, created_at)
  WHERE status = 'queued' AND blocked_on IS NULL AND NOT hot;

-- Claimable rows whose key was once busy, by key_hash: the first of each key_hash is found by a loose index scan.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_hot;
CREATE INDEX CONCURRENTLY ix_dl_jobs_hot ON dl_jobs (queue, hashtext(lock_key), priority, created_at)
  WHERE status = 'queued' AND blocked_on IS NULL AND hot;

-- Rows that wait for their time.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_due;
CREATE INDEX CONCURRENTLY ix_dl_jobs_due ON dl_jobs (queue, available_at)
  WHERE status = 'queued' AND blocked_on = 'time';

-- Slots that are taken; also what the reaper reads, for there are never more running rows than workers.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_running;
CREATE INDEX CONCURRENTLY ix_dl_jobs_running ON dl_jobs (hashtext(lock_key)) WHERE status = 'running';

-- A job's journal.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_job_events_job;
CREATE INDEX CONCURRENTLY ix_dl_job_events_job ON dl_job_events (job_id, event_id);

-- With the lease in an index no heartbeat could be a heap-only (HOT) update.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_running_lease;
