-- The smart worker: when the run of each worker has last reported something.
-- oldest code: 1

ALTER TABLE dl_workers ADD COLUMN IF NOT EXISTS reported_at timestamptz;
