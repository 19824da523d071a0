-- Predicted ends; called by the functions of dataloader/queue/reports/predictions.py. No statement here changes a job.

-- name: queue
-- The facts of a queue that a prediction needs. A worker of several busy queues counts by its part. `length` is the reaper's count.
WITH serving AS (
  SELECT coalesce(queues, ARRAY[queue]) AS served FROM dl_workers
   WHERE seen_at > now() - interval '30 s' AND state NOT IN ('dead', 'leaving', 'stopped')
     AND %(queue)s = ANY (coalesce(queues, ARRAY[queue]))),
busy AS (
  SELECT other FROM (SELECT DISTINCT unnest(served) AS other FROM serving) served
   WHERE other = %(queue)s OR EXISTS (SELECT FROM dl_jobs WHERE queue = other AND status = 'queued' AND blocked_on IS NULL))
SELECT now() AS at, coalesce(paused_at IS NOT NULL, false) AS is_paused, coalesce(merge, false) AS merges,
       coalesce((SELECT sum(1.0 / (SELECT count(*) FROM busy WHERE other = ANY (served))) FROM serving), 0)::float8 AS workers,
       coalesce((SELECT length - scheduled FROM dl_lengths WHERE queue = %(queue)s), 0) AS length
  FROM (SELECT) one LEFT JOIN dl_queues ON queue = %(queue)s;

-- name: running
-- Running jobs: on each worker the one that runs, then those claimed ahead, in their order. Few: ix_dl_jobs_running,
-- ix_dl_job_events_job.
SELECT job_id, task, lock_key, limits, progress, claims, coalesce(claimed_by, job_id::text) AS worker,
       greatest(extract(epoch FROM clock_timestamp() - coalesce(picked.ts, started_at)), 0)::float8 AS ran_sec
  FROM dl_jobs j
  LEFT JOIN LATERAL (SELECT ts FROM dl_job_events e WHERE e.job_id = j.job_id AND e.kind = 'picked'
                      ORDER BY event_id DESC LIMIT 1) picked ON true
 WHERE status = 'running' AND queue = %(queue)s
 ORDER BY claimed_by, heartbeat_at IS NULL, priority, coalesce(turn_at, created_at), job_id;

-- name: waiting
-- The first queued jobs in the claim's order, up to `most`, without those that wait for parents; those that are due go first
-- into that number. In an ordered queue a job waits for the time of each job before it in its key. Served by
-- ix_dl_jobs_turn, ix_dl_jobs_time, ix_dl_jobs_key_turn, ix_dl_jobs_limit_turn.
WITH found (at) AS (
  (SELECT ctid FROM dl_jobs WHERE queue = %(queue)s AND status = 'queued' AND blocked_on IS NULL
    ORDER BY queue, priority, coalesce(turn_at, created_at) LIMIT %(most)s)
  UNION ALL
  (SELECT ctid FROM dl_jobs WHERE queue = %(queue)s AND status = 'queued' AND blocked_on = 'time'
    ORDER BY queue, available_at LIMIT %(most)s)
  UNION ALL
  (SELECT of_key.at FROM (
     SELECT hashtext(lock_key) AS key_hash FROM dl_jobs WHERE status = 'running'
     UNION SELECT hashtext(lock_key) FROM (
       SELECT lock_key FROM dl_jobs
        WHERE queue = %(queue)s AND status = 'queued' AND blocked_on = 'time' AND score IS NOT NULL
        ORDER BY queue, available_at LIMIT %(most)s) heads) busy
   CROSS JOIN LATERAL (
     SELECT ctid AS at FROM dl_jobs
      WHERE hashtext(lock_key) = key_hash AND queue = %(queue)s AND status = 'queued'
        AND (blocked_on IS NULL OR blocked_on = 'key')
      ORDER BY hashtext(lock_key), queue, priority, coalesce(turn_at, created_at) LIMIT %(most)s) of_key
   LIMIT 10 * %(most)s)
  UNION ALL
  SELECT parked.at FROM dl_limits l
   CROSS JOIN LATERAL (
     SELECT ctid AS at FROM dl_jobs
      WHERE status = 'queued' AND limits IS NOT NULL AND blocked_on = 'limit:' || l.name AND queue = %(queue)s
      ORDER BY status, blocked_on, queue, priority, coalesce(turn_at, created_at) LIMIT %(most)s) parked)
SELECT job_id, task, lock_key, limits,
       CASE WHEN score IS NULL THEN due_sec
            ELSE max(due_sec) OVER (PARTITION BY lock_key ORDER BY score, created_at, job_id) END AS due_sec FROM (
  SELECT job_id, task, lock_key, limits, priority, score, created_at, coalesce(turn_at, created_at) AS turn,
         CASE blocked_on WHEN 'time' THEN extract(epoch FROM dl_readable(available_at) - now()) ELSE 0 END::float8 AS due_sec
    FROM dl_jobs WHERE ctid = ANY (ARRAY(SELECT at FROM found))
   ORDER BY blocked_on IS NOT DISTINCT FROM 'time' AND available_at > now(), priority, turn, job_id LIMIT %(most)s) line
 ORDER BY priority, turn, job_id;

-- name: room
-- How many jobs of each limit may run at once beside those of other queues; a rate is not looked at.
SELECT name, greatest(most - (SELECT count(*) FROM dl_jobs WHERE status = 'running' AND queue <> %(queue)s
                                 AND limits IS NOT NULL AND l.name = ANY (limits)), 0)::int AS room
  FROM dl_limits l WHERE most IS NOT NULL;

-- name: durations
SELECT task, seconds FROM dl_durations WHERE task = ANY (%(tasks)s);

-- name: accuracy
-- How right the last day's predictions were, by the time that was left; `ratios` of three days: time taken by predicted.
SELECT count(*) FILTER (WHERE is_of_today) AS predictions,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY missed / took) FILTER (WHERE is_of_today) AS error,
       avg((ended_at BETWEEN earliest AND latest)::int) FILTER (WHERE is_of_today)::float8 AS within,
       array_agg(took / greatest(plain_sec, 0.001)) FILTER (WHERE plain_sec > 0) AS ratios
  FROM (SELECT *, greatest(extract(epoch FROM dl_readable(ended_at) - dl_readable(made_at)), 0.001)::float8 AS took,
               abs(extract(epoch FROM dl_readable(ended_at) - dl_readable(ends_at)))::float8 AS missed,
               ended_at > now() - interval '1 day' AS is_of_today
          FROM dl_predictions
         WHERE queue = %(queue)s AND ended_at > now() - interval '3 days' AND ends_at IS NOT NULL
         ORDER BY queue, ended_at DESC LIMIT 1000) newest;

-- name: job
SELECT job_id, queue, status, blocked_on, deadline,
       extract(epoch FROM dl_readable(available_at) - now())::float8 AS due_sec,
       blocked_on = 'key' AND EXISTS (  -- a dead job holds its key: by ix_dl_jobs_order
         SELECT FROM dl_queues q JOIN dl_jobs d ON d.queue = q.queue AND d.lock_key = j.lock_key
                                               AND d.status IN ('failed', 'lost') AND d.score IS NOT NULL
          WHERE q.queue = j.queue AND q.ordered AND q.on_dead = 'hold') AS is_held
  FROM dl_jobs j WHERE job_id = %(job_id)s;

-- name: queues
-- Those that have something to predict, as the reaper has counted, and as it runs now.
SELECT queue FROM dl_lengths WHERE length > 0 UNION SELECT queue FROM dl_jobs WHERE status = 'running' ORDER BY queue;

-- name: compare
-- The ends of predicted jobs. Only a job that has succeeded can be compared with its prediction.
WITH over AS (
  SELECT p.job_id, j.status, j.finished_at FROM dl_predictions p LEFT JOIN dl_jobs j USING (job_id)
   WHERE p.ended_at IS NULL AND (j.job_id IS NULL OR j.finished_at IS NOT NULL)),
ended AS (
  UPDATE dl_predictions p SET ended_at = least(over.finished_at, now()) FROM over  -- others may write any time
   WHERE p.job_id = over.job_id AND over.status = 'succeeded' AND over.finished_at >= p.made_at)
DELETE FROM dl_predictions
 WHERE job_id IN (SELECT job_id FROM over WHERE status IS DISTINCT FROM 'succeeded')
    OR ended_at < now() - interval '3 days' OR made_at < now() - interval '30 days';

-- name: with_deadlines
SELECT job_id, deadline FROM dl_jobs
 WHERE job_id = ANY (%(job_ids)s) AND deadline IS NOT NULL ORDER BY deadline LIMIT %(most)s;

-- name: note
-- The first prediction of a job stays, to be compared with its end; with a deadline the newest is kept as well.
INSERT INTO dl_predictions AS p (job_id, queue, made_at, ends_at, earliest, latest, plain_sec, deadline, expected_at)
SELECT job_id, queue, %(made_at)s, ends_at, earliest, latest, plain_sec, deadline,
       CASE WHEN deadline IS NOT NULL THEN ends_at END
  FROM json_populate_recordset(NULL::dl_predictions, %(forecast)s) ORDER BY job_id
ON CONFLICT (job_id) DO UPDATE SET
   deadline = excluded.deadline, expected_at = excluded.expected_at,
   made_at = CASE WHEN p.ends_at IS NULL THEN excluded.made_at ELSE p.made_at END,
   plain_sec = CASE WHEN p.ends_at IS NULL THEN excluded.plain_sec ELSE p.plain_sec END,
   ends_at = coalesce(p.ends_at, excluded.ends_at), earliest = coalesce(p.earliest, excluded.earliest),
   latest = coalesce(p.latest, excluded.latest)
   WHERE p.ended_at IS NULL AND (p.deadline IS NOT NULL OR excluded.deadline IS NOT NULL);

-- name: late
-- Served by ix_dl_predictions_open; the same jobs as at_risk in stats.sql.
SELECT p.job_id, j.task, j.lock_key, p.deadline, p.expected_at FROM dl_predictions p JOIN dl_jobs j USING (job_id)
 WHERE p.queue = %(queue)s AND p.ended_at IS NULL AND p.deadline IS NOT NULL
   AND (p.expected_at > p.deadline OR p.deadline < now()) ORDER BY p.deadline, p.job_id LIMIT %(most)s;

-- name: alert
-- Jobs that are going to miss their deadlines, or have, told in the journal once: webhooks read it there.
WITH missing AS (
  UPDATE dl_predictions p SET alerted_at = now() FROM dl_jobs j
   WHERE j.job_id = p.job_id AND j.status IN ('queued', 'running') AND p.ended_at IS NULL AND p.alerted_at IS NULL
     AND p.queue = %(queue)s AND (p.expected_at > p.deadline OR p.deadline < now())
  RETURNING p.job_id, p.queue, p.deadline, p.expected_at)
INSERT INTO dl_job_events (job_id, queue, kind, payload)
SELECT job_id, queue, 'deadline', jsonb_build_object('deadline', deadline, 'expected_at', expected_at, 'reason',
         format(CASE WHEN deadline < now() THEN 'it should have ended at %%s UTC'
                     ELSE 'it should end by %%s UTC, and is predicted to end at %%s UTC' END,
                to_char(deadline AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'),
                to_char(expected_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'))) FROM missing
RETURNING job_id;
