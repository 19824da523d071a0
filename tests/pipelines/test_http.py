"""The promises of the HTTP module that the built-in pipelines share."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from receiver import Receiver

from dataloader.pipelines import http
from dataloader.pipelines.http import Address, Times, Unreachable


@contextmanager
def silent() -> Iterator[socket.socket]:
    """A listener that accepts no connection any more: its queue of two is full."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        first.connect(listening.getsockname())
        second.setblocking(False)
        with suppress(BlockingIOError):
            second.connect(listening.getsockname())
        yield listening


def test_a_silent_address_of_a_host_leaves_time_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = Receiver()
    with silent() as first:
        places = [first.getsockname(), ("127.0.0.1", int(receiver.url.rpartition(":")[2]))]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
        monkeypatch.setattr(http, "getaddrinfo", lambda *_, **__: found)
        address = Address.of("http://ops.example.com/")
        with http.exchange(address, Times(2, 30), "POST", body=b"{}") as answer:
            assert answer.status == 204
    receiver.close()


def test_a_host_that_accepts_no_connection_is_given_up_in_time() -> None:
    with silent() as only:
        address = Address.of(f"http://127.0.0.1:{only.getsockname()[1]}/")
        with (
            pytest.raises(Unreachable, match=r"^127\.0\.0\.1 accepts no connection within 0\.2 s$"),
            http.exchange(address, Times(0.2, 30)),
        ):
            pass


def test_a_server_that_does_not_read_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address.of(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        began = time.monotonic()
        with (
            pytest.raises(Unreachable, match=r"has not answered within 0\.3 s"),
            http.exchange(address, Times(5, 60, 0.3), "POST", body=bytes(64 * 2**20)),
        ):
            pass
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_status_that_passes_is_no_answer(status: int) -> None:
    with pytest.raises(Unreachable, match=f"^shop answered {status}$"):
        http.require_final("shop", status, None)


@pytest.mark.parametrize("status", [200, 302, 400, 401, 403, 404, 410, 422])
def test_another_status_is_one(status: int) -> None:
    http.require_final("shop", status, "9")
