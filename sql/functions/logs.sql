-- The partitions of dl_job_logs. A farm owns no table, so with the owner's rights.

-- Make the partitions of today and the next two days, drop those that ended more than p_keep_days ago (null: none). A new
-- day takes its rows from the default partition. Returns how many changed; null: another session is at it. Waits half a
-- second for a lock: all writers stand behind.
CREATE OR REPLACE FUNCTION dl_log_days(p_keep_days float8) RETURNS int LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  home text := {schema_name};
  today date := (now() AT TIME ZONE 'UTC')::date;
  oldest timestamptz := now() - make_interval(secs => p_keep_days * 86400);
  first timestamptz;
  name text;
  changed int := 0;
BEGIN
  IF NOT pg_try_advisory_xact_lock(431315969907) THEN  -- "dlogs"; the keys have smaller numbers
    RETURN NULL;
  END IF;
  PERFORM set_config('lock_timeout', '500ms', true);
  FOR first IN SELECT (today + n)::timestamp AT TIME ZONE 'UTC' FROM generate_series(0, 2) n LOOP
    name := 'dl_job_logs_' || to_char(first AT TIME ZONE 'UTC', 'YYYYMMDD');
    CONTINUE WHEN to_regclass(format('%I.%I', home, name)) IS NOT NULL;
    LOCK TABLE {schema}.dl_job_logs_rest IN ACCESS EXCLUSIVE MODE;  -- or a row of this day could come behind the look
    EXECUTE format('CREATE TABLE %I.%I (LIKE %I.dl_job_logs INCLUDING CONSTRAINTS)', home, name, home);
    EXECUTE format('ALTER TABLE %I.%I REPLICA IDENTITY FULL', home, name);  -- a partition inherits none
    EXECUTE format('WITH moved AS (DELETE FROM %I.dl_job_logs_rest WHERE at >= $1 AND at < $2 RETURNING *)'
                   ' INSERT INTO %I.%I SELECT * FROM moved', home, home, name) USING first, first + interval '24 h';
    EXECUTE format('ALTER TABLE %I.dl_job_logs ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
                   home, home, name, first, first + interval '24 h');
    changed := changed + 1;
  END LOOP;
  FOR name IN
    SELECT c.oid::regclass::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
     WHERE i.inhparent = format('%I.dl_job_logs', home)::regclass AND c.relname ~ '_[0-9]{8}$'
       AND (to_date(right(c.relname, 8), 'YYYYMMDD') + 1)::timestamp AT TIME ZONE 'UTC' <= oldest
  LOOP
    EXECUTE 'DROP TABLE ' || name;
    changed := changed + 1;
  END LOOP;
  DELETE FROM {schema}.dl_job_logs_rest WHERE at < oldest;
  RETURN changed;
END
$$;
