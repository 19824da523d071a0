"""Commands made from the operations: each operation with a `command` gets its arguments, options, help and output."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, Literal, get_args, get_origin

import click
from annotated_types import Ge, Le
from rich.console import Group

from dataloader import ops
from dataloader.cli import base, screen
from dataloader.cli.connection import Reached, may_be_new, reaching
from dataloader.model.queues import QueueState
from dataloader.ops.op import Op, Parameter, bounds, may_be_none, plain_type

NONE = "none"  # the word for null
ROWS = 50  # of a table, where the command does not say
_DIGITS = re.compile(r"-?[0-9]+(\.[0-9]+)?")
NEW_NAMES = ("schedules", "backfills", "webhooks")  # subjects whose words name queues and tasks to come


def add(root: click.Group, *subjects: str) -> None:
    """Add the commands of the operations of these subjects to `root`, and to the groups that it has."""
    for op in ops.load().values():
        if op.command and op.subject in subjects:
            *groups, name = [word for word in op.command.split() if not word.isupper()]
            parent: Any = root
            for group in groups:
                parent = parent.commands[group]
            parent.add_command(_command(op, name))


def _command(op: Op, name: str) -> click.Command:
    def run(reached: Reached, **options: Any) -> None:
        is_new = options.pop("is_new", None)
        given = {each: value for each, value in options.items() if value is not None and each in op.parameters}
        given = {each: read(op.parameters[each], value, reached) for each, value in given.items()}
        if op.is_page and op.rows:
            given["limit"] = None if options["has_no_limit"] else options["limit"]
        if op.is_change and not any(each in given for each in op.parameters if each not in op.in_path) and _changes(op):
            raise click.UsageError(f"name what to change: {', '.join(_flag(each) for each in _changes(op))}")
        if op.subject in NEW_NAMES:
            for queue in given.get("queues", [given.get("queue")]):
                reached.require(is_new, queue=queue, task=given.get("task"))
        elif "queue" in op.in_path:
            reached.require(is_new, queue=given["queue"])
        _show(op, reached, given, getattr(reached.farm, op.name)(**given))

    summary, _, more = (op.function.__doc__ or "").partition("\n")
    made = base.Command(
        name, callback=reaching(run), params=list(_params(op)), help=f"{summary}\n{more}", examples=op.examples
    )
    made.params += getattr(made.callback, "__click_params__", [])[::-1]
    if op.answer is QueueState or (op.subject in NEW_NAMES and {"task", "queues"} & op.parameters.keys()):
        may_be_new(made)
    return made


def read(each: Parameter, value: Any, reached: Reached) -> Any:
    """The value of an option: a word for null, the JSON of an object, a time, or what click has read."""
    kind = plain_type(each.annotation)
    if value == NONE and NONE not in get_args(kind):
        return None
    if kind is datetime:
        return base.instant(value, reached.zone, _flag(each.name))
    return base.arguments(value) if get_origin(kind) is dict else value


def _changes(op: Op) -> list[str]:
    """The options of an operation that needs at least one option."""
    rest = [each for each in op.parameters.values() if each.name not in op.in_path]
    return [each.name for each in rest] if rest and op.method == "PUT" and not rest[0].is_required else []


def _params(op: Op) -> Iterator[click.Parameter]:
    capitals = [word for word in op.command.split() if word.isupper()]
    for each in op.parameters.values():
        metavar = each.name.upper()
        if metavar in capitals:
            note = f"{metavar}|{NONE}" if may_be_none(each.annotation) else metavar
            yield click.Argument([each.name], type=_type(each), metavar=note)
        elif each.name == "limit" and op.is_page:
            yield click.Option(["--limit"], type=click.IntRange(1), default=ROWS, show_default=True)
            yield click.Option(["--all", "has_no_limit"], is_flag=True, help="show all rows, without a limit")
        elif each.name != "after":
            # Without a filter a question is for all; null is no other word for that.
            yield option(each._replace(default=None, stays=False) if each.stays and not op.is_change else each)


def option(each: Parameter) -> click.Option:
    """The option of a parameter; one for a list may be given again and again."""
    flag, kind = _flag(each.name), plain_type(each.annotation)
    if kind is bool:
        return click.Option([f"{flag}/--no-{each.name.replace('_', '-')}"], default=None, help=_text(each))
    declared = {"q": ["--search", "-s", "q"], "queue": [flag, "-q", "queue"]}.get(each.name, [flag, each.name])
    if get_origin(kind) is list:
        declared[0] = flag.removesuffix("s")
        of_one = _type(each._replace(annotation=get_args(kind)[0]))
        return click.Option(
            declared, type=of_one, multiple=True, callback=lambda *given: list(given[-1]) or None, help=_text(each)
        )
    if kind is datetime:
        return click.Option(declared, metavar="TIME", help=f"{_text(each)}: 2h (min, h, d) ago, or a time")
    return click.Option(declared, type=_type(each), required=each.is_required, help=_text(each))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Span(click.IntRange):
    """Seconds, or a span such as 30s, 15min, 2h or 1d."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = base.span(str(value))
        if seconds is None or seconds % 1:
            self.fail(f"{value!r} should be seconds, or a span such as 30s, 15min, 2h or 1d", param, ctx)
        return super().convert(int(seconds), param, ctx)


class _OrNone(click.ParamType[Any]):
    """A value of another type, or the word for null."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner, self.name = inner, f"{inner.name}|{NONE}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == NONE:
            return value
        if not isinstance(self.inner, _Span) and not _DIGITS.fullmatch(str(value)):
            self.fail(f"{str(value)!r} should be a number or {NONE}", param, ctx)
        return self.inner.convert(value, param, ctx)


def _type(each: Parameter) -> click.ParamType[Any]:
    kind = plain_type(each.annotation)
    limits = {type(bound): bound for bound in bounds(each.annotation)}
    least, most = getattr(limits.get(Ge), "ge", None), getattr(limits.get(Le), "le", None)
    type_: click.ParamType[Any] = click.STRING
    if get_origin(kind) is Literal:
        is_for_null = may_be_none(each.annotation) and each.default is not None  # left out, it is null anyhow
        return base.Choice(dict.fromkeys([*get_args(kind), *([NONE] if is_for_null else [])]))
    if kind is int:
        type_ = (_Span if each.name.endswith("_sec") else click.IntRange)(least, most)
    elif kind is float:
        type_ = base.Number(least, most)
    return _OrNone(type_) if may_be_none(each.annotation) and kind in (int, float) else type_


def _text(each: Parameter) -> str:
    texts = [text for bound in bounds(each.annotation) if (text := getattr(bound, "description", None))]
    return str(texts[-1]).replace("null", NONE) if texts else ""


def _show(op: Op, reached: Reached, given: Mapping[str, Any], answer: Any) -> None:
    if op.rows:
        rows = list(answer)
        reached.answer({op.rows: rows}, lambda: screen.listing(op.columns, rows))
        if op.is_page and len(rows) == given["limit"] and not reached.as_json:
            click.echo(f"dataloader: these are {len(rows)}, there may be more: --limit N or --all", err=True)
    elif op.columns:  # a list, and more
        lists = [name for name, value in vars(answer).items() if isinstance(value, list)]
        rows = getattr(answer, lists[0])
        more = screen.sheet(answer, reached.zone, lists)
        reached.answer(answer, lambda: Group(screen.listing(op.columns, rows), "", more))
    else:
        is_count = isinstance(answer, int)
        facts = {**given, **({"changed": answer, "moved": answer} if is_count else vars(answer))}
        total = {each.name: facts[each.name] for each in fields(op.answer) if each.name in facts}
        reached.answer(
            total if is_count else answer,
            lambda: (
                op.sentence(answer, {**facts, "flags": reached.flags}, screen.plain)
                if op.done or is_count
                else screen.sheet(answer, reached.zone)
            ),
        )
    if "task" in op.in_path or ((op.rows or op.columns) and not rows):
        reached.hint(queue=given.get("queue"), task=given.get("task"))
