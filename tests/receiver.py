"""A receiver of webhooks for tests: a real HTTP server that keeps what it gets, and answers as it is told."""

import base64
import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Got(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """`answers` are (status, headers), one for each request; then 204. A status 0 breaks the connection."""

    def __init__(self, silent: bool = False) -> None:
        self.got: list[Got] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.ends = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append(Got(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                if silent:
                    receiver.ends.wait()
                status, headers = receiver.answers.pop(0) if receiver.answers else (204, {})
                if status:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients break off here
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.ends.set()
        self._server.shutdown()
        self._server.server_close()


def is_signed(got: Got, key: str = KEY) -> bool:
    """Whether the request is signed with this key, as a receiver finds out that follows standardwebhooks.com."""
    signed = b".".join([got.headers["webhook-id"].encode(), got.headers["webhook-timestamp"].encode(), got.body])
    mac = hmac.new(base64.b64decode(key.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    given = [each.split(",", 1) for each in got.headers["webhook-signature"].split()]
    return any(version == "v1" and hmac.compare_digest(base64.b64decode(text), mac) for version, text in given)
