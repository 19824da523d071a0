"""Checkpoints on a farm: what a killed, drained or failed run has saved, the next one has."""

from pathlib import Path

from farming import Farm, until
from psycopg.types.json import Jsonb


def test_a_drained_run_goes_on_elsewhere(farm: Farm) -> None:
    farm.conn.execute("CREATE TABLE written (number int); CREATE TABLE begun (done int)")
    first = farm.ready(workers=1, dl_drain_sec=0)
    job = farm.enqueue("goes_on", args={"to": 1_000_000})
    until(lambda: farm.rows("SELECT count(*) FROM written")[0][0] > 50, "rows")
    assert first.stop() == 0
    status = farm.job(job)
    assert (status["status"], status["attempt"]) == ("queued", 0)
    ((kept,),) = farm.rows("SELECT checkpoint ->> 'done' FROM dl_checkpoints")
    assert farm.rows("SELECT max(number)::text FROM written") == [(kept,)]  # the last words before the release
    to = int(kept) + 200
    farm.conn.execute("UPDATE dl_jobs SET args = %s", (Jsonb({"to": to}),))
    farm.ready(workers=1)
    assert farm.wait(job, "succeeded")["attempt"] == 1
    rows = farm.rows("SELECT number, count(*) FROM written GROUP BY 1 ORDER BY 1")
    assert rows == [(number, 2) for number in range(1, to + 1)]
    assert farm.rows("SELECT done::text FROM begun") == [(None,), (kept,)]
    until(lambda: farm.rows("SELECT checkpoint, target_claim FROM dl_checkpoints") == [(None, 3)], "it to be spent")


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
