-- The turn of a job: its place in its queue and priority. It is created_at, or a turn_at: with a deadline before all others,
-- or in a fair queue. A fair queue keeps a clock by start-time fair queuing (Goyal, Vin, Cheng 1996), which shows the turn
-- of the first ready job; a new job comes a microsecond behind the last of its share, and not before the clock. So a claim
-- takes one of each share in turns.

-- The turn of a job that becomes ready in a fair queue; an empty queue's clock starts at p_created_at. VOLATILE: a statement
-- that adds many rows has to see those before.
CREATE OR REPLACE FUNCTION dl_turn(p_queue text, p_priority int, p_share text, p_created_at timestamptz)
RETURNS timestamptz LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET enable_sort = off SET enable_bitmapscan = off AS $$
DECLARE
  clock timestamptz := (
    SELECT coalesce(turn_at, created_at) FROM {schema}.dl_jobs
     WHERE queue = p_queue AND status = 'queued' AND blocked_on IS NULL AND priority = p_priority
       -- Behind those with deadlines, and before those that have their turns only after this.
       AND coalesce(turn_at, created_at) > '1970-01-01 00:00+00' AND coalesce(turn_at, created_at) < 'infinity'
     ORDER BY queue, priority, coalesce(turn_at, created_at) LIMIT 1);
  last timestamptz := (
    SELECT turn_at FROM {schema}.dl_jobs
     WHERE queue = p_queue AND priority = p_priority AND share = p_share AND turn_at < 'infinity' AND status = 'queued'
     ORDER BY queue DESC, priority DESC, share DESC, turn_at DESC LIMIT 1);
BEGIN
  IF last IS NULL THEN
    -- The first ready row may stand there for long, where no worker has room for it: then the running rows know more.
    last := (SELECT max(turn_at) FROM (
               SELECT turn_at FROM {schema}.dl_jobs
                WHERE status = 'running' AND queue = p_queue AND priority = p_priority AND share IS NOT NULL LIMIT 1000) run);
  END IF;
  RETURN greatest(last + interval '1 microsecond', coalesce(clock, p_created_at));
END
$$;

-- Give these queued jobs their turns, if their queue is fair, the oldest first; one that waits for its time or parents has
-- its turn later. Returns their number; locked rows are left.
CREATE OR REPLACE FUNCTION dl_give_turns(p_job_ids uuid[]) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  job record;
  given int := 0;
BEGIN
  FOR job IN
    SELECT job_id, CASE fair_by WHEN 'producer' THEN coalesce(producer, '') WHEN 'partition_key' THEN partition_key END AS share
      FROM {schema}.dl_jobs LEFT JOIN {schema}.dl_queues USING (queue)
     WHERE job_id = ANY (p_job_ids) AND status::text = 'queued'
     ORDER BY created_at, job_id FOR NO KEY UPDATE OF dl_jobs SKIP LOCKED
  LOOP
    UPDATE {schema}.dl_jobs SET share = job.share,
           turn_at = CASE WHEN job.share IS NOT NULL AND available_at <= now()
                          THEN {schema}.dl_turn(queue, priority, job.share, created_at) END
     WHERE job_id = job.job_id;
    given := given + 1;
  END LOOP;
  RETURN given;
END
$$;
