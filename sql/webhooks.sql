-- Webhooks and what they are told; called by the functions of the same name in dataloader/queue/reports/webhooks.py.

-- name: listed
SELECT * FROM dl_webhooks WHERE %(name)s::text IS NULL OR name = %(name)s ORDER BY name;

-- name: begin_anew
-- Go on behind the rows that are there: for the first webhook, and where the journal is numbered anew.
UPDATE dl_alerted SET last_event = (SELECT coalesce(max(event_id), 0) FROM dl_job_events WHERE event_id <= dl_journal_end())
 WHERE last_event > dl_journal_end() OR NOT EXISTS (SELECT FROM dl_webhooks);

-- name: put
-- A pause that stands stays.
INSERT INTO dl_webhooks (name, url, shape, signed_by, kinds, queues, lag_sec, added_by)
VALUES (%(name)s, %(url)s, %(shape)s, %(signed_by)s, %(kinds)s, %(queues)s, %(lag_sec)s, %(by)s)
ON CONFLICT (name) DO UPDATE SET
   url = excluded.url, shape = excluded.shape, signed_by = excluded.signed_by, kinds = excluded.kinds,
   queues = excluded.queues, lag_sec = excluded.lag_sec
RETURNING *;

-- name: remove
-- With the conditions that it was told of.
DELETE FROM dl_webhooks WHERE name = %(name)s RETURNING name;

-- name: pause
-- A pause that stands keeps its time and its author.
UPDATE dl_webhooks SET paused_at = coalesce(paused_at, now()), paused_by = coalesce(paused_by, %(by)s)
 WHERE name = %(name)s RETURNING *;

-- name: resume
UPDATE dl_webhooks SET paused_at = NULL, paused_by = NULL WHERE name = %(name)s RETURNING *;

-- name: keep_message
-- Before its job, which the trigger dl_jobs_internal_ins refuses without it.
INSERT INTO dl_messages (job_id, webhook, message) VALUES (%(job_id)s, %(webhook)s, %(message)s);

-- name: message
SELECT webhook, message FROM dl_messages WHERE job_id = %(job_id)s;

-- name: is_served
-- Whether a worker of some host that its keeper has shown lately serves this queue.
SELECT EXISTS (SELECT FROM dl_served
                WHERE queue = %(queue)s AND seen_at > now() - interval '30 s' AND state <> 'dead');

-- name: is_firing
-- Whether a webhook was told that this condition has begun, and not yet that it is over.
SELECT EXISTS (SELECT FROM dl_alerts
                WHERE webhook = %(webhook)s AND kind = %(kind)s AND queue = %(queue)s AND since = %(since)s);

-- name: position
-- One reaper at a time: the others find the row locked, and leave the round to that one.
SELECT last_event, now() FROM dl_alerted LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: new_events
-- Events behind a place, once the first is `bundle_sec` old. Rows become visible in the order of commits, so the answer ends
-- before the first row younger than `settle_sec`; a row from the future counts as old. Served by ix_dl_job_events_told.
WITH near AS (
  SELECT event_id, job_id, queue, ts, kind, payload,
         abs(extract(epoch FROM clock_timestamp() - ts)) < %(settle_sec)s AS is_young
    FROM dl_job_events
   WHERE event_id > %(after)s AND event_id <= (SELECT dl_journal_end()) AND kind IN ('failed', 'lost', 'stuck', 'deadline') ORDER BY event_id LIMIT %(limit)s)
SELECT event_id, kind, n.ts, job_id, n.queue, coalesce(task, '') AS task,
       left(coalesce(payload ->> 'error', payload ->> 'reason', CASE WHEN kind IN ('failed', 'lost') THEN j.error END, ''), 300) AS error,
       CASE WHEN jsonb_typeof(payload -> 'silent_sec') = 'number' THEN (payload ->> 'silent_sec')::float8 END AS silent_sec
  FROM near n LEFT JOIN dl_jobs j USING (job_id)
 WHERE event_id < coalesce((SELECT min(event_id) FROM near WHERE is_young), 9223372036854775807)
   AND (SELECT abs(extract(epoch FROM clock_timestamp() - ts)) FROM near ORDER BY event_id LIMIT 1) >= %(bundle_sec)s
 ORDER BY event_id;

-- name: go_on_behind
UPDATE dl_alerted SET last_event = %(last_event)s;

-- name: queues
-- The facts that decide the conditions: the reaper's counts and the pauses. A lag that was counted too long ago is null.
SELECT queue, CASE WHEN counted_at IS NULL OR counted_at > now() - interval '10 min' THEN coalesce(lag_sec, 0) END AS lag_sec,
       paused_at, paused_by
  FROM dl_lengths FULL JOIN dl_queues USING (queue)
 WHERE lag_sec > 0 OR paused_at IS NOT NULL;

-- name: firing
SELECT webhook, kind, queue, since, told_at FROM dl_alerts;

-- name: note_firing
-- A condition has begun, or a webhook was told of it again.
INSERT INTO dl_alerts (webhook, kind, queue, since) VALUES (%(webhook)s, %(kind)s, %(queue)s, %(since)s)
ON CONFLICT (webhook, kind, queue) DO UPDATE SET told_at = now();

-- name: note_resolved
DELETE FROM dl_alerts WHERE webhook = %(webhook)s AND kind = %(kind)s AND queue = %(queue)s;
