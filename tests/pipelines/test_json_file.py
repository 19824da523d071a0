"""JSON as people have it, in the forms of a file, with numbers that no float holds."""

import datetime as dt
import gzip
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from judging import Load, Rows

from dataloader.pipelines import PermanentError, csv_table, json_file
from dataloader.pipelines.csv_table import Rejected
from dataloader.pipelines.files import Files
from dataloader.pipelines.json_file import JsonFile

Read = Callable[..., JsonFile]
Loaded = Callable[..., list[Any]]


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """The file of these bytes."""
    with ExitStack() as opened:

        def read(text: str | bytes) -> JsonFile:
            (tmp_path / "f.json").write_bytes(text if isinstance(text, bytes) else text.encode())
            file = opened.enter_context((tmp_path / "f.json").open("rb"))
            return JsonFile("f.json", file.fileno(), file, Files(path="f.json", table="t", key=["id"]))

        yield read


@pytest.fixture
def loaded(tmp_path: Path, job: Load, rows: Rows) -> Loaded:
    """What is in the table after the load of these bytes; raises the error of a load that fails for good."""

    def loaded(text: str | bytes, query: str = "SELECT * FROM t ORDER BY 1", **args: Any) -> list[Any]:
        (tmp_path / "f.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        result = job("load.files", {"path": "f.json", "table": "t", "key": ["id"]} | args)
        if result.status != "succeeded":
            raise PermanentError(f"{result.status} {result.attempts} {result.error}")
        return rows(query)

    return loaded


def test_rows_within_an_object_are_named(loaded: Loaded) -> None:
    with pytest.raises(PermanentError, match="page, data; records should name the one that has the rows: page, data"):
        loaded('{"page": {"n": 1}, "data": [{"id": 1}]}')


@pytest.mark.parametrize(
    ("text", "records"),
    [
        ('{"data":[{"id":1},{"id":2}],"next":null}', "data"),
        ('\ufeff{"n": {"data": [7], "x": "}]"},\r\n "data": [{"id":1},\n{"id":2}] }\r\n', "data"),
        (
            '{"took": 3, "é\\"": [], "hits": {"total": {"value": 2}, "hits": [{"id":1},{"id":2}]}, "b": "%s"}',
            "hits.hits",
        ),
    ],
)
def test_the_rows_within_a_document_are_those_that_records_names(loaded: Loaded, text: str, records: str) -> None:
    assert loaded(text.replace("%s", "x" * 200_000), records=records) == [(1,), (2,)]


@pytest.mark.parametrize(
    ("text", "records", "error"),
    [
        ('{"data":[{"id":1}],"next":', "data", "line 1: the document around the records is no whole JSON"),
        ('{"data":[{"id":1}', "data", "line 1: the array has no end: is the file cut?"),
        ('{"data":[{"id":1}]}\n{"data":[{"id":2}]}', "data", "has more behind its end; each document should be a file"),
        ('{"data":[{"id":1}],"b":["' + '","' * 2**18 + '"]}', "data", "has 65536 characters or more behind them; they"),
        ('{"data":[[1, 2]]}', "data", "line 1: should be an object such as"),
        (
            '{"data":{"items":[{"id":1}]}}',
            "data",
            "records: data should be the way to an array of objects in the first",
        ),
        ('{"data":[{"id":1}]}', "nosuch", "records: nosuch should be the way"),
        ('{"data":"[", "b": 1}', "data.b", "records: data.b should be the way"),
        ('[{"id":1}]', "data", "records: data should be the way"),
        ('{"a": ' + "[" * 100_000, "data", "records: data should be the way"),
    ],
)
def test_a_document_without_such_records_is_refused(
    loaded: Loaded, text: str, records: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "LONGEST_RECORD", 2**16)
    with pytest.raises(PermanentError, match=re.escape(error)):
        loaded(text, records=records)


def test_a_word_for_null_is_null_in_each_column_and_decides_no_type(loaded: Loaded) -> None:
    text = (
        '{"id": 1, "a": "n/a", "b": "n/a", "c": {"d": "n/a"}, "e": 7}\n{"id": 2, "a": "x", "b": 5, "c": null, "e": 8}\n'
    )
    query = "SELECT id, a, b, c, e, pg_typeof(b)::text FROM t ORDER BY id"
    assert loaded(text, query, null=["n/a", "7"]) == [
        (1, None, None, {"d": "n/a"}, None, "bigint"),
        (2, "x", 5, None, 8, "bigint"),
    ]


@pytest.mark.parametrize("more", [{}, {"types": {"n": "numeric"}}, {"columns": {"id": "id"}}])
def test_a_page_without_rows_is_no_page_of_other_columns(
    job: Load, rows: Rows, tmp_path: Path, more: dict[str, Any]
) -> None:
    pages = {"a": "[]", "b": '[{"id":1,"n":2}]', "c": "[]", "d": '[{"id":3,"n":4}]', "e": "[]"}
    for name, page in pages.items():
        (tmp_path / f"{name}.json").write_text(f'{{"data":{page}}}')
    for mode in ("replace", "merge"):
        args = {"path": "*.json", "records": "data", "table": "t", "key": ["id"], "mode": mode}
        assert job("load.files", args | more).error is None
        assert rows("SELECT * FROM t ORDER BY id") == [(1, 2), (3, 4)]


def test_numbers_keep_every_digit(loaded: Loaded) -> None:
    text = '{"id": 1, "v": 36893488147419103233.10, "o": {"far": 1e400}, "n": 5}\n{"id": 2, "v": -2.5e-330, "n": -0}\n'
    found = loaded(text, "SELECT id, v::text, o::text, n, pg_typeof(id)::text, pg_typeof(n)::text FROM t ORDER BY id")
    assert found[0][:2] == (1, "36893488147419103233.10")
    assert found[0][2] == '{"far": 1' + "0" * 400 + "}"
    assert found[1][1] == "-0." + "0" * 329 + "25"
    assert found[0][3:] == (5, "bigint", "bigint")


@pytest.mark.parametrize(
    "text",
    [
        '[\n{"id": 1, "v": "a\\nb"},\n\n{"v": "", "id": 2}\n]\n',
        '{"id": 1, "v": "a\\nb"}{"id": 2, "v": ""}',
        '{"id": 1, "v": "a\\nb"},\r\n{"id": 2,\n "v": ""}\n\n',
        '\ufeff [{"id":1,"v":"a\\nb"},{"id":2,"v":""}]',
        '\x1e{"id":1,"v":"a\\nb"}\n\x1e{"id":2,"v":""}\n',
    ],
)
def test_lines_arrays_and_objects_behind_each_other_are_rows(loaded: Loaded, text: str) -> None:
    assert loaded(text) == [(1, "a\nb"), (2, "")]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "is empty (0 bytes)"),
        ("[]", "has no objects, so no columns: name these in `types`"),
        ("<html>", "is a page of HTML, perhaps the error of a server"),
        (
            "{'id': 1}",
            "line 1: no valid JSON: Expecting property name enclosed in double quotes; a JSON library should write",
        ),
        ('{"id": 1}\n{"id": 2, "v": "x', "line 2: no valid JSON: Unterminated string; is the file cut?"),
        ('{"id": 1, "v": "a\\u0000b"}', "line 1: column v: a zero byte (0x00), which PostgreSQL cannot hold"),
        ('[{"id": 1},\n{"id": 2}', "line 2: the array has no end: is the file cut?"),
        ('[{"id": 1},\n{"id":\n', "line 2: no valid JSON: Expecting value"),
        ('[{"id": 1}]\n{"id": 2}', "line 2: there is more behind the end of the array"),
        ('{"id": 1}'.encode("utf-16"), "line 1: is UTF-16, and should be UTF-8"),
        ('{"id": 1, "": 2}', "line 1: header: column 2 has no name"),
        ("[1, 2]", "line 1: should be an object such as"),
        ('{"id": 1, "v": ["\\ud800"]}', "line 1: column v: a byte that is not UTF-8, or half a character"),
        ('{"id": 1, "v": ["\\u0000"]}', "line 1: column v: unsupported Unicode escape sequence; max_errors rejects"),
        ('{"id": ' + "[" * 100_000, "line 1: nested too deeply"),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(loaded: Loaded, text: str, error: str) -> None:
    with pytest.raises(PermanentError, match=r"^failed 1 f\.json") as caught:
        loaded(text)
    assert error in str(caught.value)


@pytest.mark.parametrize("odd", [b"12345678", b"1e5", b"-5.25"])
@pytest.mark.parametrize("before", range(65_526, 65_536))
def test_a_number_in_a_line_is_one_fault_wherever_the_text_is_cut(read: Read, before: int, odd: bytes) -> None:
    file = read(b'{"id": 1}' + b"\n" * (before - 9) + odd + b'\n{"id": 2}')
    assert [isinstance(text, Rejected) for _, text in file.records(file.begin)] == [False, True, False]


@pytest.mark.parametrize("before", [0, 1, 2**16 // 10 - 1, 2**16 // 10, 2**16 // 10 + 1])
def test_a_line_without_an_object_is_named_wherever_the_text_is_cut(read: Read, before: int) -> None:
    line = b'{"id": 1}\n'
    file = read(line * before + b"?" * 2**16 + b"\n" + line * 9)
    [number] = [number for number, text in file.records(file.begin) if isinstance(text, Rejected)]
    [reason] = [text.reason for _, text in file.records(file.begin) if isinstance(text, Rejected)]
    assert (number, reason) == (before + 1, f"no valid JSON: Expecting value{json_file._MENDED}")


def test_a_value_that_is_nested_too_deeply_to_be_written_is_refused(read: Read) -> None:
    file = read('{"id": 1, "v": ' + "[" * 800 + "]" * 800 + '}\n{"id": 2, "v": []}')
    assert [isinstance(text, Rejected) for _, text in file.records(file.begin)] == [True, False]


def test_one_object_around_all_rows_is_refused_by_its_length(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "LONGEST_RECORD", 1_000)
    with pytest.raises(PermanentError, match="line 1: an object of over 1000 characters; the rows should be"):
        loaded(json.dumps({"data": [{"id": n} for n in range(20_000)]}))


def test_a_refused_line_costs_no_other_line(read: Read) -> None:
    file = read(b'{"id": 1}\n{"id": \n12\n{"id": "\xff"}\n{"id": "\\ud800"}\n{"id": "x}\n{"id": 2}')
    found = list(file.records(file.begin))
    assert [number for number, _ in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [text for _, text in found if not isinstance(text, Rejected)] == ["1", "2"]


def test_a_value_that_its_column_refuses_is_named_by_its_line(loaded: Loaded) -> None:
    text = '{"id": 1,\n "v": "a\\nb",\n "n": 1}\n{"id": 2, "n": "secret"}\n'
    with pytest.raises(PermanentError, match=r"^failed 1 f\.json, line 4: column n") as caught:
        loaded(text, types={"n": "integer"})
    assert "secret" not in str(caught.value)


def test_a_key_behind_the_sample_needs_its_type(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "PART_BYTES", 8)
    text = '{"id": 1}\n{"id": 2, "late": 5}\n'
    with pytest.raises(PermanentError, match="line 2: the first rows have no column late: name it in `types`"):
        loaded(text)
    assert loaded(text, types={"late": "integer"}) == [(1, None), (2, 5)]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("is_array", [True, False])
def test_reading_goes_on_at_any_place(read: Read, indent: int | None, is_array: bool) -> None:
    chance = random.Random(5)
    objects = [{"id": n, "s": "é\n" * chance.randrange(9_000), "o": {"n": [n, None]}} for n in range(60)]
    texts = [json.dumps(each, ensure_ascii=False, indent=indent) for each in objects]
    text = "[" + ",\n".join(texts) + "]" if is_array else "\n".join(texts)
    file = read(text)
    found = list(file.records(file.begin))
    assert len(found) == len(objects)
    for count in (0, 1, 29, 60):
        again = file.records(file.begin)
        first = [next(again) for _ in range(count)]
        assert first + list(file.records(file.place())) == found


def test_texts_go_into_a_column_of_json_as_json(loaded: Loaded, rows: Rows) -> None:
    rows("CREATE TABLE t (id bigint PRIMARY KEY, v jsonb, w text, other integer DEFAULT 7)")
    assert loaded('{"id": 1, "v": "7", "w": {"a": 1}}\n{"id": 2, "v": null, "w": "x"}') == [
        (1, "7", '{"a":1}', 7),
        (2, None, "x", 7),
    ]


def test_columns_are_chosen_renamed_and_typed(loaded: Loaded) -> None:
    text = '{"id": 1, "soldOn": "05.03.2026", "x": 1, "n": 5}\n'
    how: dict[str, Any] = {"columns": {"n": "amount"}, "names": "snake", "date_format": "%d.%m.%Y"}
    how |= {"types": {"sold_on": "date", "amount": "numeric(6,2)"}, "select": ["id", "sold_on", "amount"]}
    assert loaded(text, **how) == [(1, dt.date(2026, 3, 5), Decimal("5.00"))]


def test_packed_json_is_read(loaded: Loaded) -> None:
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    lines = [b'{"id": %d}\n' % n for n in range(3)]
    assert loaded(b"".join(map(zstd.compress, lines))) == [(0,), (1,), (2,)]
    assert loaded(gzip.compress(lines[0]) + gzip.compress(b'{"id": 5}')) == [(0,), (1,), (2,), (5,)]
    with pytest.raises(PermanentError, match="the packed file ends too early; if it is cut or damaged"):
        loaded(zstd.compress(lines[0] * 9)[:-4])
    with pytest.raises(PermanentError, match=r"the packed file cannot be unpacked .*; if it is cut or damaged"):
        loaded(zstd.compress(lines[0] * 9) + b"?" * 9)


def test_files_of_one_load_agree_about_json(job: Load, rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.json").write_text('{"id": 1, "v": {"n": 1}}')
    (tmp_path / "many" / "b.json").write_text('{"id": 2, "v": "7"}')
    result = job("load.files", {"path": "many", "table": "t", "key": ["id"]})
    assert result.status == "succeeded", result.error
    assert rows("SELECT * FROM t ORDER BY id") == [(1, {"n": 1}), (2, "7")]


def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some hundred bytes be the first part of a large file."""
    for module in (csv_table, json_file):
        monkeypatch.setattr(module, "PART_BYTES", 999)
    monkeypatch.setattr(json_file, "_CHUNK_BYTES", 500)
    monkeypatch.setattr(json_file, "_COPIED_BYTES", 500)


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize(
    ("usual", "late", "error"),
    [
        (*("1", '"007"'), "a text, but the rows before had only values of this type"),
        (*("1.5", '"12E4"'), "a text, but the rows before had only values of this type"),
        (*("true", '"yes"'), "a text, but the rows before had only values of this type"),
        (*("true", "1"), "not a boolean, but the rows before had only values of this type"),
        *(("1", "true", "not a number"), ("1", "1.5", "a number with a fraction")),
    ],
)
def test_a_late_value_of_another_class_is_refused(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rows: Rows, is_quick: bool, usual: str, late: str, error: str
) -> None:
    """The first part of a large file decides the types; PostgreSQL would read "007" as 7, and 1 as true."""
    large(monkeypatch)
    if not is_quick:
        monkeypatch.setattr(JsonFile, "take", lambda self, shape: False)
    lines = [f'{{"id":{n},"v":{usual}}}\n' for n in range(1, 100)]
    text = "".join([*lines, f'{{"id":100,"v":{late}}}\n'])
    with pytest.raises(PermanentError, match=f"line 100: column v: {error}"):
        loaded(text)
    assert rows("SELECT to_regclass('t')") == [(None,)]
    assert loaded(text, "SELECT v FROM t WHERE id = 100", types={"v": "text"}) == [(late.strip('"'),)]


def test_late_numbers_of_any_form_arrive(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    late = ["1e-05", "-0.0", "1E400", "12345678901234567890.5", "null"]
    text = "".join(f'{{"id":{n},"v":{late[n] if n < 0 else 1.5}}}\n' for n in [*range(100), *range(-len(late), 0)])
    found = loaded(text, "SELECT v FROM t WHERE id < 0 ORDER BY id", null=["-"])
    assert found == [(None if each == "null" else Decimal(each),) for each in late]
