"""Every page and API GET at size: times, pictures, accessibility. `python -m tools.pages --out FOLDER`.

The program starts a PostgreSQL of its own with the settings of a new server, and the product's reaper and API. The exit
status is 0 when each p95 is within the bound and no page has a fault. It needs chromium and playwright, or --no-looks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from api_app import running
from farming import Farm, until
from psycopg.conninfo import make_conninfo

from dataloader import embedded
from dataloader.queue import migrations
from tools.programs import answers, free_port

from .addresses import Address, addresses
from .history import History
from .timing import REFRESH_SEC, faults, measured, table

OWNER = "CREATE ROLE farm_owner LOGIN PASSWORD 'p'; CREATE DATABASE farm OWNER farm_owner"


def main() -> int:
    """Fill, ask, look; returns the exit status."""
    given = _arguments()
    with _database(given.dsn, given.keep) as (dsn, folder):
        history = _history(dsn, given, folder)
        farm = Farm(dsn, folder)
        try:
            return _run(farm, history, given)
        finally:
            farm.close()


def _run(farm: Farm, job_ids: dict[str, object], given: argparse.Namespace) -> int:
    with running(farm.dsn) as app:
        found = [each for each in addresses(app, job_ids) if re.search(given.only, each.name)]  # type: ignore[arg-type]
    farm.start("reaper", dl_reaper_period_sec=10)
    port = free_port()
    farm.start("api", app_port=port, app_host="127.0.0.1", pg_pool_size=5)
    until(lambda: answers(port, "/ready"), "the API")
    wrong = []
    if given.rounds:
        timed = measured(port, found, given.rounds, given.every)
        print(table(timed), flush=True)
        wrong += faults(timed, given.most_ms)
    if given.looks:
        wrong += _looks(port, found, given.out)
    print("\n".join(wrong) or f"no faults at {len(found)} addresses")
    return 1 if wrong else 0


def _looks(port: int, found: list[Address], out: Path | None) -> list[str]:
    from playwright.sync_api import sync_playwright

    from .looks import LOOKS, looked_at

    chromium = shutil.which("chromium") or sys.exit("no chromium here: apt-get install chromium, or --no-looks")
    if out:
        out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        pages = [each for each in found if each.is_page]
        return looked_at(browser, f"http://127.0.0.1:{port}", pages, LOOKS, out)


def _history(dsn: str, given: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The ids of the jobs that are looked at: of a new history, or of the one that --keep has kept."""
    kept = folder / "job_ids"
    if kept.exists():
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("DROP TABLE IF EXISTS runs")  # of the last run's Farm
        return dict(line.split() for line in kept.read_text().splitlines())  # type: ignore[misc]
    migrations.migrate(dsn, "public")
    began = time.monotonic()
    made = History(dsn, given.jobs, lambda what: print(f"{time.monotonic() - began:6.0f} s {what}", flush=True))
    kept.write_text("".join(f"{kind} {job_id}\n" for kind, job_id in made.job_ids.items()))
    return dict(made.job_ids)


@contextmanager
def _database(given: str | None, keep: Path | None) -> Iterator[tuple[str, Path]]:
    """The DSN of an empty database of an ordinary role, or of the kept one, and a folder for the programs' files."""
    with tempfile.TemporaryDirectory(prefix="dl-pages-") as place:
        folder = keep or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        if given:
            yield given, folder
            return
        with embedded.Server.start(folder / "postgres", {"fsync": "off", "max_wal_size": "4GB"}) as server:
            with psycopg.connect(make_conninfo(server.dsn, user="postgres"), autocommit=True) as conn:
                if not conn.execute("SELECT 1 FROM pg_roles WHERE rolname = 'farm_owner'").fetchone():
                    for statement in OWNER.split("; "):
                        conn.execute(statement)
            yield make_conninfo(server.dsn, dbname="farm", user="farm_owner", password="p"), folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.pages", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=50, help="how often each address is asked; 0: not at all")
    parser.add_argument("--every", type=float, default=REFRESH_SEC, help="seconds from round to round, at least")
    parser.add_argument("--most-ms", type=float, default=100.0, help="the bound of each p95")
    parser.add_argument("--only", default="", help="only addresses that this expression finds")
    parser.add_argument("--no-looks", dest="looks", action="store_false", help="do not open the pages in Chromium")
    parser.add_argument("--out", type=Path, help="a folder for the pictures")
    parser.add_argument("--keep", type=Path, help="a folder for the database: the next run with it fills none")
    parser.add_argument("--dsn", help="an empty database elsewhere, instead of one of its own")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
