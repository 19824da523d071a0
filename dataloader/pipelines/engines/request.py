"""HTTP with JSON to an address of the operator's. No redirect is followed, no proxy of the environment is asked.

The address may have a user and a password: they are sent, and no error shows more of it than its host.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import ssl
import time
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from dataloader.pipelines.engines.engine import Refused, Unreachable

ANSWER_SEC = 3.0  # for an answer; with CANCEL_SEC it ends before DL_KILL_GRACE_SEC does
OUTPUT_SEC = 60.0  # for a program's output, which may be long: while its bytes come
ANSWER_MOST = 64 * 2**20  # bytes of an answer
_WORDS_MOST = 500  # characters of a refusal that an error shows
_PASSING = (408, 425, 429, 502, 503, 504)


class TooLong(Refused):
    """The answer has more than ANSWER_MOST bytes."""


class Server:
    """One server of a cluster."""

    def __init__(self, address: str, token: str | None = None) -> None:
        """`address` is http:// or https://; `token` is sent as a bearer's."""
        parts = urlsplit(address)
        self.host = parts.hostname or ""
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._path = parts.path.rstrip("/")
        self._headers = {"Accept": "*/*"}
        if token or parts.username:
            user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            basic = f"Basic {base64.b64encode(user.encode()).decode()}"
            self._headers["Authorization"] = f"Bearer {token}" if token else basic

    def ask(
        self, method: str, path: str, body: Any = None, within: float = ANSWER_SEC, *, whole: float | None = None
    ) -> Answer:
        """The answer to one request, whatever its status.

        Raises Unreachable where nothing comes for `within` seconds, or where the answer is not complete in `whole`
        seconds, by default `within`. The way to the server may take `within` besides, for each of its addresses.
        """
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        sent = None if body is None else json.dumps(body).encode()
        try:
            with closing(self._connection(within)) as connection:
                connection.connect()
                until = time.monotonic() + (within if whole is None else whole)  # connecting has its own time
                answering = _Answering(connection.sock, until, within)
                connection.request(method, self._path + path, sent, headers)
                answer = http.client.HTTPResponse(answering, method=method)  # type: ignore[arg-type]
                answer.begin()
                content = answer.read(ANSWER_MOST + 1)
                if answer.length and len(content) <= ANSWER_MOST:  # `read` of so many bytes does not say so itself
                    raise http.client.IncompleteRead(content, answer.length)
        except (OSError, http.client.HTTPException) as e:
            raise Unreachable(f"{self.host}:{self._port} {_words(e)}") from None
        if len(content) > ANSWER_MOST:
            raise TooLong(f"{self.host}:{self._port} has answered with more than {ANSWER_MOST} bytes")
        return Answer(f"{self.host}:{self._port}", answer.status, content)

    def _connection(self, within: float) -> http.client.HTTPConnection:
        if self._is_tls:
            return http.client.HTTPSConnection(self.host, self._port, timeout=within, context=_certificates())
        return http.client.HTTPConnection(self.host, self._port, timeout=within)


class _Answering(io.RawIOBase):
    """A reader of a socket that stops at a monotonic instant: the socket's own timeout begins anew with each byte."""

    def __init__(self, connected: socket.socket, until: float, within: float) -> None:
        self._socket, self._until, self._within = connected, until, within
        self._limit()

    def makefile(self, mode: str) -> io.BufferedReader:
        """The file that HTTPResponse reads."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes; raises TimeoutError."""
        self._limit()
        return self._socket.recv_into(buffer)

    def _limit(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(min(left, self._within))


class Answer(NamedTuple):
    """The answer of a server."""

    server: str
    status: int
    content: bytes

    def json(self) -> Any:
        """The document of a good answer; raises Refused for a refusal, Unreachable for one that passes."""
        self.require_good()
        try:
            return json.loads(self.content)
        except ValueError:
            raise Refused(f"{self.server} has answered with something else than JSON") from None

    def require_good(self) -> None:
        """Raise Refused for a refusal, Unreachable for one that passes."""
        if self.status in _PASSING:
            raise Unreachable(f"{self.server} has answered {self.status}")
        if not 200 <= self.status < 300:
            raise Refused(f"{self.server} has answered {self.status}: {self.words}".rstrip(": "))

    @property
    def words(self) -> str:
        """The end of a refusal's text: that is where a stack of Python says what is wrong."""
        return self.content.decode("utf-8", "replace").strip()[-_WORDS_MOST:]


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "has not answered in time"
    if isinstance(error, ConnectionRefusedError):
        return "accepts no connection"
    if isinstance(error, socket.gaierror):
        return "has no address"
    return f"has not answered ({type(error).__name__})"


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
