"""Network namespaces for tests, named after this process; no interface of this machine is touched."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

CLONE_NEWNET = 0x40000000
SPACE = "dl-test-{pid}-{name}"
SPACES = Path("/run/netns")
IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def space(name: str) -> str:
    """The name of this process's namespace of this name."""
    return SPACE.format(pid=os.getpid(), name=name)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """In the block this thread and its new processes are in the network of this name (setns(2), as `ip netns exec`)."""
    with Path("/proc/thread-self/ns/net").open() as ours, (SPACES / space(name)).open() as theirs:
        enter(theirs.fileno())
        try:
            yield
        finally:
            enter(ours.fileno())


def ip(*arguments: str) -> None:
    subprocess.run([str(IP), *arguments], check=True, capture_output=True, text=True)


def enter(network: int) -> None:
    """Move this thread to the network namespace of this file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def remove(name: str) -> None:
    """Remove a namespace and its end of the link, if it is there."""
    subprocess.run([str(IP), "netns", "del", name], check=False, capture_output=True)


def sweep() -> None:
    """Remove the namespaces of runs that were killed."""
    for found in SPACES.glob(SPACE.format(pid="*", name="*")):
        pid = re.search(r"\d+", found.name)
        if pid and not psutil.pid_exists(int(pid[0])):
            remove(found.name)


def obstacle() -> str | None:
    """Why there can be no namespaces here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if IP is None:
        return "network namespaces need ip (apt-get install iproute2)"
    probe = space("probe")
    try:
        ip("netns", "add", probe)
        ip("-n", probe, "link", "add", "eth0", "type", "veth", "peer", "eth1")
        with (SPACES / probe).open() as found, Path("/proc/thread-self/ns/net").open() as ours:
            enter(found.fileno())
            enter(ours.fileno())
    except (subprocess.CalledProcessError, OSError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        return f"no network namespaces here: {reason}".strip()
    finally:
        remove(probe)
    return None
