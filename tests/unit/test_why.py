"""The reasons for which a job waits, in words for people."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dataloader.queue.reports import waiting

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("workers", "ahead", "words"),
    [
        (0, 0, "It is the next of its queue: it starts when a worker of q is free."),
        (1, 0, "It is the next of its queue: it starts when the only worker of q is free."),
        (2, 0, "It is the next of its queue: it starts when one of 2 workers of q is free."),
        (0, 7, "7 jobs of the queue q go before it."),
        (1, 1, "1 job of the queue q goes before it; 1 worker serves that queue."),
        (2, 1_000, "1,000 jobs or more of the queue q go before it; 2 workers serve that queue."),
    ],
)
def test_numbers_of_workers_and_jobs(workers: int, ahead: int, words: str) -> None:
    assert waiting.words({"reason": "worker", "queue": "q", "workers": workers, "ahead": ahead}, NOW) == words


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"running": 3, "most": 3}, "The limit l has no room: 3 jobs of it run, and it allows 3."),
        (
            {"running": 0, "until": (NOW + timedelta(seconds=90)).isoformat()},
            "The limit l lets the next job start in 1 min 30 s.",
        ),
    ],
)
def test_a_limit_says_what_it_allows_or_when(more: dict[str, Any], words: str) -> None:
    assert waiting.words({"reason": "limit", "limit": "l", **more}, NOW) == words
