"""The `cursor` of `load.postgres` and `load.database`: a load of what is new, whose watermark commits with the rows.

The watermark is the largest value that the column has had, as a text in `dl_state`. A source compares with it by
parameters of the column's type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from typing import Annotated, Any, LiteralString, Protocol, cast

from psycopg import sql
from pydantic import AfterValidator, Field

from dataloader import config
from dataloader.pipelines import Arguments, Context, PermanentError, Progress, csv_table
from dataloader.pipelines.csv_table import Source, Target, identifier
from dataloader.pipelines.state import NAME_MOST, State

# The type of a lag, for the types of its column. A bound of whole numbers keeps the type, and with it an index.
_LAGS = {
    "interval": ("date", "timestamp", "timestamptz", "timestamp without time zone", "timestamp with time zone"),
    "numeric": ("smallint", "integer", "bigint", "numeric", "real", "double precision"),
}
# A lag below 0 would lose rows. JSON has the ISO form of a time, whatever the settings of a role are.
_LEAST: dict[str, LiteralString] = {
    "interval": "SELECT to_jsonb(least(m, m - %s::interval)::{0}) #>> '{{}}' FROM (SELECT %s::{0} AS m) AS s",
    "numeric": "SELECT to_jsonb(least(m, floor(m - %s::numeric))::{0}) #>> '{{}}' FROM (SELECT %s::{0} AS m) AS s",
}
_RIGHT = {"interval": 'an interval, such as "5 min"', "numeric": "a number"}
_LAST = re.compile(r"infinity|inf|nan|9999-12-31.*", re.IGNORECASE)


class Cursor(Arguments):
    """Which rows of a query are new: those whose `column` is not below the largest loaded value, less `lag`."""

    column: Annotated[str, AfterValidator(identifier)]
    lag: str | int | float | None = None  # an interval such as "5 min" for times, a number for numbers
    name: str | None = Field(default=None, min_length=1, max_length=NAME_MOST)  # of the state; SOURCE:TABLE


class Origin(Arguments):
    """Where the rows of a load from another database are."""

    source: str = Field(pattern=config.SOURCE_NAME)
    query: str = Field(min_length=1, max_length=100_000, pattern=r"^[^\x00]+$")


class Wanted(Target, Origin):
    """The arguments of every load from another database."""

    cursor: Cursor | None = None


class Rows(Protocol):
    """The rows of a query, in one state of their database."""

    def close(self) -> None: ...

    def rows(self) -> Source:
        """The rows within the limit."""

    def kind_of(self, column: str) -> str | None:
        """The type of the column in PostgreSQL, None where no row has a value; raises KeyError without the column."""

    def limit(self, column: str, mark: str | None, least: str | None, is_once: bool) -> tuple[str | None, bool]:
        """Leave out the rows from `least` down, as `statements` does; the facts about the new ones."""


def load(context: Context, wanted: Wanted, opened: Callable[[], Rows]) -> Generator[Progress | None, None, Progress]:
    """Load the rows. With a cursor these are the new ones, and the largest value is written with them."""
    state = _state(context, wanted)
    counts, most = csv_table.appended(context, wanted), state and state.value
    if counts is None:
        with closing(opened()) as session:
            most = _limited(context, wanted, session, most) if state else None
            finish = partial(state.set, most) if state else None
            counts = yield from csv_table.load(context, wanted, session.rows(), finish)
    return Progress(counts["processed"], **counts | ({"cursor": most} if state else {}))


def statements(query: str, column: str, mark: str | None, least: str | None, is_once: bool) -> tuple[str, str]:
    """PURE: the SQL for the largest new value and the number of nulls, and that for the rows.

    `column`, `mark` and `least` are expressions of SQL. The rows at the mark are read again, unless each may be read
    only once. A null has no place in the order, so its row is read each time.
    """
    rows = f"FROM ({query}\n) AS dl_rows"  # behind the line, for the query may end with a comment
    facts = f"SELECT max({column}), count(*) - count({column}) {rows}"
    if mark is None:
        return facts, f"SELECT * {rows}"
    new, again = (f"WHERE {column} {sign} OR {column} IS NULL" for sign in (f"> {mark}", f">= {least}"))
    return f"{facts} {new}", f"SELECT * {rows} {new if is_once else again}"


def _state(context: Context, wanted: Wanted) -> State | None:
    if (cursor := wanted.cursor) is None:
        return None
    if wanted.mode == "replace" or wanted.delete_missing:
        raise PermanentError("cursor: mode replace and delete_missing need all rows, also those that are not new")
    if wanted.mode == "append" and cursor.lag is not None:
        raise PermanentError("cursor: a lag reads rows again, so it needs mode merge with a key, not append")
    return context.state(cursor.name or f"{wanted.source}:{wanted.table}")


def _limited(context: Context, wanted: Wanted, session: Rows, mark: Any) -> Any:
    """Leave out the rows that are not new; the largest value so far, as text."""
    cursor, is_once = cast(Cursor, wanted.cursor), wanted.mode == "append"
    try:
        kind = session.kind_of(cursor.column)
    except KeyError:
        raise PermanentError(f"cursor: {cursor.column} should be in the query") from None
    last = None if mark is None or kind is None else str(mark)
    most, has_nulls = session.limit(cursor.column, last, _least(context, cursor, kind, last), is_once)
    if is_once and has_nulls:
        raise PermanentError(f"cursor: {cursor.column} has nulls, whose rows mode append would add each time")
    if _LAST.fullmatch(most or "") and any(kind in kinds for kinds in _LAGS.values()):
        raise PermanentError(f"cursor: {cursor.column} has the value {most}, behind which nothing is new: leave it out")
    return mark if most is None else most


def _least(context: Context, cursor: Cursor, kind: str | None, mark: str | None) -> str | None:
    """The value from which on rows are read."""
    if cursor.lag is None or kind is None:
        return mark
    lag_kind = next((lag for lag, kinds in _LAGS.items() if kind in kinds), "")
    if not lag_kind or isinstance(cursor.lag, str) != (lag_kind == "interval"):
        right = _RIGHT.get(lag_kind, "left out")
        raise PermanentError(f"cursor: the lag of {cursor.column}, which is of the type {kind}, should be {right}")
    statement = sql.SQL(_LEAST[lag_kind]).format(sql.SQL(kind))
    with csv_table.permanent("cursor", ""), context.transaction() as conn:
        row = conn.execute(statement, (str(cursor.lag), mark)).fetchone()
    return row[0] if row else None
