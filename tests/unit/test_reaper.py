"""The time since when, for a reaper, the database has been up."""

from __future__ import annotations

from dataloader.farm.reaper import GAP_SEC, JUMP_SEC, SILENCE_SEC, Uptime

CLOCK = 1_900_000_000.0  # the database's clock, when ours shows 0


def asked(uptime: Uptime, at: float, ahead: float = CLOCK, age: float = 1e6, took: float = 0.0) -> float:
    """The result when the database answers at the instant `at` of our clock, with a clock `ahead` of ours."""
    return uptime.answered(at - took, at, at + ahead, age)


def test_a_server_that_is_up_has_been_there_before_us() -> None:
    assert asked(Uptime(), 100, age=5_000) == 5_000


def test_a_server_that_was_restarted_has_been_there_since_then() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    assert asked(uptime, 110, age=3) == 3


def test_what_was_lost_counts_from_its_return() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    uptime.lost(110)
    uptime.lost(129)
    assert [asked(uptime, 130), asked(uptime, 137)] == [0, 7]


def test_a_session_that_was_ended_and_replaced_at_once_is_no_outage() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    for at in range(110, 200):
        uptime.lost(at)
        uptime.is_there(at + GAP_SEC / 2)
        uptime.lost(at + GAP_SEC)
        assert asked(uptime, at + 1.5 * GAP_SEC, took=0.1) > 1_000


def test_the_absence_ends_with_the_first_answer() -> None:
    uptime = Uptime()
    uptime.lost(100)
    uptime.is_there(104)
    assert asked(uptime, 110) == 6


def test_a_silence_is_an_outage_and_a_slow_answer_is_none() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    assert asked(uptime, 120, took=SILENCE_SEC - 1) > 1_000
    assert asked(uptime, 140, took=SILENCE_SEC + 1) == 0


def test_a_clock_that_jumps_forwards_is_an_outage() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    assert asked(uptime, 110, ahead=CLOCK + JUMP_SEC - 0.1) > 1_000
    assert asked(uptime, 120, ahead=CLOCK + 3_600, age=3_700) == 0
    assert asked(uptime, 130, ahead=CLOCK + 3_600, age=3_710) == 10


def test_neither_a_clock_that_is_set_back_nor_an_answer_that_was_late_looks_like_a_jump() -> None:
    uptime = Uptime()
    asked(uptime, 100)
    assert asked(uptime, 110, ahead=CLOCK - 3_600, age=-5) > 1_000, "it was not started in the future"
    uptime.answered(130, 134, 134 + CLOCK - 3_600, 1e6)  # the database had waited before it read its clock
    assert asked(uptime, 140, ahead=CLOCK - 3_600) > 1_000
    uptime.answered(150, 154, 150 + CLOCK - 3_600, 1e6)  # or its answer was late
    assert asked(uptime, 160, ahead=CLOCK - 3_600) > 1_000
