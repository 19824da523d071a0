"""`enqueue` in the transactions of SQLAlchemy, on each of its drivers, and of Django: as on a connection of psycopg."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
import test_enqueue_many
from hands import Conn, row, value
from psycopg.conninfo import conninfo_to_dict

from dataloader import NewJob, enqueue, enqueue_many
from dataloader.queue.db import array
from dataloader.queue.parents import UnknownParents

sqlalchemy = pytest.importorskip("sqlalchemy")
django = pytest.importorskip("django")
orm = pytest.importorskip("sqlalchemy.orm")
asynchronous = pytest.importorskip("sqlalchemy.ext.asyncio")

# A transaction of a library's: committed at the end of the block, rolled back by an exception.
Begin = Callable[[], AbstractContextManager[Any]]
EVERYTHING: dict[str, Any] = test_enqueue_many.EVERYTHING | {
    "lock_key": "ключ, \"'{}\\ %s :x",
    "args": {"city": "Хабаровск", "n": [1, 2.5, None, 10**30, {"deep": '🚀"\\,{}%(x)s:y'}]},
    "partition_key": "NULL",
    "score": -1.5e-7,
    "producer": "",
    "consumer_group": "{}",
    "limits": ['a "b"', "c\\,", "NULL"],
    "deadline": datetime(2026, 2, 1, tzinfo=UTC),
}


def url_of(dsn: str, driver: str) -> Any:
    given = conninfo_to_dict(dsn)
    host = str(given["host"])
    query = {"host": host} if host.startswith("/") else {}
    return sqlalchemy.URL.create(
        f"postgresql+{driver}",
        username=str(given["user"]),
        password=given.get("password"),
        host=None if query else host,
        port=int(given.get("port", 5432)),
        database=str(given["dbname"]),
        query=query,
    )


@contextmanager
def engine_of(dsn: str, driver: str, **more: Any) -> Iterator[Any]:
    engine = sqlalchemy.create_engine(url_of(dsn, driver), **more)
    yield engine
    engine.dispose()


@contextmanager
def django_of(dsn: str) -> Iterator[Any]:
    """A connection of Django's, of a database that no settings name."""
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
        django.setup()
    given = conninfo_to_dict(dsn)
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    own = {name: str(given.get(key) or "") for name, key in names.items()}
    connections.settings["queue"] = connections.configure_settings(
        {"default": {}, "queue": {"ENGINE": "django.db.backends.postgresql", **own}}
    )["queue"]
    yield connections["queue"]
    connections["queue"].close()
    del connections["queue"]


@pytest.fixture(params=["psycopg", "psycopg2", "session", "scoped session", "django"])
def begin(request: pytest.FixtureRequest, dsn: str) -> Iterator[Begin]:
    """Begins transactions of a library; every test that asks for it runs for each."""
    if request.param == "django":
        from django.db import transaction

        with django_of(dsn) as conn:

            @contextmanager
            def atomic() -> Iterator[Any]:
                with transaction.atomic(using="queue"):
                    yield conn

            yield atomic
    elif "session" in request.param:
        with engine_of(dsn, "psycopg") as engine:
            make = orm.sessionmaker(engine)
            yield make.begin if request.param == "session" else lambda: _scoped(orm.scoped_session(make))
    else:
        with engine_of(dsn, request.param) as engine:
            yield engine.begin


@contextmanager
def _scoped(session: Any) -> Iterator[Any]:
    with session.begin():
        yield session
    session.remove()


def counted(conn: Conn) -> int:
    return int(value(conn, "SELECT count(*) FROM dl_jobs"))


def test_a_job_is_stored_field_by_field_as_psycopg_stores_it(conn: Conn, begin: Begin) -> None:
    with begin() as other:
        job_id, status = enqueue(other, **EVERYTHING)
        assert counted(conn) == 0, "the transaction is the producer's"
        ids = [job_id, *(found for found, _ in enqueue_many(other, [NewJob(**EVERYTHING)] * 2))]
    own, _ = enqueue(conn, **EVERYTHING)
    assert status == "queued"
    for found in ids:
        one, same = (row(conn, each) for each in (found, own))
        assert {name: one[name] for name in EVERYTHING} == {name: same[name] for name in EVERYTHING} == EVERYTHING
        assert value(conn, "SELECT count(*) FROM dl_job_events WHERE job_id = %s", found) == 1


def test_bad_input_is_named_and_leaves_the_transaction_as_it_was(conn: Conn, begin: Begin) -> None:
    with begin() as other:
        with pytest.raises(ValueError, match=r"priority: .*greater than or equal to 0"):
            enqueue(other, queue="q", task="t", lock_key="k", priority=-1)
        with pytest.raises(ValueError, match=r"jobs\[1\]\.queue: "):
            enqueue_many(other, [NewJob("q", "t", "k"), NewJob("", "t", "k")])
        assert counted(conn) == 0
        enqueue(other, queue="q", task="t", lock_key="k")
    with pytest.raises(UnknownParents, match="not known"), begin() as other:  # noqa: PT012
        enqueue(other, queue="q", task="t", lock_key="k", idempotency_key="once")
        enqueue_many(other, [NewJob("q", "t", "k", idempotency_key=f"key {n}") for n in range(3)])
        enqueue(other, queue="q", task="t", lock_key="k", depends_on=[uuid4()])
    assert counted(conn) == 1, "what is rolled back leaves no job"


def test_many_jobs_keep_their_order_keys_parents_and_traces(conn: Conn, begin: Begin) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with begin() as other:
        known = enqueue(other, queue="q", task="t", lock_key="k", idempotency_key="7")
        jobs = [NewJob("q", "t", f"k{n}", {"n": n}, idempotency_key=str(n), trace=trace) for n in range(1_100)]
        found = enqueue_many(other, [*jobs, NewJob("q", "report", "r", depends_on=[0, known[0]])])
        assert enqueue_many(other, jobs[:3]) == found[:3]
    assert found[7] == known
    assert counted(conn) == 1_101
    ordered = conn.execute("SELECT (args -> 'n')::int FROM dl_jobs WHERE args ? 'n' ORDER BY created_at").fetchall()
    assert [n for (n,) in ordered] == [n for n in range(1_100) if n != 7]
    assert value(conn, "SELECT count(*) FROM dl_jobs WHERE trace = %s", trace) >= 1_099
    assert value(conn, "SELECT blocked_on FROM dl_jobs WHERE task = 'report'") == "parent"


def test_asyncpg_adds_jobs_by_run_sync(conn: Conn, dsn: str) -> None:
    async def produce() -> list[tuple[UUID, str]]:
        engine = asynchronous.create_async_engine(url_of(dsn, "asyncpg"))
        async with asynchronous.AsyncSession(engine) as session, session.begin():
            with pytest.raises(TypeError, match=r"AsyncSession: use `await conn\.run_sync\(enqueue"):
                enqueue(session, queue="q", task="t", lock_key="k")
            found = [await session.run_sync(enqueue, **EVERYTHING)]
            found += await session.run_sync(enqueue_many, [NewJob("q", "t", "k", idempotency_key="a")] * 2)
        async with engine.connect() as other:  # and is not committed
            await other.run_sync(enqueue, queue="q", task="t", lock_key="lost")
        await engine.dispose()
        return found

    first, second, third = asyncio.run(produce())
    assert {name: row(conn, first[0])[name] for name in EVERYTHING} == EVERYTHING
    assert second == third
    assert counted(conn) == 2


def test_a_connection_without_a_transaction_commits_where_its_library_does(conn: Conn, dsn: str) -> None:
    with engine_of(dsn, "psycopg") as engine:
        with engine.connect() as other:
            enqueue(other, queue="q", task="lost", lock_key="k")
        with engine.connect() as other:
            enqueue(other, queue="q", task="kept", lock_key="k")
            other.commit()
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
            enqueue(other, queue="q", task="kept", lock_key="k")
            with pytest.raises(ValueError, match="need a transaction, and conn is in AUTOCOMMIT mode"):
                enqueue_many(other, [NewJob("q", "lost", "k", idempotency_key="key")])
    with django_of(dsn) as other:
        enqueue(other, queue="q", task="kept", lock_key="k")
        enqueue_many(other, [NewJob("q", "kept", "k", idempotency_key="key")])
        with pytest.raises(UnknownParents):
            enqueue_many(other, [NewJob("q", "lost", "k", depends_on=[uuid4()])])
    assert conn.execute("SELECT task, count(*)::int FROM dl_jobs GROUP BY task").fetchall() == [("kept", 4)]


def test_an_error_of_the_database_is_the_librarys_and_shows_no_args(conn: Conn, dsn: str) -> None:
    canary = {"password": "canary-of-the-args"}
    with engine_of(dsn, "psycopg2") as engine, engine.connect() as other:
        with pytest.raises(sqlalchemy.exc.DBAPIError, match='schema "no:where" does not exist') as caught:
            enqueue(other, queue="q", task="t", lock_key="k", args=canary, schema="no:where")
        assert "canary" not in str(caught.value)
    with django_of(dsn) as other, pytest.raises(django.db.Error, match='"no%where" does not exist') as caught:
        enqueue(other, queue="q", task="t", lock_key="k", args=canary, schema="no%where")
    assert "canary" not in str(caught.value)
    assert counted(conn) == 0


def test_what_is_no_connection_to_the_queue_is_refused(dsn: str) -> None:
    with engine_of(dsn, "psycopg") as engine, pytest.raises(TypeError, match="not SQLAlchemy's Engine"):
        enqueue(engine, queue="q", task="t", lock_key="k")
    light = sqlalchemy.create_engine("sqlite://")
    with light.connect() as other, pytest.raises(TypeError, match="the queue's PostgreSQL, not to sqlite"):
        enqueue(other, queue="q", task="t", lock_key="k")
    light.dispose()
    for wrong in (None, "postgresql://", object()):
        with pytest.raises(TypeError, match=f"psycopg 3, SQLAlchemy or Django, not {type(wrong).__name__}"):
            enqueue_many(wrong, [NewJob("q", "t", "k")])


@pytest.mark.parametrize("values", [[], ["a", None, 'b"\\,{}', "NULL", ""], ["{}", " "]])
def test_a_list_is_read_back_as_it_was(conn: Conn, values: list[str | None]) -> None:
    assert value(conn, "SELECT %s::text[]", array(values)) == values
