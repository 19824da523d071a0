"""A fleet of hosts on this machine, each in a network namespace, against one primary. It needs root and ip(8).

`figures` grows the fleet and prints what it costs; `upgrade` replaces old code by new, host by host, under load; `loss`
takes a host away without a word, and lets it come back with an old clock. The exit status is 0 when every promise held.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys

from rich.console import Console

from .events import Verdict, lose, upgrade
from .figures import measure
from .site import Code, Site, before_newest_migration, code_of, this_code


def main() -> int:
    """The command line; returns the exit status."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ctrl-C passes through all cleanups
    with Site(given.hosts * (given.workers + 3)) as site:
        if given.what == "figures":
            code = _older(site, given.old) if given.old else this_code()
            site.open(code)
            sizes = sorted({size for size in (*given.sizes, given.hosts) if size <= given.hosts})
            Console(width=160).print(measure(site, sizes, given.workers, code, given.seconds))
            return 0
        try:
            verdict = _happened(site, given)
        except AssertionError as e:
            print(f"{e}; errors of jobs: {site.errors()}; warnings: {[host.troubles() for host in site.hosts]}")
            return 2
    print(json.dumps(verdict.facts, indent=1))
    print("\n".join(verdict.broken) or "every promise held")
    return 1 if verdict.broken else 0


def _happened(site: Site, given: argparse.Namespace) -> Verdict:
    if given.what == "loss":
        site.open(this_code())
        return lose(site, given.hosts, given.workers, given.rate, this_code())
    old = _older(site, given.old or before_newest_migration())
    site.open(old)
    return upgrade(site, given.hosts, given.workers, given.rate, old, this_code())


def _older(site: Site, commit: str) -> Code:
    try:
        return code_of(commit, site.folder / "old")
    except subprocess.CalledProcessError as e:
        sys.exit(f"git knows no commit {commit} here: {e.stderr.decode().strip()}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fleet", description=__doc__)
    parser.add_argument("what", nargs="?", default="figures", choices=["figures", "upgrade", "loss"])
    parser.add_argument("--hosts", type=int, default=20, help="how many (20)")
    parser.add_argument("--workers", type=int, default=50, help="of each host (50)")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 5], help="figures of smaller fleets too (1 5)")
    parser.add_argument("--seconds", type=float, default=8, help="of each of the figures' measurements (8)")
    parser.add_argument("--rate", type=float, default=20, help="triggers/s of upgrade and loss (20)")
    parser.add_argument("--old", help="the commit of the old code; the one before the newest migration")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
