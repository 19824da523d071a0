-- The health of the server, a statement a section, for dataloader/queue/reports/postgres.py. Without pg_read_all_stats the
-- sessions of other roles are only counted.

-- name: server
SELECT current_setting('server_version') AS version, current_database() AS database, current_user AS role,
       pg_database_size(current_database()) AS size_bytes, pg_postmaster_start_time() AS started_at,
       pg_is_in_recovery() AS in_recovery, pg_has_role('pg_read_all_stats', 'USAGE') AS sees_all,
       (SELECT sum(numbackends)::int FROM pg_stat_database) AS connections,
       current_setting('max_connections')::int AS max_connections,
       current_setting('superuser_reserved_connections')::int
         + coalesce(current_setting('reserved_connections', true)::int, 0) AS reserved_connections,
       d.datconnlimit AS database_limit, (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS role_limit,
       pg_notification_queue_usage() AS notify_usage, age(d.datfrozenxid) AS xids,
       current_setting('autovacuum_freeze_max_age')::int AS most_xids, current_setting('autovacuum')::bool AS vacuums
  FROM pg_database d WHERE d.datname = current_database();

-- name: claim_plan
-- How a claim comes to its first job, with the rows that it reads in vain; the statement locks and changes nothing.
EXPLAIN (ANALYZE, BUFFERS, COSTS OFF)
SELECT job_id FROM (
  SELECT job_id, lock_key, NOT cancel_requested AND attempt < greatest(max_attempts, 1)
                             AND available_at <= clock_timestamp() AS is_startable
    FROM dl_jobs WHERE queue = %(queue)s AND status = 'queued' AND blocked_on IS NULL
   ORDER BY queue, priority, coalesce(turn_at, created_at) LIMIT 1000) near
 WHERE is_startable
   AND (SELECT true FROM dl_jobs WHERE status = 'running' AND hashtext(lock_key) = hashtext(near.lock_key)
           AND lease_expires_at > now() LIMIT 1) IS NULL LIMIT 1;

-- name: connections
-- Sessions of clients in all databases by role, program and state. The word behind our programs' first colon is a queue.
SELECT coalesce(usename, '') AS "user", split_part(application_name, ':', 1) AS application, datname AS database, state,
       count(*) AS sessions
  FROM pg_stat_activity
 WHERE backend_type = 'client backend' OR backend_type IS NULL AND usename IS NOT NULL AND datname IS NOT NULL
 GROUP BY 1, 2, 3, 4 ORDER BY sessions DESC, 1, 2, 3, 4 LIMIT %(most)s;

-- name: transactions
-- The longest open transactions of this database. Of other roles only with pg_read_all_stats.
SELECT pid, usename AS "user", application_name AS application, state, wait_event_type, wait_event,
       extract(epoch FROM now() - xact_start)::float8 AS age_sec, left(query, 200) AS query,
       backend_xmin IS NOT NULL OR backend_xid IS NOT NULL AS holds_back_vacuum
  FROM pg_stat_activity
 WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND datname = current_database() AND xact_start < now() - interval '1 s'
 ORDER BY xact_start LIMIT %(most)s;

-- name: tables
-- Our tables by size. `vacuum_at`: dead rows from which autovacuum comes. `bloat_bytes`: the bytes of pages beyond the rows'
-- average width; null: unknown.
SELECT c.relname AS name, pg_total_relation_size(c.oid) AS total_bytes, pg_relation_size(c.oid) AS heap_bytes,
       pg_indexes_size(c.oid) AS index_bytes, s.n_live_tup AS live_rows, s.n_dead_tup AS dead_rows,
       (coalesce(o.threshold, current_setting('autovacuum_vacuum_threshold')::float8)
         + coalesce(o.scale, current_setting('autovacuum_vacuum_scale_factor')::float8) * greatest(c.reltuples, 0))::bigint AS vacuum_at,
       greatest(s.last_vacuum, s.last_autovacuum) AS vacuumed_at, greatest(s.last_analyze, s.last_autoanalyze) AS analyzed_at,
       CASE WHEN c.reltuples > 0 AND w.width IS NOT NULL AND pg_relation_size(c.oid) > 1000000 THEN
         greatest(pg_relation_size(c.oid) - 8192 * ceil(c.reltuples * (28 + w.width) / (8168 * coalesce(o.fillfactor, 100) / 100)), 0)::bigint
       END AS bloat_bytes
  FROM pg_class c JOIN pg_stat_user_tables s ON s.relid = c.oid
  LEFT JOIN LATERAL (
    SELECT max(option_value) FILTER (WHERE option_name = 'fillfactor')::float8 AS fillfactor,
           max(option_value) FILTER (WHERE option_name = 'autovacuum_vacuum_threshold')::float8 AS threshold,
           max(option_value) FILTER (WHERE option_name = 'autovacuum_vacuum_scale_factor')::float8 AS scale
      FROM pg_options_to_table(c.reloptions)) o ON true
  LEFT JOIN LATERAL (
    SELECT sum((1 - null_frac) * avg_width) AS width FROM pg_stats
     WHERE schemaname = current_schema() AND tablename = c.relname) w ON true
 WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
   AND c.relname LIKE 'dl\_%%' AND c.relkind = 'r'
 ORDER BY total_bytes DESC;

-- name: wal
SELECT current_setting('wal_level') AS level, pg_size_bytes(current_setting('max_wal_size')) AS most_bytes,
       w.wal_bytes::float8 AS written_bytes, w.stats_reset AS written_since,
       current_setting('archive_mode') <> 'off' AS archives, a.last_archived_time, a.last_failed_time, a.failed_count
  FROM pg_stat_wal w, pg_stat_archiver a;

-- name: wal_files
-- Only for a role with pg_monitor.
SELECT count(*) AS files, coalesce(sum(size), 0)::bigint AS bytes FROM pg_ls_waldir();

-- name: standbys
-- Servers that follow this one. `lag_bytes`: what they have not replayed.
SELECT application_name AS application, state, sync_state, extract(epoch FROM replay_lag)::float8 AS lag_sec,
       pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, replay_lsn)::bigint AS lag_bytes
  FROM pg_stat_replication ORDER BY 1;

-- name: slots
-- `kept_bytes`: the WAL that the server keeps for it.
SELECT slot_name AS name, slot_type AS kind, active, wal_status,
       pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, restart_lsn)::bigint AS kept_bytes
  FROM pg_replication_slots ORDER BY 1;

-- name: follows
-- How far this server is behind its primary, where it is a standby.
SELECT extract(epoch FROM now() - pg_last_xact_replay_timestamp())::float8 AS behind_sec WHERE pg_is_in_recovery();
