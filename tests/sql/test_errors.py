"""Errors in groups: what each end of a run writes, what people see of the groups, and what they do to one."""

from collections import Counter
from typing import Any
from uuid import UUID

import pytest
from hands import Conn, Worker, enqueue, journal, many, plain, row, value
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.farm import failures
from dataloader.queue import lifecycle, operations
from dataloader.queue.reports import errors

BOOM = "ValueError at load.py:step: row # is wrong"
TEXTS = [
    "row 17 of 'x.csv' has 3 fields",
    "order 0190a5d0-ac96-774b-bcce-b302099a8057 is late since 2026-01-31T14:30:05.123Z",
    "cannot read /data/in/2026/x.csv or in/orders/7.csv: gone",
    r"cannot read C:\data\x.csv",
    "mail to ann.lee@example.org bounced, GET https://example.org/a?b=1 gave 503",
    "it doesn't fit, user=ann id=7, at 0xdeadBEEF, took 1,234.5 s",
    "key AKIA5EXAMPLEKEY0000000000 refused\nand more 1",
    "  \n first line 5\n second",
    "x" * 3_000,
]


def ended(conn: Conn, worker: Worker, verb: str, group: str | None = BOOM, **new: Any) -> UUID:
    job_id = enqueue(conn, **new)
    worker.finish(worker.take(new.get("queue", "q")), verb, error="row 7 is wrong", error_group=group, delay_sec=60)
    return job_id


def shown(conn: Conn, **wanted: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """The groups by task and group, each with its dead and its retrying jobs."""
    return {(g["task"], g["error_group"]): (g["dead"], g["retrying"]) for g in errors.groups(conn, **wanted)["groups"]}


def test_the_database_and_the_workers_take_the_same_from_a_text(conn: Conn) -> None:
    for text in TEXTS:
        assert value(conn, "SELECT dl_error_group(%s)", text).strip() == failures.general(text)


@pytest.mark.parametrize("verb", ["retry", "fail"])
@pytest.mark.parametrize(("given", "group"), [(BOOM, BOOM), (None, "row # is wrong")])
def test_an_end_has_the_group_that_its_worker_tells_else_that_of_its_text(
    conn: Conn, worker: Worker, verb: str, given: str | None, group: str
) -> None:
    job_id = ended(conn, worker, verb, given)
    assert row(conn, job_id)["error_group"] == group
    assert journal(conn, job_id)[-1][1].get("error_group") == given


@pytest.mark.parametrize(("verb", "group"), [("succeed", None), ("cancel", None), ("hand_back", BOOM)])
def test_the_next_end_clears_the_group_with_the_error(conn: Conn, worker: Worker, verb: str, group: str | None) -> None:
    job_id = ended(conn, worker, "retry")
    operations.change(conn, "run-now", [job_id], "test")
    worker.finish(worker.take(), verb, error=None if verb == "cancel" else "a success has none")
    found = row(conn, job_id)
    assert (found["error_group"], found["error"] is None) == (group, group is None)


@pytest.mark.parametrize(
    ("end", "group"),
    [
        ("crash", "worker died on attempt #"),
        ("timeout", "worker died on attempt #"),
        ("drain", None),
        ("lease", "lease expired on attempt #: no heartbeat since …"),
    ],
)
def test_a_dead_workers_end_has_its_reasons_group(conn: Conn, worker: Worker, end: str, group: str | None) -> None:
    """Without the times in the reason of a lease that ran out."""
    job_id = worker.start_new(max_attempts=1).job_id
    if end == "lease":
        conn.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s', heartbeat_at = now()")
        assert lifecycle.reap(conn) is not None
    else:
        lifecycle.settle(conn, worker.name, end, "worker died")
    assert row(conn, job_id)["error_group"] == group


@pytest.mark.parametrize("end", ["spent", "killed"])
def test_a_retry_that_ends_in_the_queue_keeps_its_group_and_one_without_an_error_gets_one(
    conn: Conn, worker: Worker, end: str
) -> None:
    job_id, other = ended(conn, worker, "retry"), ended(conn, worker, "retry", lock_key="other")
    conn.execute("UPDATE dl_jobs SET error = NULL, error_group = NULL WHERE job_id = %s", (other,))
    if end == "spent":
        conn.execute("UPDATE dl_jobs SET attempt = max_attempts, available_at = now(), blocked_on = NULL")
        assert worker.claim().job is None
    else:
        operations.change_queue(conn, "kill-retries", "q", "ann")
        assert row(conn, other)["error"] == "killed by ann"
    groups = [(row(conn, each)["status"], row(conn, each)["error_group"]) for each in (job_id, other)]
    assert groups == (
        [("lost", BOOM), ("lost", "no attempts left")]
        if end == "spent"
        else [("failed", BOOM), ("failed", "killed by hand")]
    )


@pytest.mark.parametrize(("change", "group"), [(", error = 'no file 5'", "no file #"), ("", BOOM)])
def test_an_error_of_another_service_has_its_own_group(conn: Conn, worker: Worker, change: str, group: str) -> None:
    job_id, other = ended(conn, worker, "retry"), ended(conn, worker, "fail", lock_key="other")
    conn.execute(f"UPDATE dl_jobs SET status = 'failed'{change} WHERE job_id = %s", (job_id,))
    assert (row(conn, job_id)["error_group"], row(conn, other)["error_group"]) == (group, BOOM)


def test_a_group_tells_its_jobs_times_hosts_and_latest_error(conn: Conn, worker: Worker) -> None:
    """A dead row of another service is in the group of its text."""
    first, second = ended(conn, worker, "fail"), ended(conn, worker, "retry", lock_key="b")
    conn.execute("UPDATE dl_jobs SET finished_at = now() - interval '2 h' WHERE job_id = %s", (first,))
    (group,) = errors.groups(conn)["groups"]
    assert (group["queue"], group["task"], group["error_group"]) == ("q", "t", BOOM)
    assert (group["dead"], group["retrying"], group["job_id"], group["error"]) == (1, 1, second, "row 7 is wrong")
    assert (group["last_at"] - group["first_at"]).total_seconds() == pytest.approx(7_200, abs=60)
    assert [group["by_hour"][at] for at in (-1, -2, -3)] == [1, 0, 1]
    assert (sum(group["by_hour"]), len(group["by_hour"])) == (2, errors.HOURS)
    assert group["hosts"] == [worker.name.split(":")[0]]
    theirs = plain(conn, status="failed", task="old")
    conn.execute("UPDATE dl_jobs SET error = 'no file 5', error_group = NULL WHERE job_id = %s", (theirs,))
    assert shown(conn) == {("t", BOOM): (1, 1), ("old", "no file #"): (1, 0)}
    assert operations.change_queue(conn, "requeue-dead", "q", "ann", only={"error_group": "no file #"}).changed == 1


def test_filters_of_the_groups_leave_out_the_rest(conn: Conn, worker: Worker) -> None:
    old = ended(conn, worker, "fail", task="a")
    ended(conn, worker, "fail", task="b")
    ended(conn, worker, "retry", task="c", queue="r")
    conn.execute("UPDATE dl_jobs SET finished_at = now() - interval '2 h' WHERE job_id = %s", (old,))
    since = value(conn, "SELECT now() - interval '1 h'")
    assert {task for task, _ in shown(conn)} == {"a", "b", "c"}
    assert {task for task, _ in shown(conn, queue="q")} == {"a", "b"}
    assert {task for task, _ in shown(conn, queue="r")} == {"c"}
    assert {task for task, _ in shown(conn, task="b")} == {"b"}
    assert {task for task, _ in shown(conn, since=since)} == {"b", "c"}


def test_an_answer_that_does_not_count_all_says_so(conn: Conn, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    many(conn, 150, status="'failed'", error="'x'", error_group="'x'", finished_at="now() - i * interval '1 s'")
    found = errors.groups(conn)
    assert (found["is_cut"], found["groups"][0]["dead"]) == (False, 150)
    monkeypatch.setattr(errors, "SCAN", 120)
    found = errors.groups(conn)
    assert (found["is_cut"], found["groups"][0]["dead"]) == (True, 120)


@pytest.mark.parametrize(("change", "left"), [("requeue-dead", "queued"), ("delete-dead", None)])
def test_a_change_of_a_group_leaves_all_others_alone(conn: Conn, worker: Worker, change: str, left: str | None) -> None:
    mine = ended(conn, worker, "fail")
    others = [
        ended(conn, worker, "fail", "another group"),
        ended(conn, worker, "fail", task="other"),
        ended(conn, worker, "retry", lock_key="waits"),
        ended(conn, worker, "fail", queue="r"),
    ]
    before = [row(conn, job_id)["status"] for job_id in others]
    assert operations.change_queue(conn, change, "q", "ann", only={"task": "t", "error_group": BOOM}).changed == 1
    assert [row(conn, job_id)["status"] for job_id in others] == before == ["failed", "failed", "queued", "failed"]
    assert value(conn, "SELECT min(status::text) FROM dl_jobs WHERE job_id = %s", mine) == left
    if left:
        assert (row(conn, mine)["error"], row(conn, mine)["error_group"]) == (None, None)
        assert journal(conn, mine)[-1][1]["by"] == "ann"


def test_a_note_is_written_changed_and_cleared(conn: Conn, worker: Worker) -> None:
    ended(conn, worker, "fail")
    errors.write_note(conn, "other", BOOM, "of another task", "cy")
    errors.write_note(conn, "t", "other", "of another group", "cy")
    for note, by in (("known, see wiki", "ann"), ("fixed", "bob")):
        errors.write_note(conn, "t", BOOM, note, by)
        (group,) = errors.groups(conn)["groups"]
        assert (group["note"], group["noted_by"]) == (note, by)
    errors.write_note(conn, "t", BOOM, "  ", "bob")
    assert errors.groups(conn)["groups"][0]["note"] is None
    assert value(conn, "SELECT array_agg(task || error_group ORDER BY 1) FROM dl_error_notes") == [
        f"other{BOOM}",
        "tother",
    ]


@settings(max_examples=20)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["q", "r"]),
            st.sampled_from(["a", "b"]),
            st.sampled_from(["failed", "lost", "queued", "succeeded", "canceled"]),
            st.sampled_from([None, "x", "y"]),
        ),
        max_size=25,
    )
)
def test_the_counts_of_the_groups_add_up_to_the_jobs(conn: Conn, rows: list[tuple[Any, ...]]) -> None:
    conn.execute("TRUNCATE dl_jobs, dl_job_events")
    for number, (queue, task, status, group) in enumerate(rows):
        conn.execute(
            "WITH j AS (INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, error, error_group,"
            " finished_at) VALUES (gen_random_uuid(), %s, %s, %s, %s, 1, %s, %s, now()) RETURNING job_id, queue)"
            " INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'requeue' FROM j",
            (queue, task, str(number), status, group and f"{group}!", group),
        )
    wanted = Counter(
        (queue, task, group, status == "queued")
        for queue, task, status, group in rows
        if group and status in ("failed", "lost", "queued")
    )
    found = Counter[tuple[str, str, str, bool]]()
    for group in errors.groups(conn)["groups"]:
        for is_queued, count in ((False, group["dead"]), (True, group["retrying"])):
            found[group["queue"], group["task"], group["error_group"], is_queued] += count
    assert +found == wanted
