"""PROCESS: the bare counterparts of a worker, as small as possible. The figures start them.

`python -m dataloader.bench.bare listen` answers a notification by one claim and notes its time; DL_BENCH_DSN names
the database. `… burn ROUNDS JOBS` burns CPU without a queue: it prints a line when it is ready, begins when it reads
a line, and prints its start and its end.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from dataloader import embedded
from dataloader.bench import marks

DSN = "DL_BENCH_DSN"
_CLAIM = """\
UPDATE dl_jobs SET status = 'running', attempt = attempt + 1, started_at = coalesce(started_at, now()),
       heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => lease_ttl_sec)
 WHERE job_id = (SELECT job_id FROM dl_jobs WHERE queue = 'bench' AND status = 'queued' AND available_at <= now()
                  ORDER BY priority, created_at LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING (args->>'n')::int"""


def listen() -> None:
    """LISTEN, then select, claim, note the time, without end."""
    with psycopg.connect(os.environ[DSN], autocommit=True, prepare_threshold=0) as conn:
        conn.execute("LISTEN dl_bench")
        conn.execute(_CLAIM)
        _say("ready")
        while True:
            select.select([conn.fileno()], [], [])
            for _ in conn.notifies(timeout=0):
                pass
            if row := conn.execute(_CLAIM).fetchone():
                start = marks.now()
                marks.leave(marks.Mark(row[0], start, start))


def burn(rounds: int, jobs: int) -> None:
    """Do the work of `jobs` jobs, one after the other."""
    from dataloader.bench import pipelines

    _say("ready")
    sys.stdin.readline()
    start = marks.now()
    for _ in range(jobs):
        pipelines.burn(rounds)
    _say(f"{start!r} {marks.now()!r}")


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A counterpart in a process of its own, ready; the end of the block kills it."""
    started = subprocess.Popen(
        [sys.executable, "-m", "dataloader.bench.bare", *arguments],
        env=dict(os.environ) | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=embedded.dies_with_us(signal.SIGKILL),
    )
    with started:
        try:
            if answer(started) != "ready":
                raise RuntimeError(f"{' '.join(arguments)} did not start")
            yield started
        finally:
            started.kill()


def answer(started: subprocess.Popen[str]) -> str:
    """The next line of the process's output."""
    assert started.stdout is not None  # noqa: S101  made with a pipe
    return started.stdout.readline().strip()


def order(started: subprocess.Popen[str]) -> None:
    """Send the line to begin."""
    assert started.stdin is not None  # noqa: S101  made with a pipe
    started.stdin.write("go\n")
    started.stdin.flush()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    program: dict[str, Callable[..., None]] = {"listen": listen, "burn": burn}
    program[sys.argv[1]](*map(int, sys.argv[2:]))
