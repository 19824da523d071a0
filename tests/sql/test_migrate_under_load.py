"""Migrations of the contract's tables while others insert, claim and finish: nobody waits long, whoever holds what."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import psycopg
import pytest
from foreign import Foreign
from hands import PATIENCE, plain, until, value
from test_migrations import ALL, BLOCKED, MISPLACED, catalog, ours, session

from dataloader.queue import migrations

WORKERS = 4
LONGEST_SEC = 10  # a step; CI's machine may be busy, and its disk slow


class Traffic:
    """A producer at a steady rate and foreign workers who keep up; each writes down how long its steps took."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.over = Event()  # for the producer
        self.all_added = Event()  # for the workers, who first finish what there is
        self.waits: dict[str, list[float]] = {"insert": [], "claim": [], "finish": []}

    def timed(self, kind: str, step: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        answer = step()
        self.waits[kind].append(time.monotonic() - begun)
        return answer

    def count(self, kind: str) -> int:
        return len(self.waits[kind])

    def produce(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            while not self.over.wait(0.02):
                self.timed("insert", lambda: plain(conn, lock_key=f"new-{self.count('insert')}"))
        self.all_added.set()

    def work(self) -> None:
        foreign = Foreign(self.dsn)
        with foreign.conn:
            while True:
                is_last = self.all_added.is_set()
                if job := self.timed("claim", foreign.claim):
                    self.timed("finish", lambda job=job: foreign.finish(*job))
                elif is_last:
                    return
                else:
                    time.sleep(0.01)


@pytest.mark.parametrize(
    "holding",
    [
        "SELECT count(*) FROM dl_jobs",
        "SELECT FROM dl_jobs WHERE task = 'queued later' FOR UPDATE",
        "UPDATE dl_jobs SET priority = 1 WHERE task = 'queued later'",
    ],
    ids=["a table that was read", "a row's lock", "a row that was changed"],
)
def test_c8_whoever_holds_something_makes_the_migration_wait_and_not_the_queue(
    contract: str, module_db: str, monkeypatch: pytest.MonkeyPatch, holding: str
) -> None:
    """It asks for the table briefly, again and again, and the others get in between."""
    monkeypatch.setattr(migrations, "PAUSE_SEC", 0.3)
    traffic = Traffic(contract)
    with session(contract) as holder, session(contract) as conn, ThreadPoolExecutor(WORKERS + 2) as pool:
        others = [pool.submit(traffic.produce), *(pool.submit(traffic.work) for _ in range(WORKERS))]

        def goes_on() -> None:
            wanted = traffic.count("finish") + 10
            until(lambda: traffic.count("finish") >= wanted or any(each.done() for each in others), "ten more jobs")

        try:
            with holder.transaction():
                holder.execute(holding)
                migration = pool.submit(migrations.migrate, contract, "public")
                for _ in range(3):
                    until(lambda: value(conn, BLOCKED), "the migration to wait")
                    goes_on()
                    until(lambda: not value(conn, BLOCKED), "the migration to step back")
                assert not migration.done()
            assert migration.result(PATIENCE) == ALL
            goes_on()
        finally:
            traffic.over.set()
        for each in others:
            each.result(PATIENCE)
        assert value(conn, MISPLACED) == 0
        finished = value(conn, "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded' AND lock_key LIKE 'new-%%'")
        assert finished == traffic.count("insert")
    longest = {kind: max(waits) for kind, waits in traffic.waits.items()}
    assert max(longest.values()) < LONGEST_SEC, longest
    assert ours(contract) == catalog(module_db)
