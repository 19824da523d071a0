-- Backfills: jobs of one task for many partitions, which the reaper makes, and the ledger of what became of each.
-- oldest code: 1

CREATE TABLE dl_backfills (
  name text PRIMARY KEY,
  task text NOT NULL,
  queue text NOT NULL,
  span jsonb,
  job jsonb NOT NULL,
  code_version text NOT NULL,
  skip_done boolean NOT NULL,
  max_running int,
  total int NOT NULL,
  made int NOT NULL DEFAULT 0,
  canceled int NOT NULL DEFAULT 0,
  next_at timestamptz,
  created_at timestamptz NOT NULL DEFAULT now(),
  created_by text NOT NULL,
  paused_at timestamptz,
  paused_by text,
  canceled_at timestamptz,
  canceled_by text,
  error text,
  error_at timestamptz,
  CONSTRAINT dl_backfills_chk CHECK (max_running > 0 AND made BETWEEN 0 AND total AND canceled BETWEEN 0 AND total)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
CREATE INDEX ix_dl_backfills_next ON dl_backfills (next_at) WHERE next_at IS NOT NULL;
COMMENT ON TABLE dl_backfills IS 'jobs of one task for many partitions; the reaper makes them';
COMMENT ON COLUMN dl_backfills.job IS 'the fields of its jobs; {{ partition }} and the like are filled in';
COMMENT ON COLUMN dl_backfills.made IS 'the place up to which partitions have their jobs';
COMMENT ON COLUMN dl_backfills.canceled IS 'the place up to which a cancellation has come';
COMMENT ON COLUMN dl_backfills.next_at IS 'when the reaper goes on with it; null: there is nothing to do';
CREATE TABLE dl_partitions (
  backfill text NOT NULL,
  place int NOT NULL,
  partition text NOT NULL,
  job_id uuid,
  fingerprint uuid,
  is_skipped boolean NOT NULL DEFAULT false,
  last_status text,
  PRIMARY KEY (backfill, place)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX ix_dl_partitions_partition ON dl_partitions (backfill, partition);
CREATE INDEX ix_dl_partitions_job ON dl_partitions (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX ix_dl_partitions_fingerprint ON dl_partitions (fingerprint) WHERE fingerprint IS NOT NULL;
COMMENT ON TABLE dl_partitions IS 'the ledger of backfills: each partition, and the job that does it';
COMMENT ON COLUMN dl_partitions.fingerprint IS 'the hash of task, code version and args of its job; null: not made yet';
COMMENT ON COLUMN dl_partitions.is_skipped IS 'job_id is the job of another backfill that has done the same';
COMMENT ON COLUMN dl_partitions.last_status IS 'the status of its job when that was deleted; null: it is there';
