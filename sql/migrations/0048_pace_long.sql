-- The throughput of eight days: what dl_pace has of two days, in five minutes each. What dl_pace holds already is taken
-- over. Until the commit no dl_roll adds to either table, and the next one knows both.
-- oldest code: 1
-- functions: dl_roll
-- with rights

CREATE TABLE dl_pace_long (
  at timestamptz NOT NULL,
  queue text NOT NULL,
  processed bigint NOT NULL,
  failed bigint NOT NULL,
  PRIMARY KEY (at, queue)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500);
COMMENT ON TABLE dl_pace_long IS 'runs that ended within each five minutes, for eight days';
SELECT FROM dl_rolled FOR UPDATE;
INSERT INTO dl_pace_long
SELECT date_bin('5 min', at, '2000-01-01 00:00+00'), queue, sum(processed), sum(failed) FROM dl_pace GROUP BY 1, 2;
