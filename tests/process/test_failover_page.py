"""docs/failover-exercise.md, typed into terminals as a reader types it, on servers and programs of its own."""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from farming import free_port
from servers import given_programs

from dataloader import embedded
from tools import tutorial

PAGE = Path(__file__).parents[2] / "docs" / "failover-exercise.md"
PORTS = ("5441", "5442")  # those of the page


@pytest.fixture
def home() -> Iterator[Path]:
    """The reader's home, in which the account of PostgreSQL may make its folders."""
    folder = Path(tempfile.mkdtemp(prefix="dl-page-"))
    folder.chmod(0o777)
    yield folder
    for pid_file in folder.glob("*/*/postmaster.pid"):
        with suppress(ValueError, psutil.NoSuchProcess):
            psutil.Process(int(pid_file.read_text().split()[0])).kill()
    shutil.rmtree(folder, ignore_errors=True)


def programs(home: Path) -> Path:
    """A folder with PostgreSQL's programs; for root, whom they refuse, with commands that change to its account."""
    server = embedded.account_for("dataloader")
    found = embedded.reachable(embedded.find_programs(home / "none", given_programs()), home, server)
    folder = home / "bin"
    folder.mkdir()
    become = f"setpriv --reuid={server.uid} --regid={server.gid} --clear-groups" if server.switch else ""
    for name in ("initdb", "pg_ctl", "pg_basebackup"):
        (folder / name).write_text(f'#!/bin/sh\ncd / && exec {become} {found / name} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "psql").symlink_to(found / "psql")
    return folder


@pytest.mark.long
def test_the_page_keeps_its_promises(home: Path) -> None:
    text = PAGE.read_text("utf-8")
    for given in PORTS:
        text = re.sub(rf"\b{given}\b", str(free_port()), text)
    environment = tutorial.environment(home)
    environment["PATH"] = f"{programs(home)}:{Path(sys.executable).parent}:{environment['PATH']}"
    tutorial.walk(list(tutorial.steps(text)), environment, home)
