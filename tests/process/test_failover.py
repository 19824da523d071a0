"""The primary is lost under load, and its standby takes over: what is kept, what is lost, for how long work rests."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from farming import Farm, LongJob, Program, farm_on, until
from judge import illegal, side_by_side
from servers import FAST, Database, confirms, following, root
from test_database_faults import reconnect

from dataloader import config
from dataloader.api import create_app
from dataloader.client import Client, ClientError
from dataloader.queue import db, enqueue

LEASE = 3  # seconds
KEYS = 23
BOUND = 30.0  # seconds from the order to promote to the first claim there; less than one is usual
NOTES = "notes"


@pytest.fixture
def primary(database: Database) -> Database:
    return database


def either(*sockets: Path) -> str:
    """The DSN that names these servers, and means the one that can be written."""
    return f"host={','.join(map(str, sockets))} user=dataloader dbname=postgres target_session_attrs=read-write"


def leads_to(name: Path, server: Database) -> None:
    """Move the address of a name: a link to the folder of the socket of one server, then of another."""
    new = name.with_suffix(".new")
    new.symlink_to(server.socket)
    new.rename(name)


class Producer(threading.Thread):
    """Adds jobs all the time; sends a job again, with its idempotency key, until it is acknowledged."""

    def __init__(self, name: str, farm: Farm, port: int | None = None) -> None:
        super().__init__(name=name)
        self.acknowledged: dict[str, UUID] = {}
        self.sent_again = 0
        self._dsn, self._port = farm.dsn, port
        self._args = {"file": str(farm.folder / NOTES), "sec": 0.01}
        self._over = threading.Event()

    def run(self) -> None:
        """Go on over any error of a session; the last job is acknowledged too."""
        jobs = (f"{self.name}-{number}" for number in itertools.count())
        job = next(jobs)
        while not self._over.is_set():
            with suppress(psycopg.Error, ClientError), self._connected() as add:
                while not self._over.wait(0.01):
                    self.sent_again += 1
                    self.acknowledged[job] = add(job)
                    self.sent_again -= 1
                    job = next(jobs)
            self._over.wait(0.02)

    @contextmanager
    def _connected(self) -> Iterator[Callable[[str], UUID]]:
        """A function that adds a job by the API at the port, or by a session that takes silence for a loss."""
        given: dict[str, Any] = {"lease_ttl_sec": LEASE, "args": self._args}
        if self._port:
            trigger = partial(Client(f"http://127.0.0.1:{self._port}", timeout=5).trigger, "notes_its_time", queue="q")
            yield lambda job: trigger(lock_key=key_of(job), idempotency_key=job, **given).job_id
        else:
            with db.connect(self._dsn, name="producer", schema="public", connect_timeout=2, answer_within=5) as conn:
                new = partial(enqueue.NewJob, "q", "notes_its_time", **given)
                yield lambda job: enqueue.enqueue(conn, new(lock_key=key_of(job), idempotency_key=job))[0]

    def stop(self) -> None:
        self._over.set()
        self.join()


def key_of(job: str) -> str:
    """One of a few lock keys, so that jobs wait for each other."""
    return f"key-{sum(job.encode()) % KEYS}"


@contextmanager
def producing(farm: Farm, port: int | None = None) -> Iterator[list[Producer]]:
    """Two producers that are at work in the block; with the port of an API one more, who uses that."""
    producers = [Producer("p0", farm), Producer("p1", farm)]
    producers += [Producer("p-api", farm, port)] if port else []
    for producer in producers:
        producer.start()
    try:
        yield producers
    finally:
        for producer in producers:
            producer.stop()


def have_added(producers: Sequence[Producer], more: int) -> None:
    """Wait until each has so many more acknowledged."""
    wanted = {producer: len(producer.acknowledged) + more for producer in producers}
    until(lambda: all(len(each.acknowledged) >= wanted[each] for each in producers), f"{more} jobs more of each")


@contextmanager
def pair(primary: Database, folder: Path) -> Iterator[tuple[Database, Farm]]:
    """A standby of `primary`, and a farm whose DSN names both."""
    with (
        root() as place,
        following(primary, place) as standby,
        farm_on(either(primary.socket, standby.socket), folder) as farm,
    ):
        yield standby, farm


def fail_over(farm: Farm, heir: Database, lost_at: float) -> None:
    """Promote the standby of a primary lost then; print and bound how long it took until jobs were claimed again."""
    promoting_at = time.time()  # the clock of this machine, which both servers have
    heir.admin("SELECT pg_promote()")
    promoted_at = time.time()
    reconnect(farm)
    first = until(lambda: farm.rows(FIRST_CLAIM, promoting_at)[0][0], "the first claim on the new primary")
    seconds = [at - lost_at for at in (promoting_at, promoted_at, first)]
    print("since the loss: {:.2f} s promote, {:.2f} s promoted, {:.2f} s the first claim".format(*seconds))
    assert first - promoting_at < BOUND


FIRST_CLAIM = """
SELECT min(extract(epoch FROM ts))::float FROM dl_job_events WHERE kind = 'picked' AND extract(epoch FROM ts) > %s
"""


def nothing_is_lost(farm: Farm, producers: Sequence[Producer]) -> None:
    """Each acknowledged job succeeds once, by a legal journal; there is no job that nobody knows; keys exclude."""
    wanted = {job: job_id for producer in producers for job, job_id in producer.acknowledged.items()}
    left = "SELECT FROM dl_jobs WHERE starts_with(idempotency_key, 'p') AND status IN ('queued', 'running') LIMIT 1"
    until(lambda: not farm.rows(left), "all jobs to end", patience=120)
    found = farm.rows(
        "SELECT idempotency_key, job_id, j.status::text, array_agg(e.kind ORDER BY e.event_id) FROM dl_jobs j"
        " JOIN dl_job_events e USING (job_id) WHERE starts_with(idempotency_key, 'p') GROUP BY job_id"
    )
    ids = {job: job_id for job, job_id, _, _ in found}
    missing = wanted.keys() - ids.keys()
    assert not missing, f"{len(missing)} of {len(wanted)} acknowledged jobs are gone"
    assert {job: ids[job] for job in wanted} == wanted, "a key leads to the job that was acknowledged"
    for job, _, status, kinds in found:
        assert (status, illegal(kinds, status), kinds.count("done")) == ("succeeded", None, 1), (job, kinds)
    lines = [line.split() for line in (farm.folder / NOTES).read_text().splitlines()]  # by runs: an end is written late
    assert len(lines) > KEYS
    assert side_by_side((key, float(begun), float(ended)) for key, begun, ended in lines) == []
    again = sum(kinds.count("picked") > 1 for *_, kinds in found)
    sent_again = sum(producer.sent_again for producer in producers)
    print(f"{len(wanted)} jobs acknowledged, {len(found)} done, {again} of them run again, {sent_again} sent again")


def test_h3_a_primary_killed_under_load_loses_nothing_behind_a_synchronous_standby(
    primary: Database, tmp_path: Path, free_port: int
) -> None:
    """Its processes are gone at once, in the middle of commits; a run that is longer goes on. The API goes on too."""
    with pair(primary, tmp_path) as (standby, farm), not_ready(standby) as is_ready:
        confirms("standby", primary)
        farm.ready(workers=3, pg_connect_timeout=2)
        farm.start("reaper", pg_connect_timeout=2)
        job = LongJob(farm, "long")
        farm.start("api", app_port=free_port, pg_connect_timeout=2)
        with producing(farm, free_port) as producers:
            have_added(producers, 100)
            lost_at = time.time()
            primary.kill()
            fail_over(farm, standby, lost_at)
            until(is_ready, "an API at the new primary to be content by itself")
            have_added(producers, 100)
        job.ends_well()
        nothing_is_lost(farm, producers)
        farm.works()


@contextmanager
def not_ready(standby: Database) -> Iterator[Callable[[], bool]]:
    """An API at a standby, whose /ready has the server's own reason; whether it is ready now."""
    app = create_app(config.load(_env_file=None, dl_db_dsn=standby.dsn))
    client = app.test_client()
    answer = client.get("/ready")
    assert (answer.status_code, answer.get_json()["errors"][0]["pointer"]) == (503, "/checks/database")
    assert "read-only" in answer.get_json()["detail"] or "hot standby" in answer.get_json()["detail"]
    yield lambda: client.get("/ready").status_code == 200
    app.extensions["sessions"].close()


@pytest.mark.long
def test_h3_a_silent_primary_is_passed_by_and_acknowledges_nothing_when_it_is_back(
    primary: Database, tmp_path: Path
) -> None:
    """It accepts connections and answers nothing: each attempt costs PG_CONNECT_TIMEOUT before the next host's turn."""
    with pair(primary, tmp_path) as (standby, farm):
        confirms("standby", primary)
        farm.ready(workers=3, pg_connect_timeout=2)
        farm.start("reaper", pg_connect_timeout=2)
        with producing(farm) as producers:
            have_added(producers, 50)
            lost_at = time.time()
            primary.suspend()
            try:
                fail_over(farm, standby, lost_at)
                have_added(producers, 20)
            except BaseException:
                primary.kill()
                raise
        nothing_is_lost(farm, producers)
        primary.resume()
        acknowledges_nothing(primary)


def acknowledges_nothing(primary: Database) -> None:
    """A job that is added there waits for the standby that follows no more."""
    with db.connect(primary.dsn, name="late", schema="public", answer_within=5) as conn, pytest.raises(db.Silence):
        enqueue.enqueue(conn, enqueue.NewJob("q", "noop", "late"))
    assert ("late",) in primary.admin(WAITING)


# One waits for the standby; its commit has notified, and PostgreSQL lets others that notify commit after it.
WAITING = """
SELECT application_name FROM pg_stat_activity WHERE wait_event = 'SyncRep' OR wait_event_type = 'Lock'
"""


@pytest.mark.long
def test_h3_an_asynchronous_failover_loses_what_the_standby_did_not_have_and_no_more(
    primary: Database, tmp_path: Path
) -> None:
    """Told in numbers: jobs that are gone, ends that are gone, runs whose claim is gone; later jobs are all kept."""
    with pair(primary, tmp_path) as (standby, farm):
        kept = [farm.enqueue("noop", lease_ttl_sec=LEASE) for _ in range(20)]
        claimed = LongJob(farm, "claimed", waits=False)
        until(lambda: standby.admin("SELECT count(*) FROM dl_jobs") == [(21,)], "the standby to have the jobs")
        (sender,) = primary.processes("walsender")
        sender.suspend()  # the standby gets no more data
        program = farm.ready(workers=3)
        farm.start("reaper")
        claimed.has_begun()
        gone = [farm.enqueue("noop") for _ in range(30)]
        unknown = LongJob(farm, "gone")
        farm.succeeds(*kept, *gone)
        lost_at = time.time()
        primary.kill()
        fail_over(farm, standby, lost_at)
        later = [farm.enqueue("noop", lease_ttl_sec=LEASE) for _ in range(20)]

        known = {job for (job,) in farm.rows("SELECT job_id FROM dl_jobs")}
        lost = {*gone, unknown.job_id} - known
        print(f"{len(lost)} of {len(kept) + len(gone) + 2} acknowledged jobs are gone; {len(kept)} run once more")
        assert len(lost) == len(gone) + 1
        assert {*kept, claimed.job_id, *later} <= known

        hear = {str(claimed.job_id), str(unknown.job_id)}
        until(lambda: {each["job_id"] for each in program.events("worker.ownership.lost")} == hear, "both runs to hear")
        claimed.has_begun(times=2)
        claimed.go.touch()
        farm.succeeds(*kept, claimed.job_id, *later)
        assert farm.rows("SELECT FROM dl_job_events WHERE job_id = ANY(%s)", list(lost)) == []
        assert len(farm.rows(PICKED, claimed.job_id)) == 1, "the run that was not known there has written nothing"


PICKED = "SELECT FROM dl_job_events WHERE job_id = %s AND kind = 'picked'"


@pytest.mark.long
def test_h3_a_planned_change_loses_nothing_and_the_name_in_the_dsn_may_move(primary: Database, tmp_path: Path) -> None:
    """As with a managed PostgreSQL: one name, refused at first, then a server that cannot write, then a primary."""
    with root() as folder, following(primary, folder) as standby:
        name = tmp_path / "name"
        leads_to(name, primary)
        with farm_on(f"host={name} user=dataloader dbname=postgres", tmp_path) as farm:
            program = farm.ready(workers=3, debug=1)
            farm.reaper()
            job = LongJob(farm, "long")
            with producing(farm) as producers:
                have_added(producers, 50)
                lost_at = time.time()
                primary.end(FAST)
                until(lambda: "No such file" in refusals(program), "a refused connection")
                leads_to(name, standby)
                until(lambda: "session is read-only" in refusals(program), "a session that cannot write")
                fail_over(farm, standby, lost_at)
                have_added(producers, 50)
            job.ends_well()
            nothing_is_lost(farm, producers)


def refusals(program: Program) -> str:
    names = ("worker.session.lost", "keeper.session.lost")
    return " ".join(event["error"] for name in names for event in program.events(name))
