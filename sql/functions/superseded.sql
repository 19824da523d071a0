-- The signatures that farms of older code call; each may go when a migration says `oldest code: 19` or more.


-- Ends as older code sends them, in one JSON list.
CREATE OR REPLACE FUNCTION dl_finish(
  p_worker text, p_ends json, p_let_go boolean, p_waits boolean,
  OUT unfinished uuid[], OUT canceled uuid[], OUT locked uuid[])
LANGUAGE plpgsql AS $$
BEGIN
  IF p_waits THEN  -- older code takes for written what is not in `unfinished`
    PERFORM FROM dl_jobs WHERE job_id = ANY (ARRAY(SELECT (e ->> 'job_id')::uuid FROM json_array_elements(p_ends) e))
      ORDER BY job_id FOR NO KEY UPDATE;
  END IF;
  SELECT f.* INTO unfinished, canceled, locked
    FROM (SELECT array_agg(job_id) AS job_ids, array_agg(attempt) AS attempts, array_agg(verb) AS verbs,
                 array_agg(error) AS errors, array_agg(delay_sec) AS delays, array_agg(progress::text) AS progress,
                 array_agg(facts::text) AS facts
            FROM json_to_recordset(p_ends) AS e (
                   job_id uuid, attempt int, verb text, error text, delay_sec float8, progress jsonb, facts jsonb)) e
   CROSS JOIN LATERAL dl_finish(
     p_worker, p_let_go, coalesce(job_ids, '{}'), attempts, verbs, errors, delays, progress, e.facts) f;
END
$$;


CREATE OR REPLACE FUNCTION dl_finish(
  p_worker text, p_ends json, p_let_go boolean, OUT unfinished uuid[], OUT canceled uuid[]) LANGUAGE sql AS $$
  SELECT unfinished, canceled FROM dl_finish(p_worker, p_ends, p_let_go, true)
$$;


-- Workers that know no affinity.
CREATE OR REPLACE FUNCTION dl_step(
  p_queues text[], p_by_lag boolean, p_worker text, p_backend_start timestamptz, p_backoff_sec float8, p_most int,
  p_priority int, p_from timestamptz,
  p_job_id uuid[], p_attempt int[], p_verb text[], p_error text[], p_delay_sec float8[], p_progress text[], p_facts text[])
RETURNS TABLE (
  job_id uuid, queue text, task text, args text, idempotency_key text, lock_key text, partition_key text, attempt int,
  max_attempts int, lease_ttl_sec int, timeout_sec int, claims int, said text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  SELECT job_id, queue, task, args, idempotency_key, lock_key, partition_key, attempt, max_attempts, lease_ttl_sec,
         timeout_sec, claims, said
    FROM dl_step(p_queues, p_by_lag, p_worker, p_backend_start, p_backoff_sec, p_most, p_priority, p_from, p_job_id,
                 p_attempt, p_verb, p_error, p_delay_sec, p_progress, p_facts, NULL);
END
$$;


-- Code of before 0023 claims nothing from an ordered queue: it would run the jobs of a delivery one by one.
CREATE OR REPLACE FUNCTION dl_step(
  p_queue text, p_worker text, p_backend_start timestamptz, p_backoff_sec float8, p_most int,
  p_priority int, p_from timestamptz,
  p_job_id uuid[], p_attempt int[], p_verb text[], p_error text[], p_delay_sec float8[], p_progress text[], p_facts text[])
RETURNS TABLE (
  job_id uuid, task text, args text, idempotency_key text, lock_key text, partition_key text, attempt int,
  max_attempts int, lease_ttl_sec int, timeout_sec int, claims int,
  unfinished uuid[], canceled uuid[], locked uuid[], backoffs int, look_again boolean, due_in float8,
  from_priority int, from_time text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  SELECT job_id, task, args, idempotency_key, lock_key, partition_key, attempt, max_attempts, lease_ttl_sec, timeout_sec,
         claims, s.unfinished, s.canceled, s.locked, coalesce(s.backoffs, 0), coalesce(s.look_again, false), s.due_in,
         s.from_priority, s.from_time
    FROM dl_step(ARRAY[p_queue], false, p_worker, p_backend_start, p_backoff_sec,
                 CASE WHEN EXISTS (SELECT FROM dl_queues WHERE queue = p_queue AND ordered) THEN 0 ELSE p_most END,
                 p_priority, p_from, p_job_id, p_attempt, p_verb, p_error, p_delay_sec, p_progress, p_facts)
   CROSS JOIN json_to_record(coalesce(said, '{}')::json) AS s (
     unfinished uuid[], canceled uuid[], locked uuid[], backoffs int, look_again boolean, due_in float8,
     from_priority int, from_time text);
END
$$;


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
  wrote record;
BEGIN
  IF p_ends::text <> '[]' THEN
    SELECT * INTO wrote FROM dl_finish(p_worker, p_ends, true, p_waits);
  ELSE
    SELECT NULL::uuid[] AS unfinished, NULL::uuid[] AS canceled, NULL::uuid[] AS locked INTO wrote;
  END IF;
  RETURN QUERY
  SELECT s.job_id, s.task, s.args, s.idempotency_key, s.lock_key, s.partition_key, s.attempt, s.max_attempts,
         s.lease_ttl_sec, s.timeout_sec, s.claims, wrote.unfinished, wrote.canceled, wrote.locked, s.backoffs,
         s.look_again, s.due_in
    FROM dl_step(p_queue, p_worker, p_backend_start, p_backoff_sec, p_most, 0, '-infinity'::timestamptz,
                 CASE p_ends::text WHEN '[]' THEN '{}'::uuid[] END, NULL, NULL, NULL, NULL, NULL, NULL) s;
END
$$;


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


-- A run of one job.
CREATE OR REPLACE FUNCTION dl_settle(p_worker text, p_running uuid, p_end text, p_reason text, p_facts jsonb)
RETURNS TABLE (job_id uuid, status dl_status) LANGUAGE sql AS $$
  SELECT * FROM dl_settle(p_worker, ARRAY[p_running], p_end, p_reason, p_facts)
$$;


CREATE OR REPLACE FUNCTION dl_retake(p_job_id uuid, p_attempt int, p_worker text, p_backend_start timestamptz)
RETURNS boolean LANGUAGE sql AS $$
  SELECT dl_retake(ARRAY[p_job_id], ARRAY[p_attempt], p_worker, p_backend_start)
$$;


-- All jobs of the worker count.
CREATE OR REPLACE FUNCTION dl_settle(p_worker text, p_end text, p_reason text, p_facts jsonb)
RETURNS TABLE (job_id uuid, status dl_status) LANGUAGE sql AS $$
  SELECT * FROM dl_settle(p_worker, NULL::uuid[], p_end, p_reason, p_facts)
$$;


CREATE OR REPLACE FUNCTION dl_reap(OUT job_id uuid, OUT queue text, OUT status dl_status) LANGUAGE sql AS $$
  SELECT * FROM dl_reap('infinity', 0)
$$;


-- Jobs of code that knows no score, or no affinity_key, or no limits.
DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_many(
  p_job_id uuid[], p_queue text[], p_task text[], p_args text[], p_idempotency_key text[], p_lock_key text[],
  p_partition_key text[], p_priority int[], p_available_at timestamptz[], p_max_attempts int[], p_lease_ttl_sec int[],
  p_timeout_sec int[], p_producer text[], p_consumer_group text[], p_place int[], p_since timestamptz)
RETURNS TABLE (place int, job_id uuid, status text) LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
  SELECT * FROM %1$I.dl_enqueue_many(
    p_job_id, p_queue, p_task, p_args, p_idempotency_key, p_lock_key, p_partition_key, p_priority, p_available_at,
    p_max_attempts, p_lease_ttl_sec, p_timeout_sec, ARRAY[NULL::float8], p_producer, p_consumer_group,
    ARRAY[NULL::text], ARRAY[NULL::text], ARRAY[NULL::timestamptz], p_place, p_since)
$$
$function$, current_schema()); END $bound$;


DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_many(
  p_job_id uuid[], p_queue text[], p_task text[], p_args text[], p_idempotency_key text[], p_lock_key text[],
  p_partition_key text[], p_priority int[], p_available_at timestamptz[], p_max_attempts int[], p_lease_ttl_sec int[],
  p_timeout_sec int[], p_score float8[], p_producer text[], p_consumer_group text[], p_place int[], p_since timestamptz)
RETURNS TABLE (place int, job_id uuid, status text) LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
  SELECT * FROM %1$I.dl_enqueue_many(
    p_job_id, p_queue, p_task, p_args, p_idempotency_key, p_lock_key, p_partition_key, p_priority, p_available_at,
    p_max_attempts, p_lease_ttl_sec, p_timeout_sec, p_score, p_producer, p_consumer_group,
    ARRAY[NULL::text], ARRAY[NULL::text], ARRAY[NULL::timestamptz], p_place, p_since)
$$
$function$, current_schema()); END $bound$;


DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_many(
  p_job_id uuid[], p_queue text[], p_task text[], p_args text[], p_idempotency_key text[], p_lock_key text[],
  p_partition_key text[], p_priority int[], p_available_at timestamptz[], p_max_attempts int[], p_lease_ttl_sec int[],
  p_timeout_sec int[], p_score float8[], p_producer text[], p_consumer_group text[], p_affinity_key text[], p_place int[],
  p_since timestamptz)
RETURNS TABLE (place int, job_id uuid, status text) LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
  SELECT * FROM %1$I.dl_enqueue_many(
    p_job_id, p_queue, p_task, p_args, p_idempotency_key, p_lock_key, p_partition_key, p_priority, p_available_at,
    p_max_attempts, p_lease_ttl_sec, p_timeout_sec, p_score, p_producer, p_consumer_group, p_affinity_key,
    ARRAY[NULL::text], ARRAY[NULL::timestamptz], p_place, p_since)
$$
$function$, current_schema()); END $bound$;


DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_one(
  p_job_id uuid, p_queue text, p_task text, p_lock_key text, p_args jsonb, p_idempotency_key text,
  p_partition_key text, p_priority int, p_available_at timestamptz, p_max_attempts int, p_lease_ttl_sec int,
  p_timeout_sec int, p_producer text, p_consumer_group text)
RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT %1$I.dl_enqueue_one(
    p_job_id, p_queue, p_task, p_lock_key, p_args, p_idempotency_key, p_partition_key, p_priority, p_available_at,
    p_max_attempts, p_lease_ttl_sec, p_timeout_sec, NULL, p_producer, p_consumer_group, NULL,
    NULL, NULL)
$$
$function$, current_schema()); END $bound$;


DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_one(
  p_job_id uuid, p_queue text, p_task text, p_lock_key text, p_args jsonb, p_idempotency_key text,
  p_partition_key text, p_priority int, p_available_at timestamptz, p_max_attempts int, p_lease_ttl_sec int,
  p_timeout_sec int, p_score float8, p_producer text, p_consumer_group text)
RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT %1$I.dl_enqueue_one(
    p_job_id, p_queue, p_task, p_lock_key, p_args, p_idempotency_key, p_partition_key, p_priority, p_available_at,
    p_max_attempts, p_lease_ttl_sec, p_timeout_sec, p_score, p_producer, p_consumer_group, NULL,
    NULL, NULL)
$$
$function$, current_schema()); END $bound$;


DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_one(
  p_job_id uuid, p_queue text, p_task text, p_lock_key text, p_args jsonb, p_idempotency_key text,
  p_partition_key text, p_priority int, p_available_at timestamptz, p_max_attempts int, p_lease_ttl_sec int,
  p_timeout_sec int, p_score float8, p_producer text, p_consumer_group text, p_affinity_key text)
RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT %1$I.dl_enqueue_one(
    p_job_id, p_queue, p_task, p_lock_key, p_args, p_idempotency_key, p_partition_key, p_priority, p_available_at,
    p_max_attempts, p_lease_ttl_sec, p_timeout_sec, p_score, p_producer, p_consumer_group, p_affinity_key,
    NULL, NULL)
$$
$function$, current_schema()); END $bound$;


DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_many(
  p_job_id uuid[], p_queue text[], p_task text[], p_args text[], p_idempotency_key text[], p_lock_key text[],
  p_partition_key text[], p_priority int[], p_available_at timestamptz[], p_max_attempts int[], p_lease_ttl_sec int[],
  p_timeout_sec int[], p_score float8[], p_producer text[], p_consumer_group text[], p_affinity_key text[],
  p_limits text[], p_place int[], p_since timestamptz)
RETURNS TABLE (place int, job_id uuid, status text) LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
  SELECT * FROM %1$I.dl_enqueue_many(
    p_job_id, p_queue, p_task, p_args, p_idempotency_key, p_lock_key, p_partition_key, p_priority, p_available_at,
    p_max_attempts, p_lease_ttl_sec, p_timeout_sec, p_score, p_producer, p_consumer_group, p_affinity_key,
    p_limits, ARRAY[NULL::timestamptz], p_place, p_since)
$$
$function$, current_schema()); END $bound$;


DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_enqueue_one(
  p_job_id uuid, p_queue text, p_task text, p_lock_key text, p_args jsonb, p_idempotency_key text,
  p_partition_key text, p_priority int, p_available_at timestamptz, p_max_attempts int, p_lease_ttl_sec int,
  p_timeout_sec int, p_score float8, p_producer text, p_consumer_group text, p_affinity_key text,
  p_limits text[])
RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT %1$I.dl_enqueue_one(
    p_job_id, p_queue, p_task, p_lock_key, p_args, p_idempotency_key, p_partition_key, p_priority, p_available_at,
    p_max_attempts, p_lease_ttl_sec, p_timeout_sec, p_score, p_producer, p_consumer_group, p_affinity_key,
    p_limits, NULL)
$$
$function$, current_schema()); END $bound$;


-- Called by triggers of migrations before 0019, while these are on their way.
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


CREATE OR REPLACE FUNCTION dl_jobs_notify_key() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM dl_tell_waiters(ARRAY[hashtext(NEW.lock_key)]);
  RETURN NULL;
END
$$;


DO $bound$ BEGIN EXECUTE format($function$
CREATE OR REPLACE FUNCTION dl_jobs_forget() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF TG_RELID <> %2$L::regclass THEN
    RAISE insufficient_privilege USING MESSAGE = 'dl_jobs_forget is for dl_jobs';
  END IF;
  EXECUTE %3$L;
  RETURN NULL;
END
$$
$function$, current_schema(), format('%I.dl_jobs', current_schema()),
  format('DELETE FROM %I.dl_job_events WHERE job_id IN (SELECT job_id FROM gone)', current_schema())); END $bound$;


-- Called by our functions alone, and not any more.
DROP FUNCTION IF EXISTS dl_park(text, int[], int, timestamptz, int);
DROP FUNCTION IF EXISTS dl_take_keys(text, int, int, timestamptz, int, int[], boolean);
DROP FUNCTION IF EXISTS dl_take_keys(text, boolean, int, int, timestamptz, int, int[], boolean);
DROP FUNCTION IF EXISTS dl_take_keys(text, boolean, int, int, timestamptz, int, int[], boolean, json, int);
DROP FUNCTION IF EXISTS dl_lock_heads(text, text[], int, boolean);
DROP FUNCTION IF EXISTS dl_lock_delivery(text, text, text, int);
