"""The program on a Dask worker: it runs the function in a process of its own, which an order can stop.

Dask cannot stop a thread, so the task starts a process, passes its output on, and kills it when its order is cancelled.
This file travels to the cluster as text (on_dask): nothing of ours is installed there, so it imports the standard
library and distributed alone. The process is this file again, as a program.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

GO_SEC = 30.0  # for the word that the order is kept; without it another run of the job gives the order anew
POLL_SEC = 0.25
GRACE_SEC = 1.0  # between SIGTERM and SIGKILL
TAIL = 64 * 1024  # bytes of the output that are kept for whoever reads it next
RESULT_MOST = 2**20
PR_SET_PDEATHSIG = 1


def call(source: str, order: str) -> dict[str, Any]:
    """Run the function to its end, or until it is stopped; called in a thread of a Dask worker."""
    from distributed import Event, Variable, secede

    given = json.loads(order)
    stop = Event(given["id"] + "-stop")
    if not Event(given["id"] + "-go-" + given["nonce"]).wait(GO_SEC):
        raise RuntimeError("nobody has kept this order, so its function does not begin")
    if given["is_driver"]:
        secede()
    if stop.is_set():
        return {"code": None, "is_stopped": True, "result": None}
    with tempfile.TemporaryFile("w+") as result:
        process = _started(source, given, result.fileno())
        output = _Output(process, Variable(given["id"] + "-output"))
        is_stopped = False
        try:
            output.publish()
            while process.poll() is None and not is_stopped:
                is_stopped = stop.wait(POLL_SEC)
                output.publish()
        finally:
            _end(process)
        output.end()
        result.seek(0)
        return {"code": process.returncode, "is_stopped": is_stopped, "result": result.read() or None}


def _started(source: str, given: dict[str, Any], result: int) -> subprocess.Popen[bytes]:
    from distributed import get_worker

    env = os.environ | {"PYTHONUNBUFFERED": "1", "DATALOADER_ORDER": given["id"], "DATALOADER_ARGS": given["args"]}
    env["DASK_SCHEDULER_ADDRESS"] = str(get_worker().scheduler.address)
    process = subprocess.Popen(
        [sys.executable, "-c", source, given["function"], str(result), str(os.getpid())],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[result],
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101  it is a pipe
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps({"path": sys.path, "args": json.loads(given["args"])}).encode())
    return process


class _Output:
    """The output of the process: its size, and its end, which a variable of the scheduler keeps."""

    def __init__(self, process: subprocess.Popen[bytes], variable: Any) -> None:
        self._process, self._variable = process, variable
        self._tail, self._total, self._published = b"", 0, -1
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Pass on what has come."""
        with self._lock:
            tail, total = self._tail, self._total
        if total != self._published:
            self._variable.set({"total": total, "tail": tail})
            self._published = total

    def end(self) -> None:
        """Pass on the rest; a process that has left the group could hold the pipe for ever."""
        self._thread.join(GRACE_SEC)
        self.publish()

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101  it is a pipe
        while piece := os.read(self._process.stdout.fileno(), 2**16):
            with self._lock:
                self._total += len(piece)
                self._tail = (self._tail + piece)[-TAIL:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with its group."""
    for number, within in ((signal.SIGTERM, GRACE_SEC), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(within)


def main(function: str, result: str, parent: str) -> None:
    """Call the function, and write its result; called in the process, which dies with the Dask worker's thread."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)
    given = json.load(sys.stdin)
    sys.path[:] = given["path"]
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(given["args"])
    text = json.dumps(value)
    if len(text) > RESULT_MOST:
        raise ValueError(f"the result has {len(text)} characters of JSON, and {RESULT_MOST} are allowed")
    with open(int(result), "w") as file:
        file.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
