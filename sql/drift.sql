-- The present state of triggers, indexes and functions; dataloader/queue/drift.py compares it to the shipped texts.

-- name: triggers
-- Each trigger of the queue's tables: whether it fires in ordinary sessions, and the function of this schema that it calls.
SELECT tgname AS name, tgenabled IN ('O', 'A') AS works, proname AS calls
  FROM pg_trigger t
  LEFT JOIN pg_proc p ON p.oid = tgfoid AND pronamespace = quote_ident(current_schema())::regnamespace
  JOIN pg_class c ON c.oid = tgrelid
 WHERE relnamespace = quote_ident(current_schema())::regnamespace AND relname LIKE 'dl\_%%' AND NOT tgisinternal;

-- name: indexes
-- The contract's UNIQUE stands for ours where it is.
SELECT CASE conname WHEN 'dl_jobs_idempotency_key_key' THEN 'ix_dl_jobs_idempotency' ELSE relname END AS name,
       indisvalid AND indisready AS works
  FROM pg_index JOIN pg_class c ON c.oid = indexrelid LEFT JOIN pg_constraint ON conindid = indexrelid AND contype = 'u'
 WHERE relnamespace = quote_ident(current_schema())::regnamespace;

-- name: functions
-- The text of each function as it was given, and the names of the parameters that it sets.
SELECT proname AS name, prosrc AS body, lanname AS language, prosecdef AS by_owner,
       ARRAY(SELECT split_part(setting, '=', 1) FROM unnest(proconfig) setting) AS settings
  FROM pg_proc p JOIN pg_language l ON l.oid = prolang WHERE pronamespace = quote_ident(current_schema())::regnamespace;

-- name: bound
-- A row while the functions name the schema in which they are; one stands for all.
SELECT FROM pg_proc
 WHERE proname = 'dl_log_days' AND pronamespace = quote_ident(current_schema())::regnamespace
   AND strpos(prosrc, 'home text := ' || quote_literal(current_schema())) > 0;

-- name: hidden
-- A table with row security has no row for a role without a policy that lets the role read, and no statement fails.
SELECT relname AS name FROM pg_class c
 WHERE oid = ANY (SELECT to_regclass(name) FROM unnest(%(tables)s::text[] || 'dl_migrations'::text) name)
   AND relrowsecurity AND row_security_active(oid)
   AND NOT EXISTS (
     SELECT FROM pg_policy WHERE polrelid = c.oid AND polpermissive AND polcmd IN ('r', '*')
        AND (polroles = '{0}' OR EXISTS (SELECT FROM unnest(polroles) role WHERE pg_has_role(role, 'USAGE'))))
 ORDER BY relname;
