"""Access: tokens with scopes, the cookie of the dashboard, and the few pages that need no token."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_app import MINIMAL, NOWHERE, TOKENS, TRIGGER, Refused, bearer, entries, running
from click.testing import CliRunner
from flask import Flask
from flask.testing import FlaskClient
from structlog.testing import capture_logs

from dataloader.api.web import auth, tokens
from dataloader.cli.main import main
from tools.openapi import path_of

JOB = "/api/v1/jobs/01890a5d-ac96-474b-8cce-b302099a8057"
SCOPES = ("read", "trigger", "operate")  # and the names of the tokens, of which each has one
ENTRIES = entries(**dict(zip(SCOPES, SCOPES, strict=True)))
FROM_AFAR = {"REMOTE_ADDR": "10.0.0.7"}


@pytest.fixture
def guarded(dsn: str) -> Iterator[Flask]:
    with running(dsn, dl_api_tokens=ENTRIES) as app:
        yield app


def signed_in(app: Flask, name: str) -> FlaskClient:
    client = app.test_client()
    assert client.post("/login", data={"token": TOKENS[name]}).status_code == 303
    return client


def test_a_refusal_names_what_is_missing(guarded: Flask, refused: Refused) -> None:
    client = guarded.test_client()
    answer = client.post(TRIGGER, json={})
    problem = refused(answer, 401, "unauthorized")
    assert answer.headers["WWW-Authenticate"].startswith('Bearer realm="dataloader"')
    assert "bearer token in the header Authorization." in problem["detail"]  # no part of it may look like a secret
    assert "trigger" in refused(client.post(TRIGGER, json={}, headers=bearer("read")), 403, "forbidden")["detail"]


# The scopes of the pages' addresses; docs/openapi.json has those of all others. A new address is to be added to one.
PAGES = {
    "read": "/ /jobs /keys /key /workers /limits /errors /tasks /timeline /activity /schedules /postgres /backfills"
    " /backfills/<name> /jobs/<uuid:job_id> /jobs/<uuid:job_id>/log.txt"
    " /queues/<anything:queue> /tasks/<anything:task> /search/suggestions",
    "operate": "/webhooks /trigger /jobs/<uuid:job_id>/again POST:/trigger POST:/jobs/<uuid:job_id>/again"
    " POST:/do/<name> POST:/jobs/bulk POST:/jobs/bulk/preview",
    "": "/login /docs /docs/assets/<path:filename> /static/<path:name> POST:/login POST:/logout",
}


def scopes_of() -> dict[tuple[str, str], frozenset[str]]:
    """Every method and address there is, and the scopes of which one is needed."""
    document = json.loads((Path(__file__).parents[2] / "docs/openapi.json").read_text("utf-8"))
    found = {
        (method.upper(), path): frozenset(operation["security"][0]["bearer"] if operation["security"] else ())
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    for scope, addresses in PAGES.items():
        for address in addresses.split():
            method, _, path = address.rpartition(":/")
            key = ("POST", f"/{path}") if method == "POST" else ("GET", address)
            found[key] = frozenset({scope} - {""})
    return found | {("GET", "/openapi.json"): frozenset({"read"})}


VALUES = {"job_id": JOB.rpartition("/")[2], "queue": "q", "name": "app.css", "filename": "start.js"}
VALUES |= {"task": "t", "limit": "l", "webhook": "ops", "backfill": "b"}


def test_every_address_opens_to_its_scopes_and_to_nothing_else(guarded: Flask) -> None:
    scopes, met = scopes_of(), set()
    calls = {(m, rule.rule): rule for rule in guarded.url_map.iter_rules() for m in rule.methods or ()}
    for (method, path), rule in calls.items():
        if method == "OPTIONS":
            continue
        known = ("GET" if method == "HEAD" else method, path)
        known = known if known in scopes else (known[0], path_of(rule))
        met.add(known)
        verb = {"verb": path.partition("any('")[2].partition("'")[0]} if "verb" in rule.arguments else {}
        built = rule.build(VALUES | verb, append_unknown=False)
        assert built, path
        _opens_to(guarded.test_client(), method, built[1], scopes[known])
    assert met == scopes.keys()
    assert guarded.test_client().get("/nothing").status_code == 404


def _opens_to(client: FlaskClient, method: str, address: str, wanted: frozenset[str]) -> None:
    """A request that is let in gets another status than 401 and 403; each sign-in here has no token."""
    given = {}
    for name, headers in {"nobody": {}, **{name: bearer(name) for name in SCOPES}}.items():
        with client.open(address, method=method, headers=headers) as answer:
            given[name] = answer.status_code
    let_in = {name for name, status in given.items() if status not in (401, 403)}
    assert let_in == (wanted or set(given)) or (method, address) == ("POST", "/login"), (method, address, given)
    assert not wanted or given["nobody"] == 401, (method, address)


def test_what_is_no_known_token_or_could_be_read_in_two_ways_is_401(guarded: Flask, refused: Refused) -> None:
    wrong = ["Bearer", "Bearer ", "Bearer dl_x", "Basic dXNlcjpwYXNz", "Bearer \xff\xfe", f"Token {TOKENS['trigger']}"]
    for header in wrong:
        answer = guarded.test_client().post(TRIGGER, json=MINIMAL, headers={"Authorization": header})
        refused(answer, 401, "unauthorized")
        assert 'error="invalid_token"' in answer.headers["WWW-Authenticate"]
    for sent in [
        [("Authorization", f"Bearer {TOKENS['trigger']}"), ("Authorization", f"Bearer {TOKENS['trigger']}")],
        [("Authorization", f"Bearer {TOKENS['trigger']}"), ("Authorization", "Bearer dl_x")],
        [("Authorization", f"Bearer {TOKENS['trigger']}, Bearer dl_x")],
        [("Authorization", f"Bearer\t{TOKENS['trigger']}")],
        [("Authorization", "Bearer dl_x"), ("Cookie", f"dl_token={TOKENS['trigger']}")],
        [("Proxy-Authorization", f"Bearer {TOKENS['trigger']}")],
        [("Cookie", f"dl_token=dl_x; dl_token={TOKENS['trigger']}")],
        [("Authorization", f"Bearer {tokens.digest(TOKENS['trigger'])}")],
        [("Remote-User", "admin"), ("X-Forwarded-User", "admin")],
    ]:
        refused(guarded.test_client().post(TRIGGER, json=MINIMAL, headers=sent), 401, "unauthorized")


@pytest.mark.parametrize("header", ["BEARER {}", "bearer   {}", "Bearer {}  "])
def test_a_bearer_token_however_it_is_written_and_whatever_the_host(guarded: Flask, header: str) -> None:
    headers = {"aUTHORIZATION": header.format(TOKENS["trigger"]), "Cookie": "dl_token=dl_x", "Host": "farm.example.com"}
    assert guarded.test_client().post(TRIGGER, json=MINIMAL, headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"])
def test_no_header_makes_another_method_of_a_request(guarded: Flask, name: str) -> None:
    headers = bearer("read") | {name: "DELETE"}
    assert guarded.test_client().post(f"{JOB}?_method=DELETE", headers=headers).status_code == 405
    assert guarded.test_client().get(f"{JOB}/status", headers=headers).status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/api/v1//stats", "/health/../api/v1/stats", "/health/..%2f..%2fapi/v1/stats", "/docs/../api/v1/stats", "/docs/",
     "/docs/assets/../../openapi.json", "/docs/assets/..%2f..%2fopenapi.py", "/static/../page.py", "/login/../jobs",
     "/static/..%2f..%2fpage.py", "/static/app.css%00.js", "/api/v1/stats%00", "/./api/v1/stats"],
)  # fmt: skip
def test_no_way_round_leads_past_the_door(guarded: Flask, path: str) -> None:
    answer = guarded.test_client().get(path)
    assert answer.status_code in (400, 401, 404)
    assert "Cache-Control: no-store" in str(answer.headers)


def test_a_view_without_a_mark_needs_read_or_operate(guarded: Flask) -> None:
    guarded.add_url_rule("/unmarked", view_func=lambda: {}, methods=["GET", "POST"])
    client = guarded.test_client()
    seen = {(m, name): client.open("/unmarked", method=m, headers=bearer(name)).status_code
            for m in ("GET", "POST") for name in SCOPES}  # fmt: skip
    assert {call for call, status in seen.items() if status == 200} == {("GET", "read"), ("POST", "operate")}


def test_the_audit_names_the_token_and_nothing_holds_it(guarded: Flask) -> None:
    with capture_logs() as logs:
        answers = [guarded.test_client().post(TRIGGER, json=MINIMAL, headers=bearer(name)) for name in SCOPES]
        page = guarded.test_client().post("/login", data={"token": "dl_wrong"})
    assert [answer.status_code for answer in answers] == [403, 200, 403]
    written = json.dumps(logs, default=str) + page.text + "".join(a.text + str(a.headers) for a in answers)
    for token in map(TOKENS.__getitem__, SCOPES):
        assert token not in written
        assert tokens.digest(token) not in written
    assert "dl_wrong" not in written


@pytest.mark.parametrize(
    ("proxies", "tokens", "seen"),
    [
        (0, ENTRIES, "token read from 127.0.0.1"),
        (1, ENTRIES, "token read from 10.2.2.2"),
        (2, ENTRIES, "token read from 10.1.1.1"),
        (2, "[]", "anonymous from 10.1.1.1"),
    ],
)
def test_the_journal_names_who_asks_and_only_trusted_proxies_are_believed(
    dsn: str, proxies: int, tokens: str, seen: str
) -> None:
    with running(dsn, dl_api_tokens=tokens, dl_trusted_proxies=proxies) as app:
        app.add_url_rule("/who", view_func=lambda: auth.who())
        headers = bearer("read") | {"X-Forwarded-For": "10.9.9.9, 10.1.1.1, 10.2.2.2"}
        assert app.test_client().get("/who", headers=headers).text == seen


def test_a_request_that_came_by_no_proxy_is_local_although_proxies_are_trusted(dsn: str) -> None:
    with running(dsn, dl_trusted_proxies=1) as app:
        assert app.test_client().post(TRIGGER, json=MINIMAL).status_code == 200
        assert app.test_client().post(TRIGGER, json=MINIMAL, headers={"X-Forwarded-Prefix": "/.."}).status_code == 403


def test_without_tokens_only_this_machine_changes_anything(client: FlaskClient, refused: Refused) -> None:
    for peer, headers, may in [
        ("127.0.0.1", {}, True),
        ("127.8.9.1", {"Host": "127.0.0.1:8081"}, True),
        ("::1", {"Host": "[::1]:8081"}, True),
        ("::ffff:127.0.0.1", {"Host": "localhost:8081"}, True),
        ("10.0.0.7", {"Host": "localhost"}, False),
        ("", {}, False),
        ("127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}, False),
        ("127.0.0.1", {"Forwarded": "for=127.0.0.1"}, False),
        ("127.0.0.1", {"X-Real-IP": "127.0.0.1"}, False),
        ("127.0.0.1", {"X-Forwarded-Proto": "https"}, False),
        ("127.0.0.1", {"X-Forwarded-Server": "proxy"}, False),
        ("127.0.0.1", {"CF-Connecting-IP": "10.0.0.7"}, False),
        ("127.0.0.1", {"X-Client-IP": "10.0.0.7"}, False),
        ("127.0.0.1", {"Host": "localhost@rebound.example"}, False),
        ("127.0.0.1", {"Host": "rebound.example@localhost"}, False),
        ("127.0.0.1", {"Host": "localhost,rebound.example"}, False),
        ("127.0.0.1", {"Host": "2130706433"}, False),
        ("::1", {"Host": "[::1%25lo]"}, False),
        ("127.0.0.1", {"Host": "[::ffff:127.0.0.1]:8081"}, True),
        ("127.0.0.1", {"Host": "rebound.example"}, False),
        ("127.0.0.1", {"Host": "localhost.rebound.example"}, False),
        ("127.0.0.1", {"Host": "[::1"}, False),
    ]:
        asked: dict[str, Any] = {"headers": headers, "environ_base": {"REMOTE_ADDR": peer}}
        answer = client.post(TRIGGER, json=MINIMAL, **asked)
        if may:
            assert answer.status_code == 200
        else:
            assert "DL_API_TOKENS" in refused(answer, 403, "forbidden")["detail"]
            assert client.post(JOB + "/cancel", **asked).status_code == 403


PUBLIC = "https://farm.example.com/farm"
OUR_NAMES = [
    *("localhost", "LOCALHOST:8081", "localhost.", "127.0.0.1:8081", "10.0.0.7", "[::1]:8081", "[fd12::7]"),
    *("[::ffff:127.0.0.1]:8081", "farm.example.com", "Farm.Example.com.:443"),
    *(socket.gethostname(), f"{socket.gethostname().upper()}:8081", socket.getfqdn()),
]
OTHER_NAMES = [
    *("evil.example", "localhost.evil.example", "evil.localhost", "localhost@evil.example", "evil.example@localhost"),
    *("localhost,evil.example", "localhost evil.example", "127.0.0.1.evil.example", "farm.example.com.evil.example"),
    *("2130706433", "0x7f000001", "127.1", "[::1", ""),
]


@pytest.mark.parametrize("settings", [{}, {"dl_allow_anonymous": True}])
def test_without_tokens_a_name_of_another_site_reads_nothing(dsn: str, settings: dict[str, Any]) -> None:
    """Another site may lead its own name to this address (DNS rebinding), but neither an address nor our own name."""
    paths = ("/api/v1/queues", "/", "/info", "/status", "/ready", "/metrics", "/openapi.json", "/static/x", "/unknown")
    with running(dsn, dl_public_url=PUBLIC, **settings) as app:
        client = app.test_client()
        for host in OUR_NAMES:
            assert client.get("/api/v1/queues", headers={"Host": host}).status_code == 200, host
        for host in OTHER_NAMES:
            answer = client.get("/api/v1/queues", headers={"Host": host})
            assert answer.status_code == 403, host
            assert "DL_PUBLIC_URL" in answer.text
            assert client.get("/health", headers={"Host": host}).status_code == 200
        for path in paths:
            assert client.get(path, headers={"Host": "evil.example"}).status_code == 403, path


def test_a_page_that_claims_to_be_a_proxy_reads_nothing(dsn: str) -> None:
    """A page of a rebound name may add headers of its own to a request."""
    for proxies in (0, 1):
        with running(dsn, dl_trusted_proxies=proxies) as app:
            for host, forwarded in (("evil.example", "localhost"), ("127.0.0.1", "evil.example")):
                headers = {"Host": host, "X-Forwarded-Host": forwarded}
                status = app.test_client().get("/api/v1/queues", headers=headers).status_code
                assert status == (200 if (proxies, host) == (0, "127.0.0.1") else 403)


def test_everybody_is_let_in_where_that_is_asked_for_and_there_are_no_tokens(dsn: str, refused: Refused) -> None:
    with running(dsn, dl_allow_anonymous=True) as app:
        assert app.test_client().post(TRIGGER, json=MINIMAL, environ_base=FROM_AFAR).status_code == 200
    with running(dsn, dl_allow_anonymous=True, dl_api_tokens=ENTRIES) as app:
        refused(app.test_client().post(TRIGGER, json=MINIMAL), 401, "unauthorized")


def test_a_service_without_tokens_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_announced", False)
    with capture_logs() as logs, running(NOWHERE, dl_api_tokens=ENTRIES), running(NOWHERE), running(NOWHERE):
        pass
    assert [(line["event"], line["log_level"]) for line in logs] == [("api.open", "warning")]


def test_below_a_path_of_a_shared_host_every_address_has_the_path(dsn: str) -> None:
    with running(dsn, dl_api_tokens=ENTRIES, dl_trusted_proxies=1) as app:
        client, below = app.test_client(), {"X-Forwarded-Prefix": "/below/"}
        asked = client.get("/jobs?status=dead", headers=below | {"Accept": "text/html"})
        assert asked.headers["Location"] == "/below/login?next=%2Fbelow%2Fjobs%3Fstatus%3Ddead"
        form = {"token": TOKENS["operate"], "next": "/below/jobs?status=dead"}
        signed_in = client.post("/login", data=form, headers=below)
        assert signed_in.headers["Location"] == "/below/jobs?status=dead"
        assert "Path=/below;" in signed_in.headers["Set-Cookie"]
        mine = below | {"Cookie": f"{auth.COOKIE}={TOKENS['operate']}"}
        reader = below | {"Cookie": f"{auth.COOKIE}={TOKENS['read']}"}
        seen = {"/": reader, "/jobs": reader, "/trigger": mine, "/login": below, "/docs": below}
        for page, headers in seen.items():
            text = app.test_client(use_cookies=False).get(page, headers=headers).text
            addresses = re.findall(r'(?:href|src|action|hx-[a-z]+)="(/[^"]*)"', text)
            assert addresses, page
            assert [each for each in addresses if not each.startswith("/below/")] == []
        signed_out = client.post("/logout", headers=mine | {"Sec-Fetch-Site": "same-origin"})
        assert signed_out.headers["Location"] == "/below/login"
        ended = "".join(signed_out.headers.getlist("Set-Cookie"))
        assert "Path=/below;" in ended
        assert "Path=/;" in ended
        document = client.get("/openapi.json", headers=below | bearer("read")).get_json()
        assert document["servers"] == [{"url": "/below"}]


@pytest.mark.parametrize(
    ("proxies", "prefix"),
    [(0, "/below"), (1, "//evil.example"), (1, "evil"), (1, "/a?b"), (1, "/a//b"), (1, "/.."), (1, "javascript:x")],
)
def test_a_path_that_no_proxy_vouches_for_or_that_is_odd_does_not_count(dsn: str, proxies: int, prefix: str) -> None:
    with running(dsn, dl_api_tokens=ENTRIES, dl_trusted_proxies=proxies) as app:
        headers = {"X-Forwarded-Prefix": prefix, "Accept": "text/html"}
        assert app.test_client().get("/jobs", headers=headers).headers["Location"] == "/login?next=%2Fjobs"


def test_j9_other_sites_change_nothing(guarded: Flask, client: FlaskClient) -> None:
    for headers, may in [
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Origin": "https://localhost:443"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "http://localhost:8080"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[::1"}, False),
        ({"Origin": "http://localhost@evil.example"}, False),
        ({"Origin": ""}, False),
        ({"Sec-Fetch-Site": "none,cross-site"}, False),
        ({"Referer": "http://evil.example/http://localhost/"}, False),
        ({"Referer": "http://localhost/jobs"}, True),
    ]:
        anonymous = client.post(TRIGGER, json=MINIMAL, headers=headers)
        by_token = guarded.test_client().post(TRIGGER, json=MINIMAL, headers=headers | bearer("trigger"))
        assert {anonymous.status_code, by_token.status_code} == ({200} if may else {403}), headers
        assert client.get(JOB + "/status", headers=headers).status_code == 404


def test_a_sign_in_and_out(guarded: Flask) -> None:
    client = guarded.test_client()
    wrong = [client.post("/login", data={"token": text}) for text in ("a", "b", "")]
    assert {(answer.status_code, answer.headers.get("Set-Cookie")) for answer in wrong} == {(401, None)}
    assert len({re.sub("<!--.*?-->", "", answer.text) for answer in wrong[:2]}) == 1
    assert client.get(JOB + "/status").status_code == 401
    page = client.get("/login?next=/jobs")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert 'value="/jobs"' in page.text
    answer = client.post("/login", data={"token": f" {TOKENS['read']} ", "next": "/jobs"})
    assert (answer.status_code, answer.location) == (303, "/jobs")
    assert {"HttpOnly", "SameSite=Strict", "Secure"} & {*answer.headers["Set-Cookie"].split("; ")} == {
        "HttpOnly", "SameSite=Strict"
    }  # fmt: skip
    assert client.get(JOB + "/status").status_code == 404
    assert client.post("/logout").location == "/login"
    assert client.get(JOB + "/status").status_code == 401


def test_the_cookie_is_for_https_only_where_there_is_https(dsn: str) -> None:
    with running(dsn, dl_api_tokens=ENTRIES, dl_trusted_proxies=1) as app:
        headers = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "10.0.0.1"}
        answer = app.test_client().post("/login", data={"token": TOKENS["read"]}, headers=headers)
        assert "; Secure" in answer.headers["Set-Cookie"]


@pytest.mark.parametrize(
    "wish",
    ["//evil.example", "/\\evil.example", "https://evil.example", "/\t/x", "x", "/%0a\n", "javascript:alert(1)",
     "/a\r\nSet-Cookie: x=1", "\\\\evil.example", "/\u2028", " //evil.example", "data:text/html,x"],
)  # fmt: skip
def test_a_sign_in_leads_to_no_other_site(guarded: Flask, wish: str) -> None:
    answer = guarded.test_client().post("/login", data={"token": TOKENS["read"], "next": wish})
    assert answer.location == "/"


OURS = {"HX-Request": "true", "Sec-Fetch-Site": "same-origin"}


def test_a_change_by_cookie_comes_from_our_own_page(guarded: Flask) -> None:
    for headers, status in [
        (OURS, 404),
        ({"HX-Request": "true", "Origin": "http://localhost"}, 404),
        ({"HX-Request": "true"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 403),
        (OURS | {"Sec-Fetch-Site": "same-site"}, 403),
    ]:
        assert signed_in(guarded, "operate").post(JOB + "/cancel", headers=headers).status_code == status, headers
        assert signed_in(guarded, "read").post(JOB + "/cancel", headers=headers).status_code == 403


def test_people_are_led_to_the_sign_in_and_programs_are_not(guarded: Flask) -> None:
    guarded.add_url_rule("/page", view_func=lambda: "x")
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    client = guarded.test_client()
    assert client.get("/page?a=1&b=//x", headers=browser).location == "/login?next=%2Fpage%3Fa%3D1%26b%3D%2F%2Fx"
    assert client.get("/page", headers={"Accept": "*/*"}).status_code == 401
    assert client.get(JOB + "/status", headers=browser).status_code == 401
    assert client.get("/page", headers={"HX-Request": "true"}).headers["HX-Redirect"] == "/login"
    opened = {"HX-Request": "true", "HX-Current-URL": "http://localhost/jobs?status=dead"}
    assert client.get("/jobs", headers=opened).headers["HX-Redirect"] == "/login?next=%2Fjobs%3Fstatus%3Ddead"


def test_people_come_back_to_the_page_that_they_wanted(guarded: Flask) -> None:
    """As it was asked for, whatever it is called; a token that was pasted into it is not kept."""
    client, browser = guarded.test_client(), {"Accept": "text/html"}
    asked = client.get(f"/queues/a%2F..%2Fb%3Fc?token={TOKENS['read']}&x=1", headers=browser).location
    assert asked == "/login?next=%2Fqueues%2Fa%252F..%252Fb%253Fc%3Ftoken%3D%2A%2A%2A%26x%3D1"
    answer = client.post("/login", data={"token": TOKENS["read"], "next": "/queues/a%2F..%2Fb%3Fc?x=1"})
    assert answer.location == "/queues/a%2F..%2Fb%3Fc?x=1"
    assert 'hx-get="/queues/a%2F..%2Fb%3Fc?x=1"' in client.get(answer.location).text


def test_a_link_on_another_site_leads_a_signed_in_reader_to_its_page(guarded: Flask) -> None:
    """The browser keeps the strict cookie back at first, so the sign-in asks again by itself, once."""
    client, foreign = guarded.test_client(), {"Sec-Fetch-Site": "cross-site"}
    again = client.get("/login?next=/jobs", headers=foreign).headers["Refresh"].removeprefix("0; url=")
    assert again == "/login?next=/jobs&again="
    assert "Refresh" not in client.get(again, headers=foreign).headers
    assert "Refresh" not in client.get("/login?next=/jobs").headers
    assert signed_in(guarded, "read").get(again).location == "/jobs"
    assert signed_in(guarded, "read").get("/login?next=//evil.example/").location == "/"


def test_without_tokens_there_is_nothing_to_sign_in_to(client: FlaskClient) -> None:
    assert client.get("/login?next=/jobs").location == "/jobs"


@pytest.mark.parametrize("path", [TRIGGER, "/login", JOB + "/cancel"])
def test_j6_chunks_and_large_bodies_are_refused_everywhere(client: FlaskClient, path: str) -> None:
    assert client.post(path, headers={"Transfer-Encoding": "chunked"}).status_code == 411
    large = {"data": "x" * 300_000, "content_type": "application/x-www-form-urlencoded"}
    assert client.post(path, **large).status_code == 413


def test_the_command_makes_a_token_and_its_entry(dsn: str) -> None:
    made = CliRunner().invoke(main, ["token", "etl", "--scope", "trigger", "--scope", "read"])
    token, entry = made.stdout.splitlines()
    assert re.fullmatch(r"dl_[\w-]{43}", token)
    assert token not in entry + made.stderr
    with running(dsn, dl_api_tokens=f"[{entry}]") as app:
        answer = app.test_client().post(TRIGGER, json=MINIMAL, headers={"Authorization": f"bearer {token}"})
        assert answer.status_code == 200
    refused = CliRunner().invoke(main, ["token", "two words", "--scope", "read"])
    assert (refused.exit_code, refused.stdout) == (2, "")
