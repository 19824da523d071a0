"""The outlooks on queues that requests share: a prediction takes up to some tenths of a second."""

from __future__ import annotations

from flask import current_app

from dataloader.api.web.cache import SharedAnswer
from dataloader.queue import predictions
from dataloader.queue.db import Conn
from dataloader.queue.predictions import Outlook

FRESH_SEC = 5.0
MOST = 200  # queues of which an outlook is kept


def outlook(conn: Conn, queue: str) -> Outlook:
    """The outlook on a queue, at most FRESH_SEC old, or twice that while another request renews it."""
    kept: dict[str, SharedAnswer[Outlook]] = current_app.extensions.setdefault("outlooks", {})
    if len(kept) >= MOST and queue not in kept:
        kept.clear()
    shared = kept.setdefault(queue, SharedAnswer(FRESH_SEC, 2 * FRESH_SEC))
    return shared.ask(lambda: predictions.outlook(conn, queue))
