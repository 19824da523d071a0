"""dataloader: a job farm for long, CPU-heavy ETL work on PostgreSQL.

The path of a job: `ops/adding.py` validates → `queue/enqueue.py` inserts row and journal, a trigger notifies →
`farm/worker.py` claims, `farm/runner.py` runs a function of `pipelines/` with `farm/heartbeat.py` beside it,
`queue/job.py` decides and `queue/lifecycle.py` writes the end.

    room            what it holds                                    may import (beside config exits log obs periods)
    model           the answers of a farm, and their fields          queue.job
    queue           the queue in PostgreSQL: rows, statements        model
    ops             every operation, declared once                   queue model
    pipelines       registry, context, hooks, the built-in ones      queue.job queue.hooks queue.plans.new_schedule
                                                                     queue.reports.webhooks queue.reports.messages
                                                                     queue.args_schema queue.db
    farm            PROCESSES of one machine                         queue pipelines
    api             PROCESS (gunicorn) HTTP: v1, pages, metrics      ops queue model check.database surroundings
    client          the HTTP API from Python, for other programs     model queue.typed_args
    embedded        a PostgreSQL of our own                          -
    check           findings: settings, host, pipelines, databases   queue pipelines farm.failures farm.process
                                                                     farm.slots local.ports surroundings
    local           PROCESS everything on one machine                anything below cli
    cli             the command line, one command per process        anything
    new             templates: a pipeline and its test               -
    testing         runs a pipeline as a job, in users' tests        anything below cli
    surroundings    what a process needs of its host                 -
    config          settings from the environment                    -
    log             JSON lines, masking of secrets                   -
    obs             traces and metrics by OpenTelemetry              queue.job
    exits           the exit statuses of all programs                -
    periods         the periods that tests shorten                   -

Other programs import from here: `Client` and `AsyncClient` (docs/client.md), `NewJob`, `enqueue` and `enqueue_many`
(docs/producers.md).

Only `queue` opens connections to the queue and executes SQL on its tables; only `api` imports flask; no process of
`farm` imports another.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloader.client import AsyncClient, Client
    from dataloader.queue.enqueue import NewJob
    from dataloader.queue.new_job import enqueue, enqueue_many

__all__ = ["AsyncClient", "Client", "NewJob", "enqueue", "enqueue_many"]
# The distribution's name for pip. On the public index `dataloader` is another project: no text of ours may install it.
DISTRIBUTION = "dataloader-farm"


def version() -> str:
    """The installed distribution's version; "unknown" in a checkout that was never installed."""
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version(DISTRIBUTION))
    except metadata.PackageNotFoundError:
        return "unknown"


def __getattr__(name: str) -> Any:
    # Imported on first use: every process of a farm imports this package, and few need pydantic or a driver.
    if name == "traces":
        return import_module("dataloader.obs")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("dataloader.client" if name.endswith("Client") else "dataloader.queue.new_job"), name)
    globals()[name] = value  # the next use costs what any attribute costs
    return value
