"""Hooks in a real farm: once for all its workers, once in each, and at the death of one."""

import gzip
import signal
from typing import Any

import pytest
from farming import Farm, Program, ended_lines, until
from receiver import Receiver

HEAD = """
import os, signal, time
from pathlib import Path
from dataloader.pipelines import around_run, last_words, on_error, on_farm_start, on_worker_start, register

HERE = Path({folder!r})

def note(*words):
    with open(HERE / "notes", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

def gate():
    end = time.monotonic() + 60
    while not (HERE / "open").exists() and time.monotonic() < end:
        time.sleep(0.01)

note("import", os.getpid())

@last_words
def last(exc):
    note("last", type(exc).__name__, exc)

@on_worker_start
def worker():
    note("worker", os.getpid())
"""
ONCE = """
@on_farm_start
def once():
    note("farm", os.getpid())
    gate()
    note("farm ends")
"""


class Mine:
    def __init__(self, farm: Farm, code: str) -> None:
        self.farm, self.folder = farm, farm.folder
        (self.folder / "mine.py").write_text(HEAD.format(folder=str(self.folder)) + code)

    def start(self, workers: int = 3, **settings: Any) -> Program:
        return self.farm.start(workers=workers, dl_pipelines="farm_pipelines,mine", **settings)

    def open(self) -> None:
        (self.folder / "open").touch()

    def notes(self, kind: str) -> list[str]:
        file = self.folder / "notes"
        lines = ended_lines(file) if file.exists() else []
        return [line.removeprefix(kind).strip() for line in lines if line.startswith(kind)]

    def kinds(self) -> list[str]:
        return [line.split()[0] if line != "farm ends" else line for line in self.notes("")]


def test_a_farm_starts_once_while_its_workers_wait_and_again_at_a_reload(farm: Farm) -> None:
    mine = Mine(farm, ONCE)
    job = farm.enqueue("recorded")
    program = mine.start()
    until(lambda: len(mine.notes("import")) == 3 and mine.notes("farm"), "all workers to import the module")
    assert (farm.job(job)["status"], mine.notes("worker"), program.events("worker.started")) == ("queued", [], [])
    mine.open()
    program.logged("worker.started", 3)
    farm.wait(job, "succeeded")
    assert sorted(mine.notes("worker")) == sorted(mine.notes("import"))
    assert [kind for kind in mine.kinds() if kind != "import"] == ["farm", "farm ends", *["worker"] * 3]

    program.signal(signal.SIGHUP)
    until(lambda: len(mine.notes("worker")) == 6, "the workers of the next generation")
    assert mine.kinds().count("farm") == 2
    program.logged("supervisor.worker.exited", 3)
    program.workers()[0].kill()
    until(lambda: len(mine.notes("worker")) == 7, "the successor of a killed worker")
    assert mine.kinds().count("farm") == 2, "a successor is no start of the farm"
    assert program.stop() == 0


def test_a_worker_that_waits_for_the_start_obeys_a_drain(farm: Farm) -> None:
    mine = Mine(farm, ONCE)
    program = mine.start(dl_drain_sec=1, dl_kill_grace_sec=1)
    until(lambda: len(mine.notes("import")) == 3 and mine.notes("farm"))
    assert program.stop() == 0
    exits = [event["exit_status"] for event in program.events("supervisor.worker.exited")]
    assert exits == [0, 0, -signal.SIGKILL], "only the one within the function is killed, at the end of its time"
    assert mine.notes("worker") == []


def test_a_start_that_dies_goes_to_another_worker(farm: Farm) -> None:
    dies = """
@on_farm_start
def dies_once():
    note("farm", os.getpid())
    if not (HERE / "died").exists():
        (HERE / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
    mine = Mine(farm, dies)
    program = mine.start()
    program.logged("worker.started", 3)
    first, second = mine.notes("farm")
    assert (first != second, first in mine.notes("worker"), len(mine.notes("worker"))) == (True, False, 3)


FAILS = "@{}\ndef wrong():\n    raise LookupError('no model at password=abc')\n"
FAILS_LATE = (
    "@last_words\ndef wrong(exc):\n    raise LookupError('no model at password=abc')\n\nimport no_such_module\n"
)


@pytest.mark.parametrize("hook", ["on_farm_start", "on_worker_start", "last_words"])
def test_a_start_that_fails_keeps_the_farm_from_starting_and_has_last_words(farm: Farm, hook: str) -> None:
    """In a hook, or at an import, where the hook of last words may fail as well."""
    mine = Mine(farm, FAILS_LATE if hook == "last_words" else FAILS.format(hook))
    program = mine.start()
    assert program.process.wait(60) == 78
    failed = program.events("hook.failed")
    facts = {(event["hook"], event["function"], event["error"], event["level"]) for event in failed}
    assert facts == {(hook, "mine.wrong", "LookupError: no model at password=***", "error")}
    assert program.events("supervisor.cannot.start")
    assert not program.events("worker.started")
    if hook == "last_words":
        assert mine.notes("last")[0] == "ModuleNotFoundError No module named 'no_such_module'"
        assert "no_such_module" in program.events("worker.pipelines.failed")[0]["error"]
    else:
        assert mine.notes("last")[0] == "LookupError no model at password=abc"
        assert [event for event in failed if "raise LookupError" in event.get("exception", "")]


def sent(receiver: Receiver) -> list[str]:
    return [gzip.decompress(got.body).decode() for got in receiver.got]  # the SDK packs every body


def test_sentry_has_a_failed_run_before_its_end_and_the_death_of_a_worker(farm: Farm, receiver: Receiver) -> None:
    code = """
@register("mine.fails")
def fails(args):
    raise ValueError(f"refused {args['password']}")
"""
    mine = Mine(farm, code)
    dsn = f"{receiver.url}/1".replace("//", "//key@")
    program = mine.start(workers=1, dl_hooks="dataloader.pipelines.sentry", sentry_dsn=dsn)
    args = {"password": "canary-3f1d", "note": "canary-9a2b"}
    job = farm.enqueue("mine.fails", max_attempts=1, args=args)
    farm.wait(job, "failed")
    (event,) = sent(receiver)
    assert (str(job) in event, "refused ***" in event, "canary" in event) == (True, True, False)
    assert not program.events("sentry.off")
    farm.conn.execute("DELETE FROM dl_migrations WHERE number = 0")
    farm.end_sessions("dl-worker")
    until(lambda: any("SchemaError" in body for body in sent(receiver)[1:]), "the last words")
