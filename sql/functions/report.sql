-- Reports: lists, sums, the status for producers.

-- A time as clients can read it: Python knows the years 1 to 9999, PostgreSQL more, and infinity.
CREATE OR REPLACE FUNCTION dl_readable(p_time timestamptz) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_time IS NOT NULL THEN greatest('0001-01-02 00:00+00', least(p_time, '9999-12-30 00:00+00')) END
$$;

-- The status of a job that the calling role has added, for producers; no row for another job. The journal's first row names
-- the role: session_user, which SET ROLE does not change. A job added over HTTP is no producer's.
CREATE OR REPLACE FUNCTION dl_job_status(p_job_id uuid)
RETURNS TABLE (job_id uuid, status text, attempt int, started_at timestamptz, finished_at timestamptz,
               heartbeat_at timestamptz, error text, progress jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT j.job_id, j.status::text, j.attempt, j.started_at, j.finished_at, j.heartbeat_at, j.error, j.progress
    FROM {schema}.dl_jobs j
   WHERE j.job_id = p_job_id
     AND session_user = (SELECT e.payload ->> 'user' FROM {schema}.dl_job_events e
                          WHERE e.job_id = p_job_id AND e.kind = 'queued' ORDER BY e.event_id LIMIT 1)
$$;

-- The step of a journal row: its kind, but for a requeue its cause: 'retry' (the run failed), 'crash', 'lease', 'backoff'
-- (another session holds its key), 'handed_back' (uncounted), 'requeue' (by a person or another service).
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

-- The last number that the journal's sequence has given; without rights to it, the largest there is. Rows beyond it were
-- numbered by another service, and wait until the sequence has come to them. It goes back at TRUNCATE ... RESTART IDENTITY.
CREATE OR REPLACE FUNCTION dl_journal_end() RETURNS bigint LANGUAGE sql AS $$
  SELECT CASE WHEN has_sequence_privilege(sequence, 'USAGE, SELECT') THEN coalesce(pg_sequence_last_value(sequence), 0)
              ELSE 9223372036854775807 END
    FROM CAST(pg_get_serial_sequence('dl_job_events', 'event_id') AS regclass) sequence
$$;

-- A number in the facts of a run, cut to 0 to a billion; null for anything else.
CREATE OR REPLACE FUNCTION dl_figure(p_told jsonb) RETURNS real LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN jsonb_typeof(p_told) = 'number' THEN greatest(0, least(p_told::numeric, 1000000000))::real END
$$;

-- The part of a task's learned need that counts, in MB or processors; null where none does. Every process has up to 100 MB and one thread.
CREATE OR REPLACE FUNCTION dl_counted(p_memory_mb real, p_cpus real) RETURNS real LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN p_memory_mb >= 128 THEN p_memory_mb WHEN p_cpus >= 1.5 THEN p_cpus END
$$;

-- Add up to p_limit rows of the journal to the sums and spans; returns their number, 0 beside another call, -1 when the
-- journal is numbered anew (then the sums go on behind its rows). Called by the reaper each round.
--
-- Rows become visible in the order of commits. So it goes up to the first missing number, and past it when the row behind is
-- ten seconds old, or from the future. A run's time is from its 'picked' to its end. Durations and needs are of the last 200
-- runs of a task, processors of runs of a second or longer; a task with too long a name counts as ''. A run is in the span of
-- five minutes in which it ended, or for `waiting` started; a job waits from when it might have started. Rows older than 90
-- days or of the future are in no span.
CREATE OR REPLACE FUNCTION dl_roll(p_limit int) RETURNS int
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
  since bigint;
  upto bigint;
  journal_end bigint := dl_journal_end();
  rolled int;
  bounds CONSTANT float8[] := '{0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400, Infinity}';  -- stats.BUCKETS_SEC
  most CONSTANT bigint := 1e15;  -- the bound of the sums' checks: a row of a stranger may be there
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  SELECT last_event INTO since FROM dl_rolled LIMIT 1 FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    RETURN 0;
  END IF;
  IF journal_end < since THEN
    UPDATE dl_rolled SET last_event = greatest((SELECT max(event_id) FROM dl_job_events WHERE event_id <= journal_end), 0);
    RETURN -1;
  END IF;
  WITH near AS (
    SELECT event_id, event_id - lag(event_id, 1, since) OVER (ORDER BY event_id) > 1
                     AND ts > clock_timestamp() - interval '10 s'
                     AND ts < clock_timestamp() + interval '10 s' AS is_behind_gap
      FROM (SELECT event_id, ts FROM dl_job_events
             WHERE event_id > since AND event_id <= journal_end ORDER BY event_id LIMIT p_limit) rows)
  SELECT max(event_id), count(*) INTO upto, rolled FROM near
   WHERE event_id < coalesce((SELECT min(event_id) FROM near WHERE is_behind_gap), 9223372036854775807);
  IF upto IS NULL THEN
    RETURN 0;
  END IF;

  WITH steps AS MATERIALIZED (
    SELECT e.queue, CASE WHEN octet_length(j.task) + octet_length(e.queue) <= 2400 THEN j.task ELSE '' END AS task, e.step,
           date_bin('10 s', e.ts, '2000-01-01 00:00+00') AS at,
           CASE WHEN e.step NOT IN ('queued', 'picked', 'cancel_requested', 'backoff', 'requeue') THEN
             extract(epoch FROM e.ts - (
               SELECT CASE p.kind WHEN 'picked' THEN dl_readable(p.ts) END FROM dl_job_events p
                WHERE p.job_id = e.job_id AND p.event_id < e.event_id AND p.kind NOT IN ('heartbeat', 'cancel_requested', 'stuck', 'deadline')
                ORDER BY p.event_id DESC LIMIT 1))::float8 END AS seconds,
           CASE WHEN e.step = 'picked' AND greatest(j.created_at, j.available_at) BETWEEN '2000-01-01' AND e.ts
             THEN extract(epoch FROM e.ts - greatest(j.created_at, j.available_at))::float8 END AS waited,
           e.event_id, dl_figure(e.payload -> 'peak_mb') AS peak_mb, dl_figure(e.payload -> 'cpu_sec') AS cpu_sec
      FROM (SELECT event_id, job_id, queue, dl_readable(ts) AS ts, payload, dl_step_of(kind, payload) AS step FROM dl_job_events
             WHERE event_id > since AND event_id <= upto AND kind NOT IN ('heartbeat', 'stuck', 'deadline')
               AND octet_length(queue) <= 2400 AND octet_length(kind) <= 100) e
      LEFT JOIN dl_jobs j USING (job_id)),
  totals AS (
    INSERT INTO dl_totals AS t (queue, task, kind, count, seconds, buckets)
    SELECT queue, task, step, count(*), coalesce(sum(greatest(seconds, 0)), 0), ARRAY(
             SELECT count(run) FROM unnest(bounds) WITH ORDINALITY AS bucket (bound, nth)
               LEFT JOIN unnest(array_agg(seconds)) run ON run <= bound AND (nth = 1 OR run > bounds[nth - 1])
              GROUP BY nth ORDER BY nth)
      FROM steps GROUP BY queue, task, step
    ON CONFLICT (queue, task, kind) DO UPDATE SET
       count = least(t.count + excluded.count, most), seconds = least(t.seconds + excluded.seconds, 1e300),
       buckets = ARRAY(SELECT least(a + b, most) FROM unnest(t.buckets, excluded.buckets) WITH ORDINALITY AS n (a, b, nth) ORDER BY nth)),
  durations AS (
    INSERT INTO dl_durations AS d (task, seconds, runs, learned_at)
    SELECT task, (array_agg(greatest(seconds, 0)::real ORDER BY event_id DESC))[1:200], count(*), now()
      FROM steps WHERE step = 'done' AND seconds IS NOT NULL AND task <> '' GROUP BY task ORDER BY task
    ON CONFLICT (task) DO UPDATE SET
       seconds = (excluded.seconds || d.seconds)[1:200], runs = least(d.runs + excluded.runs, most), learned_at = excluded.learned_at),
  latest AS (
    SELECT steps.task, least(count(*) + coalesce(n.runs, 0), most) AS runs,
           (array_agg(peak_mb ORDER BY event_id DESC) || n.peaks)[1:200] AS peaks,
           (array_agg((cpu_sec / seconds)::real ORDER BY event_id DESC) FILTER (WHERE seconds >= 1) || n.shares)[1:200] AS shares
      FROM steps LEFT JOIN dl_needs n ON n.task = steps.task WHERE peak_mb IS NOT NULL AND steps.task <> ''
     GROUP BY steps.task, n.task),
  needs AS (
    INSERT INTO dl_needs (task, memory_mb, cpus, runs, learned_at, peaks, shares)
    SELECT task, (SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY peak) FROM unnest(peaks) peak),
           (SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY share) FROM unnest(shares) share),
           runs, now(), peaks, shares FROM latest ORDER BY task
    ON CONFLICT (task) DO UPDATE SET memory_mb = excluded.memory_mb, cpus = excluded.cpus, runs = excluded.runs,
       learned_at = excluded.learned_at, peaks = excluded.peaks, shares = excluded.shares),
  ended AS (
    SELECT at, queue, count(*) AS processed,
           count(*) FILTER (WHERE step IN ('failed', 'lost', 'retry', 'crash', 'lease')) AS failed FROM steps
     WHERE step IN ('done', 'failed', 'lost', 'retry', 'crash', 'lease') OR step = 'canceled' AND seconds IS NOT NULL
     GROUP BY at, queue),
  long AS (
    INSERT INTO dl_pace_long AS p (at, queue, processed, failed)
    SELECT date_bin('5 min', at, '2000-01-01 00:00+00'), queue, sum(processed), sum(failed) FROM ended GROUP BY 1, 2
    ON CONFLICT (at, queue) DO UPDATE SET
       processed = least(p.processed + excluded.processed, most), failed = least(p.failed + excluded.failed, most)),
  spans AS (
    INSERT INTO dl_spans AS s (task, queue, minutes, at, figure, count, total, largest, slots, counts)
    SELECT task, queue, 5, span, figure, sum(n), sum(total), max(largest),
           array_agg(slot ORDER BY slot), array_agg(n ORDER BY slot)
      FROM (SELECT task, queue, date_bin('5 min', at, '2000-01-01 00:00+00') AS span, figure,
                   ceil(ln(least(greatest(value, 0.001), 1e9) * 1000) / ln(1.1::float8))::smallint AS slot,
                   count(*)::int AS n, sum(greatest(value, 0)) AS total, max(greatest(value, 0)) AS largest
              FROM steps CROSS JOIN LATERAL (VALUES
                     (CASE WHEN step = 'done' THEN 'succeeded' WHEN step = 'canceled' THEN 'canceled'
                           WHEN step IN ('failed', 'lost', 'retry', 'crash', 'lease') THEN 'failed' END, seconds),
                     ('waiting', waited), ('memory', peak_mb), ('cpu', cpu_sec)) AS measured (figure, value)
             WHERE task <> '' AND (seconds IS NOT NULL OR waited IS NOT NULL) AND figure IS NOT NULL AND value IS NOT NULL
               AND at BETWEEN now() - interval '90 days' AND now() + interval '1 min'
             GROUP BY task, queue, span, figure, slot) in_slots
     GROUP BY task, queue, span, figure ORDER BY task, span, queue, figure
    {add_to_span})
  INSERT INTO dl_pace AS p (at, queue, processed, failed)
  SELECT at, queue, processed, failed FROM ended
  ON CONFLICT (at, queue) DO UPDATE SET
     processed = least(p.processed + excluded.processed, most), failed = least(p.failed + excluded.failed, most);
  DELETE FROM dl_pace WHERE at < now() - interval '2 days';
  DELETE FROM dl_pace_long WHERE at < now() - interval '8 days';
  UPDATE dl_rolled SET last_event = upto;
  RETURN rolled;
END
$$;

-- part: add_to_span
ON CONFLICT (task, minutes, at, queue, figure) DO UPDATE SET
       count = least(s.count + excluded.count, most), total = least(s.total + excluded.total, 1e300),
       largest = greatest(s.largest, excluded.largest),
       (slots, counts) = (
         SELECT array_agg(slot ORDER BY slot), array_agg(n ORDER BY slot)
           FROM (SELECT slot, least(sum(n), 2000000000)::int AS n
                   FROM unnest(s.slots || excluded.slots, s.counts || excluded.counts) AS both_spans (slot, n)
                  GROUP BY slot) merged)

-- Make spans of five minutes older than three hours those of an hour, up to p_limit, and delete up to p_limit of before 90
-- days; returns how many. Locked rows wait for a later call.
CREATE OR REPLACE FUNCTION dl_fold_spans(p_limit int) RETURNS int
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
  span dl_spans;
  folded int := 0;
  most CONSTANT bigint := 1e15;  -- as in dl_roll
  dropped int;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  FOR span IN
    WITH gone AS (
      DELETE FROM dl_spans WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM dl_spans WHERE minutes = 5 AND at < date_bin('1 h', now(), '2000-01-01 00:00+00') - interval '3 h'
         ORDER BY minutes, at LIMIT p_limit FOR UPDATE SKIP LOCKED))
      RETURNING *)
    SELECT * FROM gone ORDER BY task, date_bin('1 h', at, '2000-01-01 00:00+00'), queue, figure  -- against deadlocks
  LOOP
    INSERT INTO dl_spans AS s (task, queue, minutes, at, figure, count, total, largest, slots, counts)
    VALUES (span.task, span.queue, 60, date_bin('1 h', span.at, '2000-01-01 00:00+00'), span.figure, span.count, span.total,
            span.largest, span.slots, span.counts)
    {add_to_span};
    folded := folded + 1;
  END LOOP;
  DELETE FROM dl_spans WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM dl_spans WHERE minutes = 60 AND at < now() - interval '90 days'
     ORDER BY minutes, at LIMIT p_limit FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS dropped = ROW_COUNT;
  RETURN folded + dropped;
END
$$;

-- The seconds of a job's last run, from its last 'picked' to what ended it; null where the journal does not tell. A job that
-- started once and ended by itself needs no journal. Served by ix_dl_job_events_job.
CREATE OR REPLACE FUNCTION dl_last_run_sec(p_job dl_jobs) RETURNS float8 LANGUAGE sql STABLE AS $$
  SELECT CASE
    WHEN p_job.status = 'running' OR p_job.started_at IS NULL THEN NULL
    WHEN p_job.status IN ('succeeded', 'failed') AND p_job.attempt <= 1 AND p_job.claims <= 1
      THEN greatest(extract(epoch FROM dl_readable(p_job.finished_at) - dl_readable(p_job.started_at)), 0)
    ELSE (
      SELECT greatest(extract(epoch FROM dl_readable(ended.ts) - dl_readable(picked.ts)), 0)
        FROM (SELECT event_id, ts FROM dl_job_events WHERE job_id = p_job.job_id AND kind = 'picked'
               ORDER BY event_id DESC LIMIT 1) picked
       CROSS JOIN LATERAL (
         SELECT ts FROM dl_job_events
          WHERE job_id = p_job.job_id AND event_id > picked.event_id
            AND kind IN ('done', 'requeue', 'failed', 'canceled', 'lost') ORDER BY event_id LIMIT 1) ended) END::float8
$$;
