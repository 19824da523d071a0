"""The dashboard's sign-in: it stores a token in a cookie that scripts and other sites cannot use."""

from __future__ import annotations

import re
from typing import Any

from flask import Blueprint, Response, g, make_response, redirect, render_template, request, url_for
from werkzeug.wrappers import Response as BaseResponse

from dataloader import log
from dataloader.api.web import auth, tokens

blueprint = Blueprint("login", __name__, template_folder="templates")
_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]*")  # a path without a host, and without characters that a browser drops


@blueprint.get("/login")
@auth.require()
def form() -> BaseResponse:
    """The form; for a reader who is signed in, and without configured tokens, a redirect to the page."""
    if (g.by_cookie and g.token) or not auth.settings().dl_api_tokens:
        return redirect(_destination(), 303)
    page = _page(200)
    if request.headers.get("Sec-Fetch-Site") == "cross-site" and "again" not in request.args:
        # Behind a link on another site the browser keeps the cookie back, and sends it when our own page asks again.
        page.headers["Refresh"] = f"0; url={url_for('.form', next=_destination(), again='')}"
    return page


@blueprint.post("/login")
@auth.require()
def sign_in() -> BaseResponse:
    """Set the cookie until the browser closes. The answer does not say why a token is refused."""
    given = request.form.get("token", "").strip()
    if tokens.holder(given, auth.settings().dl_api_tokens) is None:
        return _page(401)
    answer = redirect(_destination(), 303)
    answer.set_cookie(auth.COOKIE, given, **_cookie())
    return answer


@blueprint.post("/logout")
@auth.require()
def sign_out() -> BaseResponse:
    answer = redirect(url_for(".form"), 303)
    for path in {"/", request.script_root or "/"}:  # a sign-in before the service got its path
        answer.delete_cookie(auth.COOKIE, **_cookie() | {"path": path})
    return answer


def _cookie() -> dict[str, Any]:
    """Other services of a shared host, at other paths, do not get the cookie."""
    path = request.script_root or "/"
    return {"path": path, "secure": request.is_secure, "httponly": True, "samesite": "Strict"}


def _page(status: int) -> Response:
    page = render_template("login.html", is_wrong=status == 401, next=_destination())
    answer = make_response(page, status)
    if status == 401:
        answer.headers["WWW-Authenticate"] = auth.CHALLENGE
    return answer


def _destination() -> str:
    """The path to go to after the sign-in, on this site and with its secrets masked."""
    wish = log.masked(request.values.get("next", ""))
    return wish if _PATH.fullmatch(wish) else f"{request.script_root}/"
