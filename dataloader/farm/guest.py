"""A run is a guest in its worker: its children are plain processes, and its changes to the process are undone.

A worker compares a few cheap facts of its process before and after each run (some 20 µs). Where a run has changed or
removed one, the worker leaves, and the supervisor starts a fresh one; the worker restores no fact. An addition that
stays the same, such as the threads of a library since its first use, is no difference.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the functions of `signal` make enums, at fifty times the cost
import decimal
import faulthandler
import gc
import locale
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

from setproctitle import setproctitle

from dataloader.farm.process import descendants, kill, now, strays

SETTLE_SEC = 0.05  # a thread or a child that ends just now may take so long
CHILDREN_SEC = 2.0  # from SIGKILL to a run's children until the worker leaves to get rid of them
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_NO_TIMERS = ((0.0, 0.0),) * len(_TIMERS)
_SIGNALS = range(1, 32)
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_ENVIRONMENT = os.environ  # a run may put another object in its place
_masks: dict[int, Collection[int]] = {}  # of the threads that are about to fork


def keep_children_plain(signals: Iterable[int], wakeup_fd: int) -> None:
    """From now on each child that this process forks has default handlers for its `signals`, and a title of its own.

    What the run itself has set stays, as in any other program. A spawned child imports the main module of its parent:
    an empty one, for the command line's takes more than a second.
    """
    sys.modules["__main__"] = ModuleType("__main__")
    signals = tuple(signals)
    handlers = {number: signal.getsignal(number) for number in signals}

    def before() -> None:
        # A signal that came between the fork and the new handlers would be lost.
        _masks[threading.get_ident()] = _signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def after() -> None:
        _signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(threading.get_ident()))

    def become_plain() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        faulthandler.unregister(signal.SIGTTIN)
        if (fd := signal.set_wakeup_fd(-1)) not in (-1, wakeup_fd):
            signal.set_wakeup_fd(fd)
        setproctitle("dataloader: child of a run")
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=become_plain)


class Inspection:
    """The process before and after each run."""

    def __init__(self) -> None:
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._facts = _facts(self._umask)
        self._children = frozenset(descendants(os.getpid()))
        self._tasks = os.open("/proc/self/task", os.O_RDONLY | os.O_CLOEXEC)
        self._of_log = self._of_log_now = len(_log_threads())
        self._lasting = _lasting()
        self._descriptors = _descriptors()
        self._first_free = _lowest_free(self._tasks) or 0
        self._grown: set[tuple[str, str]] = set()  # tasks, and the facts that their runs have added to
        self._is_as_before = False  # whether the latest run has left everything as it was

    def begin(self, follows: bool = False) -> None:
        """A run begins: the worker itself opens descriptors and starts threads between runs, unless one `follows`."""
        self._modules = len(sys.modules)
        if follows and self._is_as_before:
            return
        self._lowest = _lowest_free(self._tasks)
        self._threads = _links(self._tasks)

    def changed(self, task: str, warm: Collection[int], may_open: bool) -> tuple[str, ...]:
        """The names of the facts that a run of this task has changed; ends the processes that it has left.

        `warm` are the processes of warm resources; with `may_open` threads and descriptors may stay. An addition counts
        where an earlier run of the task has added to the same fact, and this one has imported no module.
        """
        facts, before = _facts(self._umask), self._facts
        is_same = facts == before and not strays(self._children, warm) and _links(self._tasks) == self._threads
        self._is_as_before = is_same and _lowest_free(self._tasks) == self._lowest
        if self._is_as_before:
            return ()
        if _links(self._tasks) > self._threads:
            faulthandler.cancel_dump_traceback_later()  # its thread, left by the run, could end the next one
        changed, added = [], []
        if facts != before:
            earlier, environment = before["environment"], facts["environment"]
            if earlier and environment and earlier.items() < environment.items():
                added.append("environment")
            if before["limits"] != facts["limits"] and all(map(_is_no_lower, before["limits"], facts["limits"])):
                added.append("limits")
            changed = [name for name, fact in facts.items() if fact != before[name] and name not in added]
            if "timers" in changed:
                for timer in _TIMERS:  # not restored: one could fire before the end of the run is written
                    signal.setitimer(timer, 0)
            self._facts = facts
        left, more = self._left(warm)
        until = now() + SETTLE_SEC
        while (left or more) and now() < until:
            time.sleep(0.002)
            left, more = self._left(warm)
        self._of_log = self._of_log_now
        if "children" in left:
            until = now() + CHILDREN_SEC
            while (pids := strays(self._children, warm)) and now() < until:
                for pid in pids:
                    kill(pid)
                time.sleep(0.001)
        if may_open:
            left, more = [name for name in left if name == "children"], []
        for name in [*added, *more]:
            if (task, name) in self._grown and len(sys.modules) == self._modules:
                changed.append(name)
            self._grown.add((task, name))
        return (*changed, *left)

    def _left(self, warm: Collection[int]) -> tuple[list[str], list[str]]:
        """The names of what the run has left that ends by itself or not at all, and of what it has added."""
        left, added = [], []
        if strays(self._children, warm):
            left.append("children")
        if (threads := _links(self._tasks)) > self._threads:
            self._of_log_now = len(_log_threads())
            if _lasting() - self._lasting:
                left.append("threads")
            elif threads > self._threads + self._of_log_now - self._of_log:
                added.append("threads")
        lowest = _lowest_free(self._tasks)
        if lowest != self._lowest:
            half = (self._first_free + resource.getrlimit(resource.RLIMIT_NOFILE)[0]) / 2  # of those free at first
            if lowest is None or lowest > half or self._descriptors - _descriptors():
                left.append("descriptors")
            elif self._lowest is not None and lowest > self._lowest:
                added.append("descriptors")
        return left, added


def _facts(umask: int) -> dict[str, Any]:
    """The facts of this process that no run may leave changed, by their names in the log."""
    decimals, timers = decimal.getcontext(), tuple(map(_signal.getitimer, _TIMERS))
    folder = None
    with suppress(OSError):  # somebody has removed it
        folder = os.getcwd()
    traps = decimals.traps.values()
    return {
        "environment": _ENVIRONMENT._data.copy() if os.environ is _ENVIRONMENT else None,  # type: ignore[attr-defined]
        "folder": folder,
        "user": (os.getresuid(), os.getresgid(), os.getgroups()),
        "umask": os.umask(umask),  # it cannot be read without a write; this one changes nothing where no run has
        "signals": tuple(map(_signal.getsignal, _SIGNALS)),
        "signal mask": _signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "timers": () if timers == _NO_TIMERS else tuple(timer != (0.0, 0.0) for timer in timers),  # the armed ones
        "decimal context": (
            *(decimals.prec, decimals.rounding, decimals.Emin, decimals.Emax, decimals.capitals, decimals.clamp),
            *traps,
        ),
        "locale": locale.setlocale(locale.LC_ALL),
        "limits": tuple(map(resource.getrlimit, _LIMITS)),
        "priority": os.nice(0),
        "socket timeout": socket.getdefaulttimeout(),
        "garbage collection": gc.isenabled(),
        "recursion limit": sys.getrecursionlimit(),
    }


def _is_no_lower(before: tuple[int, int], after: tuple[int, int]) -> bool:
    return all(b == a or b == resource.RLIM_INFINITY or -1 < a < b for a, b in zip(before, after, strict=True))


def _links(tasks: int) -> int:
    """The threads, native ones too, and two: an opened directory's links, at a tenth of the cost of a listing."""
    try:
        return os.fstat(tasks).st_nlink
    except OSError:  # a run has closed it
        return 0


def _log_threads() -> list[threading.Thread]:
    """The threads that write the log; some of them begin at the first line of their kind, within a run."""
    return [thread for thread in threading.enumerate() if thread.name == "log"]


def _lasting() -> frozenset[int | None]:
    return frozenset(thread.ident for thread in threading.enumerate() if not thread.daemon)


def _lowest_free(any_fd: int) -> int | None:
    """The lowest free descriptor, which changes where one is opened or closed; None: there is none, or not `any_fd`."""
    try:
        fd = os.dup(any_fd)
    except OSError:
        return None
    os.close(fd)
    return fd


def _descriptors() -> frozenset[int]:
    """The open descriptors, without that of the listing."""
    return frozenset(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))
