"""`top`: the farm in a terminal, redrawn until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from dataloader.cli import screen
from dataloader.cli.farm import queue_table, worker_table
from dataloader.client import Unavailable
from dataloader.client.farm import Farm


def run(farm: Farm, every: float) -> None:
    """Redraw every `every` seconds until q or Ctrl-C. While the farm is away the first line says so."""
    out = screen.console()
    drawn: Any = Text(f"asking {farm.url}")
    with _keys() as pressed, Live(drawn, console=out, screen=True, auto_refresh=False) as live:
        try:
            while True:
                drawn = _picture_or_words(farm, drawn)
                live.update(drawn, refresh=True)
                if pressed(every) in ("q", "Q", "\x03", "\x04"):
                    return
        except KeyboardInterrupt:
            return


def picture(farm: Farm) -> Any:
    """The time, the queues, the workers."""
    overview, workers = farm.overview(), farm.workers()
    blank = Text("")
    return Group(
        Text(f"{overview.at:%H:%M:%S}Z", style="bold"),
        blank,
        queue_table(overview),
        blank,
        worker_table([worker for worker in workers if worker.state != "dead"]),
    )


def _picture_or_words(farm: Farm, last: Any) -> Any:
    try:
        return picture(farm)
    except Unavailable as e:
        words = Text(f"{datetime.now(UTC):%H:%M:%S}Z {screen.plain(str(e))}; trying again", style="red")
        return Group(words, *(last.renderables[1:] if isinstance(last, Group) else ()))


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits some seconds for a key without Enter."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def pressed(within: float) -> str:
        until = time.monotonic() + within
        while (left := until - time.monotonic()) > 0:
            if select.select([number], [], [], left)[0]:
                return os.read(number, 1).decode("ascii", "replace") or "q"  # the terminal is gone
        return ""

    try:
        tty.setcbreak(number)
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
