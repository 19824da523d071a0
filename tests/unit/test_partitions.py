"""Which partitions a range has, what the job of one may name, and what a backfill's counts say; templates."""

from typing import Any

import pytest

from dataloader.queue.plans import new_backfill, partitions
from dataloader.queue.plans.words import filled, filled_text

DAYS = {"since": "2019-01-01", "until": "2019-01-03", "step": "day"}


@pytest.mark.parametrize(
    ("since", "until", "step", "expected"),
    [
        ("2019-01-30", "2019-02-01", "day", ["2019-01-30", "2019-01-31", "2019-02-01"]),
        ("2020-02-28", "2020-03-01", "1 day", ["2020-02-28", "2020-02-29", "2020-03-01"]),
        ("2019-01-01", "2019-01-20", "week", ["2019-01-01", "2019-01-08", "2019-01-15"]),
        ("2019-11", "2020-01", "month", ["2019-11-01", "2019-12-01", "2020-01-01"]),
        ("2019-11-15", "2020-05-14", "3 months", ["2019-11-15", "2020-02-15"]),
        ("2020-02-28", "2022-12-31", "year", ["2020-02-28", "2021-02-28", "2022-02-28"]),
        ("2019-01-01", "2019-01-01T12:00", "6 hours", ["2019-01-01T00:00", "2019-01-01T06:00", "2019-01-01T12:00"]),
        ("2019-01-01T23:45", "2019-01-02", "15min", ["2019-01-01T23:45", "2019-01-02T00:00"]),
        ("2019-01-01T06:00", "2019-01-03", "day", ["2019-01-01T06:00", "2019-01-02T06:00"]),
        ("0", "250", "100", ["0", "100", "200"]),
        ("-5", "5", "5", ["-5", "0", "5"]),
        ("9998-06-01", "9999-12-31", "year", ["9998-06-01", "9999-06-01"]),
        ("2019-01-01", "2019-01-01", "day", ["2019-01-01"]),
    ],
)
def test_a_range_has_a_partition_a_step_up_to_its_end(since: str, until: str, step: str, expected: list[str]) -> None:
    assert partitions.partitions_between(since, until, step) == expected


def test_a_range_may_have_as_many_partitions_as_a_backfill_may() -> None:
    assert len(partitions.partitions_between("1", str(partitions.MOST), "1")) == partitions.MOST


def test_the_job_of_a_partition_may_name_its_parts_its_end_and_its_place() -> None:
    span = {"since": "2019-01", "until": "2019-12", "step": "month"}
    found = partitions.facts("2019-02-01", 2, "b", "load", span)
    assert (found["partition"], found["place"], found["backfill"], found["task"]) == ("2019-02-01", 2, "b", "load")
    assert (found["begin"], found["end"], found["date"]) == ("2019-02-01", "2019-03-01", "2019-02-01")
    assert (found["year"], found["month"], found["day"], found["weekday"]) == (2019, 2, 1, 5)
    numbers = {"since": "0", "until": "500", "step": "100"}
    found = partitions.facts("100", 2, "b", "load", numbers)
    assert (found["begin"], found["end"], "date" in found) == (100, 200, False)
    hours = {"since": "2019-01-01", "until": "2019-01-02", "step": "6h"}
    assert partitions.facts("2019-01-01T18:00", 4, "b", "load", hours)["end"] == "2019-01-02T00:00"
    assert "end" not in partitions.facts("2019-01-01", 1, "b", "load", None)
    assert partitions.facts("moscow", 1, "b", "load", None).keys() == {"partition", "place", "backfill", "task"}


def checked(**fields: Any) -> dict[str, Any]:
    given = {"name": "b", "task": "load", **({} if "partitions" in fields else DAYS), **fields}
    return new_backfill.checked({name: value for name, value in given.items() if value is not None})


def test_templates_fill_args_keys_and_priority_of_each_job_which_names_the_limit_of_its_backfill() -> None:
    new = checked(args={"day": "{{ date }}"}, lock_key="x{{ day }}", partition_key="p{{place}}", priority="{{ year }}")
    job = new_backfill.job_of(new, "2019-01-02", 2, ["cbr"])
    assert (job["args"], job["lock_key"], job["partition_key"]) == ({"day": "2019-01-02"}, "x2", "p2")
    assert (job["priority"], job["limits"], job["producer"]) == (2019, ["cbr", "backfill:b"], "backfill b")
    plain = new_backfill.job_of(checked(limits=["own"]), "2019-01-02", 2, ["cbr"])
    assert (plain["lock_key"], plain["partition_key"], plain["priority"]) == ("load:2019-01-02", "2019-01-02", 200)
    assert plain["limits"] == ["own", "backfill:b"], "the producer's instead of the pipeline's"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"since": "2019-13-01"}, "since should be a date such as 2019-01-31"),
        ({"until": "soon"}, "until should be a date such as 2019-01-31"),
        ({"until": "7"}, "should both be whole numbers, or both dates"),
        ({"since": "2019-01-04"}, "since should not be behind until"),
        ({"step": "fortnight"}, "step should be such as day, 6 hours"),
        ({"step": "0 days"}, "step should be such as day"),
        ({"since": "0", "until": "5"}, "step should be a whole number from 1 on"),
        ({"since": "0", "until": "5", "step": "0"}, "step should be a whole number from 1 on"),
        ({"since": "2019-01-31", "until": "2020-01-02", "step": "month"}, "a day from 1 to 28"),
        ({"since": "0", "until": "200000", "step": "1"}, "at most 200,000 partitions: choose a longer step"),
        ({"step": None}, "a range should have since, until and step: step is missing"),
        ({"partitions": ["a"], "since": "1"}, "should have one of a range .* and partitions"),
        ({"partitions": []}, "partitions: List should have at least 1 item"),
        ({"partitions": ["a", "b", "a"]}, "each partition once: 'a' comes 2 times"),
        ({"partitions": ["a\nb"]}, "no control characters"),
        ({"partitions": ["a"], "args": {"x": "{{ date }}"}}, "{{ date }} is not known; known are {{ partition }}"),
        ({"priority": "{{ partition }}"}, "priority should become a whole number"),
        ({"name": "a/b"}, "name: should be letters of A to Z"),
        ({"limits": [str(n) for n in range(8)]}, "limits should be at most 7, for one is the backfill's own"),
    ],
)
def test_a_backfill_that_is_not_valid_is_refused_with_what_would_be_right(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked(**fields)


def test_the_fingerprint_tells_task_version_and_args_and_nothing_else() -> None:
    new = checked(code_version="1")
    same = new_backfill.fingerprint(new, {"a": 1, "b": {"c": 2, "d": 3}})
    assert same == new_backfill.fingerprint(new | {"name": "other"}, {"b": {"d": 3, "c": 2}, "a": 1})
    assert same != new_backfill.fingerprint(new | {"code_version": "2"}, {"a": 1, "b": {"c": 2, "d": 3}})
    assert same != new_backfill.fingerprint(new | {"task": "t"}, {"a": 1, "b": {"c": 2, "d": 3}})
    assert same != new_backfill.fingerprint(new, {"a": 1})


@pytest.mark.parametrize(
    ("made", "counts", "is_paused", "is_canceled", "expected"),
    [
        (5, {"missing": 5}, False, False, "making"),
        (10, {"queued": 1}, False, False, "running"),
        (10, {"running": 1}, False, False, "running"),
        (10, {"succeeded": 9, "failed": 1}, False, False, "done"),
        (10, {"queued": 1}, True, False, "paused"),
        (5, {}, True, False, "paused"),
        (10, {"succeeded": 10}, True, False, "done"),
        (10, {"canceled": 10}, False, True, "canceled"),
    ],
)
def test_the_state_of_a_backfill(
    made: int, counts: dict[str, int], is_paused: bool, is_canceled: bool, expected: str
) -> None:
    assert partitions.state(10, made, counts, is_paused, is_canceled) == expected


def test_the_time_left_goes_by_the_pace_of_lately() -> None:
    assert partitions.eta_sec(100, 10, 60) == 600
    assert partitions.eta_sec(100, 0, 60) is None
    assert partitions.eta_sec(100, 1, 0) is None


FACTS = {"due": "2026-03-02T03:00:00+03:00", "year": 2026, "none": None, "names": ["a", 1]}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("{{ due }}", FACTS["due"]),
        ("{{year}}", 2026),
        ("{{ none }}", None),
        ("{{ names }}", ["a", 1]),
        ("year {{ year }}, due {{due}}", "year 2026, due 2026-03-02T03:00:00+03:00"),
        ("{{ year }}{{ year }}", "20262026"),
        ("{{ names }} and {{ none }}", '["a", 1] and null'),
        ({"{{ year }}": [{"deep": "{{ year }}"}, 5, True, None]}, {"{{ year }}": [{"deep": 2026}, 5, True, None]}),
        ("no { place } }}", "no { place } }}"),
    ],
)
def test_a_place_is_filled(value: Any, found: Any) -> None:
    assert filled(value, FACTS) == found
    assert filled_text("{{ year }}", FACTS) == "2026", "a text stays one"


@pytest.mark.parametrize("text", ["{{ dew }}", "a {{ dew }} b", "{{ }}", "{{ due.year }}"])
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not known; known are \{\{ due \}\}, \{\{ year \}\}"):
        filled([text], FACTS)
