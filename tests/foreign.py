"""Another service on the same tables: it knows only the contract's columns and the plain protocol, word for word."""

from uuid import UUID

import psycopg

CONTRACT = """
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
"""
CONTRACT_TRIGGERS = """
CREATE FUNCTION notify_job_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.status = 'queued' AND NEW.available_at <= now() THEN
    PERFORM pg_notify('dl_jobs', NEW.queue);
  END IF;
  RETURN NEW;
END
$$;
CREATE TRIGGER dl_jobs_notify_ins AFTER INSERT ON dl_jobs FOR EACH ROW EXECUTE FUNCTION notify_job_ready();
CREATE TRIGGER dl_jobs_notify_upd AFTER UPDATE OF status, available_at ON dl_jobs
  FOR EACH ROW EXECUTE FUNCTION notify_job_ready();
"""
REAP = """
UPDATE dl_jobs SET status = 'queued', lease_expires_at = NULL WHERE status = 'running' AND lease_expires_at < now()
"""


class Foreign:
    """A worker of another service: no guard and no new column."""

    def __init__(self, dsn: str, queue_name: str = "q", backoff_sec: float = 15.0) -> None:
        self.conn = psycopg.connect(dsn, autocommit=True, application_name="foreign")
        self.queue = queue_name
        self.backoff_sec = backoff_sec

    def claim(self) -> tuple[UUID, str] | None:
        """The first due row by priority and age; a busy key sends it back."""
        found = self.conn.execute(
            "UPDATE dl_jobs SET status = 'running', attempt = attempt + 1, started_at = coalesce(started_at, now()),"
            " lease_expires_at = now() + make_interval(secs => lease_ttl_sec), heartbeat_at = now()"
            " WHERE job_id = (SELECT job_id FROM dl_jobs WHERE queue = %s AND status = 'queued'"
            "   AND available_at <= now() ORDER BY priority, created_at LIMIT 1 FOR UPDATE SKIP LOCKED)"
            " RETURNING job_id, lock_key",
            (self.queue,),
        ).fetchone()
        if found is None:
            return None
        job_id, lock_key = found
        if self.conn.execute("SELECT pg_try_advisory_lock(hashtext(%s))", (lock_key,)).fetchone() == (True,):
            return job_id, lock_key
        self.put_back(job_id, self.backoff_sec, counted=False)
        return None

    def put_back(self, job_id: UUID, in_sec: float, counted: bool = True) -> None:
        """Send the job back to the queue, due in so many seconds."""
        self.conn.execute(
            "UPDATE dl_jobs SET status = 'queued', lease_expires_at = NULL, attempt = attempt - %s,"
            " available_at = now() + make_interval(secs => %s) WHERE job_id = %s",
            (0 if counted else 1, in_sec, job_id),
        )

    def finish(self, job_id: UUID, lock_key: str) -> None:
        """Finish the job by two statements without a guard."""
        self.conn.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = %s", (job_id,))
        self.unlock(lock_key)

    def unlock(self, lock_key: str) -> None:
        """Release the key."""
        self.conn.execute("SELECT pg_advisory_unlock(hashtext(%s))", (lock_key,))
