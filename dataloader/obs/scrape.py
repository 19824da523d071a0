"""The figures of /metrics, sent by OpenTelemetry: each process of the API sends what it would answer to a scrape.

The names are those of /metrics. The SDK accepts no finished histogram, so its parts are sums of their own, as in
Prometheus' text: `_bucket`, `_count` and `_sum`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from math import inf
from threading import Event, Thread
from typing import Any

import structlog
from prometheus_client.core import Metric, Sample

from dataloader.obs import export

Collect = Callable[[], Iterable[Metric]]


class Figures:
    """The last figures of a collector, as instruments of a meter."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._samples: dict[str, list[Sample]] = {}

    def renew(self, meter: Any) -> None:
        """Collect the figures; each new name gets an instrument."""
        samples: dict[str, list[Sample]] = {name: [] for name in self._samples}  # a name keeps its one instrument
        for family in self._collect():
            is_sum = family.type in ("counter", "histogram")
            make = meter.create_observable_counter if is_sum else meter.create_observable_gauge
            for sample in family.samples:
                if sample.name not in samples:
                    make(sample.name, callbacks=[self._observing(sample.name)], description=family.documentation)
                samples.setdefault(sample.name, []).append(sample)
        self._samples = samples

    def _observing(self, name: str) -> Callable[[Any], list[Any]]:
        from opentelemetry.metrics import Observation

        return lambda _: [Observation(sample.value, sample.labels) for sample in self._samples.get(name, ())]


class Sender:
    """Sends the figures every OTEL_METRIC_EXPORT_INTERVAL milliseconds, from a thread of its own."""

    def __init__(self, collect: Collect) -> None:
        """Begin to send. Raises ImportError without the extra, ValueError for a wrong variable."""
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        interval = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or "60000"
        if not interval.isdecimal() or not int(interval):
            raise ValueError("OTEL_METRIC_EXPORT_INTERVAL should be milliseconds, such as 60000")
        # The SDK's own thread could not make the instruments of new names before it collects.
        reader = PeriodicExportingMetricReader(export.exporter("metrics"), export_interval_millis=inf)
        self._provider, meter = export.metering(f"{platform.node()}:{os.getpid()}", reader)
        self._is_over = Event()
        send = Thread(target=self._send, args=(Figures(collect), meter, int(interval) / 1_000), name="figures")
        send.daemon = True
        send.start()

    def close(self) -> None:
        """Send the last figures, for export.FLUSH_SEC at most."""
        self._is_over.set()
        export.close(self._provider, "metrics")

    def _send(self, figures: Figures, meter: Any, interval_sec: float) -> None:
        while not self._is_over.wait(interval_sec):
            try:
                figures.renew(meter)
                self._provider.force_flush()
            except Exception as e:  # the next interval may do better
                structlog.get_logger("metrics").warning("metrics.unsent", error=type(e).__name__)


def start(collect: Collect) -> Sender | None:
    """Send these figures from now on, if the environment asks for it; None where it does not, or it cannot work."""
    return export.start("metrics", lambda: Sender(collect))
