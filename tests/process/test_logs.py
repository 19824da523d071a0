"""The farm's logs: lines that cannot be written cost no job a beat, and no secret leaves by any way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from farming import Farm, until

PIPELINES = "farm_pipelines,log_pipelines"
PASSWORD, KNOWN, ARGUMENT = "canary-of-the-dsn", "canary-of-pg-password", "canary-of-an-argument"


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size."""
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


def beats(farm: Farm, job: UUID) -> int:
    return sum(kind == "heartbeat" for kind, _ in farm.journal(job))


def test_i11_a_stopped_reader_costs_lines_and_no_heartbeat(farm: Farm) -> None:
    """The farm's stdout and stderr are a pipe that nobody reads."""
    pipe = farm.folder / "workers-0.log"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    program = farm.start(workers=2, debug=True, dl_pipelines=PIPELINES, dl_heartbeat_sec=0.3)
    long = [farm.enqueue("chatty", args={"lines": 20_000, "sec": 2}) for _ in range(2)]
    short = [farm.enqueue("noop") for _ in range(20)]
    until(lambda: [worker.num_threads() for worker in program.workers()] == [3, 3], "main, heartbeat, log")
    for job in long + short:
        farm.wait(job, "succeeded")
        assert farm.job(job)["attempt"] == 1
    assert all(beats(farm, job) >= 3 for job in long)
    os.kill(program.workers()[0].pid, signal.SIGKILL)  # the supervisor goes on as well
    again = farm.enqueue("noop")
    until(lambda: len(program.workers()) == 2, "another worker")
    farm.wait(again, "succeeded")
    os.set_blocking(reading, True)
    assert _resumed(reading, farm) > 1_000
    os.close(reading)


def _resumed(reading: int, farm: Farm) -> int:
    """Read again until a line says how many were lost."""
    data, dropped = b"", 0
    farm.enqueue("chatty", args={"lines": 5, "sec": 0})
    farm.enqueue("chatty", args={"lines": 5, "sec": 0})
    while not dropped:
        data += os.read(reading, 65_536)
        whole = data[: data.rfind(b"\n") + 1]
        dropped = sum(line.get("dropped", 0) for line in documents(whole.decode()))
    return dropped


def test_i12_a_full_disk_costs_lines_and_no_job(farm: Farm) -> None:
    with tmpfs(farm.folder / "logs", "1m") as folder:
        program = farm.ready(workers=2, debug=True, dl_pipelines=PIPELINES, log_path=folder)
        for job in [farm.enqueue("chatty", args={"lines": 5_000, "sec": 0}) for _ in range(2)]:
            farm.wait(job, "succeeded")
        until(lambda: program.events("log.write.failed"), "stdout to say that the file cannot be written")
        file = folder / "dataloader.log"
        assert file.stat().st_size > 900_000
        until(lambda: file.read_bytes().endswith(b"\n"), "whole lines and nothing else")
        documents(file.read_text())
        file.rename(folder / "full.log")  # an operator makes room
        (folder / "full.log").unlink()
        for job in [farm.enqueue("chatty", args={"lines": 5, "sec": 0}) for _ in range(4)]:
            farm.wait(job, "succeeded")
        until(lambda: file.exists() and any(line.get("dropped") for line in documents(file.read_text())), "the number")
        assert program.stop() == 0


def test_i13_streams_have_their_files_and_rotate(farm: Farm) -> None:
    folder = farm.folder / "logs"
    program = farm.ready(
        workers=4, debug=True, dl_pipelines=PIPELINES, log_path=folder, metric_path=folder, log_rotation="100 KB"
    )
    jobs = [farm.enqueue("chatty", args={"lines": 1_000, "sec": 0}) for _ in range(8)]
    for job in jobs:
        farm.wait(job, "succeeded")
    assert program.stop() == 0
    lines = [line for file in folder.glob("dataloader*.log") for line in documents(file.read_text())]
    said = [(line["job_id"], line["event"]) for line in lines if line["logger"] == "pipeline.chatty"]
    assert sorted(said) == sorted((str(job), f"line {number}") for job in jobs for number in range(1_000))
    runs = [line for line in documents((folder / "metrics.log").read_text()) if line["event"] == "job.run"]
    assert {(line["job_id"], line["outcome"], line["task"]) for line in runs} == {
        (str(j), "done", "chatty") for j in jobs
    }
    assert all(line["duration_ms"] > 0 and line["stream"] == "metric" for line in runs)
    assert not [path.name for path in folder.iterdir() if path.suffix != ".log"], "no lock files"
    assert not program.events("job.run"), "a stream with a file does not go to stdout"


class Refusing:
    """A server that ends each connection; it counts them by the application_name that they begin with."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.asked: Counter[str] = Counter()
        threading.Thread(target=self._refuse, daemon=True).start()

    def _refuse(self) -> None:
        with suppress(OSError):
            while True:
                with self._listening.accept()[0] as connection:
                    said = connection.recv(10_000).decode("ascii", "replace")
                    for program in ("dl-worker", "dl-keeper", "dl-reaper"):
                        self.asked[program] += program in said

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def test_a_database_that_is_away_is_told_once_and_not_with_every_try(farm: Farm) -> None:
    server = Refusing()
    away = f"host=127.0.0.1 port={server.port} user=u dbname=d sslmode=disable gssencmode=disable"
    workers = farm.start(workers=1, dl_db_dsn=away)
    reaper = farm.start("reaper", dl_db_dsn=away)
    until(lambda: len(server.asked) == 3 and min(server.asked.values()) >= 4, "four tries of each")
    assert workers.process.poll() is reaper.process.poll() is None
    server.close()
    (lost,) = workers.events("farm.database.lost")
    assert lost["what"] in ("worker.session.lost", "keeper.session.lost")
    assert len(reaper.events("reaper.session.lost")) == 1


def test_a_broken_module_is_told_once_for_the_farm_with_the_users_frames(farm: Farm) -> None:
    (farm.folder / "broken.py").write_text("def configured():\n    return {}['nothing']\n\nCONFIG = configured()\n")
    given = {"dl_pipelines": "broken", "pythonpath": farm.folder}
    program = farm.start(workers=3, **given)
    assert program.process.wait(60) == 78
    (failed,) = program.events("worker.pipelines.failed")
    assert failed["error"] == "KeyError: 'nothing'"
    frames = [line.strip() for line in failed["exception"].splitlines() if "File " in line]
    assert [frame.partition("broken.py")[2] for frame in frames] == [
        '", line 4, in <module>',
        '", line 2, in configured',
    ]
    program = farm.start(workers=3, local=1, **given)
    assert program.process.wait(60) == 78
    text = program.log.read_text()
    assert text.count("line 2, in configured\n") == 1
    assert "\\n" not in text


@pytest.mark.parametrize("prefetch", [1, 5])
def test_a_failing_jobs_stack_is_in_the_log_once(farm: Farm, prefetch: int) -> None:
    wish = [{"queue": "q", "concurrency": 1, "prefetch": prefetch}]
    program = farm.ready(workers=1, dl_pipelines=PIPELINES, workers_json=json.dumps(wish))
    args = {"password": ARGUMENT, "dsn": f"postgresql://u:{PASSWORD}@h/db", "known": "x", "sec": 0}
    job = farm.enqueue("tells_secrets", args=args, max_attempts=1)
    farm.wait(job, "failed")
    assert program.stop() == 0
    (line,) = program.events("worker.job.failed")
    assert (line["job_id"], line["task"], line["attempt"], line["level"]) == (str(job), "tells_secrets", 1, "warning")
    assert line["error"].startswith("ValueError: ")
    assert line["exception"].count("in tells_secrets") == 1
    text = program.log.read_text()
    assert text.count("Traceback") == 1
    assert ARGUMENT not in text
    assert PASSWORD not in text
