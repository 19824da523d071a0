-- What runs with the owner's rights does so for the one table that it was made for, and needs no parameter of its own: only
-- a superuser may bind one to a function. Who may call which function is said by rights.sql, after the functions.
-- oldest code: 1
-- was: 74a90596d7aeb2eb8b521c1d0271edeb5ee6dd5986a1dd116fc1e4d4f25926b6
-- functions: dl_jobs_journal, dl_jobs_forget, dl_jobs_notify_key, dl_tell_waiters

-- A key becomes free: who journals the step itself (dl_finish, dl_give_back) tells the waiters itself. A crash that is settled
-- between this and the new functions tells only its own queue; what waits in another looks again within DL_CLAIM_BACKOFF_SEC.
CREATE OR REPLACE TRIGGER dl_jobs_notify_key AFTER UPDATE OF status ON dl_jobs
  FOR EACH ROW WHEN (OLD.status = 'running' AND NEW.status <> 'running' AND NEW.journaled = OLD.journaled)
  EXECUTE FUNCTION dl_jobs_notify_key();
