"""What requests share because it takes up to some tenths of a second: outlooks on queues, counts of large backfills."""

from __future__ import annotations

from dataloader import periods
from dataloader.api.web import clusters
from dataloader.api.web.cache import RenewedAnswers
from dataloader.queue.db import Conn
from dataloader.queue.plans import backfills
from dataloader.queue.reports import predictions
from dataloader.queue.reports.predictions import Outlook

# The Python of one takes the API up to 0.2 s, beside which its other answers wait.
FRESH_SEC = periods.seconds("OUTLOOKS_FRESH_SEC", 15.0)
OUTDATED_SEC = periods.seconds("OUTLOOKS_OUTDATED_SEC", 30.0)
COUNTS_FRESH_SEC = periods.seconds("COUNTS_FRESH_SEC", 5.0)
COUNTS_OUTDATED_SEC = periods.seconds("COUNTS_OUTDATED_SEC", 10.0)
MOST = 200  # queues, or backfills, of which an answer is kept


def outlook(conn: Conn, queue: str) -> Outlook:
    """The outlook on a queue: FRESH_SEC old, or as old as the time since somebody asked, up to OUTDATED_SEC."""
    sessions = clusters.of_app().sessions(clusters.chosen())
    kept = clusters.kept(
        "outlooks", lambda: RenewedAnswers(sessions, predictions.outlook, FRESH_SEC, OUTDATED_SEC, MOST)
    )
    return kept.of(conn, queue)


def counts(conn: Conn, backfill: str) -> backfills.Rows:
    """The counts of a large backfill's partitions, in the same way."""
    sessions = clusters.of_app().sessions(clusters.chosen())
    kept = clusters.kept(
        "backfill_counts",
        lambda: RenewedAnswers(sessions, backfills.counts, COUNTS_FRESH_SEC, COUNTS_OUTDATED_SEC, MOST),
    )
    return kept.of(conn, backfill)
