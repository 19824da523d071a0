"""The health of the queue's server, for people."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import errors

from dataloader.queue import db
from dataloader.queue.db import Conn, Row

LISTED = 50  # groups of sessions
OLDEST = 5  # transactions
SECTIONS = ("server", "connections", "transactions", "tables", "wal", "wal_files", "standbys", "slots", "follows")
_SQL = db.statements("postgres.sql")
# A hosted server may lack what another one offers, and another version may call it by another name.
_UNSEEN = {
    errors.InsufficientPrivilege: "This role may not see it.",
    errors.QueryCanceled: "The server did not answer in time.",
}
_ABSENT = "This server does not offer it."


class Section(NamedTuple):
    """The rows of one statement, or a sentence with the reason why they cannot be shown."""

    rows: list[Row]
    unseen: str = ""

    @property
    def row(self) -> Row | None:
        """The only row of a section of one."""
        return next(iter(self.rows), None)


def claim_plan(conn: Conn, queue: str) -> list[str]:
    """The server's plan of a search for a queue's next job, with its times and pages, line by line; claims nothing."""
    with conn.transaction():
        db.by_index(conn, sorts=False)  # as workers plan
        return [line for row in _SQL.rows(conn, "claim_plan", queue=queue) for line in row.values()]


def health(conn: Conn) -> dict[str, Section]:
    """The sections by name (SECTIONS), with what this role may not see; raises only where the server is silent."""
    sections = {}
    for name in SECTIONS:
        most = OLDEST if name == "transactions" else LISTED
        try:
            with conn.transaction():
                sections[name] = Section(_SQL.rows(conn, name, most=most))
        except (errors.ProgrammingError, errors.NotSupportedError, errors.QueryCanceled) as e:
            sections[name] = Section([], _UNSEEN.get(type(e), _ABSENT))
    return sections
