"""The routes of /api/v1, made from the operations: each checks its parameters, and calls the function.

A field or parameter that is not known, given twice or out of bounds is refused, and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, get_args
from urllib.parse import urlencode

from flask import Blueprint, Response, g, jsonify, request, url_for
from pydantic import BaseModel, Field
from pydantic_core import to_jsonable_python

from dataloader import ops
from dataloader.api.web import auth, cache, long_poll
from dataloader.api.web.endpoint import JSON, job_id, session
from dataloader.config import Settings
from dataloader.model.farm import Fault
from dataloader.model.reading import written
from dataloader.ops import checks
from dataloader.ops.adding import BATCH_DEPTH, BATCH_JOBS, BATCH_LIMIT
from dataloader.ops.errors import Problem, invalid
from dataloader.ops.op import Call, Input, Op, Texts, adapter, bounds, fields_set, plain_type
from dataloader.queue.new_job import DEPTH_LIMIT, FAULTS_SHOWN

# A name may be any percent-encoded text; at the end of a path it is one that leads to no other address.
_CONVERTERS = {"queue": "queue", "job_id": "job"}
_KEY = re.compile(r"[ -~]{1,255}")


class Named(Texts):
    """The query of an address below a queue or a task."""

    name: str | None = Field(
        default=None,
        pattern=r"^(\.|\.\.|[\s\S]*/[\s\S]*)$",
        max_length=512,
        description="the queue or the task, for the names that a path may not hold: `.` and `..`, which clients and"
        " proxies take out of it, and names with a slash, of which `a/pause` ends as another address does; the path has"
        " any other part in their place, such as `-`",
    )


_NAMED = {"queue", "task"}


def routes() -> Blueprint:
    """A blueprint with a route for each operation."""
    blueprint = Blueprint("operations", __name__, url_prefix="/api/v1")
    for each in ops.load().values():
        view = long_poll.status if each.name == "status" else _view(each)
        blueprint.add_url_rule(_rule(each), each.name, view, methods=[each.method])
    return blueprint


@contextmanager
def calling(settings: Settings | None = None) -> Iterator[Call]:
    """The call of this request; its session is borrowed when it is first used, and given back at the end."""
    with ExitStack() as stack:
        yield Call(
            lambda: stack.enter_context(session()),
            auth.who(),
            settings or auth.settings(),
            auth.may("read"),
            auth.asker(),
            request.headers.get("traceparent"),
            cache.outlook,
            cache.counts,
            cache.schemas,
        )


def _rule(op: Op) -> str:
    *before, last = [part[1:-1] if part.startswith("{") else part for part in op.path.split("/")]
    parts = [f"<anything:{part}>" if part in op.in_path else part for part in before]
    if last in op.in_path:
        words = get_args(plain_type(op.parameters[last].annotation))
        last = f"<any{words}:{last}>" if words else f"<{_CONVERTERS.get(last, 'anything')}:{last}>"
    return "/".join([*parts, last])


class Models(NamedTuple):
    """The models of the parameters in a path (but a job's id), a query and a body."""

    path: type[BaseModel]
    query: type[BaseModel]
    body: type[BaseModel] | None
    body_may_be_empty: bool


def models(op: Op) -> Models:
    """The models by which requests for an operation are checked."""
    rest = [name for name in op.parameters if name not in op.in_path]
    base = Texts if _NAMED.isdisjoint(op.in_path) else Named
    body = (op.body or op.model(rest, Input, "Body")) if op.method in ("POST", "PUT") else None
    return Models(
        op.model([name for name in op.in_path if name != "job_id"], Texts, "Path"),
        op.model(() if op.method != "GET" else rest, base, "Query", is_text=True),
        body,
        body is not None and not any(op.parameters[name].is_required for name in rest),
    )


def _view(op: Op) -> Any:
    path_model, query_model, body_model, may_be_empty = models(op)
    texts = [bound for each in op.parameters.values() for bound in bounds(each.annotation)]
    is_batch = any(getattr(bound, "max_length", 0) >= BATCH_JOBS for bound in texts)
    limit = BATCH_LIMIT if is_batch else checks.BODY_LIMIT
    depth = BATCH_DEPTH if op.name == "trigger_many" else DEPTH_LIMIT

    def view(**path: Any) -> Response:
        given, ids = _query(query_model), {"job_id": job_id(path.pop("job_id"))} if "job_id" in path else {}
        given |= ids | fields_set(checks.validated(path_model, path))
        if (noun := _NAMED & path.keys()) and (name := given.pop("name", None)):
            given |= fields_set(checks.validated(path_model, {**path, noun.pop(): name}))
        if body_model:
            request.max_content_length = limit
            body = _body(depth, may_be_empty)
            if "Idempotency-Key" in op.headers:
                body = _with_key(body)
            given |= body if op.body else fields_set(checks.validated(body_model, body))
        with calling() as call:
            answer = op.run(call, given)
        if op.is_change:
            g.changed = _change({} if op.body else given, answer)
        if op.name in ops.UNMASKED:
            return Response(adapter(op.answer).dump_json(answer, exclude_defaults=True), mimetype=JSON)
        return _paged(written(answer), answer.next) if op.is_page else jsonify(written(answer))

    view.__name__, view.__doc__ = op.name, op.function.__doc__
    return auth.require(*op.scope)(view)


def _query(model: type[BaseModel]) -> dict[str, Any]:
    """The parameters of the query string, each given once."""
    twice = [name for name, values in request.args.lists() if len(values) > 1]
    if twice:
        message = "a parameter should be given once"
        places = [checks.pointer([name]) for name in twice[:FAULTS_SHOWN]]
        raise Problem(400, message, [Fault(pointer=place, code="duplicate", message=message) for place in places])
    return fields_set(checks.validated(model, request.args.to_dict(), "parameter"))


def _body(depth: int, may_be_empty: bool) -> dict[str, Any]:
    """The JSON object in the body, which says that it is JSON; without a body no fields, where that is allowed."""
    raw = request.get_data()
    if len(raw) < (request.content_length or 0):
        raise invalid("", "truncated", "the body should be as long as its Content-Length")
    if may_be_empty and not raw:
        return {}
    if request.mimetype != JSON or request.mimetype_params.get("charset", "utf-8").lower() != "utf-8":
        raise invalid("", "content_type", "Content-Type should be application/json")
    return checks.document(raw, depth)


def _with_key(body: dict[str, Any]) -> dict[str, Any]:
    """The body with the header Idempotency-Key as a field."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return body
    if not _KEY.fullmatch(key):
        message = "Idempotency-Key should be 1 to 255 printable ASCII characters"
        raise invalid("/idempotency_key", "idempotency_key", message)
    if body.get("idempotency_key") not in (None, key):
        message = "the header Idempotency-Key and the field idempotency_key should be the same, or one be left out"
        raise invalid("/idempotency_key", "idempotency_key", message)
    return body | {"idempotency_key": key}


def _paged(document: dict[str, Any], following: object) -> Response:
    """A page that names the next one, also as a link (RFC 8288)."""
    answer = jsonify(document)
    if following is not None:
        asked = request.args.to_dict() | {"after": str(following)}
        here = url_for(str(request.endpoint), **request.view_args or {})
        answer.headers["Link"] = f'<{here}?{urlencode(asked)}>; rel="next"'
    return answer


def _change(given: Mapping[str, Any], answer: Any) -> dict[str, Any]:
    """A change in the audit: its parameters, how many jobs were changed, the first and the last of them."""
    left_out = ("args", "verb", "confirmation", "after", "idempotency_key")
    facts = {name: value for name, value in given.items() if name not in left_out and not isinstance(value, list)}
    jobs = getattr(answer, "changed", getattr(answer, "moved", None))
    if isinstance(listed := getattr(answer, "jobs", None), list):
        done = [each.job_id for each in listed if getattr(each, "outcome", "done") == "done"]
        facts |= {"first_job_id": done[0], "last_job_id": done[-1]} if done else {}
        jobs = len(done)
    elif job := getattr(answer, "job_id", None):
        facts["job_id"] = job  # of `again` the new one: the path names the other
    summary: dict[str, Any] = to_jsonable_python(facts if jobs is None else facts | {"jobs": jobs})
    return summary
