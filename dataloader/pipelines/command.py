"""`run.command`: a program of the operator's allow-list (DL_COMMANDS). docs/commands.md is the page for people.

The program is a process group of its own, which ends with its run, however that ends. The run's end closes it: SIGTERM
to the group, and SIGKILL after GRACE_SEC. When the worker dies, the kernel kills the program (launch.py), and the farm
kills what the program has started.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from logging import Logger
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dataloader import config
from dataloader.exits import outcome
from dataloader.pipelines import Arguments, Context, PermanentError, Progress, launch, register, validated

GRACE_SEC = 2.0  # less than DL_KILL_GRACE_SEC, after which the farm kills the worker
TAIL = 20  # lines; the journal keeps as many notes of a run
LONGEST_LINE = 2_000  # bytes; the rest of a longer line counts as the next one
_SLICE = 0.1  # seconds between two safe points
_ALWAYS = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")  # of the worker's environment, for every program
_PIECE = 2**16
_PIECES_LEFT = 16  # a pipe holds less; a process that has left the group could write for ever
_LINE_END = re.compile(rb"[\r\n]")  # \r: what a progress bar writes
_CONTROLS = re.compile("\x1b\\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")  # colours, and what moves a cursor


class CommandFailed(Exception):
    """The program has ended otherwise than with 0, or took too long."""


class Wanted(Arguments):
    """The `args` of `run.command`; docs/commands.md explains each."""

    command: str = Field(min_length=1, max_length=64)
    arguments: list[Annotated[str, Field(max_length=4_096, pattern=r"^[^\x00]*$")]] = Field(default=[], max_length=256)


@register("run.command")
def run_command(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, dict[str, Any]]:
    """Run the program of this name with these further arguments; return its exit code and its last lines.

    Each line of the output is logged, and the last ones are notes in the journal. An exit code other than 0, a signal
    and a program that takes longer than its `timeout_sec` raise CommandFailed with the last lines. A command that
    DL_COMMANDS does not name, or whose program or folder is not there, raises PermanentError. When the run has to stop,
    the program ends with all of its process group.
    """
    wanted = validated(Wanted, args)
    commands = config.load().dl_commands
    if (command := commands.get(wanted.command)) is None:
        known = ", ".join(sorted(commands)) or "none"
        raise PermanentError(f"command: should be one that DL_COMMANDS of this worker names ({known})")
    if not os.access(command.argv[0], os.X_OK) or not os.path.isfile(command.argv[0]):
        missing = f"the program of {wanted.command} in DL_COMMANDS"
        raise PermanentError(f"command: {missing} is no file that this worker may execute")
    folder = command.folder or context.data_dir
    if not folder.is_dir():
        setting = "DL_COMMANDS" if command.folder else "DL_DATA_DIR"
        raise PermanentError(f"command: the folder of {wanted.command} ({setting}) is missing")
    output = Output(context.logger, command.output_kb * 1024)
    argv = [*command.argv, *wanted.arguments]
    env = {name: os.environ[name] for name in (*_ALWAYS, *command.env) if name in os.environ}
    env |= {"DATALOADER_JOB_ID": str(context.job_id), "DATALOADER_ATTEMPT": str(context.attempt)}
    env |= {"DATALOADER_CLAIM": str(context.claim), "DATALOADER_DATA_DIR": str(context.data_dir)}
    try:
        with closing(Program(argv, env, folder, command.memory_mb, output)) as program:
            until = math.inf if command.timeout_sec is None else time.monotonic() + command.timeout_sec
            reported = 0
            while (status := program.wait(_SLICE)) is None:
                if time.monotonic() > until:
                    program.close()
                    too_long = f"{wanted.command} ran for more than {command.timeout_sec:g} s"
                    raise CommandFailed(f"{too_long}{output.last_words()}")
                yield Progress(output.lines) if output.lines > reported else None
                reported = output.lines
    finally:
        for line in output.tail:
            context.note(line)
    if status != 0:
        raise CommandFailed(f"{wanted.command} {outcome(status)}{output.last_words()}")
    return {"exit_code": status, "lines": output.lines, "bytes": output.bytes, "tail": list(output.tail)}


class Program:
    """One program that runs; its output goes to `output`."""

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], folder: Path, memory_mb: int | None, output: Output
    ) -> None:
        """Start it without a shell. Each of its processes may have `memory_mb` of address space; None: any."""
        self._output = output
        limits = [str(os.getpid()), str((memory_mb or 0) * 2**20)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", launch.__file__, *limits, *argv],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None  # noqa: S101  it is a pipe
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        try:
            self._end = os.pidfd_open(self._process.pid)  # readable once the program has ended
        except OSError:  # Linux before 5.3, or no descriptor is free: the program would run without us
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._pipe.close()
            raise
        self._events = select.poll()
        self._events.register(self._pipe, select.POLLIN)
        self._events.register(self._end, select.POLLIN)

    def wait(self, within: float) -> int | None:
        """Take the program's output for up to `within` seconds, or until it ends.

        Returns its exit code, or the negative number of its signal; None while it goes on.
        """
        if self._has_ended(within):
            self._bury()
        return self._process.returncode

    def close(self) -> None:
        """End the program with its process group, if it has not ended, and take its last output."""
        if self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        until = time.monotonic() + GRACE_SEC
        while (left := until - time.monotonic()) > 0 and not self._has_ended(left):
            pass
        self._bury()

    def _has_ended(self, within: float) -> bool:
        """Wait so long for an event and take one piece of the output; whether the program has ended.

        It is not buried, so no other process group can have its number.
        """
        ready = {descriptor for descriptor, _ in self._events.poll(within * 1000)}
        if self._pipe.fileno() in ready:
            if piece := os.read(self._pipe.fileno(), _PIECE):
                self._output.take(piece)
            else:  # the program has closed it, and may go on
                self._events.unregister(self._pipe)
        return self._end in ready

    def _bury(self) -> None:
        """Kill what is left of the group, and take the rest of the output."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for _ in range(_PIECES_LEFT):
            self._has_ended(0)
        self._output.end()
        self._pipe.close()
        os.close(self._end)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class Output:
    """The lines of one program, in bounded memory."""

    longest = LONGEST_LINE

    def __init__(self, logger: Logger, logged_most: int) -> None:
        """`logged_most` is how many bytes of the output are logged."""
        self.lines = 0
        self.bytes = 0
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._logger = logger
        self._left = logged_most
        self._begun = b""  # a line whose end has not come

    def take(self, piece: bytes) -> None:
        """Take the next piece of the output."""
        self.bytes += len(piece)
        *whole, self._begun = _LINE_END.split(self._begun + piece)
        for line in whole:
            self._add(line, len(line) + 1)
        if (most := (len(self._begun) - 1) // self.longest * self.longest) > 0:
            self._add(self._begun[:most], most)
            self._begun = self._begun[most:]

    def end(self) -> None:
        """The output is over: its last line may have no end."""
        self._add(self._begun, len(self._begun))
        self._begun = b""

    def last_words(self) -> str:
        """The last lines, for an error; "" without output."""
        return "".join(["; its last lines:", *(f"\n{line}" for line in self.tail)]) if self.tail else ""

    def _add(self, line: bytes, size: int) -> None:
        """Add a line, which has so many bytes with its end; an empty one is none."""
        for begin in range(0, len(line), LONGEST_LINE):
            part = line[begin : begin + LONGEST_LINE]
            text = _CONTROLS.sub("", part.decode("utf-8", "replace"))
            self.lines += 1
            self.tail.append(text)
            if self._left > 0:
                self._logger.info("%s", text)
                self._left -= len(part) + 1
                if self._left <= 0:
                    self._logger.warning("the program has written much: the rest of its output is not logged")
