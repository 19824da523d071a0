"""The list of guards fits the SQL, and the tests catch who takes one away."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from dataloader.queue import db

from .mutants import MUTANTS, Gone, Mutant, mutated
from .trial import ROOT, catchers, judged


def sql(mutant: Mutant) -> str:
    """The file that a mutant changes."""
    return (db.sql_folder() / mutant.file).read_text("utf-8")


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_guard_of_a_file_is_in_it_once(file: str) -> None:
    text = (db.sql_folder() / file).read_text("utf-8")
    assert [str(mutant) for mutant in MUTANTS if mutant.file == file and mutated(text, mutant) == text] == []


def test_no_two_have_one_name() -> None:
    assert [name for name, times in Counter(map(str, MUTANTS)).items() if times > 1] == []


def test_each_mutant_has_a_test_that_catches_it() -> None:
    """The author of a new mutant tries it, and the author of a test's new name writes the name into caught.txt."""
    known = catchers()
    assert {str(mutant) for mutant in MUTANTS if not mutant.equivalent} == known.keys()
    files = {file.name: file.read_text("utf-8") for file in (ROOT / "tests" / "sql").glob("test_*.py")}
    named = [test.split("::") for test in set(known.values())]
    assert [name for file, name in named if f"def {name}(" not in files.get(file, "")] == []


def test_a_guard_that_is_gone_is_said_to_be_gone() -> None:
    (mutant, *_) = MUTANTS
    with pytest.raises(Gone, match="not there any more"):
        mutated(mutated(sql(mutant), mutant), mutant)


def tried(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, with a server of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TEST_DATABASE_URL", "DL_TEST"))}
    command = [sys.executable, "-m", "tests.mutation", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.long
def test_one_is_caught() -> None:
    done = tried("dl_finish: any worker")
    assert (done.returncode, done.stderr) == (0, "")
    assert " test_lease.py::" in done.stdout


def test_a_test_that_cannot_be_set_up_catches_nothing() -> None:
    output = "ERROR tests/sql/test_rights.py::test_a - permission denied to create role"
    verdict = judged(MUTANTS[0], 1, output)
    assert verdict.caught_by is None
    assert verdict.broken


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_all_are_caught() -> None:
    done = tried("-j", "3")
    assert done.returncode == 0, done.stdout
