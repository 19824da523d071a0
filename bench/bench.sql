-- What `python -m bench` needs in the schemas that it makes for itself; the queue's own statements are in queue.sql.
-- First what is done to both sides alike, then the bare limit: the contract's tables, used by the shortest statements
-- that claim and finish. A pgbench script is such a statement with \gset at its end; its variables have a colon.

-- name: seed
-- Jobs as a plain producer adds them, oldest first, in one transaction of the caller. Ours and the bare tables alike.
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, available_at, created_at, status, finished_at)
SELECT gen_random_uuid(), 'bench', 'bench.noop', jsonb_build_object('n', i),
       %(key)s || '-' || i %% %(keys)s::int, now() + make_interval(secs => %(delay_sec)s::float8),
       now() - make_interval(secs => (%(jobs)s::int - i) * 0.0001 + %(age_sec)s::float8), %(status)s::dl_status,
       CASE WHEN %(status)s NOT IN ('queued', 'running') THEN now() END
  FROM generate_series(1, %(jobs)s::int) i;

-- name: limit_rows
-- The jobs of these keys count for this limit.
UPDATE dl_jobs SET limits = ARRAY[%(limit)s] WHERE lock_key LIKE %(key)s || '-%%';

-- name: quiet
-- The names of the triggers that only notify and write journals, which seeding a million rows can do without.
SELECT tgname FROM pg_trigger WHERE tgrelid = 'dl_jobs'::regclass AND NOT tgisinternal AND tgtype & 2 = 0;

-- name: hold
-- A running job for each of these keys, with a lease that outlasts the measurement: the keys are busy.
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, lease_expires_at, heartbeat_at, started_at)
SELECT gen_random_uuid(), 'held', 'bench.noop', %(key)s || '-' || i, 'running', 1, now() + interval '1 day', now(), now()
  FROM generate_series(0, %(keys)s::int - 1) i;

-- name: lock_older
-- Somebody's open transaction on the rows at the head of the queue.
SELECT count(*) FROM (SELECT FROM dl_jobs WHERE created_at < now() - make_interval(secs => %(age_sec)s) FOR UPDATE) locked;

-- name: newest
-- The last job in the order of the claim: once it has ended, few others have not.
SELECT job_id FROM dl_jobs WHERE queue = 'bench' ORDER BY priority DESC, created_at DESC LIMIT 1;

-- name: has_ended
SELECT status IN ('succeeded', 'failed', 'canceled', 'lost') FROM dl_jobs WHERE job_id = %(job_id)s;

-- name: unfinished
SELECT count(*) FROM dl_jobs WHERE queue = 'bench' AND status IN ('queued', 'running');

-- name: drained
-- How many jobs succeeded, and the seconds from the first start to the last end, by the rows.
SELECT count(*), extract(epoch FROM max(finished_at) - min(started_at))::float8
  FROM dl_jobs WHERE queue = 'bench' AND status = 'succeeded';

-- name: clear
TRUNCATE dl_jobs, dl_job_events;

-- name: bare_tables
-- The contract's tables, by its own DDL.
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

-- name: bare_index
-- The index that the bare claim is served by, in its order.
CREATE INDEX ix_bare_claim ON dl_jobs (queue, priority, created_at) WHERE status = 'queued';

-- name: bare_triggers
-- The contract's notify triggers, as it describes them, on a channel that the farm does not listen to.
CREATE FUNCTION notify_job_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' OR NEW.status = 'queued' AND NEW.available_at <= now() THEN
    PERFORM pg_notify('dl_bench', NEW.queue);
  END IF;
  RETURN NULL;
END
$$;
CREATE TRIGGER dl_jobs_notify_ins AFTER INSERT ON dl_jobs FOR EACH ROW EXECUTE FUNCTION notify_job_ready();
CREATE TRIGGER dl_jobs_notify_upd AFTER UPDATE OF status, available_at ON dl_jobs
  FOR EACH ROW EXECUTE FUNCTION notify_job_ready();

-- name: bare_claim
-- The plain protocol's claim of one job, without its advisory lock.
UPDATE dl_jobs SET status = 'running', attempt = attempt + 1, started_at = coalesce(started_at, now()),
       heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec)
 WHERE job_id = (SELECT job_id FROM dl_jobs WHERE queue = 'bench' AND status = 'queued' AND available_at <= now()
                  ORDER BY priority, created_at LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING job_id;

-- name: bare_finish
UPDATE dl_jobs SET status = 'succeeded', finished_at = now(), lease_expires_at = NULL
 WHERE job_id = CAST(:job_id AS uuid);

-- name: bare_batch
-- Finish what this client claimed before, claim up to 50 more. In this order: SKIP LOCKED leaves a lock on rows that it
-- found changed, and two clients that claimed first would then wait for each other in their finishes.
WITH finished AS (
  UPDATE dl_jobs SET status = 'succeeded', finished_at = now(), lease_expires_at = NULL
   WHERE job_id = ANY (CAST(:ids AS uuid[]))
  RETURNING 1),
next AS (
  SELECT job_id FROM dl_jobs WHERE queue = 'bench' AND status = 'queued' AND available_at <= now()
     AND (SELECT count(*) FROM finished) >= 0
   ORDER BY priority, created_at LIMIT 50 FOR UPDATE SKIP LOCKED),
claimed AS (
  UPDATE dl_jobs j SET status = 'running', attempt = attempt + 1, started_at = coalesce(started_at, now()),
         heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec)
    FROM next WHERE j.job_id = next.job_id RETURNING j.job_id)
SELECT coalesce(array_agg(job_id), '{}') AS ids FROM claimed;

-- name: claim_by_id
-- The same claim for a program in Python.
UPDATE dl_jobs SET status = 'running', attempt = attempt + 1, started_at = coalesce(started_at, now()),
       heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec)
 WHERE job_id = (SELECT job_id FROM dl_jobs WHERE queue = 'bench' AND status = 'queued' AND available_at <= now()
                  ORDER BY priority, created_at LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING job_id, (args->>'n')::int;

-- name: finish_by_id
UPDATE dl_jobs SET status = 'succeeded', finished_at = now(), lease_expires_at = NULL WHERE job_id = %(job_id)s;

-- name: wal_position
SELECT pg_current_wal_flush_lsn()::text;

-- name: writes
-- The WAL of this database since a position: bytes without the images of pages, index entries, new versions of rows.
SELECT sum(record_length - fpi_length)::float8,
       (count(*) FILTER (WHERE resource_manager = 'Btree' AND record_type LIKE 'INSERT%%'))::float8,
       (count(*) FILTER (WHERE resource_manager LIKE 'Heap%%' AND record_type ~ 'INSERT|UPDATE'))::float8
  FROM pg_get_wal_records_info(%(since)s::pg_lsn, pg_current_wal_flush_lsn()), pg_database d
 WHERE d.datname = current_database() AND (coalesce(block_ref, '') = '' OR strpos(block_ref, '/' || d.oid || '/') > 0);

-- name: insert_one
-- A plain producer's job, for the latency of both sides.
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key)
VALUES (gen_random_uuid(), 'bench', 'bench.mark', jsonb_build_object('n', %(n)s::int), 'key-' || %(n)s::int);

-- name: copy
COPY dl_jobs (job_id, queue, task, args, lock_key) FROM STDIN;

-- name: last_statements
-- The sessions of a farm's workers and keeper, each with the start of its last statement.
SELECT pid, query_start FROM pg_stat_activity
 WHERE datname = current_database()
   AND (application_name LIKE 'dl-worker:bench:%' OR application_name LIKE 'dl-keeper%');

-- name: machine
SELECT name, current_setting(name) FROM pg_settings
 WHERE name IN ('fsync', 'synchronous_commit', 'shared_buffers', 'full_page_writes', 'wal_level', 'max_wal_size',
                'autovacuum', 'wal_sync_method', 'server_version')
 ORDER BY name;
