"""The list of guards fits the SQL, and the tests catch who takes one away."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataloader.queue import db

from .mutants import MUTANTS, Gone, Mutant, mutated
from .trial import ROOT, _judged, try_out

# One of a statement, one of a function, one of a trigger, and the tests in which each is caught.
CHOSEN = {
    "dl_finish: any worker": "lease",
    "dl_reap: a live lease": "reap",
    "dl_take_keys: no key": "step",
}
BY_NAME = {str(mutant): mutant for mutant in MUTANTS}


def sql(mutant: Mutant) -> str:
    """The file that a mutant changes."""
    return (db.sql_folder() / mutant.file).read_text("utf-8")


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_guard_is_in_the_sql_once(mutant: Mutant) -> None:
    assert mutated(sql(mutant), mutant) != sql(mutant)


def test_no_two_have_one_name() -> None:
    assert [name for name, times in Counter(map(str, MUTANTS)).items() if times > 1] == []


def test_a_guard_that_is_gone_is_said_to_be_gone() -> None:
    (mutant, *_) = MUTANTS
    with pytest.raises(Gone, match="not there any more"):
        mutated(mutated(sql(mutant), mutant), mutant)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [next(iter(CHOSEN)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(CHOSEN)[1:])]
)
def test_three_are_caught(name: str) -> None:
    verdict = try_out(BY_NAME[name], [CHOSEN[name]])
    assert verdict.caught_by, verdict


def test_a_test_that_cannot_be_set_up_catches_nothing() -> None:
    said = "ERROR tests/sql/test_rights.py::test_a - permission denied to create role"
    verdict = _judged(MUTANTS[0], subprocess.CompletedProcess([], 1, said, ""))
    assert verdict.caught_by is None
    assert verdict.broken


SERVED = """
import os, psycopg
from tests.mutation.__main__ import URL, server
with server(), psycopg.connect(os.environ[URL]) as conn:
    print(*conn.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone())
"""


@pytest.mark.long
def test_the_runs_may_make_roles() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TEST_DATABASE_URL"}
    done = subprocess.run([sys.executable, "-c", SERVED], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_all_are_caught() -> None:
    with ThreadPoolExecutor(2) as pool:
        assert [verdict for verdict in pool.map(try_out, MUTANTS) if not verdict.is_good] == []
