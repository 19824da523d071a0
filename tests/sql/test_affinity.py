"""Preferences of a claim: jobs whose resources are warm in its worker, within bounds; and the jobs it passes over."""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hands import BACKOFF_SEC, Conn, Worker, keys_held, many, plain, row, state, value

from dataloader.queue import lifecycle, operations
from dataloader.queue.lifecycle import Affinity, Step


def claim(
    worker: Worker,
    warm: Collection[str] | None = None,
    elsewhere: Collection[str] = (),
    most: int = 1,
    lookahead: int = 50,
    overdue: Mapping[int, datetime] = {},
    without: Collection[str] = (),
    queues: tuple[str, ...] = ("q",),
) -> Step:
    affinity = None if warm is None else Affinity(warm, elsewhere, lookahead, overdue)
    return lifecycle.step(worker.session, [*queues], BACKOFF_SEC, most, None, affinity=affinity, without=without)


def jobs(conn: Conn, models: str, **more: Any) -> list[UUID]:
    """A job for each letter, in this order; a dot is a job without an affinity key."""
    return [plain(conn, affinity_key=None if model == "." else model, **more) for model in models]


def models(step: Step) -> str:
    return "".join(job.affinity_key or "." for job in step.jobs)


@pytest.mark.parametrize(
    ("queued", "how", "then"),
    [
        ("abab", {"warm": None}, "a"),
        ("abab", {"warm": "b"}, "b"),
        ("abab", {"warm": "ba"}, "a"),
        ("ab.", {"warm": "c"}, "."),
        ("abb", {"warm": "c"}, "b"),
        ("abb", {"warm": ""}, "b"),
        ("abb", {"warm": "c", "elsewhere": "b"}, "a"),
        ("abba", {"warm": "c"}, "a"),
        ("abb", {"warm": "c", "elsewhere": "ab"}, "b"),
        ("...", {"warm": "a"}, "."),
        ("ab.cba", {"warm": "a", "most": 10}, "a.a"),
        ("bcbca", {"warm": "a", "lookahead": 5}, "a"),
        ("bcbca", {"warm": "a", "lookahead": 4}, "b"),
    ],
)
def test_which_jobs_a_claim_takes(conn: Conn, worker: Worker, queued: str, how: dict[str, Any], then: str) -> None:
    """A warm one or one without a key; else one of most jobs, which no sibling has warm; of equals the oldest.

    A claim of many takes what is warm and nothing else; and none looks farther than it may.
    """
    jobs(conn, queued)
    assert models(claim(worker, **how)) == then
    assert len(keys_held(conn)) == len(then)


@pytest.mark.parametrize(("worse", "better", "warm"), [("aa", "b", "a"), ("ccc", "abb", "")])
def test_only_jobs_of_the_best_priority_count(conn: Conn, worker: Worker, worse: str, better: str, warm: str) -> None:
    jobs(conn, worse, priority=2)
    jobs(conn, better, priority=1)
    assert models(claim(worker, warm)) == "b"


@pytest.mark.parametrize("is_late", [False, True])
def test_where_others_have_locked_what_most_want_any_job_will_do(conn: Conn, worker: Worker, is_late: bool) -> None:
    """A claim prefers warm jobs, then the key of most jobs, then any job, also after the first queue's second round."""
    locked = jobs(conn, "bb")
    jobs(conn, "c")
    with conn.transaction(), worker.conn.transaction():
        conn.execute("SELECT FROM dl_jobs WHERE job_id = ANY (%s) FOR UPDATE", (locked,))
        if is_late:
            worker.conn.execute("SELECT pg_sleep(1.01)")  # the second begins with the claim's transaction
        assert models(claim(worker, "a", most=5 if is_late else 1)) == "c"


def test_a_claim_says_up_to_where_it_has_passed_jobs_over_and_an_overdue_one_goes_first(
    conn: Conn, worker: Worker
) -> None:
    old, taken, new = jobs(conn, "bab")
    found = claim(worker, "a")
    assert (found.job.job_id, found.reached) == (taken, (100, row(conn, taken)["created_at"]))
    instant = row(conn, new)["created_at"]
    jobs(conn, "aa")
    assert models(claim(worker, "a", overdue={99: instant})) == "a"
    assert claim(worker, "a", overdue={100: instant}).job.job_id == old
    assert models(claim(worker, "a", overdue={100: row(conn, taken)["created_at"]})) == "a", "the younger ones wait"
    assert claim(worker, "b").reached is None


def test_an_ordered_queue_keeps_its_order(conn: Conn, worker: Worker) -> None:
    operations.set_order(conn, "q", "test", ordered=True)
    first, _ = (plain(conn, lock_key="k", affinity_key=key, score=score) for key, score in (("b", 1), ("a", 2)))
    assert claim(worker, "a").job.job_id == first


def test_jobs_of_some_tasks_are_passed_over_and_the_claim_says_so(conn: Conn, worker: Worker) -> None:
    """They hide no other job, also none of a worse priority."""
    big = plain(conn, task="big")
    plain(conn, task="big")
    others = [plain(conn, task="small", priority=priority) for priority in (100, 101)]
    found = claim(worker, without=["big"], most=5)
    assert [job.job_id for job in found.jobs] == others
    assert found.left_out == ("big", row(conn, big)["created_at"])
    again = claim(worker, without=["big"])
    assert (again.jobs, again.due_in, again.look_again) == ([], 1, False)
    assert state(conn, big) == ("queued", 0)
    assert claim(worker).job.job_id == big


def test_a_job_is_left_out_since_it_is_due(conn: Conn, worker: Worker) -> None:
    """One that waits in any case is not left out."""
    plain(conn, task="big", in_sec=60)
    plain(conn, task="big", queue="other")
    assert claim(worker, without=["big"]).left_out is None
    job_id = plain(conn, task="big", in_sec=-5, made_sec=-60)
    found = claim(worker, without=["big"])
    assert found.left_out.since - row(conn, job_id)["created_at"] == timedelta(seconds=55)


def test_a_claim_reads_a_thousand_jobs_that_it_passes_over_and_no_more(conn: Conn, worker: Worker) -> None:
    """So a job far behind is not left out."""
    many(conn, 1_100, "key-%s")
    plain(conn, task="small")
    found = claim(worker, without=["t"])
    assert (found.jobs, found.left_out is not None) == ([], True)
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE blocked_on IS NOT NULL") == 0
    found = claim(worker, without=["small"])
    assert (len(found.jobs), found.left_out) == (1, None)
