"""Shared by all commands: the refusal, and the DSN of the queue."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from dataloader import embedded, log
from dataloader.config import Settings
from dataloader.farm.process import EXIT_CANNOT_START


def refuse(message: str, status: int) -> NoReturn:
    """Print `message` to stderr, each line with the program's name and masked secrets, and exit with `status`."""
    for line in message.splitlines():
        click.echo(f"dataloader: {log.masked(line)}", err=True)
    sys.exit(status)


def dsn(settings: Settings) -> str:
    """The queue's DSN: the configured one, or that of a running embedded server; refuses without either."""
    found = settings.queue_dsn or embedded.running(settings.dl_home / "postgres")
    if found is None:
        refuse(
            "no database is configured: set DL_DB_DSN or PG_HOST and PG_DATABASE, or run `dataloader up`",
            EXIT_CANNOT_START,
        )
    return found
