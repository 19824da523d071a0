"""A farm's journal, read by pages: a job's whole journal, its runs, and new events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

import click

from dataloader.cli import screen
from dataloader.client import Event, Unavailable
from dataloader.client.farm import PAGE, Farm

if TYPE_CHECKING:
    from dataloader.queue.reports import stats

MOST = 10_000  # events read of one job's journal
FOLLOW_SEC = 1.0
LATE_SEC = 3.0  # the longest delay between the commits of two events in the wrong order of ids


def whole(farm: Farm, job_id: UUID) -> list[Event]:
    """The job's journal, up to MOST events."""
    return list(farm.job_events(job_id, limit=MOST))


def attempts(events: Sequence[Event]) -> list[stats.Attempt]:
    """The runs in the journal."""
    from dataloader.queue.reports import stats  # not at the top: other questions need no driver

    rows = [{"kind": event.kind, "ts": event.ts, "payload": event.payload} for event in events]
    return stats.attempts(row for row in rows if isinstance(row["payload"], dict | None))


def followed(farm: Farm, job_id: UUID | None, queue: str | None, first: Sequence[Event]) -> Iterator[Event]:
    """The events in `first` and then new ones; of one job until its end.

    PostgreSQL assigns ids before the commit, so a smaller id may appear later: each page begins LATE_SEC in the past.
    """
    yield from first
    seen = {event.event_id: time.monotonic() for event in first}
    after = first[0].event_id - 1 if first else _newest(farm, job_id)
    is_over = False
    while not is_over:
        is_over = job_id is not None and _has_ended(farm, job_id)
        after = max([after, *(number for number, at in seen.items() if time.monotonic() - at > LATE_SEC)])
        seen = {number: at for number, at in seen.items() if number > after}
        for event in _news(farm, job_id, queue, after):
            if event.event_id not in seen:
                seen[event.event_id] = time.monotonic()
                yield event
        if not is_over:
            time.sleep(FOLLOW_SEC)


def _newest(farm: Farm, job_id: UUID | None) -> int:
    """The id of the farm's newest event, for a queue without events; 0 for a job."""
    newest = farm.events(limit=1) if job_id is None else []
    return newest[-1].event_id if newest else 0


def _has_ended(farm: Farm, job_id: UUID) -> bool:
    try:
        return farm.status(job_id).is_final
    except Unavailable:
        return False


def _news(farm: Farm, job_id: UUID | None, queue: str | None, after: int) -> Iterator[Event]:
    """All events after the id `after`; none while the farm is away."""
    try:
        if job_id:
            yield from farm.job_events(job_id, after=after)
            return
        while page := farm.events(after=after, queue=queue, limit=PAGE):
            yield from page
            after = page[-1].event_id
            if len(page) < PAGE:
                return
    except Unavailable as e:
        click.echo(f"dataloader: {screen.plain(str(e))}; trying again", err=True)
