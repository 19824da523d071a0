"""The cost of a growing fleet for its primary, in a table: a column for each size."""

from __future__ import annotations

import time
from statistics import median

from farming import until
from rich.table import Table

from .load import Load
from .site import Code, Host, Site
from .usage import cpu_sec, pss_mb, tree

RATES = (20, 100, 200)
RUN_SEC = 0.02
PAGES = ("/", "/workers", "/metrics")
REAPERS = 2

Column = dict[str, str]


def measure(site: Site, sizes: list[int], workers: int, code: Code, seconds: float) -> Table:
    """Grow the fleet to each of these sizes, and measure at each."""
    columns = []
    for size in sizes:
        began = time.monotonic()
        _grow(site, size, workers, code)
        site.await_workers(size * workers)
        up_sec = time.monotonic() - began
        columns.append({"hosts": f"{size}", "workers": f"{size * workers:,}", "start, s": f"{up_sec:.0f}"})
        columns[-1] |= _of_size(site, seconds)
        print(columns[-1], flush=True)
    return _table(columns)


def _grow(site: Site, size: int, workers: int, code: Code) -> None:
    while len(site.hosts) < size:
        host = site.add_host(workers)
        host.start("workers", code)
        if len(site.hosts) <= REAPERS:
            host.start("reaper", code)
        if len(site.hosts) == 1:
            host.start("api", code, app_host="127.0.0.1")


def _of_size(site: Site, seconds: float) -> Column:
    time.sleep(3)
    found = _sessions(site) | _memory(site)
    found["idle: server, hosts; cores"] = _used(site, seconds)
    for rate in RATES:
        load = Load(site, rate, "fleet.light", args={"sec": RUN_SEC})
        until(lambda load=load: load.acknowledged, "a first trigger")
        found[f"{rate} triggers/s: server, hosts; cores"] = _used(site, seconds)
        load.stop()
        load.await_end()
        found[f"{rate}/s: triggers made"] = f"{load.made_a_sec:.0f}/s"
        found[f"{rate}/s: trigger to claim; p50 / p95 / p99 / longest, ms"] = load.waits().told()
    for page in PAGES:
        found[f"GET {page}, ms"] = f"{_timed(site.hosts[0], page):,.0f}"
    return found


def _sessions(site: Site) -> Column:
    found = [f"{site.sessions(name):,}" for name in ("dl-", "dl-worker", "dl-keeper")]
    return {"sessions: all, workers', keepers'": ", ".join(found)}


def _memory(site: Site) -> Column:
    server, host = tree(site.server.process.pid), tree(site.hosts[0].programs["workers"].process.pid)
    mb = pss_mb(server)
    return {
        "server's memory, MB; a process": f"{mb:,.0f}; {mb / len(server):.1f}",
        "memory of a host's workers, MB": f"{pss_mb(host):,.0f}",
    }


def _used(site: Site, seconds: float) -> str:
    """Cores that the server uses, and all hosts. To read the counters of 2,000 processes takes a second or more."""
    groups = [tree(site.server.process.pid), [pid for host in site.hosts for pid in host.processes()]]
    before = [(time.monotonic(), cpu_sec(group)) for group in groups]
    time.sleep(seconds)
    after = [(time.monotonic(), cpu_sec(group)) for group in groups]
    used = [(cpu - was) / (at - since) for (at, cpu), (since, was) in zip(after, before, strict=True)]
    return ", ".join(f"{cores:.3f}" for cores in used)


def _timed(host: Host, path: str) -> float:
    taken = []
    for _ in range(5):
        began = time.monotonic()
        host.get(path)
        taken.append((time.monotonic() - began) * 1_000)
    return median(taken)


def _table(columns: list[Column]) -> Table:
    shown = Table(show_header=False)
    for name in columns[0]:
        shown.add_row(name, *(column[name] for column in columns))
    return shown
