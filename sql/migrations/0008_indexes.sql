-- Each change of a job's status had to be written into an index that served only counts by state.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_status_queue;
