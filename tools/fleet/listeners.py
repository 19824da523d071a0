"""What NOTIFY costs a server by the number of its listeners, with PostgreSQL alone: no farm runs.

`python -m tools.fleet.listeners 10 50 250 1000 1000:20` starts a PostgreSQL of its own. `1000:20`: of 1,000 sessions 20
LISTEN; `1000` is short for all. Each notification is a transaction of its own, with a queue's name as its payload. All
listeners are read by one process, whose CPU is a figure of its own: workers would need more.
"""

from __future__ import annotations

import argparse
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import NoReturn

import psycopg
from rich.console import Console
from rich.table import Table

from dataloader import embedded
from tools.programs import database

from .usage import cpu_sec, pss_mb, tree

CHANNEL = "dl_jobs"
NOTIFY = f"SELECT pg_notify('{CHANNEL}', 'load.cbr')".encode()
PATIENCE = 10.0
SETTINGS = {"fsync": "off", "logging_collector": "off"}  # the disk is not what is measured
SETTLE_SEC = 1.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: `rate` is wanted and `sent` is what came of it, both notifications/s; times in milliseconds."""

    sessions: int
    listeners: int
    rate: float
    sent: float
    server: float  # of one core
    readers: float  # of one core: the process that reads all listeners
    cost_ms: float | None  # of the server's CPU for a notification, above that of the idle server
    times_ms: tuple[float, ...]  # to the first listener: median, p99; medians: to the last one, to the commit's answer
    backend_mb: float


@dataclass(frozen=True, slots=True)
class Heard:
    """Seconds from the sending of a notification to its first listener, its last one, and the answer to its commit."""

    first: float
    last: float
    committed: float


class Sessions:
    """A session that notifies, and others of which some LISTEN: all are this process's."""

    def __init__(self, dsn: str, sessions: int, listeners: int) -> None:
        self._conns = [psycopg.connect(dsn, autocommit=True) for _ in range(sessions)]
        self._speaker = psycopg.connect(dsn, autocommit=True)
        self._heard = select.epoll()
        self._by_fd = {conn.fileno(): conn for conn in self._conns[:listeners]}
        for fd, conn in self._by_fd.items():
            conn.execute(f"LISTEN {CHANNEL}")
            self._heard.register(fd, select.EPOLLIN)
        self._heard.register(self._speaker.fileno(), select.EPOLLIN)

    def notify(self) -> Heard:
        """Notify, and read until all have heard it and the commit is answered."""
        sent = time.monotonic()
        self._speaker.pgconn.send_query(NOTIFY)
        missing, first, last, committed = len(self._by_fd), 0.0, 0.0, 0.0
        while missing or not committed:
            for fd, _ in self._heard.poll(PATIENCE, maxevents=64) or self._nobody(missing):
                last = time.monotonic() - sent
                if fd == self._speaker.fileno():
                    committed = committed or (last if self._is_answered() else 0.0)
                else:
                    first = first or last
                    missing -= len(list(self._by_fd[fd].notifies(timeout=0)))
        return Heard(first, last, committed)

    def _is_answered(self) -> bool:
        pgconn = self._speaker.pgconn
        pgconn.consume_input()
        while not pgconn.is_busy():
            if pgconn.get_result() is None:
                return True
        return False

    def _nobody(self, missing: int) -> NoReturn:
        raise TimeoutError(f"{missing} listeners have heard nothing within {PATIENCE:g} s")

    def close(self) -> None:
        """End all sessions."""
        for conn in (*self._conns, self._speaker):
            conn.close()
        self._heard.close()


def main() -> None:
    """Measure, and print a table."""
    given = _arguments()
    figures: list[Figure] = []
    most = max(sessions for sessions, _ in given.sessions)
    with database(SETTINGS | {"max_connections": str(most + 20)}) as (server, _):
        for size in given.sessions:
            sessions = Sessions(server.dsn, *size)
            time.sleep(SETTLE_SEC)
            idle = measure(server, sessions, size, 0, given.seconds)
            figures += [idle, *(measure(server, sessions, size, each, given.seconds, idle) for each in given.rates)]
            sessions.close()
    Console(width=150).print(table(figures))


def measure(
    server: embedded.Server,
    sessions: Sessions,
    size: tuple[int, int],
    rate: float,
    seconds: float,
    idle: Figure | None = None,
) -> Figure:
    """Notify so often for so many seconds."""
    pids = tree(server.process.pid)
    began, server_cpu, own_cpu = time.monotonic(), cpu_sec(pids), time.process_time()
    heard = list(_spoken(sessions, rate, began + seconds)) if rate else []
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    took = time.monotonic() - began
    busy, readers = (cpu_sec(pids) - server_cpu) / took, (time.process_time() - own_cpu) / took
    sent = len(heard) / took
    cost = (busy - (idle.server if idle else 0)) / sent * 1_000 if sent else None
    return Figure(*size, rate, sent, busy, readers, cost, _times(heard), pss_mb(pids) / size[0])


def _spoken(sessions: Sessions, rate: float, until: float) -> Iterator[Heard]:
    """Notify in step with a clock, one at a time: a server that does not keep up shows as a lower rate."""
    due = time.monotonic()
    while time.monotonic() < until:
        yield sessions.notify()
        due = max(due + 1 / rate, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _times(heard: list[Heard]) -> tuple[float, ...]:
    if not heard:
        return ()
    firsts = sorted(each.first for each in heard)
    p99 = firsts[int(len(firsts) * 0.99)]
    middles = (median(each.last for each in heard), median(each.committed for each in heard))
    return tuple(seconds * 1_000 for seconds in (median(firsts), p99, *middles))


def table(figures: list[Figure]) -> Table:
    """The figures for people."""
    shown = Table("sessions", "listen", "asked /s", "sent /s", "server, cores", "readers, cores", "server ms each")
    for more in ("first ms p50", "p99", "last ms p50", "commit ms p50", "MB a session"):
        shown.add_column(more)
    for each in figures:
        times = [f"{ms:.2f}" for ms in each.times_ms] or [""] * 4
        shown.add_row(
            f"{each.sessions:,}",
            f"{each.listeners:,}",
            f"{each.rate:g}",
            f"{each.sent:.0f}",
            f"{each.server:.3f}",
            f"{each.readers:.3f}",
            "" if each.cost_ms is None else f"{each.cost_ms:.2f}",
            *times,
            f"{each.backend_mb:.1f}",
        )
    return shown


def _size(text: str) -> tuple[int, int]:
    sessions, _, listeners = text.partition(":")
    return int(sessions), int(listeners or sessions)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fleet.listeners", description=__doc__)
    parser.add_argument(
        "sessions", nargs="+", type=_size, help="how many sessions, and how many of them LISTEN: 1000:20"
    )
    parser.add_argument("--rates", nargs="*", type=float, default=[20, 200], help="notifications/s (20 200)")
    parser.add_argument("--seconds", type=float, default=6, help="of each measurement (6)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
