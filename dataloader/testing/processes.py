"""The process of a run that is to crash: a fork, or a new interpreter where a fork cannot go on.

A fork has the memory of the test, but none of its threads. A library such as polars, which has started a pool of
threads in the test's process, waits in the fork for a pool without threads, and nothing wakes it.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from dataloader.farm import process

_POLL_SEC = 0.5  # between two checks of a process that has not ended
# Of a wait for another thread of the same process, without a time limit: futex(2) on x86-64 and others.
_FUTEX, _PRIVATE, _WAITS = ("202", "98"), 128, (0, 9)
_MAIN = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
main, given = pickle.load(sys.stdin.buffer)
sys.exit(main(*given))
"""


class Deadlocked(RuntimeError):
    """Each thread of the run waits for another one, so that the run will never go on."""


def forked(main: Callable[[], int]) -> int:
    """Fork a child that runs `main`; its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
        return process.fork(main)


def begun(main: Callable[..., int], *given: Any) -> int:
    """Begin a new interpreter that runs `main`, a function of a module, with values that can be pickled; its pid."""
    with tempfile.TemporaryFile() as file:
        pickle.dump(sys.path, file)
        pickle.dump((main, given), file)
        file.seek(0)
        stdin = (os.POSIX_SPAWN_DUP2, file.fileno(), 0)
        command = [sys.executable, "-c", _MAIN]
        return os.posix_spawn(command[0], command, os.environ, file_actions=[stdin], setsid=True)


def ended(pid: int) -> int:
    """Wait for the process, and end its children; its exit status, or -N when signal N has killed it.

    Raises Deadlocked.
    """
    watch, before = os.pidfd_open(pid), list[str]()
    try:
        while not process.readable([watch], _POLL_SEC):
            waits = _waits(pid)
            if waits and waits == before:
                raise Deadlocked("each thread of the run waits for another one")
            before = waits
    finally:
        os.close(watch)
        process.kill_group(pid)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _waits(pid: int) -> list[str]:
    """The wait of each thread, if each waits for another one without a time limit; else none (Linux: proc(5))."""
    calls = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/syscall") as file:
                call = file.read()
            with open(f"/proc/{pid}/task/{thread}/status") as file:
                calls.append(call + file.read())  # with the number of times that the thread was woken
            number, _, operation, _, limit, *_ = [*call.split(), *["0"] * 5]
            way = int(operation, 16)
            if number not in _FUTEX or way % _PRIVATE not in _WAITS or not way & _PRIVATE or int(limit, 16):
                return []
    except OSError:
        return []
    return calls
