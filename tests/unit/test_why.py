"""The reasons for which a job waits, in words for people."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dataloader.queue import waiting

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
