-- The tables that other services rely on, by the contract's own DDL. In a database where they exist already
-- nothing is touched, not even a lock is taken.
-- oldest code: 1

DO $migration$
BEGIN
  IF to_regclass('dl_jobs') IS NOT NULL THEN
    RETURN;
  END IF;

  CREATE TYPE dl_status AS ENUM ('queued', 'running', 'succeeded', 'failed', 'canceled', 'lost');

  CREATE TABLE dl_jobs (
    job_id uuid PRIMARY KEY,
    queue text NOT NULL,
    task text NOT NULL,
    args jsonb NOT NULL DEFAULT '{}'::jsonb,
    idempotency_key text UNIQUE,
    lock_key text NOT NULL,
    partition_key text NOT NULL DEFAULT '',
    priority int NOT NULL DEFAULT 100,
    available_at timestamptz NOT NULL DEFAULT now(),
    status dl_status NOT NULL DEFAULT 'queued',
    attempt int NOT NULL DEFAULT 0,
    max_attempts int NOT NULL DEFAULT 5,
    lease_ttl_sec int NOT NULL DEFAULT 60,
    lease_expires_at timestamptz,
    heartbeat_at timestamptz,
    cancel_requested boolean NOT NULL DEFAULT false,
    progress jsonb NOT NULL DEFAULT '{}'::jsonb,
    error text,
    producer text,
    consumer_group text,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    finished_at timestamptz,
    CONSTRAINT dl_jobs_chk_positive
      CHECK (priority >= 0 AND attempt >= 0 AND max_attempts >= 0 AND lease_ttl_sec > 0)
  );
  CREATE INDEX ix_dl_jobs_claim ON dl_jobs (queue, available_at, priority, created_at) WHERE status = 'queued';
  CREATE INDEX ix_dl_jobs_running_lease ON dl_jobs (lease_expires_at) WHERE status = 'running';
  CREATE INDEX ix_dl_jobs_status_queue ON dl_jobs (status, queue);

  CREATE TABLE dl_job_events (
    event_id bigserial PRIMARY KEY,
    job_id uuid NOT NULL REFERENCES dl_jobs (job_id) ON DELETE CASCADE,
    queue text NOT NULL,
    ts timestamptz NOT NULL DEFAULT now(),
    kind text NOT NULL,
    payload jsonb
  );
END
$migration$;
