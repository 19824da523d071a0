"""The needs of a process on its host, checked once at its start and by `dataloader check`. No SQL."""

from __future__ import annotations

import resource
import signal
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

FILES_WISHED = 1_024  # open files: the usual limit, with which connections and pipelines have room
FILES_OF_API = 256
_OF_THE_KERNEL = ("/proc/meminfo", "/proc/stat")
_OPEN = resource.RLIMIT_NOFILE


class Lack(NamedTuple):
    """Something that the host lacks, and what would help."""

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}"


def prepare(files: int = 0, blocked: Collection[signal.Signals] = ()) -> None:
    """Undo harmful settings of the parent process: a limit of open files below `files`, signals but `blocked` ones."""
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # those of a JVM or a thread pool; SIGTERM would have no effect
    soft, hard = resource.getrlimit(_OPEN)
    wished = max(FILES_WISHED, files)
    if soft != resource.RLIM_INFINITY and soft < wished:
        resource.setrlimit(_OPEN, (wished if hard == resource.RLIM_INFINITY else min(wished, hard), hard))


def worker_lacks(files: int) -> Iterator[Lack]:
    """The lacks of the supervisor, its workers and their keeper; each may need so many open files."""
    yield from _too_few(files, "workers need")
    for name in _OF_THE_KERNEL:
        try:
            with open(name) as file:
                file.read(1)
        except OSError as e:
            text = f"{name} cannot be read ({e.strerror}), and workers need the whole of /proc"
            yield Lack(text, "mount /proc without subset=pid; in a unit set ProcSubset=all")
            return


def api_lacks() -> Iterator[Lack]:
    """The lacks of the API."""
    yield from _too_few(FILES_OF_API, "the API needs")
    if not temporary_folder():
        text = "no folder for temporary files can be written to"
        yield Lack(text, "mount a tmpfs at /tmp or /dev/shm, or set TMPDIR")


def _too_few(files: int, subject: str) -> Iterator[Lack]:
    limit = resource.getrlimit(_OPEN)[1]
    if limit != resource.RLIM_INFINITY and limit < files:
        text = f"the limit of open files is {limit}, and {subject} {files}"
        yield Lack(text, "raise it by `ulimit -n`, by LimitNOFILE of a unit, or by nofile of a container")


def temporary_folder() -> str | None:
    """Where gunicorn keeps the files by which it watches its processes: in memory, for a slow disk would end them."""
    for folder in ("/dev/shm", None):  # noqa: S108  the file has no name there
        with suppress(OSError), tempfile.TemporaryFile(dir=folder):
            return folder or tempfile.gettempdir()
    return None
