"""The OpenAPI document, and a page to try it. `python -m tools.openapi` writes openapi.json from the code."""

from __future__ import annotations

import json
from pathlib import Path

from flask import Blueprint, Response, render_template, request, send_from_directory

from dataloader.api.web import auth
from dataloader.api.web.endpoint import JSON

DOCUMENT = Path(__file__).with_name("openapi.json")
blueprint = Blueprint("docs", __name__)


@blueprint.get("/openapi.json")
@auth.require("read")
def openapi() -> Response:
    """The document; below a path of a shared host it names this path."""
    written = DOCUMENT.read_text("utf-8")
    if request.script_root:
        written = json.dumps(json.loads(written) | {"servers": [{"url": request.script_root}]}, ensure_ascii=False)
    return Response(written, mimetype=JSON)


@blueprint.get("/docs")
@auth.require()
def page() -> str:
    """The page to read and try the document; it loads nothing from other hosts."""
    return render_template("api_docs.html")


@blueprint.get("/docs/assets/<path:filename>")
@auth.require()
def static(filename: str) -> Response:
    """A file of the page."""
    return send_from_directory(DOCUMENT.with_name("swagger"), filename)
