-- A job that has ended has a finished_at, whoever ended it: retention, lists and counts find it by that. A service that
-- leaves finished_at null, in its finish or in a row that it inserts as finished, is helped by the trigger.
-- oldest code: 1

CREATE OR REPLACE FUNCTION dl_jobs_place() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'UPDATE' AND NEW.status = 'queued' AND OLD.status NOT IN ('queued', 'running') THEN
    NEW.attempt := CASE WHEN NEW.attempt = OLD.attempt THEN 0 ELSE NEW.attempt END;
    NEW.cancel_requested := NEW.cancel_requested AND NOT OLD.cancel_requested;
    NEW.cancel_forced := false;
    NEW.finished_at := NULL;
  END IF;
  NEW.blocked_on := CASE WHEN NEW.status = 'queued' AND NEW.available_at > now() THEN 'time' END;
  IF NEW.status <> 'running' THEN
    NEW.claimed_by := NULL;
    NEW.claimed_pid := NULL;
    NEW.claimed_backend_start := NULL;
  END IF;
  IF NEW.status NOT IN ('queued', 'running') THEN
    NEW.finished_at := coalesce(NEW.finished_at, now());
  END IF;
  RETURN NEW;
END
$$;

CREATE OR REPLACE TRIGGER dl_jobs_place BEFORE UPDATE OF status, available_at ON dl_jobs
  FOR EACH ROW WHEN (NEW.status = 'queued' OR NEW.blocked_on IS NOT NULL
                     OR NEW.status <> 'running' AND (NEW.claimed_by IS NOT NULL OR NEW.finished_at IS NULL))
  EXECUTE FUNCTION dl_jobs_place();
CREATE OR REPLACE TRIGGER dl_jobs_place_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.status = 'queued' AND NEW.available_at > now()
                     OR NEW.status NOT IN ('queued', 'running') AND NEW.finished_at IS NULL)
  EXECUTE FUNCTION dl_jobs_place();
