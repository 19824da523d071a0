"""The banner of `dataloader up`: where everything is, and commands to try, once the farm is ready."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

from dataloader import config, periods
from dataloader.farm.process import now
from dataloader.local.parts import say

HEALTHY_WITHIN = periods.seconds("HEALTHY_WITHIN", 30.0)  # seconds
QUIET_SEC = 0.1  # from the parts' reports until the lines that they logged before have been written
NOOP = {"sleep1": 1, "sleep2": 1, "sleep3": 1}


class Announcement:
    """The banner, printed after the log lines of the start, once all parts are ready and the API answers."""

    def __init__(self, settings: config.Settings, database: str, tasks: str) -> None:
        self.is_made = False
        self._settings = settings
        self._database = database
        self._tasks = tasks
        self._patience_ends = now() + HEALTHY_WITHIN
        self._ready_at: float | None = None

    def look(self, are_ready: bool) -> None:
        """Print the banner when that is due; TimeoutError when the API does not answer within HEALTHY_WITHIN.

        `are_ready` says whether all parts are. After HEALTHY_WITHIN the banner no longer waits for workers.
        """
        is_late = now() > self._patience_ends
        if self.is_made or not (is_late or are_ready):
            return
        if self._ready_at is not None and now() >= self._ready_at + QUIET_SEC:
            self.is_made = True
            say(banner(self._settings, self._database, self._tasks))
        elif self._ready_at is None and _is_healthy(self._settings):
            self._ready_at = now()
        elif self._ready_at is None and is_late:
            raise TimeoutError(f"the API has not answered within {HEALTHY_WITHIN:g} s")


def _is_healthy(settings: config.Settings) -> bool:
    connection = http.client.HTTPConnection(urlsplit(settings.own_url).netloc, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def banner(settings: config.Settings, database: str, tasks: str) -> str:
    """The addresses and folders of the farm, and commands to paste into another shell."""
    url = settings.own_url
    zone = "as TIMEZONE says" if "timezone" in settings.model_fields_set else "this machine's zone (or set TIMEZONE)"
    queue = settings.workers[0].served[0]
    # Another shell lacks our environment, so the command names each value that is not the default.
    command = [*_program(), "trigger", "noop"]
    command += ["--queue", queue] if queue != "etl.default" else []
    command += ["--url", url] if url != "http://127.0.0.1:8081" else []
    command += ["--args", json.dumps(NOOP)]
    body = {"queue": queue, "task": "noop", "lock_key": "noop", "args": NOOP}
    return f"""
dataloader is up
  API        {url}
  database   {database}
  files      {settings.data_dir}   (where loaders read from)
  tasks      {tasks or "see the log"}
  times      in {settings.people_zone}, {zone}
  try it     {shlex.join(command)}
  or         curl -X POST {url}/api/v1/jobs/trigger -H 'Content-Type: application/json' \\
               -d {shlex.quote(json.dumps(body))}
  stop       Ctrl-C, or: kill {os.getpid()}
"""


def _program() -> list[str]:
    """The command for this program in another shell."""
    program = Path(sys.argv[0])
    if program.name != "dataloader":
        return [sys.executable, "-m", "dataloader"]
    on_path = shutil.which("dataloader")
    known = on_path is not None and Path(on_path).resolve() == program.resolve()
    return ["dataloader" if known else str(program.absolute())]
