"""A TCP link to the tests' PostgreSQL that can be frozen, as by a stopped server, or cut, as by a dead one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Link:
    """Listens on a port of 127.0.0.1 and passes bytes on; `dsn` leads through it."""

    def __init__(self, dsn: str) -> None:
        self._server = conninfo_to_dict(dsn)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._port = 0
        self.mend()
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=self._port, hostaddr=None)

    def mend(self) -> None:
        """Listen, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._accepting = self._start(self._accept, self._listener)

    def freeze(self) -> None:
        """From now on connections are accepted and kept, but nothing passes."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Let pass what was held up, and all that follows."""
        self._flowing.set()

    def cut(self) -> None:
        """End every connection, refuse new ones."""
        self._end(self._listener)
        self._accepting.join(timeout=10)  # a connection that was just accepted is one of these
        for each in self._sockets:
            self._end(each)
        self._sockets.clear()

    def close(self) -> None:
        """Cut for good and wait for the threads."""
        self.cut()
        self.thaw()
        for thread in self._threads:
            thread.join(timeout=10)

    def _end(self, each: socket.socket) -> None:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = self._dial()
                self._sockets += near, far
                self._start(self._pump, near, far)
                self._start(self._pump, far, near)

    def _dial(self) -> socket.socket:
        host, port = str(self._server["host"]), self._server.get("port", 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, int(port)))
        far = socket.socket(socket.AF_UNIX)
        far.connect(f"{host}/.s.PGSQL.{port}")
        return far

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._flowing.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _start(self, target: object, *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()
        return thread


@contextmanager
def linked(dsn: str) -> Iterator[Link]:
    """A Link as long as the block."""
    link = Link(dsn)
    try:
        yield link
    finally:
        link.close()
