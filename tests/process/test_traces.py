"""Traces: a run is a span of its own, linked to what triggered its job; without the wish for them they cost nothing."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from farming import Farm, until
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from receiver import Receiver

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "canary-of-the-args"
EXPORTERS = ("otel_metrics_exporter", "otel_traces_exporter")
OFF = dict.fromkeys((*EXPORTERS, "otel_exporter_otlp_endpoint", "otel_exporter_otlp_traces_endpoint"), "")


class Collector(Receiver):
    def bodies(self, of: str) -> list[bytes]:
        return [got.body for got in self.got if got.path == f"/v1/{of}"]

    def spans(self) -> list[tuple[Any, dict[str, Any]]]:
        """Each span with the attributes of its resource."""
        found = []
        for body in self.bodies("traces"):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found += [(span, attributes(resource.resource)) for span in scope.spans]
        return found

    def metrics(self) -> dict[str, Any]:
        found = {}
        for body in self.bodies("metrics"):
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource.scope_metrics:
                    found |= {metric.name: metric for metric in scope.metrics}
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(holder: Any) -> dict[str, Any]:
    values = {item.key: item.value for item in holder.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def test_runs_are_linked_spans_with_masked_errors_and_their_figures_are_sent(farm: Farm, collector: Collector) -> None:
    """One worker claims several at once here; each attempt has a span."""
    on = {"otel_metrics_exporter": "otlp", "otel_exporter_otlp_endpoint": collector.url}
    program = farm.ready(workers=1, prefetch=10, **OFF | on)
    linked = farm.enqueue("traced", args={"password": SECRET}, trace=f"00-{TRACE}-{SPAN}-01")
    fails = {"args": {"password": SECRET, "fails": True}, "max_attempts": 1}
    failed = [farm.enqueue("traced", trace=trace, **fails) for trace in (None, "nonsense")]
    farm.wait(linked, "succeeded")
    for job in failed:
        farm.wait(job, "failed")
    assert program.stop() == 0
    runs = {
        attributes(span)["dataloader.job_id"]: (span, of) for span, of in collector.spans() if span.name == "traced"
    }
    inside = {span.parent_span_id: span for span, _ in collector.spans() if span.name == "inside"}
    assert len(runs) == len(inside) == 3
    run, resource = runs[str(linked)]
    assert resource["service.name"] == "dataloader"
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in run.links] == [(TRACE, SPAN)]
    assert run.trace_id.hex() != TRACE
    assert not run.parent_span_id
    assert run.kind == run.SPAN_KIND_CONSUMER
    facts = {name.removeprefix("dataloader."): value for name, value in attributes(run).items()}
    assert facts | {"job_id": str(linked), "queue": "q", "attempt": 1, "outcome": "done"} == facts
    span = inside[run.span_id]
    assert span.trace_id == run.trace_id
    assert farm.job(linked)["progress"]["current"][:-1] == f"00-{run.trace_id.hex()}-{span.span_id.hex()}-0"
    assert attributes(span) == {"password": "***"}
    for job in failed:
        run, _ = runs[str(job)]
        assert not run.links
        assert run.status.code == run.status.STATUS_CODE_ERROR
        assert run.status.message == "ValueError: no login with password=***"
        assert attributes(run)["error.type"] == "ValueError"
        (event,) = run.events
        assert "Traceback" in attributes(event)["exception.stacktrace"]
        assert attributes(inside[run.span_id].events[0])["exception.type"] == "ValueError"

    found = collector.metrics()
    outcomes = found["dataloader.runs"].sum.data_points
    assert {attributes(point)["dataloader.outcome"]: point.as_int for point in outcomes} == {"done": 1, "error": 2}
    (waited,) = found["dataloader.queue.latency"].histogram.data_points
    assert (waited.count, attributes(waited)) == (3, {"dataloader.queue": "q", "dataloader.task": "traced"})
    assert sorted(point.count for point in found["dataloader.run.duration"].histogram.data_points) == [1, 2]
    assert [point.as_int for point in found["dataloader.running"].sum.data_points] == [0]
    assert SECRET.encode() not in b"".join(got.body for got in collector.got)


def test_a_collector_that_hangs_delays_no_drain(farm: Farm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        on = {"otel_exporter_otlp_endpoint": f"http://127.0.0.1:{deaf.getsockname()[1]}"}
        program = farm.ready(workers=1, **OFF | on)
        farm.wait(farm.enqueue("traced", args={"password": SECRET}), "succeeded")
        before = time.monotonic()
        assert program.stop() == 0
        assert time.monotonic() - before < 8, "an exporter waits for ten seconds"


def test_unwanted_traces_cost_nothing_and_impossible_ones_are_told(farm: Farm) -> None:
    program = farm.ready(workers=1, **OFF)
    assert farm.wait(farm.enqueue("untraced"), "succeeded")["progress"]["modules"] == []
    program.stop()
    (event,) = farm.ready(workers=1, **OFF | {"otel_traces_exporter": "pigeon"}).logged("traces.off")
    assert "there is no exporter 'pigeon'" in event["error"]


def test_an_api_sends_the_figures_of_its_scrapes(farm: Farm, collector: Collector, free_port: int) -> None:
    farm.enqueue("waits for ever")
    on = {"otel_metrics_exporter": "otlp", "otel_metric_export_interval": 100}
    program = farm.api(free_port, **OFF | on | {"otel_exporter_otlp_endpoint": collector.url})
    until(lambda: "dl_jobs" in collector.metrics(), "the figures of the farm")
    points = collector.metrics()["dl_jobs"].gauge.data_points
    assert {attributes(point)["status"]: point.as_double for point in points} == {"queued": 1, "running": 0, "dead": 0}
    assert program.stop() == 0
