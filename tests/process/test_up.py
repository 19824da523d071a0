"""`dataloader up` for real: everything started from nothing, used over HTTP, stopped, killed, started again."""

import itertools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from farming import call, environment, free_port, have_ended, on_all, until

from dataloader import config
from dataloader.local import up

QUEUE = "test.up"


class Farm:
    """One `dataloader up` in a folder, on a port, and what it has said."""

    def __init__(
        self, home: Path, port: int, output: int | None = None, words: tuple[str, ...] = (), **settings: str
    ) -> None:
        workers = json.dumps([{"queue": QUEUE, "concurrency": 1}])
        ours = {"DL_HOME": str(home), "APP_PORT": str(port), "APP_HOST": "127.0.0.1", "WORKERS_JSON": workers}
        self.port = port
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dataloader", "up", *words],
            cwd=home,  # a .env of the checkout is not ours
            env=environment() | ours | {"DL_DRAIN_SEC": "15"} | settings,
            stdout=self._file if output is None else output,
            stderr=self._file if output is None else output,
        )

    @property
    def output(self) -> str:
        return os.pread(self._file.fileno(), 1_000_000, 0).decode()

    def wait_up(self) -> None:
        until(lambda: "dataloader is up" in self.output or self.process.poll() is not None)
        assert self.process.poll() is None, self.output

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if word in " ".join(child.cmdline()))

    def stop(self, *signals: signal.Signals) -> int:
        for number in signals or (signal.SIGTERM,):
            self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop()
        print(self.output)  # shown where a test fails
        self._file.close()

    def trigger(self, **body: Any) -> str:
        job = {"queue": QUEUE, "task": "noop", "lock_key": "up", "args": {"sleep1": 0.01}, **body}
        return str(call(self.port, "/api/v1/jobs/trigger", job)["job_id"])

    def status(self, job_id: str) -> str:
        return str(call(self.port, f"/api/v1/jobs/{job_id}/status")["status"])

    def succeeds(self) -> bool:
        with suppress(OSError):  # the API is not back yet, or has no database
            job_id = self.trigger()
            until(lambda: self.status(job_id) == "succeeded")
            return True
        return False


class OnTerminal(Farm):
    """The same before a person's eyes."""

    def __init__(self, home: Path, port: int, **settings: str) -> None:
        terminal, theirs = pty.openpty()
        self._shown = b""
        super().__init__(home, port, theirs, **settings)
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(terminal,), daemon=True)
        self._reader.start()

    def _read(self, terminal: int) -> None:
        with suppress(OSError):  # EIO: the last program has closed it
            while data := os.read(terminal, 65_536):
                self._shown += data
        os.close(terminal)

    @property
    def is_colored(self) -> bool:
        return b"\x1b[" in self._shown

    @property
    def output(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m|\r", "", self._shown.decode())


@contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="dl-up-"))  # not tmp_path: PostgreSQL's user could not enter it
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def home() -> Iterator[Path]:
    with folder() as made:
        yield made


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    """One that is up, for the tests that leave it so."""
    with folder() as home, closing(Farm(home, free_port())) as farm:
        farm.wait_up()
        yield farm


MINE = """
from dataloader.pipelines import register

@register("mine")
def mine(args):
    return {"hidden": __import__("logging").__file__}
"""


def test_a_person_at_a_terminal_reads_lines_and_the_banner_last(home: Path) -> None:
    """Their module lies in the current folder, in which no file hides one of the standard library."""
    (home / "mine.py").write_text(MINE)
    for name in ("logging.py", "queue.py", "psycopg.py"):
        (home / name).write_text("raise SystemExit('taken for another module')")
    settings = {"DL_PIPELINES": "mine", "DL_DRAIN_SECS": "3", "TZ": "Asia/Tokyo", "PYTHONPATH": ""}
    with closing(OnTerminal(home, free_port(), **settings)) as farm:
        until(lambda: "Ctrl-C, or: kill" in farm.output or farm.process.poll() is not None)
        start, banner = farm.output.split("\ndataloader is up\n")
        warned, _, programs = start.partition("supervisor.started")
        assert "dataloader up: warning: settings: DL_DRAIN_SECS is no setting; DL_DRAIN_SEC may be meant" in warned
        assert "worker.started" in programs
        assert "reaper.started" in start
        assert start.count("everybody on this machine may trigger") == 1
        assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\+09:00 \[info", start, re.MULTILINE)
        assert "load.cbr.rates, load.csv, load.database, load.files, " in banner
        assert "load.postgres, mine, noop, run.command" in banner
        assert "Asia/Tokyo" in banner
        job_id = farm.trigger(task="mine", args={})
        until(lambda: farm.status(job_id) == "succeeded")
        assert "taken for another" not in farm.output
        assert farm.is_colored
        until(lambda: "worker.job.finished" in farm.output)
        logs = home / "log"  # a file is made when there is a line for it
        until(lambda: any(job_id in log.read_text() for log in logs.glob("metrics.log")))
        until(lambda: any("/jobs/trigger" in log.read_text() for log in logs.glob("audit.log")))
        assert farm.stop(signal.SIGINT) == 0
        assert not re.search(r"^\{|job\.run|http\.request|request\.(begin|end)", farm.output, re.MULTILINE)


VERSIONS = """
import dataloader.pipelines
import helping
@dataloader.pipelines.register("versioned")
def versioned(args):
    return helping.VERSION
"""


def version(farm: Farm) -> object:
    job_id = farm.trigger(task="versioned", args={})
    until(lambda: farm.status(job_id) == "succeeded")
    return call(farm.port, f"/api/v1/jobs/{job_id}/result")["result"]


def test_a_change_of_any_own_module_brings_workers_with_the_new_code(home: Path) -> None:
    """A module that a pipeline imports counts too; broken code is named and changes nothing."""
    (home / "versions.py").write_text(VERSIONS)
    helping = home / "helping.py"
    helping.write_text("VERSION = 1\n")
    settings = {"DL_PIPELINES": "versions", "PYTHONPATH": "", "NO_COLOR": "1"}
    with closing(OnTerminal(home, free_port(), words=("--reload",), **settings)) as farm:
        farm.wait_up()
        assert version(farm) == 1
        helping.write_text("VERSION = 2\n")
        until(lambda: "dataloader up: helping.py changed: new workers start" in farm.output)
        until(lambda: version(farm) == 2)
        helping.write_text("VERSION = \n")
        until(lambda: "helping.py changed, and the workers go on with the code of before" in farm.output)
        assert "SyntaxError" in farm.output
        assert version(farm) == 2
        helping.write_text("VERSION = 3\n")
        until(lambda: version(farm) == 3)
        assert not farm.is_colored


@pytest.mark.longest
def test_from_nothing_to_finished_jobs_over_a_stop_a_kill_and_a_drain(home: Path) -> None:
    """Three starts in one folder: each finds the rows of the one before."""
    port = free_port()
    with closing(Farm(home, port)) as first:
        first.wait_up()
        job_id = first.trigger()
        until(lambda: first.status(job_id) == "succeeded")
        children = first.children()
        assert first.stop(signal.SIGTERM, signal.SIGINT, signal.SIGTERM) == 0, first.output
        assert have_ended(children)
        assert first.output.rstrip().endswith("dataloader up: stopped")
    with closing(Farm(home, port)) as second:
        second.wait_up()
        assert second.status(job_id) == "succeeded"
        later = second.trigger(available_at=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
        children = second.children()
        second.process.kill()
        second.process.wait()
        with closing(Farm(home, port)) as third:
            third.wait_up()
            until(lambda: have_ended(children))
            assert third.status(later) == "queued"
            running = third.trigger(args={"sleep1": 2})
            until(lambda: third.status(running) in ("running", "succeeded"))
            assert third.stop() == 0
            finished = [line for line in third.output.splitlines() if running in line and '"succeeded"' in line]
            assert finished, third.output


def test_what_it_prints_can_be_pasted_and_a_second_one_is_refused(farm: Farm, home: Path) -> None:
    pasted = next(line for line in farm.output.splitlines() if "try it" in line).split(maxsplit=2)[2]
    done = subprocess.run(pasted, shell=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["status"] in ("queued", "running"), done.stderr
    same = Path(farm.child("postgres").cmdline()[2]).parents[1]
    in_use = f"is in use by another program (process {farm.process.pid})"
    for folder, port, words in (
        (same, free_port(), in_use),
        (home, farm.port, "is taken by another program"),
    ):
        with closing(Farm(folder, port)) as second:
            assert second.process.wait(60) == 1
            assert words in second.output
    assert [made.name for made in home.iterdir()] == ["up.lock"], "nothing is started"
    assert farm.succeeds()


def test_programs_that_die_are_started_again(farm: Farm) -> None:
    titles = {"api": "gunicorn", "workers": "supervisor", "reaper": "reaper"}
    until(lambda: all(is_there(farm, title) for title in titles.values()))
    killed = [farm.child(title) for title in titles.values()]
    ended = [*killed, *itertools.chain(*(each.children(recursive=True) for each in killed))]
    on_all(psutil.Process.kill, killed)
    until(lambda: have_ended(ended))  # orphans of the API answer for a moment yet
    for name, title in titles.items():
        until(lambda name=name: f"{name} was ended by SIGKILL" in farm.output)
        until(lambda title=title: is_there(farm, title))
    until(farm.succeeds)
    farm.child("postgres").kill()
    until(lambda: "PostgreSQL was ended by SIGKILL" in farm.output)
    until(farm.succeeds)


def is_there(farm: Farm, title: str) -> bool:
    try:
        return farm.child(title).is_running()
    except (StopIteration, psutil.Error):
        return False


def test_a_program_that_cannot_start_ends_it_all(home: Path) -> None:
    (home / "moody.py").write_text("import sys\nif 'check' not in sys.argv: raise ValueError('not in the mood')")
    with closing(Farm(home, free_port(), DL_PRELOAD="moody")) as farm:
        until(lambda: farm.process.poll() is not None)
        assert farm.process.returncode == 78
        assert "workers cannot start with these settings" in farm.output
        assert "DL_PRELOAD: moody cannot be imported: not in the mood" in farm.output


def test_a_configured_database_is_used_and_its_password_not_shown(home: Path, own_db: str) -> None:
    with closing(Farm(home, free_port(), DL_DB_DSN=f"{own_db} password=hush-hush")) as farm:
        farm.wait_up()
        assert farm.succeeds()
        assert not (home / "postgres").exists()
        assert not any("hush-hush" in arg for child in farm.children() for arg in child.cmdline())
        assert farm.stop() == 0
        assert "hush-hush" not in farm.output


ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]", "::1": "[::1]", "10.0.0.7": "10.0.0.7"}


def test_the_queue_and_address_are_said_where_they_are_not_the_defaults(home: Path) -> None:
    plain = config.load(_env_file=None, dl_home=home, app_port=8081, app_host="0.0.0.0", workers_json=())
    assert " trigger noop --args " in up.banner(plain, "", "")
    for host, address in ADDRESSES.items():
        other = config.load(_env_file=None, dl_home=home, app_host=host, app_port=8082, workers_json=[{"queue": "q"}])
        assert other.own_url == f"http://{address}:8082"
        assert f" trigger noop --queue q --url {shlex.quote(other.own_url)}" in up.banner(other, "", "")


def test_what_a_person_has_set_stays_so_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LOCAL", "METRIC_PATH", "AUDIT_LOG_PATH", "TIMEZONE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    settings = config.load(_env_file=None, dl_home="/h", local=False, metric_path="/m", timezone="Asia/Tokyo")
    environment = up.environment_of_programs(settings, "dbname=x", is_terminal=True)
    assert [environment.get(name) for name in names] == [None, None, "/h/log", None]


def test_a_check_that_cannot_be_made_is_no_reason_not_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)")
    report = up._check(os.environ | {"PYTHONPATH": str(tmp_path)}, SimpleNamespace(received=set()))  # type: ignore[arg-type]
    assert (report, up._print_findings(report)) == (None, "")
    assert "`dataloader check` ended with status 3" in capsys.readouterr().err
