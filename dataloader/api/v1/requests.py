"""What may stand behind the `?` of an address: a model for each endpoint, and how its parameters are read.

Whatever is not known, given twice or out of bounds is refused with the parameter's name.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError
from werkzeug.datastructures import MultiDict

from dataloader.api.web import json_body
from dataloader.api.web.problems import Fault, Problem
from dataloader.queue.job import GROUPS, STATUSES
from dataloader.queue.new_job import FAULTS_SHOWN, instant

LIMIT = 200  # rows of one page
MINUTES = 360
BIGINT_MAX = 2**63 - 1
_NUMBER = re.compile(r"-?\d{1,19}", re.ASCII)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def _number(text: object) -> int:
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        raise PydanticCustomError("int_parsing", "Input should be an integer, in decimal digits")
    return int(text)


def _storable(text: str) -> str:
    if _UNSTORABLE.search(text):
        raise PydanticCustomError("unstorable_text", "text should hold no U+0000 and no lone surrogate")
    return text


_AsNumber = BeforeValidator(_number)
Text = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_storable)]
Instant = Annotated[datetime, BeforeValidator(instant)]
Limit = Annotated[int, Field(ge=1, le=LIMIT, description="at most so many"), _AsNumber]
ListedBy: TypeAlias = Literal[STATUSES]  # type: ignore[valid-type]
AfterEvent = Annotated[int, Field(ge=0, le=BIGINT_MAX, description="rows with a greater `event_id`"), _AsNumber]
Q = TypeVar("Q", bound="Query")


class Query(BaseModel):
    """The parameters of an endpoint; this one takes none."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Jobs(Query):
    """GET /api/v1/jobs. Filters that are given must all hold."""

    queue: Text | None = None
    task: Text | None = None
    status: ListedBy | None = Field(
        default=None, description=f"a status, or {', '.join(f'{name} ({words})' for name, words in GROUPS.items())}"
    )
    lock_key: Text | None = None
    partition_key: Text | None = None
    producer: Text | None = None
    consumer_group: Text | None = None
    since: Instant | None = Field(default=None, description="changed then or later")
    until: Instant | None = Field(default=None, description="changed before")
    sort: Literal["changed", "key"] = "changed"
    limit: Limit = 50
    after: Annotated[str, Field(min_length=1, max_length=2_000), AfterValidator(_storable)] | None = Field(
        default=None,
        description="`next` of the page before; the other parameters as they were",
        json_schema_extra={"format": "cursor"},
    )


class Status(Query):
    """GET /api/v1/jobs/{job_id}/status, which ignores all others; schemas.seconds_to_wait reads it."""

    wait: Annotated[int, Field(ge=0, le=json_body.WAIT_LIMIT), _AsNumber] | None = Field(
        default=None,
        description="for how many seconds to wait until the job is another than `If-None-Match` says, or, without that,"
        " until it has changed",
    )


class JobEvents(Query):
    """GET /api/v1/jobs/{job_id}/events."""

    after: AfterEvent = 0
    limit: Limit = LIMIT


class FarmEvents(Query):
    """GET /api/v1/events. Without `after` the newest rows."""

    after: AfterEvent | None = None
    queue: Text | None = None
    limit: Limit = LIMIT


class OfQueue(Query):
    """What is done to one queue."""

    name: Literal[".", ".."] | None = Field(
        default=None,
        description="the queue, for the two names that no path can hold, and that clients and proxies take out of it;"
        " the path has any other part in their place, such as `-`",
    )


class Pace(Query):
    """GET /api/v1/pace."""

    minutes: Annotated[int, Field(ge=1, le=MINUTES, description="how far back"), _AsNumber] = 60


def read(model: type[Q], given: MultiDict[str, str]) -> Q:
    """The parameters of a query string as `model` has them; raises a 400 Problem that names all that is wrong."""
    twice = [name for name, values in given.lists() if len(values) > 1]
    if twice:
        message = "a parameter should be given once"
        raise Problem(400, message, [Fault(_pointer(name), "duplicate", message) for name in twice[:FAULTS_SHOWN]])
    try:
        return model.model_validate(given.to_dict())
    except ValidationError as e:
        errors = e.errors(include_url=False, include_context=False, include_input=False)
    faults = [_fault(model, error) for error in errors[:FAULTS_SHOWN]]
    count = "one parameter is" if len(errors) == 1 else f"{len(errors)} parameters are"
    raise Problem(400, f"{count} not valid, see errors", faults)


def _fault(model: type[Query], error: Any) -> Fault:
    message = error["msg"]
    if error["type"] == "extra_forbidden":
        message = f"This parameter is not known; the parameters are: {', '.join(model.model_fields) or 'none'}"
    return Fault(_pointer(str(error["loc"][0])), error["type"], message)


def _pointer(name: str) -> str:
    return "/" + _UNSTORABLE.sub("\ufffd", name[:200]).replace("~", "~0").replace("/", "~1")
