-- queued with blocked_on 'parent': jobs that wait for other jobs, their parents.
--
-- dl_waiting counts the parents that have not let a job go; its available_at is the year 9999, so that no service starts it.
-- Each function that ends a parent calls dl_resolve in the same transaction. A parent that succeeded lets its children go; else
-- on_failure decides: cancel (with its own children), hold (wait on until it has succeeded), run (go).

-- The time of a job that waits for its parents: after all times that a producer may give.
-- part: far
timestamptz '9999-01-01 00:00+00'

-- The meaning of a parent's status for its child: 'go', 'cancel', or null: wait on. A deleted parent has a null status.
CREATE OR REPLACE FUNCTION dl_after(p_status dl_status, p_on_failure text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_status = 'succeeded' THEN 'go'
              WHEN p_status IN ('queued', 'running') THEN NULL
              ELSE CASE p_on_failure WHEN 'run' THEN 'go' WHEN 'cancel' THEN 'cancel' END END
$$;

-- Let jobs wait for their parents, in the transaction that has added the jobs: a value of each array for each parent of a
-- job, in order. Others' jobs are left alone. Returns unknown parents: then roll back. With the owner's rights.
CREATE OR REPLACE FUNCTION dl_depend(p_job_id uuid[], p_parent_id uuid[], p_on_failure text[]) RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
  unknown uuid[] := ARRAY(
    SELECT DISTINCT parent FROM unnest(p_parent_id) parent
     WHERE NOT EXISTS (SELECT FROM {schema}.dl_jobs WHERE job_id = parent));
  new uuid[] := ARRAY(
    SELECT j.job_id FROM {schema}.dl_jobs j
     WHERE j.job_id = ANY (p_job_id) AND j.status::text = 'queued'
       AND EXISTS (SELECT FROM {schema}.dl_job_events e
                    WHERE e.job_id = j.job_id AND e.ts = now() AND e.kind = 'queued'
                      AND (e.payload ->> 'user' = session_user OR has_table_privilege(session_user, j.tableoid, 'UPDATE'))));
BEGIN
  IF unknown <> '{}' THEN
    RETURN unknown;
  END IF;
  PERFORM {schema}.dl_link(n.job_id, n.parent_ids, n.on_failure)
     FROM (SELECT job_id, array_agg(parent_id ORDER BY nth) AS parent_ids, min(on_failure) AS on_failure
             FROM unnest(p_job_id, p_parent_id, p_on_failure) WITH ORDINALITY AS e (job_id, parent_id, on_failure, nth)
            WHERE job_id = ANY (new) GROUP BY job_id) n;
  RETURN unknown;
END
$$;

-- Let one job wait for these parents too: a queued one at once, a running one from the end of its run. Parents that it
-- has, or that let it go, add none.
CREATE OR REPLACE FUNCTION dl_link(p_job_id uuid, p_parent_ids uuid[], p_on_failure text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
  open int;
BEGIN
  WITH linked AS (
    INSERT INTO {schema}.dl_parents (job_id, parent_id, place, is_over)
    SELECT p_job_id, parent_id, min(nth),
           (SELECT {schema}.dl_after(status, p_on_failure) IS NOT DISTINCT FROM 'go' FROM {schema}.dl_jobs WHERE job_id = parent_id)
      FROM unnest(p_parent_ids) WITH ORDINALITY AS parent (parent_id, nth) GROUP BY parent_id
    ON CONFLICT (job_id, parent_id) DO NOTHING
    RETURNING is_over)
  SELECT count(*) FILTER (WHERE NOT is_over) INTO open FROM linked;
  IF open > 0 THEN
    INSERT INTO {schema}.dl_waiting (job_id, parents, available_at, on_failure)
    SELECT p_job_id, open, available_at, p_on_failure FROM {schema}.dl_jobs WHERE job_id = p_job_id
    ON CONFLICT (job_id) DO UPDATE SET parents = dl_waiting.parents + excluded.parents;
    UPDATE {schema}.dl_jobs SET blocked_on = 'parent', available_at = {far},
           turn_at = CASE WHEN share IS NULL THEN turn_at END
     WHERE job_id = p_job_id AND status::text = 'queued';
  END IF;
END
$$;

-- Let a job that this worker runs wait for these jobs from the end of its run; false when the claim is over. SQLSTATE 22023
-- for a circle.
CREATE OR REPLACE FUNCTION dl_gather(p_job_id uuid, p_attempt int, p_worker text, p_parent_ids uuid[]) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
BEGIN
  IF EXISTS (
    WITH RECURSIVE before (job_id) AS (
      SELECT unnest(p_parent_ids)
      UNION
      SELECT e.parent_id FROM before JOIN dl_parents e USING (job_id) WHERE NOT e.is_over)
    SELECT FROM before WHERE job_id = p_job_id) THEN
    RAISE invalid_parameter_value USING MESSAGE = 'a job that is gathered waits for the job that gathers it';
  END IF;
  PERFORM FROM dl_jobs
    WHERE job_id = p_job_id AND attempt = p_attempt AND claimed_by = p_worker AND status::text = 'running' FOR SHARE;
  IF FOUND THEN
    PERFORM dl_link(p_job_id, p_parent_ids, 'run');
    RETURN true;
  END IF;
  RETURN false;
END
$$;

-- Runs at the commit that links a job to a parent, which may have ended meanwhile. The session that ends the parent has its
-- row locked, or waits for this commit. Where the row is locked, or our transaction has one snapshot, dl_freed tries again.
CREATE OR REPLACE FUNCTION dl_linked() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  is_open boolean;
BEGIN
  IF (TG_TABLE_SCHEMA, TG_TABLE_NAME) <> ({schema_name}, 'dl_parents') THEN
    RAISE insufficient_privilege USING MESSAGE = 'dl_linked is for dl_parents';
  END IF;
  IF current_setting('transaction_isolation') = 'read committed' THEN
    SELECT status IN ('queued', 'running') INTO is_open FROM {schema}.dl_jobs
     WHERE job_id = NEW.parent_id FOR SHARE SKIP LOCKED;
  END IF;
  IF is_open IS NULL THEN
    INSERT INTO {schema}.dl_freed (parent_id) VALUES (NEW.parent_id);
  ELSIF NOT is_open THEN
    PERFORM {schema}.dl_resolve(ARRAY[NEW.parent_id]);
  END IF;
  RETURN NULL;
END
$$;

-- The work of dl_resolve, at most p_most rows: jobs that wait for one of these ended parents; jobs whose wait is over and
-- that were not let go; ended jobs that are queued again although they wait (context.gather). Each arm reads an index without
-- the children that are done, so the cost does not grow with them. OFFSET 0 keeps a plan that was made for empty tables from
-- reading all jobs, or all that wait for each parent. A bitmap would read all links of the parent before the first one.
CREATE OR REPLACE FUNCTION dl_concerned(p_ended uuid[], p_most int) RETURNS TABLE (job_id uuid, parent_id uuid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
  (SELECT e.job_id, e.parent_id
     FROM (SELECT job_id, parent_id FROM {schema}.dl_parents WHERE parent_id = ANY (p_ended) AND NOT is_over OFFSET 0) e
     CROSS JOIN LATERAL (SELECT on_failure FROM {schema}.dl_waiting WHERE job_id = e.job_id OFFSET 0) w
     LEFT JOIN LATERAL (SELECT status FROM {schema}.dl_jobs WHERE job_id = e.parent_id OFFSET 0) p ON true
    WHERE {schema}.dl_after(p.status, w.on_failure) IS NOT NULL)
  UNION ALL
  (SELECT w.job_id, e.parent_id
     FROM (SELECT job_id FROM {schema}.dl_waiting WHERE parents <= 0 OR failed_parent IS NOT NULL OFFSET 0) w
     CROSS JOIN LATERAL (SELECT status FROM {schema}.dl_jobs WHERE job_id = w.job_id OFFSET 0) j
     CROSS JOIN LATERAL (SELECT parent_id FROM {schema}.dl_parents WHERE job_id = w.job_id AND parent_id = ANY (p_ended) OFFSET 0) e
    WHERE j.status::text = 'queued')
  UNION ALL
  (SELECT w.job_id, w.job_id FROM {schema}.dl_waiting w
     CROSS JOIN LATERAL (SELECT status, blocked_on FROM {schema}.dl_jobs WHERE job_id = w.job_id OFFSET 0) j
    WHERE w.job_id = ANY (p_ended) AND j.status::text = 'queued' AND j.blocked_on IS DISTINCT FROM 'parent')
  LIMIT p_most
$$;

-- These jobs have ended: let their children go or cancel them, and so on down. Waits for no lock, so it cannot deadlock, and
-- stops after 100 changes, some 5 ms, for a claim that waits behind them is late by that. A row of dl_freed stands for the
-- rest: 10 ms later it is due for a claim that starts no job, 0.31 s later for any.
CREATE OR REPLACE FUNCTION dl_resolve(p_ended uuid[]) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
  most CONSTANT int := 100;
  ended uuid[] := p_ended;
  concerned record;
  step record;
  number int := 0;
  tries int := 0;
BEGIN
  FOR round IN 1 .. 20 LOOP
    SELECT array_agg(c.job_id) AS children, array_agg(c.parent_id) AS parents INTO concerned
      FROM {schema}.dl_concerned(ended, most) c;
    IF concerned.children IS NULL THEN
      RETURN;
    END IF;
    step := {schema}.dl_end_waits(concerned.children, concerned.parents);
    number := number + step.changed;
    IF step.changed = 0 THEN
      EXIT WHEN tries = 3;
      tries := tries + 1;
      PERFORM pg_sleep(0.0002 * 5 ^ tries);
    END IF;
    ended := ended || ARRAY(
      SELECT DISTINCT parent_id FROM {schema}.dl_parents WHERE parent_id = ANY (step.canceled) AND NOT is_over);
    EXIT WHEN number >= most;
  END LOOP;
  INSERT INTO {schema}.dl_freed (parent_id, since)
  SELECT DISTINCT parent, clock_timestamp() - CASE WHEN tries = 3 THEN interval '0' ELSE interval '0.69 s' END
    FROM unnest(ended) parent WHERE EXISTS (SELECT FROM {schema}.dl_concerned(ARRAY[parent], 1));
  IF FOUND THEN  -- the idle workers of one queue are enough
    PERFORM pg_notify('dl_jobs', queue) FROM {schema}.dl_workers
      WHERE state = 'idle' AND seen_at > now() - interval '30 s' AND octet_length(queue) < 8000 LIMIT 1;
  END IF;
END
$$;

-- End the waits of these jobs, each for its ended parent in the second array: let the jobs go or cancel them. `changed`
-- counts the changed rows; locked and running jobs stay. A comparison of rows has no index but the links' key: by the
-- parent's index a generic plan would read all links of the parent for each child.
CREATE OR REPLACE FUNCTION dl_end_waits(p_children uuid[], p_ended uuid[], OUT changed int, OUT canceled uuid[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
  children uuid[] := ARRAY(SELECT job_id FROM {schema}.dl_waiting WHERE job_id = ANY (p_children) FOR UPDATE SKIP LOCKED);
  free uuid[];
  without_turn uuid[];
BEGIN
  WITH over AS (
    UPDATE {schema}.dl_parents e SET is_over = true
      FROM (SELECT l.at, {schema}.dl_after(l.status, w.on_failure) AS word
              FROM unnest(p_children, p_ended) AS link (job_id, parent_id)
             CROSS JOIN LATERAL (SELECT on_failure FROM {schema}.dl_waiting w WHERE w.job_id = link.job_id OFFSET 0) w
             CROSS JOIN LATERAL (
               SELECT ctid AS at, is_over, (SELECT status FROM {schema}.dl_jobs p WHERE p.job_id = link.parent_id) AS status
                 FROM {schema}.dl_parents
                WHERE (job_id, parent_id) BETWEEN (link.job_id, link.parent_id) AND (link.job_id, link.parent_id)
               OFFSET 0) l
             WHERE link.job_id = ANY (children) AND NOT is_over) now_over
     WHERE e.ctid = now_over.at AND word IS NOT NULL
    RETURNING e.job_id, e.parent_id, word),
  counted AS (
    UPDATE {schema}.dl_waiting w SET parents = parents - number, failed_parent = coalesce(w.failed_parent, failed)
      FROM (SELECT job_id, count(*) FILTER (WHERE word = 'go') AS number,
                   (array_agg(parent_id) FILTER (WHERE word = 'cancel'))[1] AS failed FROM over GROUP BY job_id) outcome
     WHERE w.job_id = outcome.job_id AND w.job_id = ANY (children) RETURNING w.job_id)
  SELECT count(*) INTO changed FROM counted;

  free := ARRAY(
    SELECT j.job_id FROM {schema}.dl_jobs j JOIN {schema}.dl_waiting w USING (job_id)
     WHERE j.job_id = ANY (children) AND w.job_id = ANY (children) AND j.status::text = 'queued'
       AND (w.parents <= 0 OR w.failed_parent IS NOT NULL OR j.blocked_on IS DISTINCT FROM 'parent')
       FOR NO KEY UPDATE OF j SKIP LOCKED);
  changed := changed + cardinality(free);
  WITH placed AS (
    UPDATE {schema}.dl_jobs j SET
           status = CASE WHEN w.failed_parent IS NOT NULL THEN 'canceled' ELSE j.status END,
           finished_at = CASE WHEN w.failed_parent IS NOT NULL THEN now() END,
           error = CASE WHEN w.failed_parent IS NULL THEN j.error
                        ELSE 'canceled: its parent ' || w.failed_parent || ' has ended '
                             || coalesce((SELECT p.status::text FROM {schema}.dl_jobs p WHERE p.job_id = w.failed_parent), 'deleted') END,
           journaled = CASE WHEN w.failed_parent IS NOT NULL THEN mod(journaled, 1000000) + 1 ELSE journaled END,
           blocked_on = CASE WHEN w.parents > 0 AND w.failed_parent IS NULL THEN 'parent' END,
           available_at = CASE WHEN w.parents > 0 AND w.failed_parent IS NULL THEN {far} ELSE greatest(w.available_at, now()) END,
           turn_at = CASE WHEN j.share IS NULL THEN j.turn_at ELSE coalesce(j.turn_at, 'infinity') END
      FROM {schema}.dl_waiting w WHERE j.job_id = ANY (free) AND w.job_id = ANY (free) AND w.job_id = j.job_id
    RETURNING j.job_id, j.queue, j.status, j.attempt, j.blocked_on, j.turn_at, w.failed_parent),
  journal AS (
    INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
    SELECT job_id, queue, 'canceled', jsonb_build_object('attempt', attempt, 'reason', 'its parent has not succeeded',
                                                         'parent', failed_parent)
      FROM placed WHERE status = 'canceled'),
  gone AS (
    DELETE FROM {schema}.dl_waiting
     WHERE job_id = ANY (free) AND job_id IN (SELECT job_id FROM placed WHERE blocked_on IS NULL))
  SELECT coalesce(array_agg(job_id) FILTER (WHERE status = 'canceled'), '{}'),
         array_agg(job_id) FILTER (WHERE turn_at = 'infinity')
    INTO canceled, without_turn FROM placed;
  IF without_turn IS NOT NULL THEN
    PERFORM {schema}.dl_give_turns(without_turn);
  END IF;
END
$$;

-- Resolve parents whose end no trigger saw (session_replication_role, DISABLE TRIGGER). Reads up to p_limit waiting jobs
-- after p_after; returns the last one, null at the end. Called by the reaper.
CREATE OR REPLACE FUNCTION dl_resolve_stranded(p_after uuid, p_limit int) RETURNS uuid LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off AS $$
DECLARE
  waiting uuid[] := ARRAY(SELECT job_id FROM dl_waiting WHERE job_id > p_after ORDER BY job_id LIMIT p_limit);
BEGIN
  PERFORM dl_resolve(ARRAY(
    SELECT DISTINCT parent_id FROM dl_parents WHERE job_id = ANY (waiting) AND NOT is_over) || ARRAY(
    SELECT job_id FROM dl_jobs WHERE job_id = ANY (waiting) AND status::text = 'queued' AND blocked_on IS DISTINCT FROM 'parent'));
  RETURN waiting[p_limit];
END
$$;
