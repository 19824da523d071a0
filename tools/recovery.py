"""The farm's recovery times: `python -m tools.recovery [--rounds 10]` prints a table of medians.

The program starts a PostgreSQL of its own, and a farm of real processes with the default settings except for two,
which the table names.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from farming import Farm, until

from dataloader import embedded
from dataloader.queue import db, lifecycle
from tools.farms import farm
from tools.programs import started_again, stopped

SETTINGS = {"dl_heartbeat_sec": 10, "dl_claim_backoff_sec": 15, "dl_drain_sec": 30, "dl_kill_grace_sec": 1}
GIL = {"n": 8_000_000_000}  # minutes in one C call


class Recovery:
    """A farm of two workers for repeated recoveries."""

    def __init__(self, farm: Farm, server: embedded.Server, rounds: int) -> None:
        self.farm, self.server, self.rounds = farm, server, rounds
        self.program = self.farm.ready(workers=2, **SETTINGS)

    def run(self) -> None:
        """Make every measurement, and print a line for each."""
        self.report("kill -9 of a worker: its job runs again", self.kill)
        self.report("forced cancel of `while True: pass`: slot free", lambda: self.cancel("spins"))
        self.report("forced cancel of a generator that never yields", lambda: self.cancel("deaf"))
        self.report("forced cancel of a C call that holds the GIL", lambda: self.cancel("holds_the_gil", GIL))
        self.report(
            "forced cancel of a pipeline with a `sleep 999` child",
            lambda: self.cancel("waits_for_a_child", {"mark": 399}),
        )
        self.report("PostgreSQL restarted (fast): first claim", lambda: self.restart("fast"))
        self.report("PostgreSQL restarted (immediate): first claim", lambda: self.restart("immediate"))
        self.report("TERM with idle workers: exit", self.term)

    def report(self, what: str, measure: Callable[[], float]) -> None:
        """The median, the least and the most of the rounds."""
        times = [measure() for _ in range(self.rounds)]
        print(f"{what:<58} {statistics.median(times):7.3f} s   {min(times):.3f} to {max(times):.3f}", flush=True)

    def begun(self, task: str, args: dict[str, Any]) -> UUID:
        """Trigger a job, and wait until its pipeline has begun."""
        job = self.farm.enqueue(task, args=args)
        until(lambda: self.farm.rows("SELECT FROM runs WHERE job_id = %s", job))
        return job

    def kill(self) -> float:
        """The time from the kill to the second start."""
        job = self.begun("recorded", {"sec": 0.5})
        (pid,) = self.farm.rows("SELECT pid FROM runs WHERE job_id = %s", job)[0]
        started = time.monotonic()
        next(worker for worker in self.program.workers() if worker.pid == pid).kill()
        until(lambda: len(self.farm.rows("SELECT FROM runs WHERE job_id = %s", job)) == 2)
        passed = time.monotonic() - started
        self.farm.wait(job, "succeeded")
        return passed

    def cancel(self, task: str, args: dict[str, Any] | None = None) -> float:
        """The time from the request to the end of the job and a ready worker in its place."""
        job = self.begun(task, args or {})
        started = time.monotonic()
        lifecycle.request_cancel(self.farm.conn, job, force=True)
        self.farm.wait(job, "canceled")
        until(lambda: self.idle() == 2)
        return time.monotonic() - started

    def idle(self) -> int:
        """The number of workers that wait for a job."""
        return len(self.program.children("idle"))

    def restart(self, mode: str) -> float:
        """The time from the moment the server accepts connections again to the start of a queued job."""
        until(lambda: self.idle() == 2)
        self.farm.conn.close()
        stopped(self.server, {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
        started_again(self.server)
        started = time.monotonic()
        self.farm.conn = db.connect(self.server.dsn, name="test", schema="public")
        job = self.farm.enqueue("recorded", args={"sec": 0})
        until(lambda: self.farm.rows("SELECT FROM runs WHERE job_id = %s", job))
        return time.monotonic() - started

    def term(self) -> float:
        """The time from SIGTERM to the exit."""
        until(lambda: self.idle() == 2)
        started = time.monotonic()
        assert self.program.stop() == 0
        passed = time.monotonic() - started
        self.program = self.farm.ready(workers=2, **SETTINGS)
        return passed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="how often each is measured (10)")
    rounds = parser.parse_args().rounds
    with farm() as (running, server):
        Recovery(running, server, rounds).run()


if __name__ == "__main__":
    main()
