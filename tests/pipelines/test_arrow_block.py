"""CSV by Arrow and binary COPY, and in blocks: the same table, rejects and errors as record by record."""

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from judging import Load, Rows, ends_its_threads

from dataloader.pipelines import Context, arrow_block, csv_file, csv_table, files
from dataloader.pipelines.csv_table import Table
from dataloader.testing.farm import NotReached

NUMBERS = [
    *("0", "1", "-1", "-0", "-0.0", "7", "007", "+7", " 9", "32767", "32768", "-32769", "2147483648", "1.10", "0x10"),
    *("9223372036854775807", "9223372036854775808", "123456789012345678901", "1.0", "1e2", "1E-2", "0X1f", "1_000"),
    *("1e400", "1e-400", "5e-324", "2.4e-324", "0." + "0" * 330 + "1", "1" * 45, "0." + "3" * 45, "9" * 30, "0.005"),
    *("1.005", "0.1234567890123456789", "603296.69", "999999.995", "-12345.67", "1.7976931348623159e308", "1e99"),
    *("1.", ".5", ".", "-", "1e", "NaN", "nan(1)", "-nan", "Infinity", "inf", "-Infinity", "1,5", "1 000", "(1)", "1-"),
    *("16777217", "3.4028236e38", "1e-46", "0." + "0" * 28 + "1", "0.30000000000000004", "\t5", "1\t", "١"),
]
TEXTS = [
    *("", "a", "Ёж", 'Müller, "A" & Söhne', "two\nlines", "two\r\nlines", "cr\rin", "\\.", "\\N", "NULL", "NA"),
    *("abc  ", "abcdefg", "😀", "tab\there", "t", "1", " 1", '"', '""', ",", "\n", "\n\n", "\x7f", "{}", "1 day", "-0"),
    *("\x00", "a\x1ab", "\x1a", "\ufeffa", "#no", "v", "\\", "'", "ü\u0308", "e-400"),
    "550e8400-e29b-41d4-a716-446655440000",
]
DAYS = [
    *("2026-01-02", "0001-01-01", "0000-01-01", "9999-12-31", "20260102", "2026-1-2", "2026-02-30", "infinity", "NA"),
    *("01.02.2026", "2026-01-02T00:00:00", "2024-02-29", "2026-01-02 ", "１０２６-01-02", "1582-10-10", "12026-01-02"),
    *("0044-03-15 BC", "2026-13-01", "2026-00-10", " 2026-01-02", "-2026-01-02", "2026/01/02", "today", "epoch"),
]
ZONES = ["", "Z", "z", "+00", "+0000", "+00:00", "-05:30", "+14:59", "+15:59", "+16", "-16:00", "+23:59", "+24", " +00"]
ZONES += ["-00:00", "+05:60", " UTC", " Europe/Berlin", "+5", "+05:", "+05:3", "+053000"]
TIMES = [
    *("03:04:05", "03:04", "03", "03:04:05.1", "03:04:05.123456", "03:04:05.1234567", "23:59:60", "24:00:00", "3:04"),
    *("23:59:59.999999", "25:00:00", "03:04:05.", "030405", "03:60", "03:04:05.1200000", "03:04:05,5", "03:04 PM", ""),
]
BOOLEANS = ["t", "f", "true", "false", "T", "TRUE", "yes", "on", "1", "0", "tr", " t", "y", "NA", "nul"]
KINDS = {
    **dict.fromkeys(("smallint", "integer", "bigint"), "whole"),
    **dict.fromkeys(("double precision", "real", "numeric", "numeric(8,2)", "numeric(5,0)", "numeric(20,3)"), "number"),
    **dict.fromkeys(("text", "varchar(5)", "char(4)"), "text"),
    **{"boolean": "boolean", "date": "day", "timestamp": "time", "timestamp(3)": "time"},
    **{"timestamptz": "time", "timestamptz(0)": "time", "small": "whole", "uuid": "text"},
}
OTHER_ARGS: list[dict[str, Any]] = [
    *({"null": words} for words in (["a"], ["NA", "7", ""], ["", "t", "0", "2026-01-02"])),
    *({"date_format": "%d.%m.%Y"}, {"decimal": ","}, {"true": ["yes"], "false": ["t"]}, {"comment": "#"}),
    *({"add": {"f": "file"}}, {"add": {"n": "line"}}, {"add": {"n": "line", "f": "file"}}, {"columns": {"v": "x"}}),
    *({"select": ["id", "v"]}, {"mode": "append"}, {"schema_change": "widen"}, {"schema_change": "add"}),
    *({"skip_footer": 1}, {"encoding": "cp1251"}, {"encoding": "utf-8"}, {"timezone": "Europe/Berlin"}),
]
ODD_LINES = [
    *(b"", b"  ", b"x", b'"a', b"#no", b"\\.", b"\x1a", b"1,2,3,4,5,6,7", b'"open\n', b"\xff", b'5" pipe', b"id,v"),
]


def value(chance: random.Random, kind: str, oddity: float) -> str:
    """A value for a column of this type; an odd one may be of any type."""
    if chance.random() < oddity:
        kind = chance.choice(["number", "text", "day", "time", "boolean"])
    odd = chance.random() < oddity * 3
    if kind in ("number", "whole"):
        usual = str(chance.randrange(-99, 100)) if kind == "whole" else f"{chance.randrange(9_999) / 100}"
        return chance.choice(NUMBERS) if odd else usual
    if kind == "boolean":
        return chance.choice(BOOLEANS if odd else BOOLEANS[:4])
    if kind == "day":
        return chance.choice(DAYS if odd else DAYS[:1])
    if kind == "time":
        zone, time = (chance.choice(ZONES), chance.choice(TIMES)) if odd else (chance.choice(ZONES[1:2]), TIMES[0])
        return f"2026-01-{chance.randrange(10, 32)}{chance.choice('T ')}{time}{zone}"
    return chance.choice(TEXTS if odd else TEXTS[:5])


def field(chance: random.Random, text: str, mark: str, oddity: float) -> str:
    """The value as CSV, mostly right."""
    if chance.random() < oddity / 4:
        return chance.choice([f'"{text}"', text, f'"{text}"x', f'x"{text}', f' "{text}"', '""'])
    if any(each in text for each in f'"\r\n{mark}') or (text and chance.random() < 0.1):
        return '"' + text.replace('"', '""') + '"'
    return text


def written(chance: random.Random, kinds: dict[str, str], begin: int, mark: str) -> bytes:
    """A file of these columns, with ids from there on."""
    oddity = chance.choice([0.0, 0.0, 0.003, 0.02, 0.1])
    end, zone = chance.choice(["\n", "\n", "\r\n"]), chance.choice([None, "", "Z", "+02"])
    lines = [mark.join(["id", *(f'"{name}"' for name in kinds)]).encode()]
    for number in range(begin, begin + chance.randrange(1, 40)):
        fields = [str(number if chance.random() > oddity / 4 else chance.choice([0, "", "x", '"1"']))]
        for kind in kinds.values():
            text = value(chance, KINDS[kind], oddity)
            if zone is not None and KINDS[kind] == "time" and chance.random() > oddity:
                text = f"2026-03-0{chance.randrange(1, 9)} 0{chance.randrange(9)}:00:00.5{zone}"
            fields.append(field(chance, text, mark, oddity) if chance.random() > 0.05 else "")
        fields += ["more"] * (chance.random() < oddity / 9)
        lines.append(mark.join(fields[: -1 if chance.random() < oddity / 9 else None]).encode("utf-8", "surrogatepass"))
        if chance.random() < oddity / 2:
            lines.append(chance.choice([*ODD_LINES, lines[0]]))
    return end.encode().join(lines) + (end.encode() if chance.random() < 0.8 else b"")


def loaded(job: Load, rows: Rows, args: dict[str, Any], make: str, **how: Any) -> list[Any]:
    """The end of a load, and what it leaves."""
    rows(f"DROP TABLE IF EXISTS t, t_rejects; {make}")
    try:
        result = job("load.files", args, **how)
    except NotReached:  # it was over before the crash
        return []
    counts = {name: number for name, number in (result.result or {}).items() if name not in ("seconds", "bytes")}
    left = [result.status, result.error, counts]
    for name, query in {
        "t": "SELECT to_jsonb(t)::text, t.id::text FROM t ORDER BY 1",
        "t_rejects": "SELECT to_jsonb(r) - ARRAY['job_id', 'at'] FROM t_rejects AS r",
    }.items():
        if rows(f"SELECT to_regclass('{name}')") != [(None,)]:
            # The guess of another encoding is by the rest of a chunk.
            left.append(sorted(re.sub(r"it reads as .*?(?=')", "", str(row)) for row in rows(query)))
    return left


def chosen(
    chance: random.Random, kinds: dict[str, str], more: list[dict[str, Any]]
) -> tuple[dict[str, Any], str, dict[str, int]]:
    """Random arguments of a load, the statement that makes its table or one that makes none, and where it is killed."""
    columns = ", ".join('"{}" {}'.format(name.replace('"', '""'), kind) for name, kind in kinds.items())
    args: dict[str, Any] = {"table": "t", "key": ["id"], "max_errors": chance.choice([0, 100, 100])}
    make, how = "SELECT", chance.randrange(4)
    if how == 0:
        make = f"CREATE TABLE t (id bigint PRIMARY KEY, {columns})"
    elif how < 3:
        args["types"] = {"id": "bigint", **kinds}
    if chance.random() < 0.4:
        args |= chance.choice(more)
        args["types"] = {"id": "bigint"} if {"columns", "select", "names"} & args.keys() else args.get("types", {})
    if chance.random() < 0.3:
        args |= {"mode": "append"}
        del args["key"]
        make = make.replace(" PRIMARY KEY", "")
    args["batch_rows"] = chance.choice([1, 5, 20_000, 20_000])
    return args, make, {"crash_at": chance.randrange(1, 9)} if chance.random() < 0.2 else {}


def compared(seed: int, job: Load, rows: Rows, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """All ways load one or two random files: by Arrow, in blocks, record by record; the results of them."""
    chance = random.Random(seed)
    kinds = {name: chance.choice([*KINDS]) for name in ("v", "w", "a b")[: chance.randrange(1, 4)]}
    if chance.random() < 0.9:  # the other types come as text
        kinds = {name: "text" if kind in ("small", "uuid") else kind for name, kind in kinds.items()}
    mark = chance.choice([",", ",", ";", "\t"])
    texts = [written(chance, kinds, begin, mark) for begin in (0, 50)[: chance.choice([1, 1, 2])]]
    for at in (0, 1):
        (folder / f"{at}.csv").write_bytes(texts[at % len(texts)])
    args, make, crash = chosen(chance, kinds, OTHER_ARGS)
    args |= {"path": f"{'?' if texts[1:] else 0}.csv", "delimiter": mark}
    sizes = chance.choice([10, 100, 400, 2**16]), chance.choice([1, 300, 2**21]), chance.choice([0, 2**30])
    with monkeypatch.context() as patch:
        patch.setattr(csv_file, "_CHUNK", sizes[0])
        patch.setattr(csv_file, "_COPIED_CHUNK", sizes[1])
        patch.setattr(csv_table, "PART_BYTES", 1)
        patch.setattr(csv_table, "_DIRECT_BYTES", 0 if crash else sizes[2])
        results = [loaded(job, rows, args, make, **crash)]
        patch.setattr(arrow_block, "reader", lambda *args: None)
        results.append(loaded(job, rows, args, make, **crash))
        patch.setattr(csv_file.CsvFile, "take", lambda self, shape: False)
        results.append(loaded(job, rows, args, make, **crash))
    if not all(results):
        return [], args
    if results[-1][0] == "failed":
        results = [result[:1] for result in results]  # batches of other rows have other first errors
    return results, args, make, texts


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, 60, 20)], ids=lambda each: f"from {each.start}")
def test_all_ways_leave_the_same(
    seeds: range, job: Load, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows("DROP DOMAIN IF EXISTS small; CREATE DOMAIN small AS smallint CHECK (VALUE < 50)")
    for seed in seeds:
        results, *what = compared(seed, job, rows, tmp_path, monkeypatch)
        assert not results or results[0] == results[1] == results[2], (seed, results, *what)


TYPES = {
    **{"id": "bigint", "s": "smallint", "d": "double precision", "r": "real", "n": "numeric", "m": "numeric(6,2)"},
    **{"b": "boolean", "x": "text", "c": "varchar(9)", "y": "date", "u": "timestamp", "z": "timestamptz"},
}
LINE = (
    '{},-7,0.1,1.5,123456789012345678901.10,2.5,t,"Ёж\n""",,2026-03-01,2026-03-01T02:03:04.5,2026-03-01 02:03:04+01\n'
)

ROW = '(7,-7,0.1,1.5,123456789012345678901.10,2.50,t,"Ёж\n""",,2026-03-01,"2026-03-01 02:03:04.5",'
ARGS: dict[str, Any] = {"path": "f.csv", "table": "t", "key": ["id"], "types": TYPES}


@pytest.fixture
def in_binary(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An element for each COPY in binary form; chunks are small."""
    seen: list[Any] = []
    copied = Table._copied_in_binary
    monkeypatch.setattr(Table, "_copied_in_binary", lambda *args: seen.append(args) or copied(*args))
    monkeypatch.setattr(csv_file, "_CHUNK", 2_000)
    monkeypatch.setattr(csv_file, "_COPIED_CHUNK", 2_000)
    monkeypatch.setattr(csv_table, "PART_BYTES", 2**15)
    return seen


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "f.csv"
    path.write_text(",".join(TYPES) + "\n" + "".join(LINE.format(number) for number in range(500)), "utf-8")
    return path


def test_plain_values_come_in_binary_form_alone(
    job: Load, rows: Rows, lines: Path, in_binary: list[Any], in_text: list[int]
) -> None:
    result = job("load.files", ARGS | {"add": {"line": "line"}})
    assert result.status == "succeeded", result.error
    [(first, line)] = rows("SELECT t::text, line FROM t WHERE id = 7")
    assert (first[: len(ROW)], line, bool(in_binary), sum(in_text)) == (ROW, 2 + 2 * 7, True, 0)


def test_a_small_file_and_one_without_pyarrow_come_as_text(
    job: Load, rows: Rows, lines: Path, in_binary: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dataloader.pipelines.arrow_block", None)  # its import raises ImportError
    monkeypatch.delattr("dataloader.pipelines.arrow_block")
    blocks, block = list[int](), csv_file.CsvFile._block

    def noted(self: csv_file.CsvFile, most: int) -> Any:
        found = block(self, most)
        blocks.append(found[1].records if found else 0)
        return found

    monkeypatch.setattr(csv_file.CsvFile, "_block", noted)
    assert job("load.files", ARGS).status == "succeeded"
    monkeypatch.setattr(csv_table, "PART_BYTES", 2**20)
    assert job("load.files", ARGS).status == "succeeded"
    assert (rows("SELECT count(*) FROM t"), in_binary) == ([(500,)], [])
    assert sum(blocks) > 900, "most of 1,000 records pass in blocks"


@pytest.mark.parametrize("size", [30, 20_000])
def test_a_wrong_record_costs_its_neighbours_alone_the_quick_way(
    size: int, job: Load, rows: Rows, lines: Path, in_binary: list[Any], in_text: list[int]
) -> None:
    text = lines.read_text("utf-8").replace("\n250,-7", "\n250,x").replace("\n400,-7", "\n400,40000")
    lines.write_text(text, "utf-8")
    result = job("load.files", ARGS | {"max_errors": 2, "batch_rows": size})
    assert result.status == "succeeded", result.error
    assert rows("SELECT line FROM t_rejects ORDER BY 1") == [(2 + 2 * 250,), (2 + 2 * 400,)]
    assert len(in_binary) > 15
    assert 0 < sum(in_text) < 200


@pytest.mark.usefixtures("rows", "lines", "in_binary")
def test_an_end_ends_the_thread_that_reads_ahead(context: Context) -> None:
    ends_its_threads(files.load_files(ARGS, context), 1)


@pytest.mark.parametrize(
    ("kind", "number", "is_refused"),
    [
        *(("numeric(18,4)", "1844674407370956", True), ("numeric(18,16)", "20260102", True)),
        *(("numeric(18,4)", "12345678901234.5678", False), ("numeric(20,3)", "12345678901234567.891", False)),
        *(("numeric(18,17)", "0.99999999999999999", False), ("numeric(18,18)", "0.987654321987654321", False)),
    ],
)
def test_a_number_has_all_its_digits_or_is_refused(
    kind: str, number: str, is_refused: bool, job: Load, rows: Rows, tmp_path: Path, in_binary: list[Any]
) -> None:
    rows(f"CREATE TABLE t (id bigint PRIMARY KEY, n {kind})")
    lines = "".join(f"{at},{number if at == 5_000 else '0.00'}\n" for at in range(6_000))
    (tmp_path / "f.csv").write_text(f"id,n\n{lines}")
    result = job("load.files", {"path": "f.csv", "table": "t", "key": ["id"], "max_errors": 1})
    assert (result.status, bool(in_binary)) == ("succeeded", True), result.error
    assert rows("SELECT line FROM t_rejects") == [(5_002,)] * is_refused
    assert rows("SELECT n::text FROM t WHERE n <> 0") == [(number,)] * (not is_refused)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("blank", ["{0}1,2{0}", "1,2{0}{0}3,4{0}", "1,2{0}{0}", "{0}", '"a{0}{0}",2{0}{0}1,2{0}'])
def test_a_blank_line_is_no_record(blank: str, end: str) -> None:
    read = arrow_block.reader(",", [], ["text", "text"], [], 0, [])
    assert read
    assert read(blank.format(end).encode(), 1) is None
    assert read(f'"a{end}{end}",2{end}1,2{end}'.encode(), 1)


@pytest.mark.parametrize("number", ["007", "-07"])
def test_a_guessed_integer_loses_no_zeros_behind_the_rows_of_the_guess(
    number: str, job: Load, rows: Rows, tmp_path: Path, in_binary: list[Any]
) -> None:
    lines = "".join(f"{at},{at}\n" for at in range(12_000))
    (tmp_path / "f.csv").write_text(f"id,v\n{lines}99999,{number}\n")
    args = {"path": "f.csv", "table": "t", "mode": "append"}
    result = job("load.files", args)
    assert "f.csv, line 12002: column v: a number" in str(result.error)
    assert in_binary
    assert job("load.files", args | {"types": {"v": "numeric"}}).status == "succeeded"
    assert rows("SELECT v FROM t WHERE id = 99999") == [(float(number),)]
