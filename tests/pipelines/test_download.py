"""`load.http`: a file by its URL into the data folder, against a server that breaks off, changes and redirects."""

import fcntl
import gzip
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from judging import Load, fails_for_good
from serving import Handler, Server

from dataloader import config
from dataloader.pipelines import download, http
from dataloader.pipelines.download import Part
from dataloader.testing import Result

CANARY = "canary-31d"
FILE = b"".join(b"%d,some text\n" % n for n in range(50_000))


class Files:
    """A server of one file, with its ETag and ranges, as it is told."""

    def __init__(self, certificate: tuple[str, str] | None = None) -> None:
        self.file, self.etag = FILE, '"v1"'
        self.got: list[tuple[str, dict[str, str]]] = []
        self.sent: list[int] = []  # bytes of each body
        self.breaks_after: list[int] = []  # bytes after which each answer breaks off
        self.answers: dict[str, tuple[int, dict[str, str]]] = {}  # by path, instead of the file
        self.is_chunked = self.has_no_length = False
        self.coding = ""  # Content-Encoding; the file is served as it is
        self.ranges: list[str] = []  # Content-Range of each answer, which is then a 206 of these bytes
        self.ends, self.is_silent = threading.Event(), False
        server = self

        class Answers(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.got.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                self.close_connection = True
                if server.is_silent:
                    server.ends.wait()
                elif special := server.answers.get(self.path):
                    self.answer(special[0], headers=special[1])
                elif self.headers.get("If-None-Match") == server.etag:
                    self.head(304, {})
                else:
                    self.body(self.range())

            def range(self) -> int:
                begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
                return begin if self.headers.get("If-Range") == server.etag else 0

            def head(self, status: int, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def body(self, begin: int) -> None:
                size = len(server.file)
                if begin >= size > 0 and begin:
                    return self.answer(416, headers={"Content-Range": f"bytes */{size}"})
                headers = {"ETag": server.etag} if server.etag else {}
                headers |= {"Content-Encoding": server.coding} if server.coding else {}
                body, status = server.file[begin:], 200
                if begin:
                    headers["Content-Range"], status = f"bytes {begin}-{size - 1}/{size}", 206
                if server.ranges and (named := server.ranges.pop(0)):
                    headers["Content-Range"], status = named, 206
                    first, last = map(int, (re.findall(r"\d+", named) or (0, 12))[:2])
                    body = server.file[first : last + 1]
                size, begin = len(body), 0
                headers |= {"Transfer-Encoding": "chunked"} if server.is_chunked else {}
                headers |= {} if server.is_chunked or server.has_no_length else {"Content-Length": str(size)}
                self.head(status, headers)
                if server.breaks_after:
                    body = body[: server.breaks_after.pop(0)]
                server.sent.append(len(body))
                self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body) if server.is_chunked else body)
                if server.is_chunked and len(body) == size - begin:
                    self.wfile.write(b"0\r\n\r\n")

        self._server = Server(Answers, certificate)
        self.port, self.url = self._server.server_port, f"{self._server.url}/f.csv"

    def close(self) -> None:
        self.ends.set()
        self._server.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A proxy of the environment, which nothing may use; this machine may be asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("DL_HTTP_PRIVATE_HOSTS", "127.0.0.1, localhost")
    monkeypatch.setattr(download, "SAVED_BYTES", 1)
    return monkeypatch


@pytest.fixture
def server() -> Iterator[Files]:
    with closing(Files()) as made:
        yield made


@pytest.fixture
def secure(environment: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Files]:
    """A server behind TLS, whose certificate for localhost is valid here."""
    command = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=DNS:localhost"
    key, certificate = (str(tmp_path / name) for name in ("key.pem", "cert.pem"))
    subprocess.run(["openssl", *command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    environment.setattr(http, "certificates", lambda: ssl.create_default_context(cafile=certificate))
    with closing(Files((certificate, key))) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "in"


@pytest.fixture
def load(job: Load, server: Files, folder: Path) -> Load:
    """Fetch the server's file to `in/f.csv`; one attempt."""

    def load(url: str = "", path: str = "in/f.csv", **how: Any) -> Result:
        return job("load.http", {"url": url or server.url, "path": path}, **({"max_attempts": 1} | how))

    return load


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


WHOLE = {"f.csv", ".f.csv.http"}


@pytest.mark.parametrize("chunked", [False, True])
def test_the_file_comes_whole_and_not_again(load: Load, server: Files, folder: Path, chunked: bool) -> None:
    server.is_chunked = chunked
    result = load()
    assert (result.status, result.result) == ("succeeded", {"changed": True, "bytes": len(FILE), "host": "127.0.0.1"})
    assert ((folder / "f.csv").read_bytes(), files(folder)) == (FILE, WHOLE)
    before = (folder / "f.csv").stat()
    assert load().result == {"changed": False, "bytes": len(FILE), "host": "127.0.0.1"}
    assert (folder / "f.csv").stat() == before
    assert server.sent == [len(FILE)]


@pytest.mark.parametrize("change", ["content", "time", "gone", "note", "url"])
def test_a_file_that_is_not_as_it_was_fetched_is_fetched_again(
    load: Load, server: Files, folder: Path, change: str
) -> None:
    load()
    place = folder / "f.csv"
    match change:
        case "content":
            place.write_bytes(FILE + b"x")
        case "time":
            os.utime(place, (1, 1))
        case "gone":
            place.unlink()
        case "note":
            (folder / ".f.csv.http").write_text("{")
    assert load(server.url + "?other" if change == "url" else "").result["changed"] is True
    assert (place.read_bytes(), files(folder)) == (FILE, WHOLE)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_broken_download_is_continued(load: Load, server: Files, folder: Path, chunked: bool) -> None:
    server.is_chunked = chunked
    server.breaks_after = [200_000, 100_000]
    result = load(max_attempts=1)
    assert (result.status, [run.end for run in result.runs]) == ("succeeded", ["error", "error", "done"])
    assert ((folder / "f.csv").read_bytes(), files(folder)) == (FILE, WHOLE)
    ranges = [headers.get("range") for _, headers in server.got]
    assert ranges[0] is None
    assert ranges[1] == "bytes=200000-"
    assert sum(server.sent) == len(FILE)
    assert "broke the connection" in str(result.runs[0].error)


@pytest.mark.parametrize(("how", "point"), [("crash_at", 3), ("crash_at", "end"), ("drain_at", 3)])
def test_a_killed_run_is_continued(load: Load, server: Files, folder: Path, how: str, point: Any) -> None:
    result = load(**{how: point})
    assert (result.status, len(result.runs), result.result["changed"]) == ("succeeded", 2, True)
    assert ((folder / "f.csv").read_bytes(), files(folder)) == (FILE, WHOLE)
    assert "range" in server.got[1][1] or point == "end"


def test_a_part_with_all_bytes_becomes_the_file(
    load: Load, server: Files, folder: Path, environment: pytest.MonkeyPatch
) -> None:
    put, fails = Part.put_in_place, iter([True])

    def put_in_place(part: Part) -> None:
        if next(fails, False):
            raise OSError("the disk is away")
        put(part)

    environment.setattr(Part, "put_in_place", put_in_place)
    result = load()
    assert (result.status, len(result.runs), server.sent) == ("succeeded", 2, [len(FILE)])
    assert ((folder / "f.csv").read_bytes(), files(folder)) == (FILE, WHOLE)


def test_a_file_that_changes_in_the_middle_is_fetched_from_its_beginning(
    load: Load, server: Files, folder: Path, environment: pytest.MonkeyPatch
) -> None:
    server.breaks_after = [200_000]
    opened, asked = http.get, iter([0])

    def get(*args: Any, **more: Any) -> Any:
        if next(asked, None) is None:
            server.file, server.etag = FILE[::-1], '"v2"'
        return opened(*args, **more)

    environment.setattr(http, "get", get)
    assert load().status == "succeeded"
    assert (folder / "f.csv").read_bytes() == FILE[::-1]
    assert server.got[1][1]["if-range"] == '"v1"'


@pytest.mark.parametrize("etag", ["", 'W/"v1"'])
def test_without_a_strong_etag_a_broken_download_begins_anew(
    load: Load, server: Files, folder: Path, etag: str
) -> None:
    server.etag, server.breaks_after = etag, [200_000]
    result = load(max_attempts=2)
    assert (result.status, result.attempts) == ("succeeded", 2)
    assert [headers.get("range") for _, headers in server.got] == [None, None]
    assert files(folder) == WHOLE
    assert (folder / "f.csv").read_bytes() == FILE


SHORT = ("bytes 0-12/588890", "bytes 0-12/*", "bytes 0-12/13", "none")


@pytest.mark.parametrize("named", SHORT)
def test_a_part_that_was_not_asked_for_is_never_the_file(load: Load, server: Files, folder: Path, named: str) -> None:
    server.ranges = [named, "", named]
    result = load(max_attempts=2)
    assert "another part of the file than the request asks for" in str(result.runs[0].error)
    assert ((folder / "f.csv").read_bytes(), files(folder)) == (FILE, WHOLE)
    server.etag = '"v2"'
    assert load().status == "failed"
    assert (folder / "f.csv").read_bytes() == FILE


SIZE = len(FILE)


@pytest.mark.parametrize(
    ("named", "asked"),
    [
        (f"bytes 200000-200099/{SIZE}", "bytes=200100-"),
        (f"bytes 200000-{SIZE - 2}/{SIZE}", f"bytes={SIZE - 1}-"),
        ("bytes 200000-200099/*", None),
        ("bytes 0-200099/200100", None),
        ("bytes 200000-200099/200050", None),
        ("none", None),
    ],
)
def test_a_rest_that_is_shorter_than_it_was_asked_for_is_not_the_rest(
    load: Load, server: Files, folder: Path, named: str, asked: str | None
) -> None:
    server.breaks_after, server.ranges = [200_000], ["", named]
    result = load(max_attempts=2)
    assert result.status == "succeeded"
    assert ((folder / "f.csv").read_bytes(), files(folder)) == (FILE, WHOLE)
    assert [headers.get("range") for _, headers in server.got] == [None, "bytes=200000-", asked]


def test_a_range_of_an_encoded_file_is_not_the_rest(load: Load, server: Files, folder: Path) -> None:
    server.breaks_after = [200_000]
    first = load(crash_at=3, cancel_at=1)
    server.coding = "gzip"
    assert "another part of the file" in str(load(checkpoint=first.checkpoint).error)
    assert not (folder / "f.csv").exists()


def test_a_connection_that_is_cut_without_a_length_is_seen_behind_tls(load: Load, secure: Files) -> None:
    """The end of such a file is the end of the connection, and TLS says whether the server has ended it."""
    secure.has_no_length, secure.etag = True, ""
    assert "broke the connection" in str(load(secure.url.replace("127.0.0.1", "localhost")).error)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP"])
def test_a_file_that_is_stored_encoded_is_decoded(
    load: Load, server: Files, folder: Path, chunked: bool, coding: str
) -> None:
    server.file = gzip.compress(FILE[:1000]) + gzip.compress(FILE[1000:])
    server.coding, server.is_chunked = coding, chunked
    assert load().result == {"changed": True, "bytes": len(FILE), "host": "127.0.0.1"}
    assert ((folder / "f.csv").read_bytes(), files(folder)) == (FILE, WHOLE)
    assert load().result["changed"] is False


def test_a_broken_download_of_an_encoded_file_begins_anew(load: Load, server: Files, folder: Path) -> None:
    server.file, server.coding, server.breaks_after = gzip.compress(os.urandom(10**6)), "gzip", [200_000]
    assert load(max_attempts=2).attempts == 2
    assert [headers.get("range") for _, headers in server.got] == [None, None]
    assert (folder / "f.csv").read_bytes() == gzip.decompress(server.file)


@pytest.mark.parametrize(
    "file", [gzip.compress(FILE, mtime=0)[:-9], FILE, gzip.compress(FILE, mtime=0)[:-8] + bytes(8), b""]
)
def test_an_encoded_file_that_is_damaged_is_refused(load: Load, server: Files, folder: Path, file: bytes) -> None:
    server.file, server.coding = file, "gzip"
    if file:
        assert "127.0.0.1 sends a damaged file: its gzip data is not valid" in str(load().error)
        assert files(folder) == set()
    else:
        assert load().result["bytes"] == 0


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("coding", ["", "gzip"])
def test_a_file_over_the_bound_is_refused_by_its_size_when_decoded(
    load: Load, server: Files, folder: Path, environment: pytest.MonkeyPatch, chunked: bool, coding: str
) -> None:
    environment.setenv("DL_HTTP_MAX_MB", "1")
    server.coding, server.is_chunked = coding, chunked
    for size, etag in ((2**20, '"v1"'), (2**20 + 1, '"v2"')):
        server.file, server.etag = gzip.compress(bytes(size)) if coding else bytes(size), etag
        result = load(max_attempts=3)
    fails_for_good(result, "DL_HTTP_MAX_MB allows")
    assert ((folder / "f.csv").stat().st_size, files(folder)) == (2**20, WHOLE)


def test_the_part_of_a_run_that_is_alive_is_left_to_it(load: Load, server: Files, folder: Path) -> None:
    first = load(crash_at=3, cancel_at=1)
    assert first.checkpoint is not None
    part = folder / first.checkpoint["part"]
    before = part.read_bytes()
    with part.open("rb+") as stale:
        fcntl.flock(stale, fcntl.LOCK_EX)
        assert load(checkpoint=first.checkpoint).status == "succeeded"
        assert part.read_bytes() == before
    assert (folder / "f.csv").read_bytes() == FILE


def test_a_part_that_is_shorter_than_its_checkpoint_is_not_trusted(load: Load, server: Files, folder: Path) -> None:
    first = load(crash_at=3, cancel_at=1)
    assert first.checkpoint is not None
    os.truncate(folder / first.checkpoint["part"], 10)
    assert load(checkpoint=first.checkpoint).status == "succeeded"
    assert (folder / "f.csv").read_bytes() == FILE


def test_parts_of_ended_jobs_go_after_a_week(load: Load, server: Files, folder: Path) -> None:
    parts = [folder / str((load(crash_at=3, cancel_at=1).checkpoint or {})["part"]) for _ in range(2)]
    os.utime(parts[0], (time.time() - 8 * 86_400,) * 2)
    assert load().status == "succeeded"
    assert [part.exists() for part in parts] == [False, True]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"url": "ftp://h/f"}, "url: should be a URL such as https://example.com/rates.csv"),
        ({"url": "http://h/a b"}, "with %20 for a blank"),
        ({"url": "file:///etc/passwd"}, "url: should be a URL"),
        ({"url": "http://h/a\r\nHost: x"}, "url: should be a URL"),
        ({"url": f"http://u:{CANARY}@127.0.0.1/"}, "url: should have no user and no password"),
        ({"path": "../f.csv"}, "path: ../f.csv should be a file below the data folder"),
        ({"path": "/etc/passwd"}, "path: /etc/passwd should be a file below the data folder"),
        ({"path": "out/f.csv"}, "path: out/f.csv should be a file below the data folder"),
        ({"path": "folder"}, "path: folder is a folder"),
        ({"path": "file/f.csv"}, "path: file/f.csv should have folders before its last /"),
        ({"headers": {}}, "headers: there is no such argument; there are url, path"),
    ],
)
def test_a_wrong_argument_is_named(job: Load, server: Files, tmp_path: Path, args: dict[str, Any], error: str) -> None:
    (tmp_path / "out").symlink_to("/tmp")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    fails_for_good(job("load.http", {"url": server.url, "path": "in/f.csv"} | args), error, CANARY)
    assert server.got == []


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("127.0.0.1", "an address of this machine or of a private network"),
        ("localhost", "an address of this machine or of a private network"),
        ("10.0.0.1", "an address of this machine or of a private network"),
        ("[::1]", "an address of this machine or of a private network"),
        ("[::ffff:127.0.0.1]", "an address of this machine or of a private network"),
        ("2130706433", "an address of this machine or of a private network"),
        ("169.254.169.254", "a link-local address, or that of a metadata service"),
    ],
)
def test_addresses_of_this_network_are_refused(
    load: Load, server: Files, environment: pytest.MonkeyPatch, host: str, kind: str
) -> None:
    environment.setenv("DL_HTTP_PRIVATE_HOSTS", "")
    result = load(f"http://{host}:{server.port}/f.csv", max_attempts=3)
    fails_for_good(result, f"{host.strip('[]')} has {kind}: nothing is sent there")
    assert server.got == []
    assert ("DL_HTTP_PRIVATE_HOSTS" in (result.error or "")) == ("private network" in kind)


def test_link_local_addresses_are_refused_also_of_allowed_hosts(load: Load, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DL_HTTP_PRIVATE_HOSTS", "169.254.169.254")
    assert "nothing is sent there" in str(load("http://169.254.169.254/latest/meta-data/").error)


def test_the_address_that_was_checked_is_the_one_that_is_asked(
    load: Load, server: Files, environment: pytest.MonkeyPatch
) -> None:
    """A name server that tells a public address first and this machine's at the second question reaches nothing."""
    asked: list[str] = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        place = ("127.0.0.1", server.port)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place)] * len(asked)

    environment.setattr(http, "getaddrinfo", look_up)
    assert "nothing is sent there" in str(load(f"http://files.example.com:{server.port}/f.csv").error)
    assert (asked, server.got) == (["files.example.com"], [])


@pytest.mark.parametrize(
    ("location", "error"),
    [
        ("http://169.254.169.254/latest/meta-data/", "169.254.169.254 has a link-local address"),
        ("http://127.0.0.2:1/", "127.0.0.2 has an address of this machine"),
        ("file:///etc/passwd", "redirects to what is no plain URL of http or https"),
        (f"http://u:{CANARY}@127.0.0.1/", "redirects to what is no plain URL of http or https"),
        ("/a", "127.0.0.1 redirects more than 5 times"),
    ],
)
def test_each_redirect_is_checked(load: Load, server: Files, location: str, error: str) -> None:
    server.answers["/a"] = (302, {"Location": location})
    fails_for_good(load(server.url.replace("/f.csv", "/a"), max_attempts=3), error, CANARY)


def test_redirects_are_followed_as_browsers_read_them(load: Load, server: Files, folder: Path) -> None:
    location = "/ж b%20c?x=%D0%B6#part".encode().decode("latin-1")
    server.answers["/a"] = (301, {"Location": location})
    server.answers["/%D0%B6%20b%20c?x=%D0%B6"] = (307, {"Location": f"http://localhost:{server.port}/f.csv"})
    assert load(server.url.replace("/f.csv", "/a")).result["host"] == "localhost"
    assert (folder / "f.csv").read_bytes() == FILE


@pytest.mark.parametrize(
    ("status", "headers", "attempts", "error"),
    [
        (404, {}, 1, "127.0.0.1 answered 404: there is no file for this worker at this address"),
        (401, {}, 1, "127.0.0.1 answered 401"),
        (204, {}, 1, "127.0.0.1 answered 204"),
        (503, {}, 2, "127.0.0.1 answered 503"),
        (429, {"Retry-After": "7"}, 2, "127.0.0.1 answered 429 and asks for 7 s"),
        (200, {"Content-Encoding": "br"}, 1, "127.0.0.1 sends the file encoded, although the request forbids it"),
        (200, {"Content-Encoding": "gzip, gzip"}, 1, "127.0.0.1 sends the file encoded"),
        (200, {"Transfer-Encoding": "gzip, chunked"}, 1, "127.0.0.1 sends the file encoded"),
        (200, {"Content-Length": "99999999999"}, 1, "127.0.0.1 has a file of 99999999999 bytes, and DL_HTTP_MAX_MB"),
    ],
)
def test_another_answer_leaves_the_file_as_it_was(
    load: Load, server: Files, folder: Path, status: int, headers: dict[str, str], attempts: int, error: str
) -> None:
    load()
    server.answers["/f.csv?secret=" + CANARY] = (status, headers)
    result = load(server.url + "?secret=" + CANARY, max_attempts=2)
    assert (result.status, result.attempts) == ("failed", attempts)
    assert error in (result.error or "")
    assert CANARY not in (result.error or "")
    assert (folder / "f.csv").read_bytes() == FILE


@pytest.mark.usefixtures("silence_is_safe")
def test_a_silent_server_does_not_hold_up_a_stop(load: Load, server: Files) -> None:
    server.is_silent = True
    assert load(cancel_at=2).status == "canceled"


def test_silence_is_tried_again(load: Load, server: Files, environment: pytest.MonkeyPatch) -> None:
    environment.setattr(download, "SILENCE_SEC", 0.3)
    server.is_silent = True
    result = load(max_attempts=2)
    assert (result.attempts, "127.0.0.1 was silent for 0.3 s" in (result.error or "")) == (2, True)


def test_tls_is_checked_and_read(load: Load, environment: pytest.MonkeyPatch, secure: Files, folder: Path) -> None:
    url = secure.url.replace("127.0.0.1", "localhost")
    assert load(url).status == "succeeded"
    assert (folder / "f.csv").read_bytes() == FILE
    secure.answers["/f.csv"] = (302, {"Location": f"http://localhost:{secure.port}/x"})
    assert "localhost redirects to nowhere, or from https to http" in str(load(url).error)
    environment.setattr(http, "certificates", ssl.create_default_context)
    assert "the certificate of localhost is not valid for this machine" in str(load(url).error)


@pytest.mark.parametrize("hosts", ["http://h", "h:80x y/", "*"])
def test_a_wrong_list_of_hosts_stops_the_start(environment: pytest.MonkeyPatch, hosts: str) -> None:
    environment.setenv("DL_HTTP_PRIVATE_HOSTS", hosts)
    with pytest.raises(config.ConfigError, match="DL_HTTP_PRIVATE_HOSTS: should be hosts such as"):
        config.load()
