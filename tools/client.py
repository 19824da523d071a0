"""Write dataloader/client/operations.py, the methods of the clients, from the operations.

python -m tools.client          write the file
python -m tools.client --check  exit with 1 where the file is not what it should be
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path
from textwrap import indent
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from annotated_types import Le

from dataloader import ops
from dataloader.model.kinds import OrderName
from dataloader.ops.op import Op, Parameter, bounds, may_be_none, plain_type
from dataloader.ops.types import Cursor
from dataloader.queue.plans.words import JobWords

BY_HAND = (
    "trigger",
    "trigger_many",
)  # `client.farm` has defaults for their required fields, and sends many by the thousand
FILE = Path(__file__).parent.parent / "dataloader/client/operations.py"
HEAD = '''"""The methods of the clients, made from dataloader/ops by `python -m tools.client`: change them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack
from uuid import UUID

from dataloader.client.methods import call, pages, total
{imports}
from dataloader.model.kinds import OrderName
from dataloader.queue.typed_args import Model

'''
BASE = '''
class Operations:
    """The operations of a farm, a method each. Every method may raise ClientError."""
'''


def text() -> str:
    """The whole file."""
    found = list(ops.load().values())
    words: dict[str, Any] = {"JobWords": JobWords} | {kind.__name__: kind for each in found if (kind := _words(each))}
    imports = sorted({line for each in found for line in _imports(each)})
    kinds = sorted(words.values(), key=lambda kind: len(get_type_hints(kind)))
    dicts = [_typed_dict(kind.__name__, kind.__doc__, _fields(kind), kinds) for kind in kinds]
    dicts.append(_typed_dict("TriggerFields", "The fields of a new job (docs/api.md).", _trigger_fields(), kinds))
    made = [each for each in found if each.name not in BY_HAND]
    head = HEAD.format(imports="\n".join(imports))
    parts = [head, *dicts, BASE, *map(_method, made), ""]
    return _formatted("\n".join(parts))


def _words(op: Op) -> Any:
    """The TypedDict of the operation's `**words`; None: it has none."""
    for name, parameter in inspect.signature(op.function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and not op.body:
            return get_args(get_type_hints(op.function, include_extras=True)[name])[0]
    return None


def _typed_dict(name: str, doc: str | None, hints: dict[str, str], others: Collection[Any]) -> str:
    """A TypedDict of these fields; the largest of `others` whose fields are all among them is its base."""
    bases = [other for other in others if _fields(other).items() < hints.items()]  # the largest is the last
    inherited = _fields(bases[-1]) if bases else {}
    head = f"class {name}({bases[-1].__name__ if bases else 'TypedDict'}, total=False):"
    fields = [f"    {name}: {hint}" for name, hint in hints.items() if name not in inherited]
    return "\n".join([head, f'    """{doc}"""', "", *fields, "", ""])


def _fields(kind: Any) -> dict[str, str]:
    return {name: _plain(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _trigger_fields() -> dict[str, str]:
    """The fields of a new job but for its task, of which the client needs none."""
    each = [each for name, each in ops.load()["trigger"].parameters.items() if name != "task"]
    return {field.name: _plain(field.annotation | None) for field in each}


def _imports(op: Op) -> Iterator[str]:
    for kind in (op.answer, _row(op)):
        if kind is not None and kind.__module__.startswith("dataloader.model"):
            yield f"from {kind.__module__} import {kind.__name__}"


def _row(op: Op) -> Any:
    return plain_type(get_args(plain_type(get_type_hints(op.answer)[op.rows]))[0]) if op.rows else None


def _method(op: Op) -> str:
    answer, kind, field = op.answer.__name__, "call", op.rows or ""
    hints = get_type_hints(op.answer)
    parameters = [each for each in op.parameters.values() if not (each.stays or _is_of_pages(op, each))]
    returns = answer
    if plain_type(hints.get(op.name)) is Any:  # the rest of the answer is about it
        field, returns = op.name, "Any"
    if op.rows:
        returns = f"list[{_name(_row(op))}]"
    if op.rows and op.is_page:
        kind, returns = "pages", f"Iterator[{_name(_row(op))}]"
    elif total := next((name for name in ("changed", "moved") if name in hints), None):
        kind, field, returns = "total", total, "int"
    words = _words(op)
    signature = ["self", *(_parameter(each) for each in parameters if each.is_required)]
    named = [_parameter(each) for each in parameters if not each.is_required]
    if kind == "pages":
        named.append("limit: int | None = None")
        most = next(bound.le for bound in bounds(op.parameters["limit"].annotation) if isinstance(bound, Le))
    signature += ["*", *named] if named else []
    signature += [f"**words: Unpack[{words.__name__}]"] if words else []
    declared = [repr(op.route), answer]
    declared += [repr(field)] if field else []
    declared += [str(most)] if kind == "pages" else []
    declared += ["once=True"] if not op.repeatable and kind == "call" else []
    doc = inspect.getdoc(op.function) or ""
    text = indent(f'"""{doc}' + ("\n" if "\n" in doc else "") + '"""', " " * 8)
    head = f"    @{kind}({', '.join(declared)})\n    def {op.name}({', '.join(signature)}) -> {returns}:"
    return f"{head}\n{text}\n"


def _is_of_pages(op: Op, each: Parameter) -> bool:
    """True for a parameter that the client gives itself, where it goes from page to page."""
    is_cursor = each.name == "after" and (op.is_change or Cursor in get_args(each.annotation))
    return is_cursor or (each.name == "limit" and op.is_page)


def _parameter(each: Parameter) -> str:
    default = "" if each.is_required else " = None"
    kind = _plain(each.annotation)
    return f"{each.name}: {kind}{' | None' if default and 'None' not in kind else ''}{default}"


def _plain(annotation: Any) -> str:
    """The type for a reader: without bounds; what has a text form in JSON may be given as text."""
    kind, optional = plain_type(annotation), may_be_none(annotation)
    if kind is datetime:
        name = "datetime | str"
    elif kind is UUID:
        name = "UUID | str"
    elif kind == OrderName:
        name = "OrderName"
    elif get_origin(kind) is Literal:
        name = f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    elif get_origin(kind) is list:
        name = f"Sequence[{_plain(get_args(kind)[0])}]"
    elif get_origin(kind) is dict:  # the args of a job, of which a pipeline may have a model
        name = "Mapping[str, Any] | Model"
    elif get_origin(kind) in (Union, UnionType):
        name = " | ".join(_plain(each) for each in get_args(kind) if each is not type(None))
    else:
        name = _name(kind)
    return f"{name} | None" if optional else name


def _name(kind: Any) -> str:
    return "Any" if kind is Any else str(getattr(kind, "__name__", kind))


def _formatted(source: str) -> str:
    for words in (["check", "-q", "--fix-only", "--select", "I,F401"], ["format"]):
        command = [sys.executable, "-m", "ruff", *words, "--stdin-filename", str(FILE), "-"]
        source = subprocess.run(command, input=source, text=True, capture_output=True, check=True).stdout
    return source


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(FILE.read_text() != text())
    FILE.write_text(text())
