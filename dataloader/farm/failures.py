"""PURE: the texts of exceptions, whose own methods may fail; and the group that an exception belongs to."""

from __future__ import annotations

import importlib
import re
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

CAUSES_MOST = 20  # of an exception, whose stacks are shortened
GROUP_MOST = 200  # characters of an error group
LINE_MOST = 1_000  # characters of a message that count for its group
# The parts of an error's text that differ from job to job. The same in `dl_error_group` (sql/functions/finish.sql): a
# test compares the two.
VALUES = re.compile(
    "|".join(
        (
            r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+",  # addresses
            r"(?<![A-Za-z0-9_])'[^']*'",  # quoted values; not the apostrophe of a word
            r'"[^"]*"',
            r"`[^`]*`",
            r"[^\s@'\"(),;:=<>]+@[^\s@'\"(),;:=<>]+",  # e-mails
            r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
            r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]+)?)?)?(Z|[+-][0-9]{2}:?[0-9]{2})?",
            r"[^\s/'\"(),;:=]*(/[^\s/'\"(),;:]+){2,}/?",  # paths
            r"[A-Za-z]:\\[^\s'\"]+",
            r"(?<==)[^\s,;]+",  # name=value
            r"(?=[A-Za-z_+/-]*[0-9])[A-Za-z0-9+/_-]{20,}",  # long names with digits: tokens, object keys
        )
    )
)
NUMBERS = re.compile(r"0[xX][0-9a-fA-F]+|[0-9a-fA-F]{8,}|[0-9]+([.,:][0-9]+)*")
_OURS = Path(__file__).parents[1]
_PIPELINES = _OURS / "pipelines"
# Modules there that stand around every pipeline.
_AROUND = {
    str(_PIPELINES / name)
    for name in ("__init__.py", "children.py", "context.py", "forms.py", "hooks.py", "registry.py")
}
_LIBRARY = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")


def described(error: BaseException) -> str:
    """Type, message and stack; the exception's own methods may fail."""
    try:
        return headline(error) + "\n\n" + "".join(traceback.format_exception(error))
    except BaseException:
        return type(error).__name__


def own_stack(error: BaseException) -> str:
    """The stack with the user's frames: without those of the import machinery and of this package around them."""
    try:
        parts = traceback.TracebackException.from_exception(error)
        _keep_own(parts, 0)
        return "".join(parts.format()).rstrip()
    except BaseException:
        return type(error).__name__


def _keep_own(parts: traceback.TracebackException, depth: int) -> None:
    around = ("<frozen importlib", f"{_OURS}/", importlib.__file__)
    if own := [frame for frame in parts.stack if not frame.filename.startswith(around)]:
        parts.stack = traceback.StackSummary.from_list(own)
    for cause in filter(None, (parts.__cause__, parts.__context__)):
        if depth < CAUSES_MOST:
            _keep_own(cause, depth + 1)


def headline(error: BaseException) -> str:
    """Type and message, without the notes that follow them; the exception's own methods may fail."""
    try:
        parts = traceback.TracebackException(type(error), error, None)
        parts.__notes__ = None
        return [*parts.format_exception_only()][-1].strip()
    except BaseException:
        return type(error).__name__


def message(error: BaseException) -> str:
    """The message alone; the exception's own methods may fail."""
    try:
        return str(error)
    except BaseException:
        return type(error).__name__


def fingerprint(error: BaseException, text: str) -> str:
    """The error group of an exception with this message: a readable text that errors of one cause have in common.

    `ValueError at load.py:step: row # has # fields`: the type; the file and the function of the pipeline where it was
    raised, without the line, which the next release moves; the first line of the message, without values. At most
    GROUP_MOST characters. `text` is the masked message: a secret whose digits are gone is not known any more.
    """
    place = own_frame(error)
    location = f" at {_named(place)}" if place else ""
    common = general(text)
    return f"{type(error).__name__}{location}{f': {common}' if common else ''}"[:GROUP_MOST]


def general(text: str) -> str:
    """The first line of an error's text with … in the place of values and # in that of numbers."""
    line = text.strip(" \t\r\n").partition("\n")[0][:LINE_MOST]
    return NUMBERS.sub("#", VALUES.sub("…", line))[:GROUP_MOST].strip()


def own_frame(error: BaseException) -> FrameType | None:
    """The frame of the pipeline that an exception comes from; None: it was not raised, or not below a pipeline.

    The innermost frame of the user's own code; without one that of a built-in pipeline; without either the outermost
    one of an installed package, which is the pipeline itself.
    """
    own, built_in, installed = [], [], []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if is_users(path):
            own.append(frame)
        elif path.startswith(f"{_OURS}/"):
            built_in += [frame] if path.startswith(f"{_PIPELINES}/") and path not in _AROUND else []
        elif any(part in path for part in _INSTALLED):
            installed.append(frame)
    return next(iter([*own[-1:], *built_in[-1:], *installed[:1]]), None)


def is_users(path: str) -> bool:
    """Whether a file of code is the user's own: not Python's, of no installed package, and not of this one."""
    return not (path.startswith(("<", f"{_OURS}/", *_LIBRARY)) or any(part in path for part in _INSTALLED))


def _named(frame: FrameType) -> str:
    """`load.py:step`; a package by its name."""
    path = Path(frame.f_code.co_filename)
    file = f"{path.parent.name}/{path.name}" if path.stem == "__init__" else path.name
    return f"{file}:{frame.f_code.co_name}"
