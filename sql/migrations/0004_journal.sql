-- The journal of what others do. Our statements write their own journal rows and say so by `journaled`; for every
-- other session that changes a job's status a trigger writes what is missing. Constant default: no table is rewritten.
-- oldest code: 1
-- was: c8546d4da7319b0052811332377dc0b9f661c73a57575cb99224298bfb3f4a40
-- functions: dl_jobs_journal

ALTER TABLE dl_jobs ADD COLUMN journaled int NOT NULL DEFAULT 0;  -- steps that their writer put into the journal
COMMENT ON COLUMN dl_jobs.journaled IS 'changes of status that their writer put into the journal itself';

CREATE CONSTRAINT TRIGGER dl_jobs_journal_ins AFTER INSERT ON dl_jobs DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.journaled = 0) EXECUTE FUNCTION dl_jobs_journal();
CREATE CONSTRAINT TRIGGER dl_jobs_journal_upd AFTER UPDATE OF status ON dl_jobs DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.status <> OLD.status AND NEW.journaled = OLD.journaled) EXECUTE FUNCTION dl_jobs_journal();
