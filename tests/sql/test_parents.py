"""Jobs that wait for other jobs: whoever ends a parent, its children learn of it in the same transaction."""

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hands import Conn, Worker, Workers, buffers, enqueue, expire, journal, locked, quietly, row, started, until, value
from patience import PATIENCE

from dataloader.queue import lifecycle, operations, parents
from dataloader.queue.enqueue import NewJob, enqueue_many
from dataloader.queue.job import ON_FAILURE, Finish
from dataloader.queue.lifecycle import Ended
from dataloader.queue.parents import UnknownParents
from dataloader.queue.reports import stats

Place = tuple[str, str | None]
WAITS, READY, LATER = ("queued", "parent"), ("queued", None), ("queued", "time")
CANCELED = ("canceled", None)


def child(conn: Conn, *of: UUID, on: str = "cancel", **fields: Any) -> UUID:
    return enqueue(conn, depends_on=of, on_parent_failure=on, **fields)


def place(conn: Conn, job_id: UUID) -> Place:
    found = row(conn, job_id)
    return found["status"], found["blocked_on"]


def waiting(conn: Conn) -> int:
    return int(value(conn, "SELECT count(*) FROM dl_waiting"))


def cancel_the_run(conn: Conn, worker: Worker, job_id: UUID) -> None:
    job = worker.take()
    lifecycle.request_cancel(conn, job_id)
    worker.finish(job, "cancel")


def lose_the_worker(conn: Conn, worker: Worker, job_id: UUID) -> None:
    conn.execute("UPDATE dl_jobs SET max_attempts = 1 WHERE job_id = %s", (job_id,))
    worker.take()
    lifecycle.settle(conn, worker.name, "crash", "killed", running=[job_id])


def lose_the_lease(conn: Conn, worker: Worker, job_id: UUID) -> None:
    conn.execute("UPDATE dl_jobs SET max_attempts = 1 WHERE job_id = %s", (job_id,))
    worker.take()
    expire(conn, job_id)
    assert lifecycle.reap(conn)


def spend_the_attempts(conn: Conn, worker: Worker, job_id: UUID) -> None:
    conn.execute("UPDATE dl_jobs SET attempt = 7 WHERE job_id = %s", (job_id,))
    assert worker.claim().job is None


def by_another_service(status: str) -> Callable[[Conn, Worker, UUID], object]:
    """It claims the job by a plain UPDATE, and ends it by one."""

    def change(conn: Conn, worker: Worker, job_id: UUID) -> None:
        for each in ("running", status):
            conn.execute("UPDATE dl_jobs SET status = %s WHERE job_id = %s", (each, job_id))

    return change


SUCCESSES: dict[str, Callable[[Conn, Worker, UUID], object]] = {
    "success": lambda conn, worker, job_id: worker.finish(worker.take()),
    "success elsewhere": by_another_service("succeeded"),
}
FAILURES: dict[str, Callable[[Conn, Worker, UUID], object]] = {
    "failure": lambda conn, worker, job_id: worker.finish(worker.take(), "fail", error="no"),
    "cancellation of a run": cancel_the_run,
    "cancellation in the queue": lambda conn, worker, job_id: lifecycle.request_cancel(conn, job_id),
    "lost worker": lose_the_worker,
    "lost lease": lose_the_lease,
    "spent attempts": spend_the_attempts,
    "failure elsewhere": by_another_service("failed"),
    "deletion": lambda conn, worker, job_id: conn.execute("DELETE FROM dl_jobs WHERE job_id = %s", (job_id,)),
}


@pytest.mark.parametrize("how", SUCCESSES)
def test_a_success_lets_the_children_go(conn: Conn, worker: Worker, how: str) -> None:
    parent = enqueue(conn)
    jobs = [child(conn, parent, on=on) for on in ON_FAILURE]
    assert [place(conn, job) for job in jobs] == [WAITS] * len(jobs)
    SUCCESSES[how](conn, worker, parent)
    assert ([place(conn, job) for job in jobs], waiting(conn)) == ([READY] * len(jobs), 0)


@pytest.mark.parametrize("how", FAILURES)
def test_after_a_failure_each_child_does_as_it_says(conn: Conn, worker: Worker, how: str) -> None:
    parent = enqueue(conn)
    jobs = [child(conn, parent, on=on) for on in ("cancel", "hold", "run")]
    FAILURES[how](conn, worker, parent)
    assert ([place(conn, job) for job in jobs], waiting(conn)) == ([CANCELED, WAITS, READY], 1)


def test_a_held_job_goes_when_its_parent_has_succeeded_after_all(conn: Conn, worker: Worker) -> None:
    parent, other = enqueue(conn), enqueue(conn)
    job = child(conn, parent, other, on="hold")
    ends = [Ended(worker.take(), Finish("fail", "no")), Ended(worker.take(), Finish("succeed"))]
    lifecycle.finish_some(worker.conn, worker.name, ends)  # one step looks at both
    operations.change(conn, "requeue", [parent], "somebody")
    assert place(conn, job) == WAITS
    worker.finish(worker.take())
    assert place(conn, job) == READY


def test_the_children_of_a_canceled_child_follow(conn: Conn, worker: Worker) -> None:
    """Each by what it says: of the last one here both parents were canceled, and it runs."""
    parent = enqueue(conn)
    first = child(conn, parent)
    second, beside, other = child(conn, first), child(conn, first), child(conn, first, on="hold")
    third = child(conn, second, beside, on="run")
    worker.finish(worker.take(), "fail", error="no")
    assert [place(conn, job) for job in (first, second, other, third)] == [CANCELED, CANCELED, WAITS, READY]
    assert row(conn, second)["error"] == f"canceled: its parent {first} has ended canceled"
    assert row(conn, second)["journaled"] == 3, "the trigger looks again, and that costs"
    assert journal(conn, first)[-1] == (
        "canceled",
        {"attempt": 0, "reason": "its parent has not succeeded", "parent": str(parent)},
    )
    assert waiting(conn) == 1


def test_a_parent_that_has_ended_before_counts_at_once(conn: Conn, worker: Worker) -> None:
    done, dead, open_one = enqueue(conn), enqueue(conn), enqueue(conn, priority=200)
    worker.finish(worker.take())
    worker.finish(worker.take(), "fail", error="no")
    with conn.transaction():  # its commit would look again
        assert place(conn, child(conn, done)) == READY
    assert place(conn, child(conn, done, open_one)) == WAITS
    assert place(conn, child(conn, dead)) == CANCELED
    assert place(conn, child(conn, dead, on="hold")) == WAITS
    assert place(conn, child(conn, dead, on="run")) == READY


def test_a_list_names_its_own_jobs_by_their_places(conn: Conn, worker: Worker) -> None:
    new = [NewJob("q", "t", f"k{n}") for n in range(4)]
    new[0] = NewJob("q", "t", "last", depends_on=[3, 1])
    new[3] = NewJob("q", "t", "k3", depends_on=[2])
    ids = [job_id for job_id, _ in enqueue_many(conn, new)]
    assert [place(conn, job_id) for job_id in ids] == [WAITS, READY, READY, WAITS]
    assert parents.parents_of(conn, ids[0]) == [ids[3], ids[1]]
    order = []
    while job := worker.claim().job:
        order.append(job.job_id)
        worker.finish(job)
    assert order == [ids[1], ids[2], ids[3], ids[0]]


def test_an_unknown_parent_is_refused_and_a_job_found_by_its_key_keeps_its_parents(conn: Conn) -> None:
    nobody = uuid4()
    with pytest.raises(UnknownParents, match=str(nobody)):
        child(conn, nobody)
    with pytest.raises(UnknownParents, match=str(nobody)):
        enqueue_many(conn, [NewJob("q", "t", "a"), NewJob("q", "t", "b", depends_on=[nobody])])
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 0
    parent, other = enqueue(conn), enqueue(conn)
    job = child(conn, parent, idempotency_key="once")
    assert child(conn, other, idempotency_key="once") == job
    enqueue_many(conn, [NewJob("q", "t", "k", idempotency_key="once", depends_on=[other])])
    assert parents.parents_of(conn, job) == [parent]


def test_the_time_of_the_job_counts_behind_its_parents(conn: Conn, worker: Worker) -> None:
    """And the queue is not late by the time that a job waited for them."""
    later = value(conn, "SELECT now() + interval '1 hour'")
    parent = enqueue(conn)
    job, long_due = child(conn, parent, available_at=later), child(conn, parent)
    conn.execute("UPDATE dl_jobs SET created_at = now() - interval '1 hour' WHERE job_id = %s", (long_due,))
    conn.execute("UPDATE dl_waiting SET available_at = now() - interval '1 hour' WHERE job_id = %s", (long_due,))
    assert place(conn, job) == WAITS
    worker.finish(worker.take())
    assert (place(conn, job), place(conn, long_due)) == (LATER, READY)
    assert row(conn, job)["available_at"] == later
    assert stats.overview(conn)["total"]["lag_sec"] < PATIENCE


def test_somebody_makes_a_job_due_that_waits(conn: Conn, worker: Worker) -> None:
    parent = enqueue(conn, priority=200)
    job = child(conn, parent)
    operations.change(conn, "run-now", [job], "somebody")
    assert (place(conn, job), waiting(conn)) == (READY, 0)
    assert worker.take().job_id == job
    assert worker.take().job_id == parent


def test_a_job_that_waits_is_canceled_and_put_back(conn: Conn, worker: Worker) -> None:
    """Put back it runs: its parents do not count any more. The links of a job go with it."""
    parent = enqueue(conn, priority=200)
    job = child(conn, parent)
    below, deleted = child(conn, job), child(conn, job)
    conn.execute("DELETE FROM dl_jobs WHERE job_id = %s", (deleted,))
    assert (waiting(conn), value(conn, "SELECT count(*) FROM dl_parents")) == (2, 2)
    lifecycle.request_cancel(conn, job)
    assert [place(conn, each) for each in (job, below)] == [CANCELED, CANCELED]
    assert waiting(conn) == 0
    conn.execute("UPDATE dl_jobs SET status = 'queued' WHERE job_id = %s", (job,))
    assert place(conn, job) == READY
    assert worker.take().job_id == job


def test_a_change_of_a_job_that_waits_leaves_it_waiting(conn: Conn, worker: Worker) -> None:
    job = child(conn, enqueue(conn))
    for change in ("queue = 'other'", "lock_key = 'other'", "priority = 7", "args = '{}'"):
        conn.execute(f"UPDATE dl_jobs SET {change} WHERE job_id = %s", (job,))
        assert (place(conn, job), waiting(conn)) == (WAITS, 1), change
    worker.finish(worker.take())
    assert place(conn, job) == READY


def test_a_child_holds_its_key_in_a_merged_queue(conn: Conn, worker: Worker) -> None:
    operations.set_order(conn, "q", "test", ordered=True, merge=True)
    child(conn, enqueue(conn, queue="other"), lock_key="k")
    behind = enqueue(conn, lock_key="k")
    assert worker.claim().job is None
    assert place(conn, behind) == ("queued", "key")


def test_a_locked_child_is_told_a_little_later(conn: Conn, workers: Workers) -> None:
    """Its parent's end waits for nobody; the next claim tells the child."""
    worker, other = workers(), workers()
    job = child(conn, enqueue(conn))
    with locked(other.conn, job):
        worker.finish(worker.take())
        assert place(conn, job) == WAITS
    until(lambda: worker.claim().job, "a claim to find the child")
    assert row(conn, job)["status"] == "running"
    assert value(conn, "SELECT count(*) FROM dl_freed") == 0


@pytest.mark.parametrize("first", ["end", "child"])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_child_that_is_added_while_its_parent_ends_is_told(
    conn: Conn, workers: Workers, first: str, isolation: str
) -> None:
    """The first of them is not committed, so neither sees the other.

    The commit of a child looks again; the end of a parent, or a child with one snapshot, leaves it to the next claim.
    """
    worker, other = workers(), workers()
    parent = enqueue(conn)
    job = worker.take()
    uncommitted = worker.conn if first == "end" else other.conn
    with uncommitted.transaction():
        uncommitted.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        if first == "end":
            worker.finish(job)
        added = child(other.conn, parent)
        if first == "child":
            worker.finish(job)
    if (first, isolation) == ("child", "READ COMMITTED"):
        assert (place(conn, added), waiting(conn)) == (READY, 0)
    until(lambda: worker.claim().job, "a claim to find the child")
    assert row(conn, added)["status"] == "running"


def test_two_parents_end_at_once(conn: Conn, workers: Workers) -> None:
    """Neither end sees the other; one of them has the count locked."""
    one, other = workers(), workers()
    job = child(conn, enqueue(conn), enqueue(conn))
    first, second = one.take(), other.take()
    with one.conn.transaction():
        one.finish(first)
        with started(lambda: other.finish(second), None, conn) as ended:
            assert ended.result(PATIENCE)
    until(lambda: one.claim().job, "a claim to find the child")
    assert row(conn, job)["status"] == "running"
    assert waiting(conn) == 0


def test_a_step_that_no_trigger_saw_is_found_by_the_reaper(conn: Conn) -> None:
    parent, other = enqueue(conn), enqueue(conn)
    jobs = [child(conn, parent), child(conn, other)]
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = %s", (parent,))
    assert [place(conn, job) for job in jobs] == [WAITS, WAITS]
    assert value(conn, "SELECT dl_resolve_stranded(%s, 1)", UUID(int=0)) == jobs[0]
    assert value(conn, "SELECT dl_resolve_stranded(%s, 1)", jobs[1]) is None
    assert [place(conn, job) for job in jobs] == [READY, WAITS]


def test_a_job_that_was_queued_again_while_it_waits_is_found_by_the_reaper(conn: Conn, worker: Worker) -> None:
    """A run has gathered others, and no trigger saw its end."""
    outer, part = enqueue(conn, priority=1), enqueue(conn)
    assert parents.gather(conn, worker.take(), [part])
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET status = 'queued', claimed_by = NULL WHERE job_id = %s", (outer,))
    assert place(conn, outer) == READY
    conn.execute("SELECT dl_resolve_stranded(%s, 10)", (UUID(int=0),))
    assert place(conn, outer) == WAITS


def fan(conn: Conn, number: int, status: str, queue: str = "q") -> UUID:
    """A parent with so many children; it has ended, and its end has resolved no child. Returns it."""
    (root, _), *_ = enqueue_many(
        conn, [NewJob(queue, "t", "root"), *(NewJob(queue, "t", f"{n}", depends_on=[0]) for n in range(number))]
    )
    with quietly(conn):
        conn.execute("UPDATE dl_jobs SET status = %s WHERE job_id = %s", (status, root))
    return root


def freed(conn: Conn, ago: str) -> None:
    conn.execute("UPDATE dl_freed SET since = clock_timestamp() - %s::interval", (ago,))


@pytest.mark.long
@pytest.mark.parametrize("status", ["succeeded", "canceled"])
def test_the_children_of_a_parent_are_let_go_in_bounded_steps_that_cost_the_same(conn: Conn, status: str) -> None:
    """Its cost does not grow with the children that are done, or wait."""
    root = fan(conn, 2_000, status)
    steps = []
    while left := waiting(conn):
        steps.append((left, buffers(conn, "SELECT dl_resolve(%s::uuid[])", [root])))
    assert [before for before, _ in steps] == list(range(2_000, 0, -100))
    assert max(cost for _, cost in steps) < 1.5 * steps[0][1]


@pytest.mark.parametrize("tables", ["dl_parents", "dl_waiting", "dl_jobs", "dl_parents, dl_waiting, dl_jobs"])
@pytest.mark.parametrize("left", ["one link", "dead rows"])
@pytest.mark.parametrize("plan", ["custom", "generic"])
def test_a_step_reads_few_links_of_a_parent_with_many_children(conn: Conn, left: str, tables: str, plan: str) -> None:
    """Also by the statistics of tables that were short, or whose rows were all deleted, and after five calls."""
    conn.execute(f"SET plan_cache_mode = force_{plan}_plan")
    child(conn, enqueue(conn))
    if left == "dead rows":
        conn.execute("DELETE FROM dl_waiting")
        conn.execute("DELETE FROM dl_jobs")
    conn.execute(f"ANALYZE {tables}")
    root = fan(conn, 3_000, "canceled")
    rows = """SELECT sum(idx_tup_fetch)::int FROM pg_stat_xact_user_tables
               WHERE relname IN ('dl_jobs', 'dl_parents', 'dl_waiting')"""
    with conn.transaction():
        before = value(conn, rows) or 0
        conn.execute("SELECT dl_resolve(%s)", ([root],))
        assert value(conn, rows) - before < 13_000  # some plans compare each of 100 rows with each
    assert waiting(conn) <= 2_901


@pytest.mark.parametrize("plan", ["custom", "generic"])
def test_a_step_reads_no_links_that_are_over(conn: Conn, plan: str) -> None:
    """Not even by an index: PostgreSQL 18 skips through one whose second column says whether they are."""
    conn.execute(f"SET plan_cache_mode = force_{plan}_plan")
    links = "gen_random_uuid(), gen_random_uuid(), 1, true FROM generate_series(1, 20000)"
    conn.execute(f"INSERT INTO dl_parents (job_id, parent_id, place, is_over) SELECT {links}")
    conn.execute("VACUUM ANALYZE dl_parents")
    root = fan(conn, 100, "succeeded")
    assert buffers(conn, "SELECT dl_resolve(%s::uuid[])", [root]) < 8_000


def test_a_step_reads_no_other_jobs_by_the_statistics_of_an_emptied_table(conn: Conn) -> None:
    enqueue(conn)
    conn.execute("DELETE FROM dl_jobs")
    conn.execute("ANALYZE dl_jobs")
    fan(conn, 3_000, "queued")
    root = fan(conn, 1, "succeeded")
    assert buffers(conn, "SELECT dl_resolve(%s::uuid[])", [root]) < 600


def test_a_step_does_not_look_at_each_child_as_a_parent(conn: Conn) -> None:
    """Neither at those that it cancels, nor at those that the reaper looks at."""
    resolve, stranded = "SELECT dl_resolve(%s::uuid[])", "SELECT dl_resolve_stranded(%s, 1000)"
    plain = buffers(conn, resolve, [fan(conn, 1_000, "succeeded")])
    for status, statement in (("canceled", resolve), ("succeeded", stranded)):
        conn.execute("TRUNCATE dl_jobs, dl_job_events, dl_parents, dl_waiting, dl_freed")
        root = fan(conn, 1_000, status)
        assert buffers(conn, statement, [root] if statement == resolve else UUID(int=0)) < 1.3 * plain
        assert waiting(conn) == 900


def test_a_claim_that_starts_a_job_leaves_the_children_to_one_that_starts_none(conn: Conn, workers: Workers) -> None:
    """And an idle one comes back for the next 100; but where none comes for a second, any claim frees some."""
    busy, idle = workers(), workers()
    root = fan(conn, 1_700, "succeeded", queue="nobody")
    for _ in range(3):
        enqueue(conn)
    conn.execute("INSERT INTO dl_freed (parent_id, since) VALUES (%s, clock_timestamp() - interval '0.71 s')", (root,))
    assert busy.take()
    assert lifecycle.step(busy.session, ["q"], 1, 1, None, tries_short=False).jobs
    assert waiting(conn) == 1_700
    found = idle.claim("other")
    assert (found.job, waiting(conn)) == (None, 1_600)
    assert found.due_in is not None
    assert found.due_in <= 0.01
    freed(conn, "-1 h")
    assert (idle.claim("other").due_in, waiting(conn)) == (1, 1_600)
    freed(conn, "0.9 s")
    lifecycle.step(idle.session, ["other"], 1, 0, None)
    assert waiting(conn) == 1_600
    freed(conn, "1.1 s")
    assert busy.take()
    assert waiting(conn) == 1_500
    age = value(conn, "SELECT extract(epoch FROM clock_timestamp() - since)::float8 FROM dl_freed")
    assert age >= 0.69


def test_an_end_with_many_children_wakes_idle_workers(conn: Conn, worker: Worker) -> None:
    """They sleep for as long as nobody notifies them; a host that is gone has left its workers' rows."""
    enqueue_many(conn, [NewJob("p", "t", "root"), *(NewJob("p", "t", f"{n}", depends_on=[0]) for n in range(600))])
    shown = "INSERT INTO dl_workers (worker, farm, host, pid, queue, state) VALUES (%s, 'f', 'h', 1, %s, %s)"
    conn.execute(shown, ("gone", "gone", "idle"))
    conn.execute("UPDATE dl_workers SET seen_at = now() - interval '1 h'")
    conn.execute(shown, ("one", "busy", "busy"))
    conn.execute(shown, ("two", "q", "idle"))
    worker.notes()
    conn.execute("UPDATE dl_jobs SET status = 'failed' WHERE lock_key = 'root'")
    assert worker.notes() == ["q"]


def test_a_gathering_run_goes_on_behind_its_jobs(conn: Conn, worker: Worker) -> None:
    """Its attempt is given back, and whatever comes of the others, it runs again."""
    outer = enqueue(conn, priority=1)
    job = worker.take()
    parts = [enqueue(conn), enqueue(conn)]
    assert parents.gather(conn, job, parts)
    assert row(conn, outer)["status"] == "running"
    worker.finish(job, "hand_back", error="waits")
    assert place(conn, outer) == WAITS
    version = value(conn, "SELECT xmin::text FROM dl_jobs WHERE job_id = %s", outer)
    worker.finish(worker.take())
    assert value(conn, "SELECT xmin::text FROM dl_jobs WHERE job_id = %s", outer) == version
    worker.finish(worker.take(), "fail", error="no")
    assert (place(conn, outer), waiting(conn)) == (READY, 0)
    again = worker.take()
    assert (again.job_id, again.attempt) == (outer, 1)
    found = parents.results(conn, parts)
    assert [(each.status, each.error) for each in found] == [("succeeded", None), ("failed", "no")]


def test_a_gathering_run_that_crashes_waits_and_one_whose_parts_have_ended_goes_on_at_once(
    conn: Conn, workers: Workers
) -> None:
    worker, other = workers(), workers()
    job = worker.start_new(priority=1)
    part = enqueue(conn)
    parents.gather(conn, job, [part])
    with conn.transaction(force_rollback=True):
        conn.execute("SELECT * FROM dl_settle(%s, %s, 'crash', 'killed', '{}')", (worker.name, [job.job_id]))
        assert place(conn, job.job_id) == WAITS
    other.finish(other.take())
    assert waiting(conn) == 1
    other.finish(job, "hand_back", error="waits")  # the session of the first is gone
    assert (place(conn, job.job_id), waiting(conn)) == (READY, 0)


def test_a_circle_of_gathering_is_refused_and_a_claim_that_is_over_gathers_nothing(conn: Conn, worker: Worker) -> None:
    job = worker.start_new()
    middle = child(conn, job.job_id)
    below = child(conn, middle)
    for each in (below, job.job_id):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="waits for the job that gathers it"):
            parents.gather(conn, job, [each])
    worker.finish(job)
    before = waiting(conn)
    assert not parents.gather(conn, job, [middle])
    assert waiting(conn) == before
