"""Shared by tests of several pipelines: the data that they load, and looks at a job's end and at the rows left."""

import threading
from collections.abc import Callable, Generator
from typing import Any

from dataloader.testing import Result

Rows = Callable[[str], list[Any]]  # of a query in the target
Load = Callable[..., Result]  # a job to its end
Command = Callable[..., Any]  # words of the command line
Run = Callable[..., list[Any]]  # the documents that a pipeline yields
# The columns of the table `t`, with their types.
TYPES = (
    "SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute"
    " WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
)
LEFT = r"SELECT count(*) FROM pg_class WHERE relname ~ '^dl_load_csv' AND relkind = 'r'"
ROWS = 3_000
TEXTS = [None, "", 'Ёж,"\n\r\n', "\\.", "\\N"]


def fails_for_good(result: Result, error: str, secret: str = "") -> None:
    """It has failed at its first attempt; its error holds this text, and no part of it is the secret."""
    assert (result.status, result.attempts) == ("failed", 1)
    assert error in (result.error or "")
    assert not secret or secret not in str(result.error)


def ends_its_threads(steps: Generator[Any], number: int) -> None:
    """The load has so many threads behind its first step, and none behind its end."""
    others = {*threading.enumerate()}  # of earlier tests, which may end meanwhile
    next(steps)
    assert len({*threading.enumerate()} - others) == number
    steps.close()
    assert not {*threading.enumerate()} - others
