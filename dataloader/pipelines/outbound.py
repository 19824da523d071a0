"""Connections to addresses that a job names, which may lead anywhere.

A name is looked up once: the connection goes to the address that was looked at. No proxy of the environment is asked,
and no redirect is followed here. No error text shows more of an address than its host.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import SOCK_STREAM, gaierror, getaddrinfo, socket


def _networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(map(ip_network, text.split()))


# Services of clouds that give a machine's credentials to whoever asks: of most clouds, Azure, Alibaba, Oracle.
_METADATA = frozenset(map(IPv4Address, ("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192")))
# The same in IPv6 of AWS, Google, Scaleway and Akamai, and the IPv4 addresses that are no single machine's.
_FORBIDDEN = _networks("fd00:ec2::/32 fd20:ce::254 fd00:42::42 fd00:a9fe:a9fe::1 0.0.0.0/8 224.0.0.0/4 240.0.0.0/4")
_NAT64 = ip_network("64:ff9b::/96")
# The IPv6 addresses that machines have: public, private, loopback; and those that stand for IPv4: mapped, NAT64.
_MACHINES = (*_networks("2000::/3 fc00::/7 ::1 ::ffff:0:0/96"), _NAT64)
_ISATAP = 0x0000_5EFE  # the third quarter of such an address, but for one bit


class Refused(Exception):
    """This cannot be sent or asked for, however often it is tried."""


class Unreachable(Exception):
    """There was no answer this time."""


def connection(
    is_tls: bool, host: str, port: int, until: float, is_refused: Callable[[str], bool]
) -> http.client.HTTPConnection:
    """A connection to the first address of the host that lets itself be reached, and is none of the refused ones.

    `until` is a monotonic instant, for the connection and each later wait on it. Raises Refused where all addresses are
    refused, Unreachable where there is none, OSError as a socket does.
    """
    made = http.client.HTTPConnection(host, port)
    made.sock = _socket(host, port, until, is_refused)
    if is_tls:
        # A connection that ends without TLS's own end was cut: what has come may not be all.
        made.sock = _certificates().wrap_socket(made.sock, server_hostname=host, suppress_ragged_eofs=False)
    made.sock.settimeout(max(0.1, until - time.monotonic()))
    return made


def _socket(host: str, port: int, until: float, is_refused: Callable[[str], bool]) -> socket:
    try:
        places = getaddrinfo(host, port, type=SOCK_STREAM)
    except (gaierror, UnicodeError):
        raise Unreachable(f"there is no address for {host}") from None
    allowed = [place for place in places if not is_refused(str(place[4][0]))]
    if not allowed:
        raise Refused(f"{host} has {_kind(str(places[0][4][0]))}: nothing is sent there")
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


def _kind(text: str) -> str:
    if is_forbidden(text):
        return "a link-local address, or that of a metadata service"
    return "an address of this machine or of a private network"


def is_forbidden(text: str) -> bool:
    """PURE: whether nothing may be sent to this IP address: link-local, of no single machine, or cloud metadata."""
    return any(map(_is_forbidden, _meant(ip_address(text.partition("%")[0]))))


def is_internal(text: str) -> bool:
    """PURE: whether this IP address is forbidden, or of this machine, or of a private network."""
    return is_forbidden(text) or not all(each.is_global for each in _meant(ip_address(text.partition("%")[0])))


def _is_forbidden(address: IPv4Address | IPv6Address) -> bool:
    if address in _METADATA or address.is_link_local or any(address in network for network in _FORBIDDEN):
        return True
    return address.version == 6 and not any(address in network for network in _MACHINES)


def _meant(given: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The address, and the IPv4 addresses that are within it and may be the ones that are reached."""
    if isinstance(given, IPv4Address):
        return [given]
    last = IPv4Address(int(given) & 0xFFFF_FFFF)
    is_tunnel = given in _NAT64 or int(given) >> 32 & 0xFDFF_FFFF == _ISATAP
    # A network may have a NAT64 prefix of its own, so the end of any address may be a metadata service.
    within = [
        given.ipv4_mapped,
        given.sixtofour,
        *(given.teredo or ()),
        last if is_tunnel or last in _METADATA else None,
    ]
    return [given, *(each for each in within if each is not None)]


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def seconds(text: str | None) -> float | None:
    """PURE but for the clock: the seconds of a Retry-After, which is a number or a date; None: there are none."""
    if not text:
        return None
    with suppress(ValueError, OverflowError, TypeError):
        return max(0.0, float(text) if text.isdigit() else parsedate_to_datetime(text).timestamp() - time.time())
    return None
