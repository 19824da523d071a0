"""The exceptions of the client. No text of them holds the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dataloader.model.farm import Fault

if TYPE_CHECKING:
    from dataloader.model.jobs import Status


class ClientError(Exception):
    """The base of the client's exceptions; its fields are those of a problem document.

    `status` is the answer's HTTP status, None without an answer. `kind` is the last part of the problem's type, such as
    `invalid-input`. `retry_after` is the answer's Retry-After in seconds.
    """

    def __init__(
        self,
        title: str,
        detail: str = "",
        *,
        status: int | None = None,
        kind: str = "",
        request_id: str = "",
        faults: tuple[Fault, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        self.title, self.detail, self.status, self.kind = title, detail, status, kind
        self.request_id, self.faults, self.retry_after = request_id, faults, retry_after
        super().__init__(title)

    def __str__(self) -> str:
        # A fault of the document as a whole has no pointer; where it is the only thing to say, the detail says it.
        new = [fault for fault in self.faults if fault.pointer or fault.message not in self.detail]
        lines = ["  " + ": ".join(filter(None, (fault.pointer, fault.message))) for fault in new]
        return "\n".join([": ".join(filter(None, (self.title, self.detail))), *lines])


class Refused(ClientError):
    """The request is not valid (400 and other 4xx); `faults` name the places. A repetition does not help."""


class Unauthorized(ClientError):
    """The request has no token, or one that the service does not know (401)."""


class Forbidden(ClientError):
    """The token lacks the scope, or the service without tokens takes changes from loopback only (403)."""


class NotFound(ClientError):
    """The job or the address does not exist (404)."""


class Conflict(ClientError):
    """The state of the job or the queue forbids it, or the idempotency key belongs to another producer (409)."""


class QueueFull(ClientError):
    """The queue is at its limit (429); try again after `retry_after` seconds."""


class Unavailable(ClientError):
    """No answer, or 429, 502, 503, 504: the service or its database is away, restarting or busy. A repetition may help.

    `is_lasting`: a repetition does not help, because the address or its certificate is wrong. `is_open`: the service
    may have done the request.
    """

    is_lasting = False
    is_open = True


class Unexpected(ClientError):
    """A fault of the service (500), or an answer of another program at this address."""


class WaitTimeout(ClientError, TimeoutError):
    """The job has not ended within the given time; `job` is its last known state, or None."""

    job: Status | None

    def __init__(self, job: Status | None, seconds: float) -> None:
        self.job = job
        state = f"the job is {job.status}" if job else "the service did not answer"
        super().__init__(f"after {seconds:g} s {state}")


class JobFailed(ClientError):
    """The job of `run` ended with another status than `succeeded`; `job` is its end."""

    job: Status

    def __init__(self, job: Status) -> None:
        self.job = job
        super().__init__(f"job {job.job_id} ended {job.status}", job.error or "")


_KINDS: dict[int, type[ClientError]] = {
    **{401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict},
    **dict.fromkeys((429, 502, 503, 504), Unavailable),
}


def from_answer(status: int, reason: str, document: Any, retry_after: float | None) -> ClientError:
    """The exception for an answer with this status; `document` is its JSON body, if it has one."""
    problem: Mapping[str, Any] = document if isinstance(document, dict) else {}
    listed = problem.get("errors")
    faults = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    names, kind = ("pointer", "code", "message"), _text(problem.get("type")).rpartition("/")[2]
    named = QueueFull if status == 429 and "queue" in kind else _KINDS.get(status)
    made = named or (Refused if 400 <= status < 500 else Unexpected)
    return made(
        _text(problem.get("title")) or f"HTTP {status} {reason}".strip(),
        _text(problem.get("detail")),
        status=status,
        kind=kind,
        request_id=_text(problem.get("request_id")),
        faults=tuple(Fault(**{name: _text(each.get(name)) for name in names}) for each in faults),
        retry_after=retry_after,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
