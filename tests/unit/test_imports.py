"""The import rule that dataloader/__init__.py states, read from the sources."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import dataloader

ROOT = Path(dataloader.__file__).parent
EVERYBODY = {"config", "exits", "log", "obs", "periods"}
PROCESSES = {"worker", "keeper", "reaper", "supervisor"}


def rule() -> dict[str, set[str]]:
    """The table in the docstring: each room with the rooms that it may import; a long row goes on in the next line."""
    allowed: dict[str, set[str]] = {}
    room = ""
    for line in (dataloader.__doc__ or "").splitlines():
        if row := re.match(r"    (\w+) +\S.*?  +(\S.*)$", line):
            room, rooms = row.groups()
            allowed[room] = set() if rooms == "-" else set(rooms.split())
        elif row := re.match(r" {60,}(\S.*)$", line):
            allowed[room] |= set(row[1].split())
    del allowed["room"]
    return allowed


def modules() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "__" not in path.name or path.parent != ROOT
    )


@cache
def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_the_rule_allows(module: str) -> None:
    own = Path(module).parts[0].removesuffix(".py")
    allowed = rule()[own]
    theirs = {name.removeprefix("dataloader.") for name in imported(ROOT / module) if name.startswith("dataloader.")}
    theirs = {name for name in theirs if name.split(".")[0] not in {own, "DISTRIBUTION", "version", *EVERYBODY}}
    if allowed == {"anything"}:
        return
    if "anything" in allowed:
        assert "cli" not in {name.split(".")[0] for name in theirs}
        return
    wrong = [name for name in theirs if not any(f"{name}.".startswith(f"{room}.") for room in allowed)]
    assert not wrong, f"{module} imports {wrong}"


@pytest.mark.parametrize("module", [module for module in modules() if module.startswith("farm/")])
def test_no_process_of_the_farm_imports_another(module: str) -> None:
    names = {name.split(".")[2] for name in imported(ROOT / module) if name.startswith("dataloader.farm.")}
    assert not (names & PROCESSES) - {Path(module).stem}


def test_every_module_is_in_the_map() -> None:
    assert {Path(module).parts[0].removesuffix(".py") for module in modules()} == set(rule())


def importing(library: str) -> set[str]:
    return {module for module in modules() if library in {name.split(".")[0] for name in imported(ROOT / module)}}


def test_only_api_knows_flask_and_only_what_people_ask_knows_rich() -> None:
    """rich costs each worker some MB, and only people read its output."""
    assert {module for module in importing("flask") if not module.startswith("api/")} == set()
    assert {module for module in importing("rich") if not module.startswith("cli/")} == set()
    assert "cli/main.py" not in importing("rich")


def test_a_program_of_a_farm_holds_nothing_of_what_people_ask() -> None:
    held = held_after("dataloader.cli.main, dataloader.farm.worker, dataloader.farm.keeper, dataloader.farm.reaper")
    assert "psycopg" in held
    assert not {"dataloader.client", "dataloader.cli.screen", "http.client", "rich.live"} & held


def test_the_command_line_starts_with_little() -> None:
    """`dataloader --version` imports no settings, logs or driver; a question to the API no logs, driver or farm.

    A program with a Client has none of the service's libraries.
    """
    assert not {"pydantic", "structlog", "psycopg", "rich.console", "psutil"} & held_after("dataloader.cli.main")
    held = held_after("dataloader; dataloader.Client")
    assert not {"flask", "pydantic", "psycopg", "structlog", "rich", "httpx", "anyio"} & held
    asking = held_after("dataloader.cli.main, dataloader.cli.jobs")
    assert "dataloader.client" in asking
    assert not {"psycopg", "psutil", "structlog", "dataloader.farm.process", "dataloader.embedded"} & asking


def held_after(modules: str) -> set[str]:
    code = f"import sys, {modules}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())
