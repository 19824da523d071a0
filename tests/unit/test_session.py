"""A session that is lost is replaced by the next call, which puts things right before anything else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from dataloader.farm.session import PAUSE_MOST, Lost, Session


class Server:
    """It opens sessions with numbers, and refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.resumed: list[tuple[int, list[int]]] = []  # each session, and the lost ones before it
        self.refuses_to_open: Exception | None = None
        self.refuses_to_resume: Exception | None = None
        self.outage: Any = SimpleNamespace(failed=lambda *_: None, ended=lambda: None)
        self.session: Session[Any] = Session(self._open, self._resume, self.outage, "lost")

    def _open(self) -> Any:
        if self.refuses_to_open:
            raise self.refuses_to_open
        conn = SimpleNamespace(closed=False, answer_within=10.0)
        conn.close = lambda: setattr(conn, "closed", True)
        self.opened.append(SimpleNamespace(conn=conn, number=len(self.opened)))
        return self.opened[-1]

    def _resume(self, session: Any, lost: Sequence[Any]) -> None:
        self.resumed.append((session.number, [each.number for each in lost]))
        if self.refuses_to_resume:
            raise self.refuses_to_resume

    def call(self, error: BaseException | None = None) -> int:
        """The number of the session that the work gets, which fails with this error."""

        def work(session: Any) -> int:
            if error:
                raise error
            return int(session.number)

        return self.session.call(work)


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_lost_session_is_replaced_by_the_next_call(server: Server) -> None:
    assert (server.call(), server.call()) == (0, 0)
    with pytest.raises(Lost):
        server.call(psycopg.OperationalError("gone"))
    assert (server.session.is_open, server.opened[0].conn.closed) == (False, True)
    assert server.call() == 1
    assert server.resumed == [(0, []), (1, [0])]


def test_lost_sessions_are_told_until_one_was_put_right(server: Server) -> None:
    server.call()
    server.refuses_to_resume = psycopg.OperationalError("gone again")
    for error in (psycopg.OperationalError("gone"), None, None):
        with pytest.raises(Lost):
            server.call(error)
    server.refuses_to_resume = None
    server.call()
    server.call()
    assert server.resumed == [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2])]


def test_no_work_gets_a_session_that_was_not_put_right(server: Server) -> None:
    server.refuses_to_resume = ValueError("a fault of ours")
    with pytest.raises(ValueError, match="a fault"):
        server.call()
    server.refuses_to_resume = None
    assert server.call() == 1


def test_the_first_try_after_a_loss_is_at_once_and_later_ones_are_not(server: Server) -> None:
    server.call()
    pauses = []
    for error in [psycopg.OperationalError("gone")] * 12:
        with pytest.raises(Lost):
            server.call(error)
        pauses.append(server.session.pause_sec)
    assert pauses[0] == 0
    assert 0 < pauses[1] < pauses[-1] <= PAUSE_MOST
    server.call()
    assert server.session.failures == 0


def test_an_error_of_the_statement_keeps_the_session(server: Server) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable):
        server.call(psycopg.errors.UndefinedTable())
    assert server.call() == 0


def test_a_server_that_refuses_what_it_has_granted_before_is_tried_again(server: Server) -> None:
    """It is being restored, or comes back without its roles for a moment. At the first start the refusal is final."""
    refusal = psycopg.errors.InvalidCatalogName("no such database")
    server.refuses_to_open = refusal
    with pytest.raises(psycopg.errors.InvalidCatalogName):
        server.call()
    server.refuses_to_open = None
    server.call()
    server.opened[0].conn.close()
    server.refuses_to_open = refusal
    with pytest.raises(Lost):
        server.call(psycopg.OperationalError("gone"))
    with pytest.raises(Lost):
        server.call()
    server.refuses_to_open = None
    assert server.call() == 1


def test_the_patience_of_a_call_ends_with_it(server: Server) -> None:
    def patience(session: Any) -> float:
        return float(session.conn.answer_within)

    assert server.session.call(patience, answer_within=3) == 3
    assert server.session.call(patience) == 10
