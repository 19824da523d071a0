"""The HTTP client of the built-in pipelines: exchanges, redirects, answers in pieces. `load.http` is download.py.

A name is resolved once, and the connection goes to the address that the guard has checked. No proxy of the environment
is asked. No error text shows more of a URL than its host. http.client is underneath because it lets us choose the
address of a connection and read from a socket of our own; urllib3 and httpx hide both.
"""

from __future__ import annotations

import base64
import http.client
import io
import math
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from socket import SOCK_STREAM, create_connection, gaierror, getaddrinfo, socket
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

import dataloader
from dataloader.pipelines.context import PermanentError, Retry

AGAIN_MOST_SEC = 86_400.0  # that a server may ask for
PASSING = (408, 425, 429)  # of the 4xx
REDIRECTED = (301, 302, 303, 307, 308)
REDIRECTS_MOST = 5
_SLICE_SEC = 0.2  # between two safe points while the server is silent
_SAFE = "!#$%&'()*+,/:;=?@[]~"  # in a target; the rest is percent-encoded

Guard = Callable[[str, str], bool]  # whether this host may not be asked at this IP address


class Refused(PermanentError):
    """The server or a guard of ours refuses this request, and would refuse it again."""


class TooLong(Refused):
    """The answer has more bytes than are allowed."""


class Unreachable(Exception):
    """There was no whole answer this time."""


def required(variable: str, value: str | None) -> str:
    """The value of this variable; raises Unreachable where this machine has not set it: another may have."""
    if not value:
        raise Unreachable(f"the variable {variable} is not set in the environment of this worker")
    return value


class Times(NamedTuple):
    """How many seconds an exchange may take."""

    connect: float  # for the way to the server: all addresses of its name, and TLS
    silence: float  # without a byte
    whole: float = math.inf  # from the connection to the end of the answer


class Address(NamedTuple):
    """The parts of a URL. Only the name may be shown."""

    is_tls: bool
    host: str
    port: int
    target: str
    login: str  # user:password, or ""
    name: str  # of the server in error texts

    @classmethod
    def of(cls, url: str) -> Address:
        """The parts of this URL; raises ValueError unless it is a URL of http or https."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        is_plain = url.isprintable() and " " not in url
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or port == 0:
            raise ValueError("should be a URL such as https://example.com/rates.csv, with %20 for a blank")
        is_tls = parts.scheme == "https"
        target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
        return cls(is_tls, parts.hostname, port or (443 if is_tls else 80), target, login, parts.hostname)


def checked_url(url: str) -> str:
    """The URL; raises ValueError unless it is one of http or https without user and password."""
    Address.of(url)
    if "@" in urlsplit(url).netloc:
        raise ValueError("should have no user and no password: whoever may see the job would see them")
    return url


class Answer:
    """The answer of a server. Its body comes in pieces."""

    def __init__(self, name: str, response: http.client.HTTPResponse) -> None:
        self.name, self.status, self.headers = name, response.status, response.headers
        self._response = response
        self._count = 0
        self.length = response.length  # a response without a Content-Length has None

    def read(self, size: int) -> bytes:
        """The bytes that have come, up to so many; b"" at the end. Raises Unreachable where the end is too soon."""
        with _translated(self.name):
            piece = self._response.read1(size)
        self._count += len(piece)
        if not piece and self.length is not None and self._count < self.length:
            raise Unreachable(f"{self.name} broke the connection after {self._count} of {self.length} bytes")
        return piece

    def content(self, most: int) -> bytes:
        """The whole body; raises TooLong where it has more than `most` bytes, Unreachable as `read`."""
        pieces = bytearray()
        while piece := self.read(2**16):
            pieces += piece
            if len(pieces) > most:
                raise TooLong(f"{self.name} has answered with more than {most} bytes")
        return bytes(pieces)

    def require_final(self) -> None:
        """As the function of this name."""
        require_final(self.name, self.status, self.headers.get("Retry-After"))


def require_final(name: str, status: int, retry_after: str | None) -> None:
    """Raise Unreachable for a status that passes, and Retry where the server says when to come again."""
    reason = f"{name} answered {status}"
    again_sec = pause_of(retry_after)
    if again_sec is not None and status in (429, 503):
        raise Retry(min(again_sec, AGAIN_MOST_SEC), f"{reason} and asks for {again_sec:g} s")
    if status >= 500 or status in PASSING:
        raise Unreachable(reason)


@contextmanager
def exchange(
    address: Address,
    times: Times,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    *,
    guard: Guard | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Answer]:
    """Send one request; the answer can be read within the block. Redirects are not followed.

    `guard` decides by the host and each of its IP addresses whether nothing may be sent there. `check` is called every
    0.2 s while the server is silent; its exception ends the exchange. Raises Refused where all addresses are refused,
    Unreachable without an answer.
    """
    given = {"User-Agent": f"dataloader/{dataloader.version()}", "Accept": "*/*"}
    if address.login:
        given["Authorization"] = f"Basic {base64.b64encode(address.login.encode()).decode()}"
    with _translated(address.name):
        connected = _connected(address, times.connect, guard)
    with closing(connected):
        with _translated(address.name):
            connection = http.client.HTTPConnection(address.host, address.port)
            connection.default_port = 443 if address.is_tls else 80
            connection.sock = _Watched(connected, address.name, times, check)
            connection.request(method, address.target, body, given | dict(headers or {}))
            response = connection.getresponse()
        yield Answer(address.name, response)


@contextmanager
def get(
    url: str,
    times: Times,
    headers: Mapping[str, str] | None = None,
    *,
    guard: Guard | None = None,
    check: Callable[[], None] = lambda: None,
    is_one_server: bool = False,
) -> Iterator[Answer]:
    """Ask for a URL as `exchange` does, over up to REDIRECTS_MOST redirects.

    With `is_one_server` none leads to another server.

    Raises Refused for a redirect that is not followed, and as `exchange`.
    """
    for _ in range(REDIRECTS_MOST + 1):
        address = Address.of(url)
        with exchange(address, times, headers=headers, guard=guard, check=check) as answer:
            if answer.status not in REDIRECTED:
                yield answer
                return
            url = _redirected(url, address, answer.headers.get("Location"))
        if is_one_server and Address.of(url)[:3] != address[:3]:
            raise Refused(f"{address.name} redirects to another server")
    raise Refused(f"{address.name} redirects more than {REDIRECTS_MOST} times")


def _redirected(url: str, address: Address, location: str | None) -> str:
    """The URL to which a redirect leads. Its bytes are UTF-8, and percent-encoded where they have to be."""
    try:
        raw = (location or "").encode("latin-1")  # as which http.client reads the bytes of a header
        target = checked_url(urldefrag(urljoin(url, quote(raw, _SAFE + "#"))).url)
    except ValueError:
        raise Refused(f"{address.name} redirects to what is no plain URL of http or https") from None
    if not location or (address.is_tls and not Address.of(target).is_tls):
        raise Refused(f"{address.name} redirects to nowhere, or from https to http")
    return target


def pause_of(text: str | None) -> float | None:
    """The seconds of a Retry-After, which is a number or a date; None where there are none."""
    if not text:
        return None
    with suppress(ValueError, OverflowError, TypeError):
        return max(0.0, float(text) if text.isdigit() else parsedate_to_datetime(text).timestamp() - time.time())
    return None


@cache
def certificates() -> ssl.SSLContext:
    """The certificates that this machine trusts, a company's own included."""
    return ssl.create_default_context()


# --- the connection ---


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Raise the errors of a connection as ours, because the texts of others may quote the URL."""
    try:
        yield
    except ssl.SSLCertVerificationError:
        raise Unreachable(f"the certificate of {name} is not valid for this machine") from None
    except ConnectionRefusedError:
        raise Unreachable(f"{name} accepts no connection") from None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise Unreachable(f"{name} cannot be reached, or broke the connection ({type(e).__name__})") from None


def _connected(address: Address, within: float, guard: Guard | None) -> socket:
    """A socket to the first address of the host that can be reached, and that the guard does not refuse."""
    try:
        places: list[Any] = getaddrinfo(address.host, address.port, type=SOCK_STREAM)
    except (gaierror, UnicodeError):
        raise Unreachable(f"there is no address for {address.name}") from None
    allowed = [place for place in places if not (guard and guard(address.host, place[4][0]))]
    if not allowed:
        internal = "an address of this machine or of a private network"
        kind = "a link-local address, or that of a metadata service" if is_forbidden(places[0][4][0]) else internal
        remedy = "" if kind != internal else "; DL_HTTP_PRIVATE_HOSTS may allow the host"
        raise Refused(f"{address.name} has {kind}: nothing is sent there{remedy}")
    until = time.monotonic() + within
    for number, (*_, place) in enumerate(allowed):
        try:
            # Each address has its share of the time, so that a silent one leaves some to the next.
            made = create_connection(place[:2], max(0.1, (until - time.monotonic()) / (len(allowed) - number)))
            break
        except OSError as e:
            error = e
    else:
        if isinstance(error, TimeoutError):
            raise Unreachable(f"{address.name} accepts no connection within {within:g} s")
        raise error
    made.settimeout(max(0.1, until - time.monotonic()))
    if address.is_tls:
        # A connection that ends without TLS's own end was cut: the answer may not be whole.
        return certificates().wrap_socket(made, server_hostname=address.host, suppress_ragged_eofs=False)
    return made


class _Watched(io.RawIOBase):
    """A socket for http.client that keeps the times of an exchange, and has safe points while the server is silent.

    The timeout of a socket itself begins anew with each byte, so an answer that drips could take for ever.
    """

    def __init__(self, connected: socket, name: str, times: Times, check: Callable[[], None]) -> None:
        self._socket, self._name, self._times, self._check = connected, name, times, check
        self._until = time.monotonic() + times.whole

    def close(self) -> None:
        """Keep the socket open: http.client closes it before the answer is read."""

    def makefile(self, mode: str) -> io.BufferedReader:
        """The file from which http.client reads an answer."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises Unreachable when a time is over."""
        return self._awaited(self._socket.recv_into, buffer)

    def sendall(self, data: bytes) -> None:
        """Send these bytes; raises Unreachable when a time is over."""
        view = memoryview(data)
        while view:
            view = view[self._awaited(self._socket.send, view) :]

    def _awaited(self, step: Callable[[Any], int], data: Any) -> int:
        silent = time.monotonic() + self._times.silence
        while (now := time.monotonic()) < self._until:
            self._socket.settimeout(max(0.001, min(_SLICE_SEC, silent - now, self._until - now)))
            try:
                return step(data)
            except TimeoutError:
                if silent <= time.monotonic() < self._until:
                    raise Unreachable(f"{self._name} was silent for {self._times.silence:g} s") from None
                self._check()
        raise Unreachable(f"{self._name} has not answered within {self._times.whole:g} s")


# --- the guard of addresses that a job or an operator names ---


# Services of clouds that give a machine's credentials to whoever asks: of most clouds, Azure, Alibaba, Oracle.
_METADATA = {IPv4Address(text) for text in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192")}
# Link-local addresses, those of no single machine, and the tunnels Teredo and 6to4, which lead to any IPv4 address;
# then the metadata services of AWS, Google, Scaleway and Akamai in IPv6.
_OTHERS = "169.254.0.0/16 0.0.0.0/8 224.0.0.0/4 240.0.0.0/4 2001::/32 2002::/16"
_OTHERS += " fd00:ec2::/32 fd20:ce::254 fd00:42::42 fd00:a9fe:a9fe::1"
_FORBIDDEN = [*map(ip_network, _OTHERS.split()), *map(ip_network, _METADATA)]
_MACHINES = [
    *map(ip_network, ("2000::/3", "fc00::/7", "::1"))
]  # public, private, loopback: no other IPv6 is a machine's
_OF_IPV4 = [*map(ip_network, ("::ffff:0:0/96", "64:ff9b::/96"))]  # addresses that stand for IPv4: mapped, NAT64
_ISATAP = 0x0000_5EFE  # the third quarter of such an address, which is a tunnel too, but for one bit


def is_forbidden(text: str) -> bool:
    """PURE: whether this IP address is forbidden: link-local, a tunnel, not of a single machine, or cloud metadata."""
    address = _meant(text)
    if any(address in network for network in _FORBIDDEN):
        return True
    if address.version == 4:
        return False
    # A network may have a NAT64 prefix of its own, so the end of any address may be a metadata service.
    is_metadata = IPv4Address(int(address) & 0xFFFF_FFFF) in _METADATA
    is_isatap = int(address) >> 32 & 0xFDFF_FFFF == _ISATAP
    return is_metadata or is_isatap or not any(address in network for network in _MACHINES)


def is_internal(text: str) -> bool:
    """PURE: whether this IP address is forbidden, or of this machine, or of a private network."""
    return is_forbidden(text) or not _meant(text).is_global


def guard_but(private_hosts: Collection[str]) -> Guard:
    """The guard that refuses internal addresses, but for these hosts forbidden ones alone."""
    return lambda host, ip: is_forbidden(ip) if host in private_hosts else is_internal(ip)


def _meant(text: str) -> IPv4Address | IPv6Address:
    """The address, or the IPv4 address for which it stands."""
    address = ip_address(text.partition("%")[0])
    is_of_ipv4 = any(address in network for network in _OF_IPV4)
    return IPv4Address(int(address) & 0xFFFF_FFFF) if is_of_ipv4 else address
