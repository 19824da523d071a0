"""`run.spark` on a farm, against a real standalone Spark, where SPARK_HOME or the package pyspark is there."""

from __future__ import annotations

from collections.abc import Iterator

import engine_promises as promises
import pytest
from clusters import Spark, spark_home
from farming import Farm

pytestmark = [
    pytest.mark.farm,
    pytest.mark.slow,
    pytest.mark.skipif(spark_home() is None, reason="neither SPARK_HOME nor pyspark with java"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[Spark]:
    home = spark_home()
    assert home is not None
    cluster = Spark(home)
    yield cluster
    cluster.close()


def test_a_job_of_ten_minutes_survives_the_death_of_its_worker_and_runs_once(farm: Farm, spark: Spark) -> None:
    """It has ten minutes, and ends sooner when it is told to."""
    promises.survives_the_death_of_its_worker(farm, spark)


def test_a_worker_that_dies_at_the_order_makes_no_second_start(farm: Farm, spark: Spark) -> None:
    promises.is_not_started_twice_at_the_order(farm, spark)


def test_a_cancellation_ends_the_application_in_time(farm: Farm, spark: Spark) -> None:
    promises.is_canceled_in_time(farm, spark)


def test_a_cancellation_between_two_attempts_ends_the_application(farm: Farm, spark: Spark) -> None:
    promises.is_stopped_though_no_worker_has_the_job(farm, spark)


def test_a_drain_leaves_the_application_to_the_next_worker(farm: Farm, spark: Spark) -> None:
    promises.survives_a_drain(farm, spark)


def test_an_application_that_fails_fails_its_job(farm: Farm, spark: Spark) -> None:
    """Its standard error is in Spark's own log."""
    it = promises.Engaged(farm, spark)
    it.ready()
    job = it.enqueue("fails", max_attempts=1)
    error = str(farm.wait(job, "failed")["error"])
    assert "the driver is FAILED; its last lines:\nhalf way" in error
