-- The keys of an ordered queue, for dataloader/queue/reports/keys.py. All is served by ix_dl_jobs_order: loose scans and
-- bounded counts, so that a page costs the same however many jobs a key has. Orders are whole, for no other index has them.

-- name: keys
-- Keys with queued jobs from `since` on: their jobs, counted up to `most`, and the head that dl_lock_heads would choose.
WITH RECURSIVE found (lock_key, nth) AS (
  (SELECT lock_key, 1 FROM dl_jobs
    WHERE queue = %(queue)s AND status = 'queued' AND score IS NOT NULL AND lock_key >= %(since)s
    ORDER BY queue, lock_key LIMIT 1)
  UNION ALL
  SELECT next.lock_key, nth + 1 FROM found CROSS JOIN LATERAL (
    SELECT lock_key FROM dl_jobs j
     WHERE queue = %(queue)s AND status = 'queued' AND score IS NOT NULL AND j.lock_key > found.lock_key
     ORDER BY queue, lock_key LIMIT 1) next
   WHERE nth < %(limit)s)
SELECT found.lock_key, payloads, head.*
  FROM found
 CROSS JOIN LATERAL (
   SELECT job_id, CASE WHEN abs(score) < 'Infinity' THEN score END AS score, attempt, available_at
     FROM (VALUES (0), (1)) AS of (tried) CROSS JOIN LATERAL (
     SELECT * FROM dl_jobs j
      WHERE queue = %(queue)s AND j.lock_key = found.lock_key AND status = 'queued' AND score IS NOT NULL
        AND least(attempt, 1) = tried
      ORDER BY queue, j.lock_key, status, least(attempt, 1), score, created_at, job_id LIMIT 1) two
    ORDER BY two.score, created_at, job_id LIMIT 1) head
 CROSS JOIN LATERAL (
   SELECT count(*) AS payloads FROM (
     SELECT FROM dl_jobs j
      WHERE queue = %(queue)s AND j.lock_key = found.lock_key AND status = 'queued' AND score IS NOT NULL
      ORDER BY queue, j.lock_key, status, least(attempt, 1) LIMIT %(most)s) n) counted
 ORDER BY nth;

-- name: length
-- How many queued jobs a key has, counted up to `most`.
SELECT count(*) FROM (
  SELECT FROM dl_jobs
   WHERE queue = %(queue)s AND lock_key = %(lock_key)s AND status = 'queued' AND score IS NOT NULL
   ORDER BY queue, lock_key, status, least(attempt, 1) LIMIT %(most)s) n;

-- name: jobs
-- The jobs of a key with these statuses behind a place: the queued ones in the order in which they start, or the dead ones.
-- Arguments that are long stay away. `place` is where the job stands in its key.
SELECT job_id, task, status, attempt, max_attempts, CASE WHEN abs(score) < 'Infinity' THEN score END AS score,
       left(error, 300) AS error, cancel_requested,
       CASE WHEN pg_column_size(args) <= %(long)s AND octet_length(args::text) <= %(long)s THEN args END AS args,
       created_at, available_at, finished_at, ARRAY[score::text, created_at::text, job_id::text] AS place
  FROM unnest(%(statuses)s::dl_status[]) AS of (its) CROSS JOIN (VALUES (0), (1)) AS rows (tried)
 CROSS JOIN LATERAL (
  SELECT * FROM dl_jobs
   WHERE queue = %(queue)s AND lock_key = %(lock_key)s AND status = its AND status IN ('queued', 'failed', 'lost')
     AND score IS NOT NULL AND least(attempt, 1) = tried
     AND (score, created_at, job_id) > (%(score)s::float8, %(created_at)s::timestamptz, %(job_id)s::uuid)
   ORDER BY queue, lock_key, status, least(attempt, 1), score, created_at, job_id LIMIT %(limit)s) of_each
 ORDER BY of_each.score, of_each.created_at, job_id LIMIT %(limit)s;
