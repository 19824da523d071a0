"""PURE: the partitions of a backfill, as texts, and what the job of each may name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from dataloader.model.kinds import PARTITION_STATES

STATUSES = PARTITION_STATES
SPAN = ("since", "until", "step")
MOST = 200_000  # of one backfill
LONGEST = 150  # characters: the idempotency key of the job holds it, and the name of the backfill
# The defaults of a job of a backfill: it runs after the jobs of others.
OF_JOBS = {"priority": 200, "lock_key": "{{ task }}:{{ partition }}", "partition_key": "{{ partition }}"}
STEPS = "such as day, 6 hours, 15 minutes, week, month, year; of whole numbers a number"
_STEP = re.compile(r"(?:([1-9]\d{0,5}) ?)?(minute|min|hour|h|day|d|week|month|year)s?")
_MONTHS = {"month": 1, "year": 12}
_SPANS = {"minute": 60, "min": 60, "hour": 3_600, "h": 3_600, "day": 86_400, "d": 86_400, "week": 604_800}  # seconds
_NUMBER = re.compile(r"-?\d{1,18}")
_MOMENT = re.compile(r"\d{4}-\d\d(-\d\d([T ]\d\d:\d\d(:00)?)?)?")
_SAFE_DAY = 28  # every month has it


def limit_of(backfill: str) -> str:
    """The limit that every job of this backfill names."""
    return f"backfill:{backfill}"


class Step(NamedTuple):
    """From one partition to the next: so many whole numbers, or so many months, or a span of time."""

    number: int = 0
    months: int = 0
    span: timedelta = timedelta()

    def from_(self, begin: int | datetime, count: int = 1) -> int | datetime:
        """The begin of the partition so many steps later; raises ValueError after the year 9999."""
        if isinstance(begin, int):
            return begin + count * self.number
        try:
            months = begin.month - 1 + count * self.months
            return begin.replace(year=begin.year + months // 12, month=months % 12 + 1) + count * self.span
        except OverflowError:
            raise ValueError("the range should end before the year 9999") from None


def partitions_between(since: str, until: str, step: str) -> list[str]:
    """The partitions of a range; raises ValueError with the valid form."""
    begin, last = _bound(since, "since"), _bound(until, "until")
    if isinstance(begin, int) is not isinstance(last, int):
        raise ValueError("since and until should both be whole numbers, or both dates such as 2019-01-31")
    parsed = step_of(step, isinstance(begin, int))
    if parsed.months and isinstance(begin, datetime) and begin.day > _SAFE_DAY:
        raise ValueError(f"since should be a day from 1 to {_SAFE_DAY} of a month, where the step is a month or a year")
    if begin > last:  # type: ignore[operator]
        raise ValueError(f"since should not be behind until: {since} is behind {until}")
    is_day = isinstance(begin, datetime) and not parsed.span % timedelta(days=1) and begin.hour == begin.minute == 0
    texts, at = list[str](), begin
    while at <= last:  # type: ignore[operator]
        if len(texts) == MOST:
            raise ValueError(
                f"a backfill should have at most {MOST:,} partitions: choose a longer step, or two backfills"
            )
        texts.append(_text(at, is_day))
        try:
            at = parsed.from_(begin, len(texts))
        except ValueError:  # the year 9999 was the last
            break
    return texts


def _text(at: int | datetime, is_day: bool) -> str:
    return str(at) if isinstance(at, int) else f"{at:%Y-%m-%d}" if is_day else f"{at:%Y-%m-%dT%H:%M}"


def step_of(text: str, is_number: bool) -> Step:
    """The step of this text; raises ValueError with the valid form."""
    if is_number:
        if not re.fullmatch(r"[1-9]\d{0,17}", text):
            raise ValueError(f"step should be a whole number from 1 on, as since and until are, not {text!r}")
        return Step(number=int(text))
    if not (match := _STEP.fullmatch(text.strip())):
        raise ValueError(f"step should be {STEPS}, not {text!r}")
    count, unit = int(match[1] or 1), match[2]
    return Step(months=count * _MONTHS[unit]) if unit in _MONTHS else Step(span=count * timedelta(seconds=_SPANS[unit]))


def facts(partition: str, place: int, backfill: str, task: str, span: Mapping[str, str] | None) -> dict[str, Any]:
    """The values for `{{ name }}` in the job of a partition; `place` counts from 1, `span` is that of the range."""
    values: dict[str, Any] = {"partition": partition, "place": place, "backfill": backfill, "task": task}
    at = _parsed(partition)
    if isinstance(at, datetime):
        values |= facts_of(at)
    if span and at is not None:
        end = step_of(span["step"], isinstance(at, int)).from_(at)
        begin = at if isinstance(at, int) else partition
        values |= {
            "begin": begin,
            "end": end if isinstance(end, int) else _text(end, len(partition) == len("2019-01-31")),
        }
    return values


def facts_of(at: datetime) -> dict[str, Any]:
    """The parts of a moment as the jobs of backfills and schedules may name them."""
    parts = {name: getattr(at, name) for name in ("year", "month", "day", "hour", "minute")}
    return {"date": f"{at:%Y-%m-%d}", "time": f"{at:%H:%M:%S}", **parts, "weekday": at.isoweekday()}


def _bound(text: str, name: str) -> int | datetime:
    bound = _parsed(text)
    if bound is None:
        raise ValueError(
            f"{name} should be a date such as 2019-01-31, a time such as 2019-01-31T06:00, or a whole number"
        )
    return bound


def _parsed(text: str) -> int | datetime | None:
    """The whole number or the instant of a text; None where it is neither."""
    if _NUMBER.fullmatch(text):
        return int(text)
    if not _MOMENT.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text if len(text) > len("2019-01") else f"{text}-01")
    except ValueError:
        return None


def moment(partition: str) -> datetime | None:
    """The instant that a partition names; None where it names none."""
    parsed = _parsed(partition)
    return parsed if isinstance(parsed, datetime) else None


def eta_sec(left: int, ended_lately: int, lately_sec: float) -> float | None:
    """The seconds until the open partitions will end, at the recent pace; None if that is not known."""
    return left * lately_sec / ended_lately if ended_lately and lately_sec > 0 else None


def state(total: int, made: int, counts: Mapping[str, int], is_paused: bool, is_canceled: bool) -> str:
    """The first state that applies: `canceled`, `paused`, `done` (all have ended), `making` or `running`."""
    is_over = made == total and not counts.get("queued") and not counts.get("running")
    if is_canceled:
        return "canceled"
    if is_over:
        return "done"
    return "paused" if is_paused else "making" if made < total else "running"
