-- Schedules; called by the functions of the same name in dataloader/queue/plans/schedules.py. A test may give another `now`.

-- name: shown
-- In the place of {shown}: a schedule with its last job, as people see it.
SELECT s.*, j.status::text AS last_job_status, now() AS now FROM dl_schedules s LEFT JOIN dl_jobs j ON j.job_id = s.last_job_id;

-- name: listed
{shown} WHERE %(name)s::text IS NULL OR s.name = %(name)s ORDER BY s.name;

-- name: lock
SELECT *, now() AS now FROM dl_schedules WHERE name = %(name)s FOR UPDATE;

-- name: add
-- No row where the name is taken.
INSERT INTO dl_schedules (name, origin, cron, interval_sec, timezone, catch_up, overlap, jitter_sec, job, next_due,
                          created_by)
VALUES (%(name)s, 'people', %(cron)s, %(interval_sec)s, %(timezone)s, %(catch_up)s, %(overlap)s, %(jitter_sec)s,
        %(job)s::jsonb, %(next_due)s, %(by)s)
ON CONFLICT (name) DO NOTHING;

-- name: write
-- The {changes} of a locked schedule.
UPDATE dl_schedules SET {changes} WHERE name = %(name)s;

-- name: remove
DELETE FROM dl_schedules WHERE name = %(name)s;

-- name: publish
-- The schedules of pipelines. One that a person has made or changed stays, and with the same timing the next due time.
INSERT INTO dl_schedules AS s (name, origin, cron, interval_sec, timezone, catch_up, overlap, jitter_sec, job, next_due,
                               created_by)
SELECT name, 'code', cron, interval_sec, timezone, catch_up, overlap, jitter_sec, job, next_due, 'code'
  FROM json_populate_recordset(NULL::dl_schedules, %(schedules)s) ORDER BY name
ON CONFLICT (name) DO UPDATE SET
   next_due = CASE WHEN (s.cron, s.interval_sec, s.timezone)
                        IS NOT DISTINCT FROM (excluded.cron, excluded.interval_sec, excluded.timezone)
                   THEN s.next_due ELSE excluded.next_due END,
   cron = excluded.cron, interval_sec = excluded.interval_sec, timezone = excluded.timezone,
   catch_up = excluded.catch_up, overlap = excluded.overlap, jitter_sec = excluded.jitter_sec, job = excluded.job,
   error = NULL, error_at = NULL, retry_at = NULL
 WHERE s.origin = 'code' AND s.changed_at IS NULL
   AND (s.cron, s.interval_sec, s.timezone, s.catch_up, s.overlap, s.jitter_sec, s.job) IS DISTINCT FROM
       (excluded.cron, excluded.interval_sec, excluded.timezone, excluded.catch_up, excluded.overlap,
        excluded.jitter_sec, excluded.job);

-- name: retire
-- Schedules of code that their pipelines name no more make no jobs, those named again do; unknown tasks are left alone.
UPDATE dl_schedules SET retired_at = CASE WHEN name = ANY (%(names)s::text[]) THEN NULL ELSE now() END
 WHERE origin = 'code' AND job ->> 'task' = ANY (%(tasks)s::text[])
   AND (retired_at IS NULL) <> (name = ANY (%(names)s::text[]));

-- name: lock_due
-- The schedule that has been due longest but for those of `made`, unless another reaper is at it: ix_dl_schedules_due.
SELECT *, coalesce(%(now)s::timestamptz, now()) AS now FROM dl_schedules
 WHERE next_due <= coalesce(%(now)s::timestamptz, now()) AND paused_at IS NULL AND retired_at IS NULL
   AND (retry_at IS NULL OR retry_at <= coalesce(%(now)s::timestamptz, now())) AND name <> ALL (%(made)s)
 ORDER BY next_due, name LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: has_ended
-- Whether the last job of a schedule has ended, or is gone.
SELECT NOT EXISTS (SELECT FROM dl_jobs WHERE job_id = %(job_id)s AND status IN ('queued', 'running'));

-- name: failed
-- Its due times stay due; the next try is some time later.
UPDATE dl_schedules
   SET error = %(error)s, error_at = coalesce(error_at, now()),
       retry_at = coalesce(%(now)s::timestamptz, now()) + make_interval(secs => %(retry_sec)s)
 WHERE name = %(name)s;

-- name: due_in
-- In how many seconds the next schedule is due, by the database's clock; null where none is.
SELECT extract(epoch FROM min(greatest(next_due, retry_at)) - coalesce(%(now)s::timestamptz, clock_timestamp()))::float8
  FROM dl_schedules WHERE paused_at IS NULL AND retired_at IS NULL;
