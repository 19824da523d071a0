-- The runs of a period by worker, and the latest events; called by dataloader/queue/reports/timeline.py.

-- name: newest
-- In the place of {newest}: the `read` latest rows of the journal. Another service may have numbered some beyond the sequence.
event_id > (SELECT least(max(event_id), dl_journal_end()) FROM dl_job_events) - %(read)s

-- name: of_steps
-- In the place of {of_steps}: the kinds of operators' orders and of recoveries.
kind IN ('requeue', 'cancel_requested', 'canceled')

-- name: clock
-- The time from which rows were asked for, and the latest row that is not read; null where the whole journal is shorter.
SELECT now() AS now, now() - make_interval(hours => %(hours)s) AS asked,
       (SELECT ts FROM dl_job_events WHERE NOT {newest} ORDER BY event_id DESC LIMIT 1) AS oldest;

-- name: events
-- The begins and ends of runs among the latest rows of the journal, the newest first.
SELECT e.job_id, e.queue, e.ts, e.kind, CASE e.kind WHEN 'requeue' THEN dl_step_of(e.kind, e.payload) END AS step,
       e.payload ->> 'worker' AS worker, j.task
  FROM (SELECT * FROM dl_job_events
         WHERE {newest} AND kind IN ('picked', 'done', 'requeue', 'failed', 'canceled', 'lost') AND ts >= %(since)s
         ORDER BY event_id DESC LIMIT %(most)s) e
  LEFT JOIN dl_jobs j USING (job_id) ORDER BY e.event_id DESC;

-- name: running
-- The running jobs, each with its last begin. Served by ix_dl_jobs_running.
SELECT j.job_id, j.queue, j.task, j.claimed_by AS worker, coalesce(p.ts, j.started_at, now()) AS ts
  FROM dl_jobs j
  LEFT JOIN LATERAL (SELECT ts FROM dl_job_events e WHERE e.job_id = j.job_id AND e.kind = 'picked'
                      ORDER BY event_id DESC LIMIT 1) p ON true
 WHERE j.status = 'running' LIMIT 1000;

-- name: dead
-- The latest dead jobs, stuck runs and missed deadlines, however long ago. Served by ix_dl_job_events_told.
SELECT e.event_id, e.job_id, e.queue, e.ts AS at, e.kind AS step, NULL AS by, j.task,
       left(coalesce(e.payload ->> 'error', e.payload ->> 'reason', CASE WHEN e.kind IN ('failed', 'lost') THEN j.error END), 200) AS words
  FROM dl_job_events e LEFT JOIN dl_jobs j USING (job_id)
 WHERE e.kind IN ('failed', 'lost', 'stuck', 'deadline') ORDER BY e.event_id DESC LIMIT %(most)s;

-- name: steps_since
-- The oldest row that `steps` reads, where it leaves some out.
SELECT ts AS at FROM dl_job_events WHERE {newest} AND {of_steps}
 ORDER BY event_id DESC OFFSET %(looked)s - 1 LIMIT 1;

-- name: steps
-- The actions of operators on jobs, and the recoveries, among the `looked` latest rows of these kinds. Their payloads
-- may hold long errors, so they are read once: the step is computed behind OFFSET 0.
SELECT e.event_id, e.job_id, e.queue, e.ts AS at, e.step, e.payload ->> 'by' AS by, j.task,
       left(coalesce(e.payload ->> 'error', e.payload ->> 'reason'), 200) AS words
  FROM (SELECT *, dl_step_of(kind, payload) AS step
          FROM (SELECT * FROM dl_job_events WHERE {newest} AND {of_steps}
                 ORDER BY event_id DESC LIMIT %(looked)s) latest OFFSET 0) e
  LEFT JOIN dl_jobs j USING (job_id)
 WHERE e.step IN ('crash', 'lease', 'requeue', 'cancel_requested') OR (e.step = 'canceled' AND e.payload ? 'by')
 ORDER BY e.event_id DESC LIMIT %(most)s;

-- name: states
-- The latest changes that the tables of settings and farms show; each table has few rows.
SELECT * FROM (
  SELECT paused_at AS at, 'paused' AS step, paused_by AS by, queue, NULL AS name, NULL AS words, NULL::bigint AS count
    FROM dl_queues WHERE paused_at IS NOT NULL
  UNION ALL
  SELECT min(started_at), 'farm', NULL, NULL, host, string_agg(DISTINCT queue, ', '), count(*)
    FROM dl_workers WHERE started_at IS NOT NULL GROUP BY farm, host
  UNION ALL
  SELECT max(applied_at), 'schema', NULL, NULL, max(number)::text, (array_agg(name ORDER BY number DESC))[1], count(*)
    FROM dl_migrations WHERE number > 0 GROUP BY date_trunc('minute', applied_at)
  UNION ALL SELECT created_at, 'backfill', created_by, queue, name, task, total FROM dl_backfills
  UNION ALL SELECT canceled_at, 'backfill_canceled', canceled_by, queue, name, task, NULL FROM dl_backfills WHERE canceled_at IS NOT NULL
  UNION ALL SELECT paused_at, 'backfill_paused', paused_by, queue, name, task, NULL FROM dl_backfills WHERE paused_at IS NOT NULL
  UNION ALL SELECT changed_at, 'schedule', changed_by, NULL, name, NULL, NULL FROM dl_schedules WHERE changed_at IS NOT NULL
  UNION ALL SELECT paused_at, 'schedule_paused', paused_by, NULL, name, NULL, NULL FROM dl_schedules WHERE paused_at IS NOT NULL
  UNION ALL SELECT error_at, 'schedule_error', NULL, NULL, name, left(error, 200), NULL FROM dl_schedules WHERE error_at IS NOT NULL
  UNION ALL SELECT changed_at, 'limit', changed_by, NULL, name, NULL, most FROM dl_limits
   WHERE changed_by IS NOT NULL AND name NOT LIKE 'backfill:%%'
  UNION ALL SELECT at, 'note', by, NULL, task, left(note, 200), NULL FROM dl_error_notes) state
 WHERE at <= now() ORDER BY at DESC LIMIT %(most)s;
