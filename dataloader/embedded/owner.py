"""What lasts exactly as long as the program that owns it, however that ends: a lock, and children.

`take_lock` and `release` guard a folder against a second owner; `dies_with_us` is for Popen. May import `errors`.
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

from dataloader.embedded.errors import EmbeddedError

LOCK_WITHIN = 10.0  # seconds; the previous owner may be stopping

_held: set[IO[str]] = set()


def take_lock(path: Path, within: float = LOCK_WITHIN) -> IO[str]:
    """Become the owner of what `path` guards; EmbeddedError when the last one keeps it for `within` seconds.

    The lock ends with `release` or with this process; a forked child does not hold it. Its folder is made
    if missing, so that other users may go through it.
    """
    _make_folder(path.parent)
    lock = path.open("a+", encoding="utf-8")
    deadline = time.monotonic() + within
    while not _try_lock(lock):
        if time.monotonic() > deadline:
            with lock:
                raise EmbeddedError(f"{path.parent} is in use by another program (process {_signature(lock)})")
        time.sleep(0.05)
    _sign(lock)
    _held.add(lock)
    return lock


def release(lock: IO[str]) -> None:
    """Give up a lock; harmless when repeated."""
    _held.discard(lock)
    lock.close()


def _make_folder(folder: Path) -> None:
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        made.chmod(0o755)  # whatever the umask: another user runs the server


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(lock: IO[str]) -> None:
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _signature(lock: IO[str]) -> str:
    """The process that signed last."""
    lock.seek(0)
    return lock.read().strip() or "unknown"


def _forget_locks() -> None:
    # A flock belongs to the open file, which fork shares: a child would keep it after its parent's death.
    for lock in list(_held):
        release(lock)


os.register_at_fork(after_in_child=_forget_locks)


def dies_with_us(sig: int) -> Callable[[], None]:
    """A `preexec_fn` for Popen: the child gets `sig` when the thread that starts it ends. Only on Linux."""
    if sys.platform != "linux":
        return lambda: None
    owner, prctl = os.getpid(), ctypes.CDLL(None).prctl  # looked up before the fork

    def ask() -> None:
        prctl(1, sig)  # PR_SET_PDEATHSIG; asked after Popen's setuid, which would clear it
        if os.getppid() != owner:
            os._exit(1)  # the parent ended before we asked

    return ask
