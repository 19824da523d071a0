"""A farm's journal, read by pages: the whole one of a job, the runs that it tells of, and what is added to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from uuid import UUID

import click

from dataloader.cli import screen
from dataloader.client import Event, Unavailable
from dataloader.client.farm import Farm
from dataloader.queue import stats

PAGE = 200  # events of one answer
MOST = 10_000  # that are read of one job's journal
FOLLOW_SEC = 1.0
LATE_SEC = 3.0  # an event may be committed so much later than one with a greater id


def whole(farm: Farm, job_id: UUID) -> list[Event]:
    """The job's whole journal."""
    found: list[Event] = []
    while len(found) < MOST:
        page = farm.events(job_id, after=found[-1].event_id if found else 0, limit=PAGE)
        found += page
        if len(page) < PAGE:
            break
    return found


def attempts(events: Sequence[Event]) -> list[stats.Attempt]:
    """The runs that the journal tells of."""
    rows = [{"kind": event.kind, "ts": event.ts, "payload": event.payload} for event in events]
    return stats.attempts(row for row in rows if isinstance(row["payload"], dict | None))


def followed(farm: Farm, job_id: UUID | None, queue: str | None, first: list[Event]) -> Iterator[Event]:
    """The events so far and then those that come; of one job until its end.

    Ids are given before the commit, so a smaller one may come later: each look begins where all was seen LATE_SEC ago.
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
    """Where a farm's journal ends, for a queue of which nothing was found: its history is not news."""
    newest = farm.events(limit=1) if job_id is None else []
    return newest[-1].event_id if newest else 0


def _has_ended(farm: Farm, job_id: UUID) -> bool:
    try:
        return farm.status(job_id).is_final
    except Unavailable:
        return False


def _news(farm: Farm, job_id: UUID | None, queue: str | None, after: int) -> Iterator[Event]:
    """What the journal has behind `after`, as far as it goes; nothing while the farm cannot be asked."""
    try:
        while page := farm.events(job_id, after=after, queue=queue, limit=PAGE):
            yield from page
            after = page[-1].event_id
            if len(page) < PAGE:
                return
    except Unavailable as e:
        click.echo(f"dataloader: {screen.plain(str(e))}; trying again", err=True)
