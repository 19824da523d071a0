"""The figures of /metrics, sent by OpenTelemetry where OTEL_METRICS_EXPORTER asks for it (docs/traces.md).

Each process of the API sends what it would answer to a scrape, under the same names. The SDK cannot be handed a
finished histogram, so its parts are sums of their own, as in Prometheus' text: `_bucket`, `_count` and `_sum`.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import inf
from threading import Event, Thread
from typing import Any

import structlog
from prometheus_client.core import Metric, Sample

from dataloader.log import telemetry

_SUMS = ("counter", "histogram")
_log = structlog.get_logger("metrics")
Collect = Callable[[], Iterable[Metric]]


class Figures:
    """The last figures of a collector, as instruments of a meter."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._samples: dict[str, list[Sample]] = {}
        self._met: set[str] = set()

    def renew(self, meter: Any) -> None:
        """Collect the figures; an instrument is made for each name that is new."""
        samples: dict[str, list[Sample]] = defaultdict(list)
        for family in self._collect():
            for sample in family.samples:
                samples[sample.name].append(sample)
                self._meet(meter, family, sample.name)
        self._samples = samples

    def _meet(self, meter: Any, family: Metric, name: str) -> None:
        if name in self._met:
            return
        self._met.add(name)
        make = meter.create_observable_counter if family.type in _SUMS else meter.create_observable_gauge
        make(name, callbacks=[lambda _: self._observed(name)], description=family.documentation)

    def _observed(self, name: str) -> list[Any]:
        from opentelemetry.metrics import Observation

        return [Observation(sample.value, sample.labels) for sample in self._samples.get(name, ())]


class Sender:
    """Sends the figures every OTEL_METRIC_EXPORT_INTERVAL milliseconds, from a thread of its own."""

    def __init__(self, collect: Collect) -> None:
        """Begin to send. Raises ImportError without the extra, ValueError for a wrong variable."""
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        self._every = _interval() / 1_000
        # The SDK's own thread could not make the instruments of new names before it collects.
        reader = PeriodicExportingMetricReader(telemetry.exporter(), export_interval_millis=inf)
        self._provider = telemetry.provider(f"{platform.node()}:{os.getpid()}", reader)
        self._figures, self._is_over = Figures(collect), Event()
        Thread(target=self._send, name="figures", daemon=True).start()

    def close(self) -> None:
        """Send the last figures, for otel.FLUSH_SEC at most."""
        self._is_over.set()
        telemetry.close(self._provider)

    def _send(self) -> None:
        meter = telemetry.meter(self._provider)
        while not self._is_over.wait(self._every):
            try:
                self._figures.renew(meter)
                self._provider.force_flush()
            except Exception as e:  # the next interval may do better
                _log.warning("metrics.unsent", error=type(e).__name__)


def _interval() -> float:
    """The milliseconds between two exports; raises ValueError where they are none."""
    said = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or "60000"
    if not said.isdecimal() or not int(said):
        raise ValueError("OTEL_METRIC_EXPORT_INTERVAL should be milliseconds, such as 60000")
    return int(said)


def start(collect: Collect) -> Sender | None:
    """Send these figures from now on, if the environment asks for it; None where it does not, or it cannot work."""
    return telemetry.started(lambda: Sender(collect), None)
