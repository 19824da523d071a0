"""The output of runs in this process: where it goes, what is counted only, how it is given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import UUID

import pytest

from dataloader import log
from dataloader.farm import capture
from dataloader.farm.capture import Capture, Output
from dataloader.farm.keeper import SAVED_MOST, Salvage, last_words
from dataloader.farm.slots import SharedSlots
from dataloader.queue.job import Job
from dataloader.queue.run_log import RunLog

JOB = Job(UUID(int=1), "q", "t", "{}", None, "k", "", 1, 5, 60, None, 1, "host:1:boot")


def texts(output: Output) -> list[bytes | int]:
    return [*output.read()]


def test_output_is_read_once_and_as_it_comes() -> None:
    output = Output("dl-test")
    os.write(output.fd, b"one\ntw")
    assert texts(output) == [b"one"]
    assert output.done == 4
    os.write(output.fd, b"o\n")
    assert texts(output) == [b"two"]
    assert texts(output) == []


def test_a_flood_is_counted_up_to_its_end_and_takes_no_memory() -> None:
    output = Output("dl-test")
    lines = 3 * capture.FLOOD // 10
    for _ in range(3):
        os.write(output.fd, b"123456789\n" * (lines // 3))
    found = texts(output)
    assert isinstance(found[0], int)
    assert found[0] + len(found) - 1 in (lines // 3 * 3, lines // 3 * 3 + 1)  # one line was cut by the jump
    assert os.fstat(output.fd).st_blocks * 512 < 4 * capture.KEPT


def test_the_rest_of_a_private_key_is_masked_in_last_words() -> None:
    output = Output("dl-test")
    begin = b"before\n-----BEGIN PRIVATE KEY-----\nMIIEone\n"
    os.write(output.fd, begin + b"MIIEtwo\n-----END PRIVATE KEY-----\nafter password=hunter2x\n")
    said = [each.text for each in last_words(output.fd, len(begin), "stdout")]
    assert said == ["***", "***", "after password=***"]


def test_a_worker_whose_second_file_cannot_be_opened_costs_no_descriptor() -> None:
    slot, output, saved = SharedSlots(1).slots[0], Output(capture.NAMES[0]), Salvage(16)
    slot.take(1)
    other = os.open("/dev/null", os.O_RDONLY)
    slot.pid, slot.log_files[:] = os.getpid(), (output.fd, other)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        saved.open_new([slot])
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(other)


@pytest.fixture
def captured() -> Iterator[tuple[Capture, int, int]]:
    """A capture of descriptors 1 and 2, and pipes in their place."""
    saved = os.dup(1), os.dup(2)
    pipes = [os.pipe() for _ in range(2)]
    for read, _ in pipes:
        os.set_blocking(read, False)
    slot = SharedSlots(1).slots[0]
    made = Capture(16, slot, (pipes[0][1], pipes[1][1]))
    yield made, pipes[0][0], pipes[1][0]
    made.end()
    made.rest()
    for fd, number in zip(saved, (1, 2), strict=True):
        os.dup2(fd, number)


def lines(run: RunLog | None) -> list[tuple[str, str]]:
    return [(line.source, line.text) for line in run.unwritten().lines] if run else []


def test_last_words_begin_with_a_whole_line() -> None:
    output = Output("dl-test")
    os.write(output.fd, b"first\n" + b"x" * (SAVED_MOST - 3) + b"\nlast")
    assert [each.text for each in last_words(output.fd, 0, "stdout")] == ["last"]


def test_each_line_of_a_secret_of_several_is_masked(captured: tuple[Capture, int, int]) -> None:
    made, out, _ = captured
    log.learn_job({"password": "first-canary\n  second-canary\nx\n"})
    made.begin(JOB, True)
    os.write(1, b"first-canary\n  second-canary\nx\n")
    assert lines(made.end()) == [("stdout", "***"), ("stdout", "  ***"), ("stdout", "x")]
    assert os.read(out, 1_000) == b"***\n  ***\nx\n"
    log.learn_job({})


def test_a_color_within_a_secret_hides_it_from_no_mask(captured: tuple[Capture, int, int]) -> None:
    made, out, _ = captured
    log.learn_job({"password": "first-canary"})
    made.begin(JOB, True)
    os.write(1, b"first\x1b[31m-can\x1b[0mary\n\x1b[31mred\x1b[0m\n")
    assert lines(made.end()) == [("stdout", "***"), ("stdout", "red")]
    assert os.read(out, 1_000) == b"***\n\x1b[31mred\x1b[0m\n"
    log.learn_job({})


def test_a_private_key_that_has_no_end_masks_no_line_of_the_next_run(captured: tuple[Capture, int, int]) -> None:
    made, _, _ = captured
    made.begin(JOB, True)
    os.write(1, b"-----BEGIN PRIVATE KEY-----\nMIIEone\n")
    assert lines(made.end())[1:] == [("stdout", "***")]
    made.begin(JOB, True)
    os.write(1, b"of the next\n")
    assert lines(made.end()) == [("stdout", "of the next")]
