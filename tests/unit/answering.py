"""An HTTP service for tests of clients: it gives the answers of a list, and keeps the requests."""

import json
import time
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from serving import Handler, Server

from dataloader.ops.op import adapter, may_be_none, plain_type

T = TypeVar("T")

ID = "01890a5d-ac96-474b-8cce-b302099a8057"
TOKEN = "dl_canary-canary-canary"
STARTED = {"job_id": ID, "status": "queued"}


class Asked(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


class Answer(NamedTuple):
    """The answer to one request; `raw` replaces the document, `close` ends the connection without an answer."""

    status: int = 200
    document: Any = None
    headers: dict[str, str] = {}  # noqa: RUF012
    raw: bytes | None = None
    close: bool = False
    delay: float = 0.0


class Service(Server):
    """Gives the answers of its list in their order, and repeats the last one."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.has_no_names = False  # True: as an older service, which cannot say whether it knows a name
        self.answers: list[Answer] = [Answer(document=STARTED)]
        service = self

        class Answering(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                service.reply(self)

            do_POST = do_PUT = do_DELETE = do_GET

        super().__init__(Answering)

    def reply(self, handler: Handler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        headers = {name.lower(): value for name, value in handler.headers.items()}
        if self.has_no_names and handler.path.startswith("/api/v1/names"):
            self._send(handler, problem(404, "not-found"))
            return
        self.asked.append(Asked(handler.command, handler.path, headers, body, handler.client_address[1]))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        time.sleep(answer.delay)
        if answer.close:
            handler.close_connection = True
            return
        self._send(handler, answer)

    def _send(self, handler: Handler, answer: Answer) -> None:
        raw = answer.raw if answer.raw is not None else json.dumps(answer.document).encode()
        raw = b"" if answer.status == 304 else raw
        handler.answer(answer.status, raw, answer.headers)


def problem(status: int, kind: str, detail: str = "", **more: Any) -> Answer:
    document = {"type": f"/problems/{kind}", "title": f"title {kind}", "status": status, "detail": detail}
    headers = more.pop("headers", {})
    return Answer(status, document | {"request_id": "r1", "errors": []} | more, headers)


def state(status: str, **more: Any) -> dict[str, Any]:
    """A job's status, or a job of a list, whose other fields are null."""
    names = {"queue": "q", "task": "t", "lock_key": "k", "partition_key": "", "priority": 100, "max_attempts": 5}
    times = dict.fromkeys(("created_at", "available_at", "changed_at"), "2026-01-01T00:00:00Z")
    at = {"attempt": 1, "error": None, "progress": {}, "cancel_requested": False}
    return {"job_id": ID, "status": status} | at | names | times | more


def filled(kind: type[T], **given: Any) -> T:
    """An answer of this type with these fields; all others are None, zero, empty or False."""
    hints = get_type_hints(kind)
    return kind(**{name: given.get(name, _least(hint)) for name, hint in hints.items()})


def shown(kind: type, **given: Any) -> dict[str, Any]:
    found: dict[str, Any] = adapter(kind).dump_python(filled(kind, **given), mode="json")
    return found


def _least(hint: Any) -> Any:
    kind = plain_type(hint)
    if get_origin(kind) is Literal:
        return None if may_be_none(hint) else get_args(kind)[0]
    plain = get_origin(kind) or kind
    return None if may_be_none(hint) or plain not in (int, float, str, bool, list, dict) else plain()
