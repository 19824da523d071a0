"""Declarations of tasks (dl_tasks): every way to add a job reads them where the producer gives no value."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from hands import Conn, value
from psycopg.types.json import Jsonb

import dataloader
from dataloader.queue import enqueue, operations
from dataloader.queue.enqueue import NewJob

GIVEN = ("queue", "task", "lock_key", "args", "idempotency_key", "max_attempts", "affinity_key", "limits")
Add = Callable[[Conn, list[NewJob]], Any]


def facts(max_attempts: int | None = None, *affinity: str) -> dict[str, Any]:
    """The declaration of one pipeline."""
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


def stored(conn: Conn, column: str) -> list[Any]:
    found = conn.execute(f"SELECT {column} FROM dl_jobs ORDER BY lock_key".encode()).fetchall()
    return [each for (each,) in found]


LIMITED = {"load": facts() | {"limits": ["a", "b"]}, "silent": facts()}
ODD = ['"', "\\", "{x,y}", " ", "NULL", "🚀"]
# Of a column what pipelines say, and of which task, with which args, with which word of the producer a job has what.
WORDS: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any], Any, Any]]]] = {
    "max_attempts": (
        DECLARED,
        [
            ("twice", {}, None, 2),
            ("twice", {}, 7, 7),
            ("once", {}, None, 1),
            ("silent", {}, None, 5),
            ("unknown", {}, None, 5),
        ],
    ),
    "affinity_key": (
        HEAVY,
        [
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
        ],
    ),
    "limits": (
        LIMITED,
        [
            ("load", {}, None, ["a", "b"]),
            ("load", {}, ["c"], ["c"]),
            ("load", {}, [], None),
            ("silent", {}, None, None),
            ("silent", {}, ODD, ODD),
            ("unknown", {}, ["d"], ["d"]),
            ("unknown", {}, None, None),
        ],
    ),
}


@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
@pytest.mark.parametrize("add", [add_plainly, add_alone, add_by_function, enqueue.enqueue_many])
@pytest.mark.parametrize("column", WORDS)
def test_the_producers_word_of_a_job_counts_and_else_the_pipelines(
    conn: Conn, column: str, add: Add, keys: bool
) -> None:
    said, jobs = WORDS[column]
    operations.publish_tasks(conn, said)
    add(
        conn,
        [
            NewJob("q", task, f"{n:02}", args, idempotency_key=str(n) if keys else None, **{column: given})
            for n, (task, args, given, _) in enumerate(jobs)
        ],
    )
    assert stored(conn, column) == [wanted for *_, wanted in jobs]


def test_a_list_of_one_task_whose_columns_are_as_short_as_they_can_be(conn: Conn) -> None:
    """One task, and one word of the producer, or one for each."""
    operations.publish_tasks(conn, {"ask": facts(2, "model")})
    given = [[{}] * 3, [{"max_attempts": 3, "affinity_key": "one"}] * 3]
    given.append([{}, {"max_attempts": 1, "affinity_key": "given"}, {"max_attempts": 2}])
    for list_, words in enumerate(given):
        jobs = [NewJob("q", "ask", f"{list_}-{n}", {"model": f"m{n}"}, **words[n]) for n in range(3)]
        enqueue.enqueue_many(conn, jobs)
    found = conn.execute("SELECT max_attempts, affinity_key FROM dl_jobs ORDER BY lock_key").fetchall()
    assert found == [(2, "m0"), (2, "m1"), (2, "m2"), *[(3, "one")] * 3, (2, "m0"), (1, "given"), (2, "m2")]


@pytest.mark.parametrize("bad", [list("abcdefghi"), ["a", "a"], [""], ["n" * 101], ["a\nb"]])
@pytest.mark.parametrize("add", [add_alone, add_by_function])
def test_wrong_limits_of_a_job_are_refused(conn: Conn, add: Add, bad: list[str]) -> None:
    with pytest.raises((ValueError, psycopg.DataError), match="limits"):
        add(conn, [NewJob("q", "t", "k", limits=bad)])
    assert stored(conn, "limits") == []


def test_what_a_task_says_is_the_latest_word_and_written_only_where_it_differs(conn: Conn) -> None:
    before_it = DECLARED | HEAVY | LIMITED
    operations.publish_tasks(conn, before_it)
    before = conn.execute("SELECT task, xmin::text FROM dl_tasks ORDER BY task").fetchall()
    changed = {"once": facts(9), "ask": facts(), "paint": facts(None, "category", "model"), "new": facts(1, "a", "b")}
    changed["load"] = facts() | {"limits": ["z"]}
    operations.publish_tasks(conn, before_it | changed)
    found = conn.execute("SELECT task, max_attempts, affinity, limits FROM dl_tasks").fetchall()
    assert {task: words for task, *words in found} == {
        "twice": [2, None, None],
        "silent": [None, None, None],
        "once": [9, None, None],
        "ask": [None, None, None],
        "paint": [None, ["category", "model"], None],
        "new": [1, ["a", "b"], None],
        "load": [None, None, ["z"]],
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
