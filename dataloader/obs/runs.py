"""A worker's runs as spans, linked to the request that triggered the job, and as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import UUID

import dataloader
from dataloader import log
from dataloader.obs import export
from dataloader.queue.job import End, Job, Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.trace import Link, Span

MESSAGE_LIMIT = 500  # characters of a span's status
# From a millisecond to a day: jobs are short or long.
BOUNDS_SEC = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600, 14_400, 86_400)
Report = Callable[[Outcome], None]


class Runs:
    """Reports each run of a worker as a span and as metrics, each where it is wanted. The SDK's threads send them."""

    _OFF: AbstractContextManager[Report] = nullcontext(lambda outcome: None)

    def __init__(self, spans: Spans | None, figures: Figures | None) -> None:
        self._spans, self._figures = spans, figures

    def learn(self, parents: Callable[[], Mapping[UUID, str]], waits: Callable[[], Mapping[UUID, float]]) -> None:
        """Keep what is wanted about the jobs that are about to run.

        `parents` gives their traceparents, `waits` the seconds for which they were due when they were claimed.
        """
        if self._spans:
            self._spans.parents = parents()
        if self._figures:
            self._figures.waits, self._figures.learned_at = waits(), monotonic()

    def run(self, job: Job) -> AbstractContextManager[Report]:
        """Report the run in the block; the block passes the run's outcome to the function that it gets."""
        return self._run(job) if self._spans or self._figures else self._OFF

    @contextmanager
    def _run(self, job: Job) -> Iterator[Report]:
        def report(outcome: Outcome) -> None:
            report_span(outcome)
            report_figures(outcome)

        span = self._spans.run(job) if self._spans else self._OFF
        figures = self._figures.run(job) if self._figures else self._OFF
        with span as report_span, figures as report_figures:
            yield report

    def close(self) -> None:
        """Send the last spans and figures, for export.FLUSH_SEC each at most."""
        if self._spans:
            self._spans.close()
        if self._figures:
            self._figures.close()


def start(worker: str) -> Runs:
    """The reports of a worker process; a log line says what prevents those that the environment asks for."""

    def figures() -> Figures:
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        return Figures(worker, PeriodicExportingMetricReader(export.exporter("metrics")))

    return Runs(export.start("traces", lambda: Spans(worker)), export.start("metrics", figures))


class Figures:
    """Durations, outcomes and waits of one worker's runs, and how many run now."""

    def __init__(self, worker: str, reader: Any) -> None:
        self._provider, meter = export.metering(worker, reader)
        bounds = {"unit": "s", "explicit_bucket_boundaries_advisory": BOUNDS_SEC}
        self._durations = meter.create_histogram("dataloader.run.duration", description="How long runs took", **bounds)
        self._latencies = meter.create_histogram(
            "dataloader.queue.latency", description="How long due jobs had waited at their start", **bounds
        )
        self._runs = meter.create_counter("dataloader.runs", unit="{run}", description="Runs by their outcome")
        self._running = meter.create_up_down_counter("dataloader.running", unit="{run}", description="Runs under way")
        self.waits: Mapping[UUID, float] = {}
        self.learned_at = 0.0

    @contextmanager
    def run(self, job: Job) -> Iterator[Report]:
        """Measure the run in the block."""
        labels = {"dataloader.queue": log.masked(job.queue), "dataloader.task": log.masked(job.task)}
        began = monotonic()

        def report(outcome: Outcome) -> None:
            ended = labels | {"dataloader.outcome": str(outcome.end)}
            self._durations.record(monotonic() - began, ended)
            self._runs.add(1, ended)

        if (waited := self.waits.get(job.job_id)) is not None:
            self._latencies.record(waited + began - self.learned_at, labels)
        self._running.add(1, labels)
        try:
            yield report
        finally:
            self._running.add(-1, labels)

    def close(self) -> None:
        """Send the last figures."""
        export.close(self._provider, "metrics")


class Spans:
    """The spans of one worker's runs."""

    def __init__(self, worker: str) -> None:
        """Set up the process's tracing. Raises ImportError without the extra, ValueError for a wrong variable."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        self._provider = TracerProvider(resource=export.resource(worker), shutdown_on_exit=False)
        self._provider.add_span_processor(_processor())
        trace.set_tracer_provider(self._provider)  # for the spans of pipelines
        self._tracer = self._provider.get_tracer(export.NAME, dataloader.version())
        self.parents: Mapping[UUID, str] = {}

    @contextmanager
    def run(self, job: Job) -> Iterator[Report]:
        """A trace of its own, linked to the trigger's: a job may run long after its trigger, and again."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        with self._tracer.start_as_current_span(
            job.task,
            context=Context(),
            kind=SpanKind.CONSUMER,
            links=_links(self.parents.get(job.job_id)),
            attributes={
                "dataloader.job_id": str(job.job_id),
                "dataloader.queue": job.queue,
                "dataloader.lock_key": job.lock_key,
                "dataloader.attempt": job.attempt,
                "dataloader.max_attempts": job.max_attempts,
            },
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield lambda outcome: _report(span, outcome)

    def close(self) -> None:
        """Send the last spans."""
        export.close(self._provider, "traces")


def _processor() -> SpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    class Masking(BatchSpanProcessor):
        """Masks secrets while the job runs: the SDK may send its batch during another job, with other secrets."""

        def on_end(self, span: ReadableSpan) -> None:
            super().on_end(_masked(span))

    return Masking(export.exporter("traces"))


def _links(parent: str | None) -> list[Link]:
    from opentelemetry.trace import Link, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if parent is None:
        return []
    span = get_current_span(TraceContextTextMapPropagator().extract({"traceparent": parent})).get_span_context()
    return [Link(span)] if span.is_valid else []


def _report(span: Span, outcome: Outcome) -> None:
    """Set the run's outcome. Its error is masked already; an error with a stack begins with the exception's type."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("dataloader.outcome", str(outcome.end))
    if outcome.end in (End.ERROR, End.PERMANENT, End.TIMEOUT):
        error = outcome.error or ""
        head = error.partition("\n")[0]
        kind = head.partition(":")[0]
        has_kind = outcome.end is End.ERROR and "\n" in error and kind.replace(".", "_").isidentifier()
        span.set_attribute("error.type", kind if has_kind else str(outcome.end))
        span.set_status(StatusCode.ERROR, head[:MESSAGE_LIMIT])
        span.add_event("exception", {"exception.message": head, "exception.stacktrace": error})


def _masked(span: ReadableSpan) -> ReadableSpan:
    """A copy without secrets; pipelines' own spans record exceptions unmasked."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Status

    def masked(attributes: Any) -> dict[str, Any]:
        return log.masked(dict(attributes or {}))

    return ReadableSpan(
        name=log.masked(span.name),
        context=span.get_span_context(),
        parent=span.parent,
        resource=span.resource,
        attributes=masked(span.attributes),
        events=[Event(log.masked(event.name), masked(event.attributes), event.timestamp) for event in span.events],
        links=span.links,
        kind=span.kind,
        status=Status(span.status.status_code, log.masked(span.status.description)),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
