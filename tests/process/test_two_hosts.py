"""Two hosts on one queue: they share the jobs, keys exclude across them, and one of them is lost and comes back."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from uuid import UUID

import pytest
from farming import Farm, Program, farm_on, until
from judge import OVERLAPS, illegal
from namespaces import inside, ip, obstacle, remove, space, sweep

from dataloader import embedded
from dataloader.queue import migrations

LEASE = 4  # seconds
REAPER_PERIOD = 1.0
RESERVE = 30.0  # for slow machines: what is promised is the lease and one period of the reaper
NOBODY = "02:00:00:00:00:99"  # a hardware address that no interface has


class Networks:
    """A link of each host to `db`, where PostgreSQL listens. No interface of this machine is touched."""

    # The database's end, and the host's.
    LINKS: ClassVar = {"a": ("192.0.2.1", "192.0.2.2"), "b": ("192.0.2.5", "192.0.2.6")}

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        for name in ("db", *self.LINKS):
            stack.callback(remove, space(name))
            ip("netns", "add", space(name))
        for name in self.LINKS:
            self._connect(name)
        hba = folder / "hba.conf"
        hba.write_text("local all all trust\nhost all all 192.0.2.0/24 trust\n")
        hba.chmod(0o644)
        settings = {"fsync": "off", "listen_addresses": "*", "hba_file": str(hba), "logging_collector": "off"}
        with self.inside("db"):
            given = os.environ.get("DL_PG_BIN")
            server = embedded.Server.start(folder, settings, Path(given) if given else None, initdb=["--no-sync"])
        stack.callback(server.stop)
        self.admin_dsn = server.dsn
        migrations.migrate(server.dsn, schema="public")

    def dsn(self, name: str) -> str:
        return f"host={self.LINKS[name][0]} port=5432 user=dataloader dbname=postgres"

    def inside(self, name: str) -> AbstractContextManager[None]:
        return inside(name)

    def lose(self, host: Host) -> None:
        """Cut the link: both ends send to nobody, and neither hears of it."""
        for here, device, peer in self._ends(host.name):
            ip("-n", space(here), "neigh", "replace", peer, "lladdr", NOBODY, "dev", device, "nud", "permanent")

    def bring_back(self, host: Host) -> None:
        """Heal the link."""
        for here, device, peer in self._ends(host.name):
            ip("-n", space(here), "neigh", "del", peer, "dev", device)

    def _ends(self, name: str) -> list[tuple[str, str, str]]:
        """Both ends of a host's link: whose it is, its interface, the other end's address."""
        database, host = self.LINKS[name]
        return [(name, "eth0", database), ("db", f"to-{name}", host)]

    def _connect(self, name: str) -> None:
        to_host = f"to-{name}"
        ip("-n", space(name), "link", "add", "eth0", "type", "veth", "peer", to_host, "netns", space("db"))
        for (here, device, _), address in zip(self._ends(name), reversed(self.LINKS[name]), strict=True):
            ip("-n", space(here), "addr", "add", f"{address}/30", "dev", device)
            ip("-n", space(here), "link", "set", "dev", device, "up")


@dataclass
class Host:
    """The workers and the reaper of one host."""

    name: str
    workers: Program
    reaper: Program

    def has_run(self, farm: Farm, job: UUID) -> bool:
        return runs_by(farm, job)[-1] in {event["worker"] for event in self.workers.events("worker.started")}

    def is_rid_of(self, farm: Farm, job: UUID) -> bool:
        """True when the worker of the job's first run, one of this host's, has said so or has ended."""
        ended = {event["worker"] for event in self.workers.events("supervisor.worker.exited")}
        heard = {event["job_id"] for event in self.workers.events("worker.ownership.lost")}
        return runs_by(farm, job)[0] in ended or str(job) in heard


def runs_by(farm: Farm, job: UUID) -> list[str]:
    return [payload["worker"] for kind, payload in farm.journal(job) if kind == "picked"]


@dataclass
class Site:
    place: Networks
    farm: Farm

    def host(self, name: str, workers: int) -> Host:
        settings = {"dl_reaper_period_sec": REAPER_PERIOD, "pg_connect_timeout": 2, "dl_db_dsn": self.place.dsn(name)}
        with self.place.inside(name):
            return Host(name, self.farm.ready(workers=workers, **settings), self.farm.reaper(**settings))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A network for each host, and a server of its own that both reach over TCP."""
    if why := obstacle():
        pytest.skip(why)
    sweep()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dl-test-"))  # what a killed run leaves, the next one removes
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        place = Networks(folder, stack)
        farm = stack.enter_context(farm_on(place.admin_dsn, tmp_path))
        farm.executes = True  # a forked program would be in the network of the fork server
        yield Site(place, farm)


def test_two_hosts_share_the_jobs_and_keys_exclude_across_them(site: Site) -> None:
    a, b = site.host("a", workers=2), site.host("b", workers=2)
    farm = site.farm
    jobs = [farm.enqueue("recorded", lock_key=f"k{n % 6}", args={"sec": 0.05}) for n in range(60)]
    for job in jobs:
        farm.succeeds(job)
    by_a, by_b = ([job for job in jobs if host.has_run(farm, job)] for host in (a, b))
    assert len(by_a) + len(by_b) == len(jobs)
    assert by_a, "the first has worked"
    assert by_b, "the second has worked"
    assert farm.rows("SELECT count(*), count(DISTINCT job_id), count(ended) FROM runs") == [(60, 60, 60)]
    assert farm.rows(OVERLAPS) == []


def test_h1_a_lost_hosts_jobs_run_on_the_other_and_its_late_ends_change_nothing(site: Site, tmp_path: Path) -> None:
    """Three runs are lost: one stops itself, one would not, and one comes to its end while it is lost."""
    farm, place = site.farm, site.place
    never, done, go = str(tmp_path / "never"), tmp_path / "done", tmp_path / "go"
    a = site.host("a", workers=3)

    def enqueue(name: str, task: str, first_until: Path | str) -> UUID:
        args = {"file": str(tmp_path / name), "until": [str(first_until), str(go)]}
        return farm.enqueue(task, lock_key=name, lease_ttl_sec=LEASE, args=args)

    obedient = enqueue("obedient", "diary", never)
    stubborn = enqueue("stubborn", "stubborn_diary", never)
    late = enqueue("late", "diary", done)
    jobs = (obedient, stubborn, late)
    for job in jobs:
        until(lambda job=job: "heartbeat" in [kind for kind, _ in farm.journal(job)], "a first renewal")
    b = site.host("b", workers=3)

    place.lose(a)
    (lost_at,) = farm.rows("SELECT clock_timestamp()")[0]
    done.touch()
    for job in jobs:
        until(lambda job=job: farm.job(job)["attempt"] == 2, "the job to run on the other host")
        assert b.has_run(farm, job)
        (picked_at,) = farm.rows("SELECT max(ts) FROM dl_job_events WHERE job_id = %s AND kind = 'picked'", job)[0]
        assert (picked_at - lost_at).total_seconds() < LEASE + REAPER_PERIOD + RESERVE
    for name in ("obedient", "stubborn", "late"):
        first, second = until(lambda name=name: times(tmp_path / name))
        assert first[-1] < second[0], f"{name}: the lost run was over before the other began"

    place.bring_back(a)
    for job in jobs:
        until(lambda job=job: a.is_rid_of(farm, job), "the lost host to learn that the job is not its any more")
    lost = a.workers.events("worker.ownership.lost")
    assert str(late) in [event["job_id"] for event in lost if event.get("verb") == "succeed"]
    for job in jobs:
        assert (farm.job(job)["status"], farm.job(job)["attempt"]) == ("running", 2)
        assert b.has_run(farm, job)
    go.touch()
    for job in jobs:
        assert farm.wait(job, "succeeded")["attempt"] == 2
        assert farm.story(job) == ["queued", "picked", "requeue", "picked", "done"]
        assert illegal([kind for kind, _ in farm.journal(job)], "succeeded") is None

    assert b.workers.stop() == 0
    again = farm.enqueue("noop", lock_key="obedient")
    assert farm.wait(again, "succeeded")["attempt"] == 1
    assert a.has_run(farm, again), "the host that was lost works again, and the key is free"
    assert a.workers.stop() == 0
    farm.no_sessions("dl-worker")


def times(file: Path) -> tuple[list[float], list[float]] | None:
    """When the first and the second attempt noted a step; None before the second has."""
    lines = [line.split() for line in file.read_text().splitlines()]
    first, second = ([float(at) for attempt, at in lines if attempt == number] for number in ("1", "2"))
    return (first, second) if second else None
