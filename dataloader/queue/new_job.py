"""The rules of a new job, and dataloader.enqueue and enqueue_many. It needs pydantic, so no worker imports it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from dataloader import config
from dataloader.queue import fields
from dataloader.queue.enqueue import Columns, NewJob, as_json, as_texts, enqueue_columns, enqueue_one, merged, spread
from dataloader.queue.fields import INT4_MAX as INT4_MAX
from dataloader.queue.foreign import Foreign, opened
from dataloader.queue.hooks import AROUND_ENQUEUE, before_enqueue
from dataloader.queue.job import ON_FAILURE
from dataloader.queue.parents import Parents, fault
from dataloader.queue.typed_args import plain

if TYPE_CHECKING:
    from dataloader.queue.foreign import ProducerConn

DEPTH_LIMIT = 64  # objects and arrays within each other, a job's document being the first, its args the second
EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
HORIZON = timedelta(days=3_653)  # ten years: Python cannot read back what PostgreSQL holds beyond year 9999
FAULTS_SHOWN = 20
PARENTS = 10_000  # of one job
_NESTING = (dict, list)
NUL_IN_JSON = re.compile(r"(?<!\\)(\\\\)*\\u0000")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_UUID = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.IGNORECASE | re.ASCII)


def printable(text: str) -> str:
    """`text`; raises PydanticCustomError where it holds a control character."""
    if _CONTROL.search(text):
        raise PydanticCustomError("control_character", "Input should hold no control characters")
    return text


def instant(value: object) -> datetime | None:
    """The instant that an RFC 3339 text names, or a datetime, in UTC, when it is one that the queue can keep."""
    if value is None:
        return None
    at = None
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise PydanticCustomError("time_zone", "Input should be a datetime with a time zone")
        at = value
    elif isinstance(value, str) and _RFC3339.fullmatch(value):
        with suppress(ValueError, OverflowError):
            at = datetime.fromisoformat(value.upper()).astimezone(UTC)
    if at is None:
        raise PydanticCustomError(
            "rfc3339", "Input should be an RFC 3339 time with an offset, such as 2026-01-31T06:30:00+03:00"
        )
    if not EARLIEST <= at <= datetime.now(UTC) + HORIZON:
        raise PydanticCustomError("time_range", "Input should be from 2000 to ten years from now")
    return at


def no_internal_task(task: str) -> str:
    if task == fields.INTERNAL_TASK:
        raise PydanticCustomError(
            "internal_task", "Input should not be {task}: the farm alone adds jobs of this task", {"task": task}
        )
    return task


def distinct(names: list[str] | None) -> list[str] | None:
    if names and len(set(names)) < len(names):
        raise PydanticCustomError("distinct", "List should hold each name once")
    return names


LimitName = Annotated[str, Field(min_length=1, max_length=fields.LIMIT_NAME), AfterValidator(printable)]
_TYPES: dict[str, Any] = {
    "text": str,
    "int": int,
    "float8": FiniteFloat,
    "jsonb": dict[str, Any],
    "timestamptz": datetime,
    "text[]": Annotated[list[LimitName], Field(json_schema_extra={"uniqueItems": True}, fail_fast=True)],
}
_CHECKS = {
    "queue": AfterValidator(printable),
    "task": AfterValidator(no_internal_task),
    "available_at": BeforeValidator(instant),
    "deadline": BeforeValidator(instant),
    "limits": AfterValidator(distinct),
}


def bounded(field: fields.Field) -> Any:
    """The bounds and the text of a field, as pydantic takes them."""
    names = ("min_length", "max_length") if field.type in ("text", "text[]") else ("ge", "le")
    bounds: Any = zip(names, (field.least, field.most), strict=True)
    return Field(description=field.text, **{name: bound for name, bound in bounds if bound is not None})


def rule(field: fields.Field) -> tuple[Any, Any]:
    """A field's type with its bounds, and its default, as pydantic takes them."""
    kind = _TYPES[field.type] if field.default is not None else _TYPES[field.type] | None
    checks = (_CHECKS[field.name],) if field.name in _CHECKS else ()
    return Annotated[kind, bounded(field), *checks], field.default


def _parent(value: object) -> UUID | int:
    if isinstance(value, UUID) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, str) and _UUID.fullmatch(value):
        return UUID(value)
    raise PydanticCustomError("parent", "Input should be a job's id, or its place in the list of jobs, from 0")


_rules: dict[str, Any] = {field.name: rule(field) for field in fields.OF_PRODUCER} | {
    "depends_on": (
        Annotated[list[Annotated[UUID | int, BeforeValidator(_parent)]], Field(max_length=PARENTS, fail_fast=True)]
        | None,
        Field(default=None, description="the jobs that end before this one starts; a number: a place in the batch"),
    ),
    "on_parent_failure": (
        Literal[ON_FAILURE],
        Field(default="cancel", description="what comes of the job when one of these does not succeed"),
    ),
}
Trigger = create_model(
    "Trigger",
    __doc__="The fields that a producer gives of a job. The default of dataloader.NewJob stands for a missing field.",
    __module__=__name__,
    __config__=ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True),
    **_rules,
)

_DEFAULTS = {name: None if field.is_required() else field.default for name, field in Trigger.model_fields.items()}
_NOT_GIVEN = _DEFAULTS | {"lock_key": ""}
_document = Trigger.__pydantic_validator__.validate_python
# The same rules by columns, many times as fast for many jobs; _document names the exact faults of one.
_RULES: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(
        Annotated[list[Annotated[field.annotation, name, *field.metadata]], Field(fail_fast=True)],  # type: ignore[arg-type,name-defined]
        config=ConfigDict(strict=True, hide_input_in_errors=True),
    )
    for name, field in Trigger.model_fields.items()
}


def enqueue(
    conn: ProducerConn,
    *,
    queue: str,
    task: str,
    lock_key: str,
    args: Mapping[str, Any] | BaseModel | None = None,
    idempotency_key: str | None = None,
    partition_key: str = "",
    priority: int = 100,
    available_at: datetime | None = None,
    max_attempts: int | None = None,
    lease_ttl_sec: int = 60,
    timeout_sec: int | None = None,
    score: float | None = None,
    producer: str | None = None,
    consumer_group: str | None = None,
    affinity_key: str | None = None,
    limits: list[str] | None = None,
    deadline: datetime | None = None,
    depends_on: Parents | None = None,
    on_parent_failure: str = "cancel",
    schema: str | None = None,
) -> tuple[UUID, str]:
    """Add one job on `conn`, in its transaction, if any; returns its id and status, or those of the job with its key.

    `conn` is of psycopg 3, Django or SQLAlchemy, also a session. The fields are the API's (docs/api.md); times need a
    zone; `args` may be an instance of the pipeline's model; a `lock_key` "" leaves it to a hook. `schema` is by default
    PG_SCHEMA_QUEUE. Raises ValueError, which names every wrong field, before `conn` is touched; TypeError for another
    `conn`; UnknownParents; the errors of its library.
    """
    given = locals() | {"args": {} if args is None else plain(args)}
    del given["conn"], given["schema"]
    fields = {name: value for name, (value,) in all_checked([given]).items()} if AROUND_ENQUEUE else checked(given)
    own, schema = opened(conn), _configured_schema() if schema is None else schema
    if fields["depends_on"] or isinstance(own, Foreign):
        return enqueue_columns(own, {name: [value] for name, value in fields.items()}, schema)[0]
    return enqueue_one(own, fields, schema)


def enqueue_many(conn: ProducerConn, jobs: Sequence[NewJob], *, schema: str | None = None) -> list[tuple[UUID, str]]:
    """Add jobs on `conn`, all or none; ids and statuses in order. As `enqueue`; an error says `jobs[3].queue`."""
    if not jobs:
        return []
    if any(type(job.args) is not dict for job in jobs):
        jobs = [replace(job, args=plain(job.args)) for job in jobs]
    if AROUND_ENQUEUE:
        columns = _all_hooked([without_defaults(_document_of(job)) for job in jobs])
        columns |= {"trace": [job.trace for job in jobs]}
    else:
        columns = _all_checked(lambda: spread(jobs), map(_document_of, jobs))
    return enqueue_columns(opened(conn), columns, _configured_schema() if schema is None else schema)


def without_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """These fields of a producer without those that are as by default."""
    return {name: value for name, value in fields.items() if value != _NOT_GIVEN[name]}


def hooked(job: Mapping[str, Any]) -> dict[str, Any]:
    """A valid job's fields after every `around_enqueue`, unchecked; raises ValueError where one refuses the job."""
    try:
        return before_enqueue(job)
    except ValidationError as e:  # of a hook's own model; its text would quote the args
        raise ValueError(in_words(e)) from None


def in_words(error: ValidationError) -> str:
    """The fault as `priority: the rule`, without the values."""
    return "; ".join(_worded(each, slice(None)) for each in _errors(error))


def keyed(job: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as they are checked before a hook sees them: it may fill in the key."""
    return {"lock_key": "-", **job}


class WrongJobs(ValueError):
    """Jobs that are not valid; the `loc` of each of their first `faults` begins with the job's place."""

    def __init__(self, jobs: Sequence[Any]) -> None:
        self.faults: list[ErrorDetails] = []
        for number, job in enumerate(jobs):
            self.faults += [each | {"loc": (number, *each["loc"])} for each in _faults_of(job)]
            if len(self.faults) > FAULTS_SHOWN:
                break
        texts = [f"jobs[{fault['loc'][0]}]." * (len(jobs) > 1) + _worded(fault) for fault in self.faults]
        super().__init__("; ".join([*texts[:FAULTS_SHOWN], *(["and more"] if texts[FAULTS_SHOWN:] else [])]))


def checked(job: dict[str, Any]) -> dict[str, Any]:
    """All fields of a job, `args` as JSON; raises ValueError, which names every wrong field."""
    unfit = ["all of it"]
    with suppress(ValueError, TypeError, RecursionError):
        valid: dict[str, Any] = vars(_document(job))  # one is checked in a fifth of the time that columns take
        valid |= {"args": as_json(valid["args"])}
        unfit = _unfit(
            {"texts": [value for value in valid.values() if isinstance(value, str)], "args": [valid["args"]]}
        )
    if unfit:
        raise WrongJobs([job])
    if wrong := fault([valid["depends_on"]], 1):
        raise ValueError(wrong)
    return valid


def all_checked(documents: Sequence[Mapping[str, Any]]) -> Columns:
    """These documents as columns, each after every hook; raises ValueError, which names the wrong fields."""
    given = [dict(document) for document in documents]
    if AROUND_ENQUEUE:
        return _all_hooked([without_defaults(document) for document in given])
    return _all_checked(lambda: _columns_of(given), given)


def _all_hooked(documents: list[dict[str, Any]]) -> Columns:
    """The columns of these documents after every hook; a field that is as by default is left out of them."""
    ready = list(map(keyed, documents))
    _all_checked(lambda: _columns_of(ready), ready)
    for number, document in enumerate(documents):
        try:
            documents[number] = hooked(document)
        except ValueError as e:
            raise ValueError(f"jobs[{number}]: {e}" if len(documents) > 1 else str(e)) from e
    return _all_checked(lambda: _columns_of(documents), documents)


def _all_checked(make: Callable[[], Columns], documents: Iterable[dict[str, Any]]) -> Columns:
    """The columns that are made, checked; raises ValueError, which names the wrong fields of these documents."""
    columns = _valid(make, documents)
    if wrong := fault(columns["depends_on"], len(columns["args"])):
        raise ValueError(wrong)
    return columns


def columns_of(documents: Sequence[Any], lease_ttl_sec: int) -> Columns:
    """Documents as columns, checked but for the links between them; raises WrongJobs.

    PostgreSQL can store a document that no hook has made: the API's guards on JSON have passed it.
    """
    is_storable = not AROUND_ENQUEUE
    return _valid(lambda: _columns_of(documents, lease_ttl_sec=lease_ttl_sec), documents, is_storable)


def _valid(make: Callable[[], Columns], documents: Iterable[Any], is_storable: bool = False) -> Columns:
    columns: Columns = {}
    with suppress(ValueError, TypeError, RecursionError):
        columns = _checked(make())
    if not columns or (not is_storable and _unfit(columns)):
        raise WrongJobs(list(documents))
    return columns


def _columns_of(documents: Sequence[Any], **more_defaults: Any) -> Columns:
    """Documents as _checked takes them; raises ValueError for what is none, and for a field that is not known."""
    defaults = _DEFAULTS | more_defaults
    if not (set(map(type, documents)) <= {dict} and defaults.keys() >= set().union(*documents)):
        raise ValueError("there is a job that is no object, or a field that is not known")
    return {name: [document.get(name, value) for document in documents] for name, value in defaults.items()}


def _checked(columns: Columns) -> Columns:
    """Columns that meet the rules, those of one value shortened to it; `args` as JSON."""
    valid = {name: _RULES[name].validate_python(merged(columns[name])) for name in _RULES if name != "args"}
    args = columns["args"]
    if not (set(map(type, args)) <= {dict} and set(map(type, chain.from_iterable(args))) <= {str}):
        args = _RULES["args"].validate_python(args)
    return columns | valid | {"args": as_texts(args)}


def _unfit(columns: Columns) -> list[str]:
    """The columns that hold what PostgreSQL or a worker could not: what the API's guards on JSON refuse as well."""
    names = [name for name, values in columns.items() if not _are_storable(values, is_json=name == "args")]
    # Most args have few brackets, so their depth need not be measured.
    large = [text for text in columns["args"] if len(text) >= 2 * DEPTH_LIMIT]
    if any(text.count("{") + text.count("[") >= DEPTH_LIMIT and is_deep(json.loads(text)) for text in large):
        names.append("args")
    return names


def _are_storable(values: Sequence[object], is_json: bool) -> bool:
    text = "".join([value for value in values if isinstance(value, str)])
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text and not (is_json and "\\u0000" in text and NUL_IN_JSON.search(text))


def is_deep(value: Any, room: int = DEPTH_LIMIT - 1) -> bool:
    """True when objects and arrays are nested deeper than `room` in it, itself included."""
    level = [value] if isinstance(value, _NESTING) else []
    while level and room:
        inside = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [item for item in inside if isinstance(item, _NESTING)]
        room -= 1
    return bool(level)


def _document_of(job: NewJob) -> dict[str, Any]:
    return {name: getattr(job, name) for name in _DEFAULTS}


def _faults_of(document: Any) -> list[ErrorDetails]:
    """The faults of a job, with the first of its unknown fields only: pydantic would collect a million of them."""
    if isinstance(document, dict) and len(document) > len(_DEFAULTS) + FAULTS_SHOWN:
        unknown = islice((name for name in document if name not in _DEFAULTS), FAULTS_SHOWN + 1)
        document = {name: document[name] for name in [*filter(document.__contains__, _DEFAULTS), *unknown]}
    try:
        valid = vars(_document(document))  # _checked takes long for one
        unfit = _unfit({name: [value] for name, value in valid.items()} | {"args": [as_json(valid["args"])]})
    except ValidationError as e:
        return _errors(e)
    except (ValueError, TypeError, RecursionError) as e:
        return [_fault("args", f"should be what JSON can say: {e}")]
    return [_fault(name, "should hold no U+0000, no lone surrogate and nothing nested over 64 deep") for name in unfit]


def _fault(name: str, text: str) -> ErrorDetails:
    return {"type": "not_json", "loc": (name,), "msg": text, "input": None}


def _errors(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_input=False, include_context=False)


def _worded(error: ErrorDetails, places: slice = slice(1, 2)) -> str:
    path = ".".join(map(str, error["loc"][places]))
    return f"{path}: {error['msg']}" if path else error["msg"]


@cache
def _configured_schema() -> str:
    return config.load().pg_schema_queue
