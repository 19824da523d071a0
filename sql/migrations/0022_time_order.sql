-- Rows whose time comes at one instant become claimable in the order of the claim, some at a time. The index of before
-- had them in any order. Without blocking anybody; may be run again.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_time;
CREATE INDEX CONCURRENTLY ix_dl_jobs_time ON dl_jobs (queue, available_at, priority, created_at)
  WHERE status = 'queued' AND blocked_on = 'time';
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_due;
