-- Operators' changes to jobs and queues; called by the functions of the same name in dataloader/queue/operations.py.
-- Each writes its own journal rows, with the name of the asker. Rows are locked in the order of job_id, as by
-- `request_cancel`.

-- name: pause
-- From the next claim on no job of the queue starts, on any host. A pause that stands keeps its time and its author.
INSERT INTO dl_queues AS q (queue, paused_at, paused_by) VALUES (%(queue)s, now(), %(by)s)
ON CONFLICT (queue) DO UPDATE SET paused_at = coalesce(q.paused_at, excluded.paused_at),
                                  paused_by = coalesce(q.paused_by, excluded.paused_by)
RETURNING {settings};

-- name: resume
-- The commit wakes the queue's workers. A row without any setting stays.
WITH resumed AS (
  UPDATE dl_queues SET paused_at = NULL, paused_by = NULL WHERE queue = %(queue)s AND paused_at IS NOT NULL
  RETURNING queue)
SELECT pg_notify('dl_jobs', queue) FROM resumed;

-- name: limit_length
INSERT INTO dl_queues (queue, max_length) VALUES (%(queue)s, %(max_length)s)
ON CONFLICT (queue) DO UPDATE SET max_length = excluded.max_length
RETURNING {settings};

-- name: queue
SELECT {settings} FROM dl_queues WHERE queue = %(queue)s;

-- name: settings
-- In the place of {settings}: a queue's settings, with their defaults.
queue, paused_at, paused_by, max_length, coalesce(ordered, false) AS ordered, coalesce(merge, false) AS merge,
coalesce(merge_limit, 1000) AS merge_limit, batch, coalesce(on_dead, 'continue') AS on_dead;

-- name: said
SELECT ordered, merge FROM dl_queues WHERE queue = %(queue)s;

-- name: lock_queue
-- What has been said of the order of a queue, null where nothing was; nobody else changes it before the commit.
INSERT INTO dl_queues AS q (queue) VALUES (%(queue)s) ON CONFLICT (queue) DO UPDATE SET queue = excluded.queue
RETURNING ordered, merge, merge_limit, batch, on_dead;

-- name: set_order
-- The commit wakes the queue's workers.
WITH changed AS (
  UPDATE dl_queues SET ordered = %(ordered)s, merge = %(merge)s, merge_limit = %(merge_limit)s, batch = %(batch)s,
         on_dead = %(on_dead)s
   WHERE queue = %(queue)s RETURNING queue)
SELECT pg_notify('dl_jobs', queue), pg_current_xact_id()::text FROM changed;

-- name: give_scores
-- Scores for queued and running jobs without one, some at a time; see dl_give_scores.
SELECT given, reached::text FROM dl_give_scores(%(queue)s, %(after)s::timestamptz, %(limit)s);

-- name: tell_tasks
-- What pipelines say of their tasks. Of a farm that starts only the first worker finds a difference.
INSERT INTO dl_tasks (task, max_attempts)
SELECT task, max_attempts FROM unnest(%(tasks)s::text[], %(max_attempts)s::int[]) AS said (task, max_attempts)
EXCEPT SELECT task, max_attempts FROM dl_tasks ORDER BY task
ON CONFLICT (task) DO UPDATE SET max_attempts = excluded.max_attempts;

-- name: is_past
-- Whether every transaction sees the commit of this one.
SELECT %(transaction)s::xid8 < pg_snapshot_xmin(pg_current_snapshot());

-- name: queue_names
-- The queues that workers serve, that have settings, or that the journal's sums name; and this one, when it has jobs
-- that wait, run or are dead. Served by the keys of the small tables, and for the last by ix_dl_jobs_claim,
-- ix_dl_jobs_running and ix_dl_jobs_dead.
(SELECT queue FROM dl_served UNION SELECT queue FROM dl_totals
 UNION SELECT queue FROM dl_queues WHERE paused_at IS NOT NULL OR max_length IS NOT NULL OR ordered LIMIT %(most)s)
UNION (SELECT queue FROM dl_jobs WHERE queue = %(queue)s AND status = 'queued' ORDER BY queue, available_at LIMIT 1)
UNION (SELECT queue FROM dl_jobs WHERE queue = %(queue)s AND status = 'running' LIMIT 1)
UNION (SELECT queue FROM dl_jobs WHERE queue = %(queue)s AND status IN ('failed', 'lost')
        ORDER BY queue, finished_at LIMIT 1);

-- name: statuses
-- The statuses of these jobs, after a statement that has left some of them alone.
SELECT job_id, status::text FROM dl_jobs WHERE job_id = ANY (%(job_ids)s);

-- name: cancellations
SELECT job_id, status::text, cancel_requested FROM dl_jobs WHERE job_id = ANY (%(job_ids)s);

-- name: requeue
-- final -> queued, due at once, with a fresh budget: the trigger takes back the cancellation that had ended the job. In a
-- merged queue the same for the jobs of its key that wait for a retry: they go as one. Others' locked ones stay.
WITH again AS (
  UPDATE dl_jobs SET status = 'queued', available_at = now(), attempt = 0, error = NULL, progress = '{}',
         backoffs = 0, journaled = journaled + 1
   WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s)
                              ORDER BY job_id FOR NO KEY UPDATE))
     AND status IN ('succeeded', 'failed', 'canceled', 'lost')
  RETURNING job_id, queue, lock_key),
with_them AS (
  UPDATE dl_jobs SET available_at = now(), attempt = 0 WHERE ctid = ANY (ARRAY(
    SELECT j.ctid FROM dl_jobs j
     WHERE status = 'queued' AND score IS NOT NULL AND least(attempt, 1) = 1
       AND (queue, lock_key) IN (SELECT queue, lock_key FROM again JOIN dl_queues q USING (queue) WHERE q.merge)
       FOR NO KEY UPDATE SKIP LOCKED))),
journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, 'requeue', jsonb_build_object('attempt', 0, 'by', %(by)s::text, 'reason', 'requeued by hand')
    FROM again)
SELECT job_id FROM again;

-- name: run_now
-- queued -> queued: what waits for its time becomes due. One that is due already stays as it is. In a merged queue the
-- same for the jobs of its key that wait for a retry. Others' locked ones stay.
WITH due AS (
  UPDATE dl_jobs SET available_at = now(), journaled = journaled + 1
   WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s)
                              ORDER BY job_id FOR NO KEY UPDATE))
     AND status = 'queued' AND (blocked_on = 'time' OR available_at > now())
  RETURNING job_id, queue, lock_key, attempt),
with_them AS (
  UPDATE dl_jobs SET available_at = now() WHERE ctid = ANY (ARRAY(
    SELECT j.ctid FROM dl_jobs j
     WHERE status = 'queued' AND score IS NOT NULL AND least(attempt, 1) = 1 AND job_id <> ALL (%(job_ids)s)
       AND (queue, lock_key) IN (SELECT queue, lock_key FROM due JOIN dl_queues q USING (queue) WHERE q.merge)
       FOR NO KEY UPDATE SKIP LOCKED))),
journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, 'requeue',
         jsonb_build_object('attempt', attempt, 'by', %(by)s::text, 'reason', 'made due by hand') FROM due)
SELECT job_id FROM due UNION
SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND status = 'queued' AND available_at <= now();

-- name: delete
-- Gone, with its journal (dl_jobs_forget): all but running jobs.
DELETE FROM dl_jobs
 WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) ORDER BY job_id FOR UPDATE))
   AND status <> 'running'
RETURNING job_id;

-- name: dead
-- The next of a queue's dead jobs, the oldest end first. Served by ix_dl_jobs_dead; skips locked rows.
SELECT job_id FROM dl_jobs WHERE queue = %(queue)s AND status IN ('failed', 'lost')
 ORDER BY finished_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED;

-- name: not_due
-- The next of a queue's jobs that wait for their time, the earliest first. Served by ix_dl_jobs_time.
SELECT job_id FROM dl_jobs WHERE queue = %(queue)s AND status = 'queued' AND blocked_on = 'time'
 ORDER BY available_at LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED;
