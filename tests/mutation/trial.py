"""Try mutants: each in a fork, which runs the tests of the SQL on a copy of the checkout up to the first failure.

The copy has one guard less. The parent has imported pytest and the libraries, and has made a database with the whole
schema; so a fork imports only the copy, and applies only what the mutant has changed.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hypothesis  # noqa: F401  for the forks, as psycopg
import psycopg  # noqa: F401
import pytest

from .mutants import ROOT, Mutant, apply

# Not test_migrations, to which any change is one; the long ones last.
TESTS = [
    *("lease", "ends", "park", "locked_rows", "cancel", "settle", "reap", "wake", "notify", "claim", "step"),
    *("affinity", "limits", "order", "idempotency", "enqueue_many", "foreign_journal", "schemas", "rights"),
    *(
        "operate",
        "move",
        "stats",
        "retention",
        "tasks",
        "schedules",
        "backfills",
        "target",
        "results",
        "kept_checkpoints",
    ),
    *(
        "fair",
        "several_queues",
        "predictions",
        "guards",
        "transitions",
        "lock",
        "webhooks",
        "ordered",
        "ordered_model",
        "model",
        "parents",
    ),
    *("parents_model", "interleavings", "plans", "errors", "job_logs", "cleanups"),
]
# Where to look first, so that most runs are short.
FIRST = {
    **dict.fromkeys(("write", "leave_out"), "job_logs"),
    **dict.fromkeys(("due", "take", "strike", "hand_over", "forget"), "cleanups"),
    **dict.fromkeys(("dl_error_group", "groups", "write_note", "clear_note"), "errors"),
    "dl_is_running": "guards park",
    "dl_park": "park ordered lock guards",
    "dl_unpark": "park ordered notify rights order",
    "dl_unpark_freed": "park parents",
    **dict.fromkeys(("dl_depend", "dl_link", "dl_gather", "dl_linked", "dl_concerned", "dl_resolve"), "parents rights"),
    "dl_after": "parents",
    **dict.fromkeys(("dl_tell", "dl_stepped", "dl_resolve_freed", "dl_resolve_stranded"), "parents parents_model"),
    "dl_unpark_stranded": "park",
    "dl_set_aside": "claim park step ordered errors",
    "dl_put_off": "lock guards step",
    "dl_lock_heads": "ordered ordered_model",
    "dl_lock_delivery": "ordered ordered_model",
    "dl_jobs_score": "fair ordered rights",
    "dl_jobs_internal": "rights",
    "dl_jobs_score_ins": "fair ordered rights",
    **dict.fromkeys(("dl_turn", "dl_give_turns"), "fair"),
    "dl_give_scores": "ordered",
    **dict.fromkeys(
        ("queue", "running", "waiting", "room", "accuracy", "compare", "note", "alert"),
        "predictions",
    ),
    "dl_prune": "ordered retention",
    "beat": "lease ordered cancel guards",
    "dl_is_taken": "locked_rows order",
    "dl_most_wanted": "affinity",
    "dl_left_out": "affinity",
    **dict.fromkeys(
        (
            "dl_limit_state",
            "dl_ask_limits",
            "dl_has_room",
            "dl_use_room",
            "dl_settle_limits",
            "dl_spend_tokens",
            "dl_hold_running",
            "dl_let_in",
            "dl_next_of_limit",
            "dl_let_in_some",
            "dl_let_in_later",
            "dl_let_in_all",
        ),
        "limits",
    ),
    "dl_take_keys": "step affinity limits claim park order locked_rows",
    "dl_finish": "step park ends lease locked_rows ordered ordered_model errors",
    "dl_retry_delay": "ends",
    "dl_by_lag": "several_queues",
    "dl_step": "park claim step affinity ordered locked_rows lock wake operate several_queues",
    "dl_give_back": "kept_checkpoints park settle reap ordered ordered_model order rights errors",
    "dl_jobs_place": "wake retention",
    "keep_results": "results",
    "keep_checkpoint": "kept_checkpoints",
    "spend_checkpoints": "kept_checkpoints",
    "start_over": "kept_checkpoints",
    "standing": "kept_checkpoints",
    "hold_and_save": "kept_checkpoints",
    "result": "results",
    "dl_jobs_step": "kept_checkpoints park ordered foreign_journal notify retention rights errors",
    "dl_jobs_gone": "results kept_checkpoints park ordered rights operate",
    "dl_jobs_notify_upd": "park notify",
    "enqueue": "guards idempotency enqueue_many operate tasks",
    "request_cancel": "cancel guards locked_rows",
    "cancellations": "guards",
    "dl_end_session": "guards reap",
    "dl_wake": "wake fair",
    "keep": "reap lease",
    "tell_stuck": "guards",
    "dl_affinity": "tasks",
    "tell_tasks": "tasks",
    "dl_enqueue": "tasks enqueue_many rights",
    "dl_enqueue_many": "tasks enqueue_many",
    "dl_enqueue_one": "tasks enqueue_many rights ordered",
    "dl_job_status": "rights",
    "dl_set_trace": "rights",
    "producer": "rights",
    "spread": "rights",
    "dl_settle": "settle step guards",
    "take_back": "step",
    "dl_reap": "reap ordered",
    "dl_retake": "lease guards",
    "dl_jobs_place_ins": "notify wake retention",
    "notify_job_ready": "notify",
    "dl_jobs_notify_ins": "notify",
    "dl_jobs_journal": "foreign_journal rights",
    "dl_jobs_journal_ins": "foreign_journal",
    "leap": "lease",
    "raise": "target guards",
    "in_the_way": "target guards",
    "hold": "target guards",
    "forget": "target guards",
    "end_older": "target guards",
    "dl_is_full": "operate",
    "dl_roll": "stats needs spans",
    "dl_fold_spans": "spans",
    "dl_journal_begins_anew": "stats",
    "pause": "operate schedules webhooks backfills",
    "resume": "operate schedules webhooks backfills",
    **dict.fromkeys(("has_ended", "tell", "retire", "change", "due_in"), "schedules"),
    **dict.fromkeys(("lock_due", "add", "failed", "made"), "schedules backfills"),
    **dict.fromkeys(
        ("status_of", "cancel", "is_open", "done", "jobs_behind", "note", "canceled", "has_company"), "backfills"
    ),
    "begin_here": "webhooks",
    "remove": "webhooks",
    "is_served": "webhooks",
    "is_firing": "webhooks",
    "position": "webhooks",
    "new_events": "webhooks",
    "begin_anew": "webhooks",
    "queues": "webhooks",
    "note_firing": "webhooks",
    "note_resolved": "webhooks",
    "requeue": "operate ordered ordered_model locked_rows errors",
    "run_now": "operate ordered ordered_model locked_rows",
    "delete": "operate locked_rows",
    "dead": "operate backfills",
    "not_due": "operate",
    "retried": "operate",
    "chosen": "operate",
    "passes": "operate errors",
    "kill": "operate transitions ordered errors",
    "claims_under_way": "move",
    "running_to_move": "move",
    "queued_to_move": "move",
    "dead_to_move": "move",
    "move": "move",
    "pause_source": "move",
    "moves_to": "move",
    "resume_own": "move",
}
OPTIONS = [
    *("-x", "-q", "-rfE", "--no-header", "--tb=line", "--timeout=120"),
    *("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:schemathesis"),  # the last takes seconds to import
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of the libraries that the parent has imported
]
CAUGHT = Path(__file__).with_name("caught.txt")
CAUGHT_ONE = 1  # pytest's exit status when a test has failed
PATIENCE = 600.0  # seconds for one run; a test that hangs is ended much earlier


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
            said = (folder / "said").read_text("utf-8", "replace")
            shutil.rmtree(folder)
            yield judged(mutant, os.waitstatus_to_exitcode(status), said)


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
    """Start a process that copies, mutates and runs the tests, those first that look at the guard; its pid."""
    if pid := os.fork():
        return pid
    output = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    copy_checkout(folder)
    apply(folder / "dataloader" / "sql", mutant)
    first = FIRST.get(str(mutant).split(":")[0], "").split()
    rest = [test for test in TESTS if test not in first]
    known = catchers().get(str(mutant))
    if known and _run(mutant, folder, [known]) == CAUGHT_ONE:
        os._exit(CAUGHT_ONE)
    status = _run(mutant, folder, [f"test_{test}.py" for test in first]) if first else 0
    if status == 0:
        status = _run(mutant, folder, [f"test_{test}.py" for test in rest])
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
    """What the tests of the SQL need. The SQL lies inside the package, as it does where that is installed."""
    ignore = shutil.ignore_patterns("data", "mutation")
    places = {"dataloader": "dataloader", "sql": "dataloader/sql", "tests": "tests", "docs": "docs"}
    for folder, where in places.items():
        shutil.copytree(ROOT / folder, copy / where, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)


def judged(mutant: Mutant, status: int, said: str) -> Verdict:
    """The verdict from pytest's exit status and output."""
    if status == 0:
        return Verdict(mutant, None)
    # An ERROR is none: a test that cannot be set up says nothing of the guard.
    found = re.search(r"^FAILED tests/sql/(\S+)", said, re.MULTILINE)
    if status == CAUGHT_ONE and found:
        return Verdict(mutant, found[1])
    return Verdict(mutant, None, said[-400:])
