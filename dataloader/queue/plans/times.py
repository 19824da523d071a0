"""PURE: when a schedule is due, by cron or by an interval; which due times get a job; what their jobs may name.

By Debian's rules (cronsim): a fixed time comes once, behind a gap of the clocks or the first of two; with a star it
goes by real time. An interval counts from 1970 in UTC, so no restart moves it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from hashlib import sha256
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from dataloader import periods
from dataloader.queue.plans import partitions

LAST, ALL = ("last", "all")  # the values of catch_up, beside none
# A due time without a job is missed after so long: a reaper that starts again is back by then.
GRACE_SEC = periods.seconds("SCHEDULE_GRACE_SEC", 60)
INTERVAL_MOST = 366 * 86_400
CRON = "five fields: minute, hour, day of the month, month, day of the week, such as 0 3 * * MON-FRI"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LOOKS_BACK = (timedelta(hours=1), timedelta(days=2), timedelta(days=70), timedelta(days=800), timedelta(days=18_000))
TICK, _MINUTE, _DAY = timedelta(microseconds=1), timedelta(minutes=1), timedelta(days=1)
_KEY = "schedule:"
_CLOCK = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]", re.ASCII)
_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


@dataclass(frozen=True, slots=True)
class Timing:
    """When a schedule is due: `cron` in the time zone `zone`, or every `interval_sec` seconds."""

    cron: str | None
    interval_sec: int | None
    zone: str


class Choice(NamedTuple):
    """The due times that get a job now, the oldest first, and the next due time; None if there is none."""

    due: list[datetime]
    following: datetime | None


def zone_of(name: str) -> ZoneInfo:
    """The time zone of this name; raises ValueError for any other text."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # an unknown name, no name, a folder of zones
        raise ValueError(f"there is no time zone {name!r}; it should be a name such as Europe/Moscow or UTC") from None


def check_cron(text: str) -> None:
    """Raise ValueError with the valid form, unless `text` is a cron expression with a due time."""
    if len(text.split()) != 5:
        raise ValueError(f"should be {CRON}; shorter times are for interval_sec")
    try:
        next(_simulated(text, _EPOCH))
    except StopIteration:
        raise ValueError(f"should be {CRON}: no day of the next 50 years fits") from None


def after(timing: Timing, at: datetime) -> Iterator[datetime]:
    """The due times behind `at`, from old to new, in UTC; they end where none comes in 50 years."""
    return _by_interval(timing.interval_sec, at) if timing.interval_sec else _by_cron(timing, at)


def first(timing: Timing, at: datetime) -> datetime | None:
    """The first due time behind `at`."""
    return next(after(timing, at), None)


def latest(timing: Timing, until: datetime) -> datetime | None:
    """The last due time that is not behind `until`; None where none came in the 49 years before."""
    for span in _LOOKS_BACK:
        begin = until - max(span, timedelta(seconds=timing.interval_sec or 0))
        due_times = list(takewhile(lambda due: due <= until, after(timing, begin)))
        if due_times:
            return due_times[-1]
    return None


def chosen(timing: Timing, since: datetime, now: datetime, catch_up: str, most: int) -> Choice:
    """The due times from `since` to `now` that get a job: all up to `most`, those of GRACE_SEC, or the latest."""
    if catch_up == ALL:
        due_times = list(islice(chain([since], after(timing, since)), most + 1))
        due = [at for at in due_times[:most] if at <= now]
        return Choice(due, next(iter(due_times[len(due) :]), None))
    grace = timedelta(seconds=GRACE_SEC)
    due = list(takewhile(lambda at: at <= now, after(timing, max(since - TICK, now - grace))))
    if not due and catch_up == LAST and (missed := latest(timing, now)) and missed >= since:
        due = [missed]
    return Choice(due, first(timing, now))


def delay(name: str, due: datetime, jitter_sec: float) -> timedelta:
    """How long after its due time a job may begin: 0 to `jitter_sec` seconds, for each due time always the same."""
    share = int.from_bytes(sha256(key_of(name, due).encode()).digest()[:6]) / 2**48
    return timedelta(seconds=share * jitter_sec)


def key_of(name: str, due: datetime) -> str:
    """The idempotency key of a due time's job."""
    at = due.astimezone(UTC)
    fraction = f".{at:%f}" if at.microsecond else ""
    return f"{_KEY}{name}:{at:%Y%m%dT%H%M%S}{fraction}Z"


def due_of_key(key: str | None) -> tuple[str, datetime] | None:
    """The name of the schedule and the due time in such a key; None for any other."""
    if key is None or not key.startswith(_KEY):
        return None
    name, _, text = key.removeprefix(_KEY).rpartition(":")
    try:
        return name, datetime.fromisoformat(text)
    except ValueError:
        return None


def check_clock(text: str) -> None:
    """Raise ValueError with the valid form, unless `text` is a time of the day."""
    if not _CLOCK.fullmatch(text):
        raise ValueError("should be a time of the day such as 07:00")


def deadline(due: datetime, zone: str, clock: str | None, seconds: int | None) -> datetime | None:
    """When the job of a due time should have ended, in UTC: at the next `clock` in the zone, or `seconds` later."""
    if clock is None:
        return None if seconds is None else due.astimezone(UTC) + timedelta(seconds=seconds)
    local = due.astimezone(zone_of(zone))
    ends = (datetime.combine(local.date() + day * _DAY, time.fromisoformat(clock), local.tzinfo) for day in range(3))
    return next(at for each in ends if (at := each.astimezone(UTC)) > due)


def facts(name: str, timing: Timing, due: datetime, previous: datetime | None) -> dict[str, Any]:
    """The values for `{{ name }}` in the job of a due time; `previous` is the due time before, or None."""
    local = due.astimezone(zone_of(timing.zone))
    return {
        "due": local.isoformat(),
        "due_utc": f"{due.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
        **partitions.facts_of(local),
        "second": local.second,
        "timestamp": int(due.timestamp()),
        "previous_due": previous and previous.astimezone(local.tzinfo).isoformat(),
        "schedule": name,
    }


def words(timing: Timing) -> str:
    """When the schedule is due, for people: `At 03:00 from Monday through Friday, Europe/Moscow`."""
    if timing.interval_sec:
        unit, size = next((unit, size) for unit, size in _UNITS if timing.interval_sec % size == 0)
        times = timing.interval_sec // size
        return f"Every {unit}" if times == 1 else f"Every {times} {unit}s"
    assert timing.cron is not None  # noqa: S101  one of the two is there
    return f"{_simulated(timing.cron, _EPOCH).explain()}, {timing.zone}"


def _simulated(cron: str, at: datetime) -> CronSim:
    """The due times behind `at`; raises ValueError, for a row of another service may hold any text."""
    try:
        return CronSim(cron, at)
    except CronSimError as e:
        raise ValueError(f"should be {CRON}: {str(e).lower()}") from None


def _by_interval(interval_sec: int, at: datetime) -> Iterator[datetime]:
    step = timedelta(seconds=interval_sec)
    due = _EPOCH + (at - _EPOCH) // step * step
    while True:
        due += step
        yield due


def _by_cron(timing: Timing, at: datetime) -> Iterator[datetime]:
    assert timing.cron is not None  # noqa: S101  one of the two is there
    zone, last = zone_of(timing.zone), at
    sim = _simulated(timing.cron, at.astimezone(zone))
    if any(field.startswith("*") for field in timing.cron.split()[:2]):
        yield from _by_real_time(sim, zone, at)
        return
    for local in sim:
        due = local.astimezone(UTC)
        if due > last:  # of a repeated time the first one, also where `at` lies between the two
            yield due
            last = due


def _by_real_time(sim: CronSim, zone: ZoneInfo, at: datetime) -> Iterator[datetime]:
    """Minute by minute: cronsim's own steps of an hour leave times out where the clocks change by half an hour."""
    due = at.astimezone(UTC).replace(second=0, microsecond=0) + _MINUTE
    while due.year <= at.year + 50:
        local = due.astimezone(zone)
        if local.month not in sim.months or not sim.match_day(local.date()):
            due = datetime.combine(local.date() + _DAY, time(), zone).astimezone(UTC)
            continue
        if local.hour not in sim.hours:
            due += (15 - local.minute % 15) * _MINUTE  # no zone changes its clocks between two quarters of an hour
            continue
        if local.minute in sim.minutes:
            yield due
        due += _MINUTE
