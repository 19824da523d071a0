"""Which lines of a run are kept, how output is cut into lines, what of a text may be shown."""

from __future__ import annotations

from itertools import pairwise
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.queue.job import Job
from dataloader.queue.run_log import LINE_COST, LINE_MOST, RunLog, Splitter, harmless, marked, read

JOB = Job(UUID(int=1), "q", "t", "{}", None, "k", "", 1, 5, 60, None, 1, "host:1:boot")


class Table:
    """What the database would have."""

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


def test_a_log_of_its_size_is_whole() -> None:
    run = RunLog(JOB, 100_000, 0.0)
    table = Table(run)
    add(run, *map(str, range(500)))
    table.write()
    assert [table.lines[number] for number in range(1, 501)] == [*map(str, range(500))]


def test_lines_that_were_not_looked_at_count() -> None:
    run = RunLog(JOB, 100_000, 0.0)
    add(run, "a")
    run.skip(1_000)
    add(run, "b")
    assert [line.number for line in run.unwritten().lines] == [1, 1_002]


def test_a_long_line_keeps_its_begin_and_end() -> None:
    run = RunLog(JOB, 2**20, 0.0)
    add(run, "a" * 500_000 + "z" * 500_000)
    (line,) = run.unwritten().lines
    assert len(line.text) < LINE_MOST + 50
    assert line.text[:5] + line.text[-5:] == "aaaaazzzzz"


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
    assert found[0].endswith(b" [... %d bytes more ...]" % (2_000_000 - Splitter.LONGEST))
    assert found[1] == b"next"
    splitter.feed(b"a" * 100_000)
    assert splitter.waiting == 100_000
    assert splitter.finish()[0].endswith(b" [... 34464 bytes more ...]")
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
