"""The schema: made in an empty database, adopted where the contract's tables are, upgraded while the queue is in use.

`sql/schema.sql` is the whole schema; functions/ and rights.sql are applied whenever they have changed. From 0002 on
`sql/migrations/NNNN_name.sql` change a database of an earlier version. Their headers may say:

    -- oldest code: N            the lowest migration that code must know to use the result; 1 is version 0.2.0
    -- outside a transaction     each statement stands alone, has no time limit, and may be run again
    -- functions: name, name     applied before the migration, in its transaction: its triggers call these
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from uuid import UUID

from psycopg import errors, sql

from dataloader import periods
from dataloader.config import ConfigError
from dataloader.queue import db, drift, fields, probe
from dataloader.queue.db import Conn

# Outside the int4 range, in which the keys' advisory locks are (hashtext). One lock for a whole database.
ADVISORY_LOCK = 0x646C_6D69_6772_6174
LOCK_TIMEOUT = "200ms"  # the longest that a producer waits behind a migration
VACUUM_TIMEOUT = "30s"  # longer than any usual deadlock_timeout, after which the server cancels an autovacuum
PAUSE_SEC = 1.0
# Then the server ends a migration that was stopped or cut off while it held the tables.
IDLE_SEC = periods.seconds("MIGRATION_IDLE_SEC", 5.0)
WAIT_SEC = periods.seconds("MIGRATION_WAIT_SEC", 600.0)
BATCH = 500  # rows that are changed in one transaction
FIT_LISTED = 1_000  # of those that broke a check `migrate` names so many
KINDS = ("farm", "producer", "reader")  # of roles, beside the owner
FIRST = "schema of 0.2.0"  # the name of number 1 in dl_migrations
_ADOPT = db.statements("adopt.sql", "misplaced")
_RIGHTS = db.statements("rights.sql", "tables")
_HEADER = re.compile(r"^-- (oldest code|outside a transaction|functions)(?:: (.*))?$", re.MULTILINE)
# Behind a function: a part of it that stands in several places, each as {its name}; it ends with an empty line.
_PART = re.compile(r"^-- part: (\w+)\n(.*?)\n\n", re.MULTILINE | re.DOTALL)
# A semicolon at a line's end closes a statement, unless it is inside a dollar-quoted body.
_STATEMENT = re.compile(r"(?>(\$\w*\$).*?\1|.)+?(?:;[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


class SchemaError(Exception):
    """This code cannot use the schema; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: `number` 0 stands for all of functions/, which may be applied again. The header as the module says."""

    number: int
    name: str
    text: str
    oldest_code: int = 0
    in_transaction: bool = True
    functions: tuple[str, ...] = ()

    @property
    def checksum(self) -> str:
        """sha256 of the text, which shows that a file has changed."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@cache
def known() -> tuple[Migration, ...]:
    """The numbered migrations of this code, in order, from 0002 on."""
    return tuple(_read(int(name[:4]), name, text) for name, text in _files("migrations"))


@cache
def functions() -> Migration:
    """All of functions/, which follows the numbered ones, and the rights on what it makes."""
    text = "\n".join(text for _, text in _files("functions"))
    for part in _PART.finditer(text):
        text = text.replace(part[0], "").replace(f"{{{part[1]}}}", part[2].strip())
    return Migration(0, "functions", f"{fields.filled(text)}\n{_RIGHTS['spread']};\n")


def _files(folder: str) -> list[tuple[str, str]]:
    files = [file for file in (db.sql_folder() / folder).iterdir() if file.name.endswith(".sql")]
    return sorted((file.name, file.read_text("utf-8")) for file in files)


def migrate(dsn: str, schema: str, plain_protocol: bool | None = None) -> list[str]:
    """Bring the queue in `schema` up to date; returns what was applied, and what drifted or broke a check, in words.

    `plain_protocol`: with the contract's UNIQUE on idempotency_key, which `ON CONFLICT (idempotency_key)` in other
    services needs, or with a cheaper partial index; None keeps what is there, and a new queue gets the partial index.
    Safe to run several times at once and beside a working farm. Raises SchemaError for a newer schema, a changed file,
    or a pooler.
    """
    with _session(dsn, schema) as conn, _alone(conn):
        if conn.execute("SELECT current_schema()").fetchone() == (None,):
            conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        done = [] if _exists(conn) else _make(conn)
        for migration in _missing(conn):
            _apply(conn, migration)
            done.append(migration.name)
        done += _use_unique(conn, plain_protocol)
        for (index,) in conn.execute(_ADOPT["old_indexes"]).fetchall():
            conn.execute(sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}").format(sql.Identifier(index)))
        return [*done, *_mend(conn)]


def grants(schema: str, roles: Iterable[tuple[str, str]]) -> str:
    """The script that gives `roles` (kind of KINDS and name) their rights; the owner may run it, and again."""
    lines: list[sql.Composable] = [sql.SQL("BEGIN;\nSET LOCAL search_path = {};").format(sql.Identifier(schema))]
    columns = [sql.Identifier(name) for name in ("job_id", "created_at", *(field.name for field in fields.OF_NEW_JOB))]
    for kind, role in roles:
        names = {"schema": sql.Identifier(schema), "role": sql.Identifier(role), "columns": sql.SQL(", ").join(columns)}
        lines.append(sql.SQL(f"{_RIGHTS[kind]};").format(**names))
    lines.append(sql.SQL(f"{_RIGHTS['spread']};\nCOMMIT;"))
    return sql.SQL("\n").join(lines).as_string()


def closing(database: str, roles: Iterable[tuple[str, str]]) -> str:
    """The statements that let no role but these, and those with a GRANT of their own, connect to the database."""
    names = sql.SQL(", ").join(sql.Identifier(role) for role in dict.fromkeys(role for _, role in roles))
    text = sql.SQL("REVOKE CONNECT ON DATABASE {0} FROM PUBLIC; GRANT CONNECT ON DATABASE {0} TO {1};")
    return text.format(sql.Identifier(database), names).as_string()


def grant(dsn: str, schema: str, roles: Collection[tuple[str, str]]) -> None:
    """Give `roles`, as `grants` does, their rights; raises SchemaError for a role that does not exist."""
    with _session(dsn, schema) as conn, _alone(conn):
        for _, role in roles:
            if conn.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).fetchone() is None:
                made = sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)).as_string()
                raise SchemaError(f"there is no role {role}: correct the name, or make it: {made}")
        conn.execute(grants(schema, roles).encode())


def missing(conn: db.Connection) -> list[str]:
    """The names of the files that `migrate` would apply; raises SchemaError as `migrate` does."""
    _require_utf8(conn)
    if not _exists(conn):
        return [FIRST, functions().name]
    return [migration.name for migration in _missing(conn)]


def drifted(conn: db.Connection) -> list[str]:
    """The triggers, indexes and functions that `migrate` would put back; empty unless this code has made the schema."""
    return [str(each) for each in _drifts(conn)]


def faults(conn: Conn) -> list[str]:
    """Rows that this role does not see, else triggers and indexes that do not work; see `drifted` for functions."""
    if hidden := drift.hidden(conn):
        return [hidden]
    is_ours = max(_applied(conn)) == expected()[0]
    return [str(each) for each in drift.of_tables(conn)] if is_ours else []


def expected() -> tuple[int, str]:
    """The number of this code's last migration, and the checksum of its functions."""
    return max((migration.number for migration in known()), default=1), functions().checksum


def check(conn: db.Connection) -> None:
    """Raise SchemaError unless this code may use the schema that `conn` sees; a newer schema may forbid it."""
    _require_utf8(conn)
    if not _exists(conn):
        has_tables, _ = conn.execute(_ADOPT["tables"]).fetchone() or (False, False)
        fault = "the tables are not adopted yet" if has_tables else "the database has no dataloader schema"
        raise SchemaError(f"{fault}: run `dataloader migrate`")
    if hidden := drift.hidden(conn):
        raise SchemaError(hidden)
    applied = _applied(conn)
    latest, checksum = expected()
    if max(applied) < latest:
        raise SchemaError(f"the schema is at {max(applied)}, this code needs {latest}: run `dataloader migrate`")
    if 0 not in applied:
        raise SchemaError(
            "the schema's functions are missing, a migration has stopped before them: run `dataloader migrate`"
        )
    oldest_code = max(each["oldest_code"] for each in applied.values())
    if oldest_code > latest:
        raise SchemaError(f"the schema needs code that knows migration {oldest_code}: upgrade dataloader")
    if applied[0]["checksum"] == checksum and not drift.is_bound(conn):
        raise SchemaError("the schema was renamed, and its functions have the former name: run `dataloader migrate`")


def _require_utf8(conn: db.Connection) -> None:
    """Raise SchemaError where the database cannot store every text of a job, and so would refuse the end of a run."""
    encoding = conn.info.parameter_status("server_encoding")
    if encoding not in ("UTF8", None):  # None: a pooler does not pass it on
        made = "CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0"
        raise SchemaError(f"the database's encoding is {encoding}, and only UTF8 holds every text of a job: {made}")


def _read(number: int, name: str, text: str) -> Migration:
    says = dict(_HEADER.findall(text))
    return Migration(
        number,
        name,
        text,
        oldest_code=int(says.get("oldest code", 0)),
        in_transaction="outside a transaction" not in says,
        functions=tuple(says["functions"].split(", ")) if "functions" in says else (),
    )


def _session(dsn: str, schema: str) -> db.Connection:
    """Without the limits that a role or a database may have; one that stops in a transaction frees its locks soon."""
    conn = db.connect(
        dsn, name="dl-migrate", schema=schema, answer_within=7 * 86_400, idle_in_transaction_timeout=IDLE_SEC
    )
    try:
        probe.require_session(conn, dsn)  # for the lock and these settings
        _require_utf8(conn)
        conn.execute("SET statement_timeout = 0; SET lock_timeout = 0")
        if conn.info.server_version >= 170_000:
            conn.execute("SET transaction_timeout = 0")
    except (ConfigError, SchemaError) as e:
        conn.close()
        raise SchemaError(str(e)) from None
    return conn


def _exists(conn: db.Connection) -> bool:
    # Not the search_path: a queue in `public` must not stand in for a schema that was never migrated.
    found = conn.execute("SELECT to_regclass(quote_ident(current_schema()) || '.dl_migrations') IS NOT NULL")
    return found.fetchone() == (True,)


def _missing(conn: db.Connection) -> list[Migration]:
    applied = _applied(conn)
    if max(applied) > expected()[0]:
        check(conn)
        return []  # A newer dataloader was here: its functions serve this code too.
    for migration in known():
        if migration.number in applied and applied[migration.number]["checksum"] != migration.checksum:
            raise SchemaError(f"{migration.name} is not the file that was applied: restore it and add a new migration")
    todo = [migration for migration in known() if migration.number not in applied]
    has_functions = 0 in applied and applied[0]["checksum"] == functions().checksum
    return todo if has_functions and not todo else [*todo, functions()]


def _applied(conn: Conn) -> dict[int, db.Row]:
    """The applied migrations by number; raises SchemaError for a schema that no released version has made."""
    rows = db.rows(conn, "SELECT number, name, checksum, oldest_code FROM dl_migrations")
    applied = {row["number"]: row for row in rows}
    if applied.get(1, {}).get("name") != FIRST:
        raise SchemaError("the schema was made by code before 0.2.0, which was never released: use an empty database")
    return applied


def _make(conn: db.Connection) -> list[str]:
    """Make the schema, of the contract's tables where they are; returns its names, and the rows that were mended."""
    parts = {name: f"{text};\n" for name, text in db.statements("schema.sql").items()}
    has_tables, has_begun = conn.execute(_ADOPT["tables"]).fetchone() or (False, False)
    mended: list[str] = []
    if has_tables:
        if not has_begun:
            place = [*_bodies("dl_jobs_place", "dl_jobs_check"), f"{_ADOPT['begin']};\n"]
            _patiently(conn, "the begin of the adoption", "\n".join([parts["columns"], *place, parts["checks"]]))
        _in_batches(conn, "unplaced", "place")
        unfit = _in_batches(conn, "unfit", "fit")
        mended = [f"job {job_id}, which broke a check of dl_jobs" for job_id in unfit[:FIT_LISTED]]
        mended += [f"and {len(unfit) - FIT_LISTED} more jobs"] if len(unfit) > FIT_LISTED else []
        for statement in [each for index in drift.index_drifts(conn, parts["indexes"]) for each in index.mend]:
            conn.execute(statement.encode())
        before, behind = [], [f"{_ADOPT['finish']};\n"]
    else:
        before, behind = [parts[name] for name in ("contract", "columns", "indexes")], [parts["checks"]]
    text = "\n".join([*before, parts["tables"], functions().text, *behind, parts["triggers"]])
    # The code of 0.2.0 adds jobs with ON CONFLICT (idempotency_key), which needs the contract's UNIQUE.
    oldest_code = 1 if has_tables else 2
    _patiently(conn, FIRST, text, [Migration(1, FIRST, "", oldest_code=oldest_code), *known(), functions()])
    return [*mended, FIRST, functions().name]


def _bound(conn: db.Connection, text: str) -> str:
    """The text with the name of the schema that `conn` sees, as an identifier and as a literal."""
    names = conn.execute("SELECT quote_ident(current_schema()), quote_literal(current_schema())").fetchone() or ()
    by_place = dict(zip(("{schema}", "{schema_name}"), names, strict=True))
    return re.sub(r"{schema(?:_name)?}", lambda place: by_place[place[0]], text)


def _bodies(*names: str) -> list[str]:
    return [each.text for each in drift.shipped(functions().text) if each.name in names]


def _drifts(conn: db.Connection) -> list[drift.Drift]:
    try:
        is_ours = _exists(conn) and not _missing(conn) and max(_applied(conn)) == expected()[0]
    except SchemaError:
        is_ours = False
    return drift.drifts(conn, _bound(conn, functions().text)) if is_ours else []


def _mend(conn: db.Connection) -> list[str]:
    drifts = _drifts(conn)
    if any(not each.mend for each in drifts):
        _apply(conn, functions())
    for each in drifts:
        for statement in each.mend if each.is_index else ():
            conn.execute(statement.encode())
        if each.mend and not each.is_index:
            _patiently(conn, each.what, ";\n".join(each.mend))
    return [f"{each.what}, which {each.how}" for each in drifts]


def has_unique(conn: db.Connection) -> bool:
    """Whether dl_jobs has the contract's UNIQUE on idempotency_key."""
    return conn.execute(_ADOPT["has_unique"]).fetchone() == (True,)


def _use_unique(conn: db.Connection, wanted: bool | None) -> list[str]:
    if wanted is None or wanted == has_unique(conn):
        return []
    for statement in _STATEMENT.finditer(_ADOPT["unique" if wanted else "no_unique"]):
        if "CONCURRENTLY" in statement[0]:
            conn.execute(statement[0].encode())
        else:
            _patiently(conn, "the UNIQUE on idempotency_key", statement[0])
    return [f"{'UNIQUE' if wanted else 'partial index'} on idempotency_key"]


def _in_batches(conn: db.Connection, listing: str, change: str) -> list[UUID]:
    """Change the jobs that a statement of adopt.sql lists, batch by batch, locked ones later; returns their ids."""
    left = [job_id for (job_id,) in conn.execute(_ADOPT[listing])]
    changed: list[UUID] = []
    deadline = time.monotonic() + WAIT_SEC
    while left:
        if time.monotonic() > deadline:
            raise SchemaError(f"others have held rows of dl_jobs for {WAIT_SEC:g} s, such as job {left[0]}")
        done, locked = conn.execute(_ADOPT[change], {"job_ids": left[:BATCH]}).fetchone() or ((), ())
        changed += done or ()
        left = left[BATCH:] + (locked or [])
        if locked and not done:
            time.sleep(0.1)
    return changed


@contextmanager
def _alone(conn: db.Connection) -> Iterator[None]:
    """Hold the migrations' lock. Polled: a waiting statement's snapshot would stop CREATE INDEX CONCURRENTLY."""
    deadline = time.monotonic() + WAIT_SEC
    while conn.execute("SELECT pg_try_advisory_lock(%s)", (ADVISORY_LOCK,)).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise SchemaError(f"another migration has been running for more than {WAIT_SEC:g} s")
        time.sleep(0.1)
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute("SELECT pg_advisory_unlock(%s)", (ADVISORY_LOCK,))


def _apply(conn: db.Connection, migration: Migration) -> None:
    if migration.in_transaction:
        # The rights, because farms use new tables at once.
        text = "\n".join([*_bodies(*migration.functions), migration.text, f"{_RIGHTS['spread']};"])
        _patiently(conn, migration.name, text, [migration])
    else:
        for statement in _STATEMENT.finditer(migration.text):
            conn.execute(statement[0])
        _record(conn, migration)


def _patiently(conn: db.Connection, name: str, text: str, records: Iterable[Migration] = ()) -> None:
    """Execute in a transaction; ask for table locks briefly, and again: all later comers wait behind a waiting lock."""
    deadline = time.monotonic() + WAIT_SEC
    for attempt in count():
        try:
            with conn.transaction():
                if attempt:
                    # An autovacuum gives way only to a lock request older than deadlock_timeout.
                    conn.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(VACUUM_TIMEOUT))
                    for table in ("dl_jobs", "dl_job_events"):
                        if conn.execute("SELECT to_regclass(%s) IS NOT NULL", (table,)).fetchone() == (True,):
                            conn.execute(f"LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE".encode())
                conn.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(LOCK_TIMEOUT))
                conn.execute(_bound(conn, text).encode())
                for record in records:
                    _record(conn, record)
            return
        except (errors.LockNotAvailable, errors.DeadlockDetected) as e:
            if time.monotonic() > deadline:
                raise SchemaError(f"{name}: others have held the tables for {WAIT_SEC:g} s, see pg_locks") from e
            time.sleep(PAUSE_SEC)


def _record(conn: db.Connection, migration: Migration) -> None:
    conn.execute(
        "INSERT INTO dl_migrations (number, name, checksum, oldest_code) VALUES (%s, %s, %s, %s)"
        " ON CONFLICT (number) DO UPDATE SET name = excluded.name, checksum = excluded.checksum, applied_at = now()",
        (migration.number, migration.name, migration.checksum, migration.oldest_code),
    )
