-- The steps in a job's life that need several statements, each with a fresh snapshot (READ COMMITTED gives one to
-- every statement of a PL/pgSQL function). Called from dataloader/queue.py. Applied again whenever this file
-- changes, so farms of two versions share them: a function whose signature or promise changes gets a new name.
--
-- Words. The *slot* of a job is hashtext(lock_key): two keys may share one, they then exclude each other and
-- nothing worse follows. A slot is *busy* while a running row with a live lease has it. A queued row is
-- in exactly one of three places: blocked (blocked_on says why), cold, or hot (a claim once found its key busy).


-- A time as clients can read it: Python knows the years 1 to 9999, PostgreSQL more, and infinity.
CREATE OR REPLACE FUNCTION dl_readable(p_time timestamptz) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_time IS NOT NULL THEN greatest('0001-01-02 00:00+00', least(p_time, '9999-12-30 00:00+00')) END
$$;


-- Has somebody paused the queue? Then no claim starts a job of it. VOLATILE: each call sees what is committed by now.
CREATE OR REPLACE FUNCTION dl_is_paused(p_queue text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  RETURN (SELECT paused_at FROM dl_queues WHERE queue = p_queue) IS NOT NULL;
END
$$;


-- Are as many jobs queued as the queue may hold? Two that ask at once may both be let in. Served by ix_dl_jobs_claim.
CREATE OR REPLACE FUNCTION dl_is_full(p_queue text) RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
  most int := (SELECT max_length FROM dl_queues WHERE queue = p_queue);
BEGIN
  RETURN most IS NOT NULL
     AND (SELECT count(*) FROM (SELECT FROM dl_jobs WHERE queue = p_queue AND status = 'queued' LIMIT most) n) >= most;
END
$$;


-- Is the slot busy? Served by ix_dl_jobs_running. VOLATILE on purpose: each call sees what is committed by now.
CREATE OR REPLACE FUNCTION dl_slot_is_busy(p_slot int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  RETURN EXISTS (SELECT FROM dl_jobs
                  WHERE status = 'running' AND hashtext(lock_key) = p_slot AND lease_expires_at > now());
END
$$;


-- Take the slot for this session: 'taken', 'busy' (a running job has it) or 'refused' (a session has it and no
-- running job says why).
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
      -- Its holder lost the session but not the lease: the work goes on, the row speaks for it.
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


-- End a session that outlived its worker's right to a job, and wait up to 2 s until it is gone. The start is
-- compared because pids are used again. Not allowed for another role's session: then its lock stays, and
-- with it the key, until the server notices that its client is gone.
CREATE OR REPLACE FUNCTION dl_end_session(p_pid int, p_backend_start timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF p_pid <> pg_backend_pid()
     AND EXISTS (SELECT FROM pg_stat_get_activity(p_pid) WHERE backend_start = p_backend_start) THEN
    PERFORM pg_terminate_backend(p_pid, 2000);
  END IF;
EXCEPTION WHEN insufficient_privilege THEN
  NULL;
END
$$;


-- Make up to p_limit rows of the queue claimable whose time has come, and tell its sleepers. Returns their number.
-- Called by dl_claim, and by the reaper for queues that nobody claims from. Served by ix_dl_jobs_due.
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


-- The keys of these slots became free: tell the queues in which hot rows of them wait. Rows that are not hot need no
-- word: the claim that leaves empty-handed past one marks it first (dl_claim).
CREATE OR REPLACE FUNCTION dl_tell_waiters(p_slots int[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  waiting text;
BEGIN
  SELECT min(queue) INTO waiting FROM dl_jobs WHERE status = 'queued' AND blocked_on IS NULL AND hot;
  WHILE waiting IS NOT NULL LOOP
    IF EXISTS (SELECT FROM dl_jobs WHERE queue = waiting AND hashtext(lock_key) = ANY (p_slots)
                  AND status = 'queued' AND blocked_on IS NULL AND hot) THEN
      PERFORM pg_notify('dl_jobs', waiting);
    END IF;
    SELECT min(queue) INTO waiting FROM dl_jobs
     WHERE status = 'queued' AND blocked_on IS NULL AND hot AND queue > waiting;
  END LOOP;
END
$$;


-- The nearest claimable rows of one slot, locked: all that a refusal of its key concerns. At most 1,000 of each place.
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


-- Start those of these queued jobs that may still run and that nobody is at; this session holds their keys. Returns
-- what a worker needs to know of them, the best first. The worker begins that one at once; the others are claimed ahead,
-- and their heartbeat_at stays null until a beat says that they run (dl_reap).
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


-- Try to start one candidate of a claim: null when another session is at it, else what became of it:
-- 'started', 'ended' (cancelled by a plain producer, or out of attempts), 'early' (blocked on its time), 'busy' (its key
-- is, or an older job has the first claim to it: marked hot) or 'refused' (blocked on time, longer with every refusal in
-- a row).
--
-- Whoever locks a queued row here also changes it, so a claim that skips a locked row loses nothing by it.
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
    -- With it go the rows of the same slot among the nearest: each would cost the same wait to be refused as well.
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


-- The slots in which hot rows of the queue wait: a loose scan of ix_dl_jobs_hot, one probe a slot. Called by dl_claim,
-- under its settings. VOLATILE on purpose, as dl_slot_is_busy.
CREATE OR REPLACE FUNCTION dl_hot_slots(p_queue text) RETURNS int[] LANGUAGE plpgsql AS $$
BEGIN
  RETURN ARRAY(
    WITH RECURSIVE slots (slot) AS (
      (SELECT hashtext(lock_key) FROM dl_jobs
        WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
        ORDER BY hashtext(lock_key), priority, created_at LIMIT 1)
      UNION ALL
      SELECT (SELECT hashtext(lock_key) FROM dl_jobs
               WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
                 AND hashtext(lock_key) > slots.slot ORDER BY hashtext(lock_key), priority, created_at LIMIT 1)
        FROM slots WHERE slots.slot IS NOT NULL)
    SELECT slot FROM slots WHERE slot IS NOT NULL);
END
$$;


-- How many of the queue's cold rows stand before the first one that nobody has locked, and the slots of these rows: they
-- stay the first of their keys. One pass over the index; what it finds free is locked.
CREATE OR REPLACE FUNCTION dl_locked_ahead(p_queue text, OUT rows int, OUT slots int[]) LANGUAGE plpgsql AS $$
DECLARE
  first_free uuid := (
    SELECT job_id FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
     ORDER BY priority, created_at LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED);
  candidate uuid;
  its_slot int;
BEGIN
  rows := 0;
  slots := '{}';
  -- Counted, for jobs that were added together may have one created_at.
  FOR candidate, its_slot IN
    SELECT job_id, hashtext(lock_key) FROM dl_jobs
     WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot ORDER BY priority, created_at
  LOOP
    EXIT WHEN candidate = first_free;
    rows := rows + 1;
    slots := slots || its_slot;
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
-- PostgreSQL before 18 that every plan would be compiled). A claim that has spent a second returns and asks for another.
--
-- Cost: O(log N) in the length of the queue. Cold rows come from ix_dl_jobs_cold in the order of the claim,
-- one after the other, each with one probe of ix_dl_jobs_running; when the nearest 1,000 are all busy they are marked
-- hot, once in their life. When others have all of these locked, it looks at the next behind the locked ones. Hot rows
-- cost a loose scan of ix_dl_jobs_hot over the distinct slots. (Sorting the
-- ready rows, as the contract's index makes a plain claim do, takes 0.3 s at 1,000,000; parking busy rows until
-- a finish wakes them loses wake-ups.)
CREATE OR REPLACE FUNCTION dl_claim(
  p_queue text, p_worker text, p_backend_start timestamptz, p_backoff_sec float8,
  OUT job dl_jobs, OUT backoffs int, OUT look_again boolean, OUT due_in float8)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
  candidates refcursor;
  candidate uuid;
  candidate_slot int;
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
  past int := 0;  -- cold rows at the head that others have locked, with their slots
  past_slots int[] := '{}';
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
    passed := past_slots;
    IF (SELECT true FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
         ORDER BY hashtext(lock_key), priority, created_at LIMIT 1) THEN
      waiting := dl_hot_slots(p_queue);
      OPEN candidates FOR
        WITH first_hot AS (
          SELECT first.* FROM unnest(waiting) AS slots (slot) CROSS JOIN LATERAL (
            SELECT job_id, slots.slot, priority, created_at FROM dl_jobs
             WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
               AND hashtext(lock_key) = slots.slot
             ORDER BY priority, created_at LIMIT 1) first
           WHERE (SELECT true FROM dl_jobs r WHERE r.status = 'running' AND hashtext(r.lock_key) = slots.slot
                     AND r.lease_expires_at > now() LIMIT 1) IS NULL),
        first_cold AS (
          SELECT job_id, hashtext(lock_key) AS slot, priority, created_at FROM (
            SELECT job_id, lock_key, priority, created_at FROM dl_jobs
             WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
             ORDER BY priority, created_at LIMIT 1000 OFFSET past) near
           WHERE (SELECT true FROM dl_jobs r WHERE r.status = 'running' AND hashtext(r.lock_key) = hashtext(near.lock_key)
                     AND r.lease_expires_at > now() LIMIT 1) IS NULL
           ORDER BY priority, created_at LIMIT 64)
        SELECT job_id, slot FROM (TABLE first_hot UNION ALL TABLE first_cold) best ORDER BY priority, created_at;
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
      FETCH candidates INTO candidate, candidate_slot;
      EXIT WHEN NOT FOUND;
      CONTINUE WHEN candidate_slot = ANY (passed);  -- a key that becomes free meanwhile is its first job's
      SELECT * INTO tried FROM dl_try(candidate, p_worker, p_backend_start, p_backoff_sec);
      IF tried.outcome = 'started' THEN
        CLOSE candidates;
        job := tried.job;
        look_again := false;
        IF marks THEN
          PERFORM pg_notify('dl_jobs', p_queue);  -- whoever left before these marks may have the rest
        END IF;
        RETURN;
      END IF;
      changed := changed OR tried.outcome IS NOT NULL;
      IF tried.outcome = 'refused' THEN
        backoffs := backoffs + 1;
        EXIT;  -- most candidates may have been of this slot: look anew
      ELSIF tried.outcome = 'busy' THEN
        marks := true;
        passed := passed || candidate_slot;
      ELSIF tried.outcome IS NULL THEN
        passed := passed || candidate_slot;  -- who is at it may be marking it: it stays the first of its key
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

    -- Empty-handed. What was passed over is marked hot, so that the next look sees past it and the finish of its
    -- key's job knows whom to tell. In bunches: no claim takes long. (status::text: see dl_try.)
    near := ARRAY(
      SELECT job_id FROM dl_jobs
       WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
       ORDER BY priority, created_at LIMIT 1000 OFFSET past);
    near_unlocked := '{}';
    left_alone := past_slots;
    marked := 0;
    IF near <> '{}' THEN  -- of an empty list the planner proves what it likes, and reads some index as a whole
      near_unlocked := ARRAY(SELECT job_id FROM dl_jobs WHERE job_id = ANY (near) FOR NO KEY UPDATE SKIP LOCKED);
      -- Where somebody is at a row, the others of its slot stay as they are: were they hot and it still cold, the
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
      -- Others have all of them locked. Nobody will tell us when they let go: come back, but look behind them now.
      SELECT ahead.rows, ahead.slots INTO found_past, past_slots FROM dl_locked_ahead(p_queue) ahead;
      contended := found_past <= past;
      past := found_past;
      EXIT WHEN contended;
      CONTINUE;
    ELSIF cardinality(near) >= 1000 THEN
      look_again := true;
      EXIT;
    END IF;

    -- A finish that runs beside us must not slip between its look for waiters and our marks. So hold the running
    -- rows of the hot slots FOR SHARE: a later finish waits for our commit, sees the marks and notifies. When these
    -- rows account for every hot slot, and all is marked, nothing is claimable and nobody will be forgotten; otherwise
    -- something is becoming free, or is held by a finish, a beat or a claim under way: look again. Nothing is waited
    -- for (SKIP LOCKED), so this cannot deadlock, nor hang on a transaction that somebody left open.
    waiting := dl_hot_slots(p_queue);
    held := '{}';
    IF waiting <> '{}' THEN
      SELECT coalesce(array_agg(slot), '{}') INTO held FROM (
        SELECT hashtext(r.lock_key) AS slot FROM dl_jobs r
         WHERE r.status = 'running' AND hashtext(r.lock_key) = ANY (waiting) AND r.lease_expires_at > now()
           FOR SHARE OF r SKIP LOCKED) holders;
    END IF;
    IF waiting <@ held AND left_alone = '{}' THEN
      marks := false;
      EXIT;
    END IF;
    -- Somebody is at these rows and has not committed yet. If that goes on, come back later; where the rows are many,
    -- without another look, for each look tries them all.
    contended := look = 10 OR past + cardinality(near) - cardinality(near_unlocked) > 100;
    EXIT WHEN contended AND look < 10;
    PERFORM pg_sleep(0.0005 * look);
  END LOOP;

  IF marks THEN
    PERFORM pg_notify('dl_jobs', p_queue);  -- not proven, see above: whoever trusted these marks has to look as well
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
-- key, and of few keys not all; returns the jobs and the slots taken. For the normal case, in which some of the first
-- thousand rows of the queue may start: no row is locked or marked, and a key that is not free at once is passed over,
-- as are the first p_past cold rows and the keys of p_passed. Nothing taken says nothing: then dl_claim looks more
-- closely.
CREATE OR REPLACE FUNCTION dl_take_keys(
  p_queue text, p_most int, p_past int, p_passed int[], OUT job_ids uuid[], OUT slots int[])
LANGUAGE plpgsql AS $$
DECLARE
  candidates refcursor;
  candidate uuid;
  its_slot int;
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
      SELECT job_id, slot, cancel_requested OR attempt >= greatest(max_attempts, 1) FROM (
        (SELECT job_id, hashtext(lock_key) AS slot, cancel_requested, attempt, max_attempts, priority, created_at
           FROM dl_jobs
          WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND NOT hot
          ORDER BY priority, created_at LIMIT 1000 + p_most OFFSET p_past)
        UNION ALL
        SELECT first_hot.* FROM unnest(dl_hot_slots(p_queue)) AS hot (slot) CROSS JOIN LATERAL (
          SELECT job_id, hot.slot, cancel_requested, attempt, max_attempts, priority, created_at FROM dl_jobs
           WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot AND hashtext(lock_key) = hot.slot
           ORDER BY priority, created_at LIMIT 1) first_hot
         WHERE (SELECT true FROM dl_jobs r WHERE r.status = 'running' AND hashtext(r.lock_key) = hot.slot
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
    FETCH candidates INTO candidate, its_slot, is_over;
    EXIT WHEN NOT FOUND;
    EXIT WHEN is_over;  -- to be ended on the way, by dl_claim
    -- Its own lock would not refuse it; and a key that becomes free meanwhile is its first job's, not a later one's.
    IF its_slot = ANY (slots) THEN
      keys_are_few := true;
      behind := behind + 1;
      EXIT WHEN behind * cardinality(slots) > 500;  -- the more there are, the less is one more worth the reading
    ELSIF its_slot <> ALL (refused) THEN
      behind := 0;
      IF pg_try_advisory_lock(its_slot) THEN
        job_ids := job_ids || candidate;
        slots := slots || its_slot;
        EXIT WHEN cardinality(slots) = p_most;
      ELSE
        refused := refused || its_slot;
      END IF;
    END IF;
  END LOOP;
  CLOSE candidates;

  -- Fewer keys than this session could do with, and jobs wait behind them. Were all taken, the next worker would find
  -- none, and mark rows instead of working; as each leaves a sixteenth of what it finds, all have as many in the end.
  IF keys_are_few AND cardinality(slots) < p_most THEN
    spared := (cardinality(slots) + 8) / 16;
    PERFORM pg_advisory_unlock(slot) FROM unnest(slots[cardinality(slots) - spared + 1:]) slot;
    job_ids := trim_array(job_ids, spared);
    slots := trim_array(slots, spared);
  END IF;

  -- The look behind the lock, with a fresh snapshot: see dl_take_slot. The hot rows are looked at again as well, for the
  -- candidates are older than the locks: a job that was running then and came back, or was marked in between, stands
  -- there now and goes before a later one of its key. (What our statements make claimable again at once comes back hot.)
  SELECT ARRAY(SELECT hashtext(lock_key) FROM dl_jobs
                WHERE status = 'running' AND hashtext(lock_key) = ANY (slots) AND lease_expires_at > now()),
         (SELECT true FROM dl_jobs WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot
           ORDER BY hashtext(lock_key), priority, created_at LIMIT 1)
    INTO busy, has_hot;
  IF has_hot OR cardinality(busy) > 0 THEN
    PERFORM pg_advisory_unlock(slot) FROM unnest(busy) slot;
    SELECT array_agg(coalesce(older.job_id, taken.job_id)), array_agg(slot) INTO job_ids, slots
      FROM unnest(job_ids, slots) AS taken (job_id, slot) LEFT JOIN LATERAL (
        SELECT first.job_id FROM (
          SELECT job_id, priority, created_at FROM dl_jobs
           WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND hot AND hashtext(lock_key) = slot
           ORDER BY priority, created_at LIMIT 1) first
          JOIN dl_jobs chosen ON chosen.job_id = taken.job_id
         WHERE (first.priority, first.created_at) < (chosen.priority, chosen.created_at)) older ON true
     WHERE slot <> ALL (busy);
  END IF;
END
$$;


-- Write how runs of this worker have ended. p_ends is a list of objects:
--   job_id, attempt   the claim
--   verb              succeed; retry (again after delay_sec); fail; cancel (the run stopped for it); hand_back (again at
--                     once, uncounted)
--   error             the error's text; for hand_back the reason
--   progress, facts   the last progress; what joins the journal's row; may be missing
-- A job that was asked to cancel ends canceled, whatever came of its run: that is never tried again.
--
-- `unfinished` are those that are not this worker's any more, `canceled` those that ended so unasked by their verb,
-- `locked` those that somebody has locked: their ends are to be written again a little later. Null when there are none.
-- A claim holds running rows for a moment, so a locked row is tried again after 1, 5, 25 ms. With p_waits a locked row is
-- waited for, many in the order of job_id. The keys of the ended jobs are let go, and with p_let_go all that the session
-- holds: the row of a locked job still runs, and so speaks for its key.
--
-- Each row is found by its job_id, locked, and changed where it was found (ctid). Were it looked for by job_id once more,
-- a plan that was made on a short table would read all of a long one.
CREATE OR REPLACE FUNCTION dl_finish(
  p_worker text, p_ends json, p_let_go boolean, p_waits boolean,
  OUT unfinished uuid[], OUT canceled uuid[], OUT locked uuid[])
LANGUAGE plpgsql AS $$
DECLARE
  slots int[] := '{}';
  ended uuid[] := '{}';
  wrote record;
  pause float8;
BEGIN
  IF p_waits THEN
    PERFORM FROM dl_jobs WHERE job_id = ANY (ARRAY(SELECT (e ->> 'job_id')::uuid FROM json_array_elements(p_ends) e))
      ORDER BY job_id FOR NO KEY UPDATE;
  END IF;
  FOREACH pause IN ARRAY ARRAY[0.001, 0.005, 0.025, 0] LOOP
    WITH free AS MATERIALIZED (
      SELECT e.*, its_row.at
        FROM json_to_recordset(p_ends) AS e (
               job_id uuid, attempt int, verb text, error text, delay_sec float8, progress jsonb, facts jsonb)
       CROSS JOIN LATERAL (
         SELECT ctid AS at FROM dl_jobs WHERE dl_jobs.job_id = e.job_id FOR NO KEY UPDATE SKIP LOCKED) its_row
       WHERE e.job_id <> ALL (ended)),
    ended AS (
      UPDATE dl_jobs j SET
             status = CASE WHEN cancel_requested THEN 'canceled' ELSE CASE verb
                        WHEN 'succeed' THEN 'succeeded' WHEN 'fail' THEN 'failed' WHEN 'cancel' THEN 'canceled'
                        ELSE 'queued' END END::dl_status,
             journaled = journaled + 1,
             attempt = CASE verb WHEN 'hand_back' THEN j.attempt - 1 ELSE j.attempt END,
             -- What may run again at once: a claim beside us finds it before a later job of its key (dl_take_keys).
             hot = hot OR verb = 'hand_back' OR verb = 'retry' AND delay_sec <= 0,
             available_at = CASE verb WHEN 'retry' THEN now() + make_interval(secs => delay_sec)
                                      WHEN 'hand_back' THEN now() ELSE available_at END,
             finished_at = CASE WHEN cancel_requested OR verb NOT IN ('retry', 'hand_back') THEN now() END,
             lease_expires_at = NULL, claimed_by = NULL, claimed_pid = NULL, claimed_backend_start = NULL,
             progress = coalesce(e.progress, j.progress),
             error = CASE verb WHEN 'hand_back' THEN j.error
                               WHEN 'succeed' THEN CASE WHEN cancel_requested THEN
                                 'canceled when the pipeline had finished: its work stands' END
                               ELSE e.error END
        FROM free e WHERE j.ctid = e.at AND j.attempt = e.attempt AND claimed_by = p_worker AND status::text = 'running'
      RETURNING j.job_id, queue, lock_key, status, j.attempt, verb, delay_sec, facts,
                CASE verb WHEN 'succeed' THEN j.error ELSE e.error END AS error),
    journal AS (
      INSERT INTO dl_job_events (job_id, queue, kind, payload)
      SELECT job_id, queue,
             CASE status WHEN 'succeeded' THEN 'done' WHEN 'queued' THEN 'requeue' ELSE status::text END,
             jsonb_strip_nulls(jsonb_build_object(
               'attempt', attempt, 'worker', p_worker,
               'reason', CASE verb WHEN 'retry' THEN 'error' WHEN 'fail' THEN NULL WHEN 'cancel' THEN NULL ELSE error END,
               'error', CASE WHEN verb IN ('retry', 'fail') THEN error END,
               'delay_sec', CASE verb WHEN 'retry' THEN delay_sec END)) || coalesce(facts, '{}') FROM ended)
    SELECT array_agg(job_id) AS job_ids, array_agg(hashtext(lock_key)) AS slots,
           array_agg(job_id) FILTER (WHERE status = 'canceled' AND verb <> 'cancel') AS canceled
      INTO wrote FROM ended;
    ended := ended || wrote.job_ids;
    slots := slots || wrote.slots;
    canceled := canceled || wrote.canceled;
    locked := NULL;
    EXIT WHEN cardinality(ended) = json_array_length(p_ends);
    SELECT array_agg(job_id) FILTER (WHERE is_ours), array_agg(job_id) FILTER (WHERE is_ours IS NULL)
      INTO locked, unfinished
      FROM (SELECT e.job_id, (SELECT true FROM dl_jobs j
                               WHERE j.job_id = e.job_id AND j.attempt = e.attempt AND claimed_by = p_worker
                                 AND status::text = 'running' LIMIT 1) AS is_ours
              FROM json_to_recordset(p_ends) AS e (job_id uuid, attempt int)
             WHERE e.job_id <> ALL (ended)) missing;
    EXIT WHEN locked IS NULL;
    PERFORM pg_sleep(pause);
  END LOOP;
  IF p_let_go THEN
    PERFORM pg_advisory_unlock_all();
  ELSE
    -- Where an end comes late, for its row was locked, the key may be that of the next run by now.
    PERFORM pg_advisory_unlock(slot) FROM unnest(slots) slot
      WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = slot
                           AND claimed_by = p_worker);
  END IF;
  PERFORM dl_tell_waiters(slots);
END
$$;


-- The same, as called by farms of before, which take for written what is not unfinished: it waits.
CREATE OR REPLACE FUNCTION dl_finish(
  p_worker text, p_ends json, p_let_go boolean, OUT unfinished uuid[], OUT canceled uuid[]) LANGUAGE sql AS $$
  SELECT unfinished, canceled FROM dl_finish(p_worker, p_ends, p_let_go, true)
$$;


-- Finish what has ended and claim the next, in one round trip.
--
-- p_ends   as for dl_finish; all keys that the session still holds are let go, even with an empty list, but not with null
-- p_most   how many jobs to claim at most
-- p_waits  as for dl_finish; the other parameters as for dl_claim
--
-- Returns a row for each claimed job, as dl_start does, then one without a job, with what dl_finish and dl_claim say
-- besides.
--
-- The caller's session has the settings of dl_claim: to set them at each call would cost as much as a statement.
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
  past int := 0;  -- cold rows at the head that others have locked, with their slots
  past_slots int[] := '{}';
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
      SELECT * INTO taken FROM dl_take_keys(p_queue, p_most, past, past_slots);
      EXIT WHEN taken.job_ids IS NULL;
      RETURN QUERY SELECT s.*, NULL::uuid[], NULL::uuid[], NULL::uuid[], 0, false, NULL::float8
                     FROM dl_start(taken.job_ids, p_worker, p_backend_start) s;
      GET DIAGNOSTICS started = ROW_COUNT;
      IF started < cardinality(taken.slots) THEN
        PERFORM pg_advisory_unlock(slot) FROM unnest(taken.slots) slot
          WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = slot
                               AND claimed_by = p_worker);
      END IF;
      EXIT WHEN started > 0 OR past > 0;
      -- Others have these rows locked: once more, behind them.
      SELECT ahead.rows, ahead.slots INTO past, past_slots FROM dl_locked_ahead(p_queue) ahead;
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


-- The same, as called by farms of before.
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


-- Seconds until a job whose worker died may start again: at once the first time, then 5, 25, 125 ... up to 600.
CREATE OR REPLACE FUNCTION dl_crash_delay(p_attempt int) RETURNS float8 LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_attempt <= 1 THEN 0 ELSE least(600, 5.0 ^ least(p_attempt - 1, 10)) END::float8
$$;


-- Put a running job whose worker is gone where it belongs: 'canceled' when that was asked for, 'queued' again while it
-- has attempts left, and then, by how the run ended (p_end):
--   'crash'    the worker died: again after dl_crash_delay, in the end 'lost'
--   'timeout'  it was ended for taking too long, an error of the job: again after 30 s an attempt, in the end 'failed'
--   'drain'    it does not count: again at once, without an error, its attempt given back
-- p_facts joins the journal's row: what is known of the process that ran it. The row must be locked by the caller, the
-- session of its claim ended. Returns the new status. Called by dl_settle and dl_reap.
CREATE OR REPLACE FUNCTION dl_lose(p_job_id uuid, p_end text, p_reason text, p_facts jsonb) RETURNS dl_status
LANGUAGE plpgsql AS $$
DECLARE
  job dl_jobs;
  delay_sec float8;
BEGIN
  SELECT * INTO job FROM dl_jobs WHERE job_id = p_job_id;
  delay_sec := CASE p_end WHEN 'crash' THEN dl_crash_delay(job.attempt)
                          WHEN 'timeout' THEN least(30.0 * job.attempt, 86400) ELSE 0 END;
  IF p_end = 'drain' THEN
    job.attempt := greatest(job.attempt - 1, 0);
  END IF;
  job.status := CASE WHEN job.cancel_requested THEN 'canceled'
                     WHEN job.attempt < job.max_attempts OR p_end = 'drain' THEN 'queued'
                     WHEN p_end = 'timeout' THEN 'failed'
                     ELSE 'lost' END;
  UPDATE dl_jobs SET
         status = job.status, journaled = journaled + 1, attempt = job.attempt,
         hot = hot OR delay_sec = 0,  -- as dl_finish for what is handed back
         available_at = now() + make_interval(secs => delay_sec),
         finished_at = CASE WHEN job.status <> 'queued' THEN now() END,
         lease_expires_at = NULL,
         error = CASE WHEN p_end = 'drain' THEN error ELSE p_reason END
   WHERE job_id = p_job_id;
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  VALUES (job.job_id, job.queue, CASE job.status WHEN 'queued' THEN 'requeue' ELSE job.status::text END,
          jsonb_build_object('reason', p_reason, 'attempt', job.attempt) || p_facts);
  PERFORM dl_tell_waiters(ARRAY[hashtext(job.lock_key)]);  -- not the trigger's: this step is journaled
  RETURN job.status;
END
$$;


-- Settle what a dead worker held, at once: called by the keeper, which saw it die; p_end, p_reason and p_facts as for
-- dl_lose. They are for p_running, the last job that it had begun to run; whatever else it had claimed is handed back
-- uncounted. Null: it is not known, so all count. The worker's session is ended first, so that its advisory locks are
-- gone when the jobs are claimed again. Returns each job settled and its new status; a null status for one that somebody
-- has locked, to be tried again.
CREATE OR REPLACE FUNCTION dl_settle(p_worker text, p_running uuid, p_end text, p_reason text, p_facts jsonb)
RETURNS TABLE (job_id uuid, status dl_status) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  held dl_jobs;
  claimed uuid;
BEGIN
  FOR claimed IN SELECT dl_jobs.job_id FROM dl_jobs WHERE status = 'running' AND claimed_by = p_worker LOOP
    job_id := claimed;
    status := NULL;
    SELECT * INTO held FROM dl_jobs WHERE dl_jobs.job_id = claimed FOR NO KEY UPDATE SKIP LOCKED;
    CONTINUE WHEN FOUND AND (held.status <> 'running' OR held.claimed_by IS DISTINCT FROM p_worker);
    IF FOUND THEN
      PERFORM dl_end_session(held.claimed_pid, held.claimed_backend_start);
      IF claimed <> p_running THEN
        status := dl_lose(claimed, 'drain', 'not started: ' || p_reason, '{}');
      ELSE
        status := dl_lose(
          claimed, p_end, p_reason || CASE WHEN p_end = 'drain' THEN '' ELSE ' on attempt ' || held.attempt END,
          p_facts);
      END IF;
    END IF;
    RETURN NEXT;
  END LOOP;
END
$$;


-- The same, as called by farms of before.
CREATE OR REPLACE FUNCTION dl_settle(p_worker text, p_end text, p_reason text, p_facts jsonb)
RETURNS TABLE (job_id uuid, status dl_status) LANGUAGE sql AS $$
  SELECT * FROM dl_settle(p_worker, NULL, p_end, p_reason, p_facts)
$$;


-- Return one job whose lease has run out to where it belongs (dl_lose). One call, one job, one short transaction;
-- called by the reaper until it returns no row. Checked and changed under one row lock, never selected first and
-- updated later (river#1373); rows that somebody holds are skipped. Served by ix_dl_jobs_running. A running row
-- without a lease, which only another service can make, has one of lease_ttl_sec from its last sign of life.
--
-- A job that was claimed ahead and never beat was not begun (a worker beats for such a job when it has run for 50 ms), so
-- it goes back uncounted. But once for each attempt only: a job that ends its machine within these 50 ms looks the same.
--
-- p_up_sec        for so long the database has answered the caller, by a clock that did not jump
-- p_patience_sec  as long as a living worker may need to reach the database again and to write what it has to
--
-- While the database was away nobody could renew. So a lease that was last renewed before the database came back is over
-- only when its worker has had that time, and a third of the lease besides: the longest pause between two heartbeats.
-- After a jump of the database's clock the same holds for all leases of before.
CREATE OR REPLACE FUNCTION dl_reap(
  p_up_sec float8, p_patience_sec float8, OUT job_id uuid, OUT queue text, OUT status dl_status)
LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  not_begun CONSTANT text := 'not started: the lease expired';
  held dl_jobs;
  back timestamptz := CASE WHEN p_up_sec < 1e9 THEN now() - make_interval(secs => p_up_sec) ELSE '-infinity' END;
BEGIN
  SELECT * INTO held FROM dl_jobs
   WHERE status = 'running'
     AND coalesce(lease_expires_at,
                  coalesce(heartbeat_at, started_at, created_at) + make_interval(secs => lease_ttl_sec)) < now()
     AND (p_up_sec > p_patience_sec + lease_ttl_sec / 3.0
          OR greatest(lease_expires_at - make_interval(secs => lease_ttl_sec), heartbeat_at, created_at) >= back)
   LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  PERFORM dl_end_session(held.claimed_pid, held.claimed_backend_start);
  job_id := held.job_id;
  queue := held.queue;
  IF held.heartbeat_at IS NULL AND held.claimed_by IS NOT NULL AND held.attempt > (
       SELECT count(*) FROM dl_job_events e
        WHERE e.job_id = held.job_id AND kind = 'requeue' AND payload ->> 'reason' = not_begun) THEN
    status := dl_lose(held.job_id, 'drain', not_begun, '{}');
    RETURN;
  END IF;
  status := dl_lose(
    held.job_id, 'crash', 'lease expired on attempt ' || held.attempt || ': no heartbeat since '
    || coalesce(to_char(held.heartbeat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), 'the start'), '{}');
END
$$;


-- The same, as called by reapers of before.
CREATE OR REPLACE FUNCTION dl_reap(OUT job_id uuid, OUT queue text, OUT status dl_status) LANGUAGE sql AS $$
  SELECT * FROM dl_reap('infinity', 0)
$$;


-- Delete up to p_limit jobs, and their journal, that ended at or after p_since and more than p_older_than_sec ago, the
-- oldest first. One call, one short transaction; called by the reaper until it returns fewer than p_limit.
--
-- pruned    how many were deleted
-- reached   the latest end among them: where the next call goes on, p_since when there was none. So no call reads again
--           what those before it deleted, which stays in the index while any old transaction may see it
--
-- Rows that somebody holds are skipped: they are being put back, or get a word in the journal. FOR UPDATE looks at the
-- newest version, so a job that came back to life is left alone. The arrays, like the settings, keep the plans what they
-- should be whatever the statistics say: each row is found by an index. Served by ix_dl_jobs_finished.
CREATE OR REPLACE FUNCTION dl_prune(
  p_older_than_sec float8, p_since timestamptz, p_limit int, OUT pruned int, OUT reached timestamptz)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
  old uuid[];
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);  -- after a crash of the server it is done once more
  SELECT coalesce(array_agg(job_id), '{}'), coalesce(max(finished_at), p_since) INTO old, reached FROM (
    SELECT job_id, finished_at FROM dl_jobs
     WHERE finished_at >= p_since AND finished_at < now() - make_interval(secs => p_older_than_sec)
       AND status::text IN ('succeeded', 'failed', 'canceled', 'lost')
     ORDER BY finished_at LIMIT p_limit FOR UPDATE SKIP LOCKED) finished;
  DELETE FROM dl_job_events WHERE job_id = ANY (old);
  DELETE FROM dl_jobs WHERE job_id = ANY (old);
  pruned := cardinality(old);
END
$$;


-- Does this session hold the slot's advisory lock? A lock by one bigint stands in pg_locks as two halves.
CREATE OR REPLACE FUNCTION dl_session_has_slot(p_pid int, p_backend_start timestamptz, p_slot bigint) RETURNS boolean
LANGUAGE sql AS $$
  SELECT EXISTS (SELECT FROM pg_stat_get_activity(p_pid) WHERE backend_start = p_backend_start)
     AND EXISTS (SELECT FROM pg_locks
                  WHERE locktype = 'advisory' AND granted AND pid = p_pid AND objsubid = 1
                    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                    AND classid::bigint = (p_slot >> 32) & 4294967295 AND objid::bigint = p_slot & 4294967295)
$$;


-- After a reconnect: take the key again for this session and renew the claim. True when the run may go on; false
-- when the claim or the key is somebody else's by now, and then nothing is held. Null when the run may go on, but its
-- former session still has the key: it cannot end (its process is stopped, its disk hangs). Then try again later.
CREATE OR REPLACE FUNCTION dl_retake(p_job_id uuid, p_attempt int, p_worker text, p_backend_start timestamptz)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  held dl_jobs;
BEGIN
  SELECT * INTO held FROM dl_jobs
   WHERE job_id = p_job_id AND attempt = p_attempt AND claimed_by = p_worker AND status = 'running'
     FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  -- The server may not have noticed that our old session is gone.
  PERFORM dl_end_session(held.claimed_pid, held.claimed_backend_start);
  IF NOT pg_try_advisory_lock(hashtext(held.lock_key)) THEN
    IF NOT dl_session_has_slot(held.claimed_pid, held.claimed_backend_start, hashtext(held.lock_key)) THEN
      RETURN false;
    END IF;
    UPDATE dl_jobs SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec)
     WHERE job_id = p_job_id;
    RETURN NULL;
  END IF;
  IF EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = hashtext(held.lock_key)
                AND lease_expires_at > now() AND job_id <> p_job_id) THEN
    PERFORM pg_advisory_unlock(hashtext(held.lock_key));
    RETURN false;
  END IF;
  UPDATE dl_jobs SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec),
         claimed_pid = pg_backend_pid(), claimed_backend_start = p_backend_start
   WHERE job_id = p_job_id;
  RETURN true;
END
$$;


-- A column of a batch as enqueue_many sends it: one value per job, or a single one for all of them.
CREATE OR REPLACE FUNCTION dl_spread(p_values anyarray, p_size int) RETURNS anyarray LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN cardinality(p_values) = 1 THEN array_fill(p_values[1], ARRAY[p_size]) ELSE p_values END
$$;


-- Add a batch: one row and one journal row per job, or nothing. The job ids are the caller's, one per job, growing, so
-- that the keys of both tables' indexes are inserted at their right edge. Each other array has one value per job or one
-- for all, but p_args (JSON) has one per job. Returns the jobs that were not added: their place in the arrays (from 1),
-- and the id and status of the job that has their idempotency key; nulls when that job was deleted meanwhile.
--
-- now() is the same all over a transaction, and jobs of one created_at run in no order. So each job is created a
-- microsecond after the one before it in the list, counted from p_since, or from the clock: an insert takes longer than
-- that, so the next batch of the session comes later still. p_place are the jobs' places in a list of several batches.
-- Keys are inserted in the order of their bytes: two batches that share keys wait for each other and never in a circle.
-- With the owner's rights, for a producer has none on the tables; so it trusts no search_path, nor pg_temp, and is bound to
-- this schema by its text. The journal says which role added the jobs: see dl_job_status.
DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_many(
  p_job_id uuid[], p_queue text[], p_task text[], p_args text[], p_idempotency_key text[], p_lock_key text[],
  p_partition_key text[], p_priority int[], p_available_at timestamptz[], p_max_attempts int[], p_lease_ttl_sec int[],
  p_timeout_sec int[], p_producer text[], p_consumer_group text[], p_place int[], p_since timestamptz)
RETURNS TABLE (place int, job_id uuid, status text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  size int := cardinality(p_job_id);
  since timestamptz := coalesce(p_since, clock_timestamp());
  added_by jsonb := jsonb_build_object('user', session_user);
  written int;
BEGIN
  IF array_remove(p_idempotency_key, NULL) = '{}' THEN
    -- Nothing can be in the way, and an insert that need not look is cheaper by a tenth.
    INSERT INTO %1$I.dl_jobs (
           job_id, queue, task, args, lock_key, partition_key, priority, available_at, max_attempts, lease_ttl_sec,
           timeout_sec, producer, consumer_group, created_at, journaled)
    SELECT n.job_id, queue, task, args::jsonb, lock_key, partition_key, priority, coalesce(available_at, now()),
           max_attempts, lease_ttl_sec, timeout_sec, producer, consumer_group,
           since + coalesce(n.place, nth) * interval '1 microsecond', 1
      FROM (SELECT unnest(p_job_id) AS job_id, unnest(%1$I.dl_spread(p_queue, size)) AS queue,
                   unnest(%1$I.dl_spread(p_task, size)) AS task, unnest(%1$I.dl_spread(p_lock_key, size)) AS lock_key,
                   unnest(%1$I.dl_spread(p_partition_key, size)) AS partition_key,
                   unnest(%1$I.dl_spread(p_priority, size)) AS priority,
                   unnest(%1$I.dl_spread(p_available_at, size)) AS available_at,
                   unnest(%1$I.dl_spread(p_max_attempts, size)) AS max_attempts,
                   unnest(%1$I.dl_spread(p_lease_ttl_sec, size)) AS lease_ttl_sec,
                   unnest(%1$I.dl_spread(p_timeout_sec, size)) AS timeout_sec,
                   unnest(%1$I.dl_spread(p_producer, size)) AS producer,
                   unnest(%1$I.dl_spread(p_consumer_group, size)) AS consumer_group, unnest(p_args) AS args,
                   unnest(p_place) AS place, generate_series(1, size) AS nth) n;
    INSERT INTO %1$I.dl_job_events (job_id, queue, kind, payload)
    SELECT n.job_id, queue, 'queued',
           CASE WHEN producer IS NULL THEN added_by ELSE added_by || jsonb_build_object('producer', producer) END
      FROM (SELECT unnest(p_job_id) AS job_id, unnest(%1$I.dl_spread(p_queue, size)) AS queue,
                   unnest(%1$I.dl_spread(p_producer, size)) AS producer) n;
    RETURN;
  END IF;

  WITH added AS (
    INSERT INTO %1$I.dl_jobs (
           job_id, queue, task, args, idempotency_key, lock_key, partition_key, priority, available_at, max_attempts,
           lease_ttl_sec, timeout_sec, producer, consumer_group, created_at, journaled)
    SELECT n.job_id, queue, task, args::jsonb, idempotency_key, lock_key, partition_key, priority,
           coalesce(available_at, now()), max_attempts, lease_ttl_sec, timeout_sec, producer, consumer_group,
           since + coalesce(n.place, nth) * interval '1 microsecond', 1
      FROM (SELECT unnest(p_job_id) AS job_id, unnest(%1$I.dl_spread(p_queue, size)) AS queue,
                   unnest(%1$I.dl_spread(p_task, size)) AS task,
                   unnest(%1$I.dl_spread(p_idempotency_key, size)) AS idempotency_key,
                   unnest(%1$I.dl_spread(p_lock_key, size)) AS lock_key,
                   unnest(%1$I.dl_spread(p_partition_key, size)) AS partition_key,
                   unnest(%1$I.dl_spread(p_priority, size)) AS priority,
                   unnest(%1$I.dl_spread(p_available_at, size)) AS available_at,
                   unnest(%1$I.dl_spread(p_max_attempts, size)) AS max_attempts,
                   unnest(%1$I.dl_spread(p_lease_ttl_sec, size)) AS lease_ttl_sec,
                   unnest(%1$I.dl_spread(p_timeout_sec, size)) AS timeout_sec,
                   unnest(%1$I.dl_spread(p_producer, size)) AS producer,
                   unnest(%1$I.dl_spread(p_consumer_group, size)) AS consumer_group, unnest(p_args) AS args,
                   unnest(p_place) AS place, generate_series(1, size) AS nth) n
     ORDER BY idempotency_key COLLATE "C", nth
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING job_id, queue, producer)
  INSERT INTO %1$I.dl_job_events (job_id, queue, kind, payload)
  SELECT added.job_id, queue, 'queued',
         CASE WHEN producer IS NULL THEN added_by ELSE added_by || jsonb_build_object('producer', producer) END
    FROM added;
  GET DIAGNOSTICS written = ROW_COUNT;
  IF written < size THEN
    -- A statement of its own, for its own snapshot: in one with the insert a twin's row stays invisible.
    RETURN QUERY
    SELECT nth::int, j.job_id, j.status::text
      FROM unnest(p_job_id, %1$I.dl_spread(p_idempotency_key, size)) WITH ORDINALITY AS n (job_id, idempotency_key, nth)
      LEFT JOIN %1$I.dl_jobs j USING (idempotency_key)
     WHERE idempotency_key IS NOT NULL AND j.job_id IS DISTINCT FROM n.job_id;
  END IF;
END
$$
$function$, current_schema()); END $bound$;


-- Add one job, for producers in any language (docs/producers.md); returns its id, and for an idempotency key seen
-- before that of the job that has it. The parameters are dl_jobs' columns, by name; null counts as left out. Bad input
-- is refused with SQLSTATE 22023 and a message that names the parameter. Runs with the owner's rights, bound as
-- dl_enqueue_many: call it by its full name from anywhere. The journal is the trigger's.
DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue(
  queue text, task text, lock_key text, args jsonb DEFAULT NULL, idempotency_key text DEFAULT NULL,
  partition_key text DEFAULT NULL, priority int DEFAULT NULL, available_at timestamptz DEFAULT NULL,
  max_attempts int DEFAULT NULL, lease_ttl_sec int DEFAULT NULL, timeout_sec int DEFAULT NULL,
  producer text DEFAULT NULL, consumer_group text DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  wrong text;
  found uuid;
BEGIN
  -- The rules of dataloader/producer.py.
  wrong := CASE
    WHEN coalesce(length(dl_enqueue.queue), 0) NOT BETWEEN 1 AND 128 OR dl_enqueue.queue ~ '[\u0001-\u001f\u007f-\u009f]'
      THEN 'queue should be a text of 1 to 128 characters without control characters'
    WHEN coalesce(length(dl_enqueue.task), 0) NOT BETWEEN 1 AND 200 THEN 'task should be a text of 1 to 200 characters'
    WHEN coalesce(length(dl_enqueue.lock_key), 0) NOT BETWEEN 1 AND 512
      THEN 'lock_key should be a text of 1 to 512 characters'
    WHEN jsonb_typeof(dl_enqueue.args) <> 'object' THEN 'args should be a JSON object'
    WHEN length(dl_enqueue.idempotency_key) NOT BETWEEN 1 AND 255
      THEN 'idempotency_key should be a text of 1 to 255 characters'
    WHEN length(dl_enqueue.partition_key) > 255 THEN 'partition_key should be a text of at most 255 characters'
    WHEN dl_enqueue.priority < 0 THEN 'priority should be 0 or more'
    WHEN dl_enqueue.available_at NOT BETWEEN '2000-01-01 00:00+00' AND now() + interval '3653 days'
      THEN 'available_at should be from the year 2000 to ten years from now'
    WHEN dl_enqueue.max_attempts < 1 THEN 'max_attempts should be 1 or more'
    WHEN dl_enqueue.lease_ttl_sec NOT BETWEEN 1 AND 86400 THEN 'lease_ttl_sec should be from 1 to 86400'
    WHEN dl_enqueue.timeout_sec NOT BETWEEN 1 AND 2592000 THEN 'timeout_sec should be from 1 to 2592000'
    WHEN length(dl_enqueue.producer) > 255 THEN 'producer should be a text of at most 255 characters'
    WHEN length(dl_enqueue.consumer_group) > 255 THEN 'consumer_group should be a text of at most 255 characters'
  END;
  IF wrong IS NOT NULL THEN
    RAISE EXCEPTION 'dl_enqueue: %%', wrong USING ERRCODE = 'invalid_parameter_value';
  END IF;
  LOOP
    INSERT INTO %1$I.dl_jobs (
           job_id, queue, task, lock_key, args, idempotency_key, partition_key, priority, available_at, max_attempts,
           lease_ttl_sec, timeout_sec, producer, consumer_group, created_at)
    VALUES (gen_random_uuid(), dl_enqueue.queue, dl_enqueue.task, dl_enqueue.lock_key, coalesce(dl_enqueue.args, '{}'),
            dl_enqueue.idempotency_key, coalesce(dl_enqueue.partition_key, ''), coalesce(dl_enqueue.priority, 100),
            coalesce(dl_enqueue.available_at, now()), coalesce(dl_enqueue.max_attempts, 5),
            coalesce(dl_enqueue.lease_ttl_sec, 60), dl_enqueue.timeout_sec, dl_enqueue.producer,
            -- Not now(): several jobs of one transaction run in the order of their calls.
            dl_enqueue.consumer_group, clock_timestamp())
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING job_id INTO found;
    EXIT WHEN found IS NOT NULL;
    SELECT job_id INTO found FROM %1$I.dl_jobs WHERE idempotency_key = dl_enqueue.idempotency_key;
    EXIT WHEN found IS NOT NULL;
    -- The job that had the key was deleted between the two: the key is free again.
  END LOOP;
  RETURN found;
END
$$
$function$, current_schema()); END $bound$;


-- The status of a job that the calling role has added, for producers, who may not read the tables; no row for any other
-- job. Whose it is says the first row of its journal: session_user, whom SET ROLE does not change. That row is written at
-- the commit of a plain INSERT and of dl_enqueue. A job that was added over HTTP is no producer's.
DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_job_status(p_job_id uuid)
RETURNS TABLE (job_id uuid, status text, attempt int, started_at timestamptz, finished_at timestamptz,
               heartbeat_at timestamptz, error text, progress jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT j.job_id, j.status::text, j.attempt, j.started_at, j.finished_at, j.heartbeat_at, j.error, j.progress
    FROM %1$I.dl_jobs j
   WHERE j.job_id = p_job_id
     AND session_user = (SELECT e.payload ->> 'user' FROM %1$I.dl_job_events e
                          WHERE e.job_id = p_job_id AND e.kind = 'queued' ORDER BY e.event_id LIMIT 1)
$$
$function$, current_schema()); END $bound$;


-- Note where the trigger of these jobs stands in a trace: of those that dl_enqueue_many has added for this role in this
-- transaction. One that was found by its key keeps that of its first trigger.
DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_set_trace(p_trace text, p_job_ids uuid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE %1$I.dl_jobs j SET trace = p_trace
   WHERE job_id = ANY (p_job_ids) AND trace IS NULL
     AND EXISTS (SELECT FROM %1$I.dl_job_events e
                  WHERE e.job_id = j.job_id AND e.ts = now() AND e.kind = 'queued' AND e.payload ->> 'user' = session_user)
$$
$function$, current_schema()); END $bound$;


-- What a row of the journal says for the sums: its kind, but for a requeue why: 'retry' (the run failed), 'crash' (its
-- worker died), 'lease' (nobody renewed it), 'backoff' (another session holds its key), 'handed_back' (a drain and the
-- like, uncounted), 'requeue' (by a person or another service).
CREATE OR REPLACE FUNCTION dl_step_of(p_kind text, p_payload jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_kind <> 'requeue' THEN p_kind
              WHEN p_payload ? 'backoffs' THEN 'backoff'
              WHEN p_payload ? 'by' THEN 'requeue'
              WHEN p_payload ? 'delay_sec' OR p_payload ->> 'reason' LIKE 'timeout%' THEN 'retry'
              WHEN p_payload ->> 'reason' LIKE 'lease expired%' THEN 'lease'
              WHEN p_payload ? 'worker' OR p_payload ->> 'reason' IN ('drain', 'the lease ran out')
                OR p_payload ->> 'reason' LIKE 'not started%' THEN 'handed_back'
              ELSE 'crash' END
$$;


-- Has the journal's sequence been set back behind this event (TRUNCATE ... RESTART IDENTITY, setval)? Not asked of the
-- rows: the newest go with a job that is deleted. Null for a role without rights.
CREATE OR REPLACE FUNCTION dl_journal_begins_anew(p_last_event bigint) RETURNS boolean LANGUAGE sql AS $$
  SELECT has_sequence_privilege(sequence, 'USAGE, SELECT') AND coalesce(pg_sequence_last_value(sequence), 0) < p_last_event
    FROM CAST(pg_get_serial_sequence('dl_job_events', 'event_id') AS regclass) sequence
$$;


-- Add up to p_limit rows of the journal to dl_totals and dl_pace; returns how many. One at a time: who finds another at
-- it returns 0. Called by the reaper each round.
--
-- Rows become visible in the order of their commits, not of their numbers. So it goes up to the first number that is
-- missing, and past that only when the row behind it is ten seconds old: by then it was rolled back, or stands in a
-- transaction of such a length that its row is not counted. A row from ten seconds ahead counts as old as well: the clock
-- was set back, and may need hours to get there.
--
-- Returns -1 when the journal is numbered anew: then the sums go on behind the rows that are there, for nobody knows
-- which of them they have.
--
-- A run's time is from its 'picked' to its end; what ends a job that waits (a cancellation) ends no run. The upper bounds
-- of the buckets, in seconds, are those of dataloader.stats.BUCKETS_SEC; the last bucket has no end.
CREATE OR REPLACE FUNCTION dl_roll(p_limit int) RETURNS int
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
  since bigint;
  upto bigint;
  rolled int;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  SELECT last_event INTO since FROM dl_rolled LIMIT 1 FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN 0;
  END IF;
  WITH near AS (
    SELECT event_id, event_id - lag(event_id, 1, since) OVER (ORDER BY event_id) > 1
                     AND ts > clock_timestamp() - interval '10 s'
                     AND ts < clock_timestamp() + interval '10 s' AS is_behind_gap
      FROM (SELECT event_id, ts FROM dl_job_events WHERE event_id > since ORDER BY event_id LIMIT p_limit) rows)
  SELECT max(event_id), count(*) INTO upto, rolled FROM near
   WHERE event_id < coalesce((SELECT min(event_id) FROM near WHERE is_behind_gap), 9223372036854775807);
  IF upto IS NULL THEN
    IF dl_journal_begins_anew(since) THEN
      UPDATE dl_rolled SET last_event = coalesce((SELECT max(event_id) FROM dl_job_events), 0);
      RETURN -1;
    END IF;
    RETURN 0;
  END IF;

  WITH steps AS MATERIALIZED (
    SELECT e.queue, coalesce(j.task, '') AS task, e.step, date_bin('10 s', e.ts, '2000-01-01 00:00+00') AS at,
           CASE WHEN e.step NOT IN ('queued', 'picked', 'cancel_requested', 'backoff', 'requeue') THEN
             extract(epoch FROM e.ts - (
               SELECT CASE p.kind WHEN 'picked' THEN p.ts END FROM dl_job_events p
                WHERE p.job_id = e.job_id AND p.event_id < e.event_id AND p.kind NOT IN ('heartbeat', 'cancel_requested')
                ORDER BY p.event_id DESC LIMIT 1))::float8 END AS seconds
      FROM (SELECT event_id, job_id, queue, ts, dl_step_of(kind, payload) AS step FROM dl_job_events
             WHERE event_id > since AND event_id <= upto AND kind <> 'heartbeat') e
      LEFT JOIN dl_jobs j USING (job_id)),
  totals AS (
    INSERT INTO dl_totals AS t (queue, task, kind, count, seconds, buckets)
    SELECT queue, task, step, count(*), coalesce(sum(greatest(seconds, 0)), 0), ARRAY[
             count(*) FILTER (WHERE seconds <= 0.1),
             count(*) FILTER (WHERE seconds > 0.1 AND seconds <= 0.5),
             count(*) FILTER (WHERE seconds > 0.5 AND seconds <= 1),
             count(*) FILTER (WHERE seconds > 1 AND seconds <= 5),
             count(*) FILTER (WHERE seconds > 5 AND seconds <= 15),
             count(*) FILTER (WHERE seconds > 15 AND seconds <= 60),
             count(*) FILTER (WHERE seconds > 60 AND seconds <= 300),
             count(*) FILTER (WHERE seconds > 300 AND seconds <= 900),
             count(*) FILTER (WHERE seconds > 900 AND seconds <= 3600),
             count(*) FILTER (WHERE seconds > 3600 AND seconds <= 14400),
             count(*) FILTER (WHERE seconds > 14400 AND seconds <= 86400),
             count(*) FILTER (WHERE seconds > 86400)]
      FROM steps GROUP BY queue, task, step
    ON CONFLICT (queue, task, kind) DO UPDATE SET
       count = t.count + excluded.count, seconds = t.seconds + excluded.seconds,
       buckets = ARRAY(SELECT a + b FROM unnest(t.buckets, excluded.buckets) WITH ORDINALITY AS n (a, b, nth) ORDER BY nth))
  INSERT INTO dl_pace AS p (at, queue, processed, failed)
  SELECT at, queue, count(*), count(*) FILTER (WHERE step IN ('failed', 'lost', 'retry', 'crash', 'lease')) FROM steps
   WHERE step IN ('done', 'failed', 'lost', 'retry', 'crash', 'lease') OR step = 'canceled' AND seconds IS NOT NULL
   GROUP BY at, queue
  ON CONFLICT (at, queue) DO UPDATE SET
     processed = p.processed + excluded.processed, failed = p.failed + excluded.failed;
  DELETE FROM dl_pace WHERE at < now() - interval '2 days';
  UPDATE dl_rolled SET last_event = upto;
  RETURN rolled;
END
$$;


-- For how many seconds the last run of a job went on: from its last 'picked' to what ended that run, as dl_roll counts it.
-- Null while the job runs, before its first run, and where the journal does not tell. A job that started once and ended by
-- itself needs no journal. Served by ix_dl_job_events_job.
CREATE OR REPLACE FUNCTION dl_last_run_sec(p_job dl_jobs) RETURNS float8 LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN p_job.status = 'running' OR p_job.started_at IS NULL THEN NULL
    WHEN p_job.status IN ('succeeded', 'failed') AND p_job.attempt <= 1 AND p_job.claims <= 1
      THEN greatest(extract(epoch FROM p_job.finished_at - p_job.started_at), 0)
    ELSE (
      SELECT greatest(extract(epoch FROM ended.ts - picked.ts), 0)
        FROM (SELECT event_id, ts FROM dl_job_events WHERE job_id = p_job.job_id AND kind = 'picked'
               ORDER BY event_id DESC LIMIT 1) picked
       CROSS JOIN LATERAL (
         SELECT ts FROM dl_job_events
          WHERE job_id = p_job.job_id AND event_id > picked.event_id
            AND kind IN ('done', 'requeue', 'failed', 'canceled', 'lost') ORDER BY event_id LIMIT 1) ended) END::float8
$$;


-- Does a job pass the filter of a list? Null is no filter. p_status is one of dl_status, or scheduled (its time has not
-- come), fresh (never tried), retries (tried before), dead (failed or lost).
CREATE OR REPLACE FUNCTION dl_matches(
  j dl_jobs, p_queue text, p_task text, p_status text, p_lock_key text, p_partition_key text, p_producer text,
  p_consumer_group text) RETURNS boolean LANGUAGE sql STABLE AS $$
  SELECT (p_queue IS NULL OR j.queue = p_queue) AND (p_task IS NULL OR j.task = p_task)
     AND (p_lock_key IS NULL OR j.lock_key = p_lock_key)
     AND (p_partition_key IS NULL OR j.partition_key = p_partition_key)
     AND (p_producer IS NULL OR j.producer = p_producer)
     AND (p_consumer_group IS NULL OR j.consumer_group = p_consumer_group)
     AND CASE p_status WHEN 'scheduled' THEN j.status = 'queued' AND j.blocked_on IS NOT DISTINCT FROM 'time'
                       WHEN 'fresh' THEN j.status = 'queued' AND j.attempt = 0
                       WHEN 'retries' THEN j.status = 'queued' AND j.attempt > 0
                       WHEN 'dead' THEN j.status IN ('failed', 'lost')
                       ELSE p_status IS NULL OR j.status::text = p_status END
$$;
