"""The hooks of a farm's workers: around a run, at its error, at the start of farm and worker, at a worker's death.

Each decorator raises TypeError unless the function can be called as it says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

from dataloader.queue.hooks import AROUND_ENQUEUE, Hook, identity

F = TypeVar("F", bound=Callable[..., Any])
Steps = Generator[Any, None, Any]

AROUND_RUN = Hook("around_run", "run", wraps=True)
ON_ERROR = Hook("on_error", "run", "exc")
ON_FARM_START = Hook("on_farm_start")
ON_WORKER_START = Hook("on_worker_start")
LAST_WORDS = Hook("last_words", "exc")
ALL = (AROUND_ENQUEUE, AROUND_RUN, ON_ERROR, ON_FARM_START, ON_WORKER_START, LAST_WORDS)


@dataclass(frozen=True, slots=True)
class Run:
    """One run as hooks see it: of a job, or of the jobs of one call.

    `args` is the pipeline's first argument: the job's args, or {lock_key: [args, ...]} with `batch_size`; None where
    the pipeline could not be given any. `job_id`, `lock_key` and `attempt` are those of the first job, `job_ids` are
    all. Secrets in `args` are as they were given, so the representation leaves `args` out.
    """

    queue: str
    task: str
    lock_key: str
    job_id: UUID
    attempt: int
    args: Any = field(repr=False)
    job_ids: tuple[UUID, ...]


def around_run(function: F) -> F:
    """Wrap each run of a pipeline: `function(run)` is a generator function with one yield, in which the run happens.

    The first registered is the outermost. The pipeline's exception is raised at the yield. When the function ends
    without it, the run counts as done; when it raises another, the run has failed with that one. A MemoryError, and
    what is no Exception (Stopped, at a cancellation, a drain or a timeout), passes: only `finally` and `with` do their
    work. Where a function swallows what one within it has raised before its yield, the run has failed, for the pipeline
    has not begun.
    """
    return AROUND_RUN.add(function)


def on_error(function: F) -> F:
    """Call `function(run, exc)` when a run has failed, before its end is written.

    `exc` is the exception with which the run has ended, behind every `around_run`; TimeoutError for a run over its
    time. For a batch it is called also for each exception that the pipeline has given to `context.fail`, with a `run`
    of that key alone. An exception of `function` is logged and changes nothing.
    """
    return ON_ERROR.add(function)


def on_farm_start(function: F) -> F:
    """Call `function()` once for each start and each reload of a machine's workers, in one of them.

    No worker of that start claims a job before it has returned; at a reload the older workers go on claiming. An
    exception keeps the farm from starting, as that of an import does.
    """
    return ON_FARM_START.add(function)


def on_worker_start(function: F) -> F:
    """Call `function()` in each worker process before its first claim; an exception keeps the worker from starting."""
    return ON_WORKER_START.add(function)


def last_words(function: F) -> F:
    """Call `function(exc)` when a worker process is about to end because of the exception `exc`.

    A process that is killed calls nothing. An exception of `function` is logged.
    """
    return LAST_WORDS.add(function)


def wrapped(run: Run, steps: Steps) -> Steps:
    """The steps of a run within every `around_run`; `steps` are the pipeline's, as a generator."""
    layers = steps
    for function in reversed([*AROUND_RUN]):
        layers = _within(function, run, layers, steps)
    return layers


def _within(function: Callable[..., Any], run: Run, steps: Steps, pipeline: Steps) -> Steps:
    """The steps within one `around_run`; they are the pipeline's, or lead to them."""
    raised: BaseException | None = None
    try:
        with contextmanager(function)(run):
            try:
                return (yield from steps)
            except BaseException as e:
                raised = e
                raise
    finally:
        # An order to stop and an error that ends the worker are raised again, even if the function caught them.
        if isinstance(raised, MemoryError) or not (raised is None or isinstance(raised, Exception)):
            raise raised
    if inspect.getgeneratorstate(pipeline) == inspect.GEN_CREATED:
        error = f"@around_run {identity(function)} has swallowed the {type(raised).__name__} of another"
        raise RuntimeError(f"the pipeline has not begun: {error}") from raised
    return None
