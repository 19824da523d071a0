"""The time zone of a page: the reader's choice, which a cookie keeps, else that of the installation.

`chosen` decides for the times that pages show and for those that readers type.
"""

from __future__ import annotations

from zoneinfo import ZoneInfo

from flask import current_app, g, request
from flask.sansio.app import App

from dataloader.config import Settings, is_zone

COOKIE = "dl_zone"  # a zone's name, stored by the page's script; no cookie: the installation's zone
_LONGEST = 64  # characters of a name


def install(app: App) -> None:
    """Find the zone of the installation once: TIMEZONE if it is set, else the zone of the machine that serves pages."""
    settings: Settings = app.extensions["settings"]
    app.extensions["zone"] = ZoneInfo(settings.people_zone)


def chosen() -> ZoneInfo:
    """The zone of this request. A cookie that names no zone counts as none."""
    if "zone" not in g:
        name = request.cookies.get(COOKIE, "")
        g.zone = ZoneInfo(name) if len(name) <= _LONGEST and is_zone(name) else current_app.extensions["zone"]
    zone: ZoneInfo = g.zone
    return zone


def choice() -> dict[str, str]:
    """For the page: the zone in use, the zone of the installation, and which choice it is (server, utc, browser)."""
    current, own = chosen().key, current_app.extensions["zone"].key
    made = "server" if current == own else "utc" if current == "UTC" else "browser"
    return {"zone": current, "server_zone": own, "zone_choice": made}
