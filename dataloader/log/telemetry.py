"""Metrics by OpenTelemetry: whether the environment asks for them, and where they go. The extra `otel`.

Off unless OTEL_METRICS_EXPORTER names an exporter; while metrics are off, nothing of OpenTelemetry is imported. The SDK
has a thread, so a process sets it up after its fork.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import dataloader
from dataloader import otel

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader

R = TypeVar("R")


def are_wanted() -> bool:
    """True when the environment asks for metrics, by the variables that every OpenTelemetry SDK reads."""
    return not otel.is_disabled() and otel.said("OTEL_METRICS_EXPORTER") not in ("", "none")


def started(start: Callable[[], R], off: R) -> R:
    """What `start` makes where metrics are wanted, else `off`; a log line says what prevents them."""
    if not are_wanted():
        return off
    import structlog

    try:
        return start()
    except ImportError as e:
        why = f"{e}: install 'dataloader-farm[otel]'"
    except Exception as e:  # the SDK's complaint about a variable
        why = str(e)
    structlog.get_logger("metrics").warning("metrics.off", error=why)
    return off


def exporter() -> MetricExporter:
    """The exporter that the environment names. Raises ImportError without the extra, ValueError for an unknown name."""
    made: MetricExporter = otel.exporter("metrics")
    return made


def provider(instance: str, reader: MetricReader) -> MeterProvider:
    """The metrics of this process, which `instance` names, for this reader."""
    from opentelemetry.sdk.metrics import MeterProvider

    return MeterProvider([reader], resource=otel.resource(instance), shutdown_on_exit=False)


def meter(provider: MeterProvider) -> Any:
    """The project's meter."""
    return provider.get_meter(otel.NAME, dataloader.version())


def close(provider: MeterProvider) -> None:
    """Send the last figures, for otel.FLUSH_SEC at most."""
    otel.close(provider, "metrics")
