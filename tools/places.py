"""Count the places of a fact: `python -m tools.places`.

A place is a file outside tests, documents and generated files that names the fact, and so may have to change with it.
An operation is named by its id in openapi.json, its route, its command, or a call or definition of its function in SQL
and Python; a field, a type of an answer or an error by its name. The rules are rough and the same each time.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
FOLDERS = ("dataloader", "sql")
KINDS = {".py", ".sql", ".html", ".js", ".txt"}
NOT_OURS = ("generated", "swagger/", "vendor/")  # parts of paths
# Each row: the fact, and the patterns of which a place has one.
FACTS = {
    "operations": {
        "pause a queue": (
            r"\bpause_queue\b|/queues/[^\s\"']*/pause\b|operations\.pause\b|def pause\(conn[^)]*queue",
            r"\bpauses?\b.*\bqueue|\bqueue.*\bpause\(|\"pause\"|'pause'|farm\.pause\b|do/pause",
        ),
        "cancel a job": (
            r"\bcancel_jobs?\b|<job:\w+>/cancel\b|request_cancel|operations\.cancel\b|-- name: cancel|cancellations\b",
            r"farm\.cancel\b|def cancel\(self, job_id|dataloader cancel|/cancel\"",
        ),
        "create a schedule": (
            r"\badd_schedule\b|schedules\.add\b|new_schedule\b|NewSchedule|INSERT INTO dl_schedules|/schedules\b",
        ),
        "set a limit": (r"\bset_limit\b|INSERT INTO dl_limits|/limits\b|limits\.set\b|LimitSet\b|-- name: set_limit",),
        "requeue a job": (
            r"\brequeue_jobs?\b|/requeue\b|operations\.requeue\b|-- name: requeue\b|farm\.requeue\b|dataloader requeue",
        ),
        "list the errors": (r"\blist_errors\b|/errors\b|errors\.groups\b|-- name: groups\b|ErrorGroup\b",),
    },
    "fields of a job": {
        name: (rf"\b{name}\b|{name.replace('_', '-')}\b",)
        for name in ("deadline", "max_attempts", "affinity_key", "on_parent_failure")
    },
    "types of answers": {
        name: (rf"(?<!\.)\bclass {name}\b|\b{name}\(|\b(results|responses|types)\.{name}\b|\bimport.*\b{name}\b",)
        for name in ("QueueState", "Schedule", "Webhook", "Backfill", "Limit")
    },
    "errors": {
        name: (rf"\b{name}\b",) for name in ("Contradiction", "WrongName", "WrongCursor", "Refused", "QueueFull")
    },
}


def places(patterns: tuple[str, ...]) -> list[str]:
    """The files that name a fact by one of these patterns."""
    wanted = re.compile("|".join(patterns))
    return [str(path.relative_to(ROOT)) for path in files() if wanted.search(path.read_text("utf-8"))]


def files() -> list[Path]:
    """The files that people write, outside tests and documents."""
    every = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))
    return [path for path in every if path.suffix in KINDS and not any(part in str(path) for part in NOT_OURS)]


def main() -> None:
    """Print a table for each kind of fact."""
    for kind, facts in FACTS.items():
        click.echo(f"| {kind} | places | Python | SQL | pages |\n|---|---:|---:|---:|---:|")
        for fact, patterns in facts.items():
            endings = [Path(path).suffix for path in places(patterns)]
            counts = [endings.count(".py"), endings.count(".sql"), endings.count(".html") + endings.count(".js")]
            click.echo(f"| {fact} | {len(endings)} | {' | '.join(map(str, counts))} |")
        click.echo("")


if __name__ == "__main__":
    main()
