-- Queues that live in several clusters (docs/clusters.md). The other statements of a move are in clusters.sql.


-- Those of these queues that have moved to another cluster, and where to. Until the commit none of the others moves: a job
-- that this transaction adds is one that the move will see. A move that is about to begin holds the lock for an instant.
-- Any role could hold it for long: then a job may be added behind the move, and the reaper carries it.
CREATE OR REPLACE FUNCTION dl_moved(p_queues text[]) RETURNS TABLE (queue text, cluster text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  number int;
  tries int := 0;
BEGIN
  FOR number IN SELECT DISTINCT hashtext(name) AS n FROM unnest(p_queues) name ORDER BY n LOOP
    WHILE NOT pg_try_advisory_xact_lock_shared(hashtext('dl_queues'), number) AND tries < 50 LOOP
      PERFORM pg_sleep(0.01);
      tries := tries + 1;
    END LOOP;
  END LOOP;
  RETURN QUERY SELECT q.queue, q.cluster FROM dl_queues q WHERE q.queue = ANY (p_queues) AND q.cluster IS NOT NULL;
END
$$;
