-- Rows of before a check of dl_jobs that break it; called by dataloader/queue/migrations.py. PostgreSQL checks them at each
-- update, so nobody could claim, renew, cancel or end such a job.

-- name: unvalidated
-- The checks of dl_jobs that hold for new rows only.
SELECT conname FROM pg_constraint WHERE conrelid = 'dl_jobs'::regclass AND contype = 'c' AND NOT convalidated;

-- name: breaks
-- In the place of {breaks}: the checks of migration 0053, the other way round.
(octet_length(queue) > 512 OR octet_length(task) > 2000 OR octet_length(lock_key) > 2048
 OR octet_length(idempotency_key) > 1020 OR octet_length(partition_key) > 1020 OR octet_length(producer) > 1020
 OR octet_length(consumer_group) > 1020 OR octet_length(affinity_key) > 800 OR octet_length(trace) > 255
 OR timeout_sec NOT BETWEEN 1 AND 2592000
 OR deadline < '2000-01-01 00:00+00' OR deadline >= '9999-01-01 00:00+00'
 OR greatest(claims, journaled, backoffs) > 1000000000
 OR limits <> '{}' AND NOT (
      array_ndims(limits) = 1 AND array_lower(limits, 1) = 1 AND cardinality(limits) <= 8
      AND array_position(limits, NULL) IS NULL AND array_position(limits, '') IS NULL
      AND greatest(octet_length(limits[1]), octet_length(limits[2]), octet_length(limits[3]), octet_length(limits[4]),
                   octet_length(limits[5]), octet_length(limits[6]), octet_length(limits[7]), octet_length(limits[8])) <= 400));

-- name: unfit
SELECT job_id FROM dl_jobs WHERE {breaks};

-- name: fit
-- Mend some of these rows, as far as nobody has them locked. Each keeps its status, so it can be seen, run, canceled and
-- deleted as before. A text that is too long is cut; a hash at its end keeps different keys different. A number or a
-- time that means nothing becomes null, as if its producer had not named it. Of the limits the first 8 usable names stay.
WITH mended AS (
  UPDATE dl_jobs SET
         queue = CASE WHEN octet_length(queue) > 512 THEN left(queue, 90) || '…' || md5(queue) ELSE queue END,
         task = CASE WHEN octet_length(task) > 2000 THEN left(task, 160) || '…' || md5(task) ELSE task END,
         lock_key = CASE WHEN octet_length(lock_key) > 2048 THEN left(lock_key, 470) || '…' || md5(lock_key) ELSE lock_key END,
         idempotency_key = CASE WHEN octet_length(idempotency_key) > 1020
                                THEN left(idempotency_key, 220) || '…' || md5(idempotency_key) ELSE idempotency_key END,
         partition_key = CASE WHEN octet_length(partition_key) > 1020
                              THEN left(partition_key, 220) || '…' || md5(partition_key) ELSE partition_key END,
         producer = CASE WHEN octet_length(producer) > 1020 THEN left(producer, 220) || '…' || md5(producer) ELSE producer END,
         consumer_group = CASE WHEN octet_length(consumer_group) > 1020
                               THEN left(consumer_group, 220) || '…' || md5(consumer_group) ELSE consumer_group END,
         affinity_key = CASE WHEN octet_length(affinity_key) > 800
                             THEN left(affinity_key, 160) || '…' || md5(affinity_key) ELSE affinity_key END,
         trace = CASE WHEN octet_length(trace) <= 255 THEN trace END,
         timeout_sec = CASE WHEN timeout_sec BETWEEN 1 AND 2592000 THEN timeout_sec END,
         deadline = CASE WHEN deadline >= '2000-01-01 00:00+00' AND deadline < '9999-01-01 00:00+00' THEN deadline END,
         turn_at = CASE WHEN deadline < '2000-01-01 00:00+00' OR deadline >= '9999-01-01 00:00+00' THEN NULL ELSE turn_at END,
         claims = least(claims, 1000000), journaled = least(journaled, 1000000), backoffs = least(backoffs, 1000000),
         limits = CASE WHEN limits <> '{}' THEN (
                    SELECT array_agg(name ORDER BY nth) FROM (
                      SELECT name, nth FROM unnest(limits) WITH ORDINALITY AS its (name, nth)
                       WHERE octet_length(name) BETWEEN 1 AND 400 ORDER BY nth LIMIT 8) usable) END,
         blocked_on = CASE WHEN left(blocked_on, 6) <> 'limit:' THEN blocked_on END  -- the next claim asks them anew
   WHERE job_id IN (SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND {breaks} FOR NO KEY UPDATE SKIP LOCKED)
  RETURNING job_id)
SELECT (SELECT array_agg(job_id) FROM mended) AS mended,
       (SELECT array_agg(job_id) FROM dl_jobs
         WHERE job_id = ANY (%(job_ids)s) AND {breaks} AND job_id NOT IN (SELECT job_id FROM mended)) AS locked;
