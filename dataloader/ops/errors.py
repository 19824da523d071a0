"""The meaning of each error of the queue: one table for HTTP, the command line, the dashboard and programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from dataloader.model.farm import Fault
from dataloader.queue import enqueue, operations, parents
from dataloader.queue.cursor import WrongCursor
from dataloader.queue.plans import plan
from dataloader.queue.reports import bulk, keys, search, stats, webhooks

T = TypeVar("T")
# status: (the last part of the problem's type, title). A type, once published, never changes.
KINDS = {
    400: ("invalid-input", "The request is not valid"),
    401: ("unauthorized", "Unauthorized"),
    404: ("not-found", "There is nothing at this address"),
    405: ("method-not-allowed", "This address does not take that method"),
    409: ("conflict", "The state of the job or the queue does not allow it"),
    411: ("length-required", "The request should say how long its body is"),
    413: ("too-large", "The request is too large"),
    429: ("queue-full", "The queue holds as many jobs as it may"),
    500: ("internal-error", "The service has failed"),
    503: ("unavailable", "The service cannot answer now"),
}
FULL_RETRY_AFTER_SEC = 15
KEY_TAKEN = "key-taken", "The idempotency key belongs to a job of another producer"  # another 409
NOT_ORDERED = "not-ordered", "The queue is not ordered"  # and another


class Problem(Exception):
    """A refusal, as the answer has it: a status, a text, the faults of the request, headers, the kind and its title."""

    def __init__(
        self,
        status: int,
        detail: str,
        faults: Iterable[Fault] = (),
        headers: Mapping[str, str] | None = None,
        kind: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.faults, self.headers = status, detail, tuple(faults), headers
        self.kind = kind or KINDS[status]

    def document(self) -> dict[str, Any]:
        """The problem document (RFC 9457), without what the request says of itself."""
        last, title = self.kind
        document = {"type": f"/problems/{last}", "title": title, "status": self.status, "detail": self.detail}
        return document | {"errors": [asdict(fault) for fault in self.faults]}


def invalid(pointer: str, code: str, message: str) -> Problem:
    """The 400 Problem of one fault in the input."""
    return Problem(400, message, [Fault(pointer=pointer, code=code, message=message)])


class Unknown(Exception):
    """There is no such thing: a job, a limit, a schedule, a backfill, a webhook, a task."""

    def __init__(self, noun: str) -> None:
        special = {"job": "there is no job with this job_id", "task": "no worker has shown a pipeline of this task"}
        super().__init__(special.get(noun, f"there is no {noun} of this name"))


def known(value: T | None, noun: str) -> T:
    """Return `value`; raises Unknown where it is None."""
    if value is None:
        raise Unknown(noun)
    return value


class NotAllowed(Exception):
    """The state of the job does not allow the change; the text says which state does."""


class Meaning(NamedTuple):
    """The HTTP status of an error, the code of the fault, and the parameter that is wrong."""

    status: int
    code: str = ""
    parameter: str = ""
    kind: tuple[str, str] | None = None


MEANINGS: dict[type[Exception], Meaning] = {
    Unknown: Meaning(404),
    NotAllowed: Meaning(409),
    WrongCursor: Meaning(400, "cursor", "after"),
    search.WrongSearch: Meaning(400, "search", "q"),
    stats.TooMany: Meaning(400, "too_many", "sort"),
    bulk.WrongTarget: Meaning(400, "target", "matching"),
    bulk.WrongConfirmation: Meaning(400, "confirmation", "confirmation"),
    operations.WrongName: Meaning(400, "queue_name", "to"),
    operations.WrongLimit: Meaning(400, "limit"),
    operations.Contradiction: Meaning(400, "contradiction", "merge"),
    operations.Conflict: Meaning(409),
    keys.NotOrdered: Meaning(409, kind=NOT_ORDERED),
    plan.Unknown: Meaning(404),
    plan.Wrong: Meaning(400, "plan"),
    webhooks.WrongWebhook: Meaning(400, "webhook"),
    parents.UnknownParents: Meaning(400, "depends_on", "depends_on"),
}
# The errors for which `refusal` has an answer.
MENDABLE: tuple[type[Exception], ...] = (Problem, enqueue.KeyTaken, enqueue.QueueFull, *MEANINGS)


def refusal(error: Exception) -> Problem | None:
    """The refusal of an error that an asker can mend; None for any other."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, enqueue.KeyTaken):  # the answer does not name the job: a guessed key must not reveal it
        pointer = "/idempotency_key" if error.place is None else f"/jobs/{error.place}/idempotency_key"
        text = "the idempotency key should be one that no other producer has used"
        fault = Fault(pointer=pointer, code="key_taken", message=text)
        return Problem(409, f"{error}: send another", [fault], kind=KEY_TAKEN)
    if isinstance(error, enqueue.QueueFull):
        return Problem(429, f"{error}; send it again later", headers={"Retry-After": str(FULL_RETRY_AFTER_SEC)})
    means = next((MEANINGS[kind] for kind in type(error).__mro__ if kind in MEANINGS), None)
    if means is None:
        return None
    parameter = getattr(error, "field", means.parameter)
    if means.status == 400:
        return invalid(f"/{parameter}" if parameter else "", means.code, str(error))
    return Problem(means.status, str(error), kind=means.kind)
