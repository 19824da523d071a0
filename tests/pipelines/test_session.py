"""`context.http`: a pipeline that asks an API, against a real server of this test."""

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from judging import Load, fails_for_good
from serving import Handler, Server

from dataloader.pipelines import Context, register

pytestmark = pytest.mark.usefixtures("own_registry")
ROWS = [{"id": n} for n in range(7)]
Ask = Callable[..., Any]  # a function of the context as a job


class Api:
    """An API with pages of three rows, which keeps the requests that it got."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, list[str]], dict[str, str], bytes]] = []
        self.first: dict[str, list[tuple[int, dict[str, str]]]] = {}  # answers of a path before the right ones
        self.ends = threading.Event()
        api = self

        class Answers(Handler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = parse_qs(url.query)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                api.got.append((url.path, query, {name.lower(): value for name, value in self.headers.items()}, body))
                status, headers = api.first[url.path].pop(0) if api.first.get(url.path) else (200, {})
                if url.path == "/silent":
                    api.ends.wait()
                document, more = api.answer(url.path, {name: values[-1] for name, values in query.items()})
                data = gzip.compress(json.dumps(document).encode())
                if url.path == "/bomb":
                    data = gzip.compress(bytes(50 * 2**20))
                self.answer(status, data, headers | more | {"Content-Encoding": "gzip"})

            do_POST = do_HEAD = do_GET

        self._server = Server(Answers)
        self.url = self._server.url

    def close(self) -> None:
        self.ends.set()
        self._server.close()

    def answer(self, path: str, query: dict[str, str]) -> tuple[Any, dict[str, str]]:
        begin = int(query.get("cursor") or query.get("offset") or 3 * (int(query.get("page", 1)) - 1))
        rows, following = ROWS[begin : begin + 3], begin + 3 if begin + 3 < len(ROWS) else None
        if path == "/link":
            return rows, {"Link": f'</link?offset={following}>; rel="next"'} if following else {}
        if path == "/elsewhere":
            return rows, {"Link": '<https://evil.example/x>; rel="next"'}
        return {"data": {"items": rows}, "meta": {"next": following and str(following)}}, {}


@pytest.fixture
def api() -> Iterator[Api]:
    with closing(Api()) as made:
        yield made


@pytest.fixture
def ask(job: Load) -> Ask:
    """Run a function of the context as a job."""
    given: list[Callable[[Context], Any]] = []

    @register("ask.api", spares_attempts=True)
    def pipeline(args: dict[str, Any], context: Context) -> Any:
        return given[-1](context)

    def ask(function: Callable[[Context], Any], **how: Any) -> Any:
        given.append(function)
        return job("ask.api", {}, **({"max_attempts": 1} | how))

    return ask


@pytest.mark.parametrize("by", ["link", "cursor", "offset", "page"])
def test_pages_are_read_in_each_way_and_again_from_where_they_were(ask: Ask, api: Api, by: Any) -> None:
    words = {} if by == "link" else {"rows": "data.items", "cursor": "meta.next"}

    def read(context: Context) -> Any:
        context.http.params = {"v": "2"}
        return [page for page in context.http.pages(f"{api.url}/{by}?status=ö&q=a", by, params={"q": "b"}, **words)]

    pages = ask(read).result
    assert [row for rows, _ in pages for row in rows] == ROWS
    assert len(pages) == 3
    asked = [query for _, query, *_ in api.got][: 1 if by == "link" else None]  # the links of this API have no status
    assert {(*query["status"], *query["q"], *query["v"]) for query in asked} == {("ö", "b", "2")}
    rest = ask(lambda context: [*context.http.pages(f"{api.url}/{by}", by, begin=pages[1][1], **words)]).result
    assert [row for rows, _ in rest for row in rows] == ROWS[6:]


@pytest.mark.parametrize("by", ["link", "cursor"])
def test_behind_the_last_page_nothing_is_asked_for(ask: Ask, api: Api, by: Any) -> None:
    words = {} if by == "link" else {"rows": "data.items", "cursor": "meta.next"}
    ends: list[Any] = []

    def read(context: Context) -> int:
        begin = (context.checkpoint or {"begin": None})["begin"]
        for page in context.http.pages(f"{api.url}/{by}", by, begin=begin, **words):
            context.save({"begin": page.next})
            ends.append(page.next)
        if begin is None:
            raise RuntimeError("killed behind the last page")
        return 1

    assert ask(read, max_attempts=2).result == 1
    assert (len(api.got), ends[2:]) == (3, [False])


def pages_of(answers: list[Any]) -> Callable[[httpx.Request], httpx.Response]:
    """An API that gives these documents in turn, the last one again and again; a text is a body as it is."""

    def answer(_: httpx.Request) -> httpx.Response:
        document = answers.pop(0) if len(answers) > 1 else answers[0]
        return httpx.Response(200, content=document if isinstance(document, str) else json.dumps(document))

    return answer


def read_by_cursor(context: Context) -> list[Any]:
    return [page.rows for page in context.http.pages("https://shop.example/x", "cursor", rows="rows", name="after")]


def test_a_cursor_that_stays_is_read_up_to_an_empty_page_but_not_for_ever(ask: Ask) -> None:
    first, second, empty = ({"rows": rows, "next": "same"} for rows in ([1], [2], []))
    assert ask(read_by_cursor, http=pages_of([first, second, empty])).result == [[1], [2], []]
    error = "shop.example: two pages in turn are equal; does it give pages by after?"
    fails_for_good(ask(read_by_cursor, http=pages_of([first, second])), error)


@pytest.mark.parametrize("body", ['{"rows": [{"id": 1, "canary', "<html>canary</html>", ""])
def test_an_answer_that_is_no_json_is_asked_for_again(ask: Ask, body: str) -> None:
    assert ask(read_by_cursor, http=pages_of([body, {"rows": [1]}]), max_attempts=2).result == [[1]]
    result = ask(read_by_cursor, http=pages_of([body]))
    assert result.status == "failed"
    assert "shop.example answered 200 with what is no JSON" in result.error
    assert "canary" not in result.error


def test_headers_may_have_letters_and_an_answer_no_body(ask: Ask, api: Api) -> None:
    api.first["/any"] = [(200, {"Content-Disposition": "attachment; filename=Größe.csv"})]
    got = ask(lambda context: context.http.get(f"{api.url}/any").headers["Content-Disposition"])
    assert got.result == "attachment; filename=Größe.csv"
    assert ask(lambda context: int(context.http.head(f"{api.url}/any").headers["Content-Length"])).result > 0


def test_headers_and_bodies_arrive_once(ask: Ask, api: Api) -> None:
    def post(context: Context) -> Any:
        context.http.headers["Authorization"] = "Bearer x"
        return context.http.post(f"{api.url}/any", json={"a": "ö"}).json()["meta"]

    assert ask(post).result == {"next": "3"}
    [(_, _, headers, body)] = api.got
    assert (headers["authorization"], json.loads(body)) == ("Bearer x", {"a": "ö"})
    assert headers["user-agent"].startswith("python-httpx")


@pytest.mark.parametrize(
    ("status", "attempts", "error"), [(500, 2, "127.0.0.1 answered 500"), (404, 1, "127.0.0.1 answered 404")]
)
def test_other_statuses_are_tried_again_where_that_may_help(
    ask: Ask, api: Api, status: int, attempts: int, error: str
) -> None:
    api.first["/any"] = [(status, {})] * 9
    result = ask(lambda context: context.http.get(f"{api.url}/any?token=canary"), max_attempts=2)
    assert (result.status, result.attempts) == ("failed", attempts)
    assert error in result.error
    assert "canary" not in result.error


def test_no_request_goes_to_internal_addresses_or_follows_a_link_elsewhere(ask: Ask, api: Api) -> None:
    fails_for_good(ask(lambda context: context.http.get("http://169.254.169.254/")), "nothing is sent there")
    fails_for_good(
        ask(lambda context: context.http.get("http://10.0.0.1/")), "DL_HTTP_PRIVATE_HOSTS may allow the host"
    )
    pages = ask(lambda context: [*context.http.pages(f"{api.url}/elsewhere", "link")])
    fails_for_good(pages, "the next page of 127.0.0.1 is on another server")
    api.first["/any"] = [(302, {"Location": "http://127.0.0.1/x"})]
    fails_for_good(ask(lambda context: context.http.get(f"{api.url}/any")), "127.0.0.1 answered 302")
    fails_for_good(
        ask(lambda context: [*context.http.pages(f"{api.url}/any", "page", rows="items")]),
        "rows: the answer of 127.0.0.1 should be a list under 'items'",
    )


@pytest.mark.usefixtures("silence_is_safe")
def test_a_silent_server_does_not_hold_up_a_stop(ask: Ask, api: Api) -> None:
    assert ask(lambda context: context.http.get(f"{api.url}/silent"), cancel_at=2).status == "canceled"


def test_an_answer_may_not_be_larger_than_its_request_allows_also_unpacked(ask: Ask, api: Api) -> None:
    def get(context: Context, most: int) -> int:
        return len(context.http.get(f"{api.url}/bomb", extensions={"most_bytes": most}).content)

    result = ask(lambda context: get(context, 20 * 2**20))
    fails_for_good(result, "127.0.0.1 has answered with more than 20971520 bytes")
    assert ask(lambda context: get(context, 60 * 2**20)).result == 50 * 2**20


def test_a_request_may_have_its_own_time(ask: Ask, api: Api) -> None:
    result = ask(lambda context: context.http.get(f"{api.url}/silent", timeout=0.3))
    assert "127.0.0.1 was silent for 0.3 s" in result.error


def test_a_request_in_a_test_needs_no_limit_of_the_farm(ask: Ask) -> None:
    def within_a_limit(context: Context) -> Any:
        context.http.limit = "source:shop"
        return context.http.get("https://shop.example/x").json()

    assert ask(within_a_limit, http=pages_of([[1]])).result == [1]
