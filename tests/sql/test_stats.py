"""Questions about many jobs: the answers are right, and cost what they show, not what lies behind."""

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hands import Conn, Worker, Workers, age, enqueue, expire, many, plain, quietly, row, started, value
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from test_search import pages

from dataloader.queue import db, lifecycle, operations
from dataloader.queue.job import Finish
from dataloader.queue.lifecycle import Ended
from dataloader.queue.reports import runs, stats
from dataloader.queue.reports.stats import Wanted


def test_a_page_is_full_unless_it_is_the_last(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many jobs there are before those that its filter passes."""
    monkeypatch.setattr(stats, "FILL_SEC", 60)
    with quietly(conn):
        rare = "CASE WHEN i IN (1, 7, 150, 250, 399) THEN 'rare' ELSE '' END"
        many(conn, 400, partition_key=rare)
        conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE substr(lock_key, 2)::int <= 200")
    for wanted, count in ((Wanted(partition_key="rare"), 5), (Wanted(partition_key="rare", status="dead"), 3)):
        first = stats.jobs(conn, wanted, 2)
        assert len(first.rows) == 2, wanted
        assert len(pages(conn, wanted, 2)) == count
    none = stats.jobs(conn, Wanted(task="nobody's"), 50)
    assert (none.rows, none.next) == ([], None)


def test_a_page_whose_time_is_over_goes_on_with_the_next(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request reads on and on, and the last of very many is reached all the same."""
    monkeypatch.setattr(stats, "SCAN_MOST", 10_000)
    monkeypatch.setattr(stats, "FILL_SEC", 0.001)
    rare = enqueue(conn, partition_key="rare")
    with quietly(conn):
        many(conn, 30_000, "k%s")
        conn.execute("UPDATE dl_jobs SET created_at = now() - interval '1 day' WHERE job_id = %s", (rare,))
    page, pages = stats.jobs(conn, stats.Wanted(partition_key="rare")), 1
    assert page.rows == []
    while page.next:
        page, pages = stats.jobs(conn, stats.Wanted(partition_key="rare"), after=page.next), pages + 1
    assert [row["job_id"] for row in page.rows] == [rare]
    assert 1 < pages <= 4


def test_a_page_reads_what_it_shows(own_db: str) -> None:
    """Without statistics and with right ones, and however rare its jobs are."""
    with db.connect(own_db, name="test", schema="public") as conn:
        conn.execute("ALTER TABLE dl_jobs SET (autovacuum_enabled = off)")  # it would come between the steps
        with quietly(conn):
            many(conn, 50_000, "k%s")
            conn.execute(
                "UPDATE dl_jobs SET status = CASE WHEN lock_key < 'k3' THEN 'failed' ELSE 'succeeded' END::dl_status,"
                " finished_at = created_at WHERE lock_key < 'k5'"
            )
            conn.execute("UPDATE dl_jobs SET queue = 'rare', task = 'rare' WHERE lock_key IN ('k27', 'k47', 'k97')")
        filters = ("", "queue:q", "queue:rare", "task:rare", "key:k1", "key:none")
        states = (None, "queued", "succeeded", "canceled", "dead", "failed", "lost")
        asked = [Wanted(status=status, q=text) for status in states for text in filters]
        for statistics in ("none", "right"):
            if statistics == "right":
                conn.execute("VACUUM ANALYZE dl_jobs")
            for wanted in asked:
                assert read(conn, lambda wanted=wanted: stats.jobs(conn, wanted, 50)) < 1_000, (statistics, wanted)


def test_the_newest_rows_of_a_quiet_queues_journal_stand_behind_many_of_others(conn: Conn) -> None:
    enqueue(conn, queue="quiet")
    conn.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind)"
        " SELECT gen_random_uuid(), 'loud', 'note' FROM generate_series(1, 10000)"
    )
    assert [event["kind"] for event in stats.latest_events(conn, None, 5, "quiet")] == ["queued"]


def read(conn: Conn, question: Callable[[], Any]) -> int:
    """How many rows of the table a question has looked at."""
    rows = (
        "SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0) FROM pg_stat_xact_user_tables WHERE relname = 'dl_jobs'"
    )
    with conn.transaction():
        before = value(conn, rows)
        question()
        return int(value(conn, rows) - before)


def test_how_the_farm_stands(conn: Conn, worker: Worker) -> None:
    for _ in range(3):
        enqueue(conn, queue="load")
    late = plain(conn, queue="load", in_sec=-90, made_sec=-100)
    plain(conn, queue="load", in_sec=600)
    plain(conn, queue="load", in_sec=30, attempt=2)
    plain(conn, queue="old", status="failed")
    plain(conn, queue="old", status="lost")
    plain(conn, queue="done", status="succeeded")
    plain(conn, queue="parked", blocked_on="key", in_sec=-50, made_sec=-50)
    enqueue(conn, queue="runs")
    worker.take("runs")
    operations.pause(conn, "quiet", "me")
    operations.limit_length(conn, "load", 9, "me")
    conn.execute(
        "INSERT INTO dl_workers (worker, farm, host, pid, queue, state, seen_at) VALUES"
        " ('a', 'f', 'h', 1, 'serves', 'idle', now()), ('b', 'f', 'h', 2, 'load', 'dead', now()),"
        " ('c', 'f', 'h', 3, 'load', 'idle', now() - interval '1 min')"
    )
    conn.execute("UPDATE dl_workers SET queues = '{serves, quiet}' WHERE worker = 'a'")

    found = stats.overview(conn)
    queues = {each["queue"]: each for each in found["queues"]}
    assert list(queues) == ["load", "old", "parked", "quiet", "runs", "serves"]
    load = queues["load"]
    names = ("length", "scheduled", "fresh", "retries", "busy", "dead", "workers")
    assert [load[name] for name in names] == [6, 2, 5, 1, 0, 0, 0]
    assert (load["max_length"], load["length_is_exact"]) == (9, True)
    assert 89 < load["lag_sec"] < 120, row(conn, late)
    assert 50 <= queues["parked"]["lag_sec"] < 80
    assert (queues["old"]["dead"], queues["runs"]["busy"], queues["serves"]["workers"]) == (2, 1, 1)
    assert queues["quiet"]["workers"] == 1
    assert (queues["quiet"]["paused_by"], queues["quiet"]["lag_sec"]) == ("me", 0)
    total = found["total"]
    assert (total["length"], total["busy"], total["dead"], total["workers"]) == (7, 1, 2, 1)
    assert total["lag_sec"] == load["lag_sec"]


def test_a_count_ends_somewhere_and_says_so(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue is counted by the reaper; before it has done so, there are at least so many."""
    monkeypatch.setattr(stats, "COUNTED", 10)
    with quietly(conn):
        many(conn, 30, "k%s")
    (found,) = stats.overview(conn)["queues"]
    assert (found["length"], found["length_is_exact"], found["counted_at"]) == (10, False, None)
    assert stats.note_lengths(conn, 0) is not None
    (found,) = stats.overview(conn)["queues"]
    assert (found["length"], found["fresh"], found["length_is_exact"]) == (30, 30, False)
    assert found["counted_at"] is not None
    conn.execute("UPDATE dl_lengths SET counted_at = now() - interval '11 min'")  # the reaper is gone
    (found,) = stats.overview(conn)["queues"]
    assert (found["length"], found["counted_at"]) == (10, None)
    conn.execute("DELETE FROM dl_jobs")
    assert stats.note_lengths(conn, 0) == 0
    assert value(conn, "SELECT count(*) FROM dl_lengths") == 0


def test_one_reaper_counts_at_a_time_and_not_what_another_has_just_counted(conn: Conn, dsn: str) -> None:
    enqueue(conn)
    age(conn, enqueue(conn), "available_at", 50)
    conn.execute("UPDATE dl_jobs SET created_at = available_at")
    with db.connect(dsn, name="other", schema="public") as other:
        with other.transaction():
            assert 50 <= (stats.note_lengths(other, 60) or 0) < 60
            assert stats.note_lengths(conn, 0) is None
        assert stats.note_lengths(conn, 60) is None
        assert stats.note_lengths(conn, 0) is not None


def test_the_attempts_that_a_journal_tells_of(conn: Conn, workers: Workers) -> None:
    """After a requeue `attempt` begins at 1 again: the number of the run and who put the job back tell them apart."""
    job_id = enqueue(conn, max_attempts=9)
    for end in ("retry", "hand_back", "crash", "lease", "succeed"):
        worker = workers()  # some lose their session on the way
        job = worker.take()
        facts = {"peak_mb": 5.0, "cpu_sec": 0.5}
        if end == "crash":
            lifecycle.settle(conn, worker.name, "crash", "worker killed by signal 9", facts | {"signal": 9}, [job_id])
        elif end == "lease":
            expire(conn, job_id)
            lifecycle.reap(conn)
        else:
            finish = Finish(end, "what went wrong" if end == "retry" else None, 30)
            lifecycle.finish_some(worker.conn, worker.name, [Ended(job, finish, facts)])
        if end != "succeed":
            operations.change(conn, "run-now", [job_id], "me")  # puts no finished job back: the budget goes on
    found = stats.attempts(stats.events(conn, job_id))
    assert [a.end for a in found] == [*["requeue"] * 4, "done"]
    assert (found[0].error, found[0].peak_mb, found[2].signal) == ("what went wrong", 5.0, 9)
    assert (found[3].reason or "").startswith("lease expired")
    assert all(a.seconds is not None and a.seconds >= 0 for a in found)
    assert stats.aggregate(conn) > 0
    counted = {each["kind"]: each["count"] for each in stats.totals(conn)}
    del counted["requeue"]  # by hand
    assert counted == dict.fromkeys(("queued", "retry", "handed_back", "crash", "lease", "done"), 1) | {"picked": 5}
    worker = workers()
    operations.change(conn, "requeue", [job_id], "token ops from 10.0.0.7")
    worker.finish(worker.take(), "fail")
    conn.execute("UPDATE dl_jobs SET status = 'queued', available_at = now() WHERE job_id = %s", (job_id,))
    worker.take()
    runs = [(a.run, a.attempt, a.requeued_by) for a in stats.attempts(stats.events(conn, job_id))]
    assert runs[:5] == [(1, 1, None), (2, 2, None), (3, 2, None), (4, 3, None), (5, 4, None)]
    assert runs[5:] == [(6, 1, "token ops from 10.0.0.7"), (7, 1, "another service")]


def test_a_job_took_what_its_last_run_took(conn: Conn, worker: Worker) -> None:
    """And not the time since its first start, with the pauses between its attempts. A cancellation ends no run then."""
    jobs = {name: enqueue(conn, queue=name) for name in ("twice", "dropped", "once", "runs", "waits")}
    for name in ("twice", "dropped"):
        worker.finish(worker.take(name), "retry")
    conn.execute(
        "UPDATE dl_jobs SET started_at = started_at - interval '6 min' WHERE attempt > 0;"
        "UPDATE dl_job_events SET ts = ts - interval '6 min' WHERE kind IN ('picked', 'requeue')"
    )
    operations.change(conn, "run-now", [jobs["twice"]], "me")
    worker.finish(worker.take("twice"))
    lifecycle.request_cancel(conn, jobs["dropped"])  # six minutes after its only run
    worker.finish(worker.take("once"), "fail")
    worker.take("runs")
    listed = {each["job_id"]: each["run_sec"] for each in stats.jobs(conn, Wanted()).rows}
    for name, job_id in jobs.items():
        status = lifecycle.status(conn, job_id) or {}
        assert status["run_sec"] == listed[job_id], name
        assert status["run_sec"] is None if name in ("runs", "waits") else 0 <= status["run_sec"] < 60, name
    lifecycle.request_cancel(conn, jobs["waits"])
    stats.aggregate(conn)
    canceled = [each for each in stats.totals(conn) if each["kind"] == "canceled"]
    assert [(each["count"], each["seconds"], sum(each["buckets"])) for each in canceled] == [(1, 0, 0)] * 2
    assert sum(each["processed"] for each in stats.pace(conn, 1)) == 2, "of the last minute, without cancellations"


def test_sums_of_the_journal_count_each_row_once(conn: Conn, worker: Worker) -> None:
    for _ in range(5):
        enqueue(conn)
    for verb in ("succeed", "succeed", "fail", "retry"):
        worker.finish(worker.take(), verb)
    assert [stats.aggregate(conn) > 0, stats.aggregate(conn)] == [True, 0]
    totals = {each["kind"]: each for each in stats.totals(conn)}
    counts = {kind: each["count"] for kind, each in totals.items()}
    assert counts == {"queued": 5, "picked": 4, "done": 2, "failed": 1, "retry": 1}
    assert sum(totals["done"]["buckets"]) == 2
    assert len(totals["done"]["buckets"]) == len(stats.BUCKETS_SEC) + 1
    pace = stats.pace(conn, 1)
    assert (sum(each["processed"] for each in pace), sum(each["failed"] for each in pace)) == (4, 2)
    assert len(pace) == 7
    worker.finish(worker.take())
    stats.aggregate(conn)
    assert {each["kind"]: each["count"] for each in stats.totals(conn)}["done"] == 3


def test_throughput_has_each_step_once_up_to_the_present_one_and_is_kept_for_eight_days(
    conn: Conn, worker: Worker
) -> None:
    conn.execute(
        "INSERT INTO dl_pace_long SELECT date_bin('5 min', now() - make_interval(days => day), '2000-01-01'), 'q', 1, 0"
        "  FROM unnest('{6, 7, 9}'::int[]) day"
    )
    for verb in ("succeed", "fail", "retry"):
        enqueue(conn)
        worker.finish(worker.take(), verb)
        stats.aggregate(conn)  # a second round adds to the rows of the first
    assert value(conn, "SELECT count(*) FROM dl_pace_long WHERE at < now() - interval '1 day'") == 2
    for span, step, processed in ((3_600, 60, 3), (6 * 3_600, 300, 3), (86_400, 900, 3), (7 * 86_400, 3_600, 4)):
        steps = stats.throughput(conn, span, step)
        assert len(steps) == span // step
        assert {(b["at"] - a["at"]).total_seconds() for a, b in itertools.pairwise(steps)} == {step}
        assert steps[-1]["at"] <= datetime.now(UTC) < steps[-1]["at"] + timedelta(seconds=step + 5)
        assert (sum(each["processed"] for each in steps), sum(each["failed"] for each in steps)) == (processed, 2)


def test_a_row_that_is_committed_late_is_counted_too_and_by_one_at_a_time(conn: Conn, dsn: str) -> None:
    """Numbers are given out before they are visible: nothing is passed over but what stays away for long."""
    enqueue(conn)
    with db.connect(dsn, name="other", schema="public") as other:
        with other.transaction():
            assert stats.aggregate(other) == 1
            assert stats.aggregate(conn) == 0
        with other.transaction():
            plain(other)
            other.execute("SET CONSTRAINTS ALL IMMEDIATE")  # the journal's row is there, and only this session sees it
            enqueue(conn)
            assert stats.aggregate(conn) == 0
    assert stats.aggregate(conn) == 2
    assert stats.totals(conn)[0]["count"] == 3


@pytest.mark.parametrize(("moved", "first", "then"), [("-11 s", 1, 1), ("1 hour", 0, 2)])
def test_a_number_that_never_comes_is_passed_after_a_while(conn: Conn, moved: str, first: int, then: int) -> None:
    """And at once among rows of the future: the clock was set back by an hour, which is too long to wait."""
    enqueue(conn)
    value(conn, "SELECT nextval('dl_job_events_event_id_seq')")
    enqueue(conn)
    if first:
        assert [stats.aggregate(conn), stats.aggregate(conn)] == [first, 0]
    conn.execute("UPDATE dl_job_events SET ts = ts + %s::interval", (moved,))
    assert [stats.aggregate(conn), stats.aggregate(conn)] == [then, 0]


def test_sums_go_on_when_the_journal_is_emptied_or_numbered_anew(conn: Conn) -> None:
    kept = enqueue(conn)
    enqueue(conn)
    assert stats.aggregate(conn) == 2
    conn.execute("DELETE FROM dl_jobs WHERE job_id <> %s", (kept,))
    assert stats.aggregate(conn) == 0
    conn.execute("DELETE FROM dl_jobs")
    assert stats.aggregate(conn) == 0
    enqueue(conn)
    assert stats.aggregate(conn) == 1
    conn.execute("TRUNCATE dl_job_events RESTART IDENTITY")
    assert [stats.aggregate(conn), stats.aggregate(conn)] == [stats.ANEW, 0]
    enqueue(conn)
    enqueue(conn)
    assert [stats.aggregate(conn), stats.aggregate(conn)] == [2, 0]


def test_a_row_that_another_service_has_numbered_beyond_the_sequence_holds_up_no_sums(conn: Conn) -> None:
    job_id = enqueue(conn)
    conn.execute(
        "INSERT INTO dl_job_events (event_id, job_id, queue, kind, ts)"
        " VALUES (1000000000000, %s, 'q', 'done', now() - interval '1 min')",
        (job_id,),
    )
    assert [stats.aggregate(conn), stats.aggregate(conn)] == [1, 0]
    enqueue(conn)
    assert [stats.aggregate(conn), stats.aggregate(conn)] == [1, 0]
    conn.execute("UPDATE dl_rolled SET last_event = 1000000000000")  # as after a first start behind that row
    assert [stats.aggregate(conn), stats.aggregate(conn)] == [stats.ANEW, 0]
    enqueue(conn)
    assert [stats.aggregate(conn), stats.aggregate(conn)] == [1, 0]


SUMS_AT_THEIR_BOUND = """
WITH job AS (SELECT queue, task, date_bin('5 min', now(), '2000-01-01 00:00+00') AS at FROM dl_jobs),
  totals AS (INSERT INTO dl_totals SELECT queue, task, 'done', 1e15, 1e300, array_fill(1e15::bigint, '{12}') FROM job),
  durations AS (INSERT INTO dl_durations SELECT task, '{1}', 1e15, now() FROM job),
  needs AS (INSERT INTO dl_needs SELECT task, 1, NULL, 1e15, now(), '{1}' FROM job),
  pace AS (INSERT INTO dl_pace SELECT date_bin('10 s', now(), '2000-01-01 00:00+00'), queue, 1e15, 1e15 FROM job),
  long AS (INSERT INTO dl_pace_long SELECT at, queue, 1e15, 1e15 FROM job)
INSERT INTO dl_spans SELECT task, queue, 5, at, 'cpu', 1e15, 1e300, 1, '{73}', '{2000000000}' FROM job
"""
RUN_OF_THE_JOB = """
INSERT INTO dl_job_events (job_id, queue, kind, ts, payload)
SELECT job_id, queue, kind, now(), payload
  FROM dl_jobs, (VALUES ('picked', '{}'::jsonb), ('done', '{"peak_mb": 1, "cpu_sec": 1}')) run (kind, payload)
"""


@pytest.mark.parametrize(
    ("table", "sum_"),
    [
        ("dl_totals", "count"),
        ("dl_totals", "seconds"),
        ("dl_totals", "buckets[1]"),
        ("dl_durations", "runs"),
        ("dl_needs", "runs"),
        ("dl_pace", "processed"),
        ("dl_pace_long", "processed"),
        ("dl_spans", "count"),
        ("dl_spans", "total"),
        ("dl_spans", "counts[1]"),
    ],
)
def test_a_sum_has_a_bound_and_stays_there(conn: Conn, table: str, sum_: str) -> None:
    """A farm's role may write any sum, and the reaper must be able to add to it."""
    enqueue(conn)
    with conn.transaction():
        conn.execute(SUMS_AT_THEIR_BOUND)
        conn.execute(RUN_OF_THE_JOB)
    before = value(conn, f"SELECT max({sum_}) FROM {table}")
    while stats.aggregate(conn):
        pass
    runs.fold(conn)
    assert value(conn, f"SELECT max({sum_}) FROM {table}") == before
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute(f"UPDATE {table} SET {sum_} = {sum_} * 1.001".encode())


def test_what_a_keeper_shows_replaces_what_it_showed(conn: Conn, worker: Worker) -> None:
    """The memory and CPU of a run are those of its worker, by a fresh reading."""
    job = worker.start_new(queue="q")
    lifecycle.beat(worker.conn, [job], '{"processed": 5}', False)
    shown = {"worker": worker.name, "pid": 7, "queue": "q", "state": "busy", "job_id": str(job.job_id), "jobs": 3}
    shown |= {"memory_bytes": 2**33, "cpu_percent": 99.5, "started_at": datetime.now(UTC) - timedelta(hours=1)}
    idle = shown | {"worker": "h:8:b", "pid": 8, "state": "idle", "job_id": None}
    stats.show_workers(conn, "farm", "h", [shown, idle])
    stats.show_workers(conn, "another", "i", [idle | {"worker": "i:1:b"}])
    found = {each["worker"]: each for each in stats.workers(conn)}
    assert set(found) == {worker.name, "h:8:b", "i:1:b"}
    mine = found[worker.name]
    assert (mine["task"], mine["attempt"], mine["progress"], mine["is_live"]) == ("t", 1, {"processed": 5}, True)
    assert (mine["memory_bytes"], mine["job_started_at"]) == (2**33, row(conn, job.job_id)["started_at"])
    used = stats.used(conn, job.job_id, worker.name) or {}
    assert (used["memory_bytes"], used["cpu_percent"]) == (2**33, 99.5)
    assert stats.used(conn, job.job_id, "another") is None
    assert stats.used(conn, enqueue(conn), worker.name) is None
    conn.execute("UPDATE dl_workers SET seen_at = now() - interval '31 s' WHERE worker = %s", (worker.name,))
    assert stats.used(conn, job.job_id, worker.name) is None

    stats.show_workers(conn, "farm", "h", [idle])
    assert {each["worker"] for each in stats.workers(conn)} == {"h:8:b", "i:1:b"}
    conn.execute("UPDATE dl_workers SET seen_at = now() - interval '1 min' WHERE worker = 'i:1:b'")
    assert {each["worker"]: each["is_live"] for each in stats.workers(conn)} == {"h:8:b": True, "i:1:b": False}
    conn.execute("UPDATE dl_workers SET seen_at = now() - interval '2 days' WHERE worker = 'i:1:b'")
    with psycopg.connect(conn.info.dsn) as other:
        other.execute("LOCK TABLE dl_workers IN EXCLUSIVE MODE")
        with pytest.raises(psycopg.errors.LockNotAvailable):  # and does not wait
            stats.show_workers(conn, "farm", "h", [])
    stats.show_workers(conn, "farm", "h", [])
    assert value(conn, "SELECT count(*) FROM dl_workers") == 0
    assert value(conn, "SELECT current_setting('lock_timeout')") == "0"


def test_queues_that_take_too_long_to_count_are_told_as_noted(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much the database has to do, the answer comes in time and names the time of its figures."""
    with quietly(conn):
        many(conn, 20_000, "k%s")
    operations.pause(conn, "new", "me")
    stats.note_lengths(conn, 0)
    monkeypatch.setattr(stats, "COUNTING_SEC", 0.001)
    with conn.transaction():  # as for /metrics
        found = stats.overview(conn)
        assert value(conn, "SELECT current_setting('statement_timeout')") == "0"
    assert [queue["queue"] for queue in found["queues"]] == ["new", "q"]
    assert (found["total"]["length"], found["total"]["length_is_exact"]) == (20_000, False)
    assert found["queues"][1]["counted_at"] is not None
    assert found["queues"][0]["paused_by"] == "me"


@pytest.mark.parametrize(
    ("age_sec", "xids", "dead", "live", "lag_sec", "is_told"),
    [
        (86_400, 9, 100, 1_000, 0, False),  # a long report beside an idle queue
        (300, 9, 30_000, 1_000, 0, True),
        (10, 9, 30_000, 1_000, 0, False),  # not its doing: it is younger than they are
        (300, 9, 30_000, 2_000_000, 0, False),  # what a vacuum of such a table leaves anyhow
        (300, 9, 90_000, 2_000_000, 0, True),
        (300, 9, 6_000, 1_000, 30, False),
        (300, 9, 6_000, 1_000, 90, True),  # due jobs wait as well
        (300, 9, 4_000, 1_000, 900, False),
        (None, 9_000, 30_000, 1_000, 0, False),  # of another role: its age is not shown
        (None, 11_000, 30_000, 1_000, 0, True),
    ],
)
def test_a_held_snapshot_is_told_of_when_claims_fall_behind(
    age_sec: float | None, xids: int, dead: int, live: int, lag_sec: float, is_told: bool
) -> None:
    held = {"age_sec": age_sec, "xids": xids}
    vacuum = {"held_by": held, "jobs_dead_tuples": dead, "jobs_live_tuples": live}
    assert stats.slows_claims(vacuum, lag_sec) == (held if is_told else None)
    assert stats.slows_claims(vacuum | {"held_by": None}, lag_sec) is None


def test_who_holds_back_vacuum_is_named_as_far_as_this_role_may_see(own_db: str, server_dsn: str) -> None:
    """The view of a role that may see all is in tests/sql/test_watch.py."""
    name, admin = f"clerk_{uuid4().hex}", make_conninfo(server_dsn, dbname=conninfo_to_dict(own_db)["dbname"])
    with psycopg.connect(own_db) as report, psycopg.connect(admin, autocommit=True) as conn:
        report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        report.execute("SELECT count(*) FROM dl_jobs")
        conn.execute(
            f"CREATE ROLE {name}; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}; SET ROLE {name}".encode()
        )
        held = stats.vacuum(conn)["held_by"]
        conn.execute("RESET ROLE")
        conn.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())
        assert (held["pid"], held["query"]) == (report.info.backend_pid, "<insufficient privilege>")
        assert (held["age_sec"], held["state"]) == (None, None)
        report.rollback()
        assert stats.vacuum(conn)["held_by"] is None


def test_a_session_that_waits_for_a_row_has_not_locked_the_table(dsn: str, conn: Conn) -> None:
    """It has a lock of the tuple meanwhile."""
    enqueue(conn)
    with db.connect(dsn, name="waits", schema="public") as other, psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM dl_jobs FOR UPDATE")
        with started(lambda: other.execute("SELECT FROM dl_jobs FOR UPDATE"), other.info.backend_pid, conn):
            found = stats.blockers(conn)
            holder.commit()
    assert found == []
