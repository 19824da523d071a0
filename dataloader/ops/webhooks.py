"""Webhooks: the receivers of alerts (docs/alerts.md). Their secrets are no part of any request or answer."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from dataloader.model.farm import Tested, Webhook, Webhooks
from dataloader.model.kinds import ALERTS, SHAPES, Gone
from dataloader.ops.errors import Unknown, known
from dataloader.ops.op import Call, Op, made, operations_on
from dataloader.ops.types import Text
from dataloader.queue.reports import webhooks as receivers

QUEUES = 1_000  # that a webhook may name
WebhookName = Annotated[str, Field(description="of a receiver of alerts")]
Shape: TypeAlias = Literal[SHAPES]  # type: ignore[valid-type]
Kind: TypeAlias = Literal[ALERTS]  # type: ignore[valid-type]


_webhook = operations_on("webhook", "webhook", "ops")


@_webhook(
    "list",
    scope=("operate",),
    columns="name shape url kinds queues late_after=lag_sec signed_by paused=paused_at by=paused_by"
    " undelivered last_error",
)
def webhooks(call: Call) -> Webhooks:
    """The receivers of alerts, and whether a worker serves the queue of their messages."""
    queue = call.settings.dl_alerts_queue
    fields = {"queue": queue, "is_served": receivers.is_served(call.conn, queue)}
    return made(Webhooks, fields | {"webhooks": receivers.with_deliveries(call.conn)})


@Op(
    "PUT /webhooks/{webhook}",
    command="webhook add WEBHOOK URL",
    done="{name} is sent messages. To try it: dataloader webhook test {name!q}{flags}",
    examples=("dataloader webhook add ops https://ops.example.com/alerts --signed-by DL_WEBHOOK_KEY",),
)
def put_webhook(
    call: Call,
    webhook: WebhookName,
    url: Annotated[
        str,
        Field(
            max_length=receivers.URL_LIMIT,
            json_schema_extra={"pattern": r"^(https?://[!-~]+|\$\{DL_WEBHOOK_[A-Z0-9_]{1,64}\})$"},
            description="where messages go; `${DL_WEBHOOK_...}`: the variable of the workers that holds a secret URL",
        ),
    ],
    shape: Annotated[Shape, Field(description="of the messages")] = "json",
    signed_by: Annotated[
        str,
        Field(
            json_schema_extra={"pattern": "^DL_WEBHOOK_[A-Z0-9_]{1,64}$"},
            description="the variable of the workers with the key that signs messages; null: none does",
        ),
    ]
    | None = None,
    kinds: Annotated[list[Kind], Field(min_length=1, max_length=len(ALERTS), description="of alerts; null: all")]
    | None = None,
    queues: Annotated[list[Text], Field(min_length=1, max_length=QUEUES, description="whose alerts; null: all")]
    | None = None,
    lag_sec: Annotated[
        float, Field(gt=0, le=1e9, allow_inf_nan=False, description="from which queue latency on a queue is late")
    ] = receivers.LAG_SEC,
) -> Webhook:
    """Add a receiver of alerts, or change the one of this name; what the request leaves out has its default."""
    row = receivers.put(call.conn, webhook, url, call.by, shape, signed_by, kinds, queues, lag_sec)
    return made(Webhook, row)


@_webhook("remove", done="{webhook} is removed")
def remove_webhook(call: Call, webhook: WebhookName) -> Gone:
    """Remove a receiver of alerts; messages that wait for it are not sent any more."""
    if not receivers.remove(call.conn, webhook):
        raise Unknown("webhook")
    return Gone(name=webhook)


@_webhook("pause", done="{webhook} is sent no messages")
def pause_webhook(call: Call, webhook: WebhookName) -> Webhook:
    """Send a receiver no more messages; those of the pause are never sent."""
    return made(Webhook, known(receivers.pause(call.conn, webhook, call.by), "webhook"))


@_webhook("resume", done="{webhook} is sent messages again")
def resume_webhook(call: Call, webhook: WebhookName) -> Webhook:
    """Send messages to a paused receiver again, also if its answer 410 has paused it."""
    return made(Webhook, known(receivers.resume(call.conn, webhook), "webhook"))


@_webhook(
    "test",
    done="the message is job {job_id}. Has it arrived? `dataloader wait {job_id}{flags}` waits for it. {advice:}",
    repeatable=False,
    links="/job_id",
)
def test_webhook(call: Call, webhook: WebhookName) -> Tested:
    """Send a receiver a test message, also while it is paused; the answer has the job that sends it."""
    job_id = known(receivers.send_test(call.conn, webhook, call.settings), "webhook")
    queue = call.settings.dl_alerts_queue
    advice = f'No worker serves the queue {queue}: add {{"queue": "{queue}"}} to WORKERS_JSON.'
    return Tested(name=webhook, job_id=job_id, advice=None if receivers.is_served(call.conn, queue) else advice)
