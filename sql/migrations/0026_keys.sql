-- How many keys of an ordered queue have queued jobs, as the reaper has counted them. A reaper of older code leaves the
-- column as it is.
-- oldest code: 1

ALTER TABLE dl_lengths ADD COLUMN IF NOT EXISTS keys bigint;
COMMENT ON COLUMN dl_lengths.keys IS 'keys with queued jobs; null: the queue is not ordered, or they were not counted';
