"""Limits for the whole fleet: how many jobs of one run at once and start in a minute, whoever claims, ends or dies."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import UUID

import httpx
import pytest
from hands import Conn, Worker, Workers, expire, locked, many, plain, quietly, started, step, until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from readings import row, value, waits

from dataloader import config
from dataloader.farm.runner import Runner
from dataloader.pipelines import PermanentError, Stopped
from dataloader.pipelines.session import Session
from dataloader.queue import lifecycle, operations
from dataloader.queue.job import Finish, Job
from dataloader.queue.lifecycle import Ended, Step
from dataloader.queue.reports import stats

RUNNING = "SELECT count(DISTINCT (lock_key, claimed_by)) FROM dl_jobs WHERE status = 'running' AND %s = ANY (limits)"


def allow(conn: Conn, name: str = "l", **what: Any) -> None:
    operations.set_limit(conn, name, "test", **what)


def jobs(conn: Conn, number: int, *limits: str, **more: Any) -> list[UUID]:
    """So many jobs of these limits, in the order in which they start."""
    return [plain(conn, limits=list(limits or ("l",)), **more) for _ in range(number)]


def claim(worker: Worker, most: int = 1, queue: str = "q") -> Step:
    return step(worker, most, queue=queue)


def run(*workers: Worker) -> list[Job]:
    return [worker.take() for worker in workers]


@pytest.mark.parametrize("verb", ["succeed", "retry", "fail", "hand_back", "lost"])
def test_an_end_lets_the_first_one_in_and_no_more(conn: Conn, one: Worker, two: Worker, verb: str) -> None:
    """A row whose lease is over counts until it is recovered."""
    allow(conn, most=1)
    _, second, third = jobs(conn, 3, max_attempts=1)
    job = one.take()
    if verb == "lost":
        expire(conn, job.job_id)
    assert claim(two).job is None
    two.notes()
    if verb == "lost":
        assert lifecycle.reap(two.conn) is not None
    else:
        one.finish(job, verb, delay_sec=3600.0)
    assert two.notes().count("q") >= 1
    assert waits(conn, second, third) == [None, "limit:l"]
    assert two.take().job_id == second


@pytest.mark.parametrize("ordered", [False, True])
def test_a_claim_takes_one_job_of_a_limit_and_others_beside_it(conn: Conn, worker: Worker, ordered: bool) -> None:
    operations.set_order(conn, "q", "test", ordered=ordered)
    allow(conn, most=3)
    limited, others = jobs(conn, 3), [plain(conn) for _ in range(3)]
    assert [job.job_id for job in claim(worker, 10).jobs] == [limited[0], *others[:3]]


def test_a_full_limit_costs_the_jobs_behind_it_nothing(conn: Conn, worker: Worker) -> None:
    allow(conn, most=0)
    with quietly(conn):
        many(conn, 2_500, limits="'{l}'")
        other, last = plain(conn), plain(conn)
    version = value(conn, "SELECT xmin::text FROM dl_jobs WHERE job_id = %s", last)
    assert worker.take().job_id == other
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE blocked_on = 'limit:l'") == 2_500
    assert value(conn, "SELECT xmin::text FROM dl_jobs WHERE job_id = %s", last) == version


def test_a_job_of_two_limits_needs_room_in_both_and_jobs_of_its_key_pass_it(conn: Conn, worker: Worker) -> None:
    allow(conn, "a", most=1)
    allow(conn, "b", most=0)
    (both,) = jobs(conn, 1, "a", "b", lock_key="k")
    other = plain(conn, lock_key="k")
    assert worker.take().job_id == other
    assert waits(conn, both) == ["limit:b"]


def test_a_place_goes_to_the_next_row_when_one_stops_at_another_limit(conn: Conn, workers: Workers) -> None:
    allow(conn, "a", most=1)
    allow(conn, "b", most=1)
    holds_a, holds_b = jobs(conn, 1, "a") + jobs(conn, 1, "b")
    one, two, three = (workers() for _ in range(3))
    first, second = run(one, two)
    assert (first.job_id, second.job_id) == (holds_a, holds_b)
    (both,) = jobs(conn, 1, "a", "b")
    (only_a,) = jobs(conn, 1, "a")
    assert claim(three).job is None
    assert waits(conn, both, only_a) == ["limit:a", "limit:a"]
    one.finish(first)
    third = three.take()
    assert (third.job_id, waits(conn, both)) == (only_a, ["limit:a"])
    two.finish(second)
    three.finish(third)
    assert two.take().job_id == both


@pytest.mark.parametrize(
    "leaves",
    [
        "UPDATE dl_jobs SET status = 'canceled'",
        "UPDATE dl_jobs SET available_at = now() + interval '1 hour'",
        "UPDATE dl_jobs SET queue = 'other'",
        "DELETE FROM dl_jobs",
    ],
)
def test_a_place_passes_on_from_an_end_or_a_row_that_leaves(conn: Conn, one: Worker, two: Worker, leaves: str) -> None:
    allow(conn, most=1)
    first, second, third = jobs(conn, 3)
    run(one)
    assert claim(two).job is None
    conn.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = %s", (first,))
    assert waits(conn, second, third) == [None, "limit:l"]
    conn.execute(f"{leaves} WHERE job_id = %s", (second,))
    assert waits(conn, third) == [None]


@pytest.mark.parametrize(
    "leaves", ["UPDATE dl_jobs SET status = 'canceled'", "UPDATE dl_jobs SET queue = 'other'", "DELETE FROM dl_jobs"]
)
def test_a_row_that_leaves_its_limit_frees_its_key(conn: Conn, leaves: str) -> None:
    first = plain(conn, lock_key="k", limits=["l"], blocked_on="limit:l", journaled=2)
    behind = plain(conn, lock_key="k", blocked_on="key", journaled=2)
    conn.execute(f"{leaves} WHERE job_id = %s", (first,))
    assert waits(conn, behind) == [None]


def test_every_queue_has_a_row_for_the_room(conn: Conn, one: Worker, two: Worker) -> None:
    """A queue that is paused, or has no worker, does not keep a place from the others."""
    allow(conn, most=1)
    (first,) = jobs(conn, 1)
    idle, later = jobs(conn, 2, queue="idle", made_sec=-60)
    (second,) = jobs(conn, 1)
    (job,) = run(one)
    assert claim(two).job is None
    assert waits(conn, idle, later, second) == [None, None, "limit:l"]
    assert claim(two, queue="idle").job is None
    assert waits(conn, idle, later) == ["limit:l"] * 2
    one.finish(job)
    assert waits(conn, idle, later, second) == [None, "limit:l", None]
    assert (job.job_id, two.take().job_id) == (first, second)


def test_a_limit_that_is_changed_holds_at_once(conn: Conn, workers: Workers) -> None:
    allow(conn, most=1)
    queued = jobs(conn, 5)
    four = [workers() for _ in range(4)]
    run(four[0])
    assert claim(four[1]).job is None
    allow(conn, most=3)
    assert waits(conn, *queued[1:]) == [None, None, "limit:l", "limit:l"]
    run(*four[1:3])
    assert claim(four[3]).job is None
    allow(conn, most=1)  # with three that run
    (late,) = jobs(conn, 1)
    assert claim(four[3]).job is None
    assert waits(conn, late) == ["limit:l"]
    assert operations.remove_limit(conn, "l", "test")
    assert waits(conn, *queued[3:]) == [None, None]
    assert not operations.remove_limit(conn, "l", "test")


def test_a_ready_job_stands_for_one_place(conn: Conn, one: Worker, two: Worker) -> None:
    """Of its own limit: neither one of another limit nor many parked ones of another are in the way."""
    allow(conn, most=1)
    _, second, third = jobs(conn, 3)
    run(one)
    assert claim(two).job is None
    (ready,) = jobs(conn, 1)
    jobs(conn, 1, "other")
    with quietly(conn):
        many(conn, 101, limits="'{a}'", blocked_on="'limit:a'")
    allow(conn, most=3)
    assert waits(conn, second, third, ready) == [None, "limit:l", None]


def test_a_row_that_is_parked_behind_its_key_leaves_its_place(conn: Conn, one: Worker, two: Worker) -> None:
    allow(conn, most=1)
    plain(conn, lock_key="k")
    run(one)
    (behind,) = jobs(conn, 1, lock_key="k")
    (other,) = jobs(conn, 1, blocked_on="limit:l", journaled=2)
    assert two.take().job_id == other
    assert waits(conn, behind) == ["key"]


def test_a_worker_runs_several_jobs_and_a_delivery_is_one_run(conn: Conn, one: Worker, two: Worker) -> None:
    operations.set_order(conn, "merged", "test", ordered=True, merge=True)
    allow(conn, "l", most=3)
    allow(conn, "rate", per_minute=1, burst=2)
    jobs(conn, 2, "l", "rate", lock_key="k", queue="merged")
    assert len(claim(one, queue="merged").jobs) == 2
    jobs(conn, 1, "rate"), jobs(conn, 3)
    run(two, two, two)
    assert claim(one).job is None


def test_a_start_takes_tokens_of_its_own_limit(conn: Conn, worker: Worker) -> None:
    allow(conn, "a", per_minute=1)
    allow(conn, "b", per_minute=1)
    (first,), (second,) = jobs(conn, 1, "a"), jobs(conn, 1, "b")
    assert [worker.take().job_id, worker.take().job_id] == [first, second]


def test_a_locked_row_is_not_waited_for_and_takes_no_token(conn: Conn, worker: Worker) -> None:
    allow(conn, "full", most=0)
    allow(conn, "rate", per_minute=1)
    (full,), (rate,) = jobs(conn, 1, "full"), jobs(conn, 1, "rate")
    with locked(conn, full, rate):
        assert claim(worker).job is None
    assert waits(conn, full) == [None]
    assert worker.take().job_id == rate


def test_as_many_jobs_start_as_there_are_tokens_and_none_is_given_back(conn: Conn, worker: Worker) -> None:
    allow(conn, per_minute=1, burst=3)
    queued = jobs(conn, 5)
    started_jobs = claim(worker, 10).jobs
    assert [job.job_id for job in started_jobs] == queued[:3]
    assert claim(worker, 10).jobs == []
    assert waits(conn, *queued[3:]) == ["time", "limit:l"]
    worker.finish(started_jobs[0], "hand_back")
    assert claim(worker, 10).jobs == []


def test_the_first_job_that_waits_gets_the_time_of_the_next_token(conn: Conn, one: Worker, two: Worker) -> None:
    allow(conn, per_minute=1)
    first, second, third = jobs(conn, 3)
    assert one.take().job_id == first
    assert claim(two).due_in == pytest.approx(30, abs=15)  # half a token was there beside the one
    assert waits(conn, second, third) == ["time", "limit:l"]
    conn.execute("UPDATE dl_limits SET empty_at = empty_at - interval '31 s'")
    conn.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = %s", (second,))
    assert two.take().job_id == second
    assert waits(conn, third) == ["time"]


def test_a_stranger_with_the_limits_row_stops_its_starts_alone(conn: Conn, worker: Worker) -> None:
    allow(conn, per_minute=60)
    (limited,), other = jobs(conn, 1), plain(conn)
    with conn.transaction():
        conn.execute("SELECT FROM dl_limits FOR UPDATE")
        assert worker.take().job_id == other
        assert claim(worker).job is None
    assert worker.take().job_id == limited


def test_a_faster_rate_makes_the_waiting_job_due(conn: Conn, worker: Worker) -> None:
    allow(conn, per_minute=0.01)
    first, second = jobs(conn, 2)
    plain(conn, in_sec=1_000)
    conn.execute("UPDATE dl_jobs SET backoffs = 2")
    assert worker.take().job_id == first
    assert claim(worker).job is None
    assert (waits(conn, second), row(conn, second)["backoffs"]) == (["time"], 0)
    allow(conn, per_minute=60_000)
    assert worker.take().job_id == second


def test_a_changed_rate_keeps_its_tokens(conn: Conn, worker: Worker) -> None:
    allow(conn, per_minute=6, burst=10)
    jobs(conn, 7)
    assert len(claim(worker, 7).jobs) == 7
    for per_minute in (0.6, 12, 0.001):  # at 12 ten seconds add two; a full bucket would have 10.5
        allow(conn, per_minute=per_minute, burst=10)
        assert stats.limits(conn, "l")[0]["tokens"] == pytest.approx(3.5, abs=2)
    allow(conn, most=1)
    assert stats.limits(conn, "l")[0]["tokens"] is None
    allow(conn, per_minute=60, burst=4)
    assert stats.limits(conn, "l")[0]["tokens"] == pytest.approx(4.5, abs=0.1)


def asking(dsn: str, check: Callable[[], None] = lambda: None) -> Session:
    """The HTTP session of a run in a worker of its own, whose requests count for the limit and are answered at once."""
    http = Session(
        httpx.MockTransport(lambda _: httpx.Response(200)), partial(Runner(config.load(), dsn).pace, check=check)
    )
    http.limit = "l"
    return http


def test_the_requests_of_all_workers_keep_to_the_rate(conn: Conn, dsn: str) -> None:
    allow(conn, per_minute=600, burst=2)

    def ask(_: int) -> None:
        http = asking(dsn)
        for _ in range(5):
            http.get("https://shop.example/")

    began = time.monotonic()
    with ThreadPoolExecutor(4) as workers:
        list(workers.map(ask, range(4)))
    assert time.monotonic() - began >= (20 - 2.5) * 0.1


def test_requests_need_a_limit_with_a_rate_and_share_its_tokens_with_starts(
    conn: Conn, dsn: str, worker: Worker
) -> None:
    words = "there is no limit l with a rate: dataloader limit set l --per-minute 60"
    with pytest.raises(PermanentError, match=words):
        asking(dsn).get("https://shop.example/")
    allow(conn, most=1)
    with pytest.raises(PermanentError, match=words):
        asking(dsn).get("https://shop.example/")
    operations.remove_limit(conn, "l", "test")
    allow(conn, per_minute=1, burst=2)
    queued = jobs(conn, 2)
    asking(dsn).get("https://shop.example/")
    assert [job.job_id for job in claim(worker, 2).jobs] == queued[:1]
    assert waits(conn, queued[1]) == ["time"]


def test_a_request_that_waits_is_a_safe_point(conn: Conn, dsn: str) -> None:
    def check() -> None:
        raise Stopped

    allow(conn, per_minute=1)
    http = asking(dsn, check)
    http.get("https://shop.example/")
    tokens = stats.limits(conn, "l")[0]["tokens"]
    for _ in range(3):
        with pytest.raises(Stopped):
            http.get("https://shop.example/")
    assert stats.limits(conn, "l")[0]["tokens"] >= tokens  # a request that waits has taken none


def test_requests_that_wait_leave_a_start_its_token(conn: Conn, dsn: str, worker: Worker) -> None:
    allow(conn, per_minute=600)
    asking(dsn).get("https://shop.example/")  # the token of a new limit
    jobs(conn, 1)
    stops = threading.Event()

    def ask() -> None:
        http = asking(dsn)
        while not stops.is_set():
            http.get("https://shop.example/")

    with ThreadPoolExecutor(2) as runs:
        busy = [runs.submit(ask) for _ in range(2)]
        try:
            until(lambda: claim(worker, 1).jobs, "a token for the job")
        finally:
            stops.set()
        assert [each.result() for each in busy] == [None, None]


def test_two_claims_never_decide_on_one_limit_at_once(conn: Conn, one: Worker, two: Worker) -> None:
    """The second one passes the limit over, and comes back."""
    allow(conn, most=1)
    first, second = jobs(conn, 1), jobs(conn, 1, queue="other")
    with one.conn.transaction():
        assert claim(one).job is not None
        found = claim(two, queue="other")
        assert (found.job, found.due_in) == (None, pytest.approx(0.05))
        assert waits(conn, *second) == [None]
    assert claim(two, queue="other").job is None
    assert waits(conn, *first, *second) == [None, "limit:l"]


def test_an_end_during_the_parking_finds_the_parked_rows(conn: Conn, one: Worker, two: Worker) -> None:
    """The claim holds the running rows, so the end comes behind its commit."""
    allow(conn, most=1)
    jobs(conn, 1)
    (job,) = run(one)
    (second,) = jobs(conn, 1)
    with two.conn.transaction():
        assert claim(two).job is None
        assert waits(two.conn, second) == ["limit:l"]
        with started(lambda: one.finish(job), one.pid, conn):
            two.conn.execute("COMMIT; BEGIN")
    until(lambda: waits(conn, second) == [None], "the second job to be ready")


def test_nothing_is_parked_while_a_run_is_about_to_end(conn: Conn, one: Worker, two: Worker) -> None:
    """Its place may be free at once: the claim comes back. A delivery beside it is one run."""
    operations.set_order(conn, "merged", "test", ordered=True, merge=True)
    allow(conn, most=2)
    jobs(conn, 2, lock_key="k", queue="merged"), jobs(conn, 1, "other", queue="merged")
    assert len(claim(two, 2, queue="merged").jobs) == 3
    jobs(conn, 1)
    (job,) = run(one)
    (second,) = jobs(conn, 1)
    with one.conn.transaction():
        one.finish(job)
        found = claim(two)
        assert (found.job, waits(conn, second)) == (None, [None])
        assert found.due_in <= 0.1
    assert two.take().job_id == second


def test_an_end_in_one_snapshot_is_made_good_by_the_reaper(conn: Conn, one: Worker, two: Worker) -> None:
    allow(conn, most=1)
    first, second = jobs(conn, 2)
    run(one)
    assert claim(two).job is None
    with conn.transaction():
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        conn.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = %s", (first,))
    assert waits(conn, second) == ["limit:l"]
    lifecycle.let_in(two.conn)
    assert two.take().job_id == second


def test_a_locked_row_lets_the_next_one_in(conn: Conn, one: Worker, two: Worker) -> None:
    allow(conn, most=1)
    _, second, third = jobs(conn, 3)
    (job,) = run(one)
    assert claim(two).job is None
    with conn.transaction():
        conn.execute("SELECT FROM dl_jobs WHERE job_id = %s FOR UPDATE", (second,))
        one.finish(job)
        assert two.take().job_id == third


@pytest.mark.parametrize("merge", [False, True])
def test_the_head_of_an_ordered_key_waits_and_its_key_with_it(conn: Conn, workers: Workers, merge: bool) -> None:
    operations.set_order(conn, "q", "test", ordered=True, merge=merge)
    allow(conn, most=1)
    (holds,) = jobs(conn, 1)
    one, two = workers(), workers()
    (job,) = run(one)
    head, next_one = jobs(conn, 2, lock_key="k")
    assert claim(two).job is None
    assert waits(conn, head, next_one) == ["limit:l", "key"]
    one.finish(job)
    found = claim(two)
    assert [each.job_id for each in found.jobs] == ([head, next_one] if merge else [head])
    assert job.job_id == holds
    assert value(conn, RUNNING, "l") == 1


def test_a_delivery_ends_where_the_limits_differ(conn: Conn, worker: Worker) -> None:
    operations.set_order(conn, "q", "test", ordered=True, merge=True)
    allow(conn, most=0)
    first, second = plain(conn, lock_key="k"), plain(conn, lock_key="k")
    jobs(conn, 1, lock_key="k")
    assert [job.job_id for job in claim(worker).jobs] == [first, second]


def test_a_job_says_which_limit_it_waits_for_and_a_limit_has_its_figures(conn: Conn, workers: Workers) -> None:
    allow(conn, most=1)
    allow(conn, "rate", per_minute=90.5)
    _, second, _ = jobs(conn, 3)
    run(workers())
    shown = lifecycle.status(conn, second)
    assert shown["waiting_for"] == {"reason": "limit", "limit": "l", "running": 1, "most": 1}
    assert claim(workers()).job is None
    assert lifecycle.reasons(conn, [second])[second]["reason"] == "limit"
    found = {each["name"]: each for each in stats.limits(conn)}
    assert [found["l"][name] for name in ("most", "running", "waiting", "room", "tokens")] == [1, 1, 2, 0, None]
    assert [found["rate"][name] for name in ("per_minute", "burst", "most", "running")] == [90.5, 2, None, 0]


STUCK = """
SELECT count(*) FROM dl_jobs j
 WHERE status = 'queued' AND left(blocked_on, 6) = 'limit:' AND cardinality(limits) <= %s
   AND (SELECT bool_and(room > 0) FROM dl_limit_state(j.limits))
   AND NOT EXISTS (SELECT FROM dl_jobs r
                    WHERE r.status = 'queued' AND r.blocked_on IS NULL AND r.limits && ARRAY[substr(j.blocked_on, 7)])
"""


class LimitedFarm(RuleBasedStateMachine):
    """Random claims, ends, crashes and changes of two limits: never more than a limit says, never idle with work."""

    def __init__(self, dsn: str, conn: Conn) -> None:
        super().__init__()
        self.dsn, self.conn = dsn, conn
        conn.execute("TRUNCATE dl_jobs, dl_job_events, dl_limits, dl_freed")
        self.workers = [Worker(dsn, f"host:{number}:boot") for number in range(3)]
        self.runs: list[tuple[Worker, Job]] = []
        self.most: dict[str, int] = {}
        self.over: dict[str, int] = {}  # how many ran when a limit was lowered
        for name in "ab":
            self.change(name, 1)

    @rule(limits=st.sampled_from([["a"], ["b"], ["a", "b"], ["b", "a"], None]), key=st.sampled_from("klmnop"))
    def add(self, limits: list[str] | None, key: str) -> None:
        plain(self.conn, limits=limits, lock_key=key)

    @rule(number=st.integers(0, 2), most=st.integers(1, 4))
    def claim(self, number: int, most: int) -> None:
        worker = self.workers[number]
        self.runs += [(worker, job) for job in claim(worker, most).jobs]
        self.check_bounds()

    def check_bounds(self) -> None:
        for name, most in self.most.items():
            assert value(self.conn, RUNNING, name) <= max(most, self.over[name])

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), verb=st.sampled_from(["succeed", "hand_back", "fail"]))
    def end(self, data: st.DataObject, verb: str) -> None:
        worker, job = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
        lifecycle.finish_some(worker.conn, worker.session.worker, [Ended(job, Finish(verb))])

    @rule(number=st.integers(0, 2))
    def crash(self, number: int) -> None:
        worker = self.workers[number]
        lifecycle.settle(self.conn, worker.name, "killed", "test")
        worker.conn.close()
        self.runs = [run for run in self.runs if run[0] is not worker]
        self.workers[number] = Worker(self.dsn, worker.name)

    @rule(name=st.sampled_from("ab"), most=st.integers(0, 3))
    def change(self, name: str, most: int) -> None:
        allow(self.conn, name, most=most)
        self.most[name], self.over[name] = most, value(self.conn, RUNNING, name)

    @invariant()
    def never_idle_with_work(self) -> None:
        """No job waits for a limit with room but behind a ready one; of two limits, after a round of the reaper."""
        assert not value(self.conn, STUCK, 1)
        lifecycle.let_in(self.conn)
        assert not value(self.conn, STUCK, 2)

    def teardown(self) -> None:
        for worker in self.workers:
            worker.conn.close()


@pytest.mark.long
def test_no_limit_is_exceeded_or_idle_with_work_whatever_the_steps(dsn: str, conn: Conn) -> None:
    run_machine(lambda: LimitedFarm(dsn, conn), settings=settings(max_examples=12, stateful_step_count=30))


EIGHT_NAMES = "ARRAY(SELECT 'l' || i || '-' || j FROM generate_series(1, 8) j)"
ASKED = """
SELECT rows, (SELECT count(*) FROM jsonb_object_keys(room)), cardinality(mine)
  FROM dl_take_keys('q', false, %s, 0, '-infinity', 0, '{}', false, 0, NULL)
"""


@pytest.mark.parametrize(("most_running", "most"), [(None, 1_000), (0, 1), (1, 1_000)])
def test_a_claim_asks_a_bounded_number_of_limits(conn: Conn, most_running: int | None, most: int) -> None:
    """Thousands of names kept every claim of their queue busy for 20 s. Names without a limit are not remembered."""
    many(conn, 400, limits=EIGHT_NAMES)
    if most_running is not None:
        add = "INSERT INTO dl_limits (name, most) SELECT DISTINCT unnest(limits), %s FROM dl_jobs"
        conn.execute(add, (most_running,))
    rows, names, mine = conn.execute(ASKED, (most,)).fetchone() or (0, 0, 0)
    if most_running is None:
        assert (rows, names, mine) == (400, 0, 400)
    else:
        assert (0 < names <= 108, rows) == (True, 13)
