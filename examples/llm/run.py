"""Run llm.generate against three nodes, one of which fails in every way, and print what became of each job.

    DL_DB_DSN=postgresql://... python run.py

The database should be a scratch one: the example migrates it. `dataloader` is looked for beside this Python. The nodes
are fakes (fake_node.py): they speak the protocols of Ollama and of servers of MLX models, and have no model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from fake_node import FakeNode

from dataloader import enqueue

HERE = Path(__file__).parent
DATALOADER = (sys.executable, "-m", "dataloader")
QUEUE = "example.llm"
PATIENCE_SEC = 120.0
SILENCE_SEC = 2
ODD, OLLAMA, MLX = "qwen2.5-coder:7b", "llama3.2:3b", "mlx-community/Llama-3.2-3B"


class Case(NamedTuple):
    """A job, and how the first node behaves meanwhile."""

    title: str
    behave: str
    args: dict[str, Any]
    all_behave: bool = False  # the other nodes too
    is_canceled: bool = False  # in the middle of the answer


# The first node alone has a coder, so a job of this category asks it first.
CASES = (
    Case("a model of the Ollama node", "answers", {"model": OLLAMA}),
    Case("a model of the MLX node", "answers", {"model": MLX}),
    Case("a category", "answers", {"category": "coding"}),
    Case("the first node answers slowly", "slow", {"category": "coding"}),
    Case("it hangs in the middle", "hangs", {"category": "coding"}),
    Case("it never begins", "mute", {"category": "coding"}),
    Case("it echoes the prompt", "echoes", {"category": "coding"}),
    Case("it sends 500", "fails", {"category": "coding"}),
    Case("its queue is full", "busy", {"category": "coding"}),
    Case("it cuts the stream", "cuts", {"category": "coding"}),
    Case("it redirects", "moves", {"category": "coding"}),
    Case("every node sends 500", "fails", {"category": "coding"}, all_behave=True),
    Case("cancelled in the middle", "slow", {"category": "coding"}, is_canceled=True),
)


def main() -> None:
    """Start nodes and a farm, run each case, print a line for each."""
    if not (dsn := os.environ.get("DL_DB_DSN")):
        sys.exit("set DL_DB_DSN to a scratch database")
    dataloader("migrate")
    with ExitStack() as stack:
        nodes = {
            name: stack.enter_context(closing(FakeNode(protocol, (model,))))
            for name, protocol, model in (("first", "ollama", ODD), ("ollama", "ollama", OLLAMA), ("mlx", "mlx", MLX))
        }
        nodes["first"].elsewhere = nodes["mlx"].url
        conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        stack.enter_context(farm(conn, nodes))
        print(f"{'case':<32}{'node':<8}{'end':<11}{'journal':<32}{'passed over'}", flush=True)  # noqa: T201
        for case in CASES:
            print(line(conn, case, nodes), flush=True)  # noqa: T201


def line(conn: psycopg.Connection[Any], case: Case, nodes: dict[str, FakeNode]) -> str:
    """Run the case, and say what became of its job."""
    for name, node in nodes.items():
        node.behave = case.behave if name == "first" or case.all_behave else "answers"
        node.pause_sec = 1.0 if case.is_canceled else 0.2
    args = {"prompt": "What is the answer to this question?"} | case.args
    job, _ = enqueue(conn, queue=QUEUE, task="llm.generate", lock_key=case.title, args=args, max_attempts=1)
    if case.is_canceled:
        until(lambda: progress(conn, job).get("tokens"), "the first words")
        dataloader("cancel", str(job), "--direct")
    until(lambda: status(conn, job) not in ("queued", "running"), "the job to end")
    said, names = progress(conn, job), {node.url: name for name, node in nodes.items()}
    used = names[said["node"]] if status(conn, job) == "succeeded" else "-"
    passed = "; ".join(f"{names[each['node']]}: {each['reason']}" for each in said.get("passed_over", []))
    if status(conn, job) == "failed":
        passed = error(conn, job, names)
    return f"{case.title:<32}{used:<8}{status(conn, job):<11}{journal(conn, job):<32}{passed}".rstrip()


def status(conn: psycopg.Connection[Any], job: UUID) -> str:
    """The job's status."""
    return str(value(conn, "SELECT status::text FROM dl_jobs WHERE job_id = %s", job))


def progress(conn: psycopg.Connection[Any], job: UUID) -> dict[str, Any]:
    """The job's last progress, which is the pipeline's result once it has succeeded."""
    return value(conn, "SELECT progress FROM dl_jobs WHERE job_id = %s", job) or {}


def error(conn: psycopg.Connection[Any], job: UUID, names: dict[str, str]) -> str:
    """The error in the job's journal, with the nodes' names in place of their URLs."""
    text = str(
        value(conn, "SELECT payload ->> 'error' FROM dl_job_events WHERE job_id = %s AND payload ? 'error'", job)
    )
    for url, name in names.items():
        text = text.replace(url, name)
    return text


def journal(conn: psycopg.Connection[Any], job: UUID) -> str:
    """The steps of the job; after a cancellation with the seconds from the request to the end."""
    rows = conn.execute(
        "SELECT kind, extract(epoch FROM ts)::float8 FROM dl_job_events WHERE job_id = %s AND kind <> 'heartbeat'"
        " ORDER BY event_id",
        (job,),
    ).fetchall()
    steps = [kind for kind, _ in rows]
    if "cancel_requested" in steps:
        return f"{steps[-1]} {rows[-1][1] - rows[steps.index('cancel_requested')][1]:.1f} s after the request"
    return " ".join(steps)


def value(conn: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    """The only value of a statement's only row."""
    row = conn.execute(statement, parameters).fetchone()
    assert row is not None, statement  # noqa: S101  these statements always have a row
    return row[0]


def until(question: Callable[[], Any], what: str) -> None:
    """Ask until the answer is true."""
    deadline = time.monotonic() + PATIENCE_SEC
    while not question():
        if time.monotonic() > deadline:
            sys.exit(f"waited {PATIENCE_SEC:g} s for {what}")
        time.sleep(0.05)


def dataloader(*command: str) -> None:
    """Run a command to its end."""
    done = subprocess.run([*DATALOADER, *command], cwd=HERE, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dataloader {' '.join(command)} failed: {done.stderr or done.stdout}")


@contextmanager
def farm(conn: psycopg.Connection[Any], nodes: dict[str, FakeNode]) -> Iterator[None]:
    """A farm of one worker that asks these nodes; it drains at the end."""
    settings = {
        "WORKERS_JSON": json.dumps([{"queue": QUEUE, "concurrency": 1}]),
        "OLLAMA_API_URL": f"{nodes['first'].url},{nodes['ollama'].url}",
        "OLLAMA_BASE_URL": "",
        "MLX_API_URL": nodes["mlx"].url,
        "DL_LLM_SILENCE_SEC": str(SILENCE_SEC),
        "DL_LLM_BUSY_PERCENT": "100",  # these nodes have no model, so they need nothing of this machine
    }
    log = tempfile.TemporaryFile()  # noqa: SIM115  the farm has it until it ends
    program = subprocess.Popen([*DATALOADER, "workers"], cwd=HERE, env=os.environ | settings, stdout=log, stderr=log)
    try:
        ready = "SELECT count(*) FROM dl_workers WHERE queue = %s AND state = 'idle'"
        until(lambda: program.poll() is not None or value(conn, ready, QUEUE), "the worker to start")
        if program.poll() is not None:
            log.seek(0)
            sys.exit(f"the farm has not started: {log.read().decode(errors='replace')}")
        yield
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(PATIENCE_SEC)


if __name__ == "__main__":
    main()
