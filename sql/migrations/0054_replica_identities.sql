-- A replica identity for each table without a primary key. Without one, PostgreSQL refuses UPDATE and DELETE of a table that
-- a publication FOR ALL TABLES holds. The whole row identifies: these rows are few, or are dropped with their partition.
-- oldest code: 1
-- functions: dl_log_days

DO $$
DECLARE
  name regclass;
BEGIN
  FOR name IN
    SELECT unnest('{dl_freed, dl_rolled, dl_alerted, dl_job_logs}'::regclass[])
    UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = 'dl_job_logs'::regclass
  LOOP
    EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', name);  -- a partition inherits none
  END LOOP;
END
$$;
