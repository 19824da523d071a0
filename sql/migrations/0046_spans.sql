-- What the runs of each task used in each span of time, as histograms: for the pages of tasks and queues. Rows begin with
-- the journal's rows that come after the migration.
-- oldest code: 1

CREATE TABLE IF NOT EXISTS dl_spans (
  task text NOT NULL,
  queue text NOT NULL,
  minutes smallint NOT NULL,
  at timestamptz NOT NULL,
  figure text NOT NULL,
  count bigint NOT NULL,
  total float8 NOT NULL,
  largest float8 NOT NULL,
  slots smallint[] NOT NULL,
  counts int[] NOT NULL,
  PRIMARY KEY (task, minutes, at, queue, figure)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_spans IS 'what the runs of each task used, as histograms: of five minutes, after three hours of an hour, for 90 days';
COMMENT ON COLUMN dl_spans.figure IS 'succeeded, failed, canceled: seconds of the runs that ended so; waiting, cpu: seconds; memory: MB';
COMMENT ON COLUMN dl_spans.slots IS 'slot n has the values up to 1.1 to the power of n thousandths, and above those of slot n - 1';
CREATE INDEX IF NOT EXISTS ix_dl_spans_queue ON dl_spans (queue, minutes, at);
CREATE INDEX IF NOT EXISTS ix_dl_spans_at ON dl_spans (minutes, at);
