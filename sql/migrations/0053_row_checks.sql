-- The tables check the values on which claims, the reaper and the pages rely: producers insert rows as they like.
-- oldest code: 1
-- functions: dl_jobs_depth
-- fits rows

-- Octets and not characters: an index row has room for 2,700. Each bound is that of the API, at four octets a
-- character, but for `task`, of which longer ones have always been counted.
-- NOT VALID, so that the statement reads no row while it holds the table; `migrate` has mended the rows of before, and
-- validates the checks at its end.
ALTER TABLE dl_jobs
  ADD CONSTRAINT dl_jobs_chk_queue CHECK (octet_length(queue) <= 512) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_task CHECK (octet_length(task) <= 2000) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_lock_key CHECK (octet_length(lock_key) <= 2048) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_idempotency_key CHECK (octet_length(idempotency_key) <= 1020) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_partition_key CHECK (octet_length(partition_key) <= 1020) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_producer CHECK (octet_length(producer) <= 1020) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_consumer_group CHECK (octet_length(consumer_group) <= 1020) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_affinity_key CHECK (octet_length(affinity_key) <= 800) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_trace CHECK (octet_length(trace) <= 255) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_timeout_sec CHECK (timeout_sec BETWEEN 1 AND 2592000) NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_deadline CHECK (deadline >= '2000-01-01 00:00+00' AND deadline < '9999-01-01 00:00+00') NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_limits CHECK (limits IS NULL OR limits = '{}' OR (
    array_ndims(limits) = 1 AND array_lower(limits, 1) = 1 AND cardinality(limits) <= 8
    AND array_position(limits, NULL) IS NULL AND array_position(limits, '') IS NULL
    AND greatest(octet_length(limits[1]), octet_length(limits[2]), octet_length(limits[3]), octet_length(limits[4]),
                 octet_length(limits[5]), octet_length(limits[6]), octet_length(limits[7]), octet_length(limits[8])) <= 400))
    NOT VALID,
  ADD CONSTRAINT dl_jobs_chk_counters CHECK (greatest(claims, journaled, backoffs) <= 1000000000) NOT VALID;

-- By a trigger: a check would read the args of a job again with each of its heartbeats. A level takes 8 octets at least.
CREATE TRIGGER dl_jobs_depth BEFORE INSERT OR UPDATE OF args ON dl_jobs
  FOR EACH ROW WHEN (pg_column_size(NEW.args) > 4000 AND jsonb_path_exists(NEW.args, 'strict $.**{500}'))
  EXECUTE FUNCTION dl_jobs_depth();

-- Of a job whose producer names no limits.
ALTER TABLE dl_tasks ADD CONSTRAINT dl_tasks_chk_limits CHECK (limits IS NULL OR limits = '{}' OR (
    array_ndims(limits) = 1 AND array_lower(limits, 1) = 1 AND cardinality(limits) <= 8
    AND array_position(limits, NULL) IS NULL AND array_position(limits, '') IS NULL
    AND greatest(octet_length(limits[1]), octet_length(limits[2]), octet_length(limits[3]), octet_length(limits[4]),
                 octet_length(limits[5]), octet_length(limits[6]), octet_length(limits[7]), octet_length(limits[8])) <= 400));
ALTER TABLE dl_schedules ADD CONSTRAINT dl_schedules_chk_job CHECK (
  (jsonb_typeof(job) = 'object' AND jsonb_typeof(job -> 'task') = 'string' AND jsonb_typeof(job -> 'queue') = 'string') IS TRUE);
ALTER TABLE dl_backfills ADD CONSTRAINT dl_backfills_chk_job CHECK (
  jsonb_typeof(job) = 'object' AND (span IS NULL OR jsonb_typeof(span) = 'object'));

-- What the reaper and keepers write for pages and metrics: numbers that can be summed and drawn.
ALTER TABLE dl_queues ADD CONSTRAINT dl_queues_chk_queue CHECK (octet_length(queue) <= 512);
ALTER TABLE dl_workers ADD CONSTRAINT dl_workers_chk_queues CHECK (array_position(queues, NULL) IS NULL);
ALTER TABLE dl_totals ADD CONSTRAINT dl_totals_chk CHECK (
    count >= 0 AND seconds >= 0 AND seconds < 'Infinity' AND array_ndims(buckets) = 1 AND cardinality(buckets) = 12
    AND array_position(buckets, NULL) IS NULL);
ALTER TABLE dl_pace ADD CONSTRAINT dl_pace_chk CHECK (processed BETWEEN 0 AND 1e15 AND failed BETWEEN 0 AND 1e15);
ALTER TABLE dl_pace_long ADD CONSTRAINT dl_pace_long_chk CHECK (processed BETWEEN 0 AND 1e15 AND failed BETWEEN 0 AND 1e15);
ALTER TABLE dl_spans ADD CONSTRAINT dl_spans_chk CHECK (
    count BETWEEN 0 AND 1e15 AND total >= 0 AND total < 'Infinity' AND largest >= 0 AND largest < 'Infinity'
    AND cardinality(slots) = cardinality(counts) AND coalesce(array_ndims(slots), 1) = 1 AND coalesce(array_ndims(counts), 1) = 1
    AND array_position(slots, NULL) IS NULL AND array_position(counts, NULL) IS NULL AND 0 <= ALL (slots) AND 400 >= ALL (slots)
    AND 0 <= ALL (counts));
ALTER TABLE dl_lengths ADD CONSTRAINT dl_lengths_chk CHECK (
    length BETWEEN 0 AND 1e15 AND scheduled BETWEEN 0 AND 1e15 AND retries BETWEEN 0 AND 1e15
    AND dead BETWEEN 0 AND 1e15 AND lag_sec BETWEEN 0 AND 1e9 AND keys BETWEEN 0 AND 1e15);
ALTER TABLE dl_webhooks ADD CONSTRAINT dl_webhooks_chk_bounds CHECK (lag_sec <= 1e9 AND octet_length(name) <= 64);
ALTER TABLE dl_durations ADD CONSTRAINT dl_durations_chk CHECK (
    array_position(seconds, NULL) IS NULL AND coalesce(array_ndims(seconds), 1) = 1);
ALTER TABLE dl_needs ADD CONSTRAINT dl_needs_chk CHECK (
    array_position(peaks, NULL) IS NULL);
