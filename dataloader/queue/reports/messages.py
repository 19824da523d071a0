"""PURE: the messages that webhooks get: of events, and that a condition is `firing` or `resolved` (docs/alerts.md)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, NamedTuple
from urllib.parse import quote

from dataloader import periods
from dataloader.config import Settings
from dataloader.model.kinds import ALERTS
from dataloader.queue.fields import INTERNAL_TASK
from dataloader.queue.reports.alerts import Condition, conditions
from dataloader.queue.reports.words import count, duration

VERSION = 1
SENTENCES = {
    "dead": ("job is dead", "jobs are dead"),
    "stuck": ("run is stuck", "runs are stuck"),
    "deadline": ("job is going to miss its deadline", "jobs are going to miss their deadlines"),
}
TASK = INTERNAL_TASK
# The kinds of messages by the kinds of journal rows, which sql/webhooks.sql and ix_dl_job_events_told name too. Kinds
# of conditions are those of alerts.conditions.
OF_JOURNAL = {"failed": "dead", "lost": "dead", "stuck": "stuck", "deadline": "deadline"}
KINDS = ALERTS
SEVERITIES = dict.fromkeys(("dead", "deadline"), "critical") | dict.fromkeys(("stuck", "lag", "paused"), "warning")
SEVERITIES |= {"test": "info"}
SHOWN = 20  # jobs, and pairs of queue and task, that a message names
OVER = 0.5  # of the bound: a late queue stays late until its lag is below it, so that the state does not flap
REPEATED_SEC = periods.seconds("REPEATED_SEC", 600.0)  # between two messages to an Alertmanager, which forgets them
Row = Mapping[str, Any]
Message = dict[str, Any]


class Firing(NamedTuple):
    """A condition that a webhook knows, its begin, and the time of the last message about it."""

    kind: str
    queue: str
    since: datetime
    told_at: datetime


def due(
    webhook: Row,
    events: Iterable[Row],
    queues: Sequence[Row],
    active: Collection[Firing],
    settings: Settings,
    now: datetime,
) -> Iterator[Message]:
    """The messages for this webhook: of new `events`, and of what has begun or ended since it was `active`."""
    if webhook["paused_at"] is not None:
        return
    sender = _Sender(webhook["name"], settings, now)
    wanted = defaultdict(list)
    for row in events:
        kind = OF_JOURNAL[row["kind"]]
        if row["task"] != TASK and _wants(webhook, kind, row["queue"]):
            wanted[kind].append(row)
    for kind in filter(wanted.get, SENTENCES):
        yield _row_message(sender, kind, wanted[kind])
    for state, each in _news(webhook, queues, active, settings, now):
        # A browser takes a dot out of a path.
        page = f"-?name={each.queue}" if each.queue in (".", "..") else quote(each.queue, safe="")
        place = {"queue": each.queue, "url": sender.link(f"/queues/{page}")}
        yield sender.message(each.kind, state, each.text, each.since, [each.queue, _text(now)], **place)


def test(name: str, settings: Settings, now: datetime) -> Message:
    """A message without an alert, to test that messages arrive."""
    sender = _Sender(name, settings, now)
    text = "This is a test: messages of dataloader arrive here."
    return sender.message("test", "event", text, now, [_text(now)], url=sender.link())


class _Sender(NamedTuple):
    """Writes the messages of a farm with these settings to one webhook, at the time `now`."""

    webhook: str
    settings: Settings
    now: datetime

    def link(self, page: str = "") -> str | None:
        return f"{self.settings.dl_public_url}{page}" if self.settings.dl_public_url else None

    def message(
        self, kind: str, state: str, text: str, since: datetime, mark: Sequence[object], **more: Any
    ) -> Message:
        """The document of a message; its id has `mark`, to differ from messages of the same kind and begin."""
        identity = json.dumps([self.webhook, kind, state, _text(since), *mark])
        return {
            "version": VERSION,
            "id": f"alert_{sha256(identity.encode()).hexdigest()[:32]}",
            "kind": kind,
            "state": state,
            "severity": SEVERITIES[kind],
            "text": text,
            "environment": self.settings.environment,
            "since": _text(since),
            "at": _text(self.now),
            "queue": None,
            "url": None,
            "count": None,
            "groups": [],
            "jobs": [],
        } | more


def _row_message(sender: _Sender, kind: str, rows: Sequence[Row]) -> Message:
    groups = Counter((row["queue"], row["task"]) for row in rows)
    queues = {queue for queue, _ in groups}
    place = f"in queue {next(iter(queues))}" if len(queues) == 1 else f"in {len(queues)} queues"
    one, many = SENTENCES[kind]
    jobs = [
        {
            "job_id": str(row["job_id"]),
            "queue": row["queue"],
            "task": row["task"],
            "what": row["kind"],
            "at": _text(row["ts"]),
            "error": row["error"].partition("\n")[0]
            if row["silent_sec"] is None
            else f"no report for {duration(row['silent_sec'])}",
            "url": sender.link(f"/jobs/{row['job_id']}"),
        }
        for row in rows[:SHOWN]
    ]
    return sender.message(
        kind,
        "event",
        f"1 {one} {place}." if len(rows) == 1 else f"{count(len(rows))} {many} {place}.",
        min(row["ts"] for row in rows),
        mark=[rows[0]["event_id"], rows[-1]["event_id"]],
        queue=queues.pop() if len(queues) == 1 else None,
        url=sender.link("/jobs?status=dead" if kind == "dead" else ""),
        count=len(rows),
        groups=[{"queue": q, "task": task, "count": number} for (q, task), number in groups.most_common(SHOWN)],
        jobs=jobs,
    )


def _news(
    webhook: Row, queues: Sequence[Row], firing: Collection[Firing], settings: Settings, now: datetime
) -> Iterator[tuple[str, Condition]]:
    """The conditions that a webhook is told of now, each with its state."""
    active = {(each.kind, each.queue): each for each in firing}
    present: dict[tuple[str, str], Condition] = {}
    for row in queues:
        lag_sec = webhook["lag_sec"] * (OVER if ("lag", row["queue"]) in active else 1.0)
        for each in conditions(row, lag_sec, settings.dl_alerts_paused_sec, now):
            # A message about the queue of messages could not be sent.
            if row["queue"] != settings.dl_alerts_queue and _wants(webhook, each.kind, each.queue):
                present[each.kind, each.queue] = each
    for place, condition in present.items():
        known = active.get(place)
        if known is None:
            yield "firing", condition
        elif webhook["shape"] == "alertmanager" and (now - known.told_at).total_seconds() >= REPEATED_SEC:
            yield "firing", replace(condition, since=known.since)
    unknown = {row["queue"] for row in queues if row["lag_sec"] is None}
    for (kind, queue), known in active.items():
        if (kind, queue) not in present and not (kind == "lag" and queue in unknown):
            is_over = {"lag": "late", "paused": "paused"}[kind]
            yield "resolved", Condition(kind, queue, known.since, f"Queue {queue} is {is_over} no more.")


def _wants(webhook: Row, kind: str, queue: str) -> bool:
    return (webhook["kinds"] is None or kind in webhook["kinds"]) and (
        webhook["queues"] is None or queue in webhook["queues"]
    )


def _text(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")
