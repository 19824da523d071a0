-- functions: dl_jobs_check
-- The sums get upper bounds, so that the reaper can always add to them. A sum beyond its bound counts nothing.
DELETE FROM dl_totals
 WHERE count > 1e15 OR seconds > 1e300 OR NOT (0 <= ALL (buckets) AND 1e15 >= ALL (buckets));
DELETE FROM dl_spans WHERE count > 1e15 OR total > 1e300 OR NOT 2000000000 >= ALL (counts);
DELETE FROM dl_needs WHERE runs NOT BETWEEN 0 AND 1e15;
DELETE FROM dl_durations WHERE runs NOT BETWEEN 0 AND 1e15;
ALTER TABLE dl_totals DROP CONSTRAINT dl_totals_chk, ADD CONSTRAINT dl_totals_chk CHECK (
  count BETWEEN 0 AND 1e15 AND seconds BETWEEN 0 AND 1e300 AND array_ndims(buckets) = 1 AND cardinality(buckets) = 12
  AND array_position(buckets, NULL) IS NULL AND 0 <= ALL (buckets) AND 1e15 >= ALL (buckets));
ALTER TABLE dl_spans DROP CONSTRAINT dl_spans_chk, ADD CONSTRAINT dl_spans_chk CHECK (
  count BETWEEN 0 AND 1e15 AND total BETWEEN 0 AND 1e300 AND largest >= 0 AND largest < 'Infinity'
  AND cardinality(slots) = cardinality(counts) AND coalesce(array_ndims(slots), 1) = 1 AND coalesce(array_ndims(counts), 1) = 1
  AND array_position(slots, NULL) IS NULL AND array_position(counts, NULL) IS NULL AND 0 <= ALL (slots) AND 400 >= ALL (slots)
  AND 0 <= ALL (counts) AND 2000000000 >= ALL (counts));
ALTER TABLE dl_needs DROP CONSTRAINT dl_needs_chk, ADD CONSTRAINT dl_needs_chk CHECK (
  runs BETWEEN 0 AND 1e15 AND array_position(peaks, NULL) IS NULL);
ALTER TABLE dl_durations DROP CONSTRAINT dl_durations_chk, ADD CONSTRAINT dl_durations_chk CHECK (
  runs BETWEEN 0 AND 1e15 AND array_position(seconds, NULL) IS NULL AND coalesce(array_ndims(seconds), 1) = 1);

-- Why the latest reload of a farm did not succeed.
ALTER TABLE dl_workers ADD COLUMN IF NOT EXISTS reload_error text;

-- Last, because the lock of dl_jobs is held from here to the commit: milliseconds.
-- The checks of 0.2.0 become triggers: see `checks` in schema.sql.
ALTER TABLE dl_jobs
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_queue,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_task,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_lock_key,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_idempotency_key,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_partition_key,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_producer,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_consumer_group,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_affinity_key,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_trace,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_timeout_sec,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_deadline,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_limits,
  DROP CONSTRAINT IF EXISTS dl_jobs_chk_counters;
CREATE TRIGGER dl_jobs_chk_queue BEFORE INSERT OR UPDATE OF queue ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.queue) > 512) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_task BEFORE INSERT OR UPDATE OF task ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.task) > 2000) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_lock_key BEFORE INSERT OR UPDATE OF lock_key ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.lock_key) > 2048) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_idempotency_key BEFORE INSERT OR UPDATE OF idempotency_key ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.idempotency_key) > 1020) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_partition_key BEFORE INSERT OR UPDATE OF partition_key ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.partition_key) > 1020) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_producer BEFORE INSERT OR UPDATE OF producer ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.producer) > 1020) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_consumer_group BEFORE INSERT OR UPDATE OF consumer_group ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.consumer_group) > 1020) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_affinity_key BEFORE INSERT OR UPDATE OF affinity_key ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.affinity_key) > 800) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_trace BEFORE INSERT OR UPDATE OF trace ON dl_jobs
  FOR EACH ROW WHEN (octet_length(NEW.trace) > 255) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_timeout_sec BEFORE INSERT OR UPDATE OF timeout_sec ON dl_jobs
  FOR EACH ROW WHEN (NEW.timeout_sec NOT BETWEEN 1 AND 2592000) EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_deadline BEFORE INSERT OR UPDATE OF deadline ON dl_jobs
  FOR EACH ROW WHEN (NEW.deadline < '2000-01-01 00:00+00' OR NEW.deadline >= '9999-01-01 00:00+00')
  EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_limits BEFORE INSERT OR UPDATE OF limits ON dl_jobs
  FOR EACH ROW WHEN (NOT (NEW.limits IS NULL OR NEW.limits = '{}' OR (
    array_ndims(NEW.limits) = 1 AND array_lower(NEW.limits, 1) = 1 AND cardinality(NEW.limits) <= 8
    AND array_position(NEW.limits, NULL) IS NULL AND array_position(NEW.limits, '') IS NULL
    AND greatest(octet_length(NEW.limits[1]), octet_length(NEW.limits[2]), octet_length(NEW.limits[3]),
                 octet_length(NEW.limits[4]), octet_length(NEW.limits[5]), octet_length(NEW.limits[6]),
                 octet_length(NEW.limits[7]), octet_length(NEW.limits[8])) <= 400)))
  EXECUTE FUNCTION dl_jobs_check();
CREATE TRIGGER dl_jobs_chk_counters BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (greatest(NEW.claims, NEW.backoffs) > 1000000000) EXECUTE FUNCTION dl_jobs_check();
