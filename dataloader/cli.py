"""The command line: one command per process, and what people need beside them. May import anything.

Messages for people go to stderr, answers to stdout. Exit statuses are those of `process`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import psycopg

from dataloader import config, db, embedded, keeper, log, migrations, pipelines, probe, reaper, supervisor, worker
from dataloader.config import Settings
from dataloader.process import EXIT_CANNOT_START, EXIT_FAILED, Pipes
from dataloader.slots import Farm, Slot

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("dataloader"), prog_name="dataloader")
def main() -> None:
    """A job farm for long, CPU-heavy ETL work on PostgreSQL."""


@main.command()
def up() -> None:
    """Run everything on this machine; with an embedded PostgreSQL when no database is configured."""
    from dataloader import up as program

    sys.exit(program.run(_settings()))


@main.command()
def workers() -> None:
    """Run the supervisor with its workers and their keeper."""
    settings = _settings()
    dsn = _dsn(settings)
    _check_database(settings, dsn, direct=True)
    _preload(settings)

    def worker_main(settings: Settings, queue: str, farm: Farm, slot: Slot, pipes: Pipes) -> int:
        return worker.main(settings, settings.queue_dsn or dsn, queue, farm, slot, pipes)

    def keeper_main(settings: Settings, farm: Farm, pipes: Pipes) -> int:
        return keeper.main(settings, settings.queue_dsn or dsn, farm, pipes)

    sys.exit(supervisor.Supervisor(config.load, settings, worker_main, keeper_main).run())


@main.command(name="reaper")
def reaper_command() -> None:
    """Run the reaper: jobs of lost machines, rows whose time has come."""
    settings = _settings()
    sys.exit(reaper.main(settings, _dsn(settings)))


@main.command()
@click.option("--processes", default=2, show_default=True, help="gunicorn worker processes")
@click.option("--threads", default=32, show_default=True, help="threads of each")
def api(processes: int, threads: int) -> None:
    """Serve the HTTP API with gunicorn."""
    settings = _settings()
    dsn = _dsn(settings)
    _check_database(settings, dsn, direct=False)
    os.environ["DL_DB_DSN"] = dsn
    options = [
        "--config=python:dataloader.api.server",
        "--logger-class=dataloader.api.audit.GunicornLogger",
        "--workers",
        str(processes),
        "--threads",
        str(threads),
    ]
    options += [
        "--bind",
        f"{settings.app_host}:{settings.app_port}",
    ]
    command = [sys.executable, "-m", "gunicorn", *options, "dataloader.api:create_app()"]
    os.execv(sys.executable, command)  # noqa: S606  this process becomes gunicorn


@main.command()
@click.option("--check", "only_check", is_flag=True, help="only say what is missing; exit 1 if anything is")
def migrate(only_check: bool) -> None:
    """Create the queue's tables, or bring them up to date, beside a working farm."""
    settings = _settings()
    dsn, schema = _dsn(settings), settings.pg_schema_queue
    if only_check:
        names = _reached(lambda: _refusing(lambda: _missing(dsn, schema)))
        click.echo("\n".join(f"missing: {name}" for name in names) or "up to date")
        sys.exit(EXIT_FAILED if names else 0)
    names = _reached(lambda: _refusing(lambda: migrations.migrate(dsn, schema)))
    click.echo("\n".join(f"applied: {name}" for name in names) or "up to date")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="the report as a JSON document")
def check(as_json: bool) -> None:
    """Check settings, folders, pipelines and databases without starting anything; exit 78 if anything is wrong."""
    from dataloader import check as program

    report = program.run(lambda settings: settings.queue_dsn or embedded.running(settings.dl_home / "postgres"))
    click.echo(report.document() if as_json else report.text())
    sys.exit(0 if report.is_good else EXIT_CANNOT_START)


@main.command()
@click.argument("figures", nargs=-1)
@click.option(
    "--rounds", type=click.IntRange(1, 1_000), default=5, show_default=True, help="of which medians are taken"
)
@click.option(
    "--scale", type=click.FloatRange(0, 100, min_open=True), default=1.0, show_default=True, help="of all sizes"
)
@click.option("--prefetch", type=click.IntRange(2, 1_000), default=200, show_default=True, help="for drains in batches")
@click.option(
    "--bare",
    type=click.Choice(["plain", "contract", "lean"]),
    default="plain",
    show_default=True,
    help="pgbench's tables: the contract's; with its notify triggers; without its indexes",
)
@click.option("--json", "json_path", metavar="FILE", help="write the result as JSON too; - is stdout")
@click.option("--dsn", help="a database to measure in; default: the configured one, or an embedded PostgreSQL")
def bench(
    figures: tuple[str, ...],
    rounds: int,
    scale: float,
    prefetch: int,
    bare: str,
    json_path: str | None,
    dsn: str | None,
) -> None:
    """Measure a farm beside its database's bare limit; all FIGURES, or those named.

    They are drain, keys, claim, latency, handover, cpu, enqueue, idle and memory. Everything happens in schemas of
    its own, which are dropped at the end.
    """
    from dataloader.bench import program
    from dataloader.bench.place import Wish

    if unknown := [name for name in figures if name not in program.FIGURES]:
        raise click.BadParameter(f"there is no figure {unknown[0]!r}; there are {', '.join(program.FIGURES)}")
    if json_path and json_path != "-" and not _can_be_written(Path(json_path).absolute()):
        raise click.BadParameter(f"{json_path} should be a file that can be written", param_hint="--json")
    settings = _settings()
    try:
        settings = config.load(dl_db_dsn=dsn) if dsn else settings
    except config.ConfigError as e:
        raise click.BadParameter(str(e).partition(": ")[2], param_hint="--dsn") from None
    sys.exit(program.run(settings, figures, Wish(rounds, scale, prefetch, bare), json_path))


@main.command(name="dsn")
@click.option("--show-password", is_flag=True, help="with the password, if the DSN has one")
def dsn_command(show_password: bool) -> None:
    """Print the DSN in use, for psql."""
    dsn = _dsn(_settings())
    click.echo(dsn if show_password else db.shown(dsn))


@main.command(name="token")
@click.argument("name")
@click.option("--scope", "scopes", type=click.Choice(["read", "trigger", "operate"]), multiple=True, required=True)
def token_command(name: str, scopes: tuple[str, ...]) -> None:
    """Make a token for NAME: print it, once, and its entry for DL_API_TOKENS."""
    from dataloader.api import tokens

    token = tokens.new()
    try:
        entry = tokens.entry(token, name, scopes)
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="NAME") from None
    click.echo("The token, for its owner; it is not shown again. Then its entry of the list DL_API_TOKENS:", err=True)
    click.echo(f"{token}\n{entry}")


@main.command()
@click.argument("task")
@click.option("--queue", default="etl.default", show_default=True)
@click.option("--lock-key", help="jobs of one key never run at the same time; default: the task's name")
@click.option("--args", "args_json", default="{}", show_default=True, help="the pipeline's arguments, a JSON object")
@click.option("--idempotency-key")
@click.option("--timeout-sec", type=int, help="how long one run may take; default: what the pipeline says")
@click.option("--url", help="the API; default: http://127.0.0.1:APP_PORT")
def trigger(
    task: str,
    queue: str,
    lock_key: str | None,
    args_json: str,
    idempotency_key: str | None,
    timeout_sec: int | None,
    url: str | None,
) -> None:
    """Start a job and print its id and status."""
    try:
        args = json.loads(args_json)
    except ValueError as e:
        raise click.BadParameter(f"should be a JSON object: {e}", param_hint="--args") from None
    body = {"queue": queue, "task": task, "lock_key": lock_key or task, "args": args}
    given = {"idempotency_key": idempotency_key or None, "timeout_sec": timeout_sec}
    body |= {name: value for name, value in given.items() if value is not None}
    _call(url, "POST", "/api/v1/jobs/trigger", body)


@main.command()
@click.argument("job_id")
@click.option("--url", help="the API; default: http://127.0.0.1:APP_PORT")
def status(job_id: str, url: str | None) -> None:
    """Print a job's status."""
    _call(url, "GET", f"/api/v1/jobs/{urllib.parse.quote(job_id, safe='')}/status")


@main.command()
@click.argument("job_id")
@click.option("--force", is_flag=True, help="do not wait for a safe point: interrupt the run, then kill it")
@click.option("--url", help="the API; default: http://127.0.0.1:APP_PORT")
def cancel(job_id: str, force: bool, url: str | None) -> None:
    """Cancel a job: a queued one at once, a running one at its next safe point."""
    _call(url, "POST", f"/api/v1/jobs/{urllib.parse.quote(job_id, safe='')}/cancel", {"force": True} if force else None)


def _can_be_written(path: Path) -> bool:
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def _settings() -> Settings:
    try:
        settings = config.load()
    except config.ConfigError as e:
        _refuse(str(e), EXIT_CANNOT_START)
    log.configure(settings)
    return settings


def _dsn(settings: Settings) -> str:
    """The queue's DSN: the configured one, or that of an embedded server that is running."""
    dsn = settings.queue_dsn or embedded.running(settings.dl_home / "postgres")
    if dsn is None:
        _refuse(
            "no database is configured: set DL_DB_DSN or PG_HOST and PG_DATABASE, or run `dataloader up`",
            EXIT_CANNOT_START,
        )
    return dsn


def _check_database(settings: Settings, dsn: str, *, direct: bool) -> None:
    """Refuse an older schema, and where the session must be direct a pooler, in one clear line.

    A database that is away is waited for by the processes themselves.
    """
    try:
        with db.connect(dsn, name="dl-check", schema=settings.pg_schema_queue, answer_within=5) as conn:
            if direct:
                probe.require_session(conn, dsn)
            migrations.check(conn)
    except (migrations.SchemaError, config.ConfigError) as e:
        _refuse(str(e), EXIT_CANNOT_START)
    except psycopg.Error as e:
        if direct and probe.is_poolers_refusal(e):
            _refuse(f"{probe.POOLED}: {probe.DIRECT}", EXIT_CANNOT_START)
        if not db.is_passing(e):
            _refuse(f"database: {str(e).strip()}", EXIT_CANNOT_START)
        click.echo(f"dataloader: the database cannot be reached yet: {log.masked(str(e).strip())}", err=True)


def _missing(dsn: str, schema: str) -> list[str]:
    with db.connect(dsn, name="dl-migrate", schema=schema) as conn:
        return migrations.missing(conn)


def _preload(settings: Settings) -> None:
    """Import what all workers need before they are forked, so that they share its memory."""
    pipelines.load(())
    importlib.import_module("encodings.idna")  # what looking up a host's name imports
    for name in settings.preload_modules:
        try:
            importlib.import_module(name)
        except Exception as e:
            _refuse(f"DL_PRELOAD: {name} cannot be imported: {e}", EXIT_CANNOT_START)


def _refusing(action: Callable[[], T]) -> T:
    try:
        return action()
    except migrations.SchemaError as e:
        _refuse(str(e), EXIT_CANNOT_START)


def _reached(action: Callable[[], T]) -> T:
    try:
        return action()
    except psycopg.Error as e:
        _refuse(f"database: {str(e).strip()}", EXIT_FAILED)


def _refuse(message: str, status: int) -> NoReturn:
    for line in message.splitlines():
        click.echo(f"dataloader: {log.masked(line)}", err=True)
    sys.exit(status)


def _call(url: str | None, method: str, path: str, body: dict[str, Any] | None = None) -> None:
    base = url or f"http://127.0.0.1:{_settings().app_port}"
    if not base.startswith(("http://", "https://")):
        raise click.BadParameter("should begin with http:// or https://", param_hint="--url")
    request = urllib.request.Request(  # noqa: S310  the user names the URL
        base.rstrip("/") + path,
        method=method,
        data=json.dumps(body).encode() if body is not None else b"" if method == "POST" else None,
        headers={"Content-Type": "application/json"} if body is not None else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            click.echo(json.dumps(json.load(answer), ensure_ascii=False, indent=2))
    except urllib.error.HTTPError as e:
        _refuse(_problem(e), EXIT_FAILED)
    except (OSError, ValueError) as e:
        _refuse(f"no answer from {base}: {getattr(e, 'reason', e)}; is the API running?", EXIT_FAILED)


def _problem(error: urllib.error.HTTPError) -> str:
    try:
        problem = json.load(error)
        details = [f"  {item['pointer']}: {item['message']}" for item in problem.get("errors", []) if item["pointer"]]
        return "\n".join([f"{problem['title']}: {problem.get('detail', '')}".rstrip(": "), *details])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code} {error.reason}"
