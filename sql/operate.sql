-- Operators' changes; called by the functions of the same name in dataloader/queue/operations.py. Each writes its journal
-- rows, and locks rows in the order of job_id, as `request_cancel` (queue.sql).

-- name: pause
-- From the next claim on no job of the queue starts, on any host. A pause that stands keeps its time and, unless another
-- move is to know of this one by it (`is_mark`), its author.
INSERT INTO dl_queues AS q (queue, paused_at, paused_by) VALUES (%(queue)s, now(), %(by)s)
ON CONFLICT (queue) DO UPDATE SET paused_at = coalesce(q.paused_at, excluded.paused_at),
   paused_by = CASE WHEN %(is_mark)s THEN excluded.paused_by ELSE coalesce(q.paused_by, excluded.paused_by) END
RETURNING {settings};

-- name: resume
-- The commit wakes the queue's workers. A row without any setting stays. `by`: only a pause by this author.
WITH resumed AS (
  UPDATE dl_queues SET paused_at = NULL, paused_by = NULL
   WHERE queue = %(queue)s AND paused_at IS NOT NULL AND (%(by)s::text IS NULL OR paused_by = %(by)s)
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
coalesce(merge_limit, 1000) AS merge_limit, batch, coalesce(on_dead, 'continue') AS on_dead, fair_by;

-- name: order_of
SELECT ordered, merge FROM dl_queues WHERE queue = %(queue)s;

-- name: lock_queue
-- The order that people or workers chose for a queue, null where none did; no other session changes it before the commit.
INSERT INTO dl_queues AS q (queue) VALUES (%(queue)s) ON CONFLICT (queue) DO UPDATE SET queue = excluded.queue
RETURNING paused_at, paused_by, ordered, merge, merge_limit, batch, on_dead, fair_by;

-- name: set_order
-- The commit wakes the queue's workers.
WITH changed AS (
  UPDATE dl_queues SET ordered = %(ordered)s, merge = %(merge)s, merge_limit = %(merge_limit)s, batch = %(batch)s,
         on_dead = %(on_dead)s, fair_by = %(fair_by)s
   WHERE queue = %(queue)s RETURNING queue)
SELECT pg_current_xact_id()::text, pg_notify('dl_jobs', queue) FROM changed;

-- name: give_scores
-- Scores for queued and running jobs without one, some at a time; see dl_give_scores.
SELECT given, reached::text FROM dl_give_scores(%(queue)s, %(after)s::timestamptz, %(limit)s);

-- name: give_turns
-- Turns for queued jobs of a queue that is fair now, the oldest first (dl_give_turns). Served by ix_dl_jobs_queued.
SELECT dl_give_turns(array_agg(job_id)), max(created_at)::text
  FROM (SELECT job_id, created_at FROM dl_jobs
         WHERE enum_eq(status, 'queued') AND created_at >= %(after)s::timestamptz AND queue = %(queue)s AND share IS NULL
           AND deadline IS NULL
         ORDER BY created_at LIMIT %(limit)s) plain;

-- name: publish_tasks
-- The declarations of tasks in pipelines. Only the first worker of a farm that starts finds a difference.
INSERT INTO dl_tasks (task, max_attempts, affinity, limits, memory_mb, cpus, args_schema)
SELECT task, max_attempts, affinity, limits, memory_mb, cpus, args_schema FROM json_populate_recordset(NULL::dl_tasks, %(tasks)s)
EXCEPT SELECT task, max_attempts, affinity, limits, memory_mb, cpus, args_schema FROM dl_tasks ORDER BY task
ON CONFLICT (task) DO UPDATE SET
   max_attempts = excluded.max_attempts, affinity = excluded.affinity, limits = excluded.limits,
   memory_mb = excluded.memory_mb, cpus = excluded.cpus, args_schema = excluded.args_schema;

-- name: args_schemas
SELECT task, args_schema FROM dl_tasks WHERE task = ANY (%(tasks)s);

-- name: lock_limit
-- Claims that decide on this limit have committed, and others pass its jobs over until the commit.
SELECT pg_advisory_xact_lock(hashtext('dl_limits'), hashtext(%(name)s));

-- name: set_limit
-- The limit's bounds from the commit on. Its tokens are kept, as far as the new bucket holds them; a new bucket is full.
INSERT INTO dl_limits AS l (name, most, per_minute, burst, changed_by)
VALUES (%(name)s, %(most)s, %(per_minute)s, %(burst)s, %(by)s)
ON CONFLICT (name) DO UPDATE SET
   most = excluded.most, per_minute = excluded.per_minute, burst = excluded.burst, changed_by = excluded.changed_by,
   changed_at = now(), empty_at = coalesce(clock_timestamp() - make_interval(secs => 60 / excluded.per_minute * (
     SELECT tokens FROM dl_limit_state(ARRAY[%(name)s]))), '-infinity');

-- name: due_at_token
-- The jobs to which the old rate gave the time of its next token are due: they ask again.
UPDATE dl_jobs SET blocked_on = NULL, available_at = now() WHERE job_id = ANY (ARRAY(
  SELECT job_id FROM dl_jobs JOIN dl_limit_state(ARRAY[%(name)s]) l ON l.name = ANY (limits)
   WHERE status = 'queued' AND limits IS NOT NULL AND blocked_on = 'time' AND available_at = l.next_at
   ORDER BY job_id FOR NO KEY UPDATE OF dl_jobs));

-- name: remove_limit
DELETE FROM dl_limits WHERE name = %(name)s RETURNING name;

-- name: take_token
-- Take one of a limit's tokens for a request, if there is one: 0; else in how many seconds the next one comes. A token that
-- is not there yet is never taken, for starts of jobs would find none while requests wait. No row: there is no such rate.
WITH bucket AS MATERIALIZED (
  SELECT name, make_interval(secs => 60 / per_minute)
               + greatest(empty_at, clock_timestamp() - make_interval(secs => (burst + 0.5) * 60 / per_minute)) AS next_at
    FROM dl_limits WHERE name = %(name)s AND per_minute IS NOT NULL FOR NO KEY UPDATE),
taken AS (
  UPDATE dl_limits l SET empty_at = next_at FROM bucket WHERE l.name = bucket.name AND next_at <= clock_timestamp() RETURNING 1)
SELECT CASE WHEN EXISTS (SELECT FROM taken) THEN 0
            ELSE greatest(extract(epoch FROM next_at - clock_timestamp()), 0.001) END::float8 AS wait_sec
  FROM bucket;

-- name: is_past
SELECT %(transaction)s::xid8 < pg_snapshot_xmin(pg_current_snapshot());

-- name: task_names
-- The tasks of workers, journal and newest queued jobs (ix_dl_jobs_queued), and this one by itself.
(SELECT task FROM dl_tasks UNION SELECT task FROM dl_needs UNION SELECT task FROM dl_totals
 UNION SELECT task FROM (SELECT task FROM dl_jobs WHERE enum_eq(status, 'queued') ORDER BY created_at DESC LIMIT 100) new
 LIMIT %(most)s)
UNION SELECT task FROM dl_tasks WHERE task = %(task)s
UNION (SELECT task FROM dl_totals WHERE task = %(task)s LIMIT 1);

-- name: task_facts
-- Whether workers have shown this task or it has run, and the tasks that workers have shown; no row without such a task.
SELECT task = ANY (names) OR EXISTS (SELECT FROM dl_needs WHERE task = %(task)s)
       OR EXISTS (SELECT FROM dl_spans WHERE task = %(task)s) AS is_known, names
  FROM (SELECT %(task)s::text AS task, ARRAY(SELECT task FROM dl_tasks ORDER BY task LIMIT %(most)s) AS names) shown
 WHERE names <> '{}';

-- name: queue_names
-- The queues with workers, settings, plans or sums, and this one when it has jobs: by small tables and indexes.
(SELECT queue FROM dl_served UNION SELECT queue FROM dl_totals
 UNION SELECT job ->> 'queue' FROM dl_schedules UNION SELECT queue FROM dl_backfills
 UNION SELECT queue FROM dl_queues WHERE paused_at IS NOT NULL OR max_length IS NOT NULL OR ordered LIMIT %(most)s)
UNION (SELECT queue FROM dl_jobs WHERE queue = %(queue)s AND status = 'queued' ORDER BY queue, available_at LIMIT 1)
UNION (SELECT queue FROM dl_jobs WHERE queue = %(queue)s AND status = 'running' LIMIT 1)
UNION (SELECT queue FROM dl_jobs WHERE queue = %(queue)s AND status IN ('failed', 'lost')
        ORDER BY queue, finished_at LIMIT 1);

-- name: statuses
-- The statuses of these jobs, and whether a cancellation was asked for.
SELECT job_id, status::text, cancel_requested FROM dl_jobs WHERE job_id = ANY (%(job_ids)s);

-- name: requeue
-- final -> queued, due at once, with a fresh budget; in a merged queue also the jobs of its key that wait for a retry.
WITH again AS (
  UPDATE dl_jobs SET status = 'queued', available_at = now(), attempt = 0, error = NULL, error_group = NULL, progress = '{}',
         backoffs = 0, journaled = mod(journaled, 1000000) + 1
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

-- name: start_over
-- Behind `requeue`: the next runs begin at the start. The target may know a checkpoint, so each job that has run gets a row.
INSERT INTO dl_checkpoints AS c (job_id, claim, target_claim, target_number, spares_attempt)
SELECT job_id, claims, claims + 1, 0, false FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND claims > 0
ON CONFLICT (job_id) DO UPDATE SET checkpoint = NULL, target_claim = excluded.target_claim, target_number = 0
 WHERE (c.checkpoint ? 'canceled') IS NOT TRUE;  -- a cleanup stays one: queue/cleanups.py

-- name: run_now
-- queued -> queued: jobs that wait for their time become due; in a merged queue also the jobs of its key that wait for a retry.
WITH due AS (
  UPDATE dl_jobs SET available_at = now(), journaled = mod(journaled, 1000000) + 1
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

-- name: kill
-- queued -> failed: jobs that wait for their next attempts; canceled where that was asked. The trigger makes the next row of the
-- key ready.
WITH killed AS (
  UPDATE dl_jobs SET status = CASE WHEN cancel_requested THEN 'canceled' ELSE 'failed' END::dl_status,
         finished_at = now(), blocked_on = NULL, journaled = mod(journaled, 1000000) + 1,
         error = coalesce(error, 'killed by ' || %(by)s::text),
         error_group = coalesce(error_group, CASE WHEN error IS NULL THEN 'killed by hand' END)
   WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s)
                              ORDER BY job_id FOR NO KEY UPDATE))
     AND status = 'queued' AND attempt > 0
  RETURNING job_id, queue, status, attempt),
journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, status::text,
         jsonb_build_object('attempt', attempt, 'by', %(by)s::text, 'reason', 'killed by hand') FROM killed)
SELECT job_id FROM killed;

-- name: chosen
-- The next jobs of a group (of_dead, of_time, of_retries in search.sql) that pass a filter: up to `limit` of the first `scan`
-- rows behind a place, in the order of the group's index; rows with one time are sorted. is_edge marks the last row that was
-- looked at. job_id is null of a row that has left the group, is locked, or does not pass.
SELECT got.job_id, looked_at.place, looked_at.nth = %(scan)s AS is_edge
  FROM (SELECT * FROM (
          SELECT job_id, ARRAY[{texts}] AS place, row_number() OVER (ORDER BY {columns}) AS nth, {passes} AS passes
            FROM dl_jobs WHERE queue = %(queue)s AND {group} AND ({columns}) > ({after})
           ORDER BY {columns} LIMIT %(scan)s) near
         WHERE passes OR nth = %(scan)s ORDER BY nth LIMIT %(limit)s) looked_at
  LEFT JOIN LATERAL (
    SELECT job_id FROM dl_jobs
     WHERE looked_at.passes AND dl_jobs.job_id = looked_at.job_id AND {still} FOR UPDATE SKIP LOCKED) got ON true
 ORDER BY looked_at.nth;

-- name: plans
-- For `chosen` and the looks of a move: along an index, whatever the statistics say; only rows with one time are sorted.
SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off;

-- name: passes
-- Whether a row passes the filter, in the place of {passes}; null is no filter.
(%(task)s::text IS NULL OR task = %(task)s) AND (%(lock_key)s::text IS NULL OR lock_key = %(lock_key)s)
AND (%(partition_key)s::text IS NULL OR partition_key = %(partition_key)s)
AND (%(error)s::text IS NULL OR coalesce(strpos(error, %(error)s) > 0, false))
AND (%(error_group)s::text IS NULL OR coalesce(coalesce(error_group, dl_error_group(error)) = %(error_group)s, false));

-- name: claims_under_way
-- Statements that have begun to read the settings of queues, by transaction and begin; with `statements` those that are
-- left. One of them may not have seen a pause. Another role's may be hidden: then the whole transaction counts.
SELECT concat_ws(' ', l.virtualtransaction, a.query_start), l.pid, a.application_name
  FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE l.locktype = 'relation' AND l.relation = 'dl_queues'::regclass AND l.mode = 'AccessShareLock'
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND a.backend_xmin IS NOT NULL AND coalesce(a.state, '') NOT LIKE 'idle%%'
   AND (%(statements)s::text[] IS NULL OR concat_ws(' ', l.virtualtransaction, a.query_start) = ANY (%(statements)s));

-- name: running_to_move
-- Running jobs: all of one key, or several keys up to `limit`. Does not wait: with some rows locked that could be a deadlock.
SELECT job_id FROM dl_jobs
 WHERE job_id = ANY (ARRAY(
         SELECT job_id FROM (
           SELECT job_id, count(*) OVER (ORDER BY lock_key) AS so_far, dense_rank() OVER (ORDER BY lock_key) AS nth
             FROM dl_jobs WHERE status = 'running' AND queue = %(from)s) by_key
          WHERE nth = 1 OR so_far <= %(limit)s))
 ORDER BY job_id FOR NO KEY UPDATE NOWAIT;

-- name: queued_to_move
-- Served by ix_dl_jobs_claim.
SELECT job_id FROM dl_jobs WHERE queue = %(from)s AND status = 'queued' ORDER BY queue, available_at LIMIT %(limit)s;

-- name: dead_to_move
-- Served by ix_dl_jobs_dead.
SELECT job_id FROM dl_jobs WHERE queue = %(from)s AND status IN ('failed', 'lost')
 ORDER BY queue, finished_at LIMIT %(limit)s;

-- name: move
-- Another queue, and nothing else. Writes what the trigger would write row by row: a parked row is ready until a claim parks
-- it again, and in an order each row has its place.
UPDATE dl_jobs SET queue = %(to)s,
       blocked_on = CASE WHEN status <> 'queued' THEN NULL
                         WHEN blocked_on = 'parent' THEN 'parent'
                         WHEN available_at > now() THEN 'time'
                         WHEN blocked_on IN ('time', 'key') THEN NULL
                         ELSE blocked_on END,
       score = coalesce(score, CASE WHEN status IN ('queued', 'running') THEN (
         SELECT extract(epoch FROM dl_jobs.created_at) FROM dl_queues q WHERE q.queue = %(to)s AND ordered) END)
 WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s)
                            ORDER BY job_id FOR NO KEY UPDATE))
   AND queue = %(from)s AND status IN ('queued', 'running', 'failed', 'lost');

-- name: moves_to
-- A queue that a move with this author has paused, and that still has jobs for it.
SELECT queue FROM dl_queues q
 WHERE paused_by = %(by)s
   AND coalesce((SELECT queue FROM dl_jobs j WHERE j.queue = q.queue AND status = 'queued'
                  ORDER BY queue, available_at LIMIT 1),
                (SELECT queue FROM dl_jobs j WHERE j.queue = q.queue AND status = 'running' LIMIT 1),
                (SELECT queue FROM dl_jobs j WHERE j.queue = q.queue AND status IN ('failed', 'lost')
                  ORDER BY queue, finished_at LIMIT 1)) IS NOT NULL
 ORDER BY queue LIMIT 1;
