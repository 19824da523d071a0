"""A queue that was there before us: adopted with its rows, then shared with services that run the plain protocol."""

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from farming import Farm, farm_on, until
from foreign import CONTRACT, CONTRACT_TRIGGERS, REAP, Foreign
from judge import OVERLAPS, illegal

from dataloader.queue import migrations

# Of every ten rows six have ended, one runs for an hour yet, one ran out of its lease, one is due, and one is for
# later: for tomorrow, or for the seconds of the test.
BEFORE = """
INSERT INTO dl_jobs (job_id, queue, task, args, idempotency_key, lock_key, partition_key, priority, status, attempt,
                     max_attempts, cancel_requested, progress, error, producer, consumer_group, available_at,
                     lease_expires_at, heartbeat_at, created_at, started_at, finished_at)
SELECT gen_random_uuid(), CASE WHEN even THEN 'ours' ELSE 'shared' END, 'recorded', '{"sec": 0.01}',
       'before-' || i, 'before-' || i, 'p' || i, i % 3,
       (ARRAY['succeeded', 'succeeded', 'succeeded', 'failed', 'canceled', 'lost',
              'running', 'running', 'queued', 'queued'])[kind + 1]::dl_status,
       (kind < 8)::int, 50, kind = 4, '{"processed": 1}', CASE WHEN kind IN (3, 5) THEN 'boom' END, 'old', 'group',
       now() + make_interval(secs => CASE WHEN kind < 9 THEN -60 WHEN even THEN 86400 ELSE i / 200.0 END),
       now() + CASE kind WHEN 6 THEN interval '1 h' WHEN 7 THEN interval '-1 s' END,
       now() - CASE WHEN kind IN (6, 7) THEN interval '5 s' END, now() - interval '1 day',
       now() - CASE WHEN kind < 8 THEN interval '1 h' END, now() - CASE WHEN kind < 6 THEN interval '1 min' END
  FROM generate_series(1, 1000) i, LATERAL (SELECT i % 10 AS kind, i / 10 % 2 = 0 AS even) of
"""
OTHERWISE = "SELECT count(*) FROM dl_jobs WHERE NOT job_id = ANY (%s::uuid[]) AND status <> 'succeeded'"
ROWS = "SELECT to_jsonb(j) FROM dl_jobs j WHERE job_id = ANY (%s::uuid[]) ORDER BY job_id"
UNTOUCHED = """
SELECT array_agg(job_id) FROM dl_jobs
 WHERE status NOT IN ('queued', 'running') OR lease_expires_at > now() OR available_at > now() + interval '1 h'
"""
# From the time a job was due, or was put back for, to its last start.
LATE = """
SELECT extract(epoch FROM max(e.ts) - j.available_at)::float8 AS late, j.job_id
  FROM dl_jobs j JOIN dl_job_events e USING (job_id)
 WHERE e.kind = 'picked' AND j.producer = 'plain' AND j.lock_key LIKE 'own-%%' GROUP BY j.job_id ORDER BY late DESC
"""
# From the plain finish of a key's job to the start of ours that waited for it.
PASSED = """
SELECT extract(epoch FROM o.started_at - t.finished_at)::float8 AS late, o.job_id
  FROM unnest(%s::uuid[], %s::uuid[]) baton (theirs, ours)
  JOIN dl_jobs t ON t.job_id = baton.theirs JOIN dl_jobs o ON o.job_id = baton.ours ORDER BY late DESC
"""


class Others:
    """The other services, a thread each, until they are told to stop."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.over = threading.Event()
        self.inserted: list[UUID] = []
        self.batons: list[tuple[UUID, UUID]] = []  # a job of theirs, and the one of ours that waits for its key

    def run(self, seconds: float) -> None:
        """Let them work for so long; raises what any of them met."""
        steps = (self.produce, self.reap, self.pass_keys, self.work, self.work)
        with ThreadPoolExecutor(len(steps)) as threads:
            services = [threads.submit(self.repeat, step) for step in steps]
            wait(services, seconds, FIRST_COMPLETED)  # the length of the load: none ends before, but by an error
            self.over.set()
        for service in services:
            service.result()

    def repeat(self, step: Callable[[psycopg.Connection[Any]], Generator[float]]) -> None:
        """Go through a service's steps; what it yields are its pauses in seconds."""
        with (
            psycopg.connect(self.dsn, autocommit=True, application_name="another") as conn,
            closing(step(conn)) as pauses,
        ):
            while not self.over.wait(next(pauses)):
                pass

    def insert(self, conn: psycopg.Connection[Any], queue: str, lock_key: str, in_sec: float = 0) -> UUID:
        """Insert a job as a producer does that knows only the contract."""
        job_id = uuid4()
        conn.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, max_attempts, producer, available_at)"
            " VALUES (%s, %s, 'recorded', '{\"sec\": 0.02}', %s, 50, 'plain', now() + make_interval(secs => %s))",
            (job_id, queue, lock_key, in_sec),
        )
        self.inserted.append(job_id)
        return job_id

    def produce(self, conn: psycopg.Connection[Any]) -> Generator[float]:
        """Jobs for both queues, some with a key of five, some for later."""
        chance = random.Random(1)
        for number in itertools.count():
            key = chance.choice([f"own-{number}", f"own-{number}", f"key-{number % 5}"])
            self.insert(conn, chance.choice(["ours", "shared"]), key, chance.choice([0, 0, 0.5, 2]))
            yield 0.06

    def reap(self, conn: psycopg.Connection[Any]) -> Generator[float]:
        while True:
            conn.execute(REAP)
            yield 0.3

    def work(self, conn: psycopg.Connection[Any]) -> Generator[float]:
        """A plain worker of the shared queue; every fourth job it puts back for a second."""
        worker = Foreign(self.dsn, "shared", backoff_sec=0.3)
        with worker.conn:
            for turn in itertools.count():
                if found := worker.claim():
                    self.note(conn, *found)
                    if turn % 4:
                        worker.finish(*found)
                    else:
                        worker.put_back(found[0], 1)
                        worker.unlock(found[1])
                yield 0.02

    def note(self, conn: psycopg.Connection[Any], job_id: UUID, lock_key: str) -> None:
        """The work itself: 20 ms between a noted start and a noted end."""
        run = (job_id, lock_key, conn.info.backend_pid)
        conn.execute("INSERT INTO runs (job_id, lock_key, attempt, pid) VALUES (%s, %s, 0, -%s)", run)
        time.sleep(0.02)
        conn.execute("UPDATE runs SET ended = clock_timestamp() WHERE ended IS NULL AND pid = -%s", run[2:])

    def pass_keys(self, conn: psycopg.Connection[Any]) -> Generator[float]:
        """Hold a key by a job of their queue while one of ours waits for it, then finish."""
        worker = Foreign(self.dsn, "theirs")
        with worker.conn:
            for number in itertools.count():
                key = f"baton-{number}"
                theirs = self.insert(conn, "theirs", key)
                assert worker.claim() == (theirs, key)
                self.batons.append((theirs, self.insert(conn, "ours", key)))
                try:
                    yield 0.2  # its work
                finally:
                    worker.finish(theirs, key)
                yield 0.2


@pytest.fixture
def adopted(empty_db: str, tmp_path: Path) -> Iterator[Farm]:
    """The contract's tables with a thousand rows, adopted: not a value of them has changed."""
    with psycopg.connect(empty_db, autocommit=True) as conn:
        conn.execute(CONTRACT + CONTRACT_TRIGGERS + BEFORE)
        rows = "SELECT to_jsonb(j) FROM dl_jobs j ORDER BY job_id"
        before = conn.execute(rows).fetchall()
        migrations.migrate(empty_db, "public")
        after = conn.execute(rows).fetchall()
    assert [({column: new[column] for column in old},) for (old,), (new,) in zip(before, after, strict=True)] == before
    with farm_on(empty_db, tmp_path) as farm:
        yield farm


@pytest.mark.parametrize(("seconds", "bound"), [(6, 10.0), pytest.param(60, 1.0, marks=pytest.mark.slow)])
def test_a_farm_beside_other_services(adopted: Farm, seconds: float, bound: float) -> None:
    farm = adopted
    ((ids,),) = farm.rows(UNTOUCHED)
    untouched = farm.rows(ROWS, ids)
    assert len(untouched) == 750
    wish = json.dumps([{"queue": "ours", "concurrency": 2}, {"queue": "shared", "concurrency": 2}])
    farm.start("reaper", dl_reaper_period_sec=1)
    farm.ready(workers=4, workers_json=wish, dl_claim_backoff_sec=600)  # nothing comes by polling
    others = Others(farm.dsn)
    others.run(seconds)
    until(lambda: farm.rows(OTHERWISE, ids) == [(0,)], "every other job to succeed")
    assert farm.rows(ROWS, ids) == untouched
    assert farm.rows("SELECT count(*) FROM dl_jobs") == [(1_000 + len(others.inserted),)]
    assert farm.rows("SELECT job_id FROM runs WHERE pid > 0 GROUP BY job_id HAVING count(*) > 1") == []
    assert farm.rows(OVERLAPS) == []
    for job_id in others.inserted:
        assert illegal(farm.story(job_id), "succeeded") is None, farm.journal(job_id)
    ours, theirs = farm.rows("SELECT count(*) FILTER (WHERE pid > 0), count(*) FILTER (WHERE pid < 0) FROM runs")[0]
    assert min(ours, theirs) > 0
    for what, times in (
        ("started after they were due", farm.rows(LATE)),
        ("taken over after a plain finish", farm.rows(PASSED, *map(list, zip(*others.batons, strict=True)))),
    ):
        (latest, job), (earliest, _) = times[0], times[-1]
        print(f"{len(times)} jobs {what}: {earliest:.3f} to {latest:.3f} s")
        assert earliest >= 0, what
        assert latest < bound, (what, farm.journal(job))
