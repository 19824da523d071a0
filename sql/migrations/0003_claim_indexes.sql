-- Rows of before take their place, then the indexes of the claim, without blocking anybody. The triggers of 0002
-- hold already, so nothing new can slip by while this runs. Every statement may be run again after a failure.
-- oldest code: 1
-- outside a transaction

-- repeat until it changes nothing
WITH future AS (
  SELECT job_id FROM dl_jobs
   WHERE status = 'queued' AND blocked_on IS NULL AND available_at > now()
   LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE dl_jobs SET blocked_on = 'time' FROM future WHERE dl_jobs.job_id = future.job_id;

-- Those that somebody held meanwhile.
-- repeat until it changes nothing
WITH future AS (
  SELECT job_id FROM dl_jobs
   WHERE status = 'queued' AND blocked_on IS NULL AND available_at > now()
   LIMIT 100 FOR NO KEY UPDATE)
UPDATE dl_jobs SET blocked_on = 'time' FROM future WHERE dl_jobs.job_id = future.job_id;

-- The normal case: claimable rows in the order of the claim.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_cold;
CREATE INDEX CONCURRENTLY ix_dl_jobs_cold ON dl_jobs (queue, priority, created_at)
  WHERE status = 'queued' AND blocked_on IS NULL AND NOT hot;

-- Claimable rows whose key was once busy, by slot: the first of each slot is found by a loose index scan.
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
