"""HTTP/1.1 to one service, by the standard library: kept connections, a limit to every wait, an exception per error.

The transport follows no redirect and uses no proxy of the environment: the token goes to the service's address alone.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

import dataloader
from dataloader.client.errors import ClientError, Unavailable, Unexpected, of_answer

ANSWER_LIMIT = 256 * 1024 * 1024  # bytes; no answer of the API is as large
_KEPT = 8  # idle connections


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: 200 with a document, or 304."""

    status: int
    document: Any
    etag: str | None
    retry_after: float | None


class Token:
    """A bearer token that no repr and no dump of variables contains."""

    __slots__ = ("_header",)

    def __init__(self, text: str) -> None:
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("the token should be printable ASCII without spaces")
        self._header = f"Bearer {text}"

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> Any:
        raise TypeError("a token is not to be pickled")

    def headers(self) -> dict[str, str]:
        """The Authorization header."""
        return {"Authorization": self._header}

    def hidden(self, text: str) -> str:
        """`text` with the token masked: a server may repeat it."""
        return text.replace(self._header.removeprefix("Bearer "), "***")


class Transport:
    """The connections to one service. Threads may share them; a forked process opens its own."""

    def __init__(self, url: str, token: str | None, timeout: float, context: ssl.SSLContext | None = None) -> None:
        self._idle: deque[tuple[int, http.client.HTTPConnection]] = deque()
        self.url = url.rstrip("/")
        self._scheme, self._host, self._port, self._path = _address(self.url)
        self._token = Token(token) if token else None
        self._timeout = timeout
        self._context = context
        self._agent = _agent()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        extra: float = 0,
        kept: bool = True,
    ) -> Answer:
        """One exchange within the timeout and `extra` seconds; raises ClientError for all but 200 and 304.

        `kept` False: on a new connection. The server may close a kept connection at the same moment; then it is unknown
        whether it has done the request.
        """
        until = time.monotonic() + self._timeout + extra
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = self._path + path + (f"?{urlencode(given)}" if given else "")
        content = None if body is None else json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        whole = {"Accept": "application/json", "User-Agent": self._agent, **(headers or {})}
        if content is not None:
            whole["Content-Type"] = "application/json"
        try:
            return self._exchange(method, target, content, whole, until, kept)
        except ClientError as e:
            raise self._hidden(e) from None
        except (OSError, http.client.HTTPException, UnicodeError) as e:
            raise self._no_answer(e) from None

    def close(self) -> None:
        """Close the idle connections; the transport may be used again."""
        while self._idle:
            self._idle.pop()[1].close()

    def __del__(self) -> None:
        self.close()

    def _exchange(
        self, method: str, target: str, content: bytes | None, headers: dict[str, str], until: float, kept: bool
    ) -> Answer:
        connection = (self._kept() if kept else None) or self._new()
        try:
            _allow(connection, until)
            token = self._token.headers() if self._token else {}
            connection.request(method, target, content, {**headers, **token})
            _allow(connection, until)
            response = connection.getresponse()
            raw = _read(connection, response, until)
        except BaseException:
            connection.close()
            raise
        if response.will_close or len(self._idle) >= _KEPT:
            connection.close()
        else:
            self._idle.append((os.getpid(), connection))
        return _answer(response, raw)

    def _kept(self) -> http.client.HTTPConnection | None:
        """An idle connection that the server has not closed; None: there is none."""
        while self._idle:
            try:
                owner, connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if owner == os.getpid() and connection.sock and not _is_readable(connection.sock):
                return connection
            connection.close()
        return None

    def _new(self) -> http.client.HTTPConnection:
        if self._scheme == "http":
            return http.client.HTTPConnection(self._host, self._port)
        self._context = self._context or ssl.create_default_context()
        return http.client.HTTPSConnection(self._host, self._port, context=self._context)

    def _hidden(self, error: ClientError) -> ClientError:
        if self._token:
            error.title, error.detail = self._token.hidden(error.title), self._token.hidden(error.detail)
            error.args = (error.title,)
        return error

    def _no_answer(self, error: Exception) -> Unavailable:
        made = Unavailable(f"no answer from {self.url}", self._hidden(Unavailable(_reason(error))).title)
        made.is_lasting = isinstance(error, ssl.SSLCertVerificationError | UnicodeError)
        made.is_open = not (made.is_lasting or isinstance(error, ConnectionRefusedError | socket.gaierror))
        return made


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


def _allow(connection: http.client.HTTPConnection, until: float) -> None:
    """Limit the next wait to `until` (monotonic); raises TimeoutError when that is over."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.timeout = left
    if connection.sock:
        connection.sock.settimeout(left)


def _read(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, until: float) -> bytes:
    """The body, read until `until` at the latest, however slowly it arrives."""
    parts, size = [], 0
    while True:
        _allow(connection, until)
        part = response.read1(1 << 16)
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > ANSWER_LIMIT:
            raise Unexpected("The answer is too large", f"it has more than {ANSWER_LIMIT >> 20} MB")
    if response.length:  # read1 does not report a missing rest
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    response.close()  # now the connection takes another request
    return b"".join(parts)


def _answer(response: http.client.HTTPResponse, raw: bytes) -> Answer:
    wait = _seconds(response.headers.get("Retry-After"))
    try:
        document = json.loads(raw) if raw else None
        is_json = True
    except (ValueError, RecursionError):
        document, is_json = None, False
    if response.status == 304 or (response.status == 200 and is_json):
        return Answer(response.status, document, response.headers.get("ETag"), wait)
    if response.status < 400:
        what = f"HTTP {response.status}" if response.status != 200 else "text that is no JSON"
        raise Unexpected("The answer is not understood", f"it is {what}; is this the address of the dataloader API?")
    raise of_answer(response.status, response.reason, document, wait)


def _seconds(text: str | None) -> float | None:
    """The seconds of a Retry-After, which is a number or a date."""
    if not text:
        return None
    try:
        return max(0.0, float(text) if text.isdigit() else parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _is_readable(sock: socket.socket) -> bool:
    """True when an idle socket is readable, which means that the server has closed it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, UnicodeError):
        return "the host's name is not valid"
    if isinstance(error, http.client.HTTPException) and not isinstance(error, OSError):
        return f"it is no whole HTTP answer ({type(error).__name__})"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _agent() -> str:
    return f"dataloader-client/{dataloader.version()}"
