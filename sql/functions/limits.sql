-- Limits for the whole fleet: how many jobs of a limit may run at once, and start in a minute.
--
-- A claim asks once for each limit (dl_ask_limits) and decides alone, under the limit's advisory lock; the count of running
-- rows comes behind the lock with a fresh snapshot. A row whose lease is over counts until it is recovered; rows of one key
-- and claim are one run. A row without room is parked, with its limit in blocked_on. Each function that may make room calls dl_let_in;
-- the reaper does for all limits.

-- These limits now; a name without a bound has nulls, and room for 100.
--
-- most, running   how many jobs may run at once (null: any number), and how many do
-- tokens          how many may start now by the rate; null: there is none. The bucket holds half a token more than its
--                 burst: a start that comes late makes the next one no later, and no two come at once for that
-- next_at         when there is a whole token again; null: there is one, or no rate
-- room            how many may start now, at most 100
CREATE OR REPLACE FUNCTION dl_limit_state(p_names text[])
RETURNS TABLE (name text, most int, running int, tokens float8, next_at timestamptz, room int) LANGUAGE sql STABLE AS $$
  SELECT asked.name, l.most, used.running, bucket.tokens,
         CASE WHEN bucket.tokens < 0.999 THEN bucket.since + make_interval(secs => 60 / l.per_minute) END,
         greatest(0, least(100, l.most - used.running, floor(least(bucket.tokens, 1000) + 0.001)))::int
    FROM unnest(p_names) AS asked (name) LEFT JOIN {schema}.dl_limits l USING (name)
   CROSS JOIN LATERAL (SELECT clock_timestamp() AS at) clock
   CROSS JOIN LATERAL (
     SELECT count(DISTINCT (lock_key, claimed_by))::int AS running FROM {schema}.dl_jobs
      WHERE status = 'running' AND limits IS NOT NULL AND asked.name = ANY (limits)) used
   CROSS JOIN LATERAL (
     SELECT greatest(l.empty_at, clock.at - make_interval(secs => (l.burst + 0.5) * 60 / l.per_minute)) AS since) filled
   CROSS JOIN LATERAL (
     SELECT since, CASE WHEN l.per_minute IS NOT NULL
                        THEN extract(epoch FROM clock.at - since) * l.per_minute / 60 END::float8 AS tokens) bucket
$$;

-- p_room with these limits added: how many jobs of each the claim may start; null: another session decides on it. A claim
-- takes one job of a limit on running jobs: further ones would keep places in which nothing runs.
CREATE OR REPLACE FUNCTION dl_ask_limits(p_limits text[], p_room jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  bounds dl_limits;
  its_room int;
  asked text;
BEGIN
  p_room := coalesce(p_room, '{}');
  FOREACH asked IN ARRAY p_limits LOOP
    CONTINUE WHEN p_room ? asked;
    SELECT * INTO bounds FROM dl_limits WHERE name = asked;
    CONTINUE WHEN NOT FOUND;
    IF NOT pg_try_advisory_xact_lock(hashtext('dl_limits'), hashtext(asked)) THEN
      its_room := NULL;
    ELSE
      SELECT least(room, CASE WHEN most IS NOT NULL THEN 1 END) INTO its_room FROM dl_limit_state(ARRAY[asked]);
      IF bounds.per_minute IS NOT NULL AND its_room > 0 THEN  -- its tokens are ours to take until the commit
        PERFORM FROM dl_limits WHERE name = asked FOR NO KEY UPDATE SKIP LOCKED;
        its_room := CASE WHEN FOUND THEN its_room END;
      END IF;
    END IF;
    p_room := p_room || jsonb_build_object(asked, its_room);
  END LOOP;
  RETURN p_room;
END
$$;

-- Whether the claim has asked for as many limits as one may: their locks are held until the commit.
CREATE OR REPLACE FUNCTION dl_has_asked_enough(p_room jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
  SELECT count(*) > 100 FROM jsonb_object_keys(p_room)
$$;

-- Whether p_room has room for one more job of these limits. A name that is not in p_room has no bound.
CREATE OR REPLACE FUNCTION dl_has_room(p_limits text[], p_room jsonb) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce(bool_and(coalesce((p_room ->> name)::int, 0) > 0), true) FROM unnest(p_limits) name WHERE p_room ? name
$$;

-- p_room after the claim has taken one job of these limits.
CREATE OR REPLACE FUNCTION dl_use_room(p_limits text[], p_room jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
  SELECT p_room || coalesce(jsonb_object_agg(name, (p_room ->> name)::int - 1), '{}') FROM unnest(p_limits) name
   WHERE p_room ? name
$$;

-- The last step of a claim for the limits that it has asked, whose rows it has locked: it takes a token for each started
-- row of p_granted, parks rows without room among the queue's first p_rows and p_heads, and makes rows ready for the room
-- that is left. Returns the number of parked rows. It parks only where the limit stays full until the commit, by holding the
-- running rows FOR SHARE, as far as nobody else has them locked.
CREATE OR REPLACE FUNCTION dl_settle_limits(
  p_queue text, p_granted uuid[], p_room jsonb, p_heads uuid[], p_priority int, p_from timestamptz, p_rows int) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
  asked text[] := ARRAY(SELECT key FROM jsonb_each_text(p_room) WHERE value IS NOT NULL);
  full_ones text[];
  parked int := 0;
BEGIN
  UPDATE dl_limits l
     SET empty_at = greatest(l.empty_at, clock_timestamp() - make_interval(secs => (l.burst + 0.5) * 60 / l.per_minute))
                    + make_interval(secs => begun.runs * 60 / l.per_minute)
    FROM (SELECT name, count(DISTINCT (lock_key, claimed_by)) AS runs FROM dl_jobs CROSS JOIN unnest(limits) name
           WHERE job_id = ANY (p_granted) AND status::text = 'running' AND claimed_pid = pg_backend_pid()
           GROUP BY name) begun
   WHERE l.name = begun.name AND l.per_minute IS NOT NULL;
  full_ones := ARRAY(
    SELECT name FROM dl_limit_state(asked)
     WHERE room = 0 AND (next_at IS NOT NULL OR most <= (
       SELECT count(DISTINCT (lock_key, claimed_by)) FROM (
         SELECT lock_key, claimed_by FROM dl_jobs
          WHERE status = 'running' AND limits IS NOT NULL AND name = ANY (limits) FOR SHARE SKIP LOCKED) held)));
  IF full_ones <> '{}' THEN
    UPDATE dl_jobs SET blocked_on = 'limit:' || (
             SELECT name FROM unnest(limits) WITH ORDINALITY AS its (name, nth) WHERE name = ANY (full_ones)
              ORDER BY nth LIMIT 1)
     WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM dl_jobs
        WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM dl_jobs
                 WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL
                   AND (priority, coalesce(turn_at, created_at)) >= (p_priority, p_from)
                 ORDER BY priority, coalesce(turn_at, created_at) LIMIT p_rows)
                || ARRAY(SELECT ctid FROM dl_jobs WHERE job_id = ANY (p_heads)))
          AND status::text = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key') AND limits && full_ones
          FOR NO KEY UPDATE SKIP LOCKED));
    GET DIAGNOSTICS parked = ROW_COUNT;
  END IF;
  PERFORM dl_let_in(asked);
  RETURN parked;
END
$$;

-- In every queue with parked rows of these limits make as many rows ready as there is room for, and notify; where only a
-- token is missing, give the first row its time. Idempotent.
CREATE OR REPLACE FUNCTION dl_let_in(p_names text[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
  of_limit record;  -- and of a queue
  free int;
  first tid[];  -- a variable: the scan would call the function for each row
BEGIN
  -- A transaction with one snapshot sees neither the rows that were parked since, nor who runs now. The reaper does.
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RETURN;
  END IF;
  FOR of_limit IN
    WITH RECURSIVE parked (name, queue) AS (
      SELECT DISTINCT name, (SELECT queue FROM {schema}.dl_jobs
                              WHERE status = 'queued' AND limits IS NOT NULL AND blocked_on = 'limit:' || name
                              ORDER BY status, blocked_on, queue LIMIT 1)
        FROM unnest(p_names) name
      UNION ALL
      SELECT name, (SELECT queue FROM {schema}.dl_jobs
                     WHERE status = 'queued' AND limits IS NOT NULL AND blocked_on = 'limit:' || name AND queue > parked.queue
                     ORDER BY status, blocked_on, queue LIMIT 1)
        FROM parked WHERE queue IS NOT NULL)
    SELECT s.*, queue
      FROM {schema}.dl_limit_state(ARRAY(SELECT DISTINCT name FROM parked WHERE queue IS NOT NULL)) s JOIN parked USING (name)
     WHERE queue IS NOT NULL AND (most IS NULL OR running < most)
  LOOP
    first := NULL;
    IF of_limit.room > 0 THEN
      -- Of the queue's first 100 ready rows with limits as many should have this one as there is room for.
      free := of_limit.room - (
        SELECT count(*) FROM (
          SELECT limits FROM {schema}.dl_jobs
           WHERE status = 'queued' AND limits IS NOT NULL AND blocked_on IS NULL AND queue = of_limit.queue
           ORDER BY status, blocked_on, queue, priority, coalesce(turn_at, created_at) LIMIT 100) near
         WHERE of_limit.name = ANY (limits));
      IF free > 0 THEN
        first := {schema}.dl_next_of_limit(of_limit.name, of_limit.queue, free);
      END IF;
      UPDATE {schema}.dl_jobs SET blocked_on = NULL WHERE ctid = ANY (first);
    ELSE
      IF NOT EXISTS (  -- one that is due by then takes the token
        SELECT FROM (SELECT limits FROM {schema}.dl_jobs
                      WHERE queue = of_limit.queue AND status = 'queued' AND blocked_on = 'time'
                        AND available_at <= of_limit.next_at
                      ORDER BY queue, available_at, priority, created_at LIMIT 100) near WHERE of_limit.name = ANY (limits)) THEN
        first := {schema}.dl_next_of_limit(of_limit.name, of_limit.queue, 1);
      END IF;
      UPDATE {schema}.dl_jobs SET blocked_on = 'time', available_at = of_limit.next_at, backoffs = 0
       WHERE ctid = ANY (first);
    END IF;
    IF FOUND THEN
      PERFORM pg_notify('dl_jobs', of_limit.queue);
    END IF;
  END LOOP;
END
$$;

-- The first p_limit rows of a queue that are parked at a limit, unless another limit of theirs is full. Looks at 100 rows.
CREATE OR REPLACE FUNCTION dl_next_of_limit(p_name text, p_queue text, p_limit int) RETURNS tid[] LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET enable_bitmapscan = off SET enable_sort = off AS $$
BEGIN
  RETURN ARRAY(
    WITH near AS MATERIALIZED (
      SELECT ctid AS at, limits FROM {schema}.dl_jobs
       WHERE status = 'queued' AND limits IS NOT NULL AND blocked_on = 'limit:' || p_name AND queue = p_queue
       ORDER BY status, blocked_on, queue, priority, coalesce(turn_at, created_at) LIMIT 100),
    full_ones AS MATERIALIZED (
      SELECT name FROM {schema}.dl_limit_state(ARRAY(
        SELECT DISTINCT other FROM near CROSS JOIN unnest(limits) other WHERE other <> p_name)) WHERE room = 0)
    SELECT ctid FROM {schema}.dl_jobs
     WHERE ctid = ANY (ARRAY(SELECT at FROM near WHERE NOT EXISTS (SELECT FROM full_ones WHERE name = ANY (limits))))
       AND status::text = 'queued' AND blocked_on = 'limit:' || p_name
     ORDER BY priority, coalesce(turn_at, created_at) LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED);
END
$$;

-- dl_let_in for all limits with parked rows: the reaper, for steps that nothing else saw.
CREATE OR REPLACE FUNCTION dl_let_in_all() RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
  reason text := '';
  names text[] := '{}';
BEGIN
  LOOP
    SELECT blocked_on INTO reason FROM dl_jobs WHERE status = 'queued' AND limits IS NOT NULL AND blocked_on > reason
     ORDER BY status, blocked_on LIMIT 1;
    EXIT WHEN NOT FOUND;
    IF left(reason, 6) = 'limit:' THEN
      names := names || substr(reason, 7);
    END IF;
  END LOOP;
  PERFORM dl_let_in(names);  -- one look at the running rows for all limits
END
$$;
