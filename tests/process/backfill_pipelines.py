"""A pipeline that writes a row for its partition, for test_backfills_of_farms."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from dataloader.pipelines import Context, register


@register("fills")
def fills(args: dict[str, Any], context: Context) -> Iterator[dict[str, Any]]:
    """In one transaction, behind the fence: a killed run leaves nothing."""
    time.sleep(args.get("sec", 0.1))
    yield {"day": args["day"]}
    with context.transaction() as conn:
        conn.execute("DELETE FROM filled WHERE partition = %s", (args["day"],))
        conn.execute("INSERT INTO filled VALUES (%s, %s)", (args["day"], context.job_id))
