"""The farm's life: drain, single workers, lost sessions, silence, orphans. Real processes, signals, database."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import psutil
import psycopg
import pytest
from farming import Farm, until
from psycopg import sql

from dataloader.queue import lifecycle


def test_i8_what_does_not_finish_in_time_is_handed_back_uncounted(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_drain_sec=0.5)
    job = farm.enqueue("recorded", args={"sec": 60})
    farm.begun(job)
    assert program.stop() == 0
    end = farm.job(job)
    assert (end["status"], end["attempt"], end["waiting_for"]["reason"]) == ("queued", 0, "no_worker")
    kind, payload = farm.journal(job)[-1]
    assert (kind, payload["attempt"], payload["reason"]) == ("requeue", 0, "drain")
    assert payload["worker"] == farm.journal(job)[1][1]["worker"]


def test_a_workers_title_says_what_it_does(farm: Farm) -> None:
    """`idle`, then the job once its run has lasted for a look of the heartbeat, then `idle` again."""
    program = farm.ready(workers=1)
    until(lambda: program.children("q#0 idle"), "an idle worker")
    job = farm.enqueue("recorded", args={"sec": 60})
    until(lambda: program.children(f"q#0 job={job} attempt=1"), "the job in the title")
    lifecycle.request_cancel(farm.conn, job)
    until(lambda: program.children("q#0 idle"), "an idle worker")


def test_i2_a_job_without_safe_points_is_ended_and_handed_back(farm: Farm) -> None:
    """The supervisor kills, the keeper sees the session gone and hands back."""
    program = farm.ready(workers=1, dl_drain_sec=0.5, dl_kill_grace_sec=0.5)
    job = farm.enqueue("spins")
    until(lambda: farm.rows("SELECT FROM runs"))
    assert program.stop() == 0
    assert (farm.job(job)["status"], farm.job(job)["attempt"]) == ("queued", 0)
    assert farm.story(job) == ["queued", "picked", "requeue"]
    sessions = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'dl-%%'"
    until(lambda: not farm.rows(sessions), "the sessions to end")  # a backend ends a little after its client


def test_i9_a_storm_of_signals_is_one_drain(farm: Farm) -> None:
    program = farm.ready(workers=2)
    job = farm.enqueue("recorded", args={"sec": 1})
    farm.begun(job)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        program.signal(number)
        for worker in program.workers():
            with suppress(psutil.NoSuchProcess):  # the idle one leaves at once
                worker.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert program.stop() == 0
    assert farm.job(job)["status"] == "succeeded"


def test_term_to_one_worker_drains_that_worker_and_another_takes_its_place(farm: Farm) -> None:
    program = farm.ready(workers=1)
    old = program.workers()[0]
    job = farm.enqueue("recorded", args={"sec": 1})
    farm.begun(job)
    old.send_signal(signal.SIGTERM)
    assert farm.wait(job, "succeeded")["attempt"] == 1
    assert farm.wait(farm.enqueue("noop"), "succeeded")
    assert old.pid not in [worker.pid for worker in program.workers()]
    assert program.stop() == 0


def test_b9_the_next_job_of_a_key_starts_when_the_key_is_free(farm: Farm) -> None:
    """Across queues: the finish notifies the queue in which the key's next job waits."""
    farm.ready(workers=2, workers_json='[{"queue": "a"}, {"queue": "b"}]', dl_claim_backoff_sec=600)
    first = farm.enqueue("recorded", "a", "k", args={"sec": 3})
    farm.wait(first, "running")
    second = farm.enqueue("recorded", "b", "k")
    end = farm.wait(second, "succeeded")
    gap = (end["started_at"] - farm.job(first)["finished_at"]).total_seconds()
    assert 0 <= gap < 60
    assert end["attempt"] == 1


def test_a_cancelled_job_stops_at_its_next_yield(farm: Farm) -> None:
    from dataloader.queue import lifecycle

    farm.ready(workers=1, dl_heartbeat_sec=20)
    job = farm.enqueue("recorded", args={"sec": 60})
    farm.wait(job, "running")
    assert lifecycle.request_cancel(farm.conn, job)["cancel_requested"]
    end = farm.wait(job, "canceled", patience=15)  # heard at once, not at the next heartbeat
    assert end["finished_at"] is not None
    assert farm.story(job) == ["queued", "picked", "cancel_requested", "canceled"]


@pytest.mark.long
def test_i1_a_call_that_holds_the_gil_keeps_its_lease(farm: Farm) -> None:
    """Three lease times of silence: the keeper renews for it; one run, attempt 1."""
    farm.ready(workers=1)
    job = farm.enqueue("holds_the_gil", lease_ttl_sec=2, args={"sec": 6.5})
    end = farm.wait(job, "succeeded", patience=60)
    assert (end["finished_at"] - end["started_at"]).total_seconds() > 6, "too quick to show anything"
    assert end["attempt"] == 1
    assert farm.story(job) == ["queued", "picked", "done"]


@pytest.mark.long
def test_a_lease_is_kept_although_what_people_see_cannot_be_written(farm: Farm, own_db: str) -> None:
    """A table that only people read is locked: the keeper renews all the same, and settles, in its one session."""
    program = farm.ready(workers=2)
    until(lambda: farm.rows("SELECT FROM dl_workers WHERE state <> 'starting'"), "the keeper")
    job = farm.enqueue("holds_the_gil", lease_ttl_sec=1, args={"sec": 3})
    crashes = farm.enqueue("recorded", args={"sec": 60})
    farm.begun(crashes)
    with psycopg.connect(own_db) as other:
        other.execute("LOCK TABLE dl_workers IN EXCLUSIVE MODE")
        victim = farm.rows("SELECT claimed_by FROM dl_jobs WHERE job_id = %s", crashes)[0][0].split(":")[1]
        psutil.Process(int(victim)).kill()
        farm.wait(crashes, "queued", "running")
        end = farm.wait(job, "succeeded", patience=60)
        assert (end["finished_at"] - end["started_at"]).total_seconds() > 1.5, "too quick to show anything"
        assert not program.events("farm.database.lost")
    assert farm.story(job) == ["queued", "picked", "done"]
    until(lambda: farm.rows("SELECT FROM dl_workers WHERE jobs > 0"), "the keeper to show them again")


def test_a_farm_works_although_it_may_not_write_what_people_see(farm: Farm, own_db: str) -> None:
    with psycopg.connect(own_db) as owner:
        owner.execute("ALTER TABLE dl_workers DROP COLUMN cpu_percent")
    program = farm.ready(workers=1)
    assert farm.wait(farm.enqueue("noop"), "succeeded")["attempt"] == 1
    refused = until(lambda: program.events("keeper.census.failed"), "a warning")
    assert "dl_workers" in refused[0]["error"]
    assert not program.events("farm.database.lost")
    assert not program.events("supervisor.keeper.exited")


def test_a_stuck_worker_is_killed_after_dl_stall_sec(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_stall_sec=1.5, dl_heartbeat_sec=0.5)
    job = farm.enqueue("holds_the_gil", max_attempts=1, args={"sec": 3600})
    end = farm.wait(job, "lost")
    assert end["error"] == "worker killed: no heartbeat for DL_STALL_SEC on attempt 1"
    assert program.events("supervisor.worker.killed")[0]["why"] == "stalled"
    assert farm.wait(farm.enqueue("noop"), "succeeded")


def test_i4_workers_of_a_killed_supervisor_drain_and_the_keeper_leaves_last(farm: Farm) -> None:
    program = farm.ready(workers=2, dl_drain_sec=4, dl_kill_grace_sec=0.5)
    quick, stuck = farm.enqueue("recorded", args={"sec": 0.5}), farm.enqueue("spins")
    farm.wait(quick, "running", "succeeded")
    farm.wait(stuck, "running")
    family = psutil.Process(program.process.pid).children(recursive=True)
    program.signal(signal.SIGKILL)
    program.process.wait()
    psutil.wait_procs(family, timeout=60)
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert farm.job(quick)["status"] == "succeeded"
    assert (farm.job(stuck)["status"], farm.job(stuck)["attempt"]) == ("queued", 0)


def test_h4_orphans_of_a_database_that_does_not_come_back_leave_all_the_same(farm: Farm, own_db: str) -> None:
    """Supervisor killed, database gone while a job runs: the worker gives up after the drain."""
    program = farm.ready(workers=1, dl_drain_sec=1, dl_kill_grace_sec=0.5, dl_db_dsn=own_db + " connect_timeout=2")
    go = farm.folder / "go"
    job = farm.enqueue("waits_for_a_file", args={"go": str(go)})
    until(go.with_suffix(".runs").exists, "the run to begin")
    family = psutil.Process(program.process.pid).children(recursive=True)
    workers = program.workers()
    name = farm.conn.info.dbname
    with psycopg.connect(own_db, dbname="postgres", autocommit=True) as admin:
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(name)))
        program.signal(signal.SIGKILL)
        program.process.wait()
        farm.end_sessions()
        go.touch()
        psutil.wait_procs(workers, timeout=60)
        assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(sql.Identifier(name)))
    psutil.wait_procs(family, timeout=60)
    assert farm.wait(job, "queued")["attempt"] == 0


def test_a_dead_keeper_is_replaced_and_settles_what_it_finds(farm: Farm) -> None:
    program = farm.ready(workers=1)
    program.children("dataloader: keeper")[0].kill()
    job = farm.enqueue("kills_itself", max_attempts=2, args={"times": 1})
    assert farm.wait(job, "succeeded")["attempt"] == 2
    assert program.stop() == 0


def test_an_unfinished_schema_is_refused_in_one_line(farm: Farm) -> None:
    farm.conn.execute("DELETE FROM dl_migrations WHERE number = 0")
    for name in ("workers", "reaper", "api"):
        program = farm.start(name)
        assert program.process.wait(60) == 78, name
        assert "run `dataloader migrate`" in program.log.read_text()
        assert len(program.log.read_text().splitlines()) == 1


def test_e1_a_crash_during_a_drain_counts(farm: Farm) -> None:
    """Only what the drain itself ends is handed back uncounted."""
    program = farm.ready(workers=1, dl_drain_sec=20)
    job = farm.enqueue("kills_itself", max_attempts=1, args={"after_sec": 1.0})
    until(lambda: farm.rows("SELECT FROM runs"))
    assert program.stop() == 0
    assert (farm.job(job)["status"], farm.story(job)) == ("lost", ["queued", "picked", "lost"])


def test_a4_a_run_that_holds_the_gil_is_ended_before_its_unrenewed_lease_is(farm: Farm, own_db: str) -> None:
    """The database is away for longer than the lease: nobody else starts the key while the first run goes on."""
    farm.ready(workers=2)
    farm.start("reaper")
    first = farm.enqueue("holds_the_gil", lock_key="k", lease_ttl_sec=2, args={"sec": 3600})
    until(lambda: farm.rows("SELECT FROM runs"))
    (pid,) = farm.rows("SELECT pid FROM runs")[0]
    second = farm.enqueue("recorded", lock_key="k", priority=1)
    name = farm.conn.info.dbname
    with psycopg.connect(own_db, dbname="postgres", autocommit=True) as admin:
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(name)))
        farm.end_sessions()
        until(lambda: not psutil.pid_exists(pid), "the run to be ended")
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(sql.Identifier(name)))
    farm.wait(second, "succeeded")
    assert farm.programs[0].events("supervisor.worker.killed")[0]["why"] == "fenced"
    until(lambda: "requeue" in farm.story(first))


def test_b1_a_run_whose_key_was_taken_meanwhile_is_ended(farm: Farm, own_db: str) -> None:
    """A foreign session gets the key when ours is lost; the run cannot go on, safe point or not."""
    farm.ready(workers=1)
    job = farm.enqueue("sleeps", lock_key="k", lease_ttl_sec=60, args={"sec": 600})
    until(lambda: farm.rows("SELECT FROM runs"))
    (pid,) = farm.rows("SELECT pid FROM runs")[0]
    with psycopg.connect(own_db, autocommit=True) as foreign:
        waiting = threading.Thread(target=foreign.execute, args=["SELECT pg_advisory_lock(hashtext('k'))"])
        waiting.start()
        until(lambda: farm.rows("SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"))
        farm.end_sessions("dl-worker")
        waiting.join()
        until(lambda: not psutil.pid_exists(pid), "the run to be ended", patience=45)
    assert farm.wait(job, "running", "queued")["attempt"] <= 1


def test_a_transaction_may_idle_while_the_pipeline_computes(farm: Farm) -> None:
    farm.ready(workers=1)
    end = farm.wait(farm.enqueue("shows_its_limits"), "succeeded")
    assert end["progress"] == {
        "idle_in_transaction_session_timeout": "0",
        "statement_timeout": "0",
        "lock_timeout": "0",
    }


def test_g1_an_end_that_postgresql_would_refuse_is_written_all_the_same(farm: Farm) -> None:
    farm.ready(workers=1)
    end = farm.wait(farm.enqueue("odd_progress", max_attempts=1), "failed")
    assert end["error"].startswith("ValueError: \ufffd and \ufffd")
    assert end["progress"] == {"nul": "a\ufffdb", "nan": None, "bytes": "b'x'", "surrogate": "\ufffd"}


def test_g4_a_row_that_python_cannot_read_fails_alone(farm: Farm) -> None:
    farm.ready(workers=1)
    (bad,) = farm.rows(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args, max_attempts)"
        " VALUES (gen_random_uuid(), 'q', 'noop', 'x', ('{\"n\": 1' || repeat('0', 5000) || '}')::jsonb, 1)"
        " RETURNING job_id"
    )[0]
    assert "ValueError" in farm.wait(bad, "failed")["error"]
    assert farm.wait(farm.enqueue("noop"), "succeeded")


def test_errors_are_tried_again_later_and_permanent_ones_are_not(farm: Farm) -> None:
    farm.ready(workers=1)
    errs, permanent = farm.enqueue("errs"), farm.enqueue("errs", args={"permanent": True})
    unknown = farm.enqueue("unheard_of")
    assert farm.wait(permanent, "failed")["error"] == "no use"
    for job, text in ((errs, "ValueError: bad luck"), (unknown, "no pipeline 'unheard_of'")):
        until(lambda job=job: farm.story(job) == ["queued", "picked", "requeue"])
        end = farm.job(job)
        assert end["error"].startswith(text)
        delay = (end["available_at"] - end["started_at"]).total_seconds()
        assert 29 < delay < 59, "30 s times the attempt"


def test_what_a_pipeline_says_holds_where_the_trigger_says_nothing(farm: Farm) -> None:
    """A producer has no pipelines: it learns of them from the workers that have started."""
    farm.ready(workers=2)
    job = farm.wait(farm.enqueue("fails_once_or_more", args={"model": 7, "category": "c"}), "failed")
    assert (job["attempt"], job["affinity_key"]) == (1, "c")
    told = farm.enqueue("fails_once_or_more", args={"model": "m"}, max_attempts=2, affinity_key="mine")
    until(lambda: farm.story(told).count("requeue") == 1, "the trigger's second attempt")
    assert farm.job(told)["affinity_key"] == "mine"
