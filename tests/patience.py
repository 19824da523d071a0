"""How a test waits for what it cannot be told of: it asks until the answer is true."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0  # seconds until a test gives up waiting; never how long it waits when all is well


def until(question: Callable[[], Any], what: str = "it", patience: float = PATIENCE, pause: float = 0.002) -> Any:
    """Ask until the answer is true, and return it."""
    deadline = time.monotonic() + patience
    while not (answer := question()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {patience:g} s for {what}")
        time.sleep(pause)
    return answer
