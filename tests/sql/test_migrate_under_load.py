"""Migrations of the contract's tables while others insert, claim and finish: nobody waits long, whoever holds what."""

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import Any

import psycopg
import pytest
from foreign import CONTRACT, CONTRACT_TRIGGERS, Foreign
from hands import PATIENCE, plain, quietly, until, value
from test_migrations import ALL, BLOCKED, MISPLACED, catalog, ours, session

from dataloader.queue import migrations

PRODUCERS = 4
PER_SEC = 50  # jobs of all producers
WORKERS = 4
LONGEST_SEC = 10  # a step; CI's machine may be busy, and its disk slow
IDLE_SEC = 0.01  # how long a foreign worker that found nothing waits
# Of twenty rows ten have succeeded, eight are of the future, one has failed, one is canceled; a few are running.
ROWS = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, args, status, available_at, created_at, lease_expires_at)
SELECT gen_random_uuid(), 'q', 't', 'old-' || i, '{"path": "a/file/somewhere.csv", "table": "customers"}', status,
       now() + i * interval '1 s' * CASE WHEN status = 'queued' THEN 1 ELSE -1 END + interval '1 h',
       now() - i * interval '1 s', CASE WHEN status = 'running' THEN now() + interval '1 h' END
  FROM generate_series(1, %s) i,
       LATERAL (SELECT CASE WHEN i %% 20 < 10 THEN 'succeeded' WHEN i %% 20 < 18 THEN 'queued'
                            WHEN i %% 20 = 18 THEN 'failed' WHEN i < 500 THEN 'running' ELSE 'canceled' END
               ::dl_status AS status) s
"""


class Traffic:
    """Producers at a steady rate and foreign workers who keep up; each writes down how long its steps took."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.pause = PRODUCERS / PER_SEC
        self.over = Event()  # for the producers
        self.done = Event()  # for the workers, who first finish what there is
        self.waits: dict[str, list[float]] = {"insert": [], "claim": [], "finish": []}
        self.steps: list[Future[None]] = []

    def timed(self, kind: str, step: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        answer = step()
        self.waits[kind].append(time.monotonic() - begun)
        return answer

    def produce(self, number: int) -> None:
        """Insert at a fixed rate; what could not be done in time is made up for."""
        begun = time.monotonic()
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            for count in itertools.count(1):
                if self.over.wait(max(0.0, begun + count * self.pause - time.monotonic())):
                    return
                self.timed("insert", lambda key=f"new-{number}-{count}": plain(conn, lock_key=key))

    def work(self) -> None:
        foreign = Foreign(self.dsn)
        with foreign.conn:
            while not self.done.is_set():
                if job := self.timed("claim", foreign.claim):
                    self.timed("finish", lambda job=job: foreign.finish(*job))
                else:
                    self.done.wait(IDLE_SEC)

    def goes_on(self, more: int) -> None:
        """Wait until that many more jobs were finished."""
        wanted = self.count("finish") + more
        until(lambda: self.count("finish") >= wanted or self.has_failed(), f"{more} more jobs to be finished")
        assert not self.has_failed()

    def count(self, kind: str) -> int:
        return len(self.waits[kind])

    def has_failed(self) -> bool:
        return any(step.done() for step in self.steps)


@contextmanager
def traffic(dsn: str) -> Iterator[Traffic]:
    """Traffic for the block; at its end the backlog is worked off, and whoever failed is heard."""
    made = Traffic(dsn)
    with ThreadPoolExecutor(PRODUCERS + WORKERS) as pool:
        producers = [pool.submit(made.produce, number) for number in range(PRODUCERS)]
        workers = [pool.submit(made.work) for _ in range(WORKERS)]
        made.steps = producers + workers
        try:
            yield made
            made.over.set()
            wait(producers, PATIENCE)
            until(lambda: made.count("finish") >= made.count("insert"), "the backlog to be worked off")
        finally:
            made.over.set()
            made.done.set()
            for step in made.steps:
                step.result(PATIENCE)


@pytest.fixture
def contract(empty_db: str) -> str:
    """A database as it stands in production, small."""
    with session(empty_db) as conn:
        conn.execute(CONTRACT)
        conn.execute(CONTRACT_TRIGGERS)
        with quietly(conn):
            conn.execute(ROWS, (2_000,))
            conn.execute("INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'queued' FROM dl_jobs")
        conn.execute("VACUUM ANALYZE")
    return empty_db


@pytest.mark.parametrize(
    "holding",
    [
        "SELECT count(*) FROM dl_jobs",
        "SELECT FROM dl_jobs WHERE lock_key = 'old-10' FOR UPDATE",
        "UPDATE dl_jobs SET priority = 1 WHERE lock_key = 'old-10'",
    ],
    ids=["a table that was read", "a row's lock", "a row that was changed"],
)
def test_c8_whoever_holds_something_makes_the_migration_wait_and_not_the_queue(
    contract: str, module_db: str, monkeypatch: pytest.MonkeyPatch, holding: str
) -> None:
    """It asks for the table briefly, again and again, and the others get in between."""
    monkeypatch.setattr(migrations, "PAUSE_SEC", 0.3)
    with session(contract) as holder, session(contract) as conn, ThreadPoolExecutor(1) as pool:
        with traffic(contract) as made:
            with holder.transaction():
                holder.execute(holding)
                migration = pool.submit(migrations.migrate, contract, "public")
                for _ in range(3):
                    until(lambda: value(conn, BLOCKED), "the migration to wait")
                    made.goes_on(10)
                    until(lambda: not value(conn, BLOCKED), "the migration to step back")
                assert not migration.done()
            assert migration.result(PATIENCE) == ALL
            made.goes_on(10)
        assert value(conn, MISPLACED) == 0
        finished = value(conn, "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded' AND lock_key LIKE 'new-%%'")
        assert finished == made.count("finish")
    longest = {kind: max(waits) for kind, waits in made.waits.items()}
    assert max(longest.values()) < LONGEST_SEC, longest
    assert ours(contract) == catalog(module_db)
