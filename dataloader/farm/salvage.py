"""The last words of workers that have died: what their runs had written, and the workers not yet. No SQL but theirs.

The keeper opens the files of a worker's output (`farm/capture.py`) while the worker lives, and reads them once it is
dead, before it recovers the job.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from uuid import UUID

from dataloader import log
from dataloader.farm.capture import NAMES, SOURCES
from dataloader.farm.process import now
from dataloader.farm.slots import Slot, State
from dataloader.queue import lifecycle, logs
from dataloader.queue.db import Conn
from dataloader.queue.job import Job
from dataloader.queue.run_log import SAVED, Keys, RunLog, Splitter, Text, harmless, read

SAVED_MOST = 65_536  # bytes of each file that are saved
KEY_MOST = 16_384  # bytes before these in which a private key may begin


class Salvage:
    """The files of the living workers' output, by slot: the worker's pid and the descriptors here."""

    def __init__(self, most_kb: int) -> None:
        self._most = int(most_kb * 1024 * SAVED)
        self._echoes = dict(zip(SOURCES, (log.echo(1), log.echo(2)), strict=True)) if most_kb else {}
        self._files: dict[int, tuple[int, list[int]]] = {}
        # A keeper without a free descriptor could not reconnect.
        self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4

    def look(self, slots: Sequence[Slot]) -> None:
        """Open the files of new workers; costs nothing for those that are known.

        A worker rings at its birth (SharedSlots.born), so that its first run may be its last.
        """
        for slot in slots:
            pid = slot.fields.pid
            is_known = self._files.get(slot.index, (0,))[0] == pid
            if is_known or slot.state in (State.FREE, State.DEAD) or not slot.fields.log_files[0]:
                continue
            self.forget(slot)
            if len(self._files) < self._most_files:
                with suppress(OSError):  # it has died meanwhile
                    self._files[slot.index] = pid, _opened(pid, slot.fields.log_files)

    def write(self, conn: Conn, slot: Slot) -> None:
        """Write what the latest run of a dead worker has left, if its job is still this worker's."""
        pid, files = self._files.get(slot.index, (0, []))
        if pid != slot.fields.pid or not files or not slot.fields.logs or not (job_ids := slot.begun_last):
            return
        places = [*_places(slot, files)]
        if all(_begin(fd, at) == os.fstat(fd).st_size for fd, at, _ in places):
            return
        run = self._run(slot, job_ids[0])
        args = [lifecycle.parsed(text) for text in logs.args_of_run(conn, job_ids, slot.worker)]
        log.learn_job({"jobs": args})
        try:
            said = [each for place in places for each in last_words(*place)]
            _add(run, said)
            logs.write(conn, [run], now())
            self._echo(said)
        finally:
            log.learn_job({})
        slot.fields.logs = False  # once

    def _run(self, slot: Slot, job_id: UUID) -> RunLog:
        claim = Job(job_id, "", "", "{}", None, "", "", slot.begun_attempt, 0, 0, None, 0, slot.worker)
        return RunLog(claim, self._most, now(), slot.fields.log_line)

    def _echo(self, said: Sequence[Text]) -> None:
        """The output goes on to where the worker's own had led."""
        for each in said:
            if each.at is None:
                self._echoes[each.source](each.text.encode("utf-8", "backslashreplace") + b"\n")

    def forget(self, slot: Slot) -> None:
        """Close the files of the slot's worker."""
        for fd in self._files.pop(slot.index, (0, []))[1]:
            os.close(fd)


def _opened(pid: int, numbers: Sequence[int]) -> list[int]:
    found: list[int] = []
    try:
        for number, name in zip(numbers, NAMES, strict=True):
            path = f"/proc/{pid}/fd/{number}"
            if not os.readlink(path).startswith(f"/memfd:{name}"):
                raise FileNotFoundError(path)  # the pid is another process's by now
            found.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        for fd in found:
            os.close(fd)
        raise
    return found


def _places(slot: Slot, files: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    return zip(files, slot.fields.log_places, SOURCES, strict=True)


def last_words(fd: int, at: int, source: str) -> Iterator[Text]:
    """The lines behind a place, masked, as far as they are in the last SAVED_MOST bytes."""
    begin = _begin(fd, at)
    keys = _keys(fd, begin)
    for raw in _lines(os.pread(fd, os.fstat(fd).st_size - begin, begin)):
        said = read(raw, source)
        yield said._replace(text=keys.masked(log.masked(harmless(said.text)), log.MASK))


def _keys(fd: int, begin: int) -> Keys:
    """Whether the lines begin within a private key, whose first line the worker may have written itself."""
    first, keys = max(0, begin - KEY_MOST), Keys()
    for raw in _lines(os.pread(fd, begin - first, first)):
        keys.masked(raw.decode("utf-8", "replace"), log.MASK)
    return keys


def _begin(fd: int, at: int) -> int:
    """The place, or the first line of the last SAVED_MOST bytes."""
    size = os.fstat(fd).st_size
    place, cut = 0 if size < at else at, size - SAVED_MOST
    return place if cut <= place else cut + os.pread(fd, SAVED_MOST, cut).find(b"\n") + 1


def _lines(data: bytes) -> list[bytes]:
    splitter = Splitter()
    return [*splitter.feed(data.lstrip(b"\0")), *splitter.finish()]  # without memory that was given back


def _add(run: RunLog, said: Sequence[Text]) -> None:
    for each in said:
        run.add(min(now(), each.at or now()), each.level, each.source, each.text)
