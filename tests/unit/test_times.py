"""When schedules are due, also at a change of the clocks; which due times get a job; what a job may name."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.queue.plans import times
from dataloader.queue.plans.times import Timing

ZONES = ("Europe/Moscow", "America/New_York", "Australia/Lord_Howe", "Europe/Berlin", "UTC")


def instant(text: str, zone: str = "UTC") -> datetime:
    """A wall time of a zone; of a repeated one the first."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)


def walls(cron: str, zone: str, since: str, until: str) -> list[str]:
    """The due times of these days, as the clocks on the wall show them."""
    begin, end = instant(since, zone) - timedelta(seconds=1), instant(until, zone)
    found = takewhile(lambda at: at < end, times.after(Timing(cron, None, zone), begin))
    return [at.astimezone(ZoneInfo(zone)).strftime("%d %H:%M%z") for at in found]


@pytest.mark.parametrize(
    ("cron", "zone", "day", "following", "due"),
    [
        # The gap: a fixed time comes right behind it, once; what goes by real time does without it.
        ("30 2 * * *", "America/New_York", "2026-03-08", "2026-03-09", ["08 03:00-0400"]),
        ("0,30 2,3 * * *", "America/New_York", "2026-03-08", "2026-03-09", ["08 03:00-0400", "08 03:30-0400"]),
        ("*/30 2 * * *", "America/New_York", "2026-03-08", "2026-03-09", []),
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-04", "2026-10-05", ["04 02:30+1100"]),
        ("*/15 2 * * *", "Australia/Lord_Howe", "2026-10-04", "2026-10-05", ["04 02:30+1100", "04 02:45+1100"]),
        # The fold: a fixed time comes the first time only; what goes by real time comes in both hours.
        ("30 1 * * *", "America/New_York", "2026-11-01", "2026-11-02", ["01 01:30-0400"]),
        (
            "*/30 1 * * *",
            "America/New_York",
            "2026-11-01",
            "2026-11-02",
            ["01 01:00-0400", "01 01:30-0400", "01 01:00-0500", "01 01:30-0500"],
        ),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-05", "2026-04-06", ["05 01:45+1100"]),
        (
            "*/10 2 * * *",
            "Australia/Lord_Howe",
            "2026-04-05",
            "2026-04-06",
            [f"05 02:{minute}0+1030" for minute in range(6)],
        ),
        ("0 3 * * *", "Europe/Moscow", "2026-03-29", "2026-03-31", ["29 03:00+0300", "30 03:00+0300"]),
        ("0 3 * * MON-FRI", "Europe/Moscow", "2026-11-27", "2026-12-01", ["27 03:00+0300", "30 03:00+0300"]),
        ("0 0 29 2 *", "UTC", "2027-01-01", "2029-01-01", ["29 00:00+0000"]),
    ],
)
def test_due_times_at_a_change_of_the_clocks(cron: str, zone: str, day: str, following: str, due: list[str]) -> None:
    assert walls(cron, zone, day, following) == due


def test_from_between_a_repeated_time_and_its_repetition_the_next_one_is_that_of_tomorrow() -> None:
    between = instant("2026-11-01T05:45:00")  # 01:45 for the first time
    repeated = instant("2026-11-01T06:15:00")  # 01:15 for the second
    for at in (between, repeated):
        assert times.first(Timing("30 1 * * *", None, "America/New_York"), at) == instant("2026-11-02T06:30:00")


FIXED = st.builds("{} {} * * *".format, st.integers(0, 59), st.integers(0, 23))
REAL = st.sampled_from(["*/7 * * * *", "*/15 1-3 * * *", "5 * * * *", "* 2 * * SUN", "*/20 0 1,15 * *"])
INSTANTS = st.integers(0, 366 * 86_400).map(lambda sec: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=sec))
CHANGES = st.sampled_from([(3, 7), (3, 28), (4, 4), (10, 3), (10, 24), (10, 31), (6, 1)]).map(
    lambda day: datetime(2026, *day, 20, tzinfo=UTC)  # hours before a change in one of the zones
)


@given(cron=FIXED, zone=st.sampled_from(ZONES), at=INSTANTS)
@settings(max_examples=25)
def test_a_fixed_time_comes_once_on_each_day_of_a_year(cron: str, zone: str, at: datetime) -> None:
    due = list(islice(times.after(Timing(cron, None, zone), at), 366))
    days = [each.astimezone(ZoneInfo(zone)).date() for each in due]
    assert [later - earlier for earlier, later in pairwise(days)] == [timedelta(days=1)] * 365
    assert all(earlier < later for earlier, later in zip([at, *due], due, strict=False))


@given(cron=REAL, zone=st.sampled_from(ZONES), at=CHANGES)
@settings(max_examples=40)
def test_a_time_with_a_star_comes_at_each_minute_that_the_clocks_show_so(cron: str, zone: str, at: datetime) -> None:
    minutes = [at + timedelta(minutes=number) for number in range(1, 2 * 24 * 60)]
    found = takewhile(lambda due: due <= minutes[-1], times.after(Timing(cron, None, zone), at))
    assert list(found) == [each for each in minutes if shows(cron, each.astimezone(ZoneInfo(zone)))]


def shows(cron: str, here: datetime) -> bool:
    minute, hour, day, _, weekday = cron.split()
    is_time = fits(minute, here.minute) and fits(hour, here.hour)
    return is_time and fits(day, here.day) and weekday in ("*", here.strftime("%a").upper())


def fits(field: str, number: int) -> bool:
    if "," in field:
        return any(fits(each, number) for each in field.split(","))
    if "-" in field:
        low, high = map(int, field.split("-"))
        return low <= number <= high
    return number % int(field[2:]) == 0 if "/" in field else field in ("*", str(number))


@given(sec=st.integers(1, 100_000), at=INSTANTS)
def test_an_interval_is_counted_from_1970_whenever_one_looks(sec: int, at: datetime) -> None:
    timing = Timing(None, sec, "Europe/Moscow")
    due = list(islice(times.after(timing, at), 3))
    assert all(each.timestamp() % sec == 0 for each in due)
    assert timedelta(0) < due[0] - at <= timedelta(seconds=sec)
    assert times.latest(timing, due[2]) == due[2]
    assert times.latest(timing, due[2] - times.TICK) == due[1]


@pytest.mark.parametrize("cron", ["* * * * *", "30 2 * * *", "0 0 1 * *", "0 0 29 2 *", "0 0 * 2 MON#5"])
@pytest.mark.parametrize("zone", ZONES)
def test_the_latest_due_time_is_the_one_before_the_next(cron: str, zone: str) -> None:
    timing, now = Timing(cron, None, zone), instant("2026-11-23T12:00:30")
    latest = times.latest(timing, now)
    assert latest is not None
    assert latest <= now
    following = times.first(timing, latest)
    assert following is not None
    assert following > now


NOW = instant("2026-03-02T12:00:00")


def test_an_interval_of_a_second_that_rested_for_years_is_looked_at_in_a_moment() -> None:
    choice = times.chosen(Timing(None, 1, "UTC"), instant("1990-01-01T00:00:00"), NOW, "last", 10)
    assert (choice.due[-1], len(choice.due)) == (NOW, times.GRACE_SEC)


NO_ZONES = ("", "Mars/Olympus", "../../etc/passwd", "Europe", "UTC\0")
NO_CLOCKS = ("7:00", "24:00", "07:60", "07:00:00", "seven", "", "07:00\n")


@pytest.mark.parametrize(
    ("check", "text", "why"),
    [
        (times.check_cron, "0 3 * *", "five fields: minute, hour"),
        (times.check_cron, "* * * * * *", "shorter times are for interval_sec"),
        (times.check_cron, "60 * * * *", "bad minute"),
        (times.check_cron, "@daily", "five fields"),
        (times.check_cron, "0 0 30 2 *", "bad day-of-month"),
        (times.check_cron, "0 3 * * FOO", "bad day-of-week"),
        *((times.zone_of, text, "there is no time zone") for text in NO_ZONES),
        *((times.check_clock, text, "should be a time of the day such as 07:00") for text in NO_CLOCKS),
    ],
)
def test_a_wrong_text_is_refused_with_what_would_be_right(check: Callable[[str], Any], text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check(text)


@pytest.mark.parametrize("name", ["nightly", "a:b.c", "x" * 150])
def test_a_key_names_the_schedule_and_the_due_time_and_any_other_key_none(name: str) -> None:
    for due in (NOW, NOW + timedelta(microseconds=5)):
        assert times.due_of_key(times.key_of(name, due.astimezone(ZoneInfo("Europe/Moscow")))) == (name, due)
        assert len(times.key_of(name, due)) <= 255
    others = (None, "", "mine", "schedule:", "schedule:x", "schedule:x:tomorrow")
    assert [times.due_of_key(key) for key in others] == [None] * 6


@pytest.mark.parametrize(
    ("timing", "words"),
    [
        (Timing("0 3 * * MON-FRI", None, "Europe/Moscow"), "At 03:00 on Monday through Friday, Europe/Moscow"),
        (Timing(None, 900, "UTC"), "Every 15 minutes"),
        (Timing(None, 5_400, "UTC"), "Every 90 minutes"),
    ],
)
def test_a_timing_in_words(timing: Timing, words: str) -> None:
    assert times.words(timing) == words


def test_the_facts_of_a_due_time_are_those_of_its_zone() -> None:
    due = instant("2026-03-08T07:30:00")
    facts = times.facts("n", Timing("30 3 * * *", None, "America/New_York"), due, due - timedelta(days=1))
    assert facts == {
        "due": "2026-03-08T03:30:00-04:00",
        "due_utc": "2026-03-08T07:30:00Z",
        "date": "2026-03-08",
        "time": "03:30:00",
        "year": 2026,
        "month": 3,
        "day": 8,
        "hour": 3,
        "minute": 30,
        "second": 0,
        "weekday": 7,
        "timestamp": 1_772_955_000,
        "previous_due": "2026-03-07T02:30:00-05:00",
        "schedule": "n",
    }


@pytest.mark.parametrize(
    ("zone", "due", "clock", "sec", "ends"),
    [
        ("Europe/Moscow", "2026-03-02T03:00", "07:00", None, "2026-03-02T07:00+03:00"),
        ("Europe/Moscow", "2026-03-02T07:00", "07:00", None, "2026-03-03T07:00+03:00"),  # not the due time itself
        ("Europe/Moscow", "2026-03-02T23:30", "00:15", None, "2026-03-03T00:15+03:00"),
        # The clocks change between the two.
        ("Europe/Berlin", "2026-03-29T01:30", "07:00", None, "2026-03-29T07:00+02:00"),
        ("Europe/Berlin", "2026-10-25T01:30", "07:00", None, "2026-10-25T07:00+01:00"),
        ("Europe/Berlin", "2026-03-28T23:00", "02:30", None, "2026-03-29T03:30+02:00"),  # the clocks never show it
        ("Europe/Berlin", "2026-03-29T01:30", None, 3_600, "2026-03-29T03:30+02:00"),
        ("Europe/Berlin", "2026-03-29T01:30", None, None, None),
    ],
)
def test_a_deadline_is_the_first_such_time_or_so_many_seconds_behind_the_due_time_or_there_is_none(
    zone: str, due: str, clock: str | None, sec: int | None, ends: str | None
) -> None:
    assert times.deadline(instant(due, zone), zone, clock, sec) == (ends and datetime.fromisoformat(ends))
