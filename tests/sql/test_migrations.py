"""Migrations: an empty database, the contract's tables with rows in them, a queue in use, several at once."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from hands import PATIENCE, Conn, Worker, enqueue, locked, plain, row, state, until, value
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dataloader import config
from dataloader.check import database
from dataloader.cli import main
from dataloader.queue import db, lifecycle, migrations
from dataloader.queue.migrations import Migration, SchemaError
from dataloader.queue.reports import stats

ALL = [migrations.FIRST, "functions"]
# The session of an earlier migration is shown until its backend has ended: so no test picks one session by its name.
MIGRATING = """
SELECT {} FROM pg_stat_activity WHERE application_name = 'dl-migrate' AND datname = current_database()
"""
BLOCKED = MIGRATING.format("bool_or(cardinality(pg_blocking_pids(pid)) > 0)")
DYING = """
import os, signal, sys
from dataloader.queue import db, migrations

class Dying(db.Connection):
    left = int(sys.argv[2])

    def execute(self, *args, **more):
        Dying.left -= 1
        if Dying.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(*args, **more)

db.Connection = Dying
migrations.migrate(sys.argv[1], "public")
"""
MISPLACED = """
SELECT count(*) FROM dl_jobs
 WHERE blocked_on IS DISTINCT FROM CASE WHEN status = 'queued' AND available_at > now() THEN 'time' END
"""
COLUMNS = """
SELECT table_name, column_name, data_type, udt_name, column_default, is_nullable FROM information_schema.columns
 WHERE table_schema = current_schema() AND table_name LIKE 'dl\\_%' ORDER BY 1, 2
"""
CATALOG = {
    "columns": COLUMNS,
    "order": "SELECT attrelid::regclass::text, attname, attnum FROM pg_attribute JOIN pg_class c ON c.oid = attrelid"
    " WHERE relnamespace = current_schema()::regnamespace AND attnum > 0 ORDER BY 1, 3",
    "comments": "SELECT classoid::regclass::text, objoid, objsubid, description FROM pg_description"
    " WHERE objoid IN (SELECT oid FROM pg_class WHERE relnamespace = current_schema()::regnamespace)",
    "rights": "SELECT relname, (SELECT array_agg(r::text ORDER BY r::text)"
    " FROM unnest(coalesce(relacl, acldefault('r', relowner))) r) FROM pg_class"
    " WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v') ORDER BY 1",
    "rights on functions": "SELECT oid::regprocedure::text, (SELECT array_agg(r::text ORDER BY r::text)"
    " FROM unnest(proacl) r) FROM pg_proc WHERE pronamespace = current_schema()::regnamespace ORDER BY 1",
    "constraints": "SELECT conrelid::regclass::text, conname, convalidated, pg_get_constraintdef(oid)"
    " FROM pg_constraint WHERE connamespace = current_schema()::regnamespace ORDER BY 1, 2",
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema() ORDER BY 1",
    "valid": "SELECT count(*) FROM pg_index WHERE NOT indisvalid OR NOT indisready",
    "triggers": "SELECT tgname, tgrelid::regclass::text, pg_get_triggerdef(oid) FROM pg_trigger"
    " WHERE NOT tgisinternal ORDER BY 1",
    "functions": "SELECT proname, pg_get_functiondef(oid) FROM pg_proc"
    " WHERE pronamespace = current_schema()::regnamespace ORDER BY 1, 2",
    "types": "SELECT typname, array_agg(enumlabel ORDER BY enumsortorder) FROM pg_enum"
    " JOIN pg_type ON pg_type.oid = enumtypid GROUP BY 1 ORDER BY 1",
    "options": "SELECT relname, reloptions, relreplident FROM pg_class"
    " WHERE relnamespace = current_schema()::regnamespace ORDER BY 1",
}


def session(dsn: str, schema: str = "public") -> Conn:
    """A connection; the end of a block closes it."""
    return db.connect(dsn, name="test", schema=schema)


WITHOUT_DAYS = """
DO $$ DECLARE day regclass; BEGIN
  FOR day IN SELECT inhrelid FROM pg_inherits
              WHERE inhparent = to_regclass('dl_job_logs') AND inhrelid <> 'dl_job_logs_rest'::regclass
  LOOP EXECUTE 'DROP TABLE ' || day; END LOOP;
END $$
"""


def catalog(dsn: str) -> dict[str, list[Any]]:
    """Everything that the schema consists of, by the server's own words, but for the days of logs."""
    with session(dsn) as conn, conn.transaction(force_rollback=True):
        conn.execute(WITHOUT_DAYS)
        return {name: conn.execute(query).fetchall() for name, query in CATALOG.items()}


def ours(dsn: str) -> dict[str, list[Any]]:
    """The catalog, without the UNIQUE of idempotency keys that an adopted queue keeps."""
    assert migrations.migrate(dsn, "public", plain_protocol=False) == ["partial index on idempotency_key"]
    return catalog(dsn)


def test_an_empty_database_gets_everything_by_one_of_four_at_once_and_later_nothing(empty_db: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        applied = list(pool.map(lambda _: migrations.migrate(empty_db, "public"), range(4)))
    assert sorted(applied, key=len) == [[], [], [], ALL]
    first = catalog(empty_db)
    assert first["valid"] == [(0,)]
    assert migrations.migrate(empty_db, "public") == []
    assert catalog(empty_db) == first


RIGHTS = """
SELECT string_agg(p, ' ' ORDER BY p) FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p
 WHERE has_table_privilege(%s, %s, p)
"""


def test_the_contracts_tables_are_adopted_with_their_rows(contract: str, module_db: str) -> None:
    """They become a new schema, but for the UNIQUE of idempotency keys, which they keep.

    Jobs that ended without a time get their last sign of life as one.
    """
    with session(contract) as conn:
        with pytest.raises(SchemaError, match="not adopted yet: run `dataloader migrate`"):
            migrations.check(conn)
        conn.execute("UPDATE dl_jobs SET created_at = '2001-01-01', started_at = '2001-01-02' WHERE task = 'lost'")
        conn.execute("UPDATE dl_jobs SET created_at = '2001-01-01', finished_at = '2001-01-03' WHERE task = 'failed'")
        conn.execute("UPDATE dl_jobs SET finished_at = '2001-01-03' WHERE status IN ('queued', 'running')")  # a retry's
        columns = conn.execute(COLUMNS).fetchall()
        contents = "SELECT job_id, status::text, available_at, attempt, lease_expires_at, created_at, args FROM dl_jobs"
        rows = conn.execute(contents + " ORDER BY job_id").fetchall()
        filenode = value(conn, "SELECT pg_relation_filenode('dl_jobs')")
        assert migrations.migrate(contract, "public") == ALL
        assert set(columns) <= set(conn.execute(COLUMNS).fetchall())
        assert conn.execute(contents + " ORDER BY job_id").fetchall() == rows
        assert value(conn, "SELECT pg_relation_filenode('dl_jobs')") == filenode, "the table was rewritten"
        assert value(conn, "SELECT count(*) FROM dl_job_events") == len(rows)
        assert value(conn, MISPLACED) == 0
        assert conn.execute(CATALOG["valid"]).fetchall() == [(0,)]
        assert migrations.has_unique(conn)
        assert value(conn, "SELECT to_regclass('ix_dl_jobs_idempotency')") is None

        ends = "SELECT status::text, finished_at::date::text FROM dl_jobs WHERE task = status::text"
        found = dict(conn.execute(ends).fetchall())
        assert (found["failed"], found["lost"]) == ("2001-01-03", "2001-01-02")
        wrong = "SELECT count(*) FROM dl_jobs WHERE (finished_at IS NULL) <> (status IN ('queued', 'running'))"
        assert value(conn, wrong) == 0
    assert ours(contract) == catalog(module_db)


def test_other_services_get_no_rights_on_what_the_adoption_adds(contract: str, make_role: Callable[[str], str]) -> None:
    role = str(conninfo_to_dict(make_role(contract))["user"])
    with session(contract) as conn:
        conn.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON dl_jobs, dl_job_events TO {role}".encode())
        migrations.migrate(contract, "public")
        tables = "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p', 'v') AND relname LIKE 'dl\\_%'"
        given = {name for (name,) in conn.execute(tables) if value(conn, RIGHTS, role, name)}
        assert given == {"dl_jobs", "dl_job_events"}


UNFIT = {
    "queue": "q" * 600,
    "task": "t" * 2_001,
    "lock_key": "k" * 3_000,
    "idempotency_key": "\u4e00" * 400,
    "partition_key": "p" * 1_100,
    "producer": "p" * 1_100,
    "consumer_group": "c" * 1_100,
}


def test_a_row_that_breaks_a_check_is_mended_and_can_be_ended_and_deleted(contract: str) -> None:
    """And different keys stay different."""
    with session(contract) as conn:
        cases = [(status, name, odd + status) for status in ("queued", "running") for name, odd in UNFIT.items()]
        jobs = [plain(conn, status=status, **{name: odd}) for status, name, odd in cases]
        keys = [{"lock_key": "k" * 3_000 + end, "idempotency_key": "i" * 2_000 + end} for end in ("1", "2", "2 ")]
        twins = [plain(conn, **each) for each in (*keys, {"lock_key": keys[0]["lock_key"]})]
        mended = migrations.migrate(contract, "public")
        assert {line for line in mended if line.startswith("job ")} == {
            f"job {job_id}, which broke a check of dl_jobs" for job_id in (*jobs, *twins)
        }
        assert migrations.migrate(contract, "public") == []
        lock_keys = [row(conn, job_id)["lock_key"] for job_id in twins]
        assert (len(set(lock_keys)), lock_keys[0]) == (3, lock_keys[3])
        for job_id, (status, name, odd) in zip(jobs, cases, strict=True):
            assert (row(conn, job_id)[name] != odd, row(conn, job_id)["status"]) == (True, status)
            assert stats.job(conn, job_id)
            ended = f"UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = '{job_id}'"  # of the plain protocol
            with conn.transaction(force_rollback=True):
                conn.execute(ended.encode())
            with conn.transaction(force_rollback=True):
                lifecycle.request_cancel(conn, job_id)
                assert row(conn, job_id)["cancel_requested"]
            conn.execute("DELETE FROM dl_jobs WHERE job_id = %s", (job_id,))


def test_rows_are_mended_beside_a_producer_and_one_who_holds_a_row(contract: str, begin: Callable[[str], None]) -> None:
    with session(contract) as conn, session(contract) as holder, ThreadPoolExecutor(1) as pool:
        held, other = plain(conn, producer="p" * 1_100), plain(conn, task="t" * 2_001)
        begin(contract)
        with locked(holder, held):
            migrating = pool.submit(migrations.migrate, contract, "public")
            until(lambda: len(row(conn, other)["task"]) < 2_001, "the free row to be mended")
            with pytest.raises(psycopg.errors.CheckViolation):
                plain(conn, queue="q" * 600)
            assert not migrating.done()
        lines = migrating.result(PATIENCE)
        assert {str(each) in " ".join(lines) for each in (held, other)} == {True}


def test_indexes_of_a_stopped_change_to_the_unique_go_with_the_next_migrate(empty_db: str) -> None:
    migrations.migrate(empty_db, "public", plain_protocol=True)
    with session(empty_db) as conn:
        conn.execute("CREATE UNIQUE INDEX dl_jobs_unique ON dl_jobs (idempotency_key)")
        conn.execute(
            "CREATE INDEX ix_dl_jobs_idempotency ON dl_jobs (idempotency_key) WHERE idempotency_key IS NOT NULL"
        )
        migrations.migrate(empty_db, "public")
        left = conn.execute("SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%(idempotency_key)%'").fetchall()
    assert left == [("dl_jobs_idempotency_key_key",)]


NAMED = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key) VALUES (gen_random_uuid(), 'q', 't', 'k', %s)
ON CONFLICT (idempotency_key) DO NOTHING
"""


def test_the_plain_protocols_unique_comes_and_goes_beside_producers(empty_db: str, module_db: str) -> None:
    """Every key stays one job by each way of adding, and other services may name the column while it is there."""
    migrations.migrate(empty_db, "public", plain_protocol=True)
    stop = threading.Event()

    def producing() -> list[str]:
        keys: list[str] = []
        with session(empty_db) as conn:
            while not stop.is_set():
                keys.append(f"p{len(keys)}")
                for _ in range(2):
                    enqueue(conn, idempotency_key=keys[-1])
        return keys

    with session(empty_db) as conn, ThreadPoolExecutor(1) as pool:
        assert [conn.execute(NAMED, ("once",)).rowcount for _ in range(2)] == [1, 0]
        assert migrations.drifted(conn) == []
        producer = pool.submit(producing)
        try:
            for wanted in (False, False, True, True, False):
                migrations.migrate(empty_db, "public", plain_protocol=wanted)
                assert (migrations.has_unique(conn), migrations.drifted(conn)) == (wanted, [])
                # The code of 0.2.0 needs the UNIQUE.
                assert value(conn, "SELECT max(oldest_code) FROM dl_migrations") == (1 if wanted else 2)
                since = value(conn, "SELECT count(*) FROM dl_jobs")
                until(lambda n=since: producer.done() or value(conn, "SELECT count(*) FROM dl_jobs") > n, "more jobs")
        finally:
            stop.set()
        keys = producer.result(PATIENCE)
        assert value(conn, "SELECT count(*) FROM dl_jobs") == len(keys) + 1
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            conn.execute(NAMED, ("once",))
        assert conn.execute(NAMED.replace(" (idempotency_key) DO", " DO"), ("once",)).rowcount == 0
    assert catalog(empty_db) == catalog(module_db)


def test_the_command_makes_the_unique_and_check_names_it(empty_db: str) -> None:
    for option, wanted in (("--plain-protocol", True), ("--no-plain-protocol", False)):
        done = CliRunner().invoke(main, ["migrate", option], env={"DL_DB_DSN": empty_db})
        assert done.exit_code == 0, done.output
        assert "on idempotency_key" in done.output
        with session(empty_db) as conn:
            findings = [finding.what for finding in database._schema_in(conn, "public")]
        assert any("the contract's UNIQUE" in text for text in findings) == wanted


def test_no_limit_of_the_database_ends_a_step_that_waits(contract: str, begin: Callable[[str], None]) -> None:
    """An index is built as soon as the transactions of before are over, however long they take."""
    begin(contract)
    with session(contract) as holder, session(contract) as conn, ThreadPoolExecutor(1) as pool:
        for limit in ("lock_timeout", "statement_timeout"):
            name = sql.Identifier(conn.info.dbname)
            conn.execute(sql.SQL("ALTER DATABASE {} SET {} = '50ms'").format(name, sql.Identifier(limit)))
        with holder.transaction():
            holder.execute("UPDATE dl_jobs SET priority = 1 WHERE task = 'queued'")
            rest = pool.submit(migrations.migrate, contract, "public")
            until(lambda: value(conn, BLOCKED), "the migration to meet the holder")
            waiting = MIGRATING.format("min(clock_timestamp() - query_start) > '200 ms'")
            until(lambda: rest.done() or value(conn, waiting), "the migration to wait longer than the limits")
        assert rest.result(PATIENCE) == ALL


@pytest.mark.long
def test_a_migration_killed_between_any_two_statements_is_finished_by_the_next(contract: str, module_db: str) -> None:
    """The process that migrates kills itself when so many statements were executed."""
    killed, dying = 0, [sys.executable, "-c", DYING, contract]
    while (ended := subprocess.call([*dying, str(5 + 2 * killed)], timeout=PATIENCE)) == -signal.SIGKILL:
        killed += 1
    assert ended == 0
    assert killed > 5
    assert ours(contract) == catalog(module_db)
    with session(contract) as conn:
        assert value(conn, MISPLACED) == 0


KNOWN = migrations.known()
LATEST = KNOWN[-1].number
# Files of a later version: a column, a trigger's function that knows it, and an index.
LATER = (
    migrations._read(
        LATEST + 1, "later_notes.sql", "-- functions: dl_jobs_place\nALTER TABLE dl_jobs ADD COLUMN note text;"
    ),
    migrations._read(
        LATEST + 2,
        "later_notes_index.sql",
        "-- outside a transaction\nDROP INDEX CONCURRENTLY IF EXISTS ix_notes;\n"
        "CREATE INDEX CONCURRENTLY ix_notes ON dl_jobs (note);\n",
    ),
)
LATER_NAMES = ["later_notes.sql", "later_notes_index.sql", "functions"]


def known_are(patch: pytest.MonkeyPatch, *later: Migration) -> None:
    patch.setattr(migrations, "known", lambda: (*KNOWN, *later))


def test_a_later_version_applies_each_of_its_files_once_and_refuses_a_changed_one(
    own_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_are(monkeypatch, *LATER)
    with session(own_db) as conn:
        with pytest.raises(SchemaError, match=f"the schema is at {LATEST}, this code needs {LATEST + 2}: run `data"):
            migrations.check(conn)
        assert migrations.missing(conn) == LATER_NAMES
        job_id = plain(conn)
        conn.execute("DROP FUNCTION dl_jobs_place CASCADE")
        assert migrations.migrate(own_db, "public") == [*LATER_NAMES, "trigger dl_jobs_place_ins, which is missing"]
        migrations.check(conn)
        assert row(conn, job_id)["note"] is None
        assert value(conn, "SELECT indisvalid FROM pg_index WHERE indexrelid = 'ix_notes'::regclass")
        assert migrations.migrate(own_db, "public") == []
        known_are(monkeypatch, replace(LATER[0], text=LATER[0].text + "-- changed"), LATER[1])
        for step in (lambda: migrations.migrate(own_db, "public"), lambda: migrations.missing(conn)):
            with pytest.raises(SchemaError, match=r"later_notes\.sql is not the file that was applied"):
                step()


OLD_INDEXES = {
    "finished": "finished_at) WHERE finished_at IS NOT NULL",
    "queued": "created_at) WHERE enum_eq(status, 'queued')",
    "dead": "queue, finished_at) WHERE status IN ('failed', 'lost')",
}


def test_checks_of_the_first_version_become_one_trigger_and_its_sums_get_bounds(own_db: str, module_db: str) -> None:
    """Its code goes on beside them; a statement that writes no such column asks for none of them.

    Its indexes of lists get their further columns, also where an earlier attempt was cut off.
    """
    with session(own_db) as conn:
        conn.execute("DROP TRIGGER dl_jobs_check ON dl_jobs")
        conn.execute("CREATE FUNCTION dl_jobs_depth() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
        conn.execute("CREATE TRIGGER dl_jobs_depth BEFORE INSERT ON dl_jobs EXECUTE FUNCTION dl_jobs_depth()")
        for constraint in re.findall(r"CONSTRAINT IF EXISTS (\w+)", KNOWN[0].text):
            conn.execute(f"ALTER TABLE dl_jobs ADD CONSTRAINT {constraint} CHECK (attempt < 9)".encode())
        for name, columns in OLD_INDEXES.items():
            conn.execute(f"DROP INDEX ix_dl_jobs_{name}; CREATE INDEX ix_dl_jobs_{name} ON dl_jobs ({columns}".encode())
        conn.execute("CREATE INDEX ix_dl_jobs_new ON dl_jobs (status)")
        conn.execute("ALTER TABLE dl_workers DROP COLUMN reload_error")
        for table in ("dl_totals", "dl_spans", "dl_needs", "dl_durations"):
            conn.execute(
                f"ALTER TABLE {table} DROP CONSTRAINT {table}_chk, ADD CONSTRAINT {table}_chk CHECK (true)".encode()
            )
        conn.execute("INSERT INTO dl_durations VALUES ('t', '{1}', 2::bigint ^ 62, now()), ('u', '{1}', 1, now())")
        conn.execute("DELETE FROM dl_migrations WHERE number >= 2")
    assert migrations.migrate(own_db, "public") == [*(each.name for each in KNOWN), "functions"]
    with session(own_db) as conn:
        assert conn.execute("SELECT array_agg(task) FROM dl_durations").fetchone() == (["u"],)
    upgraded, made = catalog(own_db), catalog(module_db)
    del upgraded["order"], made["order"]  # a dropped column leaves its number
    assert upgraded == made


def test_a_file_that_fails_leaves_nothing_and_can_be_run_again(own_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = LATER
    known_are(monkeypatch, replace(first, text=first.text + "\nSELECT 1 / 0;"), second)
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrations.migrate(own_db, "public")
    known_are(monkeypatch, first, replace(second, text=second.text + "SELECT 1 / 0;\n"))
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrations.migrate(own_db, "public")
    known_are(monkeypatch, first, second)
    assert migrations.migrate(own_db, "public") == LATER_NAMES[1:]


def test_check_says_what_to_do(empty_db: str) -> None:
    """A queue in public does not stand in for a schema that was never migrated."""
    with session(empty_db) as conn:
        assert migrations.missing(conn) == ALL
        with pytest.raises(SchemaError, match="has no dataloader schema: run `dataloader migrate`"):
            migrations.check(conn)
        migrations.migrate(empty_db, "public")
        conn.execute('CREATE SCHEMA "Other"')
        for name in ("Other", "missing"):
            with session(empty_db, name) as other, pytest.raises(SchemaError, match="no dataloader schema"):
                migrations.check(other)
        assert migrations.missing(conn) == []
        migrations.check(conn)
        conn.execute("DELETE FROM dl_migrations WHERE number = 0")
        with pytest.raises(SchemaError, match=r"functions are missing.*: run `dataloader migrate`"):
            migrations.check(conn)
        conn.execute("UPDATE dl_migrations SET name = '0001_contract.sql' WHERE number = 1")
        for step in (migrations.check, migrations.missing, lambda _: migrations.migrate(empty_db, "public")):
            with pytest.raises(SchemaError, match=r"before 0\.2\.0, which was never released"):
                step(conn)


@pytest.mark.parametrize("oldest_code", [1, 99])
def test_a_newer_schema_is_used_unless_it_says_that_this_code_is_too_old(own_db: str, oldest_code: int) -> None:
    """And what the newer dataloader has changed has not drifted."""
    with session(own_db) as conn:
        conn.execute("DROP FUNCTION dl_wake_all; DROP TRIGGER dl_jobs_notify_ins ON dl_jobs")
        conn.execute("UPDATE dl_migrations SET checksum = 'of newer functions' WHERE number = 0")
        assert migrations.drifted(conn) == []
        conn.execute("INSERT INTO dl_migrations VALUES (99, '0099_future.sql', 'x', %s)", (oldest_code,))
        assert migrations.drifted(conn) == []
        for step in (
            lambda: migrations.check(conn),
            lambda: migrations.missing(conn) == [],
            lambda: migrations.migrate(own_db, "public") == [],
        ):
            if oldest_code == 99:
                with pytest.raises(SchemaError, match="needs code that knows migration 99: upgrade dataloader"):
                    step()
            else:
                assert step() in (None, True)
        assert value(conn, "SELECT checksum FROM dl_migrations WHERE number = 0") == "of newer functions"


def test_the_queue_may_live_in_any_schema(empty_db: str) -> None:
    schema = 'two words "quoted"'
    assert migrations.migrate(empty_db, schema) == ALL
    assert migrations.migrate(empty_db, schema) == []
    one, two = (Worker(empty_db, f"host:{number}:boot", schema) for number in (1, 2))
    with one.conn, two.conn:
        migrations.check(one.conn)
        job_id = enqueue(one.conn)
        assert two.notes() == ["q"]
        assert two.finish(two.take()) == "succeeded"
        assert state(one.conn, job_id) == ("succeeded", 1)
    with session(empty_db, schema) as conn:
        assert value(conn, "SELECT to_regclass('public.dl_jobs')") is None
        assert migrations.drifted(conn) == []
        conn.execute("ALTER TABLE dl_jobs DISABLE TRIGGER USER; ALTER TABLE dl_parents DISABLE TRIGGER USER")
        assert len(migrations.drifted(conn)) == value(conn, "SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal")


# An interrupted CREATE INDEX CONCURRENTLY leaves an index of this kind.
INVALID = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_dl_jobs_time'::regclass"
# Changes that a person may make to the schema, and the report on each.
DRIFTS = {
    "ALTER TABLE dl_jobs DISABLE TRIGGER dl_jobs_notify_ins": "trigger dl_jobs_notify_ins is disabled",
    "ALTER TABLE dl_jobs ENABLE REPLICA TRIGGER dl_jobs_place_ins": "trigger dl_jobs_place_ins is disabled",
    "DROP TRIGGER dl_jobs_journal_ins ON dl_jobs": "trigger dl_jobs_journal_ins is missing",
    "CREATE OR REPLACE TRIGGER dl_jobs_forget AFTER DELETE ON dl_jobs FOR EACH STATEMENT"
    " EXECUTE FUNCTION notify_job_ready()": "trigger dl_jobs_forget is changed",
    "DROP INDEX ix_dl_jobs_idempotency": "index ix_dl_jobs_idempotency is missing",
    INVALID: "index ix_dl_jobs_time is invalid",
    "CREATE OR REPLACE FUNCTION dl_is_running(p_key_hash int) RETURNS boolean LANGUAGE sql AS 'SELECT false'":
        "function dl_is_running is changed",
    "ALTER FUNCTION dl_unpark_freed SECURITY DEFINER": "function dl_unpark_freed is changed",
    "ALTER FUNCTION dl_prune RESET enable_sort": "function dl_prune is changed",
    "DROP FUNCTION dl_wake_all": "function dl_wake_all is missing",
    "CREATE OR REPLACE FUNCTION dl_jobs_place() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'":
        "function dl_jobs_place is changed",
}  # fmt: skip


def test_drift_is_named_and_ended(own_db: str, module_db: str, as_superuser: Callable[[str], str]) -> None:
    with session(own_db) as conn, session(as_superuser(own_db)) as superuser:
        assert migrations.drifted(conn) == []
        for change in DRIFTS:
            (superuser if change is INVALID else conn).execute(change.encode())
        drifted = migrations.drifted(conn)
        assert sorted(drifted) == sorted(DRIFTS.values())
        findings = [finding.what for finding in database._schema_in(conn, "public")]
        assert f"not as shipped: {'; '.join(drifted)}" in findings
        mended = migrations.migrate(own_db, "public")
        assert sorted(line.replace(", which", "") for line in mended) == sorted(DRIFTS.values())
        assert migrations.drifted(conn) == []
    before, after = catalog(module_db), catalog(own_db)
    for part in CATALOG:
        assert after[part] == before[part], part


@pytest.mark.parametrize("what", ["later files", "a trigger"])
def test_a_change_is_made_beside_a_working_queue(own_db: str, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A transaction that holds the table is waited for in short steps; nobody waits behind us."""
    if what == "later files":
        known_are(monkeypatch, *LATER)
        monkeypatch.setattr(migrations, "PAUSE_SEC", 0.2)
    with session(own_db) as holder, session(own_db) as conn, ThreadPoolExecutor(1) as pool:
        if what == "a trigger":
            holder.execute("DROP TRIGGER dl_jobs_notify_ins ON dl_jobs")
        with holder.transaction():
            plain(holder)
            rest = pool.submit(migrations.migrate, own_db, "public")
            until(lambda: value(conn, BLOCKED), "the migration to meet the holder")
            until(lambda: not value(conn, BLOCKED), "it to give way")
        missing = ["trigger dl_jobs_notify_ins, which is missing"]
        assert rest.result(PATIENCE) == (missing if what == "a trigger" else LATER_NAMES)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_without_utf8_is_refused(empty_db: str, encoding: str, as_superuser: Callable[[str], str]) -> None:
    name = f"{conninfo_to_dict(empty_db)['dbname']}_{encoding.lower()}"
    made = sql.SQL("CREATE DATABASE {} ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    with psycopg.connect(as_superuser(empty_db), autocommit=True) as superuser:
        superuser.execute(made.format(sql.Identifier(name), encoding))
        dsn = make_conninfo(as_superuser(empty_db), dbname=name)
        try:
            for refused in (
                lambda: migrations.migrate(dsn, "public"),
                lambda: migrations.grant(dsn, "public", []),
                lambda: migrations.check(conn),
                lambda: migrations.missing(conn),
            ):
                with session(dsn) as conn, pytest.raises(SchemaError, match=f"encoding is {encoding}.*ENCODING 'UTF8'"):
                    refused()
            with session(dsn) as conn:
                assert not value(conn, "SELECT count(*) FROM pg_class WHERE relname LIKE 'dl\\_%'")
            findings = database.queue_findings(config.load(dl_db_dsn=dsn, _env_file=None), dsn)
            (error,) = [each for each in findings if each.level is database.Level.ERROR]
            assert error.what == f"the database's encoding is {encoding}, and only UTF8 holds every text of a job"
            assert error.advice.startswith("CREATE DATABASE")
        finally:
            superuser.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
