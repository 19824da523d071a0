"""A farm's database as the browser's tests want it: every state of a job, made by the real statements."""

from __future__ import annotations

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
    """The jobs of a farm: `running`, `waiting` for its key, `scheduled`, `retry`, `dead`, `lost`, `done`."""

    def __init__(self, dsn: str, address: str, mark: str = "") -> None:
        """`mark` joins whatever a producer or a pipeline can name."""
        self.dsn, self.address, self.mark = dsn, address, mark
        self.conn = db.connect(dsn, name="scene", schema="public")
        self.workers: list[Worker] = []
        self.queue = f"load.orders{mark}"
        self.dead = self._ended("fail", error=f"ValueError: no such column{mark}\n\n{TRACE}")
        self.retry = self._ended("retry", error=f"ConnectionError: no answer{mark}", delay_sec=600)
        self.done = self._ended("succeed")
        self.lost = self._lost()
        self.scheduled = self.job(available_at=datetime.now(UTC) + timedelta(hours=3))
        self.running = self._running()
        self.waiting = self.job(lock_key=f"orders{mark}")
        self.orphan = self.job(queue=f"nobody.serves{mark}", lock_key=f"orphan{mark}")
        self.show_workers()
        stats.aggregate(self.conn)

    def job(self, **more: Any) -> UUID:
        """One more job."""
        given = {
            "queue": self.queue,
            "task": f"load.customers{self.mark}",
            "lock_key": f"key-{next(_names)}{self.mark}",
            "args": {"region": f"north{self.mark}", "password": SECRET, "dsn": f"postgresql://u:{SECRET}@h/db"},
            "partition_key": f"2026-11{self.mark}",
            "producer": f"airflow{self.mark}",
            "consumer_group": f"reports{self.mark}",
        }
        return enqueue(self.conn, **given | more)

    def status(self, job_id: UUID) -> str:
        """A job's status."""
        return str(row(self.conn, job_id)["status"])

    def show_workers(self) -> None:
        """What a keeper would show: the worker that runs, and one that waits."""
        names = [worker.name for worker in self.workers] + [f"host-2{self.mark}:9:boot"]
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
        stats.show_workers(self.conn, f"farm{self.mark}", f"host-1{self.mark}", shown)

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
        """Let go of everything."""
        for worker in self.workers:
            worker.conn.close()
        self.conn.close()

    def _worker(self) -> Worker:
        return Worker(self.dsn, f"host-1{self.mark}:{next(_names)}:boot")

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
        job_id = self.job(lock_key=f"orders{self.mark}", lease_ttl_sec=3_600)
        worker = self._worker()
        job = worker.take(self.queue)
        progress = {"processed": 640, "total": 1_000, "step": f"merge{self.mark}", "token": SECRET}
        lifecycle.beat(worker.conn, [job], json.dumps(progress), journal=True)
        age(self.conn, job_id, "started_at", 125)
        self.workers.append(worker)
        return job_id
