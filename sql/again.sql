-- Jobs that are run again with changes; called by dataloader/queue/again.py.

-- name: fields
-- The fields of a trigger that adds the job again (queue/fields.py), without an affinity key that follows from the args.
SELECT status, {fields.again},
       CASE WHEN affinity_key IS DISTINCT FROM dl_affinity(declared.affinity, args) THEN affinity_key END AS affinity_key
  FROM dl_jobs j LEFT JOIN dl_tasks declared USING (task) WHERE job_id = %(job_id)s;

-- name: note
-- Each of the two jobs names the other one in its journal.
WITH of_new AS (
  UPDATE dl_job_events SET payload = coalesce(payload, '{}') || jsonb_build_object('rerun_of', %(old_id)s::text, 'by', %(by)s::text)
   WHERE job_id = %(new_id)s AND kind = 'queued')
INSERT INTO dl_job_events (job_id, queue, kind, payload)
SELECT job_id, queue, 'again', jsonb_build_object('rerun_by', %(new_id)s::text, 'by', %(by)s::text)
  FROM dl_jobs WHERE job_id = %(old_id)s;
