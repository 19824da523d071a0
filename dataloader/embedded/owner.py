"""A lock and children that end with the program that owns them, also when it is killed.

`take_lock` and `release` guard a folder against a second owner; `dies_with_us` is for Popen.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

LOCK_WITHIN = 10.0  # seconds, enough for a previous owner to stop

_held: set[IO[str]] = set()


class EmbeddedError(Exception):
    """The embedded PostgreSQL cannot be used; the message says why and what to do."""


def take_lock(path: Path, within: float = LOCK_WITHIN) -> IO[str]:
    """Take the lock file `path`; EmbeddedError when another process holds it for `within` seconds.

    The lock ends with `release` or with this process; a forked child does not hold it. The call makes a missing
    folder of `path`, with a mode that lets other users enter it; they cannot open the file, which is enough for a lock.
    """
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        folder.chmod(0o755)  # despite the umask, since another user runs the server
    lock = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a+", encoding="utf-8")
    os.fchmod(lock.fileno(), 0o600)  # a version before made the file readable by all
    deadline = time.monotonic() + within
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                with lock:
                    lock.seek(0)
                    holder = lock.read().strip() or "unknown"
                raise EmbeddedError(f"{path.parent} is in use by another program (process {holder})") from None
        time.sleep(0.05)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    _held.add(lock)
    return lock


def release(lock: IO[str]) -> None:
    """Give up a lock; a second call does nothing."""
    _held.discard(lock)
    lock.close()


def _forget_locks() -> None:
    # fork shares the open file, and with it the flock: a child would keep the lock after its parent's death.
    for lock in list(_held):
        release(lock)


os.register_at_fork(after_in_child=_forget_locks)


def dies_with_us(sig: int) -> Callable[[], None]:
    """A `preexec_fn` for Popen: the child gets `sig` when the thread that starts it ends. It works only on Linux."""
    if sys.platform != "linux":
        return lambda: None
    owner, prctl = os.getpid(), ctypes.CDLL(None).prctl  # looked up before the fork

    def ask() -> None:
        prctl(1, sig)  # PR_SET_PDEATHSIG, after Popen's setuid, which would clear it
        if os.getppid() != owner:
            os._exit(1)  # the parent ended before prctl

    return ask
