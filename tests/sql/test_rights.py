"""The rights of the four roles, by function, and of roles that mean ill (tools/attack.py)."""

import itertools
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from click.testing import CliRunner
from foreign import Foreign
from hands import Conn, Worker, enqueue, heard, journal, kinds, plain, row, state, value
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

import dataloader
from dataloader.cli.main import main
from dataloader.queue import db, fields, lifecycle, migrations, operations
from dataloader.queue import enqueue as add
from dataloader.queue.enqueue import NewJob
from dataloader.queue.job import STATUSES
from dataloader.queue.reports import stats
from dataloader.queue.reports.messages import TASK
from tools import attack

DOCS = Path(__file__).parent.parent.parent / "docs" / "roles.md"
ROLES = ("owner", "farm", "producer", "reader", "stranger")
# Every function of the schema, and a call of it with nulls.
# Nulls by subqueries: of a strict function with plain ones the planner makes a null, and asks for no right.
CALLS = """
SELECT proname, format('SELECT %s(%s)', oid::regproc, (
         SELECT string_agg('(SELECT NULL::' || format_type(type, NULL) || ')', ', ') FROM unnest(proargtypes) type))
  FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND (proname LIKE 'dl\\_%' OR proname = 'notify_job_ready')
"""
TELL = "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (%s, 'q', 't', 'k')"


@dataclass(frozen=True)
class Cast:
    """The DSN of each role on one queue."""

    owner: str
    farm: str
    producer: str
    other_producer: str
    reader: str
    stranger: str

    def name(self, role: str) -> str:
        return str(conninfo_to_dict(getattr(self, role))["user"])


def cast_on(dsn: str, make_role: Callable[[str], str]) -> Cast:
    """The roles, each with the rights that `migrate --roles` gives."""
    cast = Cast(dsn, *(make_role(dsn) for _ in range(5)))
    kinds = {"farm": "farm", "producer": "producer", "other_producer": "producer", "reader": "reader"}
    migrations.grant(dsn, "public", [(kind, cast.name(role)) for role, kind in kinds.items()])
    return cast


@pytest.fixture(scope="module")
def roles(worker_db: str, make_role_of_module: Callable[[str], str]) -> Cast:
    """The roles on the database that the tests share."""
    return cast_on(worker_db, make_role_of_module)


@pytest.fixture
def cast(dsn: str, roles: Cast) -> Cast:
    """The roles on a queue without a row."""
    return roles


def session(dsn: str) -> psycopg.Connection:
    return psycopg.connect(dsn, autocommit=True)


def documented() -> dict[str, dict[str, bool]]:
    """The table of docs/roles.md: for each function, who may call it."""
    lines = DOCS.read_text("utf-8").partition("| functions | owner | farm |")[2].splitlines()[2:]
    found = {}
    for line in lines[: lines.index("")]:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert set(cells) <= {"yes", "no"}
        may = dict(zip(ROLES, (cell == "yes" for cell in cells), strict=True))
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), may)
    return found


def may_call(conn: psycopg.Connection, call: str) -> bool:
    """The server's answer to the call, whose changes are undone."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(call.encode())
    except psycopg.Error as e:
        return "permission denied for function" not in str(e)
    return True


def test_every_function_may_be_called_by_whom_the_documents_say(conn: Conn, cast: Cast) -> None:
    calls = conn.execute(CALLS).fetchall()
    documented_rights = documented()
    assert documented_rights.keys() == {name for name, _ in calls}
    for role in ROLES:
        with session(getattr(cast, role)) as theirs:
            found = {name: may_call(theirs, call) for name, call in calls}
        assert found == {name: may[role] for name, may in documented_rights.items()}, role


def test_functions_of_a_later_version_reach_those_who_had_the_others(
    own_db: str, make_role: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    farm, producer, service = (make_role(own_db) for _ in range(3))
    names = [str(conninfo_to_dict(role)["user"]) for role in (farm, producer, service)]
    with session(own_db) as owner:
        owner.execute(f"GRANT SELECT, UPDATE ON dl_jobs TO {names[2]}".encode())
    migrations.grant(own_db, "public", list(zip(("farm", "producer"), names, strict=False)))
    now = migrations.functions()
    new = "CREATE OR REPLACE FUNCTION dl_new() RETURNS int LANGUAGE sql AS $$SELECT 1$$;\n"
    monkeypatch.setattr(migrations, "functions", lambda: replace(now, text=new + now.text))
    assert migrations.migrate(own_db, "public") == ["functions"]
    for dsn, may in ((farm, True), (producer, False), (service, False)):
        with session(dsn) as theirs:
            assert may_call(theirs, "SELECT dl_new()") is may


# They run with the owner's rights.
OF_TRIGGERS = "dl_jobs_gone, dl_jobs_internal, dl_jobs_journal, dl_jobs_score, dl_jobs_step"
HOSTILE = [("stranger", each) for each in attack.OF_STRANGERS] + [("producer", each) for each in attack.OF_PRODUCERS]


def test_the_owners_rights_cannot_be_had(own_db: str, make_role: Callable[[str], str]) -> None:
    cast = cast_on(own_db, make_role)
    with session(own_db) as owner:
        job_id = enqueue(owner)
        owner.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(sql.Identifier(cast.name("producer"))))
        tried = {(role, each.__name__): attack.tried(each, getattr(cast, role), str(job_id)) for role, each in HOSTILE}
        assert {who: words for who, (succeeded, words) in tried.items() if succeeded} == {}
        assert kinds(owner, job_id) == ["queued"]


def test_what_runs_as_the_owner_is_for_its_one_table_whoever_may_put_it_on_another(conn: Conn, cast: Cast) -> None:
    """The second wall, should EXECUTE be granted after all."""
    job_id = enqueue(conn)
    conn.execute(f"GRANT EXECUTE ON FUNCTION {OF_TRIGGERS} TO PUBLIC")
    try:
        tried = {each.__name__: attack.tried(each, cast.stranger, str(job_id)) for each in attack.OF_STRANGERS}
    finally:
        conn.execute(f"REVOKE EXECUTE ON FUNCTION {OF_TRIGGERS} FROM PUBLIC")
    assert tried == dict.fromkeys(tried, (False, "the function is for the triggers of dl_jobs"))
    assert kinds(conn, job_id) == ["queued"]


# Each changes something, by which a role that is no farm would do a farm's work.
CHANGES = [
    "UPDATE dl_jobs SET status = 'succeeded'",
    "UPDATE dl_jobs SET cancel_requested = true",
    "DELETE FROM dl_jobs",
    "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status) VALUES (gen_random_uuid(), 'q', 't', 'k', 'lost')",
    "INSERT INTO dl_jobs (job_id, queue, task, lock_key, claimed_pid) SELECT gen_random_uuid(), 'q', 't', 'k', 1",
    "INSERT INTO dl_jobs (job_id, queue, task, lock_key, journaled) SELECT gen_random_uuid(), 'q', 't', 'k', 2",
    "INSERT INTO dl_jobs (job_id, queue, task, lock_key, blocked_on) SELECT gen_random_uuid(), 'q', 't', 'k', 'x'",
    "INSERT INTO dl_job_events (job_id, queue, kind) SELECT gen_random_uuid(), 'q', 'done'",
    "INSERT INTO dl_queues (queue, paused_at) VALUES ('q', now())",
    "UPDATE dl_limits SET empty_at = '-infinity'",
    "INSERT INTO dl_results SELECT gen_random_uuid(), 1, '1'",
    "DELETE FROM dl_results",
    "INSERT INTO dl_messages VALUES (gen_random_uuid(), 'ops', '{}')",
    "UPDATE dl_messages SET message = '{}'",
    "DELETE FROM dl_messages",
    "DELETE FROM dl_workers",
    "TRUNCATE dl_jobs",
    "ALTER TABLE dl_jobs DISABLE TRIGGER USER",
    "CREATE FUNCTION dl_mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
]


@pytest.mark.parametrize("role", ["producer", "reader", "stranger"])
def test_only_a_farm_changes_what_there_is(conn: Conn, cast: Cast, role: str) -> None:
    job_id, done = enqueue(conn), []
    with session(getattr(cast, role)) as theirs:
        for statement in CHANGES:
            with suppress(errors.InsufficientPrivilege), theirs.transaction(force_rollback=True):
                theirs.execute(statement.encode())
                done.append(statement)
    assert done == []
    assert state(conn, job_id) == ("queued", 0)


def test_a_farm_stores_results_and_who_reads_jobs_reads_them_but_no_producer(conn: Conn, cast: Cast) -> None:
    """Nor does a producer read the farm's messages."""
    job_id = enqueue(conn)
    worker = Worker(cast.farm, "host:1:boot")
    with worker.conn:
        worker.finish(worker.take(), result="[1]")
    for role in ("farm", "reader"):
        with db.connect(getattr(cast, role), name=role, schema="public") as theirs:
            assert stats.result(theirs, job_id) == {"job_id": job_id, "status": "succeeded", "result": [1]}
    for role, table in itertools.product(("producer", "stranger"), ("dl_results", "dl_messages")):
        with session(getattr(cast, role)) as theirs, pytest.raises(errors.InsufficientPrivilege):
            theirs.execute(f"SELECT FROM {table}".encode())
    with session(cast.farm) as farm:
        farm.execute("DELETE FROM dl_jobs")
        assert value(farm, "SELECT count(*) FROM dl_results") == 0


def test_a_farm_lives_with_its_role(conn: Conn, cast: Cast) -> None:
    """A whole life, the deaths, and what keeper, reaper and operators do, without the owner's rights."""
    worker = Worker(cast.farm, "host:1:boot")
    with worker.conn, db.connect(cast.farm, name="farm", schema="public") as farm:
        migrations.check(farm)
        done, lost = enqueue(farm), enqueue(farm)
        assert worker.finish(worker.take()) == "succeeded"
        worker.take()
        assert [settled.status for settled in lifecycle.settle(farm, "host:1:boot", "crash", "died")] == ["queued"]
        assert operations.pause(farm, "q", "test")["paused_by"] == "test"
        operations.set_limit(farm, "shop", "test", per_minute=60)
        assert operations.take_token(farm, "shop") == 0
        stats.show_workers(farm, "farm", "host", [])
        stats.overview(farm)
        assert operations.change(farm, "delete", [done, lost], "test") == {done: "done", lost: "done"}
        assert value(farm, "SELECT count(*) FROM dl_job_events") == 0
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 0


def test_a_producer_adds_jobs_in_every_way_and_learns_of_its_own(conn: Conn, cast: Cast) -> None:
    by_insert = uuid4()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with session(cast.producer) as producer:
        by_sql = value(producer, "SELECT dl_enqueue('q', 't', 'k')")
        producer.execute(TELL, (by_insert,))
        by_python, _ = dataloader.enqueue(producer, queue="q", task="t", lock_key="k", schema="public")
        jobs = [NewJob("q", "t", "k", idempotency_key=key, trace=trace) for key in ("a", None)]
        many = [job_id for job_id, _ in dataloader.enqueue_many(producer, jobs, schema="public")]
        every = [by_sql, by_insert, by_python, *many]
        for job_id in every:
            assert status_of(producer, job_id) == (job_id, "queued", 0, None, None, None, None, {})
    assert [row(conn, job_id)["trace"] for job_id in every] == [None, None, None, trace, trace]
    worker = Worker(cast.farm, "host:1:boot")
    with worker.conn, session(cast.producer) as producer:
        job = worker.take()
        worker.finish(job, "fail", error="no such table")
        found = status_of(producer, job.job_id)
        assert (found[1], found[2], found[6]) == ("failed", 1, "no such table")


def test_a_producers_search_path_changes_nothing_of_the_checks(own_db: str, make_role: Callable[[str], str]) -> None:
    """By INSERT and by COPY: its own functions of these names let each row pass. A look at a row leaves the path."""
    cast = cast_on(own_db, make_role)
    with session(own_db) as owner:
        owner.execute(f"CREATE SCHEMA theirs; GRANT ALL ON SCHEMA theirs TO {cast.name('producer')}".encode())
    row, into = (str(uuid4()), "q" * 513, "t", "k"), "dl_jobs (job_id, queue, task, lock_key)"
    with session(cast.producer) as producer:
        producer.execute("CREATE FUNCTION theirs.octet_length(text) RETURNS int LANGUAGE sql AS 'SELECT 1'")
        producer.execute("CREATE FUNCTION theirs.pg_column_size(jsonb) RETURNS int LANGUAGE sql AS 'SELECT 1'")
        producer.execute("CREATE FUNCTION theirs.no(int, int) RETURNS bool LANGUAGE sql AS 'SELECT false'")
        producer.execute("CREATE OPERATOR theirs.> (FUNCTION = theirs.no, LEFTARG = int, RIGHTARG = int)")
        producer.execute("SET search_path = theirs, pg_catalog, public")
        with producer.transaction():
            wide = (str(uuid4()), "q" * 500, "t", "k")
            producer.execute(f"INSERT INTO {into} VALUES (%s, %s, %s, %s)".encode(), wide)
            assert producer.execute("SHOW search_path").fetchone() == ("theirs, pg_catalog, public",)
        with pytest.raises(errors.CheckViolation, match="dl_jobs_chk_queue"):
            producer.execute(f"INSERT INTO {into} VALUES (%s, %s, %s, %s)".encode(), row)
        deep = f"INSERT INTO dl_jobs (job_id, queue, task, lock_key, args) VALUES ('{uuid4()}', 'q', 't', 'k', %s)"
        with pytest.raises(errors.CheckViolation, match="nested less than 500 deep"):
            producer.execute(deep.encode(), ("[" * 3_000 + "]" * 3_000,))
        copy = producer.cursor().copy(f"COPY {into} FROM STDIN".encode())
        with pytest.raises(errors.CheckViolation, match="dl_jobs_chk_queue"), copy as lines:
            lines.write_row(row)


# Each way by which a producer adds a job, of the task that sends the farm's messages.
FORGED = {"webhook": "ops", "message": {"id": "evt-1", "kind": "dead", "state": "event", "text": "FORGED"}}
FORGERIES: dict[str, Callable[[psycopg.Connection], object]] = {
    "insert": lambda conn: conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args) VALUES (gen_random_uuid(), 'q', %s, 'k', %s)",
        (TASK, json.dumps(FORGED)),
    ),
    "dl_enqueue": lambda conn: conn.execute("SELECT dl_enqueue('q', %s, 'k', %s)", (TASK, json.dumps(FORGED))),
    "enqueue_one": lambda conn: add.enqueue_one(
        conn, {field.name: field.default for field in fields.OF_PRODUCER}
        | {"queue": "q", "task": TASK, "lock_key": "k", "args": json.dumps(FORGED)}, "public"
    ),
    "enqueue_many": lambda conn: add.enqueue_many(
        conn, [NewJob("q", "t", "k"), NewJob("q", TASK, "k", FORGED)], "public"
    ),
    "enqueue_many with keys": lambda conn: add.enqueue_many(
        conn, [NewJob("q", TASK, "k", FORGED, idempotency_key=key) for key in "ab"], "public"
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", FORGERIES)
@pytest.mark.parametrize("role", ["producer", "farm", "owner"])
def test_only_the_reaper_adds_jobs_that_send_messages(conn: Conn, cast: Cast, role: str, way: str) -> None:
    with session(getattr(cast, role)) as theirs, pytest.raises(errors.InvalidParameterValue, match=f"^task .*{TASK}"):
        FORGERIES[way](theirs)
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 0


def status_of(producer: psycopg.Connection, job_id: UUID) -> tuple[object, ...] | None:
    """The answer of dl_job_status to this role."""
    return producer.execute("SELECT * FROM dl_job_status(%s)", (job_id,)).fetchone()


def test_a_producer_lets_its_own_new_jobs_wait_and_no_others(conn: Conn, cast: Cast) -> None:
    theirs, parent = enqueue(conn), enqueue(conn)
    with session(cast.producer) as producer:
        with producer.transaction():
            conn.execute("UPDATE dl_job_events SET ts = %s", (value(producer, "SELECT now()"),))
            producer.execute("SELECT dl_depend(%s, %s, %s)", ([theirs], [parent], ["cancel"]))
        assert row(conn, theirs)["blocked_on"] is None
        new = NewJob("q", "t", "k", depends_on=[parent])
        ((mine, _),) = dataloader.enqueue_many(producer, [new], schema="public")
        one, _ = dataloader.enqueue(producer, queue="q", task="t", lock_key="k", depends_on=[mine], schema="public")
        with pytest.raises(errors.InsufficientPrivilege):
            producer.execute("DELETE FROM dl_waiting")
    assert [row(conn, job_id)["blocked_on"] for job_id in (mine, one)] == ["parent"] * 2


def test_a_producer_learns_nothing_of_the_jobs_of_others(conn: Conn, cast: Cast) -> None:
    """Of a key that it guesses the id and the status, as over HTTP; a trace it cannot put on it."""
    with session(cast.other_producer) as other:
        theirs = value(other, "SELECT dl_enqueue('q', 't', 'k', idempotency_key => 'secret', args => '{\"n\": 1}')")
    of_the_api = enqueue(conn)
    with session(cast.producer) as producer:
        assert value(producer, "SELECT dl_enqueue('q', 't', 'k', idempotency_key => 'secret')") == theirs
        again = NewJob("q", "t", "k", idempotency_key="secret", trace="00-mine")
        assert dataloader.enqueue_many(producer, [again], schema="public") == [(theirs, "queued")]
        one = {"queue": "q", "task": "t", "lock_key": "k", "idempotency_key": "secret"}
        assert dataloader.enqueue(producer, schema="public", **one) == (theirs, "queued")
        for job_id in (theirs, of_the_api, uuid4()):
            assert status_of(producer, job_id) is None
        with pytest.raises(errors.InsufficientPrivilege):
            producer.execute("SELECT queue FROM dl_jobs")
        with producer.transaction():
            same_instant = value(producer, "SELECT now()")
            conn.execute("UPDATE dl_job_events SET ts = %s", (same_instant,))
            producer.execute("SELECT dl_set_trace('mine', %s)", ([theirs, of_the_api],))
        of_before = value(producer, "SELECT dl_enqueue('q', 't', 'k')")
        producer.execute("SELECT dl_set_trace('mine', %s)", ([of_before],))
    assert [row(conn, job_id)["trace"] for job_id in (theirs, of_the_api, of_before)] == [None] * 3
    assert len(journal(conn, theirs)) == 1


def test_a_reader_reads_everything_that_is_shown(conn: Conn, cast: Cast) -> None:
    later = plain(conn, in_sec=3_600)
    enqueue(conn)
    worker = Worker(cast.farm, "host:1:boot")
    with worker.conn, db.connect(cast.reader, name="reader", schema="public") as reader:
        running = worker.take().job_id
        migrations.check(reader)
        assert migrations.missing(reader) == []
        assert lifecycle.status(reader, later)["waiting_for"]["reason"] == "time"  # type: ignore[index]
        for status in STATUSES:
            stats.jobs(reader, stats.Wanted(status=status))
        stats.jobs(reader, stats.Wanted(sort="key"))
        assert [job["job_id"] for job in stats.jobs(reader, stats.Wanted(status="running")).rows] == [running]
        assert stats.overview(reader)["total"]["busy"] == 1
        for question in (stats.workers, stats.postgres, stats.totals):
            question(reader)
        stats.pace(reader, 5)
        assert [event["kind"] for event in stats.events(reader, running)] == ["queued", "picked"]


def test_other_services_need_no_right_on_our_functions(conn: Conn, cast: Cast, make_role: Callable[[str], str]) -> None:
    """A plain worker with the rights of the contract ends a job, and who waits for its key hears of it."""
    service = make_role(cast.owner)
    conn.execute(f"GRANT SELECT, UPDATE ON dl_jobs TO {conninfo_to_dict(service)['user']}".encode())
    first, second = plain(conn, lock_key="k"), plain(conn, lock_key="k", queue="other")
    theirs = Foreign(service)
    ours = Worker(cast.farm, "host:1:boot")
    with theirs.conn, ours.conn:
        assert theirs.claim() == (first, "k")
        assert ours.claim("other").job is None
        ours.notes()
        theirs.finish(first, "k")
        assert heard(ours.conn) == ["other"]
        assert ours.take("other").job_id == second
    assert kinds(conn, first) == ["queued", "picked", "done"]


def test_the_script_that_is_printed_is_what_is_done(own_db: str, make_role: Callable[[str], str]) -> None:
    farm = make_role(own_db)
    name, database = conninfo_to_dict(farm)["user"], conninfo_to_dict(own_db)["dbname"]
    runner, environment = CliRunner(), {"DL_DB_DSN": own_db}
    asked = ["migrate", "--roles", f"farm={name}"]
    printed = runner.invoke(main, [*asked, "--print"], env=environment)
    assert printed.exit_code == 0
    with session(farm) as theirs, pytest.raises(errors.InsufficientPrivilege):
        theirs.execute("SELECT FROM dl_jobs")
    connect = f'CONNECT ON DATABASE "{database}"'
    closing = f'REVOKE {connect} FROM PUBLIC; GRANT {connect} TO "{name}";'
    assert printed.stdout.endswith(f"-- {closing}\n")
    with session(own_db) as owner, session(farm) as theirs:
        owner.execute(printed.stdout.encode())
        theirs.execute("SELECT FROM dl_jobs")
        for _ in range(2):
            done = runner.invoke(main, asked, env=environment)
            assert done.exit_code == 0
            assert done.stdout.startswith(f"up to date\ngranted: {name} is a farm\n")
            assert done.stdout.endswith(f"{closing}\n")
        assert value(owner, "SELECT has_database_privilege('public', current_database(), 'CONNECT')")


def test_what_cannot_be_granted_is_said(dsn: str) -> None:
    for options, status, words in [
        (["--roles", "farm=nobody_of_this_name"], 78, "there is no role nobody_of_this_name: correct the name"),
        (["--roles", "worker=dl"], 2, "should be a list like farm=NAME,producer=NAME,reader=NAME"),
        (["--roles", "farm="], 2, "should be a list like"),
        (["--roles", ""], 2, "should be a list like"),
        (["--print"], 2, "--print goes with --roles"),
        (["--roles", "farm=dl", "--check"], 2, "--check goes alone"),
    ]:
        done = CliRunner().invoke(main, ["migrate", *options], env={"DL_DB_DSN": dsn})
        assert (done.exit_code, words in done.stderr) == (status, True), options


def test_the_rights_are_those_of_the_queues_schema(empty_db: str, make_role: Callable[[str], str]) -> None:
    name = 'The "queue" of today, it\'s odd'
    migrations.migrate(empty_db, name)
    producer = make_role(empty_db)
    migrations.grant(empty_db, name, [("producer", str(conninfo_to_dict(producer)["user"]))])
    with session(producer) as theirs:
        job_id, _ = dataloader.enqueue(theirs, queue="q", task="t", lock_key="k", schema=name)
    with db.connect(empty_db, name="test", schema=name) as conn:
        conn.execute("DELETE FROM dl_jobs WHERE job_id = %s", (job_id,))
        assert value(conn, "SELECT count(*) FROM dl_job_events") == 0
