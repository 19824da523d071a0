-- Several clusters behind one API: where a queue has moved to, and the jobs that have come from another cluster.
-- oldest code: 1
-- with rights

ALTER TABLE dl_queues ADD COLUMN IF NOT EXISTS cluster text;
COMMENT ON COLUMN dl_queues.cluster IS 'the cluster that the queue has moved to; null: it lives here';

CREATE TABLE IF NOT EXISTS dl_arrivals (
  job_id uuid PRIMARY KEY,
  queue text NOT NULL,
  score float8
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_arrivals IS 'jobs that another cluster may still have: none of them starts';

CREATE TABLE IF NOT EXISTS dl_departures (
  job_id uuid PRIMARY KEY,
  queue text NOT NULL
) WITH (autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_departures IS 'jobs that the last bunches of a move have deleted here';
