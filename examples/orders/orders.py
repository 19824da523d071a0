"""Pipelines of the example: they send messages about orders to a shop, which stores whatever reached it last.

The shop is two tables of the target database (SHOP). Like many services it takes the state of an order without asking
how old the state is, and a call takes a while.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from dataloader.pipelines import Context, Retry, register

Message = dict[str, Any]  # {"order", "version", "status", "ms", "refused_once"}: see produce.py
SHOP = """
CREATE TABLE shop_orders (order_id int PRIMARY KEY, version int NOT NULL, status text NOT NULL);
CREATE TABLE shop_calls (messages int NOT NULL);
CREATE TABLE shop_refusals (order_id int, version int, PRIMARY KEY (order_id, version));
"""
BUSY_SEC = 0.3  # after a refusal the shop wants to be left alone for so long


@register("orders.send")
def send(message: Message, context: Context) -> None:
    """One message a call: for a queue that does not merge."""
    if call_shop([message], context):
        raise Retry(in_sec=BUSY_SEC, why="the shop is busy")


@register("orders.sync", batch_size=10)
def sync(orders: dict[str, list[Message]], context: Context) -> None:
    """The newest state of up to ten orders a call: for a queue that merges."""
    newest = {key: messages[-1] for key, messages in orders.items()}  # old to new: the last one has all that counts
    refused = call_shop(newest.values(), context)
    for key, message in newest.items():
        if message["order"] in refused:
            context.retry(key, in_sec=BUSY_SEC)  # this order alone; the others have succeeded


def call_shop(messages: Collection[Message], context: Context) -> set[int]:
    """One round trip: the shop stores these states as they come; returns the orders that it has refused."""
    time.sleep(max(message["ms"] for message in messages) / 1_000)
    refused: set[int] = set()
    with context.transaction() as conn:
        conn.execute("INSERT INTO shop_calls (messages) VALUES (%s)", (len(messages),))
        for message in messages:
            if message["refused_once"] and _is_first_time(conn, message):
                refused.add(message["order"])
                continue
            conn.execute(
                "INSERT INTO shop_orders (order_id, version, status) VALUES (%(order)s, %(version)s, %(status)s)"
                " ON CONFLICT (order_id) DO UPDATE SET version = excluded.version, status = excluded.status",
                message,
            )
    return refused


def _is_first_time(conn: Any, message: Message) -> bool:
    noted = conn.execute(
        "INSERT INTO shop_refusals (order_id, version) VALUES (%(order)s, %(version)s) ON CONFLICT DO NOTHING", message
    )
    return bool(noted.rowcount)
