-- Alerts out: who is to be told what, and what has been told. The index has the dead jobs and stuck runs of the journal,
-- which are few: the reaper looks for new ones in each round. Without blocking anybody; may be run again.
-- oldest code: 1
-- outside a transaction

CREATE TABLE IF NOT EXISTS dl_webhooks (
  name text PRIMARY KEY,
  url text NOT NULL,
  shape text NOT NULL,
  signed_by text,
  kinds text[],
  queues text[],
  lag_sec float8 NOT NULL,
  added_at timestamptz NOT NULL DEFAULT now(),
  added_by text,
  paused_at timestamptz,
  paused_by text,
  CONSTRAINT dl_webhooks_chk_shape CHECK (shape IN ('json', 'alertmanager', 'slack')),
  CONSTRAINT dl_webhooks_chk_positive CHECK (lag_sec > 0)
);
COMMENT ON TABLE dl_webhooks IS 'receivers of alerts; of their secrets here are the names only';
COMMENT ON COLUMN dl_webhooks.url IS 'with ${DL_WEBHOOK_...} in the place of what is secret';
COMMENT ON COLUMN dl_webhooks.signed_by IS 'the variable of the workers with the key that signs messages; null: they are not signed';
COMMENT ON COLUMN dl_webhooks.kinds IS 'of alerts; null: all';
COMMENT ON COLUMN dl_webhooks.queues IS 'whose alerts; null: all';

CREATE TABLE IF NOT EXISTS dl_alerts (
  webhook text NOT NULL REFERENCES dl_webhooks ON DELETE CASCADE,
  kind text NOT NULL,
  queue text NOT NULL,
  since timestamptz NOT NULL,
  told_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (webhook, kind, queue)
);
COMMENT ON TABLE dl_alerts IS 'conditions of which a webhook was told that they have begun, and not yet that they are over';

CREATE TABLE IF NOT EXISTS dl_alerted (last_event bigint NOT NULL);
COMMENT ON TABLE dl_alerted IS 'one row: the last of the journal that webhooks were told of';
INSERT INTO dl_alerted SELECT 0 WHERE NOT EXISTS (SELECT FROM dl_alerted);

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_job_events_alerts;
CREATE INDEX CONCURRENTLY ix_dl_job_events_alerts ON dl_job_events (event_id) WHERE kind IN ('failed', 'lost', 'stuck');
