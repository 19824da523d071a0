"""gunicorn's configuration: what is the same however the API is started. May import no other part of the package.

`dataloader api` names this module, `gunicorn.conf.py` beside wsgi.py takes all that is in it; gunicorn's command line
and GUNICORN_CMD_ARGS win over it.

A worker that gunicorn forks has the arbiter's signal handlers until it installs its own, and a SIGTERM in between is
lost: the arbiter then waits all of its graceful timeout. So termination is held back over the fork, and let through
when the worker can hear it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any

from dataloader import log
from dataloader.api.web import auth
from dataloader.config import ConfigError, load  # not `config`: every name here that gunicorn knows is a setting

worker_class = "dataloader.api.server.slow_clients.BufferingWorker"
threads = 32  # half of them may hold a long poll, nearly as many a database session, two are always free
keepalive = 15  # seconds; an idle connection costs no thread
graceful_timeout = 30
timeout = 60
# gunicorn would take an address' path from a client's SCRIPT_NAME and PATH_INFO, past whatever a proxy guards by path.
forwarder_headers = ""
# It would make the arbiter threaded, and two services of one user would share its path.
control_socket_disable = True

SWITCH_SEC = 0.001  # a request of a millisecond should not wait 5 ms for each of those that have begun before it
_HELD = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}


def on_starting(_arbiter: Any) -> None:
    """Called by gunicorn in the arbiter, before it forks."""
    os.register_at_fork(before=_hold, after_in_parent=_release)
    with suppress(ConfigError):  # the workers will say it
        settings = load()
        log.configure(settings)
        auth.announce(settings)


def post_worker_init(worker: Any) -> None:
    """Called by gunicorn in a worker that has its handlers and its application."""
    _release()
    sys.setswitchinterval(SWITCH_SEC)
    for tell in getattr(worker.wsgi, "extensions", {}).get("on_threads", ()):
        tell(worker.cfg.threads)


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
