"""Pipelines that treat their worker as guests do: they fork, leave things changed, and use pools."""

import decimal
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from setproctitle import getproctitle
from squares import square

from dataloader.pipelines import Context, register

kept: list[Any] = []  # what runs leave for the life of their process


@register("tells_its_process")
def tells_its_process(args: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "folder": os.getcwd(), "variables": len(os.environ)}


@register("child_ends")
def child_ends(args: dict[str, Any], context: Context) -> str | None:
    """A child that returns, raises or exits, as `how` says; the parent goes on for a while."""
    if (pid := os.fork()) == 0:
        if args["how"] == "raises":
            raise ValueError("of the child")
        if args["how"] == "exits":
            sys.exit(0)
        return None
    _status(pid)
    time.sleep(0.3)
    return "parent"


@register("child_yields")
def child_yields(args: dict[str, Any], context: Context) -> Iterator[Any]:
    """A child that goes on to the next yield, and one that returns from the generator."""
    for _ in range(2):
        if pid := os.fork():
            yield {"status": _status(pid)}
        else:
            yield {"status": "of the child"}
    if os.fork() == 0:
        return "child"
    time.sleep(0.3)
    return "parent"


@register("child_awaits")
async def child_awaits(args: dict[str, Any], context: Context) -> str:
    """A child that returns from a coroutine, and one that raises in it."""
    for fails in (False, True):
        if pid := os.fork():
            _status(pid)
        elif fails:
            raise ValueError("of the child")
        else:
            return "child"
    return "parent"


@register("child_in_async_generator")
async def child_in_async_generator(args: dict[str, Any], context: Context) -> Any:
    """A child that goes on to the next yield of an async generator."""
    pid = os.fork()
    yield {"is_child": pid == 0}
    _status(pid)


@register("child_in_a_transaction")
def child_in_a_transaction(args: dict[str, Any], context: Context) -> str:
    """Children that leave the block of a transaction by its end and by an exception."""
    with context.transaction() as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS guests (name text)")
        for fails in (False, True):
            with suppress(ZeroDivisionError), context.transaction() as inner:
                inner.execute("SELECT 1")
                if pid := os.fork():
                    _status(pid)
                elif fails:
                    1 / 0  # noqa: B018
        conn.execute("INSERT INTO guests VALUES ('parent')")
    return "parent"


@register("child_uses_the_context")
def child_uses_the_context(args: dict[str, Any], context: Context) -> dict[str, Any]:
    """A child that does with the context what only the run may do; what came of it."""
    calls: dict[str, Callable[[], object]] = {
        "check": context.check,
        "progress": lambda: context.progress({"by": "child"}),
        "trigger": lambda: context.trigger("tells_its_process", {}),
        "transaction": lambda: context.transaction().__enter__(),
        "save": lambda: context.save({"by": "child"}),
        "note": lambda: context.note("child"),
        "checkpoint": lambda: context.checkpoint,
    }
    time.sleep(0.02)  # a check looks at the deadlines that often
    outcomes = _of_child(lambda: {name: _error_of(call) for name, call in calls.items()})
    time.sleep(0.3)
    context.check()
    return outcomes


@register("child_describes_itself")
def child_describes_itself(args: dict[str, Any], context: Context) -> dict[str, Any]:
    """The signals, the mask, the wake-up descriptor and the title of a forked child."""

    def describe() -> dict[str, Any]:
        handled = [n.name for n in signal.valid_signals() if isinstance(n, signal.Signals) and _is_ours(n)]
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        return {"handled": sorted(handled), "mask": mask, "wakeup": signal.set_wakeup_fd(-1), "title": getproctitle()}

    return _of_child(describe)


def _is_ours(number: signal.Signals) -> bool:
    return callable(handler := signal.getsignal(number)) and handler is not signal.default_int_handler


@register("child_logs")
def child_logs(args: dict[str, Any], context: Context) -> str:
    """Children that print and log; none hangs."""
    for number in range(args["times"]):
        if pid := os.fork():
            _status(pid)
        else:
            context.logger.info("logged by child %d", number)
            logging.getLogger("other").warning("warned by child %d", number)
            print("printed by child", number)
            return "child"
    return "parent"


@register("child_in_a_callback", max_attempts=1, on_exhausted=lambda args: os.fork(), retry_in=lambda n: os.fork())
def child_in_a_callback(args: dict[str, Any]) -> None:
    """A pipeline whose callbacks fork."""
    raise ValueError("as it should")


@register("terminates_a_child", timeout_sec=20)
def terminates_a_child(args: dict[str, Any]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    return child.exitcode


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _of_child(facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The facts as a forked child sees them."""
    read, write = multiprocessing.Pipe(duplex=False)
    if pid := os.fork():
        write.close()
        sent = read.recv()
        read.close()
        _status(pid)
        return dict(sent)
    write.send(facts())
    os._exit(0)


def _error_of(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()!r}"
    except BaseException as e:
        return f"{type(e).__name__}: {e}"


def _profiling_timer() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, 0.5)


def _lower_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def _exhaust_descriptors() -> None:
    with suppress(OSError):
        while True:
            kept.append(os.open("/dev/null", os.O_RDONLY))


def _close_descriptors() -> None:
    # Those of files, such as the worker's logs; not its sessions.
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if number > 2 and "memfd:stacks" in os.readlink(f"/proc/self/fd/{number}"):
                os.close(number)


def _delete_folder() -> None:
    folder = Path("gone").absolute()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    folder.rmdir()


def _become_nobody() -> None:
    """Leave a descriptor, too: the process may not list its own ones any more."""
    kept.append(os.open("/dev/null", os.O_RDONLY))
    os.setresuid(65534, 65534, 65534)


CHANGES: dict[str, tuple[str, Callable[[], object]]] = {  # by name: the fact that differs, and the change
    "alarm": ("timers", lambda: signal.alarm(1)),
    "profiling timer": ("timers", _profiling_timer),
    "cleared environment": ("environment", os.environ.clear),
    "changed variable": ("environment", lambda: os.environ.update(HOME="/elsewhere")),
    "removed variable": ("environment", lambda: os.environ.pop("HOME")),
    "folder": ("folder", lambda: os.chdir("/")),
    "deleted folder": ("folder", _delete_folder),
    "umask": ("umask", lambda: os.umask(0o077)),
    "ignored signal": ("signals", lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)),
    "own handler": ("signals", lambda: signal.signal(signal.SIGUSR2, lambda *_: None)),
    "blocked signal": ("signal mask", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})),
    "precision": ("decimal context", lambda: setattr(decimal.getcontext(), "prec", 4)),
    "rounding": ("decimal context", lambda: setattr(decimal.getcontext(), "rounding", decimal.ROUND_DOWN)),
    "locale": ("locale", lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")),
    "limit": ("limits", _lower_limit),
    "priority": ("priority", lambda: os.nice(1)),
    "socket timeout": ("socket timeout", lambda: socket.setdefaulttimeout(0.001)),
    "disabled collector": ("garbage collection", gc.disable),
    "recursion limit": ("recursion limit", lambda: sys.setrecursionlimit(500)),
    "thread": ("threads", lambda: threading.Thread(target=time.sleep, args=(600,)).start()),
    "child": ("children", lambda: kept.append(subprocess.Popen(["/bin/sleep", "600"]))),
    "all descriptors": ("descriptors", _exhaust_descriptors),
    "closed descriptor": ("descriptors", _close_descriptors),
}
if os.geteuid() == 0:
    CHANGES["user"] = ("user", _become_nobody)
    CHANGES["groups"] = ("user", lambda: os.setgroups([65534]))


@register("changes")
def changes(args: dict[str, Any]) -> int:
    """Leave the process changed; its pid."""
    CHANGES[args["what"]][1]()
    return os.getpid()


@register("adds_once")
def adds_once(args: dict[str, Any]) -> int:
    """Leave what a library leaves at its first use, and keep it; the pid."""
    os.environ["OF_A_LIBRARY"] = "1"
    if not kept:
        kept.append(os.open("/dev/null", os.O_RDONLY))
        thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
        thread.start()
    with suppress(decimal.Inexact):
        decimal.Decimal(1) / 3  # sets a flag of the context, which is no setting
    return os.getpid()


@register("adds_each_time")
def adds_each_time(args: dict[str, Any]) -> int:
    """Leave one more of `what` with each run; the pid."""
    if args["what"] == "descriptors":
        kept.append(os.open("/dev/null", os.O_RDONLY))
    elif args["what"] == "threads":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    else:
        os.environ[f"VARIABLE_{time.monotonic_ns()}"] = "1"
    return os.getpid()


@register("leaves_a_watchdog")
def leaves_a_watchdog(args: dict[str, Any]) -> None:
    faulthandler.dump_traceback_later(1, exit=True)


@register("outlasts_an_alarm")
def outlasts_an_alarm(args: dict[str, Any]) -> int:
    """Run for longer than the alarm of the job before; the pid."""
    time.sleep(1.5)
    return os.getpid()


def _exit(*_: object) -> Any:
    sys.exit(9)


class Rude(Exception):
    """An exception whose text ends the process."""

    def __str__(self) -> str:
        sys.exit(3)


@register("exits_when_exhausted", max_attempts=1, on_exhausted=_exit)
def exits_when_exhausted(args: dict[str, Any]) -> None:
    raise ValueError("the pipeline's own")


@register("exits_in_retry_in", max_attempts=2, retry_in=_exit)
def exits_in_retry_in(args: dict[str, Any]) -> None:
    raise ValueError("the pipeline's own")


@register("rude_error", max_attempts=1)
def rude_error(args: dict[str, Any]) -> None:
    raise Rude


@contextmanager
def _exits_at_its_end(args: dict[str, Any]) -> Iterator[str]:
    yield "resource"
    sys.exit(9)


@register("resource_exits", prepare=_exits_at_its_end)
def resource_exits(args: dict[str, Any], context: Context) -> Any:
    """Use a resource whose release calls sys.exit."""
    return context.resource


@register("error_with_a_note", max_attempts=1)
def error_with_a_note(args: dict[str, Any]) -> None:
    error = ValueError("amount is negative: -5")
    error.add_note("while loading part 3")
    raise error


def _pool(method: str) -> int:
    with multiprocessing.get_context(method).Pool(2) as pool:
        return sum(pool.map(square, range(5)))


def _executor(method: str) -> int:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as executor:
        return sum(executor.map(square, range(5)))


def _joblib() -> int:
    from joblib import Parallel, delayed

    return sum(Parallel(n_jobs=2)(delayed(square)(number) for number in range(5)))


def _polars() -> int:
    import polars

    frame = polars.DataFrame({"n": range(5)}).lazy()
    return int(frame.group_by("n").agg(polars.col("n").first().pow(2).alias("square")).collect()["square"].sum())


def _numpy() -> int:
    import numpy

    return int((numpy.eye(300) @ numpy.eye(300)).sum()) // 10


def _pyarrow() -> int:
    import pyarrow

    groups = pyarrow.table({"n": [n * n for n in range(5)]}).group_by("n").aggregate([("n", "sum")])
    return sum(groups["n_sum"].to_pylist())


def _torch() -> int:
    import torch
    from torch.utils.data import DataLoader

    return int(sum(batch.sum() for batch in DataLoader(torch.arange(5) ** 2, num_workers=2)))


GUESTS: dict[str, Callable[[], int]] = {
    **{f"pool by {method}": lambda method=method: _pool(method) for method in ("fork", "spawn", "forkserver")},
    **{f"executor by {method}": lambda method=method: _executor(method) for method in ("fork", "spawn", "forkserver")},
    "joblib": _joblib,
    "polars": _polars,
    "numpy": _numpy,
    "pyarrow": _pyarrow,
    "torch": _torch,
}


@register("guest")
def guest(args: dict[str, Any], context: Context) -> int:
    """Compute 30 with a library; go on until the run is ended where `goes_on`."""
    number = GUESTS[args["name"]]()
    while args.get("goes_on"):
        context.progress({"number": number})
        context.check()
        number = GUESTS[args["name"]]()
        time.sleep(0.01)
    return number
