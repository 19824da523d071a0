"""The pipelines of a fleet's jobs. They import only modules that code of each version has."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from dataloader.pipelines import Context, register

STEP_SEC = 0.1
TABLES = """
CREATE TABLE ledger (
  n bigserial PRIMARY KEY, job_id uuid NOT NULL, host text NOT NULL, code text NOT NULL, at timestamptz NOT NULL);
"""


@register("fleet.light")
def light(args: dict[str, Any]) -> None:
    """Take `sec` seconds and hardly any CPU."""
    time.sleep(args["sec"])


@register("fleet.ledger")
def ledger(args: dict[str, Any], context: Context) -> Iterator[dict[str, Any]]:
    """Take `sec` seconds with a safe point after each step, then write one row in a fenced transaction."""
    end = time.monotonic() + args["sec"]
    while time.monotonic() < end:
        select.select([], [], [], STEP_SEC)  # not time.sleep, which libfaketime 0.9 breaks
        yield {"processed": 0}
    with context.transaction() as conn:
        conn.execute(
            "INSERT INTO ledger (job_id, host, code, at) VALUES (%s, %s, %s, clock_timestamp())",
            (context.job_id, socket.gethostname(), os.environ["FLEET_CODE"]),
        )
