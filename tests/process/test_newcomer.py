"""A newcomer types everything wrong once, on a real cluster: each answer names the fault and the remedy in a line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from farming import Farm, free_port, until
from psycopg.conninfo import make_conninfo

from dataloader import embedded
from dataloader.queue import migrations

SECRET = "geheim-5f2c-canary"
UNKNOWN = "01890a5d-ac96-774b-bcce-b302099a8057"
FOREIGN = ("DL_", "PG", "APP_", "WORKERS_JSON", "LOCAL", "TIMEZONE", "OTEL_")


class Told(NamedTuple):
    """The answer to a command."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Newcomer:
    """A person in a folder of their own, with a database; `dsn` is the right one."""

    folder: Path
    dsn: str
    port: int

    def environment(self, **given: str) -> dict[str, str]:
        """Only what is given, and where this farm is."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) or k == "DL_PG_BIN"}
        ours = {"DL_DB_DSN": self.dsn, "DL_HOME": str(self.folder), "APP_HOST": "127.0.0.1", "PYTHONPATH": ""}
        wanted = ours | {"APP_PORT": str(self.port)} | given
        return inherited | {name: value for name, value in wanted.items() if value != "-"}

    def types(self, *words: str, **given: str) -> Told:
        """Run a command to its end."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "dataloader", *words],
            cwd=self.folder,
            env=self.environment(**given),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return Told(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def newcomer() -> Iterator[Newcomer]:
    """A server that asks for passwords, the project's schema, a worker of etl.default."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dl-new-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        hba = folder / "hba.conf"
        hba.write_text("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
        hba.chmod(0o644)
        settings = {"fsync": "off", "listen_addresses": "127.0.0.1", "port": str(free_port()), "hba_file": str(hba)}
        given = os.environ.get("DL_PG_BIN")
        server = embedded.Server.start(
            folder / "postgres", settings, Path(given) if given else None, initdb=["--no-sync"]
        )
        stack.callback(server.stop)
        dsn = make_conninfo(server.dsn, port=settings["port"])
        migrations.migrate(dsn, schema="public")
        with psycopg.connect(make_conninfo(dsn, user="postgres"), autocommit=True) as conn:
            conn.execute(f"CREATE ROLE newcomer LOGIN PASSWORD '{SECRET}'")
            conn.execute("CREATE DATABASE empty OWNER newcomer")
        (folder / "mine").mkdir(mode=0o777)
        farm = Farm(dsn, folder / "mine")
        stack.callback(farm.close)
        farm.ready(workers=1, queue="etl.default")
        until(lambda: farm.rows("SELECT FROM dl_workers"), "the keeper to show the worker")
        yield Newcomer(folder / "mine", dsn, free_port())


def over_tcp(newcomer: Newcomer, **parts: str) -> str:
    with psycopg.connect(newcomer.dsn) as conn:
        port = conn.info.port
    return make_conninfo(**{"host": "127.0.0.1", "port": str(port), "user": "newcomer", "dbname": "empty"} | parts)


def the_line(told: Told) -> str:
    """The line that says what is wrong; the others say how a command is used, or are findings that are no errors."""
    assert "Traceback" not in told.err + told.out
    assert SECRET not in told.err + told.out
    lines = [line for line in told.err.splitlines() if line and not line.startswith(("Usage: ", "Try '"))]
    (line,) = [line for line in lines if ": warning: " not in line]
    assert len(line) < 400
    return line


SETTINGS = {
    "no database": (("queues", "--direct"), {"DL_DB_DSN": "-"}, "no database is configured: set DL_DB_DSN"),
    "no database for workers": (("workers",), {"DL_DB_DSN": "-"}, "no database is configured: set DL_DB_DSN"),
    "a DSN": (
        ("queues", "--direct"),
        {"DL_DB_DSN": f"postgres//u:{SECRET}@h/db"},
        "DL_DB_DSN: should be postgresql://user:***@host:port/database",
    ),
    "a port": (("up",), {"APP_PORT": "http"}, "APP_PORT: Input should be a valid integer"),
    "JSON": (("up",), {"WORKERS_JSON": "[{queue"}, "WORKERS_JSON"),
    "a word in it": (("up",), {"WORKERS_JSON": '[{"queu": "x"}]'}, "there is no such word; did you mean 'queue'?"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_wrong_setting_is_named_with_the_right_form(newcomer: Newcomer, what: str) -> None:
    words, given, right = SETTINGS[what]
    told = newcomer.types(*words, **given)
    assert (told.status, told.out) == (78, ""), told
    assert right in the_line(told)


@pytest.mark.parametrize(
    ("parts", "right"),
    [
        ({"password": f"{SECRET}-but-wrong"}, 'password authentication failed for user "newcomer"'),
        ({"user": "nobody", "password": SECRET}, 'password authentication failed for user "nobody"'),
        ({"dbname": "nothing", "password": SECRET}, 'database "nothing" does not exist'),
        ({"port": "1"}, "Connection refused"),
        ({"host": "no.such.host.invalid"}, "no.such.host.invalid"),
    ],
)
@pytest.mark.parametrize("words", [("queues", "--direct"), ("migrate",), ("up",)], ids=lambda words: words[0])
def test_a_database_that_refuses_is_named(
    newcomer: Newcomer, words: tuple[str, ...], parts: dict[str, str], right: str
) -> None:
    told = newcomer.types(*words, DL_DB_DSN=over_tcp(newcomer, **parts), DL_HOME=str(newcomer.folder / "other"))
    assert told.status in (1, 78), told
    assert right in " ".join(told.err.split())
    assert "Traceback" not in told.err + told.out
    assert SECRET not in told.err + told.out


def test_a_database_without_the_schema_is_named(newcomer: Newcomer) -> None:
    for words in (("queues", "--direct"), ("workers",), ("api",)):
        told = newcomer.types(*words, DL_DB_DSN=over_tcp(newcomer, password=SECRET))
        assert told.status in (1, 78), told
        assert "dataloader migrate" in the_line(told)
