-- The logs of jobs (dl_job_logs): how workers write them, and how people read them; called by dataloader/queue/logs.py.

-- name: write
-- Lines of runs, each only while its claim holds. The times are PostgreSQL's: a line says how old it is.
INSERT INTO dl_job_logs (job_id, claim, attempt, line, at, level, source, text)
SELECT j.job_id, j.claims, j.attempt, l.line, clock_timestamp() - l.age_sec * interval '1 s', l.level, l.source, l.text
  FROM unnest(%(job_ids)s::uuid[], %(attempts)s::int[], %(claimed_by)s::text[], %(lines)s::int[], %(ages_sec)s::float8[],
              %(levels)s::text[], %(sources)s::text[], %(texts)s::text[])
       AS l (job_id, attempt, claimed_by, line, age_sec, level, source, text)
  JOIN dl_jobs j ON j.job_id = l.job_id AND j.attempt = l.attempt AND j.claimed_by = l.claimed_by
                AND j.status::text = 'running';

-- name: leave_out
-- Lines of a running run: from its middle, or behind the last confirmed one. `age_sec` bounds the partitions read.
DELETE FROM dl_job_logs l USING dl_jobs j
 WHERE j.job_id = %(job_id)s AND j.attempt = %(attempt)s AND j.claimed_by = %(claimed_by)s AND j.status::text = 'running'
   AND l.job_id = j.job_id AND l.claim BETWEEN %(claim)s AND j.claims AND l.line BETWEEN %(first)s AND %(last)s
   AND l.at >= now() - %(age_sec)s * interval '1 s';

-- name: args_of_run
-- The arguments of these running jobs of a worker, which its keeper has to mask in what the run has written.
SELECT args FROM dl_jobs
 WHERE job_id = ANY (%(job_ids)s) AND claimed_by = %(claimed_by)s AND status = 'running';

-- name: lines
SELECT claim, attempt, line, at, level, source, text FROM dl_job_logs
 WHERE job_id = %(job_id)s AND (claim, line) > (%(claim)s, %(line)s)
   AND (%(attempt)s::int IS NULL OR attempt = %(attempt)s)
 ORDER BY claim, line LIMIT %(limit)s;

-- name: last_lines
SELECT * FROM (
  SELECT claim, attempt, line, at, level, source, text FROM dl_job_logs
   WHERE job_id = %(job_id)s AND (%(attempt)s::int IS NULL OR attempt = %(attempt)s)
   ORDER BY claim DESC, line DESC LIMIT %(limit)s) latest
 ORDER BY claim, line;

-- name: attempts
-- The attempts of a job that have written something: a look for each, whatever they have written.
WITH RECURSIVE each_run AS (
  (SELECT claim, attempt FROM dl_job_logs WHERE job_id = %(job_id)s ORDER BY claim LIMIT 1)
  UNION ALL
  SELECT more.claim, more.attempt FROM each_run r CROSS JOIN LATERAL (
    SELECT claim, attempt FROM dl_job_logs WHERE job_id = %(job_id)s AND claim > r.claim ORDER BY claim LIMIT 1) more)
SELECT DISTINCT attempt FROM each_run ORDER BY attempt;
