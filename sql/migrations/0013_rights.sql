-- The new tables for the roles that farms use, where these are not the owner: without it a working farm would stop at its
-- next claim, for that looks into dl_queues. Whoever may read dl_migrations is a farm's role; other services, which only
-- know dl_jobs and dl_job_events, need nothing new and get nothing.
-- oldest code: 1

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
       AND a.grantee <> (SELECT relowner FROM pg_class WHERE oid = 'dl_queues'::regclass)
     GROUP BY a.grantee
  LOOP
    EXECUTE format('GRANT %s ON dl_queues, dl_workers, dl_totals, dl_pace, dl_rolled TO %s', farm.rights, farm.role);
  END LOOP;
END
$$;
