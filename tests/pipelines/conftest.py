"""Fixtures of the pipelines' tests: a context on a real database, and a pipeline run to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from dataloader import pipelines, testing
from dataloader.farm import fence
from dataloader.farm.runner import Execution
from dataloader.pipelines import Context, resolve, steps
from dataloader.testing import Result

Run = Callable[..., list[Any]]


@pytest.fixture
def context(dsn: str, tmp_path: Path) -> Context:
    """A job's context with transactions in the test's database and a data folder of the test."""
    pipelines.load([])

    job_id = uuid4()
    return Context(
        job_id=job_id,
        attempt=1,
        lock_key="key",
        partition_key="",
        idempotency_key=None,
        logger=logging.getLogger("test"),
        data_dir=tmp_path,
        claim=1,
        _run=SimpleNamespace(  # type: ignore[arg-type]
            must_stop=lambda: False,
            report=lambda document: None,
            transaction=lambda other: fence.transaction(other or dsn, "public", {job_id: 1}, "test"),
            decide=lambda key, outcome: None,
            begin_at=lambda: None,
        ),
    )


@pytest.fixture
def run(context: Context) -> Run:
    """Run a pipeline to its end and return the progress it reported."""

    def run(task: str, **args: Any) -> list[Any]:
        return [document for document in steps(resolve(task), args, context) if document is not None]

    return run


@pytest.fixture
def job(dsn: str, tmp_path: Path) -> Callable[..., Result]:
    """Run a job as a worker does, until its status is final."""
    return partial(testing.run, dsn=dsn, data_dir=tmp_path)


@pytest.fixture
def rows(dsn: str) -> Callable[[str], list[Any]]:
    """Query the test's database."""

    def rows(query: str) -> list[Any]:
        with psycopg.connect(dsn, autocommit=True) as conn:
            cursor = conn.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    return rows


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The notes of the runs for their journals."""
    kept: list[str] = []
    monkeypatch.setattr(Execution, "note", lambda self, text: kept.append(text))
    return kept
