"""Whether the API's port can be listened on: asked before a start, for an answer in a line."""

from __future__ import annotations

import errno
import socket
import time

from dataloader.farm.process import now

HANDOVER_WITHIN = 3.0  # seconds for the API before this one to end


class NotFree(Exception):
    """The port cannot be listened on; the message names the reason and the remedy."""


def wait_for(host: str, port: int) -> None:
    """Wait until the port is free, HANDOVER_WITHIN at most; NotFree if that fails."""
    deadline = now() + HANDOVER_WITHIN
    while trouble := _trouble(host, port):
        if trouble.errno != errno.EADDRINUSE:
            raise NotFree(f"cannot listen on {host} port {port}: {trouble.strerror} (APP_HOST, APP_PORT)")
        if now() > deadline:
            raise NotFree(f"port {port} is taken by another program: end it, or choose another with APP_PORT")
        time.sleep(0.1)


def _trouble(host: str, port: int) -> OSError | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None
