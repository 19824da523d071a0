"""Try mutants: each in a fork, which runs the tests of the SQL on a copy of the checkout up to the first failure.

The copy has one guard less. The parent has imported pytest and the libraries, and has made a database with the whole
schema; so a fork imports only the copy, and applies only what the mutant has changed.
"""

import faulthandler
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hypothesis  # noqa: F401  for the forks, as psycopg
import psycopg  # noqa: F401
import pytest

from .mutants import ROOT, Mutant, apply

# To these any change of the SQL is a mistake.
NOT = ("test_migrations.py", "test_migrate_under_load.py")
OPTIONS = [
    *("-x", "-q", "-rfE", "--no-header", "--tb=line", "--timeout=120"),
    *("-m", "not slow"),  # long ones too: some guards are caught by random steps alone
    *("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:schemathesis"),  # the last takes seconds to import
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of the libraries that the parent has imported
]
CAUGHT = Path(__file__).with_name("caught.txt")
CAUGHT_ONE = 1  # pytest's exit status when a test has failed
PATIENCE = 600.0  # seconds for one run; a test that hangs is ended much earlier


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a mutant: the test that caught it, None for uncaught, or the words of another fault."""

    mutant: Mutant
    caught_by: str | None
    broken: str | None = None

    @property
    def is_good(self) -> bool:
        """Caught, or rightly said to make no difference."""
        return self.broken is None and (self.caught_by is None) == (self.mutant.equivalent is not None)


def try_out(mutants: Sequence[Mutant], at_once: int) -> Iterator[Verdict]:
    """Run the tests of the SQL without each of these guards; yields the verdicts as they come."""
    waiting, running = list(reversed(mutants)), dict[int, tuple[Mutant, Path]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            mutant, folder = waiting.pop(), Path(tempfile.mkdtemp(prefix="dl-mutant-"))
            running[_fork(mutant, folder)] = mutant, folder
        pid, status = os.wait()
        if found := running.pop(pid, None):
            mutant, folder = found
            output = (folder / "output").read_text("utf-8", "replace")
            shutil.rmtree(folder)
            yield judged(mutant, os.waitstatus_to_exitcode(status), output)


def catchers() -> dict[str, str]:
    """The tests that caught the mutants the last time, by the mutants' names."""
    lines = CAUGHT.read_text("utf-8").splitlines() if CAUGHT.exists() else []
    return dict(line.split("\t") for line in lines)


def remember(verdict: Verdict) -> None:
    """Keep the test that has caught a mutant, of a test with parameters all cases: it is the first to run next time."""
    known = catchers()
    known.pop(str(verdict.mutant), None)
    if verdict.caught_by:
        known[str(verdict.mutant)] = verdict.caught_by.partition("[")[0]
    CAUGHT.write_text("".join(f"{name}\t{test}\n" for name, test in sorted(known.items())), "utf-8")


def _fork(mutant: Mutant, folder: Path) -> int:
    """Start a process that copies, mutates and runs the tests; its pid.

    The test that caught the mutant the last time runs first, then the files that catch mutants of the same place.
    """
    if pid := os.fork():
        return pid
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    copy_checkout(folder)
    apply(folder / "dataloader" / "sql", mutant)
    known = catchers()
    test = known.get(str(mutant))
    if test and _run(mutant, folder, [test]) == CAUGHT_ONE:
        os._exit(CAUGHT_ONE)
    place = str(mutant).partition(":")[0] + ":"
    likely = Counter(test.partition("::")[0] for name, test in known.items() if name.startswith(place))
    first = [test for test, _ in likely.most_common() if (folder / "tests" / "sql" / test).exists()]
    status = _run(mutant, folder, first) if first else 0
    if status == 0:
        every = sorted(path.name for path in (folder / "tests" / "sql").glob("test_*.py"))
        status = _run(mutant, folder, [test for test in every if test not in first and test not in NOT])
    os._exit(status)


def _run(mutant: Mutant, folder: Path, tests: Sequence[str]) -> int:
    """The exit status of pytest on these tests, in a process of its own: a second run in one would share modules."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _run_here(mutant, folder, [str(folder / "tests" / "sql" / test) for test in tests])


def _run_here(mutant: Mutant, folder: Path, tests: Sequence[str]) -> NoReturn:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    for name in [name for name in sys.modules if name.split(".")[0] in ("dataloader", "tests")]:
        del sys.modules[name]  # the copy's are imported instead
    # Neither this run's coverage nor its xdist is the copy's business, nor its databases, but for the base.
    ours = ("COV", "PYTEST", "DL_TEST_RUN")
    if mutant.file == "schema.sql":
        ours += ("DL_TEST_BASE", "DL_TEST_OWNER")  # its schema is not the base's
    for name in [name for name in os.environ if name.startswith(ours)]:
        del os.environ[name]
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    status = pytest.main([*OPTIONS, *tests])
    sys.stdout.flush()
    os._exit(int(status))


def copy_checkout(copy: Path) -> None:
    """Copy all files that the tests of the SQL need. The SQL lies in the package, as in an installed one."""
    ignore = shutil.ignore_patterns("data", "mutation")
    places = {"dataloader": "dataloader", "sql": "dataloader/sql", "tests": "tests", "docs": "docs"}
    for folder, where in places.items():
        shutil.copytree(ROOT / folder, copy / where, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)


def judged(mutant: Mutant, status: int, output: str) -> Verdict:
    """The verdict from pytest's exit status and output."""
    if status == 0:
        return Verdict(mutant, None)
    # An ERROR is none: a test that cannot be set up says nothing of the guard.
    found = re.search(r"^FAILED tests/sql/(\S+)", output, re.MULTILINE)
    if status == CAUGHT_ONE and found:
        return Verdict(mutant, found[1])
    return Verdict(mutant, None, output[-400:])
