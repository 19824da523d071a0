"""gunicorn's threaded worker, made patient: no thread ever waits for a client.

The poller, which waits for all connections at once, gathers a request until it is whole, only then gives it to a
thread, and sends what of an answer the client does not take at once. So idle, slow and silent clients cost a socket and
a little memory each, both bounded, and no thread. gunicorn's own worker gives each new connection a thread for up to
5 s, each slow body and each slow reader one for as long as they like, and closes in the poller, waiting there.

Plain HTTP/1 only; with certificates (`--certfile`) a connection is gunicorn's own business. May import nothing of the
package.
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

HEAD_SEC = 10.0  # for the head of a request, from its connection or its first byte
RATE = 128 * 1024  # bytes/s of a body or an answer, on average, which the slowest may take beyond that
CLOSE_SEC = 2.0  # for the client to take the last bytes of an answer before its connection is closed
HEAD_LIMIT = 64 * 1024  # bytes; gunicorn refuses smaller ones already
BODY_LIMIT = 16 * 1024 * 1024  # bytes; the application refuses what is declared longer without reading it
HELD_LIMIT = 64 * 1024 * 1024  # bytes of requests and answers that wait in this process
CHUNK = 256 * 1024
RESERVE = 200  # file descriptors for all else: database sessions, logs, libraries
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
    """How many bytes make this beginning of a request whole, or None while its head is not.

    `looked` is how many of them were looked at before. A body that would be refused unread counts as none.
    """
    if (end := _END.search(request, max(2, looked - 3))) is None:
        return len(request) if len(request) > HEAD_LIMIT else None
    length = _LENGTH.search(request, 0, end.end())
    body = int(length[1]) if length else 0
    return end.end() + (body if body <= BODY_LIMIT else 0)


def is_left(reader: Any) -> bool:
    """True when more is left of a body than gunicorn discards for the next request, or when nobody knows how much."""
    return getattr(reader, "length", 0) >= _DRAIN_MAX_BYTES or getattr(reader, "parser", None) is not None


class _Socket(socket.socket):
    """A client's socket as threads see it. It never waits: they read what was gathered, and leave what does not fit."""

    def __init__(self, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        super().setblocking(False)
        self.gathered = bytearray()
        self.rest = bytearray()  # of answers
        self.is_starved = False  # a thread wanted more than was gathered: nobody knows where the next request begins

    # For threads, by way of gunicorn.

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
        return len(data)  # gunicorn's "100 Continue", which the poller has sent where anybody waits for it

    def sendfile(self, file: Any, offset: int = 0, count: int | None = None) -> int:
        file.seek(offset)
        data = file.read(-1 if count is None else count)
        self.sendall(data)
        return len(data)

    # For the poller.

    def gather(self) -> bool:
        """Take what has come; False once the client sends no more. Raises OSError."""
        try:
            data = super().recv(CHUNK)
        except BlockingIOError:
            return True
        self.gathered += data
        return bool(data)

    def flush(self) -> None:
        """Send what the client takes now. Raises OSError."""
        try:
            while self.rest:
                with memoryview(self.rest) as view:
                    sent = super().send(view[:CHUNK])
                del self.rest[:sent]
        except BlockingIOError:
            pass

    def tell(self, data: bytes) -> None:
        """Send a few bytes, if they can be sent."""
        with suppress(OSError):
            super().send(data)


class _Connection(TConn):  # type: ignore[misc]  # gunicorn has no types
    """A client's connection, in the hands of the poller or of a thread."""

    def __init__(self, cfg: Any, sock: _Socket, client: Any, server: Any) -> None:
        super().__init__(cfg, sock, client, server)
        self.data_ready = True
        self.stays = True  # for another request
        self.size: int | None = None  # of the request that is gathered
        self.looked = 0
        self.since = 0.0  # when this wait began
        self.until = 0.0  # when it ends

    def held(self) -> int:
        """Bytes that wait with it."""
        return len(self.sock.gathered) + len(self.sock.rest)


class BufferingWorker(ThreadWorker):  # type: ignore[misc]
    """gunicorn's gthread, but for what its threads wait for: of clients, nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[_Connection, Callable[[], None]] = {}  # by the poller, the longest first
        self._looked = 0.0
        self._stops_at: float | None = None

    def init_process(self) -> None:
        """As many connections as this process may have file descriptors for."""
        wanted = self.cfg.worker_connections + RESERVE
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            self.worker_connections = max(self.cfg.threads, min(self.cfg.worker_connections, soft - RESERVE))
        self._urgent = ThreadPoolExecutor(max_workers=1)
        super().init_process()

    def enqueue_req(self, conn: Any) -> None:
        """Give a request to a thread; a probe to one of its own."""
        is_urgent = isinstance(conn, _Connection) and conn.sock.gathered.startswith(URGENT)
        done = (self._urgent if is_urgent else self.tpool).submit(self.handle, conn)
        done.add_done_callback(lambda future: self.method_queue.defer(self.finish_request, conn, future))

    def handle_request(self, req: Any, conn: Any) -> Any:
        """Let the answer announce the close that follows a body which the application left unread."""
        is_last = req.should_close  # asked when the answer's head is written, and once more behind the answer
        req.should_close = lambda: is_last() or is_left(req.body.reader)
        return super().handle_request(req, conn)

    # The end.

    def handle_exit(self, sig: int, frame: Any) -> None:
        """TERM: whoever waits for something within the application is told that it ends."""
        if self.alive:
            self.method_queue.defer(self._drain)
        super().handle_exit(sig, frame)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """INT, QUIT: the same, for the interpreter waits for its threads."""
        self._drain()
        super().handle_quit(sig, frame)

    def _drain(self) -> None:
        for end in getattr(getattr(self, "wsgi", None), "extensions", {}).get("on_drain", ()):
            end()

    # A connection's way: accepted, waited for, handled by a thread, waited for again or closed.

    def accept(self, listener: Any) -> None:
        """Take the connections that wait; when there are too many, those that have waited longest make room."""
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
        """A thread has made its answer; the rest of it, the next request or the end is the poller's."""
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
        """What follows a body that was refused unread need not be one: then the connection has said its last answer."""
        try:
            return bool(super()._keepalive_after(conn, keepalive))
        except ParseException:
            return False

    def _answer(self, conn: _Connection) -> None:
        """Send what is left of the answer, then see to what comes after it."""
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
        """Take what has come of a request."""
        try:
            more = conn.sock.gather()
        except OSError:
            self._close(conn)
            return
        if more:
            self._go_on(conn)
        elif conn.sock.gathered:  # the client has said all it has to say: so be it judged
            self.enqueue_req(conn)
        else:
            self._close(conn)

    def _go_on(self, conn: _Connection) -> None:
        """Give a whole request to a thread; of another wait for what is missing."""
        got = conn.sock.gathered
        if conn.size is None:
            self._look(conn)
        if conn.size is not None and len(got) >= conn.size:
            self.enqueue_req(conn)
            return
        self._wait(conn, EVENT_READ, self._gather)

    def _look(self, conn: _Connection) -> None:
        """Is the head there? Then its body may take as long as its length is worth."""
        got = conn.sock.gathered
        if got and not conn.looked:
            conn.until = monotonic() + HEAD_SEC  # no longer idle
        conn.size, conn.looked = size_of(got, conn.looked), len(got)
        if conn.size is not None and conn.size > len(got):
            conn.until += conn.size / RATE
            if _EXPECT.search(got, 0, HEAD_LIMIT):
                conn.sock.tell(CONTINUE)

    def _see_off(self, conn: _Connection) -> None:
        """The answer is sent and the client knows that it was the last: read on until it hangs up."""
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
        if conn in self._waiting:  # of two events of one look, the first may have closed the other's connection
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
        """Called by gunicorn in each round: close those whose time is over."""
        super().murder_pending()
        now = monotonic()
        if self.alive and now < self._looked + LOOK_SEC:
            return
        self._looked = now
        if not self.alive and self._stops_at is None:
            self._stops_at = now + CLOSE_SEC  # as gunicorn: a request may be under way
        for conn in [conn for conn in self._waiting if now >= min(conn.until, self._idle_until(conn))]:
            if conn.sock.gathered and conn.stays and not conn.sock.rest:
                conn.sock.tell(TOO_SLOW)
            self._close(conn)

    def _idle_until(self, conn: _Connection) -> float:
        """At a stop, those who have sent nothing of a request are not waited for."""
        is_idle = not (conn.sock.gathered or conn.sock.rest)
        return self._stops_at if self._stops_at is not None and is_idle else conn.until
