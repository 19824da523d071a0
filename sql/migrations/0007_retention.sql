-- What dl_prune reads: finished jobs in the order of their end. Built without blocking anybody; may be run again.
-- oldest code: 1
-- outside a transaction
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_finished;
CREATE INDEX CONCURRENTLY ix_dl_jobs_finished ON dl_jobs (finished_at) WHERE finished_at IS NOT NULL;
