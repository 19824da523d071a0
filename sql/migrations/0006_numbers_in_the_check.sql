-- functions: dl_jobs_check
-- The contract's CHECK keeps the number that claims and ends write, and dl_jobs_check asks for the others: see `checks` in
-- schema.sql.
ALTER TABLE dl_jobs DROP CONSTRAINT IF EXISTS dl_jobs_chk_positive,
  ADD CONSTRAINT dl_jobs_chk_positive CHECK (attempt >= 0) NOT VALID;
DROP TRIGGER IF EXISTS dl_jobs_check ON dl_jobs;
CREATE TRIGGER dl_jobs_check BEFORE INSERT OR UPDATE OF queue, task, lock_key, idempotency_key, partition_key, producer,
    consumer_group, affinity_key, trace, timeout_sec, deadline, limits, args, priority, max_attempts, lease_ttl_sec ON dl_jobs
  FOR EACH ROW EXECUTE FUNCTION dl_jobs_check();
