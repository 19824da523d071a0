"""The OpenAPI document, generated from routes, declarations of views and models; and a page to try it.

`python -m dataloader.api` prints the document; a test compares docs/openapi.json with it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from flask import Blueprint, Flask, Response, current_app, render_template, request
from pydantic import BaseModel, TypeAdapter
from werkzeug.routing import Rule

from dataloader import ops
from dataloader.api.web import auth
from dataloader.api.web.endpoint import JSON, Operation
from dataloader.model.farm import Problem
from dataloader.ops.errors import KINDS
from dataloader.ops.types import PRINTABLE

Node = dict[str, Any]
REF = "#/components/schemas/{model}"
PAGE_CSP = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
blueprint = Blueprint("docs", __name__, static_folder="swagger", static_url_path="/docs/assets")


@blueprint.get("/openapi.json")
@auth.require("read")
def openapi() -> Response:
    """This document."""
    if "openapi" not in current_app.extensions:
        current_app.extensions["openapi"] = text(document(current_app))
    written: str = current_app.extensions["openapi"]
    if request.script_root:
        written = text(json.loads(written) | {"servers": [{"url": request.script_root}]})
    return Response(written, mimetype=JSON)


@blueprint.get("/docs")
@auth.require()
def page() -> Response:
    """The page to read and try the document; it loads nothing from other hosts."""
    answer = Response(render_template("api_docs.html"), mimetype="text/html")
    answer.headers["Content-Security-Policy"] = PAGE_CSP
    return answer


def document(app: Flask) -> Node:
    """The OpenAPI document of all routes of `app` whose views are declared by `operation`."""
    paths: dict[str, Node] = {}
    for rule, method, view in operations(app):
        paths.setdefault(path_of(rule), {})[method.lower()] = _operation(app, rule, view)
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


def operations(app: Flask) -> Iterator[tuple[Rule, str, Callable[..., Any]]]:
    """Each route and method of `app` whose view is declared by `operation`."""
    for rule in app.url_map.iter_rules():
        view = app.view_functions[rule.endpoint]
        if hasattr(view, "operation"):
            for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
                yield rule, method, view


def path_of(rule: Rule) -> str:
    """The route as OpenAPI writes it."""
    return re.sub(r"<(?:[^:>]+:)?(\w+)>", r"{\1}", rule.rule)


def _operation(app: Flask, rule: Rule, view: Callable[..., Any]) -> Node:
    declared: Operation = view.operation  # type: ignore[attr-defined]
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
    for rule, _, view in operations(app):
        if parameter in rule.arguments:
            name = view.__name__
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
    for _, _, view in operations(app):
        declared: Operation = view.operation  # type: ignore[attr-defined]
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
    """The document as the API sends it and docs/openapi.json holds it."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
