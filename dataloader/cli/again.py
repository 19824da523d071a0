"""The command `again`: a job that has ended is run again with changes."""

from __future__ import annotations

import json
import sys
from typing import Any
from uuid import UUID

import click

from dataloader.cli import base, watch
from dataloader.cli.connection import Reached, reaching
from dataloader.cli.jobs import arguments
from dataloader.client.operations import given


@click.group(cls=base.Group)
def commands() -> None:
    """About jobs that have ended."""


@commands.command(examples=(f"dataloader again {base.EXAMPLE_ID} --arg day=2026-01-31 --arg limit=10",))
@click.argument("job_id", type=base.JOB_ID)
@click.option(
    "--arg", "pairs", multiple=True, metavar="NAME=VALUE", help="an arg to replace, JSON or text; again for more"
)
@click.option("--args", "args_json", default="{}", help="args to replace, a JSON object; @FILE reads a file, @- stdin")
@click.option("--without", multiple=True, metavar="NAME", help="an arg to leave out; again for more")
@click.option("--queue", "-q", help="default: the job's")
@click.option("--lock-key", help="default: the job's")
@click.option("--priority", type=int, help="default: the job's")
@click.option("--wait", "waits", is_flag=True, help="wait for the new job's end; the exit status is that of `wait`")
@reaching
def again(
    reached: Reached,
    job_id: UUID,
    pairs: tuple[str, ...],
    args_json: str,
    without: tuple[str, ...],
    waits: bool,
    **fields: Any,
) -> None:
    """Add a job with the fields of one that has ended, with changes; args that are masked stay as they are."""
    args = arguments(args_json) | dict(map(_named, pairs))
    started = reached.farm.again(job_id, args=args, without=without, **given(**fields))
    if not waits:
        reached.print_json(started.document)
        return
    click.echo(f"dataloader: job {started.job_id}", err=True)
    sys.exit(watch.to_its_end(reached, started.job_id, None))


def _named(pair: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE; a value that is no JSON is a text."""
    name, found, text = pair.partition("=")
    if not (name and found):
        raise click.BadParameter("should be NAME=VALUE, such as limit=10", param_hint="--arg")
    try:
        return name, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return name, text


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # NaN and Infinity, which JSON cannot say: they are texts
