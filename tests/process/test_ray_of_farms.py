"""`run.ray` on a farm, against a real Ray cluster: what becomes of the command when its worker, or Ray, goes."""

from __future__ import annotations

from collections.abc import Iterator

import engine_promises as promises
import pytest
from clusters import Ray
from farming import Farm

pytestmark = [pytest.mark.farm, pytest.mark.long]


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    cluster = Ray()
    yield cluster
    cluster.close()


def test_a_job_of_ten_minutes_survives_the_death_of_its_worker_and_runs_once(farm: Farm, ray: Ray) -> None:
    """It has ten minutes, and ends sooner when it is told to."""
    promises.survives_the_death_of_its_worker(farm, ray)


@pytest.mark.slow
def test_a_worker_that_dies_at_the_order_makes_no_second_start(farm: Farm, ray: Ray) -> None:
    promises.is_not_started_twice_at_the_order(farm, ray)


def test_a_cancellation_ends_the_command_in_time(farm: Farm, ray: Ray) -> None:
    promises.is_canceled_in_time(farm, ray)


def test_a_cancellation_between_two_attempts_ends_the_command(farm: Farm, ray: Ray) -> None:
    promises.is_stopped_though_no_worker_has_the_job(farm, ray)


@pytest.mark.slow
def test_the_time_limit_ends_the_command(farm: Farm, ray: Ray) -> None:
    promises.is_stopped_by_its_time_limit(farm, ray)


@pytest.mark.slow
def test_a_drain_leaves_the_command_to_the_next_worker(farm: Farm, ray: Ray) -> None:
    promises.survives_a_drain(farm, ray)


@pytest.mark.slow
def test_a_farm_that_has_lost_its_claim_leaves_the_command_alone(farm: Farm, ray: Ray) -> None:
    promises.is_left_to_the_next_owner(farm, ray)


@pytest.mark.slow
def test_an_absent_dashboard_is_a_clear_error_and_the_next_attempt_goes_on(farm: Farm, ray: Ray) -> None:
    promises.says_that_the_engine_is_away(farm, ray)


@pytest.mark.slow
def test_a_silent_dashboard_is_waited_for(farm: Farm, ray: Ray) -> None:
    promises.outlives_an_engine_that_is_silent(farm, ray, "dashboard")


@pytest.mark.slow
def test_a_cancellation_that_a_silent_dashboard_does_not_confirm_is_told(farm: Farm, ray: Ray) -> None:
    promises.says_that_a_cancellation_has_not_come_through(farm, ray, "dashboard")


@pytest.mark.slow
def test_a_command_that_fails_fails_its_job_with_its_last_lines(farm: Farm, ray: Ray) -> None:
    promises.tells_a_failure_with_its_last_lines(farm, ray)


@pytest.mark.slow
def test_the_output_is_the_jobs_log_and_a_job_that_succeeded_begins_anew(farm: Farm, ray: Ray) -> None:
    promises.logs_what_the_program_writes(farm, ray)
