"""Real farms: the errors of their runs come in groups, whatever ends a run."""

from __future__ import annotations

from farming import Farm

from dataloader.queue import operations
from dataloader.queue.reports import errors

BOOM = "ValueError at farm_pipelines.py:errs: row # of … is wrong"


def test_runs_that_fail_for_one_cause_are_one_group_and_come_back_together(farm: Farm) -> None:
    farm.ready(workers=1)
    texts = [f"row {number} of '{number}.csv' is wrong" for number in range(3)]
    same = [farm.enqueue("errs", args={"text": text}, max_attempts=1) for text in texts]
    secret = farm.enqueue("errs", args={"text": "password=hunter2x refused"}, max_attempts=1)
    good = farm.enqueue("errs", args={"permanent": True})
    crashed = farm.enqueue("kills_itself", max_attempts=1)
    for job_id in (*same, secret, good):
        farm.wait(job_id, "failed")
    farm.wait(crashed, "lost")
    groups = {group["error_group"]: group for group in errors.groups(farm.conn)["groups"]}
    assert groups[BOOM]["dead"] == 3
    assert groups["PermanentError at farm_pipelines.py:errs: no use"]["dead"] == 1
    assert "hunter" not in str(groups)
    (of_crash,) = [group for group in groups.values() if group["task"] == "kills_itself"]
    assert "attempt #" in of_crash["error_group"]
    assert len(groups) == 4
    assert farm.journal(same[0])[-1][1]["error_group"] == BOOM
    only = {"task": "errs", "error_group": BOOM}
    assert operations.change_queue(farm.conn, "requeue-dead", "q", "test", only=only).changed == 3
    for job_id in same:
        farm.wait(job_id, "failed")
    assert errors.groups(farm.conn, task="errs")["groups"][0]["dead"] == 3
