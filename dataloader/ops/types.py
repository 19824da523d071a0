"""The types of parameters: their bounds, and their descriptions for people."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from dataloader.queue.fields import INT4_MAX
from dataloader.queue.new_job import instant, printable
from dataloader.queue.reports.runs import RANGES

UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
PRINTABLE = "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"
_NUMBER = re.compile(r"-?\d{1,19}", re.ASCII)


def storable(text: str) -> str:
    """The text, which PostgreSQL can store."""
    if UNSTORABLE.search(text):
        raise PydanticCustomError("unstorable_text", "text should hold no U+0000 and no lone surrogate")
    return text


def whole_number(text: Any) -> Any:
    """The number in the text of a query."""
    if text is not None and (not isinstance(text, str) or not _NUMBER.fullmatch(text)):
        raise PydanticCustomError("int_parsing", "Input should be an integer, in decimal digits")
    return None if text is None else int(text)


BIGINT_MAX = 2**63 - 1
Storable = AfterValidator(storable)
Text = Annotated[str, Field(min_length=1, max_length=512), Storable]
SearchText = Annotated[Text, Field(json_schema_extra={"pattern": PRINTABLE, "format": "search"})]
Attempt = Annotated[int, Field(ge=1, le=INT4_MAX, description="of this attempt only")]
JobId = Annotated[UUID, Field(strict=False, description="the id of a job")]
# A trigger may name shorter queues and tasks only, other services any.
QueueName = Annotated[str, Field(min_length=1, max_length=512, description="the queue"), Storable]
NewQueueName = Annotated[
    str, Field(min_length=1, max_length=128, description="the name of the other queue"), AfterValidator(printable)
]
TaskName = Annotated[str, Field(min_length=1, max_length=2_400, description="the task"), Storable]
RangeName: TypeAlias = Literal[tuple(RANGES)]  # type: ignore[valid-type]
Whole = Annotated[int, Field(ge=0, le=INT4_MAX)]
PageSize = Annotated[int, Field(ge=1, le=200, description="at most so many")]
Instant = Annotated[datetime, BeforeValidator(instant)]
Cursor = Annotated[
    str,
    Field(
        min_length=1,
        max_length=4_000,
        description="`next` of the answer before; the rest as it was",
        json_schema_extra={"format": "cursor"},
    ),
    Storable,
]
