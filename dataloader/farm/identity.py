"""A worker's name, and the proof that a worker of this host is gone.

The name is written to `claimed_by`. It says host, pid, and where and when the process and its supervisor were started.
A farm that starts settles at once what dead processes of its own host had claimed. Two containers may have the same
host name, and the same pid means another process after a while. So the proof needs all parts of the name.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from dataloader.farm.process import has_ended, hostname, started


@cache
def place() -> str:
    """A digest of this boot of the kernel and of this pid namespace; empty where the system hides them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return hashlib.blake2b(b"%b%d" % (boot, namespace), digest_size=6).hexdigest()  # sha256 costs a worker 1 MB


def own_name() -> str:
    """The name of this worker process, whose parent is its supervisor: host:pid:place-start-supervisor-start."""
    pid, parent = os.getpid(), os.getppid()
    return f"{hostname()}:{pid}:{place()}-{started(pid) or 0}-{parent}-{started(parent) or 0}"


def is_gone(worker: str) -> bool:
    """Whether this worker was a process of this host that is gone, and whose supervisor is gone too.

    While the supervisor lives, its keeper settles what its workers held, and knows better why they ended. False
    wherever a part of the name is not this host's, or proves nothing.
    """
    try:
        named, pid, rest = worker.rsplit(":", 2)
        where, start, parent, parent_start = rest.split("-")
        processes = [(int(pid), int(start)), (int(parent), int(parent_start))]
    except ValueError:
        return False
    is_here = (named, where) == (hostname(), place()) and where != ""
    return is_here and all(start > 0 and has_ended(pid, start) for pid, start in processes)
