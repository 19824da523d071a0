"""`search-index`: the index that makes searches by arguments fast, where an operator wants to pay for it."""

from __future__ import annotations

from collections.abc import Callable

import click
import psycopg

from dataloader import config
from dataloader.cli import base
from dataloader.exits import EXIT_CANNOT_START, EXIT_FAILED
from dataloader.queue import db
from dataloader.queue.reports import stats

MAKING_SEC = 86_400.0  # an index of many millions of jobs takes its time


@click.group(cls=base.Group)
def commands() -> None:
    """The index."""


@commands.group(name="search-index", examples=["dataloader search-index create"])
def search_index() -> None:
    """The index for searches by arguments, such as args.date:2024-05-01.

    Without it such a search looks through 8,000 jobs a page. Each insert and each step of a job writes to it.
    """


@search_index.command(examples=["dataloader search-index create"])
def create() -> None:
    """Make the index beside a working farm; needs the owner of the tables."""
    click.echo("the index is made" if _change(stats.create_args_index) else "the index is there already")


@search_index.command(examples=["dataloader search-index remove"])
def remove() -> None:
    """Remove the index beside a working farm."""
    click.echo("the index is removed" if _change(stats.drop_args_index) else "there is no such index")


def _change(change: Callable[[db.Conn], bool]) -> bool:
    try:
        settings = config.load()
    except config.ConfigError as e:
        base.refuse(str(e), EXIT_CANNOT_START)
    try:
        with db.connect(base.dsn(settings), name="dl-search-index", schema=settings.pg_schema_queue) as conn:
            conn.answer_within = MAKING_SEC
            return change(conn)
    except psycopg.Error as e:
        base.refuse(f"the index was not changed: {e}", EXIT_FAILED)
