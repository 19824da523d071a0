-- Jobs that ended before 0015 without a finished_at get one: their last sign of life. Since the trigger of 0015 no new
-- ones come. May be run again after a failure.
-- oldest code: 1
-- outside a transaction

-- As the fill of 0003: listed at one instant, then batch by batch; rows that somebody holds are passed over and asked for
-- again, with no lock held meanwhile and none waited for. No trigger is fired.
DO $fill$
DECLARE
  batch uuid[];
BEGIN
  FOR batch IN
    SELECT array_agg(job_id) FROM (
      SELECT job_id, row_number() OVER () / 500 AS number FROM dl_jobs
       WHERE finished_at IS NULL AND status NOT IN ('queued', 'running')) ended
     GROUP BY number
  LOOP
    LOOP
      UPDATE dl_jobs SET finished_at = greatest(created_at, started_at, heartbeat_at) WHERE job_id IN (
        SELECT job_id FROM dl_jobs
         WHERE job_id = ANY (batch) AND finished_at IS NULL AND status NOT IN ('queued', 'running')
           FOR NO KEY UPDATE SKIP LOCKED);
      COMMIT;
      EXIT WHEN NOT EXISTS (
        SELECT FROM dl_jobs WHERE job_id = ANY (batch) AND finished_at IS NULL AND status NOT IN ('queued', 'running'));
      PERFORM pg_sleep(0.1);
    END LOOP;
  END LOOP;
END
$fill$;
