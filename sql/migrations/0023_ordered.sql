-- Ordered queues: a job's place in its key, and how a queue treats the jobs of a key.
-- oldest code: 1
-- functions: dl_jobs_score

ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS score float8;
CREATE OR REPLACE TRIGGER dl_jobs_score_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.journaled <> 2 AND NEW.score IS NULL) EXECUTE FUNCTION dl_jobs_score();
COMMENT ON COLUMN dl_jobs.score IS 'place among the jobs of the key in an ordered queue, the smallest first; else as its producer gave it';
ALTER TABLE dl_queues
  ADD COLUMN IF NOT EXISTS ordered boolean, ADD COLUMN IF NOT EXISTS merge boolean,
  ADD COLUMN IF NOT EXISTS merge_limit int, ADD COLUMN IF NOT EXISTS batch int, ADD COLUMN IF NOT EXISTS on_dead text,
  ADD CONSTRAINT dl_queues_chk_order CHECK (
    (merge IS NOT TRUE OR ordered IS TRUE) AND merge_limit BETWEEN 1 AND 1000 AND batch BETWEEN 1 AND 1000
    AND on_dead IN ('continue', 'hold'));
COMMENT ON COLUMN dl_queues.ordered IS 'whether the jobs of a key start in the order of their scores; null: nobody has said';
COMMENT ON COLUMN dl_queues.merge IS 'whether one delivery takes all queued jobs of a key; null: nobody has said';
COMMENT ON COLUMN dl_queues.merge_limit IS 'the most jobs of a key in one delivery; null: 1000';
COMMENT ON COLUMN dl_queues.batch IS 'the most keys in one call of a pipeline; null: as the pipeline says';
COMMENT ON COLUMN dl_queues.on_dead IS 'hold: a dead job stops its key; null: the key continues';
