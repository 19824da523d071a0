"""Traces and metrics by OpenTelemetry (docs/traces.md). The extra `otel`.

`telemetry` sends them. While the environment asks for none, nothing of OpenTelemetry is imported. The SDK has threads,
so a process sets it up after its fork. Clients import this module for `current`, so it imports nothing large.
"""

from __future__ import annotations

import sys


def current() -> str | None:
    """The W3C traceparent of the span under way here, for a request that triggers a job; None without a span."""
    opentelemetry = sys.modules.get("opentelemetry.trace")  # a program without this import has no span
    if opentelemetry is None:
        return None
    span = opentelemetry.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else None
