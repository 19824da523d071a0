"""`context.http`: a session of httpx for pipelines that ask an API.

The connections are those of `load.http`: the same checks of addresses and certificates, the same times, and safe points
while the server is silent. httpx is imported by the first use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import httpx

from dataloader.pipelines import http
from dataloader.pipelines.context import PermanentError

MOST_BYTES = 256 * 2**20  # of one answer, as it comes and unpacked
_PIECE = 2**12  # bytes that are unpacked at once: zstd makes up to 32,000 bytes of one
_LONGEST_SEC = 86_400.0  # where a request has timeout=None
_TIMES = httpx.Timeout(60.0, connect=15.0)


class BadStatus(PermanentError):
    """An API has answered with a status that another attempt would get again; `status` is its number."""

    def __init__(self, host: str, status: int) -> None:
        super().__init__(f"{host} answered {status}")
        self.status = status


class Page(NamedTuple):
    """One page of an API: its rows, and where the next one begins, for a checkpoint; False behind the last page."""

    rows: list[Any]
    next: Any


class Session(httpx.Client):
    """httpx.Client, whose calls raise what a job needs.

    A 429 or 503 with Retry-After raises Retry, so the job runs again after that time. Another status that passes, and
    a server without an answer, raises http.Unreachable. Any other status from 300 on raises BadStatus. A request may
    have limits of its own: `timeout`, and in `extensions` the `most_bytes` of its answer.
    """

    limit: str | None = None  # of the farm: each request waits for a token of its rate, as a start of a job does

    def __init__(self, transport: httpx.BaseTransport, pace: Callable[[str], None]) -> None:
        hooks: dict[str, list[Callable[..., Any]]] = {"request": [self._paced], "response": [_require_answer]}
        super().__init__(transport=transport, trust_env=False, event_hooks=hooks, timeout=_TIMES)
        self._pace = pace

    def _paced(self, _: httpx.Request) -> None:
        if self.limit is not None:
            self._pace(self.limit)

    def pages(
        self,
        url: str,
        by: Literal["link", "cursor", "offset", "page"],
        *,
        rows: str = "",
        cursor: str = "next",
        name: str = "",
        begin: Any = None,
        params: dict[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Page]:
        """The pages of a list, one request each.

        `by` says how the next page is asked for: by the URL of the header Link, by a cursor of the answer, by the
        number of rows or of the page; `name` is that parameter, by default `cursor`, `offset` or `page`. `rows` and
        `cursor` are paths such as "data.items" in the JSON of an answer; without `rows` the answer is the list. `begin`
        is the `next` of the page before, from a checkpoint; for False there are no pages. `options` are those of httpx,
        such as `headers`. Raises PermanentError where an answer has no such list, leads to another server or has the
        rows of the page before it, and Unreachable where it is no JSON.
        """
        asked: Any
        last: Any = None
        here: Any = {"offset": 0, "page": 1}.get(by) if begin is None else begin
        while here is not False:
            if by == "link":
                asked, url = (params if here is None else None), here or url  # a link has all parameters
            else:
                asked = {**(params or {}), **({} if here is None else {name or by: here})}
            if asked or self.params:  # httpx puts them in the place of the URL's own
                asked = httpx.URL(url).params.merge(asked)
            answer = self.get(url, params=asked or None, **options)
            document, host = _document(answer), answer.url.host
            found = _at(document, rows)
            if not isinstance(found, list):
                where = f"under {rows!r}" if rows else "as a whole"
                raise PermanentError(f"rows: the answer of {host} should be a list {where}")
            before, here = here, _next(by, answer, document, cursor, here, len(found))
            if here == before and not found:  # one cursor for all pages, as of Elasticsearch
                here = False
            elif found and found == last:
                raise PermanentError(f"{host}: two pages in turn are equal; does it give pages by {name or by}?")
            last = found
            if found or by in ("link", "cursor"):
                yield Page(found, here)


class _Pieces(httpx.SyncByteStream):
    """The body of an answer as it comes."""

    def __init__(self, answer: http.Answer) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        return iter(partial(self._answer.read, _PIECE), b"")


class Transport(httpx.BaseTransport):
    """The way of httpx's requests over our own connections; a request has one, and its answer comes as a whole."""

    def __init__(self, check: Callable[[], None], private_hosts: Collection[str]) -> None:
        """`check` is the safe point while a server is silent; `private_hosts` may have private addresses."""
        self._check, self._guard = check, http.guard_but(private_hosts)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        headers = {name.title(): value for name, value in request.headers.items()}  # as those of `exchange`
        body, guard, check = request.read() or None, self._guard, self._check
        most, limits = request.extensions.get("most_bytes", MOST_BYTES), request.extensions.get("timeout", {})
        times = http.Times(*(limits.get(name) or _LONGEST_SEC for name in ("connect", "read")))
        try:
            address = http.Address.of(str(request.url))
            with http.exchange(address, times, request.method, headers, body, guard=guard, check=check) as answer:
                given = httpx.Headers(answer.headers.items(), encoding="latin-1")  # as http.client reads them
                packed, content = httpx.Response(answer.status, headers=given, stream=_Pieces(answer)), bytearray()
                for piece in packed.iter_bytes():
                    content += piece
                    if max(len(content), packed.num_bytes_downloaded) > most:
                        raise http.TooLong(f"{answer.name} has answered with more than {most} bytes")
                for name in ("Content-Encoding", "Content-Length") if content else ():  # of the packed body
                    given.pop(name, None)
                return httpx.Response(answer.status, headers=given, content=bytes(content))
        except (http.Refused, ValueError) as e:
            raise PermanentError(str(e)) from None


def _require_answer(response: httpx.Response) -> None:
    host, status = response.url.host, response.status_code
    http.require_final(host, status, response.headers.get("Retry-After"))
    if status >= 300:
        raise BadStatus(host, status)


def _document(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:  # its text may have a part of the answer
        host, status = answer.url.host, answer.status_code
    raise http.Unreachable(f"{host} answered {status} with what is no JSON, or is cut")


def _next(by: str, answer: httpx.Response, document: Any, cursor: str, here: Any, count: int) -> Any:
    """Where the next page begins; False behind the last one."""
    if by == "cursor":
        return _at(document, cursor) or False
    if by != "link":
        return here + (count if by == "offset" else 1) if count else False
    if not (link := answer.links.get("next", {}).get("url")):
        return False
    there = answer.url.join(link)
    if (there.scheme, there.netloc) != (answer.url.scheme, answer.url.netloc):
        raise PermanentError(f"the next page of {answer.url.host} is on another server, which would get your headers")
    return str(there)


def _at(document: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        document = document.get(name) if isinstance(document, dict) else None
    return document
