"""A flood of notifications, which the server keeps for every session that listens (fault D3)."""

from __future__ import annotations

from farming import Farm, until

PAYLOAD = 7_900  # bytes; PostgreSQL refuses 8,000
PAYLOADS = 4_000  # 30 MB: more than any socket takes while nobody reads


def test_d3_a_flood_of_notifications_stops_no_session(farm: Farm) -> None:
    """Whoever listens reads, also while it runs a job: a session that does not would keep the server's queue full."""
    farm.ready(workers=2)
    running = farm.enqueue("recorded", args={"sec": 5})
    farm.wait(running, "running")
    farm.rows("SELECT pg_notify('dl_jobs', rpad(n::text, %s, 'x')) FROM generate_series(1, %s) n", PAYLOAD, PAYLOADS)
    assert farm.wait(farm.enqueue("noop"), "succeeded")["attempt"] == 1
    until(lambda: not held_up(farm), "every session to have read what it was sent")
    assert farm.wait(running, "succeeded")["attempt"] == 1
    until(lambda: not in_transaction(farm), "every session to be outside of a transaction")


def held_up(farm: Farm) -> list[tuple[str]]:
    """The farm's sessions that wait for their client to read."""
    return farm.rows(
        "SELECT application_name FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event = 'ClientWrite'"
    )


def in_transaction(farm: Farm) -> list[tuple[str]]:
    """The farm's sessions that have a transaction open: such a one would receive nothing."""
    return farm.rows(
        "SELECT application_name FROM pg_stat_activity"
        " WHERE datname = current_database() AND state LIKE 'idle in transaction%%' AND application_name LIKE 'dl-%%'"
    )
