"""The begin and the end of a job, noted by the job itself: a record of 24 bytes, appended to a file or a pipe.

All processes of the machine share the clock, the monotonic one.
"""

from __future__ import annotations

import os
import select
import struct
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

WHERE = "DL_BENCH_MARKS"  # the variable that names the file
_RECORD = struct.Struct("=qdd")


class Mark(NamedTuple):
    """Job number `number` ran from `start` to `end`, in seconds of the monotonic clock."""

    number: int
    start: float
    end: float


def now() -> float:
    """The machine's monotonic clock, in seconds."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def leave(mark: Mark) -> None:
    """Append a mark; its few bytes stay in one piece beside other writers."""
    os.write(_opened(os.environ[WHERE]), _RECORD.pack(*mark))


def read(path: Path) -> list[Mark]:
    """All marks in a file."""
    return [Mark(*fields) for fields in _RECORD.iter_unpack(path.read_bytes())]


class Pipe:
    """A pipe of marks, read one by one."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._end = os.open(path, os.O_RDWR)  # also for writing: the pipe has no end while writers come and go

    def next(self, within: float) -> Mark | None:
        """The next mark; None when none comes within `within` seconds."""
        readable, _, _ = select.select([self._end], [], [], within)
        return Mark(*_RECORD.unpack(os.read(self._end, _RECORD.size))) if readable else None

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._end)


@cache
def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND)
