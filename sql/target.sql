-- A run's statements in its target database, the queue's or another: a fence against runs that have lost their claim.
-- `claim` grows with each start of the job, also over those that are given back, so the newest run has the highest. But
-- a queue that was set back (an asynchronous failover, a backup) gives the same numbers out again. So the fence has an
-- owner; a run that finds the fence at its own number or above, and not its own, asks the queue whose the job is
-- (`leap` in queue.sql). Never do two runs hold one number: the second to raise it finds the first one's.

-- name: create
-- On first use, in the first schema of the search_path (PG_SCHEMA).
CREATE TABLE IF NOT EXISTS dl_fence (
  job_id uuid PRIMARY KEY,
  claim bigint NOT NULL,
  raised_at timestamptz NOT NULL DEFAULT now(),
  owner text,                          -- the worker that raised it, as in dl_jobs.claimed_by
  owned_at timestamptz);               -- the owner counts while this is raised_at: an older version changes that alone
CREATE INDEX IF NOT EXISTS dl_fence_raised_at ON dl_fence (raised_at);

-- name: widen
-- A table that a version of before has made.
ALTER TABLE dl_fence ADD COLUMN IF NOT EXISTS owner text, ADD COLUMN IF NOT EXISTS owned_at timestamptz;

-- name: raise
-- From now on no run with a smaller claim can commit. No row: it stands higher, or is another's.
INSERT INTO dl_fence AS f (job_id, claim, owner, owned_at) VALUES (%(job_id)s, %(claim)s, %(owner)s, now())
ON CONFLICT (job_id) DO UPDATE SET claim = excluded.claim, raised_at = now(), owner = excluded.owner, owned_at = now()
 WHERE f.claim < excluded.claim OR f.claim = excluded.claim AND f.owner = excluded.owner AND f.owned_at = f.raised_at
RETURNING current_schema();

-- name: height
-- Where the fence stands that could not be raised.
SELECT claim FROM dl_fence WHERE job_id = %(job_id)s;

-- name: rename
-- The session's name has the claim's number, by which later runs find it.
SELECT set_config('application_name', %(name)s, false);

-- name: end_older
-- The sessions of older runs, which may hold locks on the target's rows. Best effort: another role's are left alone.
SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity
 WHERE usename = current_user AND substring(application_name FROM %(session)s)::bigint < %(claim)s;

-- name: forget
-- Fences of long ago, a few at a time; no run is that old.
DELETE FROM dl_fence WHERE job_id IN (
  SELECT job_id FROM dl_fence WHERE raised_at < now() - interval '30 days' LIMIT 100 FOR UPDATE SKIP LOCKED);

-- name: unlimited
-- The first statement of the transaction: it may last, whatever the role's default says (PostgreSQL 17 and later),
-- unless the DSN's own options say it. Not in the session's options, which a server that does not know it would refuse.
SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout' AND source <> 'client';

-- name: hold
-- The last statement of the transaction: true while no newer run has raised the fence. The row stays locked until the
-- commit, so a newer run waits for it; a process that is stopped in between holds it up for 5 s at most.
WITH fence AS (
  SELECT FROM {schema}.dl_fence
   WHERE job_id = %(job_id)s AND claim = %(claim)s AND owner = %(owner)s AND owned_at = raised_at FOR SHARE)
SELECT count(*) = 1, set_config('idle_in_transaction_session_timeout', '5s', true) FROM fence;
