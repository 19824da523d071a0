"""A pipeline's view of its run: the context, and the exceptions by which a pipeline and the farm talk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import UUID

import psycopg

from dataloader import log
from dataloader.queue.job import End, Outcome, wait_sec

if TYPE_CHECKING:
    from dataloader.pipelines.session import Session
    from dataloader.pipelines.state import State

SKIP_SEC = 1.0  # until a skipped key is due again


class Progress(dict[str, Any]):
    """A report of progress that a pipeline yields: `processed`, `total` and more; a plain dict is possible too.

    `checkpoint`, a dict of JSON of at most 64 KB, is where the next run of the job goes on (`context.checkpoint`), as
    by `context.save`. It is no part of the progress, which people see.
    """

    def __init__(
        self, done: float, total: float | None = None, *, checkpoint: dict[str, Any] | None = None, **more: Any
    ) -> None:
        super().__init__({"processed": done} | ({} if total is None else {"total": total}) | more)
        self.checkpoint = checkpoint


class PermanentError(Exception):
    """For a pipeline to raise when another attempt cannot succeed: the job ends `failed` at once."""


class Retry(Exception):
    """For a pipeline to raise when its job should run again after `in_sec` seconds; the attempt counts."""

    def __init__(self, in_sec: float | timedelta, why: str = "") -> None:
        """Raises ValueError unless `in_sec` is from 0 seconds to 366 days."""
        self.in_sec = wait_sec(in_sec, "in_sec")
        super().__init__(why or f"asked to be tried again in {self.in_sec:g} s")


class Stopped(BaseException):
    """The run has to end now: it is canceled, drained, fenced off or over its time. A pipeline lets it pass.

    It is no Exception, so that a pipeline's `except Exception` does not catch it; `finally` blocks run.
    """


class Suspended(BaseException):
    """The run ends here, for its job waits for others (`Context.gather`). A pipeline lets it pass, as Stopped."""


class GatherFailed(PermanentError):
    """Jobs that a run has gathered did not succeed; `job_id` is the first of them."""

    def __init__(self, job_id: UUID, status: str | None, number: int, of: int) -> None:
        super().__init__(f"{number} of {of} gathered jobs did not succeed; job {job_id} is {status or 'deleted'}")
        self.job_id = job_id


class Parent(NamedTuple):
    """A job that another one has waited for; `task` and `status` are None where it was deleted."""

    job_id: UUID
    task: str | None
    status: str | None
    result: Any


class Execution(Protocol):
    """The run behind a context, as the farm or the testing kit knows it. Each member is as that of Context."""

    @property
    def is_saved(self) -> bool: ...
    @property
    def stop_reason(self) -> End | None: ...
    def must_stop(self) -> bool: ...
    def report(self, document: dict[str, Any]) -> None: ...
    def transaction(self, dsn: str | None) -> AbstractContextManager[psycopg.Connection[Any]]: ...
    def secret(self, name: str) -> str | None: ...
    @property
    def http(self) -> Session: ...
    def queue_session(self) -> AbstractContextManager[psycopg.Connection[Any]]: ...
    def decide(self, key: str, outcome: Outcome) -> None: ...
    def note(self, text: str) -> None: ...
    def drop_resource(self) -> None: ...
    def begin_at(self) -> dict[str, Any] | None: ...
    def save(self, checkpoint: dict[str, Any]) -> None: ...
    def trigger(self, task: str, args: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> UUID: ...
    def gather(self, job_ids: Sequence[UUID]) -> list[Any]: ...
    def parents(self) -> list[Parent]: ...


@dataclass(frozen=True, slots=True)
class Context:
    """A pipeline's view of its job, and its requests to the farm."""

    job_id: UUID
    attempt: int
    lock_key: str
    partition_key: str
    idempotency_key: str | None
    logger: Logger
    data_dir: Path
    claim: int  # the fence token: it grows with each start of the job, also with starts that are no attempt
    _run: Execution
    resource: Any = None  # what the pipeline's `prepare` has made
    affinity_key: str | None = None

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """Where the run before this one stopped: the newest checkpoint of the job as this run began, or None.

        Read it before the first transaction, also to save one. Raises PermanentError within a transaction, and in a
        call with several jobs.
        """
        return self._run.begin_at()

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Keep where the next run of the job goes on, after an error, a crash, a drain or a release of this one.

        Within `transaction()` it is committed with the data; else it is written about once a second, and before the
        end of the run is. Raises PermanentError for what is no dict of JSON of at most 64 KB, for a pipeline that has
        not read `checkpoint`, in a call with several jobs, and within two transactions at a time or one of another
        database than the target.
        """
        self._run.save(checkpoint)

    @property
    def is_saved(self) -> bool:
        """Whether the latest checkpoint that was saved outside of a transaction is in the queue.

        Then the next run gets it, however this one ends: an order to another system that must not be given twice may go
        out. It takes some ms, and up to a second where the run has saved before.
        """
        return self._run.is_saved

    @property
    def stop_reason(self) -> str | None:
        """Why the run has to end: "canceled", "timeout", "handed back" (a drain) or "gone"; None while it may go on.

        After "handed back" and "gone" another run goes on with the job, so what this one has begun in other systems is
        the other's. It is "gone" too once the lease is over: the next run may have begun.
        """
        return self._run.stop_reason

    def trigger(self, task: str, args: Mapping[str, Any] | None = None, **fields: Any) -> UUID:
        """Add a job and return its id; `fields` are those of `dataloader.enqueue`, its queue by default this job's.

        Its idempotency key is made of this job's id and a number, so a later attempt of this job that triggers in the
        same order adds nothing twice. Raises PermanentError for fields that are not valid.
        """
        return self._run.trigger(task, args, fields)

    def gather(self, job_ids: Sequence[UUID]) -> list[Any]:
        """The results of these jobs, in their order, once all have ended.

        Until then the run ends at this call and frees its worker. Its job waits for the others, and then runs from its
        begin again; the attempt is given back. Raises GatherFailed where one has not succeeded.
        """
        return self._run.gather(job_ids)

    @property
    def parents(self) -> list[Parent]:
        """The jobs that this one has waited for, with their results: first those of `depends_on`, in its order."""
        return self._run.parents()

    def fail(self, key: str, error: str | BaseException) -> None:
        """Decide that the run has failed for this key of a batch: its jobs are tried again while they have attempts.

        A PermanentError ends them at once. Of several decisions the last one counts. Raises KeyError for a key that is
        not in the batch, as `retry` and `skip` do.
        """
        end = End.PERMANENT if isinstance(error, PermanentError) else End.ERROR
        raised = error if isinstance(error, BaseException) else None
        self._run.decide(key, Outcome(end, str(error) or type(error).__name__, raised=raised))

    def retry(self, key: str, in_sec: float | timedelta) -> None:
        """Decide that this key of a batch is tried again after so many seconds; the attempt counts, as for `Retry`."""
        error = Retry(in_sec)
        self._run.decide(key, Outcome(End.ERROR, str(error), delay_sec=error.in_sec))

    def skip(self, key: str) -> None:
        """Decide that the run has left this key of a batch alone: its jobs go back uncounted, due after SKIP_SEC."""
        self._run.decide(key, Outcome(End.HANDED_BACK, "skipped by its pipeline", delay_sec=SKIP_SEC))

    def note(self, text: str) -> None:
        """Keep a line in the job's journal, beside the end of this run: up to 20 of 500 characters, secrets masked."""
        self._run.note(text)

    def drop_resource(self) -> None:
        """Keep the resource of this run for no other one: the worker releases it behind the run."""
        self._run.drop_resource()

    @property
    def stopping(self) -> bool:
        """True once the run has to end: it is canceled or over its time, its worker drains, or its claim is lost."""
        return self._run.must_stop()

    def check(self) -> None:
        """A safe point for code that does not yield: raises Stopped when the run has to end."""
        if self._run.must_stop():
            raise Stopped

    def progress(self, document: dict[str, Any]) -> None:
        """Report progress and check, as a `yield` does. The worker writes progress at most once a second."""
        self._run.report(document)
        self.check()

    def queue_session(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A session of its own on the queue's database, for the built-in pipelines that read the farm's own tables."""
        return self._run.queue_session()

    def transaction(self, dsn: str | None = None) -> AbstractContextManager[psycopg.Connection[Any]]:
        """A transaction in the target database (DL_TARGET_DSN, or `dsn`), on a connection of its own.

        The end of the block commits it. An exception, a cancellation or a lost claim rolls it back. A newer run of
        the same job rolls it back too: each run notes its claim in the table `dl_fence` of the target database. The
        search_path is PG_SCHEMA.
        """
        return self._run.transaction(dsn)

    def load(
        self,
        table: str,
        rows: Any,
        *,
        key: Sequence[str] = (),
        columns: Sequence[str] | Mapping[str, str] | None = None,
        finish: Callable[[psycopg.Connection[Any]], None] | None = None,
        **how: Any,
    ) -> dict[str, Any]:
        """Load rows into a table of the target in one transaction, with safe points; return what was counted.

        `rows` are dicts, or tuples in the order of `columns`, from any iterable; or a frame or a reader of pandas,
        polars or pyarrow. `columns` may be a dict with the types of a new table. `how` are the arguments of every load
        (docs/loaders.md), such as mode="replace". `finish` is called in the transaction before its commit: what it
        saves by `save` or `State.set` is committed with the rows, and mode="append" needs it. Raises PermanentError for
        what does not fit, and changes nothing then.
        """
        from dataloader.pipelines import rows as source

        return source.load(self, table, rows, key, columns, finish, how)

    def create(self, ddl: str) -> None:
        """Execute DDL such as `CREATE TABLE IF NOT EXISTS` in the target, in a transaction of its own.

        It waits for any other run that creates at the same time, for PostgreSQL lets one of two such statements fail.
        Raises PermanentError for what PostgreSQL refuses.
        """
        from dataloader.pipelines import csv_table, state

        with csv_table.permanent("context.create", ""), self.transaction() as conn:
            state.create(conn, ddl)

    def state(self, name: str) -> State:
        """The state of this name in the target as it is now; `set` writes it with the data of a transaction."""
        from dataloader.pipelines import state

        state.checked(name)
        with self.transaction() as conn:
            if not (found := state.states(conn, name)):
                state.create(conn, state.TABLE)
        return state.State(name, self.job_id, found[0]["value"] if found else None)

    @property
    def http(self) -> Session:
        """The run's session for APIs, an httpx.Client; session.py says what its calls raise. It needs the extra `http`.

        A status that passes becomes the job's retry, at the time that Retry-After names. `pages` reads a list.
        """
        return self._run.http

    def secret(self, name: str) -> str:
        """The value of a secret, masked from now on in logs, errors and pages.

        It is in the environment or `.env` of the workers as DL_SECRET_<NAME>, or in the file DL_SECRETS_DIR/<name>.
        Raises PermanentError where it is missing.
        """
        try:
            value = self._run.secret(name)
        except ValueError as e:
            raise PermanentError(str(e)) from None
        if value:
            log.learn_secret(value)
            return value
        places = f"set DL_SECRET_{name.upper()} for the workers, or write the file {name} in the folder DL_SECRETS_DIR"
        raise PermanentError(f"the secret {name} is missing: {places}")
