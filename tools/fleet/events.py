"""Events of a fleet under load: an upgrade host by host, the loss of a host, its return with an old clock."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from farming import until

from dataloader.queue.enqueue import NewJob, enqueue

from .load import Load
from .site import QUEUE, Code, Host, Site, migrated

RUN_SEC = 0.3
LEASE = 6  # seconds
REAPER_PERIOD = 2.0
RESERVE = 20.0  # for slow machines: what is promised is the lease and one period of the reaper
OLD_CLOCK = "-3d"
LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


@dataclass
class Verdict:
    """The figures of a run, and the promises that it broke."""

    facts: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def expect(self, name: str, found: Any, wanted: Any) -> None:
        """Note a figure that has to be this one."""
        self.facts[name] = found
        if found != wanted:
            self.broken.append(f"{name}: {found}, not {wanted}")

    def bound(self, name: str, found: float, most: float) -> None:
        """Note a figure that has a bound."""
        self.facts[name] = round(found, 3)
        if found > most:
            self.broken.append(f"{name}: {found:.3f}, more than {most}")


def judge(site: Site, load: Load, verdict: Verdict) -> None:
    """Every acknowledged job has succeeded, and has written once."""
    ids = load.acknowledged
    by_status = dict(site.rows("SELECT status::text, count(*) FROM dl_jobs WHERE job_id = ANY (%s) GROUP BY 1", ids))
    written = site.rows("SELECT count(*) FROM ledger WHERE job_id = ANY (%s) GROUP BY job_id", ids)
    verdict.facts["acknowledged"] = len(ids)
    verdict.expect("lost", len(ids) - by_status.get("succeeded", 0), 0)
    verdict.expect("never written", len(ids) - len(written), 0)
    verdict.expect("written twice", sum(count > 1 for (count,) in written), 0)
    verdict.facts["trigger to claim; p50 / p95 / p99 / longest, ms"] = load.waits().told()
    verdict.facts["longest trigger, ms"] = round(load.longest * 1_000, 1)
    verdict.facts["warnings and errors in logs"] = dict(
        Counter(each for host in site.hosts for each in host.troubles())
    )


# --- upgrade ---


def upgrade(site: Site, hosts: int, workers: int, rate: float, old: Code, new: Code) -> Verdict:
    """Migrate, then drain and start each host in turn, while jobs come."""
    verdict, began = Verdict(), time.monotonic()
    for _ in range(hosts):
        _up(site.add_host(workers), old, len(site.hosts))
    site.await_workers(hosts * workers)
    load = Load(site, rate, "fleet.ledger", args={"sec": RUN_SEC})
    until(lambda: len(_codes(site)) == 1, "a job by the old code")
    verdict.facts["files that migrate applies"] = len(migrated(site.dsn))
    at = time.monotonic()
    new.migrate(site.dsn)
    verdict.facts["migrate, s"] = round(time.monotonic() - at, 1)
    at = time.monotonic()
    for number, host in enumerate(site.hosts, 1):
        _replace(site, host, workers, new, number, verdict)
    verdict.facts["hosts, s"] = round(time.monotonic() - at, 1)
    since = time.time()
    until(lambda: _codes(site).get("new", 0) > 0 and time.time() > since + 1, "a job by the new code")
    load.stop()
    load.await_end()
    judge(site, load, verdict)
    verdict.facts |= {"hosts": hosts, "workers of each": workers, "triggers/s": rate, "jobs by code": _codes(site)}
    verdict.facts["hosts that worked"] = site.rows("SELECT count(DISTINCT host) FROM ledger")[0][0]
    verdict.expect("attempts", site.rows("SELECT max(attempt) FROM dl_jobs")[0][0], 1)
    verdict.expect("still running old code", _codes_since(site, since).get("old", 0), 0)
    verdict.facts["run, s"] = round(time.monotonic() - began)
    return verdict


def _up(host: Host, code: Code, number: int) -> None:
    host.start("workers", code)
    if number <= 2:
        host.start("reaper", code)
    if number == 1:
        host.start("api", code, app_host="127.0.0.1")


def _replace(site: Site, host: Host, workers: int, code: Code, number: int, verdict: Verdict) -> None:
    for name, program in host.programs.items():
        verdict.expect(f"exit status of {name} on {host.name}", program.stop(), 0)
        del verdict.facts[f"exit status of {name} on {host.name}"]
    gone = site.rows("SELECT count(*) FROM dl_workers WHERE host = %s", host.name)[0][0]
    verdict.expect("workers shown of a drained host", gone, 0)
    _up(host, code, number)
    until(lambda: len(host.programs["workers"].events("worker.started")) >= workers * 2, "workers to start", 120)


def _codes(site: Site) -> dict[str, int]:
    return dict(site.rows("SELECT code, count(*) FROM ledger GROUP BY code"))


def _codes_since(site: Site, since: float) -> dict[str, int]:
    return dict(site.rows("SELECT code, count(*) FROM ledger WHERE at > to_timestamp(%s) GROUP BY code", since))


# --- loss and return ---


def lose(site: Site, hosts: int, workers: int, rate: float, code: Code) -> Verdict:
    """Cut the last host's link, kill what runs there, and start it again with a clock that is three days behind."""
    verdict = Verdict()
    for _ in range(hosts):
        _up(site.add_host(workers, dl_reaper_period_sec=REAPER_PERIOD), code, len(site.hosts))
    site.await_workers(hosts * workers)
    load = Load(site, rate, "fleet.ledger", args={"sec": 2.0}, lease=LEASE)
    lost = site.hosts[-1]
    until(lambda: len(_running_on(site, lost)) >= min(workers, 3), "jobs on the host that will be lost")
    site.cut(lost)
    lost.kill()
    cut_at, held = time.time(), _running_on(site, lost)
    until(lambda: not _running_on(site, lost), "the lost host's jobs to be taken", 60)
    until(lambda: _picked_after(site, held, cut_at)[1] == len(held), "them to start elsewhere", 60)
    verdict.facts["jobs that ran on the lost host"] = len(held)
    verdict.bound(
        "the last of them started elsewhere after, s",
        _picked_after(site, held, cut_at)[0],
        LEASE + REAPER_PERIOD + RESERVE,
    )
    _come_back(site, lost, workers, code, verdict)
    load.stop()
    load.await_end()
    verdict.facts["written before the cut, and again"] = _forgive(site, held, cut_at)
    judge(site, load, verdict)
    verdict.facts |= {"hosts": hosts, "workers of each": workers, "triggers/s": rate, "lease, s": LEASE}
    verdict.facts |= {"reaper's period, s": REAPER_PERIOD}
    return verdict


def _come_back(site: Site, host: Host, workers: int, code: Code, verdict: Verdict) -> None:
    """The host works and reaps with an old clock: jobs of the future start neither early nor late there."""
    if not LIBRARIES:
        verdict.facts["old clock"] = "not tried: libfaketime is not installed"
        return
    site.heal(host)
    lies = {
        "ld_preload": LIBRARIES[0],
        "faketime": OLD_CLOCK,
        "faketime_dont_fake_monotonic": 1,
        "faketime_no_cache": 1,
    }
    before = site.rows("SELECT clock_timestamp()")[0][0]
    for name in ("workers", "reaper"):
        host.start(name, code, **lies)
    until(lambda: len(host.programs["workers"].events("worker.started")) >= workers * 2, "workers to start", 120)
    due = datetime.now(UTC) + timedelta(seconds=2)
    later = [_enqueue_for(site, f"later-{number}", due) for number in range(20)]
    until(lambda: _ended(site, later) == len(later), "the jobs of the future", 60)
    early, late = site.rows(
        "SELECT min(extract(epoch FROM started_at - available_at))::float8,"
        " max(extract(epoch FROM started_at - available_at))::float8 FROM dl_jobs WHERE job_id = ANY (%s)",
        later,
    )[0]
    verdict.bound("earliest start before its time, s", -early, 0)
    verdict.bound("latest start after its time, s", late, RESERVE)
    worked = "SELECT count(*) FROM ledger WHERE host = %s AND at > %s"
    until(lambda: site.rows(worked, host.name, before)[0][0] > 0, "the host to work again")
    verdict.facts["jobs of the host with the old clock"] = site.rows(worked, host.name, before)[0][0]


def _enqueue_for(site: Site, key: str, due: datetime) -> Any:
    return enqueue(site.conn, NewJob(QUEUE, "fleet.ledger", key, {"sec": 0.1}, available_at=due))[0]


def _ended(site: Site, job_ids: list[Any]) -> int:
    return int(
        site.rows("SELECT count(*) FROM dl_jobs WHERE job_id = ANY (%s) AND status = 'succeeded'", job_ids)[0][0]
    )


def _running_on(site: Site, host: Host) -> list[Any]:
    question = "SELECT job_id FROM dl_jobs WHERE status = 'running' AND starts_with(claimed_by, %s)"
    return [job_id for (job_id,) in site.rows(question, f"{host.name}:")]


def _forgive(site: Site, held: list[Any], cut_at: float) -> int:
    """Remove the rows of runs that wrote before the cut and could not say so, where the next run wrote again.

    The fence promises that no run writes once another has the job, and not that a job writes once.
    """
    return site.conn.execute(
        "DELETE FROM ledger first USING ledger next"
        " WHERE first.job_id = ANY (%s) AND first.at <= to_timestamp(%s)"
        "   AND next.job_id = first.job_id AND next.at > to_timestamp(%s)",
        (held, cut_at, cut_at),
    ).rowcount


def _picked_after(site: Site, job_ids: list[Any], at: float) -> tuple[float, int]:
    """Seconds until the last of these jobs was claimed after that instant, and how many of them were."""
    question = (
        "SELECT coalesce(max(extract(epoch FROM ts)), 0)::float8 - %s, count(DISTINCT job_id) FROM dl_job_events"
        " WHERE job_id = ANY (%s) AND kind = 'picked' AND ts > to_timestamp(%s)"
    )
    return (0.0, 0) if not job_ids else site.rows(question, at, job_ids, at)[0]
