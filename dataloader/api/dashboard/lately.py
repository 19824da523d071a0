"""Answers about runs, which all viewers of a page share for some seconds, and the range that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flask import request

from dataloader import periods
from dataloader.api.web.cache import SharedAnswer, kept
from dataloader.api.web.endpoint import session
from dataloader.api.web.problems import Problem
from dataloader.queue.reports import runs

ANSWERS = 50  # that are kept
FRESH_SEC = periods.seconds("LATELY_FRESH_SEC", 5.0)  # figures of spans of five minutes and longer need not be newer
T = TypeVar("T")


def asked_range() -> str:
    """The range of the address; raises a 400 Problem."""
    range_ = request.args.get("range", runs.USUAL)
    if range_ not in runs.RANGES:
        raise Problem(400, f"The range should be one of: {', '.join(runs.RANGES)}.")
    return range_


def read(question: Callable[..., T], *of: Any) -> T:
    """The answer of the database to `question`, not older than twice FRESH_SEC."""
    known: dict[Any, SharedAnswer[T]] = kept("runs", dict)
    if len(known) > ANSWERS:
        known.clear()
    return known.setdefault((question, of), SharedAnswer(FRESH_SEC, 2 * FRESH_SEC)).ask(lambda: _ask(question, of))


def _ask(question: Callable[..., T], of: tuple[Any, ...]) -> T:
    with session() as conn:
        return question(conn, *of)
