-- What lists and counts of jobs are served by: queued jobs by their age, those tried before, those that ended badly.
-- (By enum_eq and not by `=`, so that no claim's plan can take the first for its own.) Without blocking anybody; may be
-- run again.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_queued;
CREATE INDEX CONCURRENTLY ix_dl_jobs_queued ON dl_jobs (created_at) WHERE enum_eq(status, 'queued');
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_retried;
CREATE INDEX CONCURRENTLY ix_dl_jobs_retried ON dl_jobs (queue, created_at) WHERE status = 'queued' AND attempt > 0;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_dead;
CREATE INDEX CONCURRENTLY ix_dl_jobs_dead ON dl_jobs (queue, finished_at) WHERE status IN ('failed', 'lost');
