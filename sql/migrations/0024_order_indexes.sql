-- What a claim of an ordered queue reads: the rows of a key by status, those that were tried and the others in their order.
-- One index and not three, for each index of the table costs every statement that writes to it. And the parked rows by key, for two keys may share a hash. Without blocking
-- anybody; may be run again.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_order;
CREATE INDEX CONCURRENTLY ix_dl_jobs_order ON dl_jobs (queue, lock_key, status, least(attempt, 1), score, created_at, job_id)
  WHERE score IS NOT NULL AND status IN ('queued', 'failed', 'lost');
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_parked_keys;
CREATE INDEX CONCURRENTLY ix_dl_jobs_parked_keys ON dl_jobs (hashtext(lock_key), queue, lock_key)
  WHERE enum_eq(status, 'queued') AND blocked_on = 'key';
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_parked;
