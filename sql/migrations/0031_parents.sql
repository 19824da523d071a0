-- Jobs that wait for other jobs. Two tables of their own, so that a job without parents costs nothing more.
-- oldest code: 1
-- functions: dl_linked
-- with rights

CREATE TABLE dl_parents (
  job_id uuid NOT NULL,
  parent_id uuid NOT NULL,
  place int NOT NULL,
  is_over boolean NOT NULL DEFAULT false,
  PRIMARY KEY (job_id, parent_id)
);
COMMENT ON TABLE dl_parents IS 'for which jobs (parent_id) a job waits, or has waited';
CREATE INDEX ix_dl_parents_parent ON dl_parents (parent_id, is_over);

CREATE TABLE dl_waiting (
  job_id uuid PRIMARY KEY,
  parents int NOT NULL,
  available_at timestamptz NOT NULL,
  on_failure text NOT NULL,
  failed_parent uuid
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_waiting IS 'the jobs that wait for parents: those with blocked_on ''parent''';

ALTER TABLE dl_freed ALTER COLUMN key_hash DROP NOT NULL;
ALTER TABLE dl_freed ADD COLUMN IF NOT EXISTS parent_id uuid;
COMMENT ON COLUMN dl_freed.parent_id IS 'a job that has ended while others had rows of its children locked';

CREATE CONSTRAINT TRIGGER dl_parents_link AFTER INSERT ON dl_parents DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NOT NEW.is_over) EXECUTE FUNCTION dl_linked();
