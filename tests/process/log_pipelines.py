"""Pipelines that test_logs.py runs through DL_PIPELINES."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from dataloader.pipelines import Context, Progress, register


@register("chatty")
def chatty(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Log far more than a pipe holds, for a while."""
    end = time.monotonic() + args.get("sec", 1)
    number = 0
    while number < args.get("lines", 2_000) or time.monotonic() < end:
        context.logger.debug("line %s", number, extra={"text": "x" * 200})
        number += 1
        if number > args.get("lines", 2_000):
            time.sleep(0.01)
        yield {"processed": number}


@register("tells_secrets")
def tells_secrets(args: dict[str, Any], context: Context) -> Iterator[Progress]:
    """Say what it knows in every way that there is, and fail."""
    told = f"no login with {args['password']} at {args['dsn']} as {args['known']}"
    context.logger.warning("%s; args %r", told, args, extra={"args_given": args})
    threading.Thread(target=context.logger.error, args=(told,)).start()
    yield {"processed": 1, "password": args["password"], "note": told}
    time.sleep(args.get("sec", 1.5))
    raise ValueError(told, args)
