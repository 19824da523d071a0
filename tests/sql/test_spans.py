"""dl_spans: what the roll-up and the folding make of a journal is what a slow look at each row of it finds."""

import json
import random
from collections import Counter, defaultdict
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hands import Conn, plain, quietly, started, value
from histograms import slot_of

from dataloader.queue.reports import runs

Key = tuple[str, str, datetime, str]
BASE = datetime(2000, 1, 1, tzinfo=UTC)
ENDS = {"done": "succeeded", "failed": "failed", "lost": "failed", "canceled": "canceled"}


def floor(at: datetime, minutes: int) -> datetime:
    return BASE + (at - BASE) // timedelta(minutes=minutes) * timedelta(minutes=minutes)


class Journal:
    """A journal of jobs with one run or several, written as it comes, and the slow sums of it."""

    def __init__(self, conn: Conn, seed: int) -> None:
        self.conn, self.chance = conn, random.Random(seed)
        self.now = value(conn, "SELECT now()")
        self.values: dict[Key, list[float]] = defaultdict(list)
        self.rows: list[tuple[datetime, UUID, str, str, str]] = []

    def job(self, ago: timedelta, task: str = "", queue: str = "") -> None:
        chance, job_id = self.chance, uuid4()
        task, queue = task or chance.choice(["load", "<script>", "../..", "x" * 800]), queue or chance.choice("ab")
        due = self.now - ago
        at = due + timedelta(seconds=chance.choice([0, 0.5, 7, 400]))
        with quietly(self.conn):
            times = {"created_at": due - timedelta(seconds=9), "available_at": due}
            plain(self.conn, job_id=job_id, queue=queue, task=task, status="succeeded", **times)
        self._note(due, job_id, queue, "queued", {})
        for _ in range(chance.choice([1, 1, 2])):
            self._note(at, job_id, queue, "picked", {"worker": "w"})
            self._add(task, queue, at, "waiting", (at - due).total_seconds())
            at = self._end(job_id, task, queue, at)

    def _end(self, job_id: UUID, task: str, queue: str, at: datetime) -> datetime:
        chance = self.chance
        seconds = chance.choice([0.0, 0.0004, 0.3, 5.0, 300.0])
        kind, payload = chance.choice(
            [
                ("done", {}),
                ("done", {"peak_mb": chance.uniform(0, 900), "cpu_sec": chance.uniform(0, 90)}),
                ("failed", {"error": "e"}),
                ("lost", {}),
                ("canceled", {"by": "ann"}),
                ("requeue", {"delay_sec": 30}),
                ("requeue", {"reason": "lease expired"}),
                ("requeue", {"reason": "drain", "worker": "w"}),
                ("requeue", {"by": "ann"}),
            ]
        )
        end = at + timedelta(seconds=seconds)
        self._note(end, job_id, queue, kind, payload)
        figure = ENDS.get(kind, "failed" if "by" not in payload and payload.get("reason") != "drain" else "")
        if figure:
            self._add(task, queue, end, figure, seconds)
        for name, field in (("memory", "peak_mb"), ("cpu", "cpu_sec")):
            if field in payload:
                self._add(task, queue, end, name, float(f"{payload[field]:.6g}"))
        return end

    def _note(self, at: datetime, job_id: UUID, queue: str, kind: str, payload: dict[str, Any]) -> None:
        payload = {k: float(f"{v:.6g}") if k in ("peak_mb", "cpu_sec") else v for k, v in payload.items()}
        self.rows.append((at, job_id, queue, kind, json.dumps(payload)))

    def _add(self, task: str, queue: str, at: datetime, figure: str, number: float) -> None:
        self.values[task, queue, at, figure].append(number)

    def write(self) -> None:
        for at, job_id, queue, kind, payload in sorted(self.rows, key=itemgetter(0)):
            self.conn.execute(
                "INSERT INTO dl_job_events (job_id, queue, ts, kind, payload) VALUES (%s, %s, %s, %s, %s)",
                (job_id, queue, at, kind, payload),
            )
        self.rows = []

    def slow(self, is_folded: bool = False) -> dict[Key, tuple[int, float, dict[int, int]]]:
        """The count, the largest value and the slots of each span."""
        spans: dict[Key, list[float]] = defaultdict(list)
        edge = floor(self.now, 60) - timedelta(hours=3)
        for (task, queue, at, figure), numbers in self.values.items():
            span = floor(at, 60) if is_folded and floor(at, 5) < edge else floor(at, 5)
            spans[task, queue, span, figure] += numbers
        return {
            key: (len(found), pytest.approx(max(found), rel=1e-5), dict(Counter(map(slot_of, found))))
            for key, found in spans.items()
        }


def stored(conn: Conn) -> dict[Key, tuple[int, float, dict[int, int]]]:
    rows = conn.execute("SELECT task, queue, at, figure, count, largest, slots, counts FROM dl_spans").fetchall()
    for row in rows:
        assert row[6] == sorted(set(row[6]))
    return {row[:4]: (row[4], row[5], dict(zip(row[6], row[7], strict=True))) for row in rows}


def roll(conn: Conn, limit: int) -> None:
    while value(conn, "SELECT dl_roll(%s)", limit):
        pass


@pytest.mark.parametrize("seed", range(4))
def test_spans_are_what_a_slow_look_at_the_journal_finds(conn: Conn, seed: int) -> None:
    """The size of a bunch makes no difference, nor do calls between that are rolled back, as after a crash."""
    journal = Journal(conn, seed)
    for part in range(3):
        for number in range(30):
            journal.job(timedelta(minutes=journal.chance.choice([20, 200, 400, 3_000]), seconds=part * 60 + number))
        journal.write()
        with conn.transaction(force_rollback=True):
            assert conn.execute("SELECT dl_roll(1000)").fetchone() != (0,)
        roll(conn, journal.chance.choice([1, 7, 1_000]))
    assert stored(conn) == journal.slow()
    with conn.transaction(force_rollback=True):
        conn.execute("SELECT dl_fold_spans(5)")
    with conn.transaction():  # whose now() is that of the slow look, also when an hour is full just now
        journal.now = value(conn, "SELECT now()")
        for late in (0, 5):  # rows that come late join the hours to which their spans have gone
            for number in range(late):
                journal.job(timedelta(minutes=3_000, seconds=number))
            journal.write()
            roll(conn, 1_000)
            while value(conn, "SELECT dl_fold_spans(%s)", journal.chance.choice([1, 3, 1_000])):
                pass
            assert stored(conn) == journal.slow(is_folded=True)
    total = value(conn, "SELECT sum(count) FROM dl_spans")
    assert total == sum(map(len, journal.values.values()))


def test_spans_are_kept_for_90_days(conn: Conn) -> None:
    conn.execute(
        "INSERT INTO dl_spans SELECT 't', 'q', 60, now() - make_interval(days => d), 'cpu', 1, 1, 1, '{3}', '{1}'"
        " FROM unnest(ARRAY[1, 89, 91, 400]) d"
    )
    assert runs.fold(conn) == 2
    days = "SELECT array_agg(round(extract(epoch FROM now() - at) / 86400)::int ORDER BY at DESC) FROM dl_spans"
    assert value(conn, days) == [1, 89]


def test_rows_of_another_time_are_in_no_span(conn: Conn) -> None:
    """Another service may write any time into the journal."""
    journal = Journal(conn, 1)
    for ago in (timedelta(days=91), timedelta(days=-2)):
        journal.job(ago)
    journal.write()
    roll(conn, 1_000)
    assert stored(conn) == {}
    assert value(conn, "SELECT sum(count) FROM dl_totals") > 0


def test_a_name_as_long_as_the_table_allows_stops_no_sums(conn: Conn) -> None:
    """A role that may insert jobs could end all statistics otherwise."""
    noise = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=2_400))
    journal = Journal(conn, 1)
    journal.job(timedelta(minutes=20), noise, noise[:512])
    journal.job(timedelta(minutes=20), "load", "q")
    journal.write()
    roll(conn, 1_000)
    assert {task for task, *_ in stored(conn)} >= {"load"}


def test_a_job_that_was_put_back_tells_no_waiting_time(conn: Conn) -> None:
    """Its row has the next due time by then."""
    journal = Journal(conn, 1)
    journal.job(timedelta(minutes=20), "load", "q")
    journal.write()
    conn.execute("UPDATE dl_jobs SET available_at = now() + interval '1 h'")
    roll(conn, 1_000)
    assert {figure for *_, figure in stored(conn)} & {"waiting"} == set()


def test_figures_compare_a_period_with_the_one_before(conn: Conn) -> None:
    journal = Journal(conn, 5)
    for number in range(200):
        journal.job(timedelta(minutes=10 + number), "load", "q")
    journal.write()
    roll(conn, 1_000)
    conn.execute("BEGIN")  # one now() for all answers
    found = runs.task_runs(conn, "load", "1h")
    for name, since, until in (
        ("figures", found["since"], found["until"]),
        ("before", found["since"] - timedelta(hours=1), found["since"]),
    ):
        ends = [
            (figure, number)
            for (_, _, at, figure), numbers in journal.values.items()
            for number in numbers
            if since <= at < until and figure in runs.ENDS
        ]
        counts = Counter(figure for figure, _ in ends)
        figures = found[name]
        assert {end: figures[end] for end in runs.ENDS} == {end: counts[end] for end in runs.ENDS}, name
        assert figures["failure_rate"] == pytest.approx(counts["failed"] / len(ends))
        good = sorted(number for figure, number in ends if figure == "succeeded")
        assert figures["run_sec"]["largest"] == pytest.approx(good[-1], abs=1e-5)
    assert sum(row["runs"] for row in found["by_time"]) == found["figures"]["runs"]
    assert sum(bar["succeeded"] for bar in found["histogram"]) == found["figures"]["succeeded"]
    assert found["queues"][0]["queue"] == "q"
    of_queue = runs.queue_runs(conn, "q", "1h")
    assert of_queue["figures"]["runs"] == found["figures"]["runs"]
    assert of_queue["tasks"][0]["task"] == "load"
    (listed,) = runs.listed(conn, "1h", "LOA")["tasks"]
    assert (listed["task"], listed["figures"]["runs"]) == ("load", found["figures"]["runs"])
    assert runs.listed(conn, "1h", "nobody's")["tasks"] == []


def test_two_fold_beside_each_other_and_lose_nothing(conn: Conn, dsn: str) -> None:
    journal = Journal(conn, 2)
    for _ in range(20):
        journal.job(timedelta(hours=30), "load", "q")
    journal.write()
    roll(conn, 1_000)
    spans = value(conn, "SELECT count(*) FROM dl_spans WHERE minutes = 5")
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM dl_spans WHERE minutes = 5 ORDER BY at LIMIT 1 FOR UPDATE")
        conn.execute("SET lock_timeout = '5s'")
        conn.execute("SELECT dl_fold_spans(%s)", (spans,))
        assert value(conn, "SELECT count(*) FROM dl_spans WHERE minutes = 5") == 1
    runs.fold(conn)
    assert stored(conn) == journal.slow(is_folded=True)


def test_two_fold_into_the_same_hours_in_one_order(dsn: str, conn: Conn) -> None:
    """Each takes two of these spans; the queues come in another order by minutes than by their names."""
    begin = floor(value(conn, "SELECT now()") - timedelta(hours=30), 60)
    add = "INSERT INTO dl_spans VALUES (%s, %s, %s, %s, 'cpu', 1, 1, 1, '{1}', '{1}')"
    conn.execute(add, ("load", "a", 60, begin))
    for minute, queue in enumerate("abba"):
        conn.execute(add, ("load", queue, 5, begin + timedelta(minutes=5 * minute)))
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(psycopg.connect(dsn)) for _ in range(3))
        third.execute("SELECT FROM dl_spans WHERE minutes = 60 FOR UPDATE")
        folding = []
        for session in (first, second):
            fold = partial(session.execute, "SELECT dl_fold_spans(2)")
            folding.append(stack.enter_context(started(fold, session.info.backend_pid, conn)))
        third.commit()
        for session, each in zip((first, second), folding, strict=True):
            each.result()
            session.commit()
    assert {row[0]: row[1] for row in conn.execute("SELECT queue, count FROM dl_spans")} == {"a": 3, "b": 2}
