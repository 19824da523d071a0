"""Checks of the databases; a part of `dataloader check`.

A function that takes a connection or a DSN reads, and changes nothing. The others make findings of facts, and are pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from dataloader.config import Settings, WorkerSpec
from dataloader.farm.process import hostname
from dataloader.queue import db, migrations, probe
from dataloader.queue.reports import alerts, stats

VERSIONS = range(15, 19)  # the major versions that the tests run on
API_PROCESSES = 2  # the default of `dataloader api`
LISTENERS_MOST = 500  # idle workers of all farms, until a trigger costs the server more than 20 ms of CPU
LISTENER_MS = 0.04  # of the server's CPU for each idle worker and trigger: docs/scaling.md
ROLES = "`dataloader migrate --roles farm=NAME`"
FEW_RIGHTS = "as a role that may create in the schema and owns its tables"

# Advice by a part of the error of the server or of libpq; a server may speak another language.
_HELP = {
    "certificate": "name the host as the certificate does; sslrootcert is the file of its authority; renew an old one",
    "does not support SSL": "turn on ssl at the server, or choose another sslmode",
    "unsupported startup parameter": probe.DIRECT,
    "too many": "raise max_connections or the CONNECTION LIMIT, or end sessions that are not needed",
    "connection slots are reserved": "raise max_connections, or end sessions that are not needed",
    "password": "correct the role or its password: PG_USER and PG_PASSWORD, or those in the DSN",
    "does not exist": "correct the name, or create it",
    "read-only": "name the primary: this server is a standby or read-only",
}
_REFUSED = "the server refuses: correct role, password and database, see its pg_hba.conf, or wait until it is up"
_ELSE = "correct host and port; see that PostgreSQL runs there and lets this machine in"

_SQL = db.statements("check.sql")


class Level(StrEnum):
    """How bad a finding is; an error keeps the farm from working."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """The result of one check, with advice where something is wrong."""

    level: Level
    about: str
    what: str
    advice: str = ""


ok, warning, error = (partial(Finding, level) for level in Level)


def database_findings(settings: Settings, dsn: str | None) -> list[Finding]:
    """Findings on the queue's database at `dsn`, and on the database that pipelines write to."""
    if dsn is None:
        advice = "set DL_DB_DSN or PG_HOST and PG_DATABASE; `dataloader up` brings a PostgreSQL along"
        return [error("database", "no database is configured", advice)]
    findings, target_dsn = queue_findings(settings, dsn), settings.target_dsn or dsn
    if target_dsn == dsn and any(f.level is Level.ERROR and f.about in ("database", "session") for f in findings):
        return findings  # the target would repeat the error
    return [*findings, target_finding(settings, target_dsn)]


# --- the queue's database ---


def queue_findings(settings: Settings, dsn: str) -> list[Finding]:
    """Findings on the queue's database; a question that fails is a finding, and the others go on."""
    try:
        conn = _connect(settings, dsn, settings.pg_schema_queue)
    except psycopg.Error as e:
        return [unreachable("database", dsn, e)]
    with conn:
        findings = [ok("database", db.shown(dsn)), version(conn.info.server_version)]
        for about in _QUESTIONS:
            findings += _asked(about, conn, settings, dsn)
            if about == "session" and findings[-1].level is Level.ERROR:
                break  # through such a pooler the other answers are useless
        return findings


def session_findings(conn: db.Connection, settings: Settings, dsn: str) -> list[Finding]:
    """The findings on the queue's database that need no session but `conn`: all except those on a session itself."""
    findings = [version(conn.info.server_version)]
    for about in _QUESTIONS.keys() - {"session"}:
        findings += _asked(about, conn, settings, dsn, conn.transaction())
    return sorted(findings, key=lambda finding: (finding.level is not Level.ERROR, finding.about))


def _asked(
    about: str, conn: db.Connection, settings: Settings, dsn: str, block: AbstractContextManager[Any] | None = None
) -> list[Finding]:
    try:
        with block or nullcontext():
            return _QUESTIONS[about](conn, settings, dsn)
    except psycopg.Error as e:
        return [error(about, db.words(e), "see the server's log")]


def _connect(settings: Settings, dsn: str, schema: str) -> db.Connection:
    within = settings.pg_connect_timeout
    return db.connect(dsn, name="dl-check", schema=schema, connect_timeout=within, answer_within=10)


def _facts(conn: db.Connection, name: str, **parameters: Any) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_SQL[name], parameters).fetchall()


def unreachable(about: str, dsn: str, trouble: psycopg.Error) -> Finding:
    if probe.is_poolers_refusal(trouble):
        return error(about, f"a pooler refuses our sessions: {db.words(trouble)}", probe.DIRECT)
    other = _REFUSED if re.search(r"failed: \w+:  ", str(trouble)) else _ELSE  # libpq's own errors have no such begin
    advice = next((advice for part, advice in _HELP.items() if part in str(trouble)), other)
    return error(about, f"{db.shown(dsn)}: {db.words(trouble)}", advice)


def version(number: int) -> Finding:
    """The finding on the server's version in libpq's form: 150018 is 15.18."""
    major, name = number // 10_000, f"PostgreSQL {number // 10_000}.{number % 10_000}"
    between = f"PostgreSQL {VERSIONS[0]} to {VERSIONS[-1]}"
    if major in VERSIONS:
        return ok("version", name)
    if major < VERSIONS[0]:
        return error("version", f"{name} is too old", f"use {between}")
    return warning("version", f"{name} is newer than the tested versions", between)


def _session(conn: db.Connection, settings: Settings, dsn: str) -> list[Finding]:
    """The finding on a worker's session: it needs a session of its own, a working LISTEN, and our options in force."""
    with _connect(settings, dsn, settings.pg_schema_queue) as other:
        heard = probe.hears(conn, other)
    row = conn.execute("SELECT current_setting('idle_in_transaction_session_timeout') = '1min'").fetchone()
    if not heard and conn.is_direct:
        advice = "see the server's load; without notifications jobs start up to DL_CLAIM_BACKOFF_SEC late"
        return [warning("session", f"no NOTIFY arrived within {probe.HEARD_WITHIN:g} s", advice)]
    if not heard:
        return [error("session", probe.POOLED, probe.DIRECT)]
    if not probe.finds_schema(conn):
        return [error("session", probe.ASTRAY, probe.GUIDED)]
    if row != (True,):
        return [warning("session", "a pooler drops our options, search_path and keepalives among them", probe.DIRECT)]
    return [ok("session", f"{'direct' if conn.is_direct else 'through a pooler in session mode'}; LISTEN works")]


def _schema(conn: db.Connection, settings: Settings, dsn: str) -> list[Finding]:
    with db.in_force(conn):
        return _schema_in(conn, settings.pg_schema_queue)


def _schema_in(conn: db.Connection, name: str) -> list[Finding]:
    (rights,), tables = _facts(conn, "schema_rights", schema=name), _facts(conn, "table_rights", schema=name)
    may_migrate = rights["may_create"] and all(table["owned"] for table in tables)
    if rights["found"] and not rights["may_use"]:
        return [error("privileges", f"no USAGE on schema {name}", f"GRANT USAGE ON SCHEMA {name}")]
    functions = _facts(conn, "function_rights", schema=name)
    findings = privileges(name, rights, tables, functions, _facts(conn, "strangers"))
    if any(table["name"] == "dl_migrations" and table["lacking"] for table in tables):
        return findings
    migrate = "run `dataloader migrate`" + ("" if may_migrate else f" {FEW_RIGHTS}; this one may not")
    try:
        migrations.check(conn)
        todo = ", ".join(migrations.missing(conn))
        findings.append(warning("schema", f"not up to date: {todo}", migrate) if todo else ok("schema", "up to date"))
    except migrations.SchemaError as e:
        text, _, advice = str(e).partition(": ")
        findings.append(error("schema", text, migrate if "migrate" in advice else advice))
    else:
        if migrations.has_unique(conn):
            text = "the contract's UNIQUE on idempotency_key costs each job without a key 0.2 KB of WAL"
            advice = "`dataloader migrate --no-plain-protocol`, once no service or older farm names it in ON CONFLICT"
            findings.append(Finding(Level.OK, "schema", text, advice))
    if drifted := migrations.drifted(conn):
        findings.append(warning("schema", f"not as shipped: {'; '.join(drifted)}", migrate))
    return findings


def privileges(
    schema: str,
    rights: Mapping[str, Any],
    tables: Iterable[Mapping[str, Any]],
    functions: Iterable[Mapping[str, Any]],
    strangers: Iterable[Mapping[str, Any]],
) -> list[Finding]:
    """Findings on the rights that the processes need and this role lacks, and on rights that are not needed."""
    findings = []
    for table in tables:
        if table["lacking"]:
            lacking, name = ", ".join(table["lacking"]), table["name"]
            findings.append(error("privileges", f"this role has no {lacking} on {name}", f"GRANT {lacking} ON {name}"))
    if not rights["sees_itself"]:
        findings.append(error("privileges", probe.BLIND.format(rights["role"]), probe.SIGHT.format(rights["role"])))
    if names := ", ".join(function["name"] for function in functions if function["lacking"]):
        findings.append(error("privileges", f"this role may not call {names}", f"as the queue's owner: {ROLES}"))
    if roles := ", ".join(row["rolname"] for row in strangers):
        text = f"this role may not end sessions of the role {roles}, whose workers are on the queue too"
        advice = "use one role for all, or GRANT pg_signal_backend, pg_read_all_stats"
        findings.append(warning("privileges", text, advice))
    findings = findings or [ok("privileges", "all that the processes need")]
    if rights["open_to_all"]:
        text = f"every role may create in the schema {schema}: their functions there may run with this role's rights"
        findings.append(warning("privileges", text, f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC"))
    if names := ", ".join(function["name"] for function in functions if function["open_to_all"]):
        text = f"every role may call {names}, with the rights of the queue's owner"
        findings.append(warning("privileges", text, f"as the queue's owner: {ROLES}"))
    if rights["is_superuser"]:
        text = "this role is a superuser, which neither the queue's owner nor a farm needs to be"
        findings.append(warning("privileges", text, f"use an ordinary role; for a farm, as the owner: {ROLES}"))
    return findings


def _connections(conn: db.Connection, settings: Settings, dsn: str) -> list[Finding]:
    (facts,) = _facts(conn, "sessions")
    least, most = wanted_connections(settings, _is_same_server(settings, dsn))
    return [connections(least, most, sessions_left(facts, facts["here"]))]


def _is_same_server(settings: Settings, dsn: str) -> bool:
    servers = []
    for each in (settings.target_dsn or dsn, dsn):
        parts = conninfo_to_dict(each)
        servers.append((parts.get("host"), parts.get("hostaddr"), str(parts.get("port", 5432))))
    return servers[0] == servers[1]


def _fleet(conn: db.Connection, settings: Settings, dsn: str) -> list[Finding]:
    """The findings on the workers and the sessions of all farms; none of sessions where only one farm is seen."""
    try:
        with db.in_force(conn):
            farms = _facts(conn, "fleet", here=hostname())
    except (errors.InsufficientPrivilege, errors.UndefinedTable, errors.UndefinedColumn):
        return []  # the schema's findings say so
    findings = []
    workers = sum(spec.concurrency for spec in settings.workers) + sum(farm["workers"] for farm in farms)
    if workers > LISTENERS_MOST:
        text = f"all farms have {workers} workers; idle ones cost each trigger {workers * LISTENER_MS:.0f} ms of CPU"
        findings.append(warning("listeners", text, f"have at most {LISTENERS_MOST} workers: see docs/scaling.md"))
    if not farms:
        return findings
    (facts,), (counts,) = _facts(conn, "sessions"), _facts(conn, "fleet_sessions")
    is_same = _is_same_server(settings, dsn)
    _, most = wanted_connections(settings, is_same)
    most += counts["reapers"] + counts["api_hosts"] * API_PROCESSES * (settings.pg_pool_size + settings.pg_max_overflow)
    for farm in farms:  # its keeper, a successor for each kind of workers during a reload, its workers
        most += 1 + farm["kinds"] + farm["workers"] * (2 if is_same else 1)
    limit, room = min(sessions_left(facts, counts["of_farms"]).items(), key=lambda item: item[1])
    text = f"all {len(farms) + 1} farms may need {most} sessions at once, {room} are theirs to use ({limit})"
    advice = f"raise {limit} by {most - room}, or lower WORKERS_JSON, PG_POOL_SIZE or PG_MAX_OVERFLOW"
    return [*findings, ok("fleet", text) if most <= room else warning("fleet", text, advice)]


def sessions_left(facts: Mapping[str, int], ours: int) -> dict[str, int]:
    """PURE: the sessions that each limit leaves, by the limit's name, if `ours` of those in use count as free."""
    names = {"server": "max_connections", "database": "the database's limit", "role": "the role's limit"}
    return {
        name: max(0, facts[f"{limit}_limit"] - max(0, facts[f"{limit}_used"] - ours))
        for limit, name in names.items()
        if facts[f"{limit}_limit"] >= 0
    }


def _locks(conn: db.Connection, settings: Settings, dsn: str) -> list[Finding]:
    (facts,) = _facts(conn, "advisory_locks")
    blocked = [warning("locks", each.text, each.advice) for each in alerts.blocked(stats.blockers(conn))]
    return [locks(probe.lock_table(conn), settings.workers, facts["of_others"]), *blocked]


def locks(table: probe.LockTable, workers: Sequence[WorkerSpec], of_others: int) -> Finding:
    """The finding on the server's lock table: it needs room for the keys of all jobs that this machine claims at once.

    With a full lock table no session of the server can start a statement.
    """
    wanted, at_most = probe.keys_wanted(table, workers), probe.most_at_once(table, workers)
    automatic = probe.most_at_once(table, workers, is_automatic=True)
    text = f"this machine may hold {wanted} keys, others hold {of_others}; the server has room for {table.room} locks"
    needed = wanted * probe.LOCK_SHARE if wanted * probe.LOCK_SHARE > table.room else (wanted + of_others) * 2
    raised = f"raise max_locks_per_transaction to {-(-needed // table.transactions)} and restart the server"
    if any(spec.prefetch > at_most for spec in workers if not spec.is_automatic):
        text = f"{text}: a worker claims {at_most} jobs at once at most"
        return warning("locks", text, f"lower prefetch in WORKERS_JSON to {at_most}, or {raised}")
    if any(spec.prefetch > automatic for spec in workers if spec.is_automatic):
        text = f"{text}: a worker without prefetch claims {automatic} jobs at once at most"
    if (wanted + of_others) * 2 > table.room:
        return warning("locks", text, raised)
    return ok("locks", text)


def wanted_connections(settings: Settings, same_server: bool) -> tuple[int, int]:
    """The least and the most sessions that this machine needs on the queue's server.

    The least are those of workers, keeper, reaper and the API's pools. The most add the pools' overflow, a successor
    for each kind of worker during a reload and, if pipelines write to the `same_server`, a transaction per worker.
    """
    workers = sum(spec.concurrency for spec in settings.workers)
    pools = API_PROCESSES * settings.pg_pool_size if settings.pg_use_pool else 0
    most = API_PROCESSES * (settings.pg_pool_size + settings.pg_max_overflow)
    successors = len({spec.served for spec in settings.workers})
    return workers + 2 + pools, workers + 2 + most + successors + (workers if same_server else 0)


def connections(least: int, most: int, free: Mapping[str, int]) -> Finding:
    limit, left = min(free.items(), key=lambda item: item[1])
    text = f"this machine needs {least} to {most} sessions, {left} are free ({limit})"
    if most <= left:
        return ok("connections", text)
    advice = "raise the limit, or lower WORKERS_JSON, PG_POOL_SIZE or PG_MAX_OVERFLOW"
    return Finding(Level.ERROR if least > left else Level.WARNING, "connections", text, advice)


_QUESTIONS: dict[str, Callable[[db.Connection, Settings, str], list[Finding]]] = {
    "session": _session,
    "schema": _schema,
    "connections": _connections,
    "fleet": _fleet,
    "locks": _locks,
}


# --- the target ---


def target_finding(settings: Settings, dsn: str) -> Finding:
    """The finding on the database that pipelines write to; the right to create tables is optional."""
    name = settings.pg_schema
    try:
        with _connect(settings, dsn, name) as conn, db.in_force(conn):
            (facts,) = _facts(conn, "target")
    except psycopg.Error as e:
        return unreachable("target", dsn, e)
    if not facts["found"]:
        text = f"PG_SCHEMA: there is no schema {name}, or this role may not use it"
        return warning("target", text, f"CREATE SCHEMA {name}, or GRANT USAGE ON SCHEMA {name}")
    return ok("target", "reachable" if facts["may_create"] else f"reachable; may not create tables in {name}")
