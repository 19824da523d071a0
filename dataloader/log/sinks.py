"""Where lines go: a pipe that others write to as well, and a file that is set aside when it is large or old.

Neither waits longer than it says. May import nothing of the package.

Why not concurrent-log-handler, which loses nothing in rotations either: it waits for the lock of a stopped process for
ever, and of a line that half fits on a full disk it leaves the half, so that the next one is no JSON, and counts none.
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

PIPE_BUF = 4_096  # bytes that a pipe takes in one piece or not at all
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ESPIPE}
_LOCK_TRIES = 40
_LOCK_PAUSE_SEC = 0.0005
_UNITS = {"B": 1, "KB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?i?B)", re.IGNORECASE)
_PERIOD = re.compile(r"(\d+) ?(hour|day|week)s?", re.IGNORECASE)
Rule = Callable[[os.stat_result, int], bool]


class Stream:
    """An open file descriptor, usually the pipe of a supervisor that many processes write to."""

    batch = PIPE_BUF
    may_stall = False

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._nowait = not self._is_file
        self._torn = False

    def write(self, lines: Sequence[bytes]) -> int:
        """Write these lines, at most `batch` bytes, in one piece; how many were taken: 0 where it would wait.

        Raises OSError, after which they are lost.
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
        # The file description is shared with other processes, so O_NONBLOCK must not be set on it.
        if self._nowait:
            try:
                return os.pwritev(self._fd, [data], -1, os.RWF_NOWAIT)
            except OSError as e:
                if e.errno not in _NOT_SUPPORTED:
                    raise
                self._nowait = False  # pipes know it since Linux 6.4
        if not self._is_file and not self._writable(0):
            raise BlockingIOError
        return os.write(self._fd, data)

    def wait(self, seconds: float) -> None:
        """Until it can be written to."""
        self._writable(seconds)

    def _writable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1_000))

    def close(self) -> None:
        """It is not ours to close."""


class File:
    """A file that any number of processes append to, set aside under another name when its rule says so.

    Nothing is lost: who has the file's lock renames it, and who meets the renamed one opens the new. The lock is the
    file's own, so that no other file is needed. Who does not get it within 20 ms appends all the same and leaves the
    rotation to others. Files set aside are never deleted here. Where the disk is full, no part of a line stays in the
    file. It is opened for each write, so that a file that was deleted is not held by a process that logs rarely.
    """

    batch = 65_536
    may_stall = True  # a disk or an NFS server that hangs

    def __init__(self, path: Path, rule: Rule) -> None:
        self._path = path
        self._rule = rule

    def write(self, lines: Sequence[bytes]) -> int:
        """Append these lines in one piece; how many there was room for. Raises OSError when for none."""
        data = b"".join(lines)
        while True:
            with self._opened() as fd:
                mine = _locked(fd)  # until it is closed
                if mine and (self._was_renamed(fd) or self._set_aside(fd, len(data))):
                    continue
                return _append(fd, data, mine)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
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

    def _set_aside(self, fd: int, more: int) -> bool:
        found = os.fstat(fd)
        if not found.st_size or not self._rule(found, more):
            return False
        moment = datetime.now(UTC)
        aside = self._path.with_name(f"{self._path.stem}.{moment:%Y%m%dT%H%M%S.%f}Z{self._path.suffix}")
        try:
            os.rename(self._path, aside)
        except OSError:
            return False  # better too large a file than lost lines
        return True

    def wait(self, seconds: float) -> None:
        """A file is always ready."""

    def close(self) -> None:
        """It is closed after each write."""


def _locked(fd: int) -> bool:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_SEC)
        except OSError:  # a file system without locks
            return False
    return False


def _append(fd: int, data: bytes, mine: bool) -> int:
    """Append whole lines; how many. Raises OSError for none."""
    before = os.fstat(fd).st_size
    written = os.write(fd, data)
    whole = data.rfind(b"\n", 0, written) + 1
    if whole < written and mine:
        os.ftruncate(fd, before + whole)
    if not whole:
        raise OSError(errno.ENOSPC, "no room for a line")
    return data.count(b"\n", 0, whole)


def rule(text: str, zone: tzinfo) -> Rule:
    """When LOG_ROTATION sets a file aside: at a size (`10 MB`), or at the turn of a period (`1 day`, `midnight`).

    Periods are those of the calendar in `zone`; the file's last change says in which one it was written. Raises
    ValueError for another text.
    """
    if size := _SIZE.fullmatch(text.strip()):
        limit = float(size[1]) * _UNITS[size[2].upper()]
        return lambda found, more: found.st_size + more > limit
    period = _Period.of(text, zone)
    return lambda found, _more: period.number(found.st_mtime) != period.number(time.time())


@dataclass(frozen=True, slots=True)
class _Period:
    """So many hours or days, counted from the first of year 1, a Monday."""

    count: int
    hours: bool
    zone: tzinfo

    @classmethod
    def of(cls, text: str, zone: tzinfo) -> _Period:
        if text.strip().lower() == "midnight":
            return cls(1, False, zone)
        found = _PERIOD.fullmatch(text.strip())
        if not found or not int(found[1]):
            raise ValueError(f"should be a size such as 10 MB or a time such as 1 day, not {text!r}")
        unit = found[2].lower()
        return cls(int(found[1]) * (7 if unit == "week" else 1), unit == "hour", zone)

    def number(self, at: float) -> int:
        """Which of its periods the instant is in."""
        moment = datetime.fromtimestamp(at, self.zone)
        days = moment.toordinal() - 1
        return (days * 24 + moment.hour if self.hours else days) // self.count
