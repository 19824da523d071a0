-- The whole schema of the queue. `dataloader migrate` runs it in an empty database, with functions/ between `tables` and
-- `triggers`. Tables that follow the contract already are brought to the same state: adopt.sql. A change of the schema
-- is made here, and also as a numbered file in migrations/ for the databases that exist.
--
-- The story. A producer inserts a row into dl_jobs: `queued`. A worker claims it: `running`, with a lease that its
-- heartbeats renew. It ends `succeeded`, `failed`, `canceled`, or comes back to `queued`; a job whose lease runs out
-- comes back too, or ends `lost` when its attempts are spent. Every step writes a line into dl_job_events.
-- Other services insert rows, and run jobs, knowing only the contract's columns; triggers keep the rest true for
-- them. The steps themselves are in queue.sql (one statement each) and functions/ (several snapshots).
--
--                    claim                 done
--      queued ----------------> running ----------> succeeded
--       |  ^                     | | |  error, attempts spent, or permanent
--       |  |  error, crash,      | | +------------> failed     (a retry too, when an operator kills it)
--       |  +--- hand-back -------+ |   asked to cancel
--       |                          +--------------> canceled   (a queued job too, at once)
--       +--- attempts spent -- crash, attempts spent ---> lost
--
-- A queued row is ready, or blocked_on says why not; that decides how it is found:
--   ready     blocked_on null                the claim may start it      ix_dl_jobs_turn
--   due later blocked_on = 'time'            its time has not come       ix_dl_jobs_time
--   parked    blocked_on = 'key'             its key was found busy      ix_dl_jobs_parked_keys
--   waiting   blocked_on = 'parent'          jobs have to end before     dl_waiting
--   parked    blocked_on = 'limit:NAME'      a limit was found full      ix_dl_jobs_limit_turn
-- In an ordered queue the head of a key, its row with the smallest score, is the only one that may start.
-- A key is held twice: by a session advisory lock on its key_hash, hashtext(lock_key), and by the running row with a
-- live lease, which ix_dl_jobs_running finds.

-- name: contract
-- The tables that other services rely on.

-- The last four are final: no statement leaves them, only an operator's plain UPDATE.
CREATE TYPE dl_status AS ENUM ('queued', 'running', 'succeeded', 'failed', 'canceled', 'lost');

CREATE TABLE dl_jobs (
  job_id uuid PRIMARY KEY,
  queue text NOT NULL,                               -- whose workers run it; payload of its notifications
  task text NOT NULL,                                -- the pipeline's name
  args jsonb NOT NULL DEFAULT '{}'::jsonb,
  idempotency_key text,                              -- one key, one job: ix_dl_jobs_idempotency
  lock_key text NOT NULL,                            -- jobs of one key never run side by side
  partition_key text NOT NULL DEFAULT '',            -- stored, shown and filtered by
  priority int NOT NULL DEFAULT 100,                 -- the smallest first, then the oldest
  available_at timestamptz NOT NULL DEFAULT now(),   -- not before
  status dl_status NOT NULL DEFAULT 'queued',
  attempt int NOT NULL DEFAULT 0,                    -- the runs that count; part of a claim's name
  max_attempts int NOT NULL DEFAULT 5,
  lease_ttl_sec int NOT NULL DEFAULT 60,             -- how long a silent worker keeps the job
  lease_expires_at timestamptz,                      -- in no index: heartbeats are heap-only updates
  heartbeat_at timestamptz,
  cancel_requested boolean NOT NULL DEFAULT false,
  progress jsonb NOT NULL DEFAULT '{}'::jsonb,       -- what the pipeline yielded last
  error text,
  producer text,
  consumer_group text,
  created_at timestamptz NOT NULL DEFAULT now(),
  started_at timestamptz,                            -- the first start, kept over all attempts
  finished_at timestamptz,                           -- set in the final states
  CONSTRAINT dl_jobs_chk_positive
    CHECK (priority >= 0 AND attempt >= 0 AND max_attempts >= 0 AND lease_ttl_sec > 0)
);

-- A job's journal: queued, picked, heartbeat, requeue, done, failed, canceled, lost, cancel_requested; ours also note,
-- stuck, deadline and the kinds of people's orders.
CREATE TABLE dl_job_events (
  event_id bigserial PRIMARY KEY,
  job_id uuid NOT NULL,                              -- no foreign key: dl_jobs_forget does what it would
  queue text NOT NULL,
  ts timestamptz NOT NULL DEFAULT now(),
  kind text NOT NULL,
  payload jsonb
);

-- name: columns
-- Ours, of the contract's tables: what a claim needs besides.
ALTER TABLE dl_jobs
  ADD COLUMN blocked_on text,                        -- why a queued row is not ready: 'time', 'key', 'parent', 'limit:NAME'
  ADD COLUMN backoffs int NOT NULL DEFAULT 0,        -- refusals in a row of a key that no visible job holds
  ADD COLUMN claimed_by text,                        -- host:pid:boot of the worker that runs it
  ADD COLUMN claimed_pid int,                        -- that worker's backend, with its start: what may still
  ADD COLUMN claimed_backend_start timestamptz,      -- hold the key's advisory lock when the worker is gone
  ADD COLUMN journaled int NOT NULL DEFAULT 0,       -- steps that their writers put into the journal; a new row with 2: also notified
  ADD COLUMN timeout_sec int,                        -- how long one run may take; null: as its pipeline says
  ADD COLUMN cancel_forced boolean NOT NULL DEFAULT false,  -- a cancellation that does not wait for a safe point
  ADD COLUMN claims int NOT NULL DEFAULT 0,          -- starts, also those given back: a token that only grows
  ADD COLUMN trace text,                             -- W3C traceparent of the request that triggered the job
  ADD COLUMN score float8,                           -- place in the key, in an ordered queue; else as its producer gave it
  ADD COLUMN affinity_key text,                      -- the heavy resource that the job needs; null: none
  ADD COLUMN limits text[],                          -- names in dl_limits that the job's runs count for; null: none
  ADD COLUMN turn_at timestamptz,                    -- place among those of its queue and priority; null: created_at
  ADD COLUMN share text,                             -- whose job it is, in a fair queue; else null
  ADD COLUMN deadline timestamptz,                   -- when the job should have ended; null: no matter when
  ADD COLUMN error_group text;                       -- what the error has in common with others of its kind
ALTER TABLE dl_jobs SET (
  fillfactor = 70,                                   -- room for heartbeats on the row's own page
  -- A queue's rows die young: by default a vacuum would wait for a fifth of the history.
  autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
  autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 1
);
ALTER TABLE dl_job_events SET (autovacuum_vacuum_insert_scale_factor = 0.1);

-- name: checks
-- On these values claims, the reaper and the pages rely. One trigger and not CHECK constraints: every statement that writes a
-- row reads the text of each CHECK again, a third of a lone job's instructions. A trigger costs only the statements that
-- write its columns, and each trigger of its own costs an insert two microseconds. It has no condition, for a condition's
-- text is read again as well: this one would be a sixth of a lone insert.
CREATE TRIGGER dl_jobs_check BEFORE INSERT OR UPDATE OF {fields.texts}, timeout_sec, deadline, limits, args ON dl_jobs
  FOR EACH ROW EXECUTE FUNCTION dl_jobs_check();

-- name: indexes
-- One key, one job. The contract's UNIQUE serves as well, and costs three entries of each job without a key: it is kept where
-- it is found, and `migrate --plain-protocol` makes it (adopt.sql).
CREATE UNIQUE INDEX ix_dl_jobs_idempotency ON dl_jobs (idempotency_key) WHERE idempotency_key IS NOT NULL;
-- The plain protocol's claim, of other services: it sorts what this index finds. A list's jobs share an entry.
CREATE INDEX ix_dl_jobs_claim ON dl_jobs (queue, available_at) WHERE status = 'queued';
-- Our claim: ready rows in its order, then the first row of each key that it has locked.
CREATE INDEX ix_dl_jobs_turn ON dl_jobs (queue, priority, coalesce(turn_at, created_at))
  WHERE status = 'queued' AND blocked_on IS NULL;
CREATE INDEX ix_dl_jobs_key_turn ON dl_jobs (hashtext(lock_key), queue, priority, coalesce(turn_at, created_at))
  WHERE status = 'queued' AND (blocked_on IS NULL OR blocked_on = 'key');
-- In which queues rows of a key are parked: dl_unpark. By enum_eq and not by `=`, so that no other index can serve it.
CREATE INDEX ix_dl_jobs_parked_keys ON dl_jobs (hashtext(lock_key), queue, lock_key)
  WHERE enum_eq(status, 'queued') AND blocked_on = 'key';
-- Ordered queues: the rows of a key by status, those that were tried and the others in their order (dl_lock_heads). One
-- index and not three, for each index of the table costs every statement that writes to it.
CREATE INDEX ix_dl_jobs_order ON dl_jobs (queue, lock_key, status, least(attempt, 1), score, created_at, job_id)
  WHERE score IS NOT NULL AND status IN ('queued', 'failed', 'lost');
-- Rows that wait for their time: dl_wake, and the next due instant. The functions order by all its columns: without
-- statistics ix_dl_jobs_claim would look as cheap, and reads the ready rows too.
CREATE INDEX ix_dl_jobs_time ON dl_jobs (queue, available_at, priority, created_at)
  WHERE status = 'queued' AND blocked_on = 'time';
-- Keys that are busy, and the reaper's rows: never more than there are workers.
CREATE INDEX ix_dl_jobs_running ON dl_jobs (hashtext(lock_key)) WHERE status = 'running';
-- The running jobs of a limit, and the parked ones by their limit. One index and not two, as above.
CREATE INDEX ix_dl_jobs_limit_turn ON dl_jobs (status, blocked_on, queue, priority, coalesce(turn_at, created_at))
  WHERE limits IS NOT NULL AND status IN ('queued', 'running');
-- The last job of each share of a fair queue: dl_turn.
CREATE INDEX ix_dl_jobs_share ON dl_jobs (queue, priority, share, turn_at)
  WHERE status = 'queued' AND share IS NOT NULL AND turn_at IS NOT NULL;
-- Retention: finished jobs, the oldest end first. The columns behind the time, here and below, are for filters of lists: an
-- index scan passes over other jobs without their rows, ten times as fast. The key first: it decides among equal times soonest.
CREATE INDEX ix_dl_jobs_finished ON dl_jobs (finished_at, hashtext(lock_key), hashtext(task), hashtext(queue), status,
    hashtext(partition_key), hashtext(producer), hashtext(consumer_group))
  WHERE finished_at IS NOT NULL;
-- Lists and counts for people: queued jobs by their age, those tried before, those that ended badly. The first by
-- enum_eq and not by `=`, so that no claim's plan, made on an empty table, can take it for its own.
CREATE INDEX ix_dl_jobs_queued ON dl_jobs (created_at, hashtext(lock_key), hashtext(task), hashtext(queue),
    hashtext(partition_key), hashtext(producer), hashtext(consumer_group))
  WHERE enum_eq(status, 'queued');
CREATE INDEX ix_dl_jobs_retried ON dl_jobs (queue, created_at) WHERE status = 'queued' AND attempt > 0;
CREATE INDEX ix_dl_jobs_dead ON dl_jobs (queue, finished_at, hashtext(lock_key), hashtext(task), status,
    hashtext(partition_key), hashtext(producer), hashtext(consumer_group))
  WHERE status IN ('failed', 'lost');
CREATE INDEX ix_dl_job_events_job ON dl_job_events (job_id, event_id);
-- The few rows of which webhooks get messages: `new_events` in webhooks.sql.
CREATE INDEX ix_dl_job_events_told ON dl_job_events (event_id) WHERE kind IN ('failed', 'lost', 'stuck', 'deadline');

-- name: tables
-- The results of pipelines. They have a table of their own, so that a job without a result costs nothing more.
CREATE TABLE dl_results (
  job_id uuid PRIMARY KEY,                           -- no foreign key: dl_jobs_gone does what it would
  claim int NOT NULL,                                -- dl_jobs.claims of the run: that of a dead run never shows
  result jsonb NOT NULL
);

-- Which jobs wait for which, and have waited. Tables of their own, so that a job without parents costs nothing more.
CREATE TABLE dl_parents (
  job_id uuid NOT NULL,                              -- no foreign keys: dl_jobs_gone does what they would
  parent_id uuid NOT NULL,                           -- has to end before
  place int NOT NULL,                                -- among the parents of the job
  is_over boolean NOT NULL DEFAULT false,            -- the parent has ended, and was counted
  PRIMARY KEY (job_id, parent_id)
);
CREATE INDEX ix_dl_parents_parent ON dl_parents (parent_id, is_over);
CREATE TABLE dl_waiting (
  job_id uuid PRIMARY KEY,                           -- a job with blocked_on 'parent', or one that runs (context.gather)
  parents int NOT NULL,                              -- how many parents it still waits for
  available_at timestamptz NOT NULL,                 -- the job's own time, for the end of the wait
  on_failure text NOT NULL,                          -- of a parent: cancel, hold, run
  failed_parent uuid                                 -- for which the job is to be canceled
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
CREATE INDEX ix_dl_waiting_told ON dl_waiting (job_id) WHERE parents <= 0 OR failed_parent IS NOT NULL;

-- How far the runs of jobs have come. A table of its own, as for results.
CREATE TABLE dl_checkpoints (
  job_id uuid PRIMARY KEY,                           -- no foreign key: dl_jobs_gone does what it would
  claim int NOT NULL,                                -- dl_jobs.claims of the run that has come so far
  checkpoint jsonb,                                  -- where the next run goes on; null: at the start
  target_claim bigint NOT NULL,                      -- the newest checkpoint in the target that it follows: by the fence
  target_number int NOT NULL,                        -- token and the place in the job; older ones there do not count
  spares_attempt boolean NOT NULL,                   -- this run counts as no attempt when it fails
  saved_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);

-- Jobs that would leave something behind: those whose checkpoints have the key on_cancel, and some that had it. A table
-- of its own, for an index on a checkpoint's content would make each of its updates dearer.
CREATE TABLE dl_cleanups (
  job_id uuid PRIMARY KEY
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);

-- Operators' settings of a queue.
CREATE TABLE dl_queues (
  queue text PRIMARY KEY,
  paused_at timestamptz,                             -- since when no claim starts a job of it
  paused_by text,
  max_length int,                                    -- queued jobs from which on the API refuses more
  ordered boolean,                                   -- jobs of a key start in the order of their scores; null: not said
  merge boolean,                                     -- one delivery takes all queued jobs of a key; null: not said
  merge_limit int,                                   -- the most jobs of a key in one delivery; null: 1000
  batch int,                                         -- the most keys in one call; null: as the pipeline says
  on_dead text,                                      -- hold: a dead job stops its key; null: the key continues
  fair_by text,                                      -- the field by whose values jobs start in turns; null: none
  CONSTRAINT dl_queues_chk_positive CHECK (max_length >= 0),
  CONSTRAINT dl_queues_chk_order CHECK (
    (merge IS NOT TRUE OR ordered IS TRUE) AND merge_limit BETWEEN 1 AND 1000 AND batch BETWEEN 1 AND 1000
    AND on_dead IN ('continue', 'hold')),
  CONSTRAINT dl_queues_chk_fair CHECK (fair_by IN ('partition_key', 'producer')),
  CONSTRAINT dl_queues_chk_queue CHECK (octet_length(queue) <= 512)
);

-- Keys that became free while others had their first row locked, and parents of which children are left: others had
-- these locked, or a step frees no more. Tried again when they are 0.7 s old.
CREATE TABLE dl_freed (
  key_hash int,                                      -- a key, or
  since timestamptz NOT NULL DEFAULT clock_timestamp(),
  parent_id uuid                                     -- a job that has ended
);
ALTER TABLE dl_freed REPLICA IDENTITY FULL;            -- no primary key: a publication FOR ALL TABLES would refuse a DELETE

-- The workers as each farm's keeper last showed them. For people only: no claim and no recovery depends on it.
CREATE TABLE dl_workers (
  worker text PRIMARY KEY,                           -- as in dl_jobs.claimed_by
  farm text NOT NULL,                                -- the same for all children of one supervisor
  host text NOT NULL,
  pid int NOT NULL,
  queue text NOT NULL,                               -- the first of its queues
  state text NOT NULL,                               -- starting, awake, idle, busy, stuck, stopped, leaving, dead
  job_id uuid,
  memory_bytes bigint,                               -- with its job's processes
  cpu_percent real,                                  -- of one core, since the last time
  jobs bigint NOT NULL DEFAULT 0,                    -- begun since its start
  started_at timestamptz,
  seen_at timestamptz NOT NULL DEFAULT now(),
  queues text[],                                     -- all of its queues
  reported_at timestamptz,                           -- the latest sign of life of its run; null: none is under way
  host_memory_mb real,                              -- what runs may use together on its host; null: any
  reload_error text,                                 -- why the latest reload of its farm did not succeed
  CONSTRAINT dl_workers_chk_queues CHECK (array_position(queues, NULL) IS NULL)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);

CREATE VIEW dl_served AS
SELECT unnest(coalesce(queues, ARRAY[queue])) AS queue, worker, state, seen_at, host_memory_mb FROM dl_workers;

-- The declarations of tasks in the workers' pipelines; for producers, which have no pipelines.
CREATE TABLE dl_tasks (
  task text PRIMARY KEY,
  max_attempts int,                                  -- of a job whose producer names none; null: 5
  affinity text[],                                   -- from which args an affinity_key follows: dl_affinity; null: none
  memory_mb real,                                    -- what a run needs; null: as its runs have shown, 0: none
  cpus real,                                         -- the same, processors
  limits text[],                                     -- those of a job whose producer names none; null: none
  args_schema text,                                  -- the JSON Schema of the args; null: any object will do
  CONSTRAINT dl_tasks_chk_positive CHECK (max_attempts > 0),
  CONSTRAINT dl_tasks_chk_args_schema CHECK (octet_length(args_schema) <= 65536),
  CONSTRAINT dl_tasks_chk_limits CHECK (limits IS NULL OR limits = '{}' OR (
    array_ndims(limits) = 1 AND array_lower(limits, 1) = 1 AND cardinality(limits) <= 8
    AND array_position(limits, NULL) IS NULL AND array_position(limits, '') IS NULL
    AND greatest(octet_length(limits[1]), octet_length(limits[2]), octet_length(limits[3]), octet_length(limits[4]),
                 octet_length(limits[5]), octet_length(limits[6]), octet_length(limits[7]), octet_length(limits[8])) <= 400))
) WITH (fillfactor = 50);

-- The bounds of each limit of the whole fleet. A name that is not here has no bound.
CREATE TABLE dl_limits (
  name text PRIMARY KEY,
  most int,                                          -- jobs that may run at once; null: any number
  per_minute float8,                                 -- jobs that may start in a minute; null: any number
  burst int NOT NULL DEFAULT 1,                      -- of these, how many may start at once
  empty_at timestamptz NOT NULL DEFAULT '-infinity', -- since when tokens have come into an empty bucket
  changed_by text,
  changed_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT dl_limits_chk CHECK (most >= 0 AND per_minute BETWEEN 0.001 AND 1000000 AND burst BETWEEN 1 AND 1000000
                                  AND (most IS NOT NULL OR per_minute IS NOT NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);

-- The memory and the processors that runs have used, by dl_roll: 95 of 100 of the latest 200 have used no more.
CREATE TABLE dl_needs (
  task text PRIMARY KEY,
  memory_mb real NOT NULL,
  cpus real,                                         -- null: no run of a second or longer yet
  runs bigint NOT NULL,                              -- that it was learned from
  learned_at timestamptz NOT NULL,
  peaks real[] NOT NULL,                             -- MB of the latest runs, the newest first
  shares real[],                                    -- CPU seconds in a second of these
  CONSTRAINT dl_needs_chk CHECK (
    runs BETWEEN 0 AND 1e15 AND array_position(peaks, NULL) IS NULL)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);

-- How long runs take, by dl_roll, and what was predicted of jobs.
CREATE TABLE dl_durations (
  task text PRIMARY KEY,
  seconds real[] NOT NULL,                           -- of the latest runs that have succeeded, the newest first
  runs bigint NOT NULL,                              -- that there were
  learned_at timestamptz NOT NULL,
  CONSTRAINT dl_durations_chk CHECK (
    runs BETWEEN 0 AND 1e15 AND array_position(seconds, NULL) IS NULL AND coalesce(array_ndims(seconds), 1) = 1)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
CREATE TABLE dl_predictions (
  job_id uuid PRIMARY KEY,                           -- no foreign key: the reaper forgets jobs that are gone
  queue text NOT NULL,
  made_at timestamptz NOT NULL DEFAULT now(),        -- the first prediction of the job, compared with its end
  ends_at timestamptz,                               -- null: its end was not known
  earliest timestamptz,
  latest timestamptz,
  plain_sec float8,                                  -- until then, before the correction; null: the job ran already
  ended_at timestamptz,                              -- when it did; null: it has not yet
  deadline timestamptz,
  expected_at timestamptz,                           -- the newest predicted end of a job with a deadline
  alerted_at timestamptz                             -- when its deadline became an alert
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
CREATE INDEX ix_dl_predictions_ended ON dl_predictions (queue, ended_at);
-- Of these some are going to miss their deadlines.
CREATE INDEX ix_dl_predictions_open ON dl_predictions (queue, deadline)
  WHERE ended_at IS NULL AND deadline IS NOT NULL;

-- Schedules: due times of which the reaper makes jobs. A schedule is locked while its jobs are added, in one transaction
-- with its next due time; the idempotency key of a job holds both names, so a due time has one job.
CREATE TABLE dl_schedules (
  name text PRIMARY KEY,
  origin text NOT NULL,                              -- code: a pipeline names it; people: API, command line, dashboard
  cron text,                                         -- five fields, in `timezone`
  interval_sec int,                                  -- instead of cron: multiples since 1970
  timezone text NOT NULL,
  catch_up text NOT NULL,                            -- which missed due times still get a job
  overlap text NOT NULL,                             -- while the last job has not ended
  jitter_sec float8 NOT NULL,                        -- a job may begin so much later
  job jsonb NOT NULL,                                -- the fields of its jobs, with templates
  created_at timestamptz NOT NULL DEFAULT now(),
  created_by text NOT NULL,
  changed_at timestamptz,                            -- by people: then code changes it no more
  changed_by text,
  paused_at timestamptz,
  paused_by text,
  retired_at timestamptz,                            -- its pipeline names it no more
  next_due timestamptz,                              -- the first due time without a decision; null: there is none
  last_due timestamptz,                              -- the last due time with a decision
  last_job_id uuid,
  skipped bigint NOT NULL DEFAULT 0,                 -- due times without a job, by overlap
  last_skipped timestamptz,
  error text,                                        -- why its jobs cannot be made; null: they can
  error_at timestamptz,
  retry_at timestamptz,                              -- not tried again before
  CONSTRAINT dl_schedules_chk CHECK (
    origin IN ('code', 'people') AND (cron IS NULL) <> (interval_sec IS NULL) AND interval_sec > 0
    AND catch_up IN ('none', 'last', 'all') AND overlap IN ('skip', 'queue', 'cancel_old')),
  CONSTRAINT dl_schedules_chk_job CHECK (
    (jsonb_typeof(job) = 'object' AND jsonb_typeof(job -> 'task') = 'string' AND jsonb_typeof(job -> 'queue') = 'string') IS TRUE)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
CREATE INDEX ix_dl_schedules_due ON dl_schedules (next_due) WHERE paused_at IS NULL AND retired_at IS NULL;

-- Backfills: jobs of one task for many partitions. The reaper makes them, a bunch a transaction with its rows of the ledger;
-- the idempotency key of a job holds the names of backfill and partition. Each job names the limit backfill:NAME.
CREATE TABLE dl_backfills (
  name text PRIMARY KEY,
  task text NOT NULL,
  queue text NOT NULL,
  span jsonb,                                        -- since, until and step of a range; null: the partitions were listed
  job jsonb NOT NULL,                                -- the fields of its jobs, with templates
  code_version text NOT NULL,                        -- what its partitions are done by; '' where nobody says
  skip_done boolean NOT NULL,                        -- leave out what another backfill has done
  max_running int,                                   -- null: any number
  total int NOT NULL,                                -- partitions
  made int NOT NULL DEFAULT 0,                       -- the place up to which they have their jobs
  canceled int NOT NULL DEFAULT 0,                   -- the place up to which a cancellation has come
  next_at timestamptz,                               -- when the reaper goes on; null: there is nothing to do
  created_at timestamptz NOT NULL DEFAULT now(),
  created_by text NOT NULL,
  paused_at timestamptz,
  paused_by text,
  canceled_at timestamptz,
  canceled_by text,
  error text,                                        -- why its next jobs cannot be made; null: they can
  error_at timestamptz,
  CONSTRAINT dl_backfills_chk CHECK (max_running > 0 AND made BETWEEN 0 AND total AND canceled BETWEEN 0 AND total),
  CONSTRAINT dl_backfills_chk_job CHECK (
    jsonb_typeof(job) = 'object' AND (span IS NULL OR jsonb_typeof(span) = 'object'))
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
CREATE INDEX ix_dl_backfills_next ON dl_backfills (next_at) WHERE next_at IS NOT NULL;
-- The ledger of backfills: each partition, and the job that does it.
CREATE TABLE dl_partitions (
  backfill text NOT NULL,
  place int NOT NULL,                                -- from 1
  partition text NOT NULL,
  job_id uuid,                                       -- null: not made yet
  fingerprint uuid,                                  -- of task, code version and args of its job
  is_skipped boolean NOT NULL DEFAULT false,         -- job_id is another backfill's, which has done the same
  last_status text,                                  -- of a job that was deleted
  PRIMARY KEY (backfill, place)
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX ix_dl_partitions_partition ON dl_partitions (backfill, partition);
CREATE INDEX ix_dl_partitions_job ON dl_partitions (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX ix_dl_partitions_fingerprint ON dl_partitions (fingerprint) WHERE fingerprint IS NOT NULL;

-- Sums of the journal, by dl_roll.
CREATE TABLE dl_totals (
  queue text NOT NULL,
  task text NOT NULL,
  kind text NOT NULL,                                -- see dl_step_of
  count bigint NOT NULL,
  seconds float8 NOT NULL,                           -- of the runs that it ended
  buckets bigint[] NOT NULL,                         -- how many of these took up to 0.1 s and so on, see dl_roll
  PRIMARY KEY (queue, task, kind),
  CONSTRAINT dl_totals_chk CHECK (
    count BETWEEN 0 AND 1e15 AND seconds BETWEEN 0 AND 1e300 AND array_ndims(buckets) = 1 AND cardinality(buckets) = 12
    AND array_position(buckets, NULL) IS NULL AND 0 <= ALL (buckets) AND 1e15 >= ALL (buckets))
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
-- Runs that ended within each ten seconds, for two days.
CREATE TABLE dl_pace (
  at timestamptz NOT NULL,                           -- the begin of ten seconds
  queue text NOT NULL,
  processed bigint NOT NULL,
  failed bigint NOT NULL,
  PRIMARY KEY (at, queue),
  CONSTRAINT dl_pace_chk CHECK (processed BETWEEN 0 AND 1e15 AND failed BETWEEN 0 AND 1e15)
) WITH (fillfactor = 50);
-- Runs that ended within each five minutes, for eight days.
CREATE TABLE dl_pace_long (
  at timestamptz NOT NULL,                           -- the begin of five minutes
  queue text NOT NULL,
  processed bigint NOT NULL,
  failed bigint NOT NULL,
  PRIMARY KEY (at, queue),
  CONSTRAINT dl_pace_long_chk CHECK (processed BETWEEN 0 AND 1e15 AND failed BETWEEN 0 AND 1e15)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
-- One row: the last event of the journal that these tables include. Earlier events, which may be many, are not summed up.
CREATE TABLE dl_rolled (last_event bigint NOT NULL);
INSERT INTO dl_rolled SELECT coalesce(max(event_id), 0) FROM dl_job_events;
ALTER TABLE dl_rolled REPLICA IDENTITY FULL;

-- The time and the memory of each task's runs, by dl_roll: the pages of tasks and queues. Percentiles are read from the histograms,
-- see queue/reports/histogram.py.
CREATE TABLE dl_spans (
  task text NOT NULL,
  queue text NOT NULL,
  minutes smallint NOT NULL,                         -- how long the span is: 5; 60 after dl_fold_spans
  at timestamptz NOT NULL,                           -- its begin
  figure text NOT NULL,                              -- succeeded, failed, canceled: seconds of the runs that ended so;
                                                     -- waiting, cpu: seconds; memory: MB
  count bigint NOT NULL,
  total float8 NOT NULL,                             -- of the values
  largest float8 NOT NULL,
  slots smallint[] NOT NULL,                         -- slot n: values up to 0.001 * 1.1 ^ n, above those of slot n - 1
  counts int[] NOT NULL,                             -- how many values each of these slots has
  PRIMARY KEY (task, minutes, at, queue, figure),
  CONSTRAINT dl_spans_chk CHECK (
    count BETWEEN 0 AND 1e15 AND total BETWEEN 0 AND 1e300 AND largest >= 0 AND largest < 'Infinity'
    AND cardinality(slots) = cardinality(counts) AND coalesce(array_ndims(slots), 1) = 1 AND coalesce(array_ndims(counts), 1) = 1
    AND array_position(slots, NULL) IS NULL AND array_position(counts, NULL) IS NULL AND 0 <= ALL (slots) AND 400 >= ALL (slots)
    AND 0 <= ALL (counts) AND 2000000000 >= ALL (counts))
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
CREATE INDEX ix_dl_spans_queue ON dl_spans (queue, minutes, at);
-- For lists of all tasks, and for what has become old.
CREATE INDEX ix_dl_spans_at ON dl_spans (minutes, at);

-- The reaper's counts of each queue: a page counts the first thousand jobs itself and takes the rest from here.
CREATE TABLE dl_lengths (
  queue text PRIMARY KEY,
  length bigint NOT NULL,
  scheduled bigint NOT NULL,
  retries bigint NOT NULL,
  dead bigint NOT NULL,
  lag_sec float8 NOT NULL,
  counted_at timestamptz NOT NULL DEFAULT now(),
  keys bigint,                                      -- with queued jobs; null: not ordered, or not counted
  CONSTRAINT dl_lengths_chk CHECK (
    length BETWEEN 0 AND 1e15 AND scheduled BETWEEN 0 AND 1e15 AND retries BETWEEN 0 AND 1e15
    AND dead BETWEEN 0 AND 1e15 AND lag_sec BETWEEN 0 AND 1e9 AND keys BETWEEN 0 AND 1e15)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);

-- The notes of people about an error group.
CREATE TABLE dl_error_notes (
  task text NOT NULL,
  error_group text NOT NULL,
  note text NOT NULL,
  by text NOT NULL,
  at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (task, error_group)
);

-- The output of runs. The reaper makes a partition for each day, dl_job_logs_20261124 and so on, and drops the old ones
-- (dl_log_days); the default one takes what has no day of its own, so that no insert fails.
CREATE TABLE dl_job_logs (
  job_id uuid NOT NULL,
  claim int NOT NULL,                                -- dl_jobs.claims of the run: an attempt that did not count comes again
  attempt int NOT NULL,
  line int NOT NULL,                                 -- from 1 in each run; a gap is what was left out
  at timestamptz NOT NULL,
  level text NOT NULL,
  source text NOT NULL,                              -- log, stdout or stderr
  text text NOT NULL                                 -- masked, without controls
) PARTITION BY RANGE (at);
CREATE INDEX ix_dl_job_logs_line ON dl_job_logs (job_id, claim, line);
CREATE TABLE dl_job_logs_rest PARTITION OF dl_job_logs DEFAULT;
ALTER TABLE dl_job_logs REPLICA IDENTITY FULL;         -- each partition needs its own
ALTER TABLE dl_job_logs_rest REPLICA IDENTITY FULL;

-- Receivers of alerts, and what they were told.
CREATE TABLE dl_webhooks (
  name text PRIMARY KEY,
  url text NOT NULL,                                 -- or ${DL_WEBHOOK_...}, the variable that holds it
  shape text NOT NULL,                               -- of the messages
  signed_by text,                                    -- the name of the variable with the key; null: not signed
  kinds text[],                                      -- of alerts; null: all
  queues text[],                                     -- whose alerts; null: all
  lag_sec float8 NOT NULL,                           -- the queue latency from which on a queue is late
  added_at timestamptz NOT NULL DEFAULT now(),
  added_by text,
  paused_at timestamptz,                             -- since when it is told nothing
  paused_by text,
  CONSTRAINT dl_webhooks_chk_shape CHECK (shape IN ('json', 'alertmanager', 'slack')),
  CONSTRAINT dl_webhooks_chk_positive CHECK (lag_sec > 0),
  CONSTRAINT dl_webhooks_chk_bounds CHECK (lag_sec <= 1e9 AND octet_length(name) <= 64)
);
-- Conditions about whose begin a webhook has got a message, and not yet about their end.
CREATE TABLE dl_alerts (
  webhook text NOT NULL REFERENCES dl_webhooks ON DELETE CASCADE,
  kind text NOT NULL,                                -- lag, paused
  queue text NOT NULL,
  since timestamptz NOT NULL,
  told_at timestamptz NOT NULL DEFAULT now(),        -- the latest message of it
  PRIMARY KEY (webhook, kind, queue)
);
-- The messages to webhooks, each sent by a job: only these jobs may have the task alert.webhook.
CREATE TABLE dl_messages (
  job_id uuid PRIMARY KEY,                           -- the job that sends it
  webhook text NOT NULL,
  message jsonb NOT NULL                             -- masked
);
-- One row: the last event of the journal that webhooks were told of.
CREATE TABLE dl_alerted (last_event bigint NOT NULL);
INSERT INTO dl_alerted VALUES (0);
ALTER TABLE dl_alerted REPLICA IDENTITY FULL;

-- Which migrations were applied, and the oldest code that may use the result: number 1 is the schema of 0.2.0, with which
-- versions begin, and number 0 is functions/.
CREATE TABLE dl_migrations (
  number int PRIMARY KEY,
  name text NOT NULL,
  checksum text NOT NULL,
  oldest_code int NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
);

-- name: triggers
-- The conditions keep the triggers from firing where they would have nothing to do. Our inserts do themselves what the
-- triggers of inserts do, and say so by `journaled`: 2. Other services say 0, a copy of a row that ran more. A worker's own starts and ends change claimed_by; its functions do what dl_jobs_step does for all other steps.
CREATE TRIGGER dl_jobs_place_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.journaled <> 2) EXECUTE FUNCTION dl_jobs_place();
CREATE TRIGGER dl_jobs_score_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.journaled <> 2 OR NEW.deadline IS NOT NULL OR NEW.turn_at IS NOT NULL)
  EXECUTE FUNCTION dl_jobs_score();
-- By the row: a condition cannot be asked of a statement. A transaction notifies of a queue once, whatever it inserts.
CREATE TRIGGER dl_jobs_notify_ins AFTER INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.journaled <> 2) EXECUTE FUNCTION notify_job_ready();
CREATE CONSTRAINT TRIGGER dl_jobs_notify_upd AFTER UPDATE OF status, available_at, queue, lock_key ON dl_jobs
  DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.journaled = OLD.journaled OR NEW.claimed_by IS NOT DISTINCT FROM OLD.claimed_by)
  EXECUTE FUNCTION dl_jobs_step();
CREATE TRIGGER dl_jobs_forget AFTER DELETE ON dl_jobs
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION dl_jobs_gone();
CREATE CONSTRAINT TRIGGER dl_jobs_journal_ins AFTER INSERT ON dl_jobs DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.journaled = 0) EXECUTE FUNCTION dl_jobs_journal();
-- The farm alone adds jobs that send its messages.
CREATE TRIGGER dl_jobs_internal_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.task = 'alert.webhook') EXECUTE FUNCTION dl_jobs_internal();
-- At the commit that lets a job wait for another one: that one may have ended meanwhile.
CREATE CONSTRAINT TRIGGER dl_parents_link AFTER INSERT ON dl_parents DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NOT NEW.is_over) EXECUTE FUNCTION dl_linked();
