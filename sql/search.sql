-- The conditions of searches, tallies and suggestions, for dataloader/queue/reports/{search,stats,tallies,bulk}.py.

-- name: found
-- In the place of {found}: whether the job `j` has what the search asks for; null is no condition. Of a job with texts that
-- answers mask only the other texts count: a secret could be found out letter by letter.
(%(id_from)s::uuid IS NULL OR (j).job_id BETWEEN %(id_from)s::uuid AND %(id_to)s::uuid)
AND (%(args)s::jsonb[] IS NULL OR (j).args @> ANY (%(args)s::jsonb[]))
AND (%(patterns)s::text[] IS NULL
     OR CASE WHEN NOT lower({texts} COLLATE "C") LIKE ALL (%(patterns)s::text[]) THEN false
             WHEN NOT (lower({texts} COLLATE "C") LIKE ANY ({secret_words})
                       OR {texts} ~ '[!-~]{20}' AND lower({texts} COLLATE "C") LIKE ANY ({token_words})) THEN true
             ELSE lower({safe} COLLATE "C") LIKE ALL (%(patterns)s::text[]) END)
AND (%(like_id)s::text[] IS NULL
     OR CASE WHEN lower(E'\x01' || (j).job_id || E'\n' || {texts} COLLATE "C") LIKE ANY (%(like_id)s::text[])
             THEN lower(E'\x01' || (j).job_id || E'\n' || {safe} COLLATE "C") LIKE ANY (%(like_id)s::text[]) ELSE false END);

-- name: texts
-- In the place of {texts}: the texts of which words are parts.
concat_ws(E'\n', (j).task, (j).queue, (j).lock_key);

-- name: safe
-- In the place of {safe}: task, queue and key, without those that masking.py may change.
concat_ws(E'\n', CASE WHEN (j).task !~* {secret} THEN (j).task END, CASE WHEN (j).queue !~* {secret} THEN (j).queue END,
          CASE WHEN (j).lock_key !~* {secret} THEN (j).lock_key END);

-- name: secret
-- In the place of {secret}: what masking.py may change in a text. Spaces and letters beyond ASCII depend on a locale, so
-- they count as either.
'(pass|pwd|secret|token|credential|cookie|signature|authorization|bearer|jwt|sess(ion)?[-_]?id|connect\.sid|(aes|api|app|application|access|account|auth|client|db|database|[de][en]cryption|fernet|functions|hmac|license|mac|master|private|priv|service|shared|signing|ssh|storage|subscription)[-_]?key|(access|api|secret)\.key|[Пп][Аа][Рр][Оо][Лл]|auth\.user\.info|(?<![a-z])(sig|otp|pin|sas)(?![a-z])|\\[nrt](sig|otp|pin|sas))[\w-]*\W*([=:>''"[:space:]]|[^\u0020-\u007f]|%%3[ad])|://[^\s/]*@|://[^\s:/@]*:(\S*@|(?!\d{1,5}([/?#,;:)\s]|$))\S+$)|(^|[^!-~])(-u|--(proxy-)?user)[ =]*[^\s:]*:|auth\s*=|auth\\*["'']|private key|identified\s+by|basic\s+[a-z0-9+/]{8}|:thin:|@//|_pass:|(mysql|mariadb|7z|login|mongo|cqlsh|sqlcmd|bcp|ipmitool|zip).*[^!-~]-p|redis-cli.*[^!-~]-a|ldap.*[^!-~]-w|(sqlplus|sqlldr|impdp|expdp)[^!-~].*/|masterauth|auth[^!-~].*\d|kty|private-lines|from-literal|[?&](key|code|appid)=[a-z0-9]{20}|(setuser|user)[^!-~].*>|curl.*[^!-~]-(b|e|-cert)|https?[^!-~].*-a[^!-~]|_connect\(|new[^!-~]+(pdo|mysqli)|</name>|key-[a-f0-9]{32}|\w{3}\dq~[\w~.-]{31}|:(\*|\d?[56]43[23]):[^:]+:[^:]+:|pat[a-z0-9]{14}\.[a-f0-9]{9}|[a-f0-9]{32}-us\d|account\.key\.|{tokens}';

-- name: secret_words
-- In the place of {secret_words}: one of these is in each text that {secret} finds, or one of {token_words} in a word of 20
-- characters. For most texts the cheaper question.
'{%%pass%%,%%pwd%%,%%secret%%,%%token%%,%%auth%%,%%cookie%%,%%credential%%,%%signature%%,%%bearer%%,%%jwt%%,%%sess%%,%%key%%,%%sig%%,%%otp%%,%%pin%%,%%sas%%,%%-u%%,%%://%%,%%identified%%,%%basic%%,%%:thin:%%,%%@//%%,%%mysql%%,%%mariadb%%,%%7z%%,%%login%%,%%mongo%%,%%cqlsh%%,%%curl%%,%%http%%-a%%,%%user%%>%%,%%from-literal%%,%%connect(%%,%%new%%pdo(%%,%%kty%%,%%code=%%,%%appid=%%,%%connect.sid%%,%%private-lines%%,%%sqlcmd%%,%%bcp%%,%%ipmitool%%,%%zip%%,%%redis-cli%%,%%ldap%%,%%sqlplus%%,%%sqlldr%%,%%impdp%%,%%expdp%%,%%арол%%,%%АРОЛ%%,%%q~%%,%%43_:%%,%%*:*:%%,%%________________________________-us%%,%%pat______________.%%}'::text[];

-- name: kind
-- In the place of {kind}: what the job `j` counts as; one of job.TALLIED.
CASE (j).status::text WHEN 'queued' THEN CASE WHEN (j).blocked_on IS NULL THEN 'ready'
                                              WHEN (j).blocked_on = 'time' THEN 'scheduled' ELSE 'blocked' END
                      ELSE (j).status::text END;

-- name: changed_at
-- In the place of {changed_at}: when the job `j` changed last, as lists have it.
coalesce((j).finished_at, CASE (j).status WHEN 'running' THEN (j).started_at END, (j).created_at);

-- name: far
-- Stands in the place of {far} except in `of_near` itself, and leaves out the jobs that an id in the search may mean:
-- `of_near` reads these jobs by their key.
(%(near_from)s::uuid IS NULL OR (j).job_id NOT BETWEEN %(near_from)s::uuid AND %(near_to)s::uuid);

-- name: tallied
-- How many jobs of a list count as what, among the first `scan` jobs of {source}; looked_at tells whether there may be more.
SELECT kind, count(*) FILTER (WHERE fits) AS count, count(*) AS looked_at FROM (
  SELECT {kind} AS kind, {matches} AND {changed_at} BETWEEN %(since)s AND %(until)s AS fits FROM dl_jobs j
   WHERE {far} AND {of_queue} AND {source} LIMIT %(scan)s) near
 GROUP BY kind;

-- name: counted
-- The same where every job of the source fits, and all of them count as `kind`: index-only scans.
SELECT %(kind)s::text AS kind, count(*) AS count, count(*) AS looked_at FROM (
  SELECT FROM dl_jobs j
   WHERE {of_queue} AND {source} LIMIT %(scan)s) near;

-- name: of_queue
-- In the place of {of_queue}, where the source's index has the queue. Jobs that ended well have no such index: the latest
-- are looked at.
(%(queue)s::text IS NULL OR queue = %(queue)s);

-- name: of_queued
-- Served by ix_dl_jobs_queued.
enum_eq(status, 'queued');

-- name: of_retries
-- Those that were tried before. Served by ix_dl_jobs_retried.
status = 'queued' AND attempt > 0;

-- name: of_ready
-- Served by ix_dl_jobs_turn.
status = 'queued' AND blocked_on IS NULL;

-- name: of_time
-- Served by ix_dl_jobs_time.
status = 'queued' AND blocked_on = 'time';

-- name: of_key
-- Served by ix_dl_jobs_parked_keys, whose order it names: ix_dl_jobs_queued, with all queued jobs, would look as cheap.
enum_eq(status, 'queued') AND blocked_on = 'key' ORDER BY hashtext(lock_key), queue, lock_key;

-- name: of_limit
-- Served by ix_dl_jobs_limit_turn.
status = 'queued' AND limits IS NOT NULL AND blocked_on = ANY (ARRAY(SELECT 'limit:' || name FROM dl_limits));

-- name: of_parent
-- Served by dl_waiting and the jobs' key.
status = 'queued' AND blocked_on = 'parent' AND job_id = ANY (ARRAY(SELECT job_id FROM dl_waiting LIMIT %(scan)s));

-- name: waiting
-- How many jobs wait for others, counted up to `scan`: of more `of_parent` sees a part.
SELECT count(*) >= %(scan)s FROM (SELECT FROM dl_waiting LIMIT %(scan)s) n;

-- name: of_running
-- Served by ix_dl_jobs_running.
status = 'running';

-- name: of_dead
-- Served by ix_dl_jobs_dead.
status IN ('failed', 'lost');

-- name: of_finished
-- Served by ix_dl_jobs_finished. Tables of before may have running jobs with the time of an end.
finished_at IS NOT NULL AND status NOT IN ('queued', 'running');

-- name: of_near
-- The jobs that an id in the search may mean. Served by the jobs' key.
job_id BETWEEN %(near_from)s::uuid AND %(near_to)s::uuid;

-- name: of_args
-- Served by ix_dl_jobs_args, where it is.
args @> ANY (%(args)s::jsonb[]);

-- name: of_ids
-- Those that somebody has ticked. Served by the jobs' key.
job_id = ANY (%(job_ids)s::uuid[]);

-- name: args_index
-- Whether there is the index for searches by arguments, and it works.
SELECT indisvalid AND indisready FROM pg_index WHERE indexrelid = to_regclass('ix_dl_jobs_args');

-- name: are_few
-- Whether a source has at most `most` jobs.
SELECT count(*) <= %(most)s AS are_few FROM (SELECT FROM dl_jobs WHERE {source} LIMIT %(most)s + 1) n;

-- name: create_args_index
-- By an operator's command alone: each insert and each change of a job's status pays for it. Beside a working farm.
CREATE INDEX CONCURRENTLY ix_dl_jobs_args ON dl_jobs USING gin (args jsonb_path_ops);

-- name: drop_args_index
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_args;

-- name: suggested_names
-- Tasks or queues with this part: of those that workers serve, that have settings, or that the journal's sums name.
SELECT DISTINCT name FROM (
  SELECT task AS name FROM dl_tasks WHERE %(field)s = 'task'
  UNION ALL SELECT task FROM dl_totals WHERE %(field)s = 'task'
  UNION ALL SELECT queue FROM dl_totals WHERE %(field)s = 'queue'
  UNION ALL SELECT queue FROM dl_served WHERE %(field)s = 'queue'
  UNION ALL SELECT queue FROM dl_queues WHERE %(field)s = 'queue') names
 WHERE lower(name COLLATE "C") LIKE %(pattern)s AND length(name) <= 200 ORDER BY name LIMIT %(most)s;

-- name: suggested_keys
-- Keys with this part, of the latest `scan` jobs that were added and as many that ended, and of those that run.
SELECT DISTINCT lock_key AS name FROM (
  (SELECT lock_key FROM dl_jobs WHERE enum_eq(status, 'queued') ORDER BY created_at DESC LIMIT %(scan)s)
  UNION ALL (SELECT lock_key FROM dl_jobs WHERE status = 'running' LIMIT %(scan)s)
  UNION ALL (SELECT lock_key FROM dl_jobs WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT %(scan)s)) keys
 WHERE lower(lock_key COLLATE "C") LIKE %(pattern)s AND length(lock_key) <= 200 ORDER BY name LIMIT %(most)s;

-- name: chosen
-- Of these jobs those that the list has now, that count as one of `kinds`, and that have not changed since `until`; locked.
SELECT job_id FROM dl_jobs j
 WHERE job_id = ANY (%(chosen)s) AND {matches} AND {kind} = ANY (%(kinds)s)
   AND {changed_at} BETWEEN %(since)s AND %(until)s
 ORDER BY job_id FOR UPDATE;
