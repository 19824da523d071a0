"""The tests' PostgreSQL: one server for a run, a database for each process, and more for tests that need them.

The process that starts the run (with xdist: the controller) starts the server and makes the template; the workers
inherit the server's address, so that no two of them race for it. TEST_DATABASE_URL names another server.

The databases belong to an ordinary role, as in production. A test that needs a superuser takes `server_dsn` or
`as_superuser`. If the role of TEST_DATABASE_URL is no superuser, it owns the databases.
"""

import itertools
import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import hypothesis
import psycopg
import pytest
import structlog
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from receiver import Receiver

from dataloader import embedded, log
from dataloader.log import masking
from dataloader.queue import db, migrations
from dataloader.testing.database import FAST, sweep

# Many tests at once need many sessions.
SERVER = FAST | {"shared_buffers": "128MB", "max_connections": "200", "max_wal_size": "4GB"}
URL = "TEST_DATABASE_URL"
OWNER = "DL_TEST_OWNER"  # a DSN's user and password: the role that owns this run's databases
BASE = "DL_TEST_BASE"  # a database with the schema, and with it OWNER, which another process made and removes
RUN = "DL_TEST_RUN"  # the prefix of this run's databases; a given server may serve several runs
PREFIX = "dl-test-"
# By default Hypothesis fails an example of 0.2 s, and a test that draws slowly, as each does on a busy machine. It also
# fails a test with a fixture, and here all examples of a test share its database.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("tests")
_server = pytest.StashKey[embedded.Server]()
_count = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    """Start the server, unless TEST_DATABASE_URL names one, and make the template; an xdist worker does neither."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A run in the background ignores SIGINT, and so would its children; but some tests send it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    os.environ[RUN] = f"dl_test_{secrets.token_hex(4)}"  # in containers the ids of processes come again
    if URL not in os.environ:
        sweep(PREFIX)
        config.stash[_server] = started()
        os.environ[URL] = make_conninfo(config.stash[_server].dsn, user="postgres")
    if BASE not in os.environ:
        os.environ[OWNER] = ordinary_role()
    migrations.migrate(create("template", template=os.environ.get(BASE, "template1")), schema="public")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: one started last would run alone."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto` three processes on two cores: many tests wait for a lease, a timeout or a process."""
    return max(2, (os.cpu_count() or 1) * 3 // 2)


# Files whose every test has the marker, and whose import alone takes seconds.
WHOLLY = {"test_api_schemathesis.py": "long"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what the run leaves out by its markers."""
    marker = WHOLLY.get(collection_path.name)
    return True if marker and f"not {marker}" in config.option.markexpr else None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the server, or the template and the role, of pytest_configure."""
    if server := config.stash.get(_server, None):
        server.stop()
        shutil.rmtree(server.root, ignore_errors=True)
        del os.environ[URL]
    elif not hasattr(config, "workerinput") and RUN in os.environ:
        drop("template")
        if os.environ[OWNER] and BASE not in os.environ:
            admin("DROP OWNED BY {0}; DROP ROLE {0}", f"{os.environ[RUN]}_owner")


def ordinary_role() -> str:
    """Make a role that may only log in, and return its part of a DSN; "" when our role is no superuser.

    The role may set two parameters for tests: rows without triggers, and a short deadlock_timeout.
    """
    with psycopg.connect(os.environ[URL], autocommit=True) as conn:
        if conn.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone() != (True,):
            return ""
        name, password = f"{os.environ[RUN]}_owner", secrets.token_hex(16)
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(name), password))
        for parameter in ("session_replication_role", "deadlock_timeout"):
            conn.execute(sql.SQL(f"GRANT SET ON PARAMETER {parameter} TO {{}}").format(sql.Identifier(name)))
        return make_conninfo(user=name, password=password)


def started() -> embedded.Server:
    """A new server in a folder of its own; without PostgreSQL the run ends with a message, not with a traceback."""
    root = Path(tempfile.mkdtemp(prefix=PREFIX))
    given = os.environ.get("DL_PG_BIN")
    try:
        return embedded.Server.start(root, SERVER, Path(given) if given else None, initdb=["--no-sync"])
    except embedded.EmbeddedError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise pytest.UsageError(str(error)) from None


def create(name: str, template: str | None = None) -> str:
    """Make a database of this run, by default with the project's schema, and return its DSN."""
    full, source = f"{os.environ[RUN]}_{name}", template or f"{os.environ[RUN]}_template"
    owner = conninfo_to_dict(os.environ[OWNER])
    if owner:
        admin("CREATE DATABASE {} TEMPLATE {} OWNER {}", full, source, str(owner["user"]))
    else:
        admin("CREATE DATABASE {} TEMPLATE {}", full, source)
    return make_conninfo(os.environ[URL], dbname=full, **owner)


def drop(name: str) -> None:
    """Drop a database of this run, and end the sessions on it."""
    admin("DROP DATABASE IF EXISTS {} WITH (FORCE)", f"{os.environ[RUN]}_{name}")


def admin(text: str, *names: str) -> None:
    """Run a statement on the server; `names` are its identifiers."""
    with psycopg.connect(os.environ[URL], autocommit=True) as conn:
        conn.execute(sql.SQL(text).format(*map(sql.Identifier, names)))


def superuser(dsn: str) -> str:
    """A DSN for the same database, with the role of the server's DSN."""
    return make_conninfo(os.environ[URL], dbname=conninfo_to_dict(dsn)["dbname"])


@contextmanager
def roles() -> Iterator[Callable[..., str]]:
    """A function that makes roles; the end of the block drops them."""
    made: list[str] = []

    def make(dsn: str, more: str = "") -> str:
        name = f"{os.environ[RUN]}_role_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}_{next(_count)}"
        admin("CREATE ROLE {} LOGIN PASSWORD 'p' " + more, name)
        made.append(make_conninfo(dsn, user=name, password="p"))
        return made[-1]

    yield make
    for dsn in made:
        with psycopg.connect(superuser(dsn), autocommit=True) as conn:
            name = sql.Identifier(str(conninfo_to_dict(dsn)["user"]))
            conn.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(name))


@contextmanager
def lent(template: str | None = None) -> Iterator[str]:
    """A new database, dropped at the end of the block."""
    name = f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}_{next(_count)}"
    yield create(name, template)
    drop(name)


SCHEMA = (db.sql_folder() / "schema.sql").read_text("utf-8")
TABLES = re.findall(r"^CREATE TABLE (dl_\w+)", SCHEMA, re.MULTILINE)
KEPT = ("dl_migrations", "dl_rolled", "dl_alerted")  # these have their rows from the start
# Between tests: end sessions that a test has left, drop other schemas and tables, empty the queue's tables.
CLEAN = f"""
CREATE FUNCTION pg_temp.clean() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  left_over text;
  has_rows boolean;
  filled text[] := '{{}}';
BEGIN
  PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend';
  FOR left_over IN SELECT format('DROP SCHEMA %I CASCADE', nspname) FROM pg_namespace
    WHERE nspname <> 'public' AND nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%' LOOP
    EXECUTE left_over;
  END LOOP;
  FOR left_over IN SELECT format('DROP TABLE IF EXISTS %s CASCADE', oid::regclass) FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
      AND relname <> ALL (ARRAY{TABLES}) LOOP
    EXECUTE left_over;
  END LOOP;
  IF to_regclass('dl_jobs') IS NOT NULL THEN
    FOREACH left_over IN ARRAY ARRAY{[table for table in TABLES if table not in KEPT]} LOOP
      EXECUTE format('SELECT EXISTS (SELECT FROM %I)', left_over) INTO has_rows;
      filled := filled || CASE WHEN has_rows THEN left_over END;
    END LOOP;
    filled := array_remove(filled, NULL);
    IF filled <> '{{}}' THEN  -- to truncate a table, empty or not, costs milliseconds for each of its indexes
      EXECUTE format('TRUNCATE %s CASCADE', array_to_string(filled, ', '));
    END IF;
    PERFORM setval('dl_job_events_event_id_seq', 1, false);
    UPDATE dl_rolled SET last_event = 0 WHERE last_event <> 0;
    UPDATE dl_alerted SET last_event = 0 WHERE last_event <> 0;
  END IF;
END $$
"""


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """Undo what a test has set of the logging of this process, for the next test would write to its outputs."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    for logger in list(root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.disabled = False  # dictConfig disables each logger that it does not name
    log.close(0.2)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    masking._configured = masking._of_job = frozenset()
    masking._remember()


@pytest.fixture(scope="session")
def worker_db() -> Iterator[str]:
    """The database that the tests of this process use one after the other."""
    with lent() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def clean(worker_db: str) -> Iterator[Callable[[], None]]:
    """Cleans that database, by one session for all tests: a new session would plan CLEAN anew."""
    sessions = ExitStack()
    conn: psycopg.Connection | None = None

    def clean() -> None:
        nonlocal conn
        if conn is None or conn.info.transaction_status != TransactionStatus.IDLE:  # a timeout has interrupted it
            sessions.close()
            conn = psycopg.connect(superuser(worker_db), autocommit=True, application_name="cleaner")
            sessions.callback(conn.close)
            conn.execute(CLEAN)
        conn.execute("SELECT pg_temp.clean()")

    with sessions:
        yield clean


@pytest.fixture
def dsn(worker_db: str, clean: Callable[[], None]) -> str:
    """A database with the project's schema and no row, for most tests."""
    clean()
    return worker_db


@pytest.fixture
def own_db() -> Iterator[str]:
    """A database with the project's schema for this test alone: for forks, kills, new schemas."""
    with lent() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def module_db() -> Iterator[str]:
    """A database with the project's schema for the tests of one file, which share a farm because its start is slow."""
    with lent() as dsn:
        yield dsn


@pytest.fixture
def empty_db() -> Iterator[str]:
    """A database for this test alone, without the project's schema."""
    with lent(template="template1") as dsn:
        yield dsn


@pytest.fixture(scope="session")
def lend() -> Callable[[], AbstractContextManager[str]]:
    """`lent`, for fixtures of a wider scope that share a database."""
    return lent


@pytest.fixture
def conn(dsn: str) -> Iterator[db.Connection]:
    """A session on the database of `dsn`, opened as the project opens them."""
    with db.connect(dsn, name="test", schema="public") as conn:
        yield conn


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="session")
def server_dsn() -> str:
    """A superuser's DSN of the server's database `postgres`."""
    return os.environ[URL]


@pytest.fixture
def make_role() -> Iterator[Callable[..., str]]:
    """Makes a role, with further options of CREATE ROLE, and returns its DSN for the database of a given DSN."""
    with roles() as make:
        yield make


@pytest.fixture(scope="module")
def make_role_of_module() -> Iterator[Callable[..., str]]:
    """`make_role` for the tests of one file."""
    with roles() as make:
        yield make


@pytest.fixture(scope="session")
def as_superuser() -> Callable[[str], str]:
    """A superuser's DSN for the database of a given DSN."""
    return superuser
