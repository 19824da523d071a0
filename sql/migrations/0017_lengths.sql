-- What the reaper has counted of each queue, for pages and metrics: they count a long queue's first thousand jobs and take
-- the rest from here. rights.sql says who may read and write it.
-- oldest code: 1

CREATE TABLE dl_lengths (
  queue text PRIMARY KEY,
  length bigint NOT NULL,
  scheduled bigint NOT NULL,
  retries bigint NOT NULL,
  dead bigint NOT NULL,
  lag_sec float8 NOT NULL,
  counted_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_lengths IS 'what the reaper has counted of each queue that has jobs';
