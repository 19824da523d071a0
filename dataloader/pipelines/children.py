"""The children that a run forks: none of them comes back to the worker's code, and none has the run's claim."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")


class own_process:
    """A block around a user's code, which only the process leaves that has entered it.

    A child that the code forks ends where it would leave the block, as a script ends: its output is written, with the
    traceback of an exception, and its exit status is that of `sys.exit`. Nothing else runs, for it belongs to the
    parent: no `finally` of a caller, no exit handler.
    """

    # No generator: a worker enters such a block for each step of a run.
    __slots__ = ("_pid",)

    def __enter__(self) -> None:
        self._pid = os.getpid()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if os.getpid() != self._pid:
            _end(error)


class _OfThisProcess:
    __slots__ = ("_pid", "_thing")

    def __init__(self, thing: object) -> None:
        self._thing, self._pid = thing, os.getpid()

    def __getattr__(self, name: str) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the context belongs to the process of the run, and this process was forked from it: let it return its"
                " result to the run, and connect to a database by itself"
            )
        return getattr(self._thing, name)


def bound_to_process(thing: T) -> T:
    """A proxy of an object; its use in a child raises RuntimeError, because a child has neither claim nor session."""
    return cast(T, _OfThisProcess(thing))


def _end(error: BaseException | None) -> NoReturn:
    """End this process as Python ends one with this error."""
    status = 1
    try:
        code = error.code if isinstance(error, SystemExit) else 1
        if error is None or isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit):
            status = 0
        elif not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif code is None or isinstance(code, int):
            status = (code or 0) & 0xFF
        else:
            print(code, file=sys.stderr)  # noqa: T201  as Python does
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the run may have closed it, or put something else there
                stream.flush()
    finally:
        os._exit(status)
