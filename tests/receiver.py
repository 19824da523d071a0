"""A receiver of webhooks for tests: a real HTTP server that keeps what it gets, and answers as it is told."""

import base64
import hashlib
import hmac
import json
import threading
from typing import Any, NamedTuple

from serving import Handler, Server

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Got(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Receiver(Server):
    """`answers` are (status, headers), one for each request; then 204. A status 0 breaks the connection."""

    def __init__(self, silent: bool = False) -> None:
        self.got: list[Got] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.ends = threading.Event()
        receiver = self

        class Receiving(Handler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append(Got(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                if silent:
                    receiver.ends.wait()
                status, headers = receiver.answers.pop(0) if receiver.answers else (204, {})
                if status:
                    self.answer(status, headers=headers)

            do_GET = do_POST

        super().__init__(Receiving)

    def close(self) -> None:
        self.ends.set()
        super().close()


def is_signed(got: Got, key: str = KEY) -> bool:
    """Whether the request is signed with this key, as a receiver finds out that follows standardwebhooks.com."""
    signed = b".".join([got.headers["webhook-id"].encode(), got.headers["webhook-timestamp"].encode(), got.body])
    mac = hmac.new(base64.b64decode(key.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    given = [each.split(",", 1) for each in got.headers["webhook-signature"].split()]
    return any(version == "v1" and hmac.compare_digest(base64.b64decode(text), mac) for version, text in given)
