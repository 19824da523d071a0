"""Clocks lie: a host's is hours ahead, or jumps while a job runs. All times are the database's (faults F1, F2)."""

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from farming import Farm, LongJob, farm_on, until
from servers import root, serving
from test_database_faults import goes_on

from dataloader import embedded
from dataloader.queue import lifecycle, migrations

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
pytestmark = pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not installed (Debian: apt-get install faketime)")


def lied_to(**settings: Any) -> dict[str, Any]:
    """Settings of a program whose wall clock is what FAKETIME says; its monotonic clock is left alone."""
    return {"ld_preload": LIBRARIES[0], "faketime_dont_fake_monotonic": 1, "faketime_no_cache": 1, **settings}


@pytest.mark.parametrize("ahead", ["+2h", "-2h"])
def test_f1_a_host_whose_clock_is_wrong_neither_takes_nor_delays_jobs(farm: Farm, ahead: str) -> None:
    """A live lease is not reaped, a job of the future does not start early, stamps are the database's."""
    farm.ready(workers=1)
    reaper = farm.start("reaper", **lied_to(faketime=ahead))
    held = farm.enqueue("recorded", args={"sec": 4}, lease_ttl_sec=3)
    farm.begun(held)
    farm.ready(workers=1, queue="lied_to", **lied_to(faketime=ahead))
    due = datetime.now(UTC) + timedelta(seconds=2)
    later = farm.enqueue("recorded", "lied_to", available_at=due)
    farm.succeeds(later, held)
    [(early, late)] = farm.rows(
        "SELECT started_at - available_at, clock_timestamp() - started_at FROM dl_jobs WHERE job_id = %s", later
    )
    assert 0 <= early.total_seconds() < 60
    assert 0 <= late.total_seconds() < 60
    assert reaper.stop() == 0
    assert is_of_clock(datetime.fromisoformat(reaper.events("reaper.started")[0]["timestamp"]), ahead)


def is_of_clock(time: datetime, ahead: str) -> bool:
    """Whether a clock that is so far ahead, as +2h, has shown this time a moment ago."""
    return abs(time - datetime.now(UTC) - timedelta(hours=int(ahead[:2]))) < timedelta(minutes=10)


def test_f2_a_clock_that_jumps_during_a_run_ends_and_starts_nothing(farm: Farm, tmp_path: Path) -> None:
    """Hours forwards, then backwards, in farm and reaper: leases, timeouts, drains and sleeps go by another clock."""
    offset = tmp_path / "offset"
    offset.write_text("+0\n")
    program = farm.ready(workers=2, **lied_to(faketime_timestamp_file=offset))
    farm.start("reaper", **lied_to(faketime_timestamp_file=offset))
    job = LongJob(farm, lease_ttl_sec=3, timeout_sec=3_600)
    for jump in ("+5h", "-5h"):
        offset.write_text(f"{jump}\n")
        asked = farm.enqueue("tells_the_time")
        farm.succeeds(asked)
        assert is_of_clock(datetime.fromtimestamp(farm.job(asked)["progress"]["now"], UTC), jump)
        before = beats(farm)
        until(lambda before=before: beats(farm) > before, "a heartbeat behind the jump")
    job.ends_well()
    assert farm.story(job.job_id) == ["queued", "picked", "done"]
    assert lifecycle.reap(farm.conn) is None
    assert program.stop() == 0


def a_clock_for_servers(folder: Path) -> Path:
    """The compiled lying_clock.c, where the server's account may read it."""
    library = folder / "lying_clock.so"
    source = Path(__file__).with_name("lying_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


def beats(farm: Farm) -> Any:
    """The latest sign of life of a running job."""
    return farm.rows("SELECT max(heartbeat_at) FROM dl_jobs WHERE status = 'running'")[0][0]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (Debian: apt-get install gcc libc6-dev)")
def test_f2_a_jump_of_the_databases_clock_ends_no_living_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour, forwards: every lease looks expired at once, and the reaper waits until the living have renewed."""
    with root() as folder:
        offset = folder / "offset"
        offset.write_text("+0\n")
        lies = {"LD_PRELOAD": str(a_clock_for_servers(folder)), "LYING_CLOCK": str(offset)}
        monkeypatch.setattr(embedded, "ENVIRONMENT", embedded.ENVIRONMENT | lies)
        with serving(folder) as database:
            migrations.migrate(database.dsn, schema="public")
            with farm_on(database.dsn, tmp_path) as farm:
                farm.ready(workers=4)
                reaper = farm.reaper(dl_reaper_period_sec=0.1)
                jobs = [LongJob(farm, f"job-{n}", lease_ttl_sec=6, max_attempts=1) for n in range(4)]
                offset.write_text("+3600\n")
                for job in jobs:
                    goes_on(farm, job, beats=1)
                for job in jobs:
                    job.ends_well()
                assert reaper.events("reaper.patient")
                (jumped,) = reaper.events("reaper.clock.jumped")
                assert 3_590 < jumped["forwards_sec"] < 3_610
                assert not reaper.events("reaper.job.taken")
