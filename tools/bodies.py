"""The cost of faulty bodies at the limit of size for an API and its other clients: `python -m tools.bodies`.

The program starts a PostgreSQL of its own and an API of two processes. Four clients at once send a body of a million
unknown keys, then a batch with many links between its jobs, three times each, while another client asks for a job's
status again and again. It prints the slowest answer of both kinds of client, the API's CPU seconds for a body (the
slowest answer of a machine with other work says little), and the growth of the API's memory.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tools.programs import Program, answers, database, free_port

AT_ONCE, ROUNDS = 4, 3
PAUSE_SEC = 0.02  # between two questions of the other client
JOB = {"queue": "q", "task": "t", "lock_key": "k"}
BODIES = {
    "a million unknown keys": JOB | {f"k{number}": 1 for number in range(1_000_000)},
    "900,000 links": [JOB] + [JOB | {"depends_on": [0] * 10_000}] * 90,
    "100,000 links, valid": [JOB] * 5_000 + [JOB | {"depends_on": [*range(5_000)]}] * 20,
}
WITHIN = "within: 3 s of a body, 1 s of another client, 300 MB"


def asked(port: int, path: str, body: bytes | None = None) -> tuple[int, float, bytes]:
    """Status, seconds and content of an answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1/jobs/{path}", body, headers)
    since = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, time.monotonic() - since, reply.read()
    except urllib.error.HTTPError as e:
        return e.code, time.monotonic() - since, e.read()


def used(api: Program) -> tuple[int, float]:
    """The bytes of memory and the CPU seconds that the API's processes use and have used."""
    times = [process.cpu_times() for process in api.processes()]
    memory = sum(process.memory_info().rss for process in api.processes())
    return memory, sum(each.user + each.system for each in times)


def watched(api: Program, port: int, path: str, over: threading.Event) -> Iterator[tuple[float, int]]:
    """The seconds of each answer to the other client, and the bytes that the API has at that time."""
    while not over.is_set():
        _, seconds, _ = asked(port, path)
        yield seconds, used(api)[0]
        over.wait(PAUSE_SEC)


def measured(api: Program, port: int, path: str, body: bytes) -> str:
    """A line of figures for this body."""
    over, (memory_before, cpu_before) = threading.Event(), used(api)
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        other = pool.submit(lambda: [*watched(api, port, path, over)])
        sent = [*pool.map(lambda _: asked(port, "batch", body), range(AT_ONCE * ROUNDS))]
        over.set()
        seconds, memory = zip(*other.result(), strict=True)
    statuses, slowest = {status for status, *_ in sent}, max(each for _, each, _ in sent)
    cpu_sec = (used(api)[1] - cpu_before) / len(sent)
    return (
        f"{len(body) / 2**20:5.1f} MB {statuses}: slowest answer {slowest:5.2f} s (CPU {cpu_sec:4.2f} s a body), of"
        f" another client {max(seconds):5.2f} s of {len(seconds)}, memory + {(max(memory) - memory_before) >> 20} MB"
    )


def main() -> None:
    """Measure and print."""
    with database() as (server, folder):
        port = free_port()
        settings = {"DL_DB_DSN": server.dsn, "APP_HOST": "127.0.0.1", "APP_PORT": str(port)}
        with Program("api", folder, lambda: answers(port, "/ready"), settings) as api:
            job_id = json.loads(asked(port, "trigger", json.dumps(JOB).encode())[2])["job_id"]
            for name, jobs in BODIES.items():
                body = json.dumps({"jobs": jobs if isinstance(jobs, list) else [jobs]}, separators=(",", ":")).encode()
                print(f"{name:22} {measured(api, port, f'{job_id}/status', body)}", flush=True)
    print(WITHIN)


if __name__ == "__main__":
    main()
