-- The states of loads and pipelines in the target database, for dataloader/pipelines/state.py.

-- name: create
CREATE TABLE IF NOT EXISTS dl_state (
  name text PRIMARY KEY,
  value jsonb,                         -- null: none, as before the first run
  job_id uuid,                         -- the job that has set it; null: a person
  changed_at timestamptz NOT NULL DEFAULT now(),
  changed_by text);                    -- the person

-- name: lock
-- Of sessions that create tables at the same time with IF NOT EXISTS, one would fail.
SELECT pg_advisory_xact_lock(hashtext('dl_create'), 0);

-- name: is_there
SELECT to_regclass('dl_state') IS NOT NULL AS is_there;

-- name: states
SELECT name, value, job_id, changed_at, changed_by FROM dl_state
 WHERE %(name)s::text IS NULL OR name = %(name)s ORDER BY name;

-- name: set
-- No row: the value is not the one that this run has begun at.
INSERT INTO dl_state AS s (name, value, job_id, changed_by) VALUES (%(name)s, %(value)s::jsonb, %(job_id)s, %(by)s)
ON CONFLICT (name) DO UPDATE
SET value = excluded.value, job_id = excluded.job_id, changed_by = excluded.changed_by, changed_at = now()
WHERE %(by)s::text IS NOT NULL OR s.value IS NOT DISTINCT FROM %(seen)s::jsonb;
