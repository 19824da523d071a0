"""What the API accepts and how it writes: the request models, the guards on JSON, the JSON of the answers.

Whatever PostgreSQL or a worker could not hold is refused here, with a pointer to it. May import `queue`.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar
from uuid import UUID

from flask.json.provider import DefaultJSONProvider
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from dataloader.api.problems import Fault, Problem, invalid
from dataloader.queue import NewJob

BODY_LIMIT = 256 * 1024  # bytes
DEPTH_LIMIT = 64  # objects and arrays within each other, the body itself being the first
DIGITS_LIMIT = 4_300  # what Python reads as one integer, and so what a worker can
INT4_MAX = 2_147_483_647
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
HORIZON = timedelta(days=3_653)  # ten years: Python cannot read back what PostgreSQL holds beyond year 9999
_FAULTS_SHOWN = 20
_POINTER_LIMIT = 200
M = TypeVar("M", bound=BaseModel)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.IGNORECASE | re.ASCII)


def _printable(text: str) -> str:
    if _CONTROL.search(text):
        raise PydanticCustomError("control_character", "Input should hold no control characters")
    return text


def _instant(value: object) -> datetime | None:
    """The instant that an RFC 3339 text names, in UTC, when it is one that the queue can keep."""
    if value is None:
        return None
    at = _parsed(value)
    if at is None:
        raise PydanticCustomError(
            "rfc3339", "Input should be an RFC 3339 time with an offset, such as 2026-01-31T06:30:00+03:00"
        )
    if not EARLIEST <= at <= datetime.now(UTC) + HORIZON:
        raise PydanticCustomError("time_range", "Input should be from 2000 to ten years from now")
    return at


def _parsed(value: object) -> datetime | None:
    if not isinstance(value, str) or not _RFC3339.fullmatch(value):
        return None
    try:
        return datetime.fromisoformat(value.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


Queue = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_printable)]
Label = Annotated[str, Field(max_length=255)]


class Trigger(BaseModel):
    """The body of POST /api/v1/jobs/trigger. What is left out gets the default of queue.NewJob."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    queue: Queue
    task: str = Field(min_length=1, max_length=200)
    lock_key: str = Field(min_length=1, max_length=512)
    args: dict[str, Any] = {}
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=255)
    partition_key: Label = ""
    priority: int = Field(default=100, ge=0, le=INT4_MAX)
    available_at: Annotated[datetime | None, BeforeValidator(_instant)] = None
    max_attempts: int = Field(default=5, ge=1, le=INT4_MAX)
    lease_ttl_sec: int = Field(default=60, ge=1, le=86_400)
    timeout_sec: int | None = Field(default=None, ge=1, le=30 * 86_400)
    producer: Label | None = None
    consumer_group: Label | None = None


class Cancel(BaseModel):
    """The body of POST /api/v1/jobs/{job_id}/cancel, which may be left out."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    force: bool = False


def new_job(document: dict[str, Any], lease_ttl_sec: int) -> NewJob:
    """The job that a trigger's body asks for; `lease_ttl_sec` counts where the body names none.

    Raises a 400 Problem that names every field that is wrong.
    """
    trigger = _validated(Trigger, document)
    given = {name: getattr(trigger, name) for name in trigger.model_fields_set}
    return NewJob(**{"lease_ttl_sec": lease_ttl_sec, **given})


def is_forced(document: dict[str, Any]) -> bool:
    """Whether a cancel's body asks for force; raises a 400 Problem that names what is wrong."""
    return _validated(Cancel, document).force


def job_id(text: str) -> UUID:
    """The UUID of the canonical form, which `text` should be; raises a 400 Problem."""
    if not _UUID.fullmatch(text):
        raise invalid("", "uuid", "job_id should be a UUID such as 01890a5d-ac96-774b-bcce-b302099a8057")
    return UUID(text)


def document(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, holding only what PostgreSQL can store and a worker can read.

    Raises a 400 Problem for anything else: bytes that are not UTF-8, no object, a key twice in one object,
    NUL and lone surrogates, numbers that are not finite or too long, nesting beyond DEPTH_LIMIT.
    """
    if not raw:
        raise invalid("", "empty", "the body should be a JSON object; it is empty")
    value = _plain(_decoded(raw), [])
    if not isinstance(value, dict):
        raise invalid("", "object_type", "the body should be a JSON object")
    return value


class _Pairs(list[tuple[str, Any]]):
    """An object as it was written, before keys that occur twice are lost."""


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(), object_pairs_hook=_Pairs, parse_int=_integer)
    except UnicodeDecodeError:
        raise invalid("", "utf8", "the body should be JSON in UTF-8") from None
    except json.JSONDecodeError as e:
        where = f"line {e.lineno}, column {e.colno}"
        raise invalid("", "json", f"the body should be JSON; it is not from {where} on") from None
    except RecursionError:
        raise _too_deep([]) from None


def _integer(digits: str) -> float | int:
    return int(digits) if len(digits) <= DIGITS_LIMIT else math.inf


def _plain(value: Any, path: list[str | int]) -> Any:
    """`value` with dicts for _Pairs. `path` leads to it; it is grown and cut in place, to stay cheap."""
    if isinstance(value, list) and len(path) >= DEPTH_LIMIT:
        raise _too_deep(path)
    if isinstance(value, _Pairs):
        return _object(value, path)
    if isinstance(value, list):
        return [_at(path, index, item) for index, item in enumerate(value)]
    if isinstance(value, str):
        _check_text(value, path)
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(_pointer(path), "number", f"should be a finite number of at most {DIGITS_LIMIT} digits")
    return value


def _object(pairs: _Pairs, path: list[str | int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in pairs:
        _check_text(key, [*path, key])
        if key in found:
            raise invalid(_pointer([*path, key]), "duplicate_key", "a key should occur once in an object")
        found[key] = _at(path, key, item)
    return found


def _at(path: list[str | int], step: str | int, item: Any) -> Any:
    path.append(step)
    plain = _plain(item, path)
    path.pop()
    return plain


def _check_text(text: str, path: list[str | int]) -> None:
    if _UNSTORABLE.search(text):
        raise invalid(_pointer(path), "unstorable_text", "text should hold no U+0000 and no lone surrogate")


def _too_deep(path: list[str | int]) -> Problem:
    message = f"objects and arrays should be nested at most {DEPTH_LIMIT} deep"
    return invalid(_pointer(path), "too_deep", message)


def _pointer(path: list[str | int] | tuple[str | int, ...]) -> str:
    """`path` as a JSON pointer (RFC 6901), shortened and made storable."""
    text = "".join("/" + str(step)[:_POINTER_LIMIT].replace("~", "~0").replace("/", "~1") for step in path)
    return _UNSTORABLE.sub("\ufffd", text[:_POINTER_LIMIT])


def _validated(model: type[M], document: dict[str, Any]) -> M:
    try:
        return model.model_validate(document)
    except ValidationError as e:
        errors = e.errors(include_url=False, include_context=False, include_input=False)
        faults = [_fault(error, model) for error in errors[:_FAULTS_SHOWN]]
        count = "one field is" if len(errors) == 1 else f"{len(errors)} fields are"
        raise Problem(400, f"{count} not valid, see errors", faults) from None


def _fault(error: ErrorDetails, model: type[BaseModel]) -> Fault:
    message = error["msg"]
    if error["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) or "none"
        message = f"This field is not known; the fields are: {known}"
    return Fault(_pointer(error["loc"]), error["type"], message)


class Json(DefaultJSONProvider):
    """How answers are written: fields in their order, instants as RFC 3339 in UTC."""

    sort_keys = False

    @staticmethod
    def default(value: Any) -> Any:
        """What json does not know: instants here, the rest (UUID, Decimal, ...) as Flask writes it."""
        if isinstance(value, datetime):
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        return DefaultJSONProvider.default(value)
