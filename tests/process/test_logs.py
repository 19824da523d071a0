"""The farm's logs and those of its jobs: lines that cannot be written cost no beat, and no secret leaves by any way."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from farming import Farm, farm_on, free_port, until

from dataloader.queue import logs


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def documents(text: str) -> list[dict[str, Any]]:
    """The lines, each of which must be JSON; without a last one that is still being written."""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def chatter(farm: Farm, number: int, lines: int, sec: float = 0) -> list[UUID]:
    """Jobs that log so many lines each, for so long at least."""
    return [farm.enqueue("chatty", args={"lines": lines, "sec": sec}) for _ in range(number)]


def test_i11_a_stopped_reader_costs_lines_and_no_heartbeat(farm: Farm) -> None:
    """The farm's stdout and stderr are a pipe that nobody reads."""
    pipe = farm.folder / "workers-0.log"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    program = farm.start(workers=2, debug=True, dl_heartbeat_sec=0.3)
    long = chatter(farm, 2, lines=20_000, sec=2)
    short = [farm.enqueue("noop") for _ in range(20)]
    until(lambda: [worker.num_threads() for worker in program.workers()] == [3, 3], "main, heartbeat, log")
    farm.succeeds(*long, *short)
    assert all([kind for kind, _ in farm.journal(job)].count("heartbeat") >= 3 for job in long)
    os.kill(program.workers()[0].pid, signal.SIGKILL)  # the supervisor goes on as well
    again = farm.enqueue("noop")
    until(lambda: len(program.workers()) == 2, "another worker")
    farm.succeeds(again)
    os.set_blocking(reading, True)
    assert _resumed(reading, farm) > 1_000
    os.close(reading)


def _resumed(reading: int, farm: Farm) -> int:
    """Read again until a line says how many were lost."""
    data, dropped = b"", 0
    chatter(farm, 2, lines=5)
    while not dropped:
        data += os.read(reading, 65_536)
        whole = data[: data.rfind(b"\n") + 1]
        dropped = sum(line.get("dropped", 0) for line in documents(whole.decode()))
    return dropped


def test_i12_a_full_disk_costs_lines_and_no_job(farm: Farm) -> None:
    with tmpfs(farm.folder / "logs", "1m") as folder:
        program = farm.ready(workers=2, debug=True, log_path=folder)
        farm.succeeds(*chatter(farm, 2, lines=5_000))
        program.logged("log.write.failed")
        file = folder / "dataloader.log"
        assert file.stat().st_size > 900_000
        until(lambda: file.read_bytes().endswith(b"\n"), "whole lines and nothing else")
        documents(file.read_text())
        file.rename(folder / "full.log")  # an operator makes room
        (folder / "full.log").unlink()
        farm.succeeds(*chatter(farm, 4, lines=5))
        until(lambda: file.exists() and any(line.get("dropped") for line in documents(file.read_text())), "the number")
        assert program.stop() == 0


def test_i13_streams_have_their_files_and_rotate(farm: Farm) -> None:
    folder = farm.folder / "logs"
    program = farm.ready(workers=4, debug=True, log_path=folder, metric_path=folder, log_rotation="100 KB")
    jobs = chatter(farm, 8, lines=1_000)
    farm.succeeds(*jobs)
    assert program.stop() == 0
    lines = [line for file in folder.glob("dataloader*.log") for line in documents(file.read_text())]
    logged = [(line["job_id"], line["event"]) for line in lines if line["logger"] == "pipeline.chatty"]
    assert sorted(logged) == sorted((str(job), f"line {number}") for job in jobs for number in range(1_000))
    runs = [line for line in documents((folder / "metrics.log").read_text()) if line["event"] == "job.run"]
    assert {(line["job_id"], line["outcome"], line["task"]) for line in runs} == {
        (str(j), "done", "chatty") for j in jobs
    }
    assert all(line["duration_ms"] > 0 and line["stream"] == "metric" for line in runs)
    assert not [path.name for path in folder.iterdir() if path.suffix != ".log"], "no lock files"
    assert not program.events("job.run"), "a stream with a file does not go to stdout"


def test_a_database_that_is_away_is_told_once_and_not_with_every_try(farm: Farm) -> None:
    away = f"host=127.0.0.1 port={free_port()} user=u dbname=d"
    programs = farm.start(workers=1, dl_db_dsn=away, debug=1), farm.start("reaper", dl_db_dsn=away, debug=1)
    tries = {name: f"{name}.session.lost" for name in ("worker", "keeper", "reaper")}
    for program, names in zip(programs, (("worker", "keeper"), ("reaper",)), strict=True):
        for name in names:
            program.logged(tries[name], 3)
        assert program.process.poll() is None
        (lost,) = program.events("farm.database.lost")
        assert lost["what"] in [tries[name] for name in names]


def test_a_broken_module_is_told_once_for_the_farm_with_the_users_frames(farm: Farm) -> None:
    (farm.folder / "broken.py").write_text("def configured():\n    return {}['nothing']\n\nCONFIG = configured()\n")
    program = farm.start(workers=3, dl_pipelines="broken")
    assert program.process.wait(60) == 78
    (failed,) = program.events("worker.pipelines.failed")
    assert failed["error"] == "KeyError: 'nothing'"
    frames = [line.strip() for line in failed["exception"].splitlines() if "File " in line]
    assert [frame.partition("broken.py")[2] for frame in frames] == [
        '", line 4, in <module>',
        '", line 2, in configured',
    ]
    program = farm.start(workers=3, local=1, dl_pipelines="broken")
    assert program.process.wait(60) == 78
    text = program.log.read_text()
    assert text.count("line 2, in configured\n") == 1
    assert "\\n" not in text


SECRET = "canary-8f2e71"


def lines(farm: Farm, job_id: UUID) -> list[dict[str, Any]]:
    return logs.page(farm.conn, job_id).rows


def texts(farm: Farm, job_id: UUID) -> list[str]:
    return [line["text"] for line in lines(farm, job_id)]


@pytest.fixture(scope="module")
def shared(module_db: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """A farm of one worker for the tests that leave it so."""
    with farm_on(module_db, tmp_path_factory.mktemp("farm")) as made:
        made.ready(workers=1, dl_pipelines="written_pipelines")
        yield made


@pytest.fixture
def written(shared: Farm) -> Iterator[Farm]:
    yield shared
    shared.empty()


def seen(farm: Farm, *texts: str) -> str:
    """The farm's stream once it has these texts: threads write it."""
    until(lambda: all(text in farm.programs[0].log.read_text() for text in texts), "the stream")
    return farm.programs[0].log.read_text()


def test_every_way_to_write_is_in_the_log_with_its_level_and_in_the_stream_too(written: Farm) -> None:
    job_id = written.enqueue("written.all")
    written.wait(job_id, "succeeded")
    assert {(line["text"], line["level"], line["source"]) for line in lines(written, job_id)} == {
        ("first by the logger rows=5", "info", "log"),
        ("second by print", "info", "stdout"),
        ("third by a program", "info", "stdout"),
        ("fourth by its stderr", "warning", "stderr"),
        ("fifth by logging", "warning", "log"),
        ("sixth by a thread", "info", "stdout"),
        ("seventh by a fork", "error", "log"),
        ("eighth without an end", "info", "stdout"),
    }
    order = [line["text"].split()[0] for line in lines(written, job_id) if line["source"] != "stderr"]
    assert order == ["first", "second", "third", "fifth", "sixth", "seventh", "eighth"]
    assert [line["line"] for line in lines(written, job_id)] == list(range(1, 9))
    # Each of the two descriptors has a thread that writes.
    stream = seen(written, "eighth without an end", "fourth by its stderr")
    for way in ("second by print", "third by a program", "fourth by its stderr", "sixth by a thread"):
        assert stream.count(way) == 1
    (event,) = written.programs[0].logged("first by the logger")
    assert event["rows"] == 5
    assert "\x1e" not in stream
    # A worker that is killed at rest has no last words: its output has gone on.
    (worker,) = written.programs[0].workers()
    until(lambda: "idle" in " ".join(worker.cmdline()), "the worker to rest")
    worker.kill()
    until(lambda: [each.pid for each in written.programs[0].workers()] not in ([], [worker.pid]), "another worker")
    written.wait(written.enqueue("written.nothing"), "succeeded")
    assert seen(written).count("second by print") == 1
    assert len(lines(written, job_id)) == 8


def test_the_log_of_a_run_under_way_grows(written: Farm, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job_id = written.enqueue("written.live", args={"gate": str(gate)})
    until(lambda: texts(written, job_id) == ["attempt 1 waits"], "the first line")
    assert written.job(job_id)["status"] == "running"
    (first,) = lines(written, job_id)
    gate.touch()
    written.wait(job_id, "succeeded")
    (after,) = logs.page(written.conn, job_id, first["place"]).rows
    assert after["text"] == "it is there"
    assert after["at"] > first["at"]


def test_a_failed_run_has_its_whole_traceback_in_its_log(written: Farm) -> None:
    job_id = written.enqueue("written.fails", max_attempts=1)
    written.wait(job_id, "failed")
    whole = "\n".join(line["text"] for line in lines(written, job_id) if line["level"] == "error")
    assert whole.startswith("KeyError: 'the bottom'")
    assert all(f", in f{number}\n" in whole for number in range(80))
    assert whole.rstrip().endswith("KeyError: 'the bottom'")
    (event,) = [each for each in written.programs[0].logged("worker.job.failed") if each["job_id"] == str(job_id)]
    facts = (event["task"], event["attempt"], event["level"], event["error"])
    assert facts == ("written.fails", 1, "warning", "KeyError: 'the bottom'")
    in_stream = [line for line in seen(written).splitlines() if str(job_id) in line and "Traceback" in line]
    assert len(in_stream) == 1, "the farm's log has it once"
    assert written.journal(job_id)[-1][1]["error_group"].startswith("KeyError at written_pipelines.py:deeper: ")


def test_the_last_words_of_a_killed_worker_are_saved(written: Farm) -> None:
    """In its first second, and when lines of its run have been written already."""
    for sec in (0, 1.6):
        job_id = written.enqueue("written.dies", args={"sec": sec, "password": SECRET}, max_attempts=1)
        written.wait(job_id, "lost")
        assert texts(written, job_id) == [
            *(["early words"] if sec else []),
            "last words by logging",
            "last words by print, ***",
            "last words without an end",
        ]
    until(lambda: seen(written).count("last words without an end") == 2, "the stream")
    assert SECRET not in seen(written)


def test_nothing_is_kept_of_tasks_that_want_no_logs(written: Farm) -> None:
    quiet = written.enqueue("written.quiet")
    written.wait(quiet, "succeeded")
    assert lines(written, quiet) == []
    seen(written, "only in the stream")


def test_nothing_is_kept_of_farms_that_want_no_logs(farm: Farm) -> None:
    farm.ready(workers=1, dl_pipelines="written_pipelines", dl_job_log_kb=0)
    job_id = farm.enqueue("written.all")
    farm.wait(job_id, "succeeded")
    assert lines(farm, job_id) == []


def test_what_a_run_starts_takes_no_later_line_and_writes_into_no_other_run(written: Farm, tmp_path: Path) -> None:
    """One program opens the output anew, which truncates it; another one goes on when the run has ended."""
    first = written.enqueue("written.truncated")
    written.wait(first, "succeeded")
    assert texts(written, first)[-4:] == ["into /dev/stdout", "behind", "appended", "the end"]
    first = written.enqueue("written.leaves", args={"gate": str(tmp_path / "gate")})
    written.wait(first, "succeeded")
    assert {"parent", "straggler"} == set(texts(written, first))
    second = written.enqueue("written.nothing")
    written.wait(second, "succeeded")
    assert lines(written, second) == []
