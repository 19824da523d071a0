"""What traces and metrics by OpenTelemetry share: the process that they are of, and their exporters. The extra `otel`.

Clients import it by way of `farm.traces`, so it imports nothing large, and nothing of this project but its version.
"""

from __future__ import annotations

import os
import platform
import threading
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

NAME = "dataloader"  # of the service, where OTEL_SERVICE_NAME gives none, and of tracer and meter
FLUSH_SEC = 2.0  # for the last spans and figures of a process; less than DL_KILL_GRACE_SEC by default
_HTTP = "otlp_proto_http"


def is_disabled() -> bool:
    """True when the environment switches every signal off."""
    return os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"


def said(variable: str) -> str:
    """The exporter that this variable of the environment names; "" where it names none."""
    return os.environ.get(variable, "").strip()


def resource(instance: str) -> Resource:
    """This process, which `instance` names. Raises ImportError without the extra."""
    from opentelemetry.sdk.resources import Resource

    attributes: dict[str, Any] = {
        "service.instance.id": instance,
        "host.name": platform.node(),
        "process.pid": os.getpid(),
    }
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = NAME
    return Resource.create(attributes)


def exporter(signal: str) -> Any:
    """The exporter for `traces` or `metrics` that the environment names; by default OTLP over HTTP.

    Raises ImportError without the extra, ValueError for an unknown name.
    """
    variable, group = f"OTEL_{signal.upper()}_EXPORTER", f"opentelemetry_{signal}_exporter"
    named = said(variable)
    name = _HTTP if named in ("", "otlp") else named
    for found in entry_points(group=group, name=name):
        return found.load()()
    if name == _HTTP:
        raise ImportError("there is no exporter for OTLP over HTTP")
    known = sorted({found.name for found in entry_points(group=group)})
    raise ValueError(f"{variable}: there is no exporter {named!r}; there are {', '.join(['otlp', *known])}")


def close(provider: Any, name: str) -> None:
    """Send what a provider still has, for FLUSH_SEC at most: a collector that hangs delays no stop."""
    ending = threading.Thread(target=provider.shutdown, name=name, daemon=True)
    ending.start()
    ending.join(FLUSH_SEC)
