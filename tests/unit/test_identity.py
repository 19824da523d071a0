"""A worker's name proves that the process is gone, or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from dataloader.farm import process as identity
from dataloader.farm.process import hostname, is_gone, own_name, place, started

NAME = "from dataloader.farm.process import own_name; print(own_name(), flush=True)"


@pytest.fixture(scope="module")
def dead() -> str:
    """The name of a process that has ended, and so has its parent."""
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NAME!r}])"
    done = subprocess.run([sys.executable, "-c", nested], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_process_that_has_ended_is_gone(dead: str) -> None:
    assert is_gone(dead)
    assert not is_gone(own_name())


def test_a_worker_whose_supervisor_lives_is_left_to_its_keeper() -> None:
    done = subprocess.run([sys.executable, "-c", NAME], capture_output=True, text=True, check=True)
    assert not is_gone(done.stdout.strip())


def test_a_zombie_is_gone_and_a_stopped_process_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = f"{hostname()}:{child.pid}:{place()}-{started(child.pid)}-{child.pid}-{started(child.pid)}"
    child.send_signal(19)
    assert not is_gone(name)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(name)
    child.communicate()


@pytest.mark.parametrize(
    "changed",
    [
        lambda name: name.replace(hostname(), "other"),
        lambda name: name.replace(place(), "0" * 12),
        lambda name: name.replace(f"{place()}-", "-"),
        lambda name: f"{hostname()}:4194300:0123456789ab",  # of a plain worker, or of an older one
        lambda name: f"{name}-1",
        lambda name: "",
        lambda name: "x" * 200,
    ],
)
def test_what_is_not_proved_is_not_gone(dead: str, changed: Callable[[str], str]) -> None:
    assert not is_gone(changed(dead))


def test_a_host_that_hides_its_place_proves_nothing(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "place", lambda: "")
    assert not is_gone(dead.replace(place(), ""))
