"""The needs of runs on a host: learned from the journal, declared by pipelines, shown to people."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hands import Conn, Worker, enqueue, quietly, took, value

from dataloader.queue import lifecycle, operations
from dataloader.queue.reports import alerts, stats


def ran(conn: Conn, worker: Worker, task: str, facts: dict[str, Any], sec: float = 10.0) -> None:
    """A run of this task has taken so long, and told this of itself."""
    job_id = enqueue(conn, task=task)
    worker.finish(worker.take())
    took(conn, job_id, sec)
    tells = "UPDATE dl_job_events SET payload = payload || %s::jsonb WHERE job_id = %s AND kind = 'done'"
    conn.execute(tells, (json.dumps(facts), job_id))


def needs_of(conn: Conn, task: str) -> dict[str, Any]:
    """The row of a task, once the journal is summed up."""
    while stats.aggregate(conn) > 0:
        pass
    return next(row for row in stats.tasks(conn) if row["task"] == task)


def test_the_need_of_a_task_is_what_95_of_100_runs_have_used_at_most(conn: Conn, worker: Worker) -> None:
    for number in range(1, 21):
        ran(conn, worker, "heavy", {"peak_mb": number * 100.0, "cpu_sec": number * 2.0})
    found = needs_of(conn, "heavy")
    assert (found["memory_mb"], found["runs"]) == (1_900, 20)
    assert found["cpus"] == pytest.approx(3.8, rel=0.05)
    assert stats.learned(conn) == {"heavy": (1_900, pytest.approx(3.8, rel=0.05))}


def test_only_the_latest_200_runs_count(conn: Conn, worker: Worker) -> None:
    ran(conn, worker, "heavy", {"peak_mb": 900.0, "cpu_sec": 20.0})
    needs_of(conn, "heavy")
    conn.execute("UPDATE dl_needs SET peaks = array_fill(900::real, '{200}'), shares = array_fill(2::real, '{200}')")
    for _ in range(191):
        ran(conn, worker, "heavy", {"peak_mb": 300.0, "cpu_sec": 0.0})
    found = needs_of(conn, "heavy")
    assert (found["learned_memory_mb"], found["learned_cpus"]) == (300, 0)
    assert found["runs"] == 192
    assert value(conn, "SELECT ARRAY[cardinality(peaks), cardinality(shares)] FROM dl_needs") == [200, 200]
    assert value(conn, "SELECT peaks[1] || ' ' || peaks[200] FROM dl_needs") == "300 900"


def test_what_every_worker_uses_is_no_need(conn: Conn, worker: Worker) -> None:
    """Admission costs; tasks of small runs should not pay for it."""
    ran(conn, worker, "small", {"peak_mb": 127.0, "cpu_sec": 14.0})
    found = needs_of(conn, "small")
    assert (found["memory_mb"], found["cpus"]) == (None, None)
    assert (found["learned_memory_mb"], found["learned_cpus"]) == (127, pytest.approx(1.4, rel=0.05))
    assert stats.learned(conn) == {}
    ran(conn, worker, "cores", {"peak_mb": 50.0, "cpu_sec": 30.0})
    assert needs_of(conn, "cores")["cpus"] == pytest.approx(3, rel=0.05)
    assert stats.learned(conn) == {"cores": (0, pytest.approx(3, rel=0.05))}
    ran(conn, worker, "large", {"peak_mb": 128.0, "cpu_sec": 0.0})
    needs_of(conn, "large")
    assert stats.learned(conn)["large"] == (128, 0)


def test_a_short_run_tells_nothing_of_processors(conn: Conn, worker: Worker) -> None:
    ran(conn, worker, "quick", {"peak_mb": 200.0, "cpu_sec": 0.9}, sec=0.5)
    found = needs_of(conn, "quick")
    assert (found["memory_mb"], found["learned_cpus"]) == (200, None)
    ran(conn, worker, "quick", {"peak_mb": 200.0, "cpu_sec": 20.0})
    assert needs_of(conn, "quick")["cpus"] == pytest.approx(2, rel=0.05)
    ran(conn, worker, "quick", {"peak_mb": 200.0, "cpu_sec": 0.9}, sec=0.5)
    assert needs_of(conn, "quick")["cpus"] == pytest.approx(2, rel=0.05)


def test_what_others_write_into_the_journal_is_no_figure_or_within_bounds(conn: Conn, worker: Worker) -> None:
    for peak_mb in ("300", None, [300], {"mb": 300}, True):
        ran(conn, worker, "strange", {"peak_mb": peak_mb, "cpu_sec": "much"})
    ran(conn, worker, "endless", {})
    endless = '{"peak_mb": 1e400, "cpu_sec": -1e400}'
    conn.execute(
        "UPDATE dl_job_events SET payload = %s::jsonb WHERE kind = 'done' AND NOT payload ? 'peak_mb'", (endless,)
    )
    ran(conn, worker, "usual", {"peak_mb": 300.0, "cpu_sec": "much"})
    assert (needs_of(conn, "usual")["memory_mb"], needs_of(conn, "usual")["learned_cpus"]) == (300, None)
    assert needs_of(conn, "endless")["memory_mb"] == 1e9
    assert all(row["task"] != "strange" for row in stats.tasks(conn))


def test_a_task_that_no_job_has_any_more_is_not_learned_of(conn: Conn, worker: Worker) -> None:
    ran(conn, worker, "gone", {"peak_mb": 300.0})
    with quietly(conn):
        conn.execute("DELETE FROM dl_jobs")
    stats.aggregate(conn)
    assert stats.tasks(conn) == []


def test_the_word_of_the_pipeline_wins(conn: Conn, worker: Worker) -> None:
    ran(conn, worker, "heavy", {"peak_mb": 300.0, "cpu_sec": 30.0})
    operations.publish_tasks(
        conn, {"heavy": {"max_attempts": 3, "memory_mb": 4_000}, "free": {"memory_mb": 0, "cpus": 2}}
    )
    found = needs_of(conn, "heavy")
    assert (found["memory_mb"], found["declared_memory_mb"], found["learned_memory_mb"]) == (4_000, 4_000, 300)
    assert (found["cpus"], found["declared_cpus"]) == (pytest.approx(3, rel=0.05), None)
    assert found["max_attempts"] == 3
    free = needs_of(conn, "free")
    assert (free["memory_mb"], free["cpus"], free["runs"], free["learned_at"]) == (0, 2, 0, None)
    operations.publish_tasks(conn, {"heavy": {}, "free": {}})
    assert needs_of(conn, "heavy")["memory_mb"] == 300


def test_a_job_says_that_no_host_of_its_queue_has_the_memory_for_it(conn: Conn, worker: Worker) -> None:
    job_id = enqueue(conn, task="heavy")
    idle = {"queue": "q", "queues": ["q"], "state": "idle", "jobs": 0}
    shown = [{"worker": f"h:{pid}:a", "pid": pid, **idle} for pid in (1, 2)]

    def waiting_for() -> dict[str, Any]:
        found = (lifecycle.status(conn, job_id) or {})["waiting_for"]
        of_farm = [alert.text for alert in alerts.farm_alerts({"queues": []}, [], None, stats.wrong(conn, "alerts"))]
        text = "The task heavy does not start: no host of the queue q has the memory that a run needs"
        assert [each.partition(" (")[0] for each in of_farm] == [text] * (found["reason"] == "memory")
        return {name: found.get(name) for name in ("reason", "task", "need_mb", "room_mb")}

    def hosts(*rooms: float | None) -> None:
        for number, room in enumerate(rooms):
            stats.show_workers(conn, f"farm {number}", "h", [shown[number]], room)

    hosts(3_000, 2_000)
    assert waiting_for() == {"reason": "worker", "task": None, "need_mb": None, "room_mb": None}
    operations.publish_tasks(conn, {"heavy": {"memory_mb": 4_000}})
    assert waiting_for() == {"reason": "memory", "task": "heavy", "need_mb": 4_000, "room_mb": 3_000}
    hosts(3_000, 4_000)
    assert waiting_for() == {"reason": "worker", "task": None, "need_mb": 4_000, "room_mb": None}
    hosts(3_000, None)  # a host without a bound, or older code, which asks for none
    assert waiting_for()["reason"] == "worker"
    conn.execute("UPDATE dl_workers SET seen_at = now() - interval '1 min' WHERE host_memory_mb IS NULL")
    assert waiting_for()["reason"] == "memory"
    operations.publish_tasks(conn, {"heavy": {"memory_mb": 0}})
    assert waiting_for()["reason"] == "worker"
    operations.publish_tasks(conn, {"heavy": {}})
    conn.execute(
        "INSERT INTO dl_needs (task, memory_mb, runs, learned_at, peaks) VALUES ('heavy', 3001, 1, now(), '{3001}')"
    )
    assert waiting_for() == {"reason": "memory", "task": "heavy", "need_mb": 3_001, "room_mb": 3_000}


def test_a_task_without_a_host_is_one_task_since_its_job_is_due(conn: Conn) -> None:
    """A queue's jobs are read once, however many tasks are too large."""
    due = datetime.now(UTC) - timedelta(hours=1)
    for queue in ("q", "r"):
        enqueue(conn, task="heavy", queue=queue)
    conn.execute("UPDATE dl_jobs SET created_at = now() - interval '3 d', available_at = %s", (due,))
    idle = {"state": "idle", "jobs": 0}
    shown = [
        {"worker": f"h:{n}:a", "pid": n, "queue": queue, "queues": [queue], **idle} for n, queue in enumerate("qr")
    ]
    stats.show_workers(conn, "farm", "h", shown, 3_000)
    operations.publish_tasks(conn, {"heavy": {"memory_mb": 4_000}})
    [task] = stats.wrong(conn, "alerts")
    assert (task["name"], task["number"], task["since"]) == ("heavy", 1, due)
    operations.publish_tasks(conn, {f"heavy {n}": {"memory_mb": 4_000} for n in range(50)})
    with conn.transaction():
        stats.wrong(conn, "alerts")
        read = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = 'dl_jobs'::regclass"
        assert value(conn, read) < 20


def test_a_task_is_shown_whose_runs_replace_more_than_one_worker_in_ten(conn: Conn, worker: Worker) -> None:
    for number in range(20):
        changed = {"rude": ["umask"] if number % 5 else ["threads", "umask"], "seldom": ["umask"]}
        ran(conn, worker, "rude", {"cpu_sec": 0.1, "changed": changed["rude"]} if number < 3 else {"cpu_sec": 0.1})
        ran(conn, worker, "seldom", {"cpu_sec": 0.1, "changed": changed["seldom"]} if number < 2 else {"cpu_sec": 0.1})
    ran(conn, worker, "strange", {"cpu_sec": 0.1, "changed": "of another service"})
    shown = {row["task"]: row["replaces"] for row in stats.tasks(conn) if row["replaces"]}
    assert shown == {"rude": {"runs": 20, "replaced": 3, "changed": ["threads", "umask"]}}
