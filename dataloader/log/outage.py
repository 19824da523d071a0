"""An outage in few log lines, however many failures it has."""

from __future__ import annotations

from time import monotonic
from typing import Any

from dataloader import periods

EVERY_SEC = periods.seconds("OUTAGE_EVERY_SEC", 30.0)  # between two lines of the same event


class Outage:
    """Logs the first failure at once, then each event once per EVERY_SEC with the count so far, and the end once."""

    def __init__(self, logger: Any, over: str) -> None:
        """`over` is the event that logs the end."""
        self._logger = logger
        self._over = over
        self._reset()

    def _reset(self) -> None:
        self.failures = 0
        self._began = 0.0
        self._next_at: dict[str, float] = {}

    def failed(self, event: str, error: BaseException) -> None:
        """Count a failure, and log `event` with it when that is due."""
        at = monotonic()
        self._began = self._began if self.failures else at
        self.failures += 1
        if at >= self._next_at.get(event, at):
            self._next_at[event] = at + EVERY_SEC
            many = {"failures": self.failures, "lasting_sec": round(at - self._began)} if self.failures > 1 else {}
            self._logger.warning(event, error=str(error).strip(), **many)

    def ended(self) -> None:
        """Log the end of the outage; without an outage the call does nothing."""
        if self.failures:
            lasted = round(monotonic() - self._began, 1)
            self._logger.info(self._over, failures=self.failures, lasted_sec=lasted)
            self._reset()
