-- The questions of `dataloader check`: they change no row, and dataloader/check decides.

-- name: schema_rights
-- May this role use and create in the schema, or make it? Who else may create there, and is this role a superuser? Does it
-- see its own sessions, which a login that becomes another role does not?
SELECT n.oid IS NOT NULL AS found,
       coalesce(has_schema_privilege(n.oid, 'USAGE'), false) AS may_use,
       CASE WHEN n.oid IS NULL THEN has_database_privilege(current_database(), 'CREATE')
            ELSE has_schema_privilege(n.oid, 'CREATE') END AS may_create,
       coalesce(has_schema_privilege('public', n.oid, 'CREATE'), false) AS open_to_all,
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS is_superuser,
       current_user AS role, (SELECT backend_start IS NOT NULL FROM pg_stat_get_activity(pg_backend_pid())) AS sees_itself
FROM (SELECT) AS one LEFT JOIN pg_namespace n ON n.nspname = %(schema)s;

-- name: table_rights
-- Per table and sequence of ours: whether this role owns it, and what it may not do that the processes do.
SELECT c.relname AS name,
       pg_has_role(c.relowner, 'USAGE') AS owned,
       ARRAY(SELECT p FROM unnest(CASE WHEN c.relname = 'dl_migrations' THEN ARRAY['SELECT']
                                       ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END) p
             WHERE c.relkind <> 'S' AND NOT has_table_privilege(c.oid, p)
             UNION ALL
             SELECT 'USAGE' WHERE c.relkind = 'S' AND NOT has_sequence_privilege(c.oid, 'USAGE')) AS lacking
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname LIKE 'dl\_%%' AND c.relkind IN ('r', 'p', 'S') AND NOT c.relispartition
ORDER BY c.relname;

-- name: function_rights
-- The queue's functions that this role may not call, and those that lend everybody the owner's rights.
SELECT p.proname AS name, bool_or(p.prorettype <> 'trigger'::regtype AND NOT has_function_privilege(p.oid, 'EXECUTE')) AS lacking,
       bool_or(p.prosecdef AND has_function_privilege('public', p.oid, 'EXECUTE')) AS open_to_all
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = 'dl_jobs'
WHERE n.nspname = %(schema)s AND p.proname LIKE 'dl\_%%' AND p.proowner = c.relowner
GROUP BY p.proname ORDER BY 1;

-- name: strangers
-- Roles of workers whose sessions dl_end_session could neither recognize nor end for this role.
SELECT DISTINCT r.rolname
FROM pg_stat_activity a JOIN pg_roles r ON r.oid = a.usesysid
WHERE a.datname = current_database() AND a.application_name LIKE 'dl-worker:%%'
  AND NOT pg_has_role(a.usesysid, 'USAGE')
  AND (r.rolsuper OR NOT (pg_has_role('pg_signal_backend', 'USAGE') AND pg_has_role('pg_read_all_stats', 'USAGE')))
ORDER BY r.rolname;

-- name: sessions
-- The limits on sessions (-1: none), how many there are, and `here` our own on this machine.
SELECT current_setting('max_connections')::int
         - current_setting('superuser_reserved_connections')::int
         - coalesce(current_setting('reserved_connections', true)::int, 0) AS server_limit,
       (SELECT sum(numbackends)::int FROM pg_stat_database WHERE datid <> 0) AS server_used,
       CASE WHEN r.rolsuper THEN -1 ELSE d.datconnlimit END AS database_limit,
       (SELECT numbackends FROM pg_stat_database s WHERE s.datid = d.oid) AS database_used,
       CASE WHEN r.rolsuper THEN -1 ELSE r.rolconnlimit END AS role_limit,
       (SELECT count(*)::int FROM pg_stat_activity WHERE usesysid = r.oid) AS role_used,
       (SELECT count(*)::int FROM pg_stat_activity a
        WHERE a.usesysid = r.oid AND a.datid = d.oid AND a.application_name LIKE 'dl-%%'
          AND a.client_addr IS NOT DISTINCT FROM inet_client_addr()) AS here
FROM pg_roles r, pg_database d
WHERE r.rolname = current_user AND d.datname = current_database();

-- name: fleet
-- The farms of other hosts that show workers: how many, and of how many kinds.
SELECT count(*)::int AS workers, count(DISTINCT coalesce(queues, ARRAY[queue]))::int AS kinds
  FROM dl_workers WHERE seen_at > now() - interval '30 s' AND host <> %(here)s GROUP BY farm;

-- name: fleet_sessions
-- The sessions of farms, and of other machines the reapers and API hosts. An address that is null is this machine's.
SELECT count(*)::int AS of_farms,
       count(*) FILTER (WHERE name = 'dl-reaper' AND is_elsewhere)::int AS reapers,
       count(DISTINCT client_addr) FILTER (WHERE name = 'dl-api' AND is_elsewhere)::int AS api_hosts
  FROM (SELECT split_part(application_name, ' ', 1) AS name, client_addr, client_addr IS DISTINCT FROM inet_client_addr() AS is_elsewhere
          FROM pg_stat_activity
         WHERE datname = current_database() AND application_name LIKE 'dl-%%') ours;

-- name: advisory_locks
-- How many advisory locks others hold: not our own processes that run on this machine already.
SELECT count(*)::int AS of_others FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
 WHERE l.locktype = 'advisory' AND l.granted
   AND NOT coalesce(a.usename = current_user AND a.datname = current_database() AND a.application_name LIKE 'dl-%%'
                    AND a.client_addr IS NOT DISTINCT FROM inet_client_addr(), false);

-- name: target
-- Whether pipelines find their schema, and whether they may make tables in it.
SELECT current_schema() IS NOT NULL AS found,
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false) AS may_create;
