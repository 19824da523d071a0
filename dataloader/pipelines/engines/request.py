"""HTTP with JSON to an address of the operator's. No redirect is followed, no proxy of the environment is asked.

The address may have a user and a password: they are sent, and no error shows more of it than its host.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from dataloader.pipelines.engines.engine import Refused, Unreachable

ANSWER_SEC = 3.0  # without a byte; with CANCEL_SEC it ends before DL_KILL_GRACE_SEC does
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

    def ask(self, method: str, path: str, body: Any = None, within: float = ANSWER_SEC) -> Answer:
        """The answer to one request, whatever its status; raises Unreachable where there is none within the time."""
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        sent = None if body is None else json.dumps(body).encode()
        try:
            with closing(self._connection(within)) as connection:
                connection.request(method, self._path + path, sent, headers)
                answer = connection.getresponse()
                content = answer.read(ANSWER_MOST + 1)
        except (OSError, http.client.HTTPException) as e:
            raise Unreachable(f"{self.host}:{self._port} {_words(e)}") from None
        if len(content) > ANSWER_MOST:
            raise TooLong(f"{self.host}:{self._port} has answered with more than {ANSWER_MOST} bytes")
        return Answer(f"{self.host}:{self._port}", answer.status, content)

    def _connection(self, within: float) -> http.client.HTTPConnection:
        if self._is_tls:
            return http.client.HTTPSConnection(self.host, self._port, timeout=within, context=_certificates())
        return http.client.HTTPConnection(self.host, self._port, timeout=within)


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
