"""Record the behaviour that users see, as data in tests/frozen: `python -m tools.freeze [--write]`.

The program replays the calls in http_calls.txt and cli_calls.txt against one scripted database (tools/scenario.py). It
compares every answer with http.jsonl, cli.jsonl and direct.jsonl (the command line with --direct, where its answer
differs), and also the help of all commands (help.txt) and the names of metrics and log events (names.json). With
--write it writes these files instead; `git diff tests/frozen` then shows each change, and differences.md gives the
reasons.

A line of http_calls.txt is `TOKEN METHOD PATH [JSON]`; a token is `all`, `read`, `trigger`, `operate`, `wrong` or `-`.
A line of cli_calls.txt holds a command's words; `@TOKEN` before them chooses a token, ` <<< TEXT` behind them is its
input. `{name}` is the id of a job of the scenario, `$name` a value of an earlier answer. ` ## REASON` at the end of a
line says why its answer is false, although it is frozen.
"""

from __future__ import annotations

import ast
import difflib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
from api_app import listening
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

import dataloader
from dataloader import embedded, log
from dataloader.cli import main as command_line

from .scenario import TOKENS, Scenario, application, bearer

ROOT = Path(__file__).parent.parent
FROZEN = ROOT / "tests" / "frozen"
LOGGING = ("debug", "info", "warning", "error", "exception", "critical", "log")
NOBODY = "00000000-0000-4000-8000-000000000000"  # the id of no job
LEFT_OUT = {"bench", "capacity"}  # commands
SERVER = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "60"}
# Keys of JSON whose values differ from run to run, beside ids, times and fractions.
VOLATILE = {
    *(
        "event_id",
        "pid",
        "size",
        "bytes",
        "memory_bytes",
        "memory_mb",
        "above",
        "up_to",
        "others",
        "peak_mb",
        "next",
        "place",
        "claim",
    ),
    *("size_bytes", "queue_tables_bytes", "dead_tuples", "live_tuples", "connections", "waiting_sec"),
    *("confirmation", "request_id", "etag", "host_memory_mb", "uptime", "version", "python", "hostname", "commit"),
}
SAMPLED = {"histogram", "pace"}  # lists whose length and counts differ: one row says which fields there are
BY_TIME_SPENT = {"tasks"}  # lists whose order differs
MASKS = [
    (r"(Traceback \(most recent call last\):)[\s\S]*", r"\1 <frames>"),  # a list cuts them, wherever a path ends
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?( ?(UTC|Z|[+-]\d\d:?\d\d))?", "<time>"),
    (r"\b\d\d:\d\d:\d\d(\.\d+)?\b", "<time>"),
    (r"127\.0\.0\.1:\d{4,5}", "127.0.0.1:<port>"),
    (r"(?<![\w.-])\d[\d,]*(\.\d+)? ?(MB|kB|GB|bytes|B)\b", "<size>"),
    (r"(?<![\w.<-])(\d[\d,]*(\.\d+)? (ms|s|min|h|d)\b ?)+(?<! )", "<span>"),
    (r"/tmp/[\w./-]+", "<path>"),
    (r"\bdl_[A-Za-z0-9_-]{43}\b", "<token>"),
    (r"\b[0-9a-f]{64}\b", "<digest>"),
    (r"<host>(:[\w-]+){2,}", "<worker>"),
    (r"<host>:\d+", "<host>:<pid>"),
    (r"\b(cpu_sec|peak_mb|seconds)=[\d.]+", r"\1=<float>"),
    (r"\b\d+%", "<n>%"),
]


# Placeholders ------------------------------------------------------------------------------------------------


class Placeholders:
    """Replaces what differs between two runs of one transcript."""

    def __init__(self, jobs: dict[str, str]) -> None:
        self.names = {NOBODY: NOBODY} | {job_id: f"{{{name}}}" for name, job_id in jobs.items()}
        self.values: dict[str, Any] = {}  # of earlier answers: what `$name` stands for

    def filled(self, text: str) -> str:
        """The text of a call, with ids and earlier values."""
        for job_id, name in self.names.items():
            text = text.replace(name, job_id)
        return re.sub(r"\$(\w+)", lambda found: str(self.values.get(found[1], found[0])), text)

    def text(self, text: str, is_table: bool = False) -> str:
        """The text without ids, times, durations, sizes, hosts and versions."""
        text = re.sub(r"\b[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}\b", lambda found: self._name(found[0]), text)
        for secret, name in ((socket.gethostname(), "<host>"), (dataloader.version(), "<version>")):
            text = re.sub(rf"(?<![\w.]){re.escape(secret)}(?![\w.])", name, text)
        for pattern, name in MASKS:
            text = re.sub(pattern, name, text)
        return re.sub(r" {2,}", "  ", text) if is_table else text

    def _name(self, job_id: str) -> str:
        return self.names.setdefault(job_id, f"{{new-{sum('new-' in name for name in self.names.values()) + 1}}}")

    def document(self, value: Any, key: str = "") -> Any:
        """A JSON document without what differs."""
        if isinstance(value, dict):
            self.values |= {name: each for name, each in value.items() if name in ("next", "confirmation") and each}
            return {
                self.text(name): self.document(each, key if key == "waiting_sec" else name)
                for name, each in value.items()
            }
        if isinstance(value, list):
            some = [self.document(each, key) for each in (value[:1] if key in SAMPLED else value)]
            return sorted(some, key=str) if key in BY_TIME_SPENT else some
        if isinstance(value, float) or (
            key in VOLATILE and isinstance(value, int | str) and not isinstance(value, bool)
        ):
            return f"<{type(value).__name__}>"
        return self.text(value) if isinstance(value, str) else value

    def answer(self, text: str) -> Any:
        """A body or an output: a document where it is JSON, else its lines."""
        try:
            return self.document(json.loads(text))
        except ValueError:
            return [line.rstrip() for line in self.text(text, is_table=True).splitlines()]


# The transcripts ---------------------------------------------------------------------------------------------


def calls(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls in a file, and the begin of each record."""
    for line in (FROZEN / name).read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            call, _, reason = line.partition(" ## ")
            yield call, {"call": call} | ({"false": reason} if reason else {})


def over_http(dsn: str, jobs: dict[str, str]) -> list[dict[str, Any]]:
    """The answers to http_calls.txt."""
    records, mask = list[dict[str, Any]](), Placeholders(jobs)
    with application(dsn) as app:
        client = app.test_client()
        for line, record in calls("http_calls.txt"):
            token, method, path, *body = mask.filled(line).split(" ", 3)
            data = {"data": body[0], "content_type": "application/json"} if body else {}
            reply = client.open(path, method=method, headers=bearer(token), **data)
            record["status"] = reply.status_code
            names = {re.split(r"[{ ]", each)[0] for each in reply.text.splitlines() if not each.startswith("#")}
            is_metrics = path == "/metrics" and reply.status_code == 200
            record["body"] = sorted(names) if is_metrics else mask.answer(reply.text)
            records.append(record)
    return records


def over_command_line(dsn: str, jobs: dict[str, str], direct: bool = False) -> list[dict[str, Any]]:
    """The answers to cli_calls.txt, from the API or from the database."""
    records, mask = list[dict[str, Any]](), Placeholders(jobs)
    with application(dsn) as app, listening(app) as url:
        for line, record in calls("cli_calls.txt"):
            words, _, given = mask.filled(line).partition(" <<< ")
            token, *words = shlex.split(words) if words.startswith("@") else ["@all", *shlex.split(words)]
            env = {"DL_URL": url, "DL_TOKEN": TOKENS.get(token[1:]), "DL_DB_DSN": dsn, "TIMEZONE": "UTC"}
            done = CliRunner().invoke(command_line, [*words, *["--direct"][:direct]], given or None, env=env)
            if done.exception and not isinstance(done.exception, SystemExit):
                raise done.exception
            record |= {"exit": done.exit_code, "stdout": mask.answer(done.stdout), "stderr": mask.answer(done.stderr)}
            records.append(record)
    return records


def helps(command: click.Command = command_line, path: str = "dataloader") -> Iterator[str]:
    """The help of a command and of those below it."""
    widths = {"max_content_width": 100, "terminal_width": 100}
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"], **widths)
    yield f"$ {path} --help\n{command.get_help(context)}\n\n"
    if isinstance(command, click.Group):
        for name in sorted(set(command.list_commands(context)) - LEFT_OUT):
            yield from helps(command.get_command(context, name) or command, f"{path} {name}")


def event_names() -> list[str]:
    """The names of log events: the texts with a dot that loggers get as their first argument."""
    found = set[str]()
    for path in (ROOT / "dataloader").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGING:
                for each in (each for given in node.args[:2] for each in ast.walk(given)):
                    if isinstance(each, ast.Constant) and re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", str(each.value)):
                        found.add(str(each.value))
    return sorted(found)


# The program -------------------------------------------------------------------------------------------------


def frozen() -> dict[str, str]:
    """The text of each file, as it is now."""
    for name in [name for name in os.environ if name.startswith(("DL_", "PG", "APP_", "OTEL_")) or name == "DEBUG"]:
        del os.environ[name]
    log.configure = lambda *_, **__: None  # no command logs to this program's output
    logging.getLogger("werkzeug").disabled = True
    os.environ |= {"TZ": "UTC", "COLUMNS": "200", "NO_COLOR": "1", "TIMEZONE": "UTC"}
    folder = Path(tempfile.mkdtemp(prefix="dl-frozen-"))
    folder.chmod(0o711)  # another user runs PostgreSQL
    os.chdir(folder)
    server = embedded.Server.start(folder / "postgres", SERVER, initdb=["--no-sync"])
    try:
        admin = make_conninfo(server.dsn, user="postgres", dbname="postgres")
        with psycopg.connect(admin, autocommit=True) as conn:
            conn.execute("CREATE DATABASE scenario")
            scenario = Scenario(folder, make_conninfo(admin, dbname="scenario"))
            copies = []
            for name in ("http", "cli", "direct"):
                conn.execute(f"CREATE DATABASE {name} TEMPLATE scenario")
                copies.append(make_conninfo(admin, dbname=name))
        http = over_http(copies[0], scenario.jobs)
        cli = over_command_line(copies[1], scenario.jobs)
        direct = over_command_line(copies[2], scenario.jobs, direct=True)
        differing = [there for here, there in zip(cli, direct, strict=True) if here != there]
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    metrics = next(record["body"] for record in http if record["call"] == "read GET /metrics")
    names = json.dumps({"metrics": metrics, "events": event_names()}, indent=1) + "\n"
    texts = {"help.txt": "".join(helps()), "names.json": names}
    for file, records in {"http.jsonl": http, "cli.jsonl": cli, "direct.jsonl": differing}.items():
        texts[file] = "".join(json.dumps(record, ensure_ascii=False, sort_keys=True) + "\n" for record in records)
    return texts


def main() -> int:
    """Write the files, or print how they differ; 1 when they do."""
    texts = frozen()
    if "--write" in sys.argv:
        for name, text in texts.items():
            (FROZEN / name).write_text(text, "utf-8")
        return 0
    differ = False
    for name, text in texts.items():
        before = (FROZEN / name).read_text("utf-8")
        if before != text:
            differ = True
            old, new = (pretty(name, each) for each in (before, text))
            click.echo("\n".join(difflib.unified_diff(old, new, f"frozen/{name}", f"now/{name}", lineterm="", n=4)))
    return int(differ)


def pretty(name: str, text: str) -> list[str]:
    """The lines of a file; a record over many lines."""
    if not name.endswith(".jsonl"):
        return text.splitlines()
    return [line for each in text.splitlines() for line in json.dumps(json.loads(each), indent=1).splitlines()]


if __name__ == "__main__":
    sys.exit(main())
