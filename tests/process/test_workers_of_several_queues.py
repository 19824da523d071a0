"""Workers of several queues: each queue's jobs run, a notification of any wakes them, a reload changes the queues."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from farming import Farm, Program, until

from dataloader.queue import operations


def entry(*queues: str, **more: Any) -> str:
    return json.dumps([{"queues": queues, **more}])


def reloadable(farm: Farm, workers_json: str) -> tuple[Program, Callable[[str], None]]:
    """A program with one worker, and what lets it read other workers from its .env."""
    folder = farm.folder / "settings"
    folder.mkdir()
    dotenv = folder / ".env"
    dotenv.write_text(f"WORKERS_JSON='{workers_json}'\n")
    program = farm.start(cwd=folder, workers_json="")
    until(lambda: len(program.events("worker.started")) == 1, "a worker")

    def reload(workers_json: str) -> None:
        dotenv.write_text(f"WORKERS_JSON='{workers_json}'\n")
        program.signal(signal.SIGHUP)

    return program, reload


def titles(program: Program) -> list[str]:
    return [" ".join(worker.cmdline()) for worker in program.workers()]


@pytest.mark.parametrize("scheduler", ["lag", "sequential", "strict", {"a": 3, "b": 1}])
def test_the_jobs_of_each_queue_run(farm: Farm, scheduler: Any) -> None:
    program = farm.ready(workers=1, workers_json=entry("a", "b", scheduler=scheduler))
    jobs = [farm.enqueue("noop", queue) for _ in range(30) for queue in ("a", "b")]
    for job in jobs:
        farm.wait(job, "succeeded")
    assert all(title.startswith("dataloader: worker a, b#") for title in titles(program))
    by_queue = {line["job_id"]: line["queue"] for line in program.events("worker.job.finished")}
    assert [by_queue[str(job)] for job in jobs] == ["a", "b"] * 30


def test_a_notification_of_any_of_them_wakes_an_idle_worker(farm: Farm) -> None:
    program = farm.ready(workers=2, workers_json=entry("a", "b", "c", concurrency=2), dl_claim_backoff_sec=600)
    for queue in ("c", "a", "b"):
        until(lambda: len(program.children("idle")) == 2, "both to be idle")
        farm.wait(farm.enqueue("noop", queue), "succeeded")


def test_no_queue_starves_beside_one_that_is_never_empty(farm: Farm) -> None:
    """Nor does it wait for its end: the other one's jobs are all older."""
    full = [farm.enqueue("recorded", "a", args={"sec": 0.2}) for _ in range(40)]
    other = farm.enqueue("noop", "b")
    farm.ready(workers=1, workers_json=entry("a", "b", scheduler="sequential"))
    farm.wait(other, "succeeded")
    assert farm.job(full[-1])["status"] == "queued"


def test_a_reload_gives_workers_other_queues(farm: Farm) -> None:
    program, reload = reloadable(farm, entry("a"))
    job = farm.enqueue("noop", "b")
    reload(entry("a", "b", concurrency=2))
    farm.wait(job, "succeeded")
    until(lambda: len(program.workers()) == 2, "the older worker to leave")
    (reloaded,) = program.events("supervisor.reloaded")
    assert reloaded["workers"] == {"a, b": 2}
    shown = "SELECT FROM dl_workers WHERE queue = 'a' AND queues = ARRAY['a', 'b'] AND state <> 'dead'"
    until(lambda: len(farm.rows(shown)) == 2, "the keeper to show their queues")


def test_an_entry_speaks_for_its_queues_to_all_workers_of_the_farm(farm: Farm) -> None:
    """Else a worker of another entry would run jobs of the queue without their order."""
    both = [{"queue": "a", "ordered": True}, {"queues": ["a", "b"]}]
    program = farm.start(workers_json=json.dumps([both[1], both[0]]))
    until(lambda: len(program.events("worker.started")) == 2, "two workers")
    assert farm.rows("SELECT ordered FROM dl_queues WHERE queue = 'a'") == [(True,)]
    program.signal(signal.SIGTERM)
    program.process.wait(60)
    farm.conn.execute("UPDATE dl_queues SET ordered = false")
    refused = farm.start(workers_json=json.dumps(both))
    assert refused.process.wait(60) == 78
    assert {each["error"].partition(" the queue")[0] for each in refused.events("worker.schema.refused")} == {
        'WORKERS_JSON says "ordered": true of'
    }
    assert len(refused.events("worker.started")) == 0


def test_a_reload_with_another_scheduler_starts_no_second_set_of_workers(farm: Farm) -> None:
    program, reload = reloadable(farm, entry("a", "b"))
    long = farm.enqueue("recorded", "a", args={"sec": 600})
    farm.begun(long)
    reload(entry("a", "b", scheduler={"a": 3, "b": 1}))
    until(lambda: program.children("waits to claim"), "the successor to wait for its place")
    other = farm.enqueue("noop", "b")
    # A round trip of the successor, in which it could have claimed: it hears of the next reload and makes way for it.
    program.signal(signal.SIGHUP)
    until(lambda: len(program.events("worker.started")) == 3 and program.children("waits to claim"), "the next one")
    assert farm.job(other)["status"] == "queued"
    assert operations.change(farm.conn, "cancel", [long], "test")
    farm.wait(other, "succeeded")
