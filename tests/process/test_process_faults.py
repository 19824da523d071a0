"""Processes fail: a heartbeat breaks, reapers are many or stopped, the host is suspended, versions are mixed.

Names begin with the fault: A ownership, E poison, I processes.
"""

import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from farming import LOST, Farm, LongJob, on_all, until

from dataloader.queue import db, lifecycle


def test_a6_a_fence_that_is_ahead_of_the_queue_costs_no_attempt(farm: Farm) -> None:
    """The target has seen claims that a failover, or a backup, took from the queue."""
    farm.conn.execute("CREATE TABLE written (job_id uuid, claim int)")
    farm.conn.execute(db.statements("target.sql")["create"])
    program = farm.ready(workers=1)
    for fence in (1, 40):
        later = datetime.now(UTC) + timedelta(hours=1)
        job = farm.enqueue("writes_late", args={"sec": 0}, available_at=later)
        farm.conn.execute("INSERT INTO dl_fence (job_id, claim) VALUES (%s, %s)", (job, fence))
        farm.conn.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = %s", (job,))
        farm.succeeds(job)
        assert farm.rows("SELECT count(*) FROM written WHERE job_id = %s", job) == [(1,)]
        assert farm.rows("SELECT claims FROM dl_jobs WHERE job_id = %s", job) == [(fence + 1,)]
        assert farm.rows("SELECT claim::int FROM dl_fence WHERE job_id = %s", job) == [(fence + 1,)]
    leaps = program.logged("worker.fence.ahead", 2)
    assert [(leap["fence"], leap["claim"], leap["leapt_to"]) for leap in leaps] == [(1, 1, 2), (40, 1, 41)]
    assert not program.events("worker.ownership.lost")


RAISES = ["_beat"]
DIES = ["_beat", "_log"]  # the second is used where the first is caught


def test_a7_a_run_without_a_heartbeat_is_stopped_and_handed_back(farm: Farm) -> None:
    """At its next safe point; it runs again, and the worker's place is not lost. One that ends before hangs nothing."""
    program = farm.ready(workers=1)
    for methods in (RAISES, DIES):
        job = farm.enqueue("breaks_the_heartbeat", args={"methods": methods})
        farm.succeeds(job)
        assert farm.story(job) == ["queued", "picked", "requeue", "picked", "done"]
        farm.succeeds(farm.enqueue("recorded", args={"sec": 1.5}))
        quick = farm.enqueue("breaks_the_heartbeat_silently", args={"methods": methods, "sec": 1.5})
        farm.succeeds(quick)
        assert farm.story(quick) == ["queued", "picked", "done"]
        farm.works()
    assert program.stop() == 0


@pytest.mark.parametrize("by_itself", [False, True])
def test_a7_a_run_without_heartbeat_and_safe_points_is_ended(farm: Farm, by_itself: bool) -> None:
    """Before its lease is over, by the supervisor or, when that is slow, by itself; it runs again, uncounted."""
    program = farm.ready(workers=1)
    job = farm.enqueue("breaks_the_heartbeat_silently", args={"methods": RAISES, "sec": 600}, lease_ttl_sec=4)
    if by_itself:
        until(lambda: farm.rows("SELECT FROM runs"), "the run to begin")
        program.signal(signal.SIGSTOP)
        program.logged("worker.fenced")
        program.signal(signal.SIGCONT)
    farm.succeeds(job)
    assert farm.journal(job)[2][1]["reason"] == "the lease ran out"
    farm.works()


def test_e7_a_worker_whose_signals_were_taken_is_replaced_or_takes_them_back(farm: Farm) -> None:
    """Else it would never hear that it should drain; nor did it hear what was sent to it in that run.

    It takes the signals back after the import of a module, and the wake-ups at its next wait; it is not replaced.
    """
    (farm.folder / "rude.py").write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n")
    program = farm.ready(workers=1, dl_pipelines="farm_pipelines,rude", dl_claim_backoff_sec=600)
    for number, (how, fact) in enumerate((("ignore", "signals"), ("block", "signal mask")), 1):
        farm.succeeds(farm.enqueue("takes_the_signals", args={"how": how}))
        farm.succeeds(farm.enqueue("recorded"))
        first, second = farm.rows("SELECT pid FROM runs ORDER BY started")[-2:]
        assert first != second
        assert program.logged("worker.changed", number)[-1]["changed"] == [fact]
    farm.succeeds(farm.enqueue("takes_the_signals", args={"how": "silence"}))
    until(lambda: program.children("idle"), "the worker to wait")
    assert program.stop() == 0
    assert not program.events("supervisor.worker.killed")
    assert len(program.events("worker.changed")) == 2


REQUEUES = "SELECT count(*) FROM dl_job_events WHERE job_id = ANY(%s) AND kind = 'requeue'"


def lose(farm: Farm, number: int) -> list[UUID]:
    """So many jobs whose machine is gone and whose lease is over; no worker serves their queue."""
    return farm.insert(number, queue="'lost'", lock_key="'lost-' || n", **LOST)


def come_back_once(farm: Farm, jobs: list[UUID]) -> None:
    left = "SELECT FROM dl_jobs WHERE job_id = ANY(%s) AND status <> 'queued'"
    until(lambda: not farm.rows(left, jobs), "the jobs to come back")
    assert farm.rows(REQUEUES, jobs) == [(len(jobs),)]


def test_i14_several_reapers_are_safe_and_one_of_them_is_enough(farm: Farm) -> None:
    """Three at once; then one stopped and one killed; then the stopped one goes on; then one started anew."""
    reapers = [farm.reaper(dl_reaper_period_sec=0.1) for _ in range(3)]
    first = lose(farm, 300)
    come_back_once(farm, first)
    psutil.Process(reapers[0].process.pid).suspend()
    reapers[1].process.kill()
    come_back_once(farm, lose(farm, 50))
    psutil.Process(reapers[0].process.pid).resume()
    assert reapers[2].stop() == 0
    come_back_once(farm, lose(farm, 50))
    assert reapers[0].stop() == 0
    late = lose(farm, 5)
    farm.start("reaper")
    come_back_once(farm, late)
    assert farm.rows(REQUEUES, first) == [(300,)]


def test_i15_a_column_that_the_code_does_not_know_is_no_problem(farm: Farm) -> None:
    """It comes and goes under a working farm: a run goes on, and nobody needs a new session."""
    program = farm.ready(workers=2, dl_claim_backoff_sec=600)
    reaper = farm.start("reaper")
    for _ in range(12):  # statements are prepared by now
        farm.wait(farm.enqueue("recorded"), "succeeded")
    job = LongJob(farm)
    farm.conn.execute("ALTER TABLE dl_jobs ADD COLUMN extra jsonb NOT NULL DEFAULT '{}'")
    use_everything(farm)
    farm.conn.execute("ALTER TABLE dl_jobs DROP COLUMN extra")
    use_everything(farm)
    job.ends_well()
    assert not program.events("farm.database.lost")
    assert not reaper.events("farm.database.lost")


def use_everything(farm: Farm) -> None:
    """A success, an error, a cancellation, a crash, a lost machine."""
    good, bad = farm.enqueue("recorded"), farm.enqueue("errs", args={"permanent": True})
    farm.succeeds(good)
    assert farm.wait(bad, "failed")["error"] == "no use"
    endless = farm.enqueue("recorded", args={"sec": 600})
    farm.wait(endless, "running")
    lifecycle.request_cancel(farm.conn, endless)
    farm.wait(endless, "canceled")
    crash = farm.enqueue("kills_itself", args={"times": 1})
    assert farm.wait(crash, "succeeded")["attempt"] == 2
    come_back_once(farm, lose(farm, 1))


def test_i18_a_farm_that_was_suspended_is_fenced_before_it_writes(farm: Farm, tmp_path: Path) -> None:
    """For longer than the lease, while its job runs elsewhere; its runs end at their first safe point."""
    farm.conn.execute("CREATE TABLE written (job_id uuid, claim int)")
    suspended = farm.ready(workers=1)
    go = tmp_path / "go"
    job = farm.running("writes_after_a_wait", args={"go": str(go)}, lease_ttl_sec=4, lock_key="k")
    family = suspended.family()
    on_all(psutil.Process.suspend, family)
    farm.start("reaper")
    farm.ready(workers=1)
    until(lambda: farm.job(job)["attempt"] == 2, "the job to run elsewhere")
    go.touch()
    assert farm.wait(job, "succeeded")["attempt"] == 2
    on_all(psutil.Process.resume, family)
    ends = ("worker.ownership.lost", "supervisor.worker.exited")  # its worker learns it, or was ended for it
    until(lambda: any(map(suspended.events, ends)), "the suspended run to end")
    # The other run may have been handed back in between, where the machine was slow: the last one alone has written.
    ((claims,),) = farm.rows("SELECT claims FROM dl_jobs WHERE job_id = %s", job)
    assert farm.rows("SELECT claim FROM written") == [(claims,)]
    assert farm.story(job) == ["queued", "picked", *["requeue", "picked"] * (claims - 1), "done"]
    assert farm.job(job)["status"] == "succeeded"
    assert suspended.stop() == 0
