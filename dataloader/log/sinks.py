"""The sinks of log lines: a pipe shared with other processes, and a file shared with other processes, which rotates.

`Stream.write` never waits; `File.write` waits at most 20 ms for the file's lock.

concurrent-log-handler loses no line in a rotation either, but it waits forever for a lock that a stopped process
holds, and leaves a lock file. On a full disk it leaves half a line in the file, so that the next line is no JSON, and
counts no lost line.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import stat
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path

PIPE_BUF = 4_096  # bytes; Linux writes a batch of at most this size to a pipe whole or not at all
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ESPIPE}
_LOCK_TRIES = 40
_LOCK_PAUSE_SEC = 0.0005
_UNITS = {"B": 1, "KB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d{1,10}(?:\.\d{1,9})?) ?(B|[KMG]i?B)", re.IGNORECASE)
_PERIOD = re.compile(r"(\d{1,4}) ?(hour|day|week)s?", re.IGNORECASE)
Rule = Callable[[os.stat_result, int], bool]


class Stream:
    """An open file descriptor, usually a supervisor's pipe that many processes share."""

    batch = PIPE_BUF  # the most bytes of one write
    may_stall = False  # whether a write may hang

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


class File:
    """A file that any number of processes append to; `rule` decides when a process renames it and begins a new one.

    A rotation loses no line: only the holder of the file's own lock appends and renames, and a process that finds its
    file renamed opens the new one. Lines of a process that does not get the lock wait in its queue. Renamed files are
    never deleted here. On a full disk no part of a line stays in the file. Each write opens the file, so that a process
    with few log lines does not keep a deleted file's space.
    """

    batch = 65_536
    may_stall = True  # on a hanging disk or NFS server

    def __init__(self, path: Path, rule: Rule) -> None:
        self._path = path
        self._rule = rule

    def write(self, lines: Sequence[bytes]) -> int:
        """Append these lines in one piece; the number of lines written, 0 without the lock.

        Raises OSError where there is room for no line, and where the file system has no locks.
        """
        data = b"".join(lines)
        while True:
            fd = self._open()
            try:  # closing the file unlocks it
                if not _locked(fd):
                    return 0
                status = os.fstat(fd)
                if self._was_renamed(status) or self._rotated(status, len(data)):
                    continue
                written = os.write(fd, data)
                whole = data.rfind(b"\n", 0, written) + 1
                if whole < written:
                    os.ftruncate(fd, status.st_size + whole)
                if not whole:
                    raise OSError(errno.ENOSPC, "no room for a line")
                return data.count(b"\n", 0, whole)
            finally:
                os.close(fd)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o640)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            return os.open(self._path, flags, 0o640)

    def _was_renamed(self, status: os.stat_result) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), status)
        except FileNotFoundError:
            return True

    def _rotated(self, status: os.stat_result, more: int) -> bool:
        if not status.st_size or not self._rule(status, more):
            return False
        name = f"{self._path.stem}.{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z{self._path.suffix}"
        try:
            os.rename(self._path, self._path.with_name(name))
        except OSError:
            return False  # a file over its size is better than lost lines
        return True

    def wait(self, seconds: float) -> None:
        """Wait a moment for the lock."""
        time.sleep(min(max(seconds, 0), _LOCK_PAUSE_SEC))


def _locked(fd: int) -> bool:
    """Whether this process has the file's lock. Raises OSError where the file system has no locks."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_SEC)
        except OSError as e:
            raise OSError(e.errno, f"{e.strerror}: log files need a file system with flock") from None
    return False


def rule(text: str, zone: tzinfo) -> Rule:
    """The rule of a LOG_ROTATION: a size (`10 MB`), or the turn of a period (`1 day`, `midnight`).

    Periods are the calendar's in `zone`; a file belongs to the period of its last change. Raises ValueError for any
    other text.
    """
    size = _SIZE.fullmatch(text.strip())
    if size and (limit := float(size[1]) * _UNITS[size[2].upper()]) >= 1:
        return lambda status, more: status.st_size + more > limit
    number = period(text, zone)
    return lambda status, _more: number(status.st_mtime) != number(time.time())


def period(text: str, zone: tzinfo) -> Callable[[float], int]:
    """A function that gives the number of the period (`6 hours`) of an instant, in seconds since 1970.

    Raises ValueError for any other text.
    """
    match = _PERIOD.fullmatch("1 day" if text.strip().lower() == "midnight" else text.strip())
    if not match or not int(match[1]):
        raise ValueError('should be a size such as "10 MB" or a time such as "1 day" or "midnight"')
    count, unit = int(match[1]), match[2].lower()

    def number(at: float) -> int:
        moment = datetime.fromtimestamp(at, zone)
        days = moment.toordinal() - 1  # since January 1 of year 1, a Monday
        return {"hour": days * 24 + moment.hour, "day": days, "week": days // 7}[unit] // count

    return number
