"""HTTP/1.1 to one service, by the standard library: kept connections, a limit to every wait, an exception per error.

The transport follows no redirect and uses no proxy of the environment: the token goes to the service's address alone.
"""

from __future__ import annotations

import http.client
import os
import select
import ssl
import time
from collections import deque

from dataloader.client.errors import ClientError
from dataloader.client.wire import KEPT, Answer, Request, Service, answer, checked_size


class Transport:
    """The connections to one service. Threads may share them; a forked process opens its own."""

    def __init__(self, service: Service, timeout: float, context: ssl.SSLContext | None = None) -> None:
        self._idle: deque[tuple[int, http.client.HTTPConnection]] = deque()
        self._service, self._timeout, self._context = service, timeout, context

    def call(self, request: Request) -> Answer:
        """One exchange within the timeout and the request's; raises ClientError for all but 200 and 304.

        A request that must not be sent twice has a new connection. The server may close a kept connection at the same
        moment; then it is unknown whether it has done the request.
        """
        until = time.monotonic() + self._timeout + request.extra
        try:
            return self._exchange(request, until)
        except ClientError as e:
            raise self._service.hidden(e) from None
        except (OSError, http.client.HTTPException, UnicodeError) as e:
            raise self._service.no_answer(e) from None

    def close(self) -> None:
        """Close the idle connections; the transport may be used again."""
        while self._idle:
            self._idle.pop()[1].close()

    def __del__(self) -> None:
        self.close()

    def _exchange(self, request: Request, until: float) -> Answer:
        connection = (None if request.is_once else self._kept()) or self._new()
        try:
            _allow(connection, until)
            target, headers = self._service.path + request.target, self._service.headers(request)
            connection.request(request.method, target, request.content, headers)
            _allow(connection, until)
            response = connection.getresponse()
            raw = _read(connection, response, until)
        except BaseException:
            connection.close()
            raise
        if response.will_close or len(self._idle) >= KEPT:
            connection.close()
        else:
            self._idle.append((os.getpid(), connection))
        return answer(response.status, response.reason, dict(response.headers), raw)

    def _kept(self) -> http.client.HTTPConnection | None:
        """An idle connection that the server has not closed; None: there is none."""
        while self._idle:
            try:
                owner, connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if owner == os.getpid() and connection.sock:
                poll = select.poll()
                poll.register(connection.sock, select.POLLIN)
                if not poll.poll(0):  # else the server has closed it
                    return connection
            connection.close()
        return None

    def _new(self) -> http.client.HTTPConnection:
        if self._service.scheme == "http":
            return http.client.HTTPConnection(self._service.host, self._service.port)
        self._context = self._context or ssl.create_default_context()
        return http.client.HTTPSConnection(self._service.host, self._service.port, context=self._context)


def _allow(connection: http.client.HTTPConnection, until: float) -> None:
    """Limit the next wait to `until` (monotonic); raises TimeoutError when that is over."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.timeout = left
    if connection.sock:
        connection.sock.settimeout(left)


def _read(connection: http.client.HTTPConnection, response: http.client.HTTPResponse, until: float) -> bytes:
    """The body, read until `until` at the latest, however slowly it arrives."""
    parts, size = [], 0
    while True:
        _allow(connection, until)
        part = response.read1(1 << 16)
        if not part:
            break
        parts.append(part)
        size += len(part)
        checked_size(size)
    if response.length:  # read1 does not report a missing rest
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    response.close()  # now the connection takes another request
    return b"".join(parts)
