"""A row on which a claim fails: its job is set aside, whatever the kind of its queue, and the others run."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hands import BACKOFF_SEC, Worker, ids, plain, row, step, value

from dataloader.queue import lifecycle, operations
from dataloader.queue.set_aside import Aside, is_of_a_row, set_aside

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ordered": {"ordered": True},
    "merging": {"ordered": True, "merge": True},
    "fair": {"fair_by": "producer"},
}
MOST = 60
RAISES = """
CREATE FUNCTION raises() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this row, nor %', NEW.args; END $$;
CREATE TRIGGER raises BEFORE UPDATE ON dl_jobs FOR EACH ROW WHEN ({}) EXECUTE FUNCTION raises();
"""


def aside(worker: Worker) -> Aside | None:
    """Do as the worker does with a claim that fails on a row."""
    with pytest.raises(psycopg.Error) as failed:
        step(worker, MOST)
    assert is_of_a_row(failed.value)
    return set_aside(
        worker.conn,
        ["q"],
        lambda: lifecycle.step(worker.session, ["q"], BACKOFF_SEC, MOST, tries_short=False),
        failed.value,
    )


def test_a_row_of_the_long_claim_alone_is_set_aside(own_db: str, worker: Worker, poison: Callable[..., UUID]) -> None:
    """The trials repeat the long claim: a short one would start the row in front, and no failure would repeat."""
    operations.set_limit(worker.conn, "l", "test", most=5)
    good, odd = plain(worker.conn), poison(limits=["l"])
    worker.session.makes_way = True
    assert aside(worker).job_id == odd
    assert ids(step(worker, MOST)) == [good]


@pytest.fixture
def poison(own_db: str) -> Callable[..., UUID]:
    """Adds a job whose starts cannot be counted on, which a check of the table refuses otherwise."""

    def add(**more: Any) -> UUID:
        with psycopg.connect(own_db, autocommit=True) as conn:
            conn.execute("DROP TRIGGER IF EXISTS dl_jobs_check ON dl_jobs")
            return plain(conn, claims=2**31 - 1, **more)

    return add


@pytest.fixture
def worker(own_db: str) -> Iterator[Worker]:
    worker = Worker(own_db, "host:1:boot")
    with worker.conn:
        yield worker


@pytest.mark.parametrize(("kind", "place"), [*((kind, 20) for kind in KINDS), ("plain", 0), ("plain", 39)])
def test_the_job_is_set_aside_alone(worker: Worker, poison: Callable[..., UUID], kind: str, place: int) -> None:
    if KINDS[kind]:
        operations.set_order(worker.conn, "q", "test", **KINDS[kind])
    jobs = [plain(worker.conn) if n != place else poison() for n in range(40)]
    found = aside(worker)
    assert (found.job_id, found.status) == (jobs[place], "queued")
    bad = row(worker.conn, found.job_id)
    assert (bad["attempt"], bad["blocked_on"]) == (1, "time")
    assert "no worker can claim the job" in bad["error"]
    ran = set()
    while started := ids(step(worker, MOST)):
        ran |= {*started}
        worker.conn.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE status = 'running'")
    assert ran == set(jobs) - {found.job_id}
    assert value(worker.conn, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s", worker.pid) == 0


def test_each_of_several_is_found_and_fails_in_the_end(worker: Worker, poison: Callable[..., UUID]) -> None:
    bad = {poison(max_attempts=1) for _ in range(3)}
    good = plain(worker.conn)
    found = [aside(worker) for _ in bad]
    assert {(each.job_id, each.status) for each in found if each} == {(job_id, "failed") for job_id in bad}
    assert ids(step(worker, MOST)) == [good]
    kinds = "SELECT array_agg(kind) FROM dl_job_events WHERE job_id = %s"
    assert {tuple(value(worker.conn, kinds, job_id)) for job_id in bad} == {("queued", "failed")}


@pytest.mark.parametrize("condition", ["NEW.task = 'bad' AND NEW.status = 'running'", "NEW.task = 'bad'"])
def test_a_job_that_a_trigger_keeps_from_any_change_is_set_aside(worker: Worker, own_db: str, condition: str) -> None:
    with psycopg.connect(own_db, autocommit=True) as conn:
        conn.execute(RAISES.format(condition))
    bad, good = plain(worker.conn, task="bad", max_attempts=1), plain(worker.conn)
    found = aside(worker)
    assert (found.job_id, found.status, row(worker.conn, bad)["status"]) == (bad, "failed", "failed")
    assert ids(step(worker, MOST)) == [good]


def test_one_session_at_a_time_looks_for_the_job(worker: Worker, own_db: str, poison: Callable[..., UUID]) -> None:
    poison()
    other = Worker(own_db, "host:2:boot")
    found: list[Aside | None] = []

    def look() -> None:
        found.append(set_aside(other.conn, ["q"], lambda: step(other, MOST), failed.value))
        step(worker, MOST)

    with other.conn:
        with pytest.raises(psycopg.Error) as failed:
            step(worker, MOST)
        assert set_aside(worker.conn, ["q"], look, failed.value) is not None
        assert set(found) == {None}
        assert set_aside(worker.conn, ["q"], lambda: step(worker, MOST), failed.value) is None, "it is aside already"
