"""Traces (OpenTelemetry): each run is a span, linked to the request that triggered its job. The extra `otel`.

Off unless the environment names an exporter or its address; while traces are off, the farm imports nothing of
OpenTelemetry and asks the database for no traceparent. The SDK has a thread, so the worker sets it up after the fork.
Clients import this module for `current`, so the module itself imports nothing large.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from uuid import UUID

import dataloader
from dataloader import otel
from dataloader.queue.job import End, Job, Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.trace import Link, Span

MESSAGE_LIMIT = 500  # characters of a span's status
_WHERE = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
Report = Callable[[Outcome], None]


def are_wanted() -> bool:
    """True when the environment asks for traces, by the variables that every OpenTelemetry SDK reads."""
    if otel.is_disabled() or otel.said("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(os.environ.get(name) for name in _WHERE)


def current() -> str | None:
    """The W3C traceparent of the span under way here, for a request that triggers a job; None where there is none."""
    opentelemetry = sys.modules.get("opentelemetry.trace")  # a program without this import has no span
    if opentelemetry is None:
        return None
    span = opentelemetry.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else None


class Untraced:
    """Traces are off."""

    is_on = False
    _run: AbstractContextManager[Report] = nullcontext(lambda outcome: None)

    def learn(self, parents: Mapping[UUID, str]) -> None:
        """Keep the traceparents of the jobs that are about to run."""

    def run(self, job: Job) -> AbstractContextManager[Report]:
        """A span for the run in the block; the block reports the run's outcome to it."""
        return self._run

    def close(self) -> None:
        """Send the last spans, for otel.FLUSH_SEC at most."""


class Traced(Untraced):
    """The spans of one worker's runs, sent by the SDK's thread."""

    is_on = True

    def __init__(self, worker: str) -> None:
        """Set up the process's tracing. Raises ImportError without the extra, ValueError for a wrong variable."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        self._provider = TracerProvider(resource=otel.resource(worker), shutdown_on_exit=False)
        self._provider.add_span_processor(_processor())
        trace.set_tracer_provider(self._provider)  # for the spans of pipelines
        self._tracer = self._provider.get_tracer(otel.NAME, dataloader.version())
        self._parents: Mapping[UUID, str] = {}

    def learn(self, parents: Mapping[UUID, str]) -> None:
        self._parents = parents

    @contextmanager
    def run(self, job: Job) -> Iterator[Report]:
        """A trace of its own, linked to the trigger's: a job may run long after its trigger, and again."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        with self._tracer.start_as_current_span(
            job.task,
            context=Context(),
            kind=SpanKind.CONSUMER,
            links=_links(self._parents.get(job.job_id)),
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
        otel.close(self._provider, "traces")


def start(worker: str) -> Untraced:
    """The traces of a worker process, if the environment asks for them; a log line says what prevents them."""
    if not are_wanted():
        return Untraced()
    import structlog

    try:
        return Traced(worker)
    except ImportError as e:
        why = f"{e}: install 'dataloader-farm[otel]'"
    except Exception as e:  # the SDK's complaint about a variable
        why = str(e)
    structlog.get_logger("traces").warning("traces.off", error=why)
    return Untraced()


def _processor() -> SpanProcessor:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    class Masking(SpanProcessor):
        """Masks secrets while the job runs: the SDK may send its batch during another job, with other secrets."""

        def __init__(self, inner: SpanProcessor) -> None:
            self._inner = inner

        def on_end(self, span: ReadableSpan) -> None:
            self._inner.on_end(_masked(span))

        def shutdown(self) -> None:
            self._inner.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return self._inner.force_flush(timeout_millis)

    return Masking(BatchSpanProcessor(otel.exporter("traces")))


def _links(parent: str | None) -> list[Link]:
    from opentelemetry.trace import Link, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if parent is None:
        return []
    span = get_current_span(TraceContextTextMapPropagator().extract({"traceparent": parent})).get_span_context()
    return [Link(span)] if span.is_valid else []


def _report(span: Span, outcome: Outcome) -> None:
    """Set the run's outcome. Its error is masked already."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("dataloader.outcome", str(outcome.end))
    if outcome.end in (End.ERROR, End.PERMANENT, End.TIMEOUT):
        error = outcome.error or ""
        head = error.partition("\n")[0]
        span.set_attribute("error.type", _kind(outcome, head))
        span.set_status(StatusCode.ERROR, head[:MESSAGE_LIMIT])
        span.add_event("exception", {"exception.message": head, "exception.stacktrace": error})


def _kind(outcome: Outcome, head: str) -> str:
    """The exception's type, which an error with a stack begins with; else how the run ended."""
    kind = head.partition(":")[0]
    has_stack = outcome.end is End.ERROR and "\n" in (outcome.error or "")
    return kind if has_stack and kind.replace(".", "_").isidentifier() else str(outcome.end)


def _masked(span: ReadableSpan) -> ReadableSpan:
    """A copy without secrets; pipelines' own spans record exceptions unmasked."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Status

    from dataloader import log

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
