"""Whom a notification wakes: no more workers of a farm look than there are jobs and one, and no job waits for it."""

from __future__ import annotations

import signal
import time
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
    # Each claimed at its start, and once more behind its LISTEN. Without the others' restraint there would be 14 for
    # each job.
    assert 20 < claims(farm) - 24 < 20 * 12


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


def keeper(program: Program) -> psutil.Process:
    """The farm's keeper, once it hears."""
    (found,) = until(lambda: program.children("dataloader: keeper"), "the keeper")
    return found


@pytest.mark.parametrize("ended", [signal.SIGSTOP, signal.SIGKILL])
def test_d4_jobs_start_without_the_keeper(farm: Farm, ended: signal.Signals) -> None:
    program = idle(farm, 3)
    found = keeper(program)
    found.send_signal(ended)
    insert(farm, 3)
    until(lambda: running(farm) == 3, "all three to run")
    if ended == signal.SIGSTOP:
        found.send_signal(signal.SIGCONT)


def test_d4_an_idle_worker_whose_session_is_lost_hears_of_jobs_by_the_next_one(farm: Farm) -> None:
    idle(farm, 1)
    for _ in range(3):
        farm.end_sessions("dl-worker")
        farm.wait(farm.enqueue("recorded", args={"sec": 0}), "succeeded")


def wake_ups(farm: Farm, name: str) -> int:
    """How often the backends of the sessions whose names begin so have been woken."""
    found = farm.rows(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND starts_with(application_name, %s)",
        name,
    )
    assert found
    return sum(psutil.Process(pid).num_ctx_switches().voluntary for (pid,) in found)


def wakes(farm: Farm, notifications: int) -> int:
    """How often so many notifications, one after the other, wake the backends of workers."""
    before = wake_ups(farm, "dl-worker")
    for _ in range(notifications):
        farm.conn.execute("SELECT pg_notify('dl_jobs', 'a queue of others')")
        time.sleep(0.005)  # a backend that is awake already would hear of several at once
    return wake_ups(farm, "dl-worker") - before


def test_d2_a_notification_wakes_idle_workers_and_none_that_is_busy_for_longer(farm: Farm) -> None:
    """A server signals every session that listens, whatever its channel, and the commit waits for that."""
    idle(farm, 2, dl_heartbeat_sec=1)
    assert wakes(farm, 40) >= 40, "both of them hear of most"
    insert(farm, 2)
    until(lambda: running(farm) == 2, "both to run")
    until(lambda: wakes(farm, 40) < 20, "the beats to have sent UNLISTEN")
