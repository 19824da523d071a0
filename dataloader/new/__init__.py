"""`dataloader new` writes a first pipeline and its test.

The templates beside this file hold a pipeline named `my_loader`.
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
LONGEST = 50  # characters; the module's name becomes part of a table's name


class Refused(ValueError):
    """`new` cannot write a pipeline; the message names the reason and the remedy."""


def write(name: str, folder: Path) -> list[Path]:
    """Write the module `name` and its test into `folder`, and return their paths.

    Raises Refused for an unusable name, for a file that exists, and for a folder that cannot be written.
    """
    fit = name.replace("-", "_").replace(".", "_")
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        hint = f", such as {fit}" if fit.isidentifier() and fit.isascii() and not keyword.iskeyword(fit) else ""
        raise Refused(f"{name!r} cannot be a module's name: it should be letters, digits and _, no keyword{hint}")
    if len(name) > LONGEST:
        raise Refused(f"the name should have at most {LONGEST} characters, this one has {len(name)}")
    if name.startswith("test_"):
        raise Refused(f"{name} would be taken for a test: choose a name without test_")
    texts = {folder / f"{name}.py": "pipeline.txt", folder / f"test_{name}.py": "its_test.txt"}
    for path in [*texts, folder / name]:
        if os.path.lexists(path):
            raise Refused(f"{path} exists already: choose another name, or remove it first")
    if name in sys.modules or ((spec := importlib.util.find_spec(name)) and spec.loader):
        raise Refused(f"{name} would hide a module of Python or of a package: choose another name, such as load_{name}")
    try:
        for path, template in texts.items():
            with path.open("x", encoding="utf-8") as file:
                file.write((files(__name__) / template).read_text("utf-8").replace(TEMPLATE, name))
    except OSError as e:
        raise Refused(f"{path} cannot be written: {e.strerror}") from None
    return list(texts)


def what_next(name: str) -> str:
    """The next steps with the new files, as commands."""
    python, dataloader = _program("python"), _program("dataloader")
    return f"""\
test it      {python} -m pytest test_{name}.py
run it       DL_PIPELINES={name} {dataloader} up
trigger it   {dataloader} trigger {name} --args '{{"path": "example.csv"}}' --wait
             with example.csv (columns id, name, amount) in the folder of files that `up` prints"""


def _program(name: str) -> str:
    """The command for a program of this environment in the working folder."""
    path = Path(sys.executable).parent / name
    if shutil.which(name) == str(path):
        return name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
