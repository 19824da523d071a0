"""Metrics by OpenTelemetry, read by the SDK's reader in memory; without the wish for them they cost nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
from claimed import job
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dataloader.obs import telemetry
from dataloader.queue.job import End, Outcome

JOB = job()
NAMED = {"dataloader.queue": "q", "dataloader.task": "t"}


def read(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
    return {metric.name: list(metric.data.data_points) for scope in scopes for metric in scope.metrics}


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


def test_a_run_is_measured_and_counted_by_its_outcome(reader: InMemoryMetricReader) -> None:
    measured = telemetry.Figures("vm1:7:b", reader)
    runs = telemetry.Runs(measured)
    runs.learn(dict, lambda: {JOB.job_id: 40.0})
    with measured.run(JOB) as report:
        assert [(point.value, point.attributes) for point in read(reader)["dataloader.running"]] == [(1, NAMED)]
        report(Outcome(End.DONE))
    with pytest.raises(KeyboardInterrupt), measured.run(job()):
        raise KeyboardInterrupt
    found = read(reader)
    runs.close()
    assert [point.value for point in found["dataloader.running"]] == [0]
    assert [(point.value, point.attributes) for point in found["dataloader.runs"]] == [
        (1, NAMED | {"dataloader.outcome": "done"})
    ]
    (took,), (waited,) = found["dataloader.run.duration"], found["dataloader.queue.latency"]
    assert (took.count, tuple(took.explicit_bounds)) == (1, telemetry.BOUNDS_SEC)
    assert 0 <= took.sum < 5
    assert (waited.count, waited.attributes) == (1, NAMED), "the wait of the second job is not known"
    assert 40 <= waited.sum < 45


def test_the_figures_of_a_scrape_are_sent_under_their_names(reader: InMemoryMetricReader) -> None:
    jobs = [3.0]

    def collect() -> Iterator[Metric]:
        gauge = GaugeMetricFamily("dl_jobs", "Jobs", labels=("queue",))
        gauge.add_metric(("q",), jobs[-1])
        steps = CounterMetricFamily("dl_job_steps", "Steps", labels=("step",))
        steps.add_metric(("done",), 9)
        took = HistogramMetricFamily("dl_run_duration_seconds", "Took", labels=("task",))
        took.add_metric(("t",), [("0.1", 1), ("+Inf", 4)], 7.5)
        yield from (gauge, steps, took)

    sent = telemetry.Sender(collect, reader)
    for jobs[0] in (3.0, 2.0):
        sent.renew()
        found = read(reader)
        assert [(point.value, point.attributes) for point in found["dl_jobs"]] == [(jobs[0], {"queue": "q"})]
    assert [(point.value, point.attributes) for point in found["dl_job_steps_total"]] == [(9, {"step": "done"})]
    buckets = {point.attributes["le"]: point.value for point in found["dl_run_duration_seconds_bucket"]}
    assert buckets == {"0.1": 1, "+Inf": 4}
    parts = [found[f"dl_run_duration_seconds_{part}"][0].value for part in ("count", "sum")]
    assert parts == [4, 7.5]
    sent.close()


@pytest.mark.parametrize(
    ("name", "disabled", "metrics", "traces"),
    [
        ("", "", False, True),
        ("none", "", False, False),
        ("otlp", "", True, True),
        ("console", "false", True, True),
        ("otlp", "TRUE", False, False),
        ("", "true", False, False),
    ],
)
def test_an_endpoint_asks_for_traces_and_a_name_of_an_exporter_for_metrics(
    monkeypatch: pytest.MonkeyPatch, name: str, disabled: str, metrics: bool, traces: bool
) -> None:
    for variable in ("OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER"):
        monkeypatch.setenv(variable, name)
    monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert (telemetry.is_wanted("metrics"), telemetry.is_wanted("traces")) == (metrics, traces)


def test_an_exporter_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "pigeon")
    with pytest.raises(ValueError, match="no exporter 'pigeon'; there are otlp, console"):
        telemetry._exporter("metrics")
    assert telemetry.start_runs("w").run(JOB) is telemetry.Runs._OFF


@pytest.mark.parametrize("interval", ["0", "soon", "-5"])
def test_an_interval_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, interval: str) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    with pytest.raises(ValueError, match="OTEL_METRIC_EXPORT_INTERVAL should be milliseconds"):
        telemetry.Sender(list)
    assert telemetry.start_sender(list) is None
