"""The orders that a worker has received, and its waits, which an order ends."""

from __future__ import annotations

import os
import signal

from dataloader.config import Settings
from dataloader.farm.process import Signals, call_parent, now
from dataloader.farm.slots import Order, Slot


class Orders:
    """SIGTERM, SIGINT and the supervisor's death drain the worker; SIGHUP makes the worker look at its slot."""

    def __init__(self, settings: Settings, slot: Slot, life: int) -> None:
        self._settings = settings
        self._slot = slot
        self._life = life  # a pipe whose only writer is the supervisor
        self._supervisor = os.getppid()
        self._orphaned = False
        self.signals = Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._on_signal)

    def _on_signal(self, number: int) -> None:
        """In the signal handler: only set values."""
        if number != signal.SIGHUP:
            self.drain()

    def drain(self) -> None:
        """Claim nothing more; a running job has DL_DRAIN_SEC. Safe in a signal handler: the method only sets values."""
        self._slot.drain_until(now() + self._settings.dl_drain_sec + self._settings.dl_kill_grace_sec)

    @property
    def drain_by(self) -> float:
        """When a draining worker is killed (monotonic seconds); 0 while the worker does not drain."""
        return float(self._slot.fields.drain_by)

    @property
    def stopping(self) -> bool:
        """True once the worker drains."""
        return self.drain_by > 0

    @property
    def may_claim(self) -> bool:
        """False once the worker drains, and while another worker has its place."""
        return not self.stopping and self._slot.order is Order.WORK

    @property
    def is_over(self) -> bool:
        """True once the worker drains or leaves."""
        return self.stopping or self._slot.order is Order.LEAVE

    @property
    def is_overdue(self) -> bool:
        """True once a draining worker has used up DL_DRAIN_SEC and DL_KILL_GRACE_SEC."""
        return self.stopping and now() > self.drain_by

    def pause(self, seconds: float, *others: int) -> None:
        """Wait for `seconds`, a signal, the supervisor's death, or one of the file descriptors `others`."""
        life = [] if self._orphaned else [self._life]  # a pipe without a writer is readable for ever
        if self._life in self.signals.wait(seconds, *others, *life):
            self._orphaned = True
            self.drain()

    def call_supervisor(self) -> None:
        """Let the supervisor look at the slot now; otherwise its next tick does."""
        call_parent(self._supervisor)
