-- queued -> running. The steps in a job's life that need several statements are functions, for READ COMMITTED gives
-- each statement of a PL/pgSQL function a fresh snapshot. `dataloader migrate` applies the files of this folder again
-- whenever one has changed, so farms of two versions share them: a function whose signature or promise changes gets a
-- new name.
--
-- Words. The *key_hash* of a job is hashtext(lock_key): two keys may share one, they then exclude each other and
-- nothing worse follows. A key_hash is *busy* while a running row with a live lease has it. A queued row is
-- in exactly one of three places: blocked (blocked_on says why), cold, or hot (a claim once found its key busy).


-- Is the queue paused? Then no claim starts a job of the queue. VOLATILE: each call sees every commit of before.
CREATE OR REPLACE FUNCTION dl_is_paused(p_queue text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  RETURN (SELECT paused_at FROM dl_queues WHERE queue = p_queue) IS NOT NULL;
END
$$;


-- Is the key_hash busy? Served by ix_dl_jobs_running. VOLATILE: each call sees every commit of before.
CREATE OR REPLACE FUNCTION dl_slot_is_busy(p_slot int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  RETURN EXISTS (SELECT FROM dl_jobs
                  WHERE status = 'running' AND hashtext(lock_key) = p_slot AND lease_expires_at > now());
END
$$;


-- Take the key_hash for this session. Returns 'taken', 'busy' (a running job holds the key) or 'refused' (a session
-- holds the key, and no running job is visible).
--
-- Advisory locks do not obey MVCC, so the order is: lock, then look at the running rows again. The other
-- way round a job that started in between would be missed (Que, lib/que/worker.rb:72-82). A refusal without a
-- visible job is mostly a claim about to commit: look again after 1, 5, 25 ms.
CREATE OR REPLACE FUNCTION dl_take_slot(p_slot int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  pause float8;
BEGIN
  FOREACH pause IN ARRAY ARRAY[0.001, 0.005, 0.025, 0] LOOP
    IF pg_try_advisory_lock(p_slot) THEN
      IF NOT dl_slot_is_busy(p_slot) THEN
        RETURN 'taken';
      END IF;
      -- The holder lost its session but not its lease: the work goes on, and the running row keeps the key.
      PERFORM pg_advisory_unlock(p_slot);
      RETURN 'busy';
    END IF;
    IF dl_slot_is_busy(p_slot) THEN
      RETURN 'busy';
    END IF;
    PERFORM pg_sleep(pause);
  END LOOP;
  RETURN 'refused';
END
$$;


-- Make up to p_limit due rows of the queue claimable, and notify the queue's workers. Returns the number of rows.
-- Called by dl_claim, and by the reaper for queues without a worker. Served by ix_dl_jobs_due.
CREATE OR REPLACE FUNCTION dl_wake(p_queue text, p_limit int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  woken int;
BEGIN
  WITH due AS (
    SELECT job_id FROM dl_jobs
     WHERE queue = p_queue AND status = 'queued' AND blocked_on = 'time' AND available_at <= now()
     ORDER BY available_at LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED)
  UPDATE dl_jobs SET blocked_on = NULL FROM due WHERE dl_jobs.job_id = due.job_id;
  GET DIAGNOSTICS woken = ROW_COUNT;
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
  this text;
BEGIN
  SELECT min(queue) INTO this FROM dl_jobs WHERE status = 'queued' AND blocked_on = 'time';
  WHILE this IS NOT NULL LOOP
    woken := woken + dl_wake(this, p_limit);
    SELECT min(queue) INTO this FROM dl_jobs WHERE status = 'queued' AND blocked_on = 'time' AND queue > this;
  END LOOP;
  RETURN woken;
END
$$;


-- The nearest claimable rows of one key_hash, locked: all that a refusal of its key concerns. At most 1,000 of each
-- place.
CREATE OR REPLACE FUNCTION dl_near_of_slot(p_queue text, p_slot int) RETURNS uuid[] LANGUAGE sql AS $$
  SELECT ARRAY(
    SELECT job_id FROM dl_jobs WHERE job_id = ANY (ARRAY(
      SELECT job_id FROM (
        SELECT job_id, lock_key FROM dl_jobs
         WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
         ORDER BY priority, created_at LIMIT 1000) near
       WHERE hashtext(lock_key) = p_slot
      UNION ALL
      (SELECT job_id FROM dl_jobs
        WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot AND hashtext(lock_key) = p_slot
        ORDER BY priority, created_at LIMIT 1000)))
       AND status::text = 'queued' AND blocked_on IS NULL
       FOR NO KEY UPDATE SKIP LOCKED)
$$;


-- Start those of these queued jobs that may still run and whose rows are not locked; this session holds their keys.
-- Returns the jobs for their worker, the best first. The worker begins the best job at once; the others are claimed
-- ahead, and their heartbeat_at stays null until their run's first heartbeat (dl_reap).
CREATE OR REPLACE FUNCTION dl_start(p_job_ids uuid[], p_worker text, p_backend_start timestamptz)
RETURNS TABLE (
  job_id uuid, task text, args text, idempotency_key text, lock_key text, partition_key text, attempt int,
  max_attempts int, lease_ttl_sec int, timeout_sec int, claims int)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  WITH free AS MATERIALIZED (
    SELECT job_id AS free_id, clock_timestamp() AS started, priority AS p, created_at AS c FROM dl_jobs
     WHERE job_id = ANY (p_job_ids) AND status::text = 'queued' AND blocked_on IS NULL
       AND available_at <= clock_timestamp() AND NOT cancel_requested AND attempt < greatest(max_attempts, 1)
       FOR NO KEY UPDATE SKIP LOCKED),
  started AS (
    UPDATE dl_jobs SET status = 'running', attempt = attempt + 1, claims = claims + 1, backoffs = 0,
           journaled = journaled + 1,
           started_at = coalesce(started_at, started), finished_at = NULL,
           heartbeat_at = CASE WHEN free_id = (SELECT free_id FROM free ORDER BY p, c, free_id LIMIT 1) THEN started END,
           lease_expires_at = started + make_interval(secs => lease_ttl_sec),
           claimed_by = p_worker, claimed_pid = pg_backend_pid(), claimed_backend_start = p_backend_start
      FROM free WHERE job_id = free_id
    RETURNING job_id, queue, task, args, idempotency_key, lock_key, partition_key, attempt, max_attempts,
              lease_ttl_sec, timeout_sec, claims, started, priority, created_at),
  journal AS (
    -- Not at now(), when the claim began: the row may be younger, and its journal would begin with its second step.
    INSERT INTO dl_job_events (job_id, queue, ts, kind, payload)
    SELECT job_id, queue, started, 'picked', jsonb_build_object('attempt', attempt, 'worker', p_worker)
      FROM started)
  SELECT job_id, task, args::text, idempotency_key, lock_key, partition_key, attempt, max_attempts, lease_ttl_sec,
         timeout_sec, claims FROM started ORDER BY priority, created_at, job_id;
END
$$;


-- Try to start one candidate of a claim. The outcome is null when another session has the row locked, else
-- 'started', 'ended' (cancelled by a plain producer, or out of attempts), 'early' (blocked on its time), 'busy' (its
-- key is, or an older job has the first claim to it: marked hot) or 'refused' (blocked on time, longer with every
-- refusal in a row).
--
-- A claim that locks a queued row here also changes it, so a claim that skips a locked row loses nothing.
CREATE OR REPLACE FUNCTION dl_try(
  p_job_id uuid, p_worker text, p_backend_start timestamptz, p_backoff_sec float8, OUT outcome text, OUT job dl_jobs)
LANGUAGE plpgsql AS $$
DECLARE
  refused uuid[];
BEGIN
  -- By job_id alone: a condition on the state would let the planner take a partial index for this, and with stale
  -- statistics it does.
  SELECT * INTO job FROM dl_jobs WHERE job_id = p_job_id FOR NO KEY UPDATE SKIP LOCKED;
  IF job.status IS DISTINCT FROM 'queued' OR job.blocked_on IS NOT NULL THEN
    job := NULL;
    RETURN;
  END IF;

  -- Not now(): that is when the claim began, and this row may be younger.
  IF job.available_at > clock_timestamp() THEN
    UPDATE dl_jobs SET blocked_on = 'time' WHERE job_id = job.job_id;  -- no trigger saw it come
    outcome := 'early';
    RETURN;
  END IF;

  IF job.cancel_requested OR job.attempt >= greatest(job.max_attempts, 1) THEN
    UPDATE dl_jobs SET status = CASE WHEN cancel_requested THEN 'canceled' ELSE 'lost' END::dl_status,
           journaled = journaled + 1, finished_at = now(),
           error = CASE WHEN cancel_requested THEN error
                        ELSE concat_ws(E'\n', 'no attempts left: ' || attempt || ' of ' || max_attempts, error) END
     WHERE job_id = job.job_id RETURNING * INTO job;
    INSERT INTO dl_job_events (job_id, queue, kind, payload)
    VALUES (job.job_id, job.queue, job.status::text, jsonb_build_object('attempt', job.attempt, 'by', 'claim'));
    outcome := 'ended';
    RETURN;
  END IF;

  outcome := dl_take_slot(hashtext(job.lock_key));
  -- The look behind the lock for the order of the key: an older row may have become hot since the claim chose this one.
  -- Then it is that one's turn, in the next look.
  IF outcome = 'taken' AND (
       SELECT true FROM dl_jobs
        WHERE queue = job.queue AND status = 'queued' AND blocked_on IS NULL AND hot
          AND hashtext(lock_key) = hashtext(job.lock_key) AND (priority, created_at) < (job.priority, job.created_at)
        ORDER BY priority, created_at LIMIT 1) THEN
    PERFORM pg_advisory_unlock(hashtext(job.lock_key));
    outcome := 'busy';
  END IF;
  IF outcome = 'taken' THEN
    PERFORM dl_start(ARRAY[p_job_id], p_worker, p_backend_start);
    SELECT * INTO job FROM dl_jobs WHERE job_id = p_job_id;
    outcome := 'started';
  ELSIF outcome = 'busy' THEN
    UPDATE dl_jobs SET hot = true WHERE job_id = job.job_id;
  ELSE
    -- With it go the rows of the same key_hash among the nearest: each would cost the same wait to be refused as well.
    refused := dl_near_of_slot(job.queue, hashtext(job.lock_key)) || job.job_id;
    UPDATE dl_jobs SET backoffs = backoffs + 1,
           available_at = now() + make_interval(secs => least(p_backoff_sec, 0.1 * 2.0 ^ least(backoffs, 20)))
     WHERE job_id = ANY (refused);
    job.backoffs := job.backoffs + 1;
    INSERT INTO dl_job_events (job_id, queue, kind, payload)
    VALUES (job.job_id, job.queue, 'requeue', jsonb_build_object(
            'reason', 'the key is held by another session', 'attempt', job.attempt, 'backoffs', job.backoffs));
  END IF;
END
$$;


-- The key hashes in which hot rows of the queue wait: a loose scan of ix_dl_jobs_hot, one probe a key_hash. Called by
-- dl_claim, under its settings. VOLATILE on purpose, as dl_slot_is_busy.
CREATE OR REPLACE FUNCTION dl_hot_slots(p_queue text) RETURNS int[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN ARRAY(
    WITH RECURSIVE hashes (key_hash) AS (
      (SELECT hashtext(lock_key) FROM dl_jobs
        WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
        ORDER BY hashtext(lock_key), priority, created_at LIMIT 1)
      UNION ALL
      SELECT (SELECT hashtext(lock_key) FROM dl_jobs
               WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
                 AND hashtext(lock_key) > hashes.key_hash ORDER BY hashtext(lock_key), priority, created_at LIMIT 1)
        FROM hashes WHERE hashes.key_hash IS NOT NULL)
    SELECT key_hash FROM hashes WHERE key_hash IS NOT NULL);
END
$$;


-- The number of the queue's cold rows before the first unlocked one, and the key hashes of these rows, which stay the
-- first of their keys. One pass over the index; the function locks the first unlocked row.
CREATE OR REPLACE FUNCTION dl_locked_ahead(p_queue text, OUT rows int, OUT slots int[]) LANGUAGE plpgsql AS $$
DECLARE
  first_free uuid := (
    SELECT job_id FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
     ORDER BY priority, created_at LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED);
  candidate uuid;
  its_key_hash int;
BEGIN
  rows := 0;
  slots := '{}';
  -- Counted, for jobs that were added together may have one created_at.
  FOR candidate, its_key_hash IN
    SELECT job_id, hashtext(lock_key) FROM dl_jobs
     WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot ORDER BY priority, created_at
  LOOP
    EXIT WHEN candidate = first_free;
    rows := rows + 1;
    slots := slots || its_key_hash;
  END LOOP;
END
$$;


-- Claim the best job of the queue that may run now, by priority, then created_at; a job whose key is busy is
-- passed over without any change to its attempts. One round trip: due rows are woken, the key taken, the row marked
-- running, the journal written.
--
-- p_worker          host:pid:boot of the worker, written to claimed_by
-- p_backend_start   start of this session's backend
-- p_backoff_sec     longest back-off of a key that a foreign session holds
-- job               the claimed row; all null when there is none
-- backoffs          how many keys were refused on the way
-- look_again        nothing claimed, but more rows are left to look at: call again at once
-- due_in            nothing claimed: seconds until the queue's next row is due, null when there is none
--
-- The settings keep its plans what they should be whatever the statistics say (jit: a forbidden sort costs so much on
-- PostgreSQL before 18 that every plan would be compiled). A claim that has spent a second returns and asks for
-- another.
--
-- Cost: O(log N) in the length of the queue. Cold rows come from ix_dl_jobs_cold in the order of the claim,
-- one after the other, each with one probe of ix_dl_jobs_running; when the nearest 1,000 are all busy they are marked
-- hot, once in their life. When others have all of these locked, it looks at the next behind the locked ones. Hot rows
-- cost a loose scan of ix_dl_jobs_hot over the distinct key hashes. (Sorting the
-- ready rows, as the contract's index makes a plain claim do, takes 0.3 s at 1,000,000; parking busy rows until
-- a finish wakes them loses wake-ups.)
CREATE OR REPLACE FUNCTION dl_claim(
  p_queue text, p_worker text, p_backend_start timestamptz, p_backoff_sec float8,
  OUT job dl_jobs, OUT backoffs int, OUT look_again boolean, OUT due_in float8)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
  candidates refcursor;
  candidate uuid;
  candidate_key_hash int;
  passed int[];
  tried record;
  changed boolean;
  near uuid[] := '{}';
  near_unlocked uuid[] := '{}';
  left_alone int[];
  marked int;
  marks boolean := false;
  woken int := 0;
  waiting int[];
  held int[];
  contended boolean := false;
  past int := 0;  -- cold rows at the head that others have locked, with their key hashes
  past_key_hashes int[] := '{}';
  found_past int;
  retry_in float8;
BEGIN
  backoffs := 0;
  look_again := false;
  IF dl_is_paused(p_queue) THEN  -- also looked at here, for dl_step may have begun before the pause
    RETURN;
  END IF;

  IF (SELECT available_at FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on = 'time'
       ORDER BY queue, available_at LIMIT 1) <= now() THEN
    woken := dl_wake(p_queue, 100);
  END IF;

  FOR look IN 1..10 LOOP
    changed := false;
    passed := past_key_hashes;
    IF (SELECT true FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
         ORDER BY hashtext(lock_key), priority, created_at LIMIT 1) THEN
      waiting := dl_hot_slots(p_queue);
      OPEN candidates FOR
        WITH first_hot AS (
          SELECT first.* FROM unnest(waiting) AS hashes (key_hash) CROSS JOIN LATERAL (
            SELECT job_id, hashes.key_hash, priority, created_at FROM dl_jobs
             WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
               AND hashtext(lock_key) = hashes.key_hash
             ORDER BY priority, created_at LIMIT 1) first
           WHERE (SELECT true FROM dl_jobs r WHERE r.status = 'running' AND hashtext(r.lock_key) = hashes.key_hash
                     AND r.lease_expires_at > now() LIMIT 1) IS NULL),
        first_cold AS (
          SELECT job_id, hashtext(lock_key) AS key_hash, priority, created_at FROM (
            SELECT job_id, lock_key, priority, created_at FROM dl_jobs
             WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
             ORDER BY priority, created_at LIMIT 1000 OFFSET past) near
           WHERE (SELECT true FROM dl_jobs r WHERE r.status = 'running' AND hashtext(r.lock_key) = hashtext(near.lock_key)
                     AND r.lease_expires_at > now() LIMIT 1) IS NULL
           ORDER BY priority, created_at LIMIT 64)
        SELECT job_id, key_hash FROM (TABLE first_hot UNION ALL TABLE first_cold) best ORDER BY priority, created_at;
    ELSE
      -- The short path: no hot rows, so the cold ones come straight from the index, as many as are asked for.
      OPEN candidates FOR
        SELECT job_id, hashtext(lock_key) FROM (
          SELECT job_id, lock_key, priority, created_at FROM dl_jobs
           WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
           ORDER BY priority, created_at LIMIT 1000 OFFSET past) near
         WHERE (SELECT true FROM dl_jobs r WHERE r.status = 'running' AND hashtext(r.lock_key) = hashtext(near.lock_key)
                   AND r.lease_expires_at > now() LIMIT 1) IS NULL
         ORDER BY priority, created_at;
    END IF;

    LOOP
      FETCH candidates INTO candidate, candidate_key_hash;
      EXIT WHEN NOT FOUND;
      CONTINUE WHEN candidate_key_hash = ANY (passed);  -- a key that becomes free meanwhile is its first job's
      SELECT * INTO tried FROM dl_try(candidate, p_worker, p_backend_start, p_backoff_sec);
      IF tried.outcome = 'started' THEN
        CLOSE candidates;
        job := tried.job;
        look_again := false;
        IF marks THEN
          PERFORM pg_notify('dl_jobs', p_queue);  -- claims that ended before these marks may take the rest
        END IF;
        RETURN;
      END IF;
      changed := changed OR tried.outcome IS NOT NULL;
      IF tried.outcome = 'refused' THEN
        backoffs := backoffs + 1;
        EXIT;  -- most candidates may have been of this key_hash: look anew
      ELSIF tried.outcome = 'busy' THEN
        marks := true;
        passed := passed || candidate_key_hash;
      ELSIF tried.outcome IS NULL THEN
        passed := passed || candidate_key_hash;  -- its locker may be marking it: it stays the first of its key
      END IF;
      EXIT WHEN clock_timestamp() > now() + interval '1 s';
    END LOOP;
    CLOSE candidates;
    -- Rows have left their place: the nearest 1,000 are others now.
    look_again := changed;
    IF clock_timestamp() > now() + interval '1 s' THEN
      contended := NOT changed;
      EXIT;
    END IF;
    CONTINUE WHEN changed;

    -- This look started no job. The claim marks the rows that it passed over as hot: the next look skips them, and the
    -- finish of their key's job finds the queues to notify. In bunches, so that no claim takes long. (status::text: see
    -- dl_try.)
    near := ARRAY(
      SELECT job_id FROM dl_jobs
       WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
       ORDER BY priority, created_at LIMIT 1000 OFFSET past);
    near_unlocked := '{}';
    left_alone := past_key_hashes;
    marked := 0;
    IF near <> '{}' THEN  -- of an empty list the planner proves what it likes, and reads some index as a whole
      near_unlocked := ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (near) FOR NO KEY UPDATE SKIP LOCKED);
      -- Where somebody is at a row, the others of its key_hash stay as they are: were they hot and it still cold, the
      -- first hot row would not be the first of its key.
      IF cardinality(near_unlocked) < cardinality(near) THEN
        left_alone := left_alone || ARRAY(SELECT DISTINCT hashtext(lock_key) FROM dl_jobs
                                           WHERE job_id = ANY (near) AND job_id <> ALL (near_unlocked));
      END IF;
      UPDATE dl_jobs SET hot = true
       WHERE job_id = ANY (near_unlocked) AND status::text = 'queued' AND blocked_on IS NULL AND NOT hot
         AND hashtext(lock_key) <> ALL (left_alone);
      GET DIAGNOSTICS marked = ROW_COUNT;
      IF marked = 0 AND cardinality(near) >= 1000 THEN
        -- But a lock that somebody holds on to must not hide what is behind these rows: then the order has to wait.
        UPDATE dl_jobs SET hot = true
         WHERE job_id = ANY (near_unlocked) AND status::text = 'queued' AND blocked_on IS NULL AND NOT hot;
        GET DIAGNOSTICS marked = ROW_COUNT;
      END IF;
    END IF;
    marks := marks OR marked > 0;
    IF cardinality(near) >= 1000 AND near_unlocked = '{}' THEN
      -- Other sessions have all of these rows locked, and no notification follows their release: the caller comes back,
      -- and this claim looks behind them now.
      SELECT ahead.rows, ahead.slots INTO found_past, past_key_hashes FROM dl_locked_ahead(p_queue) ahead;
      contended := found_past <= past;
      past := found_past;
      EXIT WHEN contended;
      CONTINUE;
    ELSIF cardinality(near) >= 1000 THEN
      look_again := true;
      EXIT;
    END IF;

    -- A finish that runs beside us must not slip between its look for waiters and our marks. So hold the running
    -- rows of the hot key hashes FOR SHARE: a later finish waits for our commit, sees the marks and notifies. When
    -- these rows account for every hot key_hash, and all is marked, nothing is claimable and nobody will be forgotten;
    -- otherwise something is becoming free, or is held by a finish, a beat or a claim under way: look again. Nothing is
    -- waited for (SKIP LOCKED), so this cannot deadlock, nor hang on a transaction that somebody left open.
    waiting := dl_hot_slots(p_queue);
    held := '{}';
    IF waiting <> '{}' THEN
      SELECT coalesce(array_agg(key_hash), '{}') INTO held FROM (
        SELECT hashtext(r.lock_key) AS key_hash FROM dl_jobs r
         WHERE r.status = 'running' AND hashtext(r.lock_key) = ANY (waiting) AND r.lease_expires_at > now()
           FOR SHARE OF r SKIP LOCKED) holders;
    END IF;
    IF waiting <@ held AND left_alone = '{}' THEN
      marks := false;
      EXIT;
    END IF;
    -- Other transactions hold these rows and have not committed yet. If they go on, the caller comes back later; with
    -- many such rows at once, for each look tries all of them.
    contended := look = 10 OR past + cardinality(near) - cardinality(near_unlocked) > 100;
    EXIT WHEN contended AND look < 10;
    PERFORM pg_sleep(0.0005 * look);
  END LOOP;

  IF marks THEN
    PERFORM pg_notify('dl_jobs', p_queue);  -- not proven, see above: claims that trusted these marks look again
  END IF;
  look_again := look_again OR woken = 100;
  retry_in := CASE WHEN contended THEN
                least(1, greatest(0.1, (past + cardinality(near) - cardinality(near_unlocked)) / 1000.0)) END;
  SELECT least(retry_in,
               extract(epoch FROM least(available_at, now() + interval '1 year') - clock_timestamp())) INTO due_in
    FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on = 'time' AND available_at > now()
   ORDER BY queue, available_at LIMIT 1;
  IF NOT FOUND THEN
    due_in := retry_in;
  END IF;
END
$$;


-- Take for this session the keys of up to p_most jobs of the queue that may run now, the best first, one job of each
-- key, and of few keys not all; returns the jobs and the key hashes taken. For the normal case, in which some of the
-- first thousand rows of the queue may start: no row is locked or marked, and a key that is not free at once is passed
-- over, as are the first p_past cold rows and the keys of p_passed. Taking no key proves nothing; dl_claim decides.
CREATE OR REPLACE FUNCTION dl_take_keys(
  p_queue text, p_most int, p_past int, p_passed int[], OUT job_ids uuid[], OUT slots int[])
LANGUAGE plpgsql AS $$
DECLARE
  candidates refcursor;
  candidate uuid;
  its_key_hash int;
  is_over boolean;
  refused int[] := p_passed;
  behind int := 0;  -- jobs of keys that are taken already, since the last new key
  keys_are_few boolean := false;
  spared int;
  busy int[];
  has_hot boolean;
BEGIN
  slots := '{}';
  IF (SELECT true FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
       ORDER BY hashtext(lock_key), priority, created_at LIMIT 1) THEN
    OPEN candidates FOR
      SELECT job_id, key_hash, cancel_requested OR attempt >= greatest(max_attempts, 1) FROM (
        (SELECT job_id, hashtext(lock_key) AS key_hash, cancel_requested, attempt, max_attempts, priority, created_at
           FROM dl_jobs
          WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
          ORDER BY priority, created_at LIMIT 1000 + p_most OFFSET p_past)
        UNION ALL
        SELECT first_hot.* FROM unnest(dl_hot_slots(p_queue)) AS hot (key_hash) CROSS JOIN LATERAL (
          SELECT job_id, hot.key_hash, cancel_requested, attempt, max_attempts, priority, created_at FROM dl_jobs
           WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot AND hashtext(lock_key) = hot.key_hash
           ORDER BY priority, created_at LIMIT 1) first_hot
         WHERE (SELECT true FROM dl_jobs r WHERE r.status = 'running' AND hashtext(r.lock_key) = hot.key_hash
                   AND r.lease_expires_at > now() LIMIT 1) IS NULL) near
       ORDER BY priority, created_at;
  ELSE
    OPEN candidates FOR
      SELECT job_id, hashtext(lock_key), cancel_requested OR attempt >= greatest(max_attempts, 1) FROM dl_jobs
       WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
       -- Others may be at the first; what is not fetched is not read.
       ORDER BY priority, created_at LIMIT 1000 + p_most OFFSET p_past;
  END IF;
  LOOP
    FETCH candidates INTO candidate, its_key_hash, is_over;
    EXIT WHEN NOT FOUND;
    EXIT WHEN is_over;  -- to be ended on the way, by dl_claim
    -- Its own lock would not refuse it; and a key that becomes free meanwhile is its first job's, not a later one's.
    IF its_key_hash = ANY (slots) THEN
      keys_are_few := true;
      behind := behind + 1;
      EXIT WHEN behind * cardinality(slots) > 500;  -- the more there are, the less is one more worth the reading
    ELSIF its_key_hash <> ALL (refused) THEN
      behind := 0;
      IF pg_try_advisory_lock(its_key_hash) THEN
        job_ids := job_ids || candidate;
        slots := slots || its_key_hash;
        EXIT WHEN cardinality(slots) = p_most;
      ELSE
        refused := refused || its_key_hash;
      END IF;
    END IF;
  END LOOP;
  CLOSE candidates;

  -- Fewer keys than this session could do with, and jobs wait behind them. Were all taken, the next worker would find
  -- none, and mark rows instead of working; as each leaves a sixteenth of what it finds, all have as many in the end.
  IF keys_are_few AND cardinality(slots) < p_most THEN
    spared := (cardinality(slots) + 8) / 16;
    PERFORM pg_advisory_unlock(key_hash) FROM unnest(slots[cardinality(slots) - spared + 1:]) key_hash;
    job_ids := trim_array(job_ids, spared);
    slots := trim_array(slots, spared);
  END IF;

  -- The look behind the lock, with a fresh snapshot: see dl_take_slot. The hot rows are looked at again as well, for
  -- the candidates are older than the locks: a job that was running then and came back, or was marked in between,
  -- stands there now and goes before a later one of its key. (What our statements make claimable again at once comes
  -- back hot.)
  SELECT ARRAY(SELECT hashtext(lock_key) FROM dl_jobs
                WHERE status = 'running' AND hashtext(lock_key) = ANY (slots) AND lease_expires_at > now()),
         (SELECT true FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
           ORDER BY hashtext(lock_key), priority, created_at LIMIT 1)
    INTO busy, has_hot;
  IF has_hot OR cardinality(busy) > 0 THEN
    PERFORM pg_advisory_unlock(key_hash) FROM unnest(busy) key_hash;
    SELECT array_agg(coalesce(older.job_id, taken.job_id)), array_agg(key_hash) INTO job_ids, slots
      FROM unnest(job_ids, slots) AS taken (job_id, key_hash) LEFT JOIN LATERAL (
        SELECT first.job_id FROM (
          SELECT job_id, priority, created_at FROM dl_jobs
           WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot AND hashtext(lock_key) = key_hash
           ORDER BY priority, created_at LIMIT 1) first
          JOIN dl_jobs chosen ON chosen.job_id = taken.job_id
         WHERE (first.priority, first.created_at) < (chosen.priority, chosen.created_at)) older ON true
     WHERE key_hash <> ALL (busy);
  END IF;
END
$$;


-- Finish what has ended and claim the next, in one round trip.
--
-- p_ends   as for dl_finish; releases all keys that the session still holds, also with an empty list, but not with null
-- p_most   the largest number of jobs to claim
-- p_waits  as for dl_finish; the other parameters as for dl_claim
--
-- Returns a row for each claimed job, as dl_start does, then one without a job, with what dl_finish and dl_claim say
-- besides.
--
-- The caller's session has the settings of dl_claim: setting them at each call would cost as much as a statement.
CREATE OR REPLACE FUNCTION dl_step(
  p_queue text, p_worker text, p_backend_start timestamptz, p_backoff_sec float8, p_most int, p_ends json,
  p_waits boolean)
RETURNS TABLE (
  job_id uuid, task text, args text, idempotency_key text, lock_key text, partition_key text, attempt int,
  max_attempts int, lease_ttl_sec int, timeout_sec int, claims int,
  unfinished uuid[], canceled uuid[], locked uuid[], backoffs int, look_again boolean, due_in float8)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  past int := 0;  -- cold rows at the head that others have locked, with their key hashes
  past_key_hashes int[] := '{}';
  taken record;
  looked record;
  started int := 0;
BEGIN
  backoffs := 0;
  look_again := false;
  IF p_ends::text = '[]' THEN
    PERFORM pg_advisory_unlock_all();
  ELSIF p_ends IS NOT NULL THEN
    SELECT f.unfinished, f.canceled, f.locked INTO unfinished, canceled, locked
      FROM dl_finish(p_worker, p_ends, true, p_waits) f;
  END IF;

  IF p_most > 0 AND NOT dl_is_paused(p_queue) THEN
    IF (SELECT available_at FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on = 'time'
         ORDER BY queue, available_at LIMIT 1) <= now() THEN
      PERFORM dl_wake(p_queue, 100);
    END IF;
    LOOP
      SELECT * INTO taken FROM dl_take_keys(p_queue, p_most, past, past_key_hashes);
      EXIT WHEN taken.job_ids IS NULL;
      RETURN QUERY SELECT s.*, NULL::uuid[], NULL::uuid[], NULL::uuid[], 0, false, NULL::float8
                     FROM dl_start(taken.job_ids, p_worker, p_backend_start) s;
      GET DIAGNOSTICS started = ROW_COUNT;
      IF started < cardinality(taken.slots) THEN
        PERFORM pg_advisory_unlock(key_hash) FROM unnest(taken.slots) key_hash
          WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = key_hash
                               AND claimed_by = p_worker);
      END IF;
      EXIT WHEN started > 0 OR past > 0;
      -- Other sessions have these rows locked: look once more, behind them.
      SELECT ahead.rows, ahead.slots INTO past, past_key_hashes FROM dl_locked_ahead(p_queue) ahead;
      EXIT WHEN past = 0;
    END LOOP;
    IF started = 0 THEN
      SELECT * INTO looked FROM dl_claim(p_queue, p_worker, p_backend_start, p_backoff_sec);
      backoffs := looked.backoffs;
      look_again := looked.look_again;
      due_in := looked.due_in;
      RETURN QUERY SELECT job_id, task, args::text, idempotency_key, lock_key, partition_key, attempt, max_attempts,
                          lease_ttl_sec, timeout_sec, claims, NULL::uuid[], NULL::uuid[], NULL::uuid[], 0, false,
                          NULL::float8
                     FROM dl_jobs WHERE job_id = (looked.job).job_id;
    END IF;
  END IF;
  RETURN NEXT;
END
$$;


-- The same for farms of older code; kept until a migration says `oldest code: 18` or more.
CREATE OR REPLACE FUNCTION dl_step(
  p_queue text, p_worker text, p_backend_start timestamptz, p_backoff_sec float8, p_most int, p_ends json)
RETURNS TABLE (
  job_id uuid, task text, args text, idempotency_key text, lock_key text, partition_key text, attempt int,
  max_attempts int, lease_ttl_sec int, timeout_sec int, claims int,
  unfinished uuid[], canceled uuid[], backoffs int, look_again boolean, due_in float8)
LANGUAGE sql AS $$
  SELECT job_id, task, args, idempotency_key, lock_key, partition_key, attempt, max_attempts, lease_ttl_sec,
         timeout_sec, claims, unfinished, canceled, backoffs, look_again, due_in
    FROM dl_step(p_queue, p_worker, p_backend_start, p_backoff_sec, p_most, p_ends, true)
$$;
