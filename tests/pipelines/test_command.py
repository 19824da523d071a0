"""`run.command`: real programs of an allow-list, their output, their limits and their end."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from judging import Load, fails_for_good
from patience import until

from dataloader import config
from dataloader.pipelines import command
from dataloader.pipelines.command import LONGEST_LINE, TAIL, Output
from dataloader.testing import Result

Allow = Callable[..., None]


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Allow:
    """Allow the command `it`: Python code, with these further words of its entry."""

    def allow(code: str, **words: Any) -> None:
        monkeypatch.setenv("DL_COMMANDS", json.dumps({"it": {"argv": [sys.executable, "-c", code], **words}}))

    return allow


def ran(job: Load, *arguments: str, **how: Any) -> Result:
    return job("run.command", {"command": "it", "arguments": list(arguments)}, **({"max_attempts": 1} | how))


def test_a_program_that_cannot_be_watched_is_ended(job: Load, allow: Allow, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def refused(number: int) -> int:
        started.append(number)
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.pidfd_open", refused)
    allow("import time; time.sleep(60)")
    result = ran(job)
    assert (result.status, "Function not implemented" in (result.error or "")) == ("failed", True)
    assert [psutil.pid_exists(number) for number in started] == [False]


def test_the_result_has_the_exit_code_and_the_last_lines(
    job: Load, allow: Allow, notes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    allow("import sys; print(sys.argv[1:]); print('to stderr', file=sys.stderr); print('Ёж', end='')")
    result = ran(job, "a b", "$(id)", "; ls", "--x=1")
    lines = ["['a b', '$(id)', '; ls', '--x=1']", "to stderr", "Ёж"]
    assert result.status == "succeeded"
    assert (result.result["exit_code"], sorted(result.result["tail"])) == (0, sorted(lines))
    assert result.result["lines"] == 3
    assert sorted(notes) == sorted(lines)
    logged = [record.getMessage() for record in caplog.records if record.name == "pipeline.run.command"]
    assert sorted(logged) == sorted(lines)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print('half way'); raise SystemExit(3)", "it ended with status 3; its last lines:\nhalf way"),
        ("import os; os.kill(os.getpid(), 9)", "it was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 35)", "it was ended by signal 35"),
    ],
)
def test_another_end_is_an_error_and_is_tried_again(job: Load, allow: Allow, code: str, error: str) -> None:
    allow(code)
    result = ran(job, max_attempts=2)
    assert (result.status, result.attempts) == ("failed", 2)
    assert error in (result.error or "")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"command": "other"}, "command: should be one that DL_COMMANDS of this worker names (it)"),
        ({"command": "/bin/sh"}, "command: should be one that DL_COMMANDS of this worker names (it)"),
        ({"command": "it", "arguments": "-la"}, "arguments: Input should be a valid list"),
        ({"command": "it", "arguments": ["\0"]}, "arguments.0: String should match pattern"),
        ({"command": "it", "env": {"A": "b"}}, "env: there is no such argument"),
        ({}, "command: Field required"),
    ],
)
def test_what_is_not_allowed_is_refused_at_once(job: Load, allow: Allow, args: dict[str, Any], error: str) -> None:
    allow("")
    fails_for_good(job("run.command", args), error)


def test_without_the_setting_no_program_may_run(job: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DL_COMMANDS", raising=False)
    assert "names (none)" in (ran(job).error or "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"argv": ["/no/such/program"]}, "the program of it in DL_COMMANDS is no file that this worker may execute"),
        ({"argv": ["/"]}, "the program of it in DL_COMMANDS is no file that this worker may execute"),
        ({"folder": "/no/such/folder"}, "the folder of it (DL_COMMANDS) is missing"),
    ],
)
def test_a_program_or_folder_that_is_missing_is_named(job: Load, allow: Allow, words: Any, error: str) -> None:
    allow("", **words)
    fails_for_good(ran(job, max_attempts=3), error)


def test_the_program_sees_only_what_is_allowed_and_its_job(
    job: Load, allow: Allow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DL_DB_DSN", "postgresql://u:canary@h/d")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    monkeypatch.setenv("DBT_TARGET", "prod")
    allow("import os; print(dict(os.environ)); print(os.getcwd())", env=["DBT_TARGET", "NOT_SET"])
    result = ran(job)
    shown, folder = result.result["tail"]
    seen = eval(shown)
    assert "canary" not in shown
    assert {"PATH", "DBT_TARGET", "DATALOADER_JOB_ID"} <= set(seen)
    assert set(seen) <= {
        *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "DBT_TARGET", "LC_CTYPE"),
        *("DATALOADER_JOB_ID", "DATALOADER_ATTEMPT", "DATALOADER_CLAIM", "DATALOADER_DATA_DIR"),
    }
    assert (seen["DATALOADER_JOB_ID"], seen["DATALOADER_ATTEMPT"]) == (str(result.job_id), "1")
    assert folder == seen["DATALOADER_DATA_DIR"] == str(tmp_path)


@pytest.mark.parametrize("name", ["DL_DB_DSN", "DL_SOURCE_CRM", "PG_PASSWORD", "dl_token"])
def test_the_farms_own_variables_are_not_handed_out(allow: Allow, name: str) -> None:
    allow("", env=[name])
    with pytest.raises(config.ConfigError, match=f"should name no variable of the farm itself: {name}"):
        config.load()


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ('{"ls": ["ls"]}', "should begin with the program's whole path"),
        ('{"ls": []}', "at least 1 item"),
        ('{"l s": ["/bin/ls"]}', "DL_COMMANDS"),
        ('{"ls": "/bin/ls -la"}', "DL_COMMANDS"),
        ('{"ls": {"argv": ["/bin/ls"], "shell": true}}', "DL_COMMANDS.ls.shell"),
        ("[", "should be JSON such as"),
    ],
)
def test_a_wrong_allow_list_stops_the_start(monkeypatch: pytest.MonkeyPatch, setting: str, error: str) -> None:
    monkeypatch.setenv("DL_COMMANDS", setting)
    with pytest.raises(config.ConfigError) as caught:
        config.load()
    assert error in str(caught.value)


def test_secrets_of_the_args_are_masked_in_what_the_program_says(job: Load, allow: Allow, notes: list[str]) -> None:
    allow("import sys; print('got', sys.argv[1]); raise SystemExit(1)")
    result = ran(job, "--url=postgresql://u:hunter22@h/d")
    assert "hunter22" not in (result.error or "")
    assert "***" in (result.error or "")


def test_the_output_is_kept_and_logged_in_bounds(
    job: Load, allow: Allow, notes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    allow("for n in range(20_000): print(n, 'x' * 100)", output_kb=2)
    result = ran(job)
    assert (result.result["lines"], len(result.result["tail"]), len(notes)) == (20_000, TAIL, TAIL)
    assert result.result["tail"][-1] == "19999 " + "x" * 100
    logged = [record.getMessage() for record in caplog.records if record.name == "pipeline.run.command"]
    assert 15 < len(logged) < 25
    assert logged[-1] == "the program has written much: the rest of its output is not logged"


def test_a_line_without_end_takes_bounded_memory() -> None:
    kept = Output(logging.getLogger("test"), 0)
    for _ in range(50):
        kept.take(b"x" * 65_536)
        assert len(kept._begun) <= LONGEST_LINE
    kept.end()
    assert kept.bytes == 50 * 65_536
    assert {len(line) for line in kept.tail} <= {LONGEST_LINE, kept.bytes % LONGEST_LINE}
    assert len(kept.tail) == TAIL


def test_colours_and_progress_bars_become_plain_lines() -> None:
    kept = Output(logging.getLogger("test"), 0)
    for piece in (b"\x1b[31mred\x1b", b"[0m\n10%\r", b"\n20%\r100%\r\n\xff\x00\x07bell"):
        kept.take(piece)
    kept.end()
    assert list(kept.tail) == ["red", "10%", "20%", "100%", "\ufffdbell"]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def steps_at_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has a safe point, and looks at its time, when the program has written, and no sooner."""
    monkeypatch.setattr(command, "_SLICE", 600)


@pytest.mark.usefixtures("steps_at_output")
def test_a_program_over_its_time_ends_with_its_group(job: Load, allow: Allow) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    allow(code, timeout_sec=0.001)
    result = ran(job)
    words, pid = (result.error or "").split("\n\n")[0].rsplit("\n", 1)
    assert words.endswith("it ran for more than 0.001 s; its last lines:")
    until(lambda: is_gone(int(pid)), "the end of the group")


@pytest.mark.usefixtures("steps_at_output")
@pytest.mark.parametrize(("how", "end"), [("cancel_at", "canceled"), ("drain_at", "handed back")])
def test_a_stopped_run_asks_the_program_to_end(job: Load, allow: Allow, notes: list[str], how: str, end: str) -> None:
    allow(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(os.write(1, b'bye') - 3))\n"
        "if not os.path.exists('again'):\n"
        "    open('again', 'w'); print('begun', flush=True); time.sleep(600)\n"
    )
    result = ran(job, **{how: 1})
    assert result.runs[0].end == end
    assert notes == ["begun", "bye"]
    assert result.status == ("canceled" if end == "canceled" else "succeeded")


@pytest.mark.usefixtures("steps_at_output")
def test_a_program_that_does_not_hear_is_killed(
    job: Load, allow: Allow, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setattr(command, "GRACE_SEC", 0.2)
    allow(
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    assert ran(job, cancel_at=1).status == "canceled"
    until(lambda: is_gone(int(notes[0])), "the end of the program")


@pytest.mark.usefixtures("steps_at_output")
def test_the_program_dies_with_its_worker(job: Load, allow: Allow, tmp_path: Path) -> None:
    """The run is a process of its own, which is killed; the second run finds the first one's program gone."""
    allow(
        "import os, sys, time\n"
        "if not os.path.exists('pid'):\n"
        "    print(os.getpid(), file=open('pid', 'w')); print('begun', flush=True); time.sleep(600)\n"
        "pid = int(open('pid').read())\n"
        "def is_alive():\n"
        "    try: return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'Z'\n"
        "    except OSError: return False\n"
        "end = time.monotonic() + 60\n"
        "while is_alive() and time.monotonic() < end: time.sleep(0.01)\n"
        "sys.exit(is_alive())\n"
    )
    result = ran(job, max_attempts=3, crash_at=1)
    assert (result.status, [run.end for run in result.runs]) == ("succeeded", ["crash", "done"])
    assert (tmp_path / "pid").exists()


def test_a_program_that_leaves_a_process_behind_ends(job: Load, allow: Allow) -> None:
    """The process holds the pipe of the output; it is killed with the group."""
    allow("import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")
    result = ran(job)
    assert result.status == "succeeded"
    until(lambda: is_gone(int(result.result["tail"][0])), "the end of the process")


def test_a_program_may_close_its_output_and_go_on(job: Load, allow: Allow) -> None:
    allow("import os, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(7)")
    assert "it ended with status 7" in (ran(job).error or "")


def test_memory_is_bounded(job: Load, allow: Allow) -> None:
    allow("bytearray(400 * 2**20)", memory_mb=200)
    assert "MemoryError" in (ran(job).error or "")
    allow("bytearray(400 * 2**20)", memory_mb=2_000)
    assert ran(job).status == "succeeded"


def test_a_list_alone_is_an_entry(job: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_COMMANDS", json.dumps({"it": ["/bin/echo", "first"]}))
    assert ran(job, "second").result["tail"] == ["first second"]
