"""The account of a host: processes share it, dead ones leave nothing, nobody waits long, strangers have no part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataloader.farm import host_account
from dataloader.farm.host_account import Entry, HostAccount, NoAccount, Reservation, default_folder
from dataloader.farm.process import now, started

HOLDS = """
import sys, time
from pathlib import Path
from dataloader.farm.host_account import HostAccount
account = HostAccount(Path(sys.argv[1]))
with account.opened() as book:
    book.entries.append(account.entry("held", 100, 1))
    if sys.argv[2] == "lock":
        print("holds", flush=True)
        sys.stdin.read()
print("entered", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "host"


@pytest.fixture
def account(folder: Path) -> HostAccount:
    return HostAccount(folder)


@pytest.fixture
def other(folder: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Another process that enters a run, and holds the "lock" meanwhile or only the "entry"."""
    begun: list[subprocess.Popen[str]] = []

    def begin(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDS, str(folder), what]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        begun.append(process)
        assert process.stdout
        assert process.stdout.readline()
        return process

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def entered(account: HostAccount) -> list[str]:
    with account.opened() as book:
        return [entry.task for entry in book.entries]


def test_processes_share_the_account(account: HostAccount, other: Callable[[str], subprocess.Popen[str]]) -> None:
    with account.opened() as book:
        book.entries.append(account.entry("ours", 50, 0))
    process = other("entry")
    with account.opened() as book:
        assert [(entry.pid, entry.task) for entry in book.entries] == [(os.getpid(), "ours"), (process.pid, "held")]


def test_a_dead_process_has_no_entry(account: HostAccount, other: Callable[[str], subprocess.Popen[str]]) -> None:
    process = other("entry")
    assert entered(account) == ["held"]
    process.kill()
    process.wait()
    assert entered(account) == []


def test_a_process_that_has_the_number_of_a_dead_one_is_another(account: HostAccount) -> None:
    with account.opened() as book:
        book.entries.append(Entry(os.getpid(), 1, "of before", 50, 0))
    assert entered(account) == []


def test_a_stopped_holder_of_the_lock_stops_nobody_for_long(
    account: HostAccount, other: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = other("lock")
    process.send_signal(signal.SIGSTOP)
    began = now()
    with pytest.raises(NoAccount, match=r"another process has held the lock of .*host/account for 0.1 s"):
        entered(account)
    assert now() < began + 5
    process.kill()
    process.wait()
    assert entered(account) == []  # its change was not written


def test_what_fails_changes_nothing(account: HostAccount) -> None:
    def fail() -> None:
        with account.opened() as book:
            book.entries.append(account.entry("ours", 50, 0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert entered(account) == []


def test_an_account_that_is_removed_is_made_anew(account: HostAccount, folder: Path) -> None:
    """The clean-up of a folder for everybody may do that; all must then use the new one."""
    assert entered(account) == []
    (folder / "account").unlink()
    with account.opened() as book:
        book.entries.append(account.entry("ours", 50, 0))
    assert entered(HostAccount(folder)) == ["ours"]


@pytest.mark.parametrize("line", ["", "no JSON", "[1]", '{"entries": [[1]]}', '{"reservation": [1]}', '{"entries": 5}'])
def test_a_broken_line_is_an_empty_book(account: HostAccount, folder: Path, line: str) -> None:
    assert entered(account) == []
    (folder / "account").write_text(f"{line}\nmore")
    assert entered(account) == []


def test_a_short_book_over_a_long_one_is_whole(account: HostAccount) -> None:
    with account.opened() as book:
        book.entries += [account.entry(f"task {number}", 50, 0) for number in range(40)]
    with account.opened() as book:
        del book.entries[1:]
    assert entered(account) == ["task 0"]


def test_a_reservation_ends_by_itself(account: HostAccount) -> None:
    with account.opened() as book:
        book.reservation = Reservation("big", 500, 0, now() + 60)
    with account.opened() as book:
        assert book.reservation is not None
        book.reservation = book.reservation._replace(until=now() - 0.001)
    with account.opened() as book:
        assert book.reservation is None


def test_it_tells_that_somebody_else_has_changed_it(account: HostAccount, folder: Path) -> None:
    assert not account.has_changed()
    entered(account)
    assert not account.has_changed()
    time.sleep(0.02)  # the file's clock goes by 4 ms
    other = HostAccount(folder)
    entered(other)
    assert not account.has_changed()
    with other.opened() as book:
        book.entries.append(other.entry("theirs", 50, 0))
    assert account.has_changed()


def test_the_folder_is_for_its_owner_alone(account: HostAccount, folder: Path) -> None:
    entered(account)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "account").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_may_enter_is_refused(account: HostAccount, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(NoAccount, match=r"should be a folder of user .* with mode 0700; it is of user .* mode 0770"):
        entered(account)
    assert not [*folder.iterdir()]


def test_a_folder_of_somebody_else_is_refused(
    account: HostAccount, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NoAccount, match="should be a folder of user"):
        entered(account)


def test_no_link_is_followed(account: HostAccount, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoAccount, match="cannot be opened"):
        entered(account)
    folder.unlink()
    folder.mkdir(mode=0o700)
    (tmp_path / "precious").write_text("precious")
    (folder / "account").symlink_to(tmp_path / "precious")
    with pytest.raises(NoAccount, match="cannot be opened"):
        entered(account)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_all_farms_of_a_user_find_the_same_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_account, "SHARED", (tmp_path / "no", tmp_path))
    assert default_folder() == tmp_path / f"dataloader-{os.geteuid()}"


def test_a_process_that_is_gone_has_no_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert started(process.pid) is None, "a zombie"
    process.wait()
    assert started(process.pid) is None
    assert (started(os.getpid()) or 0) > 0
