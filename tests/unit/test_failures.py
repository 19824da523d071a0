"""The error group of an exception: what errors of one cause have in common, whatever the exception does."""

import json
from collections.abc import Callable
from types import CodeType
from typing import Any

import psycopg
import pytest

from dataloader.farm.failures import GROUP_MOST, fingerprint, general, message, own_frame
from dataloader.pipelines import csv_file, forms

SITE = "/srv/venv/lib/python3.11/site-packages/library/core.py"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def group_of(fails: Callable[[], object]) -> str:
    try:
        fails()
    except BaseException as error:
        return fingerprint(error, message(error))
    raise AssertionError("nothing was raised")


def at(path: str, source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    code: CodeType = compile(source, path, "exec")
    exec(code, names)  # a module whose file need not exist
    return names


def raising(error: BaseException) -> Callable[[], object]:
    def fails() -> object:
        raise error

    return fails


def chained() -> None:
    try:
        raise KeyError("inner")
    except KeyError as e:
        raise ValueError("row 7 is not whole") from e


def wrong_json() -> None:
    json.loads('{"a": ')


@pytest.mark.parametrize(
    ("fails", "group"),
    [
        (raising(ValueError("row 17 has 3 fields")), "ValueError at test_failures.py:fails: row # has # fields"),
        (raising(Mute()), "Mute at test_failures.py:fails: Mute"),
        (raising(ValueError()), "ValueError at test_failures.py:fails"),
        (chained, "ValueError at test_failures.py:chained: row # is not whole"),
        (
            raising(ExceptionGroup("parts", [ValueError(1)])),
            "ExceptionGroup at test_failures.py:fails: parts (# sub-exception)",
        ),
        (
            lambda: compile("a b", "job_17.py", "exec"),
            "SyntaxError at test_failures.py:<lambda>: invalid syntax (job_#.py, line #)",
        ),
        (wrong_json, "JSONDecodeError at test_failures.py:wrong_json: Expecting value: line # column # (char #)"),
        (raising(SystemExit(3)), "SystemExit at test_failures.py:fails: #"),
        (
            raising(psycopg.errors.UniqueViolation('duplicate key value violates "pk"\nDETAIL: Key (id)=(5) exists')),
            "UniqueViolation at test_failures.py:fails: duplicate key value violates …",
        ),
    ],
)
def test_a_group_names_the_type_the_place_and_the_message_without_values(
    fails: Callable[[], object], group: str
) -> None:
    assert group_of(fails) == group


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("order 0190a5d0-ac96-774b-bcce-b302099a8057 is late", "order … is late"),
        ("no row since 2026-01-31T14:30:05.123Z, 3 tries", "no row since …, # tries"),
        ("no row since 2026-01-31", "no row since …"),
        ("cannot read /data/in/2026/x.csv: gone", "cannot read …: gone"),
        ("cannot read in/orders/x.csv", "cannot read …"),
        (r"cannot read C:\data\x.csv", "cannot read …"),
        ("mail to ann.lee@example.org bounced", "mail to … bounced"),
        ("GET https://example.org/a?b=1 gave 503", "GET … gave #"),
        ("column \"a b\" of 'x' and `y`", "column … of … and …"),
        ("it doesn't fit and won't", "it doesn't fit and won't"),
        ("user=ann id=7, gone", "user=… id=…, gone"),
        ("at 0xdeadBEEF and deadbeef12", "at # and #"),
        ("took 1,234.5 s", "took # s"),
        ("key AKIA5EXAMPLEKEY0000000000 refused", "key … refused"),
        ("read and/or write", "read and/or write"),
        ("  first\nsecond 2", "first"),
        ("", ""),
    ],
)
def test_what_differs_from_job_to_job_goes_from_the_message(text: str, expected: str) -> None:
    assert general(text) == expected


def test_a_group_is_short_and_ends_within_a_moment_for_any_text() -> None:
    for text in ("a" * 1_000_000, "/a" * 500_000, "'" * 100_000, "a/" * 50_000, "0" * 100_000, "@" * 100_000):
        assert len(fingerprint(ValueError(), text)) <= GROUP_MOST


def test_the_place_is_the_innermost_frame_of_own_code_below_which_a_library_raises() -> None:
    library = at(SITE, "def call(): raise OSError('away')")
    own = at("/srv/app/load.py", "def step(call): call()")
    assert group_of(lambda: own["step"](library["call"])) == "OSError at load.py:step: away"


def below(fails: Callable[[], object]) -> OSError:
    """What `fails` raises, without this file's own frames."""
    with pytest.raises(OSError, match="away") as raised:
        fails()
    trace = raised.value.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return raised.value.with_traceback(trace)


def test_the_place_of_an_installed_or_built_in_pipeline_is_its_own_function() -> None:
    inner = at(SITE, "def call(): raise OSError('away')")["call"]
    outer = at(SITE.replace("core", "tasks"), "def run(call): call()")["run"]
    assert own_frame(below(lambda: outer(inner))).f_code.co_name == "run"
    rows = at(csv_file.__file__, "def rows(): raise OSError('away')")["rows"]
    around = at(forms.__file__, "def step(f): f()")["step"]
    assert fingerprint(below(lambda: around(rows)), "away") == "OSError at csv_file.py:rows: away"
    alone = at(forms.__file__, "def step(): raise OSError('away')")["step"]
    assert fingerprint(below(alone), "away") == "OSError: away"


def test_a_release_that_moves_the_line_keeps_the_group() -> None:
    first = at("/srv/app/load.py", "def step(): raise OSError('away')")
    later = at("/srv/app/load.py", "\n\n\ndef step():\n    raise OSError('away')")
    assert group_of(first["step"]) == group_of(later["step"]) != group_of(raising(OSError("away")))
    assert fingerprint(ValueError("x"), "x") == "ValueError: x", "it was not raised, and has no place"
