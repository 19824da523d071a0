-- functions: dl_jobs_check
-- The condition of the check moves into its function, which costs a lone insert less: see `checks` in schema.sql.
DROP TRIGGER IF EXISTS dl_jobs_check ON dl_jobs;
CREATE TRIGGER dl_jobs_check BEFORE INSERT OR UPDATE OF queue, task, lock_key, idempotency_key, partition_key, producer,
    consumer_group, affinity_key, trace, timeout_sec, deadline, limits, args ON dl_jobs
  FOR EACH ROW EXECUTE FUNCTION dl_jobs_check();
