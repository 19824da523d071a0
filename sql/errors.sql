-- The errors of jobs in groups, for people; called by the functions of the same name in dataloader/queue/reports/errors.py.

-- name: groups
-- The groups of dead jobs and of those that wait for a retry, the largest first. Reads of each queue its latest jobs, `scan`
-- dead and `scan_retried` others in all, at least 100 each; is_cut: there are more. Hosts are those of the latest five jobs.
WITH RECURSIVE
with_dead (queue) AS (
  SELECT max(queue) FROM dl_jobs WHERE status IN ('failed', 'lost') AND (%(queue)s::text IS NULL OR queue = %(queue)s)
  UNION ALL
  SELECT (SELECT max(queue) FROM dl_jobs WHERE status IN ('failed', 'lost') AND queue < with_dead.queue)
    FROM with_dead WHERE queue IS NOT NULL AND %(queue)s::text IS NULL),
with_retried (queue) AS (
  (SELECT queue FROM dl_jobs
    WHERE status = 'queued' AND attempt > 0 AND (%(queue)s::text IS NULL OR queue = %(queue)s)
    ORDER BY queue DESC, created_at DESC LIMIT 1)
  UNION ALL
  SELECT (SELECT queue FROM dl_jobs WHERE status = 'queued' AND attempt > 0 AND queue < with_retried.queue
           ORDER BY queue DESC, created_at DESC LIMIT 1)
    FROM with_retried WHERE queue IS NOT NULL AND %(queue)s::text IS NULL),
shares AS (
  SELECT greatest(100, %(scan)s / greatest(1, (SELECT count(queue) FROM with_dead))) AS dead,
         greatest(100, %(scan_retried)s / greatest(1, (SELECT count(queue) FROM with_retried))) AS retried),
dead AS (
  SELECT j.* FROM with_dead w CROSS JOIN LATERAL (
    SELECT job_id, queue, task, error_group, CASE WHEN error_group IS NULL THEN error END AS error, finished_at AS at
      FROM dl_jobs WHERE status IN ('failed', 'lost') AND dl_jobs.queue = w.queue
       AND finished_at >= coalesce(%(since)s::timestamptz, '-infinity')
     ORDER BY queue DESC, finished_at DESC LIMIT (SELECT dead FROM shares)) j),
retried AS (
  SELECT j.*, failed.ts AS at FROM with_retried w CROSS JOIN LATERAL (
    SELECT job_id, queue, task, error_group, CASE WHEN error_group IS NULL THEN error END AS error
      FROM dl_jobs WHERE status = 'queued' AND attempt > 0 AND dl_jobs.queue = w.queue
     ORDER BY queue DESC, created_at DESC LIMIT (SELECT retried FROM shares)) j
  CROSS JOIN LATERAL (
    SELECT ts FROM dl_job_events e WHERE e.job_id = j.job_id AND kind = 'requeue' ORDER BY event_id DESC LIMIT 1) failed),
has_failed AS MATERIALIZED (
  SELECT job_id, queue, task, coalesce(error_group, dl_error_group(error)) AS error_group, at, is_dead,
         greatest(0, least(floor(extract(epoch FROM now() - at) / 3600), 24))::int AS hours_ago
    FROM (SELECT *, true AS is_dead FROM dead UNION ALL SELECT *, false FROM retried) jobs
   WHERE (%(task)s::text IS NULL OR task = %(task)s) AND at >= coalesce(%(since)s::timestamptz, '-infinity')),
by_hour AS (
  SELECT queue, task, error_group, hours_ago, count(*) FILTER (WHERE is_dead) AS dead,
         count(*) FILTER (WHERE NOT is_dead) AS retrying, min(at) AS first_at, max(at) AS last_at
    FROM has_failed WHERE error_group IS NOT NULL GROUP BY queue, task, error_group, hours_ago),
found AS MATERIALIZED (
  SELECT queue, task, error_group, sum(dead)::bigint AS dead, sum(retrying)::bigint AS retrying,
         min(first_at) AS first_at, max(last_at) AS last_at,
         jsonb_object_agg(hours_ago, dead + retrying) FILTER (WHERE hours_ago < 24) AS by_hour,
         row_number() OVER (ORDER BY sum(dead) + sum(retrying) DESC, max(last_at) DESC, queue, task, error_group) AS nth
    FROM by_hour GROUP BY queue, task, error_group ORDER BY nth LIMIT %(most)s),
latest AS (
  SELECT * FROM (
    SELECT nth, job_id, row_number() OVER (PARTITION BY nth ORDER BY at DESC, job_id) AS place
      FROM found JOIN has_failed USING (queue, task, error_group)) of_group
   WHERE place <= 5)
SELECT found.queue, found.task, found.error_group, dead, retrying, first_at, last_at, by_hour,
       latest.job_id, left(j.error, 1000) AS error, hosts, n.note, n.by AS noted_by, n.at AS noted_at,
       EXISTS (SELECT FROM dead GROUP BY dead.queue HAVING count(*) >= (SELECT s.dead FROM shares s))
       OR EXISTS (SELECT FROM retried GROUP BY retried.queue HAVING count(*) >= (SELECT s.retried FROM shares s)) AS is_cut
  FROM found
  JOIN latest ON latest.nth = found.nth AND place = 1
  LEFT JOIN dl_jobs j USING (job_id)
  LEFT JOIN dl_error_notes n ON n.task = found.task AND n.error_group = found.error_group
  LEFT JOIN (
    SELECT nth, array_agg(DISTINCT split_part(picked.worker, ':', 1)) AS hosts FROM latest CROSS JOIN LATERAL (
      SELECT payload ->> 'worker' AS worker FROM dl_job_events e
       WHERE e.job_id = latest.job_id AND kind = 'picked' ORDER BY event_id DESC LIMIT 1) picked
     WHERE worker IS NOT NULL GROUP BY nth) of_hosts ON of_hosts.nth = found.nth
 ORDER BY found.nth;

-- name: write_note
INSERT INTO dl_error_notes AS n (task, error_group, note, by) VALUES (%(task)s, %(error_group)s, %(note)s, %(by)s)
ON CONFLICT (task, error_group) DO UPDATE SET note = excluded.note, by = excluded.by, at = now();

-- name: clear_note
DELETE FROM dl_error_notes WHERE task = %(task)s AND error_group = %(error_group)s;
