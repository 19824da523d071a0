"""`webhook`: the receivers of alerts (docs/alerts.md)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from dataloader.cli import base, made, names, screen
from dataloader.cli.connection import Reached, reaching
from dataloader.client import Webhook, Webhooks
from dataloader.client.operations import given
from dataloader.model.kinds import SHAPES
from dataloader.queue.reports.messages import KINDS


@click.group(cls=base.Group)
def commands() -> None:
    """Alerts."""


@commands.group(examples=["dataloader webhook add ops https://ops.example.com/alerts --signed-by DL_WEBHOOK_KEY"])
def webhook() -> None:
    """The receivers of alerts for dead jobs, stuck runs, late and paused queues (docs/alerts.md)."""


@webhook.command(examples=["dataloader webhook add ops https://ops.example.com/alerts --signed-by DL_WEBHOOK_KEY"])
@click.argument("name")
@click.argument("address", metavar="URL")
@click.option("--shape", type=base.Choice(SHAPES), default="json", show_default=True, help="of the messages")
@click.option("--signed-by", metavar="VARIABLE", help="the workers' variable with the key, as DL_WEBHOOK_KEY")
@click.option("--kind", "kinds", type=base.Choice(KINDS), multiple=True, help="of alerts; default: all")
@click.option("--queue", "queues", multiple=True, help="whose alerts; default: of all queues")
@click.option("--lag-sec", type=base.Number(0, min_open=True), help="from which latency on a queue is late")
@names.may_be_new
@reaching
def add(
    reached: Reached,
    name: str,
    address: str,
    is_new: bool,
    kinds: tuple[str, ...],
    queues: tuple[str, ...],
    **more: Any,
) -> None:
    """Add a receiver, or change the one of this name.

    A URL with a secret is '${DL_WEBHOOK_OPS}', or another variable of this prefix, which holds the whole URL.
    """
    for queue in queues:
        names.require(reached, is_new, queue=queue)
    lists = {"kinds": list(kinds) or None, "queues": list(queues) or None}
    found = reached.farm.put_webhook(name, address, **given(**lists, **more))
    if reached.as_json:
        reached.print_json(found)
    else:
        click.echo(f"{name} is told of {_what(found)}. To try it: {reached.command('webhook', 'test', name)}")
    _warn(reached, reached.farm.webhooks())


@webhook.command(name="list", examples=["dataloader webhook list"])
@reaching
def list_webhooks(reached: Reached) -> None:
    """List the receivers of alerts."""
    found = reached.farm.webhooks()
    if reached.as_json:
        reached.print_json(found)
        return
    screen.show(_table(found))
    _warn(reached, found)


@webhook.command(name="test", examples=["dataloader webhook test ops"])
@click.argument("name")
@reaching
def send_test(reached: Reached, name: str) -> None:
    """Send a test message to a receiver, also to a paused one."""
    sent = reached.farm.test_webhook(name)
    if reached.as_json:
        reached.print_json(sent)
    else:
        click.echo(f"the message is job {sent.job_id}. Has it arrived?\n    {reached.command('wait', sent.job_id)}")
    _warn(reached, reached.farm.webhooks())


made.add(commands, "alerts")


def _warn(reached: Reached, found: Webhooks) -> None:
    if not found.is_served:
        queue = screen.plain(found.queue)
        text = f'no worker serves the queue {queue}: messages wait. Add {{"queue": "{queue}"}} to WORKERS_JSON'
        click.echo(f"dataloader: {text}", err=True)


def _what(found: Webhook) -> str:
    kinds = ", ".join(found.kinds or KINDS)
    return f"{kinds} of {', '.join(map(screen.plain, found.queues)) if found.queues else 'all queues'}"


def _table(found: Webhooks) -> Any:
    titles = ("name", "shape", "url", "told of", "late after", "signed by", "")
    now = datetime.now(UTC)
    return screen.table(
        titles,
        (
            (
                each.name,
                each.shape,
                screen.short(each.url, 80),
                _what(each),
                screen.duration(each.lag_sec),
                each.signed_by or "",
                _paused(each, now),
            )
            for each in found.webhooks
        ),
        loose=titles[2:4],
    )


def _paused(webhook: Webhook, now: datetime) -> str:
    if webhook.paused_at is None:
        return ""
    return f"paused {screen.ago(webhook.paused_at, now)} by {screen.short(webhook.paused_by, 60)}"
