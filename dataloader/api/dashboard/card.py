"""PURE: the head of a job's page: the reason of its state, and the remaining time of its run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from dataloader.api.dashboard import formats
from dataloader.model.kinds import fraction as share

REASON_SHOWN = 160  # characters
MIN_INTERVAL_SEC = 1.0  # between the two reports of progress that give a rate
Row = Mapping[str, Any]


def reason(job: Row, waiting: str) -> str:
    """The reason of the job's state in one line: its wait, the request to stop, or its error; "" if there is none."""
    if job["status"] == "queued":
        text = waiting
    elif job["status"] == "running":
        text = "asked to stop" if job["cancel_requested"] else ""
    else:
        text = "" if job["status"] == "succeeded" else formats.first_line(job["error"])
    return text if len(text) <= REASON_SHOWN else text[: REASON_SHOWN - 1] + "…"


def remaining_sec(job: Row, events: Sequence[Row], run_sec: float | None, now: datetime) -> float | None:
    """The seconds until the present run ends, at the rate since its first report; None if the rate is not known.

    The rate of a run that began at a checkpoint comes only from its own reports, which heartbeats journal.
    """
    done, at = share(job["progress"]), job["heartbeat_at"]
    if not done or at is None or run_sec is None:
        return None
    first = next(_reports(events), None)
    if first and (at - first[0]).total_seconds() >= MIN_INTERVAL_SEC and done > first[1]:
        seconds: float = (at - first[0]).total_seconds() / (done - first[1]) * (1 - done) - (now - at).total_seconds()
        return max(seconds, 0.0)
    return run_sec / done * (1 - done) if job["claims"] <= 1 else None


def _reports(events: Sequence[Row]) -> Iterator[tuple[datetime, float]]:
    """The time and the progress of each journaled heartbeat of the latest run, the oldest first."""
    begin = max((nth for nth, event in enumerate(events) if event["kind"] == "picked"), default=len(events))
    for event in events[begin:]:
        done = share((event["payload"] or {}).get("progress")) if event["kind"] == "heartbeat" else None
        if done is not None:
            yield event["ts"], done
