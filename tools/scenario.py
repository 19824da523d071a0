"""The database of the frozen transcripts: jobs in every status, queues, limits, schedules, backfills, webhooks.

Real processes make the past, one job after the other, so that two runs leave the same rows but for ids and times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
from flask import Flask

from dataloader import config
from dataloader.api import create_app
from dataloader.api.web import tokens

SCOPES = {"all": ("read", "trigger", "operate"), "read": ("read",), "trigger": ("trigger",), "operate": ("operate",)}
TOKENS = {name: tokens.new() for name in SCOPES} | {"wrong": tokens.new()}
WORKERS = [{"queue": "etl.default", "concurrency": 1}, {"queue": "etl.long", "concurrency": 1}]


class Scenario:
    """A database with jobs in every status, made once by real processes; `jobs` has their ids by name."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder, self.dsn, self.jobs = folder, dsn, dict[str, str]()
        self.env = {
            **os.environ,
            "DL_DB_DSN": dsn,
            "DL_HOME": str(folder),
            "DL_PIPELINES": "frozen_pipelines",
            "DL_REAPER_PERIOD_SEC": "0.2",
            "DL_HEARTBEAT_SEC": "1",
            "PYTHONPATH": str(Path(__file__).parent),
            "WORKERS_JSON": json.dumps(WORKERS),
        }
        subprocess.run([sys.executable, "-m", "dataloader", "migrate"], env=self.env, check=True, capture_output=True)
        with psycopg.connect(dsn, autocommit=True) as self.conn, application(dsn) as app:
            self.client = app.test_client()
            with self.programs("workers", "reaper"):
                self.wait("SELECT count(*) = 2 FROM dl_workers WHERE state IN ('awake', 'idle')")
                self.past()
            self.present()

    @contextmanager
    def programs(self, *names: str) -> Iterator[None]:
        """Run these programs in the block, and kill them at its end: a run that is under way stays `running`."""
        command, running = [sys.executable, "-m", "dataloader"], []
        try:
            for name in names:
                log = (self.folder / f"{name}.log").open("wb")
                running.append(subprocess.Popen([*command, name], env=self.env, stdout=log, stderr=log))
            yield
        finally:
            # All stop before one ends: a worker would hand its job back once its supervisor is gone.
            family = [each for program in running for each in psutil.Process(program.pid).children(recursive=True)]
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in [each.pid for each in (*running, *family)]:
                    os.kill(pid, number)
            for program in running:
                program.wait()
        self.wait(
            "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND application_name NOT LIKE '%api%'"
        )

    def wait(self, question: str, *values: Any) -> None:
        """Wait until the answer to this SQL is true."""
        until = time.monotonic() + 30
        while not ((row := self.conn.execute(question, values or None).fetchone()) and row[0]):
            if time.monotonic() > until:
                jobs = self.conn.execute("SELECT lock_key, status, error, progress FROM dl_jobs").fetchall()
                raise TimeoutError(f"{question} {values}: {jobs}")
            time.sleep(0.02)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the API; the answer's document."""
        reply = self.client.open(path, method=method, json=body, headers=bearer("all"))
        if reply.status_code != 200:
            raise RuntimeError(f"{method} {path}: {reply.text}")
        return reply.get_json()

    def trigger(self, name: str, task: str = "load.day", queue: str = "etl.default", **more: Any) -> str:
        """Add a job with this name and key."""
        args = {"day": "2026-03-04"} if task == "load.day" else {}
        fields = {"task": task, "queue": queue, "lock_key": name, "args": args} | more
        self.jobs[name] = self.call("POST", "/api/v1/jobs/trigger", fields)["job_id"]
        return self.jobs[name]

    def ran(self, name: str, status: str, *job: Any, **more: Any) -> None:
        """Add a job, and wait for its end."""
        self.trigger(name, *job, **more)
        self.wait("SELECT status::text = %s AND attempt > 0 FROM dl_jobs WHERE job_id = %s", status, self.jobs[name])

    def past(self) -> None:
        """The steps that need workers, one job after the other."""
        self.ran(
            "done",
            "succeeded",
            producer="shop",
            partition_key="2026-03-04",
            idempotency_key="day-4",
            deadline="2035-01-01T00:00:00Z",
        )
        self.ran("failed", "failed", "load.broken", max_attempts=1)
        self.ran("failed_too", "failed", "load.broken", max_attempts=1, args={"column": "name", "password": "secret"})
        self.ran("retry", "queued", "load.broken", max_attempts=3, producer="shop")
        self.ran("lost", "lost", "load.killed", max_attempts=1)
        days = {"since": "2026-01-01", "until": "2026-01-03", "step": "day", "args": {"day": "{{ partition }}"}}
        self.call("POST", "/api/v1/backfills", {"name": "january", "task": "load.day"} | days)
        self.wait("SELECT count(*) = 3 FROM dl_jobs WHERE lock_key LIKE 'load.day:%' AND status::text = 'succeeded'")
        self.trigger("running", "load.long", "etl.long")
        self.wait("SELECT count(*) = 1 FROM dl_checkpoints")
        self.wait("SELECT last_event = (SELECT max(event_id) FROM dl_job_events) FROM dl_rolled")

    def present(self) -> None:
        """The steps that need no worker."""
        self.trigger("canceled", available_at="2035-01-01T00:00:00Z")
        self.call("POST", f"/api/v1/jobs/{self.jobs['canceled']}/cancel")
        self.trigger("ready", queue="etl.idle", partition_key="2026-03-05")
        self.trigger("ready_too", queue="etl.idle", priority=50, limits=["source:oracle"])
        self.trigger("scheduled", available_at="2035-01-01T00:00:00Z", affinity_key="orders")
        self.trigger("child", "load.broken", depends_on=[self.jobs["running"], self.jobs["done"]])
        self.trigger("paused", queue="etl.paused")
        self.call("POST", "/api/v1/queues/etl.paused/pause")
        self.call("PUT", "/api/v1/queues/shop.orders", {"ordered": True, "merge": True})
        for number, score in enumerate((3, 1, 2)):
            self.trigger(f"order_{number}", "load.broken", "shop.orders", lock_key=f"order-{number % 2}", score=score)
        self.call("PUT", "/api/v1/limits/source:oracle", {"most": 1, "per_minute": 60})
        self.call("PUT", "/api/v1/webhooks/ops", {"url": "https://ops.example.com/alerts", "kinds": ["dead"]})
        clock = {"cron": "0 3 * * MON-FRI", "timezone": "Europe/Berlin", "args": {"day": "{{ date }}"}}
        self.call("POST", "/api/v1/schedules", {"name": "nightly", "task": "load.day"} | clock)
        days = {"since": "2026-02-01", "until": "2026-02-10", "step": "day", "max_running": 2}
        words = {"name": "february", "task": "load.day", "queue": "etl.idle", "args": {"day": "{{ partition }}"}}
        self.call("POST", "/api/v1/backfills", words | days)
        self.conn.execute(
            "UPDATE dl_jobs SET available_at = now() + interval '1 day' WHERE job_id = %s", [self.jobs["retry"]]
        )
        self.conn.execute(
            "UPDATE dl_jobs SET lease_expires_at = now() + interval '1 day', heartbeat_at = now() + interval '10 min'"
            " WHERE status = 'running'"
        )
        self.conn.execute("UPDATE dl_workers SET seen_at = now() + interval '10 min'")


@contextmanager
def application(dsn: str) -> Iterator[Flask]:
    """The API on this database."""
    known = [json.loads(tokens.entry(TOKENS[name], name, scopes)) for name, scopes in SCOPES.items()]
    app = create_app(config.load(_env_file=None, dl_db_dsn=dsn, dl_api_tokens=known, timezone="UTC", pg_pool_size=2))
    try:
        yield app
    finally:
        app.extensions["sessions"].close()


def bearer(token: str) -> dict[str, str]:
    """The header with this token."""
    return {"Authorization": f"Bearer {TOKENS[token]}"} if token in TOKENS else {}
