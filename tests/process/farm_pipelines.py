"""Pipelines that the process tests run through DL_PIPELINES. Most leave rows in `runs` to be judged by."""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg

from dataloader.pipelines import Context, PermanentError, Progress, register

RUNS = """
CREATE TABLE runs (
  job_id uuid, lock_key text, attempt int, pid int,
  started timestamptz NOT NULL DEFAULT clock_timestamp(), ended timestamptz)
"""


def started(context: Context) -> psycopg.Connection[Any]:
    """Note the start of a run in the queue's database, committed at once, by a connection of its own."""
    conn = psycopg.connect(os.environ["DL_DB_DSN"], autocommit=True)
    conn.execute(
        "INSERT INTO runs (job_id, lock_key, attempt, pid) VALUES (%s, %s, %s, %s)",
        (context.job_id, context.lock_key, context.attempt, os.getpid()),
    )
    return conn


@register("tells_the_time")
def tells_the_time(args: dict[str, Any]) -> dict[str, Any]:
    return {"now": time.time()}


@register("returns")
def returns(args: dict[str, Any]) -> Any:
    """Return `value`, or a text of so many `kb`."""
    return "x" * (args["kb"] * 1_024) if "kb" in args else args.get("value")


@register("recorded")
def recorded(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Sleep `sec` in small steps between a noted start and a noted end."""
    with started(context) as conn:
        end = time.monotonic() + args.get("sec", 0.02)
        yield {"processed": 0, "total": 1}
        while time.monotonic() < end:
            select.select([], [], [], 0.01)  # not time.sleep, which libfaketime 0.9 breaks
            yield {"processed": 0, "total": 1}
        conn.execute(
            "UPDATE runs SET ended = clock_timestamp() WHERE job_id = %s AND pid = %s AND ended IS NULL",
            (context.job_id, os.getpid()),
        )
    yield {"processed": 1, "total": 1}


@register("kills_itself")
def kills_itself(args: dict[str, Any], context: Context) -> None:
    """Die by a signal, on every attempt up to `times`."""
    started(context).close()
    time.sleep(args.get("after_sec", 0))
    if context.attempt <= args.get("times", 1_000):
        os.kill(os.getpid(), args.get("signal", signal.SIGKILL))


@register("exits")
def exits(args: dict[str, Any]) -> None:
    sys.exit(args.get("status", 3))


@register("errs")
def errs(args: dict[str, Any], context: Context) -> None:
    started(context).close()
    raise PermanentError("no use") if args.get("permanent") else ValueError(args.get("text", "bad luck"))


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


def hold_the_gil(sec: float) -> None:
    """Wait in one C call for a mutex that is taken: no other thread runs, no signal ends it, and no CPU is used."""
    c, mutex, until = ctypes.PyDLL(None), ctypes.create_string_buffer(64), time.time() + sec
    c.pthread_mutex_init(mutex, None)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_timedlock(mutex, ctypes.byref(_Timespec(int(until), int(until % 1 * 1e9))))


@register("holds_the_gil")
def holds_the_gil(args: dict[str, Any], context: Context) -> Progress:
    """C calls that let no other thread run, each for so many seconds; with `at_once` one, noted when it is over.

    Runs behind the first so many `claims` end at once.
    """
    if context.claim > args.get("claims", context.claim):
        return {"processed": 1}
    if args.get("at_once"):  # before the heartbeat's first look, which a slow connection would let come first
        hold_the_gil(args["sec"])
        started(context).close()
        return {"processed": 1}
    with started(context) as conn:
        for _ in range(args.get("times", 1)):
            hold_the_gil(args.get("sec", 1.0))
        conn.execute("UPDATE runs SET ended = clock_timestamp() WHERE job_id = %s", (context.job_id,))
    return {"processed": 1}


@register("spins")
def spins(args: dict[str, Any], context: Context) -> None:
    started(context).close()
    while True:
        pass


@register("takes_the_signals")
def takes_the_signals(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Leave the process deaf: `how` is ignore, block or silence; go on for `sec` seconds."""
    if args["how"] == "ignore":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    elif args["how"] == "block":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    else:
        signal.set_wakeup_fd(-1)
    started(context).close()
    end = time.monotonic() + args.get("sec", 0)
    while time.monotonic() < end:
        time.sleep(0.02)
        yield {"processed": 1}


@register("sleeps")
def sleeps(args: dict[str, Any], context: Context) -> None:
    started(context).close()
    time.sleep(args["sec"])


_kept: list[bytearray] = []


@register("grows")
def grows(args: dict[str, Any]) -> None:
    _kept.append(bytearray(os.urandom(2**20) * args["mb"]))


@register("deaf")
def deaf(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    started(context).close()
    yield {"processed": 1}
    while True:
        pass


@register("tidies_up")
def tidies_up(args: dict[str, Any], context: Context) -> None:
    """Never end by itself, but leave by its `finally` what is to be left."""
    try:
        while True:
            time.sleep(600)
    finally:
        started(context).close()


@register("leaves_slowly")
def leaves_slowly(args: dict[str, Any]) -> Iterator[Progress]:
    """Have safe points, and a `finally` of so many seconds."""
    try:
        while True:
            time.sleep(0.01)
            yield {"processed": 1}
    finally:
        time.sleep(args["sec"])


@register("prints_on")
def prints_on(args: dict[str, Any]) -> None:
    while True:
        print("a line", flush=True)
        time.sleep(0.05)


@register("waits_for_a_child")
def waits_for_a_child(args: dict[str, Any], context: Context) -> None:
    """Wait for a process that does not end; in a session of its own where `daemon`."""
    child = subprocess.Popen(["/bin/sleep", str(600 + args["mark"])], start_new_session=args.get("daemon", False))
    started(context).close()
    child.wait()


@register("leaves_children")
def leaves_children(args: dict[str, Any], context: Context) -> None:
    """End while processes that it started go on, one of them out of its group and forgotten by its parent."""
    subprocess.Popen(["/bin/sleep", str(600 + args["mark"])])
    subprocess.run(["/bin/sh", "-c", f"setsid sleep {600 + args['mark']} &"], check=True)
    if args.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)


@register("leaves_a_busy_child")
def leaves_a_busy_child(args: dict[str, Any]) -> None:
    """End while a process that it started goes on; the process has used 0.3 s of CPU by then."""
    child = psutil.Popen([sys.executable, "-c", "while True: pass"])
    while child.cpu_times().user < 0.3:
        time.sleep(0.01)


@register("queries")
def queries(args: dict[str, Any], context: Context) -> None:
    with context.transaction() as conn:
        started(context).close()
        conn.execute("SELECT pg_sleep(600)")


@register("within_a_second", timeout_sec=1)
def within_a_second(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Take `sec` seconds, of which the pipeline's own limit allows one."""
    end = time.monotonic() + args["sec"]
    while time.monotonic() < end:
        time.sleep(0.01)
        yield {"processed": 1}


@register("hungry", max_memory_mb=400)
def hungry(args: dict[str, Any], context: Context) -> None:
    """Use 16 MB more each 20 ms up to 640 MB, or let a child do it."""
    started(context).close()
    code = (
        "import time\nkept = [bytearray(b'x') * (16 << 20) for _ in range(40) if not time.sleep(0.02)]\ntime.sleep(600)"
    )
    if args.get("child"):
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        exec(code)


@register("writes_late")
def writes_late(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Write into the target; the commit comes behind a safe point."""
    with context.transaction() as conn:
        conn.execute("INSERT INTO written VALUES (%s, %s)", (context.job_id, context.claim))
        yield {"processed": 1}


@register("waits_for_a_file")
def waits_for_a_file(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Wait until the file `go` exists; each run adds its claim to `go` + `.runs`. Asks nothing of the database."""
    go = Path(args["go"])
    with go.with_suffix(".runs").open("a") as runs:
        print(context.claim, file=runs)
    while not go.exists():
        select.select([], [], [], 0.02)  # not time.sleep, which libfaketime 0.9 breaks
        yield {"processed": 0}


@register("notes_its_time")
def notes_its_time(args: dict[str, Any], context: Context) -> None:
    """Sleep `sec`; add the key, the begin and the end, by the machine's monotonic clock, to `file`."""
    begun = time.monotonic()
    time.sleep(args["sec"])
    with Path(args["file"]).open("a") as file:
        file.write(f"{context.lock_key} {begun} {time.monotonic()}\n")


@register("breaks_the_heartbeat")
def breaks_the_heartbeat(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """In the first run: break the worker's heartbeat, then go on and on; `methods` are those that raise."""
    started(context).close()
    if context.claim == 1:
        _break_heartbeat(args["methods"])
        while True:
            time.sleep(0.02)
            yield {"processed": 0}


@register("breaks_the_heartbeat_silently")
def breaks_the_heartbeat_silently(args: dict[str, Any], context: Context) -> None:
    """The same without a safe point, for at most `sec` seconds."""
    started(context).close()
    if context.claim == 1:
        _break_heartbeat(args["methods"])
        time.sleep(args["sec"])


def _break_heartbeat(methods: list[str]) -> None:
    """From now on these methods of this worker's heartbeat raise."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    (heartbeat,) = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    for method in methods:
        setattr(heartbeat, method, broken)


@register("writes_after_a_wait")
def writes_after_a_wait(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Wait until the file `go` exists; then a safe point, and a row that no fence guards."""
    started(context).close()
    while not Path(args["go"]).exists():
        time.sleep(0.02)
    yield {"processed": 1}
    with psycopg.connect(os.environ["DL_DB_DSN"], autocommit=True) as conn:
        conn.execute("INSERT INTO written VALUES (%s, %s)", (context.job_id, context.claim))


@register("goes_on")
def goes_on(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Add two rows for each number from the checkpoint up to `to`, in a transaction each, and note where runs begin."""
    begin = context.checkpoint
    with psycopg.connect(os.environ["DL_DB_DSN"], autocommit=True) as conn:
        conn.execute("INSERT INTO begun VALUES (%s)", (begin and begin["done"],))
    for number in range(begin["done"] + 1 if begin else 1, args["to"] + 1):
        with context.transaction() as conn:
            for _ in range(2):
                conn.execute("INSERT INTO written VALUES (%s)", (number,))
                yield Progress(number, args["to"], checkpoint={"done": number})


@register("waits_behind_a_checkpoint")
def waits_behind_a_checkpoint(args: dict[str, Any], context: Context) -> Iterator[Any]:
    """Save `secret`, and wait until the file `go` exists; return the names in the checkpoint that it began with."""
    names = sorted(context.checkpoint or ())
    context.save({"password": args["secret"]})
    yield from waits_for_a_file(args, context)
    return names


@register("chatty")
def chatty(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Log far more than a pipe holds, for a while."""
    end = time.monotonic() + args.get("sec", 1)
    number = 0
    while number < args.get("lines", 2_000) or time.monotonic() < end:
        context.logger.debug("line %s", number, extra={"text": "x" * 200})
        number += 1
        if number > args.get("lines", 2_000):
            time.sleep(0.01)
        yield {"processed": number}


@register("fills")
def fills(args: dict[str, Any], context: Context) -> Iterator[dict[str, Any]]:
    """In one transaction, behind the fence: a killed run leaves nothing."""
    time.sleep(0.1)
    yield {"day": args["day"]}
    with context.transaction() as conn:
        conn.execute("DELETE FROM filled WHERE partition = %s", (args["day"],))
        conn.execute("INSERT INTO filled VALUES (%s, %s)", (args["day"], context.job_id))


def note(line: str) -> None:
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(line + "\n")


@register("part")
def part(args: dict[str, Any]) -> int:
    note(f"part {args['n']}")
    if args["n"] < 0:
        raise PermanentError("below zero")
    time.sleep(0.05)  # so that a test which kills workers finds parts that are not done yet
    return 2 * int(args["n"])


@register("whole")
def whole(args: dict[str, Any], context: Context) -> dict[str, Any]:
    note(f"whole {context.attempt}")
    parts = [context.trigger("part", {"n": n}) for n in args["parts"]]
    return {"sum": sum(context.gather(parts)), "attempt": context.attempt}


@register("sums")
def sums(args: dict[str, Any], context: Context) -> dict[str, Any]:
    return {"of": [parent.result for parent in context.parents], "states": [p.status for p in context.parents]}


@register("triggers badly")
def triggers_badly(args: dict[str, Any], context: Context) -> None:
    context.trigger("part", nonsense=1)


@register("traced")
def traced(args: dict[str, Any]) -> Iterator[Any]:
    """A span of its own, over a safe point."""
    from opentelemetry import trace

    from dataloader import obs

    with trace.get_tracer("ours").start_as_current_span("inside", attributes={"password": args["password"]}):
        yield {"current": obs.current()}
        if args.get("fails"):
            raise ValueError(f"no login with password={args['password']}")


@register("untraced")
def untraced(args: dict[str, Any], context: Context) -> dict[str, Any]:
    return {"modules": sorted(name for name in sys.modules if name.startswith("opentelemetry"))}


EACH_SECOND = {"interval_sec": 1, "queue": "q", "overlap": "queue", "args": {"due": "{{ due_utc }}"}}


@register("ticks", schedule=EACH_SECOND if os.environ.get("SCHEDULED") == "1" else None)
def ticks(args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"due": args["due"]}


@register("never.steps", stall_sec=5, on_stall="retry")
def never_steps(args: dict[str, Any]) -> Iterator[Progress]:
    yield {"done": 1}
    (time.sleep if args["how"] == "sleep" else hold_the_gil)(3600)


@register("silent", stall_sec=0.5)
def silent(args: dict[str, Any], context: Context) -> Iterator[None]:
    """Silent for so long, twice, and then done."""
    for _ in range(2):
        time.sleep(args["sec"])
        yield


@register("talks", stall_sec=3, on_stall="retry")
def talks(args: dict[str, Any], context: Context) -> Progress:
    """Longer than its stall_sec, with a sign of life now and then."""
    for number in range(10):
        time.sleep(0.4)
        if number % 2:
            context.check()
        else:
            context.progress({"done": number})
    return {"done": 10}


@register("witnessed")
def witnessed(args: dict[str, Any], context: Context) -> Iterator[Any]:
    """Run for `sec` seconds, and on until the file `go` exists; begin and end are added to the file `witness`."""
    seconds, go = args.get("sec", 0.0), Path(args["go"]) if args.get("go") else None
    begun = time.monotonic()
    assert context.checkpoint in (None, {"seen": 1})
    _note(args, context, "begin")
    print("has begun")  # a line of the job's log
    word = "stop"
    try:
        while time.monotonic() < begun + seconds or not (go is None or go.exists()):
            select.select([], [], [], 0.02)
            yield Progress(int(50 * (time.monotonic() - begun)), None, checkpoint={"seen": 1})
        word = "end"
        return {"pid": os.getpid()}
    finally:
        _note(args, context, word)


def _note(args: dict[str, Any], context: Context, word: str) -> None:
    line = f"{word} {context.job_id} {context.lock_key} {context.claim} {os.getpid()} {time.monotonic()}\n"
    with Path(args["witness"]).open("a") as file:
        file.write(line)
