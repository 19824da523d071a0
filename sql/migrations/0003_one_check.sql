-- functions: dl_jobs_check
-- The checks of 0002 become one trigger, which costs an insert less: see `checks` in schema.sql.
DROP TRIGGER IF EXISTS dl_jobs_chk_queue ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_task ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_lock_key ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_idempotency_key ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_partition_key ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_producer ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_consumer_group ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_affinity_key ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_trace ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_timeout_sec ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_deadline ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_limits ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_chk_counters ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_depth ON dl_jobs;
DROP FUNCTION IF EXISTS dl_jobs_depth();
CREATE TRIGGER dl_jobs_check BEFORE INSERT OR UPDATE OF queue, task, lock_key, idempotency_key, partition_key, producer,
    consumer_group, affinity_key, trace, timeout_sec, deadline, limits, args ON dl_jobs
  FOR EACH ROW WHEN (
    greatest(octet_length(NEW.queue), octet_length(NEW.task), octet_length(NEW.lock_key), octet_length(NEW.idempotency_key),
             octet_length(NEW.partition_key), octet_length(NEW.producer), octet_length(NEW.consumer_group),
             octet_length(NEW.affinity_key), octet_length(NEW.trace)) > 255
    OR NEW.timeout_sec NOT BETWEEN 1 AND 2592000 OR NEW.limits <> '{}'
    OR NEW.deadline < '2000-01-01 00:00+00' OR NEW.deadline >= '9999-01-01 00:00+00'
    OR greatest(NEW.claims, NEW.backoffs) > 1000000000
    OR pg_column_size(NEW.args) > 4000 OR pg_column_compression(NEW.args) IS NOT NULL)
  EXECUTE FUNCTION dl_jobs_check();
