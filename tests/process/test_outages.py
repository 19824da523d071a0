"""The database goes away at every statement of the workers', keepers' and reapers' loops, and comes back."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import psycopg
import pytest
from farming import LOST, Farm, Program, ended_lines, until
from judge import illegal
from link import AFTER, BEFORE, REFUSES, SILENT, Cell, Link, linked

from dataloader.farm.heartbeat import LONG_SEC
from dataloader.queue.plans import new_schedule, schedules

# asyncio drops a connection that comes while the link's listener closes, without closing it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
LEASE = 3  # seconds, for an outage that is longer
LONG_LEASE = 12  # outlasts a beat, the time until the cuts, a shorter outage and a late return on a busy machine
# Every period of a farm that is longer than a second, but for the time limits of a server that answers.
PERIODS = dict.fromkeys(
    (
        *("LEARN_SEC", "MEMORY_SEC", "RESERVED_SEC", "UNCHANGED_SEC", "HEAT_SEC", "RECONNECT_SEC"),
        *("LOG_DAYS_SEC", "LOG_DAYS_AGAIN_SEC", "PREDICT_SEC", "HELD_AGAIN_SEC"),
    ),
    1.0,
)
SETTINGS = {
    "dl_periods": json.dumps(PERIODS),
    "dl_heartbeat_sec": 1,
    "dl_reaper_period_sec": 0.5,
    "dl_claim_backoff_sec": 60,  # no poll comes to the help of a lost notification
    "dl_retention_days": 30,
    "pg_connect_timeout": 1,
}
FARMS, WORKERS, REAPERS = 2, 3, 5
ALL_WORKERS = FARMS * WORKERS
CALM_SEC = 4.0  # some rounds of every loop
COMMON = 3  # times that a statement passes in that time; one that is rarer need not come again
ARMED_SEC = 1.0  # for the loops to come to their cuts
BACK_SEC = 5.0  # from the database's return until each worker and keeper has worked
# Those of these runs that have not beaten so late that their workers have left LISTEN.
WITHOUT_LATE_BEAT = """
SELECT FROM dl_jobs j WHERE job_id = ANY(%s) AND NOT EXISTS (
  SELECT FROM dl_job_events e WHERE e.job_id = j.job_id AND kind = 'heartbeat'
     AND ts > started_at + %s * interval '1 s')
"""


OPEN = "SELECT to_jsonb(j) - 'args' FROM dl_jobs j WHERE job_id = ANY(%s) AND status IN ('queued', 'running')"


# The workers that have claimed or renewed since a time, and the farms whose keepers have shown workers since then; each
# with the number of seconds after that time.
WORKED = """
SELECT coalesce(payload ->> 'worker', (SELECT p.payload ->> 'worker' FROM dl_job_events p
           WHERE p.job_id = e.job_id AND p.kind = 'picked' AND p.event_id < e.event_id
           ORDER BY p.event_id DESC LIMIT 1)),
       extract(epoch FROM min(ts) - %s)::float8
  FROM dl_job_events e WHERE kind IN ('picked', 'heartbeat') AND ts > %s GROUP BY 1
"""
SHOWN = "SELECT farm, extract(epoch FROM max(seen_at) - %s)::float8 FROM dl_workers WHERE seen_at > %s GROUP BY 1"
STEP = "FROM dl_step"  # the claim and the end of a run: many cases pass through one statement


class Outages:
    """Farms and reapers behind one link, and the jobs that they run meanwhile."""

    def __init__(self, farm: Farm, link: Link, lease: int) -> None:
        self.farm, self.link, self.lease = farm, link, lease
        self.witness = farm.folder / "witness"
        self.jobs: list[UUID] = []
        self.late: list[float] = []  # of each return: until the last worker or keeper has worked
        self._count = itertools.count()
        behind = {**SETTINGS, "dl_default_lease_ttl_sec": lease, "dl_db_dsn": link.dsn}
        self.programs = [farm.start(workers=WORKERS, **behind) for _ in range(FARMS)]
        self.reapers = [farm.reaper(**behind) for _ in range(REAPERS)]
        for program in self.programs:
            until(lambda program=program: len(program.events("worker.started")) >= WORKERS, "workers to start")
        self.pids = self.living()
        self.names = {event["worker"] for program in self.programs for event in program.events("worker.started")}

    def living(self) -> set[int]:
        """The processes of all workers and keepers."""
        return {
            child.pid
            for program in self.programs
            for child in program.children("dataloader: ")
            if child.status() != psutil.STATUS_ZOMBIE
        }

    def add(self, count: int, sec: float = 0.0, go: Path | None = None, key: str = "") -> list[UUID]:
        args = {"witness": str(self.witness), "sec": sec, "go": str(go) if go else None}
        keys = [f"{key}{number}" if key else f"own-{next(self._count)}" for number in range(count)]
        added = [self.farm.enqueue("witnessed", lock_key=key, lease_ttl_sec=self.lease, args=args) for key in keys]
        self.jobs += added
        return added

    def learn(self) -> set[Cell]:
        """Let the loops run undisturbed, and return the places to cut; measures how late a calm claim is."""
        self.link.seen()
        over = time.monotonic() + CALM_SEC
        while time.monotonic() < over:
            self.have_ended(self.add(ALL_WORKERS, sec=0.3, key="k") + self.add(ALL_WORKERS))
            self.have_ended(self.add(1, sec=1.2))
        self.calm_sec = max(
            seconds
            for (seconds,) in self.farm.rows(
                "SELECT extract(epoch FROM min(e.ts) - created_at)::float8 FROM dl_jobs"
                " JOIN dl_job_events e USING (job_id)"
                " WHERE kind = 'picked' AND lock_key LIKE 'own-%%' GROUP BY job_id, created_at"
            )
        )
        seen = self.link.seen()
        roles = ("dl-worker", "dl-keeper", "dl-reaper")
        common = [(role, text) for (role, text), times in seen.items() if role in roles and times >= COMMON]
        return {Cell(role, text, side) for role, text in common for side in (BEFORE, AFTER)}

    def have_ended(self, jobs: Sequence[UUID]) -> None:
        self.wait("the jobs to end", jobs, lambda: not self.farm.rows(OPEN, list(jobs)))

    def wait(self, what: str, jobs: Sequence[UUID], question: Callable[[], object]) -> None:
        """Wait until the answer is true; else tell the last cuts, and what the jobs that have not ended came to."""
        try:
            until(question, what, 6 * BACK_SEC)
        except AssertionError as e:
            rows = self.farm.rows(OPEN, list(jobs))
            story = [e, "the last cuts:", *self.link.hit[-9:], "the jobs that have not ended:", *rows]
            raise AssertionError("\n".join(map(str, story))) from None

    def one(self, seconds: float, how: str, cells: set[Cell]) -> None:
        """One outage, at as many of these cells as there are processes; runs end before, in and after it."""
        number = next(self._count)
        before, during, after = (self.farm.folder / f"{when}-{number}" for when in ("before", "during", "after"))
        runs = [job for go in (before, during, after) for job in self.add(ALL_WORKERS // 3, go=go, key=go.stem[0])]
        self.wait("the runs to begin", runs, lambda: {job for word, job, _, _ in self.notes()} >= set(runs))
        if number % 3 == 0:  # a worker sends UNLISTEN with such a beat, so it will LISTEN again
            self.wait("the runs to be long", runs, lambda: not self.farm.rows(WITHOUT_LATE_BEAT, runs, 2 * LONG_SEC))
        hits = len(self.link.hit)
        self.link.arm(cells)
        before.touch()
        if number % 3:  # else the workers whose runs end find no job
            runs += self.add(ALL_WORKERS, key="b")
        armed = time.monotonic()
        processes = ALL_WORKERS + FARMS + REAPERS
        while len(self.link.hit) < hits + min(processes, len(cells)) and time.monotonic() < armed + ARMED_SEC:
            time.sleep(0.02)
        self.link.away(seconds, how, meanwhile=during.touch)
        runs += self.return_of_the_database(after)
        after.touch()
        self.have_ended(runs)
        assert self.living() == self.pids, "the same workers and keepers"

    def return_of_the_database(self, go: Path) -> list[UUID]:
        """Each worker claims or renews, and each keeper shows its farm, within BACK_SEC; returns fresh jobs."""
        (back_at,) = self.farm.rows("SELECT clock_timestamp()")[0]
        fresh = self.add(ALL_WORKERS, go=go)
        self.wait("the workers to work again", fresh, lambda: self.names <= self.worked(back_at).keys())
        self.wait("the keepers to work again", fresh, lambda: len(self.shown(back_at)) == FARMS)
        self.late.append(max((*self.worked(back_at).values(), *self.shown(back_at).values())))
        return fresh

    def worked(self, since: datetime) -> dict[str, float]:
        """The workers that have claimed or renewed since then: how many seconds after it they first did."""
        return dict(self.farm.rows(WORKED, since, since))

    def shown(self, since: datetime) -> dict[str, float]:
        """The same of the keepers, which show their farms' workers."""
        return dict(self.farm.rows(SHOWN, since, since))

    def notes(self) -> list[tuple[str, UUID, str, float]]:
        """The notes of the runs: begin, end or stop; the job; its key; when."""
        self.witness.touch()
        lines = map(str.split, ended_lines(self.witness))
        return [(word, UUID(job), key, float(at)) for word, job, key, _, _, at in lines]

    def judge(self) -> None:
        """Every job has succeeded once, at its first counted attempt, as its own notes say, and keys exclude."""
        notes = self.notes()
        words = {job: Counter(word for word, of, _, _ in notes if of == job) for job in self.jobs}
        for job_id, status, attempt, kinds in self.farm.rows(
            "SELECT j.job_id, j.status::text, j.attempt, array_agg(e.kind ORDER BY e.event_id) FROM dl_jobs j"
            " JOIN dl_job_events e USING (job_id) GROUP BY 1, 2, 3"
        ):
            assert (status, attempt, illegal(kinds, status)) == ("succeeded", 1, None), (job_id, kinds, words[job_id])
            assert kinds.count("done") == 1, (job_id, kinds)
            assert words[job_id]["end"] == 1, (job_id, kinds, words[job_id])
            assert words[job_id]["begin"] == 1 + words[job_id]["stop"], (job_id, kinds, words[job_id])
        by_key = sorted((key, at, word) for word, _, key, at in notes)
        side_by_side = [
            (before, after)
            for before, after in itertools.pairwise(by_key)
            if before[0] == after[0] and before[2] == after[2] == "begin"
        ]
        assert side_by_side == [], "runs that began before the end of another one of their key"
        lost = [event for reaper in self.reapers for event in reaper.events("reaper.job.taken")]
        assert not lost, "the reapers leave the jobs of living workers alone"
        limit = BACK_SEC + 20 * self.calm_sec  # on a machine where a calm claim is late, so are the others
        assert max(self.late) < limit, sorted(self.late)[-5:]


@pytest.mark.longest
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seconds", "reapers"), [((0.4, 1.5), True), ((LEASE + 1.0,), False)], ids=["of a period", "of a lease"]
)
def test_outages_shorter_and_longer_than_a_period_or_a_lease(
    farm: Farm, seconds: tuple[float, ...], reapers: bool
) -> None:
    """Outages of these lengths in turn at each common statement, before and after it; `reapers`: at theirs too."""
    with linked(farm.dsn) as link, closing(farm):
        trial = Outages(farm, link, LONG_LEASE if max(seconds) < LEASE else LEASE)
        cells = trial.learn()
        steps = {cell for cell in cells if STEP in cell.statement}
        of_reapers = {cell for cell in cells if cell.role == "dl-reaper"}
        left = cells if reapers else cells - of_reapers
        print(f"{seconds} s: {Counter(cell.role for cell in cells)}; a calm claim takes up to {trial.calm_sec:.3f} s")
        for number in range(len(cells)):
            if not left:
                break
            more = steps if number % 2 else set()
            sec, how = seconds[number // 2 % len(seconds)], (REFUSES, SILENT)[number % 2]
            trial.one(sec, how, left | more | (set() if reapers else of_reapers))
            left -= set(link.hit)
        print(f"{number} outages, {len(set(link.hit))} cells; late by up to {max(trial.late):.2f} s")
        assert not left, list(map(str, left))
        trial.judge()


FOREIGN = LOST | {"lease_expires_at": "now() + interval '1 s'"}
END_REAPERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND application_name = 'dl-reaper'
"""
TICKS = "SELECT extract(epoch FROM created_at)::float8 FROM dl_jobs WHERE task = 'ticks' ORDER BY created_at"
PATIENCE = 3.0


def reaper_of(farm: Farm, **settings: Any) -> Program:
    """A reaper that has a schedule of each second to look after."""
    new = new_schedule.checked({"name": "n", "task": "ticks", "queue": "ticks", "interval_sec": 1}, "UTC")
    schedules.add(farm.conn, new, "test")
    short = PERIODS | {"PATIENCE_SEC": PATIENCE - 1, "SCHEDULE_RETRY_SEC": 1}  # and PG_CONNECT_TIMEOUT of a second
    reaper = farm.start("reaper", **{**SETTINGS, "dl_periods": json.dumps(short), **settings})
    until(lambda: len(farm.rows(TICKS)) > 1, "the first jobs of the schedule")
    return reaper


def taken_at(farm: Farm, job: UUID) -> float | None:
    """When the job was given back, by the database's clock."""
    found = farm.rows(
        "SELECT extract(epoch FROM ts)::float8 FROM dl_job_events WHERE job_id = %s AND kind = 'requeue'", job
    )
    return found[0][0] if found else None


def test_the_reaper_finishes_its_rounds_while_its_sessions_are_ended_ten_times_a_second(farm: Farm) -> None:
    reaper = reaper_of(farm)
    over = threading.Event()
    ended = itertools.count()

    def end_sessions() -> None:
        with psycopg.connect(farm.dsn, autocommit=True) as conn:
            while not over.wait(0.1):
                if conn.execute(END_REAPERS).fetchall():
                    next(ended)

    nemesis = threading.Thread(target=end_sessions)
    nemesis.start()
    try:
        (job,) = farm.insert(**FOREIGN)
        so_far = len(farm.rows(TICKS))
        until(lambda: taken_at(farm, job), "the reaper to recover the job of a worker that is gone")
        until(lambda: len(farm.rows(TICKS)) >= so_far + 3, "the jobs of the schedule")
    finally:
        over.set()
        nemesis.join()
    assert next(ended) > 10
    assert reaper.stop() == 0


def test_the_reaper_works_at_once_after_an_outage_and_recovers_leases_after_its_patience(farm: Farm) -> None:
    """Living workers come first: an outage outlasts their leases, and they renew these before it looks."""
    with linked(farm.dsn) as link, closing(farm):
        reaper_of(farm, dl_db_dsn=link.dsn)
        (job,) = farm.insert(**FOREIGN)
        link.leave(REFUSES)
        time.sleep(2.5)  # the length of the outage
        ((back_at,),) = farm.rows("SELECT extract(epoch FROM clock_timestamp())::float8")
        link.back()
        taken = until(lambda: taken_at(farm, job), "the reaper to recover the job of a worker that is gone")
        assert taken - back_at > PATIENCE
        made = [at for (at,) in farm.rows(TICKS) if back_at < at < taken]
        assert made, "meanwhile it makes the schedule's jobs"
