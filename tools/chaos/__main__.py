"""A chaos run: farms under load and faults for some time, then the verdict.

Exit status 0: every promise held; 1: a promise was broken, with the stories of the jobs; 2: the run itself failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from random import Random, SystemRandom
from typing import Any

import psycopg

from .checker import Violation, check
from .gather import gather
from .history import History
from .load import Load
from .nemesis import Nemesis
from .world import FARMS, QUEUES, WORKERS, World

READY_SEC = 60.0
DRAIN_SEC = 120.0  # from the end of the faults to the end of all jobs
QUIET_SEC = 5.0  # for the remains of the last runs to end
HURRY_SEC = 2.0
STORIES = 10  # printed in full; further violations of a bad run repeat these

# Ends every back-off: a job that waits for another attempt is due now.
_HURRY = """
UPDATE dl_jobs SET available_at = now() WHERE status = 'queued' AND claims > 0 AND available_at > now()"""
_LISTENING = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'dl-worker%'"
_UNFINISHED = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"
_LOCKS = "SELECT pid, objid FROM pg_locks WHERE locktype = 'advisory'"


class Run:
    """One run in a world of its own."""

    def __init__(self, world: World, seed: int) -> None:
        self.history = History()
        self._world = world
        self._load = Load(world.port, seed)
        self._nemesis = Nemesis(world, Random(f"{seed}-nemesis"))
        self._hurried = 0.0

    def go(self, seconds: float) -> list[Violation]:
        """Load and faults for `seconds`, then the drain, the end of all programs, and the verdict."""
        workers = WORKERS * len(QUEUES) * len(FARMS)
        if not self._world.wait(READY_SEC, lambda: self._asked(_LISTENING) >= workers):
            raise TimeoutError(f"the farms were not ready within {READY_SEC:g} s")
        self._load.start()
        self._torment(seconds)
        self._nemesis.heal()
        self._load.stop()
        self._drain()
        self._load.finish()
        self._look_around()
        self._collect()
        return check(self.history)

    def _torment(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._world.wait(min(left, self._nemesis.pause()))
            self._nemesis.strike()
            self._hurry()

    def _drain(self) -> None:
        def is_over() -> bool:
            self._hurry()
            return self._load.settled() and self._asked(_UNFINISHED) == 0

        self._world.wait(DRAIN_SEC, is_over)

    def _hurry(self) -> None:
        if time.monotonic() > self._hurried + HURRY_SEC:
            self._hurried = time.monotonic()
            with suppress(psycopg.Error):
                self._world.query(_HURRY)

    def _asked(self, question: str) -> int:
        try:
            return int(self._world.query(question)[0][0])
        except psycopg.Error:
            return -1

    def _look_around(self) -> None:
        """Note the locks that an idle farm still holds, and the processes left after its end."""
        left = self.history.left
        if not self._world.wait(QUIET_SEC, lambda: not self._world.query(_LOCKS)):
            left += [f"an idle session {pid} holds the lock {lock}" for pid, lock in self._world.query(_LOCKS)]
        if not self._world.wait(QUIET_SEC, lambda: not self._world.marked()):
            left += [f"process {pid}, started by a pipeline, outlived its job" for pid in self._world.marked()]
        left += self._world.stop_programs()

    def _collect(self) -> None:
        history = self.history
        history.triggers, history.answers = list(self._load.triggers), list(self._load.answers)
        history.surprises, history.stops = list(self._load.surprises), self._nemesis.stops
        gather(self._world.dsn, history)

    def summary(self) -> dict[str, Any]:
        """The run in figures."""
        kinds = {trigger.job_id: trigger.kind for trigger in self.history.triggers}
        ends = Counter(row.status for row in self.history.rows)
        return {
            "acknowledged": len({trigger.job_id for trigger in self.history.triggers} - {None}),
            "faults": dict(sorted(self._nemesis.count.items())),
            "outcomes": dict(ends),
            "kinds": dict(Counter(kinds[row.job_id] for row in self.history.rows if row.job_id in kinds)),
            "starts": sum(row.claims for row in self.history.rows),
            "requests sent again": self._load.retries,
        }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long faults are injected (60)")
    parser.add_argument("--seed", type=int, help="of all that is chosen; by default another each time")
    parser.add_argument("--keep", action="store_true", help="keep the server's data and the logs")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    options = parser.parse_args()
    seed = SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ctrl-C passes through all cleanups
    with World() as world:
        world.keep = options.keep
        run = Run(world, seed)
        violations = run.go(options.seconds)
        for text in _report(world, run.history, violations):
            print(text)
    figures = {"seed": seed, **run.summary(), "violations": dict(Counter(v.rule for v in violations))}
    print(json.dumps(figures) if options.json else _told(figures), flush=True)
    if options.keep:
        print(f"kept: {world.root}")
    return 1 if violations else 0


def _report(world: World, history: History, violations: list[Violation]) -> list[str]:
    lines = []
    for number, violation in enumerate(violations):
        lines.append(f"VIOLATION {violation.rule}: {violation.text}")
        for job_id in violation.job_ids if number < STORIES else ():
            lines += [f"    {line}" for line in [f"job {job_id}", *history.story(job_id), *world.mentions(job_id)]]
    return lines


def _told(figures: dict[str, Any]) -> str:
    lines = []
    for name, value in figures.items():
        shown = ", ".join(f"{what} {count}" for what, count in value.items()) if isinstance(value, dict) else value
        lines.append(f"{name}: {shown if shown != '' else 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
