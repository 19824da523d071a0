"""The cost of one tenant's mass for the others: `python -m tools.shares [schedules children limits polls]`.

The program starts a PostgreSQL of its own and a farm of real processes. It measures three things that others wait for,
alone and under each load: the recovery of an expired lease, the start of a job in another queue, and the answer about
a job's status to another token. It prints the medians and the ratio to the time alone.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from uuid import uuid4

from farming import Farm, until

from dataloader.queue import enqueue, lifecycle, operations
from dataloader.queue.enqueue import NewJob
from tools.farms import farm
from tools.programs import answers, free_port

SAMPLES = 25
SCHEDULES, CHILDREN, LIMITS, POLLS = 10_000, 200_000, 1_000, 200
TOKENS = [
    {"name": name, "scopes": ["read"], "sha256": hashlib.sha256(name.encode()).hexdigest()}
    for name in ("mass", "other")
]
WORKERS = [{"queue": "bulk", "concurrency": 1}, {"queue": "other", "concurrency": 1}]
EXPIRED = """
INSERT INTO dl_jobs (
  job_id, queue, task, lock_key, status, attempt, started_at, heartbeat_at, lease_expires_at, claimed_by)
VALUES (%s, 'nobody', 't', gen_random_uuid()::text, 'running', 1, now() - interval '2 min', now() - interval '2 min',
        now() - interval '1 min', 'gone:1:0-0')
"""
DUE = """
INSERT INTO dl_schedules (
  name, origin, interval_sec, timezone, catch_up, overlap, jitter_sec, job, created_by, next_due)
SELECT 'mass ' || n, 'people', 60, 'UTC', 'last', 'queue', 0,
       '{"task": "returns", "queue": "bulk", "lock_key": "k"}', 'mass', now() FROM generate_series(1, %s) n
"""


class Shares:
    """A farm with a queue for the mass and one for the others."""

    def __init__(self, farm: Farm) -> None:
        self.farm, self.port = farm, free_port()
        farm.ready(workers=2, workers_json=json.dumps(WORKERS))
        farm.start("reaper")
        farm.start("api", dl_api_tokens=json.dumps(TOKENS), app_host="127.0.0.1", app_port=self.port)
        until(lambda: answers(self.port), "the API to answer")
        self.job = farm.enqueue("returns", "other")
        farm.wait(self.job, "succeeded")

    def recovery(self) -> float:
        """Seconds until a job whose lease has expired is ready again."""
        job_id = uuid4()
        self.farm.conn.execute(EXPIRED, (job_id,))
        return self.passed(lambda: self.farm.job(job_id)["status"] == "queued")

    def claim(self) -> float:
        """Seconds until a job of another queue has started, by its row."""
        job_id = self.farm.enqueue("returns", "other")
        job = until(lambda: (row := self.farm.job(job_id))["status"] == "succeeded" and row, patience=300)
        return (job["started_at"] - job["created_at"]).total_seconds()

    def answer(self) -> float:
        """Seconds of an answer to another token."""
        since = time.monotonic()
        self.get("other", "")
        return time.monotonic() - since

    def passed(self, question: Callable[[], bool]) -> float:
        since = time.monotonic()
        until(question, patience=300)
        return time.monotonic() - since

    def get(self, token: str, query: str) -> Message:
        """The headers of an answer about the job's status."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v1/jobs/{self.job}/status{query}",
            headers={"Authorization": f"Bearer {token}"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            reply.read()
            return reply.headers

    def medians(self) -> dict[str, float]:
        samples = [(self.recovery(), self.claim(), self.answer()) for _ in range(SAMPLES)]
        return dict(
            zip(("recovery", "claim", "answer"), map(statistics.median, zip(*samples, strict=True)), strict=True)
        )

    # --- the loads ---

    @contextmanager
    def schedules(self) -> Iterator[None]:
        """All of them are due at once, and again each minute."""
        self.farm.conn.execute(DUE, (SCHEDULES,))
        yield
        self.farm.conn.execute("DELETE FROM dl_schedules")

    @contextmanager
    def children(self) -> Iterator[None]:
        """Their parent ends as the measurement begins."""
        parent = self.farm.enqueue("returns", "nobody")
        for n in range(0, CHILDREN, 10_000):
            new = [NewJob("nobody", "returns", f"child {n + i}", {}, depends_on=(parent,)) for i in range(10_000)]
            enqueue.enqueue_many(self.farm.conn, new)
        operations.change(self.farm.conn, "cancel", [parent], "mass")
        yield

    @contextmanager
    def limits(self) -> Iterator[None]:
        """Each has a job that waits for it."""
        self.farm.conn.execute(
            "INSERT INTO dl_limits (name, most) SELECT 'mass ' || n, 0 FROM generate_series(1, %s) n", (LIMITS,)
        )
        new = [
            NewJob("bulk", "returns", f"limited {n}", {}, limits=(f"mass {n % LIMITS + 1}",))
            for n in range(10 * LIMITS)
        ]
        enqueue.enqueue_many(self.farm.conn, new)
        yield

    @contextmanager
    def polls(self) -> Iterator[None]:
        """Long polls of one token, again as soon as they end, about a job that waits."""
        over = threading.Event()
        ended, self.job = self.job, self.farm.enqueue("returns", "nobody")

        def poll() -> None:
            while not over.is_set():
                with suppress(OSError):
                    over.wait(int(self.get("mass", "?wait=30").get("Retry-After", 0)))

        threads = [threading.Thread(target=poll, daemon=True) for _ in range(POLLS)]
        for thread in threads:
            thread.start()
        yield
        over.set()
        lifecycle.request_cancel(self.farm.conn, self.job)
        for thread in threads:
            thread.join()
        self.job = ended


def main() -> None:
    """Measure and print."""
    with farm() as (running, _):
        shares = Shares(running)
        for name in sys.argv[1:] or ("schedules", "children", "limits", "polls"):
            alone = shares.medians()
            with getattr(shares, name)():
                under = shares.medians()
            for what, time_alone in alone.items():
                print(
                    f"{name:10} {what:9} {time_alone * 1e3:9.1f} ms alone {under[what] * 1e3:9.1f} ms"
                    f"   {under[what] / time_alone:5.2f} x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
