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
    operations.set_order(ordered, "q", "test", on_dead="hold")
    late = put(ordered, "order-7", 2.0)
    head = put(ordered, "order-7", 1.0, available_at=datetime.now(UTC) + timedelta(hours=1))
    only = put(ordered, "order-9", 4.0, priority=200)
    dead, behind_dead = put(ordered, "dead", 1.0, priority=1), put(ordered, "dead", 2.0)
    held, behind_held = put(ordered, "held", 5.0), put(ordered, "held", 6.0)
    worker = workers()
    worker.finish(worker.take(), "fail", error="no")
    assert worker.take().job_id == held
    found = {row["lock_key"]: row for row in keys.page(ordered, "q").rows}
    reasons = {name: (row["job_id"], row["waiting_for"]["reason"]) for name, row in found.items()}
    assert reasons.pop("order-9") in ((only, "worker"), (only, "no_worker"))
    assert reasons == {"order-7": (head, "time"), "dead": (behind_dead, "dead"), "held": (behind_held, "lock")}
    assert [found[name]["waiting_for"]["job_id"] for name in ("dead", "held")] == [dead, held]
    shown = found["order-7"]
    assert (shown["payloads"], shown["score"], shown["attempt"]) == (2, 1.0, 0)
    assert late in [row["job_id"] for row in keys.key(ordered, "q", "order-7").payloads.rows]
    key = keys.key(ordered, "q", "dead")
    assert ([row["job_id"] for row in key.dead], key.head["waiting_for"]["reason"]) == ([dead], "dead")


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


def test_the_figures_count_the_keys_of_ordered_queues_and_the_reaper_notes_many(
    ordered: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        put(ordered, f"k{number}")
        enqueue(ordered, queue="plain", lock_key=f"k{number}")

    def counted() -> list[tuple[Any, ...]]:
        return [(row["keys"], row["counted_at"] is None) for row in stats.overview(ordered)["queues"]]

    assert (counted(), stats.overview(ordered)["total"]["keys"]) == ([(None, True), (8, True)], 8)
    monkeypatch.setattr(stats, "COUNTED", 5)
    assert counted() == [(None, True), (5, True)]
    assert stats.note_lengths(ordered, 0) is not None
    assert counted()[1] == (8, False)
    row = stats._count(ordered, 1_000, 10.0)[0]
    assert stats.figures(row | {"keys": 1_000, "noted_keys": 7_000}, 1_000)["keys"] == 7_000
    assert stats.figures(row | {"keys": 999, "noted_keys": 7_000}, 1_000)["keys"] == 999
    operations.set_order(ordered, "q", "test", ordered=False)
    assert stats.overview(ordered)["total"]["keys"] is None
