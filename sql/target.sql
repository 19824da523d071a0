-- What a run says to its target database, the queue's or another: a fence against runs that have lost their claim.
-- `claim` grows with each start of the job, also over those that are given back, so the newest run has the highest.

-- name: create
-- On first use, in the first schema of the search_path (PG_SCHEMA).
CREATE TABLE IF NOT EXISTS dl_fence (
  job_id uuid PRIMARY KEY,
  claim bigint NOT NULL,
  raised_at timestamptz NOT NULL DEFAULT now());
CREATE INDEX IF NOT EXISTS dl_fence_raised_at ON dl_fence (raised_at);

-- name: raise
-- From now on no run with a smaller claim can commit. No row: a newer one was here.
INSERT INTO dl_fence AS f (job_id, claim) VALUES (%(job_id)s, %(claim)s)
ON CONFLICT (job_id) DO UPDATE SET claim = excluded.claim, raised_at = now() WHERE f.claim <= excluded.claim
RETURNING current_schema();

-- name: end_older
-- The sessions of older runs, which may hold locks on the target's rows. Best effort: another role's are left alone.
SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity
 WHERE usename = current_user AND substring(application_name FROM %(session)s)::bigint < %(claim)s;

-- name: forget
-- Fences of long ago, a few at a time; no run is that old.
DELETE FROM dl_fence WHERE job_id IN (
  SELECT job_id FROM dl_fence WHERE raised_at < now() - interval '30 days' LIMIT 100 FOR UPDATE SKIP LOCKED);

-- name: unlimited
-- The first statement of the transaction: it may last, whatever the role's default says (PostgreSQL 17 and later), unless
-- the DSN's own options say it. Not in the session's options, which a server that does not know it would refuse.
SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout' AND source <> 'client';

-- name: hold
-- The last statement of the transaction: true while no newer run has raised the fence. The row stays locked until the
-- commit, so a newer run waits for it; a process that is stopped in between holds it up for 5 s at most.
WITH fence AS (
  SELECT FROM {schema}.dl_fence WHERE job_id = %(job_id)s AND claim = %(claim)s FOR SHARE)
SELECT count(*) = 1, set_config('idle_in_transaction_session_timeout', '5s', true) FROM fence;
