"""Metrics by OpenTelemetry: whether the environment asks for them, and where they go. The extra `otel`.

Off unless OTEL_METRICS_EXPORTER names an exporter; while metrics are off, nothing of OpenTelemetry is imported. The SDK
has a thread, so a process sets it up after its fork.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import dataloader

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader

R = TypeVar("R")
FLUSH_SEC = 2.0  # for the last figures of a process
_HTTP = "otlp_proto_http"
_GROUP = "opentelemetry_metrics_exporter"


def are_wanted() -> bool:
    """True when the environment asks for metrics, by the variables that every OpenTelemetry SDK reads."""
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not is_disabled and os.environ.get("OTEL_METRICS_EXPORTER", "").strip() not in ("", "none")


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
    said = os.environ.get("OTEL_METRICS_EXPORTER", "").strip()
    name = _HTTP if said == "otlp" else said
    for found in entry_points(group=_GROUP, name=name):
        made: MetricExporter = found.load()()
        return made
    if name == _HTTP:
        raise ImportError("there is no exporter for OTLP over HTTP")
    known = sorted({found.name for found in entry_points(group=_GROUP)})
    raise ValueError(f"OTEL_METRICS_EXPORTER: there is no exporter {said!r}; there are {', '.join(['otlp', *known])}")


def provider(instance: str, reader: MetricReader) -> MeterProvider:
    """The metrics of this process, which `instance` names, for this reader."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource

    attributes: dict[str, Any] = {
        "service.instance.id": instance,
        "host.name": platform.node(),
        "process.pid": os.getpid(),
    }
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = "dataloader"
    return MeterProvider([reader], resource=Resource.create(attributes), shutdown_on_exit=False)


def meter(provider: MeterProvider) -> Any:
    """The project's meter."""
    return provider.get_meter("dataloader", dataloader.version())


def close(provider: MeterProvider) -> None:
    """Send the last figures, for FLUSH_SEC at most: a collector that hangs delays no stop."""
    ending = threading.Thread(target=provider.shutdown, name="metrics", daemon=True)
    ending.start()
    ending.join(FLUSH_SEC)
