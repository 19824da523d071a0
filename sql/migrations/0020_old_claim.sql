-- The indexes and functions of the claim of before. A claim that had begun before 0019 may have marked rows after it; it has ended when
-- the indexes have gone, and the workers that wait for these rows look again.
-- oldest code: 1
-- outside a transaction

DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_cold;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_hot;
DROP FUNCTION IF EXISTS
  dl_claim(text, text, timestamptz, float8), dl_try(uuid, text, timestamptz, float8),
  dl_start(uuid[], text, timestamptz), dl_locked_ahead(text), dl_hot_slots(text), dl_near_of_slot(text, int),
  dl_take_slot(int), dl_slot_is_busy(int), dl_is_paused(text), dl_session_has_slot(int, timestamptz, bigint);
SELECT pg_notify('dl_jobs', queue) FROM (SELECT DISTINCT queue FROM dl_workers) served;
