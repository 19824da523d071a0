"""`alert.webhook`: sends one message to one webhook. docs/alerts.md is the page for people.

A message is signed and sent by one POST, in the shape that the receiver reads: our own document, Alertmanager's API v2,
or Slack's. No redirect is followed, and the answer's body is not read.
"""

from __future__ import annotations

import hmac
import json
import socket
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from html import escape
from typing import Any

from dataloader import config
from dataloader.pipelines import Context, PermanentError, Retry, http, register, retries
from dataloader.pipelines.http import Refused, Unreachable, required
from dataloader.queue.reports import messages, webhooks
from dataloader.queue.reports.messages import Message

TIMEOUT_SEC = 30.0  # of a run
CONNECT_SEC = 5.0
POST_SEC = 10.0  # from the connection to the status of the answer
GONE = 410
PAUSE = retries.exponential(base_sec=5, cap_sec=3_600)

_LASTS = {"event": timedelta(hours=1), "firing": timedelta(minutes=30)}  # until Alertmanager takes it for over
_NAMES = {
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


@register(messages.TASK, timeout_sec=TIMEOUT_SEC, max_attempts=webhooks.ATTEMPTS, retry_in=PAUSE, memory_mb=0, cpus=0)
def deliver(args: dict[str, Any], context: Context) -> dict[str, Any]:
    """Send the message that the farm has stored for this job; return the receiver's status, or why nothing was sent.

    The args decide nothing: other services may write them. A job that the farm has not added raises PermanentError.
    A silent receiver, a 5xx, 408, 425 and 429 are tried again, 429 and 503 when the receiver says. Any other answer but
    a 2xx raises PermanentError; 410 also pauses the webhook. No error shows more of the address than its host.
    """
    with context.queue_session() as conn:
        if (stored := webhooks.message_of(conn, context.job_id)) is None:
            raise PermanentError(f"the farm has not added this job: it alone adds jobs of {messages.TASK}")
        name, message = stored["webhook"], stored["message"]
        webhook = webhooks.find(conn, name)
        if webhook is None:
            return {"sent": False, "why": "the webhook has been removed"}
        if webhook["paused_at"] and message["kind"] != "test":
            return {"sent": False, "why": "the webhook is paused"}
        if message["state"] == "firing" and not webhooks.is_firing(conn, name, message):
            return {"sent": False, "why": "it is over by now"}
    body = json.dumps(SHAPES[webhook["shape"]](message), ensure_ascii=False).encode()
    from_here = f" (from {socket.gethostname()})"
    try:
        answer = _posted(webhook["url"], body, signed(webhook["signed_by"], message["id"], int(time.time()), body))
        from_here = ""  # the receiver has answered
        answer.require_final()
    except Unreachable as e:
        raise Retry(PAUSE(context.attempt), f"{e}{from_here}") from None
    if 200 <= answer.status < 300:
        return {"sent": True, "status": answer.status}
    why = "the receiver does not take this message; is its address or its shape wrong?"
    if 300 <= answer.status < 400:
        why = "redirects are not followed; give the webhook the address it leads to"
    if answer.status == GONE:
        with context.queue_session() as conn:
            webhooks.pause(conn, name, "its receiver, which answered 410 Gone")
        why = "the webhook is paused; `dataloader webhook resume` when that was a mistake"
    raise PermanentError(f"{answer.name} answered {answer.status}: {why}")


def _posted(url: str, body: bytes, headers: dict[str, str]) -> http.Answer:
    """The answer to one POST to a webhook's URL, or to the URL that its variable holds.

    A secret is never put into a URL: a variable holds the whole URL, and so says which host may receive it. Raises
    Refused for what is no URL, Unreachable as `required` and `http.exchange`.
    """
    variable = webhooks.WHOLE.fullmatch(url)
    name = f"the variable {variable[1]}" if variable else "a ${variable} as its url"
    url = required(variable[1], config.webhook_secret(variable[1])) if variable else url
    if not webhooks.is_address(url):
        raise Refused(f"{name} should hold the whole URL, such as https://ops.example.com/alerts, without #")
    headers = {"Content-Type": "application/json"} | headers
    times = http.Times(CONNECT_SEC, POST_SEC, POST_SEC)
    address = http.Address.of(url)
    with http.exchange(address, times, "POST", headers, body, guard=lambda _, ip: http.is_forbidden(ip)) as answer:
        return answer


def signed(variable: str | None, message_id: str, at: int, body: bytes) -> dict[str, str]:
    """The headers of Standard Webhooks (standardwebhooks.com); without a key's `variable` there is no signature.

    Raises Refused where the variable holds no such key, Unreachable where it is not set.
    """
    headers = {"webhook-id": message_id, "webhook-timestamp": str(at)}
    if variable is None:
        return headers
    prefix, _, text = required(variable, config.webhook_secret(variable)).partition("_")
    key = b""
    with suppress(ValueError):
        key = b64decode(text, validate=True)
    if prefix != "whsec" or not 24 <= len(key) <= 64:
        raise Refused(f"the variable {variable} should hold whsec_ and 24 to 64 bytes in base64")
    mac = hmac.digest(key, f"{message_id}.{at}.".encode() + body, "sha256")
    return headers | {"webhook-signature": f"v1,{b64encode(mac).decode()}"}


# --- Alertmanager, POST /api/v2/alerts ---


def _alertmanager(message: Message) -> list[dict[str, Any]]:
    groups = message["groups"] or [{"queue": message["queue"], "task": None, "count": None}]
    return [_alert(message, group) for group in groups]


def _alert(message: Message, group: dict[str, Any]) -> dict[str, Any]:
    labels = {
        "alertname": _NAMES[message["kind"]],
        "severity": message["severity"],
        "environment": message["environment"],
        "queue": group["queue"],
        "task": group["task"],
    }
    lines = [
        f"{job['job_id']} {job['what']}: {job['error']}".rstrip(": ")
        for job in message["jobs"]
        if (job["queue"], job["task"]) == (group["queue"], group["task"])
    ]
    end = datetime.fromisoformat(message["at"]) + _LASTS.get(message["state"], timedelta())
    alert = {
        "labels": {name: value for name, value in labels.items() if value},  # it takes no empty ones
        "annotations": {"summary": _summary(message, group), "description": "\n".join(lines)},
        "startsAt": message["since"],
        "endsAt": end.astimezone(UTC).isoformat().replace("+00:00", "Z"),
    }
    return alert | ({"generatorURL": message["url"]} if message["url"] else {})


def _summary(message: Message, group: dict[str, Any]) -> str:
    if group["count"] is None:
        return str(message["text"])
    one, several = messages.SENTENCES[message["kind"]]
    return f"{group['count']:,} {one if group['count'] == 1 else several} in queue {group['queue']}."


# --- Slack's incoming webhooks ---

_escaped = partial(escape, quote=False)  # its control characters are & < >


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


SHAPES: dict[str, Callable[[Message], Any]] = {"json": dict, "alertmanager": _alertmanager, "slack": _slack}
