-- A run's statements in its target database: a fence against runs that have lost their claim. `claim` grows with each start,
-- so the newest run has the highest. A queue that was set back gives numbers again, so the fence has an owner; a run that
-- finds its own number or a higher one asks the queue (`leap`). The second to raise a fence finds the first one's. A run may
-- commit its checkpoint with its data; once the next run has raised the fence, no other can come.

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
-- From now on no run with a smaller claim can commit. No row: the fence stands higher or is another's. In the order of jobs,
-- against deadlocks.
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
-- The sessions of older runs, which may hold locks. Best effort: another role's are left alone, and a batch is found by its
-- first job.
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
-- The first statement: no transaction_timeout (PostgreSQL 17), unless the DSN sets it.
SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout' AND source <> 'client';

-- name: hold
-- The last statement: true while no newer run has raised a fence. The rows stay locked until the commit, for 5 s at most.
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
