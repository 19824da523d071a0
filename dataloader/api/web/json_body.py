"""What the API accepts and how it writes: the request models, the guards on JSON, the JSON of the answers.

Whatever PostgreSQL or a worker could not hold is refused here, with a pointer to it. May import `producer` and `queue`.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar
from uuid import UUID

from flask.json.provider import DefaultJSONProvider
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from dataloader.api.web.problems import Fault, Problem, invalid
from dataloader.queue.enqueue import Columns
from dataloader.queue.lifecycle import NewJob
from dataloader.queue.new_job import DEPTH_LIMIT, FAULTS_SHOWN, INT4_MAX, Trigger, columns_of, is_deep

BODY_LIMIT = 256 * 1024  # bytes; in a batch, of each job's args
BATCH_JOBS = 10_000
BATCH_LIMIT = 16 * 1024 * 1024  # bytes
TRIGGER_DEPTH = DEPTH_LIMIT  # objects and arrays within each other, the body itself being the first
BATCH_DEPTH = DEPTH_LIMIT + 2  # so each job may be nested as deep as a trigger's body
DIGITS_LIMIT = 4_300  # what Python reads as one integer, and so what a worker can
BULK_JOBS = 1_000
QUEUE_LIMIT = 512  # characters in the name of a queue; a trigger may name shorter ones only, other services any
KEY_LIMIT = 255
WAIT_LIMIT = 30  # seconds that one request may wait for a job to change
_SECONDS = re.compile("[0-9]{1,2}")
_POINTER_LIMIT = 200
M = TypeVar("M", bound=BaseModel)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)
_KEY = re.compile(r"[ -~]{1,255}")
# W3C Trace Context: version, trace id, span id, flags; a later version may say more behind them.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?")


class Body(BaseModel):
    """A body of which every field is known and has its type."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class Batch(Body):
    """The body of POST /api/v1/jobs/batch, but for the jobs in it."""

    jobs: list[Any] = Field(max_length=BATCH_JOBS)


class Cancel(Body):
    """The body of POST /api/v1/jobs/{job_id}/cancel, which may be left out."""

    force: bool = False


class Nothing(Body):
    """A body that may be left out and says nothing."""


class Bulk(Body):
    """The jobs of a bulk request."""

    job_ids: list[Annotated[str, Field(pattern="^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")]] = Field(
        max_length=BULK_JOBS
    )

    @property
    def ids(self) -> list[UUID]:
        """The ids, in their order."""
        return [UUID(text) for text in self.job_ids]


class BulkCancel(Bulk):
    """The body of POST /api/v1/jobs/bulk/cancel."""

    force: bool = False


class QueueLimit(Body):
    """The body of PUT /api/v1/queues/{queue}/limit; null: no limit."""

    max_length: int | None = Field(ge=0, le=INT4_MAX)


def new_job(
    document: dict[str, Any], lease_ttl_sec: int, key: str | None = None, traceparent: str | None = None
) -> NewJob:
    """The job that a trigger's body asks for; `lease_ttl_sec` counts where the body names none.

    `key` and `traceparent` are the headers Idempotency-Key and traceparent. Raises a 400 Problem that names every field
    that is wrong.
    """
    trigger = _validated(Trigger, document)
    given = {name: getattr(trigger, name) for name in trigger.model_fields_set}
    given["idempotency_key"] = _one_key(given.get("idempotency_key"), key)
    return NewJob(**{"lease_ttl_sec": lease_ttl_sec, **given, "trace": trace(traceparent)})


def _one_key(in_body: str | None, in_header: str | None) -> str | None:
    if in_header is None:
        return in_body
    if not _KEY.fullmatch(in_header):
        message = f"Idempotency-Key should be 1 to {KEY_LIMIT} printable ASCII characters"
        raise invalid("/idempotency_key", "idempotency_key", message)
    if in_body not in (None, in_header):
        message = "the header Idempotency-Key and the field idempotency_key should be the same, or one be left out"
        raise invalid("/idempotency_key", "idempotency_key", message)
    return in_header


def trace(traceparent: str | None) -> str | None:
    """The W3C traceparent, when it is a valid one: whoever calls us may send what he likes there."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or (match["more"] and match[0].startswith("00")):
        return None
    return match[0][:55]


def new_jobs(document: dict[str, Any], lease_ttl_sec: int) -> Columns:
    """The jobs that a batch's body asks for; `lease_ttl_sec` counts for those that name none.

    Raises a 400 Problem that names every field that is wrong (at most FAULTS_SHOWN), a 413 one for `args` that one
    trigger could not hold either.
    """
    jobs = _validated(Batch, document).jobs
    try:
        columns = columns_of(jobs, lease_ttl_sec)
    except ValidationError as e:
        raise _refusal(e, Trigger, ("jobs",)) from None
    for number, args in enumerate(columns["args"]):
        if len(args) > BODY_LIMIT // 4 and len(args.encode()) > BODY_LIMIT:
            message = f"args should be at most {BODY_LIMIT} bytes of JSON"
            raise Problem(413, message, [Fault(f"/jobs/{number}/args", "too_large", message)])
    return columns


def seconds_to_wait(text: str | None) -> int:
    """The seconds of `?wait=`; a 400 Problem for what is no such number."""
    if text is None:
        return 0
    if not _SECONDS.fullmatch(text) or int(text) > WAIT_LIMIT:
        raise invalid("/wait", "wait", f"wait should be a whole number of seconds from 0 to {WAIT_LIMIT}")
    return int(text)


def is_forced(document: dict[str, Any]) -> bool:
    """Whether a cancel's body asks for force; raises a 400 Problem that names what is wrong."""
    return _validated(Cancel, document).force


def nothing(document: dict[str, Any]) -> None:
    """Raise a 400 Problem for a body that says something where nothing can be said."""
    _validated(Nothing, document)


def bulk(document: dict[str, Any]) -> Bulk:
    """The jobs that a bulk request names; raises a 400 Problem that names what is wrong."""
    return _validated(Bulk, document)


def bulk_cancel(document: dict[str, Any]) -> BulkCancel:
    """The jobs that a bulk cancellation names; raises a 400 Problem that names what is wrong."""
    return _validated(BulkCancel, document)


def queue_limit(document: dict[str, Any]) -> int | None:
    """The new limit of a queue's length; raises a 400 Problem that names what is wrong."""
    return _validated(QueueLimit, document).max_length


def queue(text: str) -> str:
    """The name of a queue in a path, which may be any that PostgreSQL can store; raises a 400 Problem."""
    if not 1 <= len(text) <= QUEUE_LIMIT or _UNSTORABLE.search(text):
        raise invalid("", "queue", f"queue should be 1 to {QUEUE_LIMIT} characters, none of them U+0000")
    return text


def job_id(text: str) -> UUID:
    """The UUID of the canonical form, which `text` should be; raises a 400 Problem."""
    if not _UUID.fullmatch(text):
        raise invalid("", "uuid", "job_id should be a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057")
    return UUID(text)


def document(raw: bytes, depth: int = TRIGGER_DEPTH) -> dict[str, Any]:
    """The JSON object in `raw`, holding only what PostgreSQL can store and a worker can read.

    Raises a 400 Problem for anything else: bytes that are not UTF-8, no object, a key twice in one object,
    NUL and lone surrogates, numbers that are not finite or too long, nesting beyond `depth`.
    """
    if not raw:
        raise invalid("", "empty", "the body should be a JSON object; it is empty")
    value = _at_once(raw, depth) or _plain(_decoded(raw, depth), [], depth)
    if not isinstance(value, dict):
        raise invalid("", "object_type", "the body should be a JSON object")
    return value


def _at_once(raw: bytes, depth: int) -> Any:
    """The JSON in `raw` when it is plain to see that nothing is wrong with it, else None; much faster than _plain."""
    if b"\\u0000" in raw or b"\\ud" in raw or b"\\uD" in raw:
        return None
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_without_twins, parse_float=_finite, parse_constant=_finite)
        return None if is_deep(value, depth) else value
    except (ValueError, RecursionError):
        return None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError
    return number


class _Pairs(list[tuple[str, Any]]):
    """An object as it was written, before keys that occur twice are lost."""


def _decoded(raw: bytes, depth: int) -> Any:
    try:
        return json.loads(raw.decode(), object_pairs_hook=_Pairs, parse_int=_integer)
    except UnicodeDecodeError:
        raise invalid("", "utf8", "the body should be JSON in UTF-8") from None
    except json.JSONDecodeError as e:
        where = f"line {e.lineno}, column {e.colno}"
        raise invalid("", "json", f"the body should be JSON; it is not from {where} on") from None
    except RecursionError:
        raise _too_deep([], depth) from None


def _integer(digits: str) -> float | int:
    return int(digits) if len(digits) <= DIGITS_LIMIT else math.inf


def _plain(value: Any, path: list[str | int], depth: int) -> Any:
    """`value` with dicts for _Pairs. `path` leads to it; it is grown and cut in place, to stay cheap."""
    if isinstance(value, list) and len(path) >= depth:
        raise _too_deep(path, depth)
    if isinstance(value, _Pairs):
        return _object(value, path, depth)
    if isinstance(value, list):
        return [_at(path, index, item, depth) for index, item in enumerate(value)]
    if isinstance(value, str):
        _check_text(value, path)
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(_pointer(path), "number", f"should be a finite number of at most {DIGITS_LIMIT} digits")
    return value


def _object(pairs: _Pairs, path: list[str | int], depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in pairs:
        _check_text(key, [*path, key])
        if key in found:
            raise invalid(_pointer([*path, key]), "duplicate_key", "a key should occur once in an object")
        found[key] = _at(path, key, item, depth)
    return found


def _at(path: list[str | int], step: str | int, item: Any, depth: int) -> Any:
    path.append(step)
    plain = _plain(item, path, depth)
    path.pop()
    return plain


def _check_text(text: str, path: list[str | int]) -> None:
    if _UNSTORABLE.search(text):
        raise invalid(_pointer(path), "unstorable_text", "text should hold no U+0000 and no lone surrogate")


def _too_deep(path: list[str | int], depth: int) -> Problem:
    message = f"objects and arrays should be nested at most {depth} deep"
    return invalid(_pointer(path), "too_deep", message)


def _pointer(path: list[str | int] | tuple[str | int, ...]) -> str:
    """`path` as a JSON pointer (RFC 6901), shortened and made storable."""
    text = "".join("/" + str(step)[:_POINTER_LIMIT].replace("~", "~0").replace("/", "~1") for step in path)
    return _UNSTORABLE.sub("\ufffd", text[:_POINTER_LIMIT])


def _validated(model: type[M], document: dict[str, Any]) -> M:
    try:
        return model.model_validate(document)
    except ValidationError as e:
        raise _refusal(e, model) from None


def _refusal(error: ValidationError, model: type[BaseModel], path: tuple[str, ...] = ()) -> Problem:
    """The problem that pydantic has found in the part of the body to which `path` leads."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    faults = [_fault(found, model, path) for found in errors[:FAULTS_SHOWN]]
    count = "one field is" if len(errors) == 1 else f"{len(errors)} fields are"
    return Problem(400, f"{count} not valid, see errors", faults)


def _fault(error: ErrorDetails, model: type[BaseModel], path: tuple[str, ...]) -> Fault:
    message = error["msg"]
    if error["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) or "none"
        message = f"This field is not known; the fields are: {known}"
    return Fault(_pointer((*path, *error["loc"])), error["type"], message)


class Json(DefaultJSONProvider):
    """How answers are written: fields in their order, instants as RFC 3339 in UTC."""

    sort_keys = False

    @staticmethod
    def default(value: Any) -> Any:
        """What json does not know: instants here, the rest (UUID, Decimal, ...) as Flask writes it."""
        if isinstance(value, datetime):
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        return DefaultJSONProvider.default(value)
