"""`load.database`: SQLite and DuckDB in files, and a MariaDB of the machine, into a table."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from getpass import getuser
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from typing import Any
from urllib.parse import quote

import duckdb
import psycopg
import pymysql
import pytest
from judging import TYPES, Load, Rows, fails_for_good
from patience import until
from psycopg.conninfo import make_conninfo

from dataloader.pipelines import database, state
from dataloader.testing import Result

PASSWORD = "se/cr@t-canary"
Shop = Callable[..., Result]  # a load from the source `shop`
Named = Callable[[str], Shop]  # of a URL
Made = Callable[..., Shop]  # of statements
Execute = Callable[[str], Any]  # SQL in a source
Origin = tuple[Shop, Execute]  # a load from a source, and SQL there
Mysql = tuple[Shop, Any]  # a load from a MariaDB, and a cursor of its root


@pytest.fixture
def shop(job: Load, monkeypatch: pytest.MonkeyPatch) -> Named:
    """Give a URL the name `shop`; the result loads from it into the table t."""

    def named(url: str) -> Shop:
        monkeypatch.setenv("DL_SOURCE_SHOP", url)

        def load(query: str, how: dict[str, Any] | None = None, **args: Any) -> Result:
            args = {"source": "shop", "query": query, "table": "t", "key": ["id"]} | args
            return job("load.database", args, **(how or {}))

        return load

    return named


@pytest.fixture
def sqlite(tmp_path: Path, shop: Named) -> Shop:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as conn, conn:
        conn.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, amount, at TEXT, raw BLOB)")
        rows = [(1, 9007199254740993, "2026-01-31 10:00:00", b"\0\xff"), (2, 0.1, None, None), (3, None, "", b"")]
        conn.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
    return shop(f"sqlite://{quote(str(tmp_path / 'shop.db'))}")


@pytest.fixture
def duck(tmp_path: Path, shop: Named) -> Made:
    """A load from a DuckDB in which these statements have been executed."""

    def made(*statements: str) -> Shop:
        with duckdb.connect(tmp_path / "shop.duckdb") as conn:
            for statement in statements:
                conn.execute(statement)
        return shop(f"duckdb://{tmp_path / 'shop.duckdb'}")

    return made


@pytest.fixture(scope="session")
def mariadb() -> Iterator[Callable[..., pymysql.Connection]]:
    """Connections to a MariaDB as its root, by a function."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    programs = ("mariadbd", "mariadb-install-db", "my_print_defaults")
    server, install, _ = found = [shutil.which(name, path=path) for name in programs]
    if not server or not install or None in found:
        pytest.skip("needs mariadb-server-core and mariadb-client-core")
    folder = Path(mkdtemp(prefix="dl-maria-"))
    with ExitStack() as stack:
        certificate = _certificate(folder)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        where = ["--no-defaults", f"--user={getuser()}", f"--datadir={folder / 'data'}", "--innodb-use-native-aio=0"]
        subprocess.run([install, *where, "--skip-test-db", "--auth-root-authentication-method=normal"], check=True)
        ready = [f"--socket={folder / 's'}", f"--ssl-cert={certificate}", f"--ssl-key={folder / 'key'}"]
        log = stack.enter_context((folder / "log").open("wb"))
        processes: list[subprocess.Popen[bytes]] = []
        port = 0

        def connect() -> pymysql.Connection | None:
            with suppress(pymysql.OperationalError):
                return pymysql.connect(host="127.0.0.1", port=port, user="root", autocommit=True)
            return None

        def start() -> pymysql.Connection | None:
            """Connect to the server; it gets another port when it has ended, for another process may have taken it."""
            nonlocal port
            if not processes or processes[-1].poll() is not None:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                command = [server, *where, *ready, "--bind-address=127.0.0.1", f"--port={port}"]
                processes.append(stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log)))
                stack.callback(processes[-1].terminate)
            return connect()

        with closing(until(start, "MariaDB to start")) as conn:
            cursor = conn.cursor()
            cursor.execute("CREATE DATABASE shop CHARACTER SET utf8mb4")
            cursor.execute(f"CREATE USER reader@'%' IDENTIFIED BY '{PASSWORD}'")
            cursor.execute("GRANT SELECT ON shop.* TO reader@'%'")
        yield lambda: until(connect, "MariaDB")


def _certificate(folder: Path) -> Path:
    """The certificate of 127.0.0.1, which has signed itself."""
    command = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=shop -addext subjectAltName=IP:127.0.0.1"
    to = ["-keyout", folder / "key", "-out", folder / "certificate"]
    subprocess.run(["openssl", *command.split(), *to], check=True, capture_output=True)
    return folder / "certificate"


def _url(port: int, scheme: str = "mysql", host: str = "127.0.0.1", more: str = "") -> str:
    """The URL of a MariaDB for its reader."""
    return f"{scheme}://reader:{quote(PASSWORD, safe='')}@{host}:{port}/shop{more}"


@pytest.fixture
def mysql(mariadb: Callable[..., pymysql.Connection], shop: Named) -> Iterator[Mysql]:
    """A load from the MariaDB as a role that may only read, and a cursor of its root."""
    with closing(mariadb()) as conn:
        cursor = conn.cursor()
        cursor.execute("USE shop")
        yield shop(_url(conn.port, "mariadb")), cursor
        cursor.execute("DROP TABLE IF EXISTS orders")


def test_sqlite_keeps_the_value_of_each_row_and_types_are_given(sqlite: Shop, rows: Rows) -> None:
    result = sqlite("SELECT * FROM orders WHERE id < 3", types={"at": "timestamp"})
    assert result.status == "succeeded", result.error
    assert result.result["inserted"] == 2
    assert rows("SELECT * FROM t ORDER BY id") == [
        (1, Decimal(9007199254740993), datetime(2026, 1, 31, 10), b"\0\xff"),  # noqa: DTZ001
        (2, Decimal("0.1"), None, None),
    ]
    assert sqlite("orders", mode="replace", types={"raw": "bytea"}, table="u").status == "succeeded"
    assert rows("SELECT id, at, raw FROM u ORDER BY id")[2] == (3, "", b"")


@pytest.mark.parametrize("value", ["'12:00:00+02'::timetz", "'101'::bit", "12345678901234567890::bignum"])
def test_a_type_that_duckdb_gives_in_part_is_refused(duck: Made, value: str) -> None:
    load = duck()
    fails_for_good(load(f"SELECT 1 AS id, {value} AS v"), "select CAST(v AS text) AS v")
    assert load(f"SELECT 1 AS id, CAST({value} AS text) AS v").error is None
    fails_for_good(load("SELECT 1 AS id; SELECT 2 AS id"), "query: should be the name of a table, or one SELECT")


@pytest.mark.parametrize("is_enum", [False, True])
def test_texts_of_duckdb_are_read_by_the_job_and_not_by_the_sessions_datestyle(
    duck: Made, rows: Rows, is_enum: bool
) -> None:
    texts = "CREATE TABLE o AS SELECT range AS id, '0' || 1 + range || '.03.2026' AS day, '1.5' AS n FROM range(3)"
    enums = [
        "CREATE TYPE days AS ENUM (SELECT DISTINCT day FROM o WHERE day IS NOT NULL)",
        "CREATE TYPE numbers AS ENUM ('1.5', 'n/a')",
        "ALTER TABLE o ALTER day TYPE days; ALTER TABLE o ALTER n TYPE numbers",
    ]
    load = duck(texts, "INSERT INTO o VALUES (3, '', 'n/a'), (4, NULL, NULL)", *enums * is_enum)
    types = {"day": "date", "n": "numeric"}
    reason = "source shop, row 1: column day: a date that two formats read differently; date_format should say which"
    fails_for_good(load("o", types=types, null=["n/a"]), reason)
    assert load("o", types=types, null=["n/a"], date_format="%d.%m.%Y").error is None
    assert rows("SELECT array_agg(day::text ORDER BY id), array_agg(n::text ORDER BY id) FROM t") == [
        (["2026-03-01", "2026-03-02", "2026-03-03", None, None], ["1.5", "1.5", "1.5", None, None])
    ]
    assert load("SELECT id + 10 AS id, '05.03.2026' AS day FROM o", max_errors=5).error is None
    assert rows("SELECT count(*), min(line) FROM t_rejects") == [(5, 1)]


@pytest.mark.parametrize("scheme", ["sqlite", "duckdb"])
def test_a_number_of_a_database_becomes_a_time_by_the_format(
    tmp_path: Path, shop: Named, rows: Rows, scheme: str
) -> None:
    connect = sqlite3.connect if scheme == "sqlite" else duckdb.connect
    with closing(connect(str(tmp_path / "shop.db"))) as conn:
        conn.execute("CREATE TABLE o (id int, v double precision)")
        conn.execute("INSERT INTO o VALUES (1, 1772721240), (2, 1772721240.5), (3, NULL), (4, 0)")
        conn.commit()
    load = shop(f"{scheme}://{tmp_path / 'shop.db'}")
    fails_for_good(load("o", types={"v": "timestamptz"}), "row 1: column v: a number, not a date; date_format")
    assert load("o", types={"v": "timestamptz"}, date_format="epoch").error is None
    assert rows("SELECT array_agg(extract(epoch FROM v)::float ORDER BY id) FROM t") == [
        ([1772721240, 1772721240.5, None, 0],)
    ]


def test_a_text_of_sqlite_is_read_for_a_domain_as_for_the_type_behind_it(sqlite: Shop, rows: Rows) -> None:
    rows("CREATE DOMAIN daily AS date; CREATE DOMAIN price AS numeric(9,1) CHECK (value > 0)")
    rows("CREATE TABLE t (id bigint PRIMARY KEY, day daily, n price)")
    query = "SELECT 1 AS id, '03/04/2026' AS day, '1.234,56' AS n"
    fails_for_good(sqlite(query), "source shop, row 1: column day: a date that two formats read differently")
    assert sqlite(query, date_format="%d/%m/%Y", decimal=",", thousands=".").error is None
    assert rows("TABLE t") == [(1, date(2026, 4, 3), Decimal("1234.6"))]
    fails_for_good(sqlite("SELECT 1 AS id, -1 AS n"), "price_check")


def test_a_blob_among_texts_is_written_as_bytea(sqlite: Shop, rows: Rows) -> None:
    assert sqlite("SELECT 1 AS id, x'00ff' AS v UNION SELECT 2, 'a'").error is None
    assert rows("TABLE t") == [(1, "\\x00ff"), (2, "a")]


def test_arguments_say_how_the_texts_of_sqlite_are_written(sqlite: Shop, rows: Rows) -> None:
    query = "SELECT 1 AS id, '05.03.2026' AS d, '1.234,50' AS n, 'ja' AS ok, '2026-03-05 12:00' AS at, '-' AS v"
    types = {"d": "date", "n": "numeric", "ok": "boolean", "at": "timestamptz", "v": "date"}
    words = {"date_format": "%d.%m.%Y", "decimal": ",", "thousands": ".", "true": ["ja"], "null": ["-"]}
    assert sqlite(query, types=types, **words).error is None
    noon = datetime(2026, 3, 5, 12, tzinfo=UTC)
    assert rows("TABLE t") == [(1, date(2026, 3, 5), Decimal("1234.50"), True, noon, None)]
    assert sqlite(query, types=types, timezone="Europe/Moscow", **words).error is None
    assert rows("SELECT at FROM t") == [(noon - timedelta(hours=3),)]


def test_a_word_for_null_decides_no_type(sqlite: Shop, rows: Rows) -> None:
    query = "SELECT 1 AS id, 1.5 AS v UNION SELECT 2, 'n/a'"
    assert sqlite(query, null=["n/a"]).error is None
    assert rows("SELECT v, pg_typeof(v)::text FROM t ORDER BY id") == [
        (1.5, "double precision"),
        (None, "double precision"),
    ]


def test_duckdb_has_its_types_also_without_rows(duck: Made, rows: Rows) -> None:
    load = duck(
        "CREATE TABLE orders AS SELECT 1 AS id, 1.5::decimal(10,2) AS amount, '2026-01-31'::date AS day,"
        " '2026-01-31 10:00:00+02'::timestamptz AS at, [1, NULL] AS list, uuid() AS uid, 'a'::ENUM('a') AS word,"
        " 10000000000000000000000000000000000001::hugeint AS huge, 'x'::blob AS raw,"
        " INTERVAL '1 month -2 days 3.000004 seconds' AS span"
    )
    assert load("SELECT * FROM orders WHERE id = 0", table="empty").status == "succeeded"
    assert load("orders").status == "succeeded"
    for table in ("t", "empty"):
        assert dict(rows(TYPES.replace("'t'", f"'{table}'"))) == {
            **{"id": "integer", "amount": "numeric(10,2)", "day": "date", "at": "timestamp with time zone"},
            **{"list": "jsonb", "uid": "text", "word": "text", "huge": "numeric(38,0)", "raw": "bytea"},
            "span": "interval",
        }
    assert rows("SELECT span::text FROM t") == [("1 mon -2 days +00:00:03.000004",)]
    [(_, amount, day, at, numbers, _, word, huge, raw, _)] = rows("TABLE t")
    assert (amount, day, at) == (Decimal("1.50"), date(2026, 1, 31), datetime(2026, 1, 31, 8, tzinfo=UTC))
    assert (numbers, word, huge, raw) == ([1, None], "a", 10**37 + 1, b"x")
    for query in ("SELECT * FROM read_csv('/etc/passwd')", "COPY orders TO '/tmp/orders.csv'", "SET threads = 1"):
        assert load(query).status == "failed"


def test_mariadb_keeps_each_value(mysql: Mysql, rows: Rows) -> None:
    load, cursor = mysql
    cursor.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, amount decimal(30,10), large bigint unsigned, at timestamp NULL,"
        " local datetime(6), day date, span time(3), doc json, raw blob, share double, name text)"
    )
    cursor.execute("SET time_zone = '+02:00'")
    cursor.execute(
        "INSERT INTO orders VALUES (1, 12345678901234567890.1234567891, 18446744073709551615, '2026-01-31 10:00:00',"
        " '2026-01-31 10:00:00.123456', '2026-01-31', '25:00:00.5', '{\"a\":1}', x'00ff', 0.1, 'é\"😀'),"
        " (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)"
    )
    assert load("orders", types={"doc": "jsonb"}).status == "succeeded"
    first, second = rows("SELECT * FROM t ORDER BY id")
    assert first == (
        *(1, Decimal("12345678901234567890.1234567891"), 2**64 - 1, datetime(2026, 1, 31, 8, tzinfo=UTC)),
        *(datetime(2026, 1, 31, 10, 0, 0, 123456), date(2026, 1, 31), timedelta(hours=25, milliseconds=500)),  # noqa: DTZ001
        *({"a": 1}, b"\0\xff", 0.1, 'é"😀'),
    )
    assert set(second[1:]) == {None}


def test_the_role_of_a_mariadb_changes_nothing_and_a_zero_date_is_named(mysql: Mysql, rows: Rows) -> None:
    load, cursor = mysql
    cursor.execute("SET sql_mode = ''")
    cursor.execute("CREATE TABLE orders (id int PRIMARY KEY, day date, at timestamp NULL)")
    cursor.execute("INSERT INTO orders VALUES (1, '2026-01-31', NULL), (2, '0000-00-00', '0000-00-00')")
    result = load("orders", types={"day": "date"}, key=["id"])
    fails_for_good(result, "source shop, row 2: column day: ")
    fails_for_good(load("DELETE FROM orders"), "source shop: ")
    fails_for_good(load("SET @x = 1"), "query: should be the name of a table, or one SELECT")
    cursor.execute("SELECT count(*) FROM orders")
    assert cursor.fetchall() == ((2,),)
    assert rows("SELECT to_regclass('t')") == [(None,)]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (_url(1), "source shop: Can't connect to MySQL server"),
        ("sqlite:///nowhere/shop.db", "source shop: unable to open database file; its URL is in DL_SOURCE_SHOP"),
        ("duckdb:///nowhere/shop.db", 'IO Error: Cannot open database "..."; its URL is in DL_SOURCE_SHOP'),
        ("mysql://u@h/x?ssl_ca=/nowhere", "ssl_ca should name PEM files that this worker can read (No such file"),
        (f"mysql://u@h/x?ssl_ca={__file__}", "DL_SOURCE_SHOP: ssl_ca should name PEM files that this worker can read"),
        ("mysql://u@h/x?ssl_cert=/no&ssl_key=/no&ssl_key_password=canary", "ssl_cert, ssl_key should name PEM files"),
    ],
)
def test_a_source_that_is_away_is_asked_again(shop: Named, url: str, error: str) -> None:
    result = shop(url)("orders", how={"max_attempts": 2})
    assert (result.status, result.attempts) == ("failed", 2)
    assert error in (result.error or "")
    assert "canary" not in str(result.error)


def test_a_wrong_password_is_refused_without_it(mysql: Mysql, shop: Named) -> None:
    _, cursor = mysql
    load = shop(f"mysql://reader:wrong-canary@127.0.0.1:{cursor.connection.port}/shop")
    result = load("orders", how={"max_attempts": 1})
    assert "source shop: Access denied for user '...'; its URL is in DL_SOURCE_SHOP\n" in (result.error or "")
    assert "canary" not in str(result.error)


@pytest.mark.parametrize(
    ("url", "args", "error"),
    [
        ("oracle://u:canary@h/x", {}, "DL_SOURCE_SHOP should be a URL of sqlite, duckdb, mysql, mariadb or postgresql"),
        ("mysql://u:canary/1@h/x", {}, "DL_SOURCE_SHOP should be a URL; percent-encode its password"),
        ("mysql://u:canary[1@h/x", {}, "DL_SOURCE_SHOP should be a URL; percent-encode its password"),
        ("mysql://u@127.0.0.1/x?ssl_cat=canary", {}, "DL_SOURCE_SHOP should have only ssl_ca"),
        ("mysql://u@127.0.0.1/x?sslmode=canary", {}, "DL_SOURCE_SHOP should have only ssl_ca"),
        ("sqlite:///x.db", {"speed": 9}, "speed: there is no such argument"),
        ("sqlite:///x.db", {"query": ""}, "query: String should have at least 1 character"),
    ],
)
def test_a_wrong_source_or_argument_is_named(shop: Named, url: str, args: dict[str, Any], error: str) -> None:
    fails_for_good(shop(url)(**{"query": "orders"} | args), error, "canary")


def test_a_type_of_no_column_is_named(sqlite: Shop) -> None:
    fails_for_good(sqlite("orders", types={"att": "date"}), "types: att should be in the query")


@pytest.mark.parametrize("url", ["mysql://h/x", "duckdb:///x.db"])
def test_a_missing_driver_names_the_extra(shop: Named, url: str, monkeypatch: Any) -> None:
    for module in ("pymysql", "duckdb"):
        monkeypatch.setitem(sys.modules, module, None)
    fails_for_good(shop(url)("orders"), "pip install 'dataloader-farm[databases]'")


@pytest.mark.usefixtures("silence_is_safe")
@pytest.mark.parametrize("more", [{}, {"cursor": {"column": "id"}}])
@pytest.mark.parametrize("kind", ["sqlite", "mysql", "duckdb"], indirect=True)
def test_a_cancellation_ends_the_query_of_a_silent_source(kind: str, more: dict[str, Any], origin: Origin) -> None:
    endless = "WITH RECURSIVE n AS (SELECT 1 AS id UNION ALL SELECT id + 1 FROM n) SELECT max(id) AS id FROM n"
    load, execute = origin
    execute("CREATE TABLE orders (id int)")  # a DuckDB begins with a file
    query = "SELECT sleep(3600) AS id" if kind == "mysql" else endless
    assert load(query, how={"cancel_at": 2}, **more).status == "canceled"


def test_a_cancellation_between_two_batches_leaves_mariadb_without_the_query(mysql: Mysql) -> None:
    load, cursor = mysql
    cursor.execute("CREATE TABLE orders AS SELECT seq AS id FROM seq_1_to_100000")
    assert load("orders", how={"cancel_at": 3}, batch_rows=1000).status == "canceled"
    of_reader = "SELECT count(*) FROM information_schema.processlist WHERE user = 'reader'"
    until(lambda: cursor.execute(of_reader) and cursor.fetchall() == ((0,),), "the session to end")


def test_a_ca_checks_the_server_of_a_mariadb(mysql: Mysql, shop: Named, tmp_path: Path) -> None:
    _, cursor = mysql
    cursor.execute("CREATE TABLE orders AS SELECT 1 AS id")
    own = cursor.execute("SHOW VARIABLES LIKE 'ssl_cert'") and cursor.fetchone()[1]
    wrong = _certificate(tmp_path)

    def load(host: str, query: str) -> Result:
        return shop(_url(cursor.connection.port, "mysql", host, f"?{query}"))("orders", how={"max_attempts": 1})

    assert load("127.0.0.1", f"ssl_ca={own}").status == "succeeded"
    assert "source shop: Can't connect" in (load("127.0.0.1", f"ssl_ca={wrong}").error or "")
    assert "source shop: Can't connect" in (load("localhost", f"ssl_ca={own}").error or "")
    assert load("localhost", f"ssl_ca={own}&ssl_verify_identity=false").status == "succeeded"


@pytest.mark.parametrize("query", ["VACUUM INTO '{}'", "ATTACH '{}' AS other", "PRAGMA soft_heap_limit = 1000000000"])
def test_a_query_changes_nothing_of_the_machine_by_sqlite(sqlite: Shop, tmp_path: Path, query: str) -> None:
    path = tmp_path / "new.db"
    error = "cannot VACUUM from within a transaction" if query.startswith("VACUUM") else "not authorized"
    fails_for_good(sqlite(query.format(path)), f"source shop: {error}")
    assert not path.exists()


def test_a_mysql_that_is_silent_is_asked_again(shop: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_CONNECT_SEC", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = shop(f"mysql://u@127.0.0.1:{silent.getsockname()[1]}/shop")("orders", how={"max_attempts": 2})
    assert (result.status, result.attempts) == ("failed", 2)
    assert "source shop: Lost connection to MySQL server" in (result.error or "")


@pytest.mark.usefixtures("silence_is_safe")
def test_a_cancellation_ends_a_query_whose_mysql_is_lost(
    mysql: Mysql, shop: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_CONNECT_SEC", 1)
    _, cursor = mysql
    with socket.create_server(("127.0.0.1", 0)) as host:  # it passes on the first connection only

        def serve() -> None:
            client, _ = host.accept()
            server = socket.create_connection(("127.0.0.1", cursor.connection.port))
            for source, target in ((client, server), (server, client)):
                Thread(target=pass_on, args=(source, target), daemon=True).start()

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with source, suppress(OSError):
                while data := source.recv(65536):
                    target.sendall(data)

        Thread(target=serve, daemon=True).start()
        assert shop(_url(host.getsockname()[1]))("SELECT sleep(3600) AS id", how={"cancel_at": 2}).status == "canceled"
    cursor.execute("KILL USER reader")


def test_a_float_of_mysql_is_refused_because_it_arrives_rounded(mysql: Mysql, rows: Rows) -> None:
    load, cursor = mysql
    cursor.execute("CREATE TABLE orders (id int, share float)")
    cursor.execute("INSERT INTO orders VALUES (1, 1234567)")
    fails_for_good(load("orders"), "query: MySQL rounds share, a FLOAT: select share + 0e0 AS share")
    assert load("SELECT id, share + 0e0 AS share FROM orders").status == "succeeded"
    assert rows("SELECT share FROM t") == [(1234567,)]


# --- each kind of source ---


CHANGES = "CREATE TABLE orders (id int PRIMARY KEY, changed {}, n int)"
AT = {"sqlite": "text", "duckdb": "timestamp", "mysql": "datetime(6)", "postgres": "timestamp"}
SELECTED = {"orders": "TABLE orders"}  # a query of PostgreSQL for the name of a table
TIME = "2026-06-01 12:{}"
SINCE = {"column": "changed", "lag": "5 min"}


@pytest.fixture(params=["sqlite", "duckdb", "mysql", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def origin(kind: str, request: pytest.FixtureRequest, tmp_path: Path, shop: Named, dsn: str) -> Origin:
    """A load from an empty source of each kind, and a function that executes SQL there."""
    path = tmp_path / f"source.{kind}"
    if kind == "postgres":
        source = make_conninfo(dsn, options="-c search_path=shop")

        def execute_there(text: str) -> None:
            with psycopg.connect(source, autocommit=True) as conn:
                conn.execute(text.encode())

        execute_there("CREATE SCHEMA shop")
        load = shop(source)
        return lambda query, *more, **args: load(SELECTED.get(query, query), *more, **args), execute_there
    if kind == "mysql":
        load, cursor = request.getfixturevalue("mysql")
        return load, lambda text: cursor.execute(text)
    if kind == "duckdb":
        return shop(f"duckdb://{path}"), lambda text: duckdb.connect(path).execute(text).close()
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("PRAGMA journal_mode = wal")

    def execute(text: str) -> None:
        with closing(sqlite3.connect(path)) as conn, conn:
            conn.execute(text)

    return shop(f"sqlite://{path}"), execute


REFUSED = {
    "mysql": [
        ("nowhere", "source shop: Table 'shop.nowhere' doesn't exist"),
        ("SELECT nothing FROM orders", "source shop: Unknown column 'nothing'"),
        ("SELEC 1", "source shop: You have an error in your SQL syntax"),
        ("SELECT n, n FROM orders", "columns: should name each column once"),
        ("SELECT n + 18446744073709551615 AS id FROM orders", "value is out of range in '...'"),
    ],
    "sqlite": [
        ("nowhere", "source shop: no such table: nowhere"),
        ("SELECT lost FROM orders", "source shop: no such column: lost"),
        ("SELECT 1; SELECT 2", "source shop: You can only execute one statement at a time"),
        ("DELETE FROM orders", "source shop: attempt to write a readonly database"),
        ("SELECT 1 AS id, CAST(x'ff' AS text) AS name", "source shop, row 1: column name: PostgreSQL has no text"),
    ],
    "duckdb": [
        ("nowhere", "Table with name nowhere does not exist"),
        ("SELECT n * n AS id FROM orders", "source shop: Out of Range Error: Overflow in multiplication of INT32 (..."),
        ("SELECT n::smallint AS id FROM orders", "source shop: Conversion Error: Type INT32 with value ..."),
        ("SELECT chr(-n) AS id FROM orders", "source shop: Invalid Input Error: Invalid UTF8 Codepoint ..."),
        ("SELECT ('key 7 of ' || n)::int AS id FROM orders", "Could not convert string '...'"),
        ("SELECT ('it''s ' || n)::int AS id FROM orders", "Could not convert string '...'"),
        (" ", "query: should be the name of a table, or one SELECT"),
        ("-- nothing", "query: should be the name of a table, or one SELECT"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "query", "error"),
    [(kind, *case) for kind, cases in REFUSED.items() for case in cases],
    indirect=["kind"],
)
def test_a_query_that_the_source_refuses_is_one_error_without_values(origin: Origin, query: str, error: str) -> None:
    load, execute = origin
    execute("CREATE TABLE orders AS SELECT 2147483647 AS n")
    result = load(query)
    fails_for_good(result, error, "2147483647")
    assert PASSWORD not in str(result.error)


@pytest.fixture
def changes(kind: str, origin: Origin) -> Origin:
    """A load of two rows that changed 12:00:00.25 and 12:30:00.5, and a function that executes SQL in their source."""
    load, execute = origin
    execute(CHANGES.format(AT[kind]))
    execute(f"INSERT INTO orders VALUES (1, '{TIME.format('00:00.25')}', 1), (2, '{TIME.format('30:00.5')}', 1)")
    return load, execute


# --- a cursor ---


def test_a_cursor_of_each_database_loads_what_is_new_and_what_came_late(changes: Origin, rows: Rows) -> None:
    load, execute = changes
    assert load("orders", cursor=SINCE).result["processed"] == 2
    # The third is new, the fourth and fifth are late but within the lag, the last is older than the lag allows.
    for number, at in ((3, "40:00.125"), (4, "26:00"), (5, "25:00.5"), (6, "24:59.4")):
        execute(f"INSERT INTO orders VALUES ({number}, '{TIME.format(at)}', 1)")
    result = load("SELECT * FROM orders -- all", cursor=SINCE).result
    assert result["inserted"] == 3
    assert result["cursor"].startswith(TIME.format("40:00.125"))
    assert rows("SELECT id FROM t ORDER BY id") == [(1,), (2,), (3,), (4,), (5,)]
    assert rows("SELECT name, value FROM dl_state") == [("shop:t", result["cursor"])]
    execute("DELETE FROM orders WHERE id > 1")
    again = load("orders", cursor=SINCE).result
    assert (again["processed"], again["cursor"]) == (0, result["cursor"])


def test_rows_of_an_equal_value_and_without_one_are_loaded(changes: Origin, rows: Rows) -> None:
    load, execute = changes
    execute("INSERT INTO orders VALUES (3, NULL, 1)")
    assert load("orders", cursor={"column": "changed"}).result["processed"] == 3
    execute(f"INSERT INTO orders VALUES (4, '{TIME.format('30:00.5')}', 1)")
    execute("UPDATE orders SET n = 2 WHERE changed IS NULL")
    result = load("orders", cursor={"column": "changed"}).result
    assert (result["inserted"], result["updated"], result["unchanged"]) == (1, 1, 1)
    assert rows("SELECT id, n FROM t ORDER BY id") == [(1, 1), (2, 1), (3, 2), (4, 1)]
    error = "cursor: changed has nulls, whose rows mode append would add each time"
    fails_for_good(load("orders", cursor={"column": "changed"}, mode="append", table="u"), error)


@pytest.mark.parametrize("point", [4, "end"])
def test_rows_and_cursor_are_one_after_a_kill_at_any_point(changes: Origin, rows: Rows, point: Any) -> None:
    load, execute = changes
    load("orders", cursor=SINCE)
    new = ", ".join(f"({n}, '2026-06-02 12:{n % 60:02}:00.{n:06}', {n})" for n in range(3, 300))
    execute(f"INSERT INTO orders VALUES {new}")
    result = load("orders", cursor=SINCE, batch_rows=100, how={"crash_at": point})
    assert (result.status, len(result.runs)) == ("succeeded", 2)
    assert rows("SELECT count(*), sum(n) FROM t") == [(299, sum(range(3, 300)) + 2)]
    assert rows("SELECT (value #>> '{}')::timestamp = (SELECT max(changed::timestamp) FROM t) FROM dl_state") == [
        (True,)
    ]


@pytest.mark.parametrize("kind", ["sqlite", "mysql"], indirect=True)  # a DuckDB that is read has no writer
def test_a_row_that_is_committed_during_a_load_is_loaded_by_the_next_one(
    changes: Origin, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, execute = changes
    limit = database.Session.limit

    def interrupted(self: database.Session, *args: Any) -> Any:
        facts = limit(self, *args)
        monkeypatch.undo()
        execute(f"INSERT INTO orders VALUES (3, '{TIME.format('50:00')}', 1), (4, '{TIME.format('00:00')}', 1)")
        return facts

    monkeypatch.setattr(database.Session, "limit", interrupted)
    url = os.environ["DL_SOURCE_SHOP"]
    assert load("orders", cursor={"column": "id"}, mode="append").result["cursor"] == "2"
    monkeypatch.setenv("DL_SOURCE_SHOP", url)
    assert load("orders", cursor={"column": "id"}, mode="append").result["inserted"] == 2
    assert rows("SELECT id FROM t ORDER BY id") == [(1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(
    ("type_", "values", "lag", "again"),
    [
        ("bigint", ("-5", "9007199254740993", "9007199254740994"), 1, 2),
        ("bigint", ("1", "2", "3"), 0.5, 2),
        ("decimal(30,10)", ("-1.5", "12345678901234567890.1234567891", "12345678901234567890.1234567892"), 1, 2),
        ("double", ("0.1", "0.30000000000000004", "1e300"), 0, 1),
        ("date", ("'2026-01-30'", "'2026-01-31'", "'2026-02-01'"), "5 min", 2),
        ("varchar(20)", ("'a'", "'b''%s?'", "'é'"), None, 1),
    ],
)
def test_a_cursor_is_of_any_type_that_has_an_order(
    kind: str, origin: Origin, type_: str, values: tuple[str, ...], lag: Any, again: int
) -> None:
    load, execute = origin
    if (kind, type_) in (("sqlite", "decimal(30,10)"), ("postgres", "double")):
        pytest.skip("the database has no exact decimals, or no type of this name")
    execute(f"CREATE TABLE orders (id int PRIMARY KEY, changed {type_})")
    for number, value in enumerate(values):
        execute(f"INSERT INTO orders VALUES ({number}, {value})")
        result = load("SELECT * FROM orders WHERE '%' = '%'", cursor={"column": "changed"}, mode="append")
        assert result.result["inserted"] == 1, result.error
    assert load("orders", cursor={"column": "changed", "name": "other"}, table="u").result["inserted"] == len(values)
    found = load("orders", cursor={"column": "changed", "name": "other", "lag": lag}, table="u").result["processed"]
    assert found == again


@pytest.mark.parametrize(("kind", "type_"), [("mysql", "timestamp(6)"), ("duckdb", "timestamptz")], indirect=["kind"])
def test_an_instant_is_the_same_in_each_zone(
    origin: Origin, type_: str, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    load, execute = origin
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("PGTZ", "America/New_York")
    execute(f"CREATE TABLE orders (id int PRIMARY KEY, changed {type_})")
    execute("SET time_zone = '+00:00'" if type_ == "timestamp(6)" else "SELECT 1")
    zone = "+00" if type_ == "timestamptz" else ""
    execute(f"INSERT INTO orders VALUES (1, '2026-03-08 07:01:00.25{zone}')")
    assert load("orders", cursor=SINCE).result["cursor"] == "2026-03-08 07:01:00.250000+00:00"
    execute(f"INSERT INTO orders VALUES (2, '2026-03-08 06:56:00.25{zone}'), (3, '2026-03-08 06:56:00.24{zone}')")
    assert load("orders", cursor=SINCE).result["inserted"] == 1
    with psycopg.connect(dsn) as conn:
        state.give(conn, "shop:t", "2026-03-08 09:00:00+02", "ann@vm")
    assert load("orders", cursor={"column": "changed"}).result["processed"] == 1


@pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
def test_the_largest_value_has_the_type_of_a_cursor(origin: Origin, dsn: str) -> None:
    load, execute = origin
    execute("CREATE TABLE orders (id int PRIMARY KEY, changed text)")
    execute("INSERT INTO orders VALUES (1, ''), (2, '2026-06-01 12:00:00')")
    assert load("SELECT * FROM orders;", cursor=SINCE).result["cursor"] == "2026-06-01 12:00:00"
    fails_for_good(load("DELETE FROM orders", cursor=SINCE), "source shop: ")
    last = "SELECT id, '9999-12-31 23:59:59' AS changed FROM orders"
    fails_for_good(load(last, cursor=SINCE), "behind which nothing is new")
    with psycopg.connect(dsn) as conn:
        state.give(conn, "of a person", "yesterday", "ann@vm")
    other = load("orders", cursor={"column": "id", "name": "of a person"})
    fails_for_good(other, "cursor: id and its state should be values of one type")


@pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "form", ["2026-06-0{}T12:00:00Z", "2026-06-0{} 12:00", "2026-06-0{}", "2026-06-0{}T12:00:00.5+00:00"]
)
def test_a_time_of_sqlite_is_a_text_of_any_one_form(origin: Origin, form: str) -> None:
    load, execute = origin
    execute("CREATE TABLE orders (id int PRIMARY KEY, changed text)")
    execute("INSERT INTO orders VALUES " + ", ".join(f"({n}, '{form.format(n)}')" for n in range(1, 6)))
    assert load("orders", cursor={"column": "changed", "lag": "1 day"}).result["cursor"] == form.format(5)
    assert load("orders", cursor={"column": "changed", "lag": "1 day"}).result["processed"] == 2


def test_the_name_of_a_cursor_may_need_quotes(kind: str, origin: Origin) -> None:
    load, execute = origin
    name = 'a`"%s?'
    quoted = '`a``"%s?`' if kind == "mysql" else '"a`""%s?"'
    execute(f"CREATE TABLE orders (id int PRIMARY KEY, {quoted} int)")
    execute("INSERT INTO orders VALUES (1, 1), (2, 2)")
    for processed in (2, 1):
        assert load("orders", cursor={"column": name}).result["processed"] == processed


@pytest.mark.parametrize("kind", ["sqlite", "postgres"], indirect=True)
@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"cursor": {"column": "at"}}, "cursor: at should be in the query"),
        ({"cursor": {"column": "changed", "lag": 5}}, "cursor: the lag of changed, which is of the type timestamp"),
        ({"cursor": {"column": "id", "lag": "5 min"}}, "should be a number"),
        ({"cursor": {"column": "changed", "lag": "soon"}}, 'cursor: invalid input syntax for type interval: "..."'),
        ({"cursor": SINCE, "mode": "append"}, "cursor: a lag reads rows again, so it needs mode merge with a key"),
        ({"cursor": SINCE, "delete_missing": True}, "cursor: mode replace and delete_missing need all rows"),
        ({"cursor": SINCE, "mode": "replace"}, "cursor: mode replace and delete_missing need all rows"),
    ],
)
def test_a_cursor_that_does_not_fit_a_database_is_named(changes: Origin, args: dict[str, Any], error: str) -> None:
    load, _ = changes
    load("orders", cursor={"column": "changed"})
    fails_for_good(load(**{"query": "orders"} | args), error)


def test_a_source_without_values_keeps_its_cursor(changes: Origin, rows: Rows) -> None:
    load, execute = changes
    assert load("SELECT * FROM orders WHERE id > 2", cursor=SINCE).result["cursor"] is None
    mark = load("orders", cursor=SINCE).result["cursor"]
    execute("UPDATE orders SET changed = NULL")
    result = load("orders", cursor=SINCE).result
    assert (result["processed"], result["updated"], result["cursor"]) == (2, 2, mark)


@pytest.mark.parametrize("kind", ["duckdb"], indirect=True)
@pytest.mark.parametrize("type_", ["timestamp_ns", "blob", "boolean", "int[]"])
def test_a_cursor_whose_values_have_no_exact_text_is_refused(origin: Origin, type_: str) -> None:
    load, execute = origin
    value = {"timestamp_ns": "'2026-01-31 10:00:00.123456789'", "blob": "'a'", "boolean": "true", "int[]": "[1]"}[type_]
    execute(f"CREATE TABLE orders AS SELECT 1 AS id, {value}::{type_} AS changed")
    fails_for_good(
        load("orders", cursor={"column": "changed"}), "cursor: changed should be a text, a number, or a time without"
    )
