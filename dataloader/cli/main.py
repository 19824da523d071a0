"""The command line: one command per process, and the commands that ask or change a farm.

Messages go to stderr, answers to stdout; exit statuses are those of `exits`. This module holds the programs,
and `_MODULES` names the module of each other command. Most commands are made from the operations (`made`).
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dataloader import version
from dataloader.cli import base
from dataloader.exits import EXIT_CANNOT_START, EXIT_FAILED

# Each command imports its program by itself: `dataloader --version` and questions to a farm need none of them.
if TYPE_CHECKING:
    from dataloader.config import Settings
    from dataloader.surroundings import Lack

# The module of each command that asks or changes a farm.
_MODULES = {
    name: module
    for module, names in {
        "jobs": "trigger again wait status result job events logs",
        "farm": "jobs tally queues ps tasks task predict top completion",
        "doctor": "doctor",
        "operate": "cancel requeue run-now delete pause resume limit queue schedule errors webhook search-index"
        " backfill",
        "target": "load state",
    }.items()
    for name in names.split()
}
_UNWRITABLE = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # a full disk, a reader that has left
_OPEN_TO_ALL = (
    "Every role may connect to the database until its owner runs, with the roles of other services named as well:"
)
# gunicorn puts the current folder in front of sys.path, where any file of it would hide a library, unless it is there.
_GUNICORN = """\
import sys
from gunicorn import util
sys.path.append(util.getcwd())
from gunicorn.app.wsgiapp import run
run(prog="gunicorn")
"""


class _Main(base.Group):
    """Imports a command of `_MODULES` when it is called: no process of a farm needs their memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands.update(dict.fromkeys(_MODULES, click.Command(None)))  # so that click knows the names

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _MODULES:
            return super().get_command(ctx, name)
        group: click.Group = importlib.import_module(f"dataloader.cli.{_MODULES[name]}").commands
        return group.get_command(ctx, name)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line. Where its output cannot be written, one line replaces the traceback."""
        try:
            try:
                return super().main(*args, **options)
            finally:
                if sys.stdout:
                    sys.stdout.flush()
        except OSError as e:
            if e.errno not in _UNWRITABLE or not _is_of_output(e):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes the rest at its exit
            if e.errno != errno.EPIPE:
                base.refuse(f"the output cannot be written: {e.strerror}", EXIT_FAILED)
            sys.exit(EXIT_FAILED)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """The context of the words behind `dataloader`; an error quotes them without secrets."""
        with base.harmless_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error quotes the words without secrets."""
        with base.harmless_errors():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        programs = [name for name in self.list_commands(ctx) if name not in _MODULES]
        for title, names in (("Programs", programs), ("What people ask of a farm", list(_MODULES))):
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str()) for name, command in commands if command])


def _is_of_output(error: OSError) -> bool:
    """Whether a write to stdout or stderr has failed, and none to a file of the command."""
    place = error.__traceback__
    while place and place.tb_next:
        place = place.tb_next
    module = place.tb_frame.f_globals["__name__"] if place else ""
    return module == __name__ or module.partition(".")[0] in ("click", "rich")


def _print_version(context: click.Context, option: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        click.echo(f"dataloader, version {version()}")  # click's own option raises where nothing is installed
        context.exit()


@click.group(
    cls=_Main,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=["dataloader up", "dataloader trigger noop --wait", "dataloader top"],
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """A job farm for long, CPU-heavy ETL work on PostgreSQL."""


@main.command(examples=["dataloader up", "DL_PIPELINES=pipelines dataloader up --reload"])
@click.option("--reload", "reloads", is_flag=True, help="watch the files of your modules; a change brings new workers")
def up(reloads: bool) -> None:
    """Run everything on this machine; with an embedded PostgreSQL when no database is configured."""
    from dataloader import surroundings
    from dataloader.farm import supervisor
    from dataloader.farm.slots import files_needed
    from dataloader.local import up as program

    settings = base.settings()
    files = files_needed(supervisor.wished(settings).total())
    _check_host([*surroundings.worker_lacks(files), *surroundings.api_lacks()], files)
    sys.exit(program.run(settings, reloads))


@main.command(examples=["dataloader workers"])
def workers() -> None:
    """Run the supervisor with its workers and their keeper."""
    blocked = {signal.SIGHUP, signal.SIGTTIN}  # until the supervisor can obey: they would end or stop the program
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    from dataloader import config, pipelines, surroundings
    from dataloader.farm import keeper, supervisor, worker
    from dataloader.farm.slots import files_needed
    from dataloader.queue import migrations

    settings = base.settings()
    files = files_needed(supervisor.wished(settings).total())
    _check_host(surroundings.worker_lacks(files), files, blocked)
    dsn = base.dsn(settings)
    _check_database(settings, dsn, direct=True)
    # The supervisor imports and reads before the fork all that its workers need, so that they share its memory.
    pipelines.load(())
    importlib.import_module("encodings.idna")  # the lookup of a host's name imports it
    for name in settings.dl_preload:
        try:
            pipelines.import_users(name)
        except (Exception, SystemExit) as e:
            base.refuse(f"DL_PRELOAD: {name} cannot be imported: {e}", EXIT_CANNOT_START)
    migrations.expected()

    # A reload may bring another DSN; that of an embedded server stays.
    program = supervisor.Supervisor(
        config.load,
        settings,
        lambda settings, *given: worker.main(settings, settings.queue_dsn or dsn, *given),
        lambda settings, *given: keeper.main(settings, settings.queue_dsn or dsn, *given),
    )
    sys.exit(program.run())


@main.command(name="reaper", examples=["dataloader reaper"])
def reaper_command() -> None:
    """Run the reaper: jobs of lost machines, rows whose time has come."""
    from dataloader import surroundings
    from dataloader.farm import reaper

    settings = base.settings()
    surroundings.prepare()
    sys.exit(reaper.main(settings, base.dsn(settings)))


@main.command(examples=["dataloader api --processes 2 --threads 32"])
@click.option("--processes", default=2, show_default=True, help="gunicorn worker processes")
@click.option("--threads", default=32, show_default=True, help="threads of each worker process")
def api(processes: int, threads: int) -> None:
    """Serve the HTTP API with gunicorn."""
    # Until gunicorn can obey: these signals would end or stop the program.
    blocked = {signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    from dataloader import surroundings
    from dataloader.local import ports
    from dataloader.queue import hooks

    settings = base.settings()
    _check_host(surroundings.api_lacks(), blocked=blocked)
    dsn = base.dsn(settings)
    _check_database(settings, dsn, direct=False)
    with base.refusing():
        hooks.load(settings.dl_hooks)
    try:
        bind = ports.wait_for(settings.app_host, settings.app_port)
    except ports.NotFree as e:
        base.refuse(str(e), EXIT_FAILED)
    os.environ["DL_DB_DSN"] = dsn
    options = [
        "--config=python:dataloader.api.server.gunicorn_config",
        "--logger-class=dataloader.api.server.audit.GunicornLogger",
        f"--workers={processes}",
        f"--threads={threads}",
        f"--bind={bind}",
    ]
    command = [sys.executable, "-P", "-c", _GUNICORN, *options, "dataloader.api:create_app()"]
    os.execv(sys.executable, command)  # noqa: S606  this process becomes gunicorn


def _parsed_roles(context: click.Context, option: click.Parameter, value: str | None) -> list[tuple[str, str]]:
    from dataloader.queue import migrations

    roles = [
        (kind.strip(), name.strip()) for kind, _, name in (each.partition("=") for each in (value or "").split(","))
    ]
    if value is not None and not all(kind in migrations.KINDS and name for kind, name in roles):
        raise click.BadParameter("should be a list like farm=NAME,producer=NAME,reader=NAME")
    return roles if value else []


@main.command(examples=["dataloader migrate", "dataloader migrate --roles farm=dl_farm,reader=dl_reader"])
@click.option(
    "--check", "only_check", is_flag=True, help="change nothing, print what is missing; exit 1 if anything is"
)
@click.option(
    "--roles", callback=_parsed_roles, help="then grant their rights to roles: farm=NAME,producer=NAME,reader=NAME"
)
@click.option("--print", "only_print", is_flag=True, help="with --roles: change nothing, print the GRANTs")
@click.option(
    "--plain-protocol/--no-plain-protocol",
    default=None,
    help="with or without the UNIQUE that other services' ON CONFLICT (idempotency_key) needs; default: as it is",
)
def migrate(only_check: bool, roles: list[tuple[str, str]], only_print: bool, plain_protocol: bool | None) -> None:
    """Create the queue's tables, or bring them up to date, beside a working farm."""
    from psycopg.conninfo import conninfo_to_dict

    from dataloader.queue import db, migrations

    if (only_print and not roles) or (only_check and (roles or plain_protocol is not None)):
        raise click.UsageError("--print goes with --roles, --check goes alone")
    settings = base.settings()
    schema = settings.pg_schema_queue
    name = conninfo_to_dict(settings.queue_dsn or "").get("dbname") or "the_database"
    closing = migrations.closing(str(name), roles)
    if only_print:
        click.echo(f"{migrations.grants(schema, roles)}\n-- {_OPEN_TO_ALL}\n-- {closing}")
        return
    dsn = base.dsn(settings)
    with base.refusing():
        if only_check:
            with db.connect(dsn, name="dl-migrate", schema=schema) as conn, db.in_force(conn):
                todo = [f"missing: {name}" for name in migrations.missing(conn)]
                todo += [f"not as shipped: {drift}" for drift in migrations.drifted(conn)]
            click.echo("\n".join(todo) or "up to date")
            sys.exit(EXIT_FAILED if todo else 0)
        names = migrations.migrate(dsn, schema, plain_protocol)
        click.echo("\n".join(f"applied: {name}" for name in names) or "up to date")
        if roles:
            migrations.grant(dsn, schema, roles)
            click.echo("\n".join(f"granted: {role} is a {kind}" for kind, role in roles))
            click.echo(f"{_OPEN_TO_ALL}\n{closing}")


@main.command(examples=["dataloader check"])
@click.option("--json", "as_json", is_flag=True, help="print the report as a JSON document")
def check(as_json: bool) -> None:
    """Check settings, folders, pipelines and databases without starting anything; exit 78 if anything is wrong."""
    from dataloader import check as program
    from dataloader import embedded

    report = program.run(lambda settings: settings.queue_dsn or embedded.running(settings.dl_home / "postgres"))
    click.echo(report.document() if as_json else report.text())
    sys.exit(0 if report.is_good else EXIT_CANNOT_START)


@main.command(examples=["dataloader new count_customers"])
@click.argument("name")
def new(name: str) -> None:
    """Write a pipeline and its test into this folder: NAME.py and test_NAME.py."""
    from dataloader import new as kit

    try:
        written = kit.write(name, Path.cwd())
    except kit.Refused as e:
        base.refuse(str(e), EXIT_FAILED)
    click.echo("\n".join(f"written      {path.name}" for path in written) + "\n\n" + kit.what_next(name))


@main.command(name="dsn", examples=['psql "$(dataloader dsn --show-password)"'])
@click.option("--show-password", is_flag=True, help="print the password too, if the DSN has one")
def dsn_command(show_password: bool) -> None:
    """Print the DSN in use, for psql."""
    from dataloader.queue import db

    dsn = base.dsn(base.settings())
    click.echo(dsn if show_password else db.shown(dsn))


@main.command(name="token", examples=["dataloader token ops --scope read --scope operate"])
@click.argument("name")
@click.option("--scope", "scopes", type=base.Choice(["read", "trigger", "operate"]), multiple=True, required=True)
def token_command(name: str, scopes: tuple[str, ...]) -> None:
    """Make a token for NAME: print it, once, and its entry for DL_API_TOKENS."""
    from dataloader.api.web import tokens

    token = tokens.new()
    try:
        entry = tokens.entry(token, name, scopes)
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="NAME") from None
    click.echo("The token, for its owner; it is not shown again. Then its entry of the list DL_API_TOKENS:", err=True)
    click.echo(f"{token}\n{entry}")


def _check_host(lacks: Iterable[Lack], files: int = 0, blocked: Collection[signal.Signals] = ()) -> None:
    """Undo what the parent process has handed down, and refuse, a line each, what the host lacks."""
    from dataloader import surroundings

    surroundings.prepare(files, blocked)
    if lines := [str(lack) for lack in lacks]:
        base.refuse("\n".join(lines), EXIT_CANNOT_START)


def _check_database(settings: Settings, dsn: str, *, direct: bool) -> None:
    """Refuse, in one line, an older schema, and a pooler through which these processes cannot work.

    The processes themselves wait for a database that is away.
    """
    import psycopg

    from dataloader import config, log
    from dataloader.queue import db, migrations, probe

    try:
        with db.connect(dsn, name="dl-check", schema=settings.pg_schema_queue, answer_within=5) as conn:
            if direct:
                probe.require_session(conn, dsn)
            with db.in_force(conn):
                migrations.check(conn)
    except (migrations.SchemaError, config.ConfigError) as e:
        base.refuse(str(e), EXIT_CANNOT_START)
    except psycopg.Error as e:
        if probe.is_poolers_refusal(e):
            why = f"{probe.POOLED}: {probe.DIRECT}" if direct else f"{probe.REFUSED}: {probe.SHARED}"
            base.refuse(why, EXIT_CANNOT_START)
        if not db.is_passing(e):
            base.refuse(f"database: {str(e).strip()}", EXIT_CANNOT_START)
        click.echo(f"dataloader: the database cannot be reached yet: {log.masked(str(e).strip())}", err=True)
