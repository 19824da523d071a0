"""The sinks of log lines: a pipe shared with other processes, and a file shared with other processes, which rotates.

`Stream.write` never waits; `File.write` waits at most 20 ms for the file's lock, on a full disk 0.2 s more.

concurrent-log-handler loses no line in a rotation either, but it waits forever for a lock that a stopped process
holds. On a full disk it leaves half a line in the file, so that the next line is no JSON, and counts no lost line.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path

PIPE_BUF = 4_096  # bytes; Linux writes a batch of at most this size to a pipe whole or not at all
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ESPIPE}
_LOCK_TRIES = 40
_LOCK_TRIES_OF_A_PART = 400  # a part of a line stays in the file until somebody with the lock removes it
_LOCK_PAUSE_SEC = 0.0005
_UNITS = {"B": 1, "KB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d{1,10}(?:\.\d{1,9})?) ?(B|[KMG]i?B)", re.IGNORECASE)
_PERIOD = re.compile(r"(\d{1,4}) ?(hour|day|week)s?", re.IGNORECASE)
Rule = Callable[[os.stat_result, int], bool]


class Stream:
    """An open file descriptor, usually a supervisor's pipe that many processes share."""

    batch = PIPE_BUF
    may_stall = False

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._nowait = not self._is_file
        self._torn = False

    def write(self, lines: Sequence[bytes]) -> int:
        """Write these lines, at most `batch` bytes, in one piece; the number of lines written, 0 if it had to wait.

        Raises OSError; these lines are lost then.
        """
        data = b"\n" * self._torn + b"".join(lines)
        try:
            written = self._write(data)
        except BlockingIOError:
            return 0
        self._torn = written < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, "written in part")
        return len(lines)

    def _write(self, data: bytes) -> int:
        # Other processes share the file description, so this one must not set O_NONBLOCK on it.
        if self._nowait:
            try:
                return os.pwritev(self._fd, [data], -1, os.RWF_NOWAIT)
            except OSError as e:
                if e.errno not in _NOT_SUPPORTED:
                    raise
                self._nowait = False  # pipes support RWF_NOWAIT since Linux 6.4
        if not self._is_file and not self._writable(0):
            raise BlockingIOError
        return os.write(self._fd, data)

    def wait(self, seconds: float) -> None:
        """Wait at most this long until the descriptor is writable."""
        self._writable(seconds)

    def _writable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1_000))

    def close(self) -> None:
        """Do nothing: the descriptor belongs to the caller."""


class File:
    """A file that any number of processes append to; `rule` decides when a process renames it and begins a new one.

    A rotation loses no line: only the holder of the file's own lock renames the file, and a process that finds its
    file renamed opens the new one. A process that does not get the lock within 20 ms appends without it and does not
    rotate. Renamed files are never deleted here. On a full disk no part of a line stays in the file: the writer removes
    the part. If the writer does not get the lock, the next writer removes it. Each write opens the file, so that a
    process with few log lines does not keep a deleted file's space.
    """

    batch = 65_536
    may_stall = True  # on a hanging disk or NFS server

    def __init__(self, path: Path, rule: Rule) -> None:
        self._path = path
        self._rule = rule

    def write(self, lines: Sequence[bytes]) -> int:
        """Append these lines in one piece; the number of lines written. Raises OSError if there is room for none."""
        data = b"".join(lines)
        while True:
            with self._opened() as fd:
                mine = _locked(fd)  # closing the file unlocks it
                if mine and (self._was_renamed(fd) or self._rotated(fd, len(data))):
                    continue
                return _append(fd, data, mine)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags, 0o640)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            fd = os.open(self._path, flags, 0o640)
        try:
            yield fd
        finally:
            os.close(fd)

    def _was_renamed(self, fd: int) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(fd))
        except FileNotFoundError:
            return True

    def _rotated(self, fd: int, more: int) -> bool:
        found = os.fstat(fd)
        if not found.st_size or not self._rule(found, more):
            return False
        moment = datetime.now(UTC)
        aside = self._path.with_name(f"{self._path.stem}.{moment:%Y%m%dT%H%M%S.%f}Z{self._path.suffix}")
        try:
            os.rename(self._path, aside)
        except OSError:
            return False  # a file over its size is better than lost lines
        return True

    def wait(self, seconds: float) -> None:
        """A file is always ready."""

    def close(self) -> None:
        """Do nothing: each write closes the file."""


def _locked(fd: int, tries: int = _LOCK_TRIES) -> bool:
    for _ in range(tries):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_SEC)
        except OSError:  # a file system without locks
            return False
    return False


def _append(fd: int, data: bytes, mine: bool) -> int:
    """Append whole lines; the number written. Raises OSError if it is 0."""
    written = 0
    try:
        written = os.write(fd, data)
    finally:
        if written < len(data) and (mine or (written and _locked(fd, _LOCK_TRIES_OF_A_PART))):
            _remove_part(fd)
    whole = data.count(b"\n", 0, written)
    if not whole:
        raise OSError(errno.ENOSPC, "no room for a line")
    return whole


def _remove_part(fd: int) -> None:
    """Remove the part of a line at the file's end, this process's or another's that did not get the lock."""
    size = os.fstat(fd).st_size
    begin = max(0, size - File.batch)
    end = begin + os.pread(fd, size - begin, begin).rfind(b"\n") + 1
    if end < size and (end > begin or not begin):  # else a line that others append now would be cut off
        os.ftruncate(fd, end)


def rule(text: str, zone: tzinfo) -> Rule:
    """The rule of a LOG_ROTATION: a size (`10 MB`), or the turn of a period (`1 day`, `midnight`).

    Periods are the calendar's in `zone`; a file belongs to the period of its last change. Raises ValueError for any
    other text.
    """
    size = _SIZE.fullmatch(text.strip())
    if size and (limit := float(size[1]) * _UNITS[size[2].upper()]) >= 1:
        return lambda found, more: found.st_size + more > limit
    period = _Period.of(text, zone)
    return lambda found, _more: period.number(found.st_mtime) != period.number(time.time())


@dataclass(frozen=True, slots=True)
class _Period:
    """A period of `count` hours or days. Periods are counted from January 1 of year 1, a Monday."""

    count: int
    hours: bool
    zone: tzinfo

    @classmethod
    def of(cls, text: str, zone: tzinfo) -> _Period:
        if text.strip().lower() == "midnight":
            return cls(1, False, zone)
        found = _PERIOD.fullmatch(text.strip())
        if not found or not int(found[1]):
            raise ValueError('should be a size such as "10 MB" or a time such as "1 day" or "midnight"')
        unit = found[2].lower()
        return cls(int(found[1]) * (7 if unit == "week" else 1), unit == "hour", zone)

    def number(self, at: float) -> int:
        """The number of the period that contains the instant `at`, in seconds of the epoch."""
        moment = datetime.fromtimestamp(at, self.zone)
        days = moment.toordinal() - 1
        return (days * 24 + moment.hour if self.hours else days) // self.count
