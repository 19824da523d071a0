-- The time and the memory of the runs of tasks and queues, from dl_spans; called by the functions of dataloader/queue/reports/runs.py.

-- name: period
-- The period that ends now and the one before it; both begin with a span, so no span is in both.
SELECT now() AS until, since, since - make_interval(secs => %(seconds)s) AS before
  FROM date_bin(make_interval(secs => %(span_sec)s), now() - make_interval(secs => %(seconds)s), '2000-01-01 00:00+00') since;

-- name: of_task
task = %(task)s AND minutes IN (5, 60) AND at >= %(before)s

-- name: of_queue
queue = %(queue)s AND minutes IN (5, 60) AND at >= %(before)s

-- name: of_all
minutes IN (5, 60) AND at >= %(before)s AND figure IN ('succeeded', 'failed', 'canceled', 'waiting')

-- name: of_tasks
minutes IN (5, 60) AND at >= %(before)s AND figure IN ('succeeded', 'failed', 'canceled', 'waiting') AND task = ANY (%(tasks)s)

-- name: sums
-- Served by the primary key for a task, by ix_dl_spans_queue for a queue; {of} is one of the conditions above. {part} is the
-- task, or null for all runs together.
SELECT {part} AS task, at >= %(since)s AS is_now, figure, sum(total) AS total, max(largest) AS largest
  FROM dl_spans WHERE {of} GROUP BY 1, 2, 3;

-- name: slots
SELECT {part} AS task, at >= %(since)s AS is_now, figure, slot, sum(n)::bigint AS count
  FROM dl_spans CROSS JOIN LATERAL unnest(slots, counts) AS of_span (slot, n) WHERE {of} GROUP BY 1, 2, 3, 4;

-- name: by_time
SELECT date_bin(make_interval(secs => %(bin_sec)s), at, %(since)s) AS at,
       coalesce(sum(count) FILTER (WHERE figure IN ('succeeded', 'failed', 'canceled')), 0)::bigint AS runs,
       coalesce(sum(count) FILTER (WHERE figure = 'failed'), 0)::bigint AS failed
  FROM dl_spans WHERE {of} AND at >= %(since)s GROUP BY 1 ORDER BY 1;

-- name: parts
-- A task's runs by queue, or a queue's by task, in the place of {part}: those with the most time first.
SELECT {part}, sum(count)::bigint AS runs, coalesce(sum(count) FILTER (WHERE figure = 'failed'), 0)::bigint AS failed,
       sum(total) AS seconds
  FROM dl_spans WHERE {of} AND at >= %(since)s AND figure IN ('succeeded', 'failed', 'canceled')
 GROUP BY 1 ORDER BY sum(total) DESC, 1 LIMIT %(most)s;

-- name: tasks
-- The tasks with the most time of all their runs, of both periods. Served by ix_dl_spans_at.
SELECT task, array_agg(DISTINCT queue ORDER BY queue) AS queues FROM dl_spans
 WHERE {of} AND figure <> 'waiting' AND (%(like)s::text IS NULL OR strpos(lower(task), lower(%(like)s)) > 0)
 GROUP BY 1 ORDER BY sum(total) DESC, 1 LIMIT %(most)s;

-- name: is_known
SELECT EXISTS (SELECT FROM dl_tasks WHERE task = %(task)s) OR EXISTS (SELECT FROM dl_needs WHERE task = %(task)s)
    OR EXISTS (SELECT FROM dl_spans WHERE task = %(task)s) AS is_known;
