"""Outages with real times: `python -m tools.long_outages` prints a table after some eight minutes.

The program starts a PostgreSQL of its own and a farm of two workers with the default settings. Runs of 75 s go on while
the server is stopped for 1, 20 and 90 s; the first two outages begin shortly before the runs' ends, the last one
outlasts the lease. The table shows how each job ended, and how many seconds after the database's return each worker
claimed or renewed again, and the keeper showed the farm.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from farming import Farm, until

from dataloader import embedded
from dataloader.queue import db
from tools.farms import farm
from tools.programs import started_again, stopped

DEFAULTS = {"dl_heartbeat_sec": 10, "dl_claim_backoff_sec": 15, "dl_reaper_period_sec": 10, "dl_drain_sec": 30}
RUN_SEC = 75
# So long is the outage, and so many seconds after the runs' begin it comes.
OUTAGES = ((1, 70), (20, 68), (90, 30))
# The workers that have claimed or renewed since an instant, and the keeper: each with the seconds until it first did.
WORKED = """
SELECT coalesce(payload ->> 'worker', (SELECT p.payload ->> 'worker' FROM dl_job_events p WHERE p.job_id = e.job_id
                AND p.kind = 'picked' AND p.event_id < e.event_id ORDER BY p.event_id DESC LIMIT 1)),
       extract(epoch FROM min(ts) - %(since)s)::float8
  FROM dl_job_events e WHERE kind IN ('picked', 'heartbeat') AND ts > %(since)s GROUP BY 1
"""
SHOWN = "SELECT extract(epoch FROM seen_at - %s)::float8 FROM dl_workers WHERE seen_at > %s ORDER BY seen_at LIMIT 1"
ENDS = "SELECT status::text, attempt FROM dl_jobs WHERE job_id = ANY (%s) ORDER BY created_at"


def outage(farm: Farm, server: embedded.Server, seconds: int, after: int) -> str:
    """One outage; the line of the table."""
    notes = farm.folder / f"notes-{seconds}"
    jobs = [farm.enqueue("witnessed", args={"witness": str(notes), "sec": RUN_SEC}) for _ in range(2)]
    until(lambda: notes.exists() and notes.read_text().count("begin") == 2, "the runs to begin")
    time.sleep(after)
    farm.conn.close()
    stopped(server, signal.SIGINT)
    time.sleep(seconds)
    started_again(server)
    farm.conn = db.patiently(lambda: db.connect(farm.dsn, name="test", schema="public"), sleep=time.sleep)
    (since,) = farm.rows("SELECT clock_timestamp()")[0]
    fresh = [farm.enqueue("witnessed", args={"witness": str(notes), "sec": 3}) for _ in range(2)]

    def rows(statement: str, *values: Any) -> list[Any]:
        return farm.conn.execute(statement, values).fetchall()

    shown = until(lambda: rows(SHOWN, since, since), "the keeper", patience=120)[0][0]
    worked = until(lambda: len(found := worked_since(farm, since)) == 2 and found, "the workers", patience=120)
    left = "SELECT FROM dl_jobs WHERE job_id = ANY (%s) AND status IN ('queued', 'running')"
    until(lambda: not rows(left, jobs + fresh), "the jobs to end", patience=4 * RUN_SEC)
    ends = ", ".join(f"{status} ({attempt})" for status, attempt in rows(ENDS, jobs + fresh))
    workers = ", ".join(f"{each:.2f}" for each in sorted(worked.values()))
    return f"{seconds:>4} s after {after} s   {ends:<62} {workers:<12} {shown:.2f}"


def worked_since(farm: Farm, since: Any) -> dict[str, float]:
    """The workers that have claimed or renewed since then."""
    return dict(farm.conn.execute(WORKED, {"since": since}).fetchall())


def main() -> None:
    """Make the outages, and print the table."""
    with farm() as (running, server):
        program = running.ready(workers=2, **DEFAULTS)
        running.start("reaper", **DEFAULTS)
        before = {worker.pid for worker in program.workers()}
        print(f"{'outage':<18} {'jobs (attempts): two long, two fresh':<62} {'workers, s':<12} keeper, s")
        for seconds, after in OUTAGES:
            print(outage(running, server, seconds, after), flush=True)
        kept = {worker.pid for worker in program.workers()} == before
        print("The workers are the same." if kept else "Workers were replaced.")


if __name__ == "__main__":
    main()
