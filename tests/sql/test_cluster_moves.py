"""A queue moves to another cluster: here two databases, each with the project's schema (`clusters.move`)."""

from __future__ import annotations

import itertools
import json
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any
from uuid import UUID

import psycopg
import pytest
import structlog
from hands import Worker, enqueue, journal, plain, row, value
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dataloader import config
from dataloader.farm import reaper
from dataloader.queue import clusters, db, lifecycle, migrations, operations
from dataloader.queue.clusters import Side
from dataloader.queue.enqueue import NewJob
from dataloader.queue.enqueue import enqueue as add
from dataloader.queue.operations import Busy, Contradiction

QUEUED = "SELECT array_agg(job_id ORDER BY score, created_at, job_id) FROM dl_jobs WHERE status = 'queued'"
BY = "ops"


@pytest.fixture
def other(own_db: str) -> Iterator[db.Connection]:
    with db.connect(own_db, name="test", schema="public") as conn:
        yield conn


@pytest.fixture
def east(conn: db.Connection) -> Side:
    return Side("east", conn)


@pytest.fixture
def west(other: db.Connection) -> Side:
    return Side("west", other)


def move(source: Side, target: Side, queue: str = "q", limit: int = 1_000) -> int:
    """As the command does; returns how many jobs were carried."""
    carried = 0
    for _ in range(200):
        step = clusters.move(source, target, queue, limit)
        carried += step.moved
        if step.is_done:
            return carried
    raise AssertionError("the move does not end")


def in_order(dsn: str, queue: str = "q") -> list[Any]:
    worker, found = Worker(dsn, "west:1:boot"), []
    with worker.conn:
        while job := worker.claim(queue).job:
            found.append(job.job_id)
            worker.finish(job)
    return found


def test_queued_and_dead_jobs_are_carried_and_history_stays(east: Side, west: Side) -> None:
    queued, later = enqueue(east.conn), plain(east.conn, in_sec=60)
    retry = plain(east.conn, in_sec=60, attempt=2)
    dead = [plain(east.conn, status="failed"), plain(east.conn, status="lost")]
    done, elsewhere = plain(east.conn, status="succeeded"), enqueue(east.conn, queue="other")
    before = {job_id: row(east.conn, job_id) for job_id in (queued, later, retry, *dead)}
    assert move(east, west) == 5
    for job_id, was in before.items():
        ours = {"journaled", "now"}
        assert {k: v for k, v in row(west.conn, job_id).items() if k not in ours} == {
            k: v for k, v in was.items() if k not in ours
        }
    assert value(east.conn, "SELECT array_agg(job_id ORDER BY job_id) FROM dl_jobs") == sorted([done, elsewhere])
    assert value(west.conn, "SELECT count(*) FROM dl_arrivals") == 0


def test_what_belongs_to_a_job_goes_with_it(east: Side, west: Side) -> None:
    job_id = enqueue(east.conn)
    east.conn.execute(
        "INSERT INTO dl_job_logs VALUES (%s, 1, 1, 1, now() - interval '3 days', 'info', 'log', 'seen')", (job_id,)
    )
    east.conn.execute("INSERT INTO dl_checkpoints VALUES (%s, 1, '{\"row\": 7}', 1, 1, false)", (job_id,))
    east.conn.execute("INSERT INTO dl_job_events (job_id, queue, kind) VALUES (%s, 'q', 'failed')", (job_id,))
    kinds = journal(east.conn, job_id)
    move(east, west)
    assert journal(west.conn, job_id) == kinds
    assert value(west.conn, "SELECT max(event_id) FROM dl_job_events") < 0  # neither counted nor told again
    assert value(west.conn, "SELECT text FROM dl_job_logs") == "seen"
    assert value(west.conn, "SELECT checkpoint FROM dl_checkpoints") == {"row": 7}
    for table in ("dl_job_logs", "dl_checkpoints", "dl_job_events"):
        assert value(east.conn, f"SELECT count(*) FROM {table}") == 0


@pytest.mark.parametrize("ordered", [True, False])
def test_the_order_of_each_key_is_kept(east: Side, west: Side, own_db: str, ordered: bool) -> None:
    if ordered:
        operations.set_order(east.conn, "q", BY, ordered=True)
    rng = random.Random(7)
    for n in range(60):
        score = float(rng.randint(0, 9)) if ordered else None
        add(east.conn, NewJob("q", "t", f"k{n % 5}", {"n": n}, score=score))
    by_key = (
        "SELECT array_agg(job_id ORDER BY score, created_at, job_id) FROM dl_jobs GROUP BY lock_key ORDER BY lock_key"
    )
    wanted = [each[0] for each in east.conn.execute(by_key)]
    assert move(east, west, limit=7) == 60
    assert operations.settings(west.conn, "q")["ordered"] is ordered
    started = in_order(own_db)
    for key in wanted:
        assert [job_id for job_id in started if job_id in key] == key


def test_a_running_job_ends_where_it_runs_and_its_retry_is_carried(east: Side, west: Side, dsn: str) -> None:
    first, second = enqueue(east.conn), enqueue(east.conn)
    worker = Worker(dsn, "east:1:boot")
    with worker.conn:
        running = worker.take()
        steps = [clusters.move(east, west, "q") for _ in range(3)]
        assert [step.running for step in steps] == [1, 1, 1]
        assert not any(step.is_done for step in steps)
        assert operations.settings(west.conn, "q")["paused_at"]
        assert worker.claim().job is None
        worker.finish(running, "retry", error="once", delay_sec=0.0)
        assert move(east, west) == 1
    assert value(west.conn, QUEUED) is not None
    assert sorted([first, second]) == sorted(value(west.conn, QUEUED))
    assert operations.settings(west.conn, "q")["paused_at"] is None
    assert operations.settings(east.conn, "q")["paused_by"] == "queue move across clusters: to west"


class Cut(Exception):
    """The mover is killed here."""


class Mortal:
    """A session that ends with its process at the n-th statement of the two sides together."""

    def __init__(self, conn: db.Connection, left: list[int]) -> None:
        self._conn, self._left = conn, left

    def execute(self, *args: Any) -> Any:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise Cut
        return self._conn.execute(*args)

    def cursor(self, **kwargs: Any) -> Any:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise Cut
        return self._conn.cursor(**kwargs)

    def transaction(self) -> Any:
        return _Until(self._conn.transaction(), self._left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)


class _Until:
    """A transaction whose commit may have happened when the process is killed behind it."""

    def __init__(self, block: Any, left: list[int]) -> None:
        self._block, self._left = block, left

    def __enter__(self) -> Any:
        return self._block.__enter__()

    def __exit__(self, *exc: Any) -> Any:
        answer = self._block.__exit__(*exc)
        self._left[0] -= 1
        if exc[0] is None and self._left[0] < 0:
            raise Cut
        return answer


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
def test_a_move_may_be_cut_off_between_any_two_statements(east: Side, west: Side, own_db: str, every: int) -> None:
    """After the next complete move each job is in the target, once, and none has started before."""
    cut = 0
    for n in itertools.count(step=every):
        for conn in (east.conn, west.conn):
            conn.execute("TRUNCATE dl_jobs, dl_queues, dl_arrivals, dl_departures, dl_job_events")
        wanted = [enqueue(east.conn) for _ in range(3)] + [plain(east.conn, status="failed")]
        left = [n]
        try:
            move(Side("east", Mortal(east.conn, left)), Side("west", Mortal(west.conn, left)), limit=2)  # type: ignore
        except Cut:
            cut += 1
            assert in_order(own_db) == []  # whatever is there waits
            move(east, west)
        there = value(west.conn, "SELECT array_agg(job_id ORDER BY job_id) FROM dl_jobs")
        assert (there, value(east.conn, "SELECT count(*) FROM dl_jobs")) == (sorted(wanted), 0), n
        assert value(west.conn, "SELECT count(*) FROM dl_arrivals") == 0
        assert value(east.conn, "SELECT count(*) FROM dl_departures") == 0
        assert len(in_order(own_db)) == 3
        if left[0] >= 0:
            break
    assert cut > 30 / every


@pytest.mark.parametrize("where", ["source", "target"])
@pytest.mark.parametrize("what", ["cancel", "delete"])
def test_what_people_end_between_the_two_commits_stays_ended(
    east: Side, west: Side, own_db: str, where: str, what: str
) -> None:
    job_id = enqueue(east.conn)
    clusters._begin(east, west, "q")
    with west.conn.transaction():
        clusters._copy(east, west.conn, [job_id])  # the target has committed, and the source has not
    assert row(west.conn, job_id)["blocked_on"] == "cluster"
    side = east if where == "source" else west
    change = operations.cancel if what == "cancel" else operations.delete
    assert change(side.conn, [job_id], BY) == {job_id: "done"}
    move(east, west)
    statuses = [lifecycle.status(each.conn, job_id) for each in (east, west)]
    found = [each["status"] for each in statuses if each]
    assert found == ([] if what == "delete" else ["canceled"])
    assert in_order(own_db) == []


def foreign(conn: db.Connection, job_id: UUID) -> None:
    """Somebody else's job with this id, in another queue."""
    theirs = enqueue(conn, queue="elsewhere")
    conn.execute("UPDATE dl_jobs SET job_id = %s WHERE job_id = %s", (job_id, theirs))


def test_a_queue_of_which_the_target_has_an_id_does_not_begin_to_move(east: Side, west: Side) -> None:
    job_id = enqueue(east.conn)
    foreign(west.conn, job_id)
    with pytest.raises(Contradiction, match=rf"the cluster west has other jobs with ids of q, {job_id}: delete"):
        clusters.move(east, west, "q")
    assert value(east.conn, "SELECT queue FROM dl_jobs") == "q"
    for side in (east, west):
        assert value(side.conn, "SELECT count(*) FROM dl_queues WHERE queue = 'q'") == 0


def test_a_job_of_which_the_target_has_the_id_stays_where_it_is(east: Side, west: Side) -> None:
    """The step is refused, with all its jobs: none is deleted here that was not copied."""
    doubled = enqueue(east.conn)
    wanted = sorted([doubled, enqueue(east.conn)])
    clusters._begin(east, west, "q")
    foreign(west.conn, doubled)
    with pytest.raises(Contradiction, match=str(doubled)):
        clusters.move(east, west, "q")
    assert value(east.conn, "SELECT array_agg(job_id ORDER BY job_id) FROM dl_jobs") == wanted
    assert value(west.conn, "SELECT array_agg(queue) FROM dl_jobs") == ["elsewhere"]
    assert value(west.conn, "SELECT count(*) FROM dl_arrivals") == 0
    operations.delete(west.conn, [doubled], BY)
    assert move(east, west) == 2
    assert value(west.conn, "SELECT array_agg(job_id ORDER BY job_id) FROM dl_jobs") == wanted


def test_a_message_names_some_of_many_ids(east: Side, west: Side) -> None:
    for _ in range(clusters.NAMED + 2):
        foreign(west.conn, enqueue(east.conn))
    with pytest.raises(Contradiction, match=r"and 2 more: delete"):
        clusters.move(east, west, "q")


def reaper_of(east: Side, **dsns: str) -> Callable[..., None]:
    """What east's reaper does in a round for the jobs of queues that have moved: so many seconds long."""
    known = config.load(_env_file=None, dl_clusters=json.dumps({"east": "dbname=nowhere", **dsns}), dl_cluster="east")
    log, memory = structlog.get_logger("reaper"), reaper.Memory()
    return lambda seconds=60.0: reaper.carry(east.conn, known, log, memory, monotonic() + seconds)


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the reaper's clock to when it tries again what has failed."""
    at = monotonic() + reaper.CARRY_AGAIN_SEC
    monkeypatch.setattr(reaper, "now", lambda: at)


def straggler(side: Side, queue: str, cluster: str = "west") -> UUID:
    """A job of a queue that has moved to another cluster."""
    side.conn.execute(
        "INSERT INTO dl_queues (queue, cluster, paused_at) VALUES (%s, %s, now()) ON CONFLICT DO NOTHING",
        (queue, cluster),
    )
    return enqueue(side.conn, queue=queue)


def test_the_reaper_leaves_a_queue_of_which_the_target_has_an_id(
    east: Side, west: Side, own_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "CARRY_AGAIN_SEC", 50)  # the machine may stall
    doubled, other = straggler(east, "p"), straggler(east, "q")
    foreign(west.conn, doubled)
    carry = reaper_of(east, west=own_db)
    carry()
    assert value(east.conn, QUEUED) == [doubled]
    assert row(west.conn, other)["queue"] == "q"
    operations.delete(west.conn, [doubled], BY)
    carry()
    assert value(east.conn, QUEUED) == [doubled]
    later(monkeypatch)
    carry()
    assert row(west.conn, doubled)["queue"] == "p"


@pytest.fixture
def silent() -> Iterator[Silent]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Silent(server)


class Silent:
    """A server that accepts connections and never answers."""

    def __init__(self, server: socket.socket) -> None:
        server.setblocking(False)
        self._server = server
        self.dsn = f"host=127.0.0.1 port={server.getsockname()[1]} dbname=x user=x"

    def calls(self) -> int:
        """How many connections have come since the last call."""
        number = 0
        with suppress(BlockingIOError):
            while True:
                self._server.accept()[0].close()
                number += 1
        return number


def test_a_silent_cluster_costs_the_reaper_one_wait_and_the_others_nothing(
    east: Side, west: Side, own_db: str, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "CARRY_AGAIN_SEC", 50)  # the machine may stall
    for n in range(8):
        straggler(east, f"a{n}", "north")
    first = straggler(east, "q")
    carry = reaper_of(east, west=own_db, north=silent.dsn)
    carry()
    assert silent.calls() == 1
    second = straggler(east, "q")
    carry()
    assert silent.calls() == 0
    assert value(west.conn, QUEUED) == [first, second]


def test_a_reaper_carries_nothing_behind_its_time(east: Side, own_db: str) -> None:
    job_id = straggler(east, "q")
    reaper_of(east, west=own_db)(-1.0)
    assert value(east.conn, QUEUED) == [job_id]


def test_a_reaper_has_one_session_in_a_cluster_for_all_its_queues(
    east: Side, own_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    connect = reaper._connect
    monkeypatch.setattr(reaper, "_connect", lambda *args: opened.append(connect(*args)) or opened[-1])
    for n in range(3):
        straggler(east, f"q{n}")
    reaper_of(east, west=own_db)()
    assert value(east.conn, QUEUED) is None
    assert [conn.closed for conn in opened] == [True]


def test_a_queue_whose_jobs_a_cluster_refuses_does_not_hold_up_the_next(
    east: Side, west: Side, own_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    west.conn.execute("ALTER TABLE dl_jobs ADD CONSTRAINT not_p CHECK (queue <> 'p')")
    refused, other = straggler(east, "p"), straggler(east, "q")
    carry = reaper_of(east, west=own_db)
    carry()
    later(monkeypatch)
    carry()
    assert value(east.conn, QUEUED) == [refused]
    assert value(west.conn, QUEUED) == [other]


def test_a_copy_that_people_have_requeued_is_no_other_job(east: Side, west: Side, own_db: str) -> None:
    """The mover dies between its two commits, so both have the job; the next one finds it in the target's queue."""
    job_id = plain(east.conn, status="failed")
    clusters._begin(east, west, "q")
    with west.conn.transaction():
        clusters._copy(east, west.conn, [job_id])
    assert operations.requeue(west.conn, [job_id], BY) == {job_id: "done"}
    move(east, west)
    assert value(east.conn, "SELECT count(*) FROM dl_jobs") == 0
    assert in_order(own_db) == [job_id]


def test_fair_queues_deadlines_and_merged_queues_go_on_as_they_were(east: Side, west: Side, own_db: str) -> None:
    operations.set_order(east.conn, "fair", BY, fair_by="partition_key")
    operations.set_order(east.conn, "merged", BY, ordered=True, merge=True)
    ids = [
        add(east.conn, NewJob("fair", "t", f"k{n}", partition_key="ab"[n == 3], deadline=deadline))[0]
        for n, deadline in enumerate([None, None, None, None, datetime.now(UTC)])
    ]
    several = [add(east.conn, NewJob("merged", "t", "k", {"n": n}))[0] for n in range(3)]
    assert move(east, west, "fair") == 5
    assert move(east, west, "merged") == 3
    assert in_order(own_db, "fair") == [ids[4], ids[0], ids[3], ids[1], ids[2]]
    worker = Worker(own_db, "west:2:boot")
    with worker.conn:
        found = lifecycle.step(worker.session, ["merged"], 1.0, 10, ())
        assert [job.job_id for job in found.jobs] == several


def test_a_role_of_a_farm_may_move_a_queue(
    east: Side, west: Side, dsn: str, own_db: str, make_role: Callable[[str], str], as_superuser: Callable[[str], str]
) -> None:
    role = conninfo_to_dict(make_role(dsn))
    sides = []
    for side, address in ((east, dsn), (west, own_db)):
        migrations.grant(address, "public", [("farm", str(role["user"]))])
        farms = make_conninfo(address, user=role["user"], password=role["password"])
        sides.append(Side(side.name, db.connect(farms, name="test", schema="public")))
    job_id = enqueue(east.conn)
    try:
        assert move(*sides) == 1
        assert clusters.stragglers(sides[0].conn) == []
        assert clusters.moved_away(sides[0].conn, ["q"]) == {"q": "west"}
    finally:
        for side in sides:
            side.conn.close()
        with psycopg.connect(as_superuser(own_db), autocommit=True) as conn:
            conn.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(str(role["user"]))))
    assert row(west.conn, job_id)["blocked_on"] is None


def test_a_move_back_needs_no_more(east: Side, west: Side, dsn: str) -> None:
    wanted = [enqueue(east.conn) for _ in range(4)]
    move(east, west)
    wanted.append(enqueue(west.conn))
    assert move(west, east) == 5
    assert operations.settings(east.conn, "q")["paused_at"] is None
    assert clusters.placed(east.conn)["q"] is None
    assert clusters.placed(west.conn)["q"] == "east"
    assert in_order(dsn) == wanted


def test_a_move_that_is_not_over_may_be_taken_back(east: Side, west: Side, dsn: str) -> None:
    wanted = [enqueue(east.conn) for _ in range(6)]
    clusters.move(east, west, "q", limit=2)
    assert move(west, east) == 2
    assert in_order(dsn) == wanted


def test_what_was_carried_and_not_admitted_is_settled_by_whoever_comes_next(
    east: Side, west: Side, dsn: str, own_db: str
) -> None:
    """The mover dies between its second commit and its last: the jobs are in the target alone, and start nowhere."""
    operations.set_order(east.conn, "q", BY, ordered=True)
    ids = [add(east.conn, NewJob("q", "t", "k", score=score))[0] for score in (2.0, 1.0)]

    def carried_halfway() -> None:
        clusters._begin(east, west, "q")
        with east.conn.transaction():
            with west.conn.transaction():
                clusters._copy(east, west.conn, ids)
            east.conn.execute(clusters._SQL["forget"], {"job_ids": ids})

    carried_halfway()
    go_on_without_the_source(west)
    assert in_order(own_db) == []
    assert clusters.stragglers(east.conn) == [("q", "west")]
    north = Side("north", west.conn)
    with pytest.raises(Contradiction, match="have not all arrived there"):
        clusters.move(west, north, "q")
    assert move(west, east) == 2  # back again
    assert clusters.stragglers(west.conn) == []
    carried_halfway()
    assert clusters.carry(east, west, "q") == 0  # as the reaper does
    go_on_without_the_source(west)
    assert in_order(own_db) == ids[::-1]
    assert clusters.stragglers(east.conn) == []


def test_a_third_cluster_leaves_alone_what_comes_from_another(
    east: Side, west: Side, lend: Callable[[], AbstractContextManager[str]]
) -> None:
    """It carries a straggler while the second has copies that the first has just deleted."""
    job_id = enqueue(east.conn)
    with lend() as dsn, db.connect(dsn, name="test", schema="public") as conn:
        north = Side("north", conn)
        late = straggler(north, "q", "west")
        clusters._begin(east, west, "q")
        with east.conn.transaction():
            with west.conn.transaction():
                clusters._copy(east, west.conn, [job_id])
            east.conn.execute(clusters._SQL["forget"], {"job_ids": [job_id]})
        assert clusters.carry(north, west, "q") == 1
        assert clusters.carry(east, west, "q") == 0
    assert value(west.conn, "SELECT array_agg(job_id ORDER BY job_id) FROM dl_jobs") == sorted([job_id, late])
    assert value(west.conn, "SELECT count(*) FROM dl_arrivals") == 0


def by_way_of(every: list[Side], to: str) -> clusters.Moved:
    """Steps to the end of a move to a cluster, from where the clusters say that the queue is."""
    while not (step := clusters.move_from(*clusters.sides(every, "q", to, "east"), "q")).is_done:
        pass
    return step


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_queue_leaves_the_cluster_where_it_lives_whatever_an_earlier_one_says(
    east: Side, west: Side, lend: Callable[[], AbstractContextManager[str]], order: int
) -> None:
    """North has once moved it to west; so had a move from there begun again, it would be over at once."""
    with lend() as dsn, db.connect(dsn, name="test", schema="public") as conn:
        every = [Side("north", conn), east, west]
        every = every[order:] + every[:order]
        job_id = enqueue(conn)
        for to in ("west", "east", "west"):
            by_way_of(every, to)
        assert value(west.conn, "SELECT array_agg(job_id) FROM dl_jobs") == [job_id]
        assert row(west.conn, job_id)["blocked_on"] is None
        late = straggler(Side("north", conn), "q", "west")
        other = enqueue(west.conn)
        with west.conn.transaction():
            clusters._copy(Side("north", conn), west.conn, [late])  # cut off; and then people delete it
        assert operations.cancel(conn, [late], BY) == {late: "done"}
        by_way_of(every, "west")
        by_way_of(every, "east")
        assert value(east.conn, "SELECT array_agg(job_id ORDER BY job_id) FROM dl_jobs") == sorted([job_id, other])


def test_a_move_goes_on_from_where_it_came_and_from_nowhere_else(
    east: Side, west: Side, lend: Callable[[], AbstractContextManager[str]]
) -> None:
    assert clusters.route("west", "east", ["north"], None) == ["east", "north"]
    assert clusters.route("west", "west", ["north", "east"], "east") == ["east", "north"]
    assert clusters.route("west", "west", ["north", "east"], None) == ["north", "east"]
    assert clusters.route("west", "west", [], None) == ["west"]
    enqueue(east.conn)
    assert clusters.move(east, west, "q").moved == 1
    with lend() as dsn, db.connect(dsn, name="test", schema="public") as conn:
        straggler(Side("north", conn), "q", "west")
        with pytest.raises(Contradiction, match="q is in the cluster east, which does not answer"):
            clusters.sides([Side("north", conn), west], "q", "west", "north")
        by_way_of([Side("north", conn), east, west], "west")
    assert operations.settings(west.conn, "q")["paused_by"] is None
    assert value(west.conn, "SELECT count(*) FROM dl_jobs WHERE blocked_on IS NULL") == 2


def go_on_without_the_source(target: Side) -> None:
    """As people do where they know that nothing of the queue runs in the cluster that it comes from."""
    operations.pause(target.conn, "q", BY)
    operations.resume(target.conn, "q", BY)


def test_a_queue_that_comes_is_not_resumed_while_a_job_of_it_may_run_where_it_comes_from(
    east: Side, west: Side, own_db: str
) -> None:
    """Its key excludes within a cluster: two jobs of one key would run at once."""
    add(east.conn, NewJob("q", "t", "k"))
    second, _ = add(east.conn, NewJob("q", "t", "k"))
    runs = Worker(make_conninfo(east.conn.info.dsn, password=east.conn.info.password), "east:1:boot")
    with runs.conn:
        runs.take()
        step = clusters.move(east, west, "q")
        assert (step.moved, step.running, step.is_done) == (1, 1, False)
        assert clusters.coming(west.conn) == [("q", "east")]
        with pytest.raises(
            operations.IsMoving, match="q is moving here from the cluster east, where jobs of it may run"
        ):
            operations.resume(west.conn, "q", BY)
        assert in_order(own_db) == []
    go_on_without_the_source(west)
    assert in_order(own_db) == [second]
    assert clusters.coming(west.conn) == []


def test_a_pause_of_people_during_a_move_outlasts_it(east: Side, west: Side) -> None:
    add(east.conn, NewJob("q", "t", "k"))
    assert clusters.move(east, west, "q").moved == 1
    west.conn.execute("UPDATE dl_queues SET paused_at = now() - interval '3 h'")
    paused = operations.pause(west.conn, "q", BY)
    assert (paused["paused_by"], value(west.conn, "SELECT now() - paused_at < '1 h' FROM dl_queues")) == (BY, True)
    move(east, west)
    assert operations.settings(west.conn, "q")["paused_by"] == BY


def test_stragglers_are_named_and_carried(east: Side, west: Side, own_db: str) -> None:
    enqueue(east.conn)
    move(east, west)
    assert clusters.stragglers(east.conn) == []
    late = plain(east.conn)
    assert clusters.stragglers(east.conn) == [("q", "west")]
    assert clusters.carry(east, west, "q") == 1
    assert late in in_order(own_db)


def test_two_movers_are_not_in_each_others_way(east: Side, west: Side, dsn: str) -> None:
    enqueue(east.conn)
    clusters._begin(east, west, "q")
    with psycopg.connect(dsn) as held:
        held.execute("SELECT pg_advisory_xact_lock(hashtext('dl_clusters'), hashtext('q'))")
        with pytest.raises(Busy, match="q is moving, and another session carries its jobs"):
            clusters.move(east, west, "q")
    assert move(east, west) == 1


def test_of_two_movers_to_two_clusters_the_first_wins(
    east: Side, west: Side, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one begins, and says that the queue has moved, while this one pauses the queue in its target."""
    job_id = enqueue(east.conn)
    operations.limit_length(west.conn, "q", 7, BY)
    before = operations.settings(west.conn, "q")
    order_to_take = clusters._order_to_take

    def meanwhile(*args: Any) -> Any:
        with psycopg.connect(dsn) as other:
            away = {"queue": "q", "cluster": "north", "by": clusters._author(to="north")}
            other.execute(clusters._SQL["send_away"].encode(), away)
        return order_to_take(*args)

    monkeypatch.setattr(clusters, "_order_to_take", meanwhile)
    with pytest.raises(Contradiction, match="paused in the cluster east by a queue move across clusters: to north"):
        clusters.move(east, west, "q")
    assert clusters.placed(east.conn)["q"] == "north"
    assert value(east.conn, QUEUED) == [job_id]
    assert clusters.placed(west.conn)["q"] is None
    assert operations.settings(west.conn, "q") == before


def test_what_cannot_move_is_named_and_nothing_changes(east: Side, west: Side) -> None:
    parent = enqueue(east.conn)
    add(east.conn, NewJob("q", "t", "child", depends_on=[parent]))
    east.conn.execute(
        "INSERT INTO dl_schedules (name, origin, cron, timezone, catch_up, overlap, jitter_sec, job, created_by)"
        " VALUES ('nightly', 'people', '0 0 * * *', 'UTC', 'none', 'skip', 0,"
        ' \'{"queue": "q", "task": "t"}\', \'ops\')'
    )
    with pytest.raises(Contradiction, match=r"jobs wait for others.*the schedule nightly makes jobs of it"):
        clusters.move(east, west, "q")
    with pytest.raises(Contradiction, match="no queue nowhere is known in the cluster east"):
        clusters.move(east, west, "nowhere")
    with pytest.raises(clusters.LivesThere, match="q lives in the cluster east: name another one"):
        clusters.move(east, east, "q")
    operations.set_order(west.conn, "p", BY, ordered=True)
    enqueue(east.conn, queue="p")
    operations.set_order(east.conn, "p", BY, ordered=False)
    with pytest.raises(Contradiction, match="p in east has ordered false and p in west has true"):
        clusters.move(east, west, "p")
    assert operations.settings(east.conn, "q")["paused_at"] is None
    assert value(west.conn, "SELECT count(*) FROM dl_queues WHERE queue = 'q'") == 0


def test_a_pause_by_people_in_the_target_outlasts_the_move(east: Side, west: Side) -> None:
    enqueue(east.conn)
    operations.pause(west.conn, "q", BY)
    move(east, west)
    assert operations.settings(west.conn, "q")["paused_by"] == BY


def test_an_idempotency_key_that_the_target_has_stays_with_its_job(east: Side, west: Side, own_db: str) -> None:
    ours, _ = add(east.conn, NewJob("q", "t", "k", idempotency_key="once"))
    theirs, _ = add(west.conn, NewJob("q", "t", "k", idempotency_key="once"))
    move(east, west)
    assert row(west.conn, theirs)["idempotency_key"] == "once"
    assert row(west.conn, ours)["idempotency_key"] is None
    assert sorted(in_order(own_db)) == sorted([ours, theirs])


def test_a_job_that_is_added_while_the_queue_leaves_is_carried_or_goes_there(east: Side, west: Side, dsn: str) -> None:
    """`moved_away` holds the move until the job is committed, and says where the queue is once it has moved."""
    with psycopg.connect(dsn) as adder:
        assert clusters.moved_away(adder, ["q", "other"]) == {}
        enqueue(east.conn)
        with pytest.raises(Busy, match="other sessions add jobs to q and do not end"):
            clusters.move(east, west, "q")
    assert move(east, west) == 1
    with psycopg.connect(dsn) as adder:
        assert clusters.moved_away(adder, ["q", "other"]) == {"q": "west"}
