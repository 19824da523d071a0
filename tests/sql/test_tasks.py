"""What pipelines say of their jobs (dl_tasks): every way to add a job reads it where the producer says nothing."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from hands import Conn, plain, row, value
from psycopg.types.json import Jsonb

import dataloader
from dataloader.queue import enqueue, operations
from dataloader.queue.enqueue import NewJob

GIVEN = ("queue", "task", "lock_key", "args", "idempotency_key", "max_attempts", "affinity_key", "limits")
Add = Callable[[Conn, list[NewJob]], Any]


def facts(max_attempts: int | None = None, *affinity: str) -> dict[str, Any]:
    """What one pipeline says."""
    return {"max_attempts": max_attempts, "affinity": affinity or None}


DECLARED = {"twice": facts(2), "once": facts(1), "silent": facts()}
HEAVY = {"ask": facts(None, "model"), "paint": facts(None, "model", "category"), "silent": facts()}


def add_plainly(conn: Conn, jobs: list[NewJob]) -> None:
    for job in jobs:
        enqueue.enqueue(conn, job)


def add_alone(conn: Conn, jobs: list[NewJob]) -> None:
    for job in jobs:
        dataloader.enqueue(conn, schema="public", **{name: getattr(job, name) for name in GIVEN})


def add_by_function(conn: Conn, jobs: list[NewJob]) -> None:
    call = "SELECT dl_enqueue(" + ", ".join(f"{name} => %({name})s" for name in GIVEN) + ")"
    for job in jobs:
        given = {name: getattr(job, name) for name in GIVEN}
        conn.execute(call.encode(), given | {"args": Jsonb(job.args)})


WAYS = pytest.mark.parametrize("add", [add_plainly, add_alone, add_by_function, enqueue.enqueue_many])
KEYS = pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])


def stored(conn: Conn, column: str) -> list[Any]:
    found = conn.execute(f"SELECT {column} FROM dl_jobs ORDER BY lock_key".encode()).fetchall()
    return [each for (each,) in found]


@KEYS
@WAYS
def test_the_attempts_are_the_triggers_or_the_pipelines_or_five(conn: Conn, add: Add, keys: bool) -> None:
    operations.publish_tasks(conn, DECLARED)
    wanted = {("twice", None): 2, ("twice", 7): 7, ("once", None): 1, ("silent", None): 5, ("unknown", None): 5}
    jobs = [
        NewJob("q", task, f"key-{number}", idempotency_key=str(number) if keys else None, max_attempts=given)
        for number, (task, given) in enumerate(wanted)
    ]
    add(conn, jobs)
    assert stored(conn, "max_attempts") == list(wanted.values())


@pytest.mark.parametrize("given", [{"max_attempts": 3}, {"max_attempts": None}])
def test_the_attempts_of_a_list_of_one_task(conn: Conn, given: dict[str, Any]) -> None:
    """Its columns are as short as they can be: one task, one number, or a number for each."""
    operations.publish_tasks(conn, DECLARED)
    enqueue.enqueue_many(conn, [NewJob("q", "twice", f"k{n}", **given) for n in range(3)])
    enqueue.enqueue_many(conn, [NewJob("q", "twice", f"l{n}", max_attempts=n or None) for n in range(3)])
    assert stored(conn, "max_attempts") == [given["max_attempts"] or 2] * 3 + [2, 1, 2]


# Of which task, with which args, with which key of the producer: the key that the job has.
KEYS_OF_JOBS: list[tuple[str, dict[str, Any], str | None, str | None]] = [
    ("ask", {"model": "m"}, None, "m"),
    ("ask", {"model": "m"}, "mine", "mine"),
    ("ask", {"model": "🚀" * 200}, None, "🚀" * 200),
    ("ask", {"model": "m" * 201}, None, None),
    *(("ask", {"model": bad}, None, None) for bad in ("", 7, True, None, ["m"], {"model": "m"})),
    ("ask", {"category": "c"}, None, None),
    ("ask", {}, None, None),
    ("paint", {"category": "c", "model": "m"}, None, "m"),
    ("paint", {"category": "c"}, None, "c"),
    *(("paint", {"category": "c", "model": bad}, None, "c") for bad in ("", 7, "m" * 201)),
    ("silent", {"model": "m"}, None, None),
    ("silent", {"model": "m"}, "mine", "mine"),
    ("unknown", {"model": "m"}, None, None),
    ("unknown", {}, "mine", "mine"),
]


@KEYS
@WAYS
def test_the_affinity_key_is_the_producers_or_the_first_fit_arg_that_is_named(conn: Conn, add: Add, keys: bool) -> None:
    operations.publish_tasks(conn, HEAVY)
    jobs = [
        NewJob("q", task, f"{n:02}", args, idempotency_key=str(n) if keys else None, affinity_key=given)
        for n, (task, args, given, _) in enumerate(KEYS_OF_JOBS)
    ]
    add(conn, jobs)
    assert stored(conn, "affinity_key") == [wanted for *_, wanted in KEYS_OF_JOBS]


def test_the_affinity_keys_of_a_list_of_one_task(conn: Conn) -> None:
    """Its columns are as short as they can be: one task, one key, or a key for each."""
    operations.publish_tasks(conn, HEAVY)
    args = [{"model": f"m{n}"} for n in range(3)]
    enqueue.enqueue_many(conn, [NewJob("q", "ask", f"k{n}", args[n]) for n in range(3)])
    enqueue.enqueue_many(conn, [NewJob("q", "ask", f"l{n}", args[n], affinity_key="one") for n in range(3)])
    some = (None, "given", None)
    enqueue.enqueue_many(conn, [NewJob("q", "ask", f"m{n}", args[n], affinity_key=some[n]) for n in range(3)])
    assert stored(conn, "affinity_key") == ["m0", "m1", "m2", "one", "one", "one", "m0", "given", "m2"]


# Of which task, with which limits of the producer: the limits that the job has.
LIMITS_OF_JOBS: list[tuple[str, list[str] | None, list[str] | None]] = [
    ("load", None, ["a", "b"]),
    ("load", ["c"], ["c"]),
    ("load", [], None),
    ("silent", None, None),
    ("silent", ['"', "\\", "{x,y}", " ", "NULL", "🚀"], ['"', "\\", "{x,y}", " ", "NULL", "🚀"]),
    ("unknown", ["d"], ["d"]),
    ("unknown", None, None),
]


@KEYS
@WAYS
def test_the_limits_are_the_producers_or_the_pipelines(conn: Conn, add: Add, keys: bool) -> None:
    operations.publish_tasks(conn, {"load": facts() | {"limits": ["a", "b"]}, "silent": facts()})
    jobs = [
        NewJob("q", task, f"{n:02}", idempotency_key=str(n) if keys else None, limits=given)
        for n, (task, given, _) in enumerate(LIMITS_OF_JOBS)
    ]
    add(conn, jobs)
    assert stored(conn, "limits") == [wanted for *_, wanted in LIMITS_OF_JOBS]
    operations.publish_tasks(conn, {"load": facts() | {"limits": ["z"]}})
    add(conn, [NewJob("q", "load", "zz")])
    assert stored(conn, "limits")[-1] == ["z"]


@pytest.mark.parametrize("bad", [list("abcdefghi"), ["a", "a"], [""], ["n" * 101], ["a\nb"]])
@pytest.mark.parametrize("add", [add_alone, add_by_function])
def test_wrong_limits_of_a_job_are_refused(conn: Conn, add: Add, bad: list[str]) -> None:
    with pytest.raises((ValueError, psycopg.DataError), match="limits"):
        add(conn, [NewJob("q", "t", "k", limits=bad)])
    assert stored(conn, "limits") == []


def test_a_plain_insert_has_no_affinity_key(conn: Conn) -> None:
    operations.publish_tasks(conn, HEAVY)
    assert row(conn, plain(conn, task="ask", args=Jsonb({"model": "m"})))["affinity_key"] is None


def test_what_a_task_says_is_the_latest_word_and_written_only_where_it_differs(conn: Conn) -> None:
    operations.publish_tasks(conn, DECLARED | HEAVY)
    before = conn.execute("SELECT task, xmin::text FROM dl_tasks ORDER BY task").fetchall()
    changed = {"once": facts(9), "ask": facts(), "paint": facts(None, "category", "model"), "new": facts(1, "a", "b")}
    operations.publish_tasks(conn, DECLARED | HEAVY | changed)
    known = {
        task: (max_attempts, affinity)
        for task, max_attempts, affinity in conn.execute("SELECT task, max_attempts, affinity FROM dl_tasks")
    }
    assert known == {
        **{"twice": (2, None), "silent": (None, None)},
        **{"once": (9, None), "ask": (None, None), "paint": (None, ["category", "model"]), "new": (1, ["a", "b"])},
    }
    unchanged = "SELECT task, xmin::text FROM dl_tasks WHERE task <> ALL (%s) ORDER BY task"
    assert conn.execute(unchanged, (list(changed),)).fetchall() == [each for each in before if each[0] not in changed]
    operations.publish_tasks(conn, {"once": facts()})
    assert value(conn, "SELECT max_attempts FROM dl_tasks WHERE task = 'once'") is None


def test_the_schema_of_a_tasks_args_is_the_latest(conn: Conn) -> None:
    operations.publish_tasks(conn, {"typed": {"args_schema": "{}"}, "free": {}})
    assert operations.args_schemas(conn, ["typed", "free", "unknown"]) == {"typed": "{}", "free": None}
    for newer in ('{"type": "object"}', None):
        operations.publish_tasks(conn, {"typed": {"args_schema": newer}})
        assert operations.args_schemas(conn, ["typed"]) == {"typed": newer}
    with pytest.raises(psycopg.errors.CheckViolation):
        operations.publish_tasks(conn, {"typed": {"args_schema": "x" * 65_537}})
