-- The rights of each role. `migrate --roles` grants the first three; `spread` also follows the functions at each change, and
-- finds the roles by their rights. docs/roles.md has the outcome; a test compares.

-- name: farm
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON dl_jobs, dl_job_events TO {role};
GRANT SELECT ON dl_migrations TO {role};

-- name: producer
-- By column (queue/fields.py): a producer says what is to be done, the farm alone whether and where it runs.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT INSERT ({columns}) ON dl_jobs TO {role};

-- name: reader
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT ON dl_jobs, dl_job_events, dl_migrations TO {role};

-- name: tables
-- In the place of {tables}: all that a farm uses beside dl_jobs and dl_job_events.
dl_queues, dl_workers, dl_served, dl_tasks, dl_totals, dl_pace, dl_pace_long, dl_rolled, dl_lengths, dl_freed,
dl_results, dl_needs, dl_parents, dl_waiting, dl_schedules, dl_limits, dl_checkpoints, dl_webhooks, dl_alerts, dl_alerted,
dl_backfills, dl_partitions, dl_durations, dl_predictions, dl_error_notes, dl_job_logs, dl_spans, dl_cleanups, dl_messages;

-- name: spread
DO $rights$
DECLARE
  new_tables text := (  -- a migration comes before the last of them
    SELECT string_agg(name, ', ')
      FROM unnest('{{tables}}'::text[]) name
     WHERE to_regclass(name) IS NOT NULL);
  all_functions text;
  called text;        -- by a role; the others are triggers'
  harmless text;      -- they read or compute with their caller's rights
  of_producers text;  -- with the owner's rights
  role record;
BEGIN
  SELECT string_agg(oid::regprocedure::text, ', '),
         string_agg(oid::regprocedure::text, ', ') FILTER (WHERE prorettype <> 'trigger'::regtype),
         string_agg(oid::regprocedure::text, ', ') FILTER (WHERE proname IN ('dl_readable', 'dl_after', 'dl_matches', 'dl_last_run_sec', 'dl_counted', 'dl_limit_state', 'dl_error_group')),
         string_agg(oid::regprocedure::text, ', ')
           FILTER (WHERE proname IN ('dl_enqueue', 'dl_enqueue_one', 'dl_enqueue_many', 'dl_set_trace', 'dl_depend',
                              'dl_job_status'))
    INTO all_functions, called, harmless, of_producers
    FROM pg_proc
   WHERE pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
     AND (proname LIKE 'dl\_%' OR proname = 'notify_job_ready') AND pg_has_role(proowner, 'USAGE');
  EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', all_functions);
  IF harmless IS NOT NULL THEN  -- a migration comes before the functions
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO PUBLIC', harmless);
  END IF;

  -- A role that may read dl_migrations is a farm's; other services, which only know dl_jobs and dl_job_events, need no
  -- new tables.
  FOR role IN
    SELECT CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END AS name,
           bool_or(privilege_type = 'INSERT') AS adds,
           is_ours AND bool_or(privilege_type = 'SELECT' AND whole) AS reads,
           is_ours AND bool_or(privilege_type = 'UPDATE' AND whole) AS claims
      FROM (SELECT a.grantee, a.privilege_type, true AS whole FROM pg_class, aclexplode(relacl) a
             WHERE oid = 'dl_jobs'::regclass
            UNION ALL
            SELECT a.grantee, a.privilege_type, false FROM pg_attribute, aclexplode(attacl) a
             WHERE attrelid = 'dl_jobs'::regclass AND attname = 'queue') rights
     CROSS JOIN LATERAL (SELECT has_table_privilege(grantee, 'dl_migrations', 'SELECT') AS is_ours) ours
     WHERE grantee <> (SELECT relowner FROM pg_class WHERE oid = 'dl_jobs'::regclass)
     GROUP BY grantee, is_ours
  LOOP
    IF role.adds AND of_producers IS NOT NULL THEN
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', of_producers, role.name);
    END IF;
    IF role.reads THEN
      EXECUTE format('GRANT SELECT ON %s TO %s', new_tables, role.name);
    END IF;
    IF role.claims THEN
      EXECUTE format('GRANT INSERT, UPDATE, DELETE ON %s TO %s', new_tables, role.name);
      EXECUTE format('GRANT USAGE ON SEQUENCE %s TO %s', pg_get_serial_sequence('dl_job_events', 'event_id'), role.name);
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', called, role.name);
    END IF;
  END LOOP;
END
$rights$;
