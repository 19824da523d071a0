-- none -> queued: functions of producers, and of the API for many jobs.

-- Whether the queue holds as many jobs as it may; two producers at once may both get a place. Served by ix_dl_jobs_claim.
CREATE OR REPLACE FUNCTION dl_is_full(p_queue text) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off AS $$
DECLARE
  most int := (SELECT max_length FROM dl_queues WHERE queue = p_queue);
BEGIN
  RETURN most IS NOT NULL
     AND (SELECT count(*) FROM (SELECT FROM dl_jobs WHERE queue = p_queue AND status = 'queued' LIMIT most) n) >= most;
END
$$;

-- The affinity_key from args: the first named one (dl_tasks.affinity) that is a text of 1 to 200 characters. Strict: a task
-- without names costs no call.
CREATE OR REPLACE FUNCTION dl_affinity(p_names text[], p_args jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
  name text;
BEGIN
  FOREACH name IN ARRAY p_names LOOP
    IF jsonb_typeof(p_args -> name) = 'string' AND length(p_args ->> name) BETWEEN 1 AND 200 THEN
      RETURN p_args ->> name;
    END IF;
  END LOOP;
  RETURN NULL;
END
$$;

-- A column of a batch as enqueue_many sends it: one value per job, or a single one for all of them.
CREATE OR REPLACE FUNCTION dl_spread(p_values anyarray, p_size int) RETURNS anyarray LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN cardinality(p_values) = 1 THEN array_fill(p_values[1], ARRAY[p_size]) ELSE p_values END
$$;

-- Add a batch, or nothing. Job ids grow, so that indexes take them at the right edge. The other arrays have one value per
-- job or one for all; p_args (JSON) one per job; p_limits are lists as text. Returns the jobs that were not added: their
-- place from 1, the id and status of the job with their key; nulls when that is gone.
--
-- Each job is created a microsecond after the one before it, from p_since or the clock; p_place are places in a list of
-- several batches. Keys are inserted in the order of their bytes, against deadlocks. With the owner's rights. The journal
-- says which role added the jobs: dl_job_status. Lists of fields: queue/fields.py.
CREATE OR REPLACE FUNCTION dl_enqueue_many(
  p_job_id uuid[], {fields.p_arrays}, p_place int[], p_since timestamptz)
RETURNS TABLE (place int, job_id uuid, status text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  size int := cardinality(p_job_id);
  since timestamptz := coalesce(p_since, clock_timestamp());
  added_by jsonb := jsonb_build_object('user', session_user);
  ordered text[] := ARRAY(SELECT queue FROM {schema}.dl_queues WHERE ordered);
  fair text[] := ARRAY(SELECT queue FROM {schema}.dl_queues WHERE fair_by IS NOT NULL);
  written int;
  columns int := greatest(cardinality(p_task), cardinality(p_max_attempts));
BEGIN
  IF array_position(p_max_attempts, NULL) IS NOT NULL THEN  -- what the tasks' pipelines say
    p_max_attempts := ARRAY(
      SELECT coalesce(given, (SELECT max_attempts FROM {schema}.dl_tasks WHERE task = named), 5)
        FROM unnest({schema}.dl_spread(p_max_attempts, columns), {schema}.dl_spread(p_task, columns))
             WITH ORDINALITY AS n (given, named, nth) ORDER BY nth);
  END IF;
  IF array_position(p_affinity_key, NULL) IS NOT NULL
     AND EXISTS (SELECT FROM {schema}.dl_tasks WHERE task = ANY (p_task) AND affinity IS NOT NULL) THEN  -- mostly none
    p_affinity_key := ARRAY(
      SELECT coalesce(given, {schema}.dl_affinity(affinity, args::jsonb))
        FROM unnest({schema}.dl_spread(p_affinity_key, size), {schema}.dl_spread(p_task, size), p_args)
             WITH ORDINALITY AS n (given, task, args, nth)
        LEFT JOIN {schema}.dl_tasks USING (task) ORDER BY nth);
  END IF;
  IF array_position(p_limits, NULL) IS NOT NULL
     AND EXISTS (SELECT FROM {schema}.dl_tasks WHERE task = ANY (p_task) AND limits IS NOT NULL) THEN  -- mostly none
    p_limits := ARRAY(
      SELECT coalesce(given, limits::text)
        FROM unnest({schema}.dl_spread(p_limits, size), {schema}.dl_spread(p_task, size)) WITH ORDINALITY AS n (given, task, nth)
        LEFT JOIN {schema}.dl_tasks USING (task) ORDER BY nth);
  END IF;
  IF array_remove(p_idempotency_key, NULL) = '{}' THEN
    -- No other row can be in the way, and an insert that need not look is cheaper by a tenth.
    {many_jobs};
    INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
    SELECT n.job_id, queue, 'queued',
           CASE WHEN producer IS NULL THEN added_by ELSE added_by || jsonb_build_object('producer', producer) END
      FROM (SELECT unnest(p_job_id) AS job_id, unnest({schema}.dl_spread(p_queue, size)) AS queue,
                   unnest({schema}.dl_spread(p_producer, size)) AS producer) n;
    PERFORM pg_notify('dl_jobs', queue) FROM (SELECT DISTINCT unnest(p_queue) AS queue) queues;
    RETURN;
  END IF;

  WITH added AS (
    {many_jobs}
     ORDER BY idempotency_key COLLATE "C", nth
    ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING job_id, queue, producer)
  INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
  SELECT added.job_id, queue, 'queued',
         CASE WHEN producer IS NULL THEN added_by ELSE added_by || jsonb_build_object('producer', producer) END
    FROM added;
  GET DIAGNOSTICS written = ROW_COUNT;
  IF written > 0 THEN
    PERFORM pg_notify('dl_jobs', queue) FROM (SELECT DISTINCT unnest(p_queue) AS queue) queues;
  END IF;
  IF written < size THEN
    -- A statement of its own, for its own snapshot: in one with the insert a twin's row stays invisible.
    RETURN QUERY
    SELECT nth::int, j.job_id, j.status::text
      FROM unnest(p_job_id, {schema}.dl_spread(p_idempotency_key, size)) WITH ORDINALITY AS n (job_id, idempotency_key, nth)
      LEFT JOIN {schema}.dl_jobs j USING (idempotency_key)
     WHERE idempotency_key IS NOT NULL AND j.job_id IS DISTINCT FROM n.job_id;
  END IF;
END
$$;

-- part: many_jobs
    INSERT INTO {schema}.dl_jobs (
           job_id, {fields.plain}, available_at, max_attempts, score, affinity_key, limits, created_at, turn_at, blocked_on, journaled)
    SELECT n.job_id, {fields.plain}, coalesce(available_at, now()), max_attempts,
           coalesce(score, CASE WHEN queue = ANY (ordered)
                                THEN extract(epoch FROM since + coalesce(n.place, nth) * interval '1 microsecond') END),
           affinity_key, nullif(limits, '{}')::text[], since + coalesce(n.place, nth) * interval '1 microsecond',
           CASE WHEN queue = ANY (fair) THEN timestamptz 'infinity' END, CASE WHEN available_at > now() THEN 'time' END, 2
      FROM (SELECT unnest(p_job_id) AS job_id, {fields.unnested}, unnest(p_args)::jsonb AS args,
                   unnest(p_place) AS place, generate_series(1, size) AS nth) n


-- Add one job at half the cost of a batch of one. Returns null, or the id and status of the job with its key, as one text:
-- that is read faster. An insert that looks for no key is cheaper by a fifth.
CREATE OR REPLACE FUNCTION dl_enqueue_one(
  p_job_id uuid, {fields.parameters})
RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  known text;
  at timestamptz := clock_timestamp();
BEGIN
  IF p_idempotency_key IS NULL THEN
    {one_job};
  ELSE
    LOOP
      {one_job}
      ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING;
      EXIT WHEN FOUND;
      -- A statement of its own, for its own snapshot: in one with the insert a twin's row stays invisible.
      SELECT job_id || ' ' || status INTO known FROM {schema}.dl_jobs WHERE idempotency_key = p_idempotency_key;
      IF FOUND THEN
        RETURN known;
      END IF;
      -- The job that had the key was deleted between the two: the key is free again.
    END LOOP;
  END IF;
  INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
  VALUES (p_job_id, p_queue, 'queued',
          jsonb_strip_nulls(jsonb_build_object('user', session_user, 'producer', p_producer)));
  PERFORM pg_notify('dl_jobs', p_queue);
  RETURN NULL;
END
$$;

-- part: one_job
    INSERT INTO {schema}.dl_jobs (
           job_id, {fields.plain}, available_at, max_attempts, score, affinity_key, limits, created_at, turn_at, blocked_on, journaled)
    SELECT p_job_id, {fields.p_plain}, coalesce(p_available_at, now()),
           coalesce(p_max_attempts, declared.max_attempts, 5),
           coalesce(p_score, (SELECT extract(epoch FROM at) FROM {schema}.dl_queues WHERE queue = p_queue AND ordered)),
           coalesce(p_affinity_key, {schema}.dl_affinity(declared.affinity, p_args)),
           nullif(coalesce(p_limits, declared.limits), '{}'), at,
           (SELECT timestamptz 'infinity' FROM {schema}.dl_queues WHERE queue = p_queue AND fair_by IS NOT NULL),
           CASE WHEN p_available_at > now() THEN 'time' END, 2
      FROM (VALUES (p_task)) AS new (task) LEFT JOIN {schema}.dl_tasks declared USING (task)


-- Add one job, for producers in any language (docs/producers.md); returns the id of the new job, or of the job that has the
-- key. Null counts as left out. Bad input is refused with SQLSTATE 22023, and names the parameter. With the owner's rights.
-- A version that adds a parameter drops these three functions first: no call could choose between two.
CREATE OR REPLACE FUNCTION dl_enqueue(
  {fields.required}, {fields.optional})
RETURNS uuid LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  wrong text;
  job_id uuid := gen_random_uuid();
BEGIN
  wrong := CASE
    WHEN coalesce(length(dl_enqueue.queue), 0) NOT BETWEEN 1 AND 128 OR dl_enqueue.queue ~ '[\u0001-\u001f\u007f-\u009f]'
      THEN 'queue should be a text of 1 to 128 characters without control characters'
    {fields.refusals}
    WHEN jsonb_typeof(dl_enqueue.args) <> 'object' THEN 'args should be a JSON object'
    WHEN pg_column_size(dl_enqueue.args) > 500  -- else it has no room for so many levels
         AND jsonb_path_exists(dl_enqueue.args, 'strict $.**{63} ? (@.type() == "object" || @.type() == "array")')
      THEN 'args should be nested at most 63 deep'
    WHEN dl_enqueue.score IN ('NaN', 'Infinity', '-Infinity') THEN 'score should be a finite number'
    WHEN cardinality(dl_enqueue.limits) > 8
      OR array_ndims(dl_enqueue.limits) > 1 OR array_lower(dl_enqueue.limits, 1) <> 1
      OR cardinality(dl_enqueue.limits) > (SELECT count(DISTINCT name) FROM unnest(dl_enqueue.limits) name
                                            WHERE length(name) BETWEEN 1 AND 100 AND name !~ '[\u0001-\u001f\u007f-\u009f]')
      THEN 'limits should be at most 8 different names of 1 to 100 characters without control characters'
  END;
  IF wrong IS NOT NULL THEN
    RAISE EXCEPTION 'dl_enqueue: %', wrong USING ERRCODE = 'invalid_parameter_value';
  END IF;
  RETURN coalesce(split_part({schema}.dl_enqueue_one(p_job_id => job_id, {fields.given}), ' ', 1)::uuid, job_id);
END
$$;

-- Store the trace of these jobs' trigger, if dl_enqueue_many has added them for this role in this transaction.
CREATE OR REPLACE FUNCTION dl_set_trace(p_trace text, p_job_ids uuid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  UPDATE {schema}.dl_jobs j SET trace = p_trace
   WHERE job_id = ANY (p_job_ids) AND trace IS NULL
     AND EXISTS (SELECT FROM {schema}.dl_job_events e
                  WHERE e.job_id = j.job_id AND e.ts = now() AND e.kind = 'queued' AND e.payload ->> 'user' = session_user)
$$;
