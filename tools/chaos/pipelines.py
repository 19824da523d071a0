"""The pipelines of a chaos run. Each run leaves signs of life, which show overlaps.

A sign has the instant at which its process ran, by the machine's clock, which all farms share. The process keeps a
sign until the database takes it, since a run goes on, perhaps as a zombie, while the database is away. Signs and rows
of the target do not pass the farm's link, so that they show the work of a farm that is cut off.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg

from dataloader.pipelines import Context, PermanentError, Progress, register

TABLES = """
CREATE TABLE runs (
  job_id uuid NOT NULL, claim int NOT NULL, attempt int NOT NULL, lock_key text NOT NULL, pid int NOT NULL,
  farm text NOT NULL, what text NOT NULL, at float8 NOT NULL, noted timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE written (
  n bigserial PRIMARY KEY, job_id uuid NOT NULL, claim int NOT NULL, older int NOT NULL,
  at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX ON written (job_id);
"""
SIGN_SEC = 0.1
AGAIN_SEC = 0.3  # from a failure to the next try to reach the database

_NOTE = (
    "INSERT INTO runs (job_id, claim, attempt, lock_key, pid, farm, what, at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
)
_WRITE = """
INSERT INTO written (job_id, claim, older)
SELECT %(job_id)s, %(claim)s, count(*) FROM written WHERE job_id = %(job_id)s AND claim < %(claim)s"""


class Diary:
    """One run's signs of life."""

    def __init__(self, context: Context) -> None:
        self._whose = (context.job_id, context.claim, context.attempt, context.lock_key, os.getpid())
        self._unwritten: list[tuple[Any, ...]] = []
        self._conn: psycopg.Connection[Any] | None = None
        self._again = 0.0

    def note(self, what: str = "alive") -> None:
        """The run is at work at this instant."""
        self._unwritten.append((*self._whose, os.environ["CHAOS_FARM"], what, time.time()))
        if time.monotonic() < self._again:
            return
        try:
            self._write()
        except psycopg.Error:
            self._again = time.monotonic() + AGAIN_SEC
            self.close()

    def _write(self) -> None:
        if self._conn is None:
            # A lost sign is only lost evidence, and not worth a flush to the disk.
            self._conn = psycopg.connect(
                os.environ["CHAOS_DSN"], autocommit=True, connect_timeout=2, options="-c synchronous_commit=off"
            )
        while self._unwritten:
            self._conn.execute(_NOTE, self._unwritten[0])
            self._unwritten.pop(0)

    def close(self) -> None:
        """Close the connection; a later note opens another."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()


def _steps(diary: Diary, sec: float) -> Iterator[Progress]:
    """Sleep `sec` seconds, with a sign and a safe point after each slice."""
    diary.note("start")
    began = time.monotonic()
    while (passed := time.monotonic() - began) < sec:
        time.sleep(min(SIGN_SEC, sec - passed))
        diary.note()
        yield {"processed": round(passed, 1), "total": sec}
    diary.note("end")


@register("chaos.steps")
def steps(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Take `sec` seconds of small steps, as a generator."""
    with closing(Diary(context)) as diary:
        yield from _steps(diary, args["sec"])


@register("chaos.plain")
def plain(args: dict[str, Any], context: Context) -> None:
    """Take `sec` seconds without a safe point, as a plain function."""
    with closing(Diary(context)) as diary:
        for _ in _steps(diary, args["sec"]):
            pass


@register("chaos.awaits")
async def awaits(args: dict[str, Any], context: Context) -> None:
    """Take `sec` seconds, as a coroutine."""
    import asyncio

    with closing(Diary(context)) as diary:
        diary.note("start")
        end = time.monotonic() + args["sec"]
        while time.monotonic() < end:
            await asyncio.sleep(SIGN_SEC)
            diary.note()
        diary.note("end")


@register("chaos.holds_the_gil")
def holds_the_gil(args: dict[str, Any], context: Context) -> None:
    """Sleep in one C call that lets no other thread and no signal handler run."""
    with closing(Diary(context)) as diary:
        diary.note("start")
        poll = ctypes.PyDLL(None).poll
        until = time.monotonic() + args["sec"]
        while (left := until - time.monotonic()) > 0:  # a signal ends the call early
            poll(None, 0, int(left * 1000) + 1)
        diary.note("end")


@register("chaos.errs")
def errs(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Fail after `sec` seconds, with a permanent error if `permanent`."""
    with closing(Diary(context)) as diary:
        yield from _steps(diary, args["sec"])
    raise PermanentError("no use") if args.get("permanent") else ValueError("bad luck")


@register("chaos.dies")
def dies(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Kill the worker by the signal `by`, or, where `by` is 0, by an exit."""
    with closing(Diary(context)) as diary:
        yield from _steps(diary, args["sec"])
    if args["by"] == 0:
        os._exit(3)
    signal.signal(args["by"], signal.SIG_DFL) if args["by"] != signal.SIGKILL else None
    os.kill(os.getpid(), args["by"])


@register("chaos.writes")
def writes(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Write a row with the number of rows of older runs into the target, and commit `sec` seconds later."""
    with closing(Diary(context)) as diary:
        with context.transaction() as conn:
            conn.execute(_WRITE, {"job_id": context.job_id, "claim": context.claim})
            yield from _steps(diary, args["sec"])
        diary.note("committed")


@register("chaos.writes_often")
def writes_often(args: dict[str, Any], context: Context) -> None:
    """Write `rows` such rows, each in a transaction of its own, without a safe point: a zombie would write more."""
    with closing(Diary(context)) as diary:
        diary.note("start")
        for _ in range(args["rows"]):
            with context.transaction() as conn:
                conn.execute(_WRITE, {"job_id": context.job_id, "claim": context.claim})
                diary.note()
                time.sleep(SIGN_SEC)  # before the commit: a process that was stopped here goes on with the commit
        diary.note("end")


@register("chaos.parent")
def parent(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Leave a child that would outlive the job, outside the job's process group if `daemon`."""
    mark = os.environ["CHAOS_MARK"]
    if args.get("daemon"):
        subprocess.run(["/bin/sh", "-c", f"setsid /bin/sleep {mark} &"], check=True)
    else:
        subprocess.Popen(["/bin/sleep", mark])
    with closing(Diary(context)) as diary:
        yield from _steps(diary, args["sec"])
