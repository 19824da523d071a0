"""Pipelines that use as much memory as they say. Each run notes its begin and its end in a file."""

import os
import time
from typing import Any

import psutil

from dataloader.pipelines import register

MB = 2**20


def note(what: str, size: float) -> None:
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{what} {size} {time.monotonic()}\n")


def fill(megabytes: float) -> bytearray:
    """Memory that this process uses from now on, so that it uses so many MB in all; each page is touched."""
    held = bytearray(max(0, int(megabytes * MB) - psutil.Process().memory_info().rss))
    held[::4_096] = b"x" * len(range(0, len(held), 4_096))
    return held


def use(args: dict[str, Any]) -> None:
    """Use `mb` for `sec` seconds, and until the file `gate` is there, if one is given."""
    note("begin", args["mb"])
    held = fill(args["mb"] - 1)  # it counts whole pages
    time.sleep(args.get("sec", 0.0))
    while "gate" in args and not os.path.exists(args["gate"]):
        time.sleep(0.02)
    del held
    note("end", args["mb"])


for size in (100, 150, 200, 250, 300, 400, 500, 900):
    register(f"uses {size}", memory_mb=size)(use)
register("says nothing")(use)
register("takes a twentieth", cpus=len(os.sched_getaffinity(0)) / 20)(use)  # of all processors
