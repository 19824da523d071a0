-- Jobs that wait for other jobs, for dataloader/queue/parents.py; functions/parents.sql ends a wait.

-- name: depend
-- The parents that are not known; see dl_depend.
SELECT dl_depend(%(job_ids)s::uuid[], %(parent_ids)s::uuid[], %(on_failure)s::text[])::text[];

-- name: results
-- The status of these jobs, and what their runs have returned. A job that is not there any more has nulls.
SELECT n.job_id, j.task, j.status::text, j.error,
       CASE WHEN j.status = 'succeeded' THEN (
         SELECT r.result::text FROM dl_results r WHERE r.job_id = j.job_id AND r.claim = j.claims) END
  FROM unnest(%(job_ids)s::uuid[]) WITH ORDINALITY AS n (job_id, nth) LEFT JOIN dl_jobs j USING (job_id) ORDER BY nth;

-- name: parents
SELECT parent_id FROM dl_parents WHERE job_id = %(job_id)s ORDER BY place, parent_id;

-- name: family
-- The first parents and the first children of a job. `is_parent` tells which; `is_over`: it does not hold the other up.
(SELECT true AS is_parent, p.parent_id AS job_id, j.task, j.lock_key, j.status, p.is_over
   FROM dl_parents p LEFT JOIN dl_jobs j ON j.job_id = p.parent_id
  WHERE p.job_id = %(job_id)s ORDER BY p.place, p.parent_id LIMIT %(most)s)
UNION ALL
(SELECT false, p.job_id, j.task, j.lock_key, j.status, p.is_over
   FROM dl_parents p LEFT JOIN dl_jobs j ON j.job_id = p.job_id
  WHERE p.parent_id = %(job_id)s ORDER BY p.parent_id, p.is_over, p.job_id LIMIT %(most)s);
