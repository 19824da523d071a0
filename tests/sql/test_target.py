"""The fence in the target database: what a run that lost its claim writes there does not stand."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from uuid import UUID, uuid4

import psycopg
import pytest
from hands import PATIENCE, Conn, until, value

from dataloader.farm import fence
from dataloader.farm.fence import Overtaken
from dataloader.queue import db


@pytest.fixture
def table(conn: Conn) -> Conn:
    """A session on the target, where pipelines fill `written`."""
    conn.execute("DROP TABLE IF EXISTS dl_fence")
    conn.execute("CREATE TABLE written (claim int)")
    return conn


def written(conn: Conn) -> list[int]:
    return [claim for (claim,) in conn.execute("SELECT claim FROM written ORDER BY claim")]


def test_a8_the_newest_claim_commits_as_often_as_it_likes_and_no_older_one(table: Conn, dsn: str, job: UUID) -> None:
    for claim in (1, 1, 3):
        with fence.transaction(dsn, "public", {job: claim}) as conn:
            conn.execute("INSERT INTO written VALUES (%s)", (claim,))
    with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 1}):
        pytest.fail("began")
    assert written(table) == [1, 1, 3]


def test_a8_a_run_that_is_overtaken_meanwhile_cannot_commit(table: Conn, dsn: str, job: UUID) -> None:
    """Even where its session could not be ended, such as another role's."""
    with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 1}) as conn:  # noqa: PT012
        conn.execute("SET application_name = 'in disguise'")
        conn.execute("INSERT INTO written VALUES (1)")
        with fence.transaction(dsn, "public", {job: 2}) as newer:
            newer.execute("INSERT INTO written VALUES (2)")
    assert written(table) == [2]


def test_a_newer_run_ends_the_sessions_of_older_ones_and_their_locks(table: Conn, dsn: str, job: UUID) -> None:
    with pytest.raises(psycopg.OperationalError), fence.transaction(dsn, "public", {job: 9}) as conn:  # noqa: PT012
        conn.execute("LOCK TABLE written")
        with fence.transaction(dsn, "public", {job: 10}) as newer:
            newer.execute("INSERT INTO written VALUES (10)")
        conn.execute("INSERT INTO written VALUES (9)")
    assert written(table) == [10]


def test_other_jobs_and_runs_beside_it_are_left_alone(table: Conn, dsn: str, job: UUID) -> None:
    """Also one with a search path of its own."""
    with (
        fence.transaction(dsn, "public", {job: 1}) as one,
        fence.transaction(dsn, "public", {job: 1}) as same,
        fence.transaction(dsn, "public", {uuid4(): 7}) as other,
    ):
        one.execute("SET search_path = pg_catalog")
        for conn in (one, same, other):
            conn.execute("INSERT INTO public.written VALUES (1)")
    assert written(table) == [1, 1, 1]


def test_a_newer_run_waits_for_a_commit_under_way(table: Conn, dsn: str, job: UUID) -> None:
    """Either it is seen by the newer run, or it does not happen."""
    table.execute("ALTER TABLE written ADD UNIQUE (claim) DEFERRABLE INITIALLY DEFERRED")
    table.execute("INSERT INTO written VALUES (0)")
    holder = psycopg.connect(dsn)
    holder.execute("DELETE FROM written")

    def older() -> None:
        with fence.transaction(dsn, "public", {job: 1}) as conn:
            conn.execute("SET application_name = 'older'")
            conn.execute("INSERT INTO written VALUES (0)")  # its commit waits for the holder's delete

    def newer() -> list[int]:
        with fence.transaction(dsn, "public", {job: 2}) as conn:
            return [claim for (claim,) in conn.execute("SELECT claim FROM written")]

    with holder, ThreadPoolExecutor(2) as pool:
        committing = pool.submit(older)
        older_pid = until(lambda: waiting(table, "older"), "the older run to commit")
        seen = pool.submit(newer)
        blockers = "SELECT pg_blocking_pids(pid) FROM pg_stat_activity WHERE application_name = %s"
        blocks = partial(value, table, blockers, f"dl-job:{job}:2")
        until(lambda: older_pid in (blocks() or []), "the newer run to wait for it")
        holder.commit()
        committing.result(PATIENCE)
        assert seen.result(PATIENCE) == [0]
        holder.rollback()


def test_a_newer_run_waits_until_an_older_ones_session_is_gone(table: Conn, dsn: str, job: UUID) -> None:
    """So it finds no locks of it on the target's rows."""
    with suppress(psycopg.OperationalError), fence.transaction(dsn, "public", {job: 1}) as older:
        backend = older.info.backend_pid
        os.kill(backend, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            newer = pool.submit(lambda: run(dsn, job, 2))
            try:
                event = "SELECT array_agg(wait_event) FROM pg_stat_activity WHERE application_name = %s"
                waits = partial(value, table, event, f"dl-job:{job}:2")
                until(lambda: "BackendTermination" in (waits() or []), "the newer run to wait for it")
            finally:
                os.kill(backend, signal.SIGCONT)
            newer.result(PATIENCE)


def test_a6_two_runs_with_one_number_do_not_both_commit(table: Conn, dsn: str, job: UUID) -> None:
    """The queue lost the claim of the first. The second has the job: it leaps, and the first cannot commit any more."""
    with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 1}, "lost") as conn:  # noqa: PT012
        conn.execute("SET application_name = 'in disguise'")
        conn.execute("INSERT INTO written VALUES (1)")
        with fence.transaction(dsn, "public", {job: 1}, "heir", lambda job, fence: fence + 1) as heir:
            heir.execute("INSERT INTO written VALUES (2)")
    assert written(table) == [2]
    with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 1}, "lost", lambda job, fence: None):
        pytest.fail("began")


def test_a6_a_run_that_lost_its_job_does_not_take_the_fence_of_one_with_the_same_number(
    table: Conn, dsn: str, job: UUID
) -> None:
    """Though it comes later: it asks the queue, and the queue does not know it."""
    with fence.transaction(dsn, "public", {job: 1}, "heir") as heir:
        heir.execute("INSERT INTO written VALUES (1)")
        with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 1}, "lost"):
            pytest.fail("began")
    assert written(table) == [1]


def test_a6_a_fence_that_is_ahead_of_the_queue_is_leapt_over(table: Conn, dsn: str, job: UUID) -> None:
    """By whoever has the job, once; from then on its number is the new one."""
    run(dsn, job, 9, "before")
    asked = []
    with fence.transaction(dsn, "public", {job: 2}, "w", lambda job, fence: asked.append(fence) or 10) as conn:
        run(dsn, job, 10, "w")
        name = value(conn, "SELECT current_setting('application_name')")
    assert (asked, name) == ([9], f"dl-job:{job}:10")
    assert value(table, "SELECT claim FROM dl_fence") == 10
    with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 2}, "v", lambda job, fence: 10):
        pytest.fail("a fence that has risen again is a later run's")


RAISE_OF_BEFORE = """
INSERT INTO dl_fence AS f (job_id, claim) VALUES (%s, %s)
ON CONFLICT (job_id) DO UPDATE SET claim = excluded.claim, raised_at = now() WHERE f.claim <= excluded.claim
"""


def test_an_owner_does_not_count_when_an_older_version_has_raised_the_fence_since(
    table: Conn, dsn: str, job: UUID
) -> None:
    """It raises the same number over a fence that is not its own, and leaves the owner, who asks the queue."""
    with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 1}, "new") as conn:  # noqa: PT012
        conn.execute("INSERT INTO written VALUES (1)")
        table.execute(RAISE_OF_BEFORE, (job, 1))
    with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 1}, "new"):
        pytest.fail("began")
    asked = []
    with fence.transaction(dsn, "public", {job: 1}, "new", lambda job, fence: asked.append(fence) or 2):
        pass
    assert (asked, written(table)) == ([1], [])


def run(dsn: str, job: UUID, claim: int, *worker: str) -> None:
    with fence.transaction(dsn, "public", {job: claim}, *worker):
        pass


def waiting(conn: Conn, name: str) -> int:
    return value(
        conn, "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'", name
    )


def test_twenty_runs_may_be_the_first(table: Conn, dsn: str) -> None:
    """The table is made on first use, by whoever comes first."""

    def write(number: int) -> None:
        with fence.transaction(dsn, "public", {uuid4(): 1}) as conn:
            conn.execute("INSERT INTO written VALUES (%s)", (number,))

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(write, range(20)))
    assert written(table) == list(range(20))


def test_a_newer_run_of_any_of_its_jobs_overtakes_a_run_of_several(table: Conn, dsn: str) -> None:
    """A delivery comes back together with a job whose score is smaller, or without its first job, which is dead."""
    first, second = uuid4(), uuid4()
    for newer in ({uuid4(): 1, second: 2}, {second: 3}):
        with pytest.raises(Overtaken), fence.transaction(dsn, "public", {first: 1, second: 1}) as conn:  # noqa: PT012
            conn.execute("INSERT INTO written VALUES (1)")
            with fence.transaction(dsn, "public", newer) as other:
                other.execute("INSERT INTO written VALUES (2)")
        table.execute("DELETE FROM dl_fence WHERE job_id = %s", (second,))
    assert written(table) == [2, 2]


def test_fences_of_several_jobs_are_raised_in_the_order_of_the_jobs(table: Conn, dsn: str) -> None:
    """So a run that waits for the fence of one job has no lock on that of a later one."""
    first, second = sorted([uuid4(), uuid4()])
    for job in (first, second):
        run(dsn, job, 1)

    def both() -> None:
        with fence.transaction(dsn, "public", {second: 2, first: 2}):
            pass

    with db.connect(dsn, name="holder", schema="public") as holder, ThreadPoolExecutor(1) as pool:
        with holder.transaction():
            holder.execute("SELECT FROM dl_fence WHERE job_id = %s FOR UPDATE", (first,))
            later = pool.submit(both)
            until(lambda: waiting(table, f"dl-job:{second}:2"), "the run to wait")
            free = "SELECT job_id FROM dl_fence WHERE job_id = %s FOR UPDATE SKIP LOCKED"
            assert value(holder, free, second) == second
        later.result(PATIENCE)


def test_a_run_of_several_jobs_leaps_over_each_fence_of_a_queue_that_was_set_back(table: Conn, dsn: str) -> None:
    jobs = {uuid4(): 2, uuid4(): 2, uuid4(): 2}
    ahead = list(jobs)[1:]
    for job_id in ahead:
        run(dsn, job_id, 7, "before")
    asked: list[UUID] = []
    with fence.transaction(dsn, "public", jobs, "w", lambda job_id, fence: asked.append(job_id) or fence + 1):
        pass
    assert (set(asked), sorted(jobs.values())) == (set(ahead), [2, 8, 8])
