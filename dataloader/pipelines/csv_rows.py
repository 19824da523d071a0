"""Rows that come as CSV records and are read once: by their numbers from 1, people know them."""

from __future__ import annotations

from collections import deque

from dataloader.pipelines import PermanentError
from dataloader.pipelines.csv_source import LONGEST_RECORD, Place


class Rows:
    """The count of the rows so far, and where a line of a COPY is among them; see csv_table.Source."""

    def __init__(self, origin: str) -> None:
        """`origin` is where the rows come from, for errors."""
        self.bytes_read = 0
        self._origin = origin
        self._count = 0
        self._breaks: deque[tuple[int, int]] = deque()  # the records of several lines since the latest `place`

    def place(self) -> Place:
        """Behind the latest row. Of the rows before it `located` knows nothing any more."""
        self._breaks.clear()
        return Place(None, self._count, self._count)

    def located(self, begin: Place, reported: int) -> tuple[int, int]:
        """The number of the row at this line of the COPY that began there; line 1 replaces the header."""
        number = begin.records + reported - 1
        for row, lines in self._breaks:
            if row >= number:
                break
            number = max(row, number - lines)
        return number, 0

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        """The error of a row."""
        return PermanentError(f"{self._origin}, row {line}: {reason}")

    def _counted(self, text: str, size: int) -> tuple[int, str]:
        """The next row, of so many bytes; raises PermanentError for one that is too long."""
        self._count += 1
        self.bytes_read += size
        if size > LONGEST_RECORD:
            raise self.error(self._count, f"longer than {LONGEST_RECORD} bytes")
        if lines := text.count("\n"):
            self._breaks.append((self._count, lines))
        return self._count, text
