-- What people need to see a farm and to steer it: queues that are paused or limited, the workers of all hosts, sums of
-- the journal, and where a job's trigger stands in a trace.
-- oldest code: 1

ALTER TABLE dl_jobs ADD COLUMN trace text;
COMMENT ON COLUMN dl_jobs.trace IS 'W3C traceparent of the request that triggered the job';

CREATE TABLE dl_queues (
  queue text PRIMARY KEY,
  paused_at timestamptz,
  paused_by text,
  max_length int,
  CONSTRAINT dl_queues_chk_positive CHECK (max_length >= 0)
);
COMMENT ON COLUMN dl_queues.paused_at IS 'since when no claim starts a job of the queue; null: it is not paused';
COMMENT ON COLUMN dl_queues.max_length IS 'queued jobs from which on the API refuses more; null: no limit';

CREATE TABLE dl_workers (
  worker text PRIMARY KEY,
  farm text NOT NULL,
  host text NOT NULL,
  pid int NOT NULL,
  queue text NOT NULL,
  state text NOT NULL,
  job_id uuid,
  memory_bytes bigint,
  cpu_percent real,
  jobs bigint NOT NULL DEFAULT 0,
  started_at timestamptz,
  seen_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_workers IS 'what each farm''s keeper last showed of its workers';

CREATE TABLE dl_totals (
  queue text NOT NULL,
  task text NOT NULL,
  kind text NOT NULL,
  count bigint NOT NULL,
  seconds float8 NOT NULL,
  buckets bigint[] NOT NULL,
  PRIMARY KEY (queue, task, kind)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_totals IS 'how often each step was journaled, and how long the runs took that it ended';

CREATE TABLE dl_pace (
  at timestamptz NOT NULL,
  queue text NOT NULL,
  processed bigint NOT NULL,
  failed bigint NOT NULL,
  PRIMARY KEY (at, queue)
) WITH (fillfactor = 50);
COMMENT ON TABLE dl_pace IS 'runs that ended within each ten seconds, for two days';

-- What came before is not summed up: it may be long.
CREATE TABLE dl_rolled (last_event bigint NOT NULL);
INSERT INTO dl_rolled SELECT coalesce(max(event_id), 0) FROM dl_job_events;
COMMENT ON TABLE dl_rolled IS 'one row: the last of the journal that dl_totals and dl_pace hold';
