"""An idle farm: whom a notification wakes, what one more worker costs, floods of notifications."""

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
    return not farm.sessions("dl-worker", "state <> 'idle'")


def claims(farm: Farm) -> int:
    """How many claims there have been; a session's counts are complete when it has ended."""
    return int(
        farm.rows("SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname = 'dl_take_keys'")[0][0]
    )


def running(farm: Farm) -> int:
    return int(farm.rows("SELECT count(*) FROM dl_jobs WHERE status = 'running'")[0][0])


def insert(farm: Farm, number: int, in_sec: float = 0, sec: float = 600) -> None:
    """Insert jobs that run for so long, in one transaction, so that their notifications are one."""
    due = f"now() + make_interval(secs => {in_sec})"
    farm.insert(number, task="'recorded'", args=f"jsonb_build_object('sec', {sec}::float8)", available_at=due)


def first(workers: list[psutil.Process]) -> psutil.Process:
    return min(workers, key=lambda worker: int(worker.cmdline()[0].split("#")[1].split()[0]))


def idle(farm: Farm, workers: int, **settings: Any) -> Any:
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
    farm.no_sessions("dl-worker")
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
    has_looked = f"application_name LIKE '%%:{looker.pid}:%%' AND query_start > '{inserted}' AND state = 'idle'"
    until(lambda: farm.sessions("dl-worker", has_looked), "the first to have looked")
    looker.send_signal(signal.SIGSTOP)
    until(lambda: running(farm) == 2, "both to run beside the stopped worker")
    looker.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("ended", [signal.SIGSTOP, signal.SIGKILL])
def test_d4_jobs_start_without_the_keeper(farm: Farm, ended: signal.Signals) -> None:
    program = idle(farm, 3)
    (keeper,) = until(lambda: program.children("dataloader: keeper"), "the keeper")
    keeper.send_signal(ended)
    insert(farm, 3)
    until(lambda: running(farm) == 3, "all three to run")
    if ended == signal.SIGSTOP:
        keeper.send_signal(signal.SIGCONT)


def test_d4_an_idle_worker_whose_session_is_lost_hears_of_jobs_by_the_next_one(farm: Farm) -> None:
    idle(farm, 1)
    for _ in range(3):
        farm.end_sessions("dl-worker")
        farm.works()


def wake_ups(farm: Farm, name: str) -> int:
    """How often the backends of the sessions whose names begin so have been woken."""
    backends = farm.sessions(name)
    assert backends
    return sum(psutil.Process(pid).num_ctx_switches().voluntary for pid in backends)


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
    until(lambda: wakes(farm, 40) >= 40, "both of them to hear of most")
    insert(farm, 2)
    until(lambda: running(farm) == 2, "both to run")
    until(lambda: wakes(farm, 40) < 20, "the beats to have sent UNLISTEN")


FORKED = """
import os
import sys

modules = set()
os.register_at_fork(after_in_child=lambda: modules.update(sys.modules))
"""
LATE = """
import sys
import forked
from dataloader.pipelines import register

@register("late")
def late(args, context):
    with context.transaction() as conn:
        conn.execute("SELECT 'text'")
    return {"late": sorted(set(sys.modules) - forked.modules)}
"""


def memory(program: Program) -> int:
    """The memory (bytes) of a program and its children; what they share is counted once."""
    parent = psutil.Process(program.process.pid)
    return sum(process.memory_full_info().pss for process in [parent, *parent.children(recursive=True)])


def test_a_further_idle_worker_costs_at_most_eleven_megabytes(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without coverage and pipelines, which would be in each of them."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    farm.executes = True
    few = farm.ready(workers=1, dl_pipelines="")
    small = memory(few)
    few.stop()
    assert (memory(farm.ready(workers=5, dl_pipelines="")) - small) / 4 <= 11e6


def test_all_but_dl_pipelines_is_imported_before_the_fork(farm: Farm) -> None:
    farm.executes = True
    (farm.folder / "forked.py").write_text(FORKED)
    (farm.folder / "late_pipelines.py").write_text(LATE)
    farm.ready(workers=1, dl_pipelines="late_pipelines", dl_preload="forked")
    late = farm.wait(farm.enqueue("late"), "succeeded")["progress"]["late"]
    assert [name for name in late if not name.startswith("coverage")] == ["late_pipelines"]


PAYLOAD = 7_900  # bytes; PostgreSQL refuses 8,000
PAYLOADS = 4_000  # 30 MB: more than any socket takes while nobody reads


def test_d3_a_flood_of_notifications_stops_no_session(farm: Farm) -> None:
    """Whoever listens reads, also while it runs a job: a session that does not would keep the server's queue full."""
    farm.ready(workers=2)
    long = farm.enqueue("recorded", args={"sec": 5})
    farm.begun(long)
    farm.rows("SELECT pg_notify('dl_jobs', rpad(n::text, %s, 'x')) FROM generate_series(1, %s) n", PAYLOAD, PAYLOADS)
    farm.works()
    until(lambda: not farm.sessions("dl-", "wait_event = 'ClientWrite'"), "every session to have read what it was sent")
    farm.succeeds(long)
    deaf = "state LIKE 'idle in transaction%%'"  # such a session would receive nothing
    until(lambda: not farm.sessions("dl-", deaf), "every session to be outside of a transaction")
