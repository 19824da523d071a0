"""PURE: the head of a job's page: the reason of its state, the facts of the run that goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dataloader.api.dashboard import formats
from dataloader.model.kinds import fraction as share

REASON_SHOWN = 160  # characters
FASTEST_SEC = 1.0  # between two reports of progress that tell a rate
Row = Mapping[str, Any]


def reason(job: Row, waiting: str) -> str:
    """Why the job is in its state, in a line: what it waits for, that it is asked to stop, its error; "": no reason."""
    if job["status"] == "queued":
        text = waiting
    elif job["status"] == "running":
        text = "asked to stop" if job["cancel_requested"] else ""
    else:
        text = "" if job["status"] == "succeeded" else formats.first_line(job["error"])
    return text if len(text) <= REASON_SHOWN else text[: REASON_SHOWN - 1] + "…"


def left_sec(job: Row, events: Sequence[Row], run_sec: float | None, now: datetime) -> float | None:
    """In how many seconds the present run ends, if it goes on as fast as since its first report; None: nobody knows.

    A run that has begun at a checkpoint tells its rate by its own reports alone, which heartbeats journal.
    """
    done, at = share(job["progress"]), job["heartbeat_at"]
    if not done or at is None or run_sec is None:
        return None
    first = next(_reports(events), None)
    if first and (at - first[0]).total_seconds() >= FASTEST_SEC and done > first[1]:
        seconds: float = (at - first[0]).total_seconds() / (done - first[1]) * (1 - done) - (now - at).total_seconds()
        return max(seconds, 0.0)
    return run_sec / done * (1 - done) if job["claims"] <= 1 else None


def _reports(events: Sequence[Row]) -> Iterator[tuple[datetime, float]]:
    """The progress that the heartbeats of the latest run have journaled, the first one first."""
    begin = max((nth for nth, event in enumerate(events) if event["kind"] == "picked"), default=len(events))
    for event in events[begin:]:
        done = share((event["payload"] or {}).get("progress")) if event["kind"] == "heartbeat" else None
        if done is not None:
            yield event["ts"], done
