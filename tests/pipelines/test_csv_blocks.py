"""Records that pass in blocks: COPY gets the same bytes as by the way of single records, or the same refusal."""

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dataloader.pipelines import Context, PermanentError, csv_file
from dataloader.pipelines.csv_file import CsvFile
from dataloader.pipelines.csv_table import Block
from dataloader.pipelines.files import Files, Shaped

Seen = tuple[list[Any], str, int]
TYPES = {"id": "bigint", "name": "text", "born": "date"}
FIELDS = {
    "id": ["1", "7", "+7", "007", '"8"', "", '""', "x", " 9", "#no", "\ufeff3", "99999999999999999999"],
    "name": [
        *("a", "", '""', '"a,b"', '"a ""b"""', 'a"b', '"a"b', '"two\nlines"', '"two\r\nlines"', '"cr\rin"', "ё", "\\."),
        *('"\n\\.\n"', "NA", '"NA"', "\0", "\ufeffa", "\x85", "#no", '"open', " ", "\x1a", "\udcff", "name"),
    ],
    "born": ["2026-01-02", "20260102", "", '"2026-01-02"', "1/2/26", "2026-02-31", "2026-01-02 00:00", "infinity"],
}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"null": ["NA", "8"]},
    {"null": ["", "NA", "a"], "add": {"n": "line"}},
    {"null": ["NA", "#no", '""', "a,2026-01-02"], "add": {"file": "file", "n": "line", "m": "line"}},
    {"null": ["+7", "NA", "\\."], "delimiter": "\\"},
    {"comment": "#"},
    {"delimiter": ";"},
    {"encoding": "cp1251"},
]


def written(seed: int, path: Path, layout: dict[str, Any]) -> None:
    """A file whose records are mostly plain; the odd ones come in runs too."""
    chance = random.Random(seed)
    mark, end = layout.get("delimiter", ","), chance.choice(["\n", "\r\n"])
    names = list(TYPES)[: chance.choice([1, 2, 3, 3])]
    oddity = chance.choice([0.0, 0.03, 0.3])
    lines = [mark.join(names) + end]
    for _ in range(chance.randrange(60)):
        fields = [(chance.choice(FIELDS[name]) if chance.random() < oddity else FIELDS[name][0]) for name in names]
        fields += ["more"] * (chance.random() < oddity / 9)
        odd_end = chance.choice(["\r", "\n\n", "\r\n", "\n", f"{end}{lines[0]}"])
        lines.append(mark.join(fields) + (odd_end if chance.random() < oddity / 3 else end))
    text = "".join(lines)
    text = text[: -len(end)] if chance.random() < 0.3 else text
    encoding = layout.get("encoding", "utf-8")
    path.write_bytes(text.encode(encoding, "surrogateescape" if encoding == "utf-8" else "replace"))


def seen(items: Callable[[], Any], place: Callable[[], Any]) -> Seen:
    """The records with their numbers, the error, and the line behind them."""
    records: list[Any] = []
    error = ""
    try:
        for number, item in items():
            records += item.singles(number) if isinstance(item, Block) else [(number, item)]
    except PermanentError as e:
        error = str(e)
    return records, error, place().records


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("is_typed", [True, False])
def test_blocks_hold_the_records_that_come_one_by_one(
    is_typed: bool, layout: dict[str, Any], context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = 0
    for seed in range(40):
        monkeypatch.setattr(csv_file, "_CHUNK", random.Random(seed).choice([7, 100, 2**16]))
        written(seed, tmp_path / "f.csv", layout)
        head = (tmp_path / "f.csv").read_text(layout.get("encoding", "utf-8"), "replace").splitlines()[0]
        types = {name: kind for name, kind in TYPES.items() if name in head} if is_typed else {}
        wanted = Files(path="f.csv", table="t", mode="append", max_errors=99, types=types, **layout)
        try:
            source = Shaped(wanted, context)
        except PermanentError:
            continue  # the header or the sample
        with closing(source):
            singles = seen(lambda: source.records(source.begin), source.place)  # noqa: B023
            size = random.Random(seed).choice([1, 10, 1000])
            blocks += (
                sum(isinstance(item, Block) for _, item in source.items(source.begin, size)) if not singles[1] else 0
            )
            assert seen(lambda: source.items(source.begin, size), source.place) == singles, seed  # noqa: B023
    assert blocks > 60


def test_a_run_goes_on_from_the_middle_of_a_chunk(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("id,name\n" + "".join(f'{n},"ё ""{n}"""\n' for n in range(500)))
    with (tmp_path / "f.csv").open("rb") as file, csv_file.opened_text(file, "utf-8") as text:
        source = CsvFile("f.csv", file.fileno(), text, csv_file.Layout())
        source.require_names()
        items = source.items(source.begin, 100)
        assert [type(next(items)[1]) for _ in range(2)] == [Block, Block]
        place = source.place()
        rest = [text for number, item in source.items(place, 100) for _, text in item.singles(number)]  # type: ignore[union-attr]
    assert (place.line, place.records, rest[0], len(rest)) == (201, 200, '200,"ё ""200"""', 300)
