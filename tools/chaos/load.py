"""The jobs of a chaos run, which clients trigger and cancel over HTTP, and the API's answers.

A client repeats a request, with the same idempotency key, until the API answers 200. The only other results allowed
are 503 and a lost connection. The threads share lists, and only append to them.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any

from .history import FINAL, Answer, Trigger
from .world import QUEUES

CLIENTS = 3
PAUSE_SEC = (0.05, 0.5)  # between the triggers of one client
AHEAD = 60  # unfinished jobs at which clients pause, for all jobs have to end in the time of the drain
ENDLESS = 600.0
HOT_KEYS = 6


@dataclass(frozen=True)
class Kind:
    """A kind of job: its pipeline, the duration of its runs, and its possible ends."""

    name: str
    weight: int
    tasks: tuple[str, ...]
    sec: tuple[float, float] = (0.0, 0.4)
    may_end: frozenset[str] = frozenset({"succeeded"})
    max_attempts: tuple[int, int] = (1000, 1000)  # more than any nemesis can use up
    cancel: str = ""  # asked: ends at a safe point; forced: ends anywhere
    cancel_after: tuple[float, float] = (0.3, 4.0)
    delay: tuple[float, float] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    args: Callable[[Random], dict[str, Any]] = lambda random: {}


KINDS = (
    Kind("short", 20, ("steps", "plain", "awaits")),
    Kind("long", 8, ("steps", "awaits"), (3, 9)),
    Kind("plain", 8, ("plain",), (0.5, 4)),
    Kind("gil", 6, ("holds_the_gil",), (1, 6)),
    Kind("writes", 20, ("writes",), (0, 5)),
    Kind("writes often", 14, ("writes_often",), args=lambda random: {"rows": random.randint(5, 60)}),
    Kind("parent", 5, ("parent",), (0, 2), args=lambda random: {"daemon": random.random() < 0.5}),
    Kind("delayed", 5, ("steps",), delay=(1, 4)),
    Kind("errs", 5, ("errs",), may_end=frozenset({"failed", "lost"}), max_attempts=(1, 3)),
    Kind("permanent", 3, ("errs",), may_end=frozenset({"failed"}), args=lambda random: {"permanent": True}),
    Kind(
        "dies",
        4,
        ("dies",),
        may_end=frozenset({"lost"}),
        max_attempts=(1, 3),
        args=lambda random: {"by": random.choice([0, int(signal.SIGKILL), int(signal.SIGABRT)])},
    ),
    Kind(
        "times out",
        5,
        ("steps", "plain", "holds_the_gil", "writes", "parent"),
        (ENDLESS, ENDLESS),
        may_end=frozenset({"failed", "lost"}),
        max_attempts=(1, 2),
        fields={"timeout_sec": 1},
    ),
    Kind("canceled", 5, ("steps", "awaits", "writes"), (ENDLESS, ENDLESS), frozenset({"canceled"}), cancel="asked"),
    Kind(
        "forced",
        4,
        ("plain", "holds_the_gil", "parent", "writes"),
        (ENDLESS, ENDLESS),
        frozenset({"canceled"}),
        cancel="forced",
    ),
    Kind("canceled early", 4, ("steps",), delay=(0.5, 2), cancel="asked", cancel_after=(0, 2)),
    Kind(
        "canceled perhaps",
        6,
        ("steps", "writes", "plain", "holds_the_gil"),
        (0, 3),
        cancel="asked",
        cancel_after=(0, 3),
    ),
)


class Unanswered(Exception):
    """The client got no answer, or one without a confirmation, and may repeat the request."""


class Load:
    """Clients in threads of their own until `finish`."""

    def __init__(self, port: int, seed: int) -> None:
        self.triggers: list[Trigger] = []
        self.answers: list[Answer] = []
        self.surprises: list[str] = []
        self.retries = 0
        self._port = port
        self._stopping = threading.Event()  # trigger no more jobs
        self._over = threading.Event()  # end all threads at once
        self._cancels: list[tuple[float, str, bool]] = []  # the time, the job, by force or not
        self._unfinished: dict[str, Trigger] = {}
        self._threads = [
            threading.Thread(target=self._trigger_jobs, args=(n, Random(f"{seed}-client-{n}"))) for n in range(CLIENTS)
        ]
        self._followers = [
            threading.Thread(target=self._cancel_jobs),
            threading.Thread(target=self._ask_for_jobs, args=(Random(f"{seed}-asker"),)),
        ]
        for thread in self._threads + self._followers:
            thread.daemon = True

    def start(self) -> None:
        """Begin to trigger, to query and to cancel."""
        for thread in self._threads + self._followers:
            thread.start()

    def stop(self) -> None:
        """Trigger no more; clients repeat requests without an answer, and watch their jobs until the end."""
        self._stopping.set()

    def settled(self) -> bool:
        """True once the clients have their answers and have seen the end of all their jobs."""
        return not any(thread.is_alive() for thread in self._threads) and not self._unfinished and not self._cancels

    def finish(self) -> None:
        """End all threads."""
        self._stopping.set()
        self._over.set()
        for thread in self._threads + self._followers:
            thread.join(10)

    # --- triggers ---

    def _trigger_jobs(self, client: int, random: Random) -> None:
        number = 0
        while not self._stopping.wait(random.uniform(*PAUSE_SEC)):
            if len(self._unfinished) < AHEAD:
                number += 1
                (kind,) = random.choices(KINDS, [kind.weight for kind in KINDS])
                self._give(kind, f"client-{client}-{number}", random)

    def _give(self, kind: Kind, key: str, random: Random) -> None:
        """Trigger one job, sometimes twice at the same time or one after the other."""
        body, not_before = _body(kind, key, random)
        writes = {"chaos.writes": 1, "chaos.writes_often": body["args"].get("rows", 0)}.get(body["task"], 0)
        expected = Trigger(key, kind.name, kind.may_end, writes, not_before)
        twin = threading.Thread(target=self._send, args=(expected, body), daemon=True)
        manner = random.choices(["once", "together", "again"], [90, 5, 5])[0]
        if manner == "together":
            twin.start()
        job_id = self._send(expected, body)
        if job_id and manner == "again":
            self._send(expected, body)
        if job_id and kind.cancel:
            at = time.time() + random.uniform(*kind.cancel_after)
            self._cancels.append((at, job_id, kind.cancel == "forced"))
        if manner == "together":
            twin.join()

    def _send(self, expected: Trigger, body: dict[str, Any]) -> str | None:
        answer = self._patiently("POST", "/api/v1/jobs/trigger", body)
        job_id = answer["job_id"] if answer else None
        trigger = Trigger(**{**expected.__dict__, "job_id": job_id})
        if job_id:
            self._unfinished.setdefault(job_id, trigger)
        self.triggers.append(trigger)
        return job_id

    # --- followers ---

    def _cancel_jobs(self) -> None:
        while not self._over.wait(0.05):
            for due in [cancel for cancel in self._cancels if cancel[0] <= time.time()]:
                _, job_id, force = due
                if self._ask("cancel", "POST", job_id, {"force": force}):
                    self._cancels.remove(due)

    def _ask_for_jobs(self, random: Random) -> None:
        while not self._over.wait(0.2):
            known = list(self._unfinished)
            for job_id in random.sample(known, min(5, len(known))):
                answer = self._ask("status", "GET", job_id)
                if answer and answer.status in FINAL:
                    self._unfinished.pop(job_id, None)

    def _ask(self, asked: str, method: str, job_id: str, body: dict[str, Any] | None = None) -> Answer | None:
        try:
            status, found = self._call(method, f"/api/v1/jobs/{job_id}/{asked}", body)
        except Unanswered:
            return None
        answer = Answer(job_id, asked, time.time(), None)
        if status == 200:
            answer = Answer(job_id, asked, time.time(), found["status"], found["cancel_requested"])
        self.answers.append(answer)
        return answer

    # --- HTTP ---

    def _patiently(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Repeat the request until the answer is 200; None when the run ends before."""
        while not self._over.is_set():
            try:
                status, answer = self._call(method, path, body)
            except Unanswered:
                self.retries += 1
                self._over.wait(0.2)
                continue
            return answer if status == 200 else None
        return None

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        conn = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            conn.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = conn.getresponse()
            status, text = response.status, response.read()
        except (OSError, http.client.HTTPException) as e:
            raise Unanswered from e
        finally:
            conn.close()
        if status == 503:
            raise Unanswered
        if status not in (200, 404):
            self.surprises.append(f"{method} {path}: {status} {text[:500]!r}")
        return status, json.loads(text)


def _body(kind: Kind, key: str, random: Random) -> tuple[dict[str, Any], float]:
    """The body of a trigger, and when its job may start."""
    hot = random.random() < 0.4
    body = {
        "queue": random.choice(QUEUES),
        "task": f"chaos.{random.choice(kind.tasks)}",
        "lock_key": f"hot-{random.randrange(HOT_KEYS)}" if hot else f"own-{key}",
        "args": {"sec": round(random.uniform(*kind.sec), 2), **kind.args(random)},
        "idempotency_key": key,
        "priority": random.choice([10, 100, 100, 100]),
        "max_attempts": random.randint(*kind.max_attempts),
        "lease_ttl_sec": random.randint(4, 6),
        **kind.fields,
    }
    if kind.delay is None:
        return body, 0.0
    not_before = round(time.time() + random.uniform(*kind.delay), 3)
    body["available_at"] = datetime.fromtimestamp(not_before, UTC).isoformat()
    return body, not_before
