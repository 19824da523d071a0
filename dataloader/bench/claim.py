"""claim: the time of one claim behind a backlog, against a queue of 1,000 jobs; the cases in turns.

Each case is a schema of its own with 1,000 claimable jobs and, beside them, more claimable jobs, jobs for next week,
finished jobs, jobs of busy keys in front, or rows in front that an open transaction has locked. One case has just seen
200 jobs claimed and handed back; one has a few jobs only, in a table that nobody has analysed. One is an ordered queue
with a key whose first job waits for its retry, against an ordered queue without it. One has jobs of eight affinity
keys, against the same rows without. Claims that meet jobs of a busy key or a full limit
first park them, many at a time; the time of these claims is a line of its own. Then the bench vacuums their table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from dataloader.bench.line import Line, Must, median, percentile
from dataloader.bench.place import SQL, BenchError, Place, add, seed
from dataloader.farm.batch import Bookmark
from dataloader.queue import db, lifecycle, operations
from dataloader.queue.job import Finish

SAMPLES = 200
CLAIMABLE = 1_000  # jobs in every case, beside what the case adds
MANY = 1_000_000
OF_ONE_KEY = 100_000
FEW = 300
_HOUR_SEC = 3_600.0
_WEEK_SEC = 168 * _HOUR_SEC
BACKOFF_SEC = 15.0
LOOKAHEAD, WARM = 50, 2
_MUST = Must(most=1.2, aim=1.0)


@dataclass(frozen=True, slots=True)
class Case:
    """`rows` further rows of a kind, beside those of the base; `busy`: their keys have running jobs.

    `is_ordered`: in an ordered queue, where the first of these rows has failed. `models`: the jobs have so many
    affinity keys, and those of the last two are warm in the worker that claims. `limit`: the further rows have this
    limit, which is full.
    """

    name: str
    rows: int
    more: dict[str, Any] = field(default_factory=dict)
    busy: int = 0
    is_locked: bool = False
    hand_backs: int = 0
    is_analysed: bool = True
    is_ordered: bool = False
    models: int = 0
    limit: str | None = None

    @property
    def base(self) -> Case:
        """The case that this one is compared with: without further rows, or without affinity keys."""
        if self.models:
            return MANY_READY
        return BASE_ORDERED if self.is_ordered else BASE


BASE = Case("base", 0)
BASE_ORDERED = Case("base, ordered", 0, is_ordered=True)
FAILING = Case(
    "100,000 behind a failing head", OF_ONE_KEY, {"key": "failing", "keys": 1, "age_sec": _HOUR_SEC}, is_ordered=True
)
LIMITED = Case("100,000 of a full limit", OF_ONE_KEY, {"key": "limited", "age_sec": _HOUR_SEC}, limit="bench")
ONE_KEY = Case("100,000 of one busy key", OF_ONE_KEY, {"keys": 1, "age_sec": _HOUR_SEC}, busy=1)
MANY_READY = Case("1,000,000 ready", MANY, {"age_sec": -_HOUR_SEC})
OF_MODELS = Case("1,000,000 ready, by affinity", MANY, {"age_sec": -_HOUR_SEC}, models=8)
CASES = (
    Case("100,000 ready", 100_000, {"age_sec": -_HOUR_SEC}),
    MANY_READY,
    OF_MODELS,
    Case("1,000,000 for next week", MANY, {"delay_sec": _WEEK_SEC}),
    Case("1,000,000 finished", MANY, {"status": "succeeded"}),
    Case("5,000 of keys busy elsewhere", 5_000, {"key": "busy", "keys": 5_000, "age_sec": _HOUR_SEC}, busy=5_000),
    Case("2,000 locked at the head", 2_000, {"key": "locked", "age_sec": _HOUR_SEC}, is_locked=True),
    Case("just after 200 hand-backs", 0, hand_backs=200),
    Case("few rows, not analysed", 0, is_analysed=False),
    ONE_KEY,
    LIMITED,
    FAILING,
)


class Claimer:
    """A worker's session on one case, without a worker."""

    def __init__(self, conn: db.Connection, name: str, case: Case) -> None:
        self.conn = conn
        self.session = lifecycle.open_session(conn, f"bench:{name}")
        self._case = case
        self._bookmark = Bookmark()
        self._warm: list[str] = []  # the affinity keys of the latest jobs, as a worker keeps them

    def claim(self) -> tuple[float, bool]:
        """Milliseconds of one claim, and whether it got a job; the call finishes the job."""
        start = time.perf_counter()
        head = self._bookmark.start()
        affinity = lifecycle.Affinity(self._warm, (), LOOKAHEAD) if self._case.models else None
        claim = lifecycle.step(self.session, ["bench"], BACKOFF_SEC, 1, None, head, affinity=affinity)
        took = (time.perf_counter() - start) * 1_000
        self._bookmark.move(claim.head)
        if claim.job:
            self._use(claim.job.affinity_key)
            lifecycle.finish(self.conn, claim.job, Finish("succeed"))
        elif not claim.look_again:
            raise BenchError("a claim found nothing where there are jobs")
        return took, claim.job is not None

    def _use(self, affinity_key: str | None) -> None:
        if affinity_key:
            self._warm = [*(key for key in self._warm if key != affinity_key), affinity_key][-WARM:]

    def until_claimed(self) -> list[float]:
        """Milliseconds of each claim up to the first that gets a job."""
        times = []
        while True:
            took, has_job = self.claim()
            times.append(took)
            if has_job:
                return times

    def fill_up(self, jobs: int) -> None:
        """Add as many jobs as were claimed, and hand back a batch if that is the case."""
        if self._case.is_analysed:
            seed(self.conn, jobs, age_sec=-2 * _HOUR_SEC)
        else:
            add(self.conn, jobs)
        self.hand_back()

    def hand_back(self) -> None:
        """Claim many jobs at once, and return all of them."""
        if most := self._case.hand_backs:
            jobs = lifecycle.step(self.session, ["bench"], BACKOFF_SEC, most).jobs
            ends = [lifecycle.Ended(job, Finish("hand_back", "bench")) for job in jobs]
            lifecycle.finish_some(self.conn, self.session.worker, ends)

    def fail_first(self) -> None:
        """Claim the first job of the case's rows, if there are any; it fails, and waits for its retry."""
        if self._case.rows and (job := lifecycle.step(self.session, ["bench"], BACKOFF_SEC, 1).job):
            lifecycle.finish(self.conn, job, Finish("retry", "bench", _WEEK_SEC))

    def buffers(self) -> int:
        """Pages that one claim reads, by EXPLAIN; the claim is rolled back."""
        ends = dict.fromkeys(("job_ids", "attempts", "verbs", "errors", "delays_sec", "progress", "facts"))
        parameters = ends | {
            "queues": ["bench"],
            "by_lag": False,
            "worker": self.session.worker,
            "backend_start": self.session.backend_start,
            "backoff_sec": BACKOFF_SEC,
            "most": 1,
            "from_priority": self._bookmark.head.priority,
            "from_time": self._bookmark.head.time,
            "prefer": None,
        }
        self.conn.execute("BEGIN")
        explain = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + db.statements("queue.sql")["step"]
        row = self.conn.execute(explain.encode(), parameters).fetchone()
        self.conn.execute("ROLLBACK; SELECT pg_advisory_unlock_all()")
        plan = row[0][0]["Plan"] if row else {}
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def measure(place: Place) -> Iterator[Line]:
    """A line for each case, and one for the claims that park a busy key's jobs."""
    with ExitStack() as stack:
        claimers = _claimers(place, stack)
        first = {name: claimer.until_claimed() for name, claimer in claimers.items()}
        before = _before_vacuum(claimers[ONE_KEY.name])
        _before_vacuum(claimers[FAILING.name])
        _before_vacuum(claimers[LIMITED.name])
        _lock_heads(place, stack)
        pages = {name: claimer.buffers() for name, claimer in claimers.items()}
        times = _times(place, claimers, place.wish.scaled(SAMPLES, least=10))
    for case in CASES:
        yield _line(place, case, times, pages)
    parking = first[ONE_KEY.name]
    facts = {"claims": len(parking), "total_ms": sum(parking), "before_vacuum_ms": median(before)}
    note = f"the longest of {len(parking)} claims, {sum(parking):,.0f} ms in all; {median(before):.2f} until the vacuum"
    yield Line("claim", "parking the busy key's jobs", "ms", [max(parking)], note=note, facts=facts)


def _lock_heads(place: Place, stack: ExitStack) -> None:
    """Lock the oldest rows of the cases that say so; last, for open transactions delay vacuums and new indexes."""
    for case in CASES:
        if case.is_locked:
            other = stack.enter_context(place.connect(place.queue(_schema(case))))
            other.execute("BEGIN")
            other.execute(SQL["lock_older"], {"age_sec": _HOUR_SEC / 2})


def _before_vacuum(claimer: Claimer) -> list[float]:
    """Milliseconds of claims right after the parking; then vacuum, as autovacuum would within its minute.

    Until the vacuum, dead index entries of the parked jobs precede those of the other jobs.
    """
    times = [claimer.until_claimed()[-1] for _ in range(50)]
    seed(claimer.conn, len(times), age_sec=-2 * _HOUR_SEC)  # the number of jobs stays the same
    claimer.conn.execute("VACUUM dl_jobs")
    return times


def _line(place: Place, case: Case, times: dict[str, list[list[float]]], pages: dict[str, int]) -> Line:
    rows = place.wish.scaled(case.rows) if case.rows else 0
    facts: dict[str, Any] = {"rows": rows, "pages": pages[case.name], "pages_base": pages[case.base.name]}
    facts |= {f"p{percent}_ms": _over_rounds(times[case.name], percent) for percent in (50, 90, 99)}
    ours, bare = ([percentile(sample, 50) for sample in times[name]] for name in (case.name, case.base.name))
    note = f"pages {pages[case.name]}, among {CLAIMABLE:,} jobs {pages[case.base.name]}"
    name = case.name if rows == case.rows else f"{case.name} (here {rows:,})"
    return Line("claim", name, "ms", ours, bare, _MUST, note, facts)


def _claimers(place: Place, stack: ExitStack) -> dict[str, Claimer]:
    """A session on each case, the bases first."""
    claimers = {}
    with place.steps("claim: rows", len(CASES) + 2) as step:
        for case in (BASE, BASE_ORDERED, *CASES):
            claimers[case.name] = _claimer(place, stack, case)
            step()
    return claimers


def _times(place: Place, claimers: dict[str, Claimer], samples: int) -> dict[str, list[list[float]]]:
    """Milliseconds of each claim, by case and round; the cases take turns."""
    times: dict[str, list[list[float]]] = {name: [] for name in claimers}
    with place.steps("claim", place.wish.rounds * samples) as step:
        for _ in range(place.wish.rounds):
            this: dict[str, list[float]] = {name: [] for name in claimers}
            for _ in range(samples):
                for name, claimer in claimers.items():
                    this[name].append(claimer.until_claimed()[-1])
                step()
            for name, sample in this.items():
                times[name].append(sample)
                claimers[name].fill_up(samples)  # the number of jobs stays the same
    return times


def _claimer(place: Place, stack: ExitStack, case: Case) -> Claimer:
    conn = stack.enter_context(place.connect(place.queue(_schema(case))))
    if case.is_analysed:
        _fill(conn, place, case)
    else:
        add(conn, place.wish.scaled(SAMPLES, least=10) + FEW)
    claimer = Claimer(conn, _schema(case), case)
    claimer.hand_back()
    if case.is_ordered:
        operations.set_order(conn, "bench", "bench", ordered=True)
        claimer.fail_first()
    return claimer


def _schema(case: Case) -> str:
    return "claim_" + re.sub(r"\W", "_", case.name)


def _fill(conn: db.Connection, place: Place, case: Case) -> None:
    """The rows of the base and of the case; vacuumed and analysed, as by autovacuum within its minute."""
    quiet = [row[0] for row in conn.execute(SQL["quiet"]).fetchall()]
    _switch(conn, quiet, "DISABLE")
    seed(conn, CLAIMABLE)
    if case.rows:
        seed(conn, place.wish.scaled(case.rows), **case.more)
    if case.limit:
        operations.set_limit(conn, case.limit, "bench", most=0)
        conn.execute(SQL["limit_rows"], {"limit": case.limit, "key": case.more["key"]})
    if case.models:
        conn.execute(SQL["share_models"], {"models": case.models})
    _switch(conn, quiet, "ENABLE")
    if case.busy:
        conn.execute(SQL["hold"], {"key": case.more.get("key", "key"), "keys": case.busy})
    conn.execute("VACUUM (ANALYZE) dl_jobs")


def _switch(conn: db.Connection, triggers: list[str], what: str) -> None:
    for trigger in triggers:
        conn.execute(sql.SQL("ALTER TABLE dl_jobs {} TRIGGER {}").format(sql.SQL(what), sql.Identifier(trigger)))


def _over_rounds(rounds: list[list[float]], percent: float) -> float:
    return median([percentile(sample, percent) for sample in rounds])
