"""The group of the commands about schedules, which are made from the operations (`made`)."""

from __future__ import annotations

import click

from dataloader.cli import base, made


@click.group(cls=base.Group)
def commands() -> None:
    """About schedules."""


@commands.group(examples=["dataloader schedule add nightly load.csv --cron '0 3 * * MON-FRI'"])
def schedule() -> None:
    """Jobs by the clock (docs/schedules.md)."""


made.add(commands, "schedules")
