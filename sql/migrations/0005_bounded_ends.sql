-- What bounds a run, and what tells its writes in another database from those of later runs. Constant defaults: no
-- table is rewritten.
-- oldest code: 1
-- was: 3e14f37ca694721a24bfa51d9486330fb5cdd95159ad479bf850cf80c8e9e8e0

ALTER TABLE dl_jobs
  ADD COLUMN timeout_sec int,                -- how long one run may take; null: as its pipeline says
  ADD COLUMN IF NOT EXISTS cancel_forced boolean NOT NULL DEFAULT false,  -- a cancellation that needs no safe point
  ADD COLUMN claims int NOT NULL DEFAULT 0;  -- starts, also those given back: a token that only grows
COMMENT ON COLUMN dl_jobs.timeout_sec IS 'seconds that one run may take, null for what its pipeline says';
COMMENT ON COLUMN dl_jobs.cancel_forced IS 'the cancellation does not wait for a safe point';
COMMENT ON COLUMN dl_jobs.claims IS 'starts, also those that were given back';
