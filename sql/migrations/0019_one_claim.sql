-- One way to claim: a queued row is ready, or blocked_on says why not. The functions of workers take their rows' places
-- themselves; one trigger does so for all others.
-- oldest code: 1
-- with rights
-- was: d1616988fc414ed9135f403f2fa1226e607ccb4b59a14cd08ef52436cf22f8cc 9d6395eda3a22a05613a3f9703fc72ba05dcab9e57ee029bf9b3911b7f9c67b5 161ee1ec851e828f6b42a275e18123ac63dbbcd2205a9cccd3121c66514858e6 b5b62fbef6400375f5fa106893494949f979d25858dd5fdc850c4c3954d6c2d5
-- functions: dl_wake, dl_wake_all, dl_is_running, dl_park, dl_unpark, dl_unpark_freed, dl_set_aside, dl_put_off, dl_is_taken, dl_most_wanted, dl_left_out, dl_take_keys, dl_step, dl_retry_delay, dl_finish, dl_give_back, dl_settle, dl_reap, dl_unpark_stranded, dl_session_has_key, dl_retake, dl_jobs_step, dl_jobs_gone

-- Its functions read these columns of 0023, 0029, 0034 and 0038.
ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS score float8, ADD COLUMN IF NOT EXISTS affinity_key text,
  ADD COLUMN IF NOT EXISTS limits text[], ADD COLUMN IF NOT EXISTS turn_at timestamptz,
  ADD COLUMN IF NOT EXISTS share text, ADD COLUMN IF NOT EXISTS deadline timestamptz;
ALTER TABLE dl_queues
  ADD COLUMN IF NOT EXISTS ordered boolean, ADD COLUMN IF NOT EXISTS merge boolean,
  ADD COLUMN IF NOT EXISTS merge_limit int, ADD COLUMN IF NOT EXISTS batch int, ADD COLUMN IF NOT EXISTS on_dead text,
  ADD COLUMN IF NOT EXISTS fair_by text;

-- Keys that became free while others had their first row locked: tried again once a second.
CREATE TABLE dl_freed (
  key_hash int NOT NULL,
  since timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE dl_freed IS 'keys that became free while their first row was locked';
COMMENT ON COLUMN dl_jobs.blocked_on IS 'why a queued row is not ready (time, key), null when it is';
COMMENT ON COLUMN dl_jobs.hot IS 'unused; for code of before 0019';

DROP TRIGGER IF EXISTS dl_jobs_place ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_notify_key ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_journal_upd ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_notify_upd ON dl_jobs;
CREATE CONSTRAINT TRIGGER dl_jobs_notify_upd AFTER UPDATE OF status, available_at, queue, lock_key ON dl_jobs
  DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.journaled = OLD.journaled OR NEW.claimed_by IS NOT DISTINCT FROM OLD.claimed_by)
  EXECUTE FUNCTION dl_jobs_step();
CREATE OR REPLACE TRIGGER dl_jobs_forget AFTER DELETE ON dl_jobs
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION dl_jobs_gone();

-- Workers that wait for a row which the claim of before had marked look again.
SELECT pg_notify('dl_jobs', queue) FROM (SELECT DISTINCT queue FROM dl_workers) served;
