"""The request to a receiver: its address, the signature, one POST.

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
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import dataloader
from dataloader import config
from dataloader.pipelines import outbound
from dataloader.pipelines.outbound import Refused, Unreachable, is_forbidden
from dataloader.queue.reports.webhooks import WHOLE, is_address

POST_SEC = 10.0  # for the whole exchange


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
    """The address of a webhook's URL, or of the URL that its variable holds.

    A secret is never put into a URL: a variable holds the whole URL, and so says which host may receive it. Raises
    Unreachable where this machine has not set the variable: another may have; Refused for what is no URL.
    """
    variable = WHOLE.fullmatch(url)
    url, name = (_value(variable[1]), f"the variable {variable[1]}") if variable else (url, "a ${variable} as its url")
    if not is_address(url):
        raise Refused(f"{name} should hold the whole URL, such as https://ops.example.com/alerts, without #")
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    return Address(is_tls, parts.hostname or "", parts.port or (443 if is_tls else 80), target, login)


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
        with closing(outbound.connection(to.is_tls, to.host, to.port, until, is_forbidden)) as connection:
            connection.request("POST", to.target, body, whole)
            response = connection.getresponse()
            return Answer(to.host, response.status, outbound.seconds(response.headers.get("Retry-After")))
    except ssl.SSLCertVerificationError:
        raise Unreachable(f"the certificate of {to.host} is not valid for this machine") from None
    except TimeoutError:
        raise Unreachable(f"{to.host} was silent for {POST_SEC:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as e:  # their texts may quote the address
        raise Unreachable(f"{to.host} cannot be reached, or broke the connection ({type(e).__name__})") from None
