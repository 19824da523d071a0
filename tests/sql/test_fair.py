"""A job's turn: jobs with deadlines go first, and the shares of a fair queue have their turns one after the other."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from hands import Conn, Worker, Workers, age, buffers, enqueue, locked, many, plain, quietly, row

from dataloader import enqueue as add_one
from dataloader.queue import db, lifecycle, operations
from dataloader.queue.enqueue import NewJob
from dataloader.queue.enqueue import enqueue_many as add_many


def after(minutes: float) -> datetime:
    return datetime.now(UTC) + timedelta(minutes=minutes)


def add_all(conn: Conn, *jobs: dict[str, Any]) -> list[UUID]:
    new = [NewJob(**{"queue": "q", "task": "t", "lock_key": str(uuid4())} | job) for job in jobs]
    return [job_id for job_id, _ in add_many(conn, new)]


def by_sql(conn: Conn, **more: Any) -> UUID:
    given = {"queue": "q", "task": "t", "lock_key": str(uuid4())} | more
    names = ", ".join(f"{name} => %({name})s" for name in given)
    row = conn.execute(f"SELECT dl_enqueue({names})".encode(), given).fetchone()
    return UUID(str(row[0]))


def one(conn: Conn, **more: Any) -> UUID:
    return add_one(conn, queue="q", task="t", lock_key=str(uuid4()), schema="public", **more)[0]


def listed(conn: Conn, **more: Any) -> UUID:
    return add_all(conn, more)[0]


ADDERS: dict[str, Callable[..., UUID]] = {
    **{add.__name__: add for add in (enqueue, one, listed, by_sql, plain)},
    "one with a key": lambda conn, **more: one(conn, idempotency_key=str(uuid4()), **more),
    "listed with a key": lambda conn, **more: listed(conn, idempotency_key=str(uuid4()), **more),
}


def share_out(conn: Conn, by: str | None = "partition_key") -> None:
    operations.set_order(conn, "q", "test", fair_by=by)


def order(worker: Worker, number: int, column: str = "partition_key") -> list[Any]:
    """This column of the next jobs, claimed one by one, each ended before the next."""
    found = []
    for _ in range(number):
        job = worker.take()
        found.append(row(worker.conn, job.job_id)[column])
        worker.finish(job)
    return found


@pytest.mark.parametrize("add", ADDERS.values(), ids=ADDERS)
def test_the_earliest_deadline_goes_first(conn: Conn, worker: Worker, add: Callable[..., UUID]) -> None:
    deadline = after(30)
    none, late, soon = add(conn), add(conn, deadline=after(90)), add(conn, deadline=deadline)
    urgent = add(conn, priority=1)
    assert order(worker, 4, "job_id") == [urgent, soon, late, none]
    assert row(conn, soon)["deadline"] == deadline


def test_a_parked_job_with_a_deadline_is_let_in_first(conn: Conn, worker: Worker, workers: Workers) -> None:
    share_out(conn)
    operations.set_limit(conn, "one", "test", most=1)
    job = worker.start_new(limits=["one"])
    none, soon = enqueue(conn, limits=["one"]), enqueue(conn, limits=["one"], deadline=after(5))
    assert workers().claim().job is None
    worker.finish(job)
    assert order(worker, 2, "job_id") == [soon, none]


@pytest.mark.parametrize("add", ADDERS.values(), ids=ADDERS)
def test_a_share_does_not_wait_for_the_backlog_of_another(conn: Conn, worker: Worker, add: Callable[..., UUID]) -> None:
    share_out(conn)
    for _ in range(20):
        add(conn, partition_key="big")
    order(worker, 3)
    for _ in range(2):
        add(conn, partition_key="small")
    assert order(worker, 5).count("small") == 2


@pytest.mark.parametrize("by", ["partition_key", "producer"])
def test_the_shares_of_the_field_start_in_turns(conn: Conn, worker: Worker, by: str) -> None:
    share_out(conn, by)
    other = {"partition_key": "producer", "producer": "partition_key"}[by]
    add_all(conn, *[{by: share, other: "same"} for share in "aaaaaabbbbbbcccccc"])
    found = order(worker, 18, by)
    assert all(len(set(found[at : at + 3])) == 3 for at in range(0, 18, 3)), found


@pytest.mark.parametrize(
    "older", [{"queue": "other"}, {"priority": 1}, {"deadline": after(5)}], ids=["queue", "priority", "deadline"]
)
def test_the_clock_is_that_of_the_queue_and_priority(conn: Conn, worker: Worker, older: dict[str, Any]) -> None:
    share_out(conn)
    add_all(conn, *[{"partition_key": "big"}] * 5)
    with quietly(conn):
        job_id = plain(conn, made_sec=-3_600, **older)
        if "deadline" in older:
            conn.execute("UPDATE dl_jobs SET turn_at = deadline - interval '1000 years' WHERE job_id = %s", (job_id,))
    add_all(conn, *[{"partition_key": "small"}] * 5)
    found = order(worker, 4)
    assert found.count("big") >= 2, found


def test_what_runs_in_another_queue_says_nothing(conn: Conn, worker: Worker) -> None:
    share_out(conn)
    operations.set_order(conn, "other", "test", fair_by="partition_key")
    job = worker.start_new(queue="other", partition_key="a")
    conn.execute("UPDATE dl_jobs SET turn_at = now() + interval '1 hour' WHERE job_id = %s", (job.job_id,))
    assert row(conn, enqueue(conn, partition_key="a"))["turn_at"] <= row(conn, job.job_id)["now"]


def test_jobs_without_a_producer_are_one_share(conn: Conn, worker: Worker) -> None:
    share_out(conn, "producer")
    assert row(conn, enqueue(conn, priority=900))["share"] == ""
    assert row(conn, plain(conn, priority=900))["share"] == ""
    add_all(conn, {}, {}, {}, {"producer": "p"})
    assert "p" in order(worker, 2, "producer")


@pytest.mark.parametrize("by", ["partition_key", "producer"])
def test_a_backlog_is_shared_by_the_field_each_share_in_its_order(
    conn: Conn, worker: Worker, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(operations, "TURNS_AT_ONCE", 3)
    big = add_all(conn, *[{by: "big"}] * 5)
    small, none = enqueue(conn, **{by: "small"}), enqueue(conn)
    share_out(conn, by)
    assert row(conn, none)["share"] == ""
    found = order(worker, 7, "job_id")
    assert set(found[:3]) == {big[0], small, none}
    assert [job_id for job_id in found if job_id in big] == big


def test_a_job_that_somebody_has_locked_is_left_when_its_queue_becomes_fair(conn: Conn, dsn: str) -> None:
    held, free = enqueue(conn, partition_key="a"), enqueue(conn, partition_key="a")
    with db.connect(dsn, name="stranger", schema="public") as stranger, locked(stranger, held):
        conn.execute("SET lock_timeout = '20s'")
        share_out(conn)
    assert [row(conn, job_id)["share"] for job_id in (held, free)] == [None, "a"]


def test_a_backlog_has_its_turns_when_its_queue_becomes_fair(conn: Conn, worker: Worker) -> None:
    add_all(conn, *[{"partition_key": "big"}] * 30)
    enqueue(conn, partition_key="small")
    scheduled = enqueue(conn, partition_key="big", available_at=after(60))
    dated = enqueue(conn, partition_key="big", deadline=after(60))
    other = enqueue(conn, queue="other", partition_key="big")
    share_out(conn)
    assert row(conn, scheduled)["turn_at"] is None
    assert row(conn, scheduled)["share"] == "big"
    assert (row(conn, other)["share"], row(conn, other)["turn_at"]) == (None, None)
    assert row(conn, dated)["share"] is None
    assert order(worker, 1, "job_id") == [dated]
    assert "small" in order(worker, 2)


def test_jobs_that_were_scheduled_have_their_turns_when_they_are_due(conn: Conn, worker: Worker) -> None:
    """They do not go before all others for having been added long ago."""
    share_out(conn)
    scheduled = add_all(conn, *[{"partition_key": "big", "available_at": after(60)}] * 20)
    assert {row(conn, job_id)["turn_at"] for job_id in scheduled} == {None}
    conn.execute("UPDATE dl_jobs SET created_at = created_at - interval '1 day', available_at = now()")
    conn.execute("UPDATE dl_jobs SET blocked_on = 'time'")
    add_all(conn, *[{"partition_key": "small"}] * 5)
    lifecycle.wake(conn, 100)
    assert order(worker, 8).count("small") >= 4


@pytest.mark.parametrize("by", ["partition_key", None])
def test_jobs_that_become_ready_alone_have_turns_if_the_queue_is_fair_then(conn: Conn, by: str | None) -> None:
    share_out(conn)
    job_id = enqueue(conn, partition_key="a", available_at=after(60))
    share_out(conn, by)
    with quietly(conn):
        age(conn, job_id, "available_at", 7_200)
    lifecycle.wake(conn, 100)
    found = row(conn, job_id)
    assert (found["blocked_on"], found["share"]) == (None, "a" if by else None)
    assert (found["turn_at"] is None) == (by is None)
    assert by is None or found["turn_at"] <= found["now"]


def test_jobs_that_waited_for_their_parents_have_their_turns_then(conn: Conn, worker: Worker) -> None:
    """And one of them that is scheduled has its turn when it is due."""
    share_out(conn)
    parent = enqueue(conn, priority=1)
    children = add_all(conn, *[{"partition_key": "big", "depends_on": [parent]} for _ in range(10)])
    scheduled = enqueue(conn, partition_key="a", depends_on=[parent], available_at=after(60))
    assert {row(conn, job_id)["turn_at"] for job_id in (*children, scheduled)} == {None}
    add_all(conn, *[{"partition_key": "small"}] * 5)
    order(worker, 1)
    assert (row(conn, scheduled)["blocked_on"], row(conn, scheduled)["turn_at"]) == ("time", None)
    assert order(worker, 6).count("small") >= 3


def test_a_job_keeps_its_deadline_behind_its_parents_and_over_a_retry(conn: Conn, worker: Worker) -> None:
    none, parent = enqueue(conn), enqueue(conn, priority=1)
    soon = enqueue(conn, depends_on=[parent], deadline=after(5))
    assert order(worker, 1, "job_id") == [parent]
    worker.finish(worker.take(), "retry", delay_sec=0.0)
    assert order(worker, 2, "job_id") == [soon, none]


@pytest.mark.parametrize("delay_sec", [0.0, 60.0])
def test_a_job_that_comes_back_keeps_its_turn(conn: Conn, worker: Worker, delay_sec: float) -> None:
    share_out(conn)
    add_all(conn, *[{"partition_key": "a"}] * 5)
    job = worker.take()
    worker.finish(job, "retry", delay_sec=delay_sec)
    if delay_sec:
        with quietly(conn):
            age(conn, job.job_id, "available_at", 2 * delay_sec)
        lifecycle.wake(conn, 100)
    assert worker.take().job_id == job.job_id


def test_a_stuck_row_lets_no_newcomer_pass_the_others(conn: Conn, dsn: str, worker: Worker, workers: Workers) -> None:
    """Locked by a stranger, say: the clock of the queue shows more than the turn of that row."""
    share_out(conn)
    stuck = enqueue(conn, partition_key="stuck")
    add_all(conn, *[{"partition_key": "busy"}] * 30)
    with db.connect(dsn, name="stranger", schema="public") as stranger, locked(stranger, stuck):
        order(worker, 20)
        job = worker.take()
        add_all(conn, *[{"partition_key": "new"}] * 15)
        assert order(workers(), 10).count("busy") >= 4
        worker.finish(job)


def test_the_backlog_of_a_share_costs_the_turns_of_others_nothing(conn: Conn) -> None:
    share_out(conn)
    add_all(conn, *[{"partition_key": "big"}] * 10)
    conn.execute(f"RESET ALL; DISCARD PLANS; {lifecycle.PLANS}")

    def cost(share: str) -> int:
        turn = "SELECT dl_turn('q', 100, %s, clock_timestamp())"
        return min(buffers(conn, turn, share) for _ in range(3))  # one plans anew when autovacuum was at the table

    cost("big"), cost("small")  # the catalogs
    few = cost("big") + cost("small")
    with quietly(conn):
        many(conn, 20_000, partition_key="'big'", share="'big'", turn_at="now() + i * interval '1 us'")
    assert cost("big") + cost("small") <= few + 30  # a level of each index; 20,000 rows have 300 pages
