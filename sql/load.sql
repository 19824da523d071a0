-- A load's statements in its target database, for dataloader/pipelines/csv_table.py. Values are literals in them: beside
-- parameters, a % in a column's name would be a placeholder.

-- name: begin
-- The load's session reads a text in one way, whatever its role has set: 03/04/2026 is no date there.
SELECT current_schema(), set_config('DateStyle', 'ISO, YMD', true), set_config('IntervalStyle', 'postgres', true);

-- name: kind
SELECT (SELECT relkind FROM pg_class WHERE oid = to_regclass({table_name}));

-- name: columns
SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
 WHERE attrelid = to_regclass({table_name}) AND attnum > 0 AND NOT attisdropped;

-- name: base_types
-- The columns with their types; a domain's is the one behind it, also where that is behind another domain.
WITH RECURSIVE found (name, type, modifier) AS (
  SELECT attname, atttypid, atttypmod FROM pg_attribute
   WHERE attrelid = to_regclass({table_name}) AND attnum > 0 AND NOT attisdropped
  UNION ALL
  SELECT name, typbasetype, typtypmod FROM found JOIN pg_type ON pg_type.oid = type WHERE typtype = 'd')
SELECT name, format_type(type, modifier) FROM found JOIN pg_type ON pg_type.oid = type WHERE typtype <> 'd';

-- name: unique_keys
-- The indexes that ON CONFLICT can use: unique, not deferred, of plain columns, over all rows.
SELECT array_agg(a.attname::text)
  FROM pg_index i
  JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
 WHERE i.indrelid = {table_name}::regclass AND i.indisunique AND i.indimmediate AND i.indisvalid
   AND i.indpred IS NULL AND i.indexprs IS NULL
 GROUP BY i.indexrelid;

-- name: lock
-- Locks of two integers are distinct from the locks of one bigint that workers hold for their jobs' keys.
SELECT pg_advisory_xact_lock(hashtext('load.csv'), hashtext({table_name}));

-- name: stage
-- The target's types, checks and NOT NULL make COPY refuse every record that the target would, and name its line. An
-- unlogged table needs no log, for its rows are written once more into the target. A crash of the server empties it. The
-- staging table of a new target becomes the target, so it is logged. Rows are in the order of the source, by ctid: one
-- session after another fills the table, and no vacuum frees a place in it.
CREATE {lifetime} TABLE {staging} ({like}) WITH (autovacuum_enabled = false);

-- name: stage_rejects
CREATE {lifetime} TABLE {staged_rejects} (file text, line bigint, row text, reason text);

-- name: left_over
-- The staging tables of earlier runs of this job, and of jobs that have ended without their last transaction: canceled,
-- lost, failed.
SELECT tablename FROM pg_tables
 WHERE schemaname = current_schema() AND tablename ~ '^dl_load_csv_[0-9a-f]{{32}}(_rejects)?$' AND NOT EXISTS (
   SELECT FROM dl_fence WHERE job_id = substr(tablename, 13, 32)::uuid AND job_id <> {job_id}
      AND raised_at > now() - interval '7 days');

-- name: unfit
-- Whether a staged value differs from what its cast to another type and back leaves of it.
SELECT EXISTS (SELECT FROM {staging} WHERE {cast} IS DISTINCT FROM {value});

-- name: is_future
-- Whether the staging table can become the target.
SELECT relpersistence = 'p' FROM pg_class WHERE oid = {staging_name}::regclass;

-- name: copy
-- From a header line COPY learns the line end before the first record; without one it counts CR in quotes.
COPY {staging} ({columns}) FROM STDIN (FORMAT csv, HEADER, DELIMITER {delimiter}, ENCODING 'UTF8');

-- name: copy_binary
COPY {staging} ({columns}) FROM STDIN (FORMAT binary);

-- name: takes_copy
-- COPY passes rules, and takes values for a column that is GENERATED ALWAYS AS IDENTITY; a trigger may count statements.
-- A key that may be NULL has to be refused. Rows that are there may have keys of the source.
SELECT {is_free} AND NOT relhasrules AND NOT relrowsecurity AND has_table_privilege(oid, 'UPDATE')
   AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal)
   AND NOT EXISTS (
     SELECT FROM pg_attribute
      WHERE attrelid = c.oid AND attnum > 0
        AND (attidentity = 'a' OR attname = ANY (ARRAY[{key_names}]::text[]) AND NOT attnotnull))
  FROM pg_class AS c WHERE oid = {table_name}::regclass;

-- name: count_staged
SELECT count(*), count(DISTINCT ({key})) FROM {staging};

-- name: last
-- The last row of each key; where each key is there once, the staging table itself needs no sort.
(SELECT DISTINCT ON ({key}) * FROM {staging} ORDER BY {key}, ctid DESC)

-- name: differs
-- *<> compares the stored bytes: it takes any type (json has no =), and finds 1.0 and 1.00 different.
ROW({old_values})::record *<> ROW({new_values})::record

-- name: merge
-- The join comes first: ON CONFLICT alone locks equal rows too, and a lock is written to the log. The order of the key
-- fills the table and its index in order.
INSERT INTO {table} AS old ({columns})
SELECT {new_columns} FROM {last} AS new LEFT JOIN {table} AS old ON {match}
 WHERE NOT ({match}) IS TRUE OR {differs}
 ORDER BY {new_key}
ON CONFLICT ({key}) DO UPDATE SET {changes} WHERE {conflicts};

-- name: append
INSERT INTO {table} ({columns}) SELECT {columns} FROM {staging} ORDER BY ctid;

-- name: missing
-- The condition of the rows of `scope` that the source lacks.
{scope} AND NOT EXISTS (SELECT FROM {staging} AS new WHERE {match})

-- name: close
UPDATE {table} AS old SET valid_to = {now}, is_current = false
  FROM {last} AS new
 WHERE old.is_current AND {match} AND {differs};

-- name: open
INSERT INTO {table} ({columns}, valid_from, is_current)
SELECT {new_columns}, {now}, true
  FROM {last} AS new
 WHERE NOT EXISTS (SELECT FROM {table} AS old WHERE old.is_current AND {match});

-- name: written
-- The rows that this transaction inserted and updated: RETURNING cannot tell them apart in a partitioned table.
SELECT sum(pg_stat_get_xact_tuples_inserted(part))::bigint, sum(pg_stat_get_xact_tuples_updated(part))::bigint
  FROM (SELECT {table_name}::regclass UNION SELECT relid FROM pg_partition_tree({table_name}::regclass)) AS parts (part);

-- name: drop_earlier
-- In a staging table that has become the target.
DELETE FROM {table} AS old
 USING (SELECT {key}, max(ctid) AS last FROM {table} GROUP BY {key} HAVING count(*) > 1) AS new
 WHERE {match} AND old.ctid < new.last;

-- name: create_rejects
CREATE TABLE {rejects} (file text, line bigint, "row" text, reason text, job_id uuid, at timestamptz DEFAULT now());

-- name: rights_to_rejects
-- The roles of the target get the same rights to the table of its rejects; the change of its owner comes last. Where the
-- load's role may not give the table away, the owner has all rights to it.
SELECT 'GRANT ' || privilege_type || ' ON ' || {rejects_name} || ' TO '
       || CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END
  FROM pg_class, aclexplode(relacl) WHERE oid = {table_name}::regclass AND grantee <> relowner
UNION ALL
SELECT CASE WHEN has_schema_privilege(relowner, relnamespace, 'CREATE')
                 AND pg_has_role(relowner, CASE WHEN current_setting('server_version_num') < '16' THEN 'MEMBER' ELSE 'SET' END)
            THEN 'ALTER TABLE ' || {rejects_name} || ' OWNER TO ' ELSE 'GRANT ALL ON ' || {rejects_name} || ' TO ' END
       || quote_ident(pg_get_userbyid(relowner))
  FROM pg_class WHERE oid = {table_name}::regclass AND relowner <> current_user::regrole;

-- name: keep_rejects
-- A second run of a job that has committed replaces what the first one rejected.
WITH earlier AS (DELETE FROM {rejects} WHERE job_id = {job_id})
INSERT INTO {rejects} (file, line, "row", reason, job_id)
SELECT file, line, "row", reason, {job_id} FROM {staged_rejects} ORDER BY ctid;
