"""Commands on the target database, without a farm: `load` runs one load, `state` shows and sets what loads keep there.

They need no queue and no API, as the loads themselves: the rights in the target decide who may use them, and the table
keeps who has set a state.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from uuid import UUID, uuid4

import click
from rich import progress

from dataloader.cli import base, screen
from dataloader.cli.direct import person
from dataloader.config import Settings
from dataloader.exits import EXIT_FAILED
from dataloader.farm import fence
from dataloader.pipelines import Context, PermanentError, Progress, Retry, files, validated
from dataloader.pipelines import state as states
from dataloader.pipelines.context import Execution
from dataloader.pipelines.http import Unreachable
from dataloader.pipelines.rows import followed
from dataloader.queue import db

commands = base.Group()


@contextmanager
def _target() -> Iterator[db.Connection]:
    """A session on the target; refuses in one line what fails there."""
    settings = base.settings()
    dsn = settings.target_dsn or base.dsn(settings)
    with _refusing(), db.connect(dsn, name="dl-cli", schema=settings.pg_schema, keeps_defaults=True) as conn:
        yield conn


def _refusing() -> AbstractContextManager[None]:
    return base.refusing("target", PermanentError, Unreachable, Retry, RuntimeError)


# --- one load ---


class _RunWithoutFarm:
    """The run of a load without a farm: no later run continues it. The run of a plan (`only_reads`) changes nothing."""

    stop_reason = None

    def __init__(self, settings: Settings, job_id: UUID, only_reads: bool) -> None:
        self._settings, self._job_id, self._only_reads = settings, job_id, only_reads

    def must_stop(self) -> bool:
        return False

    def begin_at(self) -> None:
        return None

    def save(self, checkpoint: dict[str, Any]) -> None:
        pass

    @contextmanager
    def transaction(self, dsn: str | None) -> Iterator[db.Conn]:
        target, schema = dsn or self._settings.target_dsn or base.dsn(self._settings), self._settings.pg_schema
        if not self._only_reads:
            with fence.transaction(target, schema, {self._job_id: 1}, person()) as conn:
                yield conn
            return
        with db.connect(target, name="dl-cli", schema=schema, keeps_defaults=True) as conn, conn.transaction():
            conn.execute("SET TRANSACTION READ ONLY")
            yield conn


@commands.command(
    examples=[
        "dataloader load orders.csv --table orders --key id --plan",
        "dataloader load 'in/*.csv.gz' --table orders --key id --arg decimal=, --arg 'null=[\"NA\"]'",
    ]
)
@click.argument("path", metavar="PATH_OR_URL")
@click.option("--table", required=True, help="name or schema.name; it is created if it is missing")
@click.option("--key", multiple=True, help="a column that identifies a row; again for each column")
@click.option("--mode", help="merge, append, replace or scd2")
@click.option("--arg", "more", multiple=True, metavar="NAME=JSON", help="any other argument of load.files")
@click.option("--plan", "only_plan", is_flag=True, help="show the columns, the DDL and five rows; change nothing")
@click.option("--force", is_flag=True, help="append, though a repetition of this command adds the rows again")
@click.option("--json", "as_json", is_flag=True, help="print a JSON document")
def load(
    path: str,
    table: str,
    key: tuple[str, ...],
    mode: str | None,
    more: tuple[str, ...],
    only_plan: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Load files into a table of the target (DL_TARGET_DSN), without a farm."""
    given = dict(map(base.pair, more)) | ({"key": [*key]} if key else {}) | ({"mode": mode} if mode else {})
    if given.get("mode") == "append" and not (force or only_plan):
        raise click.UsageError("no job keeps a repetition of this command from adding the rows twice: add --force")
    if (kind := given.get("mode", "merge")) in ("merge", "scd2") and not (given.get("key") or only_plan):
        raise click.UsageError(f"{kind} needs --key; append and replace need none: --plan shows the columns")
    settings = base.settings()
    with _refusing(), TemporaryDirectory() as scratch:
        folder = Path(scratch)  # for what is downloaded
        if "://" not in path and "source" not in given:
            inside = Path(os.path.realpath(path)).is_relative_to(Path.cwd())
            folder, path = (Path.cwd(), path) if inside else (Path("/"), os.path.abspath(path))
        args, job_id = given | {"path": path, "table": table}, uuid4()
        run = cast(Execution, _RunWithoutFarm(settings, job_id, only_plan))
        context = Context(job_id, 1, table, "", None, logging.getLogger("pipeline.load.files"), folder, 1, run)
        if only_plan:
            _show_plan(files.plan(validated(files.Files, args), context), as_json)
        else:
            err = screen.console(sys.stderr)
            with progress.Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
                shown = bar.add_task("reading", total=None)

                def show(step: Progress) -> None:
                    if "total" in step:
                        phase = step.get("phase", "reading")
                        bar.update(shown, completed=step["processed"], total=step["total"], description=phase)

                counts = followed(files.load_files(args, context), show)
            facts = ((name.replace("_", " "), value) for name, value in counts.items() if name != "total")
            click.echo(screen.as_json(counts)) if as_json else screen.show(screen.table((), facts))


def _show_plan(plan: files.Plan, as_json: bool) -> None:
    if as_json:
        return click.echo(screen.as_json(plan._asdict()))
    screen.show(screen.table((), plan.dialect.items()))
    screen.show(screen.table(["column", "type"], plan.columns.items()))
    screen.show(screen.table([*plan.columns], plan.rows, loose=[*plan.columns]))
    click.echo(plan.ddl + ";" if plan.ddl else "the table exists")


# --- states ---


@commands.group(examples=["dataloader state list"])
def state() -> None:
    """The states of loads and pipelines in the target, such as how far a cursor has come."""


@state.command(name="list", examples=["dataloader state list"])
@click.option("--json", "as_json", is_flag=True, help="print a JSON document")
def list_states(as_json: bool) -> None:
    """List the states: the value of each, and who has changed it."""
    with _target() as conn:
        rows = states.states(conn)
    if as_json:
        click.echo(screen.as_json({"states": rows}))
    else:
        shown = [row | {"value": json.dumps(row["value"], ensure_ascii=False)} for row in rows]
        screen.show(screen.listing("name value changed_at job=job_id changed_by", shown))


@state.command(examples=["dataloader state show crm:customers"])
@click.argument("name")
def show(name: str) -> None:
    """Print the value of a state as JSON."""
    with _target() as conn:
        click.echo(screen.as_json(_known(conn, name)["value"]))


@state.command(name="set", examples=["dataloader state set crm:customers '\"2026-01-31 00:00:00+00\"'"])
@click.argument("name")
@click.argument("value")
def set_state(name: str, value: str) -> None:
    """Set a state to a value of JSON; a run under way that began at another value does not commit."""
    try:
        given = json.loads(value)
    except ValueError:
        raise click.BadParameter("should be JSON; a text has quotes of its own: '\"2026-01-31\"'") from None
    with _target() as conn, conn.transaction():
        states.give(conn, name, given, person())
    click.echo(f"the state {name} is set")


@state.command(examples=["dataloader state reset crm:customers"])
@click.argument("name")
def reset(name: str) -> None:
    """Forget the value of a state: the next load with this cursor reads everything."""
    with _target() as conn, conn.transaction():
        _known(conn, name)
        states.give(conn, name, None, person())
    click.echo(f"the state {name} has no value now")


def _known(conn: db.Connection, name: str) -> dict[str, Any]:
    if rows := states.states(conn, name):
        return rows[0]
    base.refuse(f"there is no state {name}: `dataloader state list` has their names", EXIT_FAILED)
