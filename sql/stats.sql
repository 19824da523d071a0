-- Reports for people; called by the functions of the same name in dataloader/queue/reports/stats.py. None changes a job.

-- name: queues
-- A row for each queue with queued, running or dead jobs, a setting or a live worker. The cost does not grow with the queue:
-- loose scans, each count ends at `most` and then takes what the reaper noted within ten minutes. Scans come from an index's
-- end, where the living jobs are. Served by ix_dl_jobs_claim, ix_dl_jobs_time, ix_dl_jobs_retried, ix_dl_jobs_dead,
-- ix_dl_jobs_running, ix_dl_jobs_order and ix_dl_predictions_open. With `most` 0 all is as it was noted, whenever that was.
WITH RECURSIVE
waiting (queue) AS (
  SELECT max(queue) FROM dl_jobs WHERE status = 'queued' AND %(most)s > 0
  UNION ALL
  SELECT (SELECT max(queue) FROM dl_jobs WHERE status = 'queued' AND queue < waiting.queue)
    FROM waiting WHERE queue IS NOT NULL),
dead (queue) AS (
  SELECT max(queue) FROM dl_jobs WHERE status IN ('failed', 'lost') AND %(most)s > 0
  UNION ALL
  SELECT (SELECT max(queue) FROM dl_jobs WHERE status IN ('failed', 'lost') AND queue < dead.queue)
    FROM dead WHERE queue IS NOT NULL),
running AS (SELECT queue, count(*) AS busy FROM dl_jobs WHERE status = 'running' GROUP BY queue),
serving AS (
  SELECT queue, count(*) AS workers, count(*) FILTER (WHERE state = 'stopped') AS stopped FROM dl_served
   WHERE seen_at > now() - interval '30 s' AND state <> 'dead' GROUP BY queue),
risks AS (
  SELECT queue, count(*) AS at_risk FROM dl_predictions
   WHERE ended_at IS NULL AND deadline IS NOT NULL AND (expected_at > deadline OR deadline < now()) GROUP BY queue),
noted AS (SELECT * FROM dl_lengths WHERE counted_at > now() - interval '10 min' OR %(most)s = 0),
known AS (
  SELECT queue FROM waiting UNION SELECT queue FROM dead UNION SELECT queue FROM running UNION SELECT queue FROM serving
  UNION SELECT queue FROM dl_queues WHERE paused_at IS NOT NULL OR max_length IS NOT NULL OR ordered
  UNION SELECT queue FROM noted WHERE %(most)s = 0)
SELECT queue, a.length, b.scheduled, c.retries, coalesce(busy, 0) AS busy, d.dead,
       -- At most 30 years, for clients compute with it: the times of another service's job may be infinite.
       CASE WHEN %(most)s = 0 THEN coalesce(noted.lag_sec, 0)
            ELSE least(1e9, greatest(0, extract(epoch FROM now() - (
              SELECT dl_readable(greatest(j.available_at, j.created_at)) FROM dl_jobs j
               WHERE j.queue = known.queue AND status = 'queued' AND blocked_on IS DISTINCT FROM 'time'
               ORDER BY j.queue, j.available_at LIMIT 1)), 0))::float8 END AS lag_sec,
       coalesce(workers, 0) AS workers, coalesce(stopped, 0) AS stopped, coalesce(at_risk, 0) AS at_risk, paused_at, paused_by,
       max_length, coalesce(ordered, false) AS ordered, coalesce(merge, false) AS merge,
       coalesce(merge_limit, 1000) AS merge_limit, batch, coalesce(on_dead, 'continue') AS on_dead, fair_by,
       CASE WHEN ordered THEN CASE WHEN %(most)s = 0 THEN noted.keys ELSE {keys_of} END END AS keys,
       noted.length AS noted_length, noted.scheduled AS noted_scheduled, noted.retries AS noted_retries,
       noted.dead AS noted_dead, noted.keys AS noted_keys, counted_at
  FROM known
  LEFT JOIN running USING (queue) LEFT JOIN serving USING (queue) LEFT JOIN risks USING (queue)
  LEFT JOIN dl_queues USING (queue) LEFT JOIN noted USING (queue)
  CROSS JOIN LATERAL (SELECT count(*) AS length FROM (
    SELECT FROM dl_jobs j WHERE j.queue = known.queue AND status = 'queued'
     ORDER BY j.queue DESC, available_at DESC LIMIT %(most)s) n) a
  CROSS JOIN LATERAL (SELECT count(*) AS scheduled FROM (
    SELECT FROM dl_jobs j WHERE j.queue = known.queue AND status = 'queued' AND blocked_on = 'time'
     ORDER BY j.queue DESC, available_at DESC, priority DESC, created_at DESC LIMIT %(most)s) n) b
  CROSS JOIN LATERAL (SELECT count(*) AS retries FROM (
    SELECT FROM dl_jobs j WHERE j.queue = known.queue AND status = 'queued' AND attempt > 0
     ORDER BY j.queue DESC, created_at DESC LIMIT %(most)s) n) c
  CROSS JOIN LATERAL (SELECT count(*) AS dead FROM (
    SELECT FROM dl_jobs j WHERE j.queue = known.queue AND status IN ('failed', 'lost')
     ORDER BY j.queue DESC, finished_at DESC LIMIT %(most)s) n) d
 WHERE queue IS NOT NULL;

-- name: keys_of
-- In the place of {keys_of}: the keys of an ordered queue's queued jobs, up to `most_keys`, by a loose scan of ix_dl_jobs_order.
(WITH RECURSIVE found (lock_key, nth) AS (
   (SELECT lock_key, 1 FROM dl_jobs j
     WHERE j.queue = known.queue AND status = 'queued' AND score IS NOT NULL ORDER BY j.queue, lock_key LIMIT 1)
   UNION ALL
   SELECT next.lock_key, nth + 1 FROM found CROSS JOIN LATERAL (
     SELECT lock_key FROM dl_jobs j
      WHERE j.queue = known.queue AND status = 'queued' AND score IS NOT NULL AND j.lock_key > found.lock_key
      ORDER BY j.queue, lock_key LIMIT 1) next
    WHERE nth < %(most_keys)s)
 SELECT count(*) FROM found);

-- name: live_workers
-- Of all queues together, for a worker may serve several.
SELECT count(*) AS workers, count(*) FILTER (WHERE state = 'stopped') AS stopped FROM dl_workers
 WHERE seen_at > now() - interval '30 s' AND state <> 'dead';

-- name: keys
-- For the reaper: the keys of each ordered queue.
SELECT queue, {keys_of} AS keys FROM dl_queues known WHERE ordered;

-- name: may_note
-- One reaper at a time, and not again after another reaper's fresh count.
SELECT pg_try_advisory_xact_lock(%(lock)s)
   AND NOT EXISTS (SELECT FROM dl_lengths WHERE counted_at > clock_timestamp() - make_interval(secs => %(since_sec)s));

-- name: note_lengths
WITH counted AS (
  SELECT * FROM json_to_recordset(%(queues)s) AS q (
    queue text, length bigint, scheduled bigint, retries bigint, dead bigint, lag_sec float8, keys bigint)),
gone AS (DELETE FROM dl_lengths WHERE queue NOT IN (SELECT queue FROM counted))
INSERT INTO dl_lengths AS n (queue, length, scheduled, retries, dead, lag_sec, keys)
SELECT queue, length, scheduled, retries, dead, lag_sec, keys FROM counted WHERE octet_length(queue) <= 512
ON CONFLICT (queue) DO UPDATE SET
   length = excluded.length, scheduled = excluded.scheduled, retries = excluded.retries, dead = excluded.dead,
   lag_sec = excluded.lag_sec, keys = excluded.keys, counted_at = now();

-- name: deliveries
-- The messages of each webhook that failed and were added after the last one that arrived, and the latest reason. Of each
-- webhook the `of_each` latest since it was added, among the farm's `most` latest: job_ids are ordered by time.
WITH latest AS MATERIALIZED (
  SELECT name, status, created_at, heartbeat_at, error FROM dl_webhooks w
   CROSS JOIN LATERAL (
     SELECT job_id FROM dl_messages WHERE webhook = w.name AND job_id > coalesce(
              (SELECT job_id FROM dl_messages ORDER BY job_id DESC OFFSET %(most)s LIMIT 1), '00000000-0000-0000-0000-000000000000')
      ORDER BY job_id DESC LIMIT %(of_each)s) m
   CROSS JOIN LATERAL (SELECT * FROM dl_jobs WHERE job_id = m.job_id AND created_at >= w.added_at OFFSET 0) j),  -- by the index
arrived AS (SELECT name, max(created_at) AS at FROM latest WHERE status = 'succeeded' GROUP BY name)
SELECT name, count(*) AS undelivered, left((array_agg(error ORDER BY heartbeat_at DESC NULLS LAST))[1], 300) AS last_error
  FROM latest LEFT JOIN arrived USING (name)
 WHERE error IS NOT NULL AND status NOT IN ('succeeded', 'canceled') AND created_at > coalesce(at, '-infinity')
 GROUP BY name;

-- name: wrong
-- Of the schedules and the backfills whose next jobs are not made, of the webhooks that do not receive their messages, and
-- of the tasks for which no host has the memory (among the first 1,000 jobs of a queue): the one that is oldest so, and how
-- many they are.
SELECT DISTINCT ON (kind) *, count(*) OVER (PARTITION BY kind) AS number FROM (
  SELECT 'schedule' AS kind, name, coalesce(left(error, 200), 'it is overdue') AS error, coalesce(error_at, next_due) AS since
    FROM dl_schedules
   WHERE (error IS NOT NULL OR next_due < now() - make_interval(secs => %(overdue_sec)s))
     AND paused_at IS NULL AND retired_at IS NULL
  UNION ALL
  SELECT 'backfill', name, coalesce(left(error, 200), 'it is overdue'), coalesce(error_at, next_at) FROM dl_backfills
   WHERE (error IS NOT NULL OR next_at < now() - make_interval(secs => %(overdue_sec)s))
     AND paused_at IS NULL AND canceled_at IS NULL
  UNION ALL
  SELECT 'webhook', name, CASE WHEN is_served THEN undelivered || ' undelivered'
                               ELSE 'no worker serves the queue ' || %(alerts_queue)s END, NULL
    FROM dl_webhooks LEFT JOIN ({deliveries}) d USING (name)
   CROSS JOIN (SELECT EXISTS (SELECT FROM dl_served WHERE queue = %(alerts_queue)s AND seen_at > now() - interval '30 s'
                                 AND state <> 'dead') AS is_served) serving
   WHERE paused_at IS NULL AND (undelivered > 0 OR NOT is_served)
  UNION ALL
  SELECT 'task', task,
         format('no host of the queue %%s has the memory that a run needs (%%s MB; DL_HOST_MEMORY lets runs use %%s MB)',
                queue, round(mb), round(room_mb)), since
    FROM (
      WITH needs AS (SELECT task, coalesce(t.memory_mb, dl_counted(n.memory_mb, NULL)) AS mb
                       FROM dl_tasks t FULL JOIN dl_needs n USING (task)),
      hosts AS (SELECT queue, max(host_memory_mb) AS room_mb FROM dl_served
                 WHERE seen_at > now() - interval '30 s' AND state <> 'dead'
                 GROUP BY queue HAVING count(host_memory_mb) = count(*))
      SELECT DISTINCT ON (task) task, queue, mb, room_mb, since
        FROM hosts CROSS JOIN LATERAL (  -- a queue's jobs are read once, and only where a task may be too large
          SELECT task, min(greatest(created_at, available_at)) AS since
            FROM (SELECT task, created_at, available_at FROM dl_jobs j
                   WHERE j.queue = hosts.queue AND status = 'queued' AND blocked_on IS NULL
                   ORDER BY j.queue, priority, coalesce(turn_at, created_at) LIMIT 1000) first
           WHERE room_mb < (SELECT max(mb) FROM needs) GROUP BY task) waits
        JOIN needs USING (task)
       WHERE mb > room_mb ORDER BY task, since) large) wrong
 ORDER BY kind, since, name;

-- name: beginning
-- Whether the farm has had a job.
SELECT EXISTS (SELECT FROM dl_totals) OR EXISTS (SELECT FROM dl_jobs) AS has_begun;

-- name: fitness
-- Whether this session could add and end a job now, without writing a row: the server's state, and the rights that the
-- role lacks. Whether a reaper works: by its session, whose name every role may see, and its last statement, if it may.
-- Whether a process of the role has found the disk full: its session's name tells (db.connect). The server assigns no id
-- that is 3,000,000 or less before the wraparound.
SELECT pg_is_in_recovery() AS in_recovery, current_setting('transaction_read_only') = 'on' AS read_only,
       ARRAY(SELECT privilege || ' on ' || name
               FROM unnest(%(tables)s::text[]) name, unnest('{SELECT, INSERT, UPDATE, DELETE}'::text[]) privilege
              WHERE NOT has_table_privilege(to_regclass(name), privilege)
             UNION ALL
             SELECT 'the table ' || name FROM unnest(%(tables)s::text[]) name WHERE to_regclass(name) IS NULL
             UNION ALL
             SELECT 'USAGE on ' || sequence::regclass FROM pg_get_serial_sequence('dl_job_events', 'event_id') sequence
              WHERE NOT has_sequence_privilege(sequence, 'USAGE, UPDATE')
             UNION ALL
             SELECT 'EXECUTE on ' || proname FROM pg_proc
              WHERE pronamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'dl_jobs'::regclass)
                AND proname LIKE 'dl\_%%' AND prorettype <> 'trigger'::regtype AND NOT has_function_privilege(oid, 'EXECUTE')
             ORDER BY 1) AS lacking,
       EXISTS (SELECT FROM pg_stat_activity
                WHERE datname = current_database() AND application_name LIKE 'dl-reaper%%'
                  AND coalesce(state_change > clock_timestamp() - %(reaper_sec)s * interval '1 s', true)) AS has_reaper,
       EXISTS (SELECT FROM pg_stat_activity
                WHERE datname = current_database() AND usename = current_user
                  AND to_timestamp(substring(application_name FROM ' full@(\d{1,11})$')::bigint)
                      > clock_timestamp() - %(full_sec)s * interval '1 s') AS disk_full,
       (SELECT 2144483647 - greatest(max(age(datfrozenxid)), max(mxid_age(datminmxid))) FROM pg_database) AS ids_left;

-- name: workers
-- The workers that the keepers of all hosts have shown within ten minutes, with the jobs that run there.
SELECT w.worker, w.farm, w.host, w.pid, w.queue, coalesce(w.queues, ARRAY[w.queue]) AS queues, w.state,
       w.memory_bytes, w.cpu_percent, w.jobs, w.started_at, w.seen_at, w.reported_at, w.reload_error,
       w.seen_at > now() - interval '30 s' AND w.state <> 'dead' AS is_live,
       j.job_id, j.task, j.lock_key, j.attempt, j.progress, p.ts AS job_started_at
  FROM dl_workers w
  LEFT JOIN dl_jobs j ON j.job_id = w.job_id AND j.status = 'running' AND j.claimed_by = w.worker
  LEFT JOIN LATERAL (SELECT ts FROM dl_job_events e WHERE e.job_id = j.job_id AND e.kind = 'picked'
                      ORDER BY event_id DESC LIMIT 1) p ON true
 WHERE w.seen_at > now() - interval '10 min'
 ORDER BY w.host, w.queue, w.worker;

-- name: used
-- The present use of a job's run; there is no row where no worker has shown it lately. Served by the primary key of dl_workers.
SELECT memory_bytes, cpu_percent, seen_at, CASE state WHEN 'stuck' THEN reported_at END AS stuck_since FROM dl_workers
 WHERE worker = %(worker)s AND job_id = %(job_id)s AND seen_at > now() - interval '30 s';

-- name: tasks
-- The needs of tasks, declared by pipelines and learned from runs; a declaration counts first. `replaces`: the task has
-- changed the process of more than one in ten of its runs among the newest 10,000 journal rows.
WITH ends AS MATERIALIZED (
  SELECT job_id, CASE jsonb_typeof(payload -> 'changed') WHEN 'array' THEN payload -> 'changed' END AS changed
    FROM (SELECT job_id, payload FROM dl_job_events ORDER BY event_id DESC LIMIT 10000) newest
   WHERE payload ? 'cpu_sec'),
replacing AS (
  SELECT task, jsonb_build_object('runs', count(*), 'replaced', count(changed),
                                  'changed', jsonb_agg(changed) FILTER (WHERE changed IS NOT NULL)) AS told
    FROM ends JOIN dl_jobs USING (job_id)
   WHERE EXISTS (SELECT FROM ends WHERE changed IS NOT NULL)
   GROUP BY task HAVING count(changed) > 1 AND count(changed) * 10 > count(*))
SELECT task, t.max_attempts, coalesce(t.memory_mb, dl_counted(n.memory_mb, NULL)) AS memory_mb,
       coalesce(t.cpus, dl_counted(NULL, n.cpus)) AS cpus, t.memory_mb AS declared_memory_mb, t.cpus AS declared_cpus,
       n.memory_mb AS learned_memory_mb, n.cpus AS learned_cpus, coalesce(n.runs, 0) AS runs, n.learned_at,
       r.told || jsonb_build_object('changed', (
         SELECT jsonb_agg(DISTINCT fact #>> '{}') FROM jsonb_path_query(r.told, '$.changed[*][*]') fact)) AS replaces
  FROM dl_tasks t FULL JOIN dl_needs n USING (task) FULL JOIN replacing r USING (task) ORDER BY task;

-- name: limits
-- Each limit, its running jobs and tokens, and how many wait, up to `most`. Served by ix_dl_jobs_limit_turn.
SELECT l.name, l.most, l.per_minute, CASE WHEN l.per_minute IS NOT NULL THEN l.burst END AS burst,
       s.running, s.tokens, s.room, l.changed_by, l.changed_at,
       (SELECT count(*) FROM (
          SELECT FROM dl_jobs WHERE status = 'queued' AND limits IS NOT NULL AND blocked_on = 'limit:' || l.name
           ORDER BY status, blocked_on LIMIT %(most)s) n) AS waiting
  FROM dl_limits l CROSS JOIN LATERAL dl_limit_state(ARRAY[l.name]) s
 WHERE %(wanted)s::text IS NULL OR l.name = %(wanted)s ORDER BY l.name;

-- name: learned
-- Of the tasks whose runs use much of a host.
SELECT task, coalesce(dl_counted(memory_mb, NULL), 0) AS memory_mb, coalesce(dl_counted(NULL, cpus), 0) AS cpus
  FROM dl_needs WHERE dl_counted(memory_mb, cpus) IS NOT NULL;

-- name: show_workers
-- A keeper shows its workers, and no others of this farm; rows of farms that are gone go after a day.
WITH shown AS (
  INSERT INTO dl_workers AS w (
         worker, farm, host, pid, queue, queues, state, job_id, memory_bytes, cpu_percent, jobs, started_at, reported_at,
         host_memory_mb, reload_error)
  SELECT worker, %(farm)s, %(host)s, pid, queue, queues, state, job_id, memory_bytes, cpu_percent, jobs, started_at,
         now() - make_interval(secs => silent_sec), %(host_memory_mb)s::real, %(reload_error)s::text
    FROM json_to_recordset(%(workers)s) AS s (worker text, pid int, queue text, queues text[], state text, job_id uuid,
         memory_bytes bigint, cpu_percent real, jobs bigint, started_at timestamptz, silent_sec float8)
  ON CONFLICT (worker) DO UPDATE SET
     farm = excluded.farm,  -- another, after the keeper was replaced
     state = excluded.state, job_id = excluded.job_id, memory_bytes = excluded.memory_bytes, queue = excluded.queue,
     queues = excluded.queues, cpu_percent = excluded.cpu_percent, jobs = excluded.jobs, seen_at = now(),
     reported_at = excluded.reported_at, host_memory_mb = excluded.host_memory_mb,
     reload_error = excluded.reload_error
  RETURNING worker)
DELETE FROM dl_workers
 WHERE farm = %(farm)s AND worker <> ALL (ARRAY(SELECT worker FROM json_to_recordset(%(workers)s) AS s (worker text)))
    OR seen_at < now() - interval '1 day';

-- name: postgres
-- The server for an operator. The oldest transaction is the one that holds back vacuum, or the oldest of all.
SELECT current_setting('server_version') AS version, current_database() AS database, pg_is_in_recovery() AS in_recovery,
       pg_database_size(current_database()) AS size_bytes,
       (SELECT sum(numbackends)::int FROM pg_stat_database) AS connections,
       current_setting('max_connections')::int AS max_connections,
       pg_total_relation_size('dl_jobs') + pg_total_relation_size('dl_job_events') AS queue_tables_bytes,
       t.dead_tuples, t.live_tuples, t.last_autovacuum, pg_notification_queue_usage() AS notify_usage,
       to_jsonb(o) AS oldest_transaction
  FROM (SELECT sum(n_dead_tup)::bigint AS dead_tuples, sum(n_live_tup)::bigint AS live_tuples,
               max(last_autovacuum) AS last_autovacuum
          FROM pg_stat_user_tables WHERE relid IN ('dl_jobs'::regclass, 'dl_job_events'::regclass)) t
  LEFT JOIN LATERAL (
    SELECT pid, usename AS "user", application_name AS application, state,
           extract(epoch FROM now() - xact_start)::float8 AS age_sec, left(query, 200) AS query,
           backend_xmin IS NOT NULL OR backend_xid IS NOT NULL AS holds_back_vacuum
      FROM pg_stat_activity
     WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'
       AND datname = current_database()
     ORDER BY (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) DESC, xact_start LIMIT 1) o ON true;

-- name: table_locks
-- The sessions that have locked dl_jobs: from a second on where a writer has to wait. `migrate` holds such a lock for a
-- moment, and autovacuum gives its own to a writer.
SELECT 'table' AS blocks, pid, usename, application_name, extract(epoch FROM statement_timestamp() - xact_start)::float8
  FROM pg_locks JOIN pg_stat_activity USING (pid)
 WHERE locktype = 'relation' AND relation = to_regclass('dl_jobs') AND database = datid AND datname = current_database() AND granted
   AND application_name <> 'dl-migrate' AND pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
   AND coalesce(xact_start < statement_timestamp() - interval '1 s', true);

-- name: blockers
-- Sessions in the farm's way. Their age (of the last change of their state) is seen of this role's own sessions, and with
-- pg_read_all_stats. Of the farm's advisory locks the numbers begin with "dl" in ASCII, or are "dlogs". A session with
-- several such locks is named once.
SELECT 'lock' AS blocks, pid, usename AS "user", application_name AS application,
       extract(epoch FROM statement_timestamp() - state_change)::float8 AS age_sec
  FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND a.datname = current_database() AND l.database = a.datid
   AND (classid::bigint >> 16 = 25708 OR classid = 100 AND objid = 1819240307)
   AND application_name <> 'dl-migrate'
   AND coalesce(state_change < clock_timestamp() - %(held_sec)s * interval '1 s', application_name NOT LIKE 'dl-%%')
UNION
{table_locks}
UNION ALL (
SELECT 'notifications', pid, usename, application_name, extract(epoch FROM clock_timestamp() - xact_start)::float8
  FROM pg_locks JOIN pg_stat_activity USING (pid)
 WHERE locktype = 'virtualxid' AND granted AND mode = 'ExclusiveLock' AND pid <> pg_backend_pid()
   AND pg_notification_queue_usage() > %(notify_full)s
 ORDER BY coalesce(xact_start, clock_timestamp() - interval '10 s') LIMIT 1);

-- name: vacuum
-- Dead and living rows of dl_jobs, and the oldest snapshot's holder. Others' age and query need pg_read_all_stats.
SELECT n_dead_tup AS jobs_dead_tuples, n_live_tup AS jobs_live_tuples, to_jsonb(h) AS held_by
  FROM pg_stat_user_tables
  LEFT JOIN LATERAL (
    SELECT kind, pid, "user", application, state, age_sec::float8 AS age_sec, xids, query FROM (
      SELECT CASE WHEN backend_type = 'walsender' THEN 'standby' ELSE 'session' END AS kind, pid, usename AS "user",
             application_name AS application, state, extract(epoch FROM now() - xact_start) AS age_sec,
             greatest(age(backend_xid), age(backend_xmin)) AS xids, left(query, 200) AS query
        FROM pg_stat_activity
       WHERE (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL) AND pid <> pg_backend_pid()
         AND (datname = current_database() OR backend_type = 'walsender')
         AND coalesce(backend_type, '') NOT IN ('autovacuum worker', 'parallel worker')
      UNION ALL
      SELECT 'prepared transaction', NULL, owner, gid, NULL, extract(epoch FROM now() - prepared), age(transaction), NULL
        FROM pg_prepared_xacts WHERE database = current_database()
      UNION ALL
      SELECT 'replication slot', active_pid, NULL, slot_name, NULL, NULL, age(xmin), NULL
        FROM pg_replication_slots WHERE xmin IS NOT NULL) holders
     ORDER BY xids DESC, age_sec DESC NULLS LAST LIMIT 1) h ON true
 WHERE relid = 'dl_jobs'::regclass;

-- name: throughput
-- Runs that ended in each step of a span, those without a run too. Served by the key of {pace}.
WITH ended AS (
  SELECT date_bin(make_interval(secs => %(step_sec)s), at, '2000-01-01 00:00+00') AS at,
         sum(processed)::bigint AS processed, sum(failed)::bigint AS failed
    FROM {pace}
   WHERE at >= date_bin(make_interval(secs => %(step_sec)s), now(), '2000-01-01 00:00+00')
               - make_interval(secs => %(span_sec)s - %(step_sec)s)
   GROUP BY 1)
SELECT step AS at, coalesce(processed, 0) AS processed, coalesce(failed, 0) AS failed
  FROM generate_series(date_bin(make_interval(secs => %(step_sec)s), now(), '2000-01-01 00:00+00')
                         - make_interval(secs => %(span_sec)s - %(step_sec)s), now(), make_interval(secs => %(step_sec)s)) step
  LEFT JOIN ended ON ended.at = step
 ORDER BY step;

-- name: totals
SELECT queue, task, kind, count, seconds, buckets FROM dl_totals ORDER BY queue, task, kind;

-- name: job
-- The fields that only a job's own page shows, besides `status` in queue.sql.
SELECT {fields.page} FROM dl_jobs j WHERE job_id = %(job_id)s;

-- name: checkpoint
-- When a job's checkpoint was saved, and how long it is; the checkpoint itself is the pipeline's own.
SELECT saved_at, octet_length(checkpoint::text) AS bytes FROM dl_checkpoints
 WHERE job_id = %(job_id)s AND checkpoint IS NOT NULL;

-- name: result
-- The result of a job: there is none before the job has succeeded, and none of a run that has not ended it.
SELECT j.job_id, j.status, r.result, CASE WHEN r.result IS NOT NULL THEN j.args END AS args
  FROM dl_jobs j LEFT JOIN dl_results r ON r.job_id = j.job_id AND r.claim = j.claims AND j.status = 'succeeded'
 WHERE j.job_id = %(job_id)s;

-- name: last_events
-- The newest of the farm's journal, the newest first.
SELECT event_id, job_id, queue, ts, kind, payload FROM dl_job_events
 WHERE %(queue)s::text IS NULL OR queue = %(queue)s ORDER BY event_id DESC LIMIT %(limit)s;

-- name: next_events
-- Null is any job, or any queue.
SELECT event_id, job_id, queue, ts, kind, payload FROM dl_job_events
 WHERE event_id > %(after)s AND (%(job_id)s::uuid IS NULL OR job_id = %(job_id)s)
   AND (%(queue)s::text IS NULL OR queue = %(queue)s) ORDER BY event_id LIMIT %(limit)s;

-- A page of jobs is merged of several sources (of_finished, of_running and others in search.sql), each read in the order of
-- change from an index; `of_dead` and `of_retries`, whose index begins with the queue, queue by queue. `of_near` and `of_args`
-- read and sort the few that a search names. A job changed when it ended, started first, or was added.

-- name: shown
-- The fields of a job `j` in a list, in the place of {shown}.
job_id, {fields.list}, left((j).error, 300) AS error;

-- name: matches
-- Whether the list has the job, in the place of {matches}; null is no filter. `status` is one of dl_status or of job.GROUPS.
{fields.filters}
AND CASE %(status)s::text WHEN 'ready' THEN (j).status = 'queued' AND (j).blocked_on IS NULL
                          WHEN 'scheduled' THEN (j).status = 'queued' AND (j).blocked_on IS NOT DISTINCT FROM 'time'
                          WHEN 'blocked' THEN (j).status = 'queued' AND (j).blocked_on <> 'time'
                          WHEN 'fresh' THEN (j).status = 'queued' AND (j).attempt = 0
                          WHEN 'retries' THEN (j).status = 'queued' AND (j).attempt > 0
                          WHEN 'dead' THEN (j).status IN ('failed', 'lost')
                          ELSE %(status)s::text IS NULL OR (j).status = %(status)s::text::dl_status END
AND (%(error_group)s::text IS NULL
     OR coalesce(coalesce((j).error_group, dl_error_group((j).error)) = %(error_group)s, false))
AND {found};

-- name: source
-- In the place of {source}: the jobs of a source that have changed in a time, before a place of the list.
SELECT j.*, {at} AS changed_at FROM dl_jobs j
 WHERE {of} AND {of_its} AND {at} >= %(since)s AND {at} <= %(until)s AND ({at}, job_id) < (%(until)s, %(before)s);

-- name: edge
-- When the last of the next `scan` jobs of a source changed: a page looks no further back. Index-only, so without the id.
SELECT {at} AS changed_at, NULL::uuid AS job_id FROM dl_jobs j
 WHERE {of} AND {of_its} AND {at} >= %(since)s AND {at} < %(until)s
 ORDER BY {first}{at} DESC OFFSET %(scan)s - 1 LIMIT 1;

-- name: listed
-- The first jobs of a source that match. A job that does not costs its place in the index and a comparison: 0.2 µs.
SELECT {shown}, changed_at FROM ({source}) j
 WHERE {matches} AND {far} ORDER BY {first}changed_at DESC, job_id DESC LIMIT %(limit)s;

-- name: of_each_queue
-- The statement for each queue of a source by itself, and the first jobs of all. The queues are found by a loose scan. Orders
-- are whole, and a queue is named by bounds and not by `=`, so that no other index can serve them.
WITH RECURSIVE its (name) AS (
  SELECT coalesce(%(queue)s::text, (SELECT queue FROM dl_jobs j WHERE {of} ORDER BY queue DESC, {at} DESC LIMIT 1))
  UNION ALL
  SELECT (SELECT queue FROM dl_jobs j WHERE {of} AND queue < its.name ORDER BY queue DESC, {at} DESC LIMIT 1)
    FROM its WHERE %(queue)s::text IS NULL AND its.name IS NOT NULL)
SELECT first.* FROM its CROSS JOIN LATERAL ({statement}) first ORDER BY changed_at DESC, job_id DESC LIMIT %(limit)s;

-- name: of_its
-- In the place of {of_its} in that statement.
(queue, {at}) BETWEEN (its.name, %(since)s) AND (its.name, %(until)s);

-- name: last_runs
-- How long the last runs of these jobs took.
SELECT job_id, dl_last_run_sec(j) AS run_sec FROM dl_jobs j WHERE job_id = ANY (%(job_ids)s);

-- name: in_time
-- How many jobs of its sources a list by key would have to look at, up to `scan`.
SELECT count(*) FROM (SELECT FROM ({sources}) every LIMIT %(scan)s) n;

-- name: by_key
-- A page of the jobs of some sources in the order of their keys: those that match are sorted.
SELECT {shown}, changed_at
  FROM ({sources}) j
 WHERE {matches} AND (lock_key, job_id) > (%(key)s, %(after_id)s)
 ORDER BY lock_key, job_id LIMIT %(limit)s;
