"""The promises of `load.files`: text as people have it becomes typed rows, or is refused with place and remedy."""

import bz2
import gzip
import importlib
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from judging import TYPES, Load, Rows, Run

from dataloader.pipelines import Context, PermanentError, csv_table, files, validated

Refused = Callable[..., str]


@pytest.fixture
def load(run: Run, rows: Rows, tmp_path: Path) -> Run:
    """Load these bytes into the table `t` by `id`, and return its rows as text, in their order."""

    def load(content: bytes, name: str = "f.csv", **args: Any) -> list[Any]:
        (tmp_path / name).write_bytes(content)
        run("load.files", path=name, table="t", **({"key": ["id"]} | args))
        return [tuple(row) for (row,) in rows("SELECT array(SELECT value FROM json_each_text(to_json(t))) FROM t")]

    return load


@pytest.fixture
def refused(load: Run, rows: Rows) -> Refused:
    """Load these bytes, which has to raise PermanentError and make no table, and return the error's text."""

    def refused(content: bytes, name: str = "f.csv", **args: Any) -> str:
        with pytest.raises(PermanentError) as caught:
            load(content, name, **args)
        assert rows("SELECT to_regclass('t')") == [(None,)]
        return str(caught.value)

    return refused


def zipped(members: dict[str, bytes], way: int = zipfile.ZIP_STORED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", way) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


def tarred(content: bytes) -> bytes:
    packed, member = io.BytesIO(), tarfile.TarInfo("f.csv")
    member.size = len(content)
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


# Dialects

CASES: dict[str, tuple[bytes, dict[str, Any], list[tuple[str | None, ...]]]] = {
    "semicolons are recognized": (b"id;a\n1;2,5\n2;3,5\n", {"decimal": ","}, [("1", "2.5"), ("2", "3.5")]),
    "tabs are recognized": (b"id\ta,b\n1\tx,y\n", {}, [("1", "x,y")]),
    "bars are recognized": (b"id|a\n1|x\n", {}, [("1", "x")]),
    "names in angle brackets": (
        b"<TICKER>,<PER>\nSBER,D\n",
        {"names": "snake", "key": ["ticker"]},
        [("SBER", "D")],
    ),
    "a line sep= is obeyed": (b"sep=|\nid|a;b\n1|2;3\n", {}, [("1", "2;3")]),
    "commas between thousands": (
        b'id,a\n1,"1,234.50"\n2,"(1,234,567.00)"\n3,7\n',
        {"thousands": ",", "types": {"a": "numeric"}},
        [("1", "1234.50"), ("2", "-1234567.00"), ("3", "7")],
    ),
    "a minus of typesetters": ("id,a\n1,−5\n".encode(), {"types": {"a": "int"}}, [("1", "-5")]),
    "blanks around numbers": (b"id, a\n1, 5\n2, 6 \n", {"types": {"a": "int"}}, [("1", "5"), ("2", "6")]),
    "empty quotes in numbers": (b'"id","a"\n"1","5"\n"2",""\n', {}, [("1", "5"), ("2", None)]),
    "null words": (b'id,a,b\n1,NA,NA\n2,"NA",5\n', {"null": ["NA"]}, [("1", None, None), ("2", "NA", "5")]),
    "numbers as null words": (b'id,a\n1,"-1"\n2,-1\n3,"5"\n', {"null": ["-1"]}, [("1", None), ("2", None), ("3", "5")]),
    "no quotes": (b'id,a\n1,"x\n2,y"z"\n', {"quote": ""}, [("1", '"x'), ("2", 'y"z"')]),
    "single quotes": (b"id,a\n1,'x, ''y'''\n2,\"z\n", {"quote": "'"}, [("1", "x, 'y'"), ("2", '"z')]),
    "an escape beside the delimiter": (
        b'id,a\n1,x\\,y\n2,"a\\"b, c"\n3,\\N\n',
        {"escape": "\\", "null": ["\\N"]},
        [("1", "x,y"), ("2", 'a"b, c'), ("3", None)],
    ),
    "an escape beside a literal quote": (
        b'id,a\n1,5" x \\""y\n2,\\""z\n',
        {"escape": "\\"},
        [("1", '5" x ""y'), ("2", '""z')],
    ),
    "an escape at the end": (b"id,a\n1,C:\\\n2,\"C:\\\\\"\n", {"escape": "\\"}, [("1", "C:\\"), ("2", "C:\\")]),
    "no header": (b"1,x\n2,y\n", {"header": False, "key": ["column_1"]}, [("1", "x"), ("2", "y")]),
    "comments": (b"# c\nid,a\n# \"x\n1,#2\n", {"comment": "#"}, [("1", "#2")]),
    "a footer": (b"id,a\n1,x\nSUM,2,3,4\n\nat \"noon\n", {"skip_footer": 2}, [("1", "x")]),
    "widths without a header": (
        "1  Käse ab  2026-01-05\n2           \n".encode(),
        {"widths": [3, 9, 10], "header": ["id", "a", "b"]},
        [("1", "Käse ab", "2026-01-05"), ("2", None, None)],
    ),
    "blanks as delimiter": (b'id   a\n1  "x y"\n2\t2"\n', {"delimiter": "whitespace"}, [("1", "x y"), ("2", '2"')]),
    "another character as delimiter": ("id¦a\n1¦x,y\n".encode(), {"delimiter": "¦"}, [("1", "x,y")]),
    "times without a zone": (
        b"id,a\n1,2026-03-05 14:30\n2,2026-07-05 14:30:00+00:00\n",
        {"timezone": "Europe/Berlin"},
        [("1", "2026-03-05T13:30:00+00:00"), ("2", "2026-07-05T14:30:00+00:00")],
    ),
    "midnight is a date": (b"id,a\n1,2026-03-05 00:00:00\n", {"types": {"a": "date"}}, [("1", "2026-03-05")]),
    "the usual words of booleans": (b"id,a\n1,Y\n2,n\n", {"types": {"a": "boolean"}}, [("1", "true"), ("2", "false")]),
    "selected and renamed": (
        b"ID,a,b\n1,x,y\n",
        {"columns": {"ID": "id", "b": "B b"}, "select": ["B b", "id"]},
        [("y", "1")],
    ),
    "added alone": (
        b"id,a\n1,x\n2,y\n",
        {"add": {"of": "file", "at": "line"}, "select": ["of"], "key": ["at"]},
        [("f.csv", "2"), ("f.csv", "3")],
    ),
    "files put together": (b"\xef\xbb\xbfid,a\r\n1,x\r\n\xef\xbb\xbfid,a\r\n2,y\r\n\x1a", {}, [("1", "x"), ("2", "y")]),
    "marks before quotes": (
        '\ufeff\ufeff"id","a"\n"1","x"\n\ufeff"id","a"\n\ufeff"2","y, z"\n'.encode(), {}, [("1", "x"), ("2", "y, z")]
    ),
    "a long text in the first line": (b"1," + b"x" * 140_000, {"header": ["id", "a"]}, [("1", "x" * 140_000)]),
    "marks beside each other that UTF-8 has too": (
        "id,a\n1,«Актёр»\u00a0— он\n".encode("cp1251"),
        {"encoding": "cp1251"},
        [("1", "«Актёр»\u00a0— он")],
    ),
    "the text form of COPY": (
        b"1\ta\\tb\\nc\\\\d\t\\N\n2\tx\\\ny\t\\\\N\n\\.\n",
        {"header": ["id", "a", "b"], "quote": "", "escape": "\\", "null": ["\\N"]},
        [("1", "a\tb\nc\\d", None), ("2", "x\ny", "\\N")],
    ),
    "the text form of COPY with a line end at a record's end": (
        b"1\ta\\\n\n2\tb\n",
        {"header": ["id", "a"], "quote": "", "escape": "\\", "null": ["\\N"]},
        [("1", "a\n"), ("2", "b")],
    ),
    "whole numbers with a point": (
        b"id,a\n1,3.0\n2,-5.00\n3,7\n",
        {"types": {"a": "int"}},
        [("1", "3"), ("2", "-5"), ("3", "7")],
    ),
    "a blank behind a quote": (b'id,a\n1,"x" \n2,y\n', {}, [("1", "x "), ("2", "y")]),
    "names of several lines": (b'"id\n","Amount\n(EUR)"\n1,2.5\n', {"names": "snake"}, [("1", "2.5")]),
    "names that nobody selects": (
        ("id,a,a,," + "n" * 70 + ",b\n1,2,3,4,5,6\n").encode(),
        {"select": ["id", "b"]},
        [("1", "6")],
    ),
    "a count of milliseconds decides no type": (
        b"id,at\n1,1772721240123\n",
        {"date_format": "epoch_ms"},
        [("1", "1772721240123")],
    ),
    "times of day": (
        b"id,at\n1,9:05 PM\n2, 24:00 \n3,09:05:00.5\n",
        {"types": {"at": "time"}, "date_format": "%Y%m%d"},
        [("1", "21:05:00"), ("2", "24:00:00"), ("3", "09:05:00.5")],
    ),
    "a form feed is no line end": (b"id;v,w\n1;x,q\x0cy,z\n", {}, [("1", "x,q\x0cy,z")]),
    "quoted line ends stay": (b'id,a,n\n1,"x\r\ny",1\n', {}, [("1", "x\r\ny", "1")]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_dialect(case: str, load: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    content, args, expected = CASES[case]
    monkeypatch.setenv("PGTZ", "UTC")
    assert load(content, **args) == expected


@pytest.mark.parametrize(
    ("date_format", "type_", "texts"),
    [
        (["%d.%m.%Y", "%d.%m.%Y %H:%M"], "date", {"05.03.2026": "2026-03-05"}),
        (["%d.%m.%Y", "%d.%m.%Y %H:%M"], "timestamp", {"05.03.2026 14:30": "2026-03-05T14:30:00"}),
        ("%G-W%V-%u", "date", {"2026-W10-4": "2026-03-05"}),
        ("%d-%b-%y %I.%M %p", "timestamp", {"05-MAR-26 01.34 PM": "2026-03-05T13:34:00"}),
        ([], "timestamptz", {"2026-03-05T14:30:00.1234560Z": "2026-03-05T14:30:00.123456+00:00"}),
        ("%Y%m%d.%H%M%S%f", "timestamp", {"20260305.143059123456": "2026-03-05T14:30:59.123456"}),
        ("%Y.%m%d%H%M%S.%f", "timestamp", {"2026.1212121212.1234567": "2026-12-12T12:12:12.123456"}),
        (
            "%Y-%m-%d %H:%M:%S.%f",
            "timestamp",
            {
                "2026-03-05 14:30:00.9999999": "2026-03-05T14:30:00.999999",
                "2026-03-05 14:30:00.5": "2026-03-05T14:30:00.5",
            },
        ),
        (
            "epoch",
            "timestamptz",
            {
                **{"1772721240": "2026-03-05T14:34:00+00:00", "-86400": "1969-12-31T00:00:00+00:00"},
                **{"1.7727E9": "2026-03-05T08:40:00+00:00", "2026-03-05 14:34Z": "2026-03-05T14:34:00+00:00"},
                "1772721240.1234567": "2026-03-05T14:34:00.123456+00:00",
            },
        ),
        (["epoch_us"], "timestamptz", {"1772721240123456": "2026-03-05T14:34:00.123456+00:00"}),
    ],
)
def test_times_by_a_format(
    date_format: Any, type_: str, texts: dict[str, str], load: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGTZ", "UTC")
    content = "".join(f"{number},{text}\n" for number, text in enumerate(texts))
    found = load(f"id,a\n{content}".encode(), date_format=date_format, types={"a": type_})
    assert found == [(str(number), read) for number, read in enumerate(texts.values())]


GUESSES: list[tuple[list[str], str]] = [
    (["1", "", "-20"], "bigint"),
    (["9223372036854775808"], "numeric"),
    (["1", "2.50"], "numeric"),
    (["01"], "text"),
    (["+1"], "text"),
    (["1e5"], "text"),
    (["-0"], "text"),
    (["1,5"], "text"),
    (["NaN"], "text"),
    (["true", "false"], "text"),
    (["12:30"], "text"),
    (["2026-01-05", "2024-02-29"], "date"),
    (["2026-02-30"], "text"),
    (["20260105"], "bigint"),
    (["01/02/2026"], "text"),
    (["2026-01-05 10:00", "2026-01-05T10:00:00.123456"], "timestamp without time zone"),
    (["2026-01-05 10:00:00.1234567"], "text"),
    (["2026-01-05", "2026-01-05 10:00"], "text"),
    (["2026-01-05T10:00:00Z", "2026-01-05 10:00+0100"], "timestamp with time zone"),
    (["2026-01-05 10:00:00 UTC", "2026-01-05 10:00:00.123456 UTC"], "timestamp with time zone"),
    (["2026-01-05T10:00:00.0000000", "2026-01-05T10:00:00.1234560"], "timestamp without time zone"),
    (["2026-01-05T10:00:00Z", "2026-01-05 10:00"], "text"),
    ([""], "text"),
    (["46085.5"], "numeric"),
]


def test_a_type_is_a_guess_that_loses_nothing(load: Run, rows: Rows) -> None:
    """Each of these lists is a column; a shorter one ends with nulls."""
    names = [f"c{at}" for at in range(len(GUESSES))]
    fields = zip_longest(*([f'"{value}"' for value in values] for values, _ in GUESSES), fillvalue="")
    lines = [f"{number},{','.join(line)}" for number, line in enumerate(fields)]
    load("\n".join([",".join(["id", *names]), *lines]).encode())
    found = dict(rows(TYPES))
    assert [(values, found[name]) for name, (values, _) in zip(names, GUESSES, strict=True)] == GUESSES


# Refusals: the line, the column, what the value is, the remedy

NEEDS_DICTIONARY = bytes.fromhex("28b52ffd2339a2bd490c61000069642c760a312c616263310a")


@pytest.mark.parametrize(
    ("content", "args", "reasons"),
    [
        (b"id,a\n1,x\n2,1.5\n", {"types": {"a": "numeric"}}, ["f.csv, line 2: column a: not a number", "null"]),
        (b"id,a\n1,1.234,56\n", {"types": {"a": "numeric"}}, ["line 2: 3 fields, but the header has 2", "quotes"]),
        (b"id;a\n1;1.234,56\n", {"types": {"a": "numeric"}}, ["line 2: column a:", 'decimal ","', 'thousands "."']),
        (b"id,a\n1,28/02/2026\n", {"types": {"a": "date"}}, ["line 2: column a: a date", "date_format"]),
        (b"id,a\n1,46085\n", {"types": {"a": "date"}}, ["column a: a number, not a date", '"excel"']),
        (b"id,a\n1,46085.5\n", {"types": {"a": "date"}, "date_format": "excel"}, ["column a: a time of day"]),
        (b"id,a\n1,2026-01-05 10:00\n", {"types": {"a": "timestamptz"}}, ["a: a time without its zone", "timezone"]),
        (b"id,a\n1,2026-01-05 10:00Z\n", {"types": {"a": "timestamp"}}, ["column a: a time zone", "timestamptz"]),
        (b"id,a\n1,2026-01-05 10:00\n", {"types": {"a": "date"}}, ["column a: a time of day", "timestamp"]),
        (b"id,a\n1,03/04/26\n", {"types": {"a": "timestamp"}}, ["two formats read differently", "date_format"]),
        (b"id,a\n1,maybe\n", {"types": {"a": "boolean"}}, ["column a: not a boolean", "true and false"]),
        (b"id,a\n1,2026-13-01\n", {"types": {"a": "date"}}, ["line 2: column a:", "out of range", "null"]),
        ("id,a\n1,x\n2,Łódź jest ładna\n".encode("cp1250"), {}, ["line 3", "0xA3, column a", "reads as cp1250"]),
        *(
            (f"id,a\n1,{text}\n".encode(encoding), {}, ["line 2", f"reads as {encoding}"])
            for encoding, text in {
                **{"koi8-r": "Москва", "cp1252": "Größe, schön und übel", "cp850": "Größe schön und übel"},
                **{"shift_jis": "東京タワー", "gb18030": "北京市海淀区中关村", "euc-kr": "서울특별시 강남구"},
                "cp1253": "Αθήνα και Πάτρα",
            }.items()
        ),
        (b"id,a\n1,x\n", {"types": {"b": "text"}}, ["types: b should be among the columns of f.csv: id, a"]),
        (b"id,a\n1,x\n", {"select": ["b"]}, ["select: b should be among"]),
        (b"id,a\n1,x\n", {"columns": {"A": "b"}}, ["columns: A should be in the header, which has id, a"]),
        (b"id,a\n1,x\n", {"add": {"a": "now"}}, ["add: the files have a"]),
        (b"id,a\n1,x\n", {"key": ["b"]}, ["key: b should be among"]),
        (b"id,a\n1,x\n", {"select": ["a"]}, ["key: id should be among those of select: a"]),
        (b"id,a,a,\n1,x,y,z\n", {}, ["header: ", "column 4 has no name", 'columns 2 and 3 are named "a"', "snake"]),
        ("id,a\n1,x\n".encode("utf-16-le"), {}, ["f.csv, line 1: header: ", 'is the encoding "utf-16-le"']),
        ("id,a\n1,x\n2,é\n".encode(), {"encoding": "cp1252"}, ["line 3: is utf-8 text, column a", "be utf-8"]),
        (b"\xff\xfei\0d\0", {"encoding": "utf-8"}, ["byte order mark of utf-16"]),
        (bz2.compress(b"id\n1\n"), {}, ["f.csv is packed by bzip2", "unpack"]),
        (tarred(b"id\n1\n"), {}, ["f.csv is a tar archive", "unpack"]),
        (gzip.compress(b"id,a\n1,x\n", mtime=0)[:-9], {}, ["f.csv: the packed file", "again"]),
        (b"id,a\n1,x\n", {"types": {"a": "text; DROP TABLE x"}}, ["types.a: should be a type"]),
        (b"id,a\n1,x\n", {"types": {"a": "nosuch"}}, ['type "nosuch" does not exist']),
        (b"id,a\n1,x\n", {"decimal": ",", "thousands": ","}, ["thousands: should differ"]),
        *(
            (b"id,a\n1,x\n", {"date_format": text}, ["date_format: should"])
            for text in ("d/m/y", "%d%m", "%Y-%W", "%Y-%m-%d %H:%M %Z", "%Y-%m-%d %I:%M", "%Y-%m-%d %H:%M %p", "%H:%M")
        ),
        (b"id,a\n1,x\n", {"null": "NA"}, ['null: Input should be a valid list, such as ["a"]']),
        (b"id,a\n1,x\n", {"timezone": "Berlin"}, ["timezone: should be the name of a time zone"]),
        (b"id;a\n1;0.123\n", {"types": {"a": "numeric"}, "thousands": ".", "decimal": ","}, ["column a: not a number"]),
        ("id,a\n1,5\u200b\n".encode(), {"types": {"a": "int"}}, ["not a number because of the character U+200B"]),
        (b"id,a\n1,1772668800\n", {"types": {"a": "timestamp"}}, ["column a: a number, not a date", "bigint"]),
        (b'id,a,b\n1,x,y\n2,"27" screen",5\n', {}, ["line 3: text behind the closing quote, column a;", "doubled"]),
        (b'id,a\n1,"say \\"yes\\" now"\n', {}, ["line 2: text behind the closing quote, column a;", "escape"]),
        (b"id^a\n1^x\n", {}, ["key: id should be among the columns of f.csv: id^a; is the delimiter right"]),
        ("\u200bid,a\n1,x\n".encode(), {}, ["columns of f.csv: <U+200B>id, a"]),
        ("id,cafe\u0301\n1,x\n".encode(), {"columns": {"caf\u00e9": "a"}}, ["header, which has id, cafe<U+0301>"]),
        (b"title\n\nid,a,a\n1,x,y\n", {"skip_rows": 1}, ["f.csv, line 3: header: columns 2 and 3"]),
        (b"id,a\n,\n", {}, ['line 2: null value in column "id"', "max_errors"]),
        # The reader and PostgreSQL refuse rows of one batch.
        (b"id,n\n1,99999999999\n2,x\n3,y\n", {"types": {"n": "int"}, "max_errors": 1}, ["line 3: column n: not a"]),
        (b"id,n\n1,1\n2,99999999999\n3,3\n4,x\n", {"types": {"n": "int"}}, ["line 3: column n: value"]),
        (
            b"id,n\n1,99999999999\n2,2\n3,99999999999\n4,x\n",
            {"types": {"n": "int"}, "max_errors": 1},
            ["line 4: column n: value"],
        ),
        ("id,a\n1,x\n".encode("utf-16")[:-1], {}, ["line 2", "not utf-16 text (0x0A, column a)", "is cut"]),
        ("id,a\x851,x\x85".encode("cp037"), {"encoding": "cp037"}, ["line 1: header: the control character U+0085"]),
        (b"id,a\n" + b"1,x\n" * 40_000 + "2,é\n".encode(), {"encoding": "cp1252"}, ["line 40002: is utf-8"]),
        ((",".join(["id", *(f"c{n}" for n in range(1600))]) + "\n").encode(), {}, ["f.csv: 1601 columns", "select"]),
        *(
            (b"id,a\n1," + text + b"\n", {"timezone": "Europe/Berlin", "types": {"a": "timestamptz"}} | how, ["clock"])
            for text, how in (
                (b"2026-03-29 02:30", {}),
                (b"2026-10-25T02:30:00", {}),
                (b"25.10.2026 02:30", {"date_format": "%d.%m.%Y %H:%M"}),
            )
        ),
        (b"Report\n\nid,a\n1,x\n", {}, ["key: id should be among", "Report; ", "skip_rows"]),
        (gzip.compress(gzip.compress(b"id\n1\n", mtime=0), mtime=0), {}, ["f.csv is packed twice by gzip", "unpack"]),
        (b"SQLite format 3\0" + bytes(99), {}, ["f.csv is an SQLite database", "load.database"]),
        (b"id,a,b\n1,x,y\nTotal,3\n", {}, ["line 3: 2 fields", "missing data for column b", "skip_footer"]),
        (b"Bank;DE12\nid;a;b\n1;x;y\n", {"key": ["Bank"]}, ["line 2: 3 fields, but the header has 2", "skip_rows"]),
        (b"1\x01a\n", {"header": ["id", "a"]}, ["line 1: 1 fields", "is the delimiter right"]),
        (b'{"id": 1}\n', {}, ["f.csv is JSON", 'format should be "json"']),
        (zipped({"a": b"id\n1\n"}), {}, ["f.csv is a zip archive", 'format should be "excel"']),
        (NEEDS_DICTIONARY, {}, ["f.csv: the packed file cannot be unpacked", "Dictionary"]),
        (b"id,a\n1,2026-01-05 10:00:00.1234567\n", {"types": {"a": "timestamp"}}, ["a: a time of more", "%f in date"]),
        (b"id,a\n1,20260105100000\n", {"types": {"a": "timestamp"}}, ["column a: a number, not a date", "%Y%m%d"]),
        (b"id,a\n1,2026/01/05\n", {"types": {"a": "date"}}, ["column a: not a date", '"%Y/%m/%d"']),
        (b"id,a\n1,$5\n", {"types": {"a": "numeric"}}, ["column a: not a number because of the character $"]),
        *(
            (b"id,a\n1," + text + b"\n", {"types": {"a": "int"}}, ["line 2: column a: a number with a", "numeric"])
            for text in (b"3.5", b"1.23E+12")
        ),
        (
            "id,a\n1,Größe\n".encode("cp1252") + "2,Fest 🎉\n".encode(),
            {"encoding": "cp1252"},
            ["line 3: is utf-8 text, column a", "max_errors"],
        ),
        (b"id,a\n1,1772668800000\n", {"types": {"a": "timestamptz"}}, ["column a: a number, not a date", '"epoch_ms"']),
        (b"id,a\n1,177266880000000000\n", {"types": {"a": "timestamptz"}, "date_format": "epoch"}, ["no format"]),
        (b"id,a\n1,1772668800\n", {"types": {"a": "timestamp"}, "date_format": "epoch"}, ["should have timestamptz"]),
        (b"id,a\n1,3. M\xc3\xa4rz 2026\n", {"types": {"a": "date"}, "date_format": "%d. %B %Y"}, ["English names"]),
        *(
            (f"id,a\n1,{text}\n".encode(), {"types": {"a": "timestamp"}, "date_format": form}, ["no format"])
            for text, form in {
                **{"202611121530": "%Y%m%d%H%M%S", "1112026": "%d%m%Y", "26111": "%y%m%d"},
                **{"12.11.2026 930": "%d.%m.%Y %H%M", "20261112153.5": "%Y%m%d%H%M.%f"},
            }.items()
        ),
        (b"id  a\n1\tx\n", {"widths": [3, 3]}, ["line 2: a tab", "blanks"]),
        (zipped({"mimetype": b"application/vnd.oasis.opendocument.spreadsheet"}), {}, ["of LibreOffice", ".xlsx"]),
        (b"<table><tr><td>1</td></tr></table>", {}, ["f.csv is XML", "save its table as .csv"]),
        (b"id,a,a,b\n1,2,3,4\n", {"select": ["id", "c"]}, ["select: c should be among", "id, a, (column 3), b"]),
        (b"id,ctid\n1,2\n", {}, ['f.csv, line 1: header: column 2 is named "ctid"', "columns"]),
        (b'id,n\n1,"12,50"\n', {"types": {"n": "money"}}, ['column n: not a number as the job says', 'decimal ","']),
        *(
            (f"id,a\n1,{text}\n".encode(), {"types": {"a": "time(3)"}, "date_format": "%Y%m%d"}, ["time of day alone"])
            for text in ("2026-03-05 10:00", "10:00+03", "now", "23:59:60", "10:00:00.1234567")
        ),
        (b"id,n\n1,-1.000\n", {"types": {"n": "int"}}, ["line 2: column n: a number with two readings; decimal"]),
        *(
            (b"id,a\n1," + text + b"\n", {"types": {"a": "date"}}, ["column a: not a date", "or types text"])
            for text in (b"Q1 2026", b"10000-01-01", b"today")
        ),
        (b'{"id": 1, "a": [1]}', {"format": "json", "types": {"a": "int[]"}}, ["malformed", "types or the table"]),
        (b"id,a\n1,x\n", {"format": "json"}, ["no valid JSON", 'format "text" reads CSV']),
        (b"1  x  too long\n", {"widths": [3, 3], "header": ["id", "a"]}, ["line 1: longer than the 6 characters"]),
    ],
)  # fmt: skip
def test_a_refusal(content: bytes, args: dict[str, Any], reasons: list[str], refused: Refused) -> None:
    error = refused(content, **args)
    assert all(reason in error for reason in reasons), error


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ("7.0,2026-01-05", "column a: a number with a"),
        ("00123,2026-01-05", "column a: a number in a form that it would lose"),
        ("5,05.01.2026", "column b: not such a"),
    ],
)
def test_a_late_value_that_a_guessed_type_would_lose_is_refused(
    late: str, reason: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SAMPLE_ROWS", 0)
    head = "".join(f"{n},7,2026-01-05\n" for n in range(files._SAMPLE_OF_A_FILE))
    error = refused(f"id,a,b\n{head}x{late}\n".replace("x", "9999,").encode())
    assert f"line {files._SAMPLE_OF_A_FILE + 2}: {reason}" in error
    assert "types should say it" in error


def workbook(rows: list[dict[str, Any]]) -> bytes:
    pytest.importorskip("python_calamine")
    book, packed = pytest.importorskip("openpyxl").Workbook(), io.BytesIO()
    for cells in [[*rows[0]], *([*row.values()] for row in rows)]:
        book.active.append(cells)
    book.save(packed)
    return packed.getvalue()


def table_of_parquet(rows: list[dict[str, Any]]) -> bytes:
    arrow, packed = pytest.importorskip("pyarrow"), io.BytesIO()
    importlib.import_module("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), packed)
    return packed.getvalue()


TYPED: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "f.jsonl": lambda rows: "\n".join(map(json.dumps, rows)).encode(),
    "f.xlsx": workbook,
    "f.parquet": table_of_parquet,
}


@pytest.mark.parametrize("name", ["f.jsonl", "f.xlsx"])
def test_a_number_beside_texts_has_one_reading(name: str, load: Run) -> None:
    written: dict[str, Any] = {"decimal": ",", "thousands": ".", "types": {"a": "numeric"}}
    content = TYPED[name]([{"id": 1, "a": 1.125}, {"id": 2, "a": "1.125"}])
    assert load(content, name, **written) == [("1", "1.125"), ("2", "1125")]


@pytest.mark.parametrize("name", TYPED)
def test_a_fraction_that_is_no_text_is_no_thousand_of_an_integer(name: str, refused: Refused) -> None:
    content = TYPED[name]([{"id": 1, "a": 1.125}])
    error = refused(content, name, decimal=",", thousands=".", types={"a": "int"})
    assert "1: column a: a number with a fraction" in error.replace("row 2", "row 1")


def test_a_whole_number_that_is_no_text_may_have_zeros_behind_its_point(load: Run) -> None:
    assert load(b'{"id": 1, "a": 3.000}', "f.jsonl", types={"a": "int"}) == [("1", "3")]


@pytest.mark.parametrize("name", ["f.xlsx", "f.parquet"])
def test_a_date_that_is_no_text_has_one_reading(name: str, load: Run) -> None:
    content = TYPED[name]([{"id": 1, "a": date(2026, 1, 2), "b": "2026-31-12"}])
    types = {"a": "timestamp", "b": "date"}
    assert load(content, name, date_format="%Y-%d-%m", types=types) == [("1", "2026-01-02T00:00:00", "2026-12-31")]


def test_a_text_beside_files_that_have_types_is_read_by_the_dialect(run: Run, rows: Rows, tmp_path: Path) -> None:
    folder(tmp_path, b_csv="id;a\n2;1.125\n3;2,5\n")
    (tmp_path / "in" / "a.jsonl").write_text('{"id": 1, "a": 1.125}\n')
    run("load.files", path="in", table="t", key=["id"], decimal=",", thousands=".")
    assert rows("SELECT id, a::text FROM t ORDER BY 1") == [(1, "1.125"), (2, "1125"), (3, "2.5")]


def test_wrong_rows_decide_no_type(load: Run, rows: Rows) -> None:
    load(b"id,a\n1,x\n   \n2,y\nSUM\n", max_errors=2)
    assert dict(rows(TYPES))["id"] == "bigint"


def test_a_table_that_is_there_decides_the_types(load: Run, rows: Rows) -> None:
    rows("CREATE TABLE t (id text PRIMARY KEY, n numeric(6,1), d date)")
    assert load(b'id,n,d\n007,"1.234,5",2026-01-05\n', decimal=",", thousands=".") == [("007", "1234.5", "2026-01-05")]


def test_a_column_of_a_domain_is_read_as_one_of_its_type(load: Run, rows: Rows) -> None:
    rows("CREATE DOMAIN date_only AS date; CREATE DOMAIN amount AS numeric(9,2) CHECK (value > 0)")
    rows("CREATE DOMAIN day AS date_only; CREATE TABLE t (id int PRIMARY KEY, d day, n amount)")
    with pytest.raises(PermanentError, match="line 2: column d: a date that two formats read differently"):
        load(b"id,d\n1,03/04/2026\n")
    written: dict[str, Any] = {"date_format": "%d/%m/%Y", "decimal": ",", "thousands": "."}
    assert load(b"id;d;n\n1;03/04/2026;1.234,5\n", **written) == [("1", "2026-04-03", "1234.50")]


# Several files


def folder(tmp_path: Path, **contents: str) -> None:
    for name, content in contents.items():
        path = tmp_path / "in" / name.replace("__", "/").replace("_csv", ".csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_the_folder_of_a_file_is_a_column_and_those_above_the_data_are_none(
    run: Run, rows: Rows, context: Context, tmp_path: Path
) -> None:
    data = tmp_path / "above=1"
    (data / "day=2026-03-01").mkdir(parents=True)
    (data / "day=2026-03-01" / "part-0.csv").write_text("id\n1\n")
    object.__setattr__(context, "data_dir", data)
    for path in ("day=2026-03-01/part-0.csv", "day=2026-03-01", "*/*.csv"):
        run("load.files", path=path, table="t", key=["id"])
        assert dict(rows(TYPES)) == {"id": "bigint", "day": "date"}
        assert rows("SELECT id, day::text FROM t") == [(1, "2026-03-01")]
        rows("DROP TABLE t")


@pytest.mark.parametrize(
    ("name", "how", "value"),
    [
        ("01.03.2026", {"date_format": "%d.%m.%Y"}, "2026-03-01"),
        ("2026-07-01 10:00", {"types": {"of": "timestamptz"}, "timezone": "Europe/Berlin"}, "2026-07-01 08:00:00+00"),
        ("1.125", {"decimal": ",", "thousands": "."}, "1125"),
        ("ja", {"types": {"of": "boolean"}, "true": ["ja"]}, "true"),
        ("NA", {"types": {"of": "int"}, "null": ["NA"]}, None),
    ],
)
@pytest.mark.parametrize("file", ["f.csv", "f.parquet"])
def test_the_folder_of_a_file_is_read_by_the_dialect(
    file: str,
    name: str,
    how: dict[str, Any],
    value: str | None,
    run: Run,
    rows: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGTZ", "UTC")
    (tmp_path / f"of={name}").mkdir()
    content = b"id\n1\n" if file == "f.csv" else TYPED[file]([{"id": 1}])
    (tmp_path / f"of={name}" / file).write_bytes(content)
    run("load.files", path=f"of={name}", table="t", key=["id"], **how)
    assert rows("SELECT of::text FROM t") == [(value,)]


def test_a_folder_with_two_readings_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "day=03.04.2026").mkdir()
    (tmp_path / "day=03.04.2026" / "f.csv").write_text("id\n1\n")
    with pytest.raises(PermanentError, match=r"day=03.04.2026/f.csv: column day: .* two formats read differently"):
        run("load.files", path="day=*/*", table="t", key=["id"], types={"day": "date"})


@pytest.mark.parametrize("path", ["in/_new", "in/_new/*.csv", "in/_new/[xy].csv"])
def test_what_a_path_names_is_data_by_any_name(path: str, run: Run, rows: Rows, tmp_path: Path) -> None:
    folder(
        tmp_path, **{"_new/x.csv": "id\n1\n", "_new/_y.csv": "id\n2\n", "_new/.z.csv": "id\n3\n", "_new/~$w.csv": "?"}
    )
    run("load.files", path=path, table="t", key=["id"])
    assert rows("SELECT id FROM t") == [(1,)]


def test_a_link_and_its_file_are_one(run: Run, rows: Rows, tmp_path: Path) -> None:
    folder(tmp_path, a_csv="id\n1\n")
    (tmp_path / "in" / "latest.csv").symlink_to("a.csv")
    for path in ("in", "in/*.csv"):
        assert run("load.files", path=path, table="t", key=["id"])[-1]["processed"] == 1


@pytest.mark.parametrize("path", ["../out/*.csv", "in/*.nosuch", "link/*.csv", "*/../../out/*"])
def test_a_pattern_without_files_below_the_data_folder(path: str, run: Run, context: Context, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret.csv").write_text("id\n1\n")
    data = tmp_path / "data"
    (data / "in").mkdir(parents=True)
    (data / "link").symlink_to(tmp_path / "out")
    object.__setattr__(context, "data_dir", data)
    with pytest.raises(PermanentError, match="path: ") as caught:
        run("load.files", path=path, table="t", key=["id"])
    assert "secret" not in str(caught.value)


def test_a_file_with_other_columns_is_named(run: Run, tmp_path: Path) -> None:
    folder(tmp_path, a_csv="id\n1\n", b_csv="id,more\n2,x\n")
    with pytest.raises(
        PermanentError, match=r'in/a.csv and in/b.csv have different columns: more.*schema_change "add"'
    ):
        run("load.files", path="in", table="t", key=["id"])


def test_a_load_fails_for_now_where_a_file_was_replaced_before_its_turn(
    run: Run, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path, a_csv="id,x\n1,a\n", b_csv="id,x\n2,b\n")
    begin = csv_table.load

    def late(*args: Any, **how: Any) -> Any:
        folder(tmp_path, b_csv="id,other\n2,b\n")
        return begin(*args, **how)

    monkeypatch.setattr(csv_table, "load", late)
    with pytest.raises(RuntimeError, match=r"a program wrote to in/b\.csv"):
        run("load.files", path="in", table="t", key=["id"])
    assert rows("SELECT to_regclass('t')") == [(None,)]


def test_an_error_names_the_file_and_its_line(run: Run, tmp_path: Path) -> None:
    folder(tmp_path, a_csv="id,n\n1,1\n2,2\n", b_csv='id,n\n3,"3"\n4,x\n', c_csv="id,n\n5,5\n")
    for batch_rows in (1, 20_000):
        with pytest.raises(PermanentError, match=r"in/b.csv, line 3: column n: not a number"):
            run("load.files", path="in", table="t", key=["id"], types={"n": "int"}, batch_rows=batch_rows)
    folder(tmp_path, b_csv="id,n\n3,3\n4,99999999999\n")
    with pytest.raises(PermanentError, match=r"in/b.csv, line 3: .*out of range for type integer"):
        run("load.files", path="in", table="t", key=["id"], types={"n": "int"})


def test_rejects_name_their_file_and_line(run: Run, rows: Rows, tmp_path: Path) -> None:
    folder(tmp_path, a_csv="id,n\n1,1\n2,x\n", b_csv="id,n\n3\n4,4\n5,99999999999\n")
    run("load.files", path="in", table="t", key=["id"], types={"n": "int"}, max_errors=3)
    assert rows("SELECT id FROM t ORDER BY id") == [(1,), (4,)]
    assert rows("SELECT file, line FROM t_rejects ORDER BY 1, 2") == [("in/a.csv", 3), ("in/b.csv", 2), ("in/b.csv", 4)]


def test_members_of_an_archive(load: Run, refused: Refused) -> None:
    members = {"x/a.csv": b"id,a\n1,x\n", "x/b.csv": b"id,a\n2,y\n", "__MACOSX/x/._a.csv": b"?", "x/.DS_Store": b"?"}
    assert "has no such member; it has x/a.csv" in refused(zipped(members), "f.zip", member="c.csv")
    assert load(zipped(members), "f.zip", member="x/b*") == [("2", "y")]
    assert sorted(load(zipped(members), "f.zip")) == [("1", "x"), ("2", "y")]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_with_too_many_members_or_one_name_twice_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in (("a.csv", "id\n1\n"), ("b.csv", "id\n2\n"), ("a.csv", "id\n3\n")):
            archive.writestr(name, content)
    assert "two members of the name a.csv" in refused(packed.getvalue(), "f.zip")
    monkeypatch.setattr(files, "_MAX_FILES", 1)
    assert "has 2 members" in refused(zipped({"a.csv": b"id\n1\n", "b.csv": b"id\n2\n"}), "f.zip")


def test_a_packed_file_by_its_content(load: Run) -> None:
    note = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"  # pzstd begins so
    assert load(note + bytes.fromhex("28b52ffd200529000069640a310a"), "f.csv") == [("1",)]
    assert load(gzip.compress(b"id\n1\n") + gzip.compress(b"2\n"), "f.csv") == [("1",), ("2",)]


# Parts


@pytest.mark.parametrize("names", [["f.csv"], ["a.csv", "b.csv"]])
def test_headers_within_a_file_are_skipped_and_counted(job: Load, tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("id,a\n1,x\nid,a\n2,y\nid,a\n")
    path = names[0] if len(names) == 1 else "."
    result = job("load.files", {"path": path, "table": "t", "key": ["id"]}).result
    assert (result["processed"], result["repeated_headers"]) == (2 * len(names), 2 * len(names))


@pytest.mark.parametrize("kind", ["json.gz", "zip"])
def test_the_expected_rows_of_a_packed_file_are_by_its_packed_bytes(
    kind: str, job: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_table, "PART_BYTES", 100_000)
    chance, number = random.Random(7), 20_000
    notes = [chance.randbytes(200).hex() for _ in range(number)]
    if kind == "json.gz":
        text = "".join(f'{{"id": {n}, "note": "{note}"}}\n' for n, note in enumerate(notes))
        packed = gzip.compress(text.encode())
    else:
        text = "id,note\n" + "".join(f"{n},{note}\n" for n, note in enumerate(notes))
        before, behind = chance.randbytes(4_000_000), chance.randbytes(4_000_000)
        packed = zipped({"a.csv": before, "m.csv": text.encode(), "z.csv": behind}, zipfile.ZIP_DEFLATED)
    (tmp_path / f"f.{kind}").write_bytes(packed)
    args = {"path": f"f.{kind}", "table": "t", "key": ["id"], "batch_rows": 1000}
    result = job("load.files", args | ({"member": "m.csv"} if kind == "zip" else {}))
    assert result.status == "succeeded", result.error
    expected = {step["processed"]: step["total"] for step in result.progress if step.get("processed", 0) > number / 2}
    assert len(expected) > 5
    assert {done: total for done, total in expected.items() if not 0.75 < total / number < 1.33} == {}


# Plans


@pytest.mark.parametrize(("name", "text"), [("f.csv", 'id,a\n1, "x, y"\n2,z\n'), ("f.jsonl", '{"id": 1}\n{"id":\n')])
def test_a_plan_hides_no_record_that_the_load_refuses(context: Context, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    args = {"path": name, "table": "t", "key": ["id"]}
    with pytest.raises(PermanentError, match=f"{name}, line 2: "):
        files.plan(validated(files.Files, args), context)
    assert len(files.plan(validated(files.Files, args | {"max_errors": 1}), context).rows) == 1


@pytest.mark.parametrize(("title", "rows_of"), [("Report", "id,name,v"), ("# station 7", "ts;temp;hum"), ("T", "a\tb")])
def test_rows_below_a_title_are_no_column_of_texts(refused: Refused, title: str, rows_of: str) -> None:
    error = refused("\n".join([title, *[rows_of] * 4, ""]).encode(), key=[title])
    assert "f.csv, line 2: " in error
    assert " fields, but the header has 1; " in error
    assert "skip_rows leaves out titles above" in error


def test_a_column_alone_may_have_some_marks(load: Run) -> None:
    assert load(b"note\na\nb, c\nd\n", key=["note"]) == [("a",), ("b, c",), ("d",)]


def test_the_header_alone_decides_where_it_has_a_delimiter(load: Run) -> None:
    text = b"id;a, b, c\n1;x, y\n2;x, y;\n3;x, y;;\n4;x, y;;;\n"
    assert load(text, columns={"a, b, c": "a"}) == [(str(n), "x, y") for n in range(1, 5)]
