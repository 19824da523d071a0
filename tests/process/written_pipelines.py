"""Pipelines that test_logs.py runs through DL_PIPELINES: they write in every way that there is."""

import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataloader.pipelines import Context, Progress, register


def _shell(script: str) -> None:
    subprocess.run(["/bin/sh", "-c", script], check=True)


@register("written.all")
def all_ways(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    context.logger.info("first by the logger", extra={"rows": 5})
    print("second by print")
    _shell("echo third by a program; echo fourth by its stderr >&2")
    yield {"processed": 1}
    logging.getLogger("somewhere").warning("fifth by logging")
    thread = threading.Thread(target=print, args=("sixth by a thread",))
    thread.start()
    thread.join()
    child = multiprocessing.get_context("fork").Process(target=context.logger.error, args=("seventh by a fork",))
    child.start()
    child.join()
    os.write(1, b"eighth without an end")


@register("written.live")
def live(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    print(f"attempt {context.attempt} waits")
    while not Path(args["gate"]).exists():
        time.sleep(0.02)
        yield {"processed": 1}
    print("it is there")


@register("written.truncated")
def truncated(args: dict[str, Any]) -> None:
    """Let a program open the output anew, which truncates a file."""
    _shell("echo before; echo into /dev/stdout > /dev/stdout; echo behind; echo appended >> /dev/stdout")
    print("the end")


def deeper(left: int) -> None:
    if not left:
        raise KeyError("the bottom")
    deeper(left - 1)


@register("written.fails")
def fails(args: dict[str, Any]) -> None:
    functions = "".join(f"def f{n}():\n    f{n + 1}()\n" for n in range(80)) + "def f80():\n    deeper(3)\n"
    names: dict[str, Any] = {"deeper": deeper}
    exec(compile(functions, "made_up.py", "exec"), names)
    names["f0"]()


@register("written.dies")
def dies(args: dict[str, Any]) -> Iterator[Progress]:
    """Say some words and be killed; the words are not in the database by then."""
    if args.get("sec"):
        print("early words")
        end = time.monotonic() + args["sec"]
        while time.monotonic() < end:
            time.sleep(0.02)
            yield {"processed": 1}
    logging.getLogger("x").info("last words by logging")
    print(f"last words by print, {args.get('password')}")
    os.write(2, b"last words without an end")
    os.kill(os.getpid(), signal.SIGKILL)


@register("written.quiet", logs=False)
def quiet(args: dict[str, Any]) -> None:
    print("only in the stream")


@register("written.nothing")
def nothing(args: dict[str, Any]) -> None:
    """Write nothing."""


@register("written.leaves")
def leaves(args: dict[str, Any]) -> None:
    """Leave a process that writes on and on, and makes the file `gate` behind its first line."""
    print("parent")
    script = f"while true; do echo straggler; touch '{args['gate']}'; sleep 0.01; done"
    subprocess.Popen(["/bin/sh", "-c", 'setsid sh -c "$0" &', script])
    while not Path(args["gate"]).exists():
        time.sleep(0.02)
