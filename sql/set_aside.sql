-- A job on which each claim fails; called by dataloader/queue/set_aside.py.

-- name: suspects
-- The jobs that a claim of these queues may have read: of each queue the first in the order of the claim, and the first due.
SELECT DISTINCT job_id FROM unnest(%(queues)s::text[]) AS served (its_queue) CROSS JOIN LATERAL (
  (SELECT job_id FROM dl_jobs WHERE queue = its_queue AND status = 'queued' AND blocked_on IS NULL
    ORDER BY queue, priority, coalesce(turn_at, created_at) LIMIT %(most)s)
  UNION ALL
  (SELECT job_id FROM dl_jobs WHERE queue = its_queue AND status = 'queued' ORDER BY queue, available_at LIMIT %(most)s)) near;

-- name: hide
-- In a transaction that is rolled back. Not by an update, which the row in question may refuse.
DELETE FROM dl_jobs WHERE job_id IN (
  SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND status::text = 'queued' FOR UPDATE SKIP LOCKED);

-- name: locked
SELECT EXISTS (SELECT FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND status::text = 'queued');

-- name: fail
-- As the end of a run that has failed: tried again later, and failed when its attempts are spent. The trigger does the rest.
WITH spent AS (
  UPDATE dl_jobs SET
         status = CASE WHEN attempt::bigint + 1 >= max_attempts THEN 'failed' ELSE 'queued' END::dl_status,
         attempt = least(attempt, 2147483646) + 1, journaled = mod(journaled, 1000000) + 1,
         blocked_on = CASE WHEN attempt::bigint + 1 < max_attempts THEN 'time' END,
         available_at = now() + make_interval(secs => dl_retry_delay(least(attempt, 2147483646) + 1)),
         finished_at = CASE WHEN attempt::bigint + 1 >= max_attempts THEN now() END,
         error = %(error)s, error_group = dl_error_group(%(error)s)
   WHERE job_id = %(job_id)s AND status::text = 'queued'
  RETURNING job_id, queue, status, attempt)
INSERT INTO dl_job_events (job_id, queue, kind, payload)
SELECT job_id, queue, CASE status WHEN 'queued' THEN 'requeue' ELSE 'failed' END,
       jsonb_build_object('reason', 'error', 'error', %(error)s::text, 'attempt', attempt, 'delay_sec', dl_retry_delay(attempt))
  FROM spent RETURNING queue, CASE kind WHEN 'failed' THEN 'failed' ELSE 'queued' END;

-- name: replace
-- A job that refuses each update: a failed one takes its place, without its journal.
WITH gone AS (DELETE FROM dl_jobs WHERE job_id = %(job_id)s AND status::text = 'queued' RETURNING *)
INSERT INTO dl_jobs
SELECT (jsonb_populate_record(NULL::dl_jobs, to_jsonb(gone) || jsonb_build_object(
         'status', 'failed', 'finished_at', now(), 'blocked_on', NULL, 'error', %(error)s::text,
         'error_group', dl_error_group(%(error)s)))).* FROM gone
RETURNING queue, status::text;
