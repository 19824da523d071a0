"""How long the server takes for each address, over HTTP from this machine, on a connection that stays open.

AT_ONCE addresses are asked in rounds, each as often as an open page refreshes itself: so answers that pages share for a
second are made anew. Then the next AT_ONCE: twenty open pages are many for one process of the API, 400 are none's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from .addresses import Address

REFRESH_SEC = 2.0
AT_ONCE = 20
PART = {"HX-Request": "true"}
_Asked = tuple[str, str, dict[str, str]]  # what, its path, headers


class Timed(NamedTuple):
    """The times (ms) of an address, in the order of the rounds; `status` and `size` (bytes) are of the last answer."""

    what: str
    status: int
    size: int
    times: list[float]

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self.times)

    @property
    def p95(self) -> float:
        """The time within which nineteen of twenty answers came."""
        return sorted(self.times)[max(0, -(-len(self.times) * 95 // 100) - 1)]


def measured(port: int, addresses: Iterable[Address], rounds: int, every_sec: float = REFRESH_SEC) -> list[Timed]:
    """Ask each address once for nothing, then `rounds` times, a round not more often than `every_sec`."""
    asked = [(address.name, address.path, {}) for address in addresses]
    asked += [(f"{address.name} (part)", address.path, PART) for address in addresses if address.is_page]
    client = _Client(port)
    found: list[Timed] = []
    for first in range(0, len(asked), AT_ONCE):
        found += _of_some(client, asked[first : first + AT_ONCE], rounds, every_sec)
    client.close()
    return found


def _of_some(client: _Client, asked: Sequence[_Asked], rounds: int, every_sec: float) -> list[Timed]:
    for _, path, headers in asked:
        client.ask(path, headers)
    times: dict[str, list[float]] = {what: [] for what, _, _ in asked}
    last: dict[str, tuple[int, int]] = {}
    for _ in range(rounds):
        due = time.monotonic() + every_sec
        for what, path, headers in asked:
            taken, *last[what] = client.ask(path, headers)  # type: ignore[assignment]
            times[what].append(taken)
        time.sleep(max(0.0, due - time.monotonic()))
    return [Timed(what, *last[what], times[what]) for what in times]


class _Client:
    """One connection; opened anew when the server has closed it meanwhile."""

    def __init__(self, port: int) -> None:
        self._conn = HTTPConnection("127.0.0.1", port, timeout=30)
        self.close = self._conn.close

    def ask(self, path: str, headers: dict[str, str]) -> tuple[float, int, int]:
        """The milliseconds to the last byte, the status, the size of the body."""
        try:
            return self._ask(path, headers)
        except (HTTPException, ConnectionError):
            self._conn.close()
            return self._ask(path, headers)

    def _ask(self, path: str, headers: dict[str, str]) -> tuple[float, int, int]:
        began = time.perf_counter()
        self._conn.request("GET", path, headers=headers)
        answer = self._conn.getresponse()
        size = len(answer.read())
        return (time.perf_counter() - began) * 1_000, answer.status, size


def faults(found: Sequence[Timed], most_ms: float) -> list[str]:
    """PURE: what is wrong: an answer that is none, a p95 above `most_ms`."""
    return [
        *(
            f"{_short(each.what)} answers {each.status}: name its query in QUERIES"
            for each in found
            if each.status >= 400 and not _is_refused(each)
        ),
        *(f"{_short(each.what)}: p95 is {each.p95:.0f} ms, above {most_ms:g}" for each in found if each.p95 > most_ms),
    ]


def _is_refused(timed: Timed) -> bool:
    """PURE: too many jobs are not sorted by key: a clear 400, and soon."""
    return timed.status == 400 and "sort=key" in timed.what


def table(found: Iterable[Timed]) -> str:
    """PURE: the times in Markdown, the slowest first."""
    head = "| GET | p50 ms | p95 ms | max ms | min ms | KB |\n|---|---:|---:|---:|---:|---:|"
    rows = (
        f"| `{_short(each.what)}` | {each.p50:.1f} | {each.p95:.1f} | {max(each.times):.1f} | {min(each.times):.1f}"
        f" | {each.size / 1_000:.0f} |"
        for each in sorted(found, key=lambda each: -each.p95)
    )
    return "\n".join((head, *rows))


def _short(what: str, most: int = 90) -> str:
    return (what if len(what) <= most else f"{what[: most - 20]}…{what[-19:]}").replace("|", "%7C")
