-- queued -> running in a plain queue, one that is not ordered: the short claim, without a loop. Each statement can be
-- tried in psql. A running row closes its key; the advisory lock on the key's hash only keeps two claims apart.
-- The worker calls this function first, and dl_step (claim.sql) where it has started nothing: the queue is paused, or
-- ordered by now; the time of a row has come, for example of a retry; dl_freed has an entry that has waited for a second;
-- the first ready row has limits, is canceled or has no attempt left; or a claim of one job met a row that another session
-- had locked.

-- Write the successes of this worker's runs (p_job_id to p_facts: as dl_finish), and start up to p_most jobs of the queue:
-- the best by priority, then turn, at most one of each key hash. One round trip. p_job_id null: no run has ended, and the
-- session keeps its keys; '{}': no run has ended, and it lets go of them.
--
-- Returns a row for each started job, the best first. A last row without a job says more where there is more: `left_over`,
-- the runs whose ends are not written, for they are no plain successes (then nothing is started), and `batch`, as dl_step.
CREATE OR REPLACE FUNCTION dl_step_plain(
  p_queue text, p_worker text, p_backend_start timestamptz, p_most int,
  p_job_id uuid[], p_attempt int[], p_progress text[], p_facts text[])
RETURNS TABLE (
  job_id uuid, task text, args text, idempotency_key text, lock_key text, partition_key text, attempt int, max_attempts int,
  lease_ttl_sec int, timeout_sec int, claims int, affinity_key text, left_over uuid[], batch int)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  is_plain boolean;
  its_batch int;
  mine int[];      -- the key hashes that this claim has locked, in the order of their rows; null: a row for dl_step
  odd_at int;      -- the place of a row that dl_step has to look at
  at_once timestamptz;
  started int;
BEGIN
  IF p_job_id = '{}' THEN
    PERFORM pg_advisory_unlock_all();
  ELSIF p_job_id IS NOT NULL THEN
    left_over := dl_succeed(p_worker, p_job_id, p_attempt, p_progress, p_facts);
    IF left_over <> '{}' THEN
      RETURN NEXT;
      RETURN;
    END IF;
  END IF;

  SELECT (ordered OR paused_at IS NOT NULL) IS NOT TRUE
         AND (SELECT true FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on = 'time'
                 AND available_at <= now() ORDER BY queue, available_at, priority, created_at LIMIT 1) IS NULL
         AND (SELECT true FROM dl_freed WHERE since < clock_timestamp() - interval '1 s' LIMIT 1) IS NULL, q.batch
    INTO is_plain, its_batch FROM (SELECT) one LEFT JOIN dl_queues q ON queue = p_queue;
  IF NOT is_plain THEN
    RETURN;
  END IF;

  -- Lock the keys of the first ready rows, up to the first row that dl_step has to look at: it goes before those behind it.
  -- Keys that other sessions have locked are passed over, within a bounded number of rows.
  mine := ARRAY(
    SELECT CASE WHEN is_startable THEN key_hash END FROM (
      SELECT hashtext(lock_key) AS key_hash, limits IS NULL AND NOT cancel_requested
               AND attempt < greatest(max_attempts, 1) AND available_at <= clock_timestamp() AS is_startable
        FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL
       ORDER BY queue, priority, coalesce(turn_at, created_at) LIMIT 2 * p_most + 64) near
     WHERE CASE WHEN is_startable THEN pg_try_advisory_lock(key_hash) ELSE true END LIMIT p_most);
  IF p_most > 1 THEN
    odd_at := array_position(mine, NULL);
    IF odd_at IS NOT NULL THEN
      PERFORM pg_advisory_unlock(key_hash) FROM unnest(mine[odd_at:]) key_hash WHERE key_hash IS NOT NULL;
      mine := mine[:odd_at - 1];
    END IF;
    mine := dl_each_once(mine);
  END IF;
  IF mine = '{}' OR mine[1] IS NULL THEN
    RETURN;
  END IF;

  -- Start the first job of each of these keys. Advisory locks do not obey MVCC, so this statement looks at the running rows
  -- behind the locks, with a fresh snapshot; the other way round the claim would miss a job that started in between (Que,
  -- lib/que/worker.rb:72-82). The statement also chooses the first rows behind the locks: a job that was given back in
  -- between goes before a later one of its key, and so does an older job that is parked.
  at_once := clock_timestamp();  -- not now(), when the claim began: the rows may be younger
  RETURN QUERY
  WITH free AS MATERIALIZED (
    SELECT ctid AS at, row_number() OVER (ORDER BY priority, turn, job_id) AS nth FROM (
      SELECT ctid, job_id, priority, coalesce(turn_at, created_at) AS turn FROM dl_jobs
       WHERE ctid = ANY (ARRAY(
               SELECT (SELECT ctid FROM dl_jobs
                        WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key')
                          AND hashtext(lock_key) = key_hash AND queue = p_queue
                        ORDER BY hashtext(lock_key), queue, priority, coalesce(turn_at, created_at) LIMIT 1)
                 FROM unnest(mine) key_hash
                WHERE (SELECT true FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = key_hash
                          AND lease_expires_at > now() LIMIT 1) IS NULL))  -- the earlier time: a lease counts as long
         AND status::text = 'queued' AND blocked_on IS DISTINCT FROM 'time' AND available_at <= at_once
         AND NOT cancel_requested AND attempt < greatest(max_attempts, 1) AND limits IS NULL
         FOR NO KEY UPDATE SKIP LOCKED) locked),
  {start}
  SELECT job_id, task, args::text, idempotency_key, lock_key, partition_key, attempt, max_attempts, lease_ttl_sec,
         timeout_sec, claims, affinity_key, NULL::uuid[], NULL::int
    FROM started ORDER BY nth;
  GET DIAGNOSTICS started = ROW_COUNT;

  IF started < cardinality(mine) THEN
    PERFORM dl_unlock_others(p_worker, mine, at_once);
  END IF;
  IF started > 0 AND its_batch IS NOT NULL THEN
    left_over := NULL;
    batch := its_batch;
    RETURN NEXT;
  END IF;
END
$$;

-- Start the rows that a claim has locked, of which `nth` is the place in their order.
-- part: start
  started AS (
    UPDATE dl_jobs SET status = 'running', blocked_on = NULL, attempt = attempt + 1, claims = claims + 1, backoffs = 0,
           journaled = mod(journaled, 1000000) + 1, started_at = coalesce(started_at, at_once), finished_at = NULL,
           -- The worker begins the best job at once. The others are claimed ahead: null until their runs beat (dl_reap).
           heartbeat_at = CASE WHEN nth = 1 THEN at_once END,
           lease_expires_at = at_once + make_interval(secs => lease_ttl_sec),
           claimed_by = p_worker, claimed_pid = pg_backend_pid(), claimed_backend_start = p_backend_start
      FROM free WHERE ctid = free.at
    RETURNING nth, job_id, queue, task, args, idempotency_key, lock_key, partition_key, attempt, max_attempts, lease_ttl_sec,
              timeout_sec, claims, affinity_key),
  journal AS (
    INSERT INTO dl_job_events (job_id, queue, ts, kind, payload)
    SELECT job_id, queue, at_once, 'picked',
           ('{"attempt": ' || attempt || ', "worker": ' || to_json(p_worker) || '}')::jsonb FROM started)


-- Let go of those of these keys of which this claim has started no job at that time, and return them: a running row has
-- the key after all, or the first row is locked, has changed, or is not for this claim. The lease tells which rows the
-- claim has started: an earlier run of ours may be running still, its end unwritten.
CREATE OR REPLACE FUNCTION dl_unlock_others(p_worker text, p_key_hashes int[], p_started_at timestamptz) RETURNS int[]
LANGUAGE plpgsql AS $$
DECLARE
  others int[] := ARRAY(
    SELECT key_hash FROM unnest(p_key_hashes) key_hash
     WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = key_hash
                          AND claimed_by = p_worker AND claimed_pid = pg_backend_pid()
                          AND lease_expires_at = p_started_at + make_interval(secs => lease_ttl_sec)));
BEGIN
  PERFORM pg_advisory_unlock(key_hash) FROM unnest(others) key_hash;
  RETURN others;
END
$$;


-- Of these key hashes, whose locks this session has, each once and in their order; of a lock that the session has several
-- times one stays. Where hashes repeat, few keys may have all rows: the function leaves a sixteenth of the keys to other
-- workers, which would else park rows instead of working.
CREATE OR REPLACE FUNCTION dl_each_once(p_key_hashes int[]) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
  once int[] := ARRAY(SELECT key_hash FROM unnest(p_key_hashes) WITH ORDINALITY AS locked (key_hash, nth)
                       GROUP BY key_hash ORDER BY min(nth));
  spared int := (cardinality(once) + 8) / 16;
BEGIN
  IF cardinality(once) < cardinality(p_key_hashes) THEN
    PERFORM pg_advisory_unlock(key_hash)
       FROM (SELECT key_hash, row_number() OVER (PARTITION BY key_hash) AS nth FROM unnest(p_key_hashes) key_hash) locked
      WHERE nth > 1;
    PERFORM pg_advisory_unlock(key_hash) FROM unnest(once[cardinality(once) - spared + 1:]) key_hash;
    once := trim_array(once, spared);
  END IF;
  RETURN once;
END
$$;


-- Write the successes of this worker's runs, with their last progress (JSON; null: it stays as it is) and what joins the
-- journal's row (a JSON object), and let go of all keys of the session. Returns the jobs of the other runs, whose ends
-- dl_finish has to write: canceled, locked by another session, or no longer this worker's.
CREATE OR REPLACE FUNCTION dl_succeed(p_worker text, p_job_id uuid[], p_attempt int[], p_progress text[], p_facts text[])
RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
  done uuid[];
  key_hashes int[];
  is_limited boolean;
BEGIN
  WITH free AS MATERIALIZED (
    SELECT e.*, its_row.at FROM unnest(p_job_id, p_attempt, p_progress, p_facts) AS e (job_id, attempt, progress, facts)
     CROSS JOIN LATERAL (
       SELECT ctid AS at FROM dl_jobs WHERE dl_jobs.job_id = e.job_id FOR NO KEY UPDATE SKIP LOCKED) its_row),
  ended AS (
    UPDATE dl_jobs j SET status = 'succeeded', journaled = mod(journaled, 1000000) + 1, finished_at = now(), lease_expires_at = NULL,
           claimed_by = NULL, claimed_pid = NULL, claimed_backend_start = NULL,
           progress = coalesce(e.progress::jsonb, j.progress), error = NULL, error_group = NULL
      FROM free e WHERE j.ctid = e.at AND j.attempt = e.attempt AND claimed_by = p_worker AND status::text = 'running'
                    AND NOT cancel_requested
    RETURNING j.job_id, queue, lock_key, limits, j.attempt, facts),
  journal AS (
    INSERT INTO dl_job_events (job_id, queue, kind, payload)
    SELECT job_id, queue, 'done',
           ('{"attempt": ' || attempt || ', "worker": ' || to_json(p_worker) || '}')::jsonb || coalesce(facts::jsonb, '{}')
      FROM ended)
  SELECT array_agg(job_id), array_agg(hashtext(lock_key)), bool_or(limits IS NOT NULL) INTO done, key_hashes, is_limited
    FROM ended;
  IF pg_advisory_unlock_all() IS NULL THEN END IF;  -- an expression: PERFORM would run it as a query
  {free_others};
  IF cardinality(done) = cardinality(p_job_id) THEN
    RETURN '{}';
  END IF;
  RETURN ARRAY(SELECT unnest(p_job_id) EXCEPT SELECT unnest(done));
END
$$;
