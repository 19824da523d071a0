"""A small fleet: an upgrade of all hosts under load, and a host that vanishes and comes back with an old clock."""

import subprocess

import pytest
from farming import CHECKOUT, keeps_its_promises
from namespaces import obstacle


@pytest.fixture(autouse=True)
def _networks() -> None:
    if why := obstacle():
        pytest.skip(why)


def older_code() -> str | None:
    """The commit before the newest migration; while there is none, this one. None in a copy without the history."""
    from tools.fleet.site import before_newest_migration

    try:
        commit = before_newest_migration()
    except SystemExit:
        commit = "HEAD"
    found = subprocess.run(["git", "-C", CHECKOUT, "cat-file", "-e", commit], capture_output=True, check=False)
    return commit if found.returncode == 0 else None


@pytest.mark.long
def test_an_upgrade_host_by_host_loses_no_job_and_runs_none_twice() -> None:
    """The schema first, then each host; in between farms of both versions work side by side."""
    if (old := older_code()) is None:
        pytest.skip("git has no commit of the older code here")
    keeps_its_promises("fleet", "upgrade", "--hosts", "2", "--workers", "2", "--rate", "5", "--old", old, patience=600)


@pytest.mark.long
def test_a_hosts_jobs_run_elsewhere_when_it_vanishes_and_its_old_clock_later_delays_none() -> None:
    keeps_its_promises("fleet", "loss", "--hosts", "3", "--workers", "3", "--rate", "2", patience=600)
