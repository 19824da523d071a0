"""Which buttons a job or a queue has, what they ask before, and why one cannot be pressed now.

Pure: the dashboard draws them and does what they say by `operate`. May import nothing of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FINAL = {"succeeded", "failed", "canceled", "lost"}


@dataclass(frozen=True, slots=True)
class Button:
    """One thing to do: its name in the address, its label, the question before it, and why not, if not."""

    name: str
    label: str
    question: str = ""
    because: str = ""  # why it cannot be pressed
    is_grave: bool = False  # something is lost by it


def of_job(job: Mapping[str, Any]) -> list[Button]:
    """Those that make sense for a job in this state, the one most likely wanted first."""
    if job["status"] == "queued":
        return [_run_now(job), _CANCEL_QUEUED, _delete(job)]
    if job["status"] == "running":
        return [_cancel(job), _force(job), _delete(job)]
    return [_requeue(job), _delete(job)]


_CANCEL_QUEUED = Button("cancel", "Cancel", "Cancel this job? It has not started and never will.", is_grave=True)


def _run_now(job: Mapping[str, Any]) -> Button:
    waits = (job.get("waiting_for") or {}).get("reason")
    because = "" if waits in ("time", "session") or job.get("blocked_on") == "time" else "Its time has come already."
    return Button("run-now", "Run now", because=because)


def _cancel(job: Mapping[str, Any]) -> Button:
    because = "It has been asked to stop, and will at its next safe point." if job["cancel_requested"] else ""
    return Button(
        "cancel",
        "Cancel",
        "Cancel this job? It stops at its next safe point; what it has written stays.",
        because,
        is_grave=True,
    )


def _force(job: Mapping[str, Any]) -> Button:
    return Button(
        "force-cancel",
        "Force cancel",
        "Force this job to stop? It is interrupted where it stands, and its process killed where that does not help.",
        "Its end is being forced already." if job.get("cancel_forced") else "",
        is_grave=True,
    )


def _requeue(job: Mapping[str, Any]) -> Button:
    asked = "Run this job again? It has succeeded; it will do its work once more, with a fresh budget of attempts."
    return Button("requeue", "Requeue", asked if job["status"] == "succeeded" else "")


def _delete(job: Mapping[str, Any]) -> Button:
    return Button(
        "delete",
        "Delete",
        "Delete this job, with its journal? Nothing of it remains.",
        "A running job cannot be deleted. Cancel it first." if job["status"] == "running" else "",
        is_grave=True,
    )


def of_queue(queue: Mapping[str, Any]) -> list[Button]:
    """A queue's buttons; those that would do nothing say so."""
    dead, scheduled = _jobs(queue["dead"], "dead"), _jobs(queue["scheduled"], "scheduled")
    none_dead = "" if queue["dead"] else "No job of this queue is dead."
    none_scheduled = "" if queue["scheduled"] else "No job of this queue waits for its time."
    return [
        Button("resume", "Resume")
        if queue["paused_at"]
        else Button("pause", "Pause", "Pause this queue? No job of it starts, on any host, until it is resumed."),
        Button("run-all", "Run all now", f"Let {scheduled} run now, retries in their back-off too?", none_scheduled),
        Button("requeue-dead", "Requeue all dead", f"Run {dead} again, with a fresh budget of attempts?", none_dead),
        Button("delete-dead", "Delete all dead", f"Delete {dead}, with their journals?", none_dead, is_grave=True),
    ]


def _jobs(number: int, kind: str) -> str:
    return f"the one {kind} job" if number == 1 else f"all {number:,} {kind} jobs"
