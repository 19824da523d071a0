"""A farm's database as the browser's tests want it: every state of a job, made by the real statements."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from hands import Worker, age, enqueue, expire, row

from dataloader.queue import db, lifecycle
from dataloader.queue.reports import stats

SECRET = "canary-7f3b-hunter2"
TRACE = "Traceback (most recent call last):\n" + "".join(f'  File "load.py", line {n}, in step\n' for n in range(30))
_names = itertools.count(1)


class Scene:
    def __init__(self, dsn: str, address: str) -> None:
        self.dsn, self.address = dsn, address
        self.conn = db.connect(dsn, name="scene", schema="public")
        self.workers: list[Worker] = []
        self.queue = "load.orders"
        self.dead = self._ended("fail", error=f"ValueError: no such column\n\n{TRACE}")
        self.retry = self._ended("retry", error="ConnectionError: no answer", delay_sec=600)
        self.done = self._ended("succeed")
        self.lost = self._lost()
        self.scheduled = self.job(available_at=datetime.now(UTC) + timedelta(hours=3))
        self.running = self._running()
        self.waiting = self.job(lock_key="orders")
        self.orphan = self.job(queue="nobody.serves", lock_key="orphan")
        self.show_workers()
        stats.aggregate(self.conn)

    def job(self, **more: Any) -> UUID:
        given = {
            "queue": self.queue,
            "task": "load.customers",
            "lock_key": f"key-{next(_names)}",
            "args": {"region": "north", "password": SECRET, "dsn": f"postgresql://u:{SECRET}@h/db"},
            "partition_key": "2026-11",
            "producer": "airflow",
            "consumer_group": "reports",
        }
        return enqueue(self.conn, **given | more)

    def status(self, job_id: UUID) -> str:
        return str(row(self.conn, job_id)["status"])

    def end(self, job_id: UUID, status: str) -> None:
        self.conn.execute("UPDATE dl_jobs SET status = %s, finished_at = now() WHERE job_id = %s", (status, job_id))

    def show_workers(self) -> None:
        """Write the rows of a keeper: the worker that runs, and one that waits."""
        names = [worker.name for worker in self.workers] + ["host-2:9:boot"]
        shown = [
            {
                "worker": name,
                "pid": 4_000 + number,
                "queue": self.queue,
                "state": "idle" if number else "busy",
                "job_id": None if number else str(self.running),
                "memory_bytes": 312_000_000,
                "cpu_percent": 0.0 if number else 97.0,
                "jobs": 12 * number,
                "started_at": datetime.now(UTC) - timedelta(hours=2),
            }
            for number, name in enumerate(names)
        ]
        stats.show_workers(self.conn, "farm", "host-1", shown)

    @contextmanager
    def claimed(self, **more: Any) -> Iterator[UUID]:
        """A job that runs while the block does, the only one of its queue."""
        more = {"queue": f"own-{next(_names)}", **more}
        job_id, worker = self.job(**more), self._worker()
        try:
            assert worker.take(more["queue"]).job_id == job_id
            yield job_id
        finally:
            worker.conn.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.conn.close()
        self.conn.close()

    def _worker(self) -> Worker:
        return Worker(self.dsn, f"host-1:{next(_names)}:boot")

    def _ended(self, verb: str, **how: Any) -> UUID:
        job_id, worker = self.job(), self._worker()
        worker.finish(worker.take(self.queue), verb, **how)
        worker.conn.close()
        return job_id

    def _lost(self) -> UUID:
        job_id, worker = self.job(max_attempts=1), self._worker()
        worker.take(self.queue)
        worker.conn.close()
        expire(self.conn, job_id)
        assert lifecycle.reap(self.conn)
        return job_id

    def _running(self) -> UUID:
        job_id = self.job(lock_key="orders", lease_ttl_sec=3_600)
        worker = self._worker()
        job = worker.take(self.queue)
        progress = {"processed": 640, "total": 1_000, "step": "merge", "token": SECRET}
        lifecycle.beat(worker.conn, [job], json.dumps(progress), journal=True)
        age(self.conn, job_id, "started_at", 125)
        self.workers.append(worker)
        return job_id
