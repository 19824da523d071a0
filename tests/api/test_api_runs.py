"""The cost of runs, over HTTP: tasks with any name, ranges; the pages of tasks, of the timeline, of events."""

from urllib.parse import quote
from uuid import UUID

import pytest
from api_app import answered, journal
from flask.testing import FlaskClient

from dataloader.model.runs import TaskRuns
from dataloader.queue import db
from dataloader.queue.reports import stats

NAMES = ["load", "a/b", "..", ".", "<script>alert(1)</script>", "x" * 500, "a?b#c%2f", "é\u202e \n"]
WORKER = "host-1:77:boot"


def ran(conn: db.Connection, task: str = "load", queue: str = "q", end: str | None = "done") -> UUID:
    """One run of this task, which took two seconds until this row of the journal, or goes on."""
    status = {"done": "succeeded", None: "running"}.get(end, end)
    with conn.transaction():
        conn.execute("SET LOCAL session_replication_role = replica")
        made = conn.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, created_at, started_at, finished_at,"
            " claimed_by) VALUES (gen_random_uuid(), %(queue)s, %(task)s, 'k', %(status)s, now() - interval '5 s',"
            " now() - interval '3 s', CASE WHEN %(end)s::text IS NOT NULL THEN now() - interval '1 s' END,"
            " CASE WHEN %(end)s::text IS NULL THEN %(worker)s END) RETURNING job_id",
            {"queue": queue, "task": task, "status": status, "end": end, "worker": WORKER},
        ).fetchone()
    assert made
    steps = [("queued", 5, {"worker": WORKER}), ("picked", 3, {"worker": WORKER})]
    if end:
        steps.append((end, 1, {"worker": WORKER, "peak_mb": 50}))
    journal(conn, made[0], queue, *steps)
    stats.aggregate(conn)
    job_id: UUID = made[0]
    return job_id


@pytest.mark.parametrize("task", NAMES)
@pytest.mark.long
def test_a_task_of_any_name_has_its_figures(client: FlaskClient, conn: db.Connection, task: str) -> None:
    ran(conn, task)
    ran(conn, task, end="failed")
    path = quote("-" if task in (".", "..") else task, safe="")
    name = {"name": task} if task in (".", "..") else {}
    found = answered(client.get(f"/api/v1/tasks/{path}", query_string=name), TaskRuns)
    assert (found["task"], found["is_known"], found["range"]) == (task, True, "24h")
    assert (found["figures"]["runs"], found["figures"]["failed"], found["figures"]["failure_rate"]) == (2, 1, 0.5)
    assert found["figures"]["run_sec"]["p50"] == pytest.approx(2, rel=0.1)
    page = client.get(f"/tasks/{path}", query_string=name)
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    (listed,) = [each for each in client.get("/api/v1/tasks?range=24h").get_json()["tasks"] if each["figures"]]
    assert (listed["task"], listed["figures"]["runs"]) == (task, 2)
    assert client.get("/tasks").status_code == 200


def test_a_task_that_nobody_knows_has_no_runs_and_without_a_range_tasks_have_no_figures(
    client: FlaskClient, conn: db.Connection
) -> None:
    ran(conn)
    (task,) = client.get("/api/v1/tasks").get_json()["tasks"]
    assert (task["task"], task["runs"], task["learned_memory_mb"], "figures" in task) == ("load", 1, 50, False)
    found = client.get("/api/v1/tasks/nobody?range=7d").get_json()
    assert (found["is_known"], found["figures"]["runs"], found["figures"]["run_sec"]) == (False, 0, None)
    assert "No worker has a pipeline of this name" in client.get("/tasks/nobody").text


def test_the_timeline_has_each_run_at_its_worker(client: FlaskClient, conn: db.Connection) -> None:
    """Also behind a bulk insert; and it claims no begin that it does not know."""
    failed, long, unknown = ran(conn, "broken", end="failed"), ran(conn, "long", end=None), ran(conn, "unknown")
    conn.execute("UPDATE dl_job_events SET ts = ts - interval '5 h' WHERE job_id = %s", (long,))
    conn.execute("UPDATE dl_job_events SET ts = ts - interval '5 h' WHERE job_id = %s AND kind <> 'done'", (unknown,))
    assert client.post(f"/api/v1/jobs/{failed}/requeue").status_code == 200
    conn.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind)"
        " SELECT gen_random_uuid(), 'bulk', unnest('{queued, heartbeat}'::text[]) FROM generate_series(1, 6000)"
    )
    text, activity = client.get("/timeline").text, client.get("/activity").text
    assert text.count("<rect") >= 1
    for word in (WORKER, "broken", "failed", "running"):
        assert word in text
    assert "more rows" not in text
    assert "requeued" in activity
    assert "jobs are missing here" not in activity
    rows = {row.partition("</a>")[0]: row for row in text.split('<a class="task" href="')[1:]}
    assert '"number">5 h</td>' in rows['/tasks/long">long']
    assert rows['/tasks/unknown">unknown'].count('class="number">–</td>') == 2
