"""What several processes of a farm would log, logged once for all of them: a database away, errors of imports."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from dataloader.farm import common_log
from dataloader.farm.common_log import FarmOutage, Note

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


def test_a_loss_that_lasts_is_told_again_with_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000.0]
    monkeypatch.setattr(common_log, "now", lambda: clock[0])
    mine = outage(Note())
    with capture_logs() as logs:
        for clock[0] in (1_000.0, 1_010.0, 1_029.0, 1_031.0, 1_040.0, 1_062.0):
            mine.failed("worker.session.lost", ERROR)
    lost = [line for line in logs if line["event"] == LOST]
    assert [(line.get("failures"), line.get("lasting_sec")) for line in lost] == [(None, None), (4, 31), (6, 62)]


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
