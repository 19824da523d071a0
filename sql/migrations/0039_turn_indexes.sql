-- The indexes that a claim by turns reads, beside those of the claim by time of creation. Without blocking anybody; may be
-- run again.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_turn;
CREATE INDEX CONCURRENTLY ix_dl_jobs_turn ON dl_jobs (queue, priority, coalesce(turn_at, created_at))
  WHERE status = 'queued' AND blocked_on IS NULL;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_key_turn;
CREATE INDEX CONCURRENTLY ix_dl_jobs_key_turn ON dl_jobs (hashtext(lock_key), queue, priority, coalesce(turn_at, created_at))
  WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key');
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_limit_turn;
CREATE INDEX CONCURRENTLY ix_dl_jobs_limit_turn ON dl_jobs (
    status, blocked_on, queue, priority, coalesce(turn_at, created_at))
  WHERE limits IS NOT NULL AND status IN ('queued', 'running');
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_share;
CREATE INDEX CONCURRENTLY ix_dl_jobs_share ON dl_jobs (queue, priority, share, turn_at)
  WHERE status = 'queued' AND share IS NOT NULL AND turn_at IS NOT NULL;
