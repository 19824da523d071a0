"""The slots of dl_spans as a test computes them, independently of dl_roll."""

import math

from dataloader.queue.reports.histogram import LEAST, RATIO

MOST = 1e9  # larger values are in its slot


def slot_of(value: float) -> int:
    """The slot of a value."""
    return math.ceil(math.log(min(max(value, LEAST), MOST) * 1_000) / math.log(RATIO))
