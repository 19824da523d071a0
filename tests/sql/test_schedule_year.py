"""A year of schedules in three zones, with three reapers, restarts and a clock that jumps: each due time once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import psycopg
import pytest

from dataloader.queue import db
from dataloader.queue.plans import new_schedule, schedules, times

BEGIN, END = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
ZONES = ("Europe/Moscow", "America/New_York", "Australia/Lord_Howe")
CRONS = {"fixed": "15 2 * * *", "real": "*/30 1-2 * * *"}
CASES = [
    *((zone, "fixed", catch_up) for zone in ZONES for catch_up in ("all", "last")),
    *((zone, "real", "all") for zone in ZONES),
    ("Europe/Moscow", "real", "none"),
]
MINUTE = timedelta(minutes=1)
pytestmark = pytest.mark.slow


def fixed_times(zone: ZoneInfo) -> Iterator[datetime]:
    """02:15 of each day: of a repeated one the first, of a skipped one the first moment behind the gap."""
    for number in range(-1, 367):
        wall = datetime.combine(date(2026, 1, 1) + timedelta(days=number), time(2, 15))
        while wall.replace(tzinfo=zone).astimezone(UTC).astimezone(zone).replace(tzinfo=None) != wall:
            wall += MINUTE
        yield wall.replace(tzinfo=zone).astimezone(UTC)


def real_times(zone: ZoneInfo) -> Iterator[datetime]:
    """Each half hour of the clock on the wall from 1 to 3, as often as it shows it."""
    at = BEGIN - timedelta(days=1)
    while at < END + timedelta(days=1):
        here = at.astimezone(zone)
        if here.hour in (1, 2) and here.minute % 30 == 0:
            yield at
        at += timedelta(minutes=30)


def clock(rng: random.Random) -> Iterator[datetime]:
    """The year as reapers see it: most often soon behind each other, with outages, and with jumps there and back."""
    now = BEGIN
    while now < END:
        yield now
        if rng.random() < 0.03:
            yield now + timedelta(hours=rng.uniform(1, 60))  # it jumps ahead, and is set right again
        if rng.random() < 0.03:
            yield now - timedelta(hours=rng.uniform(1, 60))
        half_hour = 30 * MINUTE
        now += rng.choice([rng.uniform(1, 2_500) * MINUTE, half_hour - (now - BEGIN) % half_hour])
        if rng.random() < 0.02:
            now += timedelta(hours=rng.uniform(5, 100))  # no reaper runs


def expected(due: list[datetime], nows: list[datetime], catch_up: str) -> list[datetime]:
    """The due times that get a job when reapers look at these instants."""
    found: list[datetime] = []
    left = [at for at in due if at > BEGIN]
    for now in nows:
        come = [at for at in left if at <= now]
        left = left[len(come) :]
        in_time = [at for at in come if now - at < timedelta(seconds=times.GRACE_SEC)]
        found += {"all": come, "last": in_time or come[-1:], "none": in_time}[catch_up]
    return found


class Reaper:
    """A session that ticks, and another one when it is killed."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.restarts = -1
        self._connect()

    def _connect(self) -> None:
        self.conn = db.connect(self._dsn, name="reaper", schema="public")
        self.pid = self.conn.info.backend_pid
        self.restarts += 1

    def look(self, now: datetime) -> None:
        try:
            assert [made.error for made in schedules.tick(self.conn, now=now) if made.error] == []
        except psycopg.OperationalError:
            self.conn.close()
            self._connect()
            self.look(now)


@pytest.mark.timeout(900)
def test_each_due_time_of_a_year_has_one_job_by_the_rules_of_catch_up(dsn: str, conn: db.Connection) -> None:
    rng = random.Random(20_260_329)
    nows = list(clock(rng))
    wanted = {}
    for zone, kind, catch_up in CASES:
        due = sorted({"fixed": fixed_times, "real": real_times}[kind](ZoneInfo(zone)))
        name = f"{zone.replace('/', '.')}-{kind}-{catch_up}"
        words = {"name": name, "task": "t", "cron": CRONS[kind], "timezone": zone, "catch_up": catch_up}
        schedules.add(conn, new_schedule.checked(words, "UTC"), "me")
        first = next(at for at in due if at > BEGIN)
        conn.execute("UPDATE dl_schedules SET next_due = %s WHERE name = %s", (first, name))
        wanted[name] = expected(due, nows, catch_up)

    reapers = [Reaper(dsn) for _ in range(3)]
    with ThreadPoolExecutor(len(reapers)) as pool:
        for now in nows:
            looks = [pool.submit(reaper.look, now) for reaper in reapers]
            if rng.random() < 0.02:
                conn.execute("SELECT pg_terminate_backend(%s)", (rng.choice(reapers).pid,))
            if failed := [error for look in looks if (error := look.exception())]:
                break
    for reaper in reapers:
        reaper.conn.close()
    assert not failed

    rows = conn.execute("SELECT idempotency_key FROM dl_jobs JOIN dl_job_events USING (job_id) WHERE kind = 'queued'")
    made = Counter(found for (key,) in rows if (found := times.of_key(key)))
    assert set(made.values()) == {1}
    for name, due_times in wanted.items():
        assert sorted(at for schedule, at in made if schedule == name) == due_times, name
    assert sum(reaper.restarts for reaper in reapers) > 5
    assert len(wanted["America.New_York-fixed-all"]) == 365
    assert len(wanted["America.New_York-real-all"]) == 365 * 4 - 2 + 2, "a gap of an hour, and an hour twice"
    assert 0 < len(wanted["Europe.Moscow-fixed-last"]) < 365
    assert 0 < len(wanted["Europe.Moscow-real-none"]) < 365 * 4
