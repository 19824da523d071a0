"""Traces and metrics by OpenTelemetry (docs/traces.md). The extra `otel`.

    export  what the environment asks for, and where it goes
    runs    spans and figures of a worker's runs
    scrape  the figures of /metrics, sent by an API process

While the environment asks for none of them, nothing of OpenTelemetry is imported. The SDK has threads, so a process
sets it up after its fork. Clients import this module for `current`, so the module itself imports nothing large.
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
