"""The keys of an ordered queue, as people are shown them: which wait, behind what, the jobs of each in their order."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hands import Conn, Workers, enqueue

from dataloader.queue import operations
from dataloader.queue.reports import keys, stats

HOSTILE = ["", "'", '"; DROP TABLE dl_jobs; --', "a/../b%2F?#", "<script>", "\u202eright", "line\nbreak", "ü" * 500]


@pytest.fixture
def ordered(conn: Conn) -> Conn:
    """A database in which the queue `q` is ordered."""
    operations.set_order(conn, "q", "test", ordered=True)
    return conn


def put(conn: Conn, lock_key: str, score: float | None = None, **more: Any) -> UUID:
    return enqueue(conn, queue="q", lock_key=lock_key, score=score, **more)


def walked(read: Callable[[str | None], Any]) -> list[dict[str, Any]]:
    """The rows of all pages."""
    found: list[dict[str, Any]] = []
    after = None
    for _ in range(1_000):
        page = read(after)
        found += page.rows
        if (after := page.next) is None:
            return found
    raise AssertionError("the list has no end")


def test_a_key_is_shown_with_its_head_and_what_that_waits_for(ordered: Conn, workers: Workers) -> None:
    late = put(ordered, "order-7", 2.0)
    head = put(ordered, "order-7", 1.0, available_at=datetime.now(UTC) + timedelta(hours=1))
    put(ordered, "order-8", 5.0)
    only = put(ordered, "order-9", 4.0)
    worker = workers()
    held = worker.take()
    assert held.lock_key == "order-8"
    found = keys.page(ordered, "q").rows
    assert [(row["lock_key"], row["job_id"], row["payloads"]) for row in found] == [
        ("order-7", head, 2),
        ("order-9", only, 1),
    ]
    assert (found[0]["score"], found[0]["attempt"], found[0]["waiting_for"]["reason"]) == (1.0, 0, "time")
    assert found[1]["waiting_for"]["reason"] in ("worker", "no_worker")
    put(ordered, "order-8", 6.0)
    (waits,) = [row for row in keys.page(ordered, "q").rows if row["lock_key"] == "order-8"]
    assert (waits["waiting_for"]["reason"], waits["waiting_for"]["job_id"]) == ("lock", held.job_id)
    assert late in [row["job_id"] for row in keys.key(ordered, "q", "order-7").payloads.rows]


def test_a_dead_head_that_holds_its_key_is_named(ordered: Conn, workers: Workers) -> None:
    operations.set_order(ordered, "q", "test", on_dead="hold")
    dead, waits = put(ordered, "k", 1.0), put(ordered, "k", 2.0)
    worker = workers()
    worker.finish(worker.take(), "fail", error="no")
    (found,) = keys.page(ordered, "q").rows
    assert (found["job_id"], found["waiting_for"]["reason"], found["waiting_for"]["job_id"]) == (waits, "dead", dead)
    key = keys.key(ordered, "q", "k")
    assert [row["job_id"] for row in key.dead] == [dead]
    assert key.head["waiting_for"]["reason"] == "dead"


def test_keys_are_paged_by_name_whatever_it_is(ordered: Conn) -> None:
    names = sorted({*HOSTILE, *(f"k{number}" for number in range(20))})
    for name in names:
        put(ordered, name or "x")
    ordered.execute("UPDATE dl_jobs SET lock_key = '' WHERE lock_key = 'x'")  # as another service may write it
    dead = put(ordered, "k3-dead")
    ordered.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE job_id = %s", (dead,))
    enqueue(ordered, queue="plain", lock_key="k5-of-another-queue")
    in_order = [name for (name,) in ordered.execute("SELECT unnest(%s::text[]) n ORDER BY n", (names,))]
    for limit in (1, 3, 200):
        pages = walked(lambda after, limit=limit: keys.page(ordered, "q", limit, after))
        assert [row["lock_key"] for row in pages] == in_order
    for name in names:
        assert keys.key(ordered, "q", name).length == 1


def test_the_payloads_of_a_key_come_in_the_order_in_which_they_start(ordered: Conn) -> None:
    ids = {score: put(ordered, "k", score) for score in (3.0, -1.5, 1e300, 2.0, 0.1, 7.0)}
    twin = put(ordered, "k", 2.0)
    ordered.execute("UPDATE dl_jobs SET attempt = 2 WHERE job_id = %s", (ids[7.0],))
    ordered.execute("UPDATE dl_jobs SET score = 'Infinity' WHERE job_id = %s", (ids[1e300],))
    in_order = [ids[-1.5], ids[0.1], ids[2.0], twin, ids[3.0], ids[7.0], ids[1e300]]
    for limit in (1, 2, 50):
        pages = walked(lambda after, limit=limit: keys.key(ordered, "q", "k", limit, after).payloads)
        assert [row["job_id"] for row in pages] == in_order
    assert keys.key(ordered, "q", "k", 1, keys.key(ordered, "q", "k", 1).payloads.next).head["job_id"] == ids[-1.5]


def test_long_arguments_stay_away_and_short_ones_are_parsed(ordered: Conn) -> None:
    put(ordered, "k", 1.0, args={"version": 1})
    put(ordered, "k", 2.0, args={"text": "x" * 5_000})
    put(ordered, "k", 3.0, args={"text": "".join(map(str, range(2_000)))})
    assert [row["args"] for row in keys.key(ordered, "q", "k").payloads.rows] == [{"version": 1}, None, None]


def test_the_figures_count_the_keys_of_ordered_queues_alone(ordered: Conn) -> None:
    for number in range(6):
        put(ordered, f"k{number % 3}")
        enqueue(ordered, queue="plain", lock_key=f"k{number}")
    found = {row["queue"]: row for row in stats.overview(ordered)["queues"]}
    assert (found["q"]["keys"], found["q"]["length"], found["plain"]["keys"]) == (3, 6, None)
    assert stats.overview(ordered)["total"]["keys"] == 3
    row = stats._count(ordered, 1_000, 10.0)[0]
    assert stats.figures(row | {"keys": 1_000, "noted_keys": 7_000}, 1_000)["keys"] == 7_000
    assert stats.figures(row | {"keys": 999, "noted_keys": 7_000}, 1_000)["keys"] == 999
    operations.set_order(ordered, "q", "test", ordered=False)
    assert stats.overview(ordered)["total"]["keys"] is None


def test_many_keys_are_noted_by_the_reaper(ordered: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        put(ordered, f"k{number}")
    monkeypatch.setattr(stats, "COUNTED", 5)
    (found,) = stats.overview(ordered)["queues"]
    assert (found["keys"], found["counted_at"]) == (5, None)
    assert stats.note_lengths(ordered, 0) is not None
    (found,) = stats.overview(ordered)["queues"]
    assert (found["keys"], found["counted_at"] is None) == (8, False)
    assert stats._SQL.rows(ordered, "queues", most=0, most_keys=0)[0]["keys"] == 8
