"""`logs`: what the runs of a job have written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import tzinfo
from uuid import UUID

import click

from dataloader.cli import base, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client import LogLine, Unavailable
from dataloader.client.farm import Farm

FOLLOW_SEC = 1.0


@click.group(cls=base.Group)
def commands() -> None:
    """Logs of jobs."""


@commands.command(examples=(f"dataloader logs -f {base.EXAMPLE_ID}",))
@click.argument("job_id", type=base.JOB_ID)
@click.option("--follow", "-f", is_flag=True, help="show new lines as they come, until Ctrl-C or the job's end")
@click.option("--attempt", type=click.IntRange(1), help="only the lines of this attempt")
@reaching
def logs(reached: Reached, job_id: UUID, follow: bool, attempt: int | None) -> None:
    """Show what the runs of a job have written: its logging, its prints, the output of its programs.

    With --json a line of JSON for each line.
    """
    run = 0
    try:
        for line in _followed(reached.farm, job_id, attempt) if follow else reached.farm.logs(job_id, attempt=attempt):
            if reached.as_json:
                reached.print_json(line, None)
                continue
            if line.claim != run and attempt is None:
                click.echo(f"--- attempt {line.attempt}")
            run = line.claim
            _show(line, reached.zone)
    except KeyboardInterrupt:
        return


def _show(line: LogLine, zone: tzinfo) -> None:
    if line.left_out:
        click.echo(f"... {line.left_out:,} lines were left out: the log is larger than DL_JOB_LOG_KB")
    source = line.level if line.source == "log" else line.source
    click.echo(f"{screen.clock(line.at, zone)} {screen.plain(source):8} {screen.plain(line.text)}")


def _followed(farm: Farm, job_id: UUID, attempt: int | None) -> Iterator[LogLine]:
    """The lines as they come, until the job has ended; over a farm that is away for a while."""
    after, is_over = None, False
    while not is_over:
        try:
            is_over = farm.status(job_id).is_final  # before the look: its last lines are there then
            for line in farm.logs(job_id, attempt=attempt, after=after):
                after = line.place
                yield line
        except Unavailable as e:
            is_over = False
            click.echo(f"dataloader: {screen.plain(str(e))}; trying again", err=True)
        if not is_over:
            time.sleep(FOLLOW_SEC)
