"""The keys of an ordered queue over HTTP and on the dashboard."""

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from api_app import Refused, next_page
from flask.testing import FlaskClient

from dataloader.api.dashboard import pages
from dataloader.queue import db, enqueue, operations
from dataloader.queue.reports import stats

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
    again = client.get(next_page(answer))
    assert [key["lock_key"] for key in again.get_json()["keys"]] == ["b"]
    assert "/../" not in answer.headers["Link"]


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


def page_of(client: FlaskClient, path: str, **query: str) -> str:
    answer = client.get(path, query_string=query)
    assert answer.status_code == 200, answer.text
    return " ".join(answer.text.split())


@pytest.mark.long
def test_a_key_of_any_name_is_found_from_the_queue_and_from_its_job(client: FlaskClient, orders: db.Connection) -> None:
    for name in ["order/9 ü?#", "<script>alert(1)</script>", "a&b=c%2F", "'\"", "\u202eline\nbreak", ""]:
        job_id = put(orders, "x")
        orders.execute("UPDATE dl_jobs SET lock_key = %s WHERE lock_key = 'x'", (name,))
        client.application.extensions.pop("shared", None)
        for path in ("/queues/orders", "/keys?queue=orders", f"/jobs/{job_id}"):
            page = client.get(path).text
            links = [urlsplit(unescape(link)) for link in re.findall('href="(/key[?][^"]*)"', page)]
            assert {"queue": ["orders"], "lock_key": [name]} in [parse_qs(link.query, True) for link in links], path
            assert "<script>alert" not in page
        page = page_of(client, "/key", queue="orders", lock_key=name)
        assert "<script>alert" not in page
        assert f'href="/jobs/{job_id}"' in page


def test_keys_and_jobs_are_paged_on_the_dashboard(
    client: FlaskClient, orders: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SHOWN", 2)
    for path in ("/keys?queue=orders", "/key?queue=orders&lock_key=order-7"):
        first = client.get(path).text
        following = unescape(re.search('rel="next" href="([^"]+)"', first)[1])
        second = client.get(following).text
        assert 'rel="next"' not in second
        assert unescape(re.search('rel="first" href="([^"]+)"', second)[1]) == path
        ids = [set(re.findall('href="/jobs/([0-9a-f-]{36})" title', page)) for page in (first, second)]
        assert ([len(found) for found in ids], ids[0] & ids[1]) == ([2, 1], set())


def test_secrets_in_keys_and_arguments_are_masked_on_pages(client: FlaskClient, orders: db.Connection) -> None:
    put(orders, "postgresql://u:s3cret-canary@h/db", args={"password": "s3cret-canary"})
    put(orders, "order-7", score=0.0, args={"password": "s3cret-canary", "region": "north"})
    for path in (KEYS, "/keys?queue=orders", "/queues/orders", "/key?queue=orders&lock_key=order-7"):
        page = client.get(path).text
        assert "s3cret-canary" not in page
    assert "region north" in page


ORDER = {"ordered": "no", "merge": "no", "merge_limit": "1000", "batch": "", "on_dead": "continue"}
SET = "/do/set_queue?queue=orders"


def test_the_form_of_an_order_changes_what_somebody_has_changed_in_it(
    client: FlaskClient, orders: db.Connection
) -> None:
    operations.set_order(orders, "orders", "test", on_dead="hold", batch=10)
    as_shown = {"was.on_dead": "continue", "was.batch": "", "was.merge_limit": "1000"}
    assert client.post(SET, data=ORDER | as_shown).status_code == 200
    found = operations.settings(orders, "orders")
    assert (found["ordered"], found["on_dead"], found["batch"]) == (False, "hold", 10)
    page = client.get("/queues/orders").text
    assert 'name="batch" min="1" max="1000" value="10"' in page
    assert "fieldset" not in client.get("/queues/orders", environ_base={"REMOTE_ADDR": "10.0.0.7"}).text
    assert "No queue of this name" in client.post("/do/set_queue?queue=new", data=ORDER | {"ordered": "yes"}).text
