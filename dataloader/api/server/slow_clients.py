"""gunicorn's threaded worker, but no thread waits for a client: one poller receives requests and sends answers.

The poller gathers a request until it is whole, gives it to a thread, and sends the part of an answer that the client
does not take at once. An idle, slow or silent client costs a socket and a little memory, both bounded, and no thread.
gunicorn 27 gives each new connection a thread for up to 5 s, and each slow body or reader a thread without a limit.

The class overrides methods that gunicorn does not document, so setup.cfg pins gunicorn to 27.0. waitress 3.0.2 buffers
too, but fails 22 of 51 tests in tests/process/test_slow_clients.py: it accepts two Content-Lengths and chunked bodies,
sets no limit to the time of a head, and drops requests at SIGTERM.
Plain HTTP/1 only; a connection with certificates (`--certfile`) is gunicorn's own.
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

# For the head of a request, counted from the connection or the first byte.
HEAD_SEC = periods.seconds("REQUEST_HEAD_SEC", 10.0)
RATE = 128 * 1024  # bytes/s, the slowest average for a body or an answer beyond HEAD_SEC
CLOSE_SEC = 2.0  # for the client to take the last bytes of an answer before its connection is closed
HEAD_LIMIT = 64 * 1024  # bytes; gunicorn itself refuses smaller heads
BODY_LIMIT = 16 * 1024 * 1024  # bytes; the application refuses a longer Content-Length unread
HELD_LIMIT = 64 * 1024 * 1024  # bytes of requests and answers that wait in this process
CHUNK = 256 * 1024
RESERVE = 200  # file descriptors for database sessions, logs, libraries
LOOK_SEC = 0.5  # between two looks for connections whose time is over
ACCEPTED_AT_ONCE = 64
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
TOO_MUCH = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
URGENT = b"GET /health "  # does not queue behind other requests
_END = re.compile(rb"\r?\n\r?\n")
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*([0-9]{1,12})[ \t]*\r?\n", re.IGNORECASE)
_EXPECT = re.compile(rb"\nexpect:[ \t]*100-continue[ \t]*\r?\n", re.IGNORECASE)


def size_of(request: bytes | bytearray, looked: int = 0) -> int | None:
    """The length in bytes of the request that begins so; None while its head is not whole.

    The first `looked` bytes were examined by an earlier call. A body longer than BODY_LIMIT counts as empty.
    """
    if (end := _END.search(request, max(2, looked - 3))) is None:
        return len(request) if len(request) > HEAD_LIMIT else None
    length = _LENGTH.search(request, 0, end.end())
    body = int(length[1]) if length else 0
    return end.end() + (body if body <= BODY_LIMIT else 0)


def is_left(reader: Any) -> bool:
    """True when gunicorn would not discard the unread rest of this body before the next request."""
    return getattr(reader, "length", 0) >= _DRAIN_MAX_BYTES or getattr(reader, "parser", None) is not None


class _Socket(socket.socket):
    """A client's socket as threads see it. A thread reads gathered bytes alone and never waits to send."""

    def __init__(self, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        super().setblocking(False)
        self.gathered = bytearray()
        self.rest = bytearray()  # of answers
        self.is_starved = False  # a thread read past the gathered bytes: where the next request begins is unknown

    # gunicorn calls these in a thread.

    def setblocking(self, flag: bool) -> None:
        pass

    def settimeout(self, value: float | None) -> None:
        pass

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = bytes(self.gathered[:size])
        del self.gathered[:size]
        self.is_starved = self.is_starved or not data
        return data

    def sendall(self, data: Any, flags: int = 0) -> None:
        self.rest += data
        self.flush()

    def send(self, data: Any, flags: int = 0) -> int:
        return len(data)  # gunicorn's "100 Continue": the poller has sent it already

    # The poller calls these.

    def gather(self) -> bool:
        """Receive available bytes; False once the client sends no more. Raises OSError."""
        try:
            data = super().recv(CHUNK)
        except BlockingIOError:
            return True
        self.gathered += data
        return bool(data)

    def flush(self) -> None:
        """Send as much of `rest` as the client takes now. Raises OSError."""
        try:
            while self.rest:
                with memoryview(self.rest) as view:
                    sent = super().send(view[:CHUNK])
                del self.rest[:sent]
        except BlockingIOError:
            pass

    def tell(self, data: bytes) -> None:
        """Try to send a few bytes."""
        with suppress(OSError):
            super().send(data)


class _Connection(TConn):  # type: ignore[misc]  # gunicorn has no types
    """A client's connection; at any time the poller or one thread handles it."""

    def __init__(self, cfg: Any, sock: _Socket, client: Any, server: Any) -> None:
        super().__init__(cfg, sock, client, server)
        self.data_ready = True
        self.stays = True  # open for another request
        self.size: int | None = None  # of the request that is being gathered; None: not known yet
        self.looked = 0  # bytes that size_of has examined
        self.since = 0.0  # begin of the present wait, monotonic
        self.until = 0.0  # its end

    def held(self) -> int:
        """The bytes that the process holds for this connection."""
        return len(self.sock.gathered) + len(self.sock.rest)


class BufferingWorker(ThreadWorker):  # type: ignore[misc]
    """gunicorn's ThreadWorker with buffered requests and answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[_Connection, Callable[[], None]] = {}  # in the poller; and the next step of each
        self._looked = 0.0
        self._stops_at: float | None = None

    def init_process(self) -> None:
        """Raise the limit of file descriptors to the number of connections, or lower the number of connections."""
        wanted = self.cfg.worker_connections + RESERVE
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            self.worker_connections = max(self.cfg.threads, min(self.cfg.worker_connections, soft - RESERVE))
        self._urgent = ThreadPoolExecutor(max_workers=1)
        super().init_process()

    def enqueue_req(self, conn: Any) -> None:
        """Give a request to a thread; GET /health has a thread of its own."""
        is_urgent = isinstance(conn, _Connection) and conn.sock.gathered.startswith(URGENT)
        done = (self._urgent if is_urgent else self.tpool).submit(self.handle, conn)
        done.add_done_callback(lambda future: self.method_queue.defer(self.finish_request, conn, future))

    def handle_request(self, req: Any, conn: Any) -> Any:
        """Announce the close of the connection in the answer where the body was left unread."""
        is_last = req.should_close  # gunicorn calls it before the answer's head and after the answer
        req.should_close = lambda: is_last() or is_left(req.body.reader)
        return super().handle_request(req, conn)

    # The end.

    def handle_exit(self, sig: int, frame: Any) -> None:
        """TERM: end the waits in the application, then let gunicorn stop."""
        if self.alive:
            self.method_queue.defer(self._drain)
        super().handle_exit(sig, frame)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """INT, QUIT: the same at once, because the interpreter waits for its threads at exit."""
        self._drain()
        super().handle_quit(sig, frame)

    def _drain(self) -> None:
        for end in getattr(getattr(self, "wsgi", None), "extensions", {}).get("on_drain", ()):
            end()

    # The poller accepts and gathers, a thread answers, the poller flushes, then keeps the connection or closes it.

    def accept(self, listener: Any) -> None:
        """Accept waiting connections; at the limit close those that have waited longest for their clients."""
        if self.cfg.is_ssl:
            super().accept(listener)
            return
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
        self._gather(conn)

    def finish_request(self, conn: Any, fs: Future[bool]) -> None:
        """A thread has made its answer: the poller sends the rest and waits for the next request, or closes."""
        if not isinstance(conn, _Connection):
            super().finish_request(conn, fs)
            return
        conn.stays = not fs.cancelled() and bool(fs.result()) and not conn.sock.is_starved
        if conn.stays:  # the parser has read ahead
            conn.sock.gathered[:0] = conn.parser.unreader.take_buffered()
        conn.size, conn.looked = None, 0
        conn.since = monotonic()
        conn.until = conn.since + HEAD_SEC + len(conn.sock.rest) / RATE
        self._answer(conn)

    def _keepalive_after(self, conn: Any, keepalive: bool) -> bool:
        """Keep the connection only if the bytes after an unread body can be parsed."""
        try:
            return bool(super()._keepalive_after(conn, keepalive))
        except ParseException:
            return False

    def _answer(self, conn: _Connection) -> None:
        """Send the rest of the answer, then wait for the next request or for the client to close."""
        try:
            conn.sock.flush()
            if conn.sock.rest:
                self._wait(conn, EVENT_WRITE, self._answer)
            elif conn.stays:
                conn.since, conn.until = monotonic(), monotonic() + self.cfg.keepalive
                self._go_on(conn)
            else:
                conn.sock.shutdown(socket.SHUT_WR)
                conn.sock.gathered.clear()
                conn.until = monotonic() + CLOSE_SEC
                self._wait(conn, EVENT_READ, self._see_off)
        except OSError:
            self._close(conn)

    def _gather(self, conn: _Connection) -> None:
        """Receive more of a request."""
        try:
            more = conn.sock.gather()
        except OSError:
            self._close(conn)
            return
        if more:
            self._go_on(conn)
        elif conn.sock.gathered:  # the client sends no more: the application answers what came
            self.enqueue_req(conn)
        else:
            self._close(conn)

    def _go_on(self, conn: _Connection) -> None:
        """Give a whole request to a thread; wait for the rest of another."""
        got = conn.sock.gathered
        if conn.size is None:
            self._look(conn)
        if conn.size is not None and len(got) >= conn.size:
            self.enqueue_req(conn)
            return
        self._wait(conn, EVENT_READ, self._gather)

    def _look(self, conn: _Connection) -> None:
        """Learn the request's size from its head, and allow its body the time that RATE gives."""
        got = conn.sock.gathered
        if got and not conn.looked:
            conn.until = monotonic() + HEAD_SEC  # no longer idle
        conn.size, conn.looked = size_of(got, conn.looked), len(got)
        if conn.size is not None and conn.size > len(got):
            conn.until += conn.size / RATE
            if _EXPECT.search(got, 0, HEAD_LIMIT):
                conn.sock.tell(CONTINUE)

    def _see_off(self, conn: _Connection) -> None:
        """Read on after the last answer until the client closes, so that a reset does not destroy the answer."""
        try:
            if conn.sock.gather() and len(conn.sock.gathered) < HEAD_LIMIT:
                self._wait(conn, EVENT_READ, self._see_off)
                return
        except OSError:
            pass
        self._close(conn)

    # Waiting.

    def _wait(self, conn: _Connection, event: int, then: Callable[[_Connection], None]) -> None:
        self._waiting[conn] = partial(then, conn)
        self.poller.register(conn.sock, event, partial(self._ready, conn))
        if conn.held() > HEAD_LIMIT and sum(map(_Connection.held, self._waiting)) > HELD_LIMIT:
            self._refuse_largest()

    def _ready(self, conn: _Connection, _file: Any) -> None:
        if conn in self._waiting:  # an earlier event of the same select may have closed this connection
            self._stop_waiting(conn)()

    def _stop_waiting(self, conn: _Connection) -> Callable[[], None]:
        self.poller.unregister(conn.sock)
        return self._waiting.pop(conn)

    def _close(self, conn: _Connection) -> None:
        if conn in self._waiting:
            self._stop_waiting(conn)
        self.nr_conns -= 1
        conn.close()

    def _refuse_largest(self) -> None:
        largest = max(self._waiting, key=_Connection.held)
        if not largest.sock.rest:
            largest.sock.tell(TOO_MUCH)
        self._close(largest)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client."""
        if self._waiting:
            self._close(min(self._waiting, key=lambda conn: conn.since))

    def murder_pending(self) -> None:
        """gunicorn calls this in each round: close connections whose time is over."""
        super().murder_pending()
        now = monotonic()
        if self.alive and now < self._looked + LOOK_SEC:
            return
        self._looked = now
        if not self.alive and self._stops_at is None:
            self._stops_at = now + CLOSE_SEC  # as gunicorn: a client may be sending a request
        for conn in [conn for conn in self._waiting if now >= min(conn.until, self._idle_until(conn))]:
            if conn.sock.gathered and conn.stays and not conn.sock.rest:
                conn.sock.tell(TOO_SLOW)
            self._close(conn)

    def _idle_until(self, conn: _Connection) -> float:
        """At a stop the end of the grace for a connection that has sent nothing of a request."""
        is_idle = not (conn.sock.gathered or conn.sock.rest)
        return self._stops_at if self._stops_at is not None and is_idle else conn.until
