-- Workers of several queues, and what pipelines say of their tasks.
-- oldest code: 1

ALTER TABLE dl_workers ADD COLUMN IF NOT EXISTS queues text[];
CREATE VIEW dl_served AS
SELECT unnest(coalesce(queues, ARRAY[queue])) AS queue, worker, state, seen_at FROM dl_workers;
COMMENT ON VIEW dl_served IS 'a row for each worker and each queue that it serves';

CREATE TABLE dl_tasks (
  task text PRIMARY KEY,
  max_attempts int,
  CONSTRAINT dl_tasks_chk_positive CHECK (max_attempts > 0)
) WITH (fillfactor = 50);
COMMENT ON TABLE dl_tasks IS 'what the pipeline of a task says of its jobs, by the worker that came last';
