"""The output of a program on an engine, line by line: progress, a result, or a line for the job's log."""

from __future__ import annotations

import json
import math
from logging import Logger
from typing import Any

from dataloader.pipelines.command.output import Output

PROGRESS_MOST = 4_096  # bytes of a line of progress
LINE_MOST = 2**20  # bytes of a line that is kept until its end has come: a result may be as long


class Lines:
    """The lines of one program, in bounded memory."""

    def __init__(self, logger: Logger, logged_most: int) -> None:
        """`logged_most` is how many bytes of the output are logged."""
        self.output = Output(logger, logged_most)
        self.progress: dict[str, Any] | None = None  # the newest that was not taken
        self.result: Any = None
        self._begun = b""
        self._from_result = 0  # bytes from the begin of the newest result on

    def take(self, piece: bytes) -> None:
        """Take the next piece of the output."""
        *whole, self._begun = (self._begun + piece).split(b"\n")
        for line in whole:
            self._taken(line, len(line) + 1)
        if len(self._begun) > LINE_MOST:
            self.end()

    def end(self) -> None:
        """The output is over, or is read no further: its last line may have no end."""
        begun, self._begun = self._begun, b""
        if begun:
            self._taken(begun, len(begun))

    @property
    def unread(self) -> int:
        """The bytes at the end that the next run is to read again: from the newest result on, or of a line begun."""
        return self._from_result + len(self._begun)

    def taken_progress(self) -> dict[str, Any] | None:
        """The newest progress, once; None: there is none."""
        found, self.progress = self.progress, None
        return found

    def _taken(self, line: bytes, size: int) -> None:
        """Take a line, which has so many bytes of the output: all behind a result is read again with it."""
        is_result = self._line(line)
        if is_result or self._from_result:
            self._from_result = (0 if is_result else self._from_result) + size

    def _line(self, line: bytes) -> bool:
        """Take a line; whether it is a result."""
        said = spoken(line)
        if said is None:
            self.output.take(line + b"\n")
        elif set(said) == {"result"}:
            self.result = said["result"]
        else:
            self.progress = said
        return said is not None and set(said) == {"result"}


def spoken(line: bytes) -> dict[str, Any] | None:
    """PURE: what a line says to the farm: {"processed": 5, "total": 9, ...} or {"result": ...}; None: nothing."""
    text = line.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    is_progress = len(text) <= PROGRESS_MOST and _is_number(said.get("processed"))
    return said if is_progress or set(said) == {"result"} else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
