"""A PgBouncer in front of the tests' PostgreSQL, while a block runs."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import until
from psycopg.conninfo import conninfo_to_dict, make_conninfo

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
TAKES_OUR_OPTIONS = "ignore_startup_parameters=options,extra_float_digits"
PORT = 6432  # it names a socket in a folder of its own: another program could take a free port of the machine


@contextmanager
def pooler(dsn: str, mode: str, *options: str) -> Iterator[str]:
    """PgBouncer in front of the database; yields the DSN through it."""
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed (Debian: apt-get install pgbouncer)")
    behind = {k: v for k, v in conninfo_to_dict(dsn).items() if k in ("host", "port", "user", "password", "dbname")}
    folder = Path(tempfile.mkdtemp(prefix="dl-pgbouncer-"))
    where = " ".join(f"{key}={value}" for key, value in behind.items() if key != "dbname")
    settings = [f"listen_port={PORT}", f"unix_socket_dir={folder}", "auth_type=any", f"pool_mode={mode}", *options]
    (folder / "pgbouncer.ini").write_text("\n".join(["[databases]", f"* = {where}", "[pgbouncer]", *settings]) + "\n")
    process = subprocess.Popen([PGBOUNCER, "-q", folder / "pgbouncer.ini"], **owner(folder, behind))
    try:
        until(lambda: answers(f"{folder}/.s.PGSQL.{PORT}"), "pgbouncer's answer")
        yield make_conninfo("", host=str(folder), port=PORT, dbname=behind["dbname"], user=behind.get("user"))
    finally:
        process.kill()  # newer ones wait at SIGTERM for their clients
        process.wait()
        shutil.rmtree(folder)


def owner(folder: Path, behind: dict[str, Any]) -> dict[str, Any]:
    """Popen's arguments for a user that reaches the server's socket and is not root, whom PgBouncer refuses."""
    if os.geteuid() != 0:
        return {}
    host = Path(str(behind.get("host", "")))
    user = host.stat().st_uid if host.is_absolute() else 65534
    os.chown(folder, user, -1)
    return {"user": user, "extra_groups": []}


def answers(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as tried:
        return tried.connect_ex(address) == 0
