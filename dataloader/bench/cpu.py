"""cpu: 400 jobs of 20 ms of pure Python on two workers, against two bare processes with the same work and no queue.

Jobs are claimed one by one, then with prefetch. The time runs from the first start to the last end, by the clocks of
the processes that burn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from dataloader.bench import bare
from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must
from dataloader.bench.marks import read
from dataloader.bench.pipelines import rounds_for
from dataloader.bench.place import BenchError, Place, add, await_drained, clear

JOBS = 400
JOB_SEC = 0.020
PROCESSES = 2


def measure(place: Place) -> Iterator[Line]:
    """A line for each way to claim jobs."""
    burn, jobs = rounds_for(JOB_SEC), place.wish.scaled(JOBS, least=20) // PROCESSES * PROCESSES
    for prefetch in (1, place.wish.prefetch):
        ours, others = place.in_turns(
            "cpu", partial(_farm_rate, place, burn, jobs, prefetch), partial(_bare_rate, burn, jobs)
        )
        facts = {"jobs": jobs, "workers": PROCESSES, "rounds_of_burn": burn, "prefetch": prefetch}
        name = f"jobs of {JOB_SEC * 1_000:g} ms, {PROCESSES} workers" + (f", prefetch {prefetch}" * (prefetch > 1))
        yield Line("cpu", name, "jobs/s", ours, others, Must(least=0.96, aim=0.99), facts=facts)


def _farm_rate(place: Place, burn: int, jobs: int, prefetch: int) -> float:
    marks = place.folder / "cpu.marks"
    with Farm(place, PROCESSES, prefetch, marks) as farm, place.connect(farm.schema) as conn:
        farm.warm()
        marks.write_bytes(b"")
        add(conn, jobs, task="bench.mark", burn=burn)
        await_drained(conn, farm.check)
        clear(conn)
    found = read(marks)
    if len(found) != jobs:
        raise BenchError(f"{len(found)} of {jobs} jobs ran")
    return jobs / (max(mark.end for mark in found) - min(mark.start for mark in found))


def _bare_rate(burn: int, jobs: int) -> float:
    with ExitStack() as stack:
        each = jobs // PROCESSES
        burning = [stack.enter_context(bare.process("burn", str(burn), str(each))) for _ in range(PROCESSES)]
        for process in burning:
            bare.order(process)
        times = [tuple(map(float, bare.answer(process).split())) for process in burning]
    return jobs / (max(end for _, end in times) - min(start for start, _ in times))
