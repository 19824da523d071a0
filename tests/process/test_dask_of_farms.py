"""`run.dask` on a farm, against a real Dask cluster: what becomes of the function when its worker, or Dask, goes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import engine_promises as promises
import pytest
from clusters import Dask
from farming import Farm, until

from dataloader.queue import lifecycle

pytestmark = [pytest.mark.farm, pytest.mark.long]


@pytest.fixture(scope="module")
def dask() -> Iterator[Dask]:
    cluster = Dask()
    yield cluster
    cluster.close()


def test_a_job_of_ten_minutes_survives_the_death_of_its_worker_and_runs_once(farm: Farm, dask: Dask) -> None:
    """It has ten minutes, and ends sooner when it is told to."""
    promises.survives_the_death_of_its_worker(farm, dask)


@pytest.mark.parametrize("_", range(3))
def test_a_worker_that_dies_at_the_order_makes_no_second_start(farm: Farm, dask: Dask, _: int) -> None:
    promises.is_not_started_twice_at_the_order(farm, dask)


def test_a_cancellation_ends_the_function_in_time(farm: Farm, dask: Dask) -> None:
    promises.is_canceled_in_time(farm, dask)


def test_a_cancellation_between_two_attempts_ends_the_function(farm: Farm, dask: Dask) -> None:
    promises.is_stopped_though_no_worker_has_the_job(farm, dask)


@pytest.mark.slow
def test_the_time_limit_ends_the_function(farm: Farm, dask: Dask) -> None:
    promises.is_stopped_by_its_time_limit(farm, dask)


def test_a_drain_leaves_the_function_to_the_next_worker(farm: Farm, dask: Dask) -> None:
    promises.survives_a_drain(farm, dask)


@pytest.mark.slow
def test_a_farm_that_has_lost_its_claim_leaves_the_function_alone(farm: Farm, dask: Dask) -> None:
    promises.is_left_to_the_next_owner(farm, dask)


@pytest.mark.slow
def test_an_absent_scheduler_is_a_clear_error_and_the_next_attempt_goes_on(farm: Farm, dask: Dask) -> None:
    promises.says_that_the_engine_is_away(farm, dask)


@pytest.mark.slow
def test_a_silent_scheduler_is_waited_for(farm: Farm, dask: Dask) -> None:
    promises.outlives_an_engine_that_is_silent(farm, dask, "scheduler")


@pytest.mark.slow
def test_a_cancellation_that_a_silent_scheduler_does_not_confirm_is_told(farm: Farm, dask: Dask) -> None:
    promises.says_that_a_cancellation_has_not_come_through(farm, dask, "scheduler")


@pytest.mark.slow
def test_a_function_that_raises_fails_its_job_with_its_last_lines(farm: Farm, dask: Dask) -> None:
    promises.tells_a_failure_with_its_last_lines(farm, dask)


@pytest.mark.slow
def test_the_output_is_the_jobs_log_and_a_job_that_succeeded_begins_anew(farm: Farm, dask: Dask) -> None:
    promises.logs_what_the_program_writes(farm, dask)


@pytest.mark.slow
def test_a_driver_spreads_its_work_over_the_cluster(farm: Farm, dask: Dask) -> None:
    it = promises.Engaged(farm, dask)
    it.ready()
    job = it.enqueue("spreads")
    farm.wait(job, "succeeded")
    assert farm.rows("SELECT result FROM dl_results") == [(55,)]


@pytest.mark.slow
def test_a_cluster_that_starts_anew_gets_the_order_anew(farm: Farm, dask: Dask) -> None:
    """It has lost its memory, so the function begins again: at least once."""
    it = promises.Engaged(farm, dask)
    it.ready(dl_engines=dask.setting(away_sec=1))
    job = it.enqueue()
    pid = it.begun()
    farm.begun(job)
    dask.kill()
    until(lambda: not promises.is_alive(pid), "the function to die with its cluster")
    until(lambda: farm.job(job)["error"], "the error")
    dask.start()
    it.hurry(job)
    it.begun(2)
    it.go()
    it.succeeded(job)
    assert len(it.starts()) == 2


@pytest.mark.slow
def test_a_function_that_waits_for_its_turn_is_canceled_before_it_begins(farm: Farm, dask: Dask) -> None:
    """The cluster has three threads."""
    it = promises.Engaged(farm, dask)
    farm.ready(workers=4, **it.settings)
    jobs = [it.enqueue() for _ in range(3)]
    it.begun(3)
    last = it.enqueue()
    until(lambda: farm.rows("SELECT 1 FROM dl_checkpoints WHERE checkpoint ->> 'handle' <> '' OFFSET 3"), "its order")
    lifecycle.request_cancel(farm.conn, last)
    farm.wait(last, "canceled")
    it.go()
    for job in jobs:
        it.succeeded(job)
    assert len(it.starts()) == 3


@pytest.mark.slow
def test_the_scheduler_forgets_what_has_ended(farm: Farm, dask: Dask) -> None:
    it = promises.Engaged(farm, dask)
    it.ready()
    job = it.enqueue(args={"sec": 1})
    it.succeeded(job)
    code = f"from distributed import Client; print(Client({dask.address!r}).list_datasets())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (told.returncode, str(job) in told.stdout) == (0, False)  # other tests may have left theirs
