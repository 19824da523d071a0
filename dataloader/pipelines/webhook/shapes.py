"""PURE: a message in the shape that its receiver reads: our own document, Alertmanager's API v2, or Slack's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

Message = dict[str, Any]
EVENT_LASTS = timedelta(hours=1)  # an event has no end; Alertmanager needs one
FIRING_LASTS = timedelta(minutes=30)  # three times as long as until the message comes again
NAMES = {
    "dead": "DataloaderDeadJobs",
    "stuck": "DataloaderStuckRuns",
    "deadline": "DataloaderDeadlineMissed",
    "lag": "DataloaderQueueLate",
    "paused": "DataloaderQueuePaused",
    "test": "DataloaderTest",
}
SLACK_JOBS = 10
SLACK_TEXT = 2_900  # characters; a block takes 3,000
_MARKS = {"critical": ":red_circle:", "warning": ":large_orange_circle:", "info": ":large_blue_circle:"}


def of(shape: str, message: Message) -> Any:
    """The JSON document to send; raises KeyError for an unknown shape."""
    return _SHAPES[shape](message)


def _json(message: Message) -> Message:
    return message


# --- Alertmanager, POST /api/v2/alerts ---


def _alertmanager(message: Message) -> list[dict[str, Any]]:
    groups = message["groups"] or [{"queue": message["queue"], "task": None, "count": None}]
    return [_alert(message, group) for group in groups]


def _alert(message: Message, group: dict[str, Any]) -> dict[str, Any]:
    labels = {
        "alertname": NAMES[message["kind"]],
        "severity": message["severity"],
        "environment": message["environment"],
        "queue": group["queue"],
        "task": group["task"],
    }
    alert = {
        "labels": {name: value for name, value in labels.items() if value},  # it takes no empty ones
        "annotations": {"summary": _summary(message, group), "description": "\n".join(_of_group(message, group))},
        "startsAt": message["since"],
        "endsAt": _end(message),
    }
    return alert | ({"generatorURL": message["url"]} if message["url"] else {})


def _summary(message: Message, group: dict[str, Any]) -> str:
    if group["count"] is None:
        return str(message["text"])
    what = _EVENTS[message["kind"]]
    return f"{group['count']:,} {what[group['count'] != 1]} in queue {group['queue']}."


_EVENTS = {
    "dead": ("job is dead", "jobs are dead"),
    "stuck": ("run is stuck", "runs are stuck"),
    "deadline": ("job is going to miss its deadline", "jobs are going to miss their deadlines"),
}


def _of_group(message: Message, group: dict[str, Any]) -> Iterator[str]:
    for job in message["jobs"]:
        if (job["queue"], job["task"]) == (group["queue"], group["task"]):
            yield f"{job['job_id']} {job['what']}: {job['error']}".rstrip(": ")


def _end(message: Message) -> str:
    at = datetime.fromisoformat(message["at"])
    lasts = {"event": EVENT_LASTS, "firing": FIRING_LASTS}.get(message["state"], timedelta())
    return (at + lasts).astimezone(UTC).isoformat().replace("+00:00", "Z")


# --- Slack's incoming webhooks ---


def _slack(message: Message) -> dict[str, Any]:
    mark = ":white_check_mark:" if message["state"] == "resolved" else _MARKS[message["severity"]]
    head = f"{mark} *{_escaped(message['environment'])}*: {_linked(message['text'], message['url'])}"
    blocks = [_section(head)]
    if lines := [_line(job) for job in message["jobs"][:SLACK_JOBS]]:
        if left := message["count"] - len(lines):
            lines.append(f"and {left:,} more")
        blocks.append(_section("\n".join(lines)))
    return {"text": _escaped(message["text"]), "blocks": blocks}


def _line(job: dict[str, Any]) -> str:
    name = _linked(f"{job['task']} {job['job_id']}", job["url"])
    return f"• {name} {job['what']}: {_escaped(job['error'][:150])}".rstrip(": ")


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:SLACK_TEXT]}}


def _linked(text: str, url: str | None) -> str:
    return f"<{_escaped(url)}|{_escaped(text).replace('|', '/')}>" if url else _escaped(text)


def _escaped(text: str) -> str:
    """Slack's three control characters."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_SHAPES: dict[str, Callable[[Message], Any]] = {"json": _json, "alertmanager": _alertmanager, "slack": _slack}
