"""An idle farm: whom a notification wakes, what one more worker costs, floods of notifications."""

import time
from collections.abc import Callable
from typing import Any

import psutil
import psycopg
import pytest
from farming import Farm, Program, until

POLL = {"dl_claim_backoff_sec": 600}  # no idle poll heals what a notification has missed


def claims(farm: Farm) -> int:
    """How many claims there have been; a session's counts are complete when it has ended."""
    return int(
        farm.rows("SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname = 'dl_take_keys'")[0][0]
    )


def running(farm: Farm) -> int:
    return int(farm.rows("SELECT count(*) FROM dl_jobs WHERE status = 'running'")[0][0])


def insert(farm: Farm, number: int, in_sec: float = 0) -> None:
    """Insert jobs that run for long, in one transaction, so that their notifications are one."""
    due = f"now() + make_interval(secs => {in_sec})"
    farm.insert(number, task="'recorded'", args="""'{"sec": 600}'""", available_at=due)


def idle(farm: Farm, workers: int, **settings: Any) -> Any:
    program = farm.ready(workers=workers, **POLL | settings)
    calm(farm, program)
    return program


def calm(farm: Farm, program: Program) -> None:
    """End all jobs, and wait until the workers are idle again."""
    farm.empty()
    until(lambda: all("idle" in worker.cmdline()[0] for worker in program.workers()), "idle workers")
    until(lambda: not farm.sessions("dl-worker", "state <> 'idle'"), "idle backends, which have told their statistics")


def test_d6_one_job_costs_a_farm_of_twelve_a_few_claims(farm: Farm, as_superuser: Callable[[str], str]) -> None:
    name = farm.conn.info.dbname
    with psycopg.connect(as_superuser(farm.dsn), autocommit=True) as conn:
        conn.execute(f"ALTER DATABASE {name} SET track_functions = 'pl'")
    program = idle(farm, 12)
    for _ in range(20):
        farm.wait(farm.enqueue("recorded", args={"sec": 0}), "succeeded")
    assert program.stop() == 0
    farm.no_sessions("dl-worker")
    # Each claimed at its start, and once more behind its LISTEN. Without the others' restraint there would be 14 for
    # each job.
    assert 20 < claims(farm) - 24 < 20 * 12


def test_d4_d6_d7_jobs_of_one_notification_start_on_all_idle_workers(farm: Farm) -> None:
    """Without the keeper, beside a stopped worker, and when they become due after that worker alone has looked."""
    program = idle(farm, 5)
    looker = min(program.workers(), key=lambda worker: int(worker.cmdline()[0].split("#")[1].split()[0]))
    (keeper,) = until(lambda: program.children("dataloader: keeper"), "the keeper")
    keeper.suspend()
    all_start(farm, 5)
    keeper.resume()
    calm(farm, program)
    looker.suspend()
    all_start(farm, 4)
    looker.resume()
    calm(farm, program)
    (inserted,) = farm.rows("SELECT clock_timestamp()")[0]
    insert(farm, 4, in_sec=1.5)
    has_looked = f"application_name LIKE '%%:{looker.pid}:%%' AND query_start > '{inserted}' AND state = 'idle'"
    until(lambda: farm.sessions("dl-worker", has_looked), "the first to have looked")
    looker.suspend()
    until(lambda: running(farm) == 4, "the others to have learnt from it when the jobs are due")
    looker.resume()
    calm(farm, program)
    keeper.kill()
    all_start(farm, 5)


def all_start(farm: Farm, number: int) -> None:
    insert(farm, number)
    until(lambda: running(farm) == number, f"all {number} to run")


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


# A claim that has come to its end empty-handed waits here while the test holds the lock.
SLOW_CLAIM = r"""
DO $do$ BEGIN
  EXECUTE regexp_replace(pg_get_functiondef('dl_take_keys'::regproc), 'END\s+\$function\$',
                         'PERFORM pg_advisory_xact_lock_shared(8, 8); END $function$');
END $do$
"""


def test_d8_a_notification_that_comes_during_a_claim_is_not_lost(farm: Farm) -> None:
    """It arrives with the claim's answer, in the driver's backlog, where no select sees it."""
    farm.conn.execute(SLOW_CLAIM)
    farm.ready(workers=1, **POLL)
    until(lambda: farm.sessions("dl-worker", "state = 'idle' AND query LIKE '%%dl_step%%'"), "the worker to sleep")
    with psycopg.connect(farm.dsn) as gate:
        gate.execute("SELECT pg_advisory_xact_lock(8, 8)")
        farm.conn.execute("NOTIFY dl_jobs, 'q'")
        at_the_gate = "wait_event_type = 'Lock' AND wait_event = 'advisory'"
        until(lambda: farm.sessions("dl-worker", at_the_gate), "a claim that has found nothing")
        job = farm.enqueue("noop")
    farm.succeeds(job)


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
    """A session that listens also reads while it runs a job: otherwise it would keep the server's queue full."""
    farm.ready(workers=2)
    long = farm.enqueue("recorded", args={"sec": 5})
    farm.begun(long)
    farm.rows("SELECT pg_notify('dl_jobs', rpad(n::text, %s, 'x')) FROM generate_series(1, %s) n", PAYLOAD, PAYLOADS)
    farm.works()
    until(lambda: not farm.sessions("dl-", "wait_event = 'ClientWrite'"), "every session to have read what it was sent")
    farm.succeeds(long)
    deaf = "state LIKE 'idle in transaction%%'"  # such a session would receive nothing
    until(lambda: not farm.sessions("dl-", deaf), "every session to be outside of a transaction")
