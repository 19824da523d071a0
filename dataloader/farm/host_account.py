"""The account of a host: what the runs of all farms of one user claim there, in a file with a lock. No SQL.

Two farms of one host would else see the same free room, and fill it twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dataloader.farm.process import now, started

LOCK_SEC = 0.1  # the lock is held for microseconds: whoever holds it for longer is stopped
SHARED = (Path("/dev/shm"), Path("/tmp"))  # noqa: S108  all farms of a host find it; the folder in it is checked
NAME = "account"
_SIZE = 2**20


class NoAccount(Exception):
    """The account cannot be read now; the message says why, and what would help."""


class Entry(NamedTuple):
    """What one run claims: a process and its start (clock ticks since the boot), MB and processors."""

    pid: int
    started: int
    task: str
    memory_mb: float
    cpus: float


class Reservation(NamedTuple):
    """The need of a job that waits while room gathers for it, until a monotonic instant."""

    task: str
    memory_mb: float
    cpus: float
    until: float


@dataclass
class Book:
    """What the account holds: the entries of live processes, and the reservation that stands."""

    entries: list[Entry] = field(default_factory=list)
    reservation: Reservation | None = None


class HostAccount:
    """The account; only the main thread of a process uses it."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is made where it is missing, for its owner alone; None: a place that all farms of the user find."""
        self._folder = folder or default_folder()
        self._file: int | None = None
        self._started = started(os.getpid()) or 0
        self._seen = 0  # when the file had been changed, at the end of the latest look (ns)

    def __del__(self) -> None:
        self._close()

    def entry(self, task: str, memory_mb: float, cpus: float) -> Entry:
        """An entry of this process."""
        return Entry(os.getpid(), self._started, task, memory_mb, cpus)

    @contextmanager
    def opened(self) -> Iterator[Book]:
        """The book, under the lock; what the block changes is written. Raises NoAccount, after LOCK_SEC at most."""
        file = self._locked()
        try:
            before = os.pread(file, _SIZE, 0).partition(b"\n")[0]
            book = _read(before)
            yield book
            # One write, and readers go up to the line's end: a process that is killed leaves the old or the new line.
            if (after := _written(book)) != before:
                os.pwrite(file, after + b"\n", 0)
            self._seen = os.fstat(file).st_mtime_ns
        except OSError as e:  # its file system is full
            raise NoAccount(f"{self._folder / NAME} cannot be written: {e.strerror}") from None
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN)

    def has_changed(self) -> bool:
        """Whether somebody else has changed the book since this process has looked; within 4 ms it may not tell."""
        return self._file is not None and os.fstat(self._file).st_mtime_ns != self._seen

    def _locked(self) -> int:
        """The file, locked; the one that has the name, for a clean-up of the folder may have removed the one before."""
        until = now() + LOCK_SEC
        while True:
            if self._file is None:
                self._file = _open(self._folder)
            if _lock(self._file):
                if os.fstat(self._file).st_nlink:
                    return self._file
                self._close()
            elif now() > until:
                raise NoAccount(f"another process has held the lock of {self._folder / NAME} for {LOCK_SEC:g} s")
            else:
                time.sleep(LOCK_SEC / 100)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def default_folder() -> Path:
    """The folder of the account where DL_HOST_ACCOUNT names none: one for each user of the host."""
    shared = next((place for place in SHARED if place.is_dir()), SHARED[-1])
    return shared / f"dataloader-{os.geteuid()}"


def _open(folder: Path) -> int:
    """The account's file, in a folder that nobody else may enter; raises NoAccount."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _require_private(folder, os.fstat(above))
            return os.open(NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=above)
        finally:
            os.close(above)
    except OSError as e:
        raise NoAccount(f"{folder / NAME} cannot be opened: {e.strerror}; remove it, or set DL_HOST_ACCOUNT") from None


def _require_private(folder: Path, found: os.stat_result) -> None:
    # Another user may have made it first, where everybody may make folders.
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise NoAccount(
            f"{folder} should be a folder of user {os.geteuid()} with mode 0700;"
            f" it is of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: remove it, or set"
            " DL_HOST_ACCOUNT"
        )


def _lock(file: int) -> bool:
    # By lockf: such a lock is the process's own, so a pipeline's forked child does not keep it.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(line: bytes) -> Book:
    """The book without the entries of dead processes and a reservation that is over; empty for a broken line."""
    try:
        said: dict[str, Any] = json.loads(line or b"{}")
        entries = [Entry(*each) for each in said.get("entries", ())]
        reservation = Reservation(*said["reservation"]) if said.get("reservation") else None
    except (ValueError, TypeError, AttributeError):
        return Book()
    stands = reservation and reservation.until > now()
    return Book([each for each in entries if started(each.pid) == each.started], reservation if stands else None)


def _written(book: Book) -> bytes:
    return json.dumps({"entries": book.entries, "reservation": book.reservation}).encode()
