"""The request to a receiver: its address with the secrets in place, the signature, one POST.

No error text shows more of the address than its host: the rest may be secret. No proxy of the environment is asked, no
redirect is followed, and a name is looked up once: the connection goes to the address that was looked at.
"""

from __future__ import annotations

import hmac
import http.client
import ssl
import time
from base64 import b64decode, b64encode
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from socket import SOCK_STREAM, gaierror, getaddrinfo, socket
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import dataloader
from dataloader import config
from dataloader.queue.webhooks import PLACE

POST_SEC = 10.0  # for the whole exchange
# Services of clouds that give a machine's credentials to whoever asks, beside those at link-local addresses.
METADATA = frozenset(map(ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")))
_NAT64 = ip_network("64:ff9b::/96")


class Refused(Exception):
    """This message cannot be sent, however often it is tried."""


class Unreachable(Exception):
    """There was no answer this time."""


class Address(NamedTuple):
    """Where a message goes. Only `host` may be shown."""

    is_tls: bool
    host: str
    port: int
    target: str
    login: str | None  # for Basic authentication


class Answer(NamedTuple):
    """The status of an answer, from which host, and after how many seconds the receiver wants to be asked again."""

    host: str
    status: int
    again_sec: float | None


def address(url: str) -> Address:
    """The address of a webhook's URL, with the values of its variables in their places, percent-encoded.

    Raises Unreachable where this machine has not set one of them: another may have.
    """
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    target = _filled(parts.path or "/", "/") + (f"?{_filled(parts.query, '')}" if parts.query else "")
    login = f"{parts.username}:{_filled(parts.password or '', None)}" if parts.username else None
    return Address(is_tls, parts.hostname or "", parts.port or (443 if is_tls else 80), target, login)


def _filled(template: str, safe: str | None) -> str:
    """The text with its variables' values, of which `safe` characters stay as they are; None: all."""
    return PLACE.sub(lambda found: _value(found[1]) if safe is None else quote(_value(found[1]), safe=safe), template)


def _value(name: str) -> str:
    if value := config.webhook_secret(name):
        return value
    raise Unreachable(f"the variable {name} is not set in the environment of this worker")


def signed(variable: str | None, message_id: str, at: int, body: bytes) -> dict[str, str]:
    """The headers of Standard Webhooks (standardwebhooks.com); without a key's `variable` there is no signature.

    Raises Refused where the variable holds no such key, Unreachable where it is not set.
    """
    headers = {"webhook-id": message_id, "webhook-timestamp": str(at)}
    if variable is None:
        return headers
    mac = hmac.digest(_key(variable), f"{message_id}.{at}.".encode() + body, "sha256")
    return headers | {"webhook-signature": f"v1,{b64encode(mac).decode()}"}


def _key(variable: str) -> bytes:
    prefix, _, text = _value(variable).partition("_")
    with suppress(ValueError):
        if prefix == "whsec" and 24 <= len(key := b64decode(text, validate=True)) <= 64:
            return key
    raise Refused(f"the variable {variable} should hold whsec_ and 24 to 64 bytes in base64")


def post(to: Address, body: bytes, headers: dict[str, str]) -> Answer:
    """Send one POST with this JSON; the answer's body is not read. Raises Refused and Unreachable."""
    until = time.monotonic() + POST_SEC
    whole = {"Content-Type": "application/json", "User-Agent": f"dataloader/{dataloader.version()}", **headers}
    if to.login is not None:
        whole["Authorization"] = f"Basic {b64encode(to.login.encode()).decode()}"
    try:
        with closing(_connection(to, until)) as connection:
            connection.request("POST", to.target, body, whole)
            response = connection.getresponse()
            return Answer(to.host, response.status, _seconds(response.headers.get("Retry-After")))
    except ssl.SSLCertVerificationError:
        raise Unreachable(f"the certificate of {to.host} is not valid for this machine") from None
    except TimeoutError:
        raise Unreachable(f"{to.host} was silent for {POST_SEC:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as e:  # their texts may quote the address
        raise Unreachable(f"{to.host} cannot be reached, or broke the connection ({type(e).__name__})") from None


def _connection(to: Address, until: float) -> http.client.HTTPConnection:
    """A connection to the first address of the host that lets itself be reached."""
    made = http.client.HTTPConnection(to.host, to.port)
    made.sock = _socket(to.host, to.port, until)
    if to.is_tls:
        made.sock = _certificates().wrap_socket(made.sock, server_hostname=to.host)
    made.sock.settimeout(max(0.1, until - time.monotonic()))
    return made


def _socket(host: str, port: int, until: float) -> socket:
    try:
        places = getaddrinfo(host, port, type=SOCK_STREAM)
    except (gaierror, UnicodeError):
        raise Unreachable(f"there is no address for {host}") from None
    allowed = [place for place in places if not is_forbidden(str(place[4][0]))]
    if not allowed:
        raise Refused(f"{host} has a link-local address, or that of a metadata service: nothing is sent there")
    for family, kind, protocol, _, place in allowed:
        made = socket(family, kind, protocol)
        try:
            made.settimeout(max(0.1, until - time.monotonic()))
            made.connect(place)
        except OSError as e:
            made.close()
            error: OSError = e
        else:
            return made
    raise error


def is_forbidden(text: str) -> bool:
    """PURE: whether nothing may be sent to this IP address: link-local, multicast, unspecified, or cloud metadata."""
    found: Any = ip_address(text.partition("%")[0])
    return any(
        each.is_link_local or each.is_multicast or each.is_unspecified or each in METADATA for each in _meant(found)
    )


def _meant(given: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The address, and the IPv4 address that is within it."""
    if isinstance(given, IPv4Address):
        return [given]
    within = (
        given.ipv4_mapped or given.sixtofour or (IPv4Address(int(given) & 0xFFFF_FFFF) if given in _NAT64 else None)
    )
    return [given, within] if within else [given]


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _seconds(text: str | None) -> float | None:
    """The seconds of a Retry-After, which is a number or a date."""
    if not text:
        return None
    with suppress(ValueError, OverflowError, TypeError):
        return max(0.0, float(text) if text.isdigit() else parsedate_to_datetime(text).timestamp() - time.time())
    return None
