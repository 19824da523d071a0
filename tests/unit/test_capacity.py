"""The model of what one primary bears: its law beside a simulation, its sums, and the limit it names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataloader.bench import simulation
from dataloader.bench.capacity import (
    DAY_SEC,
    IN_BATCHES,
    ONE_BY_ONE,
    Costs,
    Habits,
    Load,
    Primary,
    Way,
    closed_rate,
    cpu_a_sec,
    day,
    demand_of,
    fits,
    jobs_a_sec,
    most_farms,
    most_jobs_a_sec,
    most_times,
    most_triggers_a_sec,
    unread_demand,
)

ONE = Way(
    jobs_a_sec={1: 800.0, 6: 1_400.0},
    server_sec={1: 0.0006, 6: 0.001},
    worker_sec={1: 0.0004, 6: 0.0006},
    wal_bytes=2_000,
)
MANY = Way({1: 9_000.0}, {1: 0.00005}, {1: 0.00006}, 500)
COSTS = Costs(
    cores=2,
    ways={ONE_BY_ONE: ONE, IN_BATCHES: MANY},
    trigger_sec=0.0002,
    trigger_wal=1_000,
    add_sec=0.00002,
    arrival_sec=0.0012,
    commit_sec=0.0005,
    api_sec=0.002,
    listen_sec=0.00002,
    look_sec=0.0003,
    beat_sec=0.0001,
    beat_wal=300,
    beat_bytes=150,
    idle_sec=0.0001,
    kept_bytes=1_500,
    journal_rows=3,
)
PRIMARY = Primary(cores=2, sessions=190)


@pytest.mark.parametrize("cores", [1, 2, 8, 32])
@pytest.mark.parametrize("workers", [1, 2, 7, 40, 1_000])
@pytest.mark.parametrize("elsewhere", [0.0005, 0.01, 1.0])
def test_the_law_agrees_with_a_simulation(workers: int, cores: int, elsewhere: float) -> None:
    simulated = simulation.jobs_a_sec(workers, 0.001, elsewhere, cores)
    assert closed_rate(workers, 0.001, elsewhere, cores) == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize(
    ("workers", "cores", "rate"), [(1, 2, 100.0), (2, 2, 200.0), (50, 2, 200.0), (50, 32, 3_200.0)]
)
def test_workers_that_only_compute_share_the_processors(workers: int, cores: int, rate: float) -> None:
    assert closed_rate(workers, 0.01, 0.0, cores) == pytest.approx(rate)


def test_as_many_workers_as_processors_do_not_wait_for_each_other() -> None:
    assert closed_rate(2, 0.001, 0.003, 2) == pytest.approx(2 / 0.004)


@pytest.mark.parametrize("workers", [1, 6])
def test_the_rate_of_a_measured_number_of_workers_is_the_measured_one(workers: int) -> None:
    assert jobs_a_sec(ONE, workers, cores=2) == pytest.approx(ONE.jobs_a_sec[workers])


def test_rates_between_and_beyond_follow_from_the_measured_demands() -> None:
    assert 1_200 < jobs_a_sec(ONE, 2, cores=2) < 1_600
    assert 1_400 < jobs_a_sec(ONE, 4, cores=2) < 1_700
    assert jobs_a_sec(ONE, 100, cores=2) == pytest.approx(1_400, rel=0.02)


def test_two_workers_of_cheap_jobs_are_twice_as_fast_as_one() -> None:
    waits = Way({1: 100.0, 6: 590.0}, {1: 0.001, 6: 0.001}, {1: 0.0005, 6: 0.0005})
    assert jobs_a_sec(waits, 2, cores=2) == pytest.approx(200, rel=0.02)


@pytest.mark.parametrize(("workers", "cores"), [(4, 2), (16, 8), (8, 1), (1, 1)])
def test_a_demand_is_found_from_its_rate(workers: int, cores: int) -> None:
    rate = closed_rate(workers, 0.0008, 0.0012, cores)
    assert demand_of(workers, rate, 0.0012, cores) == pytest.approx(0.0008, rel=1e-3)


@pytest.mark.parametrize(("workers", "cores"), [(4, 2), (16, 8), (8, 1)])
def test_a_demand_that_nobody_can_read_is_found_from_two_rates(workers: int, cores: int) -> None:
    rate = closed_rate(workers, 0.0008, 0.0012, cores)
    assert unread_demand(1 / 0.002, workers, rate, cores) == pytest.approx(0.0008, rel=1e-3)


def test_a_primary_bears_what_its_processors_bear() -> None:
    assert most_jobs_a_sec(ONE, PRIMARY) == pytest.approx(1_400)
    assert most_jobs_a_sec(ONE, Primary(32, 190)) == pytest.approx(16 * 1_400)


def test_triggers_of_one_job_commit_one_after_the_other_on_any_server() -> None:
    assert most_triggers_a_sec(COSTS, PRIMARY) == pytest.approx(2_000)
    assert most_triggers_a_sec(COSTS, Primary(32, 190)) == pytest.approx(2_000)
    assert most_triggers_a_sec(replace(COSTS, trigger_sec=0.01), PRIMARY) == pytest.approx(140)


def test_listeners_make_commits_longer() -> None:
    assert most_triggers_a_sec(COSTS, Primary(32, 190), listeners=25) == pytest.approx(1_000)


def test_half_of_the_processors_may_look_for_jobs() -> None:
    assert most_farms(COSTS, PRIMARY, 100) == pytest.approx(0.7 / 0.00032 / 100, abs=1)


def test_half_of_the_time_of_commits_may_go_into_signals() -> None:
    assert most_farms(replace(COSTS, look_sec=0.0), PRIMARY, 100) == pytest.approx(250, abs=1)


def test_the_sums_of_a_day() -> None:
    told = day(Load(10 * DAY_SEC, 59.99875, peak=2), COSTS, PRIMARY, Habits(kept_days=10, workers_a_host=50))
    assert (told.workers, told.hosts, told.sessions) == (1_500, 30, 1_500 + 60 + 10)
    assert told.journal_rows == pytest.approx(10 * DAY_SEC * (3 + 6), rel=1e-3)
    assert told.kept_bytes == pytest.approx(10 * DAY_SEC * 10 * (1_500 + 6 * 150), rel=1e-3)
    assert told.wal_bytes == pytest.approx(10 * DAY_SEC * (2_000 + 1_000 + 6 * 300), rel=1e-3)


def test_the_cpu_of_a_second_is_the_sum_of_its_parts() -> None:
    told = cpu_a_sec(COSTS, alone=100, listeners=50, beats=200, idle=40)
    assert told == pytest.approx(100 * 0.0012 + 100 * 50 * 0.00002 + 200 * 0.0001 + 40 * 0.0001)
    of_fleet = cpu_a_sec(COSTS, alone=100, listeners=20, farms=20)
    assert of_fleet == pytest.approx(100 * 0.0012 + 100 * 20 * 0.00002 + 100 * 19 * 0.0003)
    batched = cpu_a_sec(COSTS, in_batches=10_000, listeners=50)
    assert batched == pytest.approx(10_000 * (0.00005 + 0.00002) + 100 * 50 * 0.00002)


@pytest.mark.parametrize(
    ("load", "costs", "limit"),
    [
        (Load(DAY_SEC, 100.0, 1), COSTS, "sessions"),
        (Load(1_000 * DAY_SEC, 0.0, 1), replace(COSTS, commit_sec=0.00001), "CPU of the server"),
        (Load(500 * DAY_SEC, 0.0, 1), replace(COSTS, commit_sec=0.002), "commits that notify"),
    ],
)
def test_the_limit_that_breaks_first_is_named(load: Load, costs: Costs, limit: str) -> None:
    assert day(load, costs, PRIMARY, Habits()).uses[0].name == limit


def test_batches_carry_more_than_single_jobs() -> None:
    single = Load(1_000_000, 0.01)
    batched = Load(1_000_000, 0.01, in_batches=True)
    assert most_times(batched, COSTS, PRIMARY, Habits()) > 3 * most_times(single, COSTS, PRIMARY, Habits())


def test_the_most_times_is_the_last_that_fits() -> None:
    load = Load(10_000, 1.0)
    most = most_times(load, COSTS, PRIMARY, Habits())
    assert fits(load.times(most), COSTS, PRIMARY, Habits())
    assert not fits(load.times(most * 1.05), COSTS, PRIMARY, Habits())


def test_what_never_fits_fits_no_times() -> None:
    assert most_times(Load(1, 1.0), COSTS, Primary(2, 0), Habits()) == 0
