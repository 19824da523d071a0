"""Which lines of a run are kept, how output is cut into lines, what of a text may be shown; the capture of output."""

import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
from claimed import job
from hypothesis import given
from hypothesis import strategies as st

from dataloader import log
from dataloader.farm import capture
from dataloader.farm.capture import Capture, Output
from dataloader.farm.keeper import SAVED_MOST, last_words
from dataloader.farm.slots import SharedSlots
from dataloader.queue.run_log import LINE_COST, LINE_MOST, RunLog, Splitter, harmless, marked, read

JOB = job()


class Table:
    def __init__(self, run: RunLog) -> None:
        self.run = run
        self.lines: dict[int, str] = {}

    def write(self) -> None:
        done = self.run.unwritten()
        if done.left_out:
            for number in range(done.left_out[0], done.left_out[1] + 1):
                self.lines.pop(number, None)
        for line in done.lines:
            assert line.number not in self.lines
            self.lines[line.number] = line.text
        self.run.confirm(done)

    @property
    def size(self) -> int:
        return sum(LINE_COST + len(text.encode()) for text in self.lines.values())


def add(run: RunLog, *texts: str) -> None:
    for text in texts:
        run.add(0.0, "info", "stdout", text)


@given(st.lists(st.one_of(st.integers(0, 400), st.none()), max_size=200), st.integers(1_000, 20_000))
def test_a_log_never_takes_more_than_its_size_and_keeps_begin_and_end(sizes: list[int | None], most: int) -> None:
    run = RunLog(JOB, most, 0.0)
    table, texts = Table(run), list[str]()
    for size in sizes:
        if size is None:
            table.write()
            assert table.size <= most
        else:
            texts.append("x" * size)
            add(run, texts[-1])
    table.write()
    assert table.size <= most
    assert not run.has_news
    numbers = sorted(table.lines)
    if texts:
        assert numbers[0] == 1
        assert numbers[-1] == len(texts)
    gaps = [(one, two) for one, two in pairwise(numbers) if two > one + 1]
    assert len(gaps) <= 1, "only the middle is left out"


def test_a_log_of_its_size_is_whole_and_counts_lines_that_were_not_looked_at() -> None:
    run = RunLog(JOB, 100_000, 0.0)
    table = Table(run)
    add(run, *map(str, range(500)))
    run.skip(1_000)
    add(run, "a" * 50_000 + "z" * 50_000)
    table.write()
    *whole, (number, long) = table.lines.items()
    assert whole == [(number + 1, str(number)) for number in range(500)]
    assert (number, len(long) < LINE_MOST + 50, long[:5] + long[-5:]) == (1_501, True, "aaaaazzzzz")


@given(st.binary(max_size=400).map(lambda data: data.replace(b"x", b"\n")), st.integers(1, 50))
def test_lines_are_the_same_however_they_arrive(data: bytes, step: int) -> None:
    splitter = Splitter()
    found = [line for at in range(0, len(data), step) for line in splitter.feed(data[at : at + step])]
    found += splitter.finish()
    expected = data.split(b"\n")
    assert found == (expected if expected[-1] else expected[:-1])


@pytest.mark.parametrize("step", [1_000, 70_000, 3_000_000])
def test_a_line_without_an_end_takes_bounded_memory(step: int) -> None:
    splitter = Splitter()
    data = b"a" * 2_000_000 + b"\nnext\n"
    found = [line for at in range(0, len(data), step) for line in splitter.feed(data[at : at + step])]
    assert found == [b"a" * Splitter.LONGEST + b" [... more ...]", b"next"]
    splitter.feed(b"a" * 100_000)
    assert splitter.waiting == 100_000
    assert splitter.finish() == [b"a" * Splitter.LONGEST + b" [... more ...]"]
    assert splitter.waiting == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u0444 \U0001f600", "plain \u0444 \U0001f600"),
        ("tab\tstays", "tab\tstays"),
        ("nul\0", "nul\\x00"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07rest", "rest"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[", ""),
        ("10%\r100%\r", "100%"),
        ("crlf\r", "crlf"),
        ("\u202eevil", "\\u202eevil"),
        ("\x9b31m", "\\x9b31m"),
        ("\ud800", "\\ud800"),
    ],
)
def test_a_text_is_harmless(text: str, shown: str) -> None:
    assert harmless(text) == shown
    harmless(text).encode()


def test_a_line_of_logging_comes_out_as_it_went_in() -> None:
    data = marked("warning", 12.5, "one\ntwo \x1e")
    first, second = (read(line, "stdout") for line in data.splitlines())
    assert first == ("warning", "log", "one", 12.5)
    assert second == ("warning", "log", "two \x1e", 12.5)
    assert read(marked("odd", 1.0, "x")[:-1], "stdout").level == "info"
    assert read(b"\x1enonsense 1.0\x1ex", "stderr") == ("warning", "stderr", "\x1enonsense 1.0\x1ex", None)
    assert read(b"\xff", "stdout") == ("info", "stdout", "\\xff", None)


def test_output_is_read_once_as_it_comes_and_from_its_begin_when_it_was_truncated() -> None:
    output = Output("dl-test")
    os.write(output.fd, b"one\ntw")
    assert list(output.read()) == [b"one"]
    assert output.done == 4
    os.write(output.fd, b"o\n")
    assert [*output.read(), *output.read()] == [b"two"]
    os.ftruncate(output.fd, 0)
    os.write(output.fd, b"behind it\nappended\n")  # it has grown again between two reads
    assert list(output.read()) == [b"behind it", b"appended"]


def test_a_flood_is_counted_up_to_its_end_and_takes_no_memory() -> None:
    output = Output("dl-test")
    lines = 3 * capture.FLOOD // 10
    for _ in range(3):
        os.write(output.fd, b"123456789\n" * (lines // 3))
    found = list(output.read())
    assert isinstance(found[0], int)
    assert found[0] + len(found) - 1 in (lines // 3 * 3, lines // 3 * 3 + 1)  # one line was cut by the jump
    assert os.fstat(output.fd).st_blocks * 512 < 4 * capture.KEPT


def test_a_program_is_not_faster_than_the_reader_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output("dl-test")
    os.ftruncate(output.fd, 2**31)
    sizes = []
    pread = os.pread

    def counted(fd: int, size: int, at: int) -> bytes:
        sizes.append(size)
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", counted)
    list(output.read())
    assert sum(sizes) <= capture.COUNTED + 2 * capture.CHUNK
    assert output.at == 2**31


@pytest.fixture
def captured() -> Iterator[tuple[Capture, int, int]]:
    """A capture of descriptors 1 and 2, and pipes in their place."""
    saved = os.dup(1), os.dup(2)
    pipes = [os.pipe() for _ in range(2)]
    for reading, _ in pipes:
        os.set_blocking(reading, False)
    slot = SharedSlots(1).slots[0]
    made = Capture(16, slot, (pipes[0][1], pipes[1][1]))
    yield made, pipes[0][0], pipes[1][0]
    made.end()
    made.rest()
    for fd, number in zip(saved, (1, 2), strict=True):
        os.dup2(fd, number)


def lines(run: RunLog | None) -> list[tuple[str, str]]:
    return [(line.source, line.text) for line in run.unwritten().lines] if run else []


def test_last_words_begin_with_a_whole_line_and_the_rest_of_a_private_key_is_masked() -> None:
    output, other = Output("dl-test"), Output("dl-test")
    begin = b"before\n-----BEGIN PRIVATE KEY-----\nMIIEone\n"
    os.write(output.fd, begin + b"MIIEtwo\n-----END PRIVATE KEY-----\nafter password=hunter2x\n")
    texts = [each.text for each in last_words(output.fd, len(begin), "stdout")]
    assert texts == ["***", "***", "after password=***"]
    os.write(other.fd, b"first\n" + b"x" * (SAVED_MOST - 3) + b"\nlast")
    assert [each.text for each in last_words(other.fd, 0, "stdout")] == ["last"]


@pytest.mark.parametrize(
    ("password", "written", "kept", "shown"),
    [
        ("first-canary\n  second-canary\nx\n", b"first-canary\n  second-canary\nx\n", ["***", "  ***", "x"],
         b"***\n  ***\nx\n"),
        ("first-canary", b"first\x1b[31m-can\x1b[0mary\n\x1b[31mred\x1b[0m\n", ["***", "red"],
         b"***\n\x1b[31mred\x1b[0m\n"),
    ],
    ids=["of several lines", "with a color within"],
)  # fmt: skip
def test_a_secret_in_the_output_is_masked(
    password: str, written: bytes, kept: list[str], shown: bytes, captured: tuple[Capture, int, int]
) -> None:
    made, out, _ = captured
    log.learn_job({"password": password})
    made.begin(JOB, True)
    os.write(1, written)
    assert lines(made.end()) == [("stdout", text) for text in kept]
    assert os.read(out, 1_000) == shown


def test_a_private_key_that_has_no_end_masks_no_line_of_the_next_run(captured: tuple[Capture, int, int]) -> None:
    made, _, _ = captured
    made.begin(JOB, True)
    os.write(1, b"-----BEGIN PRIVATE KEY-----\nMIIEone\n")
    assert lines(made.end())[1:] == [("stdout", "***")]
    made.begin(JOB, True)
    os.write(1, b"of the next\n")
    assert lines(made.end()) == [("stdout", "of the next")]
