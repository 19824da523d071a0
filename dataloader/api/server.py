"""gunicorn's configuration module: what its command line cannot say. May import nothing of the package.

A worker that gunicorn forks has the arbiter's signal handlers until it installs its own, and a SIGTERM in between is
lost: the arbiter then waits all of its graceful timeout. So termination is held back over the fork, and let through
when the worker can hear it.
"""

from __future__ import annotations

import os
import signal
from typing import Any

_HELD = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}


def on_starting(_arbiter: Any) -> None:
    """Called by gunicorn in the arbiter, before it forks."""
    os.register_at_fork(before=_hold, after_in_parent=_release)


def post_worker_init(_worker: Any) -> None:
    """Called by gunicorn in a worker that has its handlers and its application."""
    _release()


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
