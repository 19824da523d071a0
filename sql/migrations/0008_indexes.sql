-- An index less for each change of a job's status, which served only counts by state; one for dl_prune: finished jobs
-- in the order of their end. Without blocking anybody; may be run again.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_status_queue;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_finished;
CREATE INDEX CONCURRENTLY ix_dl_jobs_finished ON dl_jobs (finished_at) WHERE finished_at IS NOT NULL;
