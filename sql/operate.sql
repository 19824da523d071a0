-- Operators' changes to jobs and queues; called by the functions of the same name in dataloader/queue/operations.py.
-- Each writes its own journal rows, with the name of the asker. Rows are locked in the order of job_id, as by
-- `request_cancel`.

-- name: pause
-- From the next claim on no job of the queue starts, on any host. A pause that stands keeps its time and its author.
INSERT INTO dl_queues AS q (queue, paused_at, paused_by) VALUES (%(queue)s, now(), %(by)s)
ON CONFLICT (queue) DO UPDATE SET paused_at = coalesce(q.paused_at, excluded.paused_at),
                                  paused_by = coalesce(q.paused_by, excluded.paused_by)
RETURNING queue, paused_at, paused_by, max_length;

-- name: resume
-- The commit wakes the queue's workers. A row without any setting stays.
WITH resumed AS (
  UPDATE dl_queues SET paused_at = NULL, paused_by = NULL WHERE queue = %(queue)s AND paused_at IS NOT NULL
  RETURNING queue)
SELECT pg_notify('dl_jobs', queue) FROM resumed;

-- name: limit_length
INSERT INTO dl_queues (queue, max_length) VALUES (%(queue)s, %(max_length)s)
ON CONFLICT (queue) DO UPDATE SET max_length = excluded.max_length
RETURNING queue, paused_at, paused_by, max_length;

-- name: queue
SELECT queue, paused_at, paused_by, max_length FROM dl_queues WHERE queue = %(queue)s;

-- name: queue_names
-- The queues that workers serve, that have settings, or that the journal's sums name; and this one, when it has jobs
-- that wait, run or are dead. Served by the keys of the small tables, and for the last by ix_dl_jobs_claim,
-- ix_dl_jobs_running and ix_dl_jobs_dead.
(SELECT queue FROM dl_workers UNION SELECT queue FROM dl_totals
 UNION SELECT queue FROM dl_queues WHERE paused_at IS NOT NULL OR max_length IS NOT NULL LIMIT %(most)s)
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
-- final -> queued, due at once, with a fresh budget: the trigger takes back the cancellation that had ended the job.
WITH again AS (
  UPDATE dl_jobs SET status = 'queued', available_at = now(), attempt = 0, error = NULL, progress = '{}',
         backoffs = 0, journaled = journaled + 1
   WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s)
                              ORDER BY job_id FOR NO KEY UPDATE))
     AND status IN ('succeeded', 'failed', 'canceled', 'lost')
  RETURNING job_id, queue),
journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, 'requeue', jsonb_build_object('attempt', 0, 'by', %(by)s::text, 'reason', 'requeued by hand')
    FROM again)
SELECT job_id FROM again;

-- name: run_now
-- queued -> queued: what waits for its time becomes due. One that is due already stays as it is.
WITH due AS (
  UPDATE dl_jobs SET available_at = now(), journaled = journaled + 1
   WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s)
                              ORDER BY job_id FOR NO KEY UPDATE))
     AND status = 'queued' AND (blocked_on = 'time' OR available_at > now())
  RETURNING job_id, queue, attempt),
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
