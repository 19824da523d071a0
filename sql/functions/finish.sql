-- running -> final, or queued again: the ends of a worker's own runs.


-- Seconds until a job that ended with an error runs again: 30 for each attempt so far, at most a day. RETRY_SEC in
-- queue/job.py and linear() in pipelines/retries.py have the same number.
CREATE OR REPLACE FUNCTION dl_retry_delay(p_attempt int) RETURNS float8 LANGUAGE sql IMMUTABLE AS $$
  SELECT least(30.0 * p_attempt, 86400)::float8
$$;


-- The error group of an error's text, for errors of which no worker has told it: the first line, with … in the place of
-- what differs from job to job (addresses, quoted values, times, paths, ids) and # in that of numbers. The same rules as
-- in farm/failures.py, where each is explained.
CREATE OR REPLACE FUNCTION dl_error_group(p_error text) RETURNS text LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
  SELECT left(regexp_replace(regexp_replace(left(split_part(ltrim(p_error, E' \t\r\n'), E'\n', 1), 1000),
    $re$[A-Za-z][A-Za-z0-9+.-]*://[^\s'"]+|(?<![A-Za-z0-9_])'[^']*'|"[^"]*"|`[^`]*`|[^\s@'"(),;:=<>]+@[^\s@'"(),;:=<>]+|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]+)?)?)?(Z|[+-][0-9]{2}:?[0-9]{2})?|[^\s/'"(),;:=]*(/[^\s/'"(),;:]+){2,}/?|[A-Za-z]:\\[^\s'"]+|(?<==)[^\s,;]+|(?=[A-Za-z_+/-]*[0-9])[A-Za-z0-9+/_-]{20,}$re$,
    '…', 'g'), $re$0[xX][0-9a-fA-F]+|[0-9a-fA-F]{8,}|[0-9]+([.,:][0-9]+)*$re$, '#', 'g'), 200)
$$;

-- For `done`, whose runs have ended: jobs that wait for their keys, for them, or for room in their limits.
-- part: free_others
  IF (SELECT true FROM dl_jobs WHERE enum_eq(status, 'queued') AND blocked_on = 'key'
       ORDER BY hashtext(lock_key), queue LIMIT 1) THEN
    PERFORM dl_unpark(key_hashes);
  END IF;
  IF (SELECT true FROM dl_waiting LIMIT 1) THEN
    PERFORM dl_resolve(done);
  END IF;
  IF is_limited THEN
    PERFORM dl_let_in(ARRAY(SELECT DISTINCT name FROM dl_jobs CROSS JOIN unnest(limits) name WHERE job_id = ANY (done)));
  END IF


-- Write how runs of this worker have ended. The arrays have one value for each run; an array that is null has nulls.
--   p_job_id, p_attempt   the claim
--   p_verb                succeed; retry (again after p_delay_sec, null: dl_retry_delay); fail; cancel (the run stopped
--                         for it); hand_back (again after p_delay_sec, null: at once; uncounted); restart (again at once,
--                         with all attempts: another row of its delivery is dead in its place)
--   p_error               the error's text; for hand_back the reason
--   p_progress            the last progress, JSON; null: it stays as it is
--   p_facts               what joins the journal's row, a JSON object
-- A job with a requested cancellation ends canceled, whatever the end of its run is: it is never tried again.
--
-- `unfinished` are the jobs that are no longer this worker's, `canceled` those that ended canceled by another verb,
-- `locked` those whose rows another session has locked: their worker writes these ends again a little later. Null:
-- none. A claim that parks holds running rows until its commit, so the function tries a locked row again after 1, 5,
-- 25 ms. It releases the keys of jobs that are not running any more, and with p_let_go all keys of the session: a locked
-- job's row is still running, and its live lease keeps the key.
--
-- Each row is found by its job_id, locked, and changed where it was found (ctid). Were it looked for by job_id once
-- more, a plan that was made on a short table would read all of a long one.
CREATE OR REPLACE FUNCTION dl_finish(
  p_worker text, p_let_go boolean, p_job_id uuid[], p_attempt int[], p_verb text[], p_error text[], p_delay_sec float8[],
  p_progress text[], p_facts text[], OUT unfinished uuid[], OUT canceled uuid[], OUT locked uuid[])
LANGUAGE plpgsql AS $$
DECLARE
  key_hashes int[] := '{}';  -- of jobs that this worker does not run any more
  done uuid[] := '{}';       -- the jobs whose ends are written
  woken text[];              -- the queues of those that are queued again
  is_limited boolean;        -- any of them has limits
  pause float8;
BEGIN
  FOREACH pause IN ARRAY ARRAY[0.001, 0.005, 0.025, 0] LOOP
    WITH free AS MATERIALIZED (
      SELECT e.*, its_row.at,  -- wait_sec: until it runs again; null: it does not
             CASE verb WHEN 'retry' THEN coalesce(delay_sec, dl_retry_delay(e.attempt))
                       WHEN 'hand_back' THEN coalesce(delay_sec, 0) WHEN 'restart' THEN 0 END AS wait_sec
        FROM unnest(p_job_id, p_attempt, p_verb, p_error, p_delay_sec, p_progress, p_facts)
               AS e (job_id, attempt, verb, error, delay_sec, progress, facts)
       CROSS JOIN LATERAL (
         SELECT ctid AS at FROM dl_jobs WHERE dl_jobs.job_id = e.job_id FOR NO KEY UPDATE SKIP LOCKED) its_row
       WHERE e.job_id <> ALL (done)),
    ended AS (
      UPDATE dl_jobs j SET
             status = CASE WHEN cancel_requested THEN 'canceled' ELSE CASE verb
                        WHEN 'succeed' THEN 'succeeded' WHEN 'fail' THEN 'failed' WHEN 'cancel' THEN 'canceled'
                        ELSE 'queued' END END::dl_status,
             journaled = mod(journaled, 1000000) + 1,
             -- A job that joined a key of more attempts than it may have keeps its last one.
             attempt = CASE verb WHEN 'hand_back' THEN least(j.attempt, greatest(max_attempts, 1)) - 1
                                 WHEN 'restart' THEN 0 ELSE j.attempt END,
             blocked_on = CASE WHEN wait_sec > 0 AND NOT cancel_requested THEN 'time' END,
             available_at = coalesce(now() + make_interval(secs => wait_sec), available_at),
             finished_at = CASE WHEN cancel_requested OR wait_sec IS NULL THEN now() END,
             lease_expires_at = NULL, claimed_by = NULL, claimed_pid = NULL, claimed_backend_start = NULL,
             progress = coalesce(e.progress::jsonb, j.progress),
             error = CASE verb WHEN 'hand_back' THEN j.error
                               WHEN 'succeed' THEN CASE WHEN cancel_requested THEN
                                 'canceled when the pipeline had finished: its work stands' END
                               ELSE e.error END,
             error_group = CASE WHEN verb = 'hand_back' THEN j.error_group
                                WHEN verb IN ('retry', 'fail', 'restart')
                                  THEN coalesce(e.facts::jsonb ->> 'error_group', dl_error_group(e.error)) END
        FROM free e WHERE j.ctid = e.at AND j.attempt = e.attempt AND claimed_by = p_worker AND status::text = 'running'
      RETURNING j.job_id, queue, lock_key, limits, status, j.attempt, verb, facts,
                CASE WHEN verb = 'retry' AND status = 'queued' THEN wait_sec END AS delay_sec,
                CASE verb WHEN 'succeed' THEN j.error ELSE e.error END AS error),
    journal AS (
      INSERT INTO dl_job_events (job_id, queue, kind, payload)
      SELECT job_id, queue,
             CASE status WHEN 'succeeded' THEN 'done' WHEN 'queued' THEN 'requeue' ELSE status::text END,
             -- A text that becomes jsonb costs half of jsonb_build_object.
             ('{"attempt": ' || attempt || ', "worker": ' || to_json(p_worker) || '}')::jsonb
             || CASE status WHEN 'succeeded' THEN '{}' ELSE jsonb_strip_nulls(jsonb_build_object(
                  'reason', CASE verb WHEN 'retry' THEN 'error' WHEN 'fail' THEN NULL WHEN 'cancel' THEN NULL
                                      WHEN 'restart' THEN 'the first job of its key is dead' ELSE error END,
                  'error', CASE WHEN verb IN ('retry', 'fail', 'restart') THEN error END,
                  'delay_sec', delay_sec)) END
             || coalesce(facts::jsonb, '{}') FROM ended)
    SELECT done || array_agg(job_id), key_hashes || array_agg(hashtext(lock_key)),
           array_agg(queue) FILTER (WHERE status = 'queued'),
           canceled || array_agg(job_id) FILTER (WHERE status = 'canceled' AND verb <> 'cancel'),
           bool_or(limits IS NOT NULL) OR is_limited
      INTO done, key_hashes, woken, canceled, is_limited FROM ended;
    IF woken IS NOT NULL THEN
      PERFORM pg_notify('dl_jobs', queue) FROM unnest(woken) queue;  -- also of a later time: sleepers go by it
    END IF;
    locked := NULL;
    EXIT WHEN cardinality(done) = cardinality(p_job_id);
    SELECT array_agg(job_id) FILTER (WHERE is_ours), array_agg(job_id) FILTER (WHERE is_ours IS NULL)
      INTO locked, unfinished
      FROM (SELECT e.job_id, (SELECT true FROM dl_jobs j
                               WHERE j.job_id = e.job_id AND j.attempt = e.attempt AND claimed_by = p_worker
                                 AND status::text = 'running' LIMIT 1) AS is_ours
              FROM unnest(p_job_id, p_attempt) AS e (job_id, attempt)
             WHERE e.job_id <> ALL (done)) missing;
    EXIT WHEN locked IS NULL;
    PERFORM pg_sleep(pause);
  END LOOP;
  IF p_let_go THEN
    IF pg_advisory_unlock_all() IS NULL THEN END IF;  -- an expression: PERFORM would run it as a query
  ELSE
    IF unfinished IS NOT NULL THEN
      key_hashes := key_hashes || ARRAY(SELECT hashtext(lock_key) FROM dl_jobs WHERE job_id = ANY (unfinished));
    END IF;
    -- An end may come late, for its row was locked; if its lease was over, the key may be that of this worker's next run.
    PERFORM pg_advisory_unlock(key_hash) FROM (SELECT DISTINCT unnest(key_hashes)) AS ended (key_hash)
      WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = key_hash
                           AND claimed_by = p_worker);
  END IF;
  {free_others};
END
$$;
