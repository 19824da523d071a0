"""The promises of `load.csv`, by which each loader keeps its own: all rows or nothing, and the place of a bad row."""

import codecs
import csv
import io
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import LEFT, TYPES, Load, Rows, Run, fails_for_good
from psycopg.rows import scalar_row

from dataloader.pipelines import Context, PermanentError, csv_file, csv_table, resolve, steps
from dataloader.pipelines.csv_file import Layout

LOAD = {"table": "t", "key": ["id"]}
Refused = Callable[..., str]


@pytest.fixture
def load(run: Run, tmp_path: Path) -> Run:
    def load(content: bytes, **args: Any) -> list[Any]:
        (tmp_path / "f.csv").write_bytes(content)
        return run("load.csv", path="f.csv", **(LOAD | args))

    return load


@pytest.fixture
def refused(load: Run, dsn: str) -> Refused:
    """Load these bytes, which has to raise PermanentError and change no row, and return the error's text."""

    def refused(content: bytes, **args: Any) -> str:
        before = _tables(dsn)
        with pytest.raises(PermanentError) as caught:
            load(content, **args)
        assert _tables(dsn) == before
        return str(caught.value)

    return refused


def _tables(dsn: str) -> dict[str, Any]:
    """The rows of each table, with their versions."""
    names = (
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
        " AND relname <> 'dl_fence'"
    )
    with psycopg.connect(dsn, row_factory=scalar_row) as conn:
        found = conn.execute(names).fetchall()
        return {
            name: conn.execute(f'SELECT (xmin, t) FROM "{name}" AS t ORDER BY ctid'.encode()).fetchall()
            for name in found
        }


# Rows


def test_text_columns_as_in_the_header(load: Run, rows: Rows) -> None:
    load('id,Full name,"a ""b"" 50%",{x}\n1,Ёж,"two\nlines",""\n2,,,\n'.encode())
    assert rows('SELECT id, "Full name", "a ""b"" 50%", "{x}" FROM t ORDER BY id') == [
        ("1", "Ёж", "two\nlines", ""),
        ("2", None, None, None),
    ]
    assert {kind for _, kind in rows(TYPES)} == {"text"}


def test_only_what_differs_is_rewritten(load: Run, rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, a json, b numeric, kept text DEFAULT 'yes')")
    load(b'id,a,b\n1,"{""x"":1}",1.0\n2,[],\n')
    before = dict(rows("SELECT id, xmin FROM t"))
    load(b'id,a,b\n1,"{""x"":1}",1.0\n2,[],5\n3,[],6\n')
    after = dict(rows("SELECT id, xmin FROM t"))
    assert after[1] == before[1]
    assert after[2] != before[2]
    assert rows("SELECT id, b::text, kept FROM t ORDER BY id") == [(1, "1.0", "yes"), (2, "5", "yes"), (3, "6", "yes")]


def test_the_last_of_equal_keys_counts(load: Run, rows: Rows) -> None:
    for batch_rows in (1, 2, 5000):
        load(b"id,dl_line\n1,first\n2,only\n1,second\n1,last\n", batch_rows=batch_rows)
        versions = rows("SELECT id, dl_line, xmin FROM t ORDER BY id")
        load(b"id,dl_line\n2,only\n1,first\n1,last\n", batch_rows=batch_rows)
        assert rows("SELECT id, dl_line, xmin FROM t ORDER BY id") == versions
        assert [row[:2] for row in versions] == [("1", "last"), ("2", "only")]
        rows("DROP TABLE t")


def test_a_header_alone_makes_an_empty_table(load: Run, rows: Rows) -> None:
    assert load(b"id,a") == [{"processed": 0, "total": 0, "phase": "merging"}]
    assert rows("SELECT * FROM t") == []


# Forms of files


@pytest.mark.parametrize(
    ("content", "args", "expected"),
    [
        *(
            (mark + '"id",имя\r\n1,"Ёж\r\nи уж"\r\n'.encode(name), {"encoding": name}, [("1", "Ёж\r\nи уж")])
            for name, mark in (
                *(("utf-8", b""), ("utf-8", codecs.BOM_UTF8), ("UTF8", codecs.BOM_UTF8), ("utf-8-sig", b"")),
                *(("cp1251", b""), ("utf-16", b""), ("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", b"")),
                ("utf-32", b""),
            )
        ),
        *(
            ("id,a\n1,x\n".replace(",", delimiter).encode(), {"delimiter": delimiter}, [("1", "x")])
            for delimiter in (";", "\t", "|", ".", " ", "\\", "'", "%")
        ),
        (
            b'\r\n\nid,a\r\n\n1,x\n2,"y\r\n\n\rz"\r\n\r\n3,w\r4,v',
            {},
            [("1", "x"), ("2", "y\r\n\n\rz"), ("3", "w"), ("4", "v")],
        ),
        (b'id\n1\n\\.\n"a\n\\.\nb"\n2\n', {}, [("1",), ("2",), ("\\.",), ("a\n\\.\nb",)]),
        (b"b,id\n1,1\n1,2\n1,1\n", {"key": ["id", "b"]}, [("1", "1"), ("1", "2")]),
    ],
)
def test_forms_of_files(content: bytes, args: dict[str, Any], expected: list[Any], load: Run, rows: Rows) -> None:
    for _ in range(2):
        load(content, **args)
    assert rows('SELECT * FROM t ORDER BY id COLLATE "C"') == expected


@pytest.mark.parametrize(
    ("args", "text", "expected"),
    [
        ({}, "1.234,Jan-31-2026,t", "1.234 2026-01-31 true"),
        ({"decimal": ",", "thousands": "."}, "1.234,2026-01-31,t", "1234 2026-01-31 true"),
        ({"date_format": "%m.%d.%Y"}, "1,01.02.2026,t", "1 2026-01-02 true"),
        ({"true": ["ja"], "false": ["nein"]}, "1,2026-01-31,nein", "1 2026-01-31 false"),
    ],
)
def test_postgresql_alone_reads_values_unless_an_argument_says_how_they_are_written(
    args: dict[str, Any], text: str, expected: str, load: Run, rows: Rows
) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, n numeric, day date, ok boolean)")
    load(f"id,n,day,ok\n1,{text}\n".encode(), **args)
    assert rows("SELECT concat_ws(' ', n, day, ok::text) FROM t") == [(expected,)]


# Quotes


@pytest.mark.parametrize(
    ("content", "expected", "literal"),
    [
        (b'1,5" pipe\n2,6" pipe\n', [("1", '5" pipe'), ("2", '6" pipe')], 2),
        (b'1,5" pipe\n2,x\n', [("1", '5" pipe'), ("2", "x")], 1),
        (b'1,5" pipe\r2,6" pipe\r\n', [("1", '5" pipe'), ("2", '6" pipe')], 2),
        (b'1,5""6\n2,"7""8"', [("1", '5""6'), ("2", '7"8')], 2),
        (b'1, "x"\n2,"x" \n', [("1", ' "x"'), ("2", "x ")], 2),
        (b'1,"a\n5"" pipe"\n2,6" pipe\n', [("1", 'a\n5" pipe'), ("2", '6" pipe')], 1),
        (b'1,"a\n2,"",b\nc"\n', [("1", 'a\n2,",b\nc')], 0),
        (b'1,""\n2,""""\n3,\n4,"a,""b"",c"\n', [("1", ""), ("2", '"'), ("3", None), ("4", 'a,"b",c')], 0),
    ],
)
@pytest.mark.parametrize("delimiter", [",", "\\", "^"])
def test_a_quote_within_a_field_is_read_literally_and_counted(
    content: bytes, expected: list[Any], literal: int, delimiter: str, job: Load, rows: Rows, tmp_path: Path
) -> None:
    (tmp_path / "f.csv").write_bytes((b"id,v\n" + content).replace(b",", delimiter.encode()))
    result = job("load.csv", LOAD | {"path": "f.csv", "delimiter": delimiter})
    shown = [(key, value and value.replace(",", delimiter)) for key, value in expected]
    assert (result.status, rows("SELECT id, v FROM t ORDER BY id")) == ("succeeded", shown)
    done = {"processed": len(shown), "total": len(shown)}
    done |= {"literal_quotes": literal} if literal else {}
    assert result.result | done == result.result == result.value
    assert ("literal_quotes" in result.result) == bool(literal)


def test_the_log_has_a_warning_of_literal_quotes(load: Run, caplog: pytest.LogCaptureFixture) -> None:
    load(b'id,v\n1,5" pipe\n')
    assert "f.csv: 1 quotes within fields were read literally" in caplog.text


def test_a_literal_quote_in_the_header(job: Load, rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_bytes(b'id,5" pipes,"6"" pipes"\n1,2,3\n')
    assert job("load.csv", LOAD | {"path": "f.csv"}).result["literal_quotes"] == 1
    assert rows('SELECT id, "5"" pipes", "6"" pipes" FROM t') == [("1", "2", "3")]


_FIELDS = st.one_of(
    st.text(st.sampled_from('" x'), max_size=5),
    st.text(st.sampled_from('"",\n\r x'), max_size=5).map(lambda text: '"' + text.replace('"', '""') + '"'),
    st.text(st.sampled_from('"",\n\r x'), max_size=5),
)


@settings(max_examples=50)
@given(st.lists(st.tuples(_FIELDS, _FIELDS), min_size=1, max_size=6))
def test_the_rows_are_those_of_pythons_csv_or_the_error_names_the_line(
    load: Run, rows: Rows, records: list[tuple[str, str]]
) -> None:
    text = "id,a,b\n" + "\n".join(f"{n},{a},{b}" for n, (a, b) in enumerate(records))
    rows("DROP TABLE IF EXISTS t")
    expected = [row for row in csv.reader(io.StringIO(text, newline="")) if row][1:]
    is_valid = all(len(row) == 3 and row[0] for row in expected)
    error = ""
    try:
        load(text.encode())
    except PermanentError as e:
        error = str(e)
    if error:
        assert re.match(r"f\.csv, line \d+( to \d+)?: ", error)
        assert not is_valid or _is_irregular(text)
    else:
        found = rows("SELECT id, coalesce(a, ''), coalesce(b, '') FROM t")
        # Separators at a row's end are no data.
        assert sorted(found) == sorted({row[0]: (*row[:3], *filter(None, row[3:])) for row in expected}.values())


def _is_irregular(text: str) -> bool:
    """Whether Python's csv refuses it when it is strict: text behind a quoted field, or a field that does not end."""
    try:
        list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error:
        return True
    return False


# Faults in a file, and their places


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        (b"id,n\n1,x\n", "line 2:", "invalid input syntax for type integer"),
        (b"id,n\n\n\r\n1,1\n\n2,x\n", "line 6:", "column n: "),
        (b'id,n,s\n1,1,"a\nb\r\nc\rd"\n2,x,\n', "line 6:", "column n: "),
        (b'id,n,s\n1,1,"a\rb"\r\n\r\n2,x,\r\n', "line 5:", "column n: "),
        (b'id,n,s\n1,1,""\n2,x,"\n\n"\n3,,\n', "line 3 to 5:", "column n: "),
        (b'id,"n",s\n1,99999999999,\n', "line 2:", "out of range for type integer"),
        (b"id,n\n1,1\n,2\n", "line 3:", 'column "id"'),
        (b"id,n\n1,-1\n", "line 2:", 'check constraint "positive"'),
        (b"id,must\n1,1\n2,\n", "line 3:", 'column "must"'),
        (b'id,s\n1,"a\n2,b\n', "line 2:", "unterminated quote"),
        (b'id,s\n1,"a"\n\n2,"', "line 4:", "unterminated quote"),
        (b'id,s\n1,"a\n2,"b\n', "line 2 to 3:", "text behind the closing quote"),
        (b'id,s\n1,5" x\n2,"a\n3,b\n', "line 3:", "unterminated quote"),
        (b'id,n\n1,5" x\n', "line 2:", "column n: "),
        (b"id,s\n1,a\n2,\xff\n", "line 3:", "not utf-8 text"),
        (b'id,s\n1,"a\nb\r\n\xd0"\n', "line 2 to 4:", "not utf-8 text"),
        (b"id,s\n1,\xd0", "line 2:", "not utf-8 text"),
        (b"id,s\n1,a\n2,\0\n", "line 3:", "0x00"),
        (b'id,s\n1,"a\nb\0"\n', "line 2 to 3:", "0x00"),
    ],
)
def test_a_bad_record(content: bytes, where: str, reason: str, refused: Refused, rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, n int CONSTRAINT positive CHECK (n > 0), s text, must int)")
    rows("ALTER TABLE t ALTER must SET DEFAULT 0, ALTER must SET NOT NULL; INSERT INTO t VALUES (1, 7)")
    for batch_rows in (1, 5000):
        error = refused(content, batch_rows=batch_rows)
        assert error.startswith(f"f.csv, {where} ")
        assert reason in error


@pytest.mark.long
def test_errors_quote_no_values(refused: Refused, rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, a date, b varchar(3), c jsonb, d int NOT NULL)")
    for record in (b"secret,,,,1", b"1,secret,,,1", b"1,,secret,,1", b'1,,,"{""secret"":",1', b"1,,,,sec ret"):
        assert "sec" not in refused(b"id,a,b,c,d\n" + record)
    for record in (b"1,,sec,,", b"1,,sec", b",,sec,,1"):
        assert "sec" not in refused(b"id,a,b,c,d\n" + record)


@pytest.mark.usefixtures("in_parts")
def test_a_row_that_only_the_table_refuses(refused: Refused, rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, other int UNIQUE)")
    error = refused(b"id,other\n1,5\n2,5\n")
    assert error == 'f.csv into t: duplicate key value violates unique constraint "t_other_key"'
    assert rows(LEFT) == [(0,)]


@pytest.mark.parametrize("when", ["BEFORE INSERT ON t", "AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED"])
def test_a_function_of_the_table_that_raises_is_named_without_its_text(when: str, refused: Refused, rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, pin text); CREATE SCHEMA theirs")
    function = (
        "CREATE OR REPLACE FUNCTION theirs.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN RAISE 'wrong pin %', NEW.pin USING ERRCODE = '{}'; END$$"
    )
    rows(function.format("P0001"))
    kind = "CONSTRAINT TRIGGER" if "DEFERRABLE" in when else "TRIGGER"
    rows(f"CREATE {kind} refuses {when} FOR EACH ROW EXECUTE FUNCTION theirs.refuse()")
    for code in ("P0001", "45000", "23514", "22023", "UU000"):
        rows(function.format(code))
        reason = refused(b"id,pin\n1,canary4711\n")
        expected = f"f.csv into t: the function theirs.refuse raised an error ({code}), whose text may hold values"
        assert reason == expected


def test_a_function_of_a_check_that_raises_is_named_with_the_record(refused: Refused, load: Run, rows: Rows) -> None:
    rows("CREATE SCHEMA theirs; CREATE FUNCTION theirs.is_fit(pin text) RETURNS bool LANGUAGE plpgsql"
         " AS $$BEGIN RAISE 'wrong pin %', pin; END$$")  # fmt: skip
    rows("CREATE TABLE t (id int PRIMARY KEY, pin text CHECK (theirs.is_fit(pin)))")
    reason = refused(b"id,pin\n1,canary4711\n")
    assert "f.csv, line 2: the function theirs.is_fit raised an error (P0001), whose text may hold values" in reason
    assert "canary" not in reason
    load(b"id,pin\n1,canary4711\n", max_errors=1)
    assert rows("SELECT line FROM t_rejects") == [(2,)]


def test_the_text_of_a_record_is_no_name_of_a_column(refused: Refused, rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, v text, CHECK (id > 0))")
    assert "canary" not in refused(b'id,v\n-1,"x, y 3, z canary: 4"\n')
    assert "canary" not in refused(b'id,v\n-1,"x\nCOPY t, line 3, column canary: 4"\n')


@pytest.mark.parametrize("code", ["40001", "55P03", "57014", "53100"])
def test_a_function_that_raises_what_may_pass_is_tried_again(code: str, load: Run, rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY)")
    rows(f"CREATE SCHEMA theirs; CREATE FUNCTION theirs.busy() RETURNS trigger LANGUAGE plpgsql"
         f" AS $$BEGIN RAISE SQLSTATE '{code}'; END$$")  # fmt: skip
    rows("CREATE TRIGGER busies BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION theirs.busy()")
    with pytest.raises(psycopg.Error) as caught:
        load(b"id\n1\n")
    assert caught.value.sqlstate == code


@pytest.mark.long
def test_a_stray_quote_in_a_large_file(refused: Refused) -> None:
    lines = b"1,a\n" * (csv_table.LONGEST_RECORD // 4 + 1)
    assert "f.csv, line 2: unterminated quote" in refused(b'id,a\n1,"a\n' + lines)
    assert "line 2: longer than" in refused(b"id,a\n1," + b"a" * csv_table.LONGEST_RECORD)


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_bytes_of_another_encoding_without_a_line_end_take_bounded_memory(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_file, "LONGEST_RECORD", 2**17)
    with tempfile.TemporaryFile() as file:
        file.write(b"\x81" * 2**22)
        file.seek(0)
        with pytest.raises(PermanentError, match="line 1: longer than"):
            csv_file.CsvFile("f.csv", file.fileno(), csv_file.as_utf8(file, encoding), Layout(encoding=encoding))
        assert file.tell() <= 2**19


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"id," + b"x" * 64, "63 bytes"),
        (b'id,"x\n', "line 1: unterminated quote"),
        ("id\n1\n".encode("utf-16-le"), "byte order mark of utf-16"),
    ],
)
def test_a_bad_header_or_encoding(content: bytes, reason: str, refused: Refused) -> None:
    assert reason in refused(content, encoding="utf-16" if "utf-16" in reason else "utf-8")


def test_a_file_that_grows_while_it_is_read_is_tried_again(context: Context, rows: Rows) -> None:
    path = context.data_dir / "f.csv"
    path.write_bytes(b"id\n1\n2\n")
    running = steps(resolve("load.csv"), LOAD | {"path": "f.csv", "batch_rows": 1}, context)
    next(running)
    with path.open("ab") as file:
        file.write(b"3\n")
    with pytest.raises(RuntimeError, match="wrote to"):
        list(running)
    assert not rows("SELECT to_regclass('t')")[0][0]


# Tables that do not fit


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("TABLE t (id int PRIMARY KEY)", "lacks a"),
        ("TABLE t (id int, a int)", "unique index on exactly id"),
        ("TABLE t (id int, a int, PRIMARY KEY (id, a))", "unique index on exactly id"),
        ("TABLE t (id int UNIQUE DEFERRABLE, a int)", "unique index on exactly id"),
        ("TABLE t (id int, a int); CREATE UNIQUE INDEX ON t (id) WHERE a > 0", "unique index on exactly id"),
        ("TABLE of_t (id int, a int); CREATE VIEW t AS TABLE of_t", "should be a table"),
        ("TABLE t (id int PRIMARY KEY, a int GENERATED ALWAYS AS (1) STORED)", 'column "a"'),
        ("TABLE t (id int PRIMARY KEY, a int GENERATED ALWAYS AS IDENTITY)", 'column "a"'),
    ],
)
def test_a_table_that_does_not_fit(table: str, reason: str, refused: Refused, rows: Rows) -> None:
    rows(f"CREATE {table}")
    assert reason in refused(b"id,a\n1,1\n")


def test_unique_indexes_and_partitions_will_do(load: Run, rows: Rows) -> None:
    rows("CREATE TABLE t (id int, a int) PARTITION BY RANGE (id)")
    rows("CREATE TABLE t1 PARTITION OF t DEFAULT")
    rows("CREATE UNIQUE INDEX ON t (id) INCLUDE (a)")
    load(b"id,a\n1,1\n2,2\n")
    load(b"id,a\n1,1\n2,3\n")
    assert rows("SELECT * FROM t ORDER BY id") == [(1, 1), (2, 3)]


def test_other_schemas(load: Run, refused: Refused, rows: Rows) -> None:
    rows('CREATE SCHEMA "Other %s"')
    load(b"id\n1\n", table="Other %s.My {table}")
    assert rows('SELECT * FROM "Other %s"."My {table}"') == [("1",)]
    assert "no_such" in refused(b"id\n1\n", table="no_such.t")


def test_a_new_table_has_the_default_rights_of_its_schema(load: Run, rows: Rows) -> None:
    rows("CREATE SCHEMA theirs; ALTER DEFAULT PRIVILEGES IN SCHEMA theirs GRANT SELECT ON TABLES TO pg_monitor")
    rows("ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO PUBLIC")
    load(b"id\n1\n", table="theirs.t")
    acl = "(SELECT aclexplode(relacl) AS acl FROM pg_class WHERE oid = 'theirs.t'::regclass)"
    grantees = rows(f"SELECT DISTINCT (acl).grantee::regrole::text FROM {acl} AS rights")
    assert ("pg_monitor",) in grantees
    assert ("-",) not in grantees


# Arguments


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"colour": 1}, "colour: there is no such argument; there are "),
        ({"table": 1}, "table: "),
        ({"table": "dl_jobs"}, "table: should not be a table of the queue"),
        ({"table": "any.dl_job_events"}, "table: should not be a table of the queue"),
        ({"table": "pg_catalog.pg_authid"}, "table: should not be in a schema of PostgreSQL"),
        ({"table": "a.b.c"}, "table: should be name or schema.name"),
        ({"table": "x" * 64}, "table: should be name or schema.name"),
        ({"key": "id"}, "key: "),
        ({"key": []}, "key: "),
        ({"key": ["id", "id"]}, "key: should name each column once"),
        ({"delimiter": ""}, "delimiter: should be one"),
        ({"delimiter": '"'}, "delimiter: should be one"),
        ({"encoding": "latin-99"}, "encoding: should be the name of a text encoding"),
        ({"encoding": "base64"}, "encoding: should be the name of a text encoding"),
        ({"batch_rows": 1_000_001}, "batch_rows: "),
    ],
)
def test_wrong_arguments(args: dict[str, Any], reason: str, job: Load) -> None:
    fails_for_good(job("load.csv", LOAD | {"path": "f.csv"} | args), reason)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../outside.csv", "below the data folder"),
        ("inner/../../outside.csv", "below the data folder"),
        ("/etc/passwd", "below the data folder"),
        ("link.csv", "below the data folder"),
        ("folder_link/outside.csv", "below the data folder"),
        ("loop", "path: loop: "),
        ("missing.csv", "there is no such file"),
        ("f.csv/below", "there is no such file"),
        ("fifo", "regular file"),
        ("x" * 300, "too long"),
        ("a\0b", "path: "),
        ("", "path: "),
    ],
)
def test_paths(path: str, reason: str, run: Run, context: Context, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    object.__setattr__(context, "data_dir", folder)
    (tmp_path / "outside.csv").write_text("id\n1\n")
    (folder / "f.csv").write_text("id\n1\n")
    (folder / "link.csv").symlink_to(tmp_path / "outside.csv")
    (folder / "folder_link").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    with pytest.raises(PermanentError, match=reason):
        run("load.csv", path=path, **LOAD)


def test_links_and_absolute_paths_within_the_folder(run: Run, tmp_path: Path, rows: Rows) -> None:
    (tmp_path / "f.csv").write_text("id\n1\n")
    (tmp_path / "link.csv").symlink_to(tmp_path / "f.csv")
    for path in ("link.csv", str(tmp_path / "f.csv"), "./x/../f.csv"):
        run("load.csv", path=path, **LOAD)
    assert rows("SELECT * FROM t") == [("1",)]


# Two at once


@pytest.mark.usefixtures("silence_is_safe")
def test_two_loads_that_both_create_the_table(context: Context, rows: Rows, dsn: str) -> None:
    (context.data_dir / "f.csv").write_text("id\n1\n")
    with psycopg.connect(dsn) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtext('load.csv'), hashtext('\"public\".\"t\"'))")

        def while_it_waits() -> bool:
            other.execute(
                "CREATE TABLE IF NOT EXISTS t AS SELECT '0' AS id; CREATE UNIQUE INDEX IF NOT EXISTS u ON t (id)"
            )
            other.commit()
            return False

        context._run.must_stop = while_it_waits  # type: ignore[method-assign]
        list(steps(resolve("load.csv"), LOAD | {"path": "f.csv"}, context))
    assert rows("SELECT * FROM t ORDER BY id") == [("0",), ("1",)]
