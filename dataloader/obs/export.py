"""What the environment asks for, by the variables that every OpenTelemetry SDK reads, and where it goes."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

import structlog

import dataloader

NAME = "dataloader"  # of the service, where OTEL_SERVICE_NAME gives none, and of tracer and meter
FLUSH_SEC = 2.0  # for the last spans and figures of a process; less than DL_KILL_GRACE_SEC by default
Signal = Literal["traces", "metrics"]
_HTTP = "otlp_proto_http"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
T = TypeVar("T")


def is_wanted(signal: Signal) -> bool:
    """True when the environment asks for this signal. An endpoint alone asks for traces, but for no metrics."""
    exporter = _exporter_name(signal)
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    return bool(exporter) or (signal == "traces" and any(os.environ.get(name) for name in _ENDPOINTS))


def start(signal: Signal, make: Callable[[], T]) -> T | None:
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


def exporter(signal: Signal) -> Any:
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


def resource(instance: str) -> Any:
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


def metering(instance: str, reader: Any) -> tuple[Any, Any]:
    """A provider of metrics of this process, which sends them by `reader`, and the project's meter."""
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider([reader], resource=resource(instance), shutdown_on_exit=False)
    return provider, provider.get_meter(NAME, dataloader.version())


def close(provider: Any, signal: Signal) -> None:
    """Send what a provider still has, for FLUSH_SEC at most: a collector that hangs delays no stop."""
    ending = threading.Thread(target=provider.shutdown, name=signal, daemon=True)
    ending.start()
    ending.join(FLUSH_SEC)


def _exporter_name(signal: Signal) -> str:
    return os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()
