"""The pipelines that this process knows: their registration with its limits, and their lookup by task."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from dataloader.log import masking
from dataloader.pipelines.forms import Form, form_of
from dataloader.queue import args_schema
from dataloader.queue.hooks import identity

BATCH_MOST = 1_000  # keys of one call
ATTEMPTS_MOST = 2_147_483_647  # PostgreSQL's int
LIMITS_MOST, LIMIT_NAME = 8, 100  # limits of a job, characters of a name: as queue/fields.py has them

PREPARE_SEC = 120.0
REPORT, RETRY = "report", "retry"  # of `on_stall`

F = TypeVar("F", bound=Callable[..., Any])


def _argument(name: str) -> str:
    """The name of an argument whose text may be shown; PostgreSQL keeps no U+0000 and no lone surrogate."""
    if not name or not name.isprintable() or masking.is_secret(name, "text"):
        raise ValueError("should be the name of an argument that is no secret")
    return name


def _limits(names: Sequence[str]) -> Sequence[str]:
    """Names of limits as a trigger may give them (queue/fields.py)."""
    are_names = all(name.isprintable() and 0 < len(name) <= LIMIT_NAME for name in names)
    if len(names) > LIMITS_MOST or not are_names or len(set(names)) < len(names):
        raise ValueError(f"should be up to {LIMITS_MOST} different names of 1 to {LIMIT_NAME} characters")
    return names


Above0 = Annotated[int | float, Field(gt=0, lt=math.inf)]
NotBelow0 = Annotated[int | float, Field(ge=0, lt=math.inf)]
Argument = Annotated[str, AfterValidator(_argument)]


class UnknownTask(Exception):
    """This process knows no pipeline for the task. A newer farm may know it, so the farm tries the job again."""


@dataclass(slots=True, eq=False)
class Pipeline:
    """A task with its options, which makes the decorated function the pipeline of the task's jobs.

    docs/pipelines.md has examples.

    `timeout_sec`, `max_memory_mb`: the limits of a run. A run over its time ends at its next yield; a plain function
        gets Stopped raised into it. `timeout_factor` multiplies the time: a function of the pipeline's first argument,
        or factors by patterns of the affinity key, such as {"*70b*": 1.5}.
    `batch_size`: one call takes the jobs of up to so many keys; its first argument is {lock_key: [args, ...]}, from old
        to new. An exception fails all keys; `context.fail`, `context.retry` and `context.skip` decide single ones.
    `max_attempts`: the runs that a job may have whose trigger does not say it (5). With `spares_attempts` a run that
        fails or crashes behind a new checkpoint has spent none.
    `retry_in`: the seconds from the end of the failed attempt of this number (from 1) to the next one, 0 to 366 days.
    `on_exhausted`: is called with the args of a job that is about to end `failed`; its own exception is logged.
    `stall_sec`: a run is stuck that has reported nothing for so long (DL_STALL_SEC; 0: none is). Its stacks are kept;
        with `on_stall` "retry" its worker is killed, and the run has ended as an error.
    `prepare(args)` or `prepare(args, context)`: makes `context.resource` within `prepare_sec`: a generator function
        with one yield, or a function that returns a context manager. The worker keeps it for the next jobs of the same
        `affinity_key`.
    `affinity`: the names of args; the first of them that is a text of 1 to 200 characters is the `affinity_key` of a
        job whose trigger gives none.
    `memory_mb`, `cpus`: the needs of a run; it begins only while its host has room (0: it needs nothing worth counting;
        None: the farm learns them).
    `schedule`: a cron text or a dict of a schedule's words (docs/schedules.md). Its name is the task's by default.
    `limits`: the limits of the fleet that a run counts for whose trigger names none, such as ["source:oracle"].
    `logs`: False: the queue keeps nothing of what the runs write.
    `args`: a pydantic model of which the function, `prepare` and `timeout_factor` get an instance. A job whose args it
        refuses ends `failed` before the function is called, and triggers refuse it by the model's JSON Schema.

    A job keeps `max_attempts`, `affinity_key` and `limits` as they were when it was added. Producers learn of them when
    a worker with the pipeline has started. Raises ValueError when another function has the name or an option is not as
    it should be, TypeError when the function cannot be called as f(args) or f(args, context).
    """

    task: str
    _: KW_ONLY
    timeout_sec: Above0 | None = None
    max_memory_mb: Above0 | None = None
    batch_size: Annotated[int, Field(ge=1, le=BATCH_MOST)] | None = None
    max_attempts: Annotated[int, Field(ge=1, le=ATTEMPTS_MOST)] | None = None
    retry_in: Callable[[int], float] | None = None
    on_exhausted: Callable[[Any], object] | None = None
    stall_sec: NotBelow0 | None = None
    on_stall: Literal["report", "retry"] = "report"
    prepare: Callable[..., Any] | None = None  # once given: of args and context, and returns a context manager
    prepare_sec: Above0 = PREPARE_SEC
    timeout_factor: Callable[[Any], float] | Mapping[str, Above0] | None = None
    affinity: Argument | Annotated[Sequence[Argument], Field(min_length=1)] | None = None  # once given, a tuple
    memory_mb: NotBelow0 | None = None
    cpus: NotBelow0 | None = None
    schedule: str | Mapping[str, Any] | None = None  # once given, as `new_schedule.checked` makes it
    limits: Annotated[Sequence[str], AfterValidator(_limits)] | None = None
    spares_attempts: bool = False
    logs: bool = True
    args: type[BaseModel] | None = None
    args_schema: str | None = field(init=False, default=None)  # of `args`, as the queue keeps it
    # Of the decorated function; computed once, because the inspection costs more than a short run.
    function: Callable[..., Any] = field(init=False)
    wants_context: bool = field(init=False)
    form: Form = field(init=False)

    def __post_init__(self) -> None:
        for name, option in _options().items():
            try:
                setattr(self, name, option.validate_python(value := getattr(self, name), strict=True))
            except ValidationError as e:
                faults = dict.fromkeys(fault["msg"].removeprefix("Value error, ") for fault in e.errors())
                raise ValueError(f"pipeline {self.task!r}: {name}: {'; '.join(faults)}, not {value!r}") from None
        if self.spares_attempts and self.batch_size is not None:
            why = "a call with several jobs has no checkpoints, so it spares no attempts"
            raise ValueError(f"pipeline {self.task!r}: {why}")
        if self.args is not None:
            try:
                self.args_schema = args_schema.written(self.args.model_json_schema())
            except (ValueError, PydanticUserError) as e:
                why = f"the model {self.args.__name__} has no JSON Schema: {e}"
                raise ValueError(f"pipeline {self.task!r}: args: {why}") from None
        if self.affinity is not None:
            self.affinity = (self.affinity,) if isinstance(self.affinity, str) else tuple(self.affinity)
        if self.schedule is not None:
            from dataloader.queue.plans import new_schedule  # only pipelines with a schedule pay for the rules

            words = {"cron": self.schedule} if isinstance(self.schedule, str) else dict(self.schedule)
            try:
                self.schedule = new_schedule.checked({"name": self.task, **words, "task": self.task}, "")
            except ValueError as e:
                raise ValueError(f"pipeline {self.task!r}: schedule: {e}") from None
        if self.limits is not None:
            self.limits = tuple(self.limits)
        if (given := self.prepare) is not None:
            opened = contextmanager(given) if inspect.isgeneratorfunction(given) else given
            wants_both = _wants_context(f"{self.task} (prepare)", given)
            self.prepare = opened if wants_both else lambda args, context: opened(args)

    def __call__(self, function: F) -> F:
        """Make this function the pipeline."""
        known = _registry.get(self.task)
        if known and identity(known.function) != identity(function):
            both = f"{identity(known.function)}, {identity(function)}"
            raise ValueError(f"task {self.task!r} is registered twice: {both}")
        self.wants_context, self.form = _wants_context(self.task, function), form_of(function)
        self.function = function
        _registry[self.task] = self
        return function

    def timeout_of(self, given: Any, affinity_key: str | None) -> float | None:
        """How many seconds a run with this first argument may take; raises ValueError for a factor that is none."""
        if self.timeout_sec is None or self.timeout_factor is None:
            return self.timeout_sec
        if callable(self.timeout_factor):
            factor = self.timeout_factor(given)
        else:
            by_pattern = self.timeout_factor.items()
            factor = next((each for pattern, each in by_pattern if fnmatchcase(affinity_key or "", pattern)), 1.0)
        if not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ValueError(f"timeout_factor of {self.task!r} should be a number above 0, not {factor!r}")
        return self.timeout_sec * factor

    @property
    def has_safe_points(self) -> bool:
        """False for a plain function, which runs without a pause."""
        return self.form is not Form.PLAIN


@cache
def _options() -> dict[str, TypeAdapter[Any]]:
    """How the options of a pipeline are checked, by their types."""
    hints = get_type_hints(Pipeline, include_extras=True)
    return {option.name: TypeAdapter(hints[option.name]) for option in fields(Pipeline) if option.init}


register = Pipeline
_registry: dict[str, Pipeline] = {}
_absent: dict[str, str] = {}  # tasks that this installation lacks, and what would bring them


def register_with(module: str, extra: str, task: str, **options: Any) -> Callable[[F], F]:
    """`register(task, ...)` where the extra has installed this module; else `resolve` names the extra to a job."""
    if find_spec(module):
        return Pipeline(task, **options)
    _absent[task] = f"it needs {module}: pip install 'dataloader-farm[{extra}]'"
    return lambda function: function


def registered() -> Mapping[str, Pipeline]:
    """The registered pipelines by their tasks."""
    return _registry


def declarations() -> dict[str, dict[str, Any]]:
    """The declared defaults of each registered task for its jobs; None: the usual default."""
    names = ("max_attempts", "affinity", "limits", "memory_mb", "cpus", "args_schema")
    return {task: {name: getattr(pipeline, name) for name in names} for task, pipeline in _registry.items()}


def resolve(task: str) -> Pipeline:
    """The pipeline of this name; raises UnknownTask, which names the known tasks and the one probably meant.

    For a task that this installation lacks, the error says what would bring it.
    """
    try:
        return _registry[task]
    except KeyError:
        if why := _absent.get(task):
            raise UnknownTask(f"the pipeline {task!r} is not installed here: {why}") from None
        close = difflib.get_close_matches(task, tasks(), 1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise UnknownTask(f"no pipeline {task!r} is registered here{meant}; known: {', '.join(tasks())}") from None


def tasks() -> list[str]:
    """The names of all registered pipelines, sorted."""
    return sorted(_registry)


def _wants_context(task: str, function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if not positional or len(required) > 2 or keyword:
        raise TypeError(f"pipeline {task!r} should be callable as f(args) or f(args, context)")
    return len(positional) >= 2
