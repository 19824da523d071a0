"""Answers that take long: given although they are not fresh, and renewed meanwhile."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
from api_app import running
from patience import until

from dataloader.api.web.cache import RenewedAnswers
from dataloader.queue import db


class Source:
    """What is read: how often it was; `may` holds back a read by a thread, `fails` breaks it."""

    def __init__(self) -> None:
        self.reads, self.fails, self.may = 0, False, Event()

    def __call__(self, conn: db.Conn, name: str) -> str:
        if self.reads and not self.may.wait(20):
            raise TimeoutError
        conn.execute("SELECT 1")
        self.reads += 1
        if self.fails:
            raise ValueError("this cannot be read")
        return f"{name} {self.reads}"


def test_a_stale_answer_is_given_while_a_thread_renews_it(dsn: str, conn: db.Connection) -> None:
    source = Source()
    with running(dsn) as app:
        answers = RenewedAnswers(app.extensions["sessions"], source, 0.0, 60.0, 10)
        assert [answers.of(conn, "a") for _ in range(5)] == ["a 1"] * 5, "nobody waits for the second"
        source.may.set()
        until(lambda: source.reads > 1 and answers.of(conn, "a") != "a 1", "the second answer")


def test_a_renewal_that_fails_leaves_the_answer_and_is_tried_again(dsn: str, conn: db.Connection) -> None:
    source = Source()
    with running(dsn) as app:
        answers = RenewedAnswers(app.extensions["sessions"], source, 0.0, 60.0, 10)
        source.may.set()
        answers.of(conn, "a")
        source.fails = True
        until(lambda: answers.of(conn, "a") == "a 1" and source.reads > 3, "further tries")
        source.fails = False
        until(lambda: answers.of(conn, "a") != "a 1", "the next answer")


def test_one_that_nobody_has_asked_for_in_long_is_read_anew(dsn: str, conn: db.Connection) -> None:
    source = Source()
    source.may.set()
    with running(dsn) as app:
        answers = RenewedAnswers(app.extensions["sessions"], source, 0.0, 0.0, 1)
        assert [answers.of(conn, name) for name in "aab"] == ["a 1", "a 2", "b 3"]
        source.fails = True
        with pytest.raises(ValueError, match="cannot be read"):
            answers.of(conn, "a")


def test_the_counts_of_a_large_backfill_are_shared(client: Any, conn: db.Connection, monkeypatch: Any) -> None:
    from dataloader.queue.plans import backfills, new_backfill

    monkeypatch.setattr(backfills, "LARGE", 10)
    span = {"since": "2026-01-01", "until": "2026-01-31", "step": "day"}
    for name, of in (("large", span), ("small", {"partitions": ["x"]})):
        backfills.add(conn, new_backfill.checked({"name": name, "task": "t", "queue": "q", **of}), "me")
    first = {each["name"]: each["counts"]["missing"] for each in client.get("/api/v1/backfills").json["backfills"]}
    assert first == {"large": 31, "small": 1}
    conn.execute("DELETE FROM dl_partitions")
    then = {each["name"]: each["counts"]["missing"] for each in client.get("/api/v1/backfills").json["backfills"]}
    assert then == {"large": 31, "small": 0}, "up to some seconds old, and of the moment"
