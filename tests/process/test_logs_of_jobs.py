"""Real farms: what runs write is in the logs of their jobs, whatever they write and however they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from farming import Farm, Program, until

from dataloader.queue import logs

SECRET = "canary-8f2e71"
TOKEN = "canarytoken-55aa90"


def lines(farm: Farm, job_id: UUID) -> list[dict[str, Any]]:
    """All lines of a job."""
    return logs.page(farm.conn, job_id).lines


def texts(farm: Farm, job_id: UUID) -> list[str]:
    return [line["text"] for line in lines(farm, job_id)]


@pytest.fixture
def workers(farm: Farm) -> Program:
    """One worker with the pipelines of these tests."""
    return farm.ready(workers=1, dl_pipelines="written_pipelines", the_token=TOKEN, dl_heartbeat_sec=1)


def test_every_way_to_write_is_in_the_log_with_its_level_and_in_the_stream_too(farm: Farm, workers: Program) -> None:
    job_id = farm.enqueue("written.all")
    farm.wait(job_id, "succeeded")
    found = {(line["text"], line["level"], line["source"]) for line in lines(farm, job_id)}
    assert found >= {
        ("first by the logger rows=5", "info", "log"),
        ("second by print", "info", "stdout"),
        ("third by a program", "info", "stdout"),
        ("fourth by its stderr", "warning", "stderr"),
        ("fifth by logging", "warning", "log"),
        ("sixth by a thread", "info", "stdout"),
        ("seventh by a fork", "error", "log"),
        ("eighth without an end", "info", "stdout"),
    }
    ways = [text.split()[0] for text, *_ in sorted(found)]
    assert len(ways) == 8
    order = [line["text"].split()[0] for line in lines(farm, job_id) if line["source"] != "stderr"]
    assert order == ["first", "second", "third", "fifth", "sixth", "seventh", "eighth"]
    assert [line["line"] for line in lines(farm, job_id)] == list(range(1, 9))
    last = (b"eighth without an end", b"fourth by its stderr")  # each of the two descriptors has a thread that writes
    until(lambda: all(text in workers.log.read_bytes() for text in last), "the stream")
    stream = workers.log.read_bytes().decode()
    for way in ("second by print", "third by a program", "fourth by its stderr", "sixth by a thread"):
        assert stream.count(way) == 1
    (event,) = workers.events("first by the logger")
    assert event["rows"] == 5
    assert "\x1e" not in stream


def test_the_log_of_a_run_under_way_grows(farm: Farm, workers: Program, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job_id = farm.enqueue("written.live", args={"gate": str(gate)})
    until(lambda: texts(farm, job_id) == ["attempt 1 waits"], "the first line")
    assert farm.job(job_id)["status"] == "running"
    (first,) = lines(farm, job_id)
    gate.touch()
    farm.wait(job_id, "succeeded")
    (after,) = logs.page(farm.conn, job_id, first["place"]).lines
    assert after["text"] == "it is there"
    assert after["at"] > first["at"]


def test_a_program_that_opens_the_output_anew_takes_no_later_line(farm: Farm, workers: Program) -> None:
    job_id = farm.enqueue("written.truncated")
    farm.wait(job_id, "succeeded")
    assert texts(farm, job_id)[-4:] == ["into /dev/stdout", "behind", "appended", "the end"]


def test_secrets_are_masked_in_the_table_and_the_stream(farm: Farm, workers: Program) -> None:
    job_id = farm.enqueue("written.secrets", args={"password": SECRET}, max_attempts=1)
    farm.wait(job_id, "failed")
    found = "\n".join(texts(farm, job_id))
    assert found.count("login ***") >= 3
    assert "Traceback" in found
    for secret in (SECRET, TOKEN, "canarykeybody"):
        assert secret not in found
        assert secret.encode() not in workers.log.read_bytes()


def test_a_failed_run_has_its_whole_traceback_in_its_log(farm: Farm, workers: Program) -> None:
    job_id = farm.enqueue("written.fails", max_attempts=1)
    farm.wait(job_id, "failed")
    found = [line for line in lines(farm, job_id) if line["level"] == "error"]
    whole = "\n".join(line["text"] for line in found)
    assert whole.startswith("KeyError: 'the bottom'")
    assert all(f", in f{number}\n" in whole for number in range(80))
    assert whole.rstrip().endswith("KeyError: 'the bottom'")


@pytest.mark.parametrize("sec", [0, 1.6])
def test_the_last_words_of_a_killed_worker_are_saved(farm: Farm, workers: Program, sec: float) -> None:
    farm.wait(farm.enqueue("written.nothing"), "succeeded")
    job_id = farm.enqueue("written.dies", args={"sec": sec, "password": SECRET}, max_attempts=1)
    farm.wait(job_id, "lost")
    assert texts(farm, job_id) == [
        *(["early words"] if sec else []),
        "last words by logging",
        "last words by print, ***",
        "last words without an end",
    ]
    until(lambda: b"last words without an end" in workers.log.read_bytes(), "the stream")
    assert SECRET.encode() not in workers.log.read_bytes()


def test_each_attempt_has_its_own_lines(farm: Farm, workers: Program) -> None:
    job_id = farm.enqueue("written.secrets", args={"password": SECRET}, max_attempts=2)
    until(lambda: farm.job(job_id)["attempt"] == 1 and farm.job(job_id)["status"] == "queued", "the retry")
    farm.conn.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = %s", (job_id,))
    farm.wait(job_id, "failed")
    found = lines(farm, job_id)
    assert {line["attempt"] for line in found} == {1, 2}
    one, two = ([line["text"] for line in found if line["attempt"] == number] for number in (1, 2))
    assert one == two
    assert logs.attempts(farm.conn, job_id) == [1, 2]


def test_nothing_is_kept_of_tasks_and_farms_that_want_no_logs(farm: Farm, workers: Program) -> None:
    job_id = farm.enqueue("written.quiet")
    farm.wait(job_id, "succeeded")
    assert lines(farm, job_id) == []
    until(lambda: b"only in the stream" in workers.log.read_bytes(), "the stream")
    workers.stop()
    farm.ready(workers=1, dl_pipelines="written_pipelines", dl_job_log_kb=0)
    job_id = farm.enqueue("written.all")
    farm.wait(job_id, "succeeded")
    assert lines(farm, job_id) == []


def test_a_process_that_a_run_leaves_behind_writes_into_no_other_run(farm: Farm, workers: Program) -> None:
    first = farm.enqueue("written.leaves")
    farm.wait(first, "succeeded")
    assert {"parent", "straggler"} == set(texts(farm, first))
    second = farm.enqueue("written.nothing")
    farm.wait(second, "succeeded")
    assert lines(farm, second) == []


def test_a_worker_that_is_killed_at_rest_has_no_last_words(farm: Farm, workers: Program) -> None:
    """The log of its last run is written, and its output has gone on."""
    job_id = farm.enqueue("written.all")
    farm.wait(job_id, "succeeded")
    (worker,) = workers.workers()
    until(lambda: "idle" in " ".join(worker.cmdline()), "the worker to rest")
    until(lambda: b"second by print" in workers.log.read_bytes(), "the stream")  # which a thread writes
    worker.kill()
    until(lambda: [each.pid for each in workers.workers()] not in ([], [worker.pid]), "another worker")
    farm.wait(farm.enqueue("written.nothing"), "succeeded")
    assert workers.log.read_bytes().count(b"second by print") == 1
    assert len(lines(farm, job_id)) == 8
