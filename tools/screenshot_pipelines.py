"""The pipelines of `tools.screenshots`: slow loads, one that fails, and one that kills its worker."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

from dataloader.pipelines import Context, PermanentError, Progress, register


def _load(rows: int, rows_a_second: int, **more: Any) -> Iterator[Progress]:
    done, step, ballast = 0, max(rows // 50, 1), bytearray(20_000_000)
    while done < rows:
        until = time.perf_counter() + step / rows_a_second
        while time.perf_counter() < until - 0.8 * step / rows_a_second:
            ballast[random.randrange(len(ballast))] = 1
        time.sleep(max(until - time.perf_counter(), 0))
        done = min(done + step, rows)
        yield {"processed": done, "total": rows, **more}


@register("load.orders")
def load_orders(args: dict[str, Any]) -> Iterator[Progress]:
    """Report `rows` rows, at a given rate a second."""
    yield from _load(args["rows"], args.get("rows_a_second", 20_000), step="merge")


@register("load.customers")
def load_customers(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """For a region without rates, the first attempt is killed and the next one fails."""
    yield from _load(args["rows"] // 2, 40_000, step="read")
    if context.attempt == 1 and args["region"] == "south":
        os.kill(os.getpid(), signal.SIGKILL)
    rates = _rates_of(args["region"])
    yield from _load(int(args["rows"] // 2 * rates["EUR"]), 40_000, step="convert")


def _rates_of(region: str) -> dict[str, float]:
    return _RATES[region]


_RATES = {"north": {"EUR": 1.0}, "east": {"EUR": 1.0}, "west": {"EUR": 1.0}}


@register("shop.orders", retry_in=lambda attempt: 570.0 if attempt > 1 else 0.2)
def shop_orders(args: dict[str, Any]) -> Iterator[Progress]:
    """One message about an order. The shop refuses the first one about order 1042, and does not answer the next."""
    if args["order"] == 1042 and args["version"] == 1:
        raise PermanentError("422 of shop.example: the address of order 1042 has no postcode")
    if args["order"] == 1042:
        raise ConnectionError("shop.example:443 has not answered within 10 s")
    yield from _load(60_000, 1_500, step=args["state"])


@register("load.rates")
def load_rates(args: dict[str, Any]) -> Iterator[Progress]:
    """The rates of a day: there are none for some days, and those from October on take their time."""
    yield from _load(*(300, 40_000) if args["month"] < 10 else (3_000, 20))
    if args["day"] * args["month"] % 29 == 4:
        raise PermanentError(f"404 of rates.example: no rates of {args['date']}")


@register("report.daily")
def report_daily(args: dict[str, Any]) -> Iterator[Progress]:
    """A short job, which fails now and then."""
    yield from _load(2_000, 8_000)
    if args["number"] % 9 == 4:
        raise ConnectionError("the report server at reports.example:443 refused the connection")
