"""Hosts that lack something: each program undoes what it can at its start, and refuses the rest in a line, with 78."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from farming import Farm, answers, ended_lines, free_port, until

# Commands that change what a program inherits, and then execute it.
BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD})
os.execvp(sys.argv[1], sys.argv[1:])
"""
WITH_BLOCKED_SIGNALS = [sys.executable, "-c", BLOCKED]
MOUNTED = ["unshare", "--mount", "sh", "-c"]
PROC_OF_PROCESSES = [*MOUNTED, 'mount -t proc -o subset=pid proc /proc && exec "$@"', "sh"]
# Not hidden: the program itself may be in one of the two.
READ_ONLY = "for each in /tmp /var/tmp; do mount --bind $each $each && mount -o remount,bind,ro $each; done && cd /proc"
NO_TMP = [*MOUNTED, f'{READ_ONLY} && exec "$@"', "sh"]
NO_TMP_NOR_SHM = [*MOUNTED, f'{READ_ONLY} && mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"', "sh"]


def may_mount() -> bool:
    """Whether this user may mount file systems that nobody else sees."""
    return bool(shutil.which("unshare")) and subprocess.run([*PROC_OF_PROCESSES, "true"], check=False).returncode == 0


mounts = pytest.mark.skipif(not may_mount(), reason="needs root and unshare(1)")


def files(soft: int, hard: int) -> list[str]:
    return ["prlimit", f"--nofile={soft}:{hard}", "--"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_workers_that_inherit_blocked_signals_reload_and_stop(farm: Farm, number: signal.Signals) -> None:
    program = farm.ready(1, before=WITH_BLOCKED_SIGNALS)
    program.signal(signal.SIGHUP)
    program.logged("worker.started", 2)
    program.logged("supervisor.worker.exited")
    program.signal(number)
    assert program.process.wait(30) == 0


@pytest.mark.parametrize("name", ["reaper", "api --processes 1", "up"])
def test_other_programs_that_inherit_blocked_signals_stop(farm: Farm, name: str) -> None:
    port = free_port()
    program = farm.start(name, before=WITH_BLOCKED_SIGNALS, app_port=port)
    until(lambda: program.events("reaper.started") if name == "reaper" else answers(port), name)
    assert program.stop(40) == 0


@pytest.mark.parametrize(("workers", "soft", "hard"), [(1, 64, 4_096), (3, 108, 108)])
def test_a_low_soft_limit_of_open_files_is_raised(farm: Farm, workers: int, soft: int, hard: int) -> None:
    farm.ready(workers, before=files(soft, hard))
    farm.succeeds(*(farm.enqueue("noop") for _ in range(20)))


FEW_FILES = "the limit of open files is {}, and {}: raise it by `ulimit -n`"
NO_MEMINFO = "/proc/meminfo cannot be read (No such file or directory), and workers need"
NO_PLACE = "no folder for temporary files can be written to: mount a tmpfs at /tmp or /dev/shm, or set TMPDIR"
REFUSED = [  # the program, the command that executes it, and the begin of the line with which it refuses to start
    ("workers", files(64, 80), FEW_FILES.format(80, "workers need 100")),
    ("up", files(64, 80), FEW_FILES.format(80, "workers need 100")),
    ("api", files(64, 64), FEW_FILES.format(64, "the API needs 256")),
    *(pytest.param(name, PROC_OF_PROCESSES, NO_MEMINFO, marks=mounts) for name in ("workers", "up")),
    *(pytest.param(name, NO_TMP_NOR_SHM, NO_PLACE, marks=mounts) for name in ("api", "up")),
]


@pytest.mark.parametrize(("name", "before", "words"), REFUSED)
def test_what_a_program_lacks_is_named_in_a_line_and_nothing_is_started(
    farm: Farm, name: str, before: Sequence[str], words: str
) -> None:
    program = farm.start(name, workers=1, before=before)
    assert program.process.wait(60) == 78, program.log.read_text()
    lines = ended_lines(program.log)
    assert lines[0].startswith(f"dataloader: {words}")
    assert all(line.startswith("dataloader: ") for line in lines), lines


def findings_of_check(farm: Farm, **settings: Any) -> list[dict[str, str]]:
    """The findings of `dataloader check`, which refuses these settings."""
    program = farm.start("check --json", **settings)
    assert program.process.wait(60) == 78
    return list(json.loads(program.log.read_text())["findings"])


@mounts
def test_check_names_all_that_the_host_lacks(farm: Farm) -> None:
    before = [*files(200, 200), *PROC_OF_PROCESSES, *NO_TMP_NOR_SHM]
    findings = findings_of_check(farm, before=before, app_host="203.0.113.1")
    # The database's socket may be in the hidden /tmp: only the findings about the host are judged.
    found = [each["what"] for each in findings if each["about"] == "host"]
    words = [
        "/proc/meminfo cannot be read",
        "the limit of open files is 200",
        "no folder for temporary files",
        "cannot listen on 203.0.113.1 port",
    ]
    assert all(any(what.startswith(begin) for what in found) for begin in words), found
    assert len(found) == len(words)


@mounts
def test_an_api_without_a_folder_for_temporary_files_uses_memory(farm: Farm) -> None:
    port = free_port()
    assert farm.api(port, before=NO_TMP).stop(40) == 0


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize("host", ["::", "[::1]"])
def test_an_api_listens_on_ipv6_in_every_spelling(farm: Farm, host: str) -> None:
    port = free_port()
    program = farm.start("api --processes 1", app_host=host, app_port=port)
    until(lambda: answers(port, host="::1"), "the API")
    asked = farm.start("queues", app_host=host, app_port=port)  # the command's own default of the URL
    assert asked.process.wait(30) == 0, asked.log.read_text()
    assert program.stop(40) == 0


DIES_IN_TURN = """
import os, signal
from pathlib import Path
from dataloader.pipelines import on_farm_start, on_worker_start

tries = Path(__file__).with_name("tries")
number = len(tries.read_text()) if tries.exists() else 0
tries.write_text("x" * (number + 1))
if number == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
if number == 1:
    os._exit(0)

@on_farm_start
def of_farm():
    if number == 2:
        os.abort()

@on_worker_start
def of_worker():
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_module_that_ends_its_worker_is_named_and_tried_ever_more_rarely(farm: Farm) -> None:
    """At its import or in a hook."""
    (farm.folder / "boom.py").write_text(DIES_IN_TURN)
    program = farm.start(workers=1, dl_pipelines="farm_pipelines,boom")
    failed = program.logged("supervisor.start.failed", 4)
    assert [(each["pause_sec"], each["calling"]) for each in failed] == [
        (0.5, "import of boom"),
        (1.0, "import of boom"),
        (2.0, "on_farm_start boom.of_farm"),
        (4.0, "on_worker_start boom.of_worker"),
    ]
    assert program.stop() == 0


def test_check_and_up_name_a_module_that_ends_its_process(farm: Farm) -> None:
    (farm.folder / "boom.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    named = "DL_PIPELINES: the process that imports boom was ended by SIGSEGV"
    findings = findings_of_check(farm, dl_pipelines="boom,farm_pipelines")
    (wrong,) = [each["what"] for each in findings if each["level"] == "error"]
    assert wrong.startswith(named)
    up = farm.start("up", app_port=free_port(), dl_pipelines="boom")
    assert up.process.wait(60) == 78
    assert named in up.log.read_text()
    assert not up.events("supervisor.started"), "nothing is started"


NAMED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.unshare(0x04000000)  # CLONE_NEWUTS
name = b'h\\xff"x:y\\n z'
assert not libc.sethostname(name, len(name))
os.execvp(sys.argv[1], sys.argv[1:])
"""


@mounts
def test_a_host_may_have_any_name(farm: Farm) -> None:
    farm.ready(1, before=[sys.executable, "-c", NAMED])
    farm.works()
    (names,) = farm.rows("SELECT payload->>'worker' FROM dl_job_events WHERE kind = 'picked'")
    assert names[0].startswith('h\ufffd"x:y? z:')


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.06])
def test_a_term_while_the_workers_are_forked_is_not_lost(farm: Farm, free_port: int, delay: float) -> None:
    """Otherwise gunicorn waits all of its graceful timeout, 30 s, for the worker that never heard it."""
    program = farm.start("api --processes 4", app_port=free_port)
    program.logged("Using worker: dataloader.api.server.slow_clients.BufferingWorker")
    time.sleep(delay)  # into the forks, at different places
    program.signal(signal.SIGTERM)
    assert program.process.wait(28) == 0
