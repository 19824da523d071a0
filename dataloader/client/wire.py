"""PURE: a method's arguments, the request as it is sent, its answer as it is read, and what may be sent again.

The clients and their transports share this module: they differ only in how they wait.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit
from uuid import UUID, uuid4

from tenacity import RetryCallState, retry_if_exception, stop_before_delay

import dataloader
from dataloader.client.errors import ClientError, QueueFull, Unavailable, Unexpected, from_answer
from dataloader.model.reading import NotUnderstood, read
from dataloader.queue import typed_args

R = TypeVar("R")
ANSWER_LIMIT = 256 * 1024 * 1024  # bytes; no answer of the API is as large
KEPT = 8  # idle connections


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: 200 with a document, or 304 (None)."""

    document: Any
    etag: str | None
    retry_after: float | None


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the API as it is sent, but for the address and the token: a dump of variables may show it.

    The exchange may take `extra` seconds more than the client's timeout.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    content: bytes | None = None
    extra: float = 0
    is_once: bool = False  # it must not be sent twice


class Service:
    """The address of a service, and the token for it. Raises ValueError for a URL or token that is none."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        self.scheme, self.host, self.port, self.path = _address(self.url)
        if token and (not token.isascii() or not token.isprintable() or " " in token):
            raise ValueError("the token should be printable ASCII without spaces")
        # A function, so that no repr, no pickle and no dump of variables contains the token.
        self._token: Callable[[], str | None] = lambda: token
        self._agent = f"dataloader-client/{dataloader.version()}"

    def headers(self, request: Request) -> dict[str, str]:
        """The headers of the request, with the token if there is one."""
        own = {"Accept": "application/json", "User-Agent": self._agent, **request.headers}
        return own | ({"Authorization": f"Bearer {self._token()}"} if self._token() else {})

    def hidden(self, error: ClientError) -> ClientError:
        """The error with the token masked in its texts: a server may repeat the token."""
        if token := self._token():
            error.title, error.detail = error.title.replace(token, "***"), error.detail.replace(token, "***")
            error.args = (error.title,)
        return error

    def no_answer(self, error: Exception) -> Unavailable:
        """The exception for an exchange that this error has ended."""
        made = Unavailable(f"no answer from {self.url}", self.hidden(Unavailable(_reason(error))).title)
        made.is_lasting = isinstance(error, ssl.SSLCertVerificationError | UnicodeError)
        made.is_open = not (made.is_lasting or isinstance(error, ConnectionRefusedError | socket.gaierror))
        return made


def new_key() -> str:
    return f"client-{uuid4()}"


def answer(status: int, reason: str, headers: Mapping[str, str], raw: bytes) -> Answer:
    """An answer as it has arrived; raises ClientError for all but 200 and 304."""
    headers = {name.lower(): value for name, value in headers.items()}
    wait = seconds(headers.get("retry-after"))
    try:
        document = json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        document = None
    if status == 304 or (status == 200 and document is not None):
        return Answer(document, headers.get("etag"), wait)
    if status < 400:
        kind = f"HTTP {status}" if status != 200 else "text that is no JSON"
        raise Unexpected("The answer is not understood", f"it is {kind}; is this the address of the dataloader API?")
    raise from_answer(status, reason, document, wait)


def understood(kind: type[R], document: Any) -> R:
    """The document as a value of `kind`; raises Unexpected."""
    try:
        return read(kind, document)
    except NotUnderstood as e:
        raise Unexpected("The answer is not understood", str(e)) from None


def request(route: str, given: Mapping[str, Any], headers: Mapping[str, str], **more: Any) -> Request:
    """The request to the operation of this route; what the path does not name is the body, or the query.

    Raises ValueError for a body that JSON cannot say.
    """
    method, _, template = route.partition(" ")
    rest, query, target = dict(given), {}, "/api/v1"
    for part in template.split("/")[1:]:
        text = quote(str(rest.pop(part[1:-1])), safe="") if part.startswith("{") else part
        # Clients and proxies take these names out of a path; at its end a queue's name may look like another address.
        if text in (".", "..") or (part == "{queue}" and "%2F" in text and template.endswith(part)):
            text, query["name"] = "-", unquote(text)
        target += f"/{text}"
    named, content = jsonable(rest), None
    if method in ("POST", "PUT"):
        content = json.dumps(named, ensure_ascii=False, allow_nan=False).encode()
        headers = {**headers, "Content-Type": "application/json"}
    else:
        query |= {name: value for name, value in named.items() if value is not None}
    return Request(method, target + (f"?{urlencode(query)}" if query else ""), headers, content, **more)


def jsonable(value: Any, name: str = "") -> Any:
    """The value as JSON has it: ids and times as texts, a pydantic model as an object."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping) or hasattr(value, "model_dump"):
        return {key: jsonable(each, key) for key, each in typed_args.plain(value).items()}
    if isinstance(value, list | tuple):
        return [jsonable(each, name) for each in value]
    if not isinstance(value, datetime):
        return value
    if value.utcoffset() is None:
        raise ValueError(f"{name} should be a datetime with a time zone")
    return value.isoformat()


def checked_size(size: int) -> None:
    """Raise Unexpected for an answer of more than ANSWER_LIMIT bytes."""
    if size > ANSWER_LIMIT:
        raise Unexpected("The answer is too large", f"it has more than {ANSWER_LIMIT >> 20} MB")


def repetition(patience: float) -> dict[str, Any]:
    """When tenacity sends a request again: while the service is away, for so many seconds."""
    return {
        "retry": retry_if_exception(
            lambda e: isinstance(e, QueueFull | Unavailable) and not getattr(e, "is_lasting", False)
        ),
        "wait": _pause,
        "stop": stop_before_delay(patience),
        "reraise": True,
    }


def seconds(text: str | None) -> float | None:
    """The seconds of a Retry-After, which is a number or a date."""
    if not text:
        return None
    try:
        return max(0.0, float(text) if text.isdigit() else parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _pause(state: RetryCallState) -> float:
    """The seconds until the next try: growing, jittered, at least Retry-After."""
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after", None) or 0.0
    longest: float = min(5.0, 0.2 * 2 ** min(state.attempt_number, 10))
    return asked + random.uniform(0.05, longest)  # noqa: S311  jitter


def _address(url: str) -> tuple[str, str, int | None, str]:
    """Scheme, host, port and path of a URL. Raises ValueError, whose text does not repeat a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("the URL should be http://host:port or https://host") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the URL should begin with http:// or https:// and name a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL should have no user or password; use a token")
    if parts.query or parts.fragment or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise ValueError("the URL should have no query, no fragment and no spaces")
    return parts.scheme, parts.hostname, port, parts.path


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, UnicodeError):
        return "the host's name is not valid"
    if not isinstance(error, OSError):
        return f"it is no whole HTTP answer ({type(error).__name__})"
    return error.strerror or str(error) or type(error).__name__
