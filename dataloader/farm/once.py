"""One process of a farm does an action for all of them: a lock between them, and a note that it is done. No SQL."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable

_NOTE = struct.Struct("q")


class Once:
    """One of a supervisor's children does an action in each generation, while the others wait.

    The children share a file in memory, which the supervisor makes before its first fork. The kernel's lock on the file
    belongs to a process, so a crash frees it. The file holds the latest generation for which the action is done.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("once", os.MFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._file)

    def once(self, generation: int, action: Callable[[], None], may_wait: Callable[[], bool]) -> bool:
        """Return True once `action` has returned for this generation, in this process or another.

        While the action goes on in another process, this one calls `may_wait` again and again: that waits a little, and
        its False ends the wait and this call. An exception of `action` reaches the caller; the next process tries it.
        """
        while not self._is_done(generation):
            if self._is_ours():
                try:
                    if not self._is_done(generation):
                        action()
                        os.pwrite(self._file, _NOTE.pack(generation), 0)
                finally:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)
            elif not may_wait():
                return False
        return True

    def _is_done(self, generation: int) -> bool:
        note = os.pread(self._file, _NOTE.size, 0)
        return bool(note) and _NOTE.unpack(note)[0] >= generation

    def _is_ours(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
