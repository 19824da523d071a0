"""The tests' farm on a database of its own, for tools that watch jobs through the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from farming import Farm

from dataloader import embedded
from tools.programs import database


@contextmanager
def farm() -> Iterator[tuple[Farm, embedded.Server]]:
    """A farm without programs, and its server; the end of the block ends all programs that were started on it."""
    with database() as (server, folder):
        made = Farm(server.dsn, folder)
        try:
            yield made, server
        finally:
            made.close()
