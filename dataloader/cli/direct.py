"""`Direct`: a `Farm` on the queue's database, with the client's results and errors."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg
from tenacity import Retrying

from dataloader import log, obs, ops
from dataloader.cli.screen import as_json
from dataloader.client import Forbidden, Refused, Unavailable, Unexpected
from dataloader.client.errors import from_answer
from dataloader.client.farm import Farm, Look
from dataloader.client.methods import R
from dataloader.client.wire import jsonable, repetition, understood
from dataloader.config import ConfigError, Settings
from dataloader.farm.process import hostname
from dataloader.model.reading import written
from dataloader.ops.adding import BATCH_DEPTH
from dataloader.ops.checks import document
from dataloader.ops.errors import MENDABLE, refusal
from dataloader.ops.op import Call
from dataloader.queue import db, hooks, migrations
from dataloader.queue.reports import postgres

STATEMENT_SEC = 30.0  # a person may wait longer than a program
POLL_SEC = 0.3


def person() -> str:
    """The user of this process and host, for the journal."""
    user = f"user {os.getuid()}"
    with suppress(KeyError):
        user = pwd.getpwuid(os.getuid()).pw_name
    return f"{user}@{hostname()} (command line)"


class Direct(Farm):
    """A farm on its database. The session opens at the first call, and again after it was lost."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        self._dsn, self._settings, self.url = dsn, settings, db.shown(dsn)
        self._conn: db.Connection | None = None
        self._by = person()

    def close(self) -> None:
        if self._conn:
            self._conn.close()

    async def _call(
        self, route: str, answer: type[R], given: dict[str, Any], *, once: bool = False, trace: str | None = None
    ) -> R:
        op = next(op for op in ops.load().values() if op.route == route)
        if "traceparent" in op.headers:  # it adds jobs
            try:
                hooks.load(self._settings.dl_hooks)
            except ConfigError as e:
                raise Refused("The job was not added", str(e)) from None

        def run(conn: db.Connection) -> Any:
            fields = document(json.dumps(jsonable(given)).encode(), BATCH_DEPTH)
            call = Call(lambda: conn, self._by, self._settings, trace=trace or obs.current())
            return op.run(call, op.checked(fields))

        result: R = self._ask(run)
        if op.name in ops.UNMASKED:
            return result
        return understood(answer, json.loads(as_json(log.masked(written(result)), None)))  # as over HTTP

    def claim_plan(self, queue: str) -> list[str]:
        """See postgres.claim_plan."""
        plan: list[str] = self._ask(lambda conn: postgres.claim_plan(conn, queue))
        return plan

    async def _look(self, job_id: UUID | str, etag: str | None, seconds: int, patience: float) -> Look:
        return Look(Retrying(**repetition(patience))(self.status, job_id), pause=POLL_SEC)

    def _ask(self, question: Callable[[db.Connection], Any]) -> Any:
        """Call `question` on the session; each failure becomes one of the client's errors."""
        try:
            with db.in_force(conn := self._session()):
                return question(conn)
        except MENDABLE as e:
            problem = refusal(e)
            assert problem  # noqa: S101  it is one of these errors
            raise from_answer(problem.status, "", problem.document(), None) from None
        except migrations.SchemaError as e:
            raise Refused(str(e)) from None
        except ValueError as e:
            raise Refused("The request is not valid", str(e)) from None
        except hooks.WrongAnswer as e:
            raise Unexpected("The job was not added", str(e)) from None
        except psycopg.errors.InsufficientPrivilege as e:
            raise Forbidden("database", db.words(e)) from None
        except psycopg.Error as e:
            with suppress(psycopg.Error):
                self.close()
            self._conn = None
            kind = Unavailable if db.is_passing(e) else Unexpected
            raise kind("database", db.words(e)) from None

    def _session(self) -> db.Connection:
        if self._conn is None:
            schema = self._settings.pg_schema_queue
            self._conn = db.connect(
                self._dsn,
                name="dl-cli",
                schema=schema,
                connect_timeout=self._settings.pg_connect_timeout,
                statement_timeout=STATEMENT_SEC,
                answer_within=2 * STATEMENT_SEC,
            )
            with db.in_force(self._conn):
                migrations.check(self._conn)
        return self._conn
