-- ready <-> blocked_on: the reasons for which a queued row waits, and its way back to ready. Words and spellings:
-- claim.sql. In an ordered queue a row is also parked ('key') behind one before it that waits or is dead. The row of a key
-- that was put off waits for 'time'.

-- Park the ready rows of busy keys among the queue's first p_rows, and p_holders of an ordered queue; returns their number.
-- It holds each running row FOR SHARE: a later end waits for this commit, and then finds the parked rows. Waits for no lock,
-- so it cannot deadlock.
CREATE OR REPLACE FUNCTION dl_park(
  p_queue text, p_key_hashes int[], p_holders uuid[], p_priority int, p_from timestamptz, p_rows int) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
  busy int[] := ARRAY(
    SELECT hashtext(lock_key) FROM dl_jobs
     WHERE status = 'running' AND hashtext(lock_key) = ANY (p_key_hashes) AND lease_expires_at > now()
       FOR SHARE SKIP LOCKED);
  held text[] := ARRAY(
    SELECT lock_key FROM dl_jobs
     WHERE job_id = ANY (p_holders)
       AND (status::text = 'queued' AND (available_at > clock_timestamp() OR left(blocked_on, 6) = 'limit:')
            OR status::text IN ('failed', 'lost'))
       FOR SHARE SKIP LOCKED);
  parked int := 0;
  of_limits text[];
BEGIN
  IF busy <> '{}' OR held <> '{}' THEN
    WITH behind AS (
      UPDATE dl_jobs SET blocked_on = 'key' WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM dl_jobs
         WHERE ctid = ANY (ARRAY(
                 SELECT at FROM (
                   SELECT ctid AS at, lock_key FROM dl_jobs
                    WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL
                      AND (priority, coalesce(turn_at, created_at)) >= (p_priority, p_from)
                    ORDER BY priority, coalesce(turn_at, created_at) LIMIT p_rows) near
                  WHERE hashtext(lock_key) = ANY (busy) OR lock_key = ANY (held)))
           AND status::text = 'queued' AND blocked_on IS NULL
           FOR NO KEY UPDATE SKIP LOCKED))
      RETURNING limits)
    SELECT count(*), ARRAY(SELECT DISTINCT name FROM behind CROSS JOIN unnest(limits) name) INTO parked, of_limits
      FROM behind;
    IF of_limits <> '{}' THEN  -- the parked rows leave their room to other rows
      PERFORM dl_let_in(of_limits);
    END IF;
  END IF;
  RETURN parked;
END
$$;

-- These key hashes may be free: make the first row of each ready in every queue, in an ordered queue of each key, and
-- notify. Called by whoever ends a run or takes a ready row away. A key whose first row is locked goes to dl_freed.
CREATE OR REPLACE FUNCTION dl_unpark(p_key_hashes int[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
  parked record;
  first tid;
BEGIN
  -- A transaction with one snapshot may not see the rows that claims have parked behind its run since. So a later claim
  -- looks.
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    INSERT INTO {schema}.dl_freed (key_hash) SELECT DISTINCT unnest(p_key_hashes);
    PERFORM pg_notify('dl_jobs', queue)
       FROM (SELECT queue FROM {schema}.dl_workers UNION SELECT queue FROM {schema}.dl_totals) served WHERE octet_length(queue) < 8000;
    RETURN;
  END IF;
  FOR parked IN
    WITH RECURSIVE place (key_hash, queue, lock_key) AS (
      SELECT free.key_hash, first.queue, first.lock_key FROM (SELECT DISTINCT unnest(p_key_hashes)) AS free (key_hash)
       CROSS JOIN LATERAL (
        SELECT queue, lock_key FROM {schema}.dl_jobs
         WHERE enum_eq(status, 'queued') AND blocked_on = 'key' AND hashtext(lock_key) = free.key_hash
         ORDER BY queue, lock_key LIMIT 1) first
      UNION
      SELECT place.key_hash, next.queue, next.lock_key FROM place CROSS JOIN LATERAL (
        SELECT queue, lock_key FROM {schema}.dl_jobs
         WHERE enum_eq(status, 'queued') AND blocked_on = 'key' AND hashtext(lock_key) = place.key_hash
           AND (queue, lock_key) > (place.queue, place.lock_key)
         ORDER BY queue, lock_key LIMIT 1) next)
    SELECT key_hash, queue, lock_key FROM place
  LOOP
    SELECT got.ctid INTO first FROM (
      SELECT ctid AS at FROM {schema}.dl_jobs
       WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key')
         AND hashtext(lock_key) = parked.key_hash AND queue = parked.queue AND (score IS NULL OR lock_key = parked.lock_key)
       ORDER BY hashtext(lock_key), queue, priority, coalesce(turn_at, created_at) LIMIT 1) near
      CROSS JOIN LATERAL (
        SELECT ctid FROM {schema}.dl_jobs
         WHERE ctid = near.at AND status::text = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key')
           FOR NO KEY UPDATE SKIP LOCKED) got;
    IF FOUND THEN
      UPDATE {schema}.dl_jobs SET blocked_on = NULL WHERE ctid = first AND blocked_on = 'key';
    -- A row of dl_freed that we lock stays until our commit, and stands for us. One that is locked may be about to go.
    ELSIF NOT EXISTS (SELECT FROM {schema}.dl_freed WHERE key_hash = parked.key_hash FOR SHARE SKIP LOCKED) THEN
      INSERT INTO {schema}.dl_freed (key_hash) VALUES (parked.key_hash);
    END IF;
    PERFORM pg_notify('dl_jobs', parked.queue);
  END LOOP;
END
$$;

-- Try the keys and parents of dl_freed again that have waited for 0.7 s. Their rows stay locked until the commit, so a later
-- end adds a row of its own.
CREATE OR REPLACE FUNCTION dl_unpark_freed() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  freed int[];
  parents uuid[];
BEGIN
  WITH again AS (
    DELETE FROM dl_freed WHERE ctid = ANY (ARRAY(
      SELECT ctid FROM dl_freed WHERE since < clock_timestamp() - interval '0.7 s' LIMIT 100 FOR UPDATE SKIP LOCKED))
    RETURNING key_hash, parent_id)
  SELECT array_agg(DISTINCT key_hash) FILTER (WHERE key_hash IS NOT NULL),
         array_agg(DISTINCT parent_id) FILTER (WHERE parent_id IS NOT NULL) INTO freed, parents FROM again;
  PERFORM dl_unpark(freed);
  IF parents IS NOT NULL THEN
    PERFORM dl_resolve(parents);
  END IF;
END
$$;

-- Make the first row of each parked key ready that no running row has: what no trigger saw. Reads up to p_limit keys after
-- p_after; returns the last one, null at the end. Served by ix_dl_jobs_parked_keys.
CREATE OR REPLACE FUNCTION dl_unpark_stranded(p_after bigint, p_limit int) RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
  reached int;
BEGIN
  FOR i IN 1 .. p_limit LOOP
    SELECT hashtext(lock_key) INTO reached FROM dl_jobs
     WHERE enum_eq(status, 'queued') AND blocked_on = 'key' AND hashtext(lock_key) > p_after
     ORDER BY hashtext(lock_key), queue LIMIT 1;
    EXIT WHEN NOT FOUND;
    p_after := reached;
    IF NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = reached) THEN
      PERFORM dl_unpark(ARRAY[reached]);
    END IF;
  END LOOP;
  RETURN reached;
END
$$;

-- Put off up to 1,000 rows of keys that another session holds without a running row: 0.1 s from the transaction's begin,
-- doubled with each refusal, up to p_most_sec. It looks again after 1, 5, 25 ms, for a claim may be about to commit. Returns
-- the number of keys; null when one has become free meanwhile: look at the queue again.
CREATE OR REPLACE FUNCTION dl_put_off(p_queue text, p_key_hashes int[], p_most_sec float8) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
  refused int[] := '{}';
  before int;
  keys int;
  pause float8;
BEGIN
  FOREACH pause IN ARRAY ARRAY[0, 0.001, 0.005, 0.025] LOOP
    PERFORM pg_sleep(pause);
    before := cardinality(refused);
    -- A lock that this look gets, it lets go at once.
    refused := ARRAY(SELECT k FROM unnest(CASE pause WHEN 0 THEN p_key_hashes ELSE refused END) k
                      WHERE NOT (SELECT CASE WHEN pg_try_advisory_lock(k) THEN pg_advisory_unlock(k) ELSE false END)
                        AND NOT dl_is_running(k));
    IF pause > 0 AND cardinality(refused) < before THEN
      RETURN NULL;
    END IF;
    EXIT WHEN refused = '{}';
  END LOOP;
  WITH unlocked AS MATERIALIZED (
    SELECT ctid AS at, hashtext(lock_key) AS key_hash, backoffs FROM dl_jobs WHERE ctid = ANY (ARRAY(
      SELECT its_row.at FROM unnest(refused) k CROSS JOIN LATERAL (
        SELECT ctid AS at FROM dl_jobs
         WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key') AND hashtext(lock_key) = k
           AND queue = p_queue
         ORDER BY hashtext(lock_key), queue, priority, coalesce(turn_at, created_at) LIMIT 1000) its_row LIMIT 1000))
       AND status::text = 'queued' AND blocked_on IS DISTINCT FROM 'time' FOR NO KEY UPDATE SKIP LOCKED),
  later AS (
    UPDATE dl_jobs SET blocked_on = 'time', backoffs = refusals.number + 1,
           available_at = now() + make_interval(secs => least(p_most_sec, 0.1 * 2.0 ^ least(refusals.number, 20)))
      FROM (SELECT at, max(backoffs) OVER (PARTITION BY key_hash) AS number FROM unlocked) refusals
     WHERE dl_jobs.ctid = refusals.at
    RETURNING job_id, queue, hashtext(lock_key) AS key_hash, attempt, backoffs, priority, coalesce(turn_at, created_at) AS turn),
  journal AS (
    INSERT INTO dl_job_events (job_id, queue, kind, payload)
    SELECT DISTINCT ON (key_hash) job_id, queue, 'requeue', jsonb_build_object(
             'reason', 'the key is held by another session', 'attempt', attempt, 'backoffs', backoffs)
      FROM later ORDER BY key_hash, priority, turn)
  SELECT count(DISTINCT key_hash) INTO keys FROM later;
  RETURN keys;
END
$$;

-- Remove rows that may not start from their places: canceled, lost without attempts, waiting for their time, or scored in an
-- ordered queue. Only other services make such rows. Returns their number; locked rows are left.
CREATE OR REPLACE FUNCTION dl_set_aside(p_job_ids uuid[]) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  rows int;
BEGIN
  WITH odd AS MATERIALIZED (
    SELECT ctid AS at, CASE WHEN cancel_requested THEN 'canceled'
                            WHEN attempt >= greatest(max_attempts, 1) THEN 'lost'
                            WHEN available_at > clock_timestamp() THEN 'queued' END AS becomes,
           CASE WHEN score IS NULL THEN (SELECT extract(epoch FROM dl_jobs.created_at) FROM dl_queues q
                                          WHERE q.queue = dl_jobs.queue AND ordered) END AS place
      FROM dl_jobs WHERE job_id = ANY (p_job_ids) AND status::text = 'queued' FOR NO KEY UPDATE SKIP LOCKED),
  ended AS (
    UPDATE dl_jobs SET status = coalesce(becomes, 'queued')::dl_status, score = coalesce(score, place),
           blocked_on = CASE becomes WHEN 'queued' THEN 'time' END,
           journaled = CASE WHEN becomes <> 'queued' THEN mod(journaled, 1000000) + 1 ELSE journaled END,
           finished_at = CASE WHEN becomes <> 'queued' THEN now() END,
           error = CASE becomes WHEN 'lost' THEN
                     concat_ws(E'\n', 'no attempts left: ' || attempt || ' of ' || max_attempts, error) ELSE error END,
           error_group = CASE becomes WHEN 'lost' THEN coalesce(error_group, 'no attempts left') ELSE error_group END
      FROM odd WHERE dl_jobs.ctid = odd.at AND (becomes IS NOT NULL OR place IS NOT NULL)
    RETURNING job_id, queue, becomes, attempt),
  journal AS (
    INSERT INTO dl_job_events (job_id, queue, kind, payload)
    SELECT job_id, queue, becomes, jsonb_build_object('attempt', attempt, 'by', 'claim') FROM ended
     WHERE becomes <> 'queued')
  SELECT count(*) INTO rows FROM ended;
  RETURN rows;
END
$$;

-- Make up to p_limit due rows ready, the earliest first, and notify. Returns their number. Served by ix_dl_jobs_time.
CREATE OR REPLACE FUNCTION dl_wake(p_queue text, p_limit int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  woken int;
  without_turn uuid[];
BEGIN
  WITH due AS (
    SELECT ctid AS at FROM dl_jobs
     WHERE queue = p_queue AND status = 'queued' AND blocked_on = 'time' AND available_at <= now()
     ORDER BY available_at, priority, created_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED),
  ready AS (
    UPDATE dl_jobs SET blocked_on = NULL,
           turn_at = CASE WHEN share IS NULL THEN turn_at ELSE coalesce(turn_at, 'infinity') END
     WHERE ctid = ANY (ARRAY(SELECT at FROM due)) RETURNING job_id, turn_at)
  SELECT count(*), array_agg(job_id) FILTER (WHERE turn_at = 'infinity') INTO woken, without_turn FROM ready;
  IF without_turn IS NOT NULL THEN
    PERFORM dl_give_turns(without_turn);
  END IF;
  IF woken > 0 THEN
    PERFORM pg_notify('dl_jobs', p_queue);
  END IF;
  RETURN woken;
END
$$;

-- dl_wake for every queue, up to p_limit rows each. Returns their number. The queues are found by a loose scan.
CREATE OR REPLACE FUNCTION dl_wake_all(p_limit int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  woken int := 0;
  its_queue text := '';
BEGIN
  LOOP
    SELECT queue INTO its_queue FROM dl_jobs WHERE status = 'queued' AND blocked_on = 'time' AND queue > its_queue
     ORDER BY queue, available_at, priority, created_at LIMIT 1;
    EXIT WHEN NOT FOUND;
    BEGIN
      woken := woken + dl_wake(its_queue, p_limit);
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded OR raise_exception THEN
      RAISE WARNING 'the jobs of the queue % cannot be woken: %', its_queue, SQLERRM;  -- its workers set that job aside
    END;
  END LOOP;
  RETURN woken;
END
$$;

-- Give jobs of a queue that becomes ordered their places by creation: up to p_limit queued ones from this available_at on,
-- and all running ones. Returns their number and where to go on. Locked rows get theirs in the claim (dl_set_aside).
CREATE OR REPLACE FUNCTION dl_give_scores(
  p_queue text, p_after timestamptz, p_limit int, OUT given int, OUT reached timestamptz) LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET enable_sort = off AS $$
DECLARE
  rows tid[];
BEGIN
  SELECT array_agg(at), max(available_at) INTO rows, reached FROM (
    SELECT ctid AS at, available_at FROM dl_jobs
     WHERE queue = p_queue AND status = 'queued' AND available_at >= p_after AND score IS NULL
     ORDER BY queue, available_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED) plain;
  UPDATE dl_jobs SET score = extract(epoch FROM created_at) WHERE ctid = ANY (rows || ARRAY(
    SELECT ctid FROM dl_jobs WHERE status = 'running' AND queue = p_queue AND score IS NULL FOR NO KEY UPDATE SKIP LOCKED));
  GET DIAGNOSTICS given = ROW_COUNT;
END
$$;
