"""Whom a notification wakes: no more workers of a farm look than there are jobs and one, and no job waits for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from farming import Farm, Program, until

from dataloader.queue import db

POLL = {"dl_claim_backoff_sec": 600}  # no idle poll heals what a notification has missed


def is_idle(farm: Farm) -> bool:
    """No worker's backend is at work, and all of them have told their statistics."""
    return not farm.rows(
        "SELECT FROM pg_stat_activity WHERE application_name LIKE 'dl-worker%%' AND state <> 'idle'"
        " AND datname = current_database()"
    )


def claims(farm: Farm) -> int:
    """How many claims there have been; a session's counts are complete when it has ended."""
    return int(
        farm.rows("SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname = 'dl_take_keys'")[0][0]
    )


def running(farm: Farm) -> int:
    """How many jobs run."""
    return int(farm.rows("SELECT count(*) FROM dl_jobs WHERE status = 'running'")[0][0])


def succeeded(farm: Farm) -> int:
    """How many jobs have succeeded."""
    return int(farm.rows("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'")[0][0])


def insert(farm: Farm, number: int, in_sec: float = 0, sec: float = 600) -> None:
    """Insert jobs that run for so long, in one transaction, so that their notifications are one."""
    farm.conn.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args, available_at)"
        " SELECT gen_random_uuid(), 'q', 'recorded', i::text, jsonb_build_object('sec', %s::float8),"
        "        now() + make_interval(secs => %s) FROM generate_series(1, %s) i",
        (sec, in_sec, number),
    )


def first(workers: list[psutil.Process]) -> psutil.Process:
    """The worker that stands first in the farm."""
    return min(workers, key=lambda worker: int(worker.cmdline()[0].split("#")[1].split()[0]))


def idle(farm: Farm, workers: int, **settings: Any) -> Any:
    """A farm whose workers all wait."""
    program = farm.ready(workers=workers, **POLL | settings)
    until(lambda: all("idle" in worker.cmdline()[0] for worker in program.workers()) and is_idle(farm), "idle workers")
    return program


def beside_others(farm: Farm, farms: int = 19) -> None:
    """Other farms show a worker that waits for jobs of the same queue; the farm to be started counts them."""
    farm.conn.execute(
        "INSERT INTO dl_workers (worker, farm, host, pid, queue, state, jobs, seen_at)"
        " SELECT 'w' || i, 'f' || i, 'h' || i, i, 'q', 'idle', 0, now() + interval '1 hour'"
        "   FROM generate_series(1, %s) i",
        (farms,),
    )


def counting(dsn: str) -> None:
    """Count calls of functions in sessions that begin from now on."""
    with db.connect(dsn, name="test-settings", schema="public") as conn:
        conn.execute(f"ALTER DATABASE \"{conn.info.dbname}\" SET track_functions = 'pl'")


def test_d6_one_job_costs_a_farm_of_twelve_a_few_claims(
    farm: Farm, own_db: str, as_superuser: Callable[[str], str]
) -> None:
    counting(as_superuser(own_db))
    program = idle(farm, 12)
    for _ in range(20):
        farm.wait(farm.enqueue("recorded", args={"sec": 0}), "succeeded")
    assert program.stop() == 0
    # Twelve looked at their start. Without the others' restraint there would be 14 for each job.
    assert 20 < claims(farm) - 12 < 20 * 12


def test_d6_jobs_of_one_notification_start_on_all_idle_workers(farm: Farm) -> None:
    idle(farm, 6)
    insert(farm, 6)
    until(lambda: running(farm) == 6, "all six to run")


def test_d6_a_stopped_first_worker_holds_up_nobody(farm: Farm) -> None:
    program = idle(farm, 3)
    stopped = first(program.workers())
    stopped.send_signal(signal.SIGSTOP)
    insert(farm, 2)
    until(lambda: running(farm) == 2, "both to run beside the stopped worker")
    stopped.send_signal(signal.SIGCONT)


def test_d7_all_know_when_rows_are_due_though_one_has_looked(farm: Farm) -> None:
    """Whoever looked is stopped when they are: the others have learnt it from him."""
    program = idle(farm, 3)
    looker = first(program.workers())
    (inserted,) = farm.rows("SELECT clock_timestamp()")[0]
    insert(farm, 2, in_sec=1.5)
    has_looked = (
        "SELECT FROM pg_stat_activity WHERE application_name LIKE %s AND query_start > %s AND state = 'idle'"
        " AND datname = current_database()"
    )
    until(lambda: farm.rows(has_looked, f"dl-worker%:{looker.pid}:%", inserted), "the first to have looked")
    looker.send_signal(signal.SIGSTOP)
    until(lambda: running(farm) == 2, "both to run beside the stopped worker")
    looker.send_signal(signal.SIGCONT)


def starts_in_time(farm: Farm) -> None:
    """A job begins although no idle poll comes, and within what a lost notification may cost."""
    job = farm.enqueue("recorded", args={"sec": 0})
    farm.wait(job, "succeeded")
    ((took,),) = farm.rows(
        "SELECT extract(epoch FROM started_at - created_at)::float8 FROM dl_jobs WHERE job_id = %s", job
    )
    assert took < 60, "a second is promised, on a machine that is not busy with other tests"


def keeper(program: Program) -> psutil.Process:
    """The farm's keeper, once it hears."""
    (found,) = until(lambda: program.children("dataloader: keeper"), "the keeper")
    return found


@pytest.mark.parametrize("ended", [signal.SIGSTOP, signal.SIGKILL])
def test_d4_jobs_start_while_the_keeper_hears_nothing(farm: Farm, ended: signal.Signals) -> None:
    """The keeper hears notifications for all workers; stopped or killed, it costs a second and no job."""
    program = idle(farm, 3)
    found = keeper(program)
    found.send_signal(ended)
    for _ in range(3):
        starts_in_time(farm)
    insert(farm, 3)
    until(lambda: running(farm) == 3, "all three to run")
    if ended == signal.SIGSTOP:
        found.send_signal(signal.SIGCONT)


def test_d4_jobs_start_while_the_keepers_session_waits_for_an_answer_or_is_lost(
    farm: Farm, own_db: str, as_superuser: Callable[[str], str]
) -> None:
    """The backend is stopped: the keeper waits for it. Then it is ended, again and again."""
    idle(farm, 3)
    ((backend,),) = farm.rows(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'dl-keeper' AND datname = current_database()"
    )
    stopped = psutil.Process(backend)
    stopped.suspend()
    try:
        starts_in_time(farm)
    finally:
        stopped.resume()
    for _ in range(3):
        farm.end_sessions("dl-keeper")
        starts_in_time(farm)


def wake_ups(farm: Farm, name: str) -> int:
    """How often the backends of the sessions whose names begin so have been woken."""
    found = farm.rows(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND starts_with(application_name, %s)",
        name,
    )
    assert found
    return sum(psutil.Process(pid).num_ctx_switches().voluntary for (pid,) in found)


def test_d2_a_notification_wakes_one_session_of_a_farm(farm: Farm) -> None:
    """A server signals every session that listens, whatever its channel, and the commit waits for that."""
    idle(farm, 4)
    workers = wake_ups(farm, "dl-worker")
    for _ in range(20):
        before = wake_ups(farm, "dl-keeper")
        farm.conn.execute("SELECT pg_notify('dl_jobs', 'a queue of others')")
        until(lambda: wake_ups(farm, "dl-keeper") > before, "the keeper to hear")  # noqa: B023  called at once
    # Sessions that LISTEN would have been woken 80 times. Some wake by themselves: for their statistics, or to poll.
    assert wake_ups(farm, "dl-worker") < workers + 40


def test_d6_a_farm_of_a_fleet_claims_nothing_where_others_were_faster(
    farm: Farm, own_db: str, as_superuser: Callable[[str], str]
) -> None:
    counting(as_superuser(own_db))
    beside_others(farm)
    program = idle(farm, 3)
    for _ in range(20):
        before = wake_ups(farm, "dl-keeper")
        farm.conn.execute("SELECT pg_notify('dl_jobs', 'q')")
        until(lambda: wake_ups(farm, "dl-keeper") > before, "the keeper to hear")  # noqa: B023  called at once
    for _ in range(3):
        starts_in_time(farm)
    insert(farm, 3, sec=0.5)
    farm.conn.execute("SELECT pg_notify('dl_jobs', 'q')")
    # Not all at once: the share of this farm is one worker at a claim, and on a slow machine a run ends meanwhile.
    until(lambda: succeeded(farm) == 6, "three and three to succeed")
    assert program.stop() == 0
    # Three at the start, and two for each of six jobs: one that finds it, one after it. A few more on a slow machine,
    # but not the twenty for the notifications without a job.
    assert claims(farm) < 3 + 2 * 6 + 12


def test_d7_a_farm_of_a_fleet_starts_a_job_when_it_is_due_though_no_worker_knows(farm: Farm) -> None:
    beside_others(farm)
    idle(farm, 2)
    insert(farm, 2, in_sec=1)
    until(lambda: running(farm) == 2, "both to run")


def test_a_keeper_whose_look_meets_a_locked_table_keeps_its_session(farm: Farm) -> None:
    beside_others(farm)
    program = idle(farm, 2)
    waits = (
        "SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted AND relation = 'dl_jobs'::regclass"
        " AND application_name = 'dl-keeper' AND datname = current_database()"
    )
    with db.connect(farm.dsn, name="test-locker", schema="public") as locker, locker.transaction():
        locker.execute("LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")
        # Notified again at each question: the wait lasts two seconds, and a test that stands still does not see it.
        notify = "SELECT pg_notify('dl_jobs', 'q')"
        until(lambda: farm.rows(notify) and farm.rows(waits), "the keeper to wait for the lock")
        until(lambda: not farm.rows(waits), "the keeper to give up")
    starts_in_time(farm)
    assert not program.events("farm.database.lost")
