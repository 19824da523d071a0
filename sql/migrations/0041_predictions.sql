-- How long runs take, what was predicted of jobs, and the index of what webhooks are told of with one kind more. The index
-- has another name, so that the old one serves until then. Without blocking anybody; may be run again.
-- oldest code: 1
-- outside a transaction

CREATE TABLE IF NOT EXISTS dl_durations (
  task text PRIMARY KEY,
  seconds real[] NOT NULL,
  runs bigint NOT NULL,
  learned_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_durations IS 'how long the latest 200 runs of a task took that have succeeded';

CREATE TABLE IF NOT EXISTS dl_predictions (
  job_id uuid PRIMARY KEY,
  queue text NOT NULL,
  made_at timestamptz NOT NULL DEFAULT now(),
  ends_at timestamptz,
  earliest timestamptz,
  latest timestamptz,
  plain_sec float8,
  ended_at timestamptz,
  deadline timestamptz,
  expected_at timestamptz,
  alerted_at timestamptz
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_predictions IS 'predicted ends: of jobs with a deadline, and of a sample';
COMMENT ON COLUMN dl_predictions.plain_sec IS 'seconds from made_at to the predicted end before its correction; null: the job ran already';
COMMENT ON COLUMN dl_predictions.expected_at IS 'the newest predicted end of a job with a deadline';
CREATE INDEX IF NOT EXISTS ix_dl_predictions_ended ON dl_predictions (queue, ended_at);
CREATE INDEX IF NOT EXISTS ix_dl_predictions_open ON dl_predictions (queue, deadline)
  WHERE ended_at IS NULL AND deadline IS NOT NULL;

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_job_events_told;
CREATE INDEX CONCURRENTLY ix_dl_job_events_told ON dl_job_events (event_id)
  WHERE kind IN ('failed', 'lost', 'stuck', 'deadline');
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_job_events_alerts;
