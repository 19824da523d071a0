"""Judges of a farm's history: what must hold whatever happened to its processes."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

# Which journal kinds may follow which; None stands before the first.
_NEXT: dict[str | None, set[str]] = {
    None: {"queued"},
    "queued": {"picked", "canceled", "requeue"},
    "picked": {"heartbeat", "done", "requeue", "failed", "canceled", "lost", "cancel_requested"},
    "heartbeat": {"heartbeat", "done", "requeue", "failed", "canceled", "lost", "cancel_requested"},
    "cancel_requested": {"cancel_requested", "heartbeat", "done", "requeue", "canceled", "lost"},
    "requeue": {"picked", "canceled", "requeue", "lost", "failed"},
    "done": set(),
    "failed": set(),
    "canceled": set(),
    "lost": set(),
}
_REMARKS = {"stuck", "deadline"}  # they stand anywhere in a story
_ENDS = {"succeeded": "done", "failed": "failed", "canceled": "canceled", "lost": "lost"}


def illegal(kinds: Sequence[str], status: str) -> str | None:
    """Why a journal is no legal story for a job of this status; None when it is one."""
    before: str | None = None
    for kind in kinds:
        if kind in _REMARKS:
            continue
        if kind not in _NEXT[before]:
            return f"{kind} after {before}"
        before = kind
    if status in _ENDS and before != _ENDS[status]:
        return f"{status} but its story ends with {before}"
    return None


def side_by_side(runs: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Of these runs, each a key, its begin and its end, those that began before the end of another one of their key."""
    return [run for before, run in pairwise(sorted(runs)) if run[0] == before[0] and run[1] < before[2]]


OVERLAPS = """
SELECT a.lock_key, a.job_id, b.job_id, a.started, a.ended, b.started
  FROM runs a JOIN runs b ON a.lock_key = b.lock_key AND (a.job_id, a.pid, a.started) <> (b.job_id, b.pid, b.started)
 WHERE a.ended IS NOT NULL AND b.started >= a.started AND b.started < a.ended
"""

# How many runs of a limit were under way behind each of their steps, at most.
UNDER_WAY = """
SELECT max(runs) FROM (
  SELECT sum(change) OVER (ORDER BY ts, change, event_id) AS runs FROM (
    SELECT ts, event_id, CASE kind WHEN 'picked' THEN 1 ELSE -1 END AS change
      FROM dl_job_events JOIN dl_jobs USING (job_id)
     WHERE kind IN ('picked', 'done', 'failed', 'canceled', 'lost', 'requeue') AND NOT payload ? 'backoffs'
       AND %s = ANY (limits)) steps) n
"""
