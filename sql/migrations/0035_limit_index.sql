-- The running jobs of a limit, and the parked ones by their limit. One index and not two, for each index of the table
-- costs every statement that writes to it. Without blocking anybody; may be run again.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_limits;
CREATE INDEX CONCURRENTLY ix_dl_jobs_limits ON dl_jobs (status, blocked_on, queue, priority, created_at)
  WHERE limits IS NOT NULL AND status IN ('queued', 'running');
