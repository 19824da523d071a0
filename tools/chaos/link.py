"""A link between a farm and the server; after a cut neither side receives data of the other, nor its end."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

SOCKET = ".s.PGSQL.5432"


class Link:
    """A socket in `folder` that forwards to the server's socket in `target`, until it is cut."""

    def __init__(self, folder: Path, target: Path) -> None:
        folder.mkdir()
        self._target = str(target / SOCKET)
        self._whole = threading.Event()
        self._whole.set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(64)
        _run(self._serve)

    def cut(self) -> None:
        """Hold back all data from now on."""
        self._whole.clear()

    def heal(self) -> None:
        """Forward the held data, and all later data."""
        self._whole.set()

    def close(self) -> None:
        """Accept no more connections."""
        self.heal()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            _run(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        self._whole.wait()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self._target)
        except OSError:
            client.close()
            server.close()
            return
        _run(self._pump, client, server)
        self._pump(server, client)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self._whole.wait()
                sink.sendall(data)
        self._whole.wait()  # a cut hides the end of a connection too
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _run(target: object, *args: socket.socket) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]
