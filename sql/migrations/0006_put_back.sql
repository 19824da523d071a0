-- A finished job that somebody puts back by a plain UPDATE is to run: with a fresh budget of attempts, and without the
-- cancellation that had ended it. What that UPDATE sets itself stands.
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
  RETURN NEW;
END
$$;
