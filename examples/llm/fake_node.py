"""A node without a model: it speaks the protocol of Ollama, or OpenAI's as servers of MLX models do, and says words.

    python fake_node.py --port 11434                       a node like Ollama's
    python fake_node.py --port 11435 --protocol mlx        one like mlx_lm's server
    python fake_node.py --port 11434 --behave hangs        one that falls silent in the middle of its answer

Tests and run.py start such nodes in their own process and change `behave` between two jobs.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any

WORDS = ["Forty-two", "is", "the", "answer", "to", "this", "question", "."]
BEHAVIOURS = {
    "answers": "says its words",
    "slow": "says a word each `pause_sec`",
    "hangs": "says two words, then nothing",
    "mute": "accepts the request and says nothing at all",
    "echoes": "says the prompt",
    "empty": "ends without a word",
    "fails": "answers 500",
    "busy": "answers 503, as Ollama does with a full queue",
    "cuts": "says two words, then closes the connection",
    "breaks": "says two words, then an error",
    "moves": "redirects to `elsewhere`",
    "babbles": "says what is no document of its protocol",
}


class FakeNode:
    """A node on a port of 127.0.0.1, from its creation until `close`."""

    def __init__(self, protocol: str = "ollama", models: tuple[str, ...] = ("llama3.2:3b",), port: int = 0) -> None:
        self.protocol = protocol
        self.models = models
        self.loaded: tuple[str, ...] = ()
        self.behave = "answers"
        self.says = WORDS
        self.streams: list[bytes] | None = None  # the pieces of the answer's body as they are, in place of the words
        self.pause_sec = 0.05
        self.elsewhere = ""
        self.status: dict[str, Any] | None = None  # what /status says; None: there is none
        self.asked: list[tuple[str, dict[str, Any] | None]] = []  # path and body of each request
        self.passwords: set[str | None] = set()  # the Authorization of the requests
        self.silent = threading.Event()  # set while a request waits for words that do not come
        self.hung_up = threading.Event()  # set when the client has closed such a connection
        self.hung_up_at = 0.0
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for OLLAMA_API_URL or MLX_API_URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def questions(self) -> list[dict[str, Any]]:
        """The bodies of the requests for an answer."""
        return [body for _, body in self.asked if body is not None]

    def close(self) -> None:
        """End the server and its connections."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for_hang_up(self, handler: BaseHTTPRequestHandler) -> None:
        """Say nothing until the client closes the connection."""
        handler.connection.settimeout(0.02)
        self.silent.set()
        while not self._closing.is_set():
            try:
                if not handler.connection.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        self.left()

    def left(self) -> None:
        """Note that the client has closed its connection before the end."""
        self.hung_up_at = time.monotonic()
        self.hung_up.set()

    def words(self, prompt: str) -> Iterator[str]:
        """The words of the answer; the behaviour decides which, how fast, and whether all: else it raises Cut."""
        said = {"echoes": prompt.split(), "empty": []}.get(self.behave, self.says)
        for number, word in enumerate(said):
            if self.behave == "slow":
                self._closing.wait(self.pause_sec)
            if number == 2 and self.behave in ("hangs", "cuts", "breaks"):
                raise Cut
            yield word if number == 0 else f" {word}"


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # close() waits for them

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may leave when it likes."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Cut(Exception):
    """The answer ends here, without its end."""


def _handler(node: FakeNode) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            node.asked.append((self.path, None))
            node.passwords.add(self.headers["Authorization"])
            if node.behave == "moves":
                return self._move()
            document = _about(node).get(self.path)
            return self._send(404 if document is None else 200, document or {"error": "not found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            node.asked.append((self.path, body))
            node.passwords.add(self.headers["Authorization"])
            self.close_connection = True
            if node.behave == "moves":
                return self._move()
            if node.behave == "mute":
                return node.wait_for_hang_up(self)
            if node.behave == "fails":
                return self._send(500, {"error": "model runner has unexpectedly stopped"})
            if node.behave == "busy":
                return self._send(503, {"error": "server busy, please try again.  maximum pending requests exceeded"})
            return self._stream(body)

        def _move(self) -> None:
            self.send_response(302)
            self.send_header("Location", node.elsewhere + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, status: int, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, body: dict[str, Any]) -> None:
            """Ollama's answer is chunked; that of mlx_lm's server ends with the connection."""
            is_ollama = node.protocol == "ollama"
            self.send_response(200)
            self.send_header("Content-Type", "application/x-ndjson" if is_ollama else "text/event-stream")
            self.send_header(*(("Transfer-Encoding", "chunked") if is_ollama else ("Connection", "close")))
            self.end_headers()
            try:
                for line in (_ollama if is_ollama else _mlx)(node, body) if node.streams is None else node.streams:
                    self._piece(line)
                if node.streams and node.behave == "hangs":
                    raise Cut
                if is_ollama:
                    self.wfile.write(b"0\r\n\r\n")
            except Cut:
                self._cut()
            except OSError:
                node.left()

        def _piece(self, line: bytes) -> None:
            framed = b"%x\r\n%s\r\n" % (len(line), line) if node.protocol == "ollama" else line
            self.wfile.write(framed)

        def _cut(self) -> None:
            if node.behave == "hangs":
                node.wait_for_hang_up(self)
            if node.behave == "breaks":
                error = json.dumps({"error": "an error was encountered while running the model"}).encode()
                self._piece((b"" if node.protocol == "ollama" else b"data: ") + error + b"\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Be quiet."""

    return Handler


def _about(node: FakeNode) -> dict[str, Any]:
    """The node's answers about itself, by path."""
    said: dict[str, Any] = {"/status": node.status} if node.status is not None else {}
    if node.protocol == "ollama":
        said["/api/tags"] = {"models": [{"name": model, "model": model, "size": 1} for model in node.models]}
        said["/api/ps"] = {"models": [{"name": model, "model": model} for model in node.loaded]}
    else:
        said["/v1/models"] = {"object": "list", "data": [{"id": model, "object": "model"} for model in node.models]}
        said["/health"] = {"status": "ok"}
    return said


def _ollama(node: FakeNode, body: dict[str, Any]) -> Iterator[bytes]:
    """The lines of /api/generate."""
    if node.behave == "babbles":
        yield b"<html>Welcome</html>\n"
    limit = body.get("options", {}).get("num_predict")
    count = 0
    for word in islice(node.words(body["prompt"]), limit):
        count += 1
        yield json.dumps({"model": body["model"], "response": word, "done": False}).encode() + b"\n"
    end = {"model": body["model"], "response": "", "done": True, "done_reason": "stop", "eval_count": count}
    yield json.dumps(end).encode() + b"\n"


def _mlx(node: FakeNode, body: dict[str, Any]) -> Iterator[bytes]:
    """The events of /v1/chat/completions."""
    if node.behave == "babbles":
        yield b"<html>Welcome</html>\n\n"
    yield b": keepalive 1/4\n\n"
    count = 0
    for word in islice(node.words(body["messages"][-1]["content"]), body.get("max_tokens")):
        count += 1
        yield _event({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
    yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if body.get("stream_options", {}).get("include_usage"):
        yield _event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}})
    yield b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    """Letters beyond ASCII stand there as they are, as in an answer of mlx_lm's server."""
    return f"data: {json.dumps({'object': 'chat.completion.chunk'} | document, ensure_ascii=False)}\n\n".encode()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A node without a model, for tries of llm.generate.")
    parser.add_argument("--port", type=int, default=11434)
    parser.add_argument("--protocol", choices=("ollama", "mlx"), default="ollama")
    parser.add_argument("--models", default="llama3.2:3b,qwen2.5-coder:32b", help="names, separated by commas")
    parser.add_argument("--behave", choices=sorted(BEHAVIOURS), default="answers")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two words of a slow one")
    given = parser.parse_args()
    node = FakeNode(given.protocol, tuple(given.models.split(",")), given.port)
    node.behave, node.pause_sec = given.behave, given.pause
    print(f"{node.url}: {given.protocol}, {given.models}; it {BEHAVIOURS[given.behave]}", flush=True)  # noqa: T201
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        node.close()


if __name__ == "__main__":
    main()
