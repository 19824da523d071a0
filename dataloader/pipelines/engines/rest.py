"""HTTP with JSON to the servers of Ray and Spark, whose addresses are the operator's. No redirect is followed."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from dataloader.pipelines import http
from dataloader.pipelines.http import Refused, Unreachable

ANSWER_SEC = 3.0  # for an answer; with CANCEL_SEC it ends before DL_KILL_GRACE_SEC does
OUTPUT_SEC = 60.0  # for a program's output, which may be long: while its bytes come
ANSWER_MOST = 64 * 2**20  # bytes of an answer
_WORDS_MOST = 500  # characters of a refusal that an error shows
_PASSING = (408, 425, 429, 502, 503, 504)


class Answer(NamedTuple):
    """The answer of a server."""

    server: str
    status: int
    content: bytes

    def json(self) -> Any:
        """The document of a good answer; raises as `require_good`, and Refused where it is no JSON."""
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
            # A stack of Python says at its end what is wrong.
            words = self.content.decode("utf-8", "replace").strip()[-_WORDS_MOST:]
            raise Refused(f"{self.server} has answered {self.status}: {words}".rstrip(": "))


class Server:
    """One server of a cluster. Its address may have a user and a password."""

    def __init__(self, address: str, token: str | None = None) -> None:
        """`address` is http:// or https://; `token` is sent as a bearer's."""
        base = http.Address.of(address)
        self._base = base._replace(name=f"{base.host}:{base.port}", target=base.target.rstrip("/"))
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(
        self, method: str, path: str, body: Any = None, within: float = ANSWER_SEC, *, whole: float | None = None
    ) -> Answer:
        """The answer to one request, whatever its status.

        Raises Unreachable where nothing comes for `within` seconds, or where the answer is not complete in `whole`
        seconds, by default `within`. The way to the server may take `within` besides.
        """
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        sent = None if body is None else json.dumps(body).encode()
        to = self._base._replace(target=self._base.target + path)
        times = http.Times(within, within, within if whole is None else whole)
        with http.exchange(to, times, method, headers, sent) as answer:
            return Answer(self._base.name, answer.status, answer.content(ANSWER_MOST))
