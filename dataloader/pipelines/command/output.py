"""The output of a program as lines: all are counted, some are logged, the last ones are kept."""

from __future__ import annotations

import re
from collections import deque
from logging import Logger

TAIL = 20  # lines; the journal keeps as many notes of a run
LONGEST_LINE = 2_000  # bytes; the rest of a longer line counts as the next one
_LINE_END = re.compile(rb"[\r\n]+")  # \r: what a progress bar writes
_CONTROLS = re.compile("\x1b\\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")  # colours, and what moves a cursor


class Output:
    """The lines of one program, in bounded memory."""

    def __init__(self, logger: Logger, logged_most: int) -> None:
        """`logged_most` is how many bytes of the output are logged."""
        self.lines = 0
        self.bytes = 0
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._logger = logger
        self._left = logged_most
        self._begun = b""  # a line whose end has not come

    def take(self, piece: bytes) -> None:
        """Take the next piece of the output."""
        self.bytes += len(piece)
        *whole, self._begun = _LINE_END.split(self._begun + piece)
        for line in whole:
            self._add(line)
        while len(self._begun) > LONGEST_LINE:
            self._line(self._begun[:LONGEST_LINE])
            self._begun = self._begun[LONGEST_LINE:]

    def end(self) -> None:
        """The output is over: its last line may have no end."""
        self._add(self._begun)
        self._begun = b""

    def last_words(self) -> str:
        """The last lines, for an error; "" without output."""
        return "".join(["; its last lines:", *(f"\n{line}" for line in self.tail)]) if self.tail else ""

    def _add(self, line: bytes) -> None:
        for begin in range(0, len(line), LONGEST_LINE):
            self._line(line[begin : begin + LONGEST_LINE])

    def _line(self, line: bytes) -> None:
        text = _CONTROLS.sub("", line.decode("utf-8", "replace"))
        self.lines += 1
        self.tail.append(text)
        if self._left > 0:
            self._logger.info("%s", text)
            self._left -= len(line) + 1
            if self._left <= 0:
                self._logger.warning("the program has written much: the rest of its output is not logged")
