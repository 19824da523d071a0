-- Canceled jobs that have a cleanup to do (`on_cancel` in a checkpoint). Statements ask job by job: a join would read all
-- checkpoints.

-- name: due
-- The jobs that have ended canceled and left something behind.
SELECT job_id FROM dl_cleanups c JOIN dl_jobs USING (job_id)
 WHERE status = 'canceled'
   AND (SELECT checkpoint ? 'on_cancel' FROM dl_checkpoints k WHERE k.job_id = c.job_id)
 ORDER BY job_id LIMIT %(most)s;

-- name: take
-- One of them, locked, so that no session queues it again meanwhile. No row: it was queued again, or is locked.
SELECT queue, task, partition_key, lease_ttl_sec, timeout_sec
  FROM dl_jobs WHERE job_id = %(job_id)s AND status = 'canceled' FOR NO KEY UPDATE SKIP LOCKED;

-- name: strike
-- Behind the lock, to see what other reapers have committed. No row: the cleanup is there, or not needed.
DELETE FROM dl_cleanups c
 WHERE job_id = %(job_id)s
   AND (SELECT checkpoint ? 'on_cancel' FROM dl_checkpoints k WHERE k.job_id = c.job_id)
RETURNING job_id;

-- name: hand_over
-- The cleanup has the job's args and checkpoint; the job would begin at its start again. A worker asks for a checkpoint from
-- the second claim on, so one claim is counted beforehand.
WITH spent AS (
  UPDATE dl_checkpoints c SET checkpoint = NULL, target_claim = j.claims + 1, target_number = 0
    FROM dl_checkpoints before JOIN dl_jobs j USING (job_id)
   WHERE c.job_id = %(job_id)s AND before.job_id = c.job_id
  RETURNING before.checkpoint),
counted AS (
  UPDATE dl_jobs c SET claims = 1, args = j.args FROM dl_jobs j
   WHERE c.job_id = %(cleanup)s AND j.job_id = %(job_id)s)
INSERT INTO dl_checkpoints (job_id, claim, checkpoint, target_claim, target_number, spares_attempt)
SELECT %(cleanup)s, 0, checkpoint - 'on_cancel' || jsonb_build_object('canceled', %(job_id)s), 0, 0, false FROM spent;

-- name: forget
-- Jobs that are gone, or have ended and left nothing behind. One that may run, or runs, may be about to leave something.
DELETE FROM dl_cleanups WHERE job_id = ANY (ARRAY(
  SELECT job_id FROM dl_cleanups c
   WHERE NOT EXISTS (
     SELECT FROM dl_jobs j
      WHERE j.job_id = c.job_id
        AND (status IN ('queued', 'running')
             OR (SELECT checkpoint ? 'on_cancel' FROM dl_checkpoints k WHERE k.job_id = c.job_id)))
     FOR UPDATE SKIP LOCKED));
