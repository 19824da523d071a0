"""The nodes: which there are, what models they have, and whether one is too busy to be asked.

The addresses come from the settings alone. Nothing in a job names a host, and no redirect is followed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EADDRINUSE
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from dataloader.config import Settings
from dataloader.pipelines.http import certificates
from dataloader.pipelines.llm.choose import Kind, Node, Passed, PassedOver, busy, shown, tells_load

KEPT_SEC = 60.0  # for how long a scan's answer counts
CONNECT_SEC = 3.0
_SCAN_SEC = 5.0  # for one question of a scan
_LOOK_SEC = 0.2  # over which the CPU of this machine is measured
_LONGEST_LIST = 2**22  # bytes of a node's answer about itself
_MODELS: dict[Kind, str] = {"ollama": "/api/tags", "mlx": "/v1/models"}
_STATUS = ("/status", "/health")
_CONTAINER = (".dockerenv", "run/.containerenv")  # files that Docker and Podman leave in a container

_scanned: dict[tuple[Kind, str], tuple[float, Node]] = {}  # by this process: when, and what was found


def client(settings: Settings) -> httpx.AsyncClient:
    """A client for the nodes alone: without proxies and passwords of the environment, without redirects."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(settings.dl_llm_silence_sec, connect=CONNECT_SEC),
        headers={"User-Agent": "dataloader (llm.generate)", "Accept-Encoding": "identity"},
        follow_redirects=False,
        trust_env=False,
        verify=certificates(),
    )


def addresses(settings: Settings, root: Path = Path("/")) -> list[tuple[Kind, str]]:
    """The nodes of the settings in their order, Ollama's first; where no setting names one, those of this machine.

    In a container this machine is `host.docker.internal`, for `localhost` is the container itself.
    """
    named: list[tuple[Kind, str]] = [
        *(("ollama", _base(url)) for url in (*settings.ollama_api_url, *settings.ollama_base_url)),
        *(("mlx", _base(url)) for url in settings.mlx_api_url),
    ]
    if named:
        return list(dict.fromkeys(named))
    host = "host.docker.internal" if any((root / name).exists() for name in _CONTAINER) else "localhost"
    return [("ollama", f"http://{host}:11434"), ("mlx", f"http://{host}:11435")]


def _base(url: str) -> str:
    """Without the end that some programs want in these variables, as in http://localhost:11434/api."""
    return url.rstrip("/").removesuffix("/api").removesuffix("/v1").rstrip("/")


# --- the scan ---


async def scan(http: httpx.AsyncClient, settings: Settings, anew: bool = False) -> tuple[list[Node], list[Passed]]:
    """The nodes that answer, with their models, and those that do not, with the reason.

    An answer is kept for KEPT_SEC in this process, unless `anew`; that a node is down is not kept.
    """
    known = addresses(settings)
    found = await asyncio.gather(*(_scan(http, kind, url, anew) for kind, url in known))
    return [each for each in found if isinstance(each, Node)], [each for each in found if isinstance(each, Passed)]


async def _scan(http: httpx.AsyncClient, kind: Kind, url: str, anew: bool) -> Node | Passed:
    at, node = _scanned.get((kind, url), (0.0, None))
    if node and not anew and time.monotonic() < at + KEPT_SEC:
        return node
    try:
        models = _names(await _asked(http, url + _MODELS[kind]))
        loaded = frozenset(_names(await _said(http, f"{url}/api/ps"))) if kind == "ollama" else frozenset[str]()
        status_path = None  # Ollama and mlx_lm's server have none
        for path in _STATUS:
            if tells_load(await _said(http, url + path)):
                status_path = path
                break
    except PassedOver as e:
        return Passed(shown(url), str(e))
    node = Node(kind, url, models, loaded, status_path)
    _scanned[kind, url] = time.monotonic(), node
    return node


def _names(document: Any) -> tuple[str, ...]:
    """The models' names in a list of Ollama ({"models": [{"name": ...}]}) or of OpenAI ({"data": [{"id": ...}]})."""
    entries = (document.get("models") or document.get("data") or []) if isinstance(document, dict) else []
    found = [entry.get("name") or entry.get("id") for entry in entries if isinstance(entry, dict)]
    return tuple(name for name in found if isinstance(name, str))


async def _said(http: httpx.AsyncClient, url: str) -> Any:
    """The document there; None where the node has none, for it need not have this one."""
    try:
        return await _asked(http, url)
    except PassedOver:
        return None


async def _asked(http: httpx.AsyncClient, url: str) -> Any:
    """The JSON document at this address of a node; raises PassedOver where the node gives none."""
    path = urlsplit(url).path
    try:
        async with asyncio.timeout(_SCAN_SEC), http.stream("GET", url) as response:
            if response.status_code != httpx.codes.OK:
                raise PassedOver(f"it answered {response.status_code} to {path}")
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > _LONGEST_LIST:
                    raise PassedOver(f"its answer to {path} is longer than {_LONGEST_LIST} bytes")
    except TimeoutError:
        raise PassedOver(f"it was silent for {_SCAN_SEC:g} s") from None
    except httpx.InvalidURL:
        raise PassedOver("its address is not valid") from None
    except httpx.HTTPError as e:
        raise trouble(e, _SCAN_SEC) from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise PassedOver(f"its answer to {path} is no JSON") from None


def trouble(error: httpx.HTTPError, silence_sec: float) -> PassedOver:
    """The reason for people; httpx's own texts may quote the address with its password."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return PassedOver("its certificate is not valid for this machine")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return PassedOver("it is down: no connection")
    if isinstance(error, httpx.TimeoutException):
        return PassedOver(f"it was silent for {silence_sec:g} s")
    return PassedOver("it broke the connection")


# --- the load ---


async def check_load(http: httpx.AsyncClient, node: Node, most_percent: float) -> None:
    """Raise PassedOver for a node that is too busy: by its own word, or as a node on this machine by a measurement.

    With `most_percent` 100 nothing is measured, because nothing would be above it.
    """
    status = await _asked(http, node.url + node.status_path) if node.status_path else None
    why = busy(status, most_percent)
    if why is None and most_percent < 100 and _is_here(node.url):
        psutil.cpu_percent()  # the next call measures from here on
        await asyncio.sleep(_LOOK_SEC)
        load = {"ram_percent": psutil.virtual_memory().percent, "cpu_percent": psutil.cpu_percent()}
        why = busy(load, most_percent)
    if why:
        raise PassedOver(why)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in {"localhost", "::1", socket.gethostname()} or host.startswith("127.")


@contextmanager
def place(node: Node, most: int) -> Iterator[None]:
    """Hold one of the `most` places that an MLX node has for the workers of this machine; Ollama has a queue itself.

    Raises PassedOver when all are taken. A place is a socket with a name in Linux's abstract namespace: a lock that all
    workers of the machine see, and that the kernel frees when its worker dies.
    """
    if node.kind != "mlx":
        yield
        return
    mark = hashlib.sha256(node.url.encode()).hexdigest()[:32]
    for number in range(most):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
            try:
                held.bind(f"\0dataloader.llm.{mark}.{number}")
            except OSError as e:
                if e.errno == EADDRINUSE:
                    continue
                raise
            yield
            return
    raise PassedOver(f"this machine has {most} of {most} requests in flight there")
