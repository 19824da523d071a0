"""The command line without a farm: its output, its errors, its help, doctor's findings, `dataloader new`."""

import errno
import json
import os
import shlex
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import click
import pytest
from answering import ID, STARTED, TOKEN, Answer, Service, filled, problem, state
from click.testing import CliRunner, Result

from dataloader import new
from dataloader.cli import doctor, jobs, main, screen
from dataloader.cli.base import WRONG_MOST
from dataloader.client.transport import Transport
from dataloader.model.farm import Database, Worker
from dataloader.model.jobs import Event, Job, Reason, WaitingFor
from dataloader.model.plans import Backfill, Schedule
from dataloader.model.queues import Overview, Queue, Total, Wrong
from dataloader.model.reading import read
from dataloader.model.runs import ErrorGroup, ErrorGroups, Replaces, Task
from dataloader.queue.reports.stats import Attempt

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    made = Service()
    made.has_no_names = True
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DL_URL", made.url)
    monkeypatch.delenv("DL_TOKEN", raising=False)
    yield made
    made.close()


def run(*words: str, **given: Any) -> Result:
    result = CliRunner().invoke(main, words, **given)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    ("status", "code"), [("succeeded", 0), ("failed", 10), ("canceled", 11), ("lost", 12), ("exploded", 13)]
)
def test_each_end_has_its_exit_status(service: Service, status: str, code: int) -> None:
    """An unknown state, of a newer service, is no end."""
    service.answers = [Answer(document=STARTED), Answer(document=state(status, error="why\x1b[0m"))]
    done = run("trigger", "noop", "--wait", "--timeout", "0")
    assert (done.exit_code, "\x1b" in done.output) == (code, False)
    assert code == 13 or json.loads(done.stdout)["status"] == status


def test_a_watch_says_at_once_and_once_why_a_run_has_failed(service: Service) -> None:
    """Without the sentence, a job that waits 30 s for its second attempt would seem to wait for its turn."""
    due = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()
    waits = {"waiting_for": {"reason": "time", "until": due}, "max_attempts": 5}
    first = state("queued", attempt=1, error="no pipeline 'nop'\x1b[2J\n\nTraceback", **waits)
    second = state("queued", attempt=2, error="no pipeline 'nop'", **waits)
    running = state("running", attempt=2, max_attempts=5, error="no pipeline 'nop'")
    answers = [STARTED, first, first | {"priority": 1}, running, second, state("failed", error="no pipeline 'nop'")]
    service.answers = [Answer(document=document) for document in answers]
    output = run("trigger", "nop", "--wait").stderr
    assert output.count("attempt 1 of 5 failed: no pipeline 'nop'\\x1b[2J\n") == 1
    assert output.count("attempt 2 of 5 failed: no pipeline 'nop'\n") == 1
    assert output.index("attempt 1 of 5") < output.index("it is due in")
    assert "Traceback" not in output


def test_what_a_trigger_says_goes_to_the_service(service: Service) -> None:
    names = ("queue", "lock_key", "partition_key", "producer", "consumer_group", "affinity_key", "idempotency_key")
    texts = dict.fromkeys(names, "x")
    numbers = dict.fromkeys(("timeout_sec", "priority", "max_attempts", "lease_ttl_sec"), 5)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (texts | numbers).items()]
    at = "2026-01-31T06:30:00+03:00"
    more = ("--at", at, "--limit", "a", "--limit", "b", "--args", "@-")
    assert run("trigger", "t", *options, *more, input='{"a": 1}').exit_code == 0
    special = {"task": "t", "args": {"a": 1}, "available_at": at, "limits": ["a", "b"]}
    assert service.asked[0].body == texts | numbers | special


def test_a_trigger_whose_answer_is_lost_can_be_sent_again(service: Service) -> None:
    service.answers = [Answer(close=True)]
    output = run("trigger", "t").stderr
    key = service.asked[0].body["idempotency_key"]
    assert f"sent again with --idempotency-key {key} it is added once" in output
    service.close()
    output = run("trigger", "t").stderr
    assert "is the API running?" in output
    assert "sent again" not in output


def test_a_certificate_for_another_name_gets_advice_about_certificates(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "Hostname mismatch"
    monkeypatch.setattr(Transport, "_exchange", Mock(side_effect=error))
    output = run("status", str(ID)).stderr
    assert (
        "its certificate is not trusted: Hostname mismatch\ndataloader: name the host as its certificate does" in output
    )
    assert "is the API running?" not in output


def test_the_token_comes_from_the_environment_or_a_file_and_is_not_shown(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f'{TOKEN}\n{{"name": "ops"}}\n')  # as `dataloader token` prints it
    service.answers = [problem(401, "unauthorized", f"Bearer {TOKEN} is not known")]
    results = [run("status", ID, "--token-file", "token"), run("status", ID, "--token-file", "-", input=TOKEN)]
    (tmp_path / ".env").write_text(f"DL_TOKEN={TOKEN}\n")
    results.append(run("status", ID))
    monkeypatch.setenv("WORKERS_JSON", "broken")
    monkeypatch.setenv("DL_TOKEN", TOKEN)
    results.append(run("status", ID, "--url", service.url))  # this way ignores wrong settings of this machine
    assert {asked.headers["authorization"] for asked in service.asked} == {f"Bearer {TOKEN}"}
    assert len(service.asked) == 4
    for result in results:
        assert result.exit_code == 1
        assert "set DL_TOKEN to a token of this service" in result.stderr
        assert "canary" not in result.output
    assert "WORKERS_JSON" in run("status", ID).stderr


@pytest.mark.parametrize("content", [b"\xff\xfe", b"dl_token\ndl_token", b"dl_t\xc3\xb6ken"])
def test_a_file_without_a_token_alone_is_refused(service: Service, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    result = run("status", ID, "--token-file", "token")
    assert result.exit_code == 2
    assert "--token-file: the token should be printable ASCII without spaces" in result.stderr
    assert not service.asked


def test_json_can_be_shown_where_there_are_few_letters(service: Service) -> None:
    service.answers = [Answer(document=state("failed", error="Ошибка"))]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "dataloader", "status", ID]
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="ascii")
    assert json.loads(done.stdout)["error"] == "Ошибка"


@pytest.mark.parametrize(("words", "unbuffered"), [("jobs", ""), ("jobs --json", "1"), ("jobs --help", "")])
def test_an_answer_that_cannot_be_written_ends_in_one_line(service: Service, words: str, unbuffered: str) -> None:
    service.answers = [Answer(document={"jobs": [], "next_after": None})]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "dataloader", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "dataloader: the output cannot be written: No space left on device\n")


def test_a_full_disk_below_a_file_is_no_fault_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # of a write, which names no file
    monkeypatch.setattr(new, "write", Mock(side_effect=full))
    done = CliRunner().invoke(main, ["new", "mine"])
    assert (done.exception, done.stderr) == (full, "")


def test_texts_cannot_move_a_terminal() -> None:
    evil = "a\x00\x1b[31m\x07\x7f\x9b2J\u202e\u2028\ud800\ufeff\r\n\tö漢"
    assert screen.plain(evil) == r"a\x00\x1b[31m\x07\x7f\x9b2J\u202e\u2028\ud800\ufeff\r\n\tö漢"
    assert screen.plain("a\r\nb\x1b", lines=True) == "a\nb\\x1b"
    shown = screen.as_json({evil: [evil]})
    assert json.loads(shown) == {evil: [evil]}
    assert not set("\x00\x1b\x07\x7f\x9b\u202e\u2028\ud800\ufeff") & set(shown)
    assert "ö漢" in shown


def test_a_table_takes_no_markup_and_no_width_where_it_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen.show(screen.table(("job", "n"), [("[red]x[/red]" + "y" * 150, None), ("\x1b[1m", 2)], right=("n",)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "[red]x[/red]" + "y" * 150
    assert lines[2].startswith("\\x1b[1m ")


SILENT = filled(Worker, worker="w", host="vm-1", queue="q", state="idle", is_live=False)
ILL = filled(Queue, queue="other", length=3, dead=2, workers=1, max_length=3)
HELD = {"kind": "session", "pid": 26485, "user": "bi", "application": "report\x1b", "age_sec": 400.0, "xids": 9}
POSTGRES = filled(Database, max_connections=100, has_reaper=True, ids_left=2**31)


def test_doctor_says_what_is_wrong_with_the_farm() -> None:
    """The words are those of the dashboard's alerts; each has a command that shows more."""
    wrong = [Wrong(kind="webhook", name="ops", error="2 undelivered", since=None, number=1)]
    overview = Overview(at=NOW, total=filled(Total), queues=[ILL], wrong=wrong)
    assert [
        (each.text.partition(".")[0], each.command) for each in doctor.farm_findings(overview, [SILENT], POSTGRES)
    ] == [
        ("1 worker has not been heard of (vm-1)", ("ps",)),
        ("The webhook ops does not receive its messages: 2 undelivered", ("webhook", "list")),
        ("Queue other is full: 3 jobs are queued", ("queues",)),
        ("2 jobs are dead in queue other", ("jobs", "-q", "other", "--status", "dead")),
    ]
    well = Overview(at=NOW, total=filled(Total), queues=[filled(Queue, queue="q", workers=1)])
    assert list(doctor.farm_findings(well, [], POSTGRES)) == []


def test_doctor_names_the_faults_of_the_farm_where_a_job_waits_for_a_worker() -> None:
    """No process renews the rows of the workers: the machine is gone, or supervisor and keeper are stopped too."""
    held = replace(POSTGRES, held_by=HELD, jobs_dead_tuples=10**7)
    overview = Overview(at=NOW, total=filled(Total), queues=[ILL, filled(Queue, queue="q", lag_sec=400.0)], wrong=[])
    faults = list(doctor.farm_findings(overview, [SILENT], held, of_all=True))
    session, worker = (each.text for each in faults)
    assert session.startswith("The database session of bi (report\x1b)")
    assert "SELECT pg_terminate_backend(26485)" in session
    assert worker.startswith("1 worker has not been heard of (vm-1)")
    for reason, named in (("worker", faults), ("no_worker", faults), ("lock", [])):
        assert list(doctor.diagnose(waits(reason, queue="q", more={"farm": faults})))[1:] == named


def test_doctor_tells_the_top_error() -> None:
    groups = [
        filled(ErrorGroup, queue="q", task="load", error_group=error, dead=dead, retrying=1, job_id=UUID(ID), note=note)
        for error, dead, note in (("ValueError: few", 2, None), ("OSError: disk", 7, "full"), ("KeyError", 0, None))
    ]
    worst, again = doctor.error_findings(ErrorGroups(groups=groups, is_cut=False), 9)
    assert worst.text.startswith("The top error, of 7 of 9 dead jobs: OSError: disk (task load, queue q).")
    assert "Its note: full." in worst.text
    assert worst.command == ("doctor", ID)
    assert again.command == ("requeue", "--matching", 'error_group:"OSError: disk" queue:"q" task:"load" status:dead')
    cut = next(doctor.error_findings(ErrorGroups(groups=groups, is_cut=True), 9))
    assert cut.text.startswith("The top error, of at least 7 dead jobs: OSError: disk")
    assert list(doctor.error_findings(ErrorGroups(groups=groups[2:], is_cut=False), 0)) == []


def of_schedule(**more: Any) -> list[doctor.Finding]:
    return list(doctor.diagnose_schedule(filled(Schedule, name="n", **more)))


def of_backfill(state: str, serving: str = "q", *queues: Queue, **more: Any) -> list[doctor.Finding]:
    counts = more.pop("counts", {"queued": 2, "running": 1, "succeeded": 4})
    backfill = filled(Backfill, name="b", queue="q", state=state, total=7, made=7, counts=counts, **more)
    return list(doctor.diagnose_backfill(backfill, queues, list(serving)))


@pytest.mark.parametrize(
    ("findings", "words", "command"),
    [
        (of_schedule(paused_at=NOW, paused_by="me"), "paused by me", ("schedule", "resume", "n")),
        (of_schedule(retired_at=NOW), "no longer declares it", ("schedule", "remove", "n")),
        (of_schedule(error="priority: no"), "cannot be made: priority: no", ("schedule", "show", "n")),
        (of_schedule(next_due=NOW, overdue_sec=300), "5 min ago has no job: no reaper runs", ()),
        (of_schedule(), "It will never be due again", ("schedule", "show", "n")),
        (of_schedule(next_due=NOW, overdue_sec=3, words="Every hour"), "as it should be: Every hour", None),
        (of_backfill("canceled", canceled_by="me"), "canceled by me", ()),
        (of_backfill("paused", "", paused_by="me"), "paused by me", ("backfill", "resume", "b")),
        (of_backfill("making", error="full"), "cannot be made: full", ("backfill", "show", "b")),
        (of_backfill("making", overdue_sec=300), "for 5 min: none runs", ()),
        (of_backfill("running", "p"), "No worker serves its queue q. There are workers for: p.", ("ps",)),
        (of_backfill("running", max_running=1), "As many of its jobs run as may: 1.", None),
        (of_backfill("running", max_running=2), "It goes on: 4 of 7 partitions.", ("backfill", "show", "b")),
        (of_backfill("done", "", counts={"succeeded": 7}), "It is done: 7 of 7 partitions.", None),
    ],
)
def test_doctor_says_why_a_schedule_makes_no_jobs_and_why_a_backfill_does_not_go_on(
    findings: list[doctor.Finding], words: str, command: tuple[str, ...] | None
) -> None:
    (finding,) = findings
    assert words in finding.text
    assert command in (None, finding.command)


def test_doctor_tells_of_a_backfill_whose_queue_is_paused_and_of_what_is_dead_or_deleted() -> None:
    paused = of_backfill("running", "q", filled(Queue, queue="q", paused_at=NOW))
    assert paused == [doctor.Finding("Its queue q is paused.", ("resume", "q"))]
    found = of_backfill("done", counts={"succeeded": 1, "failed": 1_000, "lost": 2, "missing": 3})
    assert [finding.command[1:2] for finding in found] == [("show",), ("partitions",), ("retry",), ("partitions",)]
    assert "1,000 failed and 2 lost" in found[1].text
    assert "3 of its partitions have no job" in found[3].text


def case(job: Job, *runs: Attempt, **more: Any) -> doctor.Case:
    given = {"serving": ["q"], "worker": None, "farm": [], "events": [], "now": NOW}
    return doctor.Case(job=job, runs=runs, **given | more)


def attempt(number: int, end: str | None, **more: Any) -> Attempt:
    known = {"run": number, "attempt": number, "started_at": NOW - timedelta(seconds=90), "end": end}
    return Attempt(**dict.fromkeys(Attempt._fields) | known | more)


def a_job(status: str, **more: Any) -> Job:
    why = more.pop("waiting_for", None)
    more = {"queue": "q", "task": "t", "max_attempts": 3, "waiting_for": why and read(WaitingFor, why)} | more
    job: Job = filled(Job, job_id=UUID(ID), status=status, **more)
    return job


OTHER = str(UUID(int=7))
PAUSED = {"reason": "paused", "queue": "q", "since": NOW.isoformat(), "by": "token ops from 10.0.0.7"}


def waits(
    reason: str, *runs: Attempt, job: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **why: Any
) -> doctor.Case:
    """A queued job that waits for this reason."""
    return case(a_job("queued", waiting_for={"reason": reason, **why}, **(job or {})), *runs, **(more or {}))


def event(number: int, kind: str, **payload: Any) -> Event:
    return Event(event_id=number, ts=NOW, kind=kind, payload=payload)


def test_the_words_name_no_job_that_the_asker_may_not_know() -> None:
    holders = {"lock": "another job, which runs", "dead": "a dead job", "order": "another job, which"}
    for reason, holder in holders.items():
        assert f" {holder}" in screen.reason(Reason(reason=reason, lock_key="k"), NOW)


STUCK = filled(Worker, worker="w", is_live=True, state="stuck", reported_at=NOW - timedelta(minutes=12))
SOON = (NOW + timedelta(seconds=20)).isoformat()
CASES: list[tuple[doctor.Case, list[str], list[tuple[str, ...]]]] = [
    (
        case(a_job("queued", waiting_for=PAUSED | {"besides": [{"reason": "no_worker", "queue": "q"}]})),
        ["is paused", "by token ops", "Resume it to go on. Besides: No worker serves the queue q: start one"],
        [("resume", "q")],
    ),
    (
        waits("time", attempt(1, "requeue", reason="error", error="boom\ntrace"), job={"attempt": 1}, until=SOON),
        ["due in 20 s", "rests after a run that ended badly", "attempt 1: boom"],
        [("run-now", ID), ("job", ID)],
    ),
    (waits("lock", lock_key="k", job_id=OTHER), [f"held by job {OTHER}"], [("doctor", OTHER)]),
    (waits("no_worker", queue="q", more={"serving": ["other"]}), ["There are workers for: other"], [("ps",)]),
    (waits("limit", limit="l", running=1, most=1), ["The limit l has no room"], [("limit", "list")]),
    (
        waits("memory", queue="q", task="big", need_mb=4000.0, room_mb=3000.0),
        ["a run of the task big needs 4,000 MB, and runs may use 3,000 MB together there (DL_HOST_MEMORY)"],
        [("tasks",)],
    ),
    (waits("worker", queue="q", need_mb=400.0), ["is free and its host has room for its 400 MB."], [("top",)]),
    (
        case(
            a_job("running", attempt=1, cancel_requested=True, heartbeat_at=NOW - timedelta(seconds=300)),
            attempt(1, None),
            worker=filled(Worker, worker="w", host="vm1", pid=42, is_live=True),
        ),
        ["on vm1, process 42 for 1 min 30 s", "reported nothing", "5 min ago"],
        [("cancel", ID, "--force"), ("ps",)],
    ),
    (
        case(a_job("running", attempt=1), attempt(1, None), worker=STUCK),
        ["reported nothing for 12 min, so it counts as stuck. Its journal has its threads' stacks"],
        [("job", ID)],
    ),
    (
        case(a_job("running", attempt=1, claimed_by="w", lease_expires_at=NOW - timedelta(seconds=30))),
        ["Its lease ran out 30 s ago: its worker renews it no longer, and no reaper has noticed"],
        [("ps",)],
    ),
    (case(a_job("failed", attempt=1, error="no use")), ["permanent", "no use"], [("job", ID), ("requeue", ID)]),
    (case(a_job("failed", attempt=3, error="x")), ["after 3 of 3 attempts: x"], [("requeue", ID)]),
    (
        case(a_job("lost", attempt=2), attempt(1, "requeue", signal=9), attempt(2, "lost", signal=9, peak_mb=900)),
        ["the last of 2 attempts", "killed by signal 9", "short of memory (it had up to 900 MB)"],
        [("requeue", ID)],
    ),
    (case(a_job("lost", attempt=1), attempt(1, "lost", signal=11)), ["its only attempt", "crashed the process"], []),
    (case(a_job("canceled"), events=[event(1, "canceled", by="ops")]), ["canceled by ops"], [("requeue", ID)]),
    (case(a_job("succeeded"), attempt(1, "done", seconds=3.0)), ["succeeded in 3 s; nothing is the matter"], []),
]


@pytest.mark.parametrize(("case", "texts", "commands"), CASES)
def test_doctor_finds(case: doctor.Case, texts: list[str], commands: list[tuple[str, ...]]) -> None:
    findings = list(doctor.diagnose(case))
    report = "\n".join(finding.text for finding in findings)
    for text in texts:
        assert text in report
    for command in commands:
        assert command in [finding.command for finding in findings]


def test_a_dsn_on_the_command_line_is_hidden_from_others() -> None:
    code = (
        "import sys, psutil; sys.argv = ['x', 'queues', '--dsn', 'secret']\n"
        "from dataloader.cli import connection; connection.hide_arguments()\n"
        "print(*psutil.Process().cmdline())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "dataloader queues", done.stderr


def test_following_a_quiet_queue_begins_at_the_end_of_the_journal(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last event of the queue may be millions of rows back, more than a request can read."""
    now = {"ts": NOW.isoformat(), "kind": "queued", "payload": {}, "job_id": ID, "queue": "quiet"}
    answers = [[], [now | {"event_id": 7_000_000}], [now | {"event_id": 7_000_001}]]
    service.answers = [Answer(document={"events": events}) for events in answers]
    pause = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    assert run("events", "--queue", "quiet", "--follow", "--json").stdout.count("7000001") == 1
    asked = [parse_qs(urlsplit(each.path).query) for each in service.asked]
    assert [each.get("after") for each in asked] == [None, None, ["7000000"]]


def test_doctor_names_the_tasks_whose_runs_replace_their_workers() -> None:
    rude = filled(Task, task="rude", replaces=Replaces(runs=5, replaced=3, changed=["threads", "umask"]))
    (found,) = doctor.task_findings([filled(Task, task="kind"), rude])
    assert found.text.startswith("3 of the last 5 runs of task rude have changed their process (threads, umask)")


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found
            yield from commands(found, (*path, name))


ALL = dict(commands(main))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_no_help_is_cut_and_each_has_an_example(path: tuple[str, ...]) -> None:
    text = CliRunner().invoke(main, [*path, "--help"], terminal_width=80).output
    assert "..." not in text.replace("]...", "")  # click's mark of an argument that may come again
    assert "\nExample" in text
    examples = getattr(ALL[path], "examples", ())
    assert all(f"  {line}\n" in text for line in examples)


EXAMPLES = [(path, line) for path, command in ALL.items() for line in getattr(command, "examples", ())]


@pytest.mark.parametrize(("path", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_each_example_is_one_of_its_command_and_is_understood(path: tuple[str, ...], line: str) -> None:
    words = shlex.split(line.replace('"$(', "").replace(')"', ""))
    words = words[words.index("dataloader") + 1 :]
    assert words[: len(path)] == list(path)
    parse(main, words)


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Let click parse the words, through all groups, without a run."""
    ctx = command.make_context(command.name or "", words, parent)
    if isinstance(command, click.Group):
        rest = [*ctx._protected_args, *ctx.args]
        name, found, args = command.resolve_command(ctx, rest)
        assert name
        assert found
        parse(found, args, ctx)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("stauts", "status"),
        ("trigerr noop", "trigger"),
        ("schedule lst", "list"),
        ("jobs --statsu dead", "--status"),
        ("jobs --status quued", "queued"),
        ("trigger noop --agrs {}", "--args"),
        ("completion bsh", "bash"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_right_one(words: str, meant: str) -> None:
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert "id you mean" in last
    assert repr(meant) in last.partition("id you mean")[2]


@pytest.mark.parametrize("words", [["password=hunter2-canary"], ["jobs", "--status", "api_key=hunter2-canary"]])
def test_an_answer_shows_no_secret_and_is_bounded(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "hunter2-canary" not in result.stderr
    long = CliRunner().invoke(main, [*words[:-1], words[-1] + " x" * 100_000])
    assert long.exit_code == 2
    assert len(long.stderr) < WRONG_MOST + 500


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_what_is_written_passes_its_test_and_the_linter(folder: Path) -> None:
    output = run("new", "sales").output
    assert "DL_PIPELINES=sales dataloader up" in output.replace(str(Path(sys.executable).parent) + "/", "")
    assert 'trigger sales --args \'{"path": "example.csv"}\' --wait' in output
    assert 'context.load("sales_rows"' in (folder / "sales.py").read_text()
    assert "my_loader" not in output + "".join(path.read_text() for path in folder.iterdir())
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(folder)]
    command = [sys.executable, "-P", "-m", "pytest", *options, str(folder / "test_sales.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert "7 passed" in done.stdout, done.stdout + done.stderr
    config = Path(__file__).parents[2] / "pyproject.toml"
    for check in (["check", "--ignore", "S101,PLR"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--config", str(config), "."]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my-loader", "letters, digits and _, no keyword, such as my_loader"),
        ("class", "no keyword"),
        ("../evil", "cannot be a module's name"),
        ("__main__", "hide a module"),
        ("json", "hide a module of Python"),
        ("psycopg", "hide a module of Python or of a package"),
        ("test_it", "would be taken for a test"),
        ("a" * 51, "at most 50 characters"),
        ("there", "there.py exists already"),
        ("tested", "test_tested.py exists already"),
        ("package", "package exists already"),
    ],
)
def test_refusals_leave_the_folder_as_it_is(name: str, why: str, folder: Path) -> None:
    (folder / "there.py").write_text("mine")
    (folder / "test_tested.py").write_text("mine")
    (folder / "package").mkdir()
    done = run("new", name)
    assert done.exit_code == 1
    assert why in done.output
    assert "Traceback" not in done.output
    assert sorted(path.name for path in folder.iterdir()) == ["package", "test_tested.py", "there.py"]
    assert (folder / "there.py").read_text() == "mine"
