"""log: one valid line per event, whatever is in it; no secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from dataloader import log

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What was logged, a document a line; the process's logging is as before afterwards."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    log.configure(local=False, debug=False, stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().split("\n") if line]
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_j5_an_event_is_one_line(lines) -> None:
    structlog.get_logger("x").info("a\nb", text="c\n\x1b[31m\u2028d", number=1)
    (line,) = lines()
    assert (line["event"], line["text"], line["number"], line["level"]) == ("a\nb", "c\n\x1b[31m\u2028d", 1, "info")


def test_library_logs_come_out_the_same_with_the_jobs_context(lines) -> None:
    with structlog.contextvars.bound_contextvars(job_id="1"):
        logging.getLogger("pipeline.x").warning("read %s rows", 5)
    (line,) = lines()
    assert (line["event"], line["logger"], line["job_id"]) == ("read 5 rows", "pipeline.x", "1")


def test_exceptions_are_part_of_the_line(lines) -> None:
    try:
        raise ValueError("password=s3cret")
    except ValueError:
        structlog.get_logger("x").exception("failed")
    (line,) = lines()
    assert "ValueError" in line["exception"]
    assert "s3cret" not in line["exception"]


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://user:s3cret@host/db",
        "host=h password=s3cret dbname=d",
        "host=h password='s3cret' dbname=d",
        "token: s3cret, more",
    ],
)
def test_v13_secrets_are_masked_in_texts(text: str) -> None:
    assert "s3cret" not in log.masked(text)
    assert log.MASK in log.masked(text)


def test_v13_secrets_are_masked_by_name(lines) -> None:
    structlog.get_logger("x").info("e", pg_password="s3cret", authorization="s3cret", lock_key="shown")
    (line,) = lines()
    assert (line["pg_password"], line["authorization"], line["lock_key"]) == (log.MASK, log.MASK, "shown")
