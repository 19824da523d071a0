"""Files of an object store and of an SFTP server, both real ones on this machine, and of a web server."""

import asyncio
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from urllib.request import Request, urlopen

import pytest
from judging import Load, Rows, fails_for_good
from patience import PATIENCE
from serving import Handler, Server

from dataloader import testing
from dataloader.pipelines import Context, PermanentError, csv_table, remote
from dataloader.pipelines.http import Unreachable

pytest.importorskip("pyarrow")
FILES = {
    "a.csv": b"id\n1\n",
    "b.csv": b"id\n2\n",
    "deep/day=2026-03-01/c.csv": b"id\n3\n",
    "_SUCCESS": b"",
    "n.txt": b"?",
}
SECRET = "pa55word"

Fetch = Callable[..., tuple[str, dict[str, bytes]]]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The host and port of an S3 server with the files below bucket/lake."""
    moto = pytest.importorskip("moto.server")
    from pyarrow import fs

    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host = "{}:{}".format(*server.get_host_and_port())
    options = {"endpoint_override": host, "scheme": "http", "region": "us-east-1", "allow_bucket_creation": True}
    system = fs.S3FileSystem(access_key="key", secret_key=SECRET, **options)
    system.create_dir("bucket")
    for name, content in FILES.items():
        with system.open_output_stream(f"bucket/lake/{name}") as file:
            file.write(content)
    yield host
    server.stop()


@pytest.fixture
def lake(s3: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def lake(host: str = s3, folder: str = "bucket/lake", more: str = "") -> None:
        url = f"s3://key:{SECRET}@{folder}?region=us-east-1&endpoint_override={host}&scheme=http{more}"
        monkeypatch.setenv("DL_SOURCE_LAKE", url)

    lake()
    return lake


@pytest.fixture
def fetch(context: Context) -> Fetch:
    """The files, by their paths below the place where the path of the copy is, and their contents."""

    def fetch(path: str, source: str | None = "lake") -> tuple[str, dict[str, bytes]]:
        base = remote.folder_of(context)

        def ended() -> Iterator[Any]:
            yield (yield from remote.fetched(path, source, replace(context, data_dir=base)))

        *_, copy = ended()
        found = {str(file.relative_to(base)): file.read_bytes() for file in base.rglob("*") if file.is_file()}
        return copy, found

    return fetch


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a.csv", ["a.csv"]),
        ("*.csv", ["a.csv", "b.csv"]),
        ("deep", ["deep/day=2026-03-01/c.csv"]),
        ("**/*.csv", ["a.csv", "b.csv", "deep/day=2026-03-01/c.csv"]),
        ("deep/*/c.csv", ["deep/day=2026-03-01/c.csv"]),
    ],
)
@pytest.mark.parametrize("store", ["lake", "azure"])
def test_files_folders_and_globs_are_fetched(
    request: pytest.FixtureRequest, fetch: Fetch, store: str, path: str, names: list[str]
) -> None:
    request.getfixturevalue(store)
    assert fetch(path) == (path, {name: FILES[name] for name in names})
    with pytest.raises(PermanentError, match="the source lake has no such file"):
        fetch("nothing.csv")


def test_files_of_google_are_fetched(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    host = f"127.0.0.1:{server._api._httpd.server_port}"
    try:
        for name in ("a.csv", "b.csv", "n.txt"):  # the emulator takes no empty file
            url = f"http://{host}/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(f'lake/{name}', safe='')}"
            urlopen(Request(url, FILES[name], {"Content-Type": "text/csv"})).close()
        monkeypatch.setenv("DL_SOURCE_LAKE", f"gs://anonymous@bucket/lake?scheme=http&endpoint_override={host}")
        assert fetch("*.csv") == ("*.csv", {name: FILES[name] for name in ("a.csv", "b.csv")})
        with pytest.raises(PermanentError, match="the source lake has no such file"):
            fetch("nothing.csv")
    finally:
        server.stop()


class Blobs(Handler):
    """The requests of pyarrow to an endpoint of Azure's blobs: a list by prefix, a blob's properties, its bytes."""

    protocol_version = "HTTP/1.1"
    blobs: ClassVar = {f"lake/{name}": content for name, content in FILES.items()}
    facts: ClassVar = {"Last-Modified": "Sat, 31 Jan 2026 10:00:00 GMT", "Etag": '"0x1"'}
    more: ClassVar = {"x-ms-blob-type": "BlockBlob", "x-ms-server-encrypted": "true"}  # pyarrow aborts without these
    more["x-ms-creation-time"] = facts["Last-Modified"]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked, name = dict(parse_qsl(url.query)), unquote(url.path).removeprefix("/account/container").strip("/")
        if asked.get("sig") != SECRET:
            self.answer(403, b"", {"x-ms-error-code": "AuthenticationFailed"})
        elif asked.get("action") == "getAccessControl":
            self.answer(400, b"", {"x-ms-error-code": "HierarchicalNamespaceNotEnabled"})
        elif asked.get("comp") == "list":
            found = self._list(asked.get("prefix", ""), asked.get("delimiter"))
            self.answer(200, found, {"Content-Type": "application/xml"})
        elif (content := self.blobs.get(name)) is None:
            self.answer(404, b"", {"x-ms-error-code": "BlobNotFound"})
        elif span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-ms-range", "")):
            piece = content[int(span[1]) : int(span[2]) + 1]
            place = {"Content-Range": f"bytes {span[1]}-{int(span[1]) + len(piece) - 1}/{len(content)}"}
            self.answer(206, piece, self.facts | self.more | place)
        else:
            self.answer(200, content, self.facts | self.more)

    do_HEAD = do_GET

    def _list(self, prefix: str, delimiter: str | None) -> bytes:
        blobs, folders = "", set()
        for name, content in self.blobs.items():
            inner, folder, _ = name.removeprefix(prefix).partition(delimiter or "\0")
            if name.startswith(prefix) and folder:
                folders.add(f"<BlobPrefix><Name>{prefix}{inner}/</Name></BlobPrefix>")
            elif name.startswith(prefix):
                facts = "".join(f"<{key}>{value}</{key}>" for key, value in self.facts.items())
                facts += f"<Content-Length>{len(content)}</Content-Length><BlobType>BlockBlob</BlobType>"
                blobs += f"<Blob><Name>{name}</Name><Properties>{facts}</Properties></Blob>"
        found = f"<Blobs>{blobs}{''.join(sorted(folders))}</Blobs><NextMarker />"
        return f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults>{found}</EnumerationResults>'.encode()


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Name such an endpoint `lake`, with this signature of a SAS token."""
    server = Server(Blobs)

    def named(signature: str = f"&sv=2026-01-01&sp=rl&sig={SECRET}") -> None:
        url = f"abfs://account@127.0.0.1:{server.server_port}/container/lake?enable_tls=false{signature}"
        monkeypatch.setenv("DL_SOURCE_LAKE", url)

    named()
    yield named
    server.close()


@pytest.mark.parametrize(
    ("signature", "error"),
    [("&sv=2026-01-01&sig=canary", "AuthenticationFailed"), ("", "AuthenticationException")],
)
def test_no_error_of_azure_shows_a_signature(
    azure: Callable[..., None], fetch: Fetch, signature: str, error: str
) -> None:
    azure(signature)
    with pytest.raises(Unreachable, match=f"the source lake cannot be read: {error}") as caught:
        fetch("a.csv")
    assert "canary" not in str(caught.getrepr(style="short"))


@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.usefixtures("lake")
def test_a_cancelled_job_leaves_no_copies(job: Load, tmp_path: Path, step: int) -> None:
    args = {"source": "lake", "path": "*.csv", "table": "t", "key": ["id"], "batch_rows": 1}
    assert job("load.files", args, cancel_at=step).status == "canceled"
    assert [*tmp_path.rglob("*.csv")] == []


@pytest.mark.usefixtures("lake")
def test_what_was_fetched_is_not_fetched_again_unless_it_has_changed(fetch: Fetch, context: Context) -> None:
    fetch("a.csv")
    copy = remote.folder_of(context) / "a.csv"
    before = copy.stat()
    fetch("a.csv")
    assert copy.stat().st_ino == before.st_ino
    copy.unlink()
    fetch("a.csv")  # as a run on another machine
    assert copy.stat().st_mtime_ns == before.st_mtime_ns
    copy.write_bytes(b"id\n9\n")
    assert fetch("a.csv")[1] == {"a.csv": FILES["a.csv"]}
    (copy.parent / "old").mkdir()
    (copy.parent / "old/gone.csv").write_bytes(b"id\n8\n")  # of an earlier run, and no longer at the source
    assert fetch("**/*.csv")[1].keys() == {"a.csv", "b.csv", "deep/day=2026-03-01/c.csv"}
    remote.drop(context)
    assert not copy.exists()


@pytest.mark.parametrize(
    ("path", "source", "error"),
    [
        ("none.csv", "lake", "path: none.csv: the source lake has no such file"),
        ("*.parquet", "lake", "the source lake has no such file"),
        ("s3://bucket/lake/a.csv", "lake", "should be below the folder of the source lake, without its URL"),
        ("../a.csv", "lake", "should be below the folder of the source lake"),
        ("s3://bucket/lake/a.csv", None, "source: should name the variable DL_SOURCE_<NAME>"),
    ],
)
@pytest.mark.usefixtures("lake")
def test_a_path_outside_of_the_source_is_refused(fetch: Fetch, path: str, source: str | None, error: str) -> None:
    with pytest.raises(PermanentError, match=error):
        fetch(path, source)


@pytest.mark.parametrize(
    ("how", "error", "kind"),
    [
        ({"more": "&nonsense=1"}, "DL_SOURCE_LAKE is no URL that pyarrow can use", PermanentError),
        pytest.param(
            {"host": "127.0.0.1:1"},
            "the source lake cannot be read: NETWORK_CONNECTION",
            Unreachable,
            marks=pytest.mark.long,
        ),
    ],
)
def test_no_error_shows_a_password(
    lake: Callable[..., None], fetch: Fetch, how: dict[str, str], error: str, kind: type[Exception]
) -> None:
    lake(**how)
    with pytest.raises(kind, match=error) as caught:
        fetch("a.csv")
    assert SECRET not in str(caught.getrepr(style="short"))


@pytest.mark.usefixtures("lake")
def test_a_missing_variable_and_another_kind_of_url_are_named(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_SOURCE_LAKE", f"postgresql://u:{SECRET}@h/d")
    with pytest.raises(PermanentError, match="DL_SOURCE_LAKE should be a URL of s3, gs, abfs"):
        fetch("a.csv")
    monkeypatch.delenv("DL_SOURCE_LAKE")
    with pytest.raises(Unreachable, match="the variable DL_SOURCE_LAKE is not set"):
        fetch("a.csv")


@pytest.fixture
def sftp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A home whose known hosts have the key of an SFTP server with the files below /lake."""
    asyncssh = pytest.importorskip("asyncssh")
    pytest.importorskip("paramiko")
    home, root = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("root")
    for name, content in FILES.items():
        (root / "lake" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "lake" / name).write_bytes(content)
    key = asyncssh.generate_private_key("ssh-ed25519")

    connections: list[Any] = []

    class Server(asyncssh.SSHServer):  # type: ignore[misc,name-defined]
        def connection_made(self, conn: Any) -> None:
            connections.append(conn)

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == ("loader", SECRET)

    def factory(channel: Any) -> Any:
        return asyncssh.SFTPServer(channel, chroot=str(root).encode())

    loop = asyncio.new_event_loop()
    started = asyncssh.listen("127.0.0.1", 0, server_host_keys=[key], server_factory=Server, sftp_factory=factory)
    listener = loop.run_until_complete(started)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = listener.get_port()
    (home / ".ssh").mkdir()
    public = key.export_public_key().decode()
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DL_SOURCE_LAKE", f"sftp://loader:{SECRET}@127.0.0.1:{port}/lake")
    yield str(home)

    async def close() -> None:
        listener.close()
        for connection in connections:
            connection.abort()
            await connection.wait_closed()

    asyncio.run_coroutine_threadsafe(close(), loop).result(PATIENCE)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.usefixtures("sftp")
def test_files_of_sftp_are_fetched(fetch: Fetch) -> None:
    assert fetch("*.csv") == ("*.csv", {name: FILES[name] for name in ("a.csv", "b.csv")})
    assert fetch("deep")[1] == {"deep/day=2026-03-01/c.csv": FILES["deep/day=2026-03-01/c.csv"]}


def test_an_unknown_host_learns_no_password(sftp: str, fetch: Fetch) -> None:
    (Path(sftp) / ".ssh" / "known_hosts").unlink()
    with pytest.raises(
        Unreachable, match=r"source lake: the key of .127.* is not in ~/\.ssh/known_hosts of this worker"
    ):
        fetch("a.csv")


@pytest.mark.usefixtures("lake")
def test_files_of_s3_are_loaded_and_no_copy_is_left(job: Load, rows: Rows, tmp_path: Path) -> None:
    wanted = {"path": "**/*.csv", "source": "lake", "table": "t", "key": ["id"]}
    result = job("load.files", wanted | {"schema_change": "add", "add": {"file": "file"}})
    assert result.status == "succeeded", result.error
    assert rows("SELECT id, file, day::text FROM t ORDER BY id") == [
        (1, "a.csv", None),
        (2, "b.csv", None),
        (3, "deep/day=2026-03-01/c.csv", "2026-03-01"),
    ]
    assert not list(tmp_path.glob(".dl_remote/*"))


@pytest.mark.usefixtures("lake")
def test_an_error_names_the_file_of_s3(job: Load, tmp_path: Path) -> None:
    result = job("load.files", {"path": "a.csv", "source": "lake", "table": "t", "key": ["nr"]})
    columns = "the columns of a.csv: id; is the delimiter right, and skip_rows?"
    assert (result.status, result.error) == ("failed", f"key: nr should be among {columns}")
    assert not list(tmp_path.glob(".dl_remote/*"))


class Web(NamedTuple):
    """A web server with one file, and the requests that it has answered."""

    url: str
    file: Path
    asked: list[str]


@pytest.fixture
def web(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    root, asked = tmp_path_factory.mktemp("web"), list[str]()
    (root / "rates 1.csv").write_bytes(FILES["a.csv"])

    class Answers(SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(root))

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            asked.append(f"{self.path} {int(code)}")

    monkeypatch.setenv("DL_HTTP_PRIVATE_HOSTS", "127.0.0.1")
    with closing(Server(Answers)) as server:
        yield Web(server.url, root / "rates 1.csv", asked)


def test_a_file_of_the_web_is_loaded(job: Load, rows: Rows, tmp_path: Path, web: Web) -> None:
    result = job("load.files", {"path": f"{web.url}/rates%201.csv?day=1", "table": "t", "key": ["id"]})
    assert result.status == "succeeded", result.error
    assert (rows("SELECT id FROM t"), web.asked) == ([(1,)], ["/rates%201.csv?day=1 200"])
    assert not list(tmp_path.glob(".dl_remote/*"))
    result = job("load.files", {"path": f"{web.url}/none.csv", "table": "t", "key": ["id"]})
    fails_for_good(result, "127.0.0.1 answered 404")


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_run_after_another_asks_the_web_only_whether_the_file_has_changed(
    job: Load, rows: Rows, web: Web, monkeypatch: pytest.MonkeyPatch, has_changed: bool
) -> None:
    whole = csv_table.load
    runs: list[int] = []

    def load(*args: Any, **named: Any) -> Any:
        runs.append(1)
        if len(runs) == 1:
            if has_changed:
                web.file.write_bytes(b"id\n5\n")
                os.utime(web.file, (time.time() + 60,) * 2)
            raise RuntimeError("the target went away")
        return whole(*args, **named)

    monkeypatch.setattr(csv_table, "load", load)
    result = job("load.files", {"path": f"{web.url}/rates%201.csv", "table": "t", "key": ["id"]}, max_attempts=2)
    assert (result.status, result.attempts) == ("succeeded", 2)
    assert [request.split()[1] for request in web.asked] == ["200", "200" if has_changed else "304"]
    assert rows("SELECT id FROM t") == [(5 if has_changed else 1,)]


def test_no_error_shows_the_text_of_a_file_system() -> None:
    text = "-".join(["s3://KEY", "SECRET@bucket"])  # the source line below is part of what is formatted
    with pytest.raises(Unreachable) as failed, remote._translated("lake"):
        raise OSError(text)
    assert "SECRET@" not in "".join(traceback.format_exception(failed.value))


def test_a_job_that_has_appended_asks_its_source_no_more(dsn: str) -> None:
    """A download would keep a checkpoint of its own in the place of what was counted."""
    done = {"counts": {"processed": 2, "total": 2, "inserted": 2}}
    args = {"path": "https://127.0.0.1:1/gone.csv", "table": "t", "mode": "append"}
    result = testing.run("load.files", args, dsn=dsn, checkpoint=done)
    assert (result.status, result.result["inserted"]) == ("succeeded", 2)
