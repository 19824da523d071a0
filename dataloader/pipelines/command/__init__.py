"""`run.command`: a program of the operator's allow-list (DL_COMMANDS). docs/loaders.md is the page for people.

program     the process: its start, its output, its end
launch      what the process executes before the program: the tie to its worker, the limits
output      the lines of the output, of which only so many are kept
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dataloader import config
from dataloader.config import Command
from dataloader.pipelines import Context, PermanentError, Progress, register, validated
from dataloader.pipelines.command.output import Output
from dataloader.pipelines.command.program import Program, ended_how

_SLICE = 0.1  # seconds between two safe points
_ALWAYS = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")  # of the worker's environment, for every program


class CommandFailed(Exception):
    """The program has ended otherwise than with 0, or took too long."""


class Arguments(BaseModel):
    """The `args` of `run.command`; docs/loaders.md explains each."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

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
    wanted = validated(Arguments, args)
    command = _allowed(config.load().dl_commands, wanted.command)
    folder = _folder(command, wanted.command, context.data_dir)
    output = Output(context.logger, command.output_kb * 1024)
    argv = [*command.argv, *wanted.arguments]
    try:
        with closing(Program(argv, _environment(command, context), folder, command.memory_mb, output)) as program:
            status = yield from _watched(program, output, wanted.command, command.timeout_sec)
    finally:
        for line in output.tail:
            context.note(line)
    if status != 0:
        raise CommandFailed(f"{wanted.command} {ended_how(status)}{output.last_words()}")
    return {"exit_code": status, "lines": output.lines, "bytes": output.bytes, "tail": list(output.tail)}


def _watched(
    program: Program, output: Output, name: str, timeout_sec: float | None
) -> Generator[Progress | None, None, int]:
    """Read the output until the program has ended; its exit code, or the negative number of its signal."""
    until = None if timeout_sec is None else time.monotonic() + timeout_sec
    told = 0
    while (status := program.look(_SLICE)) is None:
        if until is not None and time.monotonic() > until:
            program.close()
            raise CommandFailed(f"{name} ran for more than {timeout_sec:g} s{output.last_words()}")
        yield Progress(output.lines) if output.lines > told else None
        told = output.lines
    return status


def _allowed(commands: dict[str, Command], name: str) -> Command:
    command = commands.get(name)
    if command is None:
        known = ", ".join(sorted(commands)) or "none"
        raise PermanentError(f"command: should be one that DL_COMMANDS of this worker names ({known})")
    if not os.access(command.argv[0], os.X_OK) or not os.path.isfile(command.argv[0]):
        raise PermanentError(f"command: the program of {name} in DL_COMMANDS is no file that this worker may execute")
    return command


def _folder(command: Command, name: str, data_dir: Path) -> Path:
    folder = command.folder or data_dir
    if os.path.isdir(folder):
        return folder
    raise PermanentError(
        f"command: the folder of {name} ({'DL_COMMANDS' if command.folder else 'DL_DATA_DIR'}) is missing"
    )


def _environment(command: Command, context: Context) -> dict[str, str]:
    """The environment of the program: allowed variables of the worker, and the names of its job."""
    names = [*_ALWAYS, *command.env]
    job = {
        "DATALOADER_JOB_ID": str(context.job_id),
        "DATALOADER_ATTEMPT": str(context.attempt),
        "DATALOADER_CLAIM": str(context.claim),
        "DATALOADER_DATA_DIR": str(context.data_dir),
    }
    return {name: os.environ[name] for name in names if name in os.environ} | job
