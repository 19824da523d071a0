"""PURE: a job's fields as lists in SQL. A text of sql/ names a list as {fields.NAME}."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from dataloader.queue.fields import FIELDS, FILTERS, INT4_MAX, OF_NEW_JOB, OF_PRODUCER, REQUIRED, Field

# What SQL fills in where the producer gives nothing: the place, null unless the queue is ordered; the time of the
# transaction; what the task's pipeline says. All other fields are `plain`.
INSTEAD = {
    "score": "(SELECT extract(epoch FROM clock_timestamp()) FROM dl_queues WHERE queue = %(queue)s AND ordered)",
    "available_at": "now()",
    "max_attempts": "said.max_attempts, 5",
    "affinity_key": "dl_affinity(said.affinity, %(args)s::jsonb)",
    "limits": "said.limits",
}
# What a job that runs again does not have from the first one.
ONCE = ("idempotency_key", "available_at", "score", "affinity_key", "deadline")


def filled(text: str) -> str:
    """`text` with the lists of fields in their places."""
    return re.sub(r"\{fields\.(\w+)\}", lambda found: _LISTS[found[1]], text)


def _value(field: Field) -> str:
    """The field's parameter in `enqueue`, and what stands for one that is not given."""
    value = f"%({field.name})s::{field.type}"
    value = f"coalesce({value}, {INSTEAD[field.name]})" if field.name in INSTEAD else value
    return f"nullif({value}, '{{}}')" if field.type == "text[]" else value


def _array(field: Field) -> str:
    """The type of the field's list in dl_enqueue_many: of values, of JSON and of lists as text."""
    return "text[]" if field.type in ("jsonb", "text[]") else f"{field.type}[]"


def _or_default(field: Field) -> str:
    """The field's parameter in dl_enqueue, where null counts as left out."""
    default = "NULL" if field.default in (REQUIRED, None) else f"'{field.default}'"
    return f"p_{field.name} => coalesce(dl_enqueue.{field.name}, {default})"


def _refusal(field: Field) -> str:
    """The bounds of a text, a number or a time in dl_enqueue."""
    value, least, most = f"dl_enqueue.{field.name}", field.least, field.most
    if field.type == "timestamptz":
        wrong = f"{value} NOT BETWEEN '2000-01-01 00:00+00' AND now() + interval '3653 days'"
        rule = "from the year 2000 to ten years from now"
    elif field.type == "int":
        wrong, rule = f"{value} NOT BETWEEN {least} AND {most}", f"from {least} to {most}"
        if most == INT4_MAX:
            wrong, rule = f"{value} < {least}", f"{least} or more"
    else:
        size = f"coalesce(length({value}), 0)" if field.default is REQUIRED else f"length({value})"
        wrong, rule = f"{size} NOT BETWEEN {least} AND {most}", f"a text of {least} to {most} characters"
        if least is None:
            wrong, rule = f"{size} > {most}", f"a text of at most {most} characters"
    return f"WHEN {wrong} THEN '{field.name} should be {rule}'"


def _shown(row: str) -> Callable[[Field], str]:
    """The field of a row as it is shown: Python does not know all times, and JSON not all numbers."""

    def shown(field: Field) -> str:
        value = f"{row}.{field.name}"
        changed = {
            "timestamptz": f"dl_readable({value})",
            "float8": f"CASE WHEN abs({value}) < 'Infinity' THEN {value} END",
            "jsonb": f"{value}::text",
            "dl_status": f"{value}::text",
        }.get(field.type)
        return f"{changed} AS {field.name}" if changed else value

    return shown


def _list(text: Callable[[Field], str], fields: Iterable[Field]) -> str:
    return ", ".join(map(text, fields))


_PLAIN = [each for each in OF_PRODUCER if each.name not in INSTEAD]
_LISTS = {
    # The statements `enqueue`, `enqueue_one` and `enqueue_many`.
    "columns": _list(lambda each: each.name, OF_NEW_JOB),
    "values": _list(_value, OF_NEW_JOB),
    "one": _list(lambda each: f"p_{each.name} => %({each.name})s", OF_PRODUCER),
    "many": _list(lambda each: f"p_{each.name} => %({each.name})b::{_array(each)}", OF_PRODUCER),
    # The functions dl_enqueue_one, dl_enqueue_many and dl_enqueue, which calls the first of them.
    "plain": _list(lambda each: each.name, _PLAIN),
    "p_plain": _list(lambda each: f"p_{each.name}", _PLAIN),
    "parameters": _list(lambda each: f"p_{each.name} {each.type}", OF_PRODUCER),
    "p_arrays": _list(lambda each: f"p_{each.name} {_array(each)}", OF_PRODUCER),
    "given": _list(_or_default, OF_PRODUCER),
    "p_given": _list(
        lambda each: f"{each.name} {each.type}" + ("" if each.default is REQUIRED else " DEFAULT NULL"), OF_PRODUCER
    ),
    "unnested": _list(
        lambda each: f"unnest(%1$I.dl_spread(p_{each.name}, size)) AS {each.name}",
        [each for each in OF_PRODUCER if each.name != "args"],
    ),
    "refusals": "\n    ".join(
        _refusal(each) for each in OF_PRODUCER if each.type in ("text", "int", "timestamptz") and each.name != "queue"
    ),
    # What is shown of a job, and by what lists are filtered.
    "status": _list(_shown("j"), [each for each in FIELDS if "status" in each.seen]),
    "page": _list(_shown("j"), [each for each in FIELDS if "page" in each.seen]),
    "list": _list(
        _shown("(j)"), [each for each in FIELDS if "list" in each.seen and each.name not in ("job_id", "error")]
    ),
    "again": _list(_shown("j"), [each for each in OF_PRODUCER if each.name not in ONCE]),
    "filters": " AND ".join(f"(%({name})s::text IS NULL OR (j).{name} = %({name})s)" for name in FILTERS),
}
