"""No row, whatever a producer or a farm writes, hurts another job, a worker, a duty of the reaper, or a page."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from flask import Flask
from flask.testing import FlaskClient
from hostile import QUEUE, Rows

from dataloader.config import Settings
from dataloader.queue import cleanups, db, lifecycle, logs
from dataloader.queue.job import Finish
from dataloader.queue.lifecycle import Ended, Session
from dataloader.queue.plans import backfills, schedules
from dataloader.queue.reports import predictions, runs, stats, webhooks
from dataloader.queue.set_aside import is_of_a_row, set_aside

RULES = Settings.model_construct(dl_alerts_bundle_sec=1.0, dl_alerts_paused_sec=1.0, environment="test")
ROUNDS = 10
ROWS = 1_000  # of a round
SEEN = 8  # jobs of a round whose own pages are looked at
HEALTHY = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key)
SELECT gen_random_uuid(), %s, 'healthy', 'healthy ' || n FROM generate_series(1, 3) n
"""
LEFT = "SELECT count(*) FROM dl_jobs WHERE task = 'healthy' AND status <> 'succeeded'"
OF_A_JOB = ("status", "prediction", "events", "result", "family", "logs")
PAGES_OF_A_JOB = ("/jobs/{}", "/jobs/{}/again", "/api/v1/jobs/{}", *(f"/api/v1/jobs/{{}}/{each}" for each in OF_A_JOB))
LISTS = (
    f"/jobs?queue={QUEUE}",
    "/jobs?status=dead",
    "/jobs?q=task:t",
    "/keys?queue=hostile&key=k",
    "/api/v1/jobs?q=args.a:1",
    "/api/v1/jobs?status=queued&limit=500",
    "/timeline?queue=hostile",
    "/api/v1/tally?by=task",
)


def rule_addresses(app: Flask) -> list[str]:
    """Every page and answer that names no object, and those of the queue, the task and the limit."""
    named = {"queue": QUEUE, "task": "t", "limit": "a"}
    rules = [rule for rule in app.url_map.iter_rules() if "GET" in (rule.methods or ())]
    able = [rule for rule in rules if rule.arguments <= named.keys()]
    found = [built[1] for rule in able if (built := rule.build(named, append_unknown=False))]
    return [*sorted({*found} - {"/key"}), *LISTS]


def duties(conn: db.Connection) -> Iterator[tuple[str, Callable[[], object]]]:
    """The duties of a round of the reaper, with their names."""

    def all_of(step: Callable[[], Any]) -> Callable[[], object]:
        return lambda: sum(1 for _ in iter(step, None))

    yield "reap", all_of(lambda: lifecycle.reap(conn))
    yield "wake", lambda: lifecycle.wake(conn, 1_000)
    yield "unpark", lambda: lifecycle.unpark_stranded(conn, None, 200)
    yield "resolve", lambda: lifecycle.resolve_stranded(conn, None, 200)
    yield "let in", lambda: lifecycle.let_in(conn)
    yield "schedules", lambda: list(schedules.tick(conn))
    yield "due schedules", lambda: schedules.due_in(conn)
    yield "backfills", lambda: [backfills.tick(conn) for _ in range(40)]
    yield "due backfills", lambda: backfills.due_in(conn)
    yield "cleanups", lambda: [cleanups.add(conn, job_id) for job_id in cleanups.due(conn)]
    yield "forget", lambda: cleanups.forget(conn)
    yield "aggregate", all_of(lambda: stats.aggregate(conn) or None)
    yield "fold", lambda: runs.fold(conn)
    yield "lengths", lambda: stats.note_lengths(conn, 0.0)
    yield "vacuum", lambda: stats.vacuum(conn)
    yield "predict", lambda: _predict(conn)
    yield "alerts", lambda: webhooks.publish(conn, RULES)
    yield "log days", lambda: logs.keep_days(conn, 30)
    yield "prune", lambda: lifecycle.prune(conn, 86_400, "-infinity", 500)
    yield "learned", lambda: stats.learned(conn)


def _predict(conn: db.Connection) -> None:
    after = ""
    while noted := predictions.note(conn, after):
        after = noted.queue
        assert noted.error is None, noted


class Hand:
    """A worker that runs all that it can claim, as `farm/batch.py` claims it."""

    def __init__(self, dsn: str) -> None:
        self.conn = db.connect(dsn, name="host:1:boot", schema="public")
        self.session: Session = lifecycle.open_session(self.conn, "host:1:boot")
        self.aside: list[UUID] = []

    def step(self, queues: list[str], most: int, ends: list[Ended]) -> lifecycle.Step:
        try:
            return lifecycle.step(self.session, queues, 0.1, most, ends)
        except psycopg.Error as e:
            if not is_of_a_row(e):
                raise
            for end in ends:
                lifecycle.finish_some(self.conn, "host:1:boot", [end])
            found = set_aside(
                self.conn, queues, lambda: lifecycle.step(self.session, queues, 0.1, most, tries_short=False), e
            )
            self.aside += [found.job_id] if found else []
            return lifecycle.Step([], {}, look_again=True)

    def work(self, queue: str) -> None:
        """Until the queue has nothing to claim now."""
        for most in (1, 20):
            ends: list[Ended] = []
            for _ in range(2_000):
                step = self.step([queue], most, ends)
                ends = [Ended(job, Finish("succeed")) for job in step.jobs]
                if not (step.jobs or step.look_again):
                    break
            else:
                raise AssertionError(f"no end of {queue}")


@pytest.fixture
def hand(dsn: str) -> Iterator[Hand]:
    hand = Hand(dsn)
    with hand.conn:
        yield hand


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_row_hurts_another_job_a_worker_a_duty_or_a_page(
    conn: db.Connection,
    hand: Hand,
    client: FlaskClient,
    app: Flask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(db, "give_up_after", lambda *_, **__: None)  # a busy machine may take longer than a duty has
    seed = int(os.environ.get("DL_HOSTILE_SEED", random.randrange(10**9)))
    print("DL_HOSTILE_SEED", seed)
    rows = Rows(conn, random.Random(seed))
    addresses = rule_addresses(app)
    hurt: list[str] = []
    for number in range(ROUNDS):
        conn.execute(HEALTHY, (QUEUE,))
        rows.add(ROWS)
        conn.execute(HEALTHY, (QUEUE,))
        conn.execute(HEALTHY, ("other",))
        conn.execute("UPDATE dl_queues SET paused_at = NULL WHERE queue = %s", (QUEUE,))
        steps = list(duties(hand.conn))
        for name, duty in [*steps, ("work", lambda: hand.work(QUEUE)), ("others", lambda: hand.work("other")), *steps]:
            try:
                duty()
            except Exception as e:
                hurt.append(f"{number} {name}: {type(e).__name__}: {e}"[:600])
        if left := conn.execute(LEFT).fetchone() or (1,):
            hurt += [f"{number}: {left[0]} healthy jobs have not run"] if left[0] else []
        for address in [*addresses, *(page.format(job) for job in rows.jobs[:SEEN] for page in PAGES_OF_A_JOB)]:
            if (status := client.get(address).status_code) >= 500:
                hurt.append(f"{number} {address}: {status}")
        for job_id in rows.jobs[:SEEN]:
            reply = client.post(f"/api/v1/jobs/{job_id}/cancel")
            is_pruned = not conn.execute("SELECT job_id FROM dl_jobs WHERE job_id = %s", (job_id,)).fetchone()
            if reply.status_code != (404 if is_pruned else 200):
                hurt.append(f"{number} cancel {job_id}: {reply.status_code} {reply.text[:300]}")
        conn.execute("DELETE FROM dl_jobs")
        _empty(conn)
    print(rows.counts, len(hand.aside), "set aside")
    assert not hurt, "\n".join([f"DL_HOSTILE_SEED={seed}", *hurt])
    assert rows.counts["tried"] >= 10_000


def _empty(conn: db.Connection) -> None:
    for (table,) in conn.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename LIKE 'dl\\_%'"
        " AND tablename NOT IN ('dl_migrations', 'dl_rolled', 'dl_alerted') AND tablename NOT LIKE 'dl_job_logs_%'"
    ).fetchall():
        conn.execute(f"DELETE FROM {table}".encode())
