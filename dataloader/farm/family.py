"""The jobs that a run adds, waits for, or has waited for: trigger, gather and parents of its context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg

from dataloader.pipelines.context import GatherFailed, Parent, PermanentError, Suspended
from dataloader.queue import db, parents, typed_args
from dataloader.queue.job import Delivery, plain


class Family:
    """The actions of one run on other jobs, by a connection of its own: the heartbeat uses the worker's."""

    def __init__(self, delivery: Delivery, connect: Callable[[], db.Connection], schema: str) -> None:
        self._delivery = delivery
        self._job = delivery.first
        self._connect = connect
        self._schema = schema
        self._conn: db.Connection | None = None
        self._added = 0

    def close(self) -> None:
        """At the end of the run."""
        if self._conn is not None:
            with suppress(psycopg.Error):
                self._conn.close()

    def trigger(self, task: str, args: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> UUID:
        """Add a job; another attempt of this job that adds its jobs in the same order finds the same ones."""
        from dataloader.queue import new_job

        self._added += 1
        name = f"{self._job.job_id}:{self._added}"
        given = {"queue": self._job.queue, "lock_key": name, "idempotency_key": name, "producer": self._job.task}
        try:
            in_json = plain(typed_args.plain(args or {}), "args")
            added: dict[str, Any] = given | {**fields}
            return new_job.enqueue(self._open(), task=task, args=in_json, schema=self._schema, **added)[0]
        except (ValueError, TypeError) as e:
            raise PermanentError(f"context.trigger: {e}") from None

    def gather(self, job_ids: Sequence[UUID]) -> list[Any]:
        """The results of these jobs once all have ended; until then the run ends, and the job waits for them."""
        if len(self._delivery.jobs) > 1:
            raise PermanentError("context.gather is for a run of one job, and this one has several")
        jobs = parents.results(self._open(), job_ids)
        if not all(each.has_ended for each in jobs):
            try:
                parents.gather(self._open(), self._job, list(job_ids))  # a lost claim ends the run in any case
            except psycopg.errors.InvalidParameterValue as e:
                raise PermanentError(f"context.gather: {e.diag.message_primary}") from None
            raise Suspended(f"waits for {len(job_ids)} jobs")
        if bad := [each for each in jobs if each.status != "succeeded"]:
            raise GatherFailed(bad[0].job_id, bad[0].status, len(bad), len(jobs))
        return [each.result for each in jobs]

    def parents(self) -> list[Parent]:
        """The jobs that this one has waited for."""
        conn = self._open()
        jobs = parents.results(conn, parents.parents_of(conn, self._job.job_id))
        return [Parent(each.job_id, each.task, each.status, each.result) for each in jobs]

    def _open(self) -> db.Connection:
        if self._conn is None:
            self._conn = self._connect()
        return self._conn
