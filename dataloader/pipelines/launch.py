"""A program of its own: sets the limits of this process and becomes another program.

`python -I -S launch.py PARENT BYTES PROGRAM ARGUMENT...`. It does here what must happen between fork and exec: a worker
has threads, and in its fork no Python code may run. So it imports nothing of ours, and little else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126  # as of a shell


def main(parent: str, memory: str, *argv: str) -> NoReturn:
    """Become the program `argv`, which the kernel kills when the process `parent` dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if int(memory):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    try:
        os.execv(argv[0], argv)  # noqa: S606  never a shell
    except OSError as e:
        sys.stderr.write(f"{argv[0]} cannot be executed: {e.strerror}\n")
        sys.exit(CANNOT_EXECUTE)


if __name__ == "__main__":
    main(*sys.argv[1:])
