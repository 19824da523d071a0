"""The command line on a real farm: over HTTP and on the database, with the same answers."""

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import UUID, uuid4

import psutil
import pytest
from click.testing import CliRunner, Result
from farming import Farm, farm_on, free_port, on_all, until

from dataloader.cli import main
from dataloader.client import Client
from dataloader.queue.plans import backfills

pytestmark = pytest.mark.long

CANARY = "canary-5f2c"
ESCAPE = "bad \x1b[31mred\x9b2J\u202e"
Ask = Callable[..., Result]


@pytest.fixture(scope="module")
def farm(module_db: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Two workers on the queue q, and one on the default one."""
    wish = [{"queue": "q", "concurrency": 2}, {"queue": "etl.default", "concurrency": 1}]
    with farm_on(module_db, tmp_path_factory.mktemp("farm")) as made:
        made.ready(workers=3, workers_json=json.dumps(wish))
        # Until the keeper has shown them, nobody knows their queues.
        until(lambda: len(made.rows("SELECT FROM dl_workers")) == 3, "the keeper to show the workers")
        yield made


@pytest.fixture(autouse=True)
def _emptied(farm: Farm) -> Iterator[None]:
    """The tests share the farm; the order in which they run must not matter."""
    yield
    farm.empty()


@pytest.fixture(scope="module")
def url(farm: Farm) -> str:
    port = free_port()
    farm.api(port)
    return f"http://127.0.0.1:{port}"


@pytest.fixture(params=["http", "direct"])
def ask(request: pytest.FixtureRequest, farm: Farm, url: str, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run a command in this process, by one of the two ways."""
    monkeypatch.setenv("DL_URL", url)
    monkeypatch.setenv("DL_DB_DSN", farm.dsn)
    more = ["--direct"] if request.param == "direct" else []

    def run(*words: object, **given: Any) -> Result:
        result = CliRunner().invoke(main, [*map(str, words), *more], **given)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def triggered(ask: Ask, task: str = "noop", queue: str = "q", **args: Any) -> str:
    key = f"key-{uuid4()}"
    done = ask(
        "trigger", task, "--queue", queue, "--lock-key", key, "--args", json.dumps(args), "--max-attempts", 1, "--new"
    )
    return str(answer(done)["job_id"])


def test_the_exit_status_tells_the_outcome(ask: Ask) -> None:
    done = ask("trigger", "noop", "--queue", "q", "--wait", "--args", '{"sleep1": 0.1}')
    assert answer(done)["status"] == "succeeded"
    assert "succeeded, 3 of 3" in done.stderr
    failed = ask("trigger", "errs", "--queue", "q", "--wait", "--args", '{"permanent": true}')
    assert (failed.exit_code, json.loads(failed.stdout)["error"]) == (10, "no use")
    lost = ask("trigger", "kills_itself", "--queue", "q", "--wait", "--max-attempts", 1)
    assert lost.exit_code == 12
    waiting = triggered(ask, queue="nobody")
    late = ask("wait", waiting, "--timeout", 0.2)
    assert late.exit_code == 13
    assert f"To go on watching: dataloader wait {waiting}" in late.stderr
    assert answer(ask("cancel", waiting))["status"] == "canceled"
    assert ask("wait", waiting).exit_code == 11


def test_what_a_pipeline_has_returned_is_printed_alone(ask: Ask) -> None:
    def run(*more: object, **args: Any) -> Result:
        return ask("trigger", "returns", "--queue", "q", "--wait", "--result", "--args", json.dumps(args), *more)

    assert answer(run(value={"rows": [1, "ü"]})) == {"rows": [1, "ü"]}
    assert answer(run()) is None
    failed = run(kb=300)
    assert (failed.exit_code, failed.stdout) == (10, "")
    assert "DL_RESULT_KB=256 allows 262,144: write large results to the target or to a file" in failed.stderr
    late = run("--timeout", 0.1, "--at", "2035-01-01T00:00:00Z")
    assert (late.exit_code, late.stdout) == (13, "")


DAYS = ("--from", "2019-01-01", "--to", "2019-01-03", "--step", "day")


def test_a_backfill_is_tried_made_waited_for_and_its_failed_partitions_retried(ask: Ask, farm: Farm) -> None:
    def waited(name: str) -> Result:
        while backfills.tick(farm.conn):  # no reaper runs that would make the jobs
            pass
        return ask("backfill", "wait", name)

    options = (*DAYS, "--queue", "q", "--args", '{"sleep1": 0.01, "day": "{{ date }}"}', "--max-running", 1)
    tried = ask("backfill", "noop", "--name", "fill", *options, "--dry-run")
    assert "would have 3 partitions; nothing is changed" in tried.stdout, tried.output
    assert "no backfill with this name" in ask("backfill", "show", "fill").stderr
    assert "making" in ask("backfill", "noop", "--name", "fill", *options).stdout
    done = waited("fill")
    assert (done.exit_code, "3 of 3 partitions, done" in done.stderr) == (0, True), done.output
    listed = answer(ask("backfill", "partitions", "fill", "--status", "succeeded", "--json"))["partitions"]
    assert [each["partition"] for each in listed] == ["2019-01-01", "2019-01-02", "2019-01-03"]
    assert "It is done: 3 of 3 partitions." in ask("doctor", "fill").stdout

    errs = ("errs", "--queue", "q", "--args", '{"permanent": true}', "--partition", "x", "--partition", "y")
    assert ask("backfill", *errs, "--name", "bad").exit_code == 0
    assert waited("bad").exit_code == 10
    assert "dataloader backfill retry bad" in ask("doctor", "bad").stdout
    assert "2 jobs queued again" in ask("backfill", "retry", "bad").stdout
    assert waited("bad").exit_code == 10
    assert answer(ask("backfill", "cancel", "bad", "--json"))["state"] == "canceled"
    assert ask("backfill", "wait", "bad").exit_code == 11


LISTED = [
    (("--partition", "north", "--partition", "south"), ["north", "south"]),
    (("--file", "partitions"), ["north", "south"]),
    (("--file", "-"), ["west", "east"]),
    (("--from", "0", "--to", "1500", "--step", "1000"), ["0", "1000"]),
]


def test_the_partitions_of_a_backfill_come_from_wherever_they_are_listed(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("partitions").write_text("north\n\n  south \n")
    for options, expected in LISTED:
        tried = ask("backfill", "noop", *options, "--dry-run", "--json", input="west\neast\n")
        assert [each["partition"] for each in answer(tried)["samples"]] == expected, options


OF_JOB = ("job", "events", "logs", "doctor", "status")
COMMANDS = [
    *("jobs --limit 3", "jobs --json", "events --limit 3", "queues", "ps", "tasks", "top --once", "doctor"),
    *("webhook list", *(f"{name} JOB" for name in OF_JOB), *(f"{name} JOB --json" for name in OF_JOB[:4])),
]


def test_no_command_shows_a_secret_or_moves_the_terminal(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are in the zone of people."""
    monkeypatch.setenv("TIMEZONE", "Asia/Tokyo")
    text = f"{ESCAPE} password={CANARY}"
    job_id = triggered(ask, "errs", permanent=False, text=text, api_key=CANARY, note=ESCAPE)
    assert ask("wait", job_id).exit_code == 10
    shown = {}
    for command in COMMANDS:
        result = ask(*command.replace("JOB", job_id).split())
        assert CANARY not in result.output, command
        assert not set("\x1b\x9b\u202e") & set(result.output), command
        shown[command] = result.stdout
    assert "\\x1b[31mred\\x9b2J\\u202e" in shown["job JOB"]
    assert "\x1b[31mred\x9b2J\u202e" in answer(ask("status", job_id))["error"]
    for command in ("job JOB", "top --once"):
        assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d JST", shown[command])


def test_doctor_sees_that_all_workers_of_a_queue_are_stopped(ask: Ask, farm: Farm) -> None:
    """They are alive, take nothing, and nobody ends an idle one that is stopped."""
    until(lambda: len(farm.programs[0].children("worker q#")) == 2, "both workers of the queue")
    stopped = farm.programs[0].children("worker q#")
    try:
        on_all(psutil.Process.suspend, stopped)
        shown = "SELECT FROM dl_workers WHERE queue = 'q' AND state = 'stopped'"
        until(lambda: len(farm.rows(shown)) == 2, "the keeper to show it")
        job_id = triggered(ask)
        advice = ask("doctor", job_id).stdout
        assert "All 2 workers of the queue q are stopped" in advice
        assert "kill -CONT" in advice
        assert "stopped" in ask("ps").stdout
    finally:
        on_all(psutil.Process.resume, stopped)
    assert ask("wait", job_id).exit_code == 0


UNKNOWN = [
    *("pause qq", "resume qq", "trigger noop -q qq", "trigger nop", "limit qq 5", "queue set qq --ordered"),
    *("queue keys qq", "queue kill-retries qq", "predict qq", "schedule add s nop --interval-sec 1d"),
    *("schedule add s noop -q qq --interval-sec 1d", "backfill nop --partition x"),
    *("backfill noop -q qq --partition x", "webhook add ops https://127.0.0.1:1/ --queue qq"),
]


def test_a_name_that_nobody_knows_changes_nothing_and_an_empty_list_says_so(ask: Ask, farm: Farm) -> None:
    tables = ("dl_jobs", "dl_queues", "dl_schedules", "dl_backfills", "dl_webhooks")
    before = [farm.rows(f"SELECT count(*) FROM {table}") for table in tables]
    for command in UNKNOWN:
        refused = ask(*command.split())
        kind, wrong, right = ("task", "nop", "noop") if "nop" in command.split() else ("queue", "qq", "q")
        assert refused.exit_code == 1, refused.output
        assert refused.stderr.startswith(f"dataloader: no {kind} '{wrong}' is known: ")
        assert f"Did you mean {right!r}" in refused.stderr, command
    assert [farm.rows(f"SELECT count(*) FROM {table}") for table in tables] == before
    for command in ("jobs", "events", "errors"):
        empty = ask(command, "-q", "unheard", "--json")
        assert answer(empty)
        assert "no queue 'unheard' is known" in empty.stderr
    assert "no task 'unheard' is known" in ask("jobs", "--task", "unheard").stderr
    assert "is known" not in ask("jobs", "-q", "q", "--task", "noop", "--status", "lost").stderr


def test_jobs_are_requeued_made_due_and_deleted_by_their_ids(ask: Ask) -> None:
    first = triggered(ask, "errs", permanent=True)
    assert ask("wait", first).exit_code == 10
    some = ask("requeue", first, str(UUID(int=1)))
    assert some.stdout == f"{first} queued again\n{UUID(int=1)} there is no such job\n"
    assert some.exit_code == 1
    later = answer(ask("trigger", "noop", "-q", "q", "--lock-key", "k", "--at", "2030-01-01T00:00:00Z"))["job_id"]
    assert "run-now" in ask("doctor", later).stdout
    assert ask("run-now", later).stdout == f"{later} due now\n"
    assert ask("wait", later).exit_code == 0
    assert ask("delete", later, input="n\n").exit_code == 1
    assert answer(ask("delete", "-", "--yes", "--json", input=f"{later}\n"))["jobs"][0]["outcome"] == "done"
    assert ask("status", later).exit_code == 1


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("status x", 2, "'x' is not a valid UUID"),
        (f"status {UUID(int=1)} --url http://127.0.0.1:1", 1, "Connection refused; is the API running?"),
        (f"status {UUID(int=1)} --url http://no.such.host.invalid", 1, "is the API running?"),
        (f"status {UUID(int=1)} --url http://u:geheim@x", 2, "should have no user or password"),
        ("queues --dsn host=/nonexistent", 1, "database: "),
        ("queues --dsn postgresql://u:gehe@im@x/y", 78, "percent-encoded"),
        ("queues --direct --url http://x", 2, "choose one"),
        ("queues --token-file /no/such/file", 2, "No such file"),
        ("trigger returns --result", 2, "--result is for --wait"),
        ("trigger noop --args [1]", 2, "should be a JSON object"),
        ("trigger noop --args @/no/such/file", 2, "cannot be read"),
        ("trigger noop --max-attempts 0", 1, "/max_attempts: "),
        ("requeue", 2, "give the ids of jobs, or a search by --matching"),
        ("requeue x", 2, "is a UUID such as"),
        ("delete -", 2, "add --yes"),
        (f"events {UUID(int=1)} --queue q", 2, "leave --queue out"),
        ("limit q many", 2, "should be a number or none"),
        ("queue set q", 2, "name what to change: --ordered"),
        (f"backfill noop {' '.join(DAYS)} --partition x", 1, "one of a range (since, until and step) and partitions"),
        ("backfill noop --partition x --file /dev/null", 2, "come from --partition or --file"),
        ("backfill noop --file no-such-file", 2, "'no-such-file': No such file or directory"),
        ("backfill noop --file /dev/null", 2, "there is no partition in it"),
        (f"backfill noop --file {sys.executable}", 2, "it is not UTF-8"),
    ],
)
def test_a_users_error_is_a_line_of_words(
    command: str, status: int, words: str, farm: Farm, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DL_URL", url)
    result = CliRunner().invoke(main, shlex.split(command))
    assert result.exit_code == status, result.output
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert "geheim" not in result.output


@contextmanager
def dataloader(farm: Farm, url: str, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A command in a process of its own, and what it prints."""
    given = os.environ | {"DL_URL": url, "DL_DB_DSN": farm.dsn}
    command = [sys.executable, "-m", "dataloader", *words]
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout
        yield process, process.stdout


def test_a_reader_who_leaves_is_no_error(farm: Farm, url: str) -> None:
    farm.enqueue("noop", "nobody")
    command = f"{sys.executable} -m dataloader jobs --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["/bin/bash", "-c", command], env=os.environ | {"DL_URL": url}, capture_output=True)
    assert done.stdout == b"{"
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


def test_ctrl_c_leaves_the_job_and_says_how_to_go_on(farm: Farm, url: str) -> None:
    words = ("trigger", "noop", "--queue", "nobody", "--lock-key", "c", "--wait", "--new")
    with dataloader(farm, url, *words) as (asking, printed):
        assert printed.readline().startswith(b"dataloader: job ")
        printed.readline()  # the first look is done
        asking.send_signal(signal.SIGINT)
        rest = printed.read()
    assert asking.returncode == 130
    assert b"To go on watching: dataloader wait" in rest
    assert b"Traceback" not in rest


def test_following_a_job_or_its_log_shows_what_happens_until_the_jobs_end(farm: Farm, url: str, ask: Ask) -> None:
    job_id = farm.enqueue("noop", "later")
    insert = "INSERT INTO dl_job_logs VALUES (%s, 1, %s, %s, now(), 'info', 'stdout', %s)"
    farm.conn.execute(insert, (job_id, 1, 1, f"first {ESCAPE}"))
    with (
        Client(url) as client,
        dataloader(farm, url, "events", str(job_id), "--follow", "--json") as (_, events),
        dataloader(farm, url, "logs", "-f", str(job_id)) as (_, log),
    ):
        assert json.loads(events.readline())["kind"] == "queued"
        assert log.readline() == b"--- attempt 1\n"
        assert b"first" in log.readline()
        farm.conn.execute(insert, (job_id, 1, 9, "second"))
        assert b"7 lines were left out" in log.readline()
        assert log.readline().endswith(b"stdout   second\n")
        client.cancel(job_id)
        assert [line.text for line in client.logs(job_id, after="1.1")] == ["second"]
        assert [json.loads(line)["kind"] for line in events][-1] == "canceled"
        assert log.read() == b""
    assert "second" in ask("logs", job_id, "--attempt", "1").stdout
    assert ask("logs", job_id, "--attempt", "2").stdout == ""
    assert "\x1b" not in ask("logs", job_id).stdout


def typed(farm: Farm, url: str, words: list[str], keys: dict[str, str]) -> tuple[int, str]:
    """Run in a terminal; when a text of `keys` is seen, type its keys. The exit status and all that was shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"DL_URL": url, "DL_DB_DSN": farm.dsn, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        os.execv(sys.executable, [sys.executable, "-m", "dataloader", *words])
    shown = ""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            shown += os.read(terminal, 65_536).decode("utf-8", "replace")
        except OSError:
            break
        for text in [text for text in keys if text in shown]:
            os.write(terminal, keys.pop(text).encode())
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_in_a_terminal_there_is_a_bar_and_a_live_view(farm: Farm, url: str) -> None:
    status, shown = typed(farm, url, ["trigger", "noop", "--queue", "q", "--wait", "--args", '{"sleep1": 0.2}'], {})
    assert status == 0, shown
    assert "━" in shown
    assert shown.rstrip().endswith("s")  # "job … succeeded after 0.2 s"
    status, shown = typed(farm, url, ["top", "--every", "1"], {"idle": "q"})
    assert status == 0, shown
    assert "\x1b[?1049l" in shown  # the screen that was there before is back


def test_the_pages_examples_run(farm: Farm, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "client.md").read_text("utf-8").replace("http://127.0.0.1:8081", url)
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/client.md", "exec"), names)
    names["client"].close()
    shown = capsys.readouterr().out
    assert shown.startswith("succeeded {'step': 'sleep3', 'total': 3, 'processed': 3}")
    assert "succeeded 100%" in shown


def test_jobs_are_searched_counted_and_ordered_in_bulk(ask: Ask, farm: Farm) -> None:
    for status, day in (("failed", 1), ("failed", 2), ("succeeded", 2)):
        job = {"queue": "searched", "task": "search.me", "lock_key": f"key {day}", "args": f'{{"day": {day}}}'}
        farm.insert(**{name: f"'{value}'" for name, value in job.items()}, status=f"'{status}'", finished_at="now()")
    search = "queue:searched status:dead"
    found = answer(ask("jobs", "--search", f'{search} key:"key 2" args.day:2', "--json"))["jobs"]
    assert [job["status"] for job in found] == ["failed"]
    assert re.search("counts failed +2", ask("tally", "-s", "search.me").stdout)
    preview = ask("requeue", "--matching", "search.me status:dead", "--preview")
    assert preview.stdout == "requeue: 2 jobs (2 failed)\n"
    assert ask("delete", "--matching", search, input="n\n").exit_code == 1
    assert ask("requeue", "--matching", f"{search} args.day:1", "--yes").stdout == "1 jobs queued again\n"
    assert ask("cancel", "--matching", "queue:searched status:queued", "--yes").stdout.startswith("1 jobs cancelled")
    assert answer(ask("delete", "--matching", "queue:searched", "--yes", "--json"))["changed"] == 3
    assert "is status meant?" in ask("jobs", "--search", "sttus:dead").stderr
    for words in (("cancel",), ("delete", "--matching", " "), ("requeue", "--matching", "a", UUID(int=1))):
        assert ask(*words).exit_code == 2, words
