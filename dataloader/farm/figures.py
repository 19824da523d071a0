"""Metrics of a worker's runs by OpenTelemetry (docs/traces.md): durations, outcomes, waits and what runs now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dataloader import log
from dataloader.log import telemetry
from dataloader.queue.job import Job, Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

Report = Callable[[Outcome], None]
# From a millisecond to a day: jobs are short or long.
BOUNDS_SEC = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600, 14_400, 86_400)


class Unmeasured:
    """Metrics are off."""

    is_on = False
    _run: AbstractContextManager[Report] = nullcontext(lambda outcome: None)

    def learn(self, waits: Mapping[UUID, float]) -> None:
        """Keep for how many seconds the jobs that are about to run were due when they were claimed."""

    def run(self, job: Job) -> AbstractContextManager[Report]:
        """Measure the run in the block; the block reports the run's outcome."""
        return self._run

    def close(self) -> None:
        """Send the last figures, for otel.FLUSH_SEC at most."""


class Measured(Unmeasured):
    """The figures of one worker's runs, sent by the SDK's thread."""

    is_on = True

    def __init__(self, worker: str, reader: MetricReader) -> None:
        self._provider = telemetry.provider(worker, reader)
        meter = telemetry.meter(self._provider)
        bounds = {"unit": "s", "explicit_bucket_boundaries_advisory": BOUNDS_SEC}
        self._took = meter.create_histogram("dataloader.run.duration", description="How long runs took", **bounds)
        self._waited = meter.create_histogram(
            "dataloader.queue.latency", description="How long due jobs had waited at their start", **bounds
        )
        self._runs = meter.create_counter("dataloader.runs", unit="{run}", description="Runs by their outcome")
        self._running = meter.create_up_down_counter("dataloader.running", unit="{run}", description="Runs under way")
        self._waits: Mapping[UUID, float] = {}

    def learn(self, waits: Mapping[UUID, float]) -> None:
        self._waits, self._learned_at = waits, monotonic()

    @contextmanager
    def run(self, job: Job) -> Iterator[Report]:
        named = {"dataloader.queue": log.masked(job.queue), "dataloader.task": log.masked(job.task)}
        began = monotonic()
        if (waited := self._waits.get(job.job_id)) is not None:
            self._waited.record(waited + began - self._learned_at, named)
        self._running.add(1, named)
        try:
            yield lambda outcome: self._report(outcome, monotonic() - began, named)
        finally:
            self._running.add(-1, named)

    def close(self) -> None:
        telemetry.close(self._provider)

    def _report(self, outcome: Outcome, seconds: float, named: dict[str, Any]) -> None:
        told = {**named, "dataloader.outcome": str(outcome.end)}
        self._took.record(seconds, told)
        self._runs.add(1, told)


def start(worker: str) -> Unmeasured:
    """The metrics of a worker process, if the environment asks for them; a log line says what prevents them."""

    def measured() -> Measured:
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        return Measured(worker, PeriodicExportingMetricReader(telemetry.exporter()))

    return telemetry.started(measured, Unmeasured())
