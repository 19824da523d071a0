"""What a call of the client may raise. Every text is without the token. May import nothing of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloader.client.results import Job


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with what was sent: where (a JSON pointer), a code for programs, words for people."""

    pointer: str
    code: str
    message: str


class ClientError(Exception):
    """Whatever a call of the client can come to beside a result; the fields are those of a problem document.

    `status` is the answer's, None where there was none. `kind` is the last part of the problem's type, such as
    `invalid-input`. `retry_after` is how many seconds the service asked to be left alone.
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
        where = [f"  {fault.pointer}: {fault.message}" for fault in self.faults if fault.pointer]
        return "\n".join([": ".join(filter(None, (self.title, self.detail))), *where])


class Refused(ClientError):
    """What was sent is not valid (400 and the like); `faults` say where. Sending it again does not help."""


class Unauthorized(ClientError):
    """The service wants a token, or does not know this one (401)."""


class Forbidden(ClientError):
    """The token has not the scope that this needs, or without one only loopback may do it (403)."""


class NotFound(ClientError):
    """There is no such job, or the service has no such address (404)."""


class Conflict(ClientError):
    """The job's status does not allow it, or the idempotency key is another producer's (409)."""


class QueueFull(ClientError):
    """The queue has as many jobs as it may hold (429); `retry_after` says when to ask again."""


class Unavailable(ClientError):
    """No answer, or 429, 502, 503, 504: the service or its database is away, restarting or busy. Trying again may help.

    `is_lasting`: it will not, for the address or its certificate is wrong. `is_open`: what was asked for may have been
    done all the same.
    """

    is_lasting = False
    is_open = True


class Unexpected(ClientError):
    """A fault of the service (500), or an answer that is none of its own: something else listens at this address."""


class WaitTimeout(ClientError, TimeoutError):
    """The job has not ended within the time given; `job` is how it was seen last, None when it was not."""

    job: Job | None

    def __init__(self, job: Job | None, seconds: float) -> None:
        self.job = job
        seen = f"the job is {job.status}" if job else "the service did not answer"
        super().__init__(f"after {seconds:g} s {seen}")


class JobFailed(ClientError):
    """The job of `run` has ended otherwise than `succeeded`; `job` is its end."""

    job: Job

    def __init__(self, job: Job) -> None:
        self.job = job
        super().__init__(f"job {job.job_id} ended {job.status}", job.error or "")


_KINDS: dict[int, type[ClientError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    429: Unavailable,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def of_answer(status: int, reason: str, document: Any, retry_after: float | None) -> ClientError:
    """The error that an answer with this status is; `document` is its body where that is JSON."""
    problem: Mapping[str, Any] = document if isinstance(document, dict) else {}
    kind = _text(problem.get("type")).rpartition("/")[2]
    named = QueueFull if status == 429 and "queue" in kind else _KINDS.get(status)
    made = named or (Refused if 400 <= status < 500 else Unexpected)
    return made(
        _text(problem.get("title")) or f"HTTP {status} {reason}".strip(),
        _text(problem.get("detail")),
        status=status,
        kind=kind,
        request_id=_text(problem.get("request_id")),
        faults=tuple(_faults(problem.get("errors"))),
        retry_after=retry_after,
    )


def _faults(listed: Any) -> list[Fault]:
    found = listed if isinstance(listed, list) else []
    return [Fault(*(_text(each.get(name)) for name in Fault.__slots__)) for each in found if isinstance(each, dict)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
