"""PURE: what to do next on a farm that has had no job yet, with commands that fit this installation."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloader.config import Settings

_WITH_TOKENS = " The variable DL_TOKEN should hold a token with the scope trigger."


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do: whether it is done, why it matters, and commands to copy."""

    title: str
    is_done: bool
    text: str
    commands: Sequence[str] = ()


def steps(facts: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], settings: Settings, url: str) -> list[Step]:
    """The steps up to the first job, by what `stats.beginning` has seen; `url` is where the API answers."""
    served = next((worker["queues"][0] for worker in workers if worker["is_live"]), None)
    queue = served or settings.workers[0].served[0]
    return [
        Step(
            "Start workers",
            bool(served),
            f"They run the jobs. Those of this machine's settings serve {_all(settings)}; start them on each machine"
            " that should work, with the settings of this service.",
            [shlex.join([*program(), "workers"])],
        ),
        Step(
            "Start the reaper",
            bool(facts["has_reaper"]),
            "It returns the jobs of machines that are lost, makes those of schedules, and counts what this page shows.",
            [shlex.join([*program(), "reaper"])],
        ),
        Step(
            "Trigger the first job",
            False,
            "It makes its queue." + (_WITH_TOKENS if settings.dl_api_tokens else ""),
            [_trigger(queue, url)] if settings.dl_api_tokens else [_trigger(queue, url), _request(queue, url)],
        ),
    ]


def program() -> list[str]:
    """The command line of this installation, as another shell on this machine finds it."""
    own = Path(sys.executable).with_name("dataloader")
    on_path = shutil.which("dataloader")
    if on_path and (not own.exists() or Path(on_path).resolve() == own.resolve()):
        return ["dataloader"]
    return [str(own)] if own.exists() else [sys.executable, "-m", "dataloader"]


def _all(settings: Settings) -> str:
    names = list(dict.fromkeys(queue for spec in settings.workers for queue in spec.served))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more queues" if len(names) > 3 else "")


def _trigger(queue: str, url: str) -> str:
    return shlex.join([*program(), "trigger", "noop", "--queue", queue, "--url", url, "--wait"])


def _request(queue: str, url: str) -> str:
    body = json.dumps({"queue": queue, "task": "noop", "lock_key": "noop"})
    address, header = shlex.quote(f"{url}/api/v1/jobs/trigger"), "-H 'Content-Type: application/json'"
    return f"curl -X POST {address} {header} -d {shlex.quote(body)}"
