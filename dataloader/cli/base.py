"""What every command says the same way: a refusal, and where the queue is. May import anything below cli."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from dataloader import embedded, log
from dataloader.config import Settings
from dataloader.farm.process import EXIT_CANNOT_START


def refuse(message: str, status: int) -> NoReturn:
    """Say what is wrong, line by line and without secrets, and leave with this exit status."""
    for line in message.splitlines():
        click.echo(f"dataloader: {log.masked(line)}", err=True)
    sys.exit(status)


def dsn(settings: Settings) -> str:
    """The queue's DSN: the configured one, or that of an embedded server that is running."""
    found = settings.queue_dsn or embedded.running(settings.dl_home / "postgres")
    if found is None:
        refuse(
            "no database is configured: set DL_DB_DSN or PG_HOST and PG_DATABASE, or run `dataloader up`",
            EXIT_CANNOT_START,
        )
    return found
