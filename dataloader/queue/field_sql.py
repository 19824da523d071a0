"""PURE: a job's fields as lists in SQL. A text of sql/ names a list as {fields.NAME}."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dataloader.queue.fields import FIELDS, FILTERS, INT4_MAX, OF_NEW_JOB, OF_PRODUCER, REQUIRED, Field

# What SQL fills in where the producer gives nothing: the place, null unless the queue is ordered; the time of the
# transaction; what the task's pipeline says. All other fields are `plain`.
_INSTEAD = {
    "score": "(SELECT extract(epoch FROM clock_timestamp()) FROM dl_queues WHERE queue = %(queue)s AND ordered)",
    "available_at": "now()",
    "max_attempts": "said.max_attempts, 5",
    "affinity_key": "dl_affinity(said.affinity, %(args)s::jsonb)",
    "limits": "said.limits",
}
_FIRST = {name: nth for nth, name in enumerate(("queue", "task", "args", "idempotency_key", "lock_key"))}
# A job that runs again takes all fields of the first one but these.
_ONCE = ("idempotency_key", "available_at", "score", "affinity_key", "deadline")
# How a value is shown: Python does not know all times, and JSON not all numbers.
_SHOWN = {
    "timestamptz": "dl_readable({0}) AS {1}",
    "float8": "CASE WHEN abs({0}) < 'Infinity' THEN {0} END AS {1}",
    "jsonb": "{0}::text AS {1}",
    "dl_status": "{0}::text AS {1}",
}


def filled(text: str) -> str:
    """`text` with the lists of fields in their places."""
    return re.sub(r"\{fields\.(\w+)\}", lambda found: _LISTS[found[1]], text)


def _each(text: str, fields: Iterable[Field] = OF_PRODUCER) -> str:
    """The text with each of these fields; `array` has a list of them: of values, of JSON and of lists as text."""
    texts = {"jsonb": "text", "text[]": "text"}
    return ", ".join(text.format(each, array=f"{texts.get(each.type, each.type)}[]") for each in fields)


def _value(field: Field) -> str:
    """The field's parameter in `enqueue`, and what stands for one that is not given."""
    value = f"%({field.name})s::{field.type}"
    value = f"coalesce({value}, {_INSTEAD[field.name]})" if field.name in _INSTEAD else value
    return f"nullif({value}, '{{}}')" if field.type == "text[]" else value


def _given(field: Field) -> str:
    """The field's parameter in dl_enqueue, where null counts as left out, as one of dl_enqueue_one."""
    default = "NULL" if field.default in (REQUIRED, None) else f"'{field.default}'"
    return f"p_{field.name} => coalesce(dl_enqueue.{field.name}, {default})"


def _refusal(field: Field) -> str:
    """The bounds of a text, a number or a time in dl_enqueue."""
    value, least, most = f"dl_enqueue.{field.name}", field.least, field.most
    wrong, rule = f"{value} NOT BETWEEN {least} AND {most}", f"from {least} to {most}"
    if field.type == "timestamptz":
        wrong = f"{value} NOT BETWEEN '2000-01-01 00:00+00' AND now() + interval '3653 days'"
        rule = "from the year 2000 to ten years from now"
    elif field.type == "text":
        size = f"coalesce(length({value}), 0)" if field.default is REQUIRED else f"length({value})"
        wrong, rule = f"{size} NOT BETWEEN {least} AND {most}", f"a text of {least} to {most} characters"
        if least is None:
            wrong, rule = f"{size} > {most}", f"a text of at most {most} characters"
    elif most == INT4_MAX:
        wrong, rule = f"{value} < {least}", f"{least} or more"
    return f"WHEN {wrong} THEN '{field.name} should be {rule}'"


def _shown(row: str, fields: Iterable[Field]) -> str:
    return ", ".join(_SHOWN.get(each.type, "{0}").format(f"{row}.{each.name}", each.name) for each in fields)


_PLAIN = [each for each in OF_PRODUCER if each.name not in _INSTEAD]
_REQUIRED = [each for each in OF_PRODUCER if each.default is REQUIRED]
_BOUND = [each for each in OF_PRODUCER if each.type in ("text", "int", "timestamptz") and each.name != "queue"]
_LISTS = {
    # The statements `enqueue`, `enqueue_one` and `enqueue_many`.
    "columns": _each("{0.name}", OF_NEW_JOB),
    "values": ", ".join(map(_value, OF_NEW_JOB)),
    "one": _each("p_{0.name} => %({0.name})s"),
    "many": _each("p_{0.name} => %({0.name})b::{array}"),
    # The functions dl_enqueue_one, dl_enqueue_many and dl_enqueue, which calls the first of them.
    "plain": _each("{0.name}", _PLAIN),
    "p_plain": _each("p_{0.name}", _PLAIN),
    "parameters": _each("p_{0.name} {0.type}"),
    # CREATE OR REPLACE renames no parameter, so the first ones keep the order of earlier versions.
    "p_arrays": _each("p_{0.name} {array}", sorted(OF_PRODUCER, key=lambda each: _FIRST.get(each.name, len(_FIRST)))),
    "unnested": _each(
        "unnest(%1$I.dl_spread(p_{0.name}, size)) AS {0.name}", [each for each in OF_PRODUCER if each.name != "args"]
    ),
    "required": _each("{0.name} {0.type}", _REQUIRED),
    "optional": _each("{0.name} {0.type} DEFAULT NULL", [each for each in OF_PRODUCER if each not in _REQUIRED]),
    "refusals": "\n    ".join(map(_refusal, _BOUND)),
    "given": ", ".join(map(_given, OF_PRODUCER)),
    # The fields that answers show, and those by which lists are filtered.
    "status": _shown("j", [each for each in FIELDS if "status" in each.seen]),
    "page": _shown("j", [each for each in FIELDS if "page" in each.seen]),
    "list": _shown("(j)", [each for each in FIELDS if "list" in each.seen and each.name not in ("job_id", "error")]),
    "again": _shown("j", [each for each in OF_PRODUCER if each.name not in _ONCE]),
    "filters": " AND ".join(f"(%({name})s::text IS NULL OR (j).{name} = %({name})s)" for name in FILTERS),
}
