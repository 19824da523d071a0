"""Jobs by the batch: in order, all or none, one per key under any concurrency, on any producer's connection."""

import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hands import Conn, Worker, Workers, journal, row, started, value
from patience import PATIENCE
from psycopg import errors
from psycopg.rows import dict_row

import dataloader
from dataloader.queue import db, enqueue, migrations, new_job
from dataloader.queue.enqueue import NewJob


def jobs(number: int, **more: Any) -> list[NewJob]:
    return [NewJob("q", "t", f"key-{i}", {"n": i}, **more) for i in range(number)]


def keyed(*keys: str | None) -> list[NewJob]:
    return [NewJob("q", "t", f"key-{i}", {"n": i}, idempotency_key=key) for i, key in enumerate(keys)]


def order(conn: Conn) -> list[Any]:
    """The jobs' args, in the order in which claims take them."""
    rows = conn.execute("SELECT args -> 'n' FROM dl_jobs ORDER BY priority, created_at").fetchall()
    assert value(conn, "SELECT count(*) = count(DISTINCT created_at) FROM dl_jobs")
    return [found for (found,) in rows]


@pytest.fixture
def batches_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "AT_ONCE", 3)


EVERYTHING = {
    "queue": "load.cbr",
    "task": "cbr",
    "lock_key": "ключ, \"'{}\\",
    "args": {"city": "Хабаровск", "n": [1, 2.5, None, 10**30, {"deep": '🚀"\\,{}'}]},
    "partition_key": "2026-01",
    "priority": 7,
    "available_at": datetime(2026, 1, 31, 3, 30, 0, 123456, UTC),
    "max_attempts": 1,
    "lease_ttl_sec": 86_400,
    "timeout_sec": 3_600,
    "producer": "billing",
    "consumer_group": "etl",
    "affinity_key": "ollama/qwen2.5-coder:32b",
}


BESIDE = [[], [NewJob("other", "other", "")], [NewJob("", "", "", idempotency_key="k")]]


@pytest.mark.parametrize("key", [None, "once"])
@pytest.mark.parametrize("way", [*range(len(BESIDE)), "one", "sql"])
def test_every_field_is_stored(conn: Conn, lone: psycopg.Connection[Any], key: str | None, way: int | str) -> None:
    """By a list, with jobs with and without keys beside it, by the call for one, and by SQL with any search_path."""
    given = EVERYTHING | {"idempotency_key": key}
    if way == "one":
        job_id, _ = add(lone, **given)
    elif way == "sql":
        lone.execute("SET search_path = pg_catalog")
        call = ", ".join(f"{name} => %({name})s" for name in given)
        given["args"] = psycopg.types.json.Jsonb(EVERYTHING["args"])
        job_id = lone.execute(f"SELECT public.dl_enqueue({call})".encode(), given).fetchone()[0]
    else:
        *_, (job_id, _) = enqueue.enqueue_many(conn, [*BESIDE[int(way)], NewJob(**given)])
    stored = row(conn, job_id)
    assert {name: stored[name] for name in EVERYTHING} == EVERYTHING
    assert (stored["status"], stored["idempotency_key"], job_id.version) == ("queued", key, 4 if way == "sql" else 7)
    if way != "sql":
        assert journal(conn, job_id) == [("queued", {"producer": "billing", "user": conn.info.user})]


ODD = [*"\t\n\\\"'%ж🚀", "\r\n", "\\N", "\\.", "\\t", "a,b", "NULL", "null", "{}", "},{", "%s", "\x01\x7f"]


@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
@pytest.mark.parametrize("alike", [False, True])
def test_odd_texts_are_stored_as_they_are(conn: Conn, batches_of_three: None, keys: bool, alike: bool) -> None:
    names = ("queue", "task", "lock_key", "partition_key", "producer", "consumer_group", "affinity_key")
    texts = [text * 2 for text in ODD[-1:] * 10 if alike] or ODD
    new = [NewJob(**dict.fromkeys(names, text), args={text: [text, {text: {}}, {}]}) for text in texts]
    new = [replace(job, idempotency_key=f"{n}{job.task}" if keys else None) for n, job in enumerate(new)]
    for job, (job_id, _) in zip(new, enqueue.enqueue_many(conn, new), strict=True):
        stored = row(conn, job_id)
        assert {name: stored[name] for name in names} == dict.fromkeys(names, job.task)
        assert (stored["args"], stored["idempotency_key"]) == (job.args, job.idempotency_key)
        assert journal(conn, job_id) == [("queued", {"producer": job.task, "user": conn.info.user})]
    assert value(conn, "SELECT count(*) FROM dl_jobs") == len(new)


@pytest.mark.parametrize("keys", [[None] * 3, ["a", "b", "c"], ["a", None, "c"]])
def test_what_is_left_out_is_as_for_one_job(conn: Conn, keys: list[str | None]) -> None:
    """By a list, and by SQL, which needs three fields."""
    differ = {"job_id", "idempotency_key", "created_at", "available_at", "now"}
    one = row(conn, enqueue.enqueue(conn, NewJob("q", "t", "key"))[0])
    added = enqueue.enqueue_many(conn, [NewJob("q", "t", "key", idempotency_key=key) for key in keys])
    by_sql = value(conn, "SELECT dl_enqueue(queue => 'q', task => 't', lock_key => 'key')")
    for job_id in (*(job_id for job_id, _ in added), by_sql):
        other = row(conn, job_id)
        also = {"journaled"} if job_id == by_sql else set()
        assert {name for name in other if other[name] != one[name]} <= differ | also
        assert other["available_at"] <= other["created_at"]
        assert [kind for kind, _ in journal(conn, job_id)] == ["queued"]


@pytest.mark.parametrize("shuffled", [False, True], ids=["no keys", "keys"])
def test_jobs_run_in_the_order_of_the_list_and_of_the_calls(conn: Conn, worker: Worker, shuffled: bool) -> None:
    keys = random.Random(1).sample(range(1_000), 60) if shuffled else [None] * 60
    new = keyed(*(key and f"i{key}" for key in keys))
    call = "SELECT dl_enqueue('q', 't', %s, args => jsonb_build_object('n', %s::int), idempotency_key => %s)"
    with conn.transaction():
        results = enqueue.enqueue_many(conn, new[:20])
        results += [enqueue.enqueue(conn, job) for job in new[20:30]]
        results += [add(conn, args=job.args, idempotency_key=job.idempotency_key) for job in new[30:40]]
        for number, job in enumerate(new[40:50], 40):
            results.append((value(conn, call, job.lock_key, number, job.idempotency_key), "queued"))
        results += enqueue.enqueue_many(conn, new[50:])
    assert order(conn) == list(range(60))
    taken = []
    for _ in new:
        job = worker.take()
        taken.append(job.job_id)
        worker.finish(job)
    assert taken == [job_id for job_id, _ in results]


def test_a_long_list_takes_several_statements_and_keeps_its_order(conn: Conn, batches_of_three: None) -> None:
    keys = [None, "m", "z", "a", "b", None, "z", "y", "a", "c", None]
    results = enqueue.enqueue_many(conn, keyed(*keys))
    assert [results[6], results[8]] == [results[2], results[3]]
    assert len(set(results)) == 9
    assert order(conn) == [0, 1, 2, 3, 4, 5, 7, 9, 10]
    assert value(conn, "SELECT count(*) FROM dl_job_events WHERE kind = 'queued'") == 9
    stored = dict(conn.execute("SELECT (args -> 'n')::int, job_id FROM dl_jobs").fetchall())
    assert all(results[n][0] == job_id for n, job_id in stored.items())


def test_lists_with_the_same_keys_at_once_are_one_list(conn: Conn, workers: Workers, batches_of_three: None) -> None:
    crew = [workers() for _ in range(4)]
    gate = Barrier(4)

    def add(worker: Worker, seed: int) -> list[dict[str, UUID]]:
        found = []
        for number in range(30):
            keys = [f"{number}-{i}" for i in range(10)]
            random.Random(seed * 100 + number).shuffle(keys)
            gate.wait(PATIENCE)
            results = enqueue.enqueue_many(worker.conn, keyed(*keys))
            found.append({key: job_id for key, (job_id, _) in zip(keys, results, strict=True)})
        return found

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(add, crew, range(4)))
    assert all(answer == answers[0] for answer in answers)
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 300
    assert value(conn, "SELECT count(*) FROM dl_job_events") == 300


@pytest.fixture(params=["bare", "rows", "prepared", "pipeline"])
def producer(request: pytest.FixtureRequest, dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection as other programs make them: no autocommit, another search_path, rows of their own kind."""
    with psycopg.connect(dsn, options="-c search_path=pg_catalog") as conn:
        if request.param == "rows":
            conn.row_factory = dict_row
            conn.cursor_factory = psycopg.ClientCursor
        if request.param == "prepared":
            conn.prepare_threshold = 0
        if request.param == "pipeline":
            with conn.pipeline():
                yield conn
        else:
            yield conn


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_the_transaction_stays_the_producers(
    conn: Conn, producer: psycopg.Connection[Any], ends: str, batches_of_three: None
) -> None:
    one = dataloader.enqueue(producer, queue="q", task="t", lock_key="k", args={"n": 0}, schema="public")
    many = dataloader.enqueue_many(producer, keyed("a", None, "b", "a"), schema="public")
    assert len({one, *many}) == 4
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 0
    getattr(producer, ends)()
    assert value(conn, "SELECT count(*) FROM dl_jobs") == (4 if ends == "commit" else 0)


def test_a_schema_that_is_given_and_the_configured_one(conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = 'Ferme "50%"'
    migrations.migrate(dsn, schema=elsewhere)
    job_id, _ = dataloader.enqueue(conn, queue="q", task="t", lock_key="k", schema=elsewhere)
    dataloader.enqueue_many(conn, keyed("a", "b", "a"), schema=elsewhere)
    monkeypatch.setenv("PG_SCHEMA_QUEUE", "nowhere")
    monkeypatch.setattr(new_job, "_configured_schema", new_job._configured_schema.__wrapped__)  # it is cached
    with pytest.raises(psycopg.Error, match='"nowhere" does not exist'):
        dataloader.enqueue(conn, queue="q", task="t", lock_key="k")
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 0
    with db.connect(dsn, name="test", schema=elsewhere) as there:
        assert row(there, job_id)["queue"] == "q"
        assert value(there, "SELECT count(*) FROM dl_job_events") == 3


@pytest.fixture
def lone(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A producer's session in autocommit."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def add(conn: psycopg.Connection[Any], **more: Any) -> tuple[UUID, str]:
    return dataloader.enqueue(conn, **({"queue": "q", "task": "t", "lock_key": "k", "schema": "public"} | more))


@pytest.mark.parametrize("key", [None, "once"])
@pytest.mark.parametrize("ways", ["one", "many", "without checks"])
def test_a_future_job_tells_its_queue_and_waits(conn: Conn, worker: Worker, ways: str, key: str | None) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    new = NewJob("q", "t", "k", available_at=later, idempotency_key=key)
    if ways == "one":
        job_id, _ = add(conn, available_at=later, idempotency_key=key)
    elif ways == "many":
        ((job_id, _),) = dataloader.enqueue_many(conn, [new], schema="public")
    else:
        job_id, _ = enqueue.enqueue(conn, new)
    assert row(conn, job_id)["blocked_on"] == "time"
    assert worker.notes() == ["q"]


def test_a_known_key_answers_with_its_job_and_tells_nobody(conn: Conn, worker: Worker) -> None:
    known = add(conn, idempotency_key="done")[0], "succeeded"
    worker.finish(worker.take())
    worker.notes()
    assert add(conn, idempotency_key="done", queue="other") == known
    assert dataloader.enqueue_many(conn, keyed("done"), schema="public") == [known]
    assert worker.notes() == []
    results = enqueue.enqueue_many(conn, keyed("new", "done", None, "new"))
    assert (results[1], results[3]) == (known, results[0])
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 3
    assert [len(journal(conn, job_id)) for job_id, _ in results] == [1, 3, 1, 1]


@pytest.mark.parametrize("by", ["producer", "api"])
@pytest.mark.parametrize("commits", [True, False])
def test_j1_a_twin_of_one_job_is_waited_for(
    conn: Conn, dsn: str, lone: psycopg.Connection[Any], commits: bool, by: str
) -> None:
    def once(session: psycopg.Connection[Any]) -> tuple[UUID, str]:
        if by == "producer":
            return add(session, idempotency_key="once")
        return enqueue.enqueue(session, NewJob("q", "t", "k", idempotency_key="once"))

    with psycopg.connect(dsn) as other:
        first = once(other)
        with started(lambda: once(lone), lone.info.backend_pid, conn) as twin:
            other.commit() if commits else other.rollback()
            assert (twin.result() == first) == commits
    assert value(conn, "SELECT count(*) FROM dl_jobs") == value(conn, "SELECT count(*) FROM dl_job_events") == 1


@pytest.fixture
def remover(conn: Conn) -> Iterator[None]:
    """After each insert of jobs, of none too, the jobs of the producer `old` are deleted."""
    conn.execute("""
        CREATE FUNCTION public.remove() RETURNS trigger LANGUAGE plpgsql AS
          $$ BEGIN DELETE FROM public.dl_jobs WHERE producer = 'old'; RETURN NULL; END $$;
        CREATE TRIGGER remove AFTER INSERT ON dl_jobs EXECUTE FUNCTION public.remove()""")
    yield
    conn.execute("DROP FUNCTION public.remove CASCADE")


@pytest.mark.parametrize("many", [False, True])
def test_a_key_whose_job_is_removed_meanwhile_is_free_again(
    conn: Conn, lone: psycopg.Connection[Any], request: pytest.FixtureRequest, many: bool
) -> None:
    old, _ = add(conn, idempotency_key="b", producer="old")
    request.getfixturevalue("remover")
    results = enqueue.enqueue_many(lone, keyed("a", "b", "c")) if many else [add(lone, idempotency_key="b")]
    new = [job_id for job_id, _ in results]
    assert old not in new
    assert [row(conn, job_id)["idempotency_key"] for job_id in new] == (["a", "b", "c"] if many else ["b"])
    assert [kind for job_id in new for kind, _ in journal(conn, job_id)] == ["queued"] * len(new)


def round_trips(conn: psycopg.Connection[Any], action: Callable[[], Any]) -> int:
    """How often `action` waits for the server, by libpq's trace of the session."""
    with tempfile.TemporaryFile() as trace:
        conn.pgconn.trace(trace.fileno())
        action()
        conn.pgconn.untrace()
        trace.seek(0)
        lines = [line.split() for line in trace]
    return sum(line[2] == b"F" and line[4] in (b"Query", b"Sync") for line in lines)


def test_one_job_is_one_round_trip_and_so_is_a_list_without_keys(lone: psycopg.Connection[Any]) -> None:
    for key in (None, "once", "once"):
        assert round_trips(lone, lambda key=key: add(lone, idempotency_key=key)) == 1
    assert round_trips(lone, lambda: dataloader.enqueue_many(lone, jobs(1_000), schema="public")) == 1


@pytest.mark.parametrize("is_pooled", [False, True])
def test_one_job_is_prepared_by_psycopgs_own_count_but_not_behind_a_pooler(
    lone: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, is_pooled: bool
) -> None:
    """A pooler hands out process ids of its own making."""
    if is_pooled:
        monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 1)
    for _ in range(7):
        add(lone)
    assert value(lone, "SELECT count(*) FROM pg_prepared_statements") == (0 if is_pooled else 1)


NOBODY: Any = object()  # any use of it fails
GOOD: dict[str, Any] = {"queue": "q", "task": "t", "lock_key": "k"}


@pytest.mark.parametrize(
    ("field", "bad"),
    [  # each rule has its cases over HTTP in test_api_refusals.py
        *((name, bad) for name in GOOD for bad in ("", None, "a\0b")),
        *(("available_at", bad) for bad in (datetime(2026, 1, 1), datetime(9999, 1, 1, tzinfo=UTC), 7)),  # noqa: DTZ001
        *(("args", bad) for bad in ([], {"a": {1}}, {"a": float("nan")}, {"\ud800": 1}, {"a": 10**5_000})),
        ("priority", True),
    ],
)
def test_a_bad_field_is_named_and_nothing_touched(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        dataloader.enqueue(NOBODY, **(GOOD | {field: bad}))
    with pytest.raises(ValueError, match=rf"^jobs\[1\]\.{field}: ") as caught:
        dataloader.enqueue_many(NOBODY, [NewJob(**GOOD), NewJob(**(GOOD | {field: bad}))])
    assert "jobs[0]" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *((name, bad) for name in GOOD for bad in (None, "", "k" * 513)),
        *(("queue", bad) for bad in ("a\nb", "a\x9f")),
        ("args", "[]"),
        ("idempotency_key", ""),
        *((name, "p" * 256) for name in ("partition_key", "producer", "consumer_group")),
        *(("affinity_key", bad) for bad in ("", "m" * 201)),
        ("priority", -1),
        *(("available_at", bad) for bad in ("infinity", "1999-12-31")),
        *((name, 0) for name in ("max_attempts", "timeout_sec")),
        ("lease_ttl_sec", 86_401),
    ],
)
def test_dl_enqueue_names_what_is_wrong(conn: Conn, field: str, bad: Any) -> None:
    given = GOOD | {field: bad}
    call = ", ".join(f"{name} => %({name})s" for name in given)
    with pytest.raises(errors.InvalidParameterValue, match=rf"^dl_enqueue: {field} should be "):
        conn.execute(f"SELECT dl_enqueue({call})", given)
    assert value(conn, "SELECT count(*) FROM dl_jobs") == 0
