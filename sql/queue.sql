-- The statements in a job's life, in its order; called by the functions of the same name in dataloader/queue/. Each writes
-- its journal row; one that changes the status counts it in `journaled`, else the trigger would write another. A write to a
-- running job names the claim: no row changed means that the claim is over.

-- name: enqueue
-- none -> queued. No row when the idempotency key exists (`find` then reads the twin), or a limited queue is full.
-- Lists of fields: queue/fields.py. Created by the clock: jobs of one transaction run in the order in which they were added.
WITH added AS (
  INSERT INTO dl_jobs (job_id, created_at, turn_at, blocked_on, journaled, {fields.columns})
  SELECT %(job_id)s, clock_timestamp(),
         (SELECT timestamptz 'infinity' FROM dl_queues WHERE queue = %(queue)s AND fair_by IS NOT NULL), CASE WHEN %(available_at)s::timestamptz > now() THEN 'time' END, 2, {fields.values}
    FROM (VALUES (%(task)s::text)) AS new (task) LEFT JOIN dl_tasks declared USING (task)
   WHERE NOT (%(limited)s AND dl_is_full(%(queue)s))
  ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
  RETURNING job_id, queue),
journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, 'queued', jsonb_strip_nulls(jsonb_build_object(
                                    'producer', %(producer)s::text, 'by', %(by)s::text)) FROM added)
SELECT pg_notify('dl_jobs', queue) FROM added;

-- name: enqueue_one
-- none -> queued, with no more than a producer's rights; see dl_enqueue_one.
SELECT dl_enqueue_one(p_job_id => %(job_id)s, {fields.one}), pg_backend_pid();

-- name: enqueue_many
-- none -> queued for each job of a batch; a row for each that was not added (dl_enqueue_many).
SELECT place, job_id::text, status FROM dl_enqueue_many(
  p_job_id => %(job_id)b::uuid[], {fields.many},
  p_place => %(place)b::int[], p_since => %(since)s::timestamptz);

-- name: set_trace
-- Of those of these jobs that this transaction has added (see dl_set_trace).
SELECT FROM dl_set_trace(%(trace)s::text, %(job_ids)s::uuid[]);

-- name: sign
UPDATE dl_job_events SET payload = coalesce(payload, '{}') || jsonb_build_object('by', %(by)s::text)
 WHERE job_id = ANY (%(job_ids)s) AND kind = 'queued';

-- name: not_added_by
-- Those of these jobs that this asker has not added, from any address. The journal of a job begins with its adder.
SELECT job_id FROM unnest(%(job_ids)s::uuid[]) job_id
 WHERE (SELECT split_part(payload ->> 'by', ' from ', 1) FROM dl_job_events e
         WHERE e.job_id = job_id.job_id AND kind = 'queued' ORDER BY event_id LIMIT 1)
       IS DISTINCT FROM split_part(%(by)s::text, ' from ', 1);

-- name: full
-- `length`: how many jobs are queued, up to 10,000.
SELECT queue, max_length, (
         SELECT count(*) FROM (SELECT FROM dl_jobs j WHERE j.queue = q.queue AND status = 'queued' LIMIT 10000) n) AS length
  FROM dl_queues q WHERE queue = ANY (%(queues)s::text[]) AND dl_is_full(queue) ORDER BY queue LIMIT 1;

-- name: find
SELECT job_id, status::text FROM dl_jobs WHERE idempotency_key = ANY (%(keys)s);

-- name: status
-- Jobs as the API shows them. A queued one says why it waits: one reason of its queue, one of itself and one of the workers,
-- in the order below. The reasons behind the first are `besides`. `version` changes with all that is shown, but for what cannot
-- change and for figures.
SELECT {fields.status},
       dl_last_run_sec(j) AS run_sec,
       CASE WHEN why ->> 'reason' = 'worker' THEN why || jsonb_build_object(
         'ahead', (SELECT count(*) FROM (
                     SELECT FROM dl_jobs o
                      WHERE o.queue = j.queue AND o.status = 'queued' AND o.blocked_on IS NULL
                        AND (o.priority, coalesce(o.turn_at, o.created_at)) < (j.priority, coalesce(j.turn_at, j.created_at)) LIMIT 1000) before))
            ELSE why END AS waiting_for,
       to_hex(hashtextextended(ROW(j.status, j.attempt, j.started_at, j.finished_at, j.heartbeat_at, j.error, j.progress,
         j.queue, j.priority, j.max_attempts, j.timeout_sec, j.score, j.cancel_requested, j.available_at, j.blocked_on,
         why - 'workers')::text, 0)) AS version
  FROM dl_jobs j
  LEFT JOIN LATERAL (
    SELECT whys[1] || CASE WHEN rest IS NULL THEN '{}' ELSE jsonb_build_object('besides', rest) END AS why
      FROM (SELECT array_remove(ARRAY[
      (SELECT jsonb_build_object('reason', 'paused', 'queue', q.queue, 'since', q.paused_at, 'by', q.paused_by)
         FROM dl_queues q WHERE q.queue = j.queue AND q.paused_at IS NOT NULL),
      coalesce(CASE WHEN j.blocked_on = 'time' AND j.backoffs > 0 THEN jsonb_build_object(
             'reason', 'session', 'lock_key', j.lock_key, 'until', dl_readable(j.available_at))
             || coalesce((SELECT jsonb_build_object('pid', a.pid, 'application', a.application_name)
                            FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                           WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND a.datname = current_database()
                             AND l.classid::bigint = (hashtext(j.lock_key)::bigint >> 32) & 4294967295
                             AND l.objid::bigint = hashtext(j.lock_key)::bigint & 4294967295
                             AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) LIMIT 1),
                         jsonb_build_object('pid', NULL, 'application', NULL)) END,
      CASE WHEN j.blocked_on = 'time'
           THEN jsonb_build_object('reason', 'time', 'until', dl_readable(j.available_at)) END,
      CASE WHEN j.blocked_on = 'parent' THEN (
        SELECT jsonb_build_object('reason', 'parent', 'parents', w.parents, 'on_failure', w.on_failure) || coalesce((
                 SELECT jsonb_strip_nulls(jsonb_build_object('job_id', e.parent_id, 'task', p.task, 'lock_key', p.lock_key,
                                                             'since', dl_readable(held.since)))
                   FROM (SELECT * FROM dl_parents WHERE job_id = j.job_id AND NOT is_over ORDER BY place LIMIT 1000) e
                   LEFT JOIN dl_jobs p ON p.job_id = e.parent_id
                  CROSS JOIN LATERAL (
                    SELECT CASE WHEN p.status NOT IN ('queued', 'running') AND dl_after(p.status, w.on_failure) IS NULL
                                THEN p.finished_at END AS since) held
                  ORDER BY held.since, e.place LIMIT 1), '{}')  -- one that holds it up for good goes first
          FROM dl_waiting w WHERE w.job_id = j.job_id) END,
      (SELECT jsonb_build_object('reason', 'lock', 'lock_key', j.lock_key, 'job_id', r.job_id) FROM dl_jobs r
        WHERE r.status = 'running' AND hashtext(r.lock_key) = hashtext(j.lock_key) AND r.lease_expires_at > now() LIMIT 1),
      (SELECT jsonb_build_object('reason', 'dead', 'lock_key', j.lock_key, 'job_id', d.job_id)
         FROM dl_queues q JOIN dl_jobs d ON d.queue = q.queue AND d.lock_key = j.lock_key
                                        AND d.status IN ('failed', 'lost') AND d.score IS NOT NULL
        WHERE q.queue = j.queue AND q.ordered AND q.on_dead = 'hold' LIMIT 1),
      (SELECT jsonb_build_object('reason', 'order', 'lock_key', j.lock_key, 'job_id', before.job_id,
                                 'until', dl_readable(before.available_at))
         FROM dl_queues q CROSS JOIN LATERAL (
           (SELECT o.job_id, o.available_at FROM dl_jobs o
             WHERE q.merge IS NOT TRUE AND o.status = 'queued' AND o.score IS NOT NULL
               AND o.queue = j.queue AND o.lock_key = j.lock_key
               AND (o.score, o.created_at, o.job_id) < (j.score, j.created_at, j.job_id)
             ORDER BY o.queue, o.lock_key, o.score, o.created_at, o.job_id LIMIT 1)
           UNION ALL
           (SELECT t.job_id, t.available_at FROM dl_jobs t
             WHERE q.merge AND t.status = 'queued' AND t.score IS NOT NULL AND least(t.attempt, 1) = 1
               AND t.queue = j.queue AND t.lock_key = j.lock_key AND t.available_at > now()
             LIMIT 1)) before
        WHERE q.queue = j.queue AND q.ordered),
      (SELECT jsonb_strip_nulls(jsonb_build_object('reason', 'limit', 'limit', l.name, 'running', l.running, 'most', l.most,
                                                   'until', dl_readable(l.next_at)))
         FROM unnest(j.limits) WITH ORDINALITY AS its (name, nth) JOIN dl_limit_state(j.limits) l USING (name)
        WHERE l.room = 0 ORDER BY nth LIMIT 1)),
      (SELECT CASE WHEN live.stopped = live.workers AND live.workers > 0
                   THEN jsonb_build_object('reason', 'stopped', 'queue', j.queue, 'workers', live.workers)
                   WHEN live.workers = 0 AND NOT EXISTS (
                         SELECT FROM dl_jobs r WHERE r.status = 'running' AND r.queue = j.queue
                            AND r.lease_expires_at > now())
                   THEN jsonb_build_object('reason', 'no_worker', 'queue', j.queue)
                   WHEN need.mb > live.room_mb AND live.bounded = live.workers
                   THEN jsonb_build_object('reason', 'memory', 'queue', j.queue, 'task', j.task,
                                           'need_mb', need.mb, 'room_mb', live.room_mb)
                   ELSE jsonb_build_object('reason', 'worker', 'queue', j.queue, 'workers', live.workers)
                        || CASE WHEN need.mb > 0 THEN jsonb_build_object('need_mb', need.mb) ELSE '{}' END END
         FROM (SELECT count(*) AS workers, count(*) FILTER (WHERE w.state = 'stopped') AS stopped,
                      count(w.host_memory_mb) AS bounded, max(w.host_memory_mb) AS room_mb FROM dl_served w
                WHERE w.queue = j.queue AND w.state <> 'dead' AND w.seen_at > now() - interval '30 s') live
        CROSS JOIN (SELECT coalesce((SELECT t.memory_mb FROM dl_tasks t WHERE t.task = j.task),
                      (SELECT dl_counted(n.memory_mb, NULL) FROM dl_needs n WHERE n.task = j.task)) AS mb) need)], NULL) AS whys) found
     CROSS JOIN LATERAL (SELECT jsonb_agg(each) AS rest FROM unnest(whys[2:]) each WHERE each ->> 'reason' <> 'worker') behind
     WHERE j.status = 'queued') waits ON true
 WHERE j.job_id = ANY (%(job_ids)s);

-- name: request_cancel
-- queued -> canceled at once; a running job is told by its row and a notification, again when forced. Rows are locked in the
-- order of job_id, so two such statements never wait for each other.
WITH asked AS (
  UPDATE dl_jobs SET cancel_requested = true, cancel_forced = cancel_forced OR %(force)s, journaled = mod(journaled, 1000000) + 1,
         status = CASE status WHEN 'queued' THEN 'canceled' ELSE status END,
         finished_at = CASE status WHEN 'queued' THEN now() END
   WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s)
                              ORDER BY job_id FOR NO KEY UPDATE))
     AND (status = 'queued' OR status = 'running'
         AND (NOT cancel_requested OR %(force)s AND NOT cancel_forced))
  RETURNING job_id, queue, status, attempt),
journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, CASE status WHEN 'canceled' THEN 'canceled' ELSE 'cancel_requested' END,
         jsonb_strip_nulls(jsonb_build_object('attempt', attempt, 'by', %(by)s::text,
                                              'force', CASE WHEN %(force)s THEN true END)) FROM asked)
SELECT pg_notify('dl_cancel', job_id::text) FROM asked WHERE status = 'running';

-- name: step
-- running -> wherever the runs have ended, and queued -> running; see dl_step.
SELECT * FROM dl_step(
  %(queues)s::text[], %(by_lag)s, %(worker)s, %(backend_start)s, %(backoff_sec)s, %(most)s, %(from_priority)s, %(from_time)s::timestamptz,
  %(job_ids)s::uuid[], %(attempts)s::int[], %(verbs)s::text[], %(errors)s::text[], %(delays_sec)s::float8[],
  %(progress)s::text[], %(facts)s::text[], %(prefer)s::json);

-- name: step_plain
-- The same of a plain queue, for runs that have all succeeded; see dl_step_plain.
SELECT * FROM dl_step_plain(
  %(queue)s, %(worker)s, %(backend_start)s, %(most)s, %(job_ids)s::uuid[], %(attempts)s::int[], %(progress)s::text[],
  %(facts)s::text[]);

-- name: traces
-- Where the triggers of these jobs stand in traces; asked only by workers that trace.
SELECT job_id, trace FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND trace IS NOT NULL;

-- name: waits
-- For how many seconds these jobs have been due; a job of a long transaction may be due before it was created.
SELECT job_id, greatest(0, extract(epoch FROM clock_timestamp() - greatest(available_at, created_at)))::float8
  FROM dl_jobs WHERE job_id = ANY (%(job_ids)s);

-- name: beat
-- running -> running: leases are renewed; progress and the regular journal row are of the first job. Heap-only: changes no
-- indexed column. Rows are locked in the order of `request_cancel`, each after the filter has bounded the wait for it.
WITH renewed AS (
  UPDATE dl_jobs j SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec),
         progress = CASE WHEN j.job_id = (%(job_ids)s::uuid[])[1] THEN coalesce(%(progress)s::jsonb, progress) ELSE progress END
    FROM unnest(%(job_ids)s::uuid[], %(attempts)s::int[]) AS run (job_id, attempt)
   WHERE j.job_id = ANY (ARRAY(
           SELECT job_id FROM dl_jobs
            WHERE job_id = ANY (%(job_ids)s) AND set_config('lock_timeout', %(lock_ms)s, true) IS NOT NULL
            ORDER BY job_id FOR NO KEY UPDATE))
     AND j.job_id = run.job_id AND j.attempt = run.attempt AND claimed_by = %(claimed_by)s AND status::text = 'running'
  RETURNING j.job_id, queue, j.attempt, progress, cancel_requested),
journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, 'heartbeat', jsonb_build_object('attempt', attempt, 'progress', progress)
    FROM renewed WHERE %(journal)s AND job_id = (%(job_ids)s::uuid[])[1])
SELECT count(*), coalesce(bool_or(cancel_requested), false) FROM renewed;

-- name: leap
-- running -> running: a number for this claim above a fence in its target. No row: the claim is over.
UPDATE dl_jobs SET claims = greatest(claims, %(fence)s) + 1
 WHERE job_id = %(job_id)s AND attempt = %(attempt)s AND claimed_by = %(claimed_by)s AND status = 'running'
RETURNING claims;

-- name: finish
-- running -> wherever the runs have ended; see dl_finish.
SELECT * FROM dl_finish(
  %(worker)s, %(let_go)s, %(job_ids)s::uuid[], %(attempts)s::int[], %(verbs)s::text[], %(errors)s::text[],
  %(delays_sec)s::float8[], %(progress)s::text[], %(facts)s::text[]);

-- name: keep_results
-- The results of runs, before their ends, only of claims that hold; a stopped run that comes later replaces nothing.
INSERT INTO dl_results (job_id, claim, result)
SELECT job_id, claims, %(result)s::jsonb FROM dl_jobs
 WHERE job_id = %(job_id)s AND attempt = %(attempt)s AND claimed_by = %(claimed_by)s AND status = 'running'
ON CONFLICT (job_id) DO UPDATE SET claim = excluded.claim, result = excluded.result
 WHERE dl_results.claim < excluded.claim;

-- name: checkpoints
-- Where these jobs go on; a null checkpoint: at the start, whatever the target has of claims below target_claim.
SELECT job_id, checkpoint::text, target_claim, target_number, spares_attempt FROM dl_checkpoints
 WHERE job_id = ANY (%(job_ids)s);

-- name: keep_checkpoint
-- running -> running: how far a run has come, of a claim that holds. A stopped run that comes later replaces nothing; a
-- repetition changes nothing. The rest that a cancellation would leave behind is listed (queue/cleanups.py).
WITH kept AS (
  INSERT INTO dl_checkpoints AS c (job_id, claim, checkpoint, target_claim, target_number, spares_attempt)
  SELECT job_id, claims, %(text)s::jsonb, %(token)s, %(number)s, %(spares_attempt)s FROM dl_jobs
   WHERE job_id = %(job_id)s AND attempt = %(attempt)s AND claimed_by = %(claimed_by)s AND status = 'running'
  ON CONFLICT (job_id) DO UPDATE SET
         claim = CASE WHEN c.checkpoint IS DISTINCT FROM excluded.checkpoint THEN excluded.claim ELSE c.claim END,
         checkpoint = excluded.checkpoint, target_claim = excluded.target_claim, target_number = excluded.target_number,
         spares_attempt = excluded.spares_attempt, saved_at = now()
   WHERE c.claim <= excluded.claim
     AND (c.checkpoint, c.target_claim, c.target_number)
         IS DISTINCT FROM (excluded.checkpoint, excluded.target_claim, excluded.target_number)
  RETURNING job_id, checkpoint)
INSERT INTO dl_cleanups SELECT job_id FROM kept WHERE checkpoint ? 'on_cancel' ON CONFLICT DO NOTHING;

-- name: spend_checkpoints
-- Of jobs that have succeeded: a further run begins at the start, and what the target has of their claims counts no more.
UPDATE dl_checkpoints c SET checkpoint = NULL, target_claim = j.claims + 1, target_number = 0
  FROM dl_jobs j WHERE c.job_id = ANY (%(job_ids)s) AND j.job_id = c.job_id AND j.status = 'succeeded'
   AND (c.checkpoint ? 'canceled') IS NOT TRUE;  -- a cleanup stays one: queue/cleanups.py

-- name: ended
-- Has this claim's end been committed, though its answer was lost? The worker's last row in the job's journal tells.
SELECT kind <> 'picked' FROM dl_job_events
 WHERE job_id = %(job_id)s AND kind IN ('picked', 'done', 'requeue', 'failed', 'canceled')
   AND payload ->> 'worker' = %(claimed_by)s ORDER BY event_id DESC LIMIT 1;

-- name: keep
-- running -> running: the keeper renews the leases of a silent worker, not once a lease is over: another job may have the
-- key. It waits for no locked row, because the other workers need it meanwhile.
UPDATE dl_jobs j SET lease_expires_at = now() + make_interval(secs => lease_ttl_sec),
       heartbeat_at = coalesce(heartbeat_at, now())
  FROM unnest(%(job_ids)s::uuid[], %(attempts)s::int[]) AS run (job_id, attempt)
 WHERE j.job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) FOR NO KEY UPDATE SKIP LOCKED))
   AND j.job_id = run.job_id AND j.attempt = run.attempt AND claimed_by = %(claimed_by)s AND status::text = 'running'
   AND lease_expires_at > now();

-- name: tell_stuck
-- running -> running: the run has reported nothing for so long. Only the journal gets a row, with the threads' stacks. It
-- gets one for each silence: a new keeper does not know the rows that the keeper before it has added.
INSERT INTO dl_job_events (job_id, queue, kind, payload)
SELECT job_id, queue, 'stuck', jsonb_build_object('attempt', attempt, 'silent_sec', %(silent_sec)s::float8,
                                                  'stacks', %(stacks)s::text)
  FROM dl_jobs
 WHERE job_id = %(job_id)s AND attempt = %(attempt)s AND claimed_by = %(claimed_by)s AND status = 'running'
   AND NOT EXISTS (SELECT FROM dl_job_events WHERE job_id = %(job_id)s AND kind = 'stuck'
                      AND ts > now() - %(silent_sec)s::float8 * interval '1 s');

-- name: cancellations
-- Those of these running jobs that should stop, and whether at once: the keeper enforces it.
SELECT job_id, cancel_forced FROM dl_jobs WHERE job_id = ANY (%(job_ids)s) AND status = 'running' AND cancel_requested;

-- name: take_back
-- running -> queued: jobs that a living worker has claimed ahead of its run and cannot hand back.
WITH waiting AS MATERIALIZED (
  SELECT job_id FROM dl_jobs
   WHERE job_id = ANY (%(job_ids)s) AND status::text = 'running' AND claimed_by = %(worker)s AND heartbeat_at IS NULL
     FOR NO KEY UPDATE SKIP LOCKED)
SELECT dl_give_back(job_id, 'drain', %(reason)s, '{}') FROM waiting;

-- name: still_held
SELECT j.job_id FROM dl_jobs j
  JOIN unnest(%(job_ids)s::uuid[], %(attempts)s::int[]) AS claim (job_id, attempt) USING (job_id, attempt)
 WHERE claimed_by = %(worker)s AND status::text = 'running';

-- name: hand_back
-- running -> queued: what a living worker has claimed and does not know, or has not begun. A standby may have lost its end.
WITH unknown AS MATERIALIZED (
  SELECT job_id FROM dl_jobs j
   WHERE status = 'running' AND claimed_by = %(worker)s
     AND NOT EXISTS (SELECT FROM unnest(%(job_ids)s::uuid[], %(attempts)s::int[]) AS held (job_id, attempt)
                      WHERE held.job_id = j.job_id AND held.attempt = j.attempt)
     FOR NO KEY UPDATE SKIP LOCKED)
SELECT job_id, dl_give_back(job_id, 'drain', %(reason)s, jsonb_build_object('worker', %(worker)s::text))::text FROM unknown;

-- name: holders
-- The workers of this host that hold jobs. A worker's name begins with its host's.
SELECT DISTINCT claimed_by FROM dl_jobs WHERE status = 'running' AND starts_with(claimed_by, %(host)s || ':');

-- name: settle_gone
-- running -> queued, lost, failed or canceled: the jobs of a worker that is gone. It began those with a heartbeat in their
-- delivery. A job without one, which may end each host so, is handed back once for each attempt.
SELECT job_id, status::text FROM dl_settle(%(worker)s, ARRAY(
  SELECT j.job_id FROM dl_jobs j
   WHERE j.status = 'running' AND j.claimed_by = %(worker)s
     AND (EXISTS (SELECT FROM dl_jobs run WHERE run.status = 'running' AND hashtext(run.lock_key) = hashtext(j.lock_key)
                     AND run.lock_key = j.lock_key AND run.claimed_by = j.claimed_by AND run.heartbeat_at IS NOT NULL)
          OR j.attempt <= (SELECT count(*) FROM dl_job_events e
                            WHERE e.job_id = j.job_id AND kind = 'requeue'
                              AND payload ->> 'reason' = 'not started: ' || %(reason)s))),
  'crash', %(reason)s, '{}');

-- name: clock
SELECT extract(epoch FROM clock_timestamp())::float8,
       extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8;

-- name: prune
-- finished -> gone, with their journal (dl_prune). The times are text, for Python does not know all of them.
SELECT pruned, reached::text FROM dl_prune(%(older_than_sec)s, %(since)s::timestamptz, %(limit)s);
