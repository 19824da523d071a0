"""Hooks that send what fails in workers to Sentry: name this module in DL_HOOKS and set SENTRY_DSN. The extra `sentry`.

An event has the exception with its stack, and task, queue, job_id and attempt as tags. It has no args and no local
variables, and `log.masked` has taken the known secrets out of it. SENTRY_ENVIRONMENT and SENTRY_RELEASE are the SDK's.

A failed run waits up to FLUSH_SEC until its event is sent, but no sooner than FLUSH_SEC after the wait before. The
events between are sent meanwhile by the SDK's thread; they are lost where the process is killed first.
"""

from __future__ import annotations

import os
from time import monotonic

import structlog

from dataloader import log
from dataloader.pipelines import Retry, Run, last_words, on_error, on_worker_start

try:
    import sentry_sdk
    from sentry_sdk.utils import BadDsn
except ImportError:
    text = "dataloader.pipelines.sentry needs the extra sentry: install 'dataloader-farm[sentry]'"
    raise ImportError(text, name="sentry_sdk") from None

FLUSH_SEC = 2.0  # for the event to reach Sentry before the run's end is written; less than DL_KILL_GRACE_SEC by default
_flushed_at: float | None = None  # the end of the last wait, by the monotonic clock
TRANSPORT: type[sentry_sdk.transport.Transport] | None = None  # None: HTTP


@on_worker_start
def start() -> None:
    """Set up Sentry in this process, after the fork: the SDK has a thread. Without SENTRY_DSN nothing is sent.

    Raises ValueError for a SENTRY_DSN that is no DSN.
    """
    if not os.environ.get("SENTRY_DSN"):
        structlog.get_logger("sentry").warning("sentry.off", error="SENTRY_DSN is not set in the environment")
    try:
        sentry_sdk.init(
            transport=TRANSPORT,
            default_integrations=False,  # they send log lines, arguments of the process, and what crashes unmasked
            auto_enabling_integrations=False,
            include_local_variables=False,
            max_breadcrumbs=0,
            before_send=lambda event, hint: log.masked(event),
        )
    except BadDsn:
        raise ValueError("SENTRY_DSN should be a DSN such as https://<key>@sentry.example.com/<project>") from None


@on_error
def report(run: Run, exc: BaseException) -> None:
    """Send the exception of a run that has failed; that of `Retry` asks for another run and is no failure."""
    global _flushed_at
    if isinstance(exc, Retry):
        return
    with sentry_sdk.new_scope() as scope:
        scope.set_tag("task", run.task)
        scope.set_tag("queue", run.queue)
        scope.set_tag("job_id", str(run.job_id))
        scope.set_tag("attempt", run.attempt)
        sentry_sdk.capture_exception(exc)
    # A batch may have many failed keys, and the time of its run is limited.
    if _flushed_at is None or monotonic() - _flushed_at >= FLUSH_SEC:
        sentry_sdk.flush(FLUSH_SEC)
        _flushed_at = monotonic()


@last_words
def report_death(exc: BaseException) -> None:
    """Send the exception of which this worker process dies."""
    sentry_sdk.capture_exception(exc)
    sentry_sdk.flush(FLUSH_SEC)
