"""Pipelines with resources that take a while to prepare. A file notes when each is prepared and released."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from dataloader.pipelines import Context, register


def note(what: str, key: object) -> None:
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{what} {key} {os.getpid()}\n")


def model(args: dict[str, Any], context: Context) -> Iterator[str]:
    time.sleep(args.get("load_sec", 0.0))
    note("load", context.affinity_key)
    try:
        yield f"model {context.affinity_key}"
    finally:
        note("release", context.affinity_key)


@register("ask", prepare=model, prepare_sec=30)
def ask(args: dict[str, Any], context: Context) -> dict[str, Any]:
    assert context.resource == f"model {context.affinity_key}"
    note("ask", context.affinity_key)
    time.sleep(args.get("sec", 0.0))
    if args.get("drop"):
        context.drop_resource()
    if args.get("fail"):
        raise ValueError("no")
    return {"model": context.resource}


@register("impatient", prepare=model, prepare_sec=0.5)
def impatient(args: dict[str, Any], context: Context) -> None:
    note("ask", context.affinity_key)


def server(args: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@register("asks_a_server", prepare=server)
def asks_a_server(args: dict[str, Any], context: Context) -> dict[str, Any]:
    seen = {"server": context.resource.pid, "alive": context.resource.poll() is None}
    if args.get("stray"):
        seen["stray"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid
    return seen
