-- The triggers of inserts fire for the rows of others only: an insert of ours takes its place and notifies by itself, and
-- says so by `journaled`: 2, and by no other number, which a copy of a row that ran has. Each statement prepares a
-- trigger's condition anew, so these are short.
-- oldest code: 1
-- functions: dl_jobs_place, notify_job_ready

CREATE OR REPLACE TRIGGER dl_jobs_place_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.journaled <> 2) EXECUTE FUNCTION dl_jobs_place();
CREATE OR REPLACE TRIGGER dl_jobs_notify_ins AFTER INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.journaled <> 2) EXECUTE FUNCTION notify_job_ready();
COMMENT ON COLUMN dl_jobs.journaled IS 'changes of status that their writer journaled; 2 from the start if it also notified';
