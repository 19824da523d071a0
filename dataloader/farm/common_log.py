"""Log events of several processes of a farm once for all of them. No SQL.

The children of a supervisor share small files in memory, which it makes before its first fork. The kernel's lock on
such a file belongs to a process, so a crash frees it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dataloader import periods
from dataloader.farm.process import now, started

OUTAGE_SEC = periods.seconds("OUTAGE_EVERY_SEC", 30.0)  # between two lines of one outage
RELAPSE_SEC = 2.0  # a loss so soon after the end of an outage belongs to it: processes notice one restart in turn
WAIT_SEC = 0.05  # for the lock, which is held for microseconds unless its holder is stopped


class Busy(Exception):
    """Another process has the note."""


class Note:
    """A dict that the children of a supervisor share."""

    def __init__(self) -> None:
        self._file = os.memfd_create("note", os.MFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._file)

    @contextmanager
    def changed(self, must: bool = False) -> Iterator[dict[str, Any]]:
        """The dict, for this process alone; what the block changes in it is kept.

        A process that does not get the lock within WAIT_SEC changes a dict that is dropped; with `must` it gets Busy.
        """
        is_ours, until = False, now() + WAIT_SEC
        while not is_ours and now() <= until:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = True
            except BlockingIOError:
                time.sleep(0.001)
        if not is_ours:
            if must:
                raise Busy
            yield {}
            return
        try:
            content = self.read()
            yield content
            text = json.dumps(content).encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def read(self) -> dict[str, Any]:
        """The dict as it is now; another process may be about to change it."""
        content: dict[str, Any] = {}
        with suppress(ValueError):  # a process was killed while it wrote: begin anew
            content = json.loads(os.pread(self._file, 1 << 20, 0) or b"{}")
        return content


class FarmOutage:
    """The database is away: the farm logs that at the first failure of any process, then every OUTAGE_SEC, and the end.

    The end is when every process that has failed has its session again, or is gone.
    """

    def __init__(self, note: Note, logger: Any) -> None:
        self.failures = 0  # of this process, in this outage
        self._note = note
        self._logger = logger

    def failed(self, event: str, error: BaseException) -> None:
        """Count a failure of this process, and log it for the farm when that is due; `event` says what has failed."""
        self.failures += 1
        at, pid = now(), str(os.getpid())
        with self._note.changed() as note:
            if not _away(note) and at > note.get("ended", -RELAPSE_SEC) + RELAPSE_SEC:
                note.clear()
            note.setdefault("began", at)
            note["failures"] = note.get("failures", 0) + 1
            note["away"] = {**_away(note), pid: at}
            is_due = at >= note.get("next_at", at)
            if is_due:
                note["next_at"] = at + OUTAGE_SEC
                note["is_told"] = True
            facts = {"failures": note["failures"], "processes": len(note["away"])}
            facts |= {"lasting_sec": round(at - note["began"])}
        text = str(error).strip()
        if is_due:
            self._logger.warning("farm.database.lost", what=event, error=text, **facts if facts["failures"] > 1 else {})
        else:
            self._logger.debug(event, error=text)

    def ended(self) -> None:
        """This process has a session again; the last one that was away logs the end."""
        if not self.failures:
            return
        self.failures = 0
        with self._note.changed() as note:
            note["away"] = away = {pid: at for pid, at in _away(note).items() if pid != str(os.getpid())}
            is_told = not away and note.pop("is_told", False)
            note["ended"] = now()
            facts = {"failures": note.get("failures", 0), "lasted_sec": round(now() - note.get("began", now()), 1)}
        if is_told:
            self._logger.info("farm.database.back", **facts)


def _away(note: dict[str, Any]) -> dict[str, float]:
    """The processes that have failed and are still there, each with the time of its latest failure."""
    return {pid: at for pid, at in note.get("away", {}).items() if started(int(pid)) is not None}


def once(note: Note, generation: int, action: Callable[[], None], may_wait: Callable[[], bool]) -> bool:
    """Return True once `action` has returned for this generation, in this process or another that shares the note.

    Where the action goes on in another process, a False of `may_wait` ends the wait. An exception reaches the caller.
    """
    while note.read().get("done", -1) < generation:
        try:
            with note.changed(must=True) as facts:
                if facts.get("done", -1) < generation:
                    action()
                    facts["done"] = generation
        except Busy:
            if not may_wait():
                return False
    return True
