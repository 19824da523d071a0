"""Another user of the same machine can do no harm to `up`, by its files or its sockets."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dataloader import embedded
from dataloader.local.up import Program

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
NOBODY = 65_534
TELL = "import os; from dataloader.farm import process; {}; process.notify_ready()"


def test_no_other_user_can_open_the_lock(tmp_path: Path) -> None:
    """A shared lock of a neighbour would keep `up` from starting."""
    path = tmp_path / "up.lock"
    mask = os.umask(0)
    try:
        embedded.release(embedded.take_lock(path))
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o600


def tell(program: Program, as_user: str = "pass") -> None:
    subprocess.run([sys.executable, "-c", TELL.format(as_user)], env=program._environment, check=True)


@pytest.mark.parametrize("as_user", ["pass", pytest.param(f"os.setuid({NOBODY})", marks=as_root)])
def test_a_program_is_ready_when_it_says_so_itself(as_user: str) -> None:
    program = Program("reaper", dict(os.environ), 1)
    with closing(program._reports):
        assert not program.is_ready
        tell(program, as_user)
        assert program.is_ready == (as_user == "pass")
        tell(program)
        assert program.is_ready


def test_gunicorns_own_report_says_nothing_of_its_application() -> None:
    program = Program("api", dict(os.environ), 1)
    with closing(program._reports), closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as arbiter:
        arbiter.sendto(b"READY=1\nSTATUS=Gunicorn arbiter booted", program._reports.getsockname())
        assert not program.is_ready
        tell(program)
        assert program.is_ready


def test_a_program_may_begin_any_number_of_times() -> None:
    """Each begin is a report, and a program waits while the socket of its reports is full."""
    program = Program("reaper", dict(os.environ), 1)
    most = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    with closing(program._reports), closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as reaper:
        reaper.settimeout(5)
        for _ in range(most + 3):
            reaper.sendto(b"READY=1", program._reports.getsockname())
            assert program.is_ready
