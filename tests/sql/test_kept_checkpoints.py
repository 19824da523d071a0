"""Checkpoints in the queue and in the target: kept by the claim that holds, spent by success, gone with the job."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from hands import Conn, Worker, enqueue, journal, row, state, value

from dataloader.farm import fence
from dataloader.farm.fence import Overtaken, Standing
from dataloader.queue import lifecycle, operations
from dataloader.queue.job import Checkpoint, Finish
from dataloader.queue.lifecycle import Ended

FIRST = Checkpoint('{"at": 1}')
SECOND = Checkpoint('{"at": 2}')


def kept(conn: Conn, job_id: UUID) -> Checkpoint | None:
    """As the next run gets it."""
    return lifecycle.checkpoints(conn, [job_id]).get(job_id)


def stored(conn: Conn) -> list[Any]:
    return conn.execute("SELECT claim, checkpoint FROM dl_checkpoints ORDER BY claim").fetchall()


def crash(conn: Conn, worker: Worker, end: str = "crash") -> None:
    """The worker dies, and the keeper settles what it has."""
    conn.execute("UPDATE dl_jobs SET claimed_pid = NULL, heartbeat_at = now()")
    assert lifecycle.settle(conn, worker.name, end, "killed")
    conn.execute("UPDATE dl_jobs SET available_at = now(), blocked_on = NULL WHERE status = 'queued'")


def test_each_save_has_its_time_and_replaces_none_of_a_later_claim(conn: Conn, worker: Worker) -> None:
    """As by the statement of a run that was stopped in its midst."""
    job = worker.start_new()
    lifecycle.keep_checkpoint(conn, job, FIRST)
    conn.execute("UPDATE dl_checkpoints SET saved_at = '-infinity'")
    lifecycle.keep_checkpoint(conn, job, SECOND)
    assert value(conn, "SELECT saved_at > now() - interval '1 min' FROM dl_checkpoints")
    conn.execute("UPDATE dl_checkpoints SET claim = 2")
    lifecycle.keep_checkpoint(conn, job, FIRST)
    assert stored(conn) == [(2, {"at": 2})]


def test_only_a_new_one_is_of_the_new_claim(conn: Conn, worker: Worker) -> None:
    job = worker.start_new()
    lifecycle.keep_checkpoint(conn, job, FIRST)
    before = value(conn, "SELECT ctid::text FROM dl_checkpoints")
    lifecycle.keep_checkpoint(conn, job, FIRST)
    assert value(conn, "SELECT ctid::text FROM dl_checkpoints") == before
    worker.finish(job, "hand_back")
    again = worker.take()
    lifecycle.keep_checkpoint(conn, again, FIRST)
    assert value(conn, "SELECT ctid::text FROM dl_checkpoints") == before
    lifecycle.keep_checkpoint(conn, again, FIRST._replace(claim=1, number=1, spares_attempt=True))
    assert stored(conn) == [(1, {"at": 1})]
    assert kept(conn, job.job_id) == Checkpoint('{"at": 1}', 1, 1, spares_attempt=True)
    lifecycle.keep_checkpoint(conn, again, FIRST._replace(claim=1, number=2))
    lifecycle.keep_checkpoint(conn, again, FIRST._replace(claim=2, number=2))
    assert kept(conn, job.job_id) == Checkpoint('{"at": 1}', 2, 2)
    lifecycle.keep_checkpoint(conn, again, SECOND)
    assert stored(conn) == [(2, {"at": 2})]


@pytest.mark.parametrize("by", ["step", "finish"])
@pytest.mark.parametrize("verb", ["retry", "hand_back", "fail", "cancel"])
def test_it_is_there_before_the_end_of_any_run_and_stays(conn: Conn, worker: Worker, by: str, verb: str) -> None:
    job_id = enqueue(conn)
    conn.execute(
        "CREATE FUNCTION looks() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " ASSERT EXISTS (SELECT FROM dl_checkpoints); RETURN NEW; END $$;"
        " CREATE TRIGGER looks BEFORE UPDATE ON dl_jobs FOR EACH ROW WHEN (OLD.status = 'running')"
        " EXECUTE FUNCTION looks()"
    )
    try:
        _end(worker, by, Ended(worker.take(), Finish(verb, "why", 0.0), checkpoint=FIRST))
    finally:
        conn.execute("DROP FUNCTION looks CASCADE")
    assert kept(conn, job_id) == FIRST


def _end(worker: Worker, by: str, end: Ended) -> None:
    if by == "step":
        lifecycle.step(worker.session, ["none"], 15, 0, [end])
    else:
        lifecycle.finish_some(worker.conn, worker.name, [end])


@pytest.mark.parametrize("by", ["step", "finish"])
def test_success_spends_it_with_all_that_the_target_has(conn: Conn, worker: Worker, by: str) -> None:
    job_id, other = enqueue(conn), enqueue(conn)
    jobs = lifecycle.step(worker.session, ["q"], 15, 2, None).jobs
    lifecycle.keep_checkpoint(conn, jobs[1], FIRST)
    worker.finish(jobs[1])
    _end(worker, by, Ended(jobs[0], Finish("succeed"), checkpoint=FIRST._replace(claim=1, number=9)))
    assert (kept(conn, job_id), kept(conn, other)) == (Checkpoint(None, claim=2), FIRST)


def test_a_job_that_came_back_meanwhile_keeps_it_and_so_does_another_change_of_one_that_has_succeeded(
    conn: Conn, worker: Worker
) -> None:
    job = worker.start_new()
    lifecycle.keep_checkpoint(conn, job, FIRST)
    conn.execute(lifecycle._SQL["spend_checkpoints"], {"job_ids": [job.job_id]})
    assert kept(conn, job.job_id) == FIRST
    worker.finish(job)
    conn.execute("UPDATE dl_jobs SET queue = 'other', status = 'failed'")
    assert kept(conn, job.job_id) == FIRST


@pytest.mark.parametrize("by", ["operator", "plain update"])
@pytest.mark.parametrize("verb", ["succeed", "fail"])
def test_a_job_that_comes_back_goes_on_unless_it_has_succeeded(conn: Conn, worker: Worker, by: str, verb: str) -> None:
    """The worker has died behind the end, before it could spend the checkpoint."""
    saved = FIRST._replace(claim=1, number=5)
    job_id, other = enqueue(conn), enqueue(conn)
    for each in lifecycle.step(worker.session, ["q"], 15, 2, None).jobs:
        lifecycle.keep_checkpoint(conn, each, saved)
        worker.finish(each, verb)
    if by == "operator":
        operations.change(conn, "requeue", [job_id], "test")
    else:
        conn.execute("UPDATE dl_jobs SET status = 'queued' WHERE job_id = %s", (job_id,))
    assert kept(conn, job_id) == (Checkpoint(None, claim=2) if verb == "succeed" else saved)
    assert kept(conn, other) == saved


def test_an_operator_lets_a_job_begin_at_the_start(conn: Conn, worker: Worker) -> None:
    """Also one of which only the target may have a checkpoint."""
    saved, unheard, other = (enqueue(conn) for _ in range(3))
    running, fresh = enqueue(conn), enqueue(conn)
    jobs = lifecycle.step(worker.session, ["q"], 15, 4, None).jobs
    for job in jobs:
        if job.job_id != unheard:
            lifecycle.keep_checkpoint(conn, job, FIRST._replace(claim=1, number=5))
        if job.job_id != running:
            worker.finish(job, "fail")
    conn.execute("UPDATE dl_jobs SET status = 'canceled' WHERE job_id = %s", (fresh,))
    outcomes = operations.change(conn, "start-over", [saved, unheard, running, fresh], "test")
    assert list(outcomes.values()) == ["done", "done", "running", "done"]
    assert [state(conn, job_id) for job_id in (saved, unheard)] == [("queued", 0)] * 2
    assert lifecycle.checkpoints(conn, [saved, unheard, other, running, fresh]) == {
        saved: Checkpoint(None, claim=2),
        unheard: Checkpoint(None, claim=2),
        other: FIRST._replace(claim=1, number=5),
        running: FIRST._replace(claim=1, number=5),
    }
    lifecycle.keep_checkpoint(conn, worker.take(), SECOND)
    assert SECOND in lifecycle.checkpoints(conn, [saved, unheard]).values()


@pytest.mark.parametrize("end", ["crash", "timeout"])
def test_a_dead_run_that_came_further_does_not_count(conn: Conn, worker: Worker, end: str) -> None:
    job_id = enqueue(conn, max_attempts=1)
    for number in range(1, 4):
        lifecycle.keep_checkpoint(conn, worker.take(), Checkpoint(f"[{number}]", spares_attempt=True))
        crash(conn, worker, end)
        assert state(conn, job_id) == ("queued", 0)
        assert row(conn, job_id)["error"] == "killed on attempt 1"
        assert journal(conn, job_id)[-1][1]["reason"] == "killed on attempt 1"
    worker.take()
    crash(conn, worker, end)  # it has saved nothing
    assert state(conn, job_id)[0] in ("lost", "failed")


@pytest.mark.parametrize("case", ["the same again", "another job's", "a pipeline that does not say so"])
def test_a_dead_run_counts_else(conn: Conn, worker: Worker, case: str) -> None:
    job_id = enqueue(conn, max_attempts=1)
    job = worker.take()
    saved = FIRST._replace(spares_attempt=case != "a pipeline that does not say so")
    if case == "another job's":
        lifecycle.keep_checkpoint(conn, job, saved)
        conn.execute("UPDATE dl_checkpoints SET job_id = gen_random_uuid()")
    else:
        lifecycle.keep_checkpoint(conn, job, saved)
        if case == "the same again":
            worker.finish(job, "hand_back")
            lifecycle.keep_checkpoint(conn, worker.take(), saved)
    crash(conn, worker)
    assert state(conn, job_id) == ("lost", 1)


@pytest.fixture
def target(conn: Conn) -> Conn:
    conn.execute("DROP TABLE IF EXISTS dl_fence")
    return conn


def commit(dsn: str, job: UUID, claim: int, text: str, number: int, owner: str = "w") -> Standing:
    """Commit a checkpoint, and return what the transaction knew."""
    standing = Standing(job)
    with fence.transaction(dsn, "public", {job: claim}, owner, standing=standing):
        standing.to_save = Checkpoint(text, number=number)
    return standing


def found(dsn: str, job: UUID, claim: int, owner: str = "w") -> Checkpoint:
    standing = Standing(job)
    with fence.transaction(dsn, "public", {job: claim}, owner, standing=standing):
        return standing.newest


def test_the_next_transaction_finds_what_was_committed(target: Conn, dsn: str) -> None:
    job, other = uuid4(), uuid4()
    assert found(dsn, job, 1) == Checkpoint()
    assert commit(dsn, job, 1, '{"at": 1}', 1).saved == Checkpoint('{"at": 1}', 1, 1)
    assert commit(dsn, other, 1, '{"at": 9}', 4).newest == Checkpoint()
    assert (found(dsn, job, 1), found(dsn, job, 2)) == (Checkpoint('{"at": 1}', 1, 1),) * 2
    with fence.transaction(dsn, "public", {job: 2}, "w"):
        pass  # it saves nothing
    assert found(dsn, job, 2) == Checkpoint('{"at": 1}', 1, 1)
    commit(dsn, job, 2, '{"at": 2}', 2)
    assert (found(dsn, job, 3), found(dsn, other, 1)) == (Checkpoint('{"at": 2}', 2, 2), Checkpoint('{"at": 9}', 1, 4))


@pytest.mark.parametrize("change", ["claim = 2", "owner = 'other'", "raised_at = raised_at + interval '1 s'"])
def test_a_run_that_is_overtaken_commits_none(target: Conn, dsn: str, job: UUID, change: str) -> None:
    """By a newer claim; after the queue was set back by a run with the same number; or by code of an older version."""
    standing = Standing(job)
    with pytest.raises(Overtaken), fence.transaction(dsn, "public", {job: 1}, "w", standing=standing) as conn:  # noqa: PT012
        conn.execute("SET application_name = 'in disguise'")
        conn.execute("CREATE TABLE written ()")
        standing.to_save = Checkpoint("{}", number=1)
        target.execute(f"UPDATE dl_fence SET {change}".encode())
    assert (standing.saved, value(target, "SELECT checkpoint FROM dl_fence")) == (None, None)
    assert value(target, "SELECT to_regclass('written')") is None


def test_the_commit_of_a_stopped_process_holds_for_5_s_at_most(target: Conn, dsn: str, job: UUID) -> None:
    standing = Standing(job)
    timeout = "current_setting('idle_in_transaction_session_timeout')"
    target.execute("CREATE TABLE seen (setting text)")
    with fence.transaction(dsn, "public", {job: 1}, "w", standing=standing) as conn:
        conn.execute("CREATE TABLE deferred (id int)")
        conn.execute(
            "CREATE FUNCTION sees() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN INSERT INTO seen SELECT {timeout}; RETURN NULL; END $$"
        )
        conn.execute(
            "CREATE CONSTRAINT TRIGGER sees AFTER INSERT ON deferred DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION sees()"
        )
        conn.execute("INSERT INTO deferred VALUES (1)")
        standing.to_save = Checkpoint("{}", number=1)
    assert target.execute("SELECT setting FROM seen").fetchall() == [("5s",)]
    target.execute("DROP FUNCTION sees CASCADE")
