-- running -> queued, lost, failed or canceled: keeper and reaper recover the jobs of lost workers. Then retention.

-- End a session that outlived its worker's right to a job, and wait up to 2 s. Its start is compared, because pids come again.
-- Another role's session may keep the key until the server notices.
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

-- Give back a running job whose worker is gone: 'canceled' when requested, 'queued' while it has attempts left. p_end:
--   'crash'    the worker died: again at once the first time, then after 5, 25, 125 ... up to 600 s, in the end 'lost'
--   'timeout'  the run took too long: again after dl_retry_delay, in the end 'failed'
--   'drain'    the run does not count: again at once, its attempt given back
-- Rows of one key and claim go back together: the fewest max_attempts count; when spent, the first is dead and the others
-- start over. A run whose checkpoint spares attempts does not count. The caller has locked the row and ended the claim's
-- session. Returns the new status.
CREATE OR REPLACE FUNCTION dl_give_back(p_job_id uuid, p_end text, p_reason text, p_facts jsonb) RETURNS dl_status
LANGUAGE plpgsql AS $$
DECLARE
  job dl_jobs;
  delivery uuid[];
  first uuid;  -- of the delivery
  most int;    -- attempts
  delay_sec float8;
  is_free boolean := p_end = 'drain';  -- the run does not count
  is_spent boolean;
BEGIN
  SELECT * INTO job FROM dl_jobs WHERE job_id = p_job_id;
  IF NOT is_free THEN
    is_free := EXISTS (SELECT FROM dl_checkpoints c
                        WHERE c.job_id = p_job_id AND c.claim = job.claims AND c.spares_attempt);
  END IF;
  SELECT array_agg(job_id), min(max_attempts),
         (array_agg(job_id ORDER BY score, created_at, job_id) FILTER (WHERE NOT cancel_requested))[1]
    INTO delivery, most, first FROM (
      SELECT * FROM dl_jobs
       WHERE status = 'running' AND hashtext(lock_key) = hashtext(job.lock_key)
         AND (job_id = p_job_id OR lock_key = job.lock_key AND queue = job.queue AND claimed_by = job.claimed_by)
         FOR NO KEY UPDATE SKIP LOCKED) held;
  delay_sec := CASE WHEN p_end = 'timeout' THEN dl_retry_delay(job.attempt)
                    WHEN p_end = 'crash' AND job.attempt > 1 THEN least(600, 5.0 ^ least(job.attempt - 1, 10)) ELSE 0 END;
  is_spent := NOT is_free AND job.attempt >= most;
  WITH given AS (
    UPDATE dl_jobs SET
           status = CASE WHEN cancel_requested THEN 'canceled'
                         WHEN NOT is_spent OR job_id <> first THEN 'queued'
                         WHEN p_end = 'timeout' THEN 'failed' ELSE 'lost' END::dl_status,
           journaled = mod(journaled, 1000000) + 1,
           attempt = CASE WHEN is_free THEN greatest(least(attempt, max_attempts) - 1, 0)  -- as dl_finish
                          WHEN is_spent AND job_id <> first THEN 0 ELSE attempt END,
           blocked_on = CASE WHEN NOT cancel_requested AND NOT is_spent AND delay_sec > 0 THEN 'time' END,
           available_at = now() + make_interval(secs => CASE WHEN is_spent THEN 0 ELSE delay_sec END),
           finished_at = CASE WHEN cancel_requested OR is_spent AND job_id = first THEN now() END,
           lease_expires_at = NULL, claimed_by = NULL, claimed_pid = NULL, claimed_backend_start = NULL,
           error = CASE WHEN p_end = 'drain' THEN error ELSE p_reason END,
           error_group = CASE WHEN p_end = 'drain' THEN error_group ELSE dl_error_group(p_reason) END
     WHERE job_id = ANY (delivery)
    RETURNING job_id, queue, status, attempt),
  journal AS (
    INSERT INTO dl_job_events (job_id, queue, kind, payload)
    SELECT job_id, queue, CASE status WHEN 'queued' THEN 'requeue' ELSE status::text END,
           jsonb_build_object('reason', p_reason, 'attempt', attempt) || p_facts FROM given)
  SELECT status INTO job.status FROM given WHERE job_id = p_job_id;
  IF job.status = 'queued' OR cardinality(delivery) > 1 THEN
    PERFORM pg_notify('dl_jobs', job.queue);
  END IF;
  PERFORM dl_unpark(ARRAY[hashtext(job.lock_key)]);
  IF (SELECT true FROM dl_waiting LIMIT 1) THEN
    PERFORM dl_resolve(delivery);
  END IF;
  IF job.limits IS NOT NULL THEN
    PERFORM dl_let_in(job.limits);
  END IF;
  RETURN job.status;
END
$$;

-- Settle the jobs of a dead worker at once; p_end, p_reason and p_facts as in dl_give_back are for p_running, the rest is
-- handed back uncounted. Null: all count. The session is ended first, for its locks. A locked row has a null status: the
-- keeper tries again.
CREATE OR REPLACE FUNCTION dl_settle(p_worker text, p_running uuid[], p_end text, p_reason text, p_facts jsonb)
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
      IF claimed <> ALL (p_running) THEN
        status := dl_give_back(claimed, 'drain', 'not started: ' || p_reason, '{}');
      ELSE
        status := dl_give_back(
          claimed, p_end, p_reason || CASE WHEN p_end = 'drain' THEN '' ELSE ' on attempt ' || held.attempt END,
          p_facts);
      END IF;
    END IF;
    RETURN NEXT;
  END LOOP;
END
$$;

-- Give back one job whose lease has run out, under one row lock (river#1373); locked rows are skipped. A foreign running row
-- without a lease has one from its last sign of life. Served by ix_dl_jobs_running. A job that was claimed ahead and never
-- beat was not begun: it goes back uncounted, once for each attempt, for a job that ends its machine at once looks the same.
--
-- p_up_sec        for so long the database has answered the caller, by a clock that did not jump
-- p_patience_sec  how long a living worker may need to reach the database again
--
-- A lease from before an outage, or a jump of the clock, is over only after that time and a third of the lease.
CREATE OR REPLACE FUNCTION dl_reap(
  p_up_sec float8, p_patience_sec float8, OUT job_id uuid, OUT queue text, OUT status dl_status)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  not_begun CONSTANT text := 'not started: the lease expired';
  held dl_jobs;
  back timestamptz := CASE WHEN p_up_sec < 1e9 THEN now() - make_interval(secs => p_up_sec) ELSE '-infinity' END;
  refused uuid[] := '{}';  -- jobs whose rows refuse the change
BEGIN
  LOOP
    SELECT * INTO held FROM dl_jobs
     WHERE status = 'running'
       AND coalesce(lease_expires_at < now(),  -- arithmetic on our clock alone: a row's may be at the end of time
                    coalesce(heartbeat_at, started_at, created_at) < now() - make_interval(secs => lease_ttl_sec))
       AND (p_up_sec > p_patience_sec + lease_ttl_sec / 3.0
            OR lease_expires_at >= back + make_interval(secs => lease_ttl_sec) OR greatest(heartbeat_at, created_at) >= back)
       AND dl_jobs.job_id <> ALL (refused)
     LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
      RETURN;
    END IF;
    BEGIN
      PERFORM dl_end_session(held.claimed_pid, held.claimed_backend_start);
      IF held.heartbeat_at IS NULL AND held.claimed_by IS NOT NULL
         AND NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = hashtext(held.lock_key)
                            AND lock_key = held.lock_key AND claimed_by = held.claimed_by AND heartbeat_at IS NOT NULL)
         AND held.attempt > (
           SELECT count(*) FROM dl_job_events e
            WHERE e.job_id = held.job_id AND kind = 'requeue' AND payload ->> 'reason' = not_begun) THEN
        status := dl_give_back(held.job_id, 'drain', not_begun, '{}');
      ELSE
        status := dl_give_back(
          held.job_id, 'crash', 'lease expired on attempt ' || held.attempt || ': no heartbeat since '
          || coalesce(to_char(held.heartbeat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), 'the start'), '{}');
      END IF;
      job_id := held.job_id;
      queue := held.queue;
      RETURN;
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded OR raise_exception THEN
      RAISE WARNING 'the job % cannot be recovered: %', held.job_id, SQLERRM;
      refused := refused || held.job_id;  -- the other jobs are recovered all the same
    END;
  END LOOP;
END
$$;

-- Delete up to p_limit jobs with their journal that ended at or after p_since and more than p_older_than_sec ago. `reached`:
-- where the next call goes on, so that none reads deleted entries again. Locked rows and dead heads of ordered keys stay.
-- Arrays and settings keep the plan by index whatever the statistics say. Served by ix_dl_jobs_finished.
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
       AND NOT (score IS NOT NULL AND status::text IN ('failed', 'lost')
                AND EXISTS (SELECT FROM dl_queues q WHERE q.queue = dl_jobs.queue AND ordered AND on_dead = 'hold'))
     ORDER BY finished_at LIMIT p_limit FOR UPDATE SKIP LOCKED) finished;
  DELETE FROM dl_job_events WHERE job_id = ANY (old);
  DELETE FROM dl_jobs WHERE job_id = ANY (old);
  pruned := cardinality(old);
END
$$;

-- Does this session hold the key_hash's advisory lock? A lock by one bigint stands in pg_locks as two halves.
CREATE OR REPLACE FUNCTION dl_session_has_key(p_pid int, p_backend_start timestamptz, p_key_hash bigint) RETURNS boolean
LANGUAGE sql AS $$
  SELECT EXISTS (SELECT FROM pg_stat_get_activity(p_pid) WHERE backend_start = p_backend_start)
     AND EXISTS (SELECT FROM pg_locks
                  WHERE locktype = 'advisory' AND granted AND pid = p_pid AND objsubid = 1
                    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                    AND classid::bigint = (p_key_hash >> 32) & 4294967295 AND objid::bigint = p_key_hash & 4294967295)
$$;

-- After a reconnect: take the keys of a run again and renew the claim. True: go on; false: a claim or a key is lost; null:
-- go on, but the former session cannot end and has a key: try again later, holding none.
CREATE OR REPLACE FUNCTION dl_retake(p_job_id uuid[], p_attempt int[], p_worker text, p_backend_start timestamptz)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  held record;
  key_hash int;
  has_lock boolean;
  has_all boolean := true;
BEGIN
  SELECT array_agg(hashtext(lock_key)) AS key_hashes, max(claimed_pid) AS pid, max(claimed_backend_start) AS backend_start
    INTO held FROM (
      SELECT * FROM dl_jobs
       WHERE job_id = ANY (p_job_id) AND attempt = p_attempt[array_position(p_job_id, job_id)] AND claimed_by = p_worker
         AND status::text = 'running' ORDER BY job_id FOR NO KEY UPDATE) ours;
  IF (cardinality(held.key_hashes) = cardinality(p_job_id)) IS NOT TRUE THEN
    RETURN false;
  END IF;
  -- The server may not have noticed that our old session is gone.
  PERFORM dl_end_session(held.pid, held.backend_start);
  FOR key_hash IN SELECT DISTINCT unnest(held.key_hashes) LOOP
    has_lock := pg_try_advisory_lock(key_hash);
    has_all := has_all AND CASE
      WHEN has_lock THEN NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = key_hash
                                        AND lease_expires_at > now() AND job_id <> ALL (p_job_id))
      ELSE nullif(dl_session_has_key(held.pid, held.backend_start, key_hash), true) END;
  END LOOP;
  IF has_all IS NOT TRUE THEN
    PERFORM pg_advisory_unlock_all();
  END IF;
  IF NOT has_all THEN
    RETURN false;
  END IF;
  UPDATE dl_jobs SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec),
         claimed_pid = CASE WHEN has_all THEN pg_backend_pid() ELSE claimed_pid END,
         claimed_backend_start = CASE WHEN has_all THEN p_backend_start ELSE claimed_backend_start END
   WHERE job_id = ANY (p_job_id);
  RETURN has_all;
END
$$;
