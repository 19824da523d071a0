-- Queues of several clusters: where each lives, and the move of one to another cluster; called by the functions of the
-- same name in dataloader/queue/clusters.py. `source` and `target` are the two databases of a move. No statement is for both.

-- name: placed
-- The queues that this cluster knows, each with the cluster that it has moved to (null: none). Those that have moved come
-- first, for the answer is cut. Those with jobs are found by loose scans of ix_dl_jobs_claim and ix_dl_jobs_dead, as by
-- `queues` of stats.sql.
WITH RECURSIVE
{named}
SELECT queue, max(cluster) FROM (
  {noted} UNION ALL SELECT queue, NULL FROM waiting UNION ALL SELECT queue, NULL FROM dead
  UNION ALL SELECT queue, NULL FROM dl_jobs WHERE status = 'running') known
 WHERE queue IS NOT NULL GROUP BY queue ORDER BY max(cluster) NULLS LAST, queue LIMIT %(most)s;

-- name: placed_as_noted
-- The same without a look at the jobs: for when that takes too long, because a transaction holds back vacuum.
SELECT queue, max(cluster) FROM ({noted}) known
 GROUP BY queue ORDER BY max(cluster) NULLS LAST, queue LIMIT %(most)s;

-- name: noted
-- In the place of {noted}: queues with settings, with workers, with jobs that the reaper has counted, with a past.
SELECT queue, cluster FROM dl_queues UNION ALL SELECT queue, NULL FROM dl_served
UNION ALL SELECT queue, NULL FROM dl_lengths UNION ALL SELECT DISTINCT queue, NULL FROM dl_totals;

-- name: plans
SELECT set_config('statement_timeout', '500ms', true), set_config('enable_seqscan', 'off', true),
       set_config('enable_bitmapscan', 'off', true), set_config('jit', 'off', true);

-- name: has_jobs
-- Whether jobs of this queue wait, run or are dead. Served by ix_dl_jobs_claim, ix_dl_jobs_running, ix_dl_jobs_dead.
SELECT EXISTS (SELECT FROM dl_jobs WHERE queue = %(queue)s AND status = 'queued')
    OR EXISTS (SELECT FROM dl_jobs WHERE queue = %(queue)s AND status = 'running')
    OR EXISTS (SELECT FROM dl_jobs WHERE queue = %(queue)s AND status IN ('failed', 'lost'));

-- name: moved
SELECT queue, cluster FROM dl_moved(%(queues)s);

-- name: lock_queue
-- What has been said of a queue, null where nothing was; nobody else changes it before the commit.
INSERT INTO dl_queues AS q (queue) VALUES (%(queue)s) ON CONFLICT (queue) DO UPDATE SET queue = excluded.queue
RETURNING cluster, paused_at, paused_by, max_length, ordered, merge, merge_limit, batch, on_dead, fair_by;

-- name: refusals
-- Source: why the queue cannot move, one row for each reason.
SELECT 'jobs wait for others, or others for them'
 WHERE EXISTS (SELECT FROM dl_waiting w JOIN dl_jobs j USING (job_id) WHERE j.queue = %(queue)s)
    OR EXISTS (SELECT FROM dl_parents p JOIN dl_jobs j ON j.job_id = p.parent_id WHERE NOT p.is_over AND j.queue = %(queue)s)
    OR EXISTS (SELECT FROM dl_parents p JOIN dl_jobs j ON j.job_id = p.job_id
                WHERE j.queue = %(queue)s AND j.status IN ('queued', 'running'))
UNION ALL
SELECT 'jobs of it have not all arrived there: complete the move that they came with'
 WHERE EXISTS (SELECT FROM dl_arrivals WHERE queue = %(queue)s)
UNION ALL
SELECT 'the backfill ' || name || ' has not ended' FROM dl_backfills b
 WHERE b.queue = %(queue)s AND (canceled_at IS NULL AND made < total OR EXISTS (
   SELECT FROM dl_partitions p JOIN dl_jobs j USING (job_id) WHERE p.backfill = b.name AND j.status IN ('queued', 'running')))
UNION ALL
SELECT 'the schedule ' || name || ' makes jobs of it' FROM dl_schedules
 WHERE job ->> 'queue' = %(queue)s AND retired_at IS NULL;

-- name: first
-- Source: about those jobs that the first steps would carry. Served by ix_dl_jobs_claim, ix_dl_jobs_dead.
(SELECT job_id FROM dl_jobs j WHERE queue = %(queue)s AND status = 'queued' AND NOT {stays}
  ORDER BY queue, available_at LIMIT %(limit)s)
UNION ALL
(SELECT job_id FROM dl_jobs j WHERE queue = %(queue)s AND status IN ('failed', 'lost') AND NOT {stays}
  ORDER BY queue, finished_at LIMIT %(limit)s);

-- name: doubles
-- Target: those of these ids that jobs have here which are no copies of a move that was cut off.
SELECT job_id FROM dl_jobs j
 WHERE job_id = ANY (%(job_ids)s) AND NOT EXISTS (SELECT FROM dl_arrivals a WHERE a.job_id = j.job_id);

-- name: take_in
-- Target: paused while the jobs come, and not yet the queue's home. A pause that somebody else has made outlasts the move.
UPDATE dl_queues SET (paused_at, paused_by) = (
         SELECT CASE WHEN stays THEN paused_at ELSE now() END, CASE WHEN stays THEN paused_by ELSE %(by)s END
           FROM (SELECT paused_at IS NOT NULL AND starts_with(paused_by, 'queue move ') IS NOT TRUE AS stays) pause),
       cluster = %(cluster)s, max_length = coalesce(max_length, %(max_length)s)
 WHERE queue = %(queue)s;

-- name: give_back
-- Target: another move was faster, so what was said before `take_in` holds again.
WITH given_back AS (
  UPDATE dl_queues SET paused_at = %(paused_at)s, paused_by = %(paused_by)s, cluster = %(cluster)s, max_length = %(max_length)s
   WHERE queue = %(queue)s AND cluster = %(source)s
  RETURNING queue)
SELECT pg_notify('dl_jobs', queue) FROM given_back;

-- name: settle_in
-- Target: the source says that the queue is here.
UPDATE dl_queues SET cluster = NULL WHERE queue = %(queue)s AND cluster = %(cluster)s;

-- name: without_adders
-- Source: the transactions have ended whose dl_moved has found the queue here, and others wait until the commit.
SELECT pg_advisory_xact_lock(hashtext('dl_queues'), hashtext(%(queue)s));

-- name: send_away
-- Source: from the commit on no claim starts a job of the queue, and the API adds none.
UPDATE dl_queues SET cluster = %(cluster)s, paused_at = coalesce(paused_at, now()), paused_by = %(by)s
 WHERE queue = %(queue)s;

-- name: alone
-- Source: whether nobody else carries jobs of this queue.
SELECT pg_try_advisory_xact_lock(hashtext('dl_clusters'), hashtext(%(queue)s));

-- name: alone_there
-- Target: the transactions have ended that have added jobs of another cluster. A process that was stopped in between
-- cannot commit behind this: the lock goes with its transaction.
SELECT pg_advisory_xact_lock(hashtext('dl_arrivals'), 0);

-- name: briefly
SET LOCAL lock_timeout = '1s';

-- name: arrivals
-- Target: jobs that the source may still have. A third cluster decides on the copies of its own jobs.
SELECT job_id FROM dl_arrivals WHERE queue = %(queue)s AND coalesce(source, %(source)s) = %(source)s;

-- name: still_there
-- Source: those of these jobs that are in the source. NOWAIT: to wait here with rows locked could be a deadlock.
SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) ORDER BY job_id FOR UPDATE NOWAIT;

-- name: departed
-- Source: those of these jobs that a move has deleted.
SELECT job_id FROM dl_departures WHERE job_id = ANY (%(job_ids)s);

-- name: clear_departures
-- Source: the target has admitted them.
DELETE FROM dl_departures WHERE queue = %(queue)s;

-- name: drop_copies
-- Target: the source has these jobs, so they are carried anew, or people have deleted them there. Not those that people
-- have ended, deleted or queued here.
WITH dropped AS (
  DELETE FROM dl_jobs WHERE job_id = ANY (%(job_ids)s)
     AND (status = 'queued' AND blocked_on = 'cluster' OR status IN ('failed', 'lost'))
  RETURNING job_id)
DELETE FROM dl_arrivals WHERE job_id IN (SELECT job_id FROM dropped) RETURNING job_id;

-- name: admit
-- Target: the source has these jobs no more. They take their places, and the commit wakes their workers.
WITH here AS (DELETE FROM dl_arrivals WHERE job_id = ANY (%(job_ids)s) RETURNING job_id, score),
ready AS (
  UPDATE dl_jobs j SET blocked_on = CASE WHEN available_at > now() THEN 'time' END,
         score = coalesce(here.score, (SELECT extract(epoch FROM j.created_at) FROM dl_queues q WHERE q.queue = j.queue AND ordered))
    FROM here WHERE j.job_id = here.job_id AND status = 'queued' AND blocked_on = 'cluster'
  RETURNING j.queue)
SELECT pg_notify('dl_jobs', queue) FROM (SELECT DISTINCT queue FROM ready) queues;

-- name: give_turns
-- Target, behind `admit`: in a fair queue they have their turns among those that are ready.
SELECT dl_give_turns(ARRAY(
  SELECT job_id FROM dl_jobs JOIN dl_queues q USING (queue)
   WHERE job_id = ANY (%(job_ids)s) AND status = 'queued' AND deadline IS NULL AND q.fair_by IS NOT NULL));

-- name: stays
-- In the place of {stays}: whether the source keeps a job, for other rows there count on it.
(blocked_on = 'parent' AND blocked_on IS NOT NULL
 OR EXISTS (SELECT FROM dl_parents p WHERE p.job_id = j.job_id)
 OR EXISTS (SELECT FROM dl_parents p WHERE p.parent_id = j.job_id AND NOT p.is_over)
 OR EXISTS (SELECT FROM dl_partitions p WHERE p.job_id = j.job_id));

-- name: to_carry
-- Source: some queued jobs, or else dead ones, locked: up to `limit`, and as many as fit into `bytes` with what belongs
-- to them. The row of the queue is locked first: it has moved and nobody takes it back meanwhile.
WITH away AS MATERIALIZED (SELECT queue FROM dl_queues WHERE queue = %(queue)s AND cluster = %(cluster)s FOR SHARE),
near AS MATERIALIZED (
  (SELECT job_id, args, claims, 0 AS class, available_at AS at FROM dl_jobs j
    WHERE queue = (SELECT queue FROM away) AND status = 'queued' AND blocked_on IS DISTINCT FROM 'cluster' AND NOT {stays}
    ORDER BY queue, available_at LIMIT %(limit)s)
  UNION ALL
  (SELECT job_id, args, claims, 1, finished_at FROM dl_jobs j
    WHERE queue = (SELECT queue FROM away) AND status IN ('failed', 'lost') AND NOT {stays}
    ORDER BY queue, finished_at LIMIT %(limit)s)),
sized AS (
  SELECT job_id, row_number() OVER (ORDER BY class, at, job_id) AS nth, sum(
           1000 + 4 * pg_column_size(args) + CASE WHEN claims > 0 THEN
             (SELECT 300 * count(*) FROM dl_job_events e WHERE e.job_id = near.job_id)
             + (SELECT coalesce(sum(100 + octet_length(text)), 0) FROM dl_job_logs l WHERE l.job_id = near.job_id) ELSE 0 END)
         OVER (ORDER BY class, at, job_id) AS so_far
    FROM near)
SELECT job_id FROM dl_jobs
 WHERE job_id = ANY (ARRAY(SELECT job_id FROM sized WHERE nth <= %(limit)s AND (nth = 1 OR so_far <= %(bytes)s)))
   AND status IN ('queued', 'failed', 'lost')
 ORDER BY job_id FOR UPDATE NOWAIT;

-- name: jobs
SELECT to_jsonb(j)::text FROM dl_jobs j WHERE job_id = ANY (%(job_ids)s) ORDER BY created_at, job_id;

-- name: events
SELECT to_jsonb(e)::text FROM dl_job_events e WHERE job_id = ANY (%(job_ids)s) ORDER BY event_id;

-- name: checkpoints
SELECT to_jsonb(c)::text FROM dl_checkpoints c WHERE job_id = ANY (%(job_ids)s);

-- name: logs
SELECT to_jsonb(l)::text FROM dl_job_logs l WHERE job_id = ANY (%(job_ids)s);

-- name: columns
SELECT attname FROM pg_attribute
 WHERE attrelid = 'dl_jobs'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum;

-- name: add_jobs
-- Target: {columns} of jobs of the source, {values} the same of r. A queued one waits for the cluster: it has no score, so
-- that it is no head of its key. An idempotency key that another job has here stays with that one. Journaled as our own
-- inserts are, which need no trigger. Returns what is new here.
WITH given AS (
  SELECT nth, doc::jsonb AS doc FROM unnest(%(rows)s::text[]) WITH ORDINALITY AS listed (doc, nth)),
records AS (
  SELECT nth, doc, jsonb_populate_record(NULL::dl_jobs, doc || jsonb_build_object(
           'journaled', 2, 'share', NULL,
           'blocked_on', CASE doc ->> 'status' WHEN 'queued' THEN 'cluster' END,
           'score', CASE doc ->> 'status' WHEN 'queued' THEN 'null' ELSE doc -> 'score' END,
           'turn_at', NULL,
           'idempotency_key', CASE WHEN NOT EXISTS (
             SELECT FROM dl_jobs o WHERE o.idempotency_key = doc ->> 'idempotency_key') THEN doc -> 'idempotency_key' END)) AS r
    FROM given),
added AS (
  INSERT INTO dl_jobs ({columns}) SELECT {values} FROM records ORDER BY nth ON CONFLICT (job_id) DO NOTHING
  RETURNING job_id),
arrived AS (
  INSERT INTO dl_arrivals (job_id, queue, score, source)
  SELECT job_id, doc ->> 'queue', (doc ->> 'score')::float8, %(source)s
    FROM added JOIN records ON (doc ->> 'job_id')::uuid = job_id
  ON CONFLICT (job_id) DO NOTHING)
SELECT job_id FROM added;

-- name: add_events
-- Target: before all that the journal has, so that neither sums nor alerts count them again.
INSERT INTO dl_job_events (event_id, job_id, queue, ts, kind, payload)
SELECT least(0, (SELECT min(event_id) FROM dl_job_events)) - row_number() OVER (ORDER BY nth DESC),
       r.job_id, r.queue, r.ts, r.kind, r.payload
  FROM unnest(%(rows)s::text[]) WITH ORDINALITY AS listed (doc, nth)
 CROSS JOIN LATERAL jsonb_populate_record(NULL::dl_job_events, doc::jsonb) r
 WHERE r.job_id = ANY (%(added)s);

-- name: add_checkpoints
WITH added AS (
  INSERT INTO dl_checkpoints SELECT r.* FROM unnest(%(rows)s::text[]) doc
   CROSS JOIN LATERAL jsonb_populate_record(NULL::dl_checkpoints, doc::jsonb) r
   WHERE r.job_id = ANY (%(added)s) ON CONFLICT (job_id) DO NOTHING
  RETURNING job_id, checkpoint)
INSERT INTO dl_cleanups SELECT job_id FROM added WHERE checkpoint ? 'on_cancel' ON CONFLICT DO NOTHING;

-- name: add_logs
INSERT INTO dl_job_logs SELECT r.* FROM unnest(%(rows)s::text[]) doc
 CROSS JOIN LATERAL jsonb_populate_record(NULL::dl_job_logs, doc::jsonb) r
 WHERE r.job_id = ANY (%(added)s);

-- name: forget
-- Source: the target has these jobs; their journals and the like go with them. They may have arrived here before: a job
-- that is noted as arriving and is not there counts as deleted by people.
WITH arrived AS (DELETE FROM dl_arrivals WHERE job_id = ANY (%(job_ids)s)),
gone AS (DELETE FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND status <> 'running' RETURNING job_id, queue)
INSERT INTO dl_departures (job_id, queue) SELECT job_id, queue FROM gone ON CONFLICT (job_id) DO NOTHING;

-- name: left
-- Source: how many jobs still run, and how many wait or are dead, counted up to `most`.
SELECT (SELECT count(*) FROM dl_jobs WHERE queue = %(queue)s AND status = 'running'),
       (SELECT count(*) FROM (SELECT FROM dl_jobs WHERE queue = %(queue)s AND status = 'queued' LIMIT %(most)s) few),
       (SELECT count(*) FROM (SELECT FROM dl_jobs WHERE queue = %(queue)s AND status IN ('failed', 'lost') LIMIT %(most)s) few);

-- name: resume_own
WITH resumed AS (
  UPDATE dl_queues SET paused_at = NULL, paused_by = NULL WHERE queue = %(queue)s AND paused_by = %(by)s
  RETURNING queue)
SELECT pg_notify('dl_jobs', queue) FROM resumed;

-- name: coming
SELECT queue, paused_by FROM dl_queues WHERE cluster IS NULL AND starts_with(paused_by, %(comes)s) ORDER BY queue;

-- name: stragglers
-- Queues that have moved, and have queued jobs here all the same; or of whose last jobs it is not sure that the other
-- cluster has admitted them. Served by ix_dl_jobs_claim.
SELECT queue, cluster FROM dl_queues q
 WHERE cluster IS NOT NULL
   AND (EXISTS (SELECT FROM dl_jobs j WHERE j.queue = q.queue AND status = 'queued')
        OR EXISTS (SELECT FROM dl_departures d WHERE d.queue = q.queue))
 ORDER BY queue;
