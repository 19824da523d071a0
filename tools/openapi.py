"""Write dataloader/api/v1/openapi.json, the OpenAPI document, from routes, operations and models; a test compares it.

python -m tools.openapi
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from flask import Flask
from pydantic import BaseModel, TypeAdapter
from werkzeug.routing import Rule

from dataloader import config, ops
from dataloader.api import create_app, dispatch
from dataloader.api.web.endpoint import JSON
from dataloader.api.web.long_poll import StatusQuery
from dataloader.model.farm import Fault
from dataloader.model.jobs import Status
from dataloader.model.kinds import Answer
from dataloader.ops.errors import KINDS
from dataloader.ops.types import PRINTABLE

Node = dict[str, Any]
REF = "#/components/schemas/{model}"
FILE = Path(__file__).parent.parent / "dataloader/api/v1/openapi.json"
# The subjects of the operations, with the first lines of their modules.
TAGS = {name: str(sys.modules[f"{ops.__name__}.{name}"].__doc__).partition("\n")[0] for name in ops.SUBJECTS}
TAGS["service"] = "This process, for probes and monitoring."
_STORABLE = "^[^\\u0000]*$"
_HEADERS: dict[str, Node] = {
    "Idempotency-Key": {
        "description": "the same as the field `idempotency_key`; where both are given they must be equal",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]([ -~]*[!-~])?$"},
    },
    "traceparent": {
        "description": "W3C Trace Context, kept with the job; one that is not valid is ignored",
        "schema": {"type": "string"},
    },
    "If-None-Match": {"description": "the `ETag` of an earlier answer", "schema": {"type": "string"}},
}
_JOB_ID: Node = {"type": "string", "format": "uuid"}
_RETRY = {
    "Retry-After": {"description": "seconds", "required": True, "schema": {"type": "integer", "minimum": 0}},
}
_NEXT = {"Link": {"description": 'the next page, `rel="next"`', "schema": {"type": "string"}}}
_VERSION = {
    "ETag": {"description": "changes with the job", "required": True, "schema": {"type": "string"}},
    "Retry-After": {"description": "too many wait already; ask again then", "schema": {"type": "integer"}},
}
_AUTHENTICATE = {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}
_WHEN = {
    304: "The job is as the `If-None-Match` has it.",
    401: "This needs a token.",
    409: "The state of the job or the queue does not allow it; or the idempotency key belongs to a job of another"
    " producer; or the queue is not ordered.",
    403: "The token has not the scope that this needs; or, without tokens, a change from another machine.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint: `query`, `body` and `answer` are models; `errors` do not follow from these."""

    tag: str
    answer: type | str
    path: type[BaseModel] | None = None  # the parts of the path but for a job_id
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    body_may_be_empty: bool = False
    headers: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    uses_database: bool = True
    leads_to_jobs: str | None = None  # where in the answer there is the id of a job


# --- the answers of views that no operation declares ---


class Health(Answer):
    """The process answers."""

    status: Literal["healthy"]


class Info(Answer):
    """The service and its version."""

    service: str
    version: str
    environment: str


class Running(Answer):
    """How long this process has run, in seconds."""

    status: Literal["running"]
    service: str
    version: str
    uptime: float


class Checks(Answer):
    """The checks of the service; all have passed, else the answer is a 503."""

    database: Literal["ok"]
    schema: Literal["ok"]
    draining: Literal[False]


class Ready(Answer):
    """Requests may be sent here."""

    status: Literal["ready"]
    checks: Checks


class Problem(Answer):
    """Every answer that is not a success (RFC 9457)."""

    type: Annotated[str, "/problems/ and the kind, which never changes"]
    title: str
    status: int
    detail: str
    instance: str
    request_id: str
    errors: list[Fault]


# The endpoints that are made by hand.
BY_HAND = {
    "health.health": Operation("service", Health, uses_database=False),
    "health.info": Operation("service", Info, uses_database=False),
    "health.uptime": Operation("service", Running, uses_database=False),
    "health.ready": Operation("service", Ready),
    "metrics.metrics": Operation("service", "text/plain", uses_database=False),
    "operations.status": Operation("jobs", Status, query=StatusQuery, headers=("If-None-Match",), errors=(304,)),
}


def document(app: Flask) -> Node:
    """The OpenAPI document of the service's and the operations' routes."""
    paths: dict[str, Node] = {}
    for rule, method, declared in operations(app):
        paths.setdefault(path_of(rule), {})[method.lower()] = _operation(app, rule, declared)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dataloader",
            "version": "1",
            "description": "A job farm on PostgreSQL. Fields and endpoints may be added; none is removed or changed.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": _schemas(app),
            "responses": {str(status): _refusal(status) for status in sorted({*KINDS, 401, 403} - {405})},
            "headers": {"X-Request-ID": {"description": "finds the request in the logs", "schema": {"type": "string"}}},
            "parameters": {"X-Request-ID": _parameter("X-Request-ID", "header", {"schema": {"type": "string"}})},
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of DL_API_TOKENS. Where none is configured everybody may read, and change"
                    " things from this machine only, unless DL_ALLOW_ANONYMOUS=1.",
                }
            },
        },
    }


def operations(app: Flask) -> Iterator[tuple[Rule, str, Operation]]:
    """Each route and method of `app` that belongs to the document."""
    for rule in app.url_map.iter_rules():
        if declared := _declared(rule.endpoint):
            for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
                yield rule, method, declared


@cache
def _declared(endpoint: str) -> Operation | None:
    """The operation at an endpoint; None for a page."""
    blueprint, _, name = endpoint.partition(".")
    if endpoint in BY_HAND or blueprint != "operations":
        return BY_HAND.get(endpoint)
    op = ops.load()[name]
    path, query, body, may_be_empty = dispatch.models(op)
    return Operation(
        op.subject, op.answer, path, query, body, may_be_empty, op.headers, op.errors, leads_to_jobs=op.links or None
    )


def path_of(rule: Rule) -> str:
    """The route as OpenAPI writes it."""
    return re.sub(r"<(?:[^:>]+:)?(\w+)>", r"{\1}", rule.rule)


def _operation(app: Flask, rule: Rule, declared: Operation) -> Node:
    view = app.view_functions[rule.endpoint]
    summary, _, more = (view.__doc__ or "").partition("\n")
    scopes = list(getattr(view, "scopes", ()))
    needs = f"Needs a token with the scope {' or '.join(f'`{scope}`' for scope in scopes)}." if scopes else ""
    node: Node = {
        "operationId": view.__name__,
        "tags": [declared.tag],
        "summary": summary.strip().removesuffix("."),
        "description": "\n\n".join(filter(None, (" ".join(more.split()), needs))),
        "parameters": list(_parameters(rule, declared)),
        "responses": _responses(app, rule, declared, scopes),
        "security": [{"bearer": scopes}, {}] if scopes else [],
    }
    if declared.body:
        content = {JSON: {"schema": _ref(declared.body)}}
        node["requestBody"] = {"required": not declared.body_may_be_empty, "content": content}
    return node


def _parameters(rule: Rule, declared: Operation) -> Iterator[Node]:
    in_path = declared.path.model_json_schema()["properties"] if declared.path and declared.path.model_fields else {}
    for name in sorted(rule.arguments):
        schema = _cleaned(in_path.get(name, _JOB_ID), is_input=True)
        described = {"description": schema.pop("description", None), "schema": schema}
        yield _parameter(name, "path", described) | {"required": True}
    if declared.query:
        model = declared.query.model_json_schema(ref_template=REF)
        for name, schema in model.get("properties", {}).items():
            schema = _cleaned(_plain(schema), is_input=True)
            required = name in model.get("required", ()) or None
            parameter = {"description": schema.pop("description", None), "required": required, "schema": schema}
            yield _parameter(name, "query", parameter)
    for name in declared.headers:
        yield _parameter(name, "header", _HEADERS[name])
    yield {"$ref": "#/components/parameters/X-Request-ID"}


def _parameter(name: str, location: str, rest: Node) -> Node:
    return {"name": name, "in": location, **{key: value for key, value in rest.items() if value is not None}}


def _responses(app: Flask, rule: Rule, declared: Operation, scopes: list[str]) -> Node:
    statuses = {500, *declared.errors}
    statuses |= {400} if rule.arguments or declared.query or declared.body or declared.headers else set()
    statuses |= {401, 403} if scopes else set()
    statuses |= {404} if "job_id" in rule.arguments else set()
    statuses |= {411, 413} if declared.body else set()
    statuses |= {503} if declared.uses_database else set()
    responses: Node = {"200": _success(app, declared)}
    for status in sorted(statuses):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    if 304 in declared.errors:
        responses["200"]["headers"] |= _VERSION
        responses["304"] = {"description": _WHEN[304], "headers": _headers(_VERSION)}
    return responses


def _success(app: Flask, declared: Operation) -> Node:
    if isinstance(declared.answer, str):
        content: Node = {declared.answer: {"schema": {"type": "string"}}}
        text = "What the summary says."
    else:
        content = {JSON: {"schema": _ref(declared.answer)}}
        text = " ".join((declared.answer.__doc__ or "").split())
        paged = "next" in get_type_hints(declared.answer)
    response: Node = {"description": text, "headers": _headers(_NEXT if content.get(JSON) and paged else {})}
    response["content"] = content
    if declared.leads_to_jobs:
        response["links"] = dict(_links(app, "job_id", declared.leads_to_jobs))
    return response


def _links(app: Flask, parameter: str, pointer: str) -> Iterator[tuple[str, Node]]:
    """A link from the id in an answer to every operation on one job."""
    for rule, _, _ in operations(app):
        if parameter in rule.arguments:
            name = app.view_functions[rule.endpoint].__name__
            yield name, {"operationId": name, "parameters": {parameter: f"$response.body#{pointer}"}}


def _refusal(status: int) -> Node:
    text = KINDS[status][1] if status in KINDS else ""
    headers: dict[int, Node] = {401: _AUTHENTICATE, 429: _RETRY, 503: _RETRY}
    return {
        "description": _WHEN.get(status, f"{text}."),
        "headers": _headers(headers.get(status, {})),
        "content": {"application/problem+json": {"schema": {"$ref": REF.format(model="Problem")}}},
    }


def _headers(more: Mapping[str, Any] | None = None) -> Node:
    return {"X-Request-ID": {"$ref": "#/components/headers/X-Request-ID"}, **(more or {})}


def _schemas(app: Flask) -> Node:
    """The schemas of all models, sorted; a request's texts get the pattern of storable text."""
    bodies: set[type[BaseModel]] = set()
    answers: set[type] = {Problem}
    for _, _, declared in operations(app):
        bodies |= {declared.body} if declared.body else set()
        answers |= set() if isinstance(declared.answer, str) else {declared.answer}
    models = sorted(bodies | answers, key=lambda model: model.__name__)
    wanted: list[Any] = [(model.__name__, "validation", TypeAdapter(model)) for model in models]
    schemas: Node = TypeAdapter.json_schemas(wanted, ref_template=REF)[1]["$defs"]
    for model in answers:
        _describe(model, schemas)
    schemas["Trigger"]["properties"]["queue"]["pattern"] = PRINTABLE
    inputs = {model.__name__ for model in bodies}
    return {name: _cleaned(schema, is_input=name in inputs) for name, schema in sorted(schemas.items())}


def _describe(model: type, schemas: Node) -> None:
    """Give the fields of an answer, and of the answers in it, the texts of their annotations."""
    for name, annotation in get_type_hints(model, include_extras=True).items() if is_dataclass(model) else ():
        texts = [text for text in getattr(annotation, "__metadata__", ()) if isinstance(text, str)]
        if texts and model.__name__ in schemas:
            schemas[model.__name__]["properties"][name]["description"] = texts[0]
        for inner in _answers_in(annotation):
            _describe(inner, schemas)


def _answers_in(annotation: Any) -> Iterator[type]:
    if is_dataclass(annotation) and isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _answers_in(part)


def _ref(model: type) -> Node:
    return {"$ref": REF.format(model=model.__name__)}


def _plain(schema: Node) -> Node:
    """The schema of an optional parameter without null, which a query string does not have."""
    plain = {key: value for key, value in schema.items() if key not in ("title", "anyOf")}
    if plain.get("default", ...) is None:
        del plain["default"]
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return kinds[0] | plain if kinds else plain


def _cleaned(schema: Any, *, is_input: bool) -> Any:
    """The schema without pydantic's titles, which repeat the names.

    That of an input gets a pattern for each text: PostgreSQL stores no U+0000.
    """
    if isinstance(schema, list):
        return [_cleaned(item, is_input=is_input) for item in schema]
    if not isinstance(schema, dict):
        return schema
    names = [name for name, value in schema.items() if name != "title" or not isinstance(value, str)]
    result = {name: _cleaned(schema[name], is_input=is_input) for name in names}
    if is_input and result.get("type") == "string" and not {"pattern", "format", "enum", "const"} & result.keys():
        result["pattern"] = _STORABLE
    return result


def text(document: Node) -> str:
    """The document as the file holds it and the API sends it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    app = create_app(config.load(_env_file=None, dl_db_dsn="postgresql://localhost/none"))
    FILE.write_text(text(document(app)), "utf-8")
