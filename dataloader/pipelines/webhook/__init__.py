"""`alert.webhook`: sends one message to one webhook. docs/alerts.md is the page for people.

shapes      the body, in the shape that the receiver reads
delivery    the address, the signature, the request
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

from dataloader.pipelines import Context, PermanentError, Retry, register, retries
from dataloader.pipelines.outbound import Refused, Unreachable
from dataloader.pipelines.webhook import delivery, shapes
from dataloader.pipelines.webhook.delivery import Answer
from dataloader.queue.reports import messages, webhooks

TIMEOUT_SEC = 30.0  # of a run
AGAIN_MOST_SEC = 86_400.0  # that a receiver may ask for
GONE = 410
BUSY = (429, 503)
PASSING = (408, 425)  # of the 4xx
PAUSE = retries.exponential(base_sec=5, cap_sec=3_600)


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
        if why := _needless(webhook, message, lambda: webhooks.is_firing(conn, name, message)):
            return {"sent": False, "why": why}
    assert webhook is not None  # noqa: S101  `_needless` has seen to it
    answer = _sent(webhook, message, context.attempt)
    if answer.status == GONE:
        with context.queue_session() as conn:
            webhooks.pause(conn, name, "its receiver, which answered 410 Gone")
    return _judged(answer, context.attempt)


def _needless(webhook: webhooks.Row | None, message: dict[str, Any], is_firing: Callable[[], bool]) -> str:
    """Why the message need not be sent; "": it should be."""
    if webhook is None:
        return "the webhook has been removed"
    if webhook["paused_at"] and message["kind"] != "test":
        return "the webhook is paused"
    if message["state"] == "firing" and not is_firing():
        return "it is over by now"
    return ""


def _sent(webhook: webhooks.Row, message: dict[str, Any], attempt: int) -> Answer:
    body = json.dumps(shapes.of(webhook["shape"], message), ensure_ascii=False).encode()
    try:
        address = delivery.address(webhook["url"])
        signed = delivery.signed(webhook["signed_by"], message["id"], int(time.time()), body)
        return delivery.post(address, body, signed)
    except Refused as e:
        raise PermanentError(str(e)) from None
    except Unreachable as e:
        raise Retry(PAUSE(attempt), f"{e} (from {socket.gethostname()})") from None


def _judged(answer: Answer, attempt: int) -> dict[str, Any]:
    """The run's value for an answer, or its exception."""
    said = f"{answer.host} answered {answer.status}"
    if 200 <= answer.status < 300:
        return {"sent": True, "status": answer.status}
    if answer.status in BUSY and answer.again_sec is not None:
        raise Retry(min(answer.again_sec, AGAIN_MOST_SEC), f"{said} and asks for {answer.again_sec:g} s")
    if answer.status >= 500 or answer.status in (*BUSY, *PASSING):
        raise Retry(PAUSE(attempt), said)
    if answer.status == GONE:
        raise PermanentError(f"{said}: the webhook is paused; `dataloader webhook resume` when that was a mistake")
    if 300 <= answer.status < 400:
        raise PermanentError(f"{said}: redirects are not followed; give the webhook the address it leads to")
    raise PermanentError(f"{said}: the receiver does not take this message; is its address or its shape wrong?")
