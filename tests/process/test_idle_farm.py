"""Whom a notification wakes: no more workers of a farm look than there are jobs and one, and no job waits for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import psutil
from farming import Farm, until

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


def test_d6_one_job_costs_a_farm_of_twelve_a_few_claims(
    farm: Farm, own_db: str, as_superuser: Callable[[str], str]
) -> None:
    with db.connect(as_superuser(own_db), name="test-settings", schema="public") as conn:
        conn.execute(f"ALTER DATABASE \"{conn.info.dbname}\" SET track_functions = 'pl'")
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
    until(lambda: running(farm) == 2, "both to run beside the stopped worker", patience=10)
    looker.send_signal(signal.SIGCONT)
