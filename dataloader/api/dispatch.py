"""The routes of /api/v1, made from the operations: each checks its parameters, and calls the function."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from flask import Blueprint, Response, current_app, g, jsonify
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from dataloader import ops
from dataloader.api.v1.requests import BATCH_JOBS, BATCH_LIMIT, Body, NamedTask, OfQueue, Query
from dataloader.api.web import auth, cache
from dataloader.api.web.endpoint import operation, paged, session
from dataloader.api.web.json_body import BODY_LIMIT
from dataloader.model.reading import written
from dataloader.ops.op import Call, Op, Parameter, bounds, plain_type

# A name may be any percent-encoded text; at the end of a path it is one that leads to no other address.
_CONVERTERS = {"queue": "queue", "job_id": "job"}
BY_HAND = ("status",)  # the contract's own view has an ETag and waits (v1.contract)
_NAMED: dict[str, type[Query]] = {"queue": OfQueue, "task": NamedTask}


def routes() -> Blueprint:
    """A blueprint with a route for each operation."""
    blueprint = Blueprint("operations", __name__, url_prefix="/api/v1")
    for each in ops.load().values():
        if each.name in BY_HAND:
            continue
        blueprint.add_url_rule(_rule(each), each.name, _view(each), methods=[each.method])
    return blueprint


def _rule(op: Op) -> str:
    *before, last = [part[1:-1] if part.startswith("{") else part for part in op.path.split("/")]
    parts = [f"<anything:{part}>" if part in op.in_path else part for part in before]
    if last in op.in_path:
        words = get_args(plain_type(op.parameters[last].annotation))
        last = f"<any{words}:{last}>" if words else f"<{_CONVERTERS.get(last, 'anything')}:{last}>"
    return "/".join([*parts, last])


def _view(op: Op) -> Any:
    rest = [name for name in op.parameters if name not in op.in_path]
    base = next((_NAMED[name] for name in op.in_path if name in _NAMED), Query)
    body = op.model(rest, Body, "Body") if op.method in ("POST", "PUT") else None

    def view(query: Query | None = None, body: Body | None = None, **path: Any) -> Response:
        given = path | _given(query, rest) | _given(body, rest)
        with session() as conn:
            call = Call(
                conn, auth.who(), current_app.extensions["settings"], auth.may("read"), cache.outlook, cache.counts
            )
            result = op.run(call, given)
        answer = written(result)
        if op.is_change:
            g.changed = _change(given, answer)
        if op.name in ops.UNMASKED:
            return Response(json.dumps(answer), mimetype="application/json")
        return paged(answer, answer["next"]) if op.is_page else jsonify(answer)

    view.__name__, view.__doc__ = op.name, op.function.__doc__
    declared = operation(
        op.subject,
        op.answer,
        path=op.model([name for name in op.in_path if name not in (*_NAMED, "job_id")], Query, "Path"),
        query=op.model(() if op.method != "GET" else rest, base, "Query", is_text=True),
        body=body,
        body_may_be_empty=body is not None and not any(op.parameters[name].is_required for name in rest),
        body_limit=BATCH_LIMIT if any(map(_is_long, op.parameters.values())) else BODY_LIMIT,
        errors=op.errors,
        leads_to_jobs=op.links or None,
    )
    return auth.require(*op.scope)(declared(view))


def _is_long(each: Parameter) -> bool:
    """Whether the parameter is a list as long as a batch may be."""
    return any(getattr(bound, "max_length", 0) >= BATCH_JOBS for bound in bounds(each.annotation))


def _change(given: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """A change in the audit: its parameters, how many jobs were changed, the first and the last of them."""
    left_out = ("args", "verb", "confirmation", "after")
    facts = {name: value for name, value in given.items() if name not in left_out and not isinstance(value, list)}
    jobs = answer.get("changed", answer.get("moved"))
    if isinstance(answer.get("jobs"), list):
        done = [each["job_id"] for each in answer["jobs"] if each["outcome"] == "done"]
        facts |= {"first_job_id": done[0], "last_job_id": done[-1]} if done else {}
        jobs = len(done)
    elif given.get("job_ids"):
        facts["named"] = len(given["job_ids"])
    elif answer.get("job_id"):
        facts["job_id"] = answer["job_id"]
    summary: dict[str, Any] = to_jsonable_python(facts if jobs is None else facts | {"jobs": jobs})
    return summary


def _given(model: BaseModel | None, names: Iterable[str]) -> dict[str, Any]:
    """The parameters of these names that the request gives; the function knows the defaults of the others."""
    return {name: getattr(model, name) for name in names if model and name in model.model_fields_set}
