"""`python -m tests.mutation [-j N] [text ...]`: try the mutants whose names have one of the texts, or all.

Prints which test caught each, and keeps that in caught.txt: the next time this test runs first. Exits with 1 when a
mutant is uncaught.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from psycopg.conninfo import conninfo_to_dict, make_conninfo

import tools  # noqa: F401  makes the modules of tests importable
from dataloader.queue import migrations
from tests.conftest import BASE, OWNER, RUN, URL, create, ordinary_role, started

from .mutants import MUTANTS, Mutant
from .trial import Verdict, remember, try_out


@contextmanager
def server() -> Iterator[None]:
    """One PostgreSQL for all the runs, with a database that has the whole schema."""
    made = started()
    os.environ[URL] = make_conninfo(made.dsn, user="postgres")  # the tests make roles and databases
    try:
        os.environ[RUN] = "dl_mutation"
        os.environ[OWNER] = ordinary_role()
        base = create("base", template="template1")
        migrations.migrate(base, schema="public")
        os.environ[BASE] = str(conninfo_to_dict(base)["dbname"])
        yield
    finally:
        made.stop()
        shutil.rmtree(made.root, ignore_errors=True)


def shown(verdict: Verdict) -> str:
    """A line of the table."""
    if verdict.broken:
        word = f"BROKEN: {verdict.broken}"
    elif verdict.mutant.equivalent:
        word = f"EQUIVALENT, BUT CAUGHT BY {verdict.caught_by}" if verdict.caught_by else "equivalent"
    else:
        word = verdict.caught_by or "UNCAUGHT"
    return f"{verdict.mutant!s:55} {word}"


def main(arguments: Sequence[str]) -> int:
    """Try, print, count."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("-j", type=int, default=2, help="runs at a time")
    parser.add_argument("texts", nargs="*", default=[""])
    given = parser.parse_args(arguments)
    chosen: list[Mutant] = [mutant for mutant in MUTANTS if any(text in str(mutant) for text in given.texts or [""])]
    bad = 0
    with server():
        for verdict in try_out(chosen, given.j):
            print(shown(verdict), flush=True)
            remember(verdict)
            bad += not verdict.is_good
    print(f"{len(chosen)} mutants, {bad} to look at")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
