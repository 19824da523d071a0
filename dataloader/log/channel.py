"""A channel takes lines from any thread and writes them to a sink; no caller waits for the sink.

`put` appends a line to a bounded queue. A thread writes the queue; in a process without this thread, one that forks,
`put` writes as many lines as the sink takes without a wait. A full queue loses the new line. The next written line
carries the number of lines lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic, sleep

from dataloader.log.sinks import File, Stream

QUEUE_LINES = 5_000  # some 2 MB of usual lines
GATHER_SEC = 0.02  # the thread gathers lines for this long: waking it costs more than writing a line
URGENT_SEC = 0.01  # the caller of an error's line waits at most this long, since its process may end next


Counting = Callable[[bytes, int], bytes]


class Channel:
    """The queue in front of one sink. It has no thread until `start`, and none in a child after a fork.

    `put` takes no lock that its holder keeps over a wait, and none that a finaliser's log line could request again.
    """

    def __init__(self, sink: Stream | File, counting: Counting, on_trouble: Callable[[OSError], None]) -> None:
        """`counting` adds the number of lost lines to a line; the channel calls `on_trouble` at the first failure."""
        self._sink = sink
        self._counting = counting
        self._on_trouble = on_trouble
        self._is_broken = False
        self._thread: threading.Thread | None = None
        self._closing = False
        self._clear()

    def _clear(self) -> None:
        self._lines: deque[bytes] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._writing = threading.Lock()
        self._dropping = threading.RLock()
        self.dropped = 0

    @property
    def is_threaded(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: bytes, urgent: bool) -> None:
        """Queue a line, which ends in a newline, or count it as lost."""
        if len(self._lines) < QUEUE_LINES or (self._thread is None and self.drain(0)):
            self._lines.append(line)
        else:
            self._drop(1)
        if self._thread is None:
            self.drain(0)
        elif not (urgent and not self._sink.may_stall and self.drain(URGENT_SEC)) and self._wake.empty():
            self._wake.put(None)

    def drain(self, within: float) -> bool:
        """Write the queued lines in their order, for about `within` seconds; True when the queue is empty."""
        until = monotonic() + within
        if not (self._writing.acquire(timeout=within) if within else self._writing.acquire(blocking=False)):
            return False
        try:
            while self._lines:
                if not self._write_batch():
                    if self._closing or monotonic() >= until:
                        return False
                    self._sink.wait(until - monotonic())
            return True
        finally:
            self._writing.release()

    def after_fork(self) -> None:
        """In the child: forget the queued lines, which the parent writes, and the parent's thread and locks."""
        self._thread = None
        self._clear()

    def close(self, within: float) -> None:
        """Write queued lines for about `within` seconds, end the thread."""
        self.drain(within)
        self._closing = True
        if self._thread:
            self._wake.put(None)
            self._thread.join(within + 1)

    def _run(self) -> None:
        while not self._closing:
            self._wake.get()
            sleep(GATHER_SEC)
            while not self._closing and not self.drain(1.0):
                pass

    def _write_batch(self) -> bool:
        """Write the next lines that fit into one write; False when the sink is not ready."""
        dropped = self.dropped  # the first line reports it
        batch = [self._counting(self._lines[0], dropped) if dropped else self._lines[0]]
        size = len(batch[0])
        for index in range(1, len(self._lines)):
            size += len(self._lines[index])
            if size > self._sink.batch:
                break
            batch.append(self._lines[index])
        trouble = None
        try:
            gone = self._sink.write(batch)
        except OSError as e:
            gone, trouble = len(batch), e
        for _ in range(gone):
            self._lines.popleft()
        if gone:
            self._drop(gone if trouble else -dropped)
            was_broken, self._is_broken = self._is_broken, trouble is not None
            if trouble and not was_broken:
                self._on_trouble(trouble)
        return gone > 0

    def _drop(self, count: int) -> None:
        with self._dropping:
            self.dropped += count
