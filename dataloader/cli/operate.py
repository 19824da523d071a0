"""Commands that change jobs (requeue, run-now, delete, cancel), queues, limits, plans, errors and webhooks.

`made` makes all other commands of these subjects from the operations. A new parameter of one here is added by hand.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import click
from rich.console import Group

from dataloader import config, ops
from dataloader.cli import base, made, screen
from dataloader.cli.connection import Reached, may_be_new, reaching
from dataloader.cli.watch import EXITS
from dataloader.client.farm import BATCH
from dataloader.exits import EXIT_FAILED
from dataloader.model.jobs import Preview
from dataloader.model.kinds import OrderName
from dataloader.ops.jobs import ORDERED
from dataloader.queue import db
from dataloader.queue.reports import stats

INDEX_SEC = 86_400.0  # the longest build of the index; one for many millions of jobs may need hours
_POLL_SEC = 1.0  # between two polls of `backfill wait`

commands = base.Group()
_ADVICE = {"run-now": "only a queued job can be made due", "delete": "cancel it first", "cancel": "it has ended"}


def _order(name: OrderName, text: str, *options: click.Option) -> None:
    """Make the command that gives this order to named jobs, or to the jobs of a search."""

    @commands.command(
        name=name,
        help=f"{text}; - reads their ids from stdin.",
        examples=[
            f"dataloader {name} {base.EXAMPLE_ID}",
            f"dataloader {name} --matching 'queue:etl.default task:load.csv'",
        ],
    )
    @click.argument("job_ids", nargs=-1, metavar="[JOB_IDS]... | -")
    @click.option("--matching", metavar="TEXT", help='all jobs of this search: "task:load.csv status:dead"')
    @click.option("--preview", "only_preview", is_flag=True, help="count the jobs of --matching; show why others stay")
    @click.option("--yes", is_flag=True, help="do not ask for confirmation")
    @reaching
    def change(
        reached: Reached,
        job_ids: tuple[str, ...],
        matching: str | None,
        only_preview: bool,
        yes: bool,
        force: bool = False,
        from_scratch: bool = False,
    ) -> None:
        if bool(job_ids) == (matching is not None):
            raise click.UsageError("give the ids of jobs, or a search by --matching, but not both")
        if matching is None and only_preview:
            raise click.UsageError("--preview is for --matching")
        if matching is not None and force:
            raise click.UsageError("--force is for named jobs, not for those of --matching")
        verb: OrderName = "start-over" if from_scratch else name
        if matching is not None:
            _change_matching(reached, verb, matching, only_preview, yes)
        elif name == "cancel" and len(job_ids) == 1 and "-" not in job_ids:
            reached.print_json(reached.farm.cancel(_ids(job_ids)[0], force=force))
        else:
            if name == "delete" and not yes:
                if "-" in job_ids:
                    raise click.UsageError("the ids come from stdin, so there is no confirmation: add --yes")
                click.confirm(f"Delete {len(job_ids)} jobs, with their journal, for good?", abort=True, err=True)
            _change_named(reached, verb, _ids(job_ids), force)

    change.params[1:1] = options


_order(
    "requeue",
    "Queue ended jobs again, each with a fresh budget of attempts",
    click.Option(["--from-scratch"], is_flag=True, help="begin at the start, not at the checkpoints"),
)
_order("run-now", "Make jobs that wait for their time due now")
_order("delete", "Delete jobs that are not running, with their journal")
_order(
    "cancel",
    "Cancel jobs: queued ones at once, running ones at their next safe point",
    click.Option(["--force"], is_flag=True, help="do not wait for a safe point: interrupt the run, then kill it"),
)


def _change_named(reached: Reached, verb: OrderName, job_ids: list[UUID], force: bool) -> None:
    farm = reached.farm
    order = partial(farm.cancel_jobs, force=force) if verb == "cancel" else partial(farm.change_jobs, verb)
    batches = (job_ids[start : start + BATCH] for start in range(0, len(job_ids), BATCH))
    outcomes = [each for batch in batches for each in order(batch)]
    known = {"done": ORDERED[verb].removesuffix(", with their journals"), "unknown": "there is no such job"}
    advice = _ADVICE.get(verb, "it has not ended")
    lines = [
        f"{each.job_id} {known.get(each.outcome) or f'is {screen.plain(each.outcome)}: {advice}'}" for each in outcomes
    ]
    if outcomes or reached.as_json:
        reached.answer({"jobs": outcomes}, lambda: "\n".join(lines))
    if any(each.outcome != "done" for each in outcomes):
        sys.exit(EXIT_FAILED)


def _change_matching(reached: Reached, verb: OrderName, query: str, only_preview: bool, yes: bool) -> None:
    """Show the preview of an order to the jobs of a search, ask for confirmation, and give the order."""
    if not query.strip():
        raise click.UsageError("--matching needs a search: an empty search would select every job")
    preview = reached.farm.preview(verb, matching={"q": query})
    if only_preview:
        reached.answer(preview, lambda: _summary(preview))
        return
    click.echo(_summary(preview), err=True)
    if preview.count and not yes:
        click.confirm(f"{verb} these {_count(preview)} jobs?", abort=True, err=True)
    changed = 0
    if preview.count or not preview.is_exact:
        changed = reached.farm.order_jobs(verb, preview.confirmation, matching={"q": query})
    text = f"{changed:,} jobs {ORDERED[verb]}"
    reached.answer({"order": verb, "previewed": preview.count, "changed": changed}, lambda: text)


def _count(preview: Preview) -> str:
    return f"{preview.count:,}{'' if preview.is_exact else ' or more'}"


def _summary(preview: Preview) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in preview.changes.items()) or "none"
    left = [f"unchanged: {each.count:,} {each.kind}; each {each.reason}" for each in preview.leaves]
    return screen.plain("\n".join([f"{preview.order}: {_count(preview)} jobs ({kinds})", *left]), lines=True)


def _ids(words: tuple[str, ...]) -> list[UUID]:
    """The ids of the arguments; a - is replaced by the ids from stdin."""
    texts = [text for word in words for text in (sys.stdin.read().split() if word == "-" else [word])]
    try:
        return list(dict.fromkeys(map(UUID, texts)))
    except ValueError:
        raise click.BadParameter(f"a job's id is a UUID such as {base.EXAMPLE_ID}") from None


@commands.group(
    default="queue", examples=["dataloader limit etl.default 10000", "dataloader limit set source:oracle --most 3"]
)
def limit() -> None:
    """Limits of the fleet: how many jobs run at once, start in a minute; the length of a queue.

    `limit QUEUE NUMBER` is `limit queue QUEUE NUMBER`.
    """


@commands.group(name="queue", examples=["dataloader queue set orders --ordered --merge"])
def queue_group() -> None:
    """A whole queue: the order of its jobs (docs/ordered.md), its keys, another name, its retries."""


@commands.group(examples=["dataloader schedule add nightly load.csv --cron '0 3 * * MON-FRI'"])
def schedule() -> None:
    """Schedules, which add jobs at given times (docs/schedules.md)."""


@commands.group(examples=["dataloader webhook add ops https://ops.example.com/alerts --signed-by DL_WEBHOOK_KEY"])
def webhook() -> None:
    """The receivers of alerts for dead jobs, stuck runs, late and paused queues (docs/alerts.md)."""


@commands.group(default="list", is_short=True, examples=["dataloader errors -q etl.default --since 1d"])
def errors() -> None:
    """Dead and retrying jobs in groups by their errors, and notes about a group (docs/errors.md).

    `errors` alone is `errors list`.
    """


@commands.group(default="add", examples=["dataloader backfill load.csv --from 2019-01-01 --to 2026-11-01 --step day"])
def backfill() -> None:
    """Jobs of one task for many partitions (docs/backfills.md): `backfill TASK --from .. --to .. --step ..`."""


@backfill.command(
    examples=[
        "dataloader backfill add load.csv --from 2019-01-01 --to 2026-11-01 --step day",
        "dataloader backfill add load.csv --file - --max-running 4 --dry-run",
    ]
)
@click.argument("task")
@click.option("--name", help="default: the task and the range")
@click.option("--from", "since", metavar="FIRST", help="the first partition: 2019-01-31, 2019-01-31T06:00, 0")
@click.option("--to", "until", metavar="LAST", help="the last partition begins here, or before")
@click.option("--partition", "listed", multiple=True, help="a partition; repeat it for more")
@click.option("--file", type=click.File("r", "utf-8"), metavar="FILE", help="a partition a line; - is stdin")
@click.option("--dry-run", is_flag=True, help="show what it would do, and change nothing")
@may_be_new
@reaching
def add(reached: Reached, task: str, name: str | None, dry_run: bool, is_new: bool, **options: Any) -> None:
    """Add a backfill of a task: one job for each partition of a range, a list or a file."""
    fields = _fields(**options)
    reached.require(is_new, queue=options["queue"], task=task)
    if name is None:
        is_range = "since" in fields and "until" in fields
        suffix = f"{fields['since']}:{fields['until']}" if is_range else f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        name = f"{task}:{suffix}"
    if not dry_run:
        added = reached.farm.add_backfill(name, task, **fields)
        reached.answer(added, lambda: screen.sheet(added, reached.zone))
        return
    planned = reached.farm.try_backfill(name, task, **fields)
    skipped = f", of which {planned.skipped:,} are done already" if planned.skipped else ""
    text = f"{screen.plain(planned.name)} would have {planned.total:,} partitions{skipped}; nothing is changed"
    samples = [vars(each) | {"args": screen.as_json(each.args, None)} for each in planned.samples]
    reached.answer(planned, lambda: Group(text, screen.listing("partition args lock_key priority", samples)))


def _fields(listed: tuple[str, ...], file: Any | None, priority: str | None, **others: Any) -> dict[str, Any]:
    if listed and file:
        raise click.UsageError("partitions come from --partition or --file")
    try:
        lines = [text for line in file if (text := line.strip())] if file else [*listed]
    except UnicodeDecodeError:
        raise click.BadParameter("it is not UTF-8", param_hint="--file") from None
    if file and not lines:
        raise click.BadParameter("there is no partition in it", param_hint="--file")
    if others["args"] is not None:
        others["args"] = base.arguments(others["args"])
    number = int(priority) if priority and priority.isascii() and priority.isdigit() else priority
    return base.given(**others, priority=number, partitions=lines or None)


_SPECIAL = ("since", "until", "partitions")  # parameters with options of another shape
_PARAMETERS = ops.load()["add_backfill"].parameters.values()
add.params[4:4] = [made.option(each) for each in _PARAMETERS if each.stays and each.name not in _SPECIAL]


@backfill.command(examples=["dataloader backfill wait history"])
@click.argument("name")
@reaching
def wait(reached: Reached, name: str) -> None:
    """Wait for the end of a backfill, with its progress on stderr.

    Exit status: 0 each partition is done, 10 some jobs are dead or canceled, 11 the backfill is canceled.
    """
    last_line = ""
    while True:
        current = reached.farm.backfill(name)
        left = f", {screen.duration(current.eta_sec)} left" if current.eta_sec is not None else ""
        line = f"{current.ended:,} of {current.total:,} partitions, {current.state}{left}"
        if line != last_line:
            bar = screen.bar(current.ended / current.total if current.total else None)
            click.echo(f"dataloader: {bar} {line}", err=True)
        if current.state in ("done", "canceled"):
            break
        last_line = line
        time.sleep(_POLL_SEC)
    reached.answer(current, lambda: screen.sheet(current, reached.zone))
    undone = current.total - current.counts.get("succeeded", 0) - current.counts.get("skipped", 0)
    sys.exit(EXITS["canceled" if current.state == "canceled" else "failed" if undone else "succeeded"])


made.add(commands, "queues", "limits", "schedules", "backfills", "failures", "webhooks")


@commands.group(name="search-index", examples=["dataloader search-index create"])
def search_index() -> None:
    """The index for searches by arguments, such as args.date:2024-05-01.

    Without it such a search reads 8,000 jobs for each page. Each insert and each step of a job writes to it.
    """


@search_index.command(examples=["dataloader search-index create"])
def create() -> None:
    """Make the index while the farm works; only the owner of the tables can."""
    _change_index(stats.create_args_index, "the index is created", "the index exists already")


@search_index.command(examples=["dataloader search-index remove"])
def remove() -> None:
    """Remove the index while the farm works."""
    _change_index(stats.drop_args_index, "the index is removed", "there is no such index")


def _change_index(change: Callable[[db.Conn], bool], done: str, unchanged: str) -> None:
    with base.refusing("the index was not changed"):
        settings = config.load()
        with db.connect(base.dsn(settings), name="dl-search-index", schema=settings.pg_schema_queue) as conn:
            conn.answer_within = INDEX_SEC
            click.echo(done if change(conn) else unchanged)
