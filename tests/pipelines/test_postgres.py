"""`load.postgres`: the rows of a query in another database, against real databases."""

import socket
from threading import Thread
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from judging import LEFT, ROWS, TYPES, Load, Rows, fails_for_good
from patience import until
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dataloader.pipelines import csv_table
from dataloader.testing import Result

CANARY = "canary-7c1"


@pytest.fixture
def source(dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test's database under the name `crm`; its schema `crm` has the tables of the source."""
    found = make_conninfo(dsn, options="-c search_path=crm", password=CANARY)
    monkeypatch.setenv("DL_SOURCE_CRM", found)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("CREATE SCHEMA crm")
    return found


@pytest.fixture
def load(job: Load, source: str) -> Load:
    """Load a query's rows into the table `t` by `id`; one attempt."""

    def load(query: str = "SELECT * FROM orders", how: dict[str, Any] | None = None, **args: Any) -> Result:
        wanted = {"source": "crm", "query": query, "table": "t", "key": ["id"], "batch_rows": 100} | args
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return job("load.postgres", wanted, **({"max_attempts": 1} | (how or {})))

    return load


@pytest.fixture
def orders(source: str, rows: Rows) -> list[Any]:
    """A table of the source with texts that CSV has to quote, and its rows."""
    rows("CREATE TABLE crm.orders (id int PRIMARY KEY, name text, price numeric(10, 2), at timestamptz, tags text[])")
    rows(
        "INSERT INTO crm.orders SELECT n, CASE n % 5 WHEN 0 THEN NULL WHEN 1 THEN '' WHEN 2 THEN E'Ёж,\"\\n\\r\\n' || n"
        " WHEN 3 THEN E'\\\\.' ELSE E'\\\\N' END, n / 7.0, '2026-03-29 01:30+01'::timestamptz + n * interval '1 hour',"
        f" ARRAY['a', NULL, n::text] FROM generate_series(1, {ROWS}) n ORDER BY n"
    )
    return rows("SELECT * FROM crm.orders ORDER BY id")


def loaded(rows: Rows) -> list[Any]:
    return rows("SELECT * FROM t ORDER BY id")


def test_a_new_table_has_the_types_of_the_source(load: Load, rows: Rows) -> None:
    query = (
        "SELECT 1 AS id, 2::int8 AS a, 'x'::varchar(3) AS b, 'y'::char(3) AS c, now() AS d, '{1}'::int[] AS e,"
        " 'f'::regclass::text AS f, '{}'::jsonb AS g, B'101' AS h, '1 day'::interval AS i, '{x}'::char(1)[] AS j"
    )
    assert load(query.replace("'f'::regclass::text", "'f'::text")).status == "succeeded"
    assert [kind for _, kind in rows(TYPES)] == [
        *("integer", "bigint", "character varying", "text", "timestamp with time zone", "integer[]"),
        *("text", "jsonb", "text", "interval", "text"),
    ]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *[("timestamp '2026-03-01 09:00'", kind) for kind in ("date", "time", "timetz")],
        *[("timestamptz '2026-03-01 09:00+03'", kind) for kind in ("date", "timestamp")],
        *(("timetz '09:00+03'", "time"), ("time '09:00'", "timetz")),
    ],
)
def test_a_time_that_the_column_would_lose_a_part_of_is_refused(load: Load, rows: Rows, value: str, kind: str) -> None:
    rows(f"CREATE TABLE t (id int PRIMARY KEY, v {kind})")
    fails_for_good(load(f"SELECT 1 AS id, {value} AS v"), "would lose a part; select CAST(v AS ")
    cast = f"CAST(timestamptz '2026-03-01 09:00+03' AS {kind})"
    assert load(f"SELECT 1 AS id, {cast} AS v").error is None


def test_a_float_keeps_its_digits_whatever_the_sources_role_shows(
    load: Load, rows: Rows, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DL_SOURCE_CRM", make_conninfo(source, options="-c extra_float_digits=-5"))
    assert load("SELECT 1 AS id, '3.4028235e38'::real AS a, 1 / 3.0::float8 AS b").error is None
    assert rows("SELECT a = '3.4028235e38'::real, b = 1 / 3.0::float8 FROM t") == [(True, True)]


def test_an_existing_tables_types_decide(load: Load, rows: Rows) -> None:
    rows("CREATE TABLE t (id text PRIMARY KEY, day date, more int DEFAULT 5)")
    assert load("VALUES (1, '2026-01-31')", key=["column1"]).error.startswith(
        "table: t should have the query's columns"
    )
    assert load("SELECT 1 AS id, '2026-01-31' AS day").status == "succeeded"
    assert rows("SELECT id, day::text, more FROM t") == [("1", "2026-01-31", 5)]


def test_a_key_of_several_texts_is_gone_on_behind(load: Load, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_table, "PART_BYTES", 1)
    rows("CREATE TABLE crm.keys (a text, b text, c text)")
    rows(
        "INSERT INTO crm.keys SELECT E'\"\\\\,''' || n % 7, E'\\n' || n, repeat('x', 200000)"
        " FROM generate_series(1, 20) n"
    )
    given = {"query": 'SELECT c AS "C", b, a FROM keys -- all', "key": ["a", "b"], "batch_rows": 3, "resume": True}
    result = load(**given, how={"crash_at": 8})
    assert (result.status, len(result.runs)) == ("succeeded", 2)
    assert result.runs[1].progress[0]["processed"] > 3
    assert rows("SELECT a, b FROM t ORDER BY a, b") == rows("SELECT a, b FROM crm.keys ORDER BY a, b")


def test_a_place_of_the_version_before_is_gone_on_behind(
    load: Load, orders: list[Any], rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That version had the skipped characters, none for a query, before the repeated headers."""
    monkeypatch.setattr(csv_table, "PART_BYTES", 1)
    job_id = uuid4()
    saved = load(resume=True, how={"crash_at": [21, 1], "job_id": job_id}).checkpoint
    rows("DELETE FROM dl_fence")  # for the test's second job has the claims of its first
    place = [*saved["place"][:4], 0, *saved["place"][4:]]
    result = load(resume=True, how={"checkpoint": saved | {"place": place}, "job_id": job_id})
    assert result.status == "succeeded"
    assert result.progress[0]["processed"] > saved["place"][2] > 0
    assert loaded(rows) == orders


@pytest.mark.parametrize("resume", [False, True])
def test_a_null_in_the_key_is_refused_also_behind_a_checkpoint(
    load: Load, orders: list[Any], rows: Rows, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    monkeypatch.setattr(csv_table, "PART_BYTES", 1)
    query = "SELECT id, name FROM orders UNION ALL SELECT NULL, 'x'"
    result = load(query, resume=resume, how={"crash_at": 21, "max_attempts": 2})
    assert result.status == "failed"
    assert f"source crm, row {ROWS + 1}: " in (result.error or "")
    assert rows(LEFT) == [(0,)]


def test_a_value_that_the_table_refuses_is_named_by_its_row(load: Load, orders: list[Any], rows: Rows) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, name int)")
    for bad in (3, 102, 103, 104, 257):
        query = f"SELECT id, CASE id WHEN {bad} THEN 'secret' || name END AS name FROM orders ORDER BY id"
        multi = query.replace("END AS", f"WHEN {bad} - 2 THEN E' 1\\n\\n\\n' END AS")
        for asked in (query, multi):
            error = f'source crm, row {bad}: column name: invalid input syntax for type integer: "..."'
            if bad % 5:
                assert load(asked).error == error
    assert loaded(rows) == []


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("SELECT 1 AS id; SELECT 2", "source crm: cannot insert multiple commands into a prepared statement"),
        ("SELECT 1 AS id) TO PROGRAM 'touch /tmp/x' --", "source crm: syntax error"),
        ("SELECT 1 AS id /*", "source crm: unterminated /* comment"),
        ("INSERT INTO orders VALUES (-1) RETURNING id", "source crm: "),
        ("SELECT nextval('number') AS id", "source crm: cannot execute nextval() in a read-only transaction"),
        ("DELETE FROM orders", "query: should be one SELECT, VALUES or TABLE, without parameters"),
        ("COMMIT", "query: should be one SELECT, VALUES or TABLE, without parameters"),
        ("SELECT $1::int AS id", "query: should be one SELECT, VALUES or TABLE, without parameters"),
        ("SELECT 1 AS id, 2 AS id", "query: the names of its columns: should name each column once"),
        ("SELECT 1 AS other", "key: id should be in the query"),
        ("SELECT * FROM nowhere", "source crm: relation"),
        ("SELECT id, (name || 'secret')::int AS n FROM orders", 'invalid input syntax for type integer: "..."'),
        ("SELECT 1 / (id - id) AS id FROM orders", "source crm: division by zero"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_query_that_the_source_refuses_changes_nothing(
    load: Load, orders: list[Any], rows: Rows, query: str, error: str, resume: bool
) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (5); CREATE SEQUENCE crm.number")
    result = load(query, resume=resume, how={"max_attempts": 3})
    fails_for_good(result, error)
    assert "secret" not in (result.error or "")
    assert (loaded(rows), rows(LEFT), rows("SELECT * FROM crm.orders ORDER BY id")) == ([(5, None)], [(0,)], orders)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"source": "../x"}, "source: String should match pattern"),
        ({"dsn": "postgresql://h/d"}, "dsn: there is no such argument; there are source, query, table, key"),
        ({"query": ""}, "query: String should have at least 1 character"),
    ],
)
def test_a_wrong_argument_is_named(load: Load, args: dict[str, Any], error: str) -> None:
    fails_for_good(load(how={"max_attempts": 3}, **args), error)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"port": "1"}, "source crm cannot be reached: Connection refused"),
        ({"dbname": "no_such_database"}, "source crm cannot be reached: does not exist"),
    ],
)
def test_a_source_that_cannot_be_reached_shows_nothing_of_its_dsn(
    load: Load, source: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], error: str
) -> None:
    given = conninfo_to_dict(source) | change
    if "port" in change:
        given["host"] = "127.0.0.1"
    monkeypatch.setenv("DL_SOURCE_CRM", make_conninfo("", **given))
    result = load(how={"max_attempts": 2})
    assert result.attempts == 2, "it is tried again"
    assert error in (result.error or "")
    assert not [part for part in (CANARY, str(given["dbname"]), str(given["user"])) if part in (result.error or "")]


def test_a_source_without_a_dsn_names_the_variable(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the variable DL_SOURCE_ERP is not set in the environment of this worker" in str(load(source="erp").error)
    monkeypatch.setenv("DL_SOURCE_ERP", f"no dsn {CANARY}")
    error = load(source="erp").error or ""
    assert "DL_SOURCE_ERP should be postgresql://" in error
    assert CANARY not in error


def test_a_lost_connection_is_tried_again(load: Load, orders: list[Any], rows: Rows, dsn: str) -> None:
    query = "SELECT pg_terminate_backend(pg_backend_pid()) AS no, id FROM orders"
    result = load(query, how={"max_attempts": 2})
    assert result.attempts == 2
    assert "Unreachable: source crm: " in (result.error or "")
    assert rows("SELECT to_regclass('t')") == [(None,)]


@pytest.mark.usefixtures("silence_is_safe")
@pytest.mark.parametrize("rows_first", [0, 1])
def test_a_silent_source_does_not_hold_up_a_stop(load: Load, rows: Rows, rows_first: int) -> None:
    """The query ends with the run, whether or not it has given a row."""
    slow = f"CASE WHEN n > {rows_first} THEN pg_sleep(600)::text END"  # a row of 20 kB is sent at once
    query = f"SELECT n AS id, repeat('x', 20000) AS x, {slow} AS y FROM generate_series(1, 3) n"
    assert load(query, how={"cancel_at": 2}).status == "canceled"
    alive = "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ '^dl-load:' AND state = 'active'"
    until(lambda: rows(f"{alive} AND datname = current_database()") == [(0,)], "the query's end")


@pytest.mark.parametrize("path", ["/nowhere/canary", __file__])
def test_a_certificate_that_cannot_be_read_is_named(load: Load, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            client, _ = server.accept()
            with client:
                client.recv(8)
                client.sendall(b"S")  # it takes TLS
                client.recv(1)

        thread = Thread(target=accept)
        thread.start()
        port = server.getsockname()[1]
        dsn = f"postgresql://u:{CANARY}@127.0.0.1:{port}/x?sslmode=verify-full&sslrootcert={path}"
        monkeypatch.setenv("DL_SOURCE_CRM", dsn)
        error = load().error or ""
        thread.join()
    words = "DL_SOURCE_CRM should name files of certificates and keys that this worker can read"
    assert f"source crm cannot be reached: {words}\n" in error
    assert "canary" not in error


# --- a cursor ---


SINCE = {"cursor": {"column": "at", "lag": "5 min"}}
STATE = "SELECT name, value FROM dl_state"
AT = "2026-06-01 12:{}:00+00"


@pytest.fixture
def changes(source: str, rows: Rows) -> Rows:
    """A table of the source with two rows that changed 12:00 and 12:30."""
    rows("CREATE TABLE crm.orders (id int PRIMARY KEY, at timestamptz, n numeric)")
    rows(f"INSERT INTO crm.orders VALUES (1, '{AT.format('00')}', 1), (2, '{AT.format('30')}', 1)")
    return rows


def test_a_value_behind_which_nothing_is_new_is_refused(load: Load, changes: Rows) -> None:
    changes("INSERT INTO crm.orders VALUES (3, 'infinity', 1)")
    fails_for_good(load(**SINCE), "has the value infinity, behind which nothing is new")
    assert load("SELECT * FROM orders WHERE at < 'infinity'", **SINCE).result["inserted"] == 2


def test_a_text_may_be_any_word_and_blanks_at_its_end_are_none(load: Load, changes: Rows) -> None:
    changes("ALTER TABLE crm.orders ADD word char(5) DEFAULT 'nan'")
    given: dict[str, Any] = {"cursor": {"column": "word"}}
    assert load("SELECT id, word FROM orders", **given).result["cursor"] == "nan"
    changes("INSERT INTO crm.orders VALUES (3, now(), 1)")
    assert load("SELECT id, word FROM orders", **given).result["processed"] == 3


def test_a_lag_below_0_loses_no_rows(load: Load, changes: Rows) -> None:
    load(cursor={"column": "id", "lag": -5})
    changes("INSERT INTO crm.orders VALUES (3, now(), 1)")
    assert load(cursor={"column": "id", "lag": -5}).result["inserted"] == 1


def test_a_load_that_fails_leaves_the_cursor_as_it_was(load: Load, changes: Rows) -> None:
    load(**SINCE)
    before = changes(STATE)
    changes("ALTER TABLE t ADD CHECK (n < 100)")
    changes("INSERT INTO crm.orders VALUES (3, now(), 100)")
    fails_for_good(load(**SINCE), "violates check constraint")
    assert changes(STATE) == before


def test_a_load_with_a_cursor_does_not_resume(load: Load, changes: Rows) -> None:
    error = "resume: a load with a cursor is one transaction"
    fails_for_good(load(cursor={"column": "at"}, resume=True), error)


def test_a_query_of_many_columns_is_appended(load: Load, rows: Rows) -> None:
    """The end of an append is a checkpoint, which has a limit."""
    names = ", ".join(f"now() AS column_with_a_long_but_ordinary_name_{n:04}" for n in range(1_000))
    load(f"SELECT 1 AS id, {names}", mode="append")
    assert rows("SELECT count(*) FROM t") == [(1,)]
