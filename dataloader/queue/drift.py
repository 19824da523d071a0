"""Whether triggers, indexes and functions of the queue are as they were shipped, and what puts them back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from dataloader.queue import db, fields
from dataloader.queue.db import Conn, Row

TABLES = f"{{dl_jobs, dl_job_events, {db.statements('rights.sql', 'tables')['tables']}}}"  # that a farm uses
_SQL = db.statements("drift.sql")
_TRIGGER = re.compile(
    r"^CREATE (?:CONSTRAINT )?TRIGGER (\w+) .*? ON (\w+)\b.*?EXECUTE FUNCTION (\w+)\(\);$", re.DOTALL | re.MULTILINE
)
_INDEX = re.compile(r"^CREATE (?:UNIQUE )?INDEX (\w+) .*?;$", re.DOTALL | re.MULTILINE)
_FUNCTION = re.compile(
    r"CREATE OR REPLACE FUNCTION (?P<name>\w+)\((?P<head>(?:(?!\$\$).)*?)AS \$\$(?P<body>.*?)\$\$", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Drift:
    """One object that is not as shipped, and what puts it back; nothing for a function: then all are applied."""

    what: str
    how: str
    mend: tuple[str, ...] = ()
    is_index: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.how}"


class Function(NamedTuple):
    """A function as functions/ has it; `text` is the statement that makes it."""

    name: str
    head: str
    body: str
    text: str

    def is_in(self, rows: Iterable[Row]) -> bool:
        """Whether one of these rows is this function, unchanged."""
        language = re.search(r"LANGUAGE (\w+)", self.head)
        settings = set(re.findall(r"\bSET ([\w.]+)", self.head))
        return any(
            self.body == row["body"]
            and (language is None or language[1] == row["language"])
            and ("SECURITY DEFINER" in self.head) == row["by_owner"]
            and settings == set(row["settings"])
            for row in rows
        )


def drifts(conn: db.Connection, functions: str) -> list[Drift]:
    """The objects of the schema that are missing, disabled or changed; `functions` is the shipped text for it."""
    installed, changed = _SQL.rows(conn, "functions"), []
    for function in shipped(functions):
        of_name = [row for row in installed if row["name"] == function.name]
        if not function.is_in(of_name):
            changed.append(Drift(f"function {function.name}", "is changed" if of_name else "is missing"))
    return [*changed, *of_tables(conn)]


def of_tables(conn: Conn) -> list[Drift]:
    """The triggers and indexes that are missing, disabled or changed."""
    return [*_trigger_drifts(conn), *index_drifts(conn, _schema())]


@cache
def _schema() -> str:
    return fields.filled((db.sql_folder() / "schema.sql").read_text("utf-8"))


def is_bound(conn: db.Connection) -> bool:
    """Whether functions that name their schema name the one that `conn` sees, and not one before a rename."""
    return bool(_SQL.do(conn, "bound"))


def hidden(conn: Conn) -> str | None:
    """A sentence on tables whose rows this role does not see: row security has no policy for the role."""
    if not (tables := [row["name"] for row in _SQL.rows(conn, "hidden", tables=TABLES)]):
        return None
    and_others = f" and {len(tables) - 1} other tables" if tables[1:] else ""
    remedy = f"ALTER TABLE {tables[0]} DISABLE ROW LEVEL SECURITY, or ALTER ROLE name BYPASSRLS"
    return f"row security hides the rows of {tables[0]}{and_others} from this role: {remedy}"


def shipped(text: str) -> list[Function]:
    """PURE: the functions that a text of functions/ makes."""
    return [Function(**match.groupdict(), text=match[0] + ";") for match in _FUNCTION.finditer(text)]


def _trigger_drifts(conn: Conn) -> Iterator[Drift]:
    installed = {row["name"]: row for row in _SQL.rows(conn, "triggers")}
    for match in _TRIGGER.finditer(_schema()):
        name, table, calls = match.groups()
        row = installed.get(name)
        if row is None:
            yield Drift(f"trigger {name}", "is missing", (match[0],))
        elif row["calls"] != calls:
            drop = f"DROP TRIGGER {name} ON {table}"
            yield Drift(f"trigger {name}", "is changed", (drop, match[0]))
        elif not row["works"]:
            yield Drift(f"trigger {name}", "is disabled", (f"ALTER TABLE {table} ENABLE TRIGGER {name}",))


def index_drifts(conn: Conn, schema: str) -> Iterator[Drift]:
    """The indexes of this text that are missing or invalid; the statements that mend one stand alone."""
    installed = {row["name"]: row["works"] for row in _SQL.rows(conn, "indexes")}
    for match in _INDEX.finditer(schema):
        if not installed.get(match[1]):
            drop = f"DROP INDEX CONCURRENTLY IF EXISTS {match[1]}"
            make = match[0].replace(" INDEX ", " INDEX CONCURRENTLY ", 1)
            fault = "is invalid" if match[1] in installed else "is missing"
            yield Drift(f"index {match[1]}", fault, (drop, make), is_index=True)
