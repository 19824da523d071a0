-- Backfills; called by the functions of the same name in dataloader/queue/plans/backfills.py.

-- name: shown
-- In the place of {shown}: a backfill as people see it, without its counts.
SELECT *, greatest(extract(epoch FROM now() - next_at), 0)::float8 AS overdue_sec, now() AS now FROM dl_backfills;

-- name: listed
-- The newest first.
{shown} WHERE %(name)s::text IS NULL OR name = %(name)s ORDER BY created_at DESC, name LIMIT %(limit)s;

-- name: status_of
-- In the place of {status_of}: what became of a partition. `missing`: its job is gone.
CASE WHEN p.is_skipped THEN 'skipped' WHEN j.status IS NOT NULL THEN j.status::text
     WHEN p.last_status IN ('succeeded', 'failed', 'lost', 'canceled') THEN p.last_status ELSE 'missing' END;

-- name: counts
-- Counts by status, how many ended lately, since when they run, and the seconds until all are due. Reads the whole ledger:
-- 100,000 partitions take some tenths of a second.
SELECT {status_of} AS status, count(*)::int AS partitions,
       (count(*) FILTER (WHERE j.finished_at > now() - make_interval(secs => %(lately_sec)s)
                           AND NOT p.is_skipped))::int AS lately,
       min(j.started_at) FILTER (WHERE NOT p.is_skipped) AS since,
       extract(epoch FROM max(dl_readable(j.available_at)) FILTER (WHERE j.blocked_on = 'time' AND NOT p.is_skipped) - now())::float8 AS due_sec
  FROM dl_partitions p LEFT JOIN dl_jobs j USING (job_id)
 WHERE p.backfill = %(name)s GROUP BY 1;

-- name: partitions
-- Some partitions behind a place, in their order; `status` null is each.
SELECT p.place, p.partition, {status_of} AS status, p.job_id, j.finished_at
  FROM dl_partitions p LEFT JOIN dl_jobs j USING (job_id)
 WHERE p.backfill = %(name)s AND p.place > %(after)s AND (%(status)s::text IS NULL OR {status_of} = %(status)s)
 ORDER BY p.place LIMIT %(limit)s;

-- name: lock
{shown} WHERE name = %(name)s FOR UPDATE;

-- name: add
-- No row where the name is taken.
INSERT INTO dl_backfills (name, task, queue, span, job, code_version, skip_done, max_running, total, next_at, created_by)
VALUES (%(name)s, %(task)s, %(queue)s, %(span)s::jsonb, %(job)s::jsonb, %(code_version)s, %(skip_done)s,
        %(max_running)s, %(total)s, now(), %(by)s)
ON CONFLICT (name) DO NOTHING;

-- name: add_partitions
INSERT INTO dl_partitions (backfill, place, partition)
SELECT %(name)s, place, partition FROM unnest(%(partitions)s::text[]) WITH ORDINALITY AS listed (partition, place);

-- name: write
-- The {changes} of a locked backfill.
UPDATE dl_backfills SET {changes} WHERE name = %(name)s;

-- name: is_open
-- Whether a job of the backfill has not ended.
SELECT EXISTS (SELECT FROM dl_partitions p JOIN dl_jobs j USING (job_id)
                WHERE p.backfill = %(name)s AND NOT p.is_skipped AND j.status IN ('queued', 'running'));

-- name: remove
WITH ledger AS (DELETE FROM dl_partitions WHERE backfill = %(name)s)
DELETE FROM dl_backfills WHERE name = %(name)s;

-- name: dead
-- Partitions behind a place whose jobs are dead.
SELECT p.place, p.job_id FROM dl_partitions p JOIN dl_jobs j USING (job_id)
 WHERE p.backfill = %(name)s AND p.place > %(after)s AND NOT p.is_skipped AND j.status IN ('failed', 'lost')
 ORDER BY p.place LIMIT %(limit)s;

-- name: lock_due
-- The backfill that has waited longest for its next bunch, unless another reaper is at it. Served by ix_dl_backfills_next.
SELECT * FROM dl_backfills WHERE next_at <= clock_timestamp() ORDER BY next_at LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: has_company
-- Whether a job outside of this limit runs, or ended in the last second: ix_dl_jobs_running, ix_dl_jobs_finished.
SELECT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND %(limit)s <> ALL (coalesce(limits, '{}')))
    OR EXISTS (SELECT FROM dl_jobs
                WHERE finished_at > now() - interval '1 s' AND %(limit)s <> ALL (coalesce(limits, '{}')));

-- name: bunch
-- The next partitions, with their own jobs. By both ends, here and below: else the first would read the whole ledger.
SELECT place, partition, CASE WHEN NOT is_skipped THEN job_id END AS job_id FROM dl_partitions
 WHERE backfill = %(name)s AND place > %(after)s AND place <= %(upto)s ORDER BY place;

-- name: of_task
-- The limits of a job whose producer names none.
SELECT limits FROM dl_tasks WHERE task = %(task)s;

-- name: done
-- By fingerprint a job that has succeeded at the same work. Served by ix_dl_partitions_fingerprint.
SELECT p.fingerprint, p.job_id FROM dl_partitions p LEFT JOIN dl_jobs j USING (job_id)
 WHERE p.fingerprint = ANY (%(fingerprints)s::uuid[]) AND NOT p.is_skipped
   AND coalesce(j.status::text, p.last_status) = 'succeeded';

-- name: note
-- The ledger of a bunch; a skipped partition has the job that did it.
UPDATE dl_partitions p SET job_id = made.job_id, fingerprint = made.fingerprint, is_skipped = made.is_skipped
  FROM unnest(%(places)s::int[], %(job_ids)s::uuid[], %(fingerprints)s::uuid[], %(are_skipped)s::boolean[])
       AS made (place, job_id, fingerprint, is_skipped)
 WHERE p.backfill = %(name)s AND p.place > %(after)s AND p.place <= %(upto)s AND p.place = made.place;

-- name: done_up_to
-- Up to this place all have jobs, or are canceled. The next bunch comes `rest` times this transaction's length later.
UPDATE dl_backfills SET made = CASE WHEN canceled_at IS NULL THEN %(upto)s ELSE made END,
                        canceled = CASE WHEN canceled_at IS NULL THEN canceled ELSE %(upto)s END,
                        error = NULL, error_at = NULL,
                        next_at = CASE WHEN %(upto)s < total
                                       THEN clock_timestamp() + %(rest)s * (clock_timestamp() - now()) END
 WHERE name = %(name)s;

-- name: failed
-- The other partitions stay; the next try is some time later.
UPDATE dl_backfills SET error = %(error)s, error_at = coalesce(error_at, now()),
                        next_at = clock_timestamp() + make_interval(secs => %(retry_sec)s)
 WHERE name = %(name)s AND next_at IS NOT NULL;

-- name: due_in
-- In how many seconds there is something to do, by the database's clock; null where there is nothing.
SELECT extract(epoch FROM min(next_at) - clock_timestamp())::float8 FROM dl_backfills WHERE next_at IS NOT NULL;
