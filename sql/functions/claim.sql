-- queued -> running: one way to claim, for one job and for many. From the top down: the worker's step, then how it takes
-- keys. A function per verb, for READ COMMITTED gives each statement of a PL/pgSQL function a fresh snapshot. `dataloader
-- migrate` applies the files of this folder again whenever one has changed, so farms of two versions share them: a
-- function whose signature or promise changes gets a new name.
--
-- Words. The *key_hash* of a job is hashtext(lock_key): two keys may share one; they then exclude each other and nothing
-- worse follows. A key_hash is *busy* while a running row with a live lease has it, or another session its advisory lock.
-- A queued row is *ready*, or blocked_on says what it waits for (schema.sql). The session that ends a run makes the first row
-- ready that is *parked* behind it.
-- The *head* of a key in an ordered queue is its queued row with the smallest score. Any ready row of the key is a
-- candidate; under the key's lock the claim starts the head instead, or with merge the head and all that follow.
--
-- Spellings. `status = 'queued'` lets the partial indexes serve. `status::text = 'queued'` tests a row that is found
-- already, and lets no index in. `enum_eq(status, 'queued')` lets only ix_dl_jobs_parked and ix_dl_jobs_queued in.


-- Write how runs of this worker have ended (p_job_id to p_facts: as dl_finish; null: none, and the session keeps its
-- keys), and claim up to p_most jobs of the first queue that has some: the best by priority, then turn, at most one
-- of each key; of an ordered queue the heads of up to p_most keys, with merge all jobs of these keys. One round trip.
--
-- p_queues          the queues in the order in which to look at them; p_by_lag: instead by how long their first due rows
--                   have waited, the longest first
-- p_worker          host:pid:boot of the worker, written to claimed_by
-- p_backend_start   start of this session's backend
-- p_backoff_sec     longest back-off of a key that a foreign session holds
-- p_priority, p_from   where a step before said to begin in the first of p_queues, for up to a second; else 0 and -infinity.
--                      By lag it counts only where that queue is the first one
--
-- p_prefer             null: the order of the queue. Else an object, of which each may be missing:
--    warm, elsewhere, lookahead   affinity keys: jobs of the keys in `warm` and jobs without a key go first, among the
--                                 queue's first `lookahead` that are of its best priority; then those of dl_most_wanted, to
--                                 which `elsewhere`, the keys of the worker's siblings, come last; then any
--    overdue                      {priority: instant}: a job whose turn was before goes before those that are warm
--    without                      tasks whose jobs the claim passes over, for the host has no room for them
--                                 One parameter for all: each costs some 2,000 instructions, also for a job alone
--
-- Returns a row for each claimed job in the order in which they run, then one without a job. That last row's `said` is the
-- text of a JSON object of the following, without nulls. Most often `said` is null. One column for all: the server spends
-- some 4,500 instructions on each column, also for a job alone.
-- unfinished, canceled, locked   as dl_finish
-- backoffs                       how many keys were put off
-- look_again                     there is more to look at: where nothing was claimed, call again at once
-- due_in                         nothing claimed: seconds until a queue may have something; else a notification tells
-- from_priority, from_time       where the worker's steps of the next second may begin in the jobs' queue, for this one has
--                                read many rows in vain; else the worker keeps what it has
-- batch                          the most keys in one call of a pipeline; else as the pipeline says
-- passed_over                    by p_prefer: `reached`: some jobs of this `priority` were passed over for their affinity,
--                                those before `since`; `left_out`: see dl_left_out. Where jobs are left out the claim
--                                reads no farther than the queue's first 1,000 jobs, and nothing tells of room: call again
--
-- A worker may sleep after a claim that starts nothing: for each row that such a claim leaves, a notification or a time
-- will come. The claim parks rows of busy keys and full limits, and puts off those of keys that a session holds without a
-- running row;
-- where others have rows locked it asks to be called again. A claim that starts something, but has passed many rows of
-- busy keys, parks these too.
CREATE OR REPLACE FUNCTION dl_step(
  p_queues text[], p_by_lag boolean, p_worker text, p_backend_start timestamptz, p_backoff_sec float8, p_most int,
  p_priority int, p_from timestamptz,
  p_job_id uuid[], p_attempt int[], p_verb text[], p_error text[], p_delay_sec float8[], p_progress text[], p_facts text[],
  p_prefer json)
RETURNS TABLE (
  job_id uuid, queue text, task text, args text, idempotency_key text, lock_key text, partition_key text, attempt int,
  max_attempts int, lease_ttl_sec int, timeout_sec int, claims int, affinity_key text, said text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  written record;
  unfinished uuid[];
  canceled uuid[];
  locked uuid[];
  backoffs int;
  look_again boolean;
  due_in float8;
  from_priority int;
  from_time text;
  batch int;
  passed_over json;
  this_queue text;
  bookmarked text;       -- the queue that p_priority and p_from are of
  freed_at timestamptz;  -- the earliest of some rows of dl_freed
  started int := 0;
BEGIN
  IF p_job_id = '{}' THEN
    PERFORM pg_advisory_unlock_all();
  ELSIF p_job_id IS NOT NULL THEN
    written := dl_finish(p_worker, true, p_job_id, p_attempt, p_verb, p_error, p_delay_sec, p_progress, p_facts);
    IF NOT written IS NULL THEN
      unfinished := written.unfinished;
      canceled := written.canceled;
      locked := written.locked;
    END IF;
  END IF;
  IF p_by_lag AND p_most > 0 THEN
    bookmarked := p_queues[1];
    p_queues := dl_by_lag(p_queues);
    IF p_queues[1] <> bookmarked THEN
      p_priority := 0;
      p_from := '-infinity';
    END IF;
  END IF;
  FOREACH this_queue IN ARRAY CASE WHEN p_most > 0 THEN p_queues ELSE '{}' END LOOP
  DECLARE  -- of this queue
    is_paused boolean;
    is_ordered boolean;
    merges int;          -- dl_lock_heads' p_merge_limit
    dead_hold boolean;   -- a dead job keeps its key
    due_at timestamptz;
    taken record;
    in_order uuid[];     -- what dl_lock_heads has chosen
    heads tid[];         -- their rows
    holders uuid[];
    odd_heads uuid[];
    heads_room jsonb;    -- as taken.room, of an ordered queue
    room jsonb;
    at_once timestamptz;
    parked int;
    is_contended boolean;              -- another claim decides on a limit of rows that this one would take
    moved int;                         -- rows that were set aside or put off
    is_careful boolean := false;       -- dl_take_keys asks whether its keys are free
    has_tried_twice boolean := false;  -- nothing that the claim could park or put off, once already
    not_started int[];
    tier int := 0;                     -- by p_prefer: 0 what is warm, 1 what most want, 2 any
    skipped int := 0;                  -- how many rows behind p_from this call has read in vain
    skipped_keys int[] := '{}';        -- their keys
  BEGIN
    SELECT paused_at IS NOT NULL, coalesce(ordered, false), CASE WHEN merge THEN coalesce(merge_limit, 1000) END,
           on_dead = 'hold', q.batch,
           (SELECT available_at FROM dl_jobs WHERE queue = this_queue AND status = 'queued' AND blocked_on = 'time'
             ORDER BY queue, available_at, priority, created_at LIMIT 1),
           (SELECT min(since) FROM (SELECT since FROM dl_freed LIMIT 100) first)
      INTO is_paused, is_ordered, merges, dead_hold, batch, due_at, freed_at
      FROM (SELECT) one LEFT JOIN dl_queues q ON queue = this_queue;
    IF is_paused THEN
      p_priority := 0;
      p_from := '-infinity';
      CONTINUE;
    END IF;
    IF due_at <= now() THEN
      look_again := dl_wake(this_queue, 100) = 100 OR look_again;
    END IF;
    IF freed_at < clock_timestamp() - interval '1 s' THEN
      PERFORM dl_unpark_freed();
    END IF;

    -- Until something has started: take keys, start their first jobs; else look again with care; make way by setting
    -- aside, parking, putting off; look once more; go on behind the rows looked at; in the end try the queue's head.
    FOR pass IN 0 .. 2147483646 LOOP
      IF pass > tier AND clock_timestamp() > now() + interval '1 s' THEN  -- a round for each tier it has in any case
        look_again := true;
        EXIT;
      END IF;
      taken := dl_take_keys(
        this_queue, is_ordered, p_most, p_priority, p_from, skipped, skipped_keys, is_careful, tier, p_prefer);
      IF taken.mine <> '{}' THEN
        -- Start the first job of each of these keys. Advisory locks do not obey MVCC, so the look at the running rows
        -- comes behind the locks, with a fresh snapshot; the other way round a job that started in between would be missed
        -- (Que, lib/que/worker.rb:72-82). So does the choice of the first rows: a job that came back in between goes
        -- before a later one of its key, and a parked one that is older.
        IF is_ordered THEN
          SELECT f.* INTO in_order, holders, odd_heads, heads_room
            FROM dl_lock_heads(this_queue, taken.lock_keys, dead_hold, merges) f;
          heads := ARRAY(SELECT ctid FROM dl_jobs WHERE job_id = ANY (in_order));
        END IF;
        at_once := clock_timestamp();  -- not now(), when the claim began: the rows may be younger
        RETURN QUERY
        WITH free AS MATERIALIZED (
          SELECT at, row_number() OVER (ORDER BY array_position(in_order, job_id), priority, turn, job_id) AS nth FROM (
            SELECT ctid AS at, job_id, priority, coalesce(turn_at, created_at) AS turn FROM dl_jobs
             WHERE ctid = ANY (CASE WHEN is_ordered THEN heads ELSE ARRAY(
                     SELECT (SELECT ctid FROM dl_jobs
                              WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key')
                                AND hashtext(lock_key) = key_hash AND queue = this_queue
                                AND (limits IS NULL OR job_id = ANY (taken.granted))
                              ORDER BY hashtext(lock_key), queue, priority, coalesce(turn_at, created_at) LIMIT 1)
                       FROM unnest(taken.mine) key_hash
                      WHERE (SELECT true FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = key_hash
                                AND lease_expires_at > now() LIMIT 1) IS NULL) END)
               AND status::text = 'queued'
               AND (is_ordered OR blocked_on IS DISTINCT FROM 'time' AND available_at <= at_once
                                       AND NOT cancel_requested AND attempt < greatest(max_attempts, 1))
               FOR NO KEY UPDATE SKIP LOCKED) locked),
        {start}
        SELECT job_id, queue, task, args::text, idempotency_key, lock_key, partition_key, attempt, max_attempts,
               lease_ttl_sec, timeout_sec, claims, affinity_key, NULL
          FROM started ORDER BY nth;
        GET DIAGNOSTICS started = ROW_COUNT;
        IF started < cardinality(taken.mine) OR is_ordered THEN
          not_started := dl_unlock_others(p_worker, taken.mine, at_once);
          taken.others := taken.others || not_started;
          -- The first row of such a key may be a parked one, which dl_take_keys has not read: is it one that may not start?
          taken.odd := nullif(taken.odd || CASE WHEN is_ordered THEN odd_heads ELSE ARRAY(
            SELECT first.job_id FROM unnest(not_started) k CROSS JOIN LATERAL (
              SELECT * FROM dl_jobs
               WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key') AND hashtext(lock_key) = k
                 AND queue = this_queue
               ORDER BY hashtext(lock_key), queue, priority, coalesce(turn_at, created_at) LIMIT 1) first
             WHERE blocked_on = 'key'
               AND (cancel_requested OR attempt >= greatest(max_attempts, 1) OR available_at > at_once)) END, '{}');
        END IF;
      END IF;
      IF taken.room IS NOT NULL OR heads_room IS NOT NULL THEN
        room := coalesce(heads_room, taken.room);
        is_contended := EXISTS (SELECT FROM jsonb_each_text(room) WHERE value IS NULL);
        parked := dl_settle_limits(this_queue, coalesce(in_order, taken.granted), room, holders, p_priority, p_from,
                                   CASE WHEN is_ordered THEN 0 ELSE skipped + taken.rows END);
        heads_room := NULL;
        CONTINUE WHEN parked > 0 AND started = 0;  -- they are out of the way now
      END IF;
      IF p_prefer IS NOT NULL THEN
        IF started = 0 AND tier < 2 AND p_prefer -> 'warm' IS NOT NULL THEN
          tier := tier + 1;
          CONTINUE;
        END IF;
        passed_over := nullif(json_strip_nulls(json_build_object(
          'left_out', CASE WHEN p_prefer -> 'without' IS NOT NULL
                           THEN dl_left_out(this_queue, p_prefer -> 'without', 1000 + p_most) END,
          'reached', CASE WHEN p_prefer -> 'warm' IS NOT NULL AND tier < 2 AND taken.rows > started
                          THEN json_build_object('priority', taken.priority, 'since', taken.since) END))::text, '{}');
        EXIT WHEN tier < 2 AND started > 0 AND taken.odd IS NULL;
        IF passed_over -> 'left_out' IS NOT NULL AND started = 0 AND taken.odd IS NULL AND taken.others = '{}' THEN
          due_in := least(due_in, 1);
          EXIT;
        END IF;
      END IF;
      IF taken.odd IS NOT NULL THEN
        moved := dl_set_aside(taken.odd);
        CONTINUE WHEN moved > 0 AND started = 0;
      END IF;
      IF is_careful AND started > 0 AND skipped + taken.rows - started > 64 THEN
        from_priority := taken.priority;
        from_time := taken.since;
      END IF;
      EXIT WHEN started > 0 AND taken.rows - started < 2 * p_most + 64;  -- few rows passed: parking them is not worth it
      is_careful := true;
      IF taken.rows = 0 THEN
        EXIT WHEN (p_priority, p_from) = (0, '-infinity');
        p_priority := 0;  -- once more from the head: rows that were locked there may be free
        p_from := '-infinity';
        skipped := 0;
        skipped_keys := '{}';
        CONTINUE;
      END IF;

      parked := dl_park(this_queue, taken.others, holders, p_priority, p_from, skipped + taken.rows);
      EXIT WHEN started > 0;
      CONTINUE WHEN parked > 0;
      moved := dl_put_off(this_queue, taken.others, p_backoff_sec);
      backoffs := nullif(coalesce(backoffs, 0) + coalesce(moved, 0), 0);
      CONTINUE WHEN moved IS NULL OR moved > 0;
      IF NOT has_tried_twice THEN
        has_tried_twice := true;
        CONTINUE;  -- a key may have become free between the try at its lock and the look at why it failed
      END IF;

      -- Others have these rows locked, or the running rows of their keys. No notification follows: the caller comes back.
      skipped := skipped + taken.rows;
      skipped_keys := taken.others;
      EXIT WHEN NOT taken.more AND (p_priority, p_from) = (0, '-infinity');
    END LOOP;

    EXIT WHEN started > 0;
    due_in := least(
      due_in, CASE WHEN skipped > 0 THEN least(1, greatest(0.1, skipped / 1000.0)) END, CASE WHEN is_contended THEN 0.05 END,
      (SELECT extract(epoch FROM least(available_at, now() + interval '1 year') - clock_timestamp()) FROM dl_jobs
        WHERE queue = this_queue AND status = 'queued' AND blocked_on = 'time' AND available_at > now()
        ORDER BY queue, available_at, priority, created_at LIMIT 1),
      CASE WHEN due_at <= now() THEN (  -- others have these rows locked
        SELECT 1 FROM dl_jobs WHERE queue = this_queue AND status = 'queued' AND blocked_on = 'time' AND available_at <= now()
         ORDER BY queue, available_at, priority, created_at LIMIT 1) END);
    p_priority := 0;
    p_from := '-infinity';
    batch := NULL;
  END;
  END LOOP;

  -- Claims that start no job free children (parents.sql): the first ones at once, so that others need not.
  IF freed_at IS NOT NULL AND started = 0 THEN
    PERFORM dl_unpark_freed();
    SELECT least(due_in, 1, extract(epoch FROM min(since) + interval '0.7 s' - clock_timestamp())) INTO due_in FROM dl_freed
     WHERE since > clock_timestamp() - interval '0.7 s';  -- others have the earlier rows locked
  END IF;
  IF NOT (unfinished, canceled, locked, backoffs, look_again, due_in, from_time, batch, passed_over) IS NULL THEN
    said := json_strip_nulls(json_build_object(
      'unfinished', unfinished, 'canceled', canceled, 'locked', locked, 'backoffs', backoffs, 'look_again', look_again,
      'due_in', due_in, 'from_priority', from_priority, 'from_time', from_time, 'batch', batch,
      'passed_over', passed_over))::text;
  END IF;
  RETURN NEXT;
END
$$;


-- These queues by how long their first ready rows have waited, or rows whose time has come and that no claim has woken yet,
-- the longest first; then those whose rows are not due; then those that are paused. Each has its turn, for the row that
-- waits grows older.
CREATE OR REPLACE FUNCTION dl_by_lag(p_queues text[]) RETURNS text[] LANGUAGE sql AS $$
  SELECT array_agg(q ORDER BY paused_at IS NOT NULL, since, nth)
    FROM unnest(p_queues) WITH ORDINALITY AS served (q, nth) LEFT JOIN dl_queues ON queue = q
   CROSS JOIN LATERAL (
      SELECT least(
        (SELECT greatest(created_at, available_at) FROM dl_jobs
          WHERE queue = q AND status = 'queued' AND blocked_on IS NULL
          ORDER BY queue, priority, coalesce(turn_at, created_at) LIMIT 1),
        (SELECT available_at FROM dl_jobs
          WHERE queue = q AND status = 'queued' AND blocked_on = 'time'
          ORDER BY queue, available_at, priority, created_at LIMIT 1)) AS since) first
$$;


-- The affinity key that a worker should make warm, by dl_step's p_prefer: that of most of the ready jobs among the queue's
-- first `lookahead`, as far as they have the priority of the first; first one that is warm in no sibling. Null where no job
-- has another key than those that are warm. One bounded read of ix_dl_jobs_turn.
CREATE OR REPLACE FUNCTION dl_most_wanted(p_queue text, p_prefer json) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN (
    WITH near AS MATERIALIZED (
      SELECT priority, coalesce(turn_at, created_at) AS turn, affinity_key FROM dl_jobs
       WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL
       ORDER BY priority, coalesce(turn_at, created_at) LIMIT (p_prefer ->> 'lookahead')::int)
    SELECT ARRAY[affinity_key] FROM near
     WHERE affinity_key NOT IN (SELECT json_array_elements_text(p_prefer -> 'warm'))
       AND priority = (SELECT min(priority) FROM near)
     GROUP BY affinity_key
     ORDER BY affinity_key IN (SELECT json_array_elements_text(p_prefer -> 'elsewhere')), count(*) DESC, min(turn)
     LIMIT 1);
END
$$;


-- Of the queue's first p_rows ready jobs the first with one of these tasks, for a claim that has passed it over: its `task`,
-- and `since` when it is due. Null without such a job.
CREATE OR REPLACE FUNCTION dl_left_out(p_queue text, p_without json, p_rows int) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
  RETURN (
    SELECT json_build_object('task', task, 'since', greatest(created_at, available_at))
      FROM (SELECT task, priority, coalesce(turn_at, created_at) AS turn, created_at, available_at FROM dl_jobs
             WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL
             ORDER BY priority, coalesce(turn_at, created_at) LIMIT p_rows) near
     WHERE task IN (SELECT json_array_elements_text(p_without)) ORDER BY priority, turn LIMIT 1);
END
$$;


-- Choose what an ordered queue may start of these keys, whose advisory locks this session has. Of each key the head: the
-- queued row with the smallest (score, created_at, job_id), though it wait for its time. A running row of the key keeps it
-- also when its lease is over: until the reaper has settled it, that job comes first.
--
-- p_merge_limit   null: the head alone starts, if it is due. Else the rows are one task: up to so many from the head on,
--                 whether due or not, as far as they have the head's task; none of them while another session has one of
--                 them locked. A key of which rows were tried before is not due before the first of these; else one ready
--                 row makes it due, and there is one.
-- p_holds         a dead row keeps its key
--
-- due        the rows to start, the keys in the order given, those of a key in their order and with the same attempt
-- holders    rows that keep their keys waiting: heads or tried rows before their time, heads without room, dead ones
-- odd        heads that may not start (dl_set_aside)
-- room       what the claim knows of the limits of the heads (dl_ask_limits); null: they have none
CREATE OR REPLACE FUNCTION dl_lock_heads(
  p_queue text, p_lock_keys text[], p_holds boolean, p_merge_limit int,
  OUT due uuid[], OUT holders uuid[], OUT odd uuid[], OUT room jsonb)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  key record;
  delivery uuid[];
BEGIN
  due := '{}'; holders := '{}'; odd := '{}';
  FOR key IN
    SELECT name, head.job_id, head.task, head.limits, dead.job_id AS dead_id,
           CASE WHEN tried.available_at > clock_timestamp() THEN tried.job_id
                WHEN (p_merge_limit IS NULL OR head.blocked_on = 'parent') AND head.available_at > clock_timestamp()
                THEN head.job_id END AS early_id,
           cancel_requested OR attempt >= greatest(max_attempts, 1) AS is_odd
      FROM unnest(p_lock_keys) WITH ORDINALITY AS keys (name, nth)
     CROSS JOIN LATERAL (
       SELECT first.* FROM (VALUES (0), (1)) AS rows (tried) CROSS JOIN LATERAL (
         SELECT * FROM dl_jobs
          WHERE score IS NOT NULL AND status = 'queued' AND queue = p_queue AND lock_key = name AND least(attempt, 1) = rows.tried
          ORDER BY queue, lock_key, status, least(attempt, 1), score, created_at, job_id LIMIT 1) first
        ORDER BY score, created_at, job_id LIMIT 1) head
      LEFT JOIN LATERAL (
        SELECT job_id, available_at FROM dl_jobs
         WHERE p_merge_limit IS NOT NULL AND score IS NOT NULL AND status = 'queued' AND queue = p_queue
           AND lock_key = name AND least(attempt, 1) = 1
         ORDER BY queue, lock_key, status, least(attempt, 1), score, created_at, job_id LIMIT 1) tried ON true
      LEFT JOIN LATERAL (
        SELECT job_id FROM dl_jobs
         WHERE p_holds AND score IS NOT NULL AND status IN ('failed', 'lost') AND queue = p_queue AND lock_key = name
         LIMIT 1) dead ON true
     WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = hashtext(name)
                          AND (lease_expires_at > now() OR queue = p_queue AND lock_key = name))
     ORDER BY nth
  LOOP
    IF key.dead_id IS NOT NULL OR key.early_id IS NOT NULL THEN
      holders := holders || coalesce(key.dead_id, key.early_id);
    ELSIF key.is_odd THEN
      odd := odd || key.job_id;
    ELSE
      IF key.limits IS NOT NULL THEN
        room := dl_ask_limits(key.limits, room);
        IF NOT dl_has_room(key.limits, room) THEN
          holders := holders || key.job_id;
          CONTINUE;
        END IF;
      END IF;
      delivery := CASE WHEN p_merge_limit IS NULL THEN ARRAY[key.job_id]
                       ELSE dl_lock_delivery(p_queue, key.name, key.task, key.limits, p_merge_limit) END;
      CONTINUE WHEN delivery = '{}';
      IF key.limits IS NOT NULL THEN
        room := dl_use_room(key.limits, room);
      END IF;
      due := due || delivery;
      -- One claim carries so many jobs, and those of the last key.
      EXIT WHEN cardinality(due) >= 1000 OR room IS NOT NULL AND dl_has_asked_enough(room);
    END IF;
  END LOOP;
END
$$;


-- Lock the first p_limit rows of a key, in their order, as far as they have this task and these limits: a delivery is one
-- run. Returns no row while another session has one of these locked, or has just changed one: a delivery has all rows of
-- its key, so the claim comes back. The rows that it has locked until its commit make others come back too, and nobody
-- waits. All rows get the attempt of the one that was tried most. Rows that may not start are passed over.
CREATE OR REPLACE FUNCTION dl_lock_delivery(
  p_queue text, p_lock_key text, p_task text, p_limits text[], p_limit int) RETURNS uuid[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  listed uuid[] := ARRAY(
    SELECT job_id FROM (
      SELECT cancel_requested OR attempt >= greatest(max_attempts, 1) AS is_odd, score, created_at, job_id,
             bool_and(task = p_task AND limits IS NOT DISTINCT FROM p_limits AND blocked_on IS DISTINCT FROM 'parent')
               OVER (ORDER BY score, created_at, job_id) AS is_same_task
        FROM (VALUES (0), (1)) AS rows (tried) CROSS JOIN LATERAL (
          SELECT * FROM dl_jobs
           WHERE score IS NOT NULL AND status = 'queued' AND queue = p_queue AND lock_key = p_lock_key
             AND least(attempt, 1) = rows.tried
           ORDER BY queue, lock_key, status, least(attempt, 1), score, created_at, job_id LIMIT p_limit) of_key
       ORDER BY score, created_at, job_id LIMIT p_limit) first
     WHERE is_same_task AND NOT is_odd ORDER BY score, created_at, job_id);
  free uuid[] := ARRAY(SELECT job_id FROM dl_jobs
                         WHERE job_id = ANY (listed) AND status::text = 'queued' AND NOT cancel_requested
                         FOR NO KEY UPDATE SKIP LOCKED);
BEGIN
  IF cardinality(free) < cardinality(listed) THEN
    RETURN '{}';
  END IF;
  IF cardinality(listed) > 1 THEN
    UPDATE dl_jobs SET attempt = most.attempt
      FROM (SELECT max(attempt) AS attempt FROM dl_jobs WHERE job_id = ANY (listed)) most
     WHERE job_id = ANY (listed) AND dl_jobs.attempt < most.attempt;
  END IF;
  RETURN listed;
END
$$;


-- Lock the keys of the queue's first ready rows for this session, in the order of the rows, up to p_most keys. If there
-- are fewer keys, and more rows behind them, the function leaves a sixteenth of the keys to other workers.
--
-- p_ordered            whether a row without a score is odd, and the keys' names are asked for
-- p_priority, p_from   the rows before these are not read
-- p_past               nor are so many rows behind these
-- p_passed             keys that are passed over
-- p_looks              take only keys that have no running row, whose row no other session has locked; a first look need
--                      not ask, for most keys are free
-- p_prefer, p_turn     see dl_step
--
-- mine              the keys whose locks this session has now; they may still prove busy, with p_looks hardly
-- lock_keys         in an ordered queue their names
-- others            the keys that are busy, and p_passed
-- odd               rows that may not start (dl_set_aside)
-- rows              how many rows were read
-- more              there may be more of them
-- priority, since   where the first row of a key taken stands
-- room              what the claim knows of the limits of these rows (dl_ask_limits); null: they have none. In an ordered
--                   queue the limits of the heads count, and are not asked here
-- granted           rows with limits that may start
CREATE OR REPLACE FUNCTION dl_take_keys(
  p_queue text, p_ordered boolean, p_most int, p_priority int, p_from timestamptz, p_past int, p_passed int[], p_looks boolean,
  p_turn int, p_prefer json,
  OUT mine int[], OUT lock_keys text[], OUT others int[], OUT odd uuid[], OUT rows int, OUT more boolean, OUT priority int,
  OUT since timestamptz, OUT room jsonb, OUT granted uuid[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  near record;
  -- Rows since the last new key. The function reads on for 500 / mine of them at most: the more keys it has, the less
  -- another one is worth. It reads on for all where it has none.
  behind int := 0;
  spared int;
  class int;
  overdue timestamptz;
  wanted text[];  -- the affinity keys of the jobs to take, beside those of jobs without one; null: any
  without text[];
  last int;  -- how many rows are looked at for a wanted one
  full_ones text[];  -- the limits of the latest row without room: the next rows mostly have the same
BEGIN
  mine := '{}'; others := p_passed; rows := 0; more := false;
  IF p_prefer IS NOT NULL THEN
    without := ARRAY(SELECT json_array_elements_text(p_prefer -> 'without'));
    last := (p_prefer ->> 'lookahead')::int;
    IF p_prefer -> 'warm' IS NOT NULL AND p_turn < 2 THEN
      wanted := CASE p_turn WHEN 0 THEN ARRAY(SELECT json_array_elements_text(p_prefer -> 'warm'))
                            ELSE dl_most_wanted(p_queue, p_prefer) END;
    END IF;
  END IF;
  FOR near IN
    SELECT job_id, ctid AS at, hashtext(lock_key) AS key_hash, lock_key, priority, coalesce(turn_at, created_at) AS turn,
           cancel_requested OR attempt >= greatest(max_attempts, 1) OR available_at > clock_timestamp()
           OR p_ordered AND score IS NULL AS is_odd, affinity_key, task, limits
      FROM dl_jobs
     WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND (priority, coalesce(turn_at, created_at)) >= (p_priority, p_from)
     ORDER BY priority, coalesce(turn_at, created_at) LIMIT 1000 + p_most OFFSET p_past
  LOOP
    rows := rows + 1;
    IF p_prefer IS NOT NULL THEN
      IF class IS NULL THEN
        class := near.priority;
        overdue := coalesce((p_prefer -> 'overdue' ->> class::text)::timestamptz, '-infinity');
      END IF;
      EXIT WHEN wanted IS NOT NULL AND (near.priority <> class OR rows > last);
      CONTINUE WHEN near.task = ANY (without) OR near.affinity_key <> ALL (wanted) AND near.turn >= overdue;
    END IF;
    behind := behind + 1;
    IF near.is_odd THEN
      odd := odd || near.job_id;
    ELSIF near.key_hash <> ALL (mine) AND near.key_hash <> ALL (others) THEN
      IF near.limits IS NOT NULL AND NOT p_ordered THEN
        CONTINUE WHEN near.limits = full_ones;
        room := dl_ask_limits(near.limits, room);
        more := dl_has_asked_enough(room);
        IF NOT dl_has_room(near.limits, room) THEN
          full_ones := near.limits;
          EXIT WHEN more;
          CONTINUE;
        END IF;
      END IF;
      IF NOT pg_try_advisory_lock(near.key_hash) THEN
        others := others || near.key_hash;
      ELSIF p_looks AND dl_is_taken(near.at, near.key_hash) THEN
        PERFORM pg_advisory_unlock(near.key_hash);
        others := others || near.key_hash;
      ELSE
        IF priority IS NULL THEN
          priority := near.priority;
          since := near.turn;
        END IF;
        mine := mine || near.key_hash;
        IF near.limits IS NOT NULL AND NOT p_ordered THEN
          room := dl_use_room(near.limits, room);
          granted := granted || near.job_id;
        END IF;
        IF p_ordered THEN
          lock_keys := lock_keys || near.lock_key;
        END IF;
        behind := 0;
      END IF;
    END IF;
    more := more OR cardinality(mine) = p_most OR behind * cardinality(mine) > 500;
    EXIT WHEN more;
  END LOOP;
  more := more OR rows = 1000 + p_most;
  -- Fewer keys than this session could do with, and jobs wait behind them. Were all taken, the next worker would find
  -- none, and park rows instead of working. Each claim of eight keys or more leaves some, so the shares even out.
  IF behind > 0 THEN
    spared := (cardinality(mine) + 8) / 16;
    PERFORM pg_advisory_unlock(k) FROM unnest(mine[cardinality(mine) - spared + 1:]) k;
    mine := trim_array(mine, spared);
    lock_keys := trim_array(lock_keys, spared);
  END IF;
END
$$;


-- Has the key_hash, whose lock this session has, a running row, or has another session the row at p_at locked? Unless
-- another has, this session has the row locked now.
CREATE OR REPLACE FUNCTION dl_is_taken(p_at tid, p_key_hash int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM dl_jobs WHERE ctid = p_at FOR NO KEY UPDATE SKIP LOCKED;
  RETURN NOT FOUND OR dl_is_running(p_key_hash);
END
$$;


-- Has the key_hash a running row with a live lease? Served by ix_dl_jobs_running. VOLATILE: each call sees every commit
-- of before.
CREATE OR REPLACE FUNCTION dl_is_running(p_key_hash int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  RETURN EXISTS (SELECT FROM dl_jobs
                  WHERE status = 'running' AND hashtext(lock_key) = p_key_hash AND lease_expires_at > now());
END
$$;
