"""The queue's SQL, tested by sessions and threads on real PostgreSQL."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from foreign import CONTRACT, CONTRACT_TRIGGERS, Foreign
from hands import Worker, many, plain
from patience import PATIENCE

from dataloader.queue import db, lifecycle, migrations

# The judge of journals is the process tests' own.
sys.path.append(str(Path(__file__).parent.parent / "process"))

SHORT_SEC = 0.1  # no time limit of the product is so short


@pytest.fixture
def contract(empty_db: str) -> str:
    """A database as it stands in production, with a row in every state and some of the future."""
    with db.connect(empty_db, name="test", schema="public") as conn:
        conn.execute(CONTRACT)
        conn.execute(CONTRACT_TRIGGERS)
        for status in ("queued", "running", "succeeded", "failed", "canceled", "lost"):
            plain(conn, status=status, task=status, in_sec=-5)
            plain(conn, status=status, task=status + " later", in_sec=3_600)
        many(conn, 2_500, "k", queue="'far'", available_at="now() + interval '1 day'")
        conn.execute(
            "UPDATE dl_jobs SET lease_expires_at = now() + interval '1 h', attempt = 1 WHERE status = 'running'"
        )
        conn.execute("INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'queued' FROM dl_jobs")
    return empty_db


class Stopped(Exception):
    """Ends a migration early."""


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Adopt a database's tables up to the first trigger, and stop."""

    def stop(*args: object) -> None:
        raise Stopped

    def until_the_fill(dsn: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(migrations, "_in_batches", stop)
            with pytest.raises(Stopped):
                migrations.migrate(dsn, "public")

    return until_the_fill


# Their tests hold for the short claim, after which dl_step makes way, and for dl_step alone.
OF_CLAIMS = {
    f"test_{name}" for name in ("claim", "interleavings", "lock", "locked_rows", "order", "park", "set_aside", "step")
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a claim twice."""
    if metafunc.module.__name__ in OF_CLAIMS:
        metafunc.parametrize("claims", ["short", "full"], indirect=True)


@pytest.fixture(autouse=True)
def claims(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short claims, or none."""
    if getattr(request, "param", "short") == "full":
        monkeypatch.setattr(lifecycle, "_may_be_short", lambda *_: False)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No statement is canceled because the machine stands still for a second; limits that a test sets stay short."""
    give_up_after = db.give_up_after

    def later(conn: db.Connection, seconds: float, lock_sec: float | None = None) -> None:
        give_up_after(conn, seconds if seconds < SHORT_SEC else PATIENCE, lock_sec)

    monkeypatch.setattr(db, "give_up_after", later)


@pytest.fixture
def workers(dsn: str) -> Iterator[Callable[[], Worker]]:
    """Open sessions of workers, each with a name of its own."""
    opened: list[Worker] = []
    names = (f"host:{number}:boot" for number in itertools.count(1))

    def open_one() -> Worker:
        opened.append(Worker(dsn, next(names)))
        return opened[-1]

    yield open_one
    for worker in opened:
        worker.conn.close()


@pytest.fixture
def worker(workers: Callable[[], Worker]) -> Worker:
    return workers()


@pytest.fixture
def one(workers: Callable[[], Worker]) -> Worker:
    return workers()


@pytest.fixture
def two(workers: Callable[[], Worker]) -> Worker:
    return workers()


@pytest.fixture
def job() -> UUID:
    """The id of a job that only the target knows."""
    return uuid4()


@pytest.fixture
def foreign(dsn: str) -> Iterator[Foreign]:
    foreign = Foreign(dsn)
    yield foreign
    foreign.conn.close()
