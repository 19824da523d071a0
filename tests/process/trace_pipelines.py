"""Pipelines that test_traces.py runs through DL_PIPELINES."""

import sys
from collections.abc import Iterator
from typing import Any

from dataloader import obs
from dataloader.pipelines import Context, register


@register("traced")
def traced(args: dict[str, Any]) -> Iterator[Any]:
    """A span of its own, over a safe point."""
    from opentelemetry import trace

    with trace.get_tracer("ours").start_as_current_span("inside", attributes={"password": args["password"]}):
        yield {"current": obs.current()}
        if args.get("fails"):
            raise ValueError(f"no login with password={args['password']}")


@register("untraced")
def untraced(args: dict[str, Any], context: Context) -> dict[str, Any]:
    return {"modules": sorted(name for name in sys.modules if name.startswith("opentelemetry")), "current": None}
