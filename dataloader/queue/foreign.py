"""Producers' connections of SQLAlchemy and Django: `enqueue` in their transactions, with all parameters as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg

from dataloader.queue.db import as_text

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, scoped_session

    ProducerConn: TypeAlias = psycopg.Connection[Any] | Connection | Session | scoped_session[Any] | BaseDatabaseWrapper

_PARAMETER = re.compile(r"%\((\w+)\)[sb](?=::)")  # one without a cast is left, and refused by the library
_ASYNC = "SQLAlchemy's asynchronous {name}: use `await conn.run_sync(enqueue, queue=...)`"
_FOREIGN = "conn should be a connection of psycopg 3, SQLAlchemy or Django, not {name}"


def opened(conn: Any) -> psycopg.Connection[Any] | Foreign:
    """A producer's connection as `enqueue` uses it; raises TypeError for what is none, and for an asynchronous one."""
    if isinstance(conn, psycopg.Connection):
        return conn
    for library, kind in (("sqlalchemy", _OfSqlAlchemy), ("django", _OfDjango)):
        if any(base.__module__.partition(".")[0] == library for base in type(conn).__mro__):
            return kind(conn)
    raise TypeError(_FOREIGN.format(name=type(conn).__name__))


class _OfSqlAlchemy:
    """A Connection, or the one of a Session or scoped_session. The statement begins its transaction, as any does."""

    def __init__(self, given: Any) -> None:
        from sqlalchemy import Connection
        from sqlalchemy.orm import Session, scoped_session

        name = type(given).__name__
        if "async" in name.lower():
            raise TypeError(_ASYNC.format(name=name))
        if not isinstance(given, Connection | Session | scoped_session):
            raise TypeError(_FOREIGN.format(name=f"SQLAlchemy's {name}"))
        self._conn = given if isinstance(given, Connection) else given.connection()
        _require_postgresql(self._conn.dialect.name)

    def execute(self, statement: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """The rows of a statement, in the transaction that the connection is in; the library's own errors come."""
        from sqlalchemy import text
        from sqlalchemy.exc import StatementError

        # A single colon of the statement's own, in the name of a schema, is no parameter.
        own, values = _as_texts(re.sub(r"(?<!:):(?!:)", r"\\:", statement), parameters, ":{}".format)
        try:
            result = self._conn.execute(text(own.replace("%%", "%")), values)
        except StatementError as e:
            e.hide_parameters = True  # the args of jobs may hold secrets
            raise
        return result.all() if result.returns_rows else []

    def in_one_transaction(self) -> AbstractContextManager[Any]:
        """A transaction around several statements where the producer has none; a producer ends its own."""
        if getattr(self._conn.connection.dbapi_connection, "autocommit", False):
            raise ValueError("jobs that take several statements need a transaction, and conn is in AUTOCOMMIT mode")
        return nullcontext()


class _OfDjango:
    """`django.db.connection`, or one of `connections`."""

    def __init__(self, conn: Any) -> None:
        if not hasattr(conn, "vendor"):
            raise TypeError(_FOREIGN.format(name=f"Django's {type(conn).__name__}"))
        _require_postgresql(conn.vendor)
        self._conn = conn

    def execute(self, statement: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """As that of SQLAlchemy."""
        own, values = _as_texts(statement, parameters, "%({})s".format)
        with self._conn.cursor() as cursor:
            cursor.execute(own, values)
            rows: Sequence[Sequence[Any]] = cursor.fetchall() if cursor.description else []
            return rows

    def in_one_transaction(self) -> AbstractContextManager[Any]:
        """As that of SQLAlchemy."""
        from django.db import transaction

        if self._conn.in_atomic_block or not self._conn.get_autocommit():
            return nullcontext()
        atomic: AbstractContextManager[Any] = transaction.atomic(using=self._conn.alias)
        return atomic


Foreign = _OfSqlAlchemy | _OfDjango  # a connection of another library


def _require_postgresql(name: str) -> None:
    if name != "postgresql":
        raise TypeError(f"conn should be a connection to the queue's PostgreSQL, not to {name}")


def _as_texts(
    statement: str, parameters: Mapping[str, Any], placeholder: Callable[[str], str]
) -> tuple[str, dict[str, str | None]]:
    """PURE: the statement with these placeholders, each a text before its cast, and the texts."""
    names = _PARAMETER.findall(statement)
    own = _PARAMETER.sub(lambda match: f"CAST({placeholder(match[1])} AS text)", statement)
    return own, {name: as_text(parameters[name]) for name in names}
