"""ordered: the rate at which five workers empty an ordered queue, and a merged one, of jobs that do nothing.

The bare limit is the same farm on a plain queue with the same jobs, one call each. Jobs of the merged queue share 1,000
keys, those of the others have a key each, as in Lowkiq's own benchmark (100,000 blank jobs, 5 threads).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must
from dataloader.bench.place import Place, add, await_drained, clear, drained
from dataloader.queue import operations

JOBS = 20_000
KEYS = 1_000
WORKERS = 5
PLAIN: dict[str, Any] = {"ordered": False, "merge": False}
# The name of a line, the settings of its queue, the jobs' task and keys.
WAYS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("ordered, a key a call", {"ordered": True}, {"task": "bench.batch", "batch": 1}),
    ("ordered, 10 keys a call", {"ordered": True}, {"task": "bench.batch", "batch": 10}),
    (f"merged, {KEYS} keys", {"ordered": True, "merge": True}, {"task": "bench.batch", "batch": 1, "keys": KEYS}),
)


def measure(place: Place) -> Iterator[Line]:
    """A line for each of WAYS."""
    jobs = place.wish.scaled(JOBS, least=KEYS)
    for name, order, how in WAYS:
        keys = {"keys": how["keys"]} if "keys" in how else {}
        sides = [
            partial(_rate, place, jobs, order, how),
            partial(_rate, place, jobs, PLAIN, {"task": "bench.noop"} | keys),
        ]
        ours, plain = place.in_turns(f"ordered: {name}", *sides)
        facts = {"workers": WORKERS, "jobs": jobs, "bare": "the same jobs in a plain queue", **how}
        ms = 1_000 / (sum(ours) / len(ours))
        note = f"{ms:.3f} ms a job; bare: a plain queue"
        yield Line(
            "ordered", f"{name}, {WORKERS} workers", "jobs/s", ours, plain, Must(least=0.7, aim=1.0), note, facts
        )


def _rate(place: Place, jobs: int, order: dict[str, Any], how: dict[str, Any]) -> float:
    """Jobs per second of a new farm, warmed up, on a queue with these settings."""
    with Farm(place, WORKERS, place.wish.prefetch) as farm, place.connect(farm.schema) as conn:
        operations.set_order(conn, "bench", "bench", **PLAIN | order, batch=how.get("batch"))
        farm.warm(how["task"])
        add(conn, jobs, task=how["task"], keys=how.get("keys", 0))
        await_drained(conn, farm.check)
        rate = jobs / drained(conn, jobs)
        clear(conn)
    return rate
