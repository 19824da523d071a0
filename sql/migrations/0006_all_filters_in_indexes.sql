-- outside a transaction
-- Indexes of lists get the columns of the other filters: see `indexes` in schema.sql. Each is built beside its old form.
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_new;
CREATE INDEX CONCURRENTLY ix_dl_jobs_new ON dl_jobs (finished_at, hashtext(lock_key), hashtext(task), hashtext(queue), status,
    hashtext(partition_key), hashtext(producer), hashtext(consumer_group))
  WHERE finished_at IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_finished;
ALTER INDEX ix_dl_jobs_new RENAME TO ix_dl_jobs_finished;
CREATE INDEX CONCURRENTLY ix_dl_jobs_new ON dl_jobs (created_at, hashtext(lock_key), hashtext(task), hashtext(queue),
    hashtext(partition_key), hashtext(producer), hashtext(consumer_group))
  WHERE enum_eq(status, 'queued');
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_queued;
ALTER INDEX ix_dl_jobs_new RENAME TO ix_dl_jobs_queued;
CREATE INDEX CONCURRENTLY ix_dl_jobs_new ON dl_jobs (queue, finished_at, hashtext(lock_key), hashtext(task), status,
    hashtext(partition_key), hashtext(producer), hashtext(consumer_group))
  WHERE status IN ('failed', 'lost');
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_dead;
ALTER INDEX ix_dl_jobs_new RENAME TO ix_dl_jobs_dead;
