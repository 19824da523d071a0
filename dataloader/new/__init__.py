"""`dataloader new`: a pipeline and its test, to begin with. Imports nothing of the package.

The templates beside this file are those of a pipeline that is named `my_loader`.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path

TEMPLATE = "my_loader"
LONGEST = 50  # characters: the table is named after the module


class Refused(ValueError):
    """No pipeline can be written; the message says why and what would be right."""


def write(name: str, folder: Path) -> list[Path]:
    """Write the module `name` and its test into `folder`; Refused when the name is not fit or a file is in the way."""
    _require_name(name)
    texts = {folder / f"{name}.py": "pipeline.txt", folder / f"test_{name}.py": "its_test.txt"}
    for path in [*texts, folder / name]:
        if os.path.lexists(path):
            raise Refused(f"{path} is there already: choose another name, or remove it first")
    if found := _shadowed(name):
        raise Refused(f"{name} would hide {found}: choose another name, such as load_{name}")
    try:
        for path, template in texts.items():
            with path.open("x", encoding="utf-8") as file:
                file.write((files(__name__) / template).read_text("utf-8").replace(TEMPLATE, name))
    except OSError as e:
        raise Refused(f"{path} cannot be written: {e.strerror}") from None
    return list(texts)


def what_next(name: str) -> str:
    """What to do with what was written, as commands."""
    python, dataloader = _program("python"), _program("dataloader")
    return f"""\
test it      {python} -m pytest test_{name}.py
run it       DL_PIPELINES={name} {dataloader} up
trigger it   {dataloader} trigger {name} --args '{{"path": "example.csv"}}' --wait
             with example.csv (columns id, name, amount) in the folder of files that `up` prints"""


def _require_name(name: str) -> None:
    fit = name.replace("-", "_").replace(".", "_")
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        hint = f", such as {fit}" if fit.isidentifier() and fit.isascii() and not keyword.iskeyword(fit) else ""
        raise Refused(f"{name!r} cannot be a module's name: it should be letters, digits and _, no keyword{hint}")
    if len(name) > LONGEST:
        raise Refused(f"the name should have at most {LONGEST} characters, this one has {len(name)}")
    if name.startswith("test_"):
        raise Refused(f"{name} would be taken for a test: choose a name without test_")


def _shadowed(name: str) -> str | None:
    """What this name imports without the new module."""
    if name in sys.stdlib_module_names:
        return "the module of Python's standard library"
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # __main__
        return "a running module"
    return f"an installed module ({spec.origin or name})" if spec and spec.loader else None


def _program(name: str) -> str:
    """How one of this environment's programs is called from here."""
    path = Path(sys.executable).parent / name
    if shutil.which(name) == str(path):
        return name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
