"""Captures the output of a run line by line: its logging, its `print`, and the output of its child processes.

From its first run until the worker waits, its descriptors 1 and 2 are two files in memory. A file takes any output at
once, also that of a C call that holds the GIL, and its end does not wait for children that have it open. The worker
reads the files at the end of the run, and the heartbeat's thread while a longer one is under way; each line goes on to
where the descriptors had led before. A line of logging stands in the file as well, with a mark, because the keeper
saves what a worker that has died did not write (`farm/keeper.py`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog

from dataloader import log
from dataloader.farm.process import now
from dataloader.farm.slots import Slot
from dataloader.queue.job import Job
from dataloader.queue.run_log import Keys, RunLog, Splitter, harmless, marked, read

NAMES = ("dl-stdout", "dl-stderr")  # of the files
SOURCES = ("stdout", "stderr")
WRITE_SEC = 1.0  # between two writes of a run under way
POLL_SEC = (0.2, 1.0)  # between two reads: while output comes, and in silence
CHUNK = 262_144  # bytes of one read
FLOOD = 4 * 2**20  # bytes behind which the output is only counted, up to its last CHUNK
FLOOD_LINES = 100_000  # the same limit in lines, because each costs time and the heartbeat waits for this read
COUNTED = 32 * 2**20  # bytes that are counted; of more the number is estimated, or the writer would be faster
KEPT = 2**19  # bytes that stay in a file for the keeper
COMPARED = 64  # bytes by which a read knows that the file is the one it left
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)


class Output:
    """One of the two files, and how far it was read."""

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)
        self.at = 0  # how far it was read
        self._last = b""  # the last bytes that were read, which still lie before `at`
        self._freed = 0  # how far its memory is given back
        self.splitter = Splitter()

    @property
    def is_silent(self) -> bool:
        """Whether there is no output. Every run checks this, by lseek: fstat costs three times as much."""
        return os.lseek(self.fd, 0, os.SEEK_END) == self.at and not self.splitter.waiting

    def read(self) -> Iterator[bytes | int]:
        """The new lines, and the numbers of skipped lines if there were too many."""
        size = os.fstat(self.fd).st_size
        # A program that opens the file as `> /dev/stdout` does truncates it, and may have written as much again.
        if size < self.at or os.pread(self.fd, len(self._last), self.at - len(self._last)) != self._last:
            self.at = self._freed = 0
            self._last = b""
            yield from self.splitter.finish()  # else `done` would lie before the file's begin
        if size - self.at > FLOOD:
            yield self._count(size - CHUNK)
        lines_read = 0
        while self.at < size:
            if lines_read > FLOOD_LINES and size - self.at > CHUNK:
                yield self._count(size - CHUNK)
            data = os.pread(self.fd, min(CHUNK, size - self.at), self.at)
            if not data:
                return
            self.at += len(data)
            self._last = data[-COMPARED:]
            lines = self.splitter.feed(data)
            lines_read += len(lines)
            yield from lines
            self._free()

    def _count(self, until: int) -> int:
        lines, begin, end = 0, self.at, min(until, self.at + COUNTED)
        while self.at < end and (data := os.pread(self.fd, min(2**20, end - self.at), self.at)):
            self.at += len(data)
            self._last = data[-COMPARED:]
            lines += data.count(b"\n")
            self._free()
        if end < until and self.at == end:
            lines = lines * (until - begin) // (end - begin)
            self.at = until
            self._last = b""  # the next read, which follows at once, sets it
            self._free()
        return lines

    def _free(self) -> None:
        """Give back the memory of what was read long ago."""
        begin, end = self._freed, self.at - KEPT
        if end - begin > KEPT:
            span = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
            _libc.fallocate(self.fd, _KEEP_SIZE | _PUNCH_HOLE, *span)
            self._freed = end

    @property
    def done(self) -> int:
        return self.at - self.splitter.waiting


class Capture:
    """The output of one worker's runs. The worker's thread begins and ends a run; the heartbeat's thread reads."""

    def __init__(self, most_kb: int, slot: Slot, beyond: tuple[int, int] | None) -> None:
        """At most `most_kb` of each run. `beyond`: the former targets of descriptors 1 and 2; None: no capture."""
        self.run: RunLog | None = None  # of the run under way, if it has a log
        self.write_at = 0.0  # when lines may be written again
        self.read_at = 0.0
        self._most = most_kb * 1024
        self._slot = slot
        self._outputs: list[Output] = []
        self._before: tuple[int, int] = beyond or (1, 2)
        self._is_redirected = False
        self._pause = POLL_SEC[0]
        self._reading = threading.Lock()
        self._keys = Keys()
        self._echoes: list[Callable[[bytes], None]] = []
        if beyond is None or not self._most:
            return
        try:
            self._outputs = [Output(name) for name in NAMES]
        except OSError as e:
            structlog.get_logger("worker").warning("worker.logs.off", error=str(e))
            return
        self._echoes = [log.echo(fd) for fd in self._before]
        self._slot.log_files[:] = [output.fd for output in self._outputs]
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a pipeline's module may have put something else there
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def begin(self, job: Job, is_wanted: bool, follows: bool = False) -> None:
        """A run begins: from now on the output of this process is its log, where that is wanted.

        Where it `follows` another one at once, lines that come between them are in its log.
        """
        slot = self._slot
        slot.logs = False
        if not self._outputs:
            return
        if not follows:
            self._read_files(None)  # what a process has written that was started by an earlier run
        self._keys = Keys()  # a key that was begun there ends there
        if not is_wanted:
            return self.rest()
        self.run = run = RunLog(job, self._most, now())
        self._pause = POLL_SEC[0]
        self.read_at, self.write_at = run.began + self._pause, run.began
        self._show_written(run, [output.done for output in self._outputs])
        slot.logs = True
        if not self._is_redirected:
            self._redirect([output.fd for output in self._outputs])
        log.divert(self._take_event)

    def end(self, error: str | None = None) -> RunLog | None:
        """The run is over, with this error: its log, if there is a line that is not written."""
        run, self.run = self.run, None
        if run is None:
            return None
        log.divert(None)
        self._flush()
        self._read_files(run, is_over=True)
        for line in (error or "").split("\n") if error else ():
            run.add(now(), "error", "log", line)
        return run if run.has_news else None

    def rest(self) -> None:
        """No run follows at once: the descriptors lead to where they had led, and the keeper saves no last words."""
        self._slot.logs = False
        if self._is_redirected:
            self._redirect(self._before)
            self._read_files(None)

    def _redirect(self, fds: Sequence[int]) -> None:
        self._flush()
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        self._is_redirected = fds is not self._before

    def _flush(self) -> None:
        with suppress(Exception):  # a pipeline has closed one of them, or put something else there
            sys.stdout.flush()
            sys.stderr.flush()
        _libc.fflush(None)

    def read_output(self) -> None:
        """Read what has come, in the heartbeat's thread; again soon, where something has."""
        run = self.run
        if run is None:
            return
        before = run.number
        self._read_files(run)
        self._pause = POLL_SEC[0] if run.number > before else min(2 * self._pause, POLL_SEC[1])
        self.read_at = now() + self._pause

    def _read_files(self, run: RunLog | None, is_over: bool = False) -> None:
        stdout, stderr = self._outputs
        if stdout.is_silent and stderr.is_silent:
            return
        with self._reading:
            for output, source, echo in zip(self._outputs, SOURCES, self._echoes, strict=True):
                for raw in output.read():
                    self._take(run, raw, source, echo)
                if is_over or run is None:
                    for raw in output.splitter.finish():
                        self._take(run, raw, source, echo)

    def _take(self, run: RunLog | None, raw: bytes | int, source: str, echo: Callable[[bytes], None]) -> None:
        if isinstance(raw, int):
            echo(b"[%d lines of output were too many to be shown]\n" % raw)
            if run is not None:
                run.skip(raw)
            return
        line = read(raw, source)
        plain = harmless(line.text)  # before the masking: a color may stand within a secret
        text = self._keys.masked(log.masked(plain), log.MASK)
        if line.at is None:  # a line of logging is in the log stream already
            echo((raw if text == plain else text.encode("utf-8", "backslashreplace")) + b"\n")
        if run is not None:
            at = now()
            run.add(at if line.at is None else min(at, max(run.began, line.at)), line.level, line.source, text)

    def _take_event(self, level: str, whole: Mapping[str, Any]) -> None:
        """Write an event of logging among the lines of the run, also in a process that the pipeline has forked."""
        with suppress(Exception):  # a log call never raises, with any fields
            os.write(self._outputs[0].fd, marked(level, now(), log.as_lines(whole)))

    def places(self) -> list[int]:
        """Up to where the files were read, for `written`."""
        with self._reading:
            return [output.done for output in self._outputs]

    def written(self, run: RunLog, places: list[int]) -> None:
        """The lines up to these places are in the database: the keeper need not save them."""
        self.write_at = now() + (WRITE_SEC if not run.is_long else 10 * WRITE_SEC)
        self._show_written(run, places)

    def _show_written(self, run: RunLog, places: list[int]) -> None:
        self._slot.log_line = run.written
        self._slot.log_places[:] = places


def beyond() -> tuple[int, int] | None:
    """Copies of descriptors 1 and 2, which stay when these change; None if one of them is closed."""
    try:
        return fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError as e:
        if e.errno != errno.EBADF:
            raise
        return None
