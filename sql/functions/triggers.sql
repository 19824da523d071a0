-- The bodies of the triggers. schema.sql creates the triggers, and says for which rows each one fires.
--
-- A function with the owner's rights trusts no search_path: it names this schema, and what it calls does too. `migrate`
-- writes the name where these files have it in braces, and each session plans the function once.

-- Refuses a row with a field beyond its bounds, as a CHECK of the field would: texts by queue/fields.py. Python could not
-- read args that are nested deeper: its recursion ends at a depth of some 900. A claim may count on from any number.
-- The caller's search_path has no say. A SET clause would cost each row of a batch a twelfth: so the types and the condition
-- that most rows pass name pg_catalog, and only for the others the search_path changes.
CREATE OR REPLACE FUNCTION dl_jobs_check() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  path pg_catalog.text;
  field pg_catalog.text;
BEGIN
  IF greatest({fields.octets}) OPERATOR(pg_catalog.>) 255
     OR NEW.timeout_sec OPERATOR(pg_catalog.<) 1 OR NEW.timeout_sec OPERATOR(pg_catalog.>) 2592000
     OR NEW.limits IS NOT NULL OR NEW.deadline IS NOT NULL
     OR greatest(NEW.claims, NEW.backoffs) OPERATOR(pg_catalog.>) 1000000000
     OR pg_catalog.pg_column_size(NEW.args) OPERATOR(pg_catalog.>) 4000
     OR pg_catalog.pg_column_compression(NEW.args) IS NOT NULL THEN
    path := pg_catalog.current_setting('search_path');
    field := pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- PERFORM would run it as a query
    field := CASE
      {fields.too_long}
      WHEN NEW.timeout_sec NOT BETWEEN 1 AND 2592000 THEN 'timeout_sec'
      WHEN NEW.deadline < '2000-01-01 00:00+00' OR NEW.deadline >= '9999-01-01 00:00+00' THEN 'deadline'
      WHEN NEW.limits <> '{}' AND NOT (
             array_ndims(NEW.limits) = 1 AND array_lower(NEW.limits, 1) = 1 AND cardinality(NEW.limits) <= 8
             AND array_position(NEW.limits, NULL) IS NULL AND array_position(NEW.limits, '') IS NULL
             AND greatest(octet_length(NEW.limits[1]), octet_length(NEW.limits[2]), octet_length(NEW.limits[3]),
                          octet_length(NEW.limits[4]), octet_length(NEW.limits[5]), octet_length(NEW.limits[6]),
                          octet_length(NEW.limits[7]), octet_length(NEW.limits[8])) <= 400) THEN 'limits'
      WHEN TG_OP = 'INSERT' AND greatest(NEW.claims, NEW.backoffs) > 1000000000 THEN 'counters'
      WHEN jsonb_path_exists(NEW.args, 'strict $.**{500}')
           AND NEW.args IS DISTINCT FROM OLD.args THEN 'args'  -- adopted args may be deeper
    END;
    IF field IS NOT NULL THEN
      RAISE check_violation USING
        MESSAGE = CASE field WHEN 'args' THEN 'args should be nested less than 500 deep'
                             ELSE format('new row for relation "dl_jobs" violates check constraint "dl_jobs_chk_%s"', field) END,
        CONSTRAINT = 'dl_jobs_chk_' || field, TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
    END IF;
    path := set_config('search_path', path, true);
  END IF;
  RETURN NEW;
END
$$;

-- Where an inserted row stands. An ended job and no other has a finished_at: retention and lists go by that.
CREATE OR REPLACE FUNCTION dl_jobs_place() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  NEW.blocked_on := CASE WHEN NEW.status = 'queued' AND NEW.available_at > now() THEN 'time' END;
  NEW.finished_at := CASE WHEN NEW.status NOT IN ('queued', 'running') THEN coalesce(NEW.finished_at, now()) END;
  RETURN NEW;
END
$$;

-- The place of an inserted row: in its key by time of creation, in its queue by its deadline or, in a fair queue, by its
-- turn. With the owner's rights.
CREATE OR REPLACE FUNCTION dl_jobs_score() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  {for_dl_jobs};
  IF NEW.journaled <> 2 AND NEW.score IS NULL THEN
    NEW.score := (SELECT extract(epoch FROM NEW.created_at) FROM {schema}.dl_queues WHERE queue = NEW.queue AND ordered);
  END IF;
  NEW.journaled := least(NEW.journaled, 1000000);  -- each step counts on, and the table has a bound
  NEW.turn_at := NEW.deadline - interval '1000 years';
  NEW.share := (SELECT CASE fair_by WHEN 'producer' THEN coalesce(NEW.producer, '') ELSE NEW.partition_key END
                  FROM {schema}.dl_queues WHERE queue = NEW.queue AND fair_by IS NOT NULL AND NEW.deadline IS NULL);
  IF NEW.share IS NOT NULL AND NEW.available_at <= now() THEN
    NEW.turn_at := {schema}.dl_turn(NEW.queue, NEW.priority, NEW.share, NEW.created_at);
  END IF;
  RETURN NEW;
END
$$;

-- part: for_dl_jobs
IF (TG_TABLE_SCHEMA, TG_TABLE_NAME) <> ({schema_name}, 'dl_jobs') THEN  -- whoever puts the trigger on another table
    RAISE insufficient_privilege USING MESSAGE = 'the function is for the triggers of dl_jobs',
      HINT = 'It is for the schema ' || {schema_name} || ': after a rename run dataloader migrate.';
  END IF

-- Only the farm adds jobs of its messages' task, and stores the message first: a producer's own text would be signed with
-- the operator's key. With the owner's rights.
CREATE OR REPLACE FUNCTION dl_jobs_internal() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  {for_dl_jobs};
  IF NOT EXISTS (SELECT FROM {schema}.dl_messages WHERE job_id = NEW.job_id) THEN
    RAISE invalid_parameter_value USING MESSAGE =
      format('task should not be %s: the farm alone adds jobs of this task', NEW.task);
  END IF;
  RETURN NEW;
END
$$;

-- Notify the workers of a queue of a row, also a future one: an idle worker sleeps until the due time that it knows.
CREATE OR REPLACE FUNCTION notify_job_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.status = 'queued' THEN
    PERFORM pg_notify('dl_jobs', NEW.queue);
  END IF;
  RETURN NULL;
END
$$;

-- The journal of other services' new rows, as dl_jobs_step has it of their steps: our services write their rows themselves,
-- and count them in `journaled`. Deferred, for a service may write its own row after its step. With the owner's rights.
-- Without sequential scans, for a plan outlives a short journal. Errors are left out: only our workers mask them.
CREATE OR REPLACE FUNCTION dl_jobs_journal() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
  step text := CASE NEW.status WHEN 'running' THEN 'picked' WHEN 'succeeded' THEN 'done' ELSE NEW.status::text END;
BEGIN
  {for_dl_jobs};
  {journal};
  RETURN NULL;
END
$$;

-- part: journal
INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, step, jsonb_strip_nulls(jsonb_build_object(
           'attempt', NEW.attempt, 'by', 'another service', 'user', session_user,
           'application', nullif(current_setting('application_name'), '')))
    FROM {schema}.dl_jobs WHERE job_id = NEW.job_id  -- it may be deleted by now
     AND NOT EXISTS (
       SELECT FROM {schema}.dl_job_events e
        WHERE e.job_id = NEW.job_id AND e.kind = step AND (e.ts = now() OR e.xmin = pg_current_xact_id()::xid))

-- A step of another service or an operator, at the commit: the row takes its place, workers are notified, the journal gets
-- its line, the next row of the key becomes ready. A finished job that is put back gets fresh attempts and loses its
-- cancellation and result; after a success it begins at the start, else at its checkpoint. Unknown reasons to wait stay.
-- With the owner's rights.
CREATE OR REPLACE FUNCTION dl_jobs_step() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
  stays boolean;
  is_resolved boolean := false;
  step text := CASE NEW.status WHEN 'running' THEN 'picked' WHEN 'succeeded' THEN 'done' WHEN 'queued' THEN 'requeue'
                               ELSE NEW.status::text END;
  is_back boolean := NEW.status = 'queued' AND OLD.status NOT IN ('queued', 'running');
  has_moved boolean := NEW.queue <> OLD.queue OR NEW.lock_key <> OLD.lock_key;
BEGIN
  {for_dl_jobs};
  UPDATE {schema}.dl_jobs j SET
         blocked_on = place.blocked_on,
         claimed_by = CASE j.status WHEN 'running' THEN j.claimed_by END,
         claimed_pid = CASE j.status WHEN 'running' THEN j.claimed_pid END,
         claimed_backend_start = CASE j.status WHEN 'running' THEN j.claimed_backend_start END,
         attempt = CASE WHEN is_back AND j.attempt = OLD.attempt THEN 0 ELSE j.attempt END,
         cancel_requested = j.cancel_requested AND NOT (is_back AND OLD.cancel_requested),
         cancel_forced = j.cancel_forced AND NOT is_back,
         finished_at = CASE WHEN j.status NOT IN ('queued', 'running') THEN coalesce(j.finished_at, now()) END,
         available_at = CASE WHEN j.status NOT IN ('queued', 'running') AND OLD.blocked_on = 'parent'
                             THEN least(j.available_at, now()) ELSE j.available_at END,
         score = coalesce(j.score, place.score)
    FROM (SELECT ctid AS at, CASE WHEN score IS NULL AND status IN ('queued', 'running') THEN (
                                    SELECT extract(epoch FROM dl_jobs.created_at) FROM {schema}.dl_queues q
                                     WHERE q.queue = dl_jobs.queue AND ordered) END AS score,
                             CASE WHEN status <> 'queued' THEN NULL
                                  WHEN blocked_on = 'parent' AND available_at >= {far} THEN 'parent'
                                  WHEN available_at > now() THEN 'time'
                                  WHEN blocked_on IN ('time', 'parent') OR blocked_on = 'key' AND has_moved THEN NULL
                                  ELSE blocked_on END AS blocked_on
            FROM {schema}.dl_jobs WHERE job_id = NEW.job_id) place
   WHERE j.ctid = place.at
     AND (is_back OR j.status <> 'running' AND j.claimed_by IS NOT NULL
          OR j.blocked_on IS DISTINCT FROM place.blocked_on OR place.score IS NOT NULL
          OR (j.status IN ('queued', 'running')) = (j.finished_at IS NOT NULL));
  -- The error of a service that knows no groups.
  IF NEW.error IS DISTINCT FROM OLD.error AND NEW.journaled = OLD.journaled
     AND NEW.error_group IS NOT DISTINCT FROM OLD.error_group THEN
    UPDATE {schema}.dl_jobs SET error_group = {schema}.dl_error_group(error) WHERE job_id = NEW.job_id;
  END IF;
  IF is_back OR NEW.status = 'succeeded' AND OLD.status <> 'succeeded' THEN
    DELETE FROM {schema}.dl_results WHERE job_id = NEW.job_id;
  END IF;
  -- A job that leaves its place waits no more; one that has ended may have children, unless dl_end_waits has canceled it.
  IF OLD.blocked_on = 'parent'
     AND NOT EXISTS (SELECT FROM {schema}.dl_jobs WHERE job_id = NEW.job_id AND blocked_on = 'parent') THEN
    DELETE FROM {schema}.dl_waiting WHERE job_id = NEW.job_id;
    is_resolved := NOT FOUND;
  END IF;
  IF NEW.status NOT IN ('queued', 'running') AND OLD.status IN ('queued', 'running') AND NOT is_resolved
     AND (SELECT true FROM {schema}.dl_waiting LIMIT 1) THEN
    PERFORM {schema}.dl_resolve(ARRAY[NEW.job_id]);
  END IF;
  IF is_back AND OLD.status = 'succeeded' THEN
    UPDATE {schema}.dl_checkpoints SET checkpoint = NULL, target_claim = NEW.claims + 1, target_number = 0
     WHERE job_id = NEW.job_id AND (checkpoint ? 'canceled') IS NOT TRUE;  -- a cleanup stays one: queue/cleanups.py
  END IF;
  IF NEW.status = 'queued' THEN
    PERFORM pg_notify('dl_jobs', NEW.queue);
  END IF;
  IF NEW.status <> OLD.status AND NEW.journaled = OLD.journaled THEN
    {journal};
  END IF;
  -- A run has ended, or a ready row has left, or one of an ordered queue: it may have stood for parked ones.
  stays := OLD.status = NEW.status AND NEW.status = 'queued' AND NEW.available_at <= now() AND NOT has_moved;
  IF NOT stays AND OLD.status IN ('queued', 'running') AND (NEW.status <> 'running' OR has_moved) THEN
    IF OLD.blocked_on IS NULL OR OLD.score IS NOT NULL
       OR left(OLD.blocked_on, 6) = 'limit:' AND (NEW.status <> 'queued' OR has_moved) THEN
      PERFORM {schema}.dl_unpark(ARRAY[hashtext(OLD.lock_key)]);
    END IF;
    IF OLD.blocked_on IS NULL AND OLD.limits <> '{}' THEN
      PERFORM {schema}.dl_let_in(OLD.limits);
    END IF;
  END IF;
  RETURN NULL;
END
$$;

-- Deleted jobs: their rows in other tables go, as by a foreign key but cheaper, and the next rows of their keys become ready;
-- the ledger keeps how they ended. By EXECUTE, for a session would keep the plan of the first number of rows. With the
-- owner's rights.
CREATE OR REPLACE FUNCTION dl_jobs_gone() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  its_table text;
  key_hashes int[];
  of_limits text[];
BEGIN
  {for_dl_jobs};
  IF (SELECT true FROM gone LIMIT 1) IS NULL THEN  -- a look of retention that has found nothing
    RETURN NULL;
  END IF;
  FOREACH its_table IN ARRAY
    '{dl_job_events, dl_results, dl_waiting, dl_parents, dl_checkpoints, dl_job_logs}'::text[]
    || CASE WHEN EXISTS (SELECT FROM gone WHERE task = 'alert.webhook') THEN '{dl_messages}'::text[] END
  LOOP
    EXECUTE format('DELETE FROM %I.%I WHERE job_id = ANY (ARRAY(SELECT job_id FROM gone))', {schema_name}, its_table);
  END LOOP;
  EXECUTE $q$UPDATE {schema}.dl_partitions p SET last_status = gone.status::text FROM gone WHERE p.job_id = gone.job_id$q$;
  IF (SELECT true FROM {schema}.dl_waiting LIMIT 1) THEN
    PERFORM {schema}.dl_resolve(ARRAY(SELECT job_id FROM gone));
  END IF;
  key_hashes := ARRAY(SELECT DISTINCT hashtext(lock_key) FROM gone
                       WHERE status = 'running' OR status = 'queued' AND blocked_on IS NULL
                          OR score IS NOT NULL AND status IN ('queued', 'failed', 'lost')
                          OR left(blocked_on, 6) = 'limit:');
  IF key_hashes <> '{}' THEN
    PERFORM {schema}.dl_unpark(key_hashes);
    of_limits := ARRAY(SELECT DISTINCT name FROM gone CROSS JOIN unnest(limits) name
                        WHERE status IN ('queued', 'running') AND blocked_on IS NULL);
    IF of_limits <> '{}' THEN
      PERFORM {schema}.dl_let_in(of_limits);
    END IF;
  END IF;
  RETURN NULL;
END
$$;
