"""The pipelines of the frozen scenario: one succeeds, one fails, one crashes, one runs until it is stopped."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from datetime import date
from typing import Any

from pydantic import BaseModel, Field

from dataloader.pipelines import Context, Progress, register


class Day(BaseModel):
    """The arguments of load.day."""

    day: date = Field(description="the day to load")
    table: str = "orders"


@register("load.day", args=Day, memory_mb=200, cpus=1, schedule={"cron": "0 6 1 1 *", "args": {"day": "{{ date }}"}})
def load_day(args: Day) -> Iterator[Any]:
    """Load one day of a table."""
    logging.getLogger("shop").info("loading %s", args.table)
    print("three rows")
    yield {"processed": 3, "total": 3, "day": str(args.day)}


@register("load.broken")
def load_broken(args: dict[str, Any]) -> None:
    """Fail at each attempt."""
    raise ValueError(f"column {args.get('column', 'day')} is missing")


@register("load.killed")
def load_killed(args: dict[str, Any]) -> None:
    """Kill its own worker."""
    os.kill(os.getpid(), signal.SIGKILL)


@register("load.long")
def load_long(args: dict[str, Any], context: Context) -> Iterator[Any]:
    """Save a checkpoint, and run until it is stopped."""
    page = (context.checkpoint or {"page": 1})["page"]
    while True:
        yield Progress(page, 4, checkpoint={"page": page})
        time.sleep(0.05)
