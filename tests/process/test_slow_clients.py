"""I17, J6: slow clients and a silent database take no threads from others (dataloader/api/server/slow_clients.py)."""

import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from farming import until
from link import SILENT, linked

from tools.slow_clients import BODY, HEADERS, POST, TRIGGER, Crowd, figures, healths, job_of

ROOT = Path(__file__).parents[2]
PATIENT = ["from dataloader.api.web import sessions", "sessions.STALL_SEC = 2.0"]  # the machine may stall
WHOLE = POST.encode() + b"%d\r\n\r\n" % len(BODY) + BODY


@contextmanager
def served(dsn: str, folder: Path, *changes: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The API in one process, with the configuration changed by these lines; its port, its arbiter."""
    conf = folder / "gunicorn.conf.py"
    server = "dataloader.api.server"
    lines = [f"from {server} import slow_clients", f"from {server}.gunicorn_config import *", *changes]
    conf.write_text("\n".join(lines))
    command = [sys.executable, "-m", "gunicorn", "-c", str(conf), "-b", "127.0.0.1:0", "wsgi:app"]
    env = os.environ | {"DL_DB_DSN": dsn}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr
    try:
        port = next(int(at[1]) for line in process.stderr if (at := re.search(r"Listening at: \S+:(\d+)", line)))
        healths(port, 0.01)
        yield port, process
    finally:
        process.terminate()
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "Traceback" not in err


IMPATIENT = """
slow_clients.HEAD_SEC, slow_clients.RATE, slow_clients.HELD_LIMIT = 1.0, 10_000_000, 3_000_000
keepalive, worker_connections, threads = 1, 60, 8
"""


@pytest.fixture(scope="module")
def port(worker_db: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server that is patient for a second only and has room for little."""
    with served(worker_db, tmp_path_factory.mktemp("api"), IMPATIENT) as (port, _):
        yield port


def connected(port: int, words: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(words)
    return sock


def answer(sock: socket.socket) -> tuple[int, bytes]:
    with HTTPResponse(sock) as found:
        found.begin()
        return found.status, found.read()


def rest_of(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65_536), b""))


# The requests that threads get, and when -----------------------------------------------------------------------------


def test_a_request_may_come_in_pieces_and_several_at_once(port: int, dsn: str) -> None:
    with connected(port) as sock:
        for at in range(0, len(WHOLE), 40):
            sock.sendall(WHOLE[at : at + 40])
            time.sleep(0.01)
        assert answer(sock)[0] == 200
        sock.sendall(WHOLE + WHOLE[:-1])
        time.sleep(0.05)
        sock.sendall(WHOLE[-1:] + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert rest_of(sock).count(b"HTTP/1.1 200 OK") == 3
    with connected(port, WHOLE.replace(b"Host", b"Expect: 100-continue\r\nHost", 1)[: -len(BODY)]) as sock:
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert answer(sock)[0] == 200


HIDDEN = b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n"
ENDS = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "body", "statuses"),
    [
        # A server that reads the length in another way than the proxy before it takes a body for a request.
        (b"Content-Length: 6\r\nTransfer-Encoding: chunked", b"0\r\n\r\nX" + HIDDEN, [400]),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 6", b"0\r\n\r\nX" + HIDDEN, [400]),
        (b"Transfer-Encoding: xchunked\r\nContent-Length: 1", b"x" + HIDDEN, [501]),
        (b"Transfer-Encoding: identity\r\nContent-Length: 1", b"x" + HIDDEN, [400]),
        (b"Transfer-Encoding : chunked\r\nContent-Length: 1", b"x" + HIDDEN, [400]),
        (b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN), [411]),
        (b"Content-Length: 1\r\nContent-Length: 1", b"x" + HIDDEN, [400]),
        (b"Content-Length: 1\r\nContent-Length: 99", b"x" + HIDDEN, [400]),
        *((b"Content-Length: " + length, b"x" + HIDDEN, [400]) for length in (b"+1", b"-1", b"1, 1", b"0x1", b"\xb9")),
        (b"Content-Length: %016d" % len(HIDDEN), HIDDEN, [404, 200]),
        (b"Content-Length:\r\n 1", b"x" + HIDDEN, [400]),
        (b"X: a\nContent-Length: 99\r\nContent-Length: 1", b"x" + HIDDEN, [400]),
        (b"X: a\rContent-Length: 99\r\nContent-Length: 1", b"x" + HIDDEN, [400]),
        (b"X: a\0b\r\nContent-Length: 1", b"x" + HIDDEN, [400]),
        (b"Host: elsewhere\r\nContent-Length: 1", b"x" + HIDDEN, [400]),
        (b"Content-Length: 1000000000000000", b"x" + HIDDEN, [404]),
        # A client may not speak for its proxy: here it asks for /nothing.
        (b"SCRIPT_NAME: /nothing\r\nContent-Length: 1", b"x", [404, 200]),
        (b"PATH_INFO: /info\r\nContent-Length: 1", b"x", [404, 200]),
        (b"SCRIPT_NAME: /else\r\nContent-Length: 1", b"x", [404, 200]),
    ],
    ids=range(23),
)
def test_no_request_hides_in_another(port: int, head: bytes, body: bytes, statuses: list[int]) -> None:
    request = b"POST /nothing/info HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n%b%b" % (head, body, ENDS)
    with connected(port, request) as sock:
        received = rest_of(sock)
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", received)] == statuses
    assert b'"service"' not in received


def test_an_answer_that_is_read_late_is_whole(port: int, dsn: str) -> None:
    job = job_of(port)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        sock.connect(("127.0.0.1", port))
        sock.settimeout(20)
        asked = f"GET {job} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        sock.sendall(asked * 39 + asked.replace(b"Host", b"Connection: close\r\nHost"))
        time.sleep(0.3)
        received = rest_of(sock)
        assert (received.count(b"HTTP/1.1 200 OK"), received.count(b'"waiting_for"')) == (40, 40)


def test_who_says_nothing_or_not_enough_is_hung_up_on(port: int) -> None:
    begun = POST.encode() + b"10\r\n\r\n{"
    waiting = [connected(port), connected(port, b"GET /hea"), connected(port, begun)]
    waiting.append(connected(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    assert answer(waiting[-1])[0] == 200
    for sock, received in zip(waiting, (b"", b"HTTP/1.1 408", b"HTTP/1.1 408", b""), strict=True):
        with sock:
            assert sock.recv(12) == received


def beside(port: int, number: int, words: bytes, refusals: int) -> float:
    """The seconds of the slowest GET /health beside so many clients, of whom so many at least are refused."""
    crowd = [connected(port, words) for _ in range(number)]
    seconds = healths(port, 0.2)
    received = [sock.recv(12) for sock in crowd] if refusals else []
    for sock in crowd:
        sock.close()
    return max(seconds) if received.count(b"HTTP/1.1 503") >= refusals else math.inf


@pytest.mark.parametrize(
    ("number", "words", "refusals"),
    [(100, b"", 0), (5, POST.encode() + b"1000001\r\n\r\n" + b"x" * 1_000_000, 2)],
    ids=["the longest waiting make room", "requests that wait have so much memory and no more"],
)
def test_a_crowd_holds_up_no_other(port: int, number: int, words: bytes, refusals: int) -> None:
    """At one of three times: the machine may stall. A crowd that says nothing is hung up on within a second."""
    assert any(beside(port, number, words, refusals) < 1 for _ in range(3))


# Lines of the configuration: each request for /info keeps its thread until a file is there.
BUSY = """
import time
handle = slow_clients.BufferingWorker.handle
def wait_and_handle(worker, conn):
    while conn.sock.received.startswith(b"GET /info ") and not os.path.exists({file!r}):
        time.sleep(0.01)
    return handle(worker, conn)
slow_clients.BufferingWorker.handle = wait_and_handle
"""


def test_health_is_answered_while_every_thread_is_busy(worker_db: str, tmp_path: Path) -> None:
    file = tmp_path / "they may go on"
    with served(worker_db, tmp_path, "import os", "threads = 8", BUSY.format(file=str(file))) as (port, _):
        busy = [connected(port, b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(16)]
        try:
            with connected(port, ENDS) as sock:
                assert answer(sock)[0] == 200
            assert select.select(busy, [], [], 0)[0] == []
        finally:
            file.touch()
        assert [answer(sock)[0] for sock in busy] == [200] * 16
        for sock in busy:
            sock.close()


def test_i17_slow_clients_and_a_silent_database_leave_the_others_alone(own_db: str, tmp_path: Path) -> None:
    """One such scene of three at most, from its first rush on: the machine may stall."""
    assert any(slowest_of_a_scene(own_db, tmp_path) < 1 for _ in range(3)), "`pytest -s` shows the seconds"


def slowest_of_a_scene(own_db: str, tmp_path: Path) -> float:
    """The seconds of the slowest GET /health beside slow clients, with a database and without."""
    with linked(own_db) as link, served(link.dsn, tmp_path, *PATIENT) as (port, _):
        job = job_of(port)
        crowd = Crowd(port)
        try:
            crowd.idle(200)
            crowd.slow_heads(20)
            crowd.slow_bodies(20)
            crowd.deaf(5, job)
            crowd.long_polls(40, job)
            crowd.triggers(4)
            seconds = healths(port, 1)
            print("slow clients:", figures(seconds))
            with ThreadPoolExecutor(80) as threads:  # more than there are sessions
                assert set(threads.map(lambda _: triggered(port), range(80))) == {200}  # a rush is no fault
            assert set(crowd.statuses) == {200}
            link.leave(SILENT)
            frozen = healths(port, 2.5)
            print("and no database:", figures(frozen))
            until(lambda: crowd.statuses[503], "a refusal")
            link.thaw()
            until(lambda: triggered(port) == 200, "the API to serve again")
        finally:
            link.thaw()
            crowd.go()
    return max(seconds + frozen)


def test_a_rush_at_a_frozen_database_is_refused_in_time_and_at_a_live_one_served(own_db: str, tmp_path: Path) -> None:
    """More requests than threads. A pool's `timeout` and `max_waiting` alone keep one of the two promises, not both."""
    with linked(own_db) as link, served(link.dsn, tmp_path, *PATIENT) as (port, _), ThreadPoolExecutor(80) as threads:
        assert triggered(port) == 200
        for _ in range(3):
            assert set(threads.map(lambda _: triggered(port), range(80))) == {200}
        link.leave(SILENT)
        for _ in range(2):
            began = time.monotonic()
            assert set(threads.map(lambda _: triggered(port), range(80))) == {503}
            # 3 s for each, and what the clients themselves take; one after the other on 32 threads they would take 9 s.
            assert time.monotonic() - began < 8
        link.thaw()


def triggered(port: int) -> int:
    http = HTTPConnection("127.0.0.1", port, timeout=40)
    http.request("POST", TRIGGER, BODY, HEADERS)
    status = http.getresponse().status
    http.close()
    return status


def test_a_stop_ends_long_polls_at_once(own_db: str, tmp_path: Path) -> None:
    with served(own_db, tmp_path) as (port, process):
        http = HTTPConnection("127.0.0.1", port, timeout=40)
        http.request("GET", job_of(port) + "?wait=30")
        idle = connected(port)
        healths(port, 0.2)  # who came later is answered: the long poll has been read
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert http.getresponse().status == 200
        assert process.wait(60) == 0
        assert time.monotonic() - began < 25
        idle.close()
        http.close()
