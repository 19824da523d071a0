"""The cluster in a server's folder: made once, whole or not at all, and served by a child of ours."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dataloader.embedded import postmaster
from dataloader.embedded.account import TMP, Account, account_for, open_way, private, take_over
from dataloader.embedded.binaries import ENVIRONMENT, find_programs, reachable
from dataloader.embedded.owner import EmbeddedError, dies_with_us

INITDB_WITHIN = 120.0  # seconds
READY_WITHIN = 120.0  # seconds; after a crash the server first replays its log

_INITDB = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale"]

# Programs log in with this ordinary role, which owns the database, as in production. Tests make more databases with it.
OWNER = "dataloader"
_OWNERS_MARK = "dataloader.owner"  # a file of the cluster; an older cluster has none, and belongs to the superuser
_MAKE_OWNER = f"""
CREATE ROLE {OWNER} LOGIN CREATEDB IN ROLE pg_checkpoint;
ALTER DATABASE postgres OWNER TO {OWNER};
"""

_SETTINGS = {
    "listen_addresses": "",  # with `trust`, TCP would give every local user a superuser's session
    "unix_socket_permissions": "0700",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "max_connections": "200",
    "max_parallel_workers_per_gather": "0",  # useless for a job farm, and it fails with a small /dev/shm
    "logging_collector": "on",  # a file for each day of the week, so that the log does not grow forever
    "log_filename": "postgresql-%a.log",
    "log_truncate_on_rotation": "on",
    "log_rotation_age": "1d",
    "log_rotation_size": "0",
}


def start(
    root: Path, settings: Mapping[str, str], pg_bin: Path | None, initdb: Sequence[str], user: str
) -> subprocess.Popen[bytes]:
    """Serve the cluster in `root`, made if missing; after an error no process is left running.

    The parameters and the errors are those of Server.start. The caller holds the folder's lock.
    """
    account = account_for(user)
    open_way(root, account)
    programs = reachable(find_programs(root / "data", pg_bin), root, account)
    _prepare(root, programs, account, initdb)
    places = {
        "unix_socket_directories": str(private(socket_folder(root), account)),
        "log_directory": str(private(root / "log", account)),
    }
    options = [f"--{name}={value}" for name, value in (_SETTINGS | places | dict(settings)).items()]
    with (root / "postgres.log").open("wb") as log:
        process = subprocess.Popen(
            [programs / "postgres", "-D", root / "data", *options],
            env=ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches our process group, and the server must stop last
            preexec_fn=dies_with_us(signal.SIGINT),
            **account.popen(),
        )
    try:
        _wait_ready(root, process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def user_of(root: Path) -> str:
    """The role for programs to log in with."""
    return OWNER if (root / "data" / _OWNERS_MARK).exists() else "postgres"


def socket_folder(root: Path) -> Path:
    """The folder of the socket of the server in `root`: `run` beside the cluster if possible, else one in /tmp."""
    run = root / "run"
    # A socket's path has at most 107 bytes (103 on macOS); a list with commas and quotes must be able to hold it.
    if re.fullmatch(r"[A-Za-z0-9_./+-]{1,80}", str(run)):
        return run
    return TMP / f"dl-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"


def remove_far_socket_folder(root: Path) -> None:
    """Remove the socket's folder if it lies in /tmp, where the user would not look for it after removing `root`."""
    run = socket_folder(root)
    if run.parent != root:
        shutil.rmtree(run, ignore_errors=True)


def _prepare(root: Path, programs: Path, account: Account, options: Sequence[str]) -> None:
    """Make the cluster, or make `account` the owner of the existing one and end the server left in it."""
    data = root / "data"
    if data.exists():
        take_over(data, account)
        postmaster.end_leftover(data)
        return
    # Made under another name, so that a kill here leaves no half-made cluster.
    shutil.rmtree(root / "new", ignore_errors=True)
    new = private(root / "new", account)
    _run(account, [str(programs / "initdb"), "-D", str(new), *_INITDB, *options])
    single = ["--single", "-D", str(new), "-c", "exit_on_error=on", "-c", "log_min_messages=error", "postgres"]
    _run(account, [str(programs / "postgres"), *single], _MAKE_OWNER)
    (new / _OWNERS_MARK).touch(mode=0o600)
    os.chown(new / _OWNERS_MARK, account.uid, account.gid)
    new.rename(data)


def _run(account: Account, command: Sequence[str], said: str = "") -> None:
    """Run a program of PostgreSQL to its end, with `said` as its stdin."""
    done = subprocess.run(
        command,
        env=ENVIRONMENT,
        cwd="/",  # the account may not enter our working folder
        input=said.encode(),
        capture_output=True,
        timeout=INITDB_WITHIN,
        check=False,
        start_new_session=True,
        preexec_fn=dies_with_us(signal.SIGTERM),
        **account.popen(),
    )
    if done.returncode:
        raise EmbeddedError(f"{Path(command[0]).name} failed: {done.stderr.decode(errors='replace').strip()}")


def _wait_ready(root: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while not postmaster.is_ready(root / "data", process.pid):
        if process.poll() is not None:
            raise EmbeddedError(f"PostgreSQL did not start: {_last_words(root)}")
        if time.monotonic() > deadline:
            raise EmbeddedError(f"PostgreSQL is not ready after {READY_WITHIN:g} s: {_last_words(root)}")
        time.sleep(0.01)


def _last_words(root: Path) -> str:
    """The end of the newest log, for an error message."""
    logs = [log for log in [root / "postgres.log", *(root / "log").glob("*.log")] if log.exists()]
    newest = max(logs, key=lambda log: log.stat().st_mtime_ns)
    lines = newest.read_text("utf-8", errors="replace").strip().splitlines()[-5:]
    return "\n  ".join([f"see {newest}, which ends with", *lines])
