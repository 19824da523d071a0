"""Exports to OpenTelemetry: a worker's runs as spans and figures, and the figures of /metrics of an API process.

The variables that every OpenTelemetry SDK reads choose the data and the receiver.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.metadata import entry_points
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import UUID

import structlog

import dataloader
from dataloader import log
from dataloader.queue.job import End, Job, Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, Span
    from prometheus_client.core import Metric, Sample

NAME = "dataloader"  # of the service, where OTEL_SERVICE_NAME gives none, and of tracer and meter
FLUSH_SEC = 2.0  # for the last spans and figures of a process; less than DL_KILL_GRACE_SEC by default
Signal = Literal["traces", "metrics"]
_HTTP = "otlp_proto_http"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
T = TypeVar("T")
MESSAGE_LIMIT = 500  # characters of a span's status
# From a millisecond to a day: jobs are short or long.
BOUNDS_SEC = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3_600, 14_400, 86_400)
Report = Callable[[Outcome], object]
Collect = Callable[[], Iterable["Metric"]]


def is_wanted(signal: Signal) -> bool:
    """True when the environment asks for this signal. An endpoint alone asks for traces, but for no metrics."""
    exporter = _exporter_name(signal)
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    return bool(exporter) or (signal == "traces" and any(os.environ.get(name) for name in _ENDPOINTS))


def _started(signal: Signal, make: Callable[[], T]) -> T | None:
    """The result of `make` where this signal is wanted, else None; a log line gives the reason if `make` fails."""
    if not is_wanted(signal):
        return None
    try:
        return make()
    except ImportError as e:
        reason = f"{e}: install 'dataloader-farm[otel]'"
    except Exception as e:  # the SDK's complaint about a variable
        reason = str(e)
    logger = structlog.get_logger(signal)
    if signal == "traces":
        logger.warning("traces.off", error=reason)
    else:
        logger.warning("metrics.off", error=reason)
    return None


def _exporter(signal: Signal) -> Any:
    """The exporter that the environment names; by default OTLP over HTTP.

    Raises ImportError without the extra, ValueError for an unknown name.
    """
    given = _exporter_name(signal)
    name = _HTTP if given in ("", "otlp") else given
    known = {point.name: point for point in entry_points(group=f"opentelemetry_{signal}_exporter")}
    if name in known:
        return known[name].load()()
    if name == _HTTP:
        raise ImportError("there is no exporter for OTLP over HTTP")
    names = ", ".join(["otlp", *sorted(known)])
    raise ValueError(f"OTEL_{signal.upper()}_EXPORTER: there is no exporter {given!r}; there are {names}")


def _resource(instance: str) -> Any:
    """The SDK's description of this process, which `instance` names. Raises ImportError without the extra."""
    from opentelemetry.sdk.resources import Resource

    attributes: dict[str, Any] = {
        "service.instance.id": instance,
        "host.name": platform.node(),
        "process.pid": os.getpid(),
    }
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = NAME
    return Resource.create(attributes)


def _metering(instance: str, reader: Any, **options: Any) -> tuple[Any, Any]:
    """A provider of metrics of this process, which sends them by `reader` or to the exporter, and the meter."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = reader or PeriodicExportingMetricReader(_exporter("metrics"), **options)
    provider = MeterProvider([reader], resource=_resource(instance), shutdown_on_exit=False)
    return provider, provider.get_meter(NAME, dataloader.version())


def _exporter_name(signal: Signal) -> str:
    return os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()


# --- a worker ---


class Runs:
    """Reports each run of a worker as a span and as metrics, each where it is wanted. The SDK's threads send them."""

    _OFF: AbstractContextManager[Report] = nullcontext(lambda outcome: None)

    def __init__(self, *parts: Spans | Figures) -> None:
        self._parts = parts

    def learn(self, parents: Callable[[], Mapping[UUID, str]], waits: Callable[[], Mapping[UUID, float]]) -> None:
        """Keep what is wanted about the jobs that are about to run.

        `parents` gives their traceparents, `waits` the seconds for which they were due when they were claimed.
        """
        for part in self._parts:
            if isinstance(part, Spans):
                part.parents = parents()
            else:
                part.waits, part.learned_at = waits(), monotonic()

    def run(self, job: Job) -> AbstractContextManager[Report]:
        """Report the run in the block; the block passes the run's outcome to the function that it gets."""
        return self._run(job) if self._parts else self._OFF

    @contextmanager
    def _run(self, job: Job) -> Iterator[Report]:
        with ExitStack() as stack:
            reports = [stack.enter_context(part.run(job)) for part in self._parts]
            yield lambda outcome: [report(outcome) for report in reports]

    def close(self) -> None:
        """Send the last spans and figures, for FLUSH_SEC each at most."""
        for part in self._parts:
            _close(part.provider)


def start_runs(worker: str) -> Runs:
    """The reports of a worker process; a log line says what prevents those that the environment asks for."""
    spans = _started("traces", lambda: Spans(worker))
    figures = _started("metrics", lambda: Figures(worker))
    return Runs(*(part for part in (spans, figures) if part))


def _close(provider: Any) -> None:
    """Send what a provider still has, for FLUSH_SEC at most: a collector that hangs delays no stop."""
    ending = threading.Thread(target=provider.shutdown, name="telemetry", daemon=True)
    ending.start()
    ending.join(FLUSH_SEC)


class Figures:
    """Durations, outcomes and waits of one worker's runs, and how many run now."""

    def __init__(self, worker: str, reader: Any = None) -> None:
        self.provider, meter = _metering(worker, reader)
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


class Spans:
    def __init__(self, worker: str) -> None:
        """Set up the process's tracing. Raises ImportError without the extra, ValueError for a wrong variable."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        class Masking(BatchSpanProcessor):
            """Masks secrets while the job runs: the SDK may send its batch during another job, with other secrets."""

            def on_end(self, span: ReadableSpan) -> None:
                super().on_end(_masked(span))

        self.provider = TracerProvider(resource=_resource(worker), shutdown_on_exit=False)
        self.provider.add_span_processor(Masking(_exporter("traces")))
        trace.set_tracer_provider(self.provider)  # for the spans of pipelines
        self._tracer = self.provider.get_tracer(NAME, dataloader.version())
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


# --- the API ---
# The names are those of /metrics. The SDK accepts no finished histogram, so its parts are sums of their own, as in
# Prometheus' text: `_bucket`, `_count` and `_sum`.


class Sender:
    """Sends a collector's figures every OTEL_METRIC_EXPORT_INTERVAL milliseconds, from a thread of its own."""

    def __init__(self, collect: Collect, reader: Any = None) -> None:
        """Begin to send. Raises ImportError without the extra, ValueError for a wrong variable."""
        interval = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or "60000"
        if not interval.isdecimal() or not int(interval):
            raise ValueError("OTEL_METRIC_EXPORT_INTERVAL should be milliseconds, such as 60000")
        # The SDK's own thread could not make the instruments of new names before it collects.
        name = f"{platform.node()}:{os.getpid()}"
        self._provider, self._meter = _metering(name, reader, export_interval_millis=inf)
        self._collect, self._interval_sec = collect, int(interval) / 1_000
        self._samples: dict[str, list[Sample]] = {}
        self._is_over = threading.Event()
        threading.Thread(target=self._send, name="figures", daemon=True).start()

    def close(self) -> None:
        """Send the last figures, for FLUSH_SEC at most."""
        self._is_over.set()
        _close(self._provider)

    def renew(self) -> None:
        """Collect the figures; each new name gets an instrument."""
        samples: dict[str, list[Sample]] = {name: [] for name in self._samples}  # a name keeps its one instrument
        for family in self._collect():
            is_sum = family.type in ("counter", "histogram")
            make = self._meter.create_observable_counter if is_sum else self._meter.create_observable_gauge
            for sample in family.samples:
                if sample.name not in samples:
                    make(sample.name, callbacks=[self._observing(sample.name)], description=family.documentation)
                samples.setdefault(sample.name, []).append(sample)
        self._samples = samples

    def _observing(self, name: str) -> Callable[[Any], list[Any]]:
        from opentelemetry.metrics import Observation

        return lambda _: [Observation(sample.value, sample.labels) for sample in self._samples.get(name, ())]

    def _send(self) -> None:
        while not self._is_over.wait(self._interval_sec):
            try:
                self.renew()
                self._provider.force_flush()
            except Exception as e:  # the next interval may do better
                structlog.get_logger("metrics").warning("metrics.unsent", error=type(e).__name__)


def start_sender(collect: Collect) -> Sender | None:
    """Send these figures from now on, if the environment asks for it; None where it does not, or it cannot work."""
    return _started("metrics", lambda: Sender(collect))
