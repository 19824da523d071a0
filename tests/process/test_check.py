"""`dataloader check` as an operator runs it: what it finds, what it advises, what it never shows."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import forkserver
import psycopg
import pytest
from farming import environment, until
from pooling import TAKES_OUR_OPTIONS, pooler
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dataloader import config
from dataloader.cli.direct import Direct
from dataloader.config import ConfigError
from dataloader.queue import db, lifecycle, migrations, probe, set_aside
from dataloader.queue.migrations import SchemaError
from dataloader.queue.reports import alerts, predictions, stats

CANARY = "canary-s3cret"
LOGS_LOCK = 431315969907  # that of dl_log_days
NOWHERE = f"postgresql://u:{CANARY}@127.0.0.1:1/d"

LEVELS = ("error", "warning", "ok")

Check = Callable[..., "Checked"]


class Checked:
    """One run of `dataloader check --json`."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        defaults = {"DL_HOME": str(folder), "PYTHONPATH": str(folder), "WORKERS_JSON": '[{"queue":"q"}]'}
        (folder / "data").mkdir(exist_ok=True)
        done = forkserver.run(["check", "--json"], environment() | defaults | settings, folder)
        self.status, self.output = done.returncode, done.stdout + done.stderr
        self.document = json.loads(done.stdout)
        assert CANARY not in self.output
        assert "Traceback" not in self.output
        assert self.status == (0 if self.document["ok"] else 78)

    def of(self, level: str) -> list[tuple[str, str, str]]:
        """The findings of this level: about, what, advice."""
        found = [finding for finding in self.document["findings"] if finding["level"] == level]
        return [(finding["about"], finding["what"], finding["advice"]) for finding in found]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return lambda **settings: Checked(tmp_path, {name.upper(): value for name, value in settings.items()})


@pytest.fixture
def role(own_db: str, make_role: Callable[..., str]) -> str:
    """The DSN of a role that may only connect; its name is in it."""
    return make_role(own_db)


def superuser(dsn: str) -> str:
    return make_conninfo(os.environ["TEST_DATABASE_URL"], dbname=conninfo_to_dict(dsn)["dbname"])


def execute(dsn: str, statement: str, role: str = "") -> None:
    """As superuser; `{}` stands for the name in the DSN `role`."""
    with psycopg.connect(superuser(dsn), autocommit=True) as conn:
        conn.execute(sql.SQL(statement).format(sql.Identifier(user(role or dsn))))


def user(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["user"])


def grant_all(dsn: str, role: str) -> None:
    migrations.grant(dsn, "public", [("farm", user(role))])


def test_all_is_well(check: Check, dsn: str) -> None:
    found = check(dl_db_dsn=dsn)
    assert (found.status, found.of("error"), found.of("warning")) == (0, [], [])
    about = {about: what for about, what, _ in found.of("ok")}
    assert set(about) == {
        "settings", "data", "pipelines", "database", "version", "session", "privileges", "schema", "connections",
        "locks", "target",
    }  # fmt: skip
    assert about["session"] == "direct; LISTEN works"
    assert "load.csv" in about["pipelines"]
    assert found.document["settings"]["WORKERS_JSON"] == '[{"queue": "q", "concurrency": 1, "prefetch": 100}]'


def test_the_report_for_people(dsn: str, tmp_path: Path) -> None:
    env = os.environ | {"DL_DB_DSN": dsn, "DL_HOME": str(tmp_path), "DL_DRAIN_SECS": "1"}
    done = forkserver.run(["check"], env, tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert f"DL_HOME                   {tmp_path}" in lines
    where = lines.index("warning  settings     DL_DRAIN_SECS is no setting")
    assert lines[where + 1].strip() == "-> DL_DRAIN_SEC may be meant"
    assert "ok       session      direct; LISTEN works" in lines


def test_an_embedded_server_that_is_running_is_found(check: Check, server_dsn: str, tmp_path: Path) -> None:
    root = Path(str(conninfo_to_dict(server_dsn).get("host", "/none"))).parent
    if not (root / "data").exists():
        pytest.skip("the tests run on a server that is not embedded")
    (tmp_path / "postgres").symlink_to(root)
    assert "version" in [about for about, *_ in check().of("ok")]


OF_SERVER = {"pg_host": "127.0.0.1", "pg_port": "1", "pg_user": "u", "pg_password": CANARY, "pg_database": "d"}
ABSENT = ("port=1: connection failed", "correct host and port")


UNUSABLE: dict[str, tuple[dict[str, str], str, str, str, str]] = {
    "no database": ({}, "error", "database", "no database is configured", "DL_DB_DSN or PG_HOST"),
    "one that is not there": ({"dl_db_dsn": NOWHERE}, "error", "database", *ABSENT),
    "the same by PG_HOST": (OF_SERVER, "error", "database", *ABSENT),
    "no target": ({"dl_db_dsn": "", "dl_target_dsn": NOWHERE}, "error", "target", *ABSENT),
    "a schema that is not found": (
        *({"dl_db_dsn": "", "pg_schema": "elsewhere"}, "warning", "target", "elsewhere", "CREATE SCHEMA elsewhere"),
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_database_that_cannot_be_used(check: Check, dsn: str, case: str) -> None:
    settings, level, about, what, advice = UNUSABLE[case]
    found = check(**{name: value or dsn for name, value in settings.items()}).of(level)
    assert [(found_about, what in text, advice in cure) for found_about, text, cure in found] == [(about, True, True)]


def test_wrong_settings_are_all_named(check: Check) -> None:
    found = check(app_port=CANARY, workers_json=CANARY, dl_db_dsn=f"{CANARY} {CANARY}", dl_stall_sec="1")
    wrong = [what.split(":")[0] for _, what, _ in found.of("error")]
    assert wrong == ["APP_PORT", "DL_DB_DSN", "WORKERS_JSON", "DL_STALL_SEC"]


HOOK = "from dataloader.pipelines import around_enqueue\n@around_enqueue\ndef f(job): return job\n"
TASK = "from dataloader.pipelines import register\n@register({!r})\ndef f(args): ..."
CORRECT = "correct the module"
MODULES = {  # of DL_PIPELINES: the code, what is found, what helps
    "raises": ("raise ValueError('password=canary-s3cret')", "error", "ValueError: password=***", CORRECT),
    "wrong": ("def (", "error", "SyntaxError", CORRECT),
    "leaves": ("import sys; sys.exit(3)", "error", "SystemExit: 3", CORRECT),
    "lacks": ("import nothing_of_this_name", "error", "No module named 'nothing_of_this_name'", CORRECT),
    "absent": (None, "error", "No module named 'absent'", "PYTHONPATH"),
    "empty": ("", "warning", "empty registers no task", "@register"),
    "twice": (TASK.format("noop"), "error", "twice", "correct"),
    "hooked": (HOOK, "warning", "@around_enqueue, which no API process would call", "name the module of this function"),
}


def test_each_module_that_is_wrong_is_named_with_what_helps(check: Check, tmp_path: Path) -> None:
    """A module that prints leaves the document whole."""
    for name, (code, *_) in MODULES.items():
        if code is not None:
            (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "loud.py").write_text(f"print('loud')\n{TASK.format('my.task')}")
    (tmp_path / "bad_hook.py").write_text(HOOK.replace("f(job)", "f()"))
    checked = check(dl_pipelines=",".join([*MODULES, "loud"]), dl_hooks="bad_hook")
    found = {level: [each[1:] for each in checked.of(level) if each[0] == "pipelines"] for level in LEVELS}
    (refused,) = [each for each in found["error"] if each[0].startswith("DL_HOOKS: ")]
    assert refused[0].startswith("DL_HOOKS: bad_hook cannot be imported: TypeError: @around_enqueue: bad_hook.f should")
    assert refused[1].startswith(CORRECT)
    for name, (_, level, words, advice) in MODULES.items():
        ((what, cure),) = [each for each in found[level] if each[0].startswith(f"DL_PIPELINES: {name} ")]
        assert (words in what, advice in cure) == (True, True), name
    assert sum(map(len, found.values())) == len(MODULES) + 2
    assert "my.task" in found["ok"][0][0]
    called = check(dl_pipelines="hooked", dl_hooks="hooked").of("warning")
    assert "pipelines" not in [about for about, *_ in called], "the API calls this hook"


NO_DSN = "no database is configured: set DL_DB_DSN or PG_HOST"


@pytest.mark.parametrize(
    ("command", "dsn", "status", "words"),
    [
        ("queues --direct", "", 78, NO_DSN),
        ("workers", "", 78, NO_DSN),
        ("queues --direct", f"postgres//u:{CANARY}@h/db", 78, "DL_DB_DSN: should be postgresql://user:***@host:port/"),
        ("queues --direct", NOWHERE, 1, "Connection refused"),
        ("migrate", NOWHERE, 1, "Connection refused"),
        ("up", NOWHERE, 1, "Connection refused"),
    ],
)
def test_each_command_names_a_wrong_database_in_words(
    command: str, dsn: str, status: int, words: str, tmp_path: Path
) -> None:
    settings = {"DL_HOME": str(tmp_path)} | ({"DL_DB_DSN": dsn} if dsn else {})
    done = forkserver.run(command.split(), environment() | settings, tmp_path)
    assert (done.returncode, words in " ".join(done.stderr.split())) == (status, True), done
    assert "Traceback" not in done.stdout + done.stderr
    assert CANARY not in done.stdout + done.stderr


def test_a_database_without_the_queue(check: Check, empty_db: str) -> None:
    ((about, what, advice),) = check(dl_db_dsn=empty_db, pg_schema_queue="new").of("error")
    assert (about, what, advice) == ("schema", "the database has no dataloader schema", MIGRATE)
    with psycopg.connect(empty_db) as conn:
        assert conn.execute("SELECT count(*) FROM pg_class WHERE relname LIKE 'dl%'").fetchone() == (0,)


MIGRATE = "run `dataloader migrate`"


# By name: statements, whose DSN, the level, what the finding is about, words of it, and words of what helps.
FINDINGS = {
    "everybody may create": (["GRANT CREATE ON SCHEMA public TO PUBLIC"], "owner", "warning", "privileges",
                             "every role may create in the schema public", "REVOKE CREATE ON SCHEMA public"),
    "everybody has the owner's rights": (["GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO PUBLIC"], "owner",
                                         "warning", "privileges", "with the rights of the queue's owner",
                                         "dataloader migrate --roles"),
    "a superuser": ([], "superuser", "warning", "privileges", "this role is a superuser", "use an ordinary role"),
    "other functions": (["UPDATE dl_migrations SET checksum = 'other' WHERE number = 0"], "owner", "warning", "schema",
                        "not up to date: functions", MIGRATE),
    "no functions": (["DELETE FROM dl_migrations WHERE number = 0"], "owner", "error", "schema",
                     "the schema's functions are missing, a migration has stopped before them", MIGRATE),
    "no functions, and no right to make them": (["DELETE FROM dl_migrations WHERE number = 0"], "role", "error",
                                                "schema", "the schema's functions are missing",
                                                "as a role that may create in the schema"),
    "no right on a table": (["REVOKE UPDATE ON dl_jobs FROM {}"], "role", "error", "privileges",
                            "this role has no UPDATE on dl_jobs", "GRANT UPDATE ON dl_jobs"),
    "no right to call": (["REVOKE EXECUTE ON FUNCTION dl_wake_all, dl_prune FROM {}"], "role", "error", "privileges",
                         "this role may not call dl_prune, dl_wake_all", "dataloader migrate --roles farm=NAME"),
    "no right to enter": (["REVOKE USAGE ON SCHEMA public FROM PUBLIC, {}"], "role", "error", "privileges",
                          "no USAGE on schema public", "GRANT USAGE ON SCHEMA public"),
    "few connections": (["ALTER ROLE {} CONNECTION LIMIT 4"], "role", "error", "connections", "the role's limit",
                        "lower WORKERS_JSON"),
    "no connections": (["ALTER ROLE {} CONNECTION LIMIT 0"], "role", "error", "database", "too many connections",
                       "CONNECTION LIMIT"),
}  # fmt: skip


@pytest.mark.parametrize("case", FINDINGS)
def test_what_is_wrong_with_a_schema_or_a_role_is_named(check: Check, own_db: str, role: str, case: str) -> None:
    statements, whose, level, about, what, advice = FINDINGS[case]
    grant_all(own_db, role)
    for statement in statements:
        execute(own_db, statement, role)
    dsns = {"owner": own_db, "role": role, "superuser": superuser(own_db)}
    ((found_about, found, cure),) = check(dl_db_dsn=dsns[whose]).of(level)
    assert (found_about, what in found, advice in cure) == (about, True, True), (found, cure)


def test_a_role_without_any_right_and_one_that_may_not_end_sessions(check: Check, own_db: str, role: str) -> None:
    errors = {what for about, what, _ in check(dl_db_dsn=role).of("error") if about == "privileges"}
    assert "this role has no SELECT, INSERT, UPDATE, DELETE on dl_jobs" in errors
    assert "this role has no SELECT on dl_migrations" in errors
    grant_all(own_db, role)
    assert check(dl_db_dsn=role).status == 0
    with psycopg.connect(own_db, application_name="dl-worker:q:host:1:x"):
        warnings = check(dl_db_dsn=role).of("warning")
    ((found, cure),) = [each[1:] for each in warnings if each[0] == "privileges"]
    assert ("may not end sessions" in found, "pg_signal_backend" in cure) == (True, True)


def test_a_role_from_which_row_security_hides_the_rows(check: Check, own_db: str, role: str) -> None:
    """A farm of this role sees an empty queue. With a policy for the role, or as the owner, the check is content."""
    grant_all(own_db, role)
    execute(own_db, "CREATE TABLE dl_of_another_program (); GRANT ALL ON dl_of_another_program TO PUBLIC")
    execute(own_db, "ALTER TABLE dl_of_another_program ENABLE ROW LEVEL SECURITY")
    for table in ("dl_jobs", "dl_migrations"):
        execute(own_db, f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        execute(own_db, f"CREATE POLICY additions ON {table} FOR INSERT WITH CHECK (true)")
        execute(own_db, f"CREATE POLICY of_others ON {table} TO pg_monitor USING (true)")
        ((about, what, advice),) = check(dl_db_dsn=role).of("error")
        assert (about, what) == ("schema", f"row security hides the rows of {table} from this role")
        assert f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY" in advice
        assert table != "dl_jobs" or check(dl_db_dsn=own_db).status == 0
        execute(own_db, f"CREATE POLICY all_rows ON {table} USING (true)")
    assert check(dl_db_dsn=role).status == 0


def test_a_role_that_becomes_another_and_does_not_see_its_own_sessions(check: Check, own_db: str, role: str) -> None:
    """As a service for short-lived logins makes them: each is a member of the farm's role, and becomes it."""
    owner = user(own_db)
    execute(own_db, f"GRANT {owner} TO {{0}}; ALTER ROLE {{0}} SET role = {owner}", role)
    ((about, what, advice),) = check(dl_db_dsn=role).of("error")
    assert (about, what) == ("privileges", f"the role {owner} may not see the sessions of this login")
    assert f"GRANT pg_read_all_stats, pg_signal_backend TO {owner}" in advice
    with db.connect(role, name="dl-worker:q:x", schema="public") as conn, pytest.raises(ConfigError, match=what):
        lifecycle.open_session(conn, "x")


def test_the_farms_of_other_hosts_count_against_the_limits(check: Check, own_db: str) -> None:
    with psycopg.connect(own_db, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO dl_workers (worker, farm, host, pid, queue, state)"
            " SELECT 'w' || i, 'farm' || i % 20, 'host' || i % 20, i, 'q', 'idle' FROM generate_series(1, 1000) i"
        )
        found = check(dl_db_dsn=own_db)
        (idle, (about, what, advice)) = found.of("warning")
        # 20 farms of 50 workers: each two sessions, a keeper and a successor; this machine's as by its settings.
        assert (about, what.startswith("all 21 farms may need 2075 sessions")) == ("fleet", True)
        assert "raise max_connections by" in advice
        assert idle[:2] == ("listeners", "all farms have 1001 workers; idle ones cost each trigger 40 ms of CPU")
        conn.execute("UPDATE dl_workers SET seen_at = now() - interval '1 min'")
        assert check(dl_db_dsn=own_db).of("warning") == []


def test_a_session_that_keeps_a_lock_of_the_farm_is_named(check: Check, own_db: str, role: str) -> None:
    """A role that may only CONNECT; keys of jobs, which are smaller numbers, are no business of this finding.

    Nor is a lock that the reaper has for a moment.
    """
    name = user(role)
    for lock in (stats.NOTE_LOCK, predictions.LOCK, set_aside.LOCK, LOGS_LOCK):
        with (
            psycopg.connect(role, application_name="psql", autocommit=True) as stranger,
            db.connect(own_db, name="test", schema="public") as conn,
        ):
            stranger.execute("SELECT pg_advisory_lock(%s), pg_advisory_lock(hashtext('key'))", (lock,))
            pid = stranger.info.backend_pid
            (blocker,) = until(lambda: stats.postgres(conn)["blockers"], "the lock to count")
            assert (blocker["blocks"], blocker["pid"], blocker["user"]) == ("lock", pid, name)
            warnings = check(dl_db_dsn=own_db).of("warning") if lock == LOGS_LOCK else []
    ((about, what, advice),) = warnings
    begin = f"The database session of {name} (psql), backend {pid}, has held an advisory lock of the farm"
    assert (about, what.startswith(begin)) == ("locks", True)
    assert f"pg_terminate_backend({pid})" in advice
    with db.connect(own_db, name="dl-reaper", schema="public") as reaper, reaper.transaction():
        reaper.execute("SELECT pg_advisory_xact_lock(%s)", (stats.NOTE_LOCK,))
        with db.connect(own_db, name="test", schema="public") as conn:
            assert stats.blockers(conn) == []


def test_the_session_of_the_oldest_transaction_is_named_while_notifications_pile_up(
    own_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "NOTIFY_FULL", -1.0)  # the real one takes 2 GB
    with psycopg.connect(own_db) as listener, psycopg.connect(superuser(own_db), autocommit=True) as conn:
        listener.execute("LISTEN dl_jobs")
        age = "SELECT extract(epoch FROM clock_timestamp() - xact_start) FROM pg_stat_activity WHERE pid = %s"
        ((age_sec,),) = conn.execute(age, (listener.info.backend_pid,)).fetchall()
        # Another test on this server may have an older one, or one that ends just now and has no age.
        found = (stats.blockers(conn)[0] for _ in range(1_000))
        blocker = next(each for each in found if each["age_sec"] is not None)
        assert blocker["blocks"] == "notifications"
        assert blocker["age_sec"] >= age_sec
        (alert,) = alerts.blocked([blocker])
        assert "may keep the NOTIFY queue from being emptied" in alert.text


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("transaction", []),
        ("transaction", ["server_round_robin=1"]),
        ("transaction", ["default_pool_size=1"]),
        ("statement", ["default_pool_size=1"]),
    ],
)
def test_b2_d10_a_pooler_in_transaction_mode_is_refused(check: Check, dsn: str, mode: str, more: list[str]) -> None:
    with pooler(dsn, mode, TAKES_OUR_OPTIONS, *more) as through:
        found = check(dl_db_dsn=through)
        assert found.of("error") == [("session", probe.POOLED, probe.DIRECT)]
        with (
            db.connect(through, name="test", schema="public") as conn,
            pytest.raises(ConfigError, match="a pooler in transaction mode"),
        ):
            probe.require_session(conn, through)


def test_a_pooler_in_session_mode_will_do_unless_it_drops_the_schema(check: Check, own_db: str) -> None:
    def asked(schema: str) -> Checked:
        """The same by the refusal of a worker's start."""
        with pooler(own_db, "session", TAKES_OUR_OPTIONS) as through:
            found = check(dl_db_dsn=through, pg_schema_queue=schema)
            with db.connect(through, name="test", schema=schema) as conn:
                if found.status:
                    with pytest.raises(ConfigError, match="on another schema"):
                        probe.require_session(conn, through)
                else:
                    probe.require_session(conn, through)
        return found

    assert [(about, "drops our options" in what) for about, what, _ in asked("public").of("warning")] == [
        ("session", True)
    ]
    migrations.migrate(own_db, "farm")
    assert asked("farm").of("error") == [("session", probe.ASTRAY, probe.GUIDED)]
    with psycopg.connect(own_db, autocommit=True) as conn:
        conn.execute(f"ALTER DATABASE {conn.info.dbname} SET search_path = farm")
    assert asked("farm").status == 0


@pytest.mark.parametrize(
    ("mode", "options"), [("transaction", []), ("statement", [TAKES_OUR_OPTIONS])], ids=["options", "transactions"]
)
def test_h8_the_api_says_what_a_pooler_refuses(dsn: str, mode: str, options: list[str], tmp_path: Path) -> None:
    with pooler(dsn, mode, *options) as through:
        started = forkserver.run(["api"], os.environ | {"DL_DB_DSN": through, "DL_HOME": str(tmp_path)}, tmp_path)
    assert (started.returncode, started.stderr.count("\n")) == (78, 1)
    assert f"{probe.REFUSED}: {probe.SHARED}" in started.stderr


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_the_command_line_finds_its_schema_through_a_pooler_and_migrates_none(own_db: str, mode: str) -> None:
    migrations.migrate(own_db, "farm")
    with pooler(own_db, mode, TAKES_OUR_OPTIONS) as through:
        way = Direct(through, config.load(_env_file=None, dl_db_dsn=through, pg_schema_queue="farm"))
        started = way.trigger("noop", queue="q")
        assert [job.job_id for job in way.jobs()] == [started.job_id]
        way.close()
        with pytest.raises(SchemaError, match="pooler"):
            migrations.migrate(through, "other")
    with db.connect(own_db, name="test", schema="farm") as conn:
        assert conn.execute("SELECT job_id FROM dl_jobs").fetchall() == [(started.job_id,)]
        assert conn.execute("SELECT to_regclass('other.dl_jobs')").fetchone() == (None,)


def test_h8_a_pooler_that_refuses_our_options(check: Check, dsn: str) -> None:
    with pooler(dsn, "transaction") as through:
        ((about, what, advice),) = check(dl_db_dsn=through).of("error")
    # From 1.20 on PgBouncer takes them.
    assert (about, what.startswith("a pooler refuses our sessions")) == ("database", True) or about == "session"
    assert advice == probe.DIRECT
