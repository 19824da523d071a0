"""The way of a line from whoever logs it to where it is written, on which nobody waits.

A line is put into a bounded queue; a thread writes it, or, in a process that forks, whoever logs does as far as that
takes no waiting. What does not fit is lost and counted, and the next line that gets through says how many. May import
`sinks`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Protocol

QUEUE_LINES = 5_000  # some 2 MB of usual lines
GATHER_SEC = 0.02  # how long a line may wait for others: to wake the thread costs more than to write a line
URGENT_SEC = 0.01  # what an error's line may cost the caller, so that it is out before the process ends


class Sink(Protocol):
    """A place to write to; `batch` is how many bytes it takes at once."""

    @property
    def batch(self) -> int: ...
    @property
    def may_stall(self) -> bool: ...
    def write(self, lines: Sequence[bytes]) -> int: ...
    def wait(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class Channel:
    """The queue before one sink. It works without a thread until `start`, and again in a child after a fork.

    Nothing here takes a lock that is held while something waits, or that a log line of a finaliser could want again.
    """

    def __init__(self, sink: Sink, tell: Callable[[bytes, int], bytes], on_trouble: Callable[[OSError], None]) -> None:
        """`tell` adds the number of the lost to a line; `on_trouble` hears of the first of several failures."""
        self._sink = sink
        self._tell = tell
        self._on_trouble = on_trouble
        self._is_broken = False
        self._thread: threading.Thread | None = None
        self._closing = False
        self._clear()

    def _clear(self) -> None:
        self._lines: deque[bytes] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._writing = threading.Lock()
        self._counting = threading.RLock()
        self.dropped = 0

    def start(self) -> None:
        """Leave the writing to a thread from now on."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes, urgent: bool) -> None:
        """Take a line that ends in a newline, or count it as lost."""
        if len(self._lines) < QUEUE_LINES or (self._thread is None and self.drain(0)):
            self._lines.append(line)
        else:
            self._drop(1)
        if self._thread is None:
            self.drain(0)
        elif not (urgent and not self._sink.may_stall and self.drain(URGENT_SEC)) and self._wake.empty():
            self._wake.put(None)

    def drain(self, within: float) -> bool:
        """Write what waits, in its order, in about so many seconds; True when nothing is left."""
        until = monotonic() + within
        if not (self._writing.acquire(timeout=within) if within else self._writing.acquire(blocking=False)):
            return False
        try:
            while self._lines:
                if not self._wrote_some():
                    if self._closing or monotonic() >= until:
                        return False
                    self._sink.wait(until - monotonic())
            return True
        finally:
            self._writing.release()

    def after_fork(self) -> None:
        """In the child: what waits is the parent's to write, and its thread and locks are not here."""
        self._thread = None
        self._clear()

    def close(self, within: float) -> None:
        """Write what can be written in this time, and end the thread."""
        self.drain(within)
        self._closing = True
        if self._thread:
            self._wake.put(None)
            self._thread.join(within + 1)
        self._sink.close()

    def _run(self) -> None:
        while not self._closing:
            self._wake.get()
            sleep(GATHER_SEC)
            while not self._closing and not self.drain(1.0):
                pass

    def _wrote_some(self) -> bool:
        """Write a batch; False when the sink is not ready."""
        batch, told = self._batch()
        try:
            taken = self._sink.write(batch)
        except OSError as e:
            self._lost(len(batch), e)
            return True
        for _ in range(taken):
            self._lines.popleft()
        if taken:
            self._drop(-told)
            self._is_broken = False
        return taken > 0

    def _batch(self) -> tuple[list[bytes], int]:
        """The next lines that fit into one write, the first with the number of the lost, if there are any."""
        told = self.dropped
        batch = [self._tell(self._lines[0], told) if told else self._lines[0]]
        size = len(batch[0])
        for index in range(1, len(self._lines)):
            size += len(self._lines[index])
            if size > self._sink.batch:
                break
            batch.append(self._lines[index])
        return batch, told

    def _lost(self, count: int, error: OSError) -> None:
        for _ in range(count):
            self._lines.popleft()
        self._drop(count)
        if not self._is_broken:
            self._is_broken = True
            self._on_trouble(error)

    def _drop(self, count: int) -> None:
        if count:
            with self._counting:
                self.dropped += count
