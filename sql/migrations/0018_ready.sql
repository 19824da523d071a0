-- What the one claim reads: ready rows in its order; the rows of a key in that order; and where rows are parked behind a
-- running row of their key. (The last by enum_eq and not by `=`, so that no other index can serve its queries.)
-- Without blocking anybody; may be run again.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_ready;
CREATE INDEX CONCURRENTLY ix_dl_jobs_ready ON dl_jobs (queue, priority, created_at)
  WHERE status = 'queued' AND blocked_on IS NULL;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_key;
CREATE INDEX CONCURRENTLY ix_dl_jobs_key ON dl_jobs (hashtext(lock_key), queue, priority, created_at)
  WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key');
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_parked;
CREATE INDEX CONCURRENTLY ix_dl_jobs_parked ON dl_jobs (hashtext(lock_key), queue)
  WHERE enum_eq(status, 'queued') AND blocked_on = 'key';
