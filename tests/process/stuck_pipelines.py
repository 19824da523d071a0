"""Pipelines that get nowhere, each in another way, and good ones beside them."""

import time
from collections.abc import Iterator
from typing import Any

from farm_pipelines import hold_the_gil

from dataloader.pipelines import Context, Progress, register


def never(args: dict[str, Any]) -> None:
    (time.sleep if args["how"] == "sleep" else hold_the_gil)(3600)


@register("never.steps", stall_sec=5, on_stall="retry")
def steps(args: dict[str, Any]) -> Iterator[Progress]:
    yield {"done": 1}
    never(args)


@register("silent", stall_sec=0.5)
def silent(args: dict[str, Any], context: Context) -> Iterator[None]:
    """Silent for so long, twice, and then done."""
    for _ in range(2):
        time.sleep(args["sec"])
        yield


@register("talks", stall_sec=3, on_stall="retry")
def talks(args: dict[str, Any], context: Context) -> Progress:
    """Longer than its stall_sec, with a sign of life now and then."""
    for number in range(10):
        time.sleep(0.4)
        if number % 2:
            context.check()
        else:
            context.progress({"done": number})
    return {"done": 10}


@register("good")
def good(args: dict[str, Any]) -> None:
    time.sleep(0.05)
