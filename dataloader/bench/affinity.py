"""affinity: how often two workers load eight models for jobs in random order, against once for each model.

A worker keeps two models. A load takes 2 s and a job 20 ms, both times the scale of the bench at most. The last line is
the time of eight jobs, each with a model of its own, against the same farm in the order of its queue.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must
from dataloader.bench.place import SQL, Place, await_drained, clear, drained

JOBS = 400
MODELS = 8
WORKERS = 2
LOAD_SEC = 2.0
OFF = {"DL_AFFINITY": "off"}
# The name of a line, its settings, and the most loads for each model.
WAYS: tuple[tuple[str, dict[str, str], float | None], ...] = (
    ("in the queue's order", OFF, None),
    ("DL_LOOKAHEAD 50", {}, 3.0),
    ("DL_LOOKAHEAD 400", {"DL_LOOKAHEAD": "400"}, 1.5),
)


def measure(place: Place) -> Iterator[Line]:
    """A line for each of WAYS, and one for models of one job each."""
    load_sec = LOAD_SEC * min(1.0, place.wish.scale)
    for name, settings, most in WAYS:
        runs = [_run(place, JOBS, load_sec, settings) for _ in range(place.wish.rounds if settings != OFF else 1)]
        seconds = [seconds for _, seconds in runs]
        note = f"loads of {MODELS} models for {JOBS} jobs; {sum(seconds) / len(seconds):.1f} s in all"
        facts = {"workers": WORKERS, "jobs": JOBS, "load_sec": load_sec, "seconds": seconds, **settings}
        loads = [float(loads) for loads, _ in runs]
        must = Must(most=most, aim=1.0) if most else None
        yield Line("affinity", name, "loads", loads, [float(MODELS)] * len(loads), must, note, facts)
    sides = [partial(_seconds, place, load_sec, settings) for settings in ({}, OFF)]
    on, off = place.in_turns("affinity: a job each", *sides)
    yield Line("affinity", f"{MODELS} models of a job each", "s", on, off, Must(most=1.03), "bare: the queue's order")


def _seconds(place: Place, load_sec: float, settings: dict[str, str]) -> float:
    return _run(place, MODELS, load_sec, settings, models=MODELS)[1]


def _run(place: Place, jobs: int, load_sec: float, settings: dict[str, str], models: int = MODELS) -> tuple[int, float]:
    """The number of loads and the seconds of a new farm that does these jobs; their order is random, and the same."""
    with Farm(place, WORKERS, settings=settings) as farm, place.connect(farm.schema) as conn:
        args = json.dumps({"load_sec": load_sec, "sec": load_sec / 100})
        conn.execute(SQL["models"], {"jobs": jobs, "models": models, "args": args, "is_random": jobs > models})
        await_drained(conn, farm.check)
        seconds = drained(conn, jobs)
        loads = farm.log.read_bytes().count(b'"worker.resource.prepared"')
        clear(conn)
    return loads, seconds
