"""An outage in few lines, however often something fails in it. May import nothing of the package."""

from __future__ import annotations

from time import monotonic
from typing import Any

EVERY_SEC = 30.0  # between two lines of the same event


class Outage:
    """Tells the first failure at once, repeats it every EVERY_SEC with how often it came, and tells the end once."""

    def __init__(self, logger: Any, over: str) -> None:
        """`over` is the event that the end is told by."""
        self._logger = logger
        self._over = over
        self._reset()

    def _reset(self) -> None:
        self.failures = 0
        self._began = 0.0
        self._tell_at: dict[str, float] = {}

    def failed(self, event: str, error: BaseException) -> None:
        """Something has failed in the way that `event` names."""
        at = monotonic()
        self._began = self._began if self.failures else at
        self.failures += 1
        if at >= self._tell_at.get(event, at):
            self._tell_at[event] = at + EVERY_SEC
            many = {"failures": self.failures, "lasting_sec": round(at - self._began)} if self.failures > 1 else {}
            self._logger.warning(event, error=str(error).strip(), **many)

    def ended(self) -> None:
        """It works again; costs next to nothing where it always has."""
        if self.failures:
            lasted = round(monotonic() - self._began, 1)
            self._logger.info(self._over, failures=self.failures, lasted_sec=lasted)
            self._reset()
