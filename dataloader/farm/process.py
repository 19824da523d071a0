"""Signals, children, names, resources and the tie to a parent, for the farm's processes. No SQL.

This module reads /proc itself: psutil reads each process of the host to find the children of one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NoReturn

from dataloader import log
from dataloader.exits import EXIT_FAILED

now = time.monotonic  # seconds, by the same clock in all processes of one machine
READY = b"READY=1"  # the report of `notify_ready`
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGESIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None, use_errno=True)


# --- signals and waits ---


class Signals:
    """Signals as data: handlers only record, and a pipe ends the wait. More in a handler can dead-lock."""

    def __init__(self, watched: Iterable[signal.Signals], on_signal: Callable[[int], None] | None = None) -> None:
        self.received: set[int] = set()
        self._watched = tuple(watched)
        self._on_signal = on_signal
        self._were_taken = False  # the wake-ups, by other code since the last wait
        self._read, self.wakeup_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in self._watched:
            signal.signal(number, self._record)
        signal.set_wakeup_fd(self.wakeup_fd, warn_on_full_buffer=False)

    def _record(self, number: int, _frame: object) -> None:
        self.received.add(number)
        if self._on_signal:
            self._on_signal(number)

    def take(self) -> tuple[signal.Signals, ...]:
        """Handle the signals, also after other code has changed them, and block none; returns the watched ones."""
        for number in self._watched:
            signal.signal(number, self._record)
        unblock_signals()
        return self._watched

    def take_wake_ups(self) -> None:
        """Let signals end a wait again, where other code has taken the process's wake-up descriptor."""
        if signal.set_wakeup_fd(self.wakeup_fd, warn_on_full_buffer=False) != self.wakeup_fd:
            self._were_taken = True

    def wait(self, timeout: float, *others: int) -> None:
        """Wait at most `timeout` seconds for a signal, or until one of the file descriptors `others` can be read.

        At once where other code had taken the wake-ups: a signal may have come that would not end this wait.
        """
        self.take_wake_ups()
        if self._were_taken:
            self._were_taken, timeout = False, 0
        if self._read in readable([self._read, *others], timeout):
            drain_pipe(self._read)

    def ignore(self) -> None:
        """At the end of a program: another order changes nothing; Python's own end would let it kill the process."""
        for number in self._watched:
            signal.signal(number, signal.SIG_IGN)

    def forget(self) -> None:
        """In a child after fork: undo everything, so that the child may install its own."""
        signal.set_wakeup_fd(-1)
        for number in self._watched:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._read)
        os.close(self.wakeup_fd)


def drain_pipe(fd: int) -> None:
    """Read a non-blocking pipe empty."""
    with suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def readable(fds: Iterable[int], timeout: float) -> list[int]:
    """Those of the file descriptors that can be read, or are at their end, within `timeout` seconds."""
    poll = select.poll()  # select(2) knows no descriptor above 1023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, timeout) * 1000)]


def notify_ready() -> None:
    """Report to the service manager that this process is ready if NOTIFY_SOCKET is set: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.sendto(READY, address.replace("@", "\0", 1) if address[0] == "@" else address)


# --- parents and children ---


def fork(main: Callable[[], int]) -> int:
    """Fork a child that runs `main` and exits with what it returns; the child's pid. Raises OSError without room.

    The child blocks termination signals until `unblock_signals`, has its own process group, and gets SIGTERM when its
    parent dies.
    """
    parent = os.getpid()
    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTIN, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            follow_parent(parent, signal.SIGTERM)
            _become(main)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _become(main: Callable[[], int]) -> NoReturn:
    code = EXIT_FAILED
    try:
        code = main()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else EXIT_FAILED
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            log.flush()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # in every case: never up the stack that this process has inherited from its parent


def unblock_signals() -> None:
    """By the supervisor and by a child of `fork`, once the handlers are installed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def call_parent(parent: int) -> None:
    """Wake `parent` by SIGCHLD to check the slots, unless it is no longer the parent of this process."""
    if os.getppid() == parent:
        os.kill(parent, signal.SIGCHLD)


def follow_parent(parent: int, number: signal.Signals) -> None:
    """Be sent `number` when the parent dies (Linux: prctl(2)); at once if it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended (Linux: prctl(2))."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill(pid: int) -> None:
    """SIGKILL a child, unless another user has it by now: a job may call sudo."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """SIGKILL the process group of a child of `fork`: the child and the processes that its job has started.

    A pid of 0 is not known, and no process is killed; for killpg(2) it would be this process's own group.
    """
    with suppress(ProcessLookupError, PermissionError):
        if pid:
            os.killpg(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    pids: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                pids += map(int, file.read().split())
    return pids


def descendants(pid: int) -> list[int]:
    """The pids of a process's children, their children and so on."""
    pids = children(pid)
    return pids + [below for child in pids for below in descendants(child)]


def strays(expected: Collection[int], warm: Collection[int]) -> list[int]:
    """The descendants of this subreaper without the `expected` ones, and without the `warm` children with theirs.

    The function buries dead children that are not expected; a library waits for the children of its import itself. A
    child that dies meanwhile still counts, because its CPU is not counted yet.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []  # most runs cost this one system call
    mine = set(children(os.getpid())).difference(warm)
    if any([_buried(pid) for pid in mine.difference(expected)]):
        mine = set(children(os.getpid())).difference(warm)  # without pids that other processes may get now
    below = [each for pid in mine for each in descendants(pid) if started(each) is not None]
    return [pid for pid in [*filter(_stat, mine), *below] if pid not in expected]


def _buried(pid: int) -> bool:
    """Take the status of a child that is dead, and count its CPU; whether it was dead."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


# --- facts about a process, from /proc ---

_UNREADABLE = ["?", *("0" for _ in range(50))]  # where no descriptor is free: the process counts as alive


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()  # the name before may hold any character
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:
        return _UNREADABLE


def is_running(pid: int) -> bool:
    """Alive and not stopped (SIGSTOP, a debugger)."""
    return _stat(pid)[:1] not in ([], ["T"], ["t"], ["Z"], ["X"])


def is_stopped(pid: int) -> bool:
    return _stat(pid)[:1] in (["T"], ["t"])


def started(pid: int) -> int | None:
    """When a process was started, in clock ticks since the boot; None when it is gone, 0 when it cannot be read."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def started_at(pid: int) -> datetime | None:
    """The same as a time, to a tenth of a second; None when it is not known."""
    if not (ticks := started(pid)):
        return None
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return datetime.fromtimestamp(round(boot + ticks / _TICKS, 1), UTC)


def resident(pid: int) -> int:
    """Resident memory of a process (bytes); 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def memory_used(pid: int) -> int:
    """Resident memory (bytes) of a process and its descendants; shared pages count for each."""
    return sum(map(resident, [pid, *descendants(pid)]))


def cpu_used_by(pid: int) -> float:
    """CPU seconds of a process and its descendants, including their children that have ended."""
    return sum(sum(map(int, _stat(each)[11:15])) for each in [pid, *descendants(pid)]) / _TICKS


class Meter:
    """The cost of each run of this process. The end of a run is the begin of the next, so a run costs one reading."""

    GROUP_SEC = 0.005
    CHILD_SEC = 0.0005  # a child's CPU is counted at its end, which does not come sooner after its begin
    SLACK = 2**20  # bytes; a new count costs as much as a short run, so a smaller growth is ignored

    def __init__(self) -> None:
        self.cpu_sec = 0.0  # of this process and its children, at the latest reading
        self.peak_memory = 0  # bytes, within SLACK
        self._looked_at = 0.0
        self._of_children = 0.0
        self._least: int | None = None  # the most memory right after it was last counted anew

    def measure(self, more_follow: bool = False) -> None:
        """Read the cost; where more runs follow at once, at most every GROUP_SEC: the last of a group has its cost."""
        at = now()
        if more_follow and at < self._looked_at + self.GROUP_SEC:
            return
        own = resource.getrusage(resource.RUSAGE_SELF)
        if at > self._looked_at + self.CHILD_SEC:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._of_children = used.ru_utime + used.ru_stime
        self._looked_at = at
        self.cpu_sec = own.ru_utime + own.ru_stime + self._of_children
        self.peak_memory = own.ru_maxrss * 1024

    def forget_peak(self) -> None:
        """Count the most memory from now on (Linux: proc(5), clear_refs), unless it has grown by less than SLACK."""
        if self._least is None or self.peak_memory > self._least + self.SLACK:
            with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self.measure()
            self._least = self.peak_memory


# --- names: claimed_by has the host, the pid, the boot, and the times of the start of worker and supervisor ---


def hostname() -> str:
    """The name of this host, for rows and logs: the kernel takes any bytes, and a row only characters."""
    name = os.fsencode(socket.gethostname()).decode("utf-8", "replace")[:100]
    return "".join(each if each.isprintable() else "?" for each in name)


@cache
def boot() -> str:
    """A digest of this boot of the kernel and of this pid namespace; empty where the system hides them."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return hashlib.blake2b(b"%b%d" % (boot_id, namespace), digest_size=6).hexdigest()  # sha256 costs a worker 1 MB


def own_name() -> str:
    """The name of this worker process, whose parent is its supervisor: host:pid:boot-start-supervisor-start."""
    pid, parent = os.getpid(), os.getppid()
    return f"{hostname()}:{pid}:{boot()}-{started(pid) or 0}-{parent}-{started(parent) or 0}"


def is_gone(worker: str) -> bool:
    """Whether this worker was a process of this host that is gone, and whose supervisor is gone too.

    While the supervisor lives, its keeper settles what its workers held, and knows better why they ended. Two
    containers may have the same host name, and a pid means another process after a while: False wherever a part of the
    name is not this host's, or proves nothing.
    """
    try:
        named, pid, rest = worker.rsplit(":", 2)
        of_boot, start, parent, parent_start = rest.split("-")
        processes = [(int(pid), int(start)), (int(parent), int(parent_start))]
    except ValueError:
        return False
    is_here = (named, of_boot) == (hostname(), boot()) and of_boot != ""
    return is_here and all(start > 0 and _has_ended(pid, start) for pid, start in processes)


def _has_ended(pid: int, start: int) -> bool:
    """Whether the process that had this pid and this start (see `started`) is proved to be gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # of another user, hidden in /proc
        pass
    fields = _stat(pid)
    return bool(fields) and fields is not _UNREADABLE and (fields[0] in "ZX" or int(fields[19]) != start)
