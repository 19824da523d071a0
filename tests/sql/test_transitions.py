"""Every statement from every state: it makes a legal step or changes nothing, and the journal tells the story."""

import itertools
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hands import Conn, Worker, enqueue, journal, kinds, row
from judge import illegal

from dataloader.queue import lifecycle, operations
from dataloader.queue.enqueue import NewJob
from dataloader.queue.enqueue import enqueue as add
from dataloader.queue.job import FINAL, Finish, Job, Status
from dataloader.queue.lifecycle import Ended

BOOT = "host:1:boot"

STATEMENTS: dict[str, Callable[[Worker, Job], Any]] = {
    "enqueue": lambda worker, job: add(worker.conn, NewJob("q", "t", "k", idempotency_key="i")),
    "status": lambda worker, job: lifecycle.status(worker.conn, job.job_id),
    "request_cancel": lambda worker, job: lifecycle.request_cancel(worker.conn, job.job_id),
    "claim": lambda worker, job: worker.claim(),
    "beat": lambda worker, job: lifecycle.beat(worker.conn, [job], None, True),
    "retake": lambda worker, job: lifecycle.retake(
        lifecycle.Session(worker.conn, BOOT, worker.session.backend_pid, worker.session.backend_start), [job]
    ),
    **{
        verb: lambda worker, job, verb=verb: lifecycle.finish_some(worker.conn, BOOT, [Ended(job, Finish(verb, "e"))])
        for verb in ("succeed", "retry", "fail", "cancel", "hand_back")
    },
    "leap": lambda worker, job: lifecycle.leap(worker.conn, job, 7),
    "keep": lambda worker, job: lifecycle.keep(worker.conn, [job.job_id], [job.attempt], job.claimed_by),
    "settle": lambda worker, job: lifecycle.settle(worker.conn, BOOT, "crash", "gone"),
    "settle uncounted": lambda worker, job: lifecycle.settle(worker.conn, BOOT, "drain", "drain"),
    "settle late": lambda worker, job: lifecycle.settle(worker.conn, BOOT, "timeout", "late"),
    "reap": lambda worker, job: lifecycle.reap(worker.conn),
    "wake": lambda worker, job: lifecycle.wake(worker.conn, 10),
    "kill": lambda worker, job: operations.change_queue(worker.conn, "kill-retries", "q", "operator"),
}
# The transitions that each may make; every other one changes no row.
MAY = {
    "request_cancel": {("queued", "canceled")},
    "claim": {("queued", "running"), ("queued", "canceled"), ("queued", "lost")},
    "succeed": {("running", "succeeded"), ("running", "canceled")},
    "retry": {("running", "queued"), ("running", "canceled")},
    "fail": {("running", "failed"), ("running", "canceled")},
    "cancel": {("running", "canceled")},
    "hand_back": {("running", "queued"), ("running", "canceled")},
    "settle": {("running", "queued"), ("running", "canceled"), ("running", "lost")},
    "settle uncounted": {("running", "queued"), ("running", "canceled")},
    "settle late": {("running", "queued"), ("running", "canceled"), ("running", "failed")},
    "reap": {("running", "queued"), ("running", "canceled"), ("running", "lost")},
    "kill": {("queued", "failed"), ("queued", "canceled")},
}
RENEWING = {"beat", "retake", "keep", "leap"}
SITUATIONS = list(itertools.product((False, True), (False, True), (False, True)))


def placed(conn: Conn, status: Status, spent: bool, asked: bool, late: bool) -> tuple[UUID, Job]:
    """A job of this status: its attempts spent, its cancellation asked for, its lease expired, or not."""
    job_id = enqueue(conn, lock_key="k", idempotency_key="i", max_attempts=1 if spent else 5)
    conn.execute(
        "UPDATE dl_jobs SET status = %s, attempt = 1, cancel_requested = %s,"
        " heartbeat_at = CASE WHEN %s = 'running' THEN now() END,"
        " lease_expires_at = CASE WHEN %s = 'running' THEN now() + make_interval(secs => %s) END",
        (status, asked, status, status, -1 if late else 60),
    )
    conn.execute("UPDATE dl_jobs SET claimed_by = %s WHERE job_id = %s", (BOOT, job_id))
    return job_id, Job(job_id, "q", "t", "{}", "i", "k", "", 1, 1 if spent else 5, 60, None, 1, BOOT)


@pytest.mark.long
def test_every_statement_from_every_state_makes_a_legal_step_or_none(conn: Conn, worker: Worker) -> None:
    steps: dict[str, set[tuple[str, str]]] = {name: set() for name in STATEMENTS}
    for name, status, (spent, asked, late) in itertools.product(STATEMENTS, Status, SITUATIONS):
        conn.execute("DELETE FROM dl_jobs")
        job_id, job = placed(conn, status, spent, asked, late)
        before, events = row(conn, job_id), len(journal(conn, job_id))
        STATEMENTS[name](worker, job)
        worker.conn.execute("SELECT pg_advisory_unlock_all()")
        after = row(conn, job_id)
        added = kinds(conn, job_id)[events:]
        case = f"{name} from {status}, spent={spent} asked={asked} late={late}"
        step = (before["status"], after["status"])
        if step[0] != step[1]:
            steps[name].add(step)
            assert len(added) == 1, case
            assert after["journaled"] == before["journaled"] + 1, case  # else the trigger looks again, and that costs
            assert not (asked and step[1] in ("queued", "running", "lost", "failed")), case
            assert (after["finished_at"] is not None) == (step[1] in FINAL), case
            assert after["claimed_by"] == (worker.name if step[1] == "running" else None), case
            assert illegal(["queued", *(["picked"] if step[0] == "running" else ["requeue"]), *added], step[1]) is None
        elif not (status == "running" and (name in RENEWING or name == "request_cancel")):
            assert after | {"now": 0} == before | {"now": 0}, case
            assert added == [], case
    assert {name: done for name, done in steps.items() if done} == MAY
