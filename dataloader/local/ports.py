"""Whether the API's port can be listened on: asked before a start, for an answer in a line."""

from __future__ import annotations

import errno
import socket
import time

from dataloader.farm.process import now

HANDOVER_WITHIN = 3.0  # seconds for the API, or the `up`, before this one to end


class NotFree(Exception):
    """The port cannot be listened on; the message names the reason and the remedy."""


def wait_for(host: str, port: int) -> str:
    """Wait until the port is free, HANDOVER_WITHIN at most; the address and the port, as gunicorn takes them.

    Raises NotFree.
    """
    deadline = now() + HANDOVER_WITHIN
    while True:
        try:
            return _bound(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise NotFree(f"{_words(host, port, error)} (APP_HOST, APP_PORT)") from None
        if now() > deadline:
            raise NotFree(f"port {port} is taken by another program: end it, or choose another with APP_PORT")
        time.sleep(0.1)


def trouble(host: str, port: int) -> str | None:
    """The reason why no program can listen there; None if one can, or does."""
    try:
        _bound(host, port)
    except OSError as error:
        return None if error.errno == errno.EADDRINUSE else _words(host, port, error)
    return None


def _words(host: str, port: int, error: OSError) -> str:
    return f"cannot listen on {host} port {port}: {error.strerror}"


def _bound(host: str, port: int) -> str:
    """The address to bind, after a test bind; raises OSError if that fails."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, _, _, address = min(infos, key=lambda each: each[0] != socket.AF_INET)  # prefer IPv4 of `localhost`
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
