-- A run's statements in its target database, the queue's or another: a fence against runs that have lost their claim.
-- `claim` grows with each start of the job, also over those that are given back, so the newest run has the highest. But
-- a queue that was set back (an asynchronous failover, a backup) gives the same numbers out again. So the fence has an
-- owner; a run that finds the fence at its own number or above, and not its own, asks the queue whose the job is
-- (`leap` in queue.sql). Never do two runs hold one number: the second to raise it finds the first one's.
--
-- A run may also commit, with its data, how far it has come: its checkpoint. Once the next run has raised the fence, no
-- other checkpoint can come; so what it then finds here is what the data are.

-- name: create
-- On first use, in the first schema of the search_path (PG_SCHEMA).
CREATE TABLE IF NOT EXISTS dl_fence (
  job_id uuid PRIMARY KEY,
  claim bigint NOT NULL,
  raised_at timestamptz NOT NULL DEFAULT now(),
  owner text,                          -- the worker that raised it, as in dl_jobs.claimed_by
  owned_at timestamptz,                -- the owner counts while this is raised_at: an older version changes that alone
  checkpoint jsonb,                    -- the newest that was committed with data
  checkpoint_claim bigint,             -- the claim of the run that committed it
  checkpoint_number int);              -- its place among those of the job
CREATE INDEX IF NOT EXISTS dl_fence_raised_at ON dl_fence (raised_at);

-- name: raise
-- From now on no run with a smaller claim to one of these jobs can commit. No row for a job: its fence stands higher, or is
-- another's. In the order of the jobs, so two runs that share some never wait for each other.
INSERT INTO dl_fence AS f (job_id, claim, owner, owned_at)
SELECT job_id, claim, %(owner)s, now() FROM unnest(%(job_ids)s::uuid[], %(claims)s::bigint[]) AS run (job_id, claim)
 ORDER BY job_id
ON CONFLICT (job_id) DO UPDATE SET claim = excluded.claim, raised_at = now(), owner = excluded.owner, owned_at = now()
 WHERE f.claim < excluded.claim OR f.claim = excluded.claim AND f.owner = excluded.owner AND f.owned_at = f.raised_at
RETURNING current_schema();

-- name: in_the_way
-- The fences that could not be raised, and where they stand.
SELECT job_id, f.claim FROM dl_fence f JOIN unnest(%(job_ids)s::uuid[], %(claims)s::bigint[]) AS run (job_id, claim) USING (job_id)
 WHERE f.claim > run.claim
    OR f.claim = run.claim AND (f.owner IS DISTINCT FROM %(owner)s OR f.owned_at IS DISTINCT FROM f.raised_at);

-- name: rename
-- The session's name has the claim's number, by which later runs find it.
SELECT set_config('application_name', %(name)s, false);

-- name: end_older
-- The sessions of older runs, which may hold locks on the target's rows. Best effort: another role's are left alone, and
-- a run of several jobs is found by the first of them.
SELECT pg_terminate_backend(pid, 2000)
  FROM (SELECT pid, regexp_match(application_name, '^dl-job:([0-9a-f-]{36}):([0-9]{1,18})$') AS name FROM pg_stat_activity
         WHERE usename = current_user) session
  JOIN unnest(%(job_ids)s::uuid[], %(claims)s::bigint[]) AS run (job_id, claim)
    ON name[1] = run.job_id::text AND name[2]::bigint < run.claim;

-- name: forget
-- Fences of long ago, a few at a time; no run is that old.
DELETE FROM dl_fence WHERE job_id IN (
  SELECT job_id FROM dl_fence WHERE raised_at < now() - interval '30 days' LIMIT 100 FOR UPDATE SKIP LOCKED);

-- name: unlimited
-- The first statement of the transaction: it may last, whatever the role's default says (PostgreSQL 17 and later),
-- unless the DSN's own options say it. Not in the session's options, which a server that does not know it would refuse.
SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout' AND source <> 'client';

-- name: hold
-- The last statement of the transaction: true while no newer run has raised a fence of these. The rows stay locked until
-- the commit, so a newer run waits for it; a process that is stopped in between holds it up for 5 s at most.
WITH fence AS (
  SELECT FROM {schema}.dl_fence f JOIN unnest(%(job_ids)s::uuid[], %(claims)s::bigint[]) AS run (job_id, claim) USING (job_id)
   WHERE f.claim = run.claim AND owner = %(owner)s AND owned_at = raised_at ORDER BY job_id FOR SHARE OF f)
SELECT count(*) = cardinality(%(job_ids)s::uuid[]), set_config('idle_in_transaction_session_timeout', '5s', true) FROM fence;

-- name: standing
-- The newest checkpoint of the job; asked behind `raise`, so no older run can commit another one.
SELECT checkpoint::text, checkpoint_claim, checkpoint_number FROM dl_fence
 WHERE job_id = %(job_id)s AND checkpoint_claim IS NOT NULL;

-- name: hold_and_save
-- As `hold`, for a run of one job that commits a checkpoint with its data.
WITH fence AS (
  UPDATE {schema}.dl_fence SET checkpoint = %(checkpoint)s::jsonb, checkpoint_claim = claim, checkpoint_number = %(number)s
   WHERE job_id = %(job_id)s AND claim = %(claim)s AND owner = %(owner)s AND owned_at = raised_at
  RETURNING job_id)
SELECT count(*) = 1, set_config('idle_in_transaction_session_timeout', '5s', true) FROM fence;
