"""Lines of JSON by numpy, Arrow and binary COPY: the same table, rejects and errors as record by record."""

import json
import random
from pathlib import Path
from typing import Any

import judging
import pytest
from judging import Load, Rows, ends_its_threads
from test_arrow_block import KINDS, chosen, loaded, value

from dataloader.pipelines import Context, csv_table, files, json_block, json_file

ODD_VALUES = [
    *("01", "-", "-0", "1.", ".5", "+1", "1e2", "1E400", "12345678901234567890123", "NaN", "-Infinity", "True", "tru"),
    *("nul", "nulls", "null", '"\\"', '"\\\\"', '"\\\\\\""', '"', '"a', "[" * 200 + "]" * 200),
    *("[" * 1500 + "]" * 1500, '""', '"null"', "2026-01-02", '"a" "b"', '"a"1', '1"a"', "1 ", " 1", "\t1"),
    *('"tab\there"', '"\x7f"', "'a'", "", '{"id": 1}', '{"a": {"id": "}", "b": [{"v": "\\""}]}}', '{"a": 1, "a": 2}'),
    *('{"a": 01}', '{"a":"\\ud83d"}', "[]", "{}", "[1, 2.50]", "[NaN]", '["\\u00e9"]', '{"a" 1}', "[1,]", '"12"'),
    *('"true"', '" 1"', " null", "null ", '"\\u0000"', '"\\u0001"', '"\\u0022"', '"\\u005c"', '"\\ud83d\\ude00"'),
    *('"\\ud83d"', '"\\uD83D\\u0041"', '"\\u00"', '"\\x"', '"\\\\u0041"', '"\\/\\b\\f\\n\\r\\t"', '"\\\\n"'),
    *('"\\u0041\\u010d"', '"\\u2028"', '"{"', '"}"', '"[\\"{,"', '", \\"v\\": 1"'),
]
ODD_LINES = [
    *("", " ", ",", "null", "[]", "[1]", "7", "x", "{", "}", "{}", '{"id":', '"id"', '{"id": 5}{"id": 6}', "\x1e"),
    "\ufeff",
]
ARGS: list[dict[str, Any]] = [
    *({"null": ["a"]}, {"null": [""]}, {"add": {"n": "line"}}, {"add": {"n": "line", "f": "file"}}),
    *({"columns": {"v": "x"}}, {"select": ["id", "v"]}, {"mode": "append"}, {"schema_change": "add"}),
    *({"schema_change": "widen"}, {"decimal": ","}, {"timezone": "Europe/Berlin"}, {"date_format": "%d.%m.%Y"}),
    *({"true": ["yes"]}, {"names": "snake"}),
]


def json_value(chance: random.Random, kind: str, oddity: float) -> str:
    """The value as JSON, mostly of its type."""
    if chance.random() < oddity:
        return chance.choice(ODD_VALUES)
    if chance.random() < 0.05:
        return "null"
    if kind in ("json", "jsonb"):
        nested = {"a": [1, None, {"id": "}"}], "é": chance.choice(["x", '"', "\\", "\n"]), "n": 1.5}
        return json.dumps(
            chance.choice([nested, [], {}, "text", 7, True, [nested]]), ensure_ascii=chance.random() < 0.3
        )
    text = value(chance, KINDS[kind], oddity)
    if KINDS[kind] in ("number", "whole", "boolean") and text and chance.random() > oddity:
        return {"t": "true", "f": "false"}.get(text, text)
    return json.dumps(text, ensure_ascii=chance.random() < 0.2)


def written(chance: random.Random, kinds: dict[str, str]) -> bytes:
    """A file of these columns."""
    oddity = chance.choice([0.0, 0.0, 0.003, 0.02, 0.1])
    end = chance.choice(["\n", "\n", "\n", "\r\n"])
    colon, comma = chance.choice([(": ", ", "), (":", ","), (": ", ","), (" : ", " , ")])
    lines = []
    for number in range(chance.randrange(1, 60)):
        pairs = [("id", str(number))] + [(name, json_value(chance, kind, oddity)) for name, kind in kinds.items()]
        if chance.random() < oddity:
            chance.shuffle(pairs)
        if chance.random() < oddity:
            pairs.append(chance.choice([*pairs, ("id", "7"), ("new", "1")]))
        if chance.random() < oddity:
            pairs.pop(chance.randrange(len(pairs)))
        line = "{" + comma.join(f'"{name}"{colon}{text}' for name, text in pairs) + "}"
        if chance.random() < oddity:
            at = chance.randrange(len(line))
            odd = chance.choice(["", " ", "\n", '"', "\\", "\udcff", "}", "{", ","])
            line = line[:at] + odd + line[at + chance.randrange(2) :]
        lines.append(line)
        if chance.random() < oddity:
            lines.append(chance.choice([*ODD_LINES, line]))
    text = end.join(lines) + end * (chance.random() < 0.8)
    return text.encode("utf-8", "surrogateescape") if "\udcff" in text else text.encode("utf-8", "surrogatepass")


def compared(seed: int, job: Load, rows: Rows, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Both ways load a random file; the results of both."""
    chance = random.Random(seed)
    known = [*(kind for kind in KINDS if kind not in ("small", "uuid")), "jsonb", "jsonb", "json", "text"]
    kinds = {name: chance.choice(known) for name in ("v", "w", 'a "b', "é")[: chance.randrange(1, 5)]}
    if chance.random() < 0.7:
        kinds.pop('a "b', None)
    texts = [written(chance, kinds) for _ in range(chance.choice([1, 1, 2]))]
    for at in (0, 1):
        (folder / f"{at}.jsonl").write_bytes(texts[at % len(texts)])
    args, make, crash = chosen(chance, kinds, ARGS)
    args["path"] = f"{'?' if texts[1:] else 0}.jsonl"
    sizes = chance.choice([10, 100, 400, 2**16]), chance.choice([300, 2**14, 2**21]), chance.choice([0, 2**30])
    with monkeypatch.context() as patch:
        patch.setattr(json_file, "_CHUNK_BYTES", sizes[0])
        patch.setattr(json_file, "_COPIED_BYTES", sizes[1])
        patch.setattr(csv_table, "PART_BYTES", 1)
        patch.setattr(json_file, "PART_BYTES", 2**20)
        patch.setattr(csv_table, "_DIRECT_BYTES", 0 if crash else sizes[2])
        quick = loaded(job, rows, args, make, **crash)
        patch.setattr(json_block.Lines, "read", lambda *args: None)
        patch.setattr(json_block, "types_in", lambda text: None)
        slow = loaded(job, rows, args, make, **crash)
    if not quick or not slow:
        return (), ()
    return quick, slow, args, make, texts


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, 60, 20)], ids=lambda each: f"from {each.start}")
def test_both_ways_leave_the_same(
    seeds: range, job: Load, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        quick, slow, *what = compared(seed, job, rows, tmp_path, monkeypatch)
        assert quick == slow, (seed, *what)


TYPES = {
    **{"id": "bigint", "s": "smallint", "d": "double precision", "r": "real", "n": "numeric", "m": "numeric(6,2)"},
    **{"b": "boolean", "x": "text", "c": "varchar(9)", "y": "date", "u": "timestamp", "z": "timestamptz", "j": "jsonb"},
}
LINE = (
    '{{"id": {}, "s": -7, "d": 0.1, "r": 1.5, "n": 123456789012345678901.10, "m": 2.5, "b": true,'
    ' "x": "\\u0401ж\\n\\"\\\\",'
    ' "c": null, "y": "2026-03-01", "u": "2026-03-01T02:03:04.5", "z": "2026-03-01 02:03:04+01",'
    ' "j": {{"a": [1.50, "\\"}}"], "x": null}}}}\n'
)
ROW = """(7,-7,0.1,1.5,123456789012345678901.10,2.50,t,"Ёж\n""\\\\",,2026-03-01,"2026-03-01 02:03:04.5","""
JSON = ',"{""a"": [1.50, ""\\\\""}""], ""x"": null}",8)'


@pytest.fixture
def in_text(in_text: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The same for small chunks."""
    monkeypatch.setattr(json_file, "_CHUNK_BYTES", 4_000)
    monkeypatch.setattr(json_file, "_COPIED_BYTES", 4_000)
    monkeypatch.setattr(csv_table, "PART_BYTES", 2**15)
    return in_text


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """The lines of `f.jsonl`."""
    lines = [LINE.format(number) for number in range(500)]
    (tmp_path / "f.jsonl").write_text("".join(lines), "utf-8")
    return lines


@pytest.mark.usefixtures("lines")
def test_plain_values_come_in_binary_form_alone(job: Load, rows: Rows, in_text: list[int]) -> None:
    args = {"path": "f.jsonl", "table": "t", "key": ["id"], "types": TYPES, "add": {"line": "line"}}
    result = job("load.files", args)
    assert result.status == "succeeded", result.error
    [(row,)] = rows("SELECT t::text FROM t WHERE id = 7")
    assert (row[: len(ROW)], row[-len(JSON) :], sum(in_text)) == (ROW, JSON, 0)
    result = job("load.files", {"path": "f.jsonl", "table": "new", "mode": "append"})
    assert (result.status, sum(in_text)) == ("succeeded", 0), result.error
    kinds = [kind for _, kind in rows(judging.TYPES.replace("'t'", "'new'"))]
    assert kinds == ["bigint"] * 2 + ["numeric"] * 4 + ["boolean"] + ["text"] * 5 + ["jsonb"]


def test_an_odd_line_costs_its_neighbours_alone_the_quick_way(
    job: Load, rows: Rows, tmp_path: Path, lines: list[str], in_text: list[int]
) -> None:
    lines[250], lines[400] = lines[250].replace("-7", '"x"'), "null\n"
    (tmp_path / "f.jsonl").write_text("".join(lines), "utf-8")
    result = job("load.files", {"path": "f.jsonl", "table": "t", "key": ["id"], "types": TYPES, "max_errors": 2})
    assert result.status == "succeeded", result.error
    assert rows("SELECT line FROM t_rejects ORDER BY 1") == [(251,), (401,)]
    assert 0 < sum(in_text) < 100


@pytest.mark.usefixtures("rows", "lines", "in_text")
def test_an_end_ends_the_threads_that_read_ahead(context: Context) -> None:
    ends_its_threads(files.load_files({"path": "f.jsonl", "table": "t", "mode": "append"}, context), 2)


@pytest.mark.parametrize(
    "odd",
    [
        *("null", "[]", "", " ", '{"id": 1}', '{"id": 1, "v": "a", "w": 1}', '{"v": "a", "id": 1}', '{"id":1,"v":"a"}'),
        *('{"id": 1, "v": "a", "v": "a"}', '{"id": 1, "v": "a"}{"id": 1, "v": "a"}', '{"id": 1, "v": "a"', "[" * 9_999),
        *(f'{{"id": {number}, "v": "a"}}' for number in ("01", "NaN", "nope", "", "1 ")),
        *(f'{{"id": 1, "v": {text}}}' for text in ("7", '"a\tb"', '"\\x"', '"\\u0000"', '"\\ud83d"', "nulL", "{}")),
        *("{}\n\n{}", "{\n}", '{"id": 1,\n"v": "a"}{}', "{}{}\n\n", " {}", "\r\n{}\r\n", "[{}\n]"),
        *('{"id": 1, "v": "a"},', '{"id": 1, "v": "a" "b"}'),
    ],
)
@pytest.mark.parametrize("kind", ["numeric", "bigint"])
def test_lines_of_another_layout_have_no_rows_but_those_of_their_objects(kind: str, odd: str) -> None:
    lines = json_block.Lines(["id", "v"], [kind, "text"], [], 0)
    line = '{"id": 1, "v": "a"}\n'
    assert lines.read(2 * line.encode())
    for text in (f"{line}{odd}\n{line}", f"{odd}\n{line}", *[odd] * (kind == "bigint")):
        columns = lines.read(text.encode())
        if columns and lines.copied(columns, 1):
            assert kind == "bigint", "numpy reads one layout"
            rows = [json.loads(each) for each in text.splitlines()]
            assert [column.to_pylist() for column in columns] == [
                [row.get(name) for row in rows] for name in ("id", "v")
            ]


@pytest.mark.parametrize("null", [" null", "null "])
def test_a_null_among_blanks_is_no_json_value(null: str) -> None:
    lines = json_block.Lines(["v", "w"], ["jsonb", "jsonb"], [], 0)
    assert lines.read(b'{"v": null, "w": null}\n')
    for at in ("v", "w"):
        assert not lines.read('{"v": 1, "w": 1}'.replace(f'"{at}": 1', f'"{at}": {null}').encode())
