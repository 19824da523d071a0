"""Webhooks, the receivers of alerts, and the reaper's round that adds a job for each message that is due.

A row has the names of the variables that hold its secrets. Every function may raise psycopg.Error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import structlog
from psycopg.types.json import Jsonb

from dataloader import log, periods
from dataloader.config import WEBHOOK_SECRETS, Settings
from dataloader.queue import db, enqueue
from dataloader.queue.db import Conn
from dataloader.queue.db import Row as Row
from dataloader.queue.reports import messages, stats
from dataloader.queue.reports.messages import KINDS, TASK, Firing, Message

LAG_SEC = periods.seconds("WEBHOOK_LAG_SEC", 300.0)  # the lag of a late queue, unless its webhook sets another
ATTEMPTS = 12  # of a message: with the pauses of the pipeline some four hours
TAKEN = 10_000  # events of one round; the next one goes on with the rest
SETTLE_SEC = periods.seconds("SETTLE_SEC", 10.0)  # from its begin until a transaction's rows should be visible
URL_LIMIT = 2_000  # characters
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_VARIABLE = re.compile(rf"{WEBHOOK_SECRETS}[A-Z0-9_]{{1,64}}", re.ASCII)
WHOLE = re.compile(rf"\$\{{({_VARIABLE.pattern})\}}", re.ASCII)  # a `url` that is a variable of the workers

_log = structlog.get_logger("reaper")
_SQL = db.statements("webhooks.sql")


class WrongWebhook(ValueError):
    """A field of a webhook is wrong; `field` names it ("" for the name), the text has the valid form."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field} {text}")
        self.field = "" if field == "name" else field


def listed(conn: Conn) -> list[Row]:
    """All webhooks, by name."""
    return _SQL.rows(conn, "listed", name=None)


def with_deliveries(conn: Conn) -> list[Row]:
    """All webhooks, by name, with `undelivered` and `last_error` of those whose latest messages have not arrived."""
    failed = {row["name"]: row for row in stats.deliveries(conn)}
    return [row | failed.get(row["name"], {}) for row in listed(conn)]


def find(conn: Conn, name: str) -> Row | None:
    """The webhook of this name, or None."""
    return _one(conn, "listed", name)


def put(
    conn: Conn,
    name: str,
    url: str,
    by: str,
    shape: str = "json",
    signed_by: str | None = None,
    kinds: list[str] | None = None,
    queues: list[str] | None = None,
    lag_sec: float = LAG_SEC,
) -> Row:
    """Add or change the webhook of this name; the first gets messages of later events only. Raises WrongWebhook.

    A secret `url` is ${DL_WEBHOOK_...}; `signed_by` names a variable; None for `kinds` or `queues`: all.
    """
    check(name, url, shape, signed_by)
    more = {"shape": shape, "signed_by": signed_by, "kinds": kinds, "queues": queues, "lag_sec": lag_sec}
    with conn.transaction():
        _SQL.do(conn, "begin_anew")
        return _SQL.rows(conn, "put", name=name, url=url, by=by, **more)[0]


def remove(conn: Conn, name: str) -> bool:
    """Remove the webhook of this name; False where there is none. Messages that wait for it are not sent any more."""
    return _one(conn, "remove", name) is not None


def pause(conn: Conn, name: str, by: str) -> Row | None:
    """Send no messages to a webhook until `resume`, also not later; returns the webhook, or None."""
    return _one(conn, "pause", name, by=by)


def resume(conn: Conn, name: str) -> Row | None:
    """End the pause of a webhook; returns it, or None."""
    return _one(conn, "resume", name)


def send_test(conn: Conn, name: str, settings: Settings) -> UUID | None:
    """Add the job of a test message, also for a paused webhook; its id, or None where there is no such webhook."""
    if find(conn, name) is None:
        return None
    return _add(conn, name, messages.test(name, settings, datetime.now(UTC)), settings)


def is_served(conn: Conn, queue: str) -> bool:
    """Whether a live worker of some host serves this queue."""
    return bool(_SQL.value(conn, "is_served", queue=queue))


def message_of(conn: Conn, job_id: UUID) -> Row | None:
    """The message that this job sends, and the name of its webhook; None where the farm has not added the job."""
    return _SQL.first(conn, "message", job_id=job_id)


def is_firing(conn: Conn, name: str, message: Message) -> bool:
    """Whether the condition of a message still lasts, by the messages that the webhook got."""
    return bool(_SQL.value(conn, "is_firing", **_place(name, message)))


def publish(conn: Conn, settings: Settings) -> int:
    """Add one job for each due message, also if several reapers call this; raises instead of waiting for a lock."""
    if not (receivers := listed(conn)):
        return 0
    with conn.transaction():
        db.give_up_after(conn, 3.0, lock_sec=0.1)  # the reaper has one session for this and for leases
        if (position := _SQL.first(conn, "position")) is None:
            return 0
        now, bundle_sec = position["now"], settings.dl_alerts_bundle_sec
        wait = {"bundle_sec": bundle_sec, "settle_sec": min(SETTLE_SEC, bundle_sec)}
        if events := _SQL.rows(conn, "new_events", after=position["last_event"], **wait, limit=TAKEN):
            _SQL.do(conn, "go_on_behind", last_event=events[-1]["event_id"])
        else:
            _SQL.do(conn, "begin_anew")
        queues, firing, sent = _SQL.rows(conn, "queues"), defaultdict(list), 0
        for row in _SQL.rows(conn, "firing"):
            if row["kind"] in KINDS:
                firing[row.pop("webhook")].append(Firing(**row))
        for each in receivers:
            try:
                with conn.transaction():
                    for message in messages.due(each, events, queues, firing[each["name"]], settings, now):
                        _add(conn, each["name"], log.masked(message), settings)
                        if message["state"] in ("firing", "resolved"):
                            _SQL.do(conn, f"note_{message['state']}", **_place(each["name"], message))
                        sent += 1
            except Exception as e:  # the row of a webhook may cause any error
                if conn.closed:
                    raise
                _log.warning("reaper.alerts.failed", webhook=each["name"], error=f"{type(e).__name__}: {e}".strip())
    return sent


def check(name: str, url: str, shape: str, signed_by: str | None) -> None:
    """PURE: raise WrongWebhook for a wrong name, URL or variable; the operation checks all other fields."""
    if not _NAME.fullmatch(name):
        raise WrongWebhook("name", "should be 1 to 64 letters, digits, dots, hyphens and underscores, as ops-chat")
    # The texts do not show the URL, because it may hold a secret in a wrong place.
    whole, wrong = f"${{{WEBHOOK_SECRETS}...}}, a variable of the workers that holds the whole URL", ""
    if "${" in url:
        wrong = f"should be {whole}: so a secret goes to no other host than its own"
    elif not is_address(url):
        wrong = f"should be a URL such as https://ops.example.com/alerts, without #; or {whole}"
    elif "@" in urlsplit(url).netloc or log.masked(url) != url:
        wrong = f"seems to hold a secret: it should be {whole}"
    elif shape == "slack":
        wrong = f"is a secret where the shape is slack: it should be {whole}"
    if wrong and not WHOLE.fullmatch(url):
        raise WrongWebhook("url", wrong)
    if signed_by is not None and not _VARIABLE.fullmatch(signed_by):
        text = f"should be the name of an environment variable of the workers, as {WEBHOOK_SECRETS}KEY, not the key"
        raise WrongWebhook("signed_by", text)


def is_address(url: str) -> bool:
    """PURE: whether messages can be sent to this URL."""
    if len(url) > URL_LIMIT or not url.isascii() or not url.isprintable() or " " in url or "${" in url:
        return False
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and parts.port != 0 and not parts.fragment
    except ValueError:  # of the port, or of brackets
        return False
    return is_right and bool(re.fullmatch(r"[A-Za-z0-9._:-]+", parts.hostname or ""))


def _add(conn: Conn, name: str, message: Message, settings: Settings) -> UUID:
    """The message and its job, without an idempotency key: a producer could take a foreseen one."""
    args = {"webhook": name, "text": message["text"]}
    queue, key = settings.dl_alerts_queue, f"webhook {name}"
    job = enqueue.NewJob(queue, TASK, key, args, max_attempts=ATTEMPTS, producer="alerts")
    job_id = enqueue.new_id()
    with conn.transaction():
        _SQL.do(conn, "keep_message", job_id=job_id, webhook=name, message=Jsonb(message))
        return enqueue.enqueue(conn, job, job_id=job_id)[0]


def _place(name: str, message: Message) -> Row:
    """The condition of a message, as the webhook knows it."""
    return {"webhook": name, **{field: message[field] for field in ("kind", "queue", "since")}}


def _one(conn: Conn, statement: str, name: str, **parameters: Any) -> Row | None:
    """The row of this webhook; None, without a question, for a name that none can have."""
    return _SQL.first(conn, statement, name=name, **parameters) if _NAME.fullmatch(name) else None
