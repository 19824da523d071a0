-- Schedules: due times of which the reaper makes jobs.
-- oldest code: 1

CREATE TABLE dl_schedules (
  name text PRIMARY KEY,
  origin text NOT NULL,
  cron text,
  interval_sec int,
  timezone text NOT NULL,
  catch_up text NOT NULL,
  overlap text NOT NULL,
  jitter_sec float8 NOT NULL,
  job jsonb NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  created_by text NOT NULL,
  changed_at timestamptz,
  changed_by text,
  paused_at timestamptz,
  paused_by text,
  retired_at timestamptz,
  next_due timestamptz,
  last_due timestamptz,
  last_job_id uuid,
  skipped bigint NOT NULL DEFAULT 0,
  last_skipped timestamptz,
  error text,
  error_at timestamptz,
  retry_at timestamptz,
  CONSTRAINT dl_schedules_chk CHECK (
    origin IN ('code', 'people') AND (cron IS NULL) <> (interval_sec IS NULL) AND interval_sec > 0
    AND catch_up IN ('none', 'last', 'all') AND overlap IN ('skip', 'queue', 'cancel_old'))
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
CREATE INDEX ix_dl_schedules_due ON dl_schedules (next_due) WHERE paused_at IS NULL AND retired_at IS NULL;
COMMENT ON TABLE dl_schedules IS 'due times of which the reaper makes jobs';
COMMENT ON COLUMN dl_schedules.job IS 'the fields of its jobs; {{ due }} and the like are filled in';
COMMENT ON COLUMN dl_schedules.retired_at IS 'since when the pipeline of a schedule of code names it no more; null: it does';
COMMENT ON COLUMN dl_schedules.next_due IS 'the first due time that was not looked at yet; it only grows';
