"""Real farms: the worker gives a pipeline its model, refuses other args for good, and shows the schema to producers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from farming import Farm, until
from psycopg.types.json import Jsonb

from dataloader.queue import args_schema, operations

WRONG = {"limit": 0, "password": "hunter2hunter2", "zone": 1}


@pytest.fixture
def told(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = farm.folder / "told"
    monkeypatch.setenv("DL_TEST_TOLD", str(path))
    return path


def insert(farm: Farm, task: str, args: dict[str, Any], key: str = "k") -> Any:
    """As another service does, by SQL."""
    rows = farm.conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args) VALUES (gen_random_uuid(), 'q', %s, %s, %s)"
        " RETURNING job_id",
        (task, key, Jsonb(args)),
    ).fetchall()
    return rows[0][0]


def faults(farm: Farm, args: dict[str, Any]) -> list[str]:
    """What producers learn of these args."""
    text = operations.args_schemas(farm.conn, ["typed"])["typed"]
    assert text is not None
    return sorted(map(str, args_schema.faults(text, args)))


def test_a_pipeline_gets_its_model_and_wrong_args_fail_for_good(farm: Farm, told: Path) -> None:
    farm.ready(workers=1, dl_pipelines="args_pipelines")
    assert faults(farm, WRONG) == [
        "day is required",
        "limit should be 1 or more",
        "zone is not known; known are: day, limit, password",
    ]
    good, wrong = insert(farm, "typed", {"day": "x", "limit": "5"}), insert(farm, "typed", WRONG)
    farm.wait(good, "succeeded")
    assert farm.result(good) == {"model": "Load", "day": "x", "limit": 5}
    failed = farm.wait(wrong, "failed")
    assert failed["attempt"] == 1
    for part in ("day: Field required", "limit: Input should be greater than or equal to 1", "zone: there is no such"):
        assert part in failed["error"]
    assert "hunter2" not in failed["error"]
    assert told.read_text().split() == ["dict"]  # what there was of its args


def test_of_a_batch_only_the_key_with_wrong_args_fails(farm: Farm, told: Path) -> None:
    farm.conn.execute("INSERT INTO dl_queues (queue, paused_at) VALUES ('q', now())")
    good, wrong = (insert(farm, "typed.batch", {"day": "x", "limit": n}, f"k{n}") for n in (1, 0))
    farm.ready(workers=1, dl_pipelines="args_pipelines", workers_json=json.dumps([{"queue": "q", "prefetch": 10}]))
    operations.resume(farm.conn, "q", "test")
    farm.wait(good, "succeeded")
    assert farm.result(good) == [1]
    assert "limit: Input should be" in farm.wait(wrong, "failed")["error"]


def test_of_two_versions_the_worker_that_started_last_has_the_word(farm: Farm, told: Path) -> None:
    farm.ready(workers=1, dl_pipelines="args_pipelines")
    assert faults(farm, {"day": "x"}) == []
    farm.ready(workers=1, queue="r", dl_pipelines="args_pipelines", dl_test_model="new")
    assert faults(farm, {"day": "x"}) == ["zone is required"]
    third = farm.start(workers=1, queue="s", dl_pipelines="args_pipelines")
    until(lambda: third.events("worker.started"), "a worker of the older code")
    assert faults(farm, {"day": "x"}) == []
