"""The producer of the example: it adds a job for each message about an order, in waves, as a broker would deliver them.

python produce.py --queue orders --task orders.sync --score
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import psycopg

from dataloader import NewJob, enqueue_many

STATUSES = ("new", "paid", "packed", "sent", "delivered")
REFUSED_OF = 20  # the shop refuses one message of so many, once
LATE_OF = 20  # one message of so many arrives late


def traffic(orders: int, versions: int, wave: int, seed: int) -> list[list[dict[str, Any]]]:
    """Messages about all versions of some orders, in waves.

    The orders take turns at random, and a turn sends up to three messages. Some messages arrive later than they were
    sent, but each wave arrives wholly before the next one. `sent` is the place at which a message was sent; `ms` is how
    long the shop takes for it.
    """
    rng = random.Random(seed)  # noqa: S311  the same traffic for each queue
    left = dict.fromkeys(range(orders), versions)
    messages: list[dict[str, Any]] = []
    while left:
        order = rng.choice(list(left))
        for _ in range(min(left[order], rng.randint(1, 3))):
            version = versions - left[order] + 1
            left[order] -= 1
            message = {
                "order": order,
                "version": version,
                "status": STATUSES[(version - 1) * len(STATUSES) // versions],
            }
            chances = {"ms": rng.randint(5, 40), "refused_once": rng.randrange(REFUSED_OF) == 0}
            messages.append({**message, "sent": len(messages), **chances})
        if not left[order]:
            del left[order]
    waves = [messages[start : start + wave] for start in range(0, len(messages), wave)]
    return [sorted(sent, key=lambda message: message["sent"] + _delay(rng)) for sent in waves]


def _delay(rng: random.Random) -> int:
    """How many places later a message arrives than it was sent: mostly none."""
    return rng.randint(2, 20) if rng.randrange(LATE_OF) == 0 else 0


def jobs(messages: list[dict[str, Any]], queue: str, task: str, by_message: bool, with_score: bool) -> Iterator[NewJob]:
    """A job for each message; its key is the order, or with `by_message` the message alone."""
    for message in messages:
        key = f"order-{message['order']}" + (f"-v{message['version']}" if by_message else "")
        yield NewJob(queue, task, key, message, score=float(message["sent"]) if with_score else None)


def produce(
    dsn: str,
    waves: list[list[dict[str, Any]]],
    queue: str,
    task: str,
    by_message: bool,
    with_score: bool,
    pause_sec: float = 0.05,
) -> None:
    """Add the jobs of each wave in a transaction of its own, with a pause in between."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for arrived in waves:
            enqueue_many(conn, list(jobs(arrived, queue, task, by_message, with_score)))
            time.sleep(pause_sec)


def main() -> None:
    """Read the options and produce."""
    parser = argparse.ArgumentParser(description="Add jobs for messages about orders to the queue of DL_DB_DSN.")
    parser.add_argument("--queue", default="orders")
    parser.add_argument("--task", default="orders.sync")
    parser.add_argument("--orders", type=int, default=30)
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--wave", type=int, default=50, help="messages that arrive together, in any order")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--score", action="store_true", help="name each message's place; else the time of arrival")
    parser.add_argument("--by-message", action="store_true", help="a lock_key for each message, not for each order")
    given = parser.parse_args()
    waves = traffic(given.orders, given.versions, given.wave, given.seed)
    produce(os.environ["DL_DB_DSN"], waves, given.queue, given.task, given.by_message, given.score)


if __name__ == "__main__":
    main()
