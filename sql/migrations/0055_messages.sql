-- The messages that the farm sends to webhooks, where no producer can write: a producer that could name their task would
-- have its own text signed with the operator's key.
-- oldest code: 1
-- functions: dl_jobs_internal
-- with rights

CREATE TABLE IF NOT EXISTS dl_messages (
  job_id uuid PRIMARY KEY,
  webhook text NOT NULL,
  message jsonb NOT NULL
);
COMMENT ON TABLE dl_messages IS 'the messages to webhooks, each by the job that sends it; only these jobs may have the task alert.webhook';

-- A secret that stood within a URL could be sent to any host.
COMMENT ON COLUMN dl_webhooks.url IS '${DL_WEBHOOK_...}: the variable of the workers that holds a secret URL';

CREATE OR REPLACE TRIGGER dl_jobs_internal_ins BEFORE INSERT ON dl_jobs
  FOR EACH ROW WHEN (NEW.task = 'alert.webhook') EXECUTE FUNCTION dl_jobs_internal();
