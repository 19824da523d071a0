"""Authorisation: bearer tokens with scopes, the dashboard's cookie, and the rights of a request without a token.

Each request is checked once, before its body is read; a view names its scopes by `require`. No answer, log line or
error holds a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from socket import getfqdn, gethostname
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import structlog
from flask import Flask, Response, abort, current_app, g, redirect, request, url_for
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.wrappers import Response as BaseResponse
from werkzeug.wsgi import get_host

from dataloader import log
from dataloader.api.web import tokens
from dataloader.config import ApiToken, Scope, Settings
from dataloader.ops.errors import Problem
from dataloader.queue import enqueue

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

COOKIE = "dl_token"
ANYBODY = "anonymous"
SAFE = {"GET", "HEAD", "OPTIONS"}
# Headers that only proxies write.
_FORWARDED = re.compile("x-forwarded-.*|forwarded|via|x-real-ip|.*-client-ip|client-ip|.*-connecting-ip", re.IGNORECASE)
_LOCAL_ONLY = (
    "Without tokens only this machine may change anything: ask on 127.0.0.1 and not by way of a proxy, or give the "
    "service tokens (DL_API_TOKENS, made by `dataloader token`). DL_ALLOW_ANONYMOUS=1 opens it to everybody."
)
_FOREIGN_NAME = (
    "Without tokens the service answers no request to this host name: another site may have pointed its own name here. "
    "Ask by an IP address, by localhost or by this machine's name; set DL_PUBLIC_URL to the address that people use; "
    "or give the service tokens (DL_API_TOKENS)."
)
_PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9_.~-]*)+")
_announced = False
_log = structlog.get_logger("api")
F = TypeVar("F", bound=Callable[..., Any])


CHALLENGE = 'Bearer realm="dataloader"'


def install(app: Flask) -> None:
    """Check every request of `app` before its body is read. Call it after audit.install."""
    if proxies := app.extensions["settings"].dl_trusted_proxies:
        app.wsgi_app = _Proxies(app.wsgi_app, proxies, proxies, proxies, x_prefix=1)  # type: ignore[method-assign]
    app.before_request_funcs.setdefault(None, []).insert(0, _recognise)  # the audit's first line names the token
    app.before_request(_admit)


class _Proxies(ProxyFix):
    """Believes X-Forwarded-Prefix of the nearest proxy alone, and only a plain path: links of pages begin with it."""

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if header := environ.get("HTTP_X_FORWARDED_PREFIX"):
            path = header.rpartition(",")[2].strip().rstrip("/")
            environ["HTTP_X_FORWARDED_PREFIX"] = path if _PLAIN_PATH.fullmatch(path) else ""
        return super().__call__(environ, start_response)


def require(*scopes: Scope) -> Callable[[F], F]:
    """Mark a view: a token with any of these scopes may call it; without scopes every request may.

    A view that is not marked needs `read` for a GET and `operate` for other methods.
    """

    def mark(view: F) -> F:
        view.scopes = scopes  # type: ignore[attr-defined]
        return view

    return mark


def may(*scopes: Scope) -> bool:
    """True when this request may call a view with any of these scopes; pages hide buttons by it."""
    token: ApiToken | None = g.get("token")
    if token is None:
        return not settings().dl_api_tokens and ("read" in scopes or _anonymous_may_change())
    return not set(scopes).isdisjoint(token.scopes)


def who() -> str:
    """The caller, for the journal: `token airflow from 10.0.0.7`, `anonymous from 127.0.0.1`."""
    name = g.get("token_name", ANYBODY)
    return f"{name if name == ANYBODY else f'token {name}'} from {request.remote_addr or 'a local socket'}"


def asker() -> enqueue.Asker | None:
    """The owner of the jobs that this request adds; None without a token. Scopes decide whether it sees other jobs."""
    return enqueue.Asker(who(), may("read", "operate")) if g.get("token") else None


def here() -> str:
    """The request's address, encoded again for a browser: a queue may be called `a?b` or `a/../b`.

    Secrets are masked: a token pasted into an address does not come back.
    """
    rule = request.url_rule
    path = (
        url_for(request.endpoint, **request.view_args or {})
        if rule and request.endpoint
        else request.script_root + quote(request.path)
    )
    query = request.query_string.decode("latin-1")
    return log.masked(path + (f"?{query}" if query else ""))


def announce(settings: Settings) -> None:
    """Warn once in a process and its forks when the service has no tokens."""
    global _announced
    if settings.dl_api_tokens or _announced:
        return
    _announced = True
    changes = "EVERYBODY who reaches it" if settings.dl_allow_anonymous else "everybody on this machine"
    text = f"without DL_API_TOKENS everybody may read, and {changes} may trigger, cancel and change jobs"
    _log.warning("api.open", detail=text, allow_anonymous=settings.dl_allow_anonymous)


def is_cross_site() -> bool:
    """True when a browser reports a request by another site's page; an old browser sends only a Referer."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return True
    origin = request.headers.get("Origin", request.headers.get("Referer"))
    return origin is not None and not _is_ours(origin)


def _admit() -> BaseResponse | None:
    """Check the request: returns None for an allowed request, and an answer or an exception for a refused one."""
    if not settings().dl_api_tokens and request.path != "/health" and not _is_to_our_name():
        abort(403, _FOREIGN_NAME)
    if request.method not in SAFE and is_cross_site():
        abort(403, "This came from another site's page, which may not change anything here.")
    if (wanted := _wanted()) is None:
        return None
    if not settings().dl_api_tokens:
        if "read" not in wanted and request.method not in SAFE and not _anonymous_may_change():
            abort(403, _LOCAL_ONLY)
        return None
    token: ApiToken | None = g.token
    if token is None:
        return _sign_in()
    if set(wanted).isdisjoint(token.scopes):
        needed, held = " or ".join(wanted), ", ".join(token.scopes)
        abort(403, f"This needs the scope {needed}; the token {token.name} has {held}.")
    # Of a change by the cookie these headers say that our page sends it: no form of another site can set htmx's.
    has_origin = "Sec-Fetch-Site" in request.headers or "Origin" in request.headers
    if g.by_cookie and request.method not in SAFE and not (has_origin and "HX-Request" in request.headers):
        abort(403, "A change by the dashboard's cookie has to come from its own page; programs send a bearer token.")
    return None


def _wanted() -> tuple[str, ...] | None:
    """The scopes of which the request needs one; None: it needs none, or no view has this address."""
    if request.url_rule is None or request.endpoint is None:
        return None
    view = current_app.view_functions[request.endpoint]
    usual = ("read",) if request.method in SAFE else ("operate",)
    return tuple(getattr(view, "scopes", usual)) or None


def _recognise() -> None:
    """Note the request's token, from the header or else from the cookie."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    g.by_cookie = scheme.lower() != "bearer"
    token = request.cookies.get(COOKIE, "") if g.by_cookie else given.strip()
    g.token = tokens.holder(token, settings().dl_api_tokens) if token else None
    if g.token is not None:
        g.token_name = g.token.name


def wants_a_page() -> bool:
    """Whether a browser asks for a page: its Accept names text/html; a program's has */* or is missing."""
    is_browser = any(kind == "text/html" for kind, _ in request.accept_mimetypes)
    return request.method == "GET" and not request.path.startswith("/api/") and is_browser


def _sign_in() -> BaseResponse:
    """The answer to an unknown caller: a browser goes to the sign-in, a program gets a 401."""
    if "HX-Request" in request.headers:
        page = ""
        with suppress(ValueError):  # of a malformed address
            parts = urlsplit(request.headers.get("HX-Current-URL", ""))
            page = log.masked(parts.path + (f"?{parts.query}" if parts.query else ""))
        return Response(status=401, headers={"HX-Redirect": _login(page)})
    if wants_a_page():
        return redirect(_login(here()), 303)
    fault = ', error="invalid_token"' if "Authorization" in request.headers else ""
    text = "This needs a token that is known here, sent as a bearer token in the header Authorization."
    raise Problem(401, text, headers={"WWW-Authenticate": CHALLENGE + fault})


def _login(page: str) -> str:
    """The address of the sign-in that leads back to a page."""
    form = url_for("login.form")
    return f"{form}?next={quote(page, safe='')}" if page not in ("", f"{request.script_root}/") else form


def _is_ours(origin: str) -> bool:
    """True for the same host and port; a proxy may have changed the scheme."""
    try:
        sender, own = urlsplit(origin), urlsplit(f"//{request.host}")
        ports = [None if port in (80, 443) else port for port in (sender.port, own.port)]
        return sender.hostname == own.hostname and ports[0] == ports[1] and bool(sender.hostname)
    except ValueError:
        return False


def _anonymous_may_change() -> bool:
    """True where everybody may, and for a request from this machine to a loopback name, without a proxy's headers.

    The name counts because a page of another site may have a DNS name that leads to 127.0.0.1.
    """
    if settings().dl_allow_anonymous:
        return True
    if any(_FORWARDED.fullmatch(name) for name in request.headers.keys()):  # noqa: SIM118  it is no dict
        return False
    return _is_loopback(request.remote_addr or "") and _is_loopback(_name(request.host))


def _is_to_our_name() -> bool:
    """True for a request to an IP address or to a name of ours: a page of another site cannot lead these elsewhere.

    A page may add headers to its requests, so the Host counts beside the X-Forwarded-Host of a trusted proxy.
    """
    received = request.environ | request.environ.get("werkzeug.proxy_fix.orig", {})
    return _is_our_name(_name(request.host)) and _is_our_name(_name(get_host(received)))


def _is_our_name(name: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(name))
    name = name.removesuffix(".")
    public = urlsplit(settings().dl_public_url or "").hostname
    return name in ("localhost", public) or name in _names_of_machine()


@cache
def _names_of_machine() -> set[str]:
    """May ask a name server, so it is called late."""
    return {gethostname().lower(), getfqdn().lower()}


def _name(host: str) -> str:
    """The host's name in small letters without its port, or its IP address; "" for what werkzeug takes for no host."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    with suppress(ValueError):
        address = ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    return name == "localhost"


def settings() -> Settings:
    """The settings of the application that answers this request."""
    configured: Settings = current_app.extensions["settings"]
    return configured
