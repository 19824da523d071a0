"""gunicorn's threaded worker, but no thread waits for a client: one poller receives requests and sends answers.

The poller receives a whole request, gives it to a thread, and sends the part of an answer that the client does not
accept at once. An idle, slow or silent client costs a socket and a little memory, both bounded, and no thread.
gunicorn 27 gives each new connection a thread for up to 5 s, and each slow body or reader a thread without a limit.

The class overrides methods that gunicorn does not document, so setup.cfg pins gunicorn to 27.0. waitress 3.0.2 buffers
too, but fails 22 of 51 tests in tests/process/test_slow_clients.py: it accepts two Content-Lengths and chunked bodies,
sets no limit to the time of a head, and drops requests at SIGTERM.
The class handles plain HTTP/1; gunicorn_config refuses certificates, which are a proxy's.
"""

from __future__ import annotations

import errno
import re
import resource
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic
from typing import Any

from gunicorn.http.errors import ParseException  # type: ignore[import-untyped]
from gunicorn.http.parser import _DRAIN_MAX_BYTES  # type: ignore[import-untyped]
from gunicorn.workers.gthread import TConn, ThreadWorker  # type: ignore[import-untyped]

from dataloader import periods

# The time limit for the head of a request, from the connection or the first byte on.
HEAD_SEC = periods.seconds("REQUEST_HEAD_SEC", 10.0)
RATE = 128 * 1024  # bytes/s, the slowest average for a body or an answer beyond HEAD_SEC
CLOSE_SEC = 2.0  # for the client to take the last bytes of an answer before its connection is closed
HEAD_LIMIT = 64 * 1024  # bytes; more than the longest head that gunicorn accepts
BODY_LIMIT = 16 * 1024 * 1024  # bytes; the application refuses a longer Content-Length before it reads the body
HELD_LIMIT = 64 * 1024 * 1024  # bytes of requests and answers that wait in this process
CHUNK = 256 * 1024
RESERVE = 200  # file descriptors for database sessions, logs, libraries
CHECK_SEC = 0.5  # between two checks for connections whose time is over
ACCEPTED_AT_ONCE = 64
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
TOO_MUCH = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
URGENT = b"GET /health "  # such a request does not queue behind others
_END = re.compile(rb"\r?\n\r?\n")
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*([0-9]{1,12})[ \t]*\r?\n", re.IGNORECASE)
_EXPECT = re.compile(rb"\nexpect:[ \t]*100-continue[ \t]*\r?\n", re.IGNORECASE)


def size_of(request: bytes | bytearray, examined: int = 0) -> int | None:
    """The length in bytes of the request that begins with these bytes; None while its head is not whole.

    The first `examined` bytes were examined by an earlier call. A body longer than BODY_LIMIT counts as empty.
    """
    if (end := _END.search(request, max(2, examined - 3))) is None:
        return len(request) if len(request) > HEAD_LIMIT else None
    length = _LENGTH.search(request, 0, end.end())
    body = int(length[1]) if length else 0
    return end.end() + (body if body <= BODY_LIMIT else 0)


def has_unread_rest(reader: Any) -> bool:
    """True when gunicorn would not discard the unread rest of this body before the next request."""
    return getattr(reader, "length", 0) >= _DRAIN_MAX_BYTES or getattr(reader, "parser", None) is not None


class _Socket(socket.socket):
    """A client's socket for threads. A thread reads only bytes that are received already, and never waits to send."""

    def __init__(self, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        super().setblocking(False)
        self.received = bytearray()
        self.unsent = bytearray()  # bytes of answers
        self.is_starved = False  # a thread wanted more bytes: the begin of the next request is not known

    # gunicorn calls these in a thread.

    def setblocking(self, flag: bool) -> None:
        pass

    def settimeout(self, value: float | None) -> None:
        pass

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = bytes(self.received[:size])
        del self.received[:size]
        self.is_starved = self.is_starved or not data
        return data

    def sendall(self, data: Any, flags: int = 0) -> None:
        self.unsent += data
        self.flush()

    def send(self, data: Any, flags: int = 0) -> int:
        return len(data)  # gunicorn sends "100 Continue" by it, and the poller has already sent that

    # The poller calls these.

    def receive(self) -> bool:
        """Receive available bytes; False once the client sends no more. Raises OSError."""
        try:
            data = super().recv(CHUNK)
        except BlockingIOError:
            return True
        self.received += data
        return bool(data)

    def flush(self) -> None:
        """Send as much of `unsent` as the client accepts now. Raises OSError."""
        try:
            while self.unsent:
                with memoryview(self.unsent) as view:
                    sent = super().send(view[:CHUNK])
                del self.unsent[:sent]
        except BlockingIOError:
            pass

    def try_send(self, data: bytes) -> None:
        with suppress(OSError):
            super().send(data)


class _Connection(TConn):  # type: ignore[misc]  # gunicorn has no types
    """A client's connection; at any time the poller or one thread handles it."""

    def __init__(self, cfg: Any, sock: _Socket, client: Any, server: Any) -> None:
        super().__init__(cfg, sock, client, server)
        self.data_ready = True
        self.is_kept = True  # stays open for another request
        self.size: int | None = None  # of the request that is being received; None: not known yet
        self.examined = 0  # bytes that size_of has examined
        self.since = 0.0  # monotonic time of the begin of the present wait
        self.until = 0.0  # its end

    def held(self) -> int:
        """The bytes that the process holds for this connection."""
        return len(self.sock.received) + len(self.sock.unsent)


class BufferingWorker(ThreadWorker):  # type: ignore[misc]
    """gunicorn's ThreadWorker with buffered requests and answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Connections in the poller, with their next steps.
        self._waiting: dict[_Connection, Callable[[_Connection], None]] = {}
        self._checked_at = 0.0
        self._stops_at: float | None = None

    def init_process(self) -> None:
        """Raise the limit of file descriptors to the number of connections, or lower the number of connections."""
        needed = self.cfg.worker_connections + RESERVE
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            self.worker_connections = max(self.cfg.threads, min(self.cfg.worker_connections, soft - RESERVE))
        self._urgent = ThreadPoolExecutor(max_workers=1)
        super().init_process()

    def enqueue_req(self, conn: _Connection) -> None:
        """Give a request to a thread; GET /health has a thread of its own."""
        pool = self._urgent if conn.sock.received.startswith(URGENT) else self.tpool
        done = pool.submit(self.handle, conn)
        done.add_done_callback(lambda future: self.method_queue.defer(self.finish_request, conn, future))

    def handle_request(self, req: Any, conn: Any) -> Any:
        """Announce in the answer that the connection closes, if the request has an unread body."""
        is_last = req.should_close  # gunicorn calls it before and after the answer
        req.should_close = lambda: is_last() or has_unread_rest(req.body.reader)
        return super().handle_request(req, conn)

    # The stop.

    def handle_exit(self, sig: int, frame: Any) -> None:
        """TERM: end the waits in the application, then let gunicorn stop."""
        if self.alive:
            self.method_queue.defer(self._drain)
        super().handle_exit(sig, frame)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """INT, QUIT: end the waits now, because the interpreter waits for its threads at exit."""
        self._drain()
        super().handle_quit(sig, frame)

    def _drain(self) -> None:
        for end in getattr(getattr(self, "wsgi", None), "extensions", {}).get("on_drain", ()):
            end()

    # The poller accepts and receives, a thread answers, the poller flushes, then keeps the connection or closes it.

    def accept(self, listener: Any) -> None:
        """Accept new connections; at the limit close those that have waited longest for their clients."""
        try:
            for _ in range(ACCEPTED_AT_ONCE):
                client, address = listener.accept()
                self._begin(_Connection(self.cfg, _Socket(client), address, listener.getsockname()))
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            elif e.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EWOULDBLOCK):
                raise

    def _begin(self, conn: _Connection) -> None:
        self.nr_conns += 1
        if self.nr_conns >= self.worker_connections:
            self._make_room()
        conn.since, conn.until = monotonic(), monotonic() + HEAD_SEC
        self._go_on(conn, self._receive)

    def finish_request(self, conn: _Connection, fs: Future[bool]) -> None:
        """After the answer of a thread: the poller sends the unsent bytes, then waits for a request or closes."""
        conn.is_kept = not fs.cancelled() and bool(fs.result()) and not conn.sock.is_starved
        if conn.is_kept:  # the parser has read ahead
            conn.sock.received[:0] = conn.parser.unreader.take_buffered()
        conn.size, conn.examined = None, 0
        conn.since = monotonic()
        conn.until = conn.since + HEAD_SEC + len(conn.sock.unsent) / RATE
        self._go_on(conn, self._answer)

    def _keepalive_after(self, conn: Any, keepalive: bool) -> bool:
        """Keep the connection only if the bytes after an unread body can be parsed."""
        try:
            return bool(super()._keepalive_after(conn, keepalive))
        except ParseException:
            return False

    def _answer(self, conn: _Connection) -> None:
        """Send the unsent bytes, then wait for the next request or for the client to close."""
        conn.sock.flush()
        if conn.sock.unsent:
            self._wait(conn, EVENT_WRITE, self._answer)
        elif conn.is_kept:
            conn.since, conn.until = monotonic(), monotonic() + self.cfg.keepalive
            self._dispatch_or_wait(conn)
        else:
            conn.sock.shutdown(socket.SHUT_WR)
            conn.sock.received.clear()
            conn.until = monotonic() + CLOSE_SEC
            self._wait(conn, EVENT_READ, self._await_close)

    def _receive(self, conn: _Connection) -> None:
        if conn.sock.receive():
            self._dispatch_or_wait(conn)
        elif conn.sock.received:  # the client sends no more: the application answers the incomplete request
            self.enqueue_req(conn)
        else:
            self._close(conn)

    def _dispatch_or_wait(self, conn: _Connection) -> None:
        """Give a whole request to a thread; wait for the missing bytes of a partial one."""
        received = conn.sock.received
        if conn.size is None:
            self._read_head(conn)
        if conn.size is not None and len(received) >= conn.size:
            self.enqueue_req(conn)
            return
        self._wait(conn, EVENT_READ, self._receive)

    def _read_head(self, conn: _Connection) -> None:
        """Get the size of the request from its head, and extend the time for the body by RATE."""
        received = conn.sock.received
        if received and not conn.examined:
            conn.until = monotonic() + HEAD_SEC  # no longer idle
        conn.size, conn.examined = size_of(received, conn.examined), len(received)
        if conn.size is not None and conn.size > len(received):
            conn.until += conn.size / RATE
            if _EXPECT.search(received, 0, HEAD_LIMIT):
                conn.sock.try_send(CONTINUE)

    def _await_close(self, conn: _Connection) -> None:
        """Read until the client closes: a reset by an early close could destroy the last answer."""
        if conn.sock.receive() and len(conn.sock.received) < HEAD_LIMIT:
            self._wait(conn, EVENT_READ, self._await_close)
        else:
            self._close(conn)

    # Waiting.

    def _wait(self, conn: _Connection, event: int, then: Callable[[_Connection], None]) -> None:
        self._waiting[conn] = then
        self.poller.register(conn.sock, event, partial(self._ready, conn))
        if conn.held() > HEAD_LIMIT and sum(map(_Connection.held, self._waiting)) > HELD_LIMIT:
            largest = max(self._waiting, key=_Connection.held)
            if not largest.sock.unsent:
                largest.sock.try_send(TOO_MUCH)
            self._close(largest)

    def _ready(self, conn: _Connection, _file: Any) -> None:
        if conn in self._waiting:  # an earlier event of the same select may have closed this connection
            self._go_on(conn, self._stop_waiting(conn))

    def _go_on(self, conn: _Connection, then: Callable[[_Connection], None]) -> None:
        """Call `then`, and close the connection where that fails."""
        try:
            then(conn)
        except OSError:
            self._close(conn)

    def _stop_waiting(self, conn: _Connection) -> Callable[[_Connection], None]:
        self.poller.unregister(conn.sock)
        return self._waiting.pop(conn)

    def _close(self, conn: _Connection) -> None:
        if conn in self._waiting:
            self._stop_waiting(conn)
        self.nr_conns -= 1
        conn.close()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client."""
        if self._waiting:
            self._close(min(self._waiting, key=lambda conn: conn.since))

    def murder_pending(self) -> None:
        """gunicorn calls this in each round: close connections whose time is over."""
        super().murder_pending()
        now = monotonic()
        if self.alive and now < self._checked_at + CHECK_SEC:
            return
        self._checked_at = now
        if not self.alive and self._stops_at is None:
            self._stops_at = now + CLOSE_SEC  # a client may be sending a request; gunicorn waits too
        for conn in list(self._waiting):
            is_idle = not (conn.sock.received or conn.sock.unsent)
            if now < conn.until and not (is_idle and self._stops_at is not None and now >= self._stops_at):
                continue
            if conn.sock.received and conn.is_kept and not conn.sock.unsent:
                conn.sock.try_send(TOO_SLOW)
            self._close(conn)
