"""The embedded PostgreSQL: real servers, each in a folder of its own, with what goes wrong around them."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from farming import have_ended, until

from dataloader import embedded
from dataloader.embedded import EmbeddedError, Server
from dataloader.queue import migrations

GIVEN = os.environ.get("DL_PG_BIN")
PG_BIN = Path(GIVEN) if GIVEN else None
NO_SYNC = ["--no-sync"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")
# xdist's workers have a thread; the child does nothing before its exec or _exit that could dead-lock.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder for a server. Not tmp_path: the server's user could not enter it."""
    folder = Path(tempfile.mkdtemp(prefix="dl-embedded-"))
    folder.chmod(0o755)
    yield folder / "postgres"
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def template() -> Iterator[Path]:
    """A cluster to copy, since making one takes most of a test's time."""
    folder = Path(tempfile.mkdtemp(prefix="dl-embedded-"))
    start(folder).stop()
    yield folder / "data"
    shutil.rmtree(folder)


@pytest.fixture
def made(root: Path, template: Path) -> Path:
    """The folder of a server that has run before, on this machine or on another."""
    shutil.copytree(template, root / "data")
    return root


def start(root: Path, settings: dict[str, str] | None = None, initdb: list[str] = NO_SYNC) -> Server:
    return Server.start(root, {"fsync": "off"} | (settings or {}), PG_BIN, initdb)


def rows(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
        conn.execute("INSERT INTO kept SELECT count(*) FROM kept")
        return [n for (n,) in conn.execute("SELECT n FROM kept ORDER BY n")]


@pytest.mark.parametrize("name", ["Пример", "a blank and a ' and a \""])
def test_rows_survive_a_stop_and_a_second_start_in_any_folder(root: Path, name: str) -> None:
    """A killed initdb has left a folder there, and the server makes it anew."""
    (root / name / "new" / "base").mkdir(parents=True)
    for expected in ([0], [0, 1]):
        with start(root / name) as server:
            assert rows(server.dsn) == expected
            assert embedded.running(root / name) == server.dsn
        assert embedded.running(root / name) is None


def test_an_idle_client_does_not_hold_up_the_stop_and_a_start_that_fails_leaves_nothing(made: Path) -> None:
    with pytest.raises(EmbeddedError, match="shared_buffers"):
        start(made, {"shared_buffers": "plenty"})
    server = start(made)
    with psycopg.connect(server.dsn):
        began = time.monotonic()
        server.stop()
    assert time.monotonic() - began < 30
    assert server.process.returncode == 0
    server.stop()


def test_it_speaks_utf8_and_utc_and_its_role_is_ordinary(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LANG": "xx_XX.KOI8-R", "LC_ALL": "xx_XX", "TZ": "Asia/Tokyo", "PGDATA": "/"}.items():
        monkeypatch.setenv(name, value)
    with start(root, {"max_connections": "17"}) as server, psycopg.connect(server.dsn) as conn:
        shown = "SELECT current_setting(n) FROM unnest(%s::text[]) n"
        names = ["server_encoding", "timezone", "lc_messages", "listen_addresses", "max_connections"]
        assert [v for (v,) in conn.execute(shown, (names,))] == ["UTF8", "UTC", "C", "", "17"]
        for folder in ("run", "data"):
            assert (root / folder).stat().st_mode & 0o777 == 0o700, "other users cannot reach it"
        attributes = "SELECT rolname, rolsuper, rolcreaterole FROM pg_roles WHERE rolname = current_user"
        assert conn.execute(attributes).fetchone() == ("dataloader", False, False)
        migrations.migrate(server.dsn, "public")
        owners = "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relname ~ '^dl_'"
        assert conn.execute(owners).fetchall() == [("dataloader",)]


OWNER = """
import sys, time
from pathlib import Path
from dataloader.embedded import Server
pg_bin = Path(sys.argv[2]) if len(sys.argv) > 2 else None
server = Server.start(Path(sys.argv[1]), pg_bin=pg_bin, initdb=["--no-sync"])
print(server.process.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_a_killed_owner_and_the_next_one_has_the_rows(root: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(root), *([GIVEN] if GIVEN else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        postmaster = psutil.Process(int(owner.stdout.readline()))
        dsn = embedded.running(root)
        assert dsn is not None
        rows(dsn)
        owner.kill()
    until(lambda: have_ended([postmaster]), "the server to end")
    with start(root) as server:
        assert rows(server.dsn) == [0, 1]


def test_a_server_starts_after_whatever_ended_the_one_before(made: Path) -> None:
    """Its owner has forgotten it, another program has its pid now, or it was killed while its sessions go on."""
    leftover = start(made, {"fsync": "on"})
    assert rows(leftover.dsn) == [0]
    embedded.release(leftover.lock)
    with start(made) as server:
        assert leftover.process.wait(60) == 0
        assert rows(server.dsn) == [0, 1]
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        (made / "data" / "postmaster.pid").write_text(f"{other.pid}\n{made / 'data'}\n1\n5432\n{made / 'run'}\n\n\n")
        assert embedded.running(made) is None
        server = start(made, {"fsync": "on"})
        assert rows(server.dsn) == [0, 1, 2]
        assert other.poll() is None
        other.kill()
    session = psycopg.pq.PGconn.connect(server.dsn.encode())
    session.send_query(b"SELECT count(*) FROM generate_series(1, 10000000)")
    server.process.kill()
    server.process.wait()
    server.stop()
    (made / "log" / "newest.log").touch()  # in which the killed one's sessions log their end
    os.utime(made / "log" / "newest.log", (2**32, 2**32))
    with start(made) as again:
        assert rows(again.dsn) == [0, 1, 2, 3]
    session.finish()


@pytest.mark.parametrize(
    ("name", "prepare", "words"),
    [
        ("x" * 90, None, "should have at most 90 bytes and no comma"),
        ("a,b", None, "should have at most 90 bytes and no comma"),
        ("link", lambda root: (root / "run").symlink_to("/etc"), "is not a folder"),
        ("other", lambda root: (root / "data" / "PG_VERSION").write_text("12\n"), "PostgreSQL 12 "),
        ("file", lambda root: (shutil.rmtree(root), root.touch()), "cannot use"),
    ],
    ids=["a long path", "a comma", "a link in place of the sockets' folder", "another major version", "a file"],
)
def test_a_folder_that_cannot_be_used_is_refused_in_words(
    root: Path, name: str, prepare: Callable[[Path], object] | None, words: str
) -> None:
    if prepare:
        (root / name / "data").mkdir(parents=True)
        prepare(root / name)
    with pytest.raises(EmbeddedError, match=words):
        start(root / name)


def test_without_usable_programs_or_a_user_the_error_says_what_to_do(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EmbeddedError, match="DL_PG_BIN: /usr/share does not hold"):
        Server.start(root, pg_bin=Path("/usr/share"))
    with monkeypatch.context() as changed:
        changed.setattr(embedded, "_candidates", lambda: iter(()))
        with pytest.raises(EmbeddedError) as refused:
            Server.start(root)
    assert [way for way in ("pip install", "apt-get", "DL_DB_DSN") if way not in str(refused.value)] == []
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    with pytest.raises(EmbeddedError, match="user id 54321 has no entry"):
        start(root)


@as_root
def test_a_parent_that_the_user_cannot_enter_is_named_and_a_foreign_cluster_taken_over(made: Path) -> None:
    barred = made / "secret"
    barred.mkdir()
    barred.chmod(0o700)
    with pytest.raises(EmbeddedError, match=f"cannot enter {barred}"):
        start(barred / "postgres")
    assert barred.stat().st_mode & 0o777 == 0o700
    for path in (made / "data", *(made / "data").rglob("*")):
        os.chown(path, 54_321, 54_321)
    with start(made) as server:
        assert rows(server.dsn) == [0]


@as_root
def test_a_wheel_out_of_reach_is_copied(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = next(embedded._candidates())
    package = root / "venv" / embedded.WHEEL
    shutil.copytree(installed.parent, package / installed.parent.name, symlinks=True)
    shutil.copytree(installed.parents[2] / f"{embedded.WHEEL}.libs", package.with_name(f"{embedded.WHEEL}.libs"))
    package.parent.chmod(0o700)
    (root / "wheel-0.0.1").mkdir()
    monkeypatch.setattr(embedded, "_candidates", lambda: [package / installed.parent.name / "bin"])
    with Server.start(root, {"fsync": "off"}, initdb=NO_SYNC) as server:
        assert rows(server.dsn) == [0]
        [copy] = root.glob("wheel-*")
        assert Path(psutil.Process(server.process.pid).exe()).is_relative_to(copy)


UNREACHABLE = 77  # an exit status of served_by


@as_root
def test_an_ordinary_user_runs_it_too(root: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    root.mkdir()
    os.chown(root, nobody.pw_uid, nobody.pw_gid)
    # Forked and not executed: that user may not be able to reach this Python.
    if (child := os.fork()) == 0:
        os._exit(served_by(root, nobody))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == UNREACHABLE:
        pytest.skip("that user cannot reach the binaries: this Python is in a folder of root's")
    assert status == 0
    assert (root / "data").stat().st_uid == nobody.pw_uid


def served_by(root: Path, user: pwd.struct_passwd) -> int:
    try:
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        with start(root) as server:
            return 0 if rows(server.dsn) == [0] else 1
    except EmbeddedError as error:
        traceback.print_exc()
        return UNREACHABLE if "no PostgreSQL" in str(error) else 2
    except BaseException:
        traceback.print_exc()
        return 2
