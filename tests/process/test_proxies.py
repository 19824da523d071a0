"""deploy/nginx.conf and deploy/Caddyfile before a real API: answers, long polls, slow clients, what is not shown."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from farming import Farm, answers, call, free_port, status, until

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX, CADDY = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"), shutil.which("caddy")
# The settings of an installation of nginx around a site; its files are in the test's folder.
AROUND = """\
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  include {folder}/site.conf;
}}
"""
PROXIES = [
    pytest.param(name, marks=pytest.mark.skipif(not program, reason=f"{name} (Debian package {name}) is not installed"))
    for name, program in (("nginx", NGINX), ("caddy", CADDY))
]


def nginx(folder: Path, port: int, upstream: int) -> list[str]:
    """The command that serves the shipped file on these ports, once nginx has said that it is valid."""
    site = (DEPLOY / "nginx.conf").read_text()
    assert (site.count("listen 80;"), site.count("127.0.0.1:8081")) == (1, 1)
    site = site.replace("listen 80;", f"listen 127.0.0.1:{port};").replace("127.0.0.1:8081", f"127.0.0.1:{upstream}")
    (folder / "site.conf").write_text(site)
    (folder / "nginx.conf").write_text(AROUND.format(folder=folder) + ("user root;" if os.geteuid() == 0 else ""))
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    return command


def caddy(_folder: Path, _port: int, _upstream: int) -> list[str]:
    """The command that serves the shipped file, once Caddy has said that it is valid."""
    options = ["--config", str(DEPLOY / "Caddyfile"), "--adapter", "caddyfile"]
    subprocess.run([str(CADDY), "validate", *options], check=True, capture_output=True)
    return [str(CADDY), "run", *options]


COMMANDS: dict[str, Callable[[Path, int, int], list[str]]] = {"nginx": nginx, "caddy": caddy}


@pytest.fixture
def proxy(request: pytest.FixtureRequest, farm: Farm, tmp_path: Path) -> Iterator[int]:
    """The port of a proxy before an API, which takes changes from everywhere."""
    port, upstream = free_port(), free_port()
    farm.start("api", app_port=upstream, dl_trusted_proxies=1, dl_allow_anonymous=1)
    folder = tmp_path / "proxy"
    folder.mkdir()
    here = {"HOME": str(folder), "FARM_SITE": f"http://127.0.0.1:{port}", "FARM_UPSTREAM": f"127.0.0.1:{upstream}"}
    until(lambda: answers(upstream, "/ready"), "the API")
    with (folder / "log").open("wb") as out:
        process = subprocess.Popen(
            COMMANDS[request.param](folder, port, upstream), env=os.environ | here, stdout=out, stderr=out
        )
    until(lambda: answers(port, "/ready") or process.poll() is not None, "the proxy")
    yield port
    process.terminate()
    process.wait(60)
    print((folder / "log").read_text())  # shown where a test fails


@pytest.mark.parametrize("proxy", PROXIES, indirect=True)
def test_a_proxy_passes_on_requests_long_polls_and_slow_bodies(proxy: int, farm: Farm) -> None:
    new = {"queue": "q", "task": "noop", "lock_key": "k"}
    job = call(proxy, "/api/v1/jobs/trigger", new)["job_id"]

    replies: list[Any] = []

    def poll() -> None:
        """A worker that appears ends a wait as well: the job then waits for another reason."""
        while not replies or replies[-1]["status"] == "queued":
            replies.append(call(proxy, f"/api/v1/jobs/{job}/status?wait=15"))

    polling = threading.Thread(target=poll, daemon=True)
    polling.start()
    farm.ready(workers=1)
    polling.join(60)
    assert replies
    assert replies[-1]["status"] in ("running", "succeeded"), "the long poll has heard of the change"

    body = json.dumps(new | {"lock_key": "slow"}).encode()
    with socket.create_connection(("127.0.0.1", proxy), timeout=60) as slow:
        head = f"POST /api/v1/jobs/trigger HTTP/1.1\r\nHost: 127.0.0.1:{proxy}\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body[:20])
        assert call(proxy, "/health") == {"status": "healthy"}, "others do not wait for a slow client"
        slow.sendall(body[20:])
        answer = b"".join(iter(lambda: slow.recv(65_536), b""))
    assert re.match(rb"HTTP/1.1 200 ", answer), answer
    assert status(proxy, "/metrics") == 404
