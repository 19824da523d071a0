"""The API's answers beside slow clients: `python -m tools.slow_clients` prints the times of GET /health.

The program starts a PostgreSQL of its own. It measures without other clients, then with slow clients of every kind and
more long polls than the service has threads, then with these and a stopped PostgreSQL (SIGSTOP).
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException

import psutil

from dataloader import embedded
from tools.programs import Program, answers, database, free_port

TRIGGER = "/api/v1/jobs/trigger"
BODY = json.dumps({"queue": "nobody", "task": "noop", "lock_key": "k"}).encode()
HEADERS = {"Content-Type": "application/json"}
POST = f"POST {TRIGGER} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
FAST = {"fsync": "off", "synchronous_commit": "off", "max_connections": "100"}


class Crowd:
    """Slow clients of every kind, until `go`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: Counter[int] = Counter()  # of the long polls and the triggers
        self._gone = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def idle(self, count: int) -> None:
        """Connections that send nothing, opened again after the server closes them."""
        self._each(count, lambda number: b"")

    def slow_heads(self, count: int) -> None:
        """Requests with a head that arrives byte by byte."""
        self._each(count, lambda number: b"GET /health HTTP/1.1\r\nX-Slow: "[: 5 + number % 20])

    def slow_bodies(self, count: int) -> None:
        """Requests with a body of which only the first byte arrives."""
        self._each(count, lambda number: f"{POST}{100 + number * 1_000}\r\n\r\n{{".encode())

    def deaf(self, count: int, job: str) -> None:
        """Many requests by a client that reads no answer."""
        self._each(count, lambda number: f"GET {job} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 50)

    def long_polls(self, count: int, job: str) -> None:
        """Clients that wait for a job, and obey Retry-After."""
        for _ in range(count):
            self._start(self._ask_on, "GET", f"{job}?wait=25", None)

    def triggers(self, count: int) -> None:
        """Clients that trigger one job after the other."""
        for _ in range(count):
            self._start(self._ask_on, "POST", TRIGGER, BODY)

    def go(self) -> None:
        """End all clients."""
        self._gone.set()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(40)
        for sock in self._sockets:
            sock.close()

    def _each(self, count: int, words: Callable[[int], bytes]) -> None:
        opened = [self._say(words(number)) for number in range(count)]
        self._start(self._keep, opened, words)

    def _say(self, words: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        sock.setblocking(False)
        with suppress(OSError):
            sock.send(words)
        self._sockets.append(sock)
        return sock

    def _keep(self, opened: list[socket.socket], words: Callable[[int], bytes]) -> None:
        """Send a further byte on each connection now and then, and replace the connections that the server closes."""
        while not self._gone.wait(1):
            for number, sock in enumerate(opened):
                if self._gone.is_set():
                    return
                try:
                    if words(number) and number % 3:
                        sock.send(b" ")
                    elif not words(number) and not sock.recv(1_000):
                        raise ConnectionResetError
                except BlockingIOError:
                    continue
                except OSError:
                    sock.close()
                    self._sockets.remove(sock)
                    with suppress(OSError):
                        opened[number] = self._say(words(number))

    def _ask_on(self, method: str, path: str, body: bytes | None) -> None:
        pause = 0.02
        while not self._gone.wait(pause):
            pause = 1.0
            http = HTTPConnection("127.0.0.1", self.port, timeout=40)
            with suppress(OSError, HTTPException):
                http.connect()
                self._sockets.append(http.sock)
                http.request(method, path, body, HEADERS if body else {})
                answer = http.getresponse()
                answer.read()
                self.statuses[answer.status] += 1
                pause = float(answer.headers.get("Retry-After", 0.02))
            if http.sock in self._sockets:
                self._sockets.remove(http.sock)
            http.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()


def healths(port: int, seconds: float, period: float = 0.01) -> list[float]:
    """The times of GET /health, each on a connection of its own, in seconds."""
    took, end = [], time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b""
            while more := sock.recv(4_096):
                answer += more
        assert answer.startswith(b"HTTP/1.1 200"), answer
        took.append(time.monotonic() - began)
        time.sleep(max(0.0, period - took[-1]))
    return took


def figures(seconds: list[float]) -> str:
    """The figures of a line, of one time or more."""
    cuts = statistics.quantiles(2 * seconds, n=100)  # which takes two at least
    in_words = {"p50": cuts[49], "p99": cuts[98], "max": max(seconds)}
    return "   ".join(f"{name} {1_000 * figure:6.1f} ms" for name, figure in in_words.items()) + f"   of {len(seconds)}"


def job_of(port: int) -> str:
    """The address of the status of a job that no worker runs."""
    http = HTTPConnection("127.0.0.1", port, timeout=10)
    http.request("POST", TRIGGER, BODY, HEADERS)
    made = json.loads(http.getresponse().read())
    http.close()
    return f"/api/v1/jobs/{made['job_id']}/status"


def processes_of(server: embedded.Server) -> list[psutil.Process]:
    """All processes of PostgreSQL."""
    postmaster = psutil.Process(server.process.pid)
    return [postmaster, *postmaster.children(recursive=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="for each line")
    parser.add_argument("--long-polls", type=int, default=100)
    given = parser.parse_args()
    with ExitStack() as stack:
        server, root = stack.enter_context(database(FAST))
        port = free_port()
        settings = {"DL_DB_DSN": server.dsn, "APP_HOST": "127.0.0.1", "APP_PORT": str(port)}
        stack.enter_context(Program("api", root, lambda: answers(port), settings))
        job = job_of(port)
        print(f"nobody else:             {figures(healths(port, given.seconds))}", flush=True)
        crowd = Crowd(port)
        stack.callback(crowd.go)
        for kind in (crowd.slow_heads, crowd.slow_bodies):
            kind(50)
        crowd.idle(200)
        crowd.deaf(20, job)
        crowd.long_polls(given.long_polls, job)
        crowd.triggers(4)
        print(f"slow clients:            {figures(healths(port, given.seconds))}   {answered(crowd)}", flush=True)
        stopped = processes_of(server)
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        stack.callback(lambda: [process.send_signal(signal.SIGCONT) for process in stopped])
        print(f"and PostgreSQL stopped:  {figures(healths(port, given.seconds))}   {answered(crowd)}", flush=True)


def answered(crowd: Crowd) -> str:
    """The answers to long polls and triggers meanwhile."""
    counted = ", ".join(f"{count} x {status}" for status, count in sorted(crowd.statuses.items()))
    crowd.statuses.clear()
    return f"(polls and triggers: {counted})"


if __name__ == "__main__":
    main()
