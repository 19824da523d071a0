-- What the reaper has counted of each queue, for pages and metrics: they count a long queue's first thousand jobs and take
-- the rest from here. The new table for the roles that farms use, as in 0013.
-- oldest code: 1

CREATE TABLE dl_lengths (
  queue text PRIMARY KEY,
  length bigint NOT NULL,
  scheduled bigint NOT NULL,
  retries bigint NOT NULL,
  dead bigint NOT NULL,
  lag_sec float8 NOT NULL,
  counted_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_lengths IS 'what the reaper has counted of each queue that has jobs';

DO $$
DECLARE
  farm record;
BEGIN
  FOR farm IN
    SELECT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role,
           string_agg(DISTINCT a.privilege_type, ', ') AS rights
      FROM pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
     WHERE c.oid = 'dl_jobs'::regclass AND a.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
       AND has_table_privilege(a.grantee, 'dl_migrations', 'SELECT')
       AND a.grantee <> (SELECT relowner FROM pg_class WHERE oid = 'dl_lengths'::regclass)
     GROUP BY a.grantee
  LOOP
    EXECUTE format('GRANT %s ON dl_lengths TO %s', farm.rights, farm.role);
  END LOOP;
END
$$;
