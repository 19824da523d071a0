"""Count the places of a fact: `python -m tools.places [--files]`; with --files it names them.

A place is a file outside tests, documents and generated files whose code names the fact, and so may have to change with
it. Comments, docstrings and applied migrations do not count, nor do the files in HOMONYMS: their word is another fact.
An operation is named by its route or command and by calls and definitions of its function in SQL and Python; a field, a
type of an answer or an error by its name. So a place that only uses a fact counts as well: a page that shows it, a plan
that calls it, a claim that sorts by it.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
FOLDERS = ("dataloader", "sql")
KINDS = {".py", ".sql", ".html", ".js", ".txt"}
NOT_OURS = ("generated", "swagger/", "vendor/", "client/operations.py", "migrations/")  # parts of paths
_REMARK = {".py": r'"""[\s\S]*?"""|(?<!["\'])#.*', ".sql": r"--(?! name:).*", ".html": r"\{#[\s\S]*?#\}"}
# Files in which the word of a field is another fact.
HOMONYMS = {
    "deadline": {
        "the end of a wait": (
            *("dataloader/embedded.py", "dataloader/farm/heartbeat.py", "dataloader/farm/slots.py"),
            *("dataloader/farm/supervisor.py", "dataloader/local/ports.py", "dataloader/queue/migrations.py"),
        ),
        "a kind of alerts": (
            *("dataloader/model/kinds.py", "dataloader/queue/reports/messages.py", "dataloader/pipelines/webhook.py"),
            *(
                "dataloader/queue/reports/timeline.py",
                "sql/functions/report.sql",
                "sql/timeline.sql",
                "sql/webhooks.sql",
            ),
        ),
    },
    "max_attempts": {"of a declared task": ("dataloader/model/runs.py", "dataloader/queue/reports/runs.py")},
}
# Each row: the fact, and the patterns of which a place has one.
FACTS = {
    "operations": {
        "pause a queue": (
            r"/queues/\{queue\}/pause|operations\.pause\b|def pause\(conn: Conn, queue",
            r"_button\(\"pause\"|run-now delete pause|-- name: pause_source",
        ),
        "cancel a job": (r"/jobs/\{job_id\}/cancel|\bcancel_jobs\b|\brequest_cancels?\b|farm\.cancel\b",),
        "create a schedule": (
            r"\badd_schedule\b|schedules\.add\(|new_schedule\.checked|INSERT INTO dl_schedules|class ScheduleWords",
        ),
        "set a limit": (r"\bset_limit\b|INSERT INTO dl_limits",),
        "requeue a job": (r"\brequeue_jobs?\b|/jobs/\{job_id\}/requeue\b|-- name: requeue\b|\"requeue\": \"requeue\"",),
        "list the errors": (r"GET /errors|of_errors\.groups\b|-- name: groups\b",),
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


def places(fact: str, patterns: tuple[str, ...]) -> list[str]:
    """The files whose code names a fact by one of these patterns."""
    wanted = re.compile("|".join(patterns))
    others = {path for of_meaning in HOMONYMS.get(fact, {}).values() for path in of_meaning}
    named = [str(path.relative_to(ROOT)) for path in files() if wanted.search(code(path))]
    return [path for path in named if path not in others]


def code(path: Path) -> str:
    """The text of a file without its comments and docstrings."""
    return re.sub(_REMARK.get(path.suffix, "$^"), "", path.read_text("utf-8"))


def files() -> list[Path]:
    """The files that people write, outside tests and documents."""
    every = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))
    return [path for path in every if path.suffix in KINDS and not any(part in str(path) for part in NOT_OURS)]


@click.command()
@click.option("--files", "with_files", is_flag=True, help="name the places")
def main(with_files: bool) -> None:
    """Print a table for each kind of fact."""
    for kind, facts in FACTS.items():
        click.echo(f"| {kind} | places | Python | SQL | pages |\n|---|---:|---:|---:|---:|")
        for fact, patterns in facts.items():
            found = places(fact, patterns)
            endings = [Path(path).suffix for path in found]
            counts = [endings.count(".py"), endings.count(".sql"), endings.count(".html") + endings.count(".js")]
            click.echo(f"| {fact} | {len(found)} | {' | '.join(map(str, counts))} |")
            if with_files:
                click.echo("\n".join(f"    {path}" for path in found))
        click.echo("")


if __name__ == "__main__":
    main()
