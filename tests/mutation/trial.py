"""Try a mutant: a copy of the checkout with one guard less, and the tests of the SQL on it up to the first failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .mutants import ROOT, Mutant, apply

# Not test_migrations, to which any change is one; the long ones last.
TESTS = [
    *("lease", "ends", "locked_rows", "cancel", "settle", "reap", "wake", "notify", "claim", "step", "order"),
    *("idempotency", "enqueue_many", "foreign_journal", "schemas", "rights", "operate", "stats", "retention"),
    *("target", "guards", "transitions", "lock", "model", "interleavings", "plans"),
]
# Where to look first, so that most runs are short.
FIRST = {
    "enqueue": "guards idempotency enqueue_many operate",
    "request_cancel": "cancel guards locked_rows",
    "cancellations": "guards",
    "dl_slot_is_busy": "guards",
    "dl_take_slot": "guards",
    "dl_end_session": "guards reap",
    "dl_wake": "wake",
    "dl_near_of_slot": "guards",
    "dl_try": "claim guards order",
    "dl_claim": "guards claim lock order locked_rows",
    "dl_start": "step claim guards reap",
    "dl_take_keys": "step order claim guards locked_rows",
    "dl_finish": "step lease ends order locked_rows",
    "dl_locked_ahead": "locked_rows",
    "keep": "reap lease",
    "dl_tell_waiters": "notify guards",
    "dl_step": "step wake guards locked_rows",
    "dl_give_back": "settle reap order rights",
    "dl_jobs_forget": "rights operate",
    "dl_enqueue": "rights",
    "dl_job_status": "rights",
    "dl_set_trace": "rights",
    "producer": "rights",
    "spread": "rights",
    "dl_settle": "settle step guards",
    "dl_reap": "reap",
    "dl_retake": "lease guards",
    "dl_jobs_place": "lease wake retention",
    "dl_jobs_place_ins": "wake retention",
    "notify_job_ready": "notify",
    "dl_jobs_notify_upd": "notify guards",
    "dl_jobs_notify_key": "notify schemas guards",
    "dl_jobs_journal": "foreign_journal rights",
    "dl_jobs_journal_ins": "foreign_journal",
    "dl_jobs_journal_upd": "foreign_journal",
    "leap": "lease",
    "raise": "target",
    "hold": "target guards",
    "forget": "target guards",
    "end_older": "target guards",
    "dl_is_paused": "operate",
    "dl_is_full": "operate",
    "dl_roll": "stats",
    "dl_journal_begins_anew": "stats",
    "pause": "operate",
    "resume": "operate",
    "requeue": "operate locked_rows",
    "run_now": "operate locked_rows",
    "delete": "operate locked_rows",
    "dead": "operate",
    "not_due": "operate",
}
OPTIONS = [
    *("-x", "-q", "-rfE", "--no-header", "--tb=line", "--timeout=40"),
    *("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:schemathesis"),  # the last takes seconds to import
]
PATIENCE = 600.0  # seconds for one mutant; a test that hangs is ended much earlier


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: the test that caught it, None for uncaught, or words of what else went wrong."""

    mutant: Mutant
    caught_by: str | None
    broken: str | None = None

    @property
    def is_good(self) -> bool:
        """Caught, or rightly said to make no difference."""
        return self.broken is None and (self.caught_by is None) == (self.mutant.equivalent is not None)


def try_out(mutant: Mutant, tests: Sequence[str] = TESTS) -> Verdict:
    """Run these files of tests/sql without this guard."""
    with tempfile.TemporaryDirectory(prefix="dl-mutant-") as name:
        copy = Path(name)
        copy_checkout(copy)
        apply(copy / "dataloader" / "sql", mutant)
        first = FIRST.get(str(mutant).split(":")[0], "").split()
        return _judged(mutant, _run(copy, sorted(tests, key=lambda test: (test not in first, tests.index(test)))))


def copy_checkout(copy: Path) -> None:
    """What the tests of the SQL need. The SQL lies inside the package, as it does where that is installed."""
    ignore = shutil.ignore_patterns("data", "mutation")
    places = {"dataloader": "dataloader", "sql": "dataloader/sql", "tests": "tests", "docs": "docs"}
    for folder, where in places.items():
        shutil.copytree(ROOT / folder, copy / where, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)


def _run(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # Neither this run's coverage nor its xdist is the copy's business.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("COV", "PYTEST", "DL_TEST_RUN"))}
    there = [f"tests/sql/test_{test}.py" for test in tests]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *there]
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=PATIENCE)


def _judged(mutant: Mutant, run: subprocess.CompletedProcess[str]) -> Verdict:
    if run.returncode == 0:
        return Verdict(mutant, None)
    # An ERROR is none: a test that cannot be set up says nothing of the guard.
    found = re.search(r"^FAILED tests/sql/(\S+)", run.stdout, re.MULTILINE)
    if run.returncode == 1 and found:
        return Verdict(mutant, found[1])
    return Verdict(mutant, None, (run.stdout + run.stderr)[-400:])
