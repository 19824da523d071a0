"""The request for a file: each address on its way is checked, and each wait is a safe point."""

from __future__ import annotations

import gzip
import http.client
import io
import re
import select
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import dataloader
from dataloader.pipelines import outbound
from dataloader.pipelines.download.part import Version
from dataloader.pipelines.outbound import Refused, Unreachable

CONNECT_SEC = 15.0
SILENCE_SEC = 60.0  # without a byte
_REDIRECTS = 5
_REDIRECTED = (301, 302, 303, 307, 308)
_PIECE = 2**16
_SLICE_MS = 200  # between two safe points while the server is silent
_GZIP = (
    "gzip",
    "x-gzip",
)  # codings that are decoded: object stores send what is stored in them, also when asked not to
_SAFE = "!#$%&'()*+,/:;=?@[]~"  # in a target; the rest is percent-encoded


class _Address(NamedTuple):
    is_tls: bool
    host: str
    port: int
    target: str


def checked_url(url: str) -> str:
    """The URL; raises ValueError unless it is one of http or https without user and password."""
    _parsed(url)
    return url


def _parsed(url: str) -> _Address:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("should be a URL such as https://example.com/rates.csv") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url or port == 0:
        raise ValueError("should be a URL such as https://example.com/rates.csv")
    if parts.username is not None or parts.password is not None:
        raise ValueError("should have no user and no password: whoever may see the job would see them")
    is_tls = parts.scheme == "https"
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
    return _Address(is_tls, parts.hostname, port or (443 if is_tls else 80), target)


class Answer:
    """The answer of a server, whose body comes in pieces."""

    def __init__(self, host: str, response: http.client.HTTPResponse) -> None:
        self.host, self.status = host, response.status
        self._response = response
        headers = response.headers
        self.again_sec = outbound.seconds(headers.get("Retry-After"))
        self.version = Version(headers.get("ETag") or "", headers.get("Last-Modified") or "")
        length = headers.get("Content-Length") or ""
        self._length = int(length) if re.fullmatch(r"[0-9]{1,18}", length) and not response.chunked else None
        self._coding = (headers.get("Content-Encoding") or "identity").lower()
        self._transfer = (headers.get("Transfer-Encoding") or "chunked").lower()

    def has_just(self, size: int) -> bool:
        """Whether an answer without a range says that the file has so many bytes, and no more."""
        return self._response.headers.get("Content-Range") == f"bytes */{size}"

    @property
    def is_encoded(self) -> bool:
        """Whether the server sends the file as gzip: the bytes of the answer are not those of the file."""
        return self._coding in _GZIP

    @property
    def is_readable(self) -> bool:
        """Whether `pieces` can decode the answer."""
        return self._coding in ("identity", *_GZIP) and self._transfer == "chunked"

    @property
    def length(self) -> int | None:
        """How many bytes of the file the answer has; None: nobody knows."""
        return None if self.is_encoded else self._length

    def total_behind(self, begin: int, version: Version) -> int | None:
        """The size of the file, where the answer is a part of this version that begins there; None where it is not.

        A server may send less than it was asked for, so the answer need not reach the end of the file.
        """
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", self._response.headers.get("Content-Range") or "")
        if not found or self.is_encoded or (self.version.etag and self.version.etag != version.etag):
            return None
        first, last, total = map(int, found.groups())
        return total if first == begin <= last < total else None

    def pieces(self) -> Iterator[bytes]:
        """The file, decoded; raises Unreachable where it ends too soon."""
        body: Any = _Body(self.host, self._response, self._length)
        if self.is_encoded:
            body = gzip.GzipFile(fileobj=body)
        while True:
            try:
                piece = body.read(_PIECE)
            except (EOFError, gzip.BadGzipFile, zlib.error):
                raise Unreachable(f"{self.host} sends a file that is damaged: it is no whole gzip") from None
            if not piece:
                return
            yield piece


class _Body:
    """The body of an answer as a file to read; `read` raises Unreachable where it ends too soon."""

    def __init__(self, host: str, response: http.client.HTTPResponse, length: int | None) -> None:
        self._host, self._response, self._length = host, response, length
        self._count = 0

    def read(self, size: int) -> bytes:
        """What has come, up to so many bytes."""
        with _translated(self._host):
            piece = self._response.read1(size)
        self._count += len(piece)
        if not piece and self._length is not None and self._count < self._length:
            raise Unreachable(f"{self._host} broke the connection after {self._count} of {self._length} bytes")
        return piece


@contextmanager
def get(url: str, headers: Mapping[str, str], private: Collection[str], check: Callable[[], None]) -> Iterator[Answer]:
    """Ask for a file, over up to five redirects; `private` hosts may have addresses of this machine's networks.

    `check` is called where the server is silent. Raises Refused for an address that may not be asked, Unreachable
    without an answer.
    """
    for _ in range(_REDIRECTS + 1):
        address = _parsed(url)
        with _asked(address, headers, private, check) as response:
            if response.status not in _REDIRECTED:
                yield Answer(address.host, response)
                return
            url = _next(url, address, response.headers.get("Location"))
    raise Refused(f"{address.host} redirects more than {_REDIRECTS} times")


def _next(url: str, address: _Address, location: str | None) -> str:
    """Where a redirect leads. Its bytes are UTF-8, and percent-encoded where they have to be, as in browsers."""
    try:
        # http.client takes the bytes of a header for Latin-1.
        parts = urlsplit((location or "").encode("latin-1").decode(errors="surrogateescape"))
        path, query = (quote(part, _SAFE, errors="surrogateescape") for part in (parts.path, parts.query))
        found = checked_url(urljoin(url, parts._replace(path=path, query=query, fragment="").geturl()))
    except ValueError:
        raise Refused(f"{address.host} redirects to what is no plain URL of http or https") from None
    if not location or (address.is_tls and urlsplit(found).scheme != "https"):
        raise Refused(f"{address.host} redirects to nowhere, or from https to http")
    return found


@contextmanager
def _asked(
    address: _Address, headers: Mapping[str, str], private: Collection[str], check: Callable[[], None]
) -> Iterator[http.client.HTTPResponse]:
    is_refused = outbound.is_forbidden if address.host in private else outbound.is_internal
    agent = f"dataloader/{dataloader.version()}"
    with _translated(address.host):
        until = time.monotonic() + CONNECT_SEC
        made = outbound.connection(address.is_tls, address.host, address.port, until, is_refused)
    with closing(made.sock) as sock:
        with _translated(address.host):
            made.request("GET", address.target, headers={"User-Agent": agent, "Accept": "*/*", **headers})
            made.sock = _Watched(sock, check)
            response = made.getresponse()
        yield response


@contextmanager
def _translated(host: str) -> Iterator[None]:
    """Errors of the connection as ours; the texts of others may quote the address."""
    try:
        yield
    except ssl.SSLCertVerificationError:
        raise Unreachable(f"the certificate of {host} is not valid for this machine") from None
    except TimeoutError:
        raise Unreachable(f"{host} was silent for too long") from None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise Unreachable(f"{host} cannot be reached, or broke the connection ({type(e).__name__})") from None


class _Watched:
    """A socket for http.client to read an answer from, which looks after the run while the server is silent."""

    def __init__(self, sock: socket.socket, check: Callable[[], None]) -> None:
        self._sock, self._check = sock, check
        sock.setblocking(False)

    def close(self) -> None:
        """Nothing yet: http.client lets go of the socket before the answer is read."""

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client reads an answer from."""
        return io.BufferedReader(_Raw(partial(_received, self._sock, self._check)))


class _Raw(io.RawIOBase):
    def __init__(self, receive: Callable[[Any], int]) -> None:
        self._receive = receive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._receive(buffer)


def _received(sock: socket.socket, check: Callable[[], None], buffer: Any) -> int:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    until = time.monotonic() + SILENCE_SEC
    while True:
        try:
            return sock.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            if time.monotonic() > until:
                raise TimeoutError from None
        if not poll.poll(_SLICE_MS):
            check()
