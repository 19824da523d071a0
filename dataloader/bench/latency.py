"""latency: the time from the commit of an insert to the start of its job on an idle farm, beside a bare LISTEN loop.

Farm and loop run all the time, and take turns. The clock starts after the insert, right before COMMIT is sent. It
stops when the job's function begins, or when the bare loop has its row. The bare loop's table has the contract's
triggers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from dataloader.bench import bare
from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must, percentile
from dataloader.bench.marks import WHERE, Pipe, now
from dataloader.bench.place import PATIENCE, SQL, BenchError, Place, clear
from dataloader.queue import db

SAMPLES = 200
WORKERS = 2
SETTLED_SEC = (0.02, 0.03)  # the pause before a job: all workers wait again, and no pause is in step with a timer
_MUST = {50: Must(most=1.3, aim=1.1), 90: None, 99: Must(most=1.5, aim=1.1)}


def measure(place: Place) -> Iterator[Line]:
    """A line for each percentile; a sample is the percentile of one round."""
    samples = place.wish.scaled(SAMPLES, least=10)
    sides = list(zip(*_rounds(place, samples), strict=True))
    for percent, must in _MUST.items():
        ours_ms, bare_ms = ([percentile(sample, percent) for sample in side] for side in sides)
        facts = {"samples": samples, "workers": WORKERS}
        yield Line("latency", f"commit to start, p{percent}", "ms", ours_ms, bare_ms, must, facts=facts)


def _rounds(place: Place, samples: int) -> Iterator[tuple[list[float], list[float]]]:
    """For each round the milliseconds of our jobs and of the bare loop's."""
    pipe = Pipe(place.folder / "latency.pipe")
    schema = place.bare("contract")
    with (
        Farm(place, WORKERS, marks=pipe.path) as farm,
        place.connect(farm.schema) as our_conn,
        place.connect(schema) as bare_conn,
        bare.process("listen", **{bare.DSN: place.dsn_of(schema), WHERE: str(pipe.path)}),
        place.steps("latency", place.wish.rounds * samples) as step,
    ):
        farm.warm()
        _one(our_conn, pipe, 0)
        for _ in range(place.wish.rounds):
            ours: list[float] = []
            others: list[float] = []
            for number in range(samples):
                ours.append(_one(our_conn, pipe, 2 * number))
                others.append(_one(bare_conn, pipe, 2 * number + 1))
                step()
            yield ours, others
        clear(our_conn)
        clear(bare_conn)
    pipe.close()


def _one(conn: db.Connection, pipe: Pipe, number: int) -> float:
    """Milliseconds from the commit to the start of one job."""
    time.sleep(random.uniform(*SETTLED_SEC))  # noqa: S311  jitter
    conn.execute("BEGIN")
    conn.execute(SQL["insert_one"], {"n": number})
    sent = now()
    conn.execute("COMMIT")
    mark = pipe.next(PATIENCE)
    if mark is None or mark.number != number:
        raise BenchError(f"job {number} was not started, but {mark}")
    return (mark.start - sent) * 1_000
