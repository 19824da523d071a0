"""PURE: the log of one run while its worker has it. Of a long one the first half stays, and the last lines."""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import NamedTuple

from dataloader.log.record import shortened, visible
from dataloader.queue.job import Job

LEVELS = ("debug", "info", "warning", "error", "critical")
SOURCES = ("log", "stdout", "stderr")
LINE_MOST = 8_000  # characters; a longer line is cut in its middle
LINE_COST = 64  # bytes that a row takes beside its text
_TAIL = 3 / 8  # of the size; the rest is for what the keeper saves of a worker that has died
SAVED = 1 / 8
# A terminal's colors and titles.
_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,16}[@-~]"  # colors, the cursor
    r"|\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)"  # titles, links
    r"|[PX^_][^\x1b]{0,500}\x1b\\"
    r"|[ -/]{0,16}[0-~])"
)


class Line(NamedTuple):
    """One line: its number in the run from 1, the monotonic instant, one of LEVELS, one of SOURCES, a harmless text."""

    number: int
    at: float
    level: str
    source: str
    text: str


class Unwritten(NamedTuple):
    """Lines to leave out (first, last), then lines to write; afterwards none behind the head up to `gone` is stored."""

    left_out: tuple[int, int] | None
    lines: list[Line]
    gone: int


def harmless(text: str) -> str:
    """The text without a terminal's sequences, other controls escaped; of overwritten lines the last state."""
    if text.isprintable():
        return text
    return visible(_SEQUENCE.sub("", text.rstrip("\r").rpartition("\r")[2]))


class RunLog:
    """The log of the run of a job. Several threads may add lines; one at a time writes them."""

    def __init__(self, job: Job, most: int, began: float, number: int = 0) -> None:
        """At most `most` bytes; the run began at that monotonic instant, and has `number` lines already."""
        self.job = job
        self.began = began
        self.number = number  # of the latest line
        self.written = number  # up to here the lines are in the database
        self.is_in_doubt = False  # whether lines behind `written` are there as well
        self._head_left = most // 2
        self._tail_most = int(most * _TAIL)
        self._line_most = max(20, min(LINE_MOST, self._tail_most // 2 - LINE_COST))
        self._tail_from: int | None = None  # the first line behind the head
        self._left_out = 0  # up to here lines behind the head were left out
        self._deleted = 0  # up to this number they are deleted from the database
        self._head: deque[Line] = deque()  # not written yet
        self._tail: deque[Line] = deque()  # the last lines, written or not
        self._tail_size = 0
        self._lock = threading.Lock()

    def add(self, at: float, level: str, source: str, text: str) -> None:
        """Add a line of a masked text."""
        text = shortened(harmless(text), self._line_most)
        with self._lock:
            self.number += 1
            line = Line(self.number, at, level, source, text)
            size = _size(line)
            if self._tail_from is None and size <= self._head_left:
                self._head_left -= size
                self._head.append(line)
                return
            self._tail_from = self._tail_from or line.number
            self._tail.append(line)
            self._tail_size += size
            while self._tail_size > self._tail_most:
                gone = self._tail.popleft()
                self._tail_size -= _size(gone)
                self._left_out = gone.number

    def skip(self, lines: int) -> None:
        """Count so many lines of the run that were skipped unread."""
        with self._lock:
            self.number += lines

    @property
    def is_long(self) -> bool:
        """Whether lines behind the head have come, which may have to go again."""
        return self._tail_from is not None

    @property
    def has_news(self) -> bool:
        """Whether there are lines to be written, or to be left out that were written."""
        return bool(self._head or self._surplus or (self._tail and self._tail[-1].number > self.written))

    @property
    def _surplus(self) -> tuple[int, int] | None:
        """The lines behind the head, first and last, that are in the database and were left out since."""
        first = max(self._tail_from or 0, self._deleted + 1)
        return (first, self._left_out) if self._left_out > self._deleted and self.written >= first else None

    def unwritten(self) -> Unwritten:
        """The next action; call `confirm` after it."""
        with self._lock:
            lines = [*self._head, *(line for line in self._tail if line.number > self.written)]
            if self.is_in_doubt:
                # The next call leaves out the other lines.
                return Unwritten((self.written + 1, self.number), lines, self._deleted)
            return Unwritten(self._surplus, lines, self._left_out)

    def confirm(self, done: Unwritten) -> None:
        """These lines are in the database, or can never be."""
        with self._lock:
            last = done.lines[-1].number if done.lines else self.written
            self.is_in_doubt = False
            self.written = max(self.written, last)
            while self._head and self._head[0].number <= last:
                self._head.popleft()
            self._deleted = done.gone


def _size(line: Line) -> int:
    return LINE_COST + (len(line.text) if line.text.isascii() else len(line.text.encode("utf-8", "replace")))


class Text(NamedTuple):
    """One line of the output: level, source, text, and the time of writing if the line has it."""

    level: str
    source: str
    text: str
    at: float | None = None


# A line of `logging` in the output begins with this, its level and its instant, and MARK again.
MARK = "\x1e"
_MARKED = re.compile(rf"{MARK}({'|'.join(LEVELS)}) (\d{{1,12}}\.\d{{1,6}}){MARK}")


def marked(level: str, at: float, text: str) -> bytes:
    """The lines of an event as they stand in the output among those of `print`."""
    head = f"{MARK}{level if level in LEVELS else 'info'} {at:.6f}{MARK}"
    return "".join([f"{head}{line}\n" for line in text.split("\n")]).encode("utf-8", "backslashreplace")


def read(raw: bytes, source: str) -> Text:
    """A line of the output; stderr is a warning."""
    text = raw.decode("utf-8", "backslashreplace")
    if text.startswith(MARK) and (match := _MARKED.match(text)):
        return Text(match[1], "log", text[match.end() :], float(match[2]))
    return Text("warning" if source == "stderr" else "info", source, text)


class Splitter:
    """Cuts the output of one descriptor into lines; the last one waits for its end, or for the run's."""

    LONGEST = 65_536  # bytes of a line that are kept

    def __init__(self) -> None:
        self._rest = b""
        self.waiting = 0  # bytes of the line that has no end yet

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in these bytes."""
        *lines, rest = (self._rest + data).split(b"\n")
        self.waiting = len(rest) if lines else self.waiting + len(data)
        self._rest = rest[: self.LONGEST + 1]  # one byte more shows that the line was cut
        return [self._cut(line) for line in lines]

    def finish(self) -> list[bytes]:
        """The line that has no end, if there is one."""
        rest, self._rest, self.waiting = self._rest, b"", 0
        return [self._cut(rest)] if rest else []

    def _cut(self, line: bytes) -> bytes:
        return line if len(line) <= self.LONGEST else line[: self.LONGEST] + b" [... more ...]"


class Keys:
    """Masks private keys, which are secrets of several lines."""

    _BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----")

    def __init__(self) -> None:
        self._lines_left = 0

    def masked(self, text: str, mask: str) -> str:
        """The line, or the mask in the place of a key's body."""
        if self._lines_left:
            self._lines_left = 0 if "-----END " in text else self._lines_left - 1
            return mask
        if "PRIVATE KEY-----" in text and self._BEGIN.search(text) and "-----END " not in text:
            self._lines_left = 200
        return text
