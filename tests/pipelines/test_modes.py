"""The modes of a load: what is inserted, changed and deleted, what is refused, and what a reader sees meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from judging import LEFT, TYPES, Load, Rows, fails_for_good
from patience import until
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dataloader.pipelines import csv_table
from dataloader.pipelines.csv_table import wider

COUNTS = ("inserted", "updated", "unchanged", "deleted", "duplicate_keys", "rejected")


@pytest.fixture
def load(job: Load, tmp_path: Path) -> Load:
    """Load this text as a file into the table `t`."""

    def load(text: str, how: dict[str, Any] | None = None, **args: Any) -> Any:
        (tmp_path / "f.csv").write_text(text)
        return job("load.csv", {"path": "f.csv", "table": "t"} | args, **(how or {}))

    return load


def counts(result: Any) -> dict[str, int]:
    """The counts of a load that are not 0."""
    assert result.status == "succeeded", result.error
    return {name: result.result[name] for name in COUNTS if result.result[name]}


TYPED = "CREATE TABLE t (id int PRIMARY KEY, day date, n numeric)"
ROWS = "id,day,n\n1,2026-03-01,1\n2,2026-03-02,2\n"
ALL = "SELECT id::int, day::text, n::int FROM t ORDER BY 1, 2, 3"


def test_a_role_may_have_a_datestyle_of_its_own(load: Load, rows: Rows, dsn: str) -> None:
    how = {"dsn": make_conninfo(dsn, options="-c DateStyle=German"), "max_attempts": 1}
    for text, expected in {ROWS: {"inserted": 2}, f"{ROWS}2,2026-03-02,3\n": {"updated": 1, "unchanged": 1}}.items():
        result = load(text, how, mode="scd2", key=["id"])
        assert {name: counts(result)[name] for name in expected} == expected
    assert rows("SELECT bool_and(valid_from < clock_timestamp()) FROM t") == [(True,)]


# --- append ---


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("point", [1, "end"])
def test_append_adds_each_row_once_for_each_job(
    load: Load, rows: Rows, in_parts: bool, is_new: bool, point: Any
) -> None:
    if not is_new:
        rows("CREATE TABLE t (id int, day date, n numeric)")
    result = load(ROWS, {"crash_at": point, "max_attempts": 2}, mode="append")
    assert (counts(result), len(result.runs)) == ({"inserted": 2}, 2)
    assert counts(load("id,day,n\n2,2026-03-02,2\n", mode="append")) == {"inserted": 1}
    assert rows(ALL) == [(1, "2026-03-01", 1), (2, "2026-03-02", 2), (2, "2026-03-02", 2)]


# --- replace ---


def test_replace_leaves_the_rows_of_the_file_alone(load: Load, rows: Rows, dsn: str, in_parts: bool) -> None:
    """A reader sees all rows of before, also one whose snapshot is older and who looks at the table only then."""
    rows("CREATE TABLE t (id int, day date, n numeric); INSERT INTO t VALUES (7), (8), (9)")
    with psycopg.connect(dsn) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT FROM pg_class LIMIT 1")
        assert counts(load(ROWS, mode="replace")) == {"inserted": 2, "deleted": 3}
        assert reader.execute("SELECT id FROM t ORDER BY 1").fetchall() == [(7,), (8,), (9,)]
    assert rows(ALL) == [(1, "2026-03-01", 1), (2, "2026-03-02", 2)]


def test_replace_by_key_writes_only_what_differs(load: Load, rows: Rows) -> None:
    rows(f"{TYPED}; INSERT INTO t VALUES (1, '2026-03-01', 1), (2, '2026-03-02', 5), (3, NULL, NULL)")
    version = rows("SELECT xmin FROM t WHERE id = 1")
    assert counts(load(ROWS, mode="replace", key=["id"])) == {"updated": 1, "unchanged": 1, "deleted": 1}
    assert (rows(ALL), rows("SELECT xmin FROM t WHERE id = 1")) == (
        [(1, "2026-03-01", 1), (2, "2026-03-02", 2)],
        version,
    )


@pytest.mark.parametrize("key", [{}, {"key": ["id"]}])
def test_a_partition_is_replaced_alone(load: Load, rows: Rows, key: dict[str, Any]) -> None:
    rows(f"{TYPED}; INSERT INTO t VALUES (1, '2026-03-01', 1), (2, '2026-03-02', 2), (3, '2026-03-02', 3)")
    args = {"mode": "replace", "partition": {"day": "2026-03-02"}} | key
    assert load("id,day,n\n4,2026-03-02,4\n", **args).result["deleted"] == 2
    after = [(1, "2026-03-01", 1), (4, "2026-03-02", 4)]
    assert rows(ALL) == after
    fails_for_good(load(ROWS, **args), "partition: the file has rows of another one")
    assert rows(ALL) == after


def test_the_first_load_of_a_partition_has_no_other_rows(load: Load, rows: Rows, in_parts: bool) -> None:
    args = {"mode": "replace", "partition": {"day": "2026-03-02"}}
    fails_for_good(load(ROWS, **args), "partition: the file has rows of another one")
    assert rows("SELECT to_regclass('t')") == [(None,)]
    assert counts(load("id,day,n\n2,2026-03-02,2\n", **args)) == {"inserted": 1}


# --- what is missing ---


def test_merge_deletes_what_the_file_lacks(load: Load, rows: Rows, in_parts: bool) -> None:
    rows(f"{TYPED}; INSERT INTO t VALUES (1, '2026-03-01', 1), (3, NULL, NULL)")
    assert counts(load(ROWS, key=["id"], delete_missing=True)) == {"inserted": 1, "unchanged": 1, "deleted": 1}
    assert rows(ALL) == [(1, "2026-03-01", 1), (2, "2026-03-02", 2)]


def test_merge_marks_what_the_file_lacks_and_what_comes_back(load: Load, rows: Rows) -> None:
    soft = {"key": ["id"], "delete_missing": "soft", "deleted_column": "gone"}
    state = "SELECT id::int, gone IS NOT NULL FROM t ORDER BY 1"
    assert counts(load("id\n1\n2\n", **soft)) == {"inserted": 2}
    assert counts(load("id\n1\n", **soft)) == {"unchanged": 1, "deleted": 1}
    assert rows(state) == [(1, False), (2, True)]
    assert counts(load("id\n1\n", **soft)) == {"unchanged": 1}
    assert counts(load("id\n1\n2\n", **soft)) == {"updated": 1, "unchanged": 1}
    assert rows(state) == [(1, False), (2, False)]


@pytest.mark.parametrize(
    "args", [{"mode": "replace"}, {"mode": "replace", "key": ["id"]}, {"key": ["id"], "delete_missing": True}]
)
@pytest.mark.parametrize("text", ["id\n", "id\n1\n"])
def test_more_rows_than_max_delete_do_not_vanish(load: Load, rows: Rows, args: dict[str, Any], text: str) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 4)")
    gone = 5 - len(text) // 2 if text == "id\n1\n" else 4
    fails_for_good(load(text, max_delete=0.5, **args), f"max_delete: {gone} of the 4 rows would vanish")
    assert rows("SELECT count(*) FROM t") == [(4,)]
    assert load("id\n1\n2\n", max_delete=0.5, **args).result["deleted"] >= 2


@pytest.mark.parametrize(
    "args", [{"delete_missing": True}, {"delete_missing": "soft"}, {"mode": "scd2", "delete_missing": True}]
)
def test_a_load_that_rejects_a_row_deletes_none(load: Load, rows: Rows, in_parts: bool, args: dict[str, Any]) -> None:
    """The row that is not in the file may be the rejected one."""
    args = {"key": ["id"], "max_errors": 1} | args
    load("id,n\n1,1\n2,2\n3,3\n", **args)
    column = "(deleted_at IS NULL)" if args["delete_missing"] == "soft" else "is_current" if "mode" in args else "true"
    rows("ALTER TABLE t ALTER n TYPE int USING n::int")
    assert counts(load("id,n\n1,1\n2,x\n", **args)) == {"unchanged": 1, "rejected": 1}
    assert rows(f"SELECT id::int, {column} FROM t ORDER BY 1") == [(1, True), (2, True), (3, True)]
    assert counts(load("id,n\n1,1\n2,2\n", **args)) == {"unchanged": 2, "deleted": 1}


# --- scd2 ---


def test_scd2_keeps_the_versions_of_a_row(load: Load, rows: Rows, in_parts: bool) -> None:
    scd2 = {"mode": "scd2", "key": ["id"]}
    versions = "SELECT id::int, a, is_current, valid_to IS NULL FROM t ORDER BY id, valid_from"
    assert counts(load("id,a\n1,x\n2,y\n1,z\n", **scd2)) == {"inserted": 2, "duplicate_keys": 1}
    assert counts(load("id,a\n1,z\n2,new\n3,n\n", **scd2)) == {"inserted": 1, "updated": 1, "unchanged": 1}
    assert rows(versions) == [
        (1, "z", True, True), (2, "y", False, False), (2, "new", True, True), (3, "n", True, True)
    ]  # fmt: skip
    assert rows("SELECT count(*) FROM t o JOIN t n ON o.id = n.id AND o.valid_to = n.valid_from") == [(1,)]
    assert counts(load("id,a\n1,z\n", delete_missing=True, **scd2)) == {"unchanged": 1, "deleted": 2}
    assert rows("SELECT id::int FROM t WHERE is_current") == [(1,)]
    assert counts(load("id,a\n2,new\n1,z\n", **scd2)) == {"inserted": 1, "unchanged": 1}


# --- changes of the table ---


def test_a_new_column_is_added_where_that_is_wanted(load: Load, rows: Rows, in_parts: bool) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (0), (1)")
    text = "id,city\n1,Rome\n2,Oslo\n"
    fails_for_good(load(text, key=["id"]), 'lacks city; schema_change "add" adds columns')
    assert counts(load(text, key=["id"], schema_change="add")) == {"inserted": 1, "updated": 1}
    assert rows("SELECT * FROM t ORDER BY id") == [(0, None), (1, "Rome"), (2, "Oslo")]


@pytest.mark.parametrize(
    ("old", "new", "kind", "fits", "unfit"),
    [
        ("smallint", "bigint", "bigint", "32767", "-32769"),
        ("integer", "numeric", "numeric", "-2147483648", "1.5"),
        ("integer", "int8", "bigint", "-2147483648", "2147483648"),
        ("integer", "Decimal(5, 1)", "numeric", "2147483647", "1.5"),
        ("numeric(5,2)", "numeric", "numeric", "999.99", "0.001"),
        ("numeric(5,2)", "numeric(12,2)", "numeric", "-1.10", "1000"),
        ("character varying(2)", "text", "text", "ab", "abc"),
        ("real", "double precision", "double precision", "0.5", "0.1"),
        ("integer", "numeric", "numeric", "7", "NaN"),
        ("bigint", "numeric", "numeric", "7", "Infinity"),
    ],
)
def test_which_values_need_a_wider_type(
    job: Load, rows: Rows, tmp_path: Path, old: str, new: str, kind: str, fits: str, unfit: str
) -> None:
    rows(f"CREATE TABLE t (v {old})")
    args = {"path": "f.csv", "table": "t", "types": {"v": new}, "schema_change": "widen", "mode": "append"}
    for value, type_ in ((fits, old), (unfit, kind)):
        (tmp_path / "f.csv").write_text(f"v\n{value}\n")
        assert job("load.files", args).status == "succeeded"
        assert rows(TYPES) == [("v", type_)]
    assert rows(f"SELECT count(*) FROM t WHERE v IN ('{fits}', '{unfit}')") == [(2,)]


@pytest.mark.parametrize(
    ("old", "new"),
    [("bigint", "integer"), ("integer", "text"), ("text", "numeric"), ("date", "text"), ("character(3)", "text")],
)
def test_other_types_stay(old: str, new: str) -> None:
    assert wider(old, new) is None


def test_blanks_that_fill_a_column_are_no_part_of_its_values(load: Load, rows: Rows) -> None:
    """A text column would keep them: `y  ` would be another key than `y`."""
    rows("CREATE TABLE t (id character(3) PRIMARY KEY, n text); INSERT INTO t VALUES ('x'), ('y')")
    args = {"key": ["id"], "schema_change": "widen", "delete_missing": True}
    assert counts(load("id,n\nx  ,1\ny  ,\n", **args)) == {"updated": 1, "unchanged": 1}
    fails_for_good(load("id,n\nabcd,1\n", **args), "line 2: column id: value too long for type character(3)")


@pytest.fixture
def before_find(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Have something happen once, between the staging of the rows and the look for the table."""
    find = csv_table.Table.find

    def prepare(happens: Callable[[], Any]) -> None:
        left = iter([True])

        def find_after(self: csv_table.Table) -> Any:
            if next(left, False):
                happens()
            return find(self)

        monkeypatch.setattr(csv_table.Table, "find", find_after)

    return prepare


@pytest.mark.parametrize("fits", [True, False])
def test_a_table_that_comes_meanwhile_rounds_no_value(
    job: Load, rows: Rows, in_parts: bool, tmp_path: Path, before_find: Callable[..., None], fits: bool
) -> None:
    kind = "numeric" if fits else "bigint"
    before_find(lambda: rows(f"CREATE TABLE t (id bigint PRIMARY KEY, n {kind}, more text)"))
    (tmp_path / "f.csv").write_text("id,n\n1,1.5\n2,2\n")
    types = {"id": "int", "n": "numeric(5,1)"}
    result = job("load.files", {"path": "f.csv", "table": "t", "key": ["id"], "types": types}, max_attempts=2)
    first, second = result.runs
    assert "id, n: other types since the rows were staged; the next run begins anew" in (first.error or "")
    assert fits or "column n: a number with a fraction or an exponent" in (second.error or "")
    assert rows("SELECT n::text FROM t ORDER BY id") == ([("1.5",), ("2",)] if fits else [])
    assert rows(LEFT) == [(0,)]


def test_a_version_ends_after_its_begin(
    load: Load, rows: Rows, in_parts: bool, before_find: Callable[..., None]
) -> None:
    """Also where another load has made the version since this one's last transaction began."""
    scd2 = {"mode": "scd2", "key": ["id"], "delete_missing": True}
    load("id,a\n1,x\n2,y\n", **scd2)
    before_find(lambda: rows("UPDATE t SET valid_from = clock_timestamp()"))
    assert counts(load("id,a\n1,z\n", **scd2)) == {"updated": 1, "deleted": 1}
    assert rows("SELECT count(*) FROM t WHERE valid_to > valid_from") == [(2,)]


# --- rejected rows ---


SHORT = "; skip_footer and comment leave out what is no row, and max_errors rejects rows"
BAD = 'id,day,n\n1,2026-03-01,1\nx,2026-03-02,2\n3,2026-02-31,"3\n"\n4,2026-03-04\n5,2026-03-05,5\n6,2026-03-06,-6\n'
REJECTS = 'SELECT file, line::int, "row", reason FROM t_rejects ORDER BY line'
REJECTED = [
    ("f.csv", 3, "x,2026-03-02,2", 'column id: invalid input syntax for type integer: "..."'),
    ("f.csv", 4, '3,2026-02-31,"3\n"', 'column day: date/time field value out of range: "..."'),
    ("f.csv", 6, "4,2026-03-04", f"2 fields, but the header has 3; missing data for column n{SHORT}"),
    ("f.csv", 8, "6,2026-03-06,-6", 'new row for relation "t" violates check constraint "t_n_check"'),
]


@pytest.mark.parametrize("batch_rows", [1, 2, 5_000])
def test_wrong_rows_are_set_aside_with_their_reasons(load: Load, rows: Rows, in_parts: bool, batch_rows: int) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, day date, n numeric CHECK (n > 0))")
    args = {"key": ["id"], "batch_rows": batch_rows}
    fails_for_good(load(BAD, max_errors=3, **args), "f.csv, line 8: ")
    assert rows("SELECT to_regclass('t_rejects'), count(*) FROM t") == [(None, 0)]
    result = load(BAD, {"crash_at": "end", "max_attempts": 2}, max_errors=4, **args)
    assert (result.status, result.result["rejected"], result.result["processed"]) == ("succeeded", 4, 6)
    assert rows(ALL) == [(1, "2026-03-01", 1), (5, "2026-03-05", 5)]
    assert (rows(REJECTS), rows(LEFT)) == (REJECTED, [(0,)])
    assert rows("SELECT DISTINCT job_id, at <= now() FROM t_rejects") == [(result.job_id, True)]


def test_the_rejects_belong_to_the_owner_of_the_table(load: Load, rows: Rows, as_superuser: Callable[..., Any]) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY); GRANT SELECT ON t TO PUBLIC")
    assert counts(load("id\n1\nx\n", key=["id"], max_errors=1)) == {"inserted": 1, "rejected": 1}
    assert rows("SELECT a.relowner = b.relowner, has_table_privilege('pg_monitor', 't_rejects', 'SELECT')"
                " FROM pg_class a, pg_class b WHERE a.oid = 't'::regclass AND b.oid = 't_rejects'::regclass"
                ) == [(True, True)]  # fmt: skip


@pytest.mark.parametrize("is_member", [True, False])
def test_a_role_that_may_not_give_its_rejects_away_keeps_them_and_lets_the_owner_read_them(
    load: Load, rows: Rows, dsn: str, make_role: Callable[..., str], as_superuser: Callable[..., Any], is_member: bool
) -> None:
    dsns = [make_role(dsn), make_role(dsn)]
    owner, loader = (str(conninfo_to_dict(each)["user"]) for each in dsns)
    with psycopg.connect(as_superuser(dsn), autocommit=True) as conn:
        conn.execute("CREATE TABLE t (id int PRIMARY KEY)")
        conn.execute(f'ALTER TABLE t OWNER TO "{owner}"; GRANT USAGE, CREATE ON SCHEMA public TO "{loader}"'.encode())
        conn.execute("GRANT SELECT ON t TO pg_monitor")
        conn.execute(f'GRANT ALL ON ALL TABLES IN SCHEMA public TO "{loader}"'.encode())
        if is_member:
            conn.execute(f'GRANT "{owner}" TO "{loader}"'.encode())
    result = load("id\n1\nx\n", {"dsn": dsns[1]}, key=["id"], max_errors=1)
    assert counts(result) == {"inserted": 1, "rejected": 1}
    assert rows(
        "SELECT pg_get_userbyid(relowner), has_table_privilege('pg_monitor', oid, 'SELECT'),"
        f" has_table_privilege('{owner}', oid, 'SELECT, DELETE') FROM pg_class WHERE oid = 't_rejects'::regclass"
    ) == [(loader, True, True)]


@pytest.mark.parametrize(
    ("text", "left"), [("id,a\n1,x\n2\n", {"inserted": 1, "rejected": 1}), ("id,a\n3\n2\n", {"rejected": 2})]
)
def test_a_new_table_may_have_rejects(load: Load, rows: Rows, in_parts: bool, text: str, left: dict[str, int]) -> None:
    assert counts(load(text, key=["id"], max_errors=2)) == left
    [(row, reason)] = rows('SELECT "row", reason FROM t_rejects WHERE line = 3')
    assert (row, "missing data for column a" in reason) == ("2", True)


# --- arguments ---


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({}, "key: mode merge needs the columns that identify a row"),
        ({"mode": "scd2"}, "key: mode scd2 needs"),
        ({"mode": "append", "partition": {"id": 1}}, "partition: mode append has no partition"),
        ({"mode": "replace", "partition": {"x": 1}}, "partition: x should be in the file"),
        ({"mode": "replace", "delete_missing": True}, "delete_missing: mode replace should not have true"),
        ({"mode": "scd2", "key": ["id"], "delete_missing": "soft"}, 'mode scd2 should not have "soft"'),
        ({"mode": "upsert", "key": ["id"]}, "mode: Input should be 'append', 'merge', 'replace' or 'scd2'"),
        ({"key": ["id"], "max_delete": 2}, "max_delete: "),
        ({"key": ["id"], "max_errors": -1}, "max_errors: "),
        ({"key": ["id"], "max_errors": 1, "table": "t" * 60}, "table: should have at most 55 bytes"),
        ({"key": ["id"], "delete_missing": "soft", "deleted_column": "id"}, "id should not be in the file"),
    ],
)
def test_arguments_that_make_no_sense(load: Load, rows: Rows, args: dict[str, Any], error: str) -> None:
    fails_for_good(load("id\n1\n", **args), error)
    assert rows("SELECT to_regclass('t')") == [(None,)]


# --- the log, and ends ---


def test_equal_rows_write_no_log(load: Load, rows: Rows, dsn: str) -> None:
    text = "id,a\n" + "".join(f"{n},{'x' * 100}\n" for n in range(20_000))
    load(text, key=["id"])
    with psycopg.connect(dsn, autocommit=True) as conn:
        written = []
        while not written or (min(written) > 1_000_000 and len(written) < 20):  # other tests of this server write too
            before = conn.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            assert counts(load(text, key=["id"])) == {"unchanged": 20_000}
            assert conn.execute("SELECT sum(xmax::text::bigint) FROM t").fetchone() == (0,)
            assert before is not None
            written += conn.execute("SELECT pg_current_wal_insert_lsn() - %s::pg_lsn", before).fetchone() or ()
    assert min(written) < 1_000_000  # the rows alone are 2.5 MB


BEFORE = {
    "scd2": "CREATE TABLE t (id int, day date, n int, valid_from timestamptz, valid_to timestamptz, is_current bool)",
    "merge": "CREATE TABLE t (id int PRIMARY KEY, day date, n numeric, deleted_at timestamptz)",
}


def test_a_stop_ends_a_long_statement(load: Load, rows: Rows, points_of_silence: Callable[[float], None]) -> None:
    points_of_silence(0.01)
    rows("CREATE TABLE t (id int PRIMARY KEY);"
         "CREATE SCHEMA theirs;"
         "CREATE FUNCTION theirs.slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); END';"
         "CREATE TRIGGER slow BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION theirs.slow()")  # fmt: skip
    result = load("id\n1\n", {"cancel_at": 20}, key=["id"])
    assert result.status == "canceled"
    assert result.seconds < 30
    assert rows("SELECT count(*) FROM t") == [(0,)]
    asleep = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    until(lambda: rows(asleep) == [], "the statement's end")


@pytest.mark.parametrize("mode", ["replace", "scd2"])
def test_a_stop_ends_the_wait_for_a_lock(
    load: Load, rows: Rows, dsn: str, mode: str, points_of_silence: Callable[[float], None]
) -> None:
    points_of_silence(0.01)
    rows(BEFORE.get(mode, "CREATE TABLE t (id int, day date, n numeric)"))
    with psycopg.connect(dsn, options="-c idle_in_transaction_session_timeout=30s") as other:
        other.execute("LOCK TABLE t IN ROW EXCLUSIVE MODE")  # as a program that has written, and does nothing now
        result = load(ROWS, {"cancel_at": 20}, mode=mode, **({"key": ["id"]} if mode == "scd2" else {}))
        assert result.status == "canceled"
        assert other.execute("SELECT 1").fetchall() == [(1,)]


# --- COPY into the target itself ---


def test_an_empty_table_is_filled_without_staging(load: Load, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(TYPED)
    monkeypatch.setattr(csv_table.Table, "make_staging", None)
    assert counts(load(ROWS, key=["id"])) == {"inserted": 2}
    assert counts(load("id\n7\n", mode="append")) == {"inserted": 1}
    assert rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,), (7,)]


def test_an_empty_table_and_a_file_with_a_key_twice_are_merged(load: Load, rows: Rows) -> None:
    rows(TYPED)
    assert counts(load(f"{ROWS}1,2026-03-03,3\n", key=["id"])) == {"inserted": 2, "duplicate_keys": 1}
    assert rows(ALL) == [(1, "2026-03-03", 3), (2, "2026-03-02", 2)]


@pytest.mark.parametrize(
    "table",
    [
        "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY UNIQUE, n int)",
        "CREATE TABLE t (id int UNIQUE, n int)",
        "CREATE TABLE t (id int PRIMARY KEY, n int); CREATE RULE r AS ON INSERT TO t DO INSTEAD NOTHING",
    ],
    ids=["identity", "nullable key", "rule"],
)
def test_what_copy_would_take_otherwise_is_merged(
    table: str, load: Load, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "id,n\n1,1\n,2\n" if "id int UNIQUE" in table else "id,n\n1,1\n"
    rows(table)
    first = load(text, key=["id"])
    rows("DROP TABLE t")
    rows(table)
    monkeypatch.setattr(csv_table, "_DIRECT_BYTES", 0)
    second = load(text, key=["id"])
    assert (first.status, first.error) == (second.status, second.error)


@pytest.mark.parametrize("how", [{"key": ["id"]}, {"key": ["id"], "mode": "replace"}, {"mode": "append"}], ids=str)
def test_a_row_may_refer_to_one_of_a_later_batch(load: Load, rows: Rows, how: dict[str, Any]) -> None:
    rows("CREATE TABLE t (id int PRIMARY KEY, boss int REFERENCES t)")
    assert counts(load("id,boss\n1,3\n2,1\n3,\n", batch_rows=1, **how)) == {"inserted": 3}
    result = load("id,boss\n4,5\n", **how)
    assert (result.status, "foreign key" in (result.error or "")) == ("failed", True)


def test_a_bad_record_for_an_empty_table_is_named(load: Load, rows: Rows) -> None:
    rows('CREATE TABLE "t 2" (id int PRIMARY KEY, n int CHECK (n > 0))')
    result = load("id,n\n1,1\n2,-1\n", table="t 2", key=["id"])
    assert "f.csv, line 3: new row for relation" in (result.error or "")
    assert rows('SELECT count(*) FROM "t 2"') == [(0,)]
