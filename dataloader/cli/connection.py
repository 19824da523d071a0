"""The farm of a command: `reaching` adds the options that choose one, and prints errors in words.

Commands know only `Farm`: the client over HTTP, or `Direct` on the queue's database. A name of a queue or a task that
the farm does not know is refused, but for `--new`.
"""

from __future__ import annotations

import codecs
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import tzinfo
from typing import IO, Any
from zoneinfo import ZoneInfo

import click

from dataloader import config
from dataloader.cli import base
from dataloader.cli.screen import as_json, plain, short, show
from dataloader.client import Client, ClientError, Forbidden, NotFound, Unauthorized, Unavailable
from dataloader.client.farm import Farm
from dataloader.config import Settings
from dataloader.exits import EXIT_CANNOT_START, EXIT_FAILED
from dataloader.log import masking
from dataloader.model.farm import Name

may_be_new = click.option(
    "--new", "is_new", is_flag=True, help="take a queue or a task that the farm does not know yet"
)
NEW_HINT = " (--new takes it all the same)"
_OF_CERTIFICATES = "\nname the host as its certificate does; SSL_CERT_FILE may name the file of its authority"
NO_QUEUE = "it has no job, no worker and no setting"
NO_TASK = "no worker has shown it, and no job names it"


@dataclass(frozen=True)
class Reached:
    """A command's farm and output. `flags` are the options with which another command reaches the same farm."""

    farm: Farm
    as_json: bool
    zone: tzinfo
    flags: str

    def command(self, *words: object) -> str:
        return shlex.join(["dataloader", *map(str, words)]) + self.flags

    def print_json(self, value: Any, indent: int | None = 2) -> None:
        """Print one JSON document to stdout; where that is not UTF-8, other letters than ASCII become escapes."""
        is_ascii = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
        click.echo(as_json(value, indent, is_ascii=is_ascii))

    def answer(self, value: Any, shown: Callable[[], Any]) -> None:
        """Print an answer: as JSON, or the text or the table that `shown` makes of it."""
        if self.as_json:
            self.print_json(value)
        elif isinstance(text := shown(), str):
            click.echo(text)
        else:
            show(text)

    def answer_line(self, value: Any, shown: str) -> None:
        """Print one of many answers on a line."""
        if self.as_json:
            self.print_json(value, None)
        else:
            click.echo(shown)

    def require(self, is_new: bool | None = None, *, queue: str | None = None, task: str | None = None) -> None:
        """Refuse a queue or a task that the farm does not know, unless `is_new`; a missing name is not checked.

        `is_new` is None for a command without `--new`. Where the farm knows no name at all, it has not begun, and where
        the asker may not know (an older service, a role without the right), the farm itself has to judge.
        """
        for known, text in () if is_new else self._unknown(queue, task):
            if known.count:
                base.refuse(text + ("" if is_new is None else NEW_HINT), EXIT_FAILED)

    def hint(self, queue: str | None = None, task: str | None = None) -> None:
        """Say on stderr that a list is empty because the farm does not know these names."""
        for _, text in self._unknown(queue, task):
            click.echo(f"dataloader: {text}", err=True)

    def _unknown(self, queue: str | None, task: str | None) -> Iterator[tuple[Name, str]]:
        """The names that the farm does not know, each with a sentence that offers similar ones."""
        if queue is None and task is None:
            return
        with suppress(NotFound, Forbidden):
            names = self.farm.names(queue=queue, task=task)
            for kind, known, why in (("queue", names.queue, NO_QUEUE), ("task", names.task, NO_TASK)):
                if known and not known.is_known:
                    text = f"no {kind} {short(known.name, 100)!r} is known: {why}"
                    similar = [short(each, 100) for each in known.similar]
                    yield known, f"{text}. {base.did_you_mean(similar)}" if similar else text


def reaching(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that choose a farm; its first argument is a Reached."""

    @click.option("--url", "api_url", help="the API; default: DL_URL, else this machine's, by APP_HOST and APP_PORT")
    @click.option(
        "--token-file",
        type=click.File(errors="replace"),
        metavar="FILE",
        help="the file that holds the token; - is stdin; default: DL_TOKEN",
    )
    @click.option("--direct", is_flag=True, help="ask the queue's database instead of the API")
    @click.option("--dsn", help="ask this database instead of the API")
    @click.option("--json", "as_json", is_flag=True, help="print the answer as JSON")
    @functools.wraps(command)
    def called(*args: Any, **options: Any) -> Any:
        reached = _reached(*(options.pop(name) for name in ("api_url", "token_file", "direct", "dsn", "as_json")))
        try:
            return command(reached, *args, **options)
        except ClientError as e:
            advice, is_over_http = "", isinstance(reached.farm, Client)
            if isinstance(e, Unavailable) and e.status is None and is_over_http:
                advice = _OF_CERTIFICATES if "certificate" in e.detail else "; is the API running?"
            elif isinstance(e, Unauthorized):
                advice = "\nset DL_TOKEN to a token of this service, or name a file that holds one by --token-file"
            elif isinstance(e, Forbidden) and is_over_http:
                advice = "\nthe token comes from DL_TOKEN or --token-file"
            base.refuse(plain(str(e), lines=True) + advice, EXIT_FAILED)
        finally:
            reached.farm.close()

    return called


def _reached(url: str | None, token_file: IO[str] | None, direct: bool, dsn: str | None, as_json: bool) -> Reached:
    if (direct or dsn) and (url or token_file):
        raise click.UsageError("--url and --token-file are for the API, --direct and --dsn for a database: choose one")
    settings = _settings(url, dsn)
    zone = ZoneInfo(settings.people_zone if settings else config.machine_zone())
    if settings:
        masking.learn_configured(settings)
    if settings and (dsn or direct):
        from dataloader.cli.direct import Direct  # a command for the API needs no driver

        flags = ' --dsn "$DSN"' if dsn else " --direct"  # the DSN itself may hold a password
        return Reached(Direct(base.dsn(settings), settings), as_json, zone, flags)
    flags, token = f" --url {shlex.quote(url)}" if url else "", os.environ.get("DL_TOKEN")
    if settings:
        url = url or settings.dl_url or settings.own_url
        token = settings.dl_token.get_secret_value() if settings.dl_token else None
    if token_file:
        token = token_file.read(10_000).strip().partition("\n{")[0]  # `dataloader token` prints the entry behind it
    try:
        return Reached(Client(url, token, timeout=30, patience=0), as_json, zone, flags)
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="--url, DL_URL, DL_TOKEN or --token-file") from None


def _settings(url: str | None, dsn: str | None) -> Settings | None:
    """This machine's settings; None where they are wrong and a URL is given."""
    if dsn:
        hide_arguments()
    try:
        return config.load(dl_db_dsn=dsn) if dsn else config.load()
    except config.ConfigError as e:
        if url:
            return None
        base.refuse(str(e).replace("DL_DB_DSN:", "--dsn:") if dsn else str(e), EXIT_CANNOT_START)


def hide_arguments() -> None:
    """Hide the arguments: a DSN may hold a password, and every user can read a process's arguments."""
    import setproctitle

    setproctitle.setproctitle(" ".join(["dataloader", *sys.argv[1:2]]))
