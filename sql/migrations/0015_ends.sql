-- A job that has ended has a finished_at, whoever ended it: retention, lists and counts find it by that. A service that
-- leaves finished_at null, in its finish or in a row that it inserts as finished, is helped by the trigger.
-- oldest code: 1
-- was: 22917a751c21675c3652eb8a21442873cee17ab39493c4867fcb9f86001f7cf0
-- functions: dl_jobs_place

CREATE OR REPLACE TRIGGER dl_jobs_place BEFORE UPDATE OF status, available_at ON dl_jobs
  FOR EACH ROW WHEN (NEW.status = 'queued' OR NEW.blocked_on IS NOT NULL
                     OR NEW.status <> 'running' AND (NEW.claimed_by IS NOT NULL OR NEW.finished_at IS NULL))
  EXECUTE FUNCTION dl_jobs_place();
CREATE OR REPLACE TRIGGER dl_jobs_place_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.status = 'queued' AND NEW.available_at > now()
                     OR NEW.status NOT IN ('queued', 'running') AND NEW.finished_at IS NULL)
  EXECUTE FUNCTION dl_jobs_place();
