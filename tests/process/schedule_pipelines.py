"""Pipelines with schedules, for test_schedules_of_farms; SCHEDULED says which of them name one."""

import os
from collections.abc import Iterator
from typing import Any

from dataloader.pipelines import register

EACH_SECOND = {"interval_sec": 1, "queue": "q", "overlap": "queue", "args": {"due": "{{ due_utc }}"}}


@register("ticks", schedule=EACH_SECOND if os.environ.get("SCHEDULED") == "1" else None)
def ticks(args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"due": args["due"]}
