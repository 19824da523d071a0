-- running -> final, or queued again: the ends of a worker's own runs.


-- These keys became free: notify the queues in which hot rows of them wait. Cold rows need no notification: a claim
-- that returns no job has marked them hot first (dl_claim).
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


-- Write how runs of this worker have ended. p_ends is a list of objects:
--   job_id, attempt   the claim
--   verb              succeed; retry (again after delay_sec); fail; cancel (the run stopped for it);
--                     hand_back (again at once, uncounted)
--   error             the error's text; for hand_back the reason
--   progress, facts   the last progress; what joins the journal's row; may be missing
-- A job with a requested cancellation ends canceled, whatever the end of its run is: it is never tried again.
--
-- `unfinished` are the jobs that are no longer this worker's, `canceled` those that ended canceled by another verb,
-- `locked` those whose rows another session has locked: their worker writes these ends again a little later. Null:
-- none. A claim holds running rows for a moment, so the function tries a locked row again after 1, 5, 25 ms. With
-- p_waits it waits for locked rows, in the order of job_id. It releases the keys of the ended jobs, and with p_let_go
-- all keys of the session: a locked job's row is still running, and so keeps its key.
--
-- Each row is found by its job_id, locked, and changed where it was found (ctid). Were it looked for by job_id once
-- more, a plan that was made on a short table would read all of a long one.
CREATE OR REPLACE FUNCTION dl_finish(
  p_worker text, p_ends json, p_let_go boolean, p_waits boolean,
  OUT unfinished uuid[], OUT canceled uuid[], OUT locked uuid[])
LANGUAGE plpgsql AS $$
DECLARE
  key_hashes int[] := '{}';
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
             -- A job that may run again at once: a claim beside us finds it before a later job of its key (dl_take_keys).
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
    SELECT array_agg(job_id) AS job_ids, array_agg(hashtext(lock_key)) AS key_hashes,
           array_agg(job_id) FILTER (WHERE status = 'canceled' AND verb <> 'cancel') AS canceled
      INTO wrote FROM ended;
    ended := ended || wrote.job_ids;
    key_hashes := key_hashes || wrote.key_hashes;
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
    PERFORM pg_advisory_unlock(key_hash) FROM unnest(key_hashes) key_hash
      WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = key_hash
                           AND claimed_by = p_worker);
  END IF;
  PERFORM dl_tell_waiters(key_hashes);
END
$$;


-- The same for farms of older code, which do not know `locked`: it waits instead.
-- Kept until a migration says `oldest code: 18` or more.
CREATE OR REPLACE FUNCTION dl_finish(
  p_worker text, p_ends json, p_let_go boolean, OUT unfinished uuid[], OUT canceled uuid[]) LANGUAGE sql AS $$
  SELECT unfinished, canceled FROM dl_finish(p_worker, p_ends, p_let_go, true)
$$;
