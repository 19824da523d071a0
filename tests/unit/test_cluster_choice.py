"""What is decided about several clusters without a database: where a queue lives, one answer of several, settings."""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any
from uuid import UUID

import pytest

from dataloader import check, config, log
from dataloader.api.web import merged
from dataloader.check import database
from dataloader.config import ConfigError, cluster_tag, load
from dataloader.log import masking
from dataloader.queue import clusters, enqueue
from dataloader.queue.reports import stats

TWO = {"east": "postgresql://ann:s3cret-east@e/db", "west": "postgresql://ann:s3cret-west@w/db"}
NOW = datetime(2026, 5, 1, tzinfo=UTC)


def loaded(**given: Any) -> config.Settings:
    return load(_env_file=None, dl_clusters=json.dumps(TWO), **given)


# --- settings ---


def test_the_first_cluster_is_this_hosts_unless_another_is_named() -> None:
    assert (loaded().cluster, loaded().queue_dsn) == ("east", TWO["east"])
    west = loaded(dl_cluster="west")
    assert (west.cluster, west.queue_dsn, west.tag) == ("west", TWO["west"], cluster_tag("west"))
    alone = load(_env_file=None, dl_db_dsn="host=h")
    assert (alone.cluster, alone.tag, alone.queue_dsn) == (None, None, "host=h")


def twins() -> tuple[str, str]:
    """Two names that ids cannot tell apart."""
    known: dict[int, str] = {}
    while True:
        name = f"c{secrets.token_hex(4)}"
        if (other := known.setdefault(cluster_tag(name), name)) != name:
            return other, name


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dl_clusters": '{"East": "host=h"}'}, "DL_CLUSTERS: should have names of 1 to 32 small letters"),
        ({"dl_clusters": '{"east": "port=many"}'}, "DL_CLUSTERS.east: should have a number for the port"),
        ({"dl_clusters": '["host=h"]'}, 'DL_CLUSTERS: should be an object of names and DSNs, as {"east"'),
        ({"dl_clusters": "east=host"}, "DL_CLUSTERS: should be JSON such as"),
        ({"dl_clusters": json.dumps(dict.fromkeys(twins(), "host=h"))}, "ids of jobs cannot tell these two apart"),
        ({"dl_clusters": '{"east": "host=h", "west": "host=h"}'}, "for each name: east and west have the same DSN"),
        ({"dl_clusters": '{"east": "host=h", "west": " "}'}, "DL_CLUSTERS: should have a DSN for west"),
        ({"dl_cluster": "north"}, "DL_CLUSTER: should be a name in DL_CLUSTERS: east, west"),
        ({"dl_clusters": "{}", "dl_cluster": "east"}, "DL_CLUSTER: should be left out where DL_CLUSTERS is"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(**{"_env_file": None, "dl_clusters": json.dumps(TWO)} | given)
    assert words in str(error.value)


def test_one_database_beside_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_CLUSTERS", json.dumps(TWO))
    assert load(_env_file=None, dl_db_dsn="host=h").queue_dsn == "host=h"  # --dsn of a command
    monkeypatch.setenv("DL_DB_DSN", "host=h")
    with pytest.raises(ConfigError, match="DL_CLUSTERS: should not be set beside DL_DB_DSN: set one of the two"):
        load(_env_file=None)


def test_passwords_of_clusters_show_nowhere() -> None:
    settings = loaded()
    assert "s3cret" not in repr(settings) + json.dumps(check.shown(settings))
    masking.learn_configured(settings)
    try:
        assert "s3cret" not in log.masked("no route to ann with s3cret-west and s3cret-east")
    finally:
        masking.learn_configured(load(_env_file=None))


# --- ids ---


def test_an_id_says_its_cluster_and_is_a_uuid_of_version_7() -> None:
    for name in TWO:
        made = list(enqueue._new_ids(1_000, cluster_tag(name)))
        assert {(each.version, each.variant) for each in made} == {(7, UUID(int=0x8000 << 48).variant)}
        assert {enqueue.tag_of(each) for each in made} == {cluster_tag(name)}
        assert made == sorted(made)
        assert len(set(made)) == 1_000
        assert {str(each)[20:23] for each in made} == {f"{cluster_tag(name):03x}"}
    assert len({enqueue.tag_of(each) for each in enqueue._new_ids(1_000)}) > 500


# --- where a queue lives ---


@pytest.mark.parametrize(
    ("known", "home"),
    [
        ({"east": {}, "west": {}}, "own"),
        ({"east": {"q": None}, "west": {"q": None}}, "east"),
        ({"east": {}, "west": {"q": None}}, "west"),
        ({"east": {"q": "west"}, "west": {"q": None}}, "west"),
        ({"east": {"q": "west"}, "west": {}}, "west"),
        ({"east": {"q": "west"}, "west": {"q": "north"}, "north": {"q": None}}, "north"),
        ({"east": {"q": "west"}, "west": {"q": "east"}}, "west"),  # a move was cut off
        ({"east": {"q": "away"}}, "away"),
    ],
)
def test_a_queue_lives_where_the_clusters_say(known: dict[str, Any], home: str) -> None:
    assert clusters.home("q", list(known.items()), "own") == home


def test_a_queue_that_has_gone_and_left_nothing_is_left_out() -> None:
    gone = {"queue": "q", "paused_by": "queue move across clusters: to west", "length": 0, "busy": 0, "dead": 0}
    assert clusters.has_gone(gone)
    assert not clusters.has_gone(gone | {"length": 1})
    assert not clusters.has_gone(gone | {"paused_by": "ops"})
    rows = merged.rows("queues")([("east", {"queues": [gone]}), ("west", {"queues": [gone | {"paused_by": None}]})], {})
    assert [row["cluster"] for row in rows["queues"]] == ["west"]


def test_check_names_what_waits_to_be_carried() -> None:
    assert [each.level for each in database.of_clusters([], ["east"])] == ["ok"]
    (known, unknown) = database.of_clusters([("q", "west"), ("p", "north")], ["east", "west"])
    assert "dataloader queue move q --cluster west" in known.advice
    assert "name north in DL_CLUSTERS" in unknown.advice
    (coming,) = database.of_clusters([], ["east", "west"], [("q", "east")], "west")
    assert (coming.level, coming.advice) == ("warning", "repeat `dataloader queue move q --cluster west`")


# --- one answer of several ---


def test_pages_of_several_are_the_pages_of_one_list() -> None:
    """Whatever each database looks at in one page, every row comes once, and in its order."""
    rows = [{"changed_at": NOW - timedelta(seconds=n // 2), "job_id": UUID(int=1_000 - n)} for n in range(30)]
    for mine in combinations(range(0, 30, 7), 3):
        parts = [[row for n, row in enumerate(rows) if (n in mine) is side] for side in (True, False)]
        found, after = [], None
        for _ in range(100):
            page = stats.merged([page_of(part, after, size) for part, size in zip(parts, (1, 4), strict=True)], 3)
            assert len(page.jobs) <= 3
            found += page.jobs
            after = page.next
            if after is None:
                break
        assert found == rows


def page_of(rows: list[dict[str, Any]], after: str | None, size: int) -> stats.Page:
    """A page of so many rows, as a database answers it."""
    place = stats._cursor(after, stats._instant)
    left = [row for row in rows if place is None or (row["changed_at"], row["job_id"]) < place]
    marked = [row | {"is_edge": False, "is_wanted": True, "progress": None} for row in left]
    page = stats._page(marked, size, lambda row: row["changed_at"].isoformat())
    return stats.Page([{"changed_at": row["changed_at"], "job_id": row["job_id"]} for row in page.jobs], page.next)


def test_names_pace_and_counts_are_added_up() -> None:
    name = {"name": "q", "is_known": False, "similar": ["qq"], "count": 2}
    parts = [("east", {"queue": name, "task": None}), ("west", {"queue": name | {"similar": ["q2"]}, "task": None})]
    assert merged.names(parts, {}) == {"queue": name | {"similar": ["qq", "q2"], "count": 4}, "task": None}
    parts[1][1]["queue"]["is_known"] = True
    assert merged.names(parts, {})["queue"]["similar"] == []
    pace = [("east", {"pace": [{"at": NOW, "processed": 1, "failed": 0}]})] * 2
    assert merged.pace(pace, {})["pace"] == [{"at": NOW, "processed": 2, "failed": 0}]
    flags = merged.rows("groups")(
        [("east", {"groups": [], "is_cut": False}), ("west", {"groups": [], "is_cut": True})], {}
    )
    assert flags["is_cut"]
