"""PURE: one answer of the answers of several clusters, each given with its cluster's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataloader.queue.clusters import has_gone
from dataloader.queue.job import TALLIED
from dataloader.queue.reports import stats

Answer = dict[str, Any]
Parts = Sequence[tuple[str, Answer]]
Arguments = Mapping[str, str]  # of the address
Merge = Callable[[Parts, Arguments], Answer]
SUGGESTED = 40
PAGE = 50  # jobs, where the address names no `limit`
SIMILAR = 3


def rows(key: str, by: Callable[[Answer], Any] | None = None) -> Merge:
    """The rows of all, each with its `cluster`, those of a cluster together or in the order of `by`.

    Of other fields the first answer's stand; of what is true or false it has to be true of one for `is_cut`, of all
    for the rest.
    """

    def merge(parts: Parts, _arguments: Arguments) -> Answer:
        found = [row | {"cluster": name} for name, part in parts for row in part[key]]
        found = [row for row in found if not has_gone(row)]
        return {**_flags(parts), key: sorted(found, key=by) if by else found}

    return merge


def _flags(parts: Parts) -> Answer:
    first = dict(parts[0][1])
    for name, value in first.items():
        if isinstance(value, bool):
            first[name] = (any if name == "is_cut" else all)(part[name] for _, part in parts)
    return first


def overview(parts: Parts, arguments: Arguments) -> Answer:
    """The figures of every queue, and their sums."""
    queues = rows("queues")(parts, arguments)["queues"]
    return {"at": min(part["at"] for _, part in parts), "total": stats.total(queues), "queues": queues}


def jobs(parts: Parts, arguments: Arguments) -> Answer:
    """The next page of a list of all jobs."""
    pages = [
        stats.Page([row | {"cluster": name} for row in part["jobs"]], part["next"], part["advice"])
        for name, part in parts
    ]
    page = stats.merged(pages, int(arguments.get("limit", PAGE)))
    return {"jobs": page.jobs, "next": page.next, "advice": page.advice}


def is_by_change(arguments: Arguments) -> bool:
    """Whether pages of this list can be merged: the order of keys is the database's, which may differ."""
    return arguments.get("sort", "changed") == "changed"


def tally(parts: Parts, _arguments: Arguments) -> Answer:
    """The sums of the counts."""
    counts = {kind: sum(part["counts"][kind] for _, part in parts) for kind in TALLIED}
    at_least = {kind for _, part in parts for kind in part["at_least"]}
    return {
        "counts": counts,
        "total": sum(counts.values()),
        "at_least": [kind for kind in TALLIED if kind in at_least],
    }


def suggestions(parts: Parts, _arguments: Arguments) -> Answer:
    """Each suggestion once."""
    every = dict.fromkeys(text for _, part in parts for text in part["suggestions"])
    return {"suggestions": list(every)[:SUGGESTED]}


def names(parts: Parts, _arguments: Arguments) -> Answer:
    """A name is known where one of the clusters knows it."""
    return {kind: _name([part[kind] for _, part in parts]) for kind in ("queue", "task")}


def _name(found: Sequence[Answer | None]) -> Answer | None:
    told = [each for each in found if each is not None]
    if not told:
        return None
    is_known = any(each["is_known"] for each in told)
    similar = dict.fromkeys(name for each in told for name in each["similar"])
    count = sum(each["count"] for each in told)
    return told[0] | {"is_known": is_known, "similar": [] if is_known else list(similar)[:SIMILAR], "count": count}


def pace(parts: Parts, _arguments: Arguments) -> Answer:
    """The sums of each ten seconds."""
    sums = {name: Counter[Any]() for name in ("processed", "failed")}
    for _, part in parts:
        for row in part["pace"]:
            for name, counter in sums.items():
                counter[row["at"]] += row[name]
    return {"pace": [{"at": at, **{name: sums[name][at] for name in sums}} for at in sorted(sums["processed"])]}
