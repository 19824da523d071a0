"""The words that schedules and backfills share: names, and the fields of their jobs. It needs pydantic."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypedDict, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError

from dataloader.queue import new_job
from dataloader.queue.fields import OF_PRODUCER
from dataloader.queue.plans.plan import OF_JOB, Wrong
from dataloader.queue.reports.words import plain

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.:+@-]*$"
DEFAULT_QUEUE = "etl.default"
# In args and in these fields of a job `{{ due }}`, `{{ partition }}` and the like are filled in.
TEMPLATES = ("lock_key", "partition_key", "affinity_key")
# A place in the texts of a template, which a fact fills in.
_PLACE = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_FIELDS = {field.name: field for field in OF_PRODUCER}


def job_field(name: str) -> Any:
    """The bounds and the text of a field of a job."""
    return new_job.bounded(_FIELDS[name])


def checks(code: Any, check: Callable[[str], object]) -> Any:
    """A pydantic validator from a check that raises ValueError with the valid form."""

    def checked(text: str | None) -> str | None:
        try:
            if text is not None:
                check(text)
        except ValueError as e:
            raise PydanticCustomError(code, "{what}", {"what": str(e)}) from None
        return text

    return AfterValidator(checked)


def name_of(noun: str, most: int) -> Any:
    """The type of the names of schedules, or of backfills, with at most so many characters."""

    def check(text: str) -> None:
        if not re.fullmatch(NAME, text):
            raise ValueError("should be letters of A to Z, digits and . : + @ - _, and begin with a letter or a digit")

    shown: Any = {"pattern": NAME}
    rule = Field(min_length=1, max_length=most, description=f"of the {noun}", json_schema_extra=shown)
    return Annotated[str, rule, checks(f"{noun}_name", check)]


Task = Annotated[str, job_field("task"), AfterValidator(new_job.no_internal_task)]
Names = Annotated[list[new_job.LimitName], job_field("limits"), AfterValidator(new_job.distinct)]


JobWords = TypedDict(  # type: ignore[misc]
    "JobWords",
    {"queue": new_job.rule(_FIELDS["queue"])[0] | None}
    | {name: new_job.rule(replace(_FIELDS[name], default=None))[0] for name in OF_JOB},
    total=False,
)
JobWords.__doc__ = "The fields of the jobs; null is the default of a job."


def model_of(title: str, words: type, **required: Any) -> type[BaseModel]:
    """A model of these words, of which none has to be given, and of `required` ones."""
    config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)
    fields: Any = {name: (hint, None) for name, hint in get_type_hints(words, include_extras=True).items()}
    fields |= {name: (hint, ...) for name, hint in required.items()}
    made: type[BaseModel] = create_model(title, __config__=config, **fields)
    return made


def given(model: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The words that these fields give, but for null; raises plan.Wrong, which names every wrong one."""
    try:
        return {name: value for name, value in model.model_validate(dict(fields)) if value is not None}
    except ValidationError as e:
        raise Wrong(new_job.in_words(e)) from None


def filled_in(job: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job with the facts in its templates; raises ValueError for a template that names no fact."""
    texts = {field: filled_text(job[field], facts) for field in TEMPLATES if field in job}
    return {**job, **texts, "args": filled(job.get("args", {}), facts)}


def filled(value: Any, facts: Mapping[str, Any]) -> Any:
    """`value` with the fact of its name for each `{{ name }}` in a text, at any depth; raises ValueError for an unknown
    name.

    A text that is one place becomes the fact itself; within a longer text it stands as text or JSON.
    """
    if isinstance(value, str):
        whole = _PLACE.fullmatch(value)
        return _fact(whole[1], facts) if whole and "}}" not in whole[1] else filled_text(value, facts)
    if isinstance(value, Mapping):
        return {key: filled(item, facts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [filled(item, facts) for item in value]
    return value


def filled_text(text: str, facts: Mapping[str, Any]) -> str:
    """`filled` for a text that stays a text."""
    return _PLACE.sub(lambda place: plain(_fact(place[1], facts)), text)


def _fact(name: str, facts: Mapping[str, Any]) -> Any:
    if name not in facts:
        known = ", ".join(f"{{{{ {known} }}}}" for known in facts)
        raise ValueError(f"{{{{ {name} }}}} is not known; known are {known}")
    return facts[name]
