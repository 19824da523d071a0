"""The keys of an ordered queue over HTTP and on the dashboard."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from api_app import Refused
from flask.testing import FlaskClient
from test_api_lists import asked

from dataloader.api.v1 import responses
from dataloader.queue import db, enqueue, operations, stats

KEYS = "/api/v1/queues/orders/keys"


@pytest.fixture
def orders(conn: db.Connection) -> db.Connection:
    """A database with an ordered queue, in which three keys wait."""
    operations.set_order(conn, "orders", "test", ordered=True)
    for score in (3.0, 2.0, 1.0):
        put(conn, "order-7", score=score, args={"version": score})
    put(conn, "order-8", score=1.0, available_at=datetime.now(UTC) + timedelta(hours=1))
    put(conn, "order/9 ü?#", score=1.0)
    return conn


def put(conn: db.Connection, lock_key: str, **more: Any) -> Any:
    return enqueue.enqueue(conn, enqueue.NewJob(more.pop("queue", "orders"), "orders.sync", lock_key, **more))[0]


def test_the_keys_are_read_page_by_page_along_their_links(client: FlaskClient, orders: db.Connection) -> None:
    found, path = [], f"{KEYS}?limit=2"
    while path:
        answer = client.get(path)
        found += asked(client, path, responses.Keys)["keys"]
        path = answer.headers.get("Link", "").partition(">")[0].lstrip("<")
    assert [(key["lock_key"], key["payloads"], key["payloads_is_exact"]) for key in found] == [
        ("order-7", 3, True),
        ("order-8", 1, True),
        ("order/9 ü?#", 1, True),
    ]
    assert (found[0]["score"], found[1]["waiting_for"]["reason"]) == (1.0, "time")


@pytest.mark.parametrize("name", ["a/b", "a/../b", "..", "new\nline"])
def test_the_link_of_a_queue_with_an_odd_name_leads_to_the_same_queue(
    client: FlaskClient, conn: db.Connection, name: str
) -> None:
    operations.set_order(conn, name, "test", ordered=True)
    for key in "ab":
        put(conn, key, queue=name)
    path = KEYS.replace("orders", "-") if name == ".." else KEYS.replace("orders", quote(name, safe=""))
    answer = client.get(path, query_string={"limit": 1} | ({"name": ".."} if name == ".." else {}))
    assert answer.status_code == 200, answer.text
    again = client.get(answer.headers["Link"].partition(">")[0].lstrip("<"))
    assert [key["lock_key"] for key in again.get_json()["keys"]] == ["b"]
    assert "/../" not in answer.headers["Link"]


def test_a_plain_queue_and_a_wrong_cursor_are_refused(
    client: FlaskClient, orders: db.Connection, refused: Refused
) -> None:
    problem = refused(client.get(KEYS.replace("orders", "plain")), 400, "invalid-input", "")
    assert problem["errors"][0]["code"] == "not_ordered"
    assert "dataloader queue set plain --ordered" in problem["detail"]
    refused(client.get(f"{KEYS}?after=YQBi"), 400, "invalid-input", "/after")
    refused(client.get(f"{KEYS}?limit=201"), 400, "invalid-input", "/limit")
    refused(client.get(f"{KEYS}?color=red"), 400, "invalid-input", "/color")


def test_secrets_in_a_key_are_masked(client: FlaskClient, orders: db.Connection) -> None:
    put(orders, "postgresql://u:s3cret-canary@h/db")
    answer = client.get(KEYS)
    assert "postgresql://" in answer.text
    assert "s3cret-canary" not in answer.text


def test_the_figures_and_the_metrics_count_keys(client: FlaskClient, orders: db.Connection) -> None:
    put(orders, "k", queue="plain")
    figures = asked(client, "/api/v1/stats", responses.Overview)
    assert {queue["queue"]: queue["keys"] for queue in figures["queues"]} == {"orders": 3, "plain": None}
    assert figures["total"]["keys"] == 3
    metrics = client.get("/metrics").text
    assert 'dl_queue_keys{queue="orders"} 3.0' in metrics
    assert 'dl_queue_keys{queue="plain"}' not in metrics


def test_too_many_dead_jobs_are_not_sorted_by_key(
    client: FlaskClient, orders: db.Connection, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now()")
    by_key = client.get("/api/v1/jobs?queue=orders&status=dead&sort=key").get_json()["jobs"]
    assert [job["lock_key"] for job in by_key] == ["order-7"] * 3 + ["order-8", "order/9 ü?#"]
    monkeypatch.setattr(stats, "SORTED", 4)
    problem = refused(client.get("/api/v1/jobs?status=dead&sort=key"), 400, "invalid-input", "/sort")
    assert "since and until" in problem["detail"]
    assert client.get("/api/v1/jobs?status=dead").status_code == 200
    page = client.get("/jobs?status=dead&sort=key")
    assert (page.status_code, "since and until" in page.text) == (400, True)
