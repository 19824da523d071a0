-- Turns: the place of a job among those of its queue and priority, where that is not its time of creation. A job may have a
-- deadline, and a queue may be fair.
-- oldest code: 1
-- functions: dl_turn, dl_jobs_score

ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS turn_at timestamptz, ADD COLUMN IF NOT EXISTS share text,
  ADD COLUMN IF NOT EXISTS deadline timestamptz;
COMMENT ON COLUMN dl_jobs.turn_at IS 'place among the ready jobs of the queue and priority; null: created_at';
COMMENT ON COLUMN dl_jobs.share IS 'whose job it is, in a fair queue: its partition_key or producer; else null';
COMMENT ON COLUMN dl_jobs.deadline IS 'when the job should have ended; null: no matter when';
ALTER TABLE dl_queues ADD COLUMN IF NOT EXISTS fair_by text,
  ADD CONSTRAINT dl_queues_chk_fair CHECK (fair_by IN ('partition_key', 'producer'));
COMMENT ON COLUMN dl_queues.fair_by IS 'the field by whose values the jobs of a priority start in turns; null: in their order';
CREATE OR REPLACE TRIGGER dl_jobs_score_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.journaled <> 2 OR NEW.deadline IS NOT NULL OR NEW.turn_at IS NOT NULL)
  EXECUTE FUNCTION dl_jobs_score();
