"""Fixtures of the pipelines' tests: a context on a real database, and a pipeline run to its end."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner
from judging import Command, Load, Rows, Run

from dataloader import pipelines, testing
from dataloader.cli.main import main
from dataloader.farm import fence
from dataloader.farm.runner import Execution
from dataloader.pipelines import Context, csv_table, registry, resolve, steps

SLICES = {"http._SLICE_SEC": 1, "database._SLICE_SEC": 1, "csv_table._SLICE_MS": 1000}
pipelines.load([])  # before a test has a registry of its own, which would be lost with what it imports


@pytest.fixture
def context(dsn: str, tmp_path: Path) -> Context:
    """A job's context with transactions in the test's database and a data folder of the test."""
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
            stop_reason=None,
            report=lambda document: None,
            transaction=lambda other: fence.transaction(other or dsn, "public", {job_id: 1}, "test"),
            decide=lambda key, outcome: None,
            begin_at=lambda: None,
            save=lambda checkpoint: None,
        ),
    )


@pytest.fixture
def run(context: Context) -> Run:
    def run(task: str, **args: Any) -> list[Any]:
        return [document for document in steps(resolve(task), args, context) if document is not None]

    return run


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings are those of the environment alone: there is no .env."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def points_of_silence(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set how often a run has a safe point while it waits for a peer: by default never.

    A test names a safe point by its number, and a stall of the machine would add such points.
    """

    def each(seconds: float) -> None:
        for name, unit in SLICES.items():
            monkeypatch.setattr(f"dataloader.pipelines.{name}", round(seconds * unit, 3))

    each(600)
    return each


@pytest.fixture
def silence_is_safe(points_of_silence: Callable[[float], None]) -> None:
    """A run has safe points while its peer is silent, but hardly one while it connects."""
    points_of_silence(0.2)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the pipelines that the test registers."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Run a job in a data folder of the test; the first transaction asks for the test's database."""
    return partial(testing.run, dsn=lambda: request.getfixturevalue("dsn"), data_dir=tmp_path)


@pytest.fixture
def rows(dsn: str) -> Rows:
    def rows(query: str) -> list[Any]:
        with psycopg.connect(dsn, autocommit=True) as conn:
            cursor = conn.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    return rows


@pytest.fixture
def command(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `dataloader` with these words; its target is the test's database."""
    monkeypatch.setenv("DL_TARGET_DSN", dsn)
    return lambda *words, **how: CliRunner().invoke(main, words, **how)


@pytest.fixture
def in_text(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of records that each COPY gets as text."""
    seen: list[int] = []
    copy_as_text = csv_table.Table._copy_as_text

    def noted(self: csv_table.Table, items: Iterator[Any]) -> Any:
        at = len(seen)
        seen.append(0)

        def counted() -> Iterator[Any]:
            for number, item in items:
                if not isinstance(item, csv_table.Batch):
                    seen[at] += item.records if isinstance(item, csv_table.Block) else 1
                yield number, item

        return copy_as_text(self, counted())

    monkeypatch.setattr(csv_table.Table, "_copy_as_text", noted)
    return seen


@pytest.fixture(params=[False, True], ids=["at once", "in parts"])
def in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Load a small file so, and so."""
    if request.param:
        monkeypatch.setattr(csv_table, "PART_BYTES", 1)
        monkeypatch.setattr(csv_table, "_DIRECT_BYTES", 0)
    return bool(request.param)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    kept: list[str] = []
    monkeypatch.setattr(Execution, "note", lambda self, text: kept.append(text))
    return kept
