"""Ports of this machine for the servers of tests."""

import itertools
import os
import socket
from contextlib import suppress

# Below the ports that the kernel gives to connections, for one of those could take a port before its server starts.
# Each process of a run has a thousand of its own, and begins somewhere among them, for another run may be beside it.
_first = 12_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20 * 1_000
_ports = itertools.islice(itertools.cycle(range(_first, _first + 1_000)), os.getpid() % 1_000, None)


def free_port() -> int:
    while True:
        port = next(_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
