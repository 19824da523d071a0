"""The shipped supervisor.conf under a real supervisord: start, restart under load, shutdown."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from farming import Farm, answers, call, environment, free_port, until

from dataloader.config import Settings
from dataloader.farm.supervisor import KEEPER_STOP_SEC

CONF = Path(__file__).parents[2] / "supervisor.conf"
PROGRAMS = ("workers", "reaper", "api")
GRACEFUL_TIMEOUT = 30  # seconds, of `dataloader api`
WORKERS = 2


class Supervisord:
    """A deployment: supervisor.conf as it is and `.env` in a folder, served by supervisord."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.port = free_port()
        shutil.copy(CONF, folder)
        settings |= {"app_host": "127.0.0.1", "app_port": self.port, "dl_home": folder}
        (folder / ".env").write_text("".join(f"{key.upper()}='{value}'\n" for key, value in settings.items()))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with (folder / "log").open("wb") as log:
            self.keeps_log = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "-c", "supervisor.conf"],
            cwd=folder,
            env=environment() | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self.keeps_log.stdin,
            stderr=subprocess.STDOUT,
        )
        assert self.keeps_log.stdin
        self.keeps_log.stdin.close()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def ctl(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "supervisor.supervisorctl", "-c", "supervisor.conf", *command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def states(self) -> dict[str, str]:
        lines = [line.split() for line in self.ctl("status").stdout.splitlines()]
        return {line[0]: line[1] for line in lines if line[0].startswith("farm:")}

    def wait_running(self) -> None:
        running = dict.fromkeys((f"farm:{name}" for name in PROGRAMS), "RUNNING")
        until(lambda: self.states() == running or self.process.poll() is not None, "all programs to run")
        assert self.process.poll() is None, self.log

    def family(self) -> list[psutil.Process]:
        """Supervisord and all that it has started, orphans included: they keep their working directory."""
        return [process for process in psutil.process_iter() if cwd_of(process) == str(self.folder)]

    def wait_healthy(self) -> None:
        """Wait until the API answers; `RUNNING` only says that it has not ended."""
        until(lambda: answers(self.port), "the API to answer")

    def close(self) -> None:
        for process in self.family():
            process.kill()
        self.process.wait()
        self.keeps_log.wait()
        print(self.log)  # shown where a test fails
        shutil.rmtree(self.folder)


def cwd_of(process: psutil.Process) -> str | None:
    """A process's working directory; None when it has gone or is a zombie."""
    try:
        return process.cwd()
    except psutil.Error:
        return None


@pytest.fixture
def supervisord(own_db: str) -> Iterator[Supervisord]:
    """The three programs, on a queue of their own; drains are short."""
    pytest.importorskip("supervisor", reason="supervisor is not installed")
    folder = Path(tempfile.mkdtemp(prefix="dl-sup-"))  # short: a socket's path has an end
    made = Supervisord(
        folder,
        dl_db_dsn=own_db,
        workers_json=json.dumps([{"queue": "q", "concurrency": WORKERS}]),
        dl_heartbeat_sec=1,
        dl_reaper_period_sec=0.5,
        dl_claim_backoff_sec=2,
        dl_drain_sec=3,
        dl_kill_grace_sec=1,
    )
    yield made
    made.close()


@pytest.mark.longest
def test_i10_a_restart_under_load_loses_nothing_and_a_shutdown_leaves_nothing(
    supervisord: Supervisord, farm: Farm
) -> None:
    supervisord.wait_running()
    supervisord.wait_healthy()
    new = {"queue": "q", "task": "noop", "lock_key": "first"}
    first = UUID(call(supervisord.port, "/api/v1/jobs/trigger", new)["job_id"])
    farm.succeeds(first)

    ends_in_time = farm.enqueue("noop", args={"sleep1": 1.5})
    is_handed_back = farm.enqueue("noop", args={"sleep1": 9})  # more than DL_DRAIN_SEC
    farm.wait(ends_in_time, "running", "succeeded")
    farm.wait(is_handed_back, "running")
    before = [process for process in supervisord.family() if process.pid != supervisord.process.pid]
    assert len(before) >= 1 + WORKERS + 1 + 1 + 1 + 2, "supervisor, workers, keeper, reaper, gunicorn and its workers"
    restarted = supervisord.ctl("restart", "farm:*")
    assert restarted.returncode == 0, restarted.stdout
    assert not [process for process in before if cwd_of(process)], "none of the old programs is left"
    supervisord.wait_running()
    farm.succeeds(ends_in_time, is_handed_back)
    assert farm.story(ends_in_time) == ["queued", "picked", "done"]
    assert farm.story(is_handed_back) == ["queued", "picked", "requeue", "picked", "done"]
    supervisord.wait_healthy()

    assert supervisord.ctl("shutdown").returncode == 0
    assert supervisord.process.wait(60) == 0
    assert supervisord.keeps_log.wait(60) == 0, "nobody writes to the log any more"
    assert supervisord.family() == []
    farm.no_sessions()
    assert '"event": "supervisor.draining"' in supervisord.log, "the programs' output comes through"


def test_i10_stop_times_exceed_what_a_stop_may_take() -> None:
    """With the default settings: else supervisord kills what is about to end by itself."""
    conf = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    conf.read(CONF)
    waits = {name: conf.getint(f"program:{name}", "stopwaitsecs") for name in PROGRAMS}
    default = {name: field.default for name, field in Settings.model_fields.items()}
    assert waits["workers"] > default["dl_drain_sec"] + default["dl_kill_grace_sec"] + KEEPER_STOP_SEC
    assert waits["api"] > GRACEFUL_TIMEOUT
    for name in PROGRAMS:
        program = conf[f"program:{name}"]
        assert program["stopsignal"] == "TERM"
        assert program["stopasgroup"] == "false", "each parent tells its children once"
        assert program["killasgroup"] == "true", "what outlives stopwaitsecs must not work beside the next start"
        assert program["autorestart"] == "true"
