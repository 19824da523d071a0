"""The declaration of an operation, the checks of its parameters, and its call."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from string import Formatter
from types import UnionType
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from dataloader.config import Scope, Settings
from dataloader.ops.checks import validated
from dataloader.ops.types import whole_number
from dataloader.queue import operations
from dataloader.queue.db import Connection
from dataloader.queue.enqueue import Asker
from dataloader.queue.plans import backfills
from dataloader.queue.reports.predictions import Outlook, outlook

P = ParamSpec("P")
R = TypeVar("R")
Done = str | Callable[..., str]  # a text with names in braces, or a function of the answer


@dataclass(slots=True)
class Call:
    """A session of the queue's database, open from its first use, and the asker: `by` names it for the journal."""

    session: Callable[[], Connection]
    by: str
    settings: Settings
    may_read: bool = True  # whether an answer may hold names that the asker has not given
    asker: Asker | None = None  # the owner of the jobs that it adds
    trace: str | None = None  # a W3C traceparent
    outlook: Callable[[Connection, str], Outlook] = outlook  # the API keeps those of the last seconds
    counts: backfills.Counts = backfills.counts  # the same for partitions of large backfills
    schemas: Callable[[Connection, Collection[str]], Mapping[str, str | None]] = operations.args_schemas  # and of tasks

    _conn: Connection | None = None

    @property
    def conn(self) -> Connection:
        if self._conn is None:  # cached_property would hold one lock for all threads while it opens
            self._conn = self.session()
        return self._conn


class Parameter(NamedTuple):
    """A parameter of an operation; without a default it is required, or (`stays`) may be left out."""

    name: str
    annotation: Any
    default: Any
    stays: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty and not self.stays


class Input(BaseModel):
    """The parameters of a call: each is known, and has its type."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class Texts(BaseModel):
    """The parameters of a query, of a path or of a form; this one has none."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


@dataclass(eq=False)
class Op:
    """An operation, and the decorator that declares its function; the signature declares the rest.

    A call that is not `repeatable` is not sent twice. A function with a `body` takes its fields as they are, and checks
    them.
    """

    route: str  # a method and a path below /api/v1, with {parameters}
    _: KW_ONLY
    scope: tuple[Scope, ...] = ()  # by default to read for a GET, else to operate
    command: str = ""  # the words of the shell, with its arguments in capitals
    done: Done = ""  # tells people of success, with the fields of the answer and the parameters in braces
    question: str = ""  # asked before an operation that destroys something; `{jobs}` are the jobs that it is for
    columns: str = ""  # the fields of a row that a table shows
    examples: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()  # HTTP statuses that do not follow from the signature
    repeatable: bool = True
    links: str = ""  # the JSON pointer of a job's id in the answer
    headers: tuple[str, ...] = ()  # that a request may have
    body: type[BaseModel] | None = None
    function: Callable[..., Any] = field(init=False)
    name: str = field(init=False)  # in the clients, in OpenAPI and in the audit
    subject: str = field(init=False)  # the module, which is the tag in OpenAPI
    method: str = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.method, _, self.path = self.route.partition(" ")
        self.scope = self.scope or (("read",) if self.method == "GET" else ("operate",))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Declare the operation that `function` carries out."""
        self.function, self.name = function, function.__name__
        self.subject = function.__module__.rpartition(".")[2]
        OPS[self.name] = self
        return function

    @cached_property
    def in_path(self) -> tuple[str, ...]:
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))

    @property
    def is_change(self) -> bool:
        return self.method != "GET" and self.scope != ("read",)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """All parameters but the call; the keys of a `**words: Unpack[...]` are parameters that may be left out."""
        return {each.name: each for each in self._parameters()}

    def _parameters(self) -> Iterator[Parameter]:
        if self.body:
            for name, info in self.body.model_fields.items():
                default = inspect.Parameter.empty if info.is_required() else info.default
                yield Parameter(name, Annotated[info.annotation, info], default)
            return
        hints = get_type_hints(self.function, include_extras=True)
        for name, parameter in list(inspect.signature(self.function).parameters.items())[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                words = get_args(hints[name])[0]
                for word, annotation in get_type_hints(words, include_extras=True).items():
                    yield Parameter(word, annotation, parameter.empty, stays=True)
            else:
                yield Parameter(name, hints[name], parameter.default)

    @cached_property
    def answer(self) -> Any:
        return get_type_hints(self.function)["return"]

    @cached_property
    def rows(self) -> str | None:
        """The field of the answer that holds its rows, for an answer that is a list or a page of one."""
        hints = get_type_hints(self.answer)
        lists = [name for name, kind in hints.items() if get_origin(kind) is list]
        others = {each.name for each in fields(self.answer)} - {"next", "advice", *lists}
        return lists[0] if len(lists) == 1 and not others else None

    @cached_property
    def is_page(self) -> bool:
        """True for an answer with `next`, the `after` of the call that goes on."""
        is_list = self.rows is not None and not self.is_change
        return is_list and any(each.name == "next" for each in fields(self.answer))

    def checked(self, given: Mapping[str, Any], *, is_text: bool = False) -> dict[str, Any]:
        """All parameters of a call, or of a form (`is_text`); raises a Problem that names each fault."""
        if self.body:
            return dict(given)
        return fields_set(validated(_input_of(self, is_text), dict(given)))

    def model(
        self, names: Iterable[str], base: type[BaseModel], suffix: str, *, is_text: bool = False
    ) -> type[BaseModel]:
        """A model of these parameters. Those of a query are texts (`is_text`), so a number is given in digits."""
        wanted: dict[str, Any] = {}
        for name in names:
            each = self.parameters[name]
            default = Field(default_factory=lambda: None) if each.stays else each.default
            annotation = each.annotation
            if is_text and plain_type(annotation) is int:
                annotation = Annotated[annotation, BeforeValidator(whole_number)]
            wanted[name] = (annotation, ... if each.is_required else default)
        title = "".join(part.capitalize() for part in self.name.split("_")) + suffix
        made: type[BaseModel] = create_model(title, __base__=base, **wanted)
        return made

    def sentence(self, answer: Any, facts: Mapping[str, Any], shown: Callable[[Any], str] = str) -> str:
        """Tell people of success; `facts` are the parameters and the fields of the answer, each as `shown`."""
        return self.done(answer) if callable(self.done) else _Sentence(shown).vformat(self.done, (), facts).rstrip()

    def run(self, call: Call, given: Mapping[str, Any]) -> Any:
        """Call the operation with parameters that were checked; raises what the function raises."""
        return self.function(call, **given)


@cache
def _input_of(op: Op, is_text: bool) -> type[BaseModel]:
    return op.model(op.parameters, Texts if is_text else Input, "", is_text=is_text)


def fields_set(model: BaseModel) -> dict[str, Any]:
    """The parameters that were given; the function knows the defaults of the others."""
    return {name: getattr(model, name) for name in model.model_fields_set}


class _Sentence(Formatter):
    """Fills in a text: `{name:word}` has the word for null, `{name!q}` is quoted for a shell, `{name!j}` is `1 job`."""

    def __init__(self, shown: Callable[[Any], str]) -> None:
        self.shown = shown

    def format_field(self, value: Any, format_spec: str) -> str:
        return format_spec if value is None else self.shown(value)

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "j":
            return "1 job" if value == 1 else f"{value:,} jobs"
        return shlex.quote(str(value)) if conversion == "q" else value


OPS: dict[str, Op] = {}


def operations_on(noun: str, parameter: str, example: str) -> Callable[..., Op]:
    """A function that makes the `Op` of a verb for one `noun`, which paths name by `parameter`."""
    one = f"/{noun}s/{{{parameter}}}"
    routes = {"list": f"GET /{noun}s", "show": f"GET {one}", "set": f"PUT {one}", "remove": f"DELETE {one}"}

    def declare(verb: str, *, errors: tuple[int, ...] = (), **words: Any) -> Op:
        named, errors = ("", errors) if verb == "list" else (f" {parameter.upper()}", (404, *errors))
        words = {"examples": (f"dataloader {noun} {verb} {example if named else ''}".rstrip(),)} | words
        route = routes.get(verb, f"POST {one}/{verb}")
        return Op(route, command=f"{noun} {verb}{named}", errors=errors, **words)

    return declare


def made(kind: type[R], row: Mapping[str, Any]) -> R:
    """The answer of this type in a row, without columns that the type does not declare.

    Other services may write to the tables. A row of theirs that breaks the type is shown as it is.
    """
    try:
        answer: R = adapter(kind).validate_python(row)
    except ValidationError:
        answer = _as_it_is(kind, row)
    return answer


def _as_it_is(wanted: Any, value: Any) -> Any:
    kind = plain_type(wanted)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{name: _as_it_is(hint, value[name]) for name, hint in hints.items() if name in value})
    if get_origin(kind) is list and isinstance(value, list):
        return [_as_it_is(get_args(kind)[0], each) for each in value]
    return value


# Reads and writes answers of a type.
adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def may_be_none(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return may_be_none(get_args(annotation)[0])
    return get_origin(annotation) in (Union, UnionType) and type(None) in get_args(annotation)


def plain_type(annotation: Any) -> Any:
    """The type of a parameter or a field without its bounds and texts, and without None."""
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return plain_type(kinds[0]) if len(kinds) == 1 else annotation
    return annotation


def bounds(annotation: Any) -> Iterator[Any]:
    """The bounds and texts of an annotation, also of one that may be null."""
    if get_origin(annotation) is Annotated:
        for each in get_args(annotation)[1:]:
            yield from getattr(each, "metadata", None) or [each]
            yield each
    for part in get_args(annotation):
        if get_origin(part) is Annotated:
            yield from bounds(part)
