"""The application under gunicorn, spoken to in raw bytes: what a test client cannot send."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from uuid import uuid4

import pytest
from api_app import MINIMAL, TRIGGER, rows
from patience import PATIENCE

from dataloader.queue import db

ROOT = Path(__file__).parents[2]
BODY = json.dumps(MINIMAL).encode()
JSON = "Content-Type: application/json"


@contextmanager
def gunicorn(dsn: str, *arguments: str) -> Iterator[int]:
    """gunicorn with one worker of four threads; yields its port."""
    command = [sys.executable, "-m", "gunicorn", "--threads", "4"]
    process = subprocess.Popen(
        [*command, "-b", "127.0.0.1:0", *arguments],
        cwd=ROOT,
        env=os.environ | {"DL_DB_DSN": dsn},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    try:
        # Connections wait in the listener's backlog until the worker has booted.
        yield next(int(at[1]) for line in process.stderr if (at := re.search(r"Listening at: \S+:(\d+)", line)))
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def server(worker_db: str) -> Iterator[int]:
    with gunicorn(worker_db, "dataloader.api:create_app()") as port:
        yield port


@pytest.fixture
def port(server: int, dsn: str) -> int:
    """The server, its tables empty. (They are emptied together with the server's sessions.)"""
    return server


def say(
    port: int, *head: str, hosts: Sequence[str] = ("localhost",), body: bytes = b"", hang_up: bool = False
) -> tuple[HTTPResponse, bytes]:
    """Send these lines and bytes as they are, and read one answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        lines = [*head, *(f"Host: {host}" for host in hosts), "", ""]
        sock.sendall("\r\n".join(lines).encode("latin-1") + body)
        if hang_up:
            sock.shutdown(socket.SHUT_WR)
        with HTTPResponse(sock) as answer:
            answer.begin()
            return answer, answer.read()


def test_without_a_length_there_is_no_body_and_one_that_is_cut_off_makes_no_job(port: int, conn: db.Connection) -> None:
    answer, text = say(port, f"POST {TRIGGER} HTTP/1.1", JSON, body=BODY, hang_up=True)
    assert (answer.status, json.loads(text)["errors"][0]["code"]) == (400, "empty")
    answer, _ = say(port, f"POST /api/v1/jobs/{uuid4()}/cancel HTTP/1.1")
    assert answer.status == 404
    length = f"Content-Length: {len(BODY) + 1}"
    answer, _ = say(port, f"POST {TRIGGER} HTTP/1.1", JSON, length, body=BODY, hang_up=True)
    assert answer.status == 400
    assert rows(conn) == []


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (413, [f"POST {TRIGGER} HTTP/1.1", JSON]),
        (403, [f"POST {TRIGGER} HTTP/1.1", JSON, "Origin: http://elsewhere"]),
        (404, ["POST /nowhere HTTP/1.1", JSON]),
        (405, [f"PUT {TRIGGER} HTTP/1.1", JSON]),
        (200, ["GET /health HTTP/1.1"]),
    ],
)
@pytest.mark.parametrize(("length", "stays"), [(300_000, False), (64 * 1024, False), (60_000, True)])
def test_a_close_after_an_unread_body_is_announced(
    port: int, status: int, head: list[str], length: int, stays: bool
) -> None:
    if status == 413 and length < 300_000:
        status = 400  # it is read
        stays = True
    whole = "\r\n".join([*head, "Host: localhost", f"Content-Length: {length}", "", ""]).encode() + b"x" * length
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        for _ in range(2 if stays else 1):
            sock.sendall(whole)
            with HTTPResponse(sock) as answer:
                answer.begin()
                answer.read()
            assert (answer.status, answer.headers["Connection"]) == (status, "keep-alive" if stays else "close")
        if not stays:
            assert sock.recv(1) == b""


@pytest.mark.parametrize("text", ["%FF%00%0d%0aX:y", "\xff\xfe", "%2e%2e%2f%2e%2e"], ids=range(3))
def test_oddities_are_harmless(port: int, text: str) -> None:
    answer, _ = say(port, f"GET /api/v1/jobs/{text}/status HTTP/1.1", body=b"{}", hang_up=True)
    assert answer.status == 400
    assert say(port, "GET /health HTTP/1.1", "X-Request-ID: a b")[0].status == 200
    assert say(port, "GET /health HTTP/1.1", hosts=["a b<>"])[0].status in (200, 400)


def test_a_name_of_another_site_reads_nothing(port: int) -> None:
    """A browser always sends a Host; a probe of HTTP/1.0 sends none."""
    for version, hosts, statuses in [
        ("1.1", ["localhost"], {200}), ("1.1", ["[::1]:1"], {200}), ("1.0", [], {200}),
        ("1.1", ["evil.example"], {403}), ("1.0", ["evil.example"], {403}), ("1.1", [""], {400, 403}),
        ("1.1", ["localhost", "evil.example"], {400, 403}), ("1.1", ["evil.example", "localhost"], {400, 403}),
    ]:  # fmt: skip
        assert say(port, f"GET /info HTTP/{version}", hosts=hosts)[0].status in statuses, (version, hosts)


@pytest.mark.long
def test_certificates_are_refused_in_a_line(dsn: str) -> None:
    command = [sys.executable, "-m", "gunicorn", "-b", "127.0.0.1:0", "--certfile", "own.pem"]
    environment = os.environ | {"DL_DB_DSN": dsn}
    done = subprocess.run(
        [*command, "dataloader.api:create_app()"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "leave --certfile and --keyfile out" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_it_may_be_loaded_before_the_fork(dsn: str) -> None:
    with gunicorn(dsn, "--preload", "-w", "2", "wsgi:app") as port:
        for _ in range(6):
            answer, text = say(port, f"POST {TRIGGER} HTTP/1.1", JSON, f"Content-Length: {len(BODY)}", body=BODY)
            assert answer.status == 200, text
