"""Messages of webhooks: each event once, however many reapers run and how often; and none without a webhook."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hands import PATIENCE, Conn, Worker, enqueue, plain, quietly, started, value

from dataloader.config import Settings
from dataloader.queue import db, lifecycle, operations
from dataloader.queue.reports import predictions, stats, webhooks
from dataloader.queue.reports.messages import TASK

RULES = Settings.model_construct(
    dl_alerts_bundle_sec=60.0,
    dl_alerts_paused_sec=3_600.0,
    environment="test",
    dl_public_url="https://farm.example.com",
)
URL = "https://ops.example.com/alerts"
CANARY = "canary-5f2c"


def add(conn: Conn, name: str = "ops", **more: Any) -> None:
    webhooks.put(conn, name, more.pop("url", URL), "test", **more)


def die(conn: Conn, number: int = 1, queue: str = "q", error: str = "no", age_sec: float = 70) -> list[UUID]:
    """Jobs that have ended badly so many seconds ago."""
    with quietly(conn):
        found = [plain(conn, queue=queue, status="failed", attempt=5, error=error) for _ in range(number)]
    conn.cursor().executemany(
        "INSERT INTO dl_job_events (job_id, queue, kind, ts, payload)"
        " VALUES (%s, %s, 'failed', now() - make_interval(secs => %s), %s)",
        [(job_id, queue, age_sec, json.dumps({"error": error})) for job_id in found],
    )
    return found


def messages(conn: psycopg.Connection[Any], webhook: str = "ops") -> list[dict[str, Any]]:
    rows = conn.execute(
        "SELECT message FROM dl_messages JOIN dl_jobs USING (job_id)"
        " WHERE task = %s AND webhook = %s ORDER BY created_at",
        (TASK, webhook),
    )
    return [row[0] for row in rows.fetchall()]


def noted(conn: Conn, queue: str, lag_sec: float) -> None:
    """The reaper has counted that the oldest due job of this queue has waited for so long."""
    conn.execute(
        "INSERT INTO dl_lengths (queue, length, scheduled, retries, dead, lag_sec) VALUES (%s, 1, 0, 0, 0, %s)"
        " ON CONFLICT (queue) DO UPDATE SET lag_sec = excluded.lag_sec, counted_at = now()",
        (queue, lag_sec),
    )


def test_a_job_that_dies_is_told_once(conn: Conn) -> None:
    """Secrets in its error do not reach the message."""
    add(conn)
    (job_id,) = die(conn, error=f"cannot reach https://user:{CANARY}@db/ with password={CANARY}\nTraceback ...")
    assert webhooks.publish(conn, RULES) == 1
    assert webhooks.publish(conn, RULES) == 0
    (message,) = messages(conn)
    assert CANARY not in json.dumps(message)
    assert (message["kind"], message["state"], message["severity"]) == ("dead", "event", "critical")
    assert (message["text"], message["count"], message["queue"]) == ("1 job is dead in queue q.", 1, "q")
    assert message["environment"] == "test"
    (entry,) = message["jobs"]
    assert (entry["job_id"], entry["task"], entry["what"]) == (str(job_id), "t", "failed")
    assert entry["error"].endswith("with password=***")
    assert entry["url"] == f"https://farm.example.com/jobs/{job_id}"
    (row,) = conn.execute("SELECT queue, max_attempts, args FROM dl_jobs WHERE task = %s", (TASK,)).fetchall()
    assert row == ("alerts", webhooks.ATTEMPTS, {"webhook": "ops", "text": message["text"]})


def test_a_run_that_ends_a_job_is_told_of_as_it_stands_in_the_journal(conn: Conn, worker: Worker) -> None:
    """Both ends of dead jobs, by the functions that write them."""
    add(conn)
    failed = enqueue(conn, max_attempts=1)
    worker.finish(worker.take(), "fail", error="ValueError: no")
    lost = enqueue(conn, max_attempts=1)
    job = worker.take()
    lifecycle.settle(conn, job.claimed_by, "crash", "worker killed by signal 9", running=[lost])
    conn.execute("UPDATE dl_job_events SET ts = ts - interval '2 min'")
    webhooks.publish(conn, RULES)
    (message,) = messages(conn)
    assert [(each["job_id"], each["what"], each["error"]) for each in message["jobs"]] == [
        (str(failed), "failed", "ValueError: no"),
        (str(lost), "lost", "worker killed by signal 9 on attempt 1"),
    ]


def test_a_thousand_dead_jobs_are_one_message_with_a_count_and_twenty_of_them(
    conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And more than a round takes comes in the next."""
    add(conn)
    jobs = die(conn, 600, "a") + die(conn, 400, "b")
    assert webhooks.publish(conn, RULES) == 1
    (message,) = messages(conn)
    assert (message["text"], message["count"]) == ("1,000 jobs are dead in 2 queues.", 1_000)
    assert message["groups"] == [{"queue": "a", "task": "t", "count": 600}, {"queue": "b", "task": "t", "count": 400}]
    assert [job["job_id"] for job in message["jobs"]] == [str(job_id) for job_id in jobs[:20]]
    monkeypatch.setattr(webhooks, "TAKEN", 6)
    die(conn, 10)
    assert [webhooks.publish(conn, RULES) for _ in range(3)] == [1, 1, 0]
    assert [message["count"] for message in messages(conn)] == [1_000, 6, 4]


def test_the_first_waits_for_those_that_come_in_its_minute(conn: Conn) -> None:
    """But rows of a clock that was ahead wait for nothing."""
    add(conn)
    die(conn, 1, age_sec=50)
    die(conn, 1, age_sec=30)
    assert webhooks.publish(conn, RULES) == 0
    conn.execute("UPDATE dl_job_events SET ts = ts - interval '15 s' WHERE kind = 'failed'")
    assert webhooks.publish(conn, RULES) == 1
    assert messages(conn)[0]["count"] == 2
    die(conn, 1, age_sec=-3_600)
    assert webhooks.publish(conn, RULES) == 1


def test_what_is_young_is_told_with_the_next_for_an_older_number_may_not_be_visible_yet(conn: Conn, dsn: str) -> None:
    add(conn)
    die(conn, 1)
    with psycopg.connect(dsn) as other:
        other.execute(
            "INSERT INTO dl_job_events (job_id, queue, kind, payload) VALUES (gen_random_uuid(), 'slow', 'lost', '{}')"
        )
        die(conn, 1, age_sec=0)
        assert webhooks.publish(conn, RULES) == 1
    conn.execute("UPDATE dl_job_events SET ts = ts - interval '2 min'")
    assert webhooks.publish(conn, RULES) == 1
    assert [message["count"] for message in messages(conn)] == [1, 2]
    assert [job["queue"] for job in messages(conn)[1]["jobs"]] == ["slow", "q"]


def test_a_dead_message_is_no_alert(conn: Conn) -> None:
    add(conn)
    (job_id,) = die(conn)
    conn.execute("UPDATE dl_jobs SET task = %s, args = '{}' WHERE job_id = %s", (TASK, job_id))
    assert webhooks.publish(conn, RULES) == 0
    die(conn)
    assert webhooks.publish(conn, RULES) == 1, "and the position has moved on"
    assert messages(conn)[0]["count"] == 1


def test_a_webhook_is_not_told_of_what_was_before_it_or_in_its_pause(conn: Conn) -> None:
    """But each is told of what was told to nobody yet."""
    die(conn)
    assert webhooks.publish(conn, RULES) == 0
    add(conn)
    assert webhooks.publish(conn, RULES) == 0
    die(conn)
    assert webhooks.publish(conn, RULES) == 1
    add(conn, "late")
    webhooks.pause(conn, "ops", "test")
    assert webhooks.publish(conn, RULES) == 0
    assert messages(conn, "late") == []
    die(conn)
    assert webhooks.publish(conn, RULES) == 1
    webhooks.resume(conn, "ops")
    assert webhooks.publish(conn, RULES) == 0
    die(conn)
    add(conn, "last")
    assert webhooks.publish(conn, RULES) == 3


def test_each_webhook_is_told_what_it_asks_for(conn: Conn) -> None:
    add(conn, "all")
    add(conn, "stuck", kinds=["stuck"])
    add(conn, "b", queues=["b"])
    add(conn, "none", kinds=["paused"], queues=["b"])
    die(conn, 2, "a")
    die(conn, 1, "b")
    conn.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, ts, payload)"
        " VALUES (gen_random_uuid(), 'a', 'stuck', now() - interval '2 min', '{\"silent_sec\": 75.0}')"
    )
    late = enqueue(conn, deadline=datetime.now(UTC) - timedelta(minutes=5))
    stats.note_lengths(conn, 0)
    predictions.note(conn, "")
    conn.execute("UPDATE dl_job_events SET ts = ts - interval '2 min' WHERE job_id = %s", (late,))
    webhooks.publish(conn, RULES)
    told = {name: {m["kind"]: m["count"] for m in messages(conn, name)} for name in ("all", "stuck", "b", "none")}
    assert told == {"all": {"dead": 3, "stuck": 1, "deadline": 1}, "stuck": {"stuck": 1}, "b": {"dead": 1}, "none": {}}
    (stuck,) = messages(conn, "stuck")
    assert (stuck["text"], stuck["jobs"][0]["error"]) == ("1 run is stuck in queue a.", "no report for 1 min 15 s")
    (deadline,) = [message for message in messages(conn, "all") if message["kind"] == "deadline"]
    assert (deadline["severity"], deadline["jobs"][0]["job_id"]) == ("critical", str(late))
    assert deadline["text"] == "1 job is going to miss its deadline in queue q."
    assert deadline["jobs"][0]["error"].startswith("it should have ended at ")


def test_a_late_queue_is_told_when_it_begins_and_when_it_is_over(conn: Conn) -> None:
    """One that nobody has counted lately is neither."""

    def told(lag_sec: float, age: str = "0 s") -> int:
        noted(conn, "q", lag_sec)
        conn.execute("UPDATE dl_lengths SET counted_at = now() - %s::interval", (age,))
        return webhooks.publish(conn, RULES)

    add(conn, lag_sec=300)
    assert (told(299), told(720, "11 min"), told(720)) == (0, 0, 1)
    assert [told(lag_sec) for lag_sec in (720, 900, 200, 151)] == [0] * 4, "it wavers around its bound"
    assert (told(1, "11 min"), told(149)) == (0, 1)
    begun, over = messages(conn)
    assert (begun["kind"], begun["state"], begun["queue"]) == ("lag", "firing", "q")
    assert begun["text"] == "The oldest due job of queue q has waited 12 min."
    assert begun["url"] == "https://farm.example.com/queues/q"
    assert (over["kind"], over["state"], over["since"]) == ("lag", "resolved", begun["since"])
    assert value(conn, "SELECT count(*) FROM dl_alerts") == 0
    assert told(720) == 1
    conn.execute("DELETE FROM dl_lengths")
    assert webhooks.publish(conn, RULES) == 1, "the queue has no job any more"


def test_a_paused_queue_is_told_after_a_while_and_is_not_late_meanwhile(conn: Conn) -> None:
    """Also one without jobs; but of the queue of the messages nothing is told."""
    add(conn)
    for queue in ("q", "empty", "alerts"):
        operations.pause(conn, queue, "token ops from 10.0.0.7")
    for queue in ("q", "alerts"):
        noted(conn, queue, 7_000)
    assert webhooks.publish(conn, RULES) == 0
    conn.execute("UPDATE dl_queues SET paused_at = now() - interval '61 min'")
    assert webhooks.publish(conn, RULES) == 2
    assert webhooks.publish(conn, RULES) == 0
    operations.resume(conn, "q", "test")
    noted(conn, "q", 0)
    operations.resume(conn, "alerts", "test")  # and it is late now
    assert webhooks.publish(conn, RULES) == 1
    assert sorted(message["queue"] for message in messages(conn)) == ["empty", "q", "q"]
    begun, over = [message for message in messages(conn) if message["queue"] == "q"]
    assert begun["text"] == "Queue q has been paused for 1 h 1 min by token ops from 10.0.0.7."
    assert over["text"] == "Queue q is paused no more."


def test_an_alertmanager_is_told_again_for_it_forgets_and_others_are_not(conn: Conn) -> None:
    add(conn, "json")
    add(conn, "am", shape="alertmanager")
    noted(conn, "q", 720)
    assert webhooks.publish(conn, RULES) == 2
    conn.execute("UPDATE dl_alerts SET told_at = now() - interval '11 min'")
    noted(conn, "q", 1_380)
    assert webhooks.publish(conn, RULES) == 1
    assert webhooks.publish(conn, RULES) == 0
    first, again = messages(conn, "am")
    assert (first["since"], first["state"]) == (again["since"], again["state"])
    assert first["id"] != again["id"]


def test_nobody_keeps_a_message_back_by_taking_its_key_and_it_goes_with_its_job(conn: Conn) -> None:
    """The id of a message follows from the journal, which readers know."""
    add(conn)
    die(conn)
    with conn.transaction(force_rollback=True):
        webhooks.publish(conn, RULES)
        (message,) = messages(conn)
    enqueue(conn, idempotency_key=message["id"])
    assert webhooks.publish(conn, RULES) == 1
    assert messages(conn) == [message | {"at": messages(conn)[0]["at"]}]
    for queue, left in (("q", 1), ("alerts", 0)):
        conn.execute("DELETE FROM dl_jobs WHERE queue = %s", (queue,))
        assert value(conn, "SELECT count(*) FROM dl_messages") == left


def test_three_reapers_at_once_make_one_message(conn: Conn, dsn: str) -> None:
    add(conn)
    noted(conn, "q", 720)
    for _ in range(5):
        die(conn, 3)
        barrier = Barrier(3)

        def reap(barrier: Barrier = barrier) -> int:
            with db.connect(dsn, name="reaper", schema="public") as own:
                barrier.wait(PATIENCE)
                return webhooks.publish(own, RULES)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: reap(), range(3)))
    sent = messages(conn)
    assert sum(message["count"] or 0 for message in sent) == 15
    assert len({job["job_id"] for message in sent for job in message["jobs"]}) == 15
    assert [message["kind"] for message in sent].count("lag") == 1


def test_a_second_reaper_waits_for_nothing_and_the_round_of_a_dead_one_is_made_again_whole(
    conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(conn)
    die(conn)
    noted(conn, "q", 720)
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM dl_alerted FOR UPDATE")
        with started(lambda: webhooks.publish(conn, RULES), None, other) as round_:
            assert round_.result(PATIENCE) == 0
    with db.connect(dsn, name="reaper", schema="public") as dying, monkeypatch.context() as patch:

        def die_here(*_: object) -> None:
            conn.execute("SELECT pg_terminate_backend(%s)", (dying.info.backend_pid,))
            dying.execute("SELECT 1")

        patch.setattr(webhooks, "_place", die_here)
        with pytest.raises(psycopg.OperationalError):
            webhooks.publish(dying, RULES)
    assert messages(conn) == []
    assert webhooks.publish(conn, RULES) == 2
    assert [message["kind"] for message in messages(conn)] == ["dead", "lag"]


@pytest.mark.parametrize("has_row_beyond", [False, True])
def test_a_journal_that_begins_anew_is_followed(conn: Conn, has_row_beyond: bool) -> None:
    """Also beside a row that another service has numbered beyond the sequence."""
    add(conn)
    if has_row_beyond:
        (job_id,) = die(conn)
        beyond = "UPDATE dl_job_events SET event_id = 1000000000000 WHERE job_id = %s AND kind = 'failed'"
        conn.execute(beyond, (job_id,))
        assert webhooks.publish(conn, RULES) == 0
    die(conn)
    assert webhooks.publish(conn, RULES) == 1
    conn.execute("UPDATE dl_alerted SET last_event = 1000000000000")
    assert webhooks.publish(conn, RULES) == 0
    die(conn)
    assert webhooks.publish(conn, RULES) == 1


WRONG = {
    "name": ["", "a b", "a/b", "x" * 65],
    "signed_by": ["whsec_c2VjcmV0", "PG_PASSWORD", "DL_WEBHOOK_"],
    "url": [
        *("ops.example.com", "ftp://a/", "file:///etc/passwd", "http://", "http://a:0/", "http://a:99999/"),
        *("http://a/#b", "http://a/ b", "http://a/\n", "http://ä/", "http://[::1/", "http://${DL_WEBHOOK_HOST}/"),
        *("https://user:canary-5f2c@a/", "https://canary-5f2c@a/", "https://a/?token=canary-5f2c", "${PG_PASSWORD}"),
        *("${DL_TOKEN}", "${DL_WEBHOOK_}", "${DL_WEBHOOK_A}\n", "${DL_WEBHOOK_A}/b", "https://a/${DL_WEBHOOK_A}"),
        *("https://a/?b=${DL_WEBHOOK_A}", "https://u:${DL_WEBHOOK_A}@a/", "https://${DL_WEBHOOK_A}:x@a/"),
        *("https://a/${PG_PASSWORD}", "https://user@a/", "https://user:@a/", "http://a/" + "x" * 2_000),
    ],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_webhook_is_refused_and_changes_nothing(conn: Conn, field: str) -> None:
    for wrong in WRONG[field]:
        given = {"name": "ops", "url": URL, field: wrong}
        with pytest.raises(webhooks.WrongWebhook, match=rf"^{field} should|^{field} seems") as refusal:
            pytest.fail(f"{wrong!r} was taken: {webhooks.put(conn, **given, by='test')}")
        assert refusal.value.field == ("" if field == "name" else field)  # a name stands in the path
        assert CANARY not in str(refusal.value)
    with pytest.raises(webhooks.WrongWebhook, match="a variable of the workers that holds the whole URL"):
        add(conn, url=f"https://hooks.slack.com/services/T0/B0/{CANARY}", shape="slack")
    assert webhooks.listed(conn) == []


def test_a_webhook_is_changed_as_a_whole_but_for_its_pause(conn: Conn) -> None:
    add(conn, kinds=["dead"], queues=["a"], signed_by="DL_WEBHOOK_KEY", lag_sec=5)
    first = webhooks.pause(conn, "ops", "first")
    assert webhooks.pause(conn, "ops", "second") == first
    add(conn, url="${DL_WEBHOOK_AM}", shape="alertmanager")
    (found,) = webhooks.listed(conn)
    assert found["url"] == "${DL_WEBHOOK_AM}"
    assert (found["kinds"], found["queues"], found["signed_by"], found["lag_sec"]) == (None, None, None, 300)
    assert (found["paused_by"], found["added_by"]) == ("first", "test")


def test_whether_the_messages_have_a_worker(conn: Conn) -> None:
    assert not webhooks.is_served(conn, "alerts")
    shown = {"worker": "h:1:b", "pid": 1, "queue": "q", "queues": ["q", "alerts"], "state": "idle", "jobs": 0}
    stats.show_workers(conn, "farm", "h", [shown])
    assert webhooks.is_served(conn, "alerts")
    assert not webhooks.is_served(conn, "other")
    conn.execute("UPDATE dl_workers SET seen_at = now() - interval '31 s'")
    assert not webhooks.is_served(conn, "alerts")
    conn.execute("UPDATE dl_workers SET seen_at = now(), state = 'dead'")
    assert not webhooks.is_served(conn, "alerts")


def test_a_change_is_for_one_webhook_and_one_that_is_removed_leaves_nothing(conn: Conn) -> None:
    for name in ("a", "b", "c"):
        add(conn, name)
    noted(conn, "q", 720)
    webhooks.publish(conn, RULES)
    webhooks.pause(conn, "a", "test")
    webhooks.pause(conn, "b", "test")
    webhooks.resume(conn, "b")
    assert webhooks.remove(conn, "c")
    assert [(each["name"], each["paused_at"] is None) for each in webhooks.listed(conn)] == [("a", False), ("b", True)]
    assert conn.execute("SELECT webhook FROM dl_alerts ORDER BY webhook").fetchall() == [("a",), ("b",)]
    assert not webhooks.remove(conn, "c")
    assert webhooks.pause(conn, "c", "test") is None
    assert webhooks.resume(conn, "c") is None
    assert webhooks.send_test(conn, "c", RULES) is None


def test_each_condition_ends_by_itself(conn: Conn) -> None:
    for name in ("a", "b"):
        add(conn, name)
    webhooks.pause(conn, "b", "test")
    for queue in ("x", "y"):
        noted(conn, queue, 720)
    operations.pause(conn, "y2", "test")
    noted(conn, "y2", 0)
    conn.execute("UPDATE dl_queues SET paused_at = now() - interval '61 min'")
    assert webhooks.publish(conn, RULES) == 3
    webhooks.resume(conn, "b")
    assert webhooks.publish(conn, RULES) == 3
    webhooks.pause(conn, "b", "test")
    noted(conn, "x", 1)
    assert webhooks.publish(conn, RULES) == 1
    firing = (
        "SELECT string_agg(webhook || ' ' || kind || ' ' || queue, ', ' ORDER BY webhook, kind, queue) FROM dl_alerts"
    )
    assert value(conn, firing) == "a lag y, a paused y2, b lag x, b lag y, b paused y2"
    operations.resume(conn, "y2", "test")
    noted(conn, "y2", 720)
    assert webhooks.publish(conn, RULES) == 2
    assert value(conn, firing) == "a lag y, a lag y2, b lag x, b lag y, b paused y2"


def test_whether_a_condition_lasts(conn: Conn) -> None:
    add(conn, "a")
    add(conn, "b")
    message = {"kind": "lag", "queue": "q", "since": "2026-01-31T06:30:00Z"}
    conn.execute("INSERT INTO dl_alerts (webhook, kind, queue, since) VALUES ('a', %s, %s, %s)", [*message.values()])
    assert webhooks.is_firing(conn, "a", message)
    assert not webhooks.is_firing(conn, "b", message)
    for other in ({"kind": "paused"}, {"queue": "r"}, {"since": "2026-01-31T06:30:01Z"}):
        assert not webhooks.is_firing(conn, "a", message | other), other
