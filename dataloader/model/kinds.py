"""How an answer is declared, and types that several answers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, dataclass_transform

from annotated_types import Ge

from dataloader.queue.job import TALLIED
from dataloader.queue.job import Status as JobState

# Kinds of alerts, the shapes of their messages, and the states of the partitions of a backfill.
ALERTS = ("dead", "stuck", "deadline", "lag", "paused")
SHAPES = ("json", "alertmanager", "slack")
PARTITION_STATES = ("missing", "queued", "running", "succeeded", "failed", "lost", "canceled", "skipped")

Count = Annotated[int, Ge(0)]
Seconds = Annotated[float, Ge(0)]
OrderName: TypeAlias = Literal["requeue", "start-over", "cancel", "delete", "run-now"]
JobStatus: TypeAlias = Literal[tuple(map(str, JobState))]  # type: ignore[valid-type]
JobKind: TypeAlias = Literal[TALLIED]  # type: ignore[valid-type]
PartitionState: TypeAlias = Literal[PARTITION_STATES]  # type: ignore[valid-type]
Progress = Annotated[Any, "the pipeline's last report: an object, unless another service wrote it"]


def fraction(progress: Any) -> float | None:
    """The finished share, 0 to 1, of a progress with `processed` and `total`, or `percent`; else None."""
    if not isinstance(progress, Mapping):
        return None
    done, total, percents = (number_of(progress.get(name)) for name in ("processed", "total", "percent"))
    if done is not None and total is not None and total > 0:
        return min(max(done / total, 0.0), 1.0)
    return None if percents is None else min(max(percents / 100, 0.0), 1.0)


def number_of(value: Any) -> float | None:
    """`value` as a float, or None: pipelines yield any JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Answer:
    """Makes each class below it a frozen dataclass; a text in the annotation of a field describes the field."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Gone(Answer):
    """A limit or a webhook that was removed."""

    name: str


class Removed(Gone):
    """A schedule or a backfill that was removed; its jobs stay."""

    removed: Literal[True] = True
