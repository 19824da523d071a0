"""A fork server: `dataloader` programs for tests, started from a process that has imported the command line already.

The imports are most of what the start of a program costs, a second of CPU each, and the process tests start hundreds.
A forked program has its own environment, folder, output and arguments. It inherits from the server all that an exec
would read anew: LD_PRELOAD, DL_PERIODS, most PYTHON variables, the hash seed, limits, namespaces. A test that needs
one of these, or that measures memory, sets `farm.executes = True`.

`python forkserver.py NUMBER` serves requests from the socket with this file descriptor.
"""

import atexit
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from setproctitle import setproctitle

from dataloader.farm.process import readable

LIMIT = 1_000_000  # bytes of a request
LOST = 255  # in place of an exit status that nobody has written: its reporter was killed
NEVER = 3_600.0


class Forked:
    """A forked program: what the tests use of subprocess.Popen."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = end  # a pipe: its exit status

    def poll(self) -> int | None:
        if self.returncode is None and readable([self._end], 0):
            status = os.read(self._end, 20)
            os.close(self._end)
            self.returncode = int(status) if status else LOST
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit status."""
        if self.returncode is None and not readable([self._end], NEVER if timeout is None else timeout):
            raise subprocess.TimeoutExpired(f"the program with pid {self.pid}", timeout or NEVER)
        self.poll()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_server: socket.socket | None = None


def start(arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None, out: int, err: int) -> Forked:
    """Start `dataloader` with these arguments, and stdout and stderr to these file descriptors."""
    global _server
    if _server is None:
        _server = _started()
    request = {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd or Path.cwd())}
    read, write = os.pipe()
    try:
        try:
            socket.send_fds(_server, [json.dumps(request).encode()], [out, err, write])
        finally:
            os.close(write)
        pid = int(os.read(read, 10))
    except (OSError, ValueError):
        _server = None  # the next test has a new one
        os.close(read)
        raise RuntimeError("the fork server has ended") from None
    return Forked(pid, read)


def run(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `dataloader` with these arguments to its end, within a minute."""
    with TemporaryFile() as out, TemporaryFile() as err:
        program = start(arguments, env, cwd, out.fileno(), err.fileno())
        try:
            status = program.wait(60)
        finally:
            program.kill()
        outputs = [os.pread(file.fileno(), LIMIT, 0).decode() for file in (out, err)]
    return subprocess.CompletedProcess(list(arguments), status, *outputs)


def _started() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", __file__, str(theirs.fileno())]
    # In a session of its own, so that Ctrl-C ends the tests, and these end the programs.
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)  # before: it ends the server
    return ours


def serve(control: socket.socket) -> None:
    """Fork a program for each request, until the tests are over. Returns in each program, which then runs."""
    # The programs of all commands, which each command would import by itself.
    import dataloader.cli.main
    import dataloader.embedded
    import dataloader.farm.keeper
    import dataloader.farm.reaper
    import dataloader.farm.supervisor
    import dataloader.farm.worker
    import dataloader.local.ports
    import dataloader.queue.probe  # noqa: F401

    # setproctitle finds the memory of titles at its first call, by the environment, which `become` replaces.
    setproctitle("dataloader: fork server")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the programs
    while True:
        text, fds, _, _ = socket.recv_fds(control, LIMIT, 3)
        if not text:
            sys.exit()
        end = fds.pop()
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                os.close(end)
                return become(json.loads(text), fds)
            _report(pid, fds, end)
        for each in (*fds, end):
            os.close(each)


def _report(pid: int, outputs: Sequence[int], end: int) -> NoReturn:
    """Write the program's pid, and its exit status when it has ended."""
    for output in outputs:
        os.close(output)
    os.write(end, f"{pid:<10}".encode())
    _, status = os.waitpid(pid, 0)
    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(request: Mapping[str, Any], outputs: Sequence[int]) -> None:
    """Make this process what an executed program would be."""
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(str(request["cwd"]))
    sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["dataloader", *request["arguments"]]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    time.tzset()
    random.seed()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    from dataloader.cli.main import main

    main(prog_name="dataloader")
