"""The server's lock table: what workers claim ahead leaves room in it for everybody else, and they live with little."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from farming import Farm, farm_on, until
from servers import with_queue

from dataloader.queue import enqueue
from dataloader.queue.enqueue import NewJob

SMALL = {"max_locks_per_transaction": "10", "max_connections": "40", "max_prepared_transactions": "10"}
ROOM = 500  # locks, by these settings
HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


@pytest.fixture(scope="module")
def small_server() -> Iterator[str]:
    """A server whose lock table is small, with the project's schema."""
    with with_queue(**SMALL) as database:
        yield database.dsn


@pytest.fixture
def small_farm(small_server: str, tmp_path: Path) -> Iterator[Farm]:
    with psycopg.connect(small_server, autocommit=True) as conn:
        conn.execute("DROP TABLE IF EXISTS runs; TRUNCATE dl_jobs, dl_job_events")
    with farm_on(small_server, tmp_path) as farm:
        yield farm


def many(farm: Farm, number: int) -> None:
    enqueue.enqueue_many(farm.conn, [NewJob("q", "noop", f"k{n}") for n in range(number)])


def test_a_farm_that_wants_more_keys_than_there_is_room_for_takes_its_share(small_farm: Farm) -> None:
    """Nine workers at a thousand: they hold a quarter at most, and everybody may connect all the while."""
    program = small_farm.ready(workers=9, prefetch=1000)
    # Of each worker the log says first that it has started.
    lowered = until(lambda: len(found := program.events("worker.prefetch.lowered")) == 9 and found, "all nine")
    assert [(line["prefetch"], line["at_most"]) for line in lowered] == [(1000, ROOM // 4 // 9)] * 9
    many(small_farm, 3_000)
    most = 0
    while small_farm.rows("SELECT FROM dl_jobs WHERE status IN ('queued', 'running') LIMIT 1"):
        most = max(most, *small_farm.rows(HELD)[0])
        psycopg.connect(small_farm.dsn).close()
    assert 9 < most <= ROOM // 4
    assert small_farm.rows("SELECT DISTINCT status::text, attempt FROM dl_jobs") == [("succeeded", 1)]
    assert not program.events("farm.database.lost")


def test_a_worker_that_meets_a_full_table_claims_fewer_and_goes_on(small_farm: Farm) -> None:
    """Another machine has taken the room."""
    program = small_farm.ready(workers=1, prefetch=120)
    with psycopg.connect(small_farm.dsn, autocommit=True) as other:
        fill(other, but=60)  # room to add jobs, and less than a claim of 120 takes
        until(
            lambda: offered(small_farm) or program.events("worker.prefetch.lowered"), "a claim to meet the full table"
        )
        open_jobs = "SELECT FROM dl_jobs WHERE status IN ('queued', 'running') LIMIT 1"
        until(lambda: not small_farm.rows(open_jobs), "the jobs to end")
    assert small_farm.rows("SELECT DISTINCT status::text, attempt FROM dl_jobs") == [("succeeded", 1)]


def offered(farm: Farm) -> None:
    """Add jobs, unless the table is too full for that just now."""
    with suppress(psycopg.errors.OutOfMemory):
        many(farm, 300)


def fill(conn: psycopg.Connection[tuple[int, ...]], but: int) -> None:
    """Take advisory locks, of another key space than jobs have, until the table is full, and let go of so many."""
    taken = 0
    while True:
        try:
            conn.execute("SELECT pg_advisory_lock(1, %s)", (taken,))
        except psycopg.errors.OutOfMemory:
            break
        taken += 1
    for number in range(taken - but, taken):
        conn.execute("SELECT pg_advisory_unlock(1, %s)", (number,))
