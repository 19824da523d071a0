"""handover: the time from the end of a job to the start of the next one of its key, by the jobs' own clocks."""

from __future__ import annotations

from collections.abc import Iterator

from dataloader.bench.farm import Farm
from dataloader.bench.line import Line, Must, gaps, percentile
from dataloader.bench.marks import read
from dataloader.bench.place import BenchError, Place, add, await_drained, clear

JOBS = 300
JOB_SEC = 0.005  # long enough for the other worker to wait for the key
WORKERS = 2


def measure(place: Place) -> Iterator[Line]:
    """p50 and p99; a sample is the percentile of one round."""
    jobs = place.wish.scaled(JOBS, least=10)
    rounds = []
    with place.steps("handover", place.wish.rounds) as step:
        for _ in range(place.wish.rounds):
            rounds.append(_gaps(place, jobs))
            step()
    facts = {"jobs": jobs, "workers": WORKERS, "job_ms": JOB_SEC * 1_000}
    for percent, must in ((50, Must(most=3, aim=1)), (99, None)):
        ours = [percentile(sample, percent) * 1_000 for sample in rounds]
        yield Line("handover", f"next job of a hot key, p{percent}", "ms", ours, must=must, facts=facts)


def _gaps(place: Place, jobs: int) -> list[float]:
    marks = place.folder / "handover.marks"
    marks.write_bytes(b"")
    with Farm(place, WORKERS, marks=marks) as farm, place.connect(farm.schema) as conn:
        farm.warm()
        add(conn, jobs, task="bench.mark", keys=1, sleep=JOB_SEC)
        await_drained(conn, farm.check)
        clear(conn)
    found = gaps([(mark.start, mark.end) for mark in read(marks)])
    if len(found) != jobs - 1 or min(found) < 0:
        raise BenchError(f"{len(found) + 1} of {jobs} jobs of one key ran, the closest {min(found):.6f} s apart")
    return found
