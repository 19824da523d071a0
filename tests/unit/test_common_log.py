"""What several processes of a farm would log, logged once for all of them: a database away, errors of imports."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from dataloader.farm import common_log
from dataloader.farm.common_log import FarmOutage, Note, is_first
from dataloader.farm.failures import own_stack

LOST, BACK = "farm.database.lost", "farm.database.back"
ERROR = ConnectionError("no database")


def as_process(action: Callable[[], object]) -> list[str]:
    """Carry out the action in a process of its own; the events that it has logged, but for debug lines."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with capture_logs() as logs:
            action()
        os.write(write, " ".join(line["event"] for line in logs if line["log_level"] != "debug").encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as told:
        return told.read().split()


def outage(note: Note) -> FarmOutage:
    import structlog

    return FarmOutage(note, structlog.get_logger("test"))


def test_many_processes_log_one_loss() -> None:
    note, told = Note(), []

    def fails() -> None:
        mine = outage(note)
        for _ in range(3):
            mine.failed("worker.session.lost", ERROR)

    with capture_logs() as logs:
        mine = outage(note)
        mine.failed("keeper.session.lost", ERROR)
        told = [as_process(fails) for _ in range(4)]
        mine.ended()
        mine.ended()
    assert told == [[]] * 4
    first, *rest = [line for line in logs if line["log_level"] != "debug"]
    assert (first["event"], first["what"], first["error"]) == (LOST, "keeper.session.lost", "no database")
    assert [(line["event"], line["failures"]) for line in rest] == [(BACK, 13)]  # the dead are not waited for


def test_a_loss_that_lasts_is_told_again_with_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000.0]
    monkeypatch.setattr(common_log, "now", lambda: clock[0])
    mine = outage(Note())
    with capture_logs() as logs:
        for clock[0] in (1_000.0, 1_010.0, 1_029.0, 1_031.0, 1_040.0, 1_062.0):
            mine.failed("worker.session.lost", ERROR)
    lost = [line for line in logs if line["event"] == LOST]
    assert [(line.get("failures"), line.get("lasting_sec")) for line in lost] == [(None, None), (4, 31), (6, 62)]


def test_the_end_is_told_when_the_last_process_is_back() -> None:
    note = Note()
    mine, (has_failed, told), (gate, opened) = outage(note), os.pipe(), os.pipe()
    with capture_logs() as logs:
        mine.failed("keeper.session.lost", ERROR)
        pid = os.fork()
        if pid == 0:  # a worker that stays away longer
            outage(note).failed("worker.session.lost", ERROR)
            os.write(told, b"!")
            os.read(gate, 1)
            os._exit(0)
        os.read(has_failed, 1)
        mine.ended()
        assert BACK not in [line["event"] for line in logs]
        os.write(opened, b"!")
        os.waitpid(pid, 0)
        mine.failed("keeper.session.lost", ERROR)
        mine.ended()
    assert [line["event"] for line in logs if line["log_level"] != "debug"] == [LOST, BACK]
    for end in (has_failed, told, gate, opened):
        os.close(end)


def test_a_relapse_of_a_moment_is_the_same_loss_and_a_later_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000.0]
    monkeypatch.setattr(common_log, "now", lambda: clock[0])
    mine = outage(Note())
    with capture_logs() as logs:
        for clock[0] in (1_000.0, 1_001.0, 1_020.0):
            mine.failed("worker.session.lost", ERROR)
            mine.ended()
    assert [line["event"] for line in logs if line["log_level"] != "debug"] == [LOST, BACK, LOST, BACK]


def test_a_note_whose_writer_was_killed_in_the_middle_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(file: int, length: int) -> None:
        raise InterruptedError

    note = Note()
    with note.changed() as told:
        told.update(text="long " * 20)
    with monkeypatch.context() as broken:
        broken.setattr(os, "ftruncate", killed)
        with pytest.raises(InterruptedError), note.changed() as told:
            told.update(text="short")
    assert as_process(lambda: outage(note).failed("worker.claim.failed", ERROR)) == [LOST]


def test_an_error_is_told_once_in_each_generation() -> None:
    told = Note()
    assert is_first(told, 0, "KeyError")
    assert as_process(lambda: is_first(told, 0, "KeyError") and os._exit(1)) == []
    assert not is_first(told, 0, "KeyError")
    assert is_first(told, 0, "ImportError")
    assert is_first(told, 1, "KeyError")
    assert not is_first(told, 0, "KeyError of an older worker")


def test_the_stack_of_an_import_has_the_users_frames_alone(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    from dataloader import pipelines

    folder = Path(str(tmp_path))
    (folder / "mine_outer.py").write_text("import mine_inner\n")
    (folder / "mine_inner.py").write_text("def set_up():\n    raise KeyError('x')\n\nset_up()\n")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(KeyError) as caught:
        pipelines.import_users("mine_outer")
    stack = own_stack(caught.value)
    files = [line.split('"')[1] for line in stack.splitlines() if line.lstrip().startswith("File ")]
    assert [Path(file).name for file in files if Path(file).parent == folder] == [
        "mine_outer.py",
        *["mine_inner.py"] * 2,
    ]
    assert not [file for file in files if "importlib" in file or "/dataloader/" in file]
    assert stack.endswith("KeyError: 'x'")
