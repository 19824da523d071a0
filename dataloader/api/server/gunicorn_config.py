"""gunicorn's configuration, the same for every way to start the API.

`dataloader api` names this module, and `gunicorn.conf.py` beside wsgi.py imports it; gunicorn's command line and
GUNICORN_CMD_ARGS override it.

A forked worker has the arbiter's signal handlers until it installs its own. A SIGTERM in between would be lost, and the
arbiter would wait all of its graceful timeout. So termination signals are blocked over the fork and unblocked when the
worker has its handlers. `dataloader api` blocks the arbiter's other signals until it has its own.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from gunicorn.systemd import sd_notify  # type: ignore[import-untyped]

from dataloader import log
from dataloader.api.web import auth
from dataloader.config import ConfigError, load  # not `config`: every name here that gunicorn knows is a setting
from dataloader.surroundings import temporary_folder

worker_class = "dataloader.api.server.slow_clients.BufferingWorker"
threads = 32  # half may hold long polls, two stay free, the others may use the database
keepalive = 15  # seconds; an idle connection costs no thread
sendfile = False  # answers go through the poller, which waits for the client
graceful_timeout = 30
timeout = 60
worker_tmp_dir = temporary_folder()
# gunicorn would take the path from a client's headers SCRIPT_NAME and PATH_INFO, past a proxy's rules about paths.
forwarder_headers = ""
# The control socket would make the arbiter threaded, and two services of one user would share its path.
control_socket_disable = True

SWITCH_SEC = 0.001  # Python's default of 5 ms would delay a short request behind each running one
_HELD = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}
_hold, _release = (partial(signal.pthread_sigmask, how, _HELD) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))


def on_starting(arbiter: Any) -> None:
    """gunicorn calls this in the arbiter before it forks."""
    if arbiter.cfg.is_ssl:
        sys.exit("dataloader api: certificates are for a proxy in front: leave --certfile and --keyfile out")
    os.register_at_fork(before=_hold, after_in_parent=_release)
    with suppress(ConfigError):  # the workers report it
        settings = load()
        log.configure(settings)
        auth.announce(settings)


def when_ready(arbiter: Any) -> None:
    """gunicorn calls this in an arbiter that has its signal handlers, before it forks."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def post_worker_init(worker: Any) -> None:
    """gunicorn calls this in a worker that has its signal handlers and its application."""
    _release()
    sys.setswitchinterval(SWITCH_SEC)
    if begin := getattr(worker.wsgi, "extensions", {}).get("on_threads"):
        begin(worker.cfg.threads)
    sd_notify("READY=1", worker.log)  # for `dataloader up`: the arbiter's own comes before there is an application
