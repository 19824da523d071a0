-- What the runs of a task need of their host, and what a worker's host has for them.
-- oldest code: 1

ALTER TABLE dl_tasks ADD COLUMN IF NOT EXISTS memory_mb real;
ALTER TABLE dl_tasks ADD COLUMN IF NOT EXISTS cpus real;

CREATE TABLE dl_needs (
  task text PRIMARY KEY,
  memory_mb real NOT NULL,
  cpus real,
  runs bigint NOT NULL,
  learned_at timestamptz NOT NULL,
  peaks real[] NOT NULL,
  shares real[]
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_needs IS 'what the latest runs of a task have used: 95 of 100 used no more';

ALTER TABLE dl_workers ADD COLUMN IF NOT EXISTS host_memory_mb real;
CREATE OR REPLACE VIEW dl_served AS
SELECT unnest(coalesce(queues, ARRAY[queue])) AS queue, worker, state, seen_at, host_memory_mb FROM dl_workers;
