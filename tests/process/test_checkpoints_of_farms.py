"""Checkpoints on a farm: what a killed, drained or failed run has saved, the next one has; load.csv reads on."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest
from farming import PATIENCE, Farm, Program, until
from psycopg.types.json import Jsonb

RECORD = '{n},"{text}"\n'
TEXT = 'Сто пятьдесят байт, ""в кавычках"",\nс концом строки и с номером в конце: '


@pytest.fixture
def writing(farm: Farm) -> Farm:
    """A farm's queue with the tables of `goes_on`."""
    farm.conn.execute("CREATE TABLE written (number int); CREATE TABLE begun (done int)")
    return farm


def runs_again(farm: Farm, after: int) -> None:
    """Wait for the run behind that claim; the job of a killed worker is made due, for a crash delays its next run."""

    def is_running() -> bool:
        farm.conn.execute("UPDATE dl_jobs SET available_at = now() WHERE status = 'queued' AND available_at > now()")
        return farm.rows("SELECT claims FROM dl_jobs") > [(after,)]

    until(is_running, "the next run")


def test_a_drained_run_goes_on_elsewhere(writing: Farm) -> None:
    first = writing.ready(workers=1, dl_drain_sec=0)
    job = writing.enqueue("goes_on", args={"to": 1_000_000})
    until(lambda: writing.rows("SELECT count(*) FROM written")[0][0] > 50, "rows")
    assert first.stop() == 0
    status = writing.job(job)
    assert (status["status"], status["attempt"]) == ("queued", 0)
    ((kept,),) = writing.rows("SELECT checkpoint ->> 'done' FROM dl_checkpoints")
    assert writing.rows("SELECT max(number)::text FROM written") == [(kept,)]  # the last words before the release
    to = int(kept) + 200
    writing.conn.execute("UPDATE dl_jobs SET args = %s", (Jsonb({"to": to}),))
    writing.ready(workers=1)
    assert writing.wait(job, "succeeded")["attempt"] == 1
    rows = writing.rows("SELECT number, count(*) FROM written GROUP BY 1 ORDER BY 1")
    assert rows == [(number, 2) for number in range(1, to + 1)]
    assert writing.rows("SELECT done::text FROM begun") == [(None,), (kept,)]
    until(lambda: writing.rows("SELECT checkpoint, target_claim FROM dl_checkpoints") == [(None, 3)], "it to be spent")


def test_it_is_written_while_the_run_goes_on_and_shows_nowhere(farm: Farm, tmp_path: Path) -> None:
    program = farm.ready(workers=1)
    go, secret = tmp_path / "go", "hunter2-of-the-checkpoint"
    job = farm.enqueue("waits_behind_a_checkpoint", args={"go": str(go), "secret": secret})
    until(lambda: farm.rows("SELECT checkpoint FROM dl_checkpoints") == [({"password": secret},)], "the first write")
    program.workers()[0].kill()
    until(lambda: farm.job(job)["attempt"] == 2, "the next run")
    go.touch()
    farm.wait(job, "succeeded")
    assert farm.result(job) == ["password"]
    shown = farm.rows("SELECT row_to_json(j)::text FROM (SELECT * FROM dl_jobs) j") + farm.journal(job)
    assert secret not in str(shown).replace(farm.rows("SELECT args::text FROM dl_jobs")[0][0], "")
    assert secret not in program.log.read_text()


def made(path: Path, size: int) -> int:
    """Write a file of so many bytes, with some keys twice, and return how many keys it has."""
    records = size // len(RECORD.format(n=10**7, text=TEXT + "0" * 8).encode())
    with path.open("w") as file:
        file.write("id,text\n")
        file.writelines(RECORD.format(n=n, text=f"{TEXT}{n:08}") for n in range(records))
        file.writelines(RECORD.format(n=n, text=f"{TEXT}again {n:02}") for n in range(10))
    return records


class Reader:
    """Counts the bytes that the workers of a farm have read from files, also those that are killed."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.total = 0

    def kill(self) -> None:
        """Kill the one worker; it has read nothing more since the count."""
        worker = until(self._program.workers, "a worker")[0]
        worker.suspend()
        until(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker to stop")
        self.total += worker.io_counters().read_chars
        worker.kill()
        worker.wait(PATIENCE)

    def end(self) -> int:
        return self.total + sum(worker.io_counters().read_chars for worker in self._program.workers())


# Whether the run under way has come further than the one before, as the target knows it, and as the queue does.
IN_TARGET = "SELECT checkpoint_claim = claims FROM dl_fence JOIN dl_jobs USING (job_id) WHERE status = 'running'"
IN_QUEUE = "SELECT claim = claims FROM dl_checkpoints JOIN dl_jobs USING (job_id) WHERE status = 'running'"


@pytest.mark.parametrize(
    ("mb", "kills", "further"),
    [
        (100, 2, IN_TARGET),
        pytest.param(1_000, 10, IN_QUEUE, marks=[pytest.mark.slow, pytest.mark.timeout(1_800)]),
    ],
)
def test_load_csv_that_is_killed_reads_on(farm: Farm, tmp_path: Path, mb: int, kills: int, further: str) -> None:
    """Each run reads a part of 34 MB once more at most; of runs that come further, as the queue knows, none counts."""
    size = mb * 10**6
    keys = made(tmp_path / "large.csv", size)
    # An empty table of this size would be filled in one transaction.
    farm.conn.execute("CREATE TABLE loaded (id text PRIMARY KEY, text text); INSERT INTO loaded VALUES ('0', 'old')")
    program = farm.ready(workers=1, dl_data_dir=tmp_path)
    reader = Reader(program)
    args = {"path": "large.csv", "table": "loaded", "key": ["id"]}
    began, job = time.monotonic(), farm.enqueue("load.csv", args=args, max_attempts=2 if further == IN_QUEUE else 50)
    until(lambda: farm.rows("SELECT to_regclass('dl_fence')") != [(None,)], "the first transaction")
    for _ in range(kills):
        until(lambda: farm.rows(further) == [(True,)], "another part")
        time.sleep(random.uniform(0, mb / 500))  # to be killed anywhere in a part
        ((claim,),) = farm.rows("SELECT claims FROM dl_jobs")
        reader.kill()
        runs_again(farm, claim)
    farm.wait(job, "succeeded", patience=900)
    read = reader.end()
    print(f"{mb} MB: {read / size:.3f} times the file read, {time.monotonic() - began:.0f} s")
    assert farm.rows("SELECT count(*), count(DISTINCT id) FROM loaded") == [(keys, keys)]
    expected = "CASE WHEN id::int < 10 THEN 'again ' || lpad(id, 2, '0') ELSE lpad(id, 8, '0') END"
    assert farm.rows(f"SELECT count(*) FROM loaded WHERE text = %s || {expected}", TEXT.replace('""', '"')) == [(keys,)]
    assert farm.rows("SELECT count(*) FROM pg_class WHERE relname ~ '^dl_load_csv'") == [(0,)]
    assert read <= size + (kills + 1) * 45 * 10**6  # libraries too
    # A run that finds the target ahead of the queue copies the checkpoint, and is handed back.
    assert kills < farm.story(job).count("picked") <= 2 * kills + 1
