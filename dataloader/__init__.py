"""dataloader: a job farm for long, CPU-heavy ETL work on PostgreSQL.

The path of a job: `api/v1.py` with `api/schemas.py` validates → `queue.py` with `sql/queue.sql` inserts row and
journal, a trigger notifies → `worker.py` claims, `run.py` with `heartbeat.py` beside it runs a function
of `pipelines/`, `job.py` decides and `queue.py` writes the end.

    module          what it is                                       may import (besides config, log)
    cli             the command line, one command per process        anything
    up              PROCESS everything on one machine                anything below cli
    client          the HTTP API from Python, for other programs     traces
    bench           PROCESS a farm beside its database's bare limit  anything below cli
    config          settings from the environment                    -
    log             JSON lines, masking of secrets                   -
    job             PURE a job, its states, what becomes of it       -
    db              connections, named statements                    -
    migrations      the schema's versions                            db drift probe
    drift           is the schema as it was shipped                  db
    queue           every statement in the life of one job           db job
    operate         what people do to jobs and queues                db queue
    stats           questions about many jobs, for people            db queue job
    why             PURE why a queued job waits, in words            -
    batch           many jobs added at once                          db queue
    producer        PURE rules of a new job; jobs from Python        queue batch
    process         signals, exit codes, children                    -
    slots           what a farm's processes show each other          process
    pipelines       registry, context, the built-in ones             job
    target          fenced transactions in the pipelines' database   db
    heartbeat       thread: keeps a claim while the pipeline runs    db queue job process slots
    run             one job after the other: its pipeline, stepped   job pipelines heartbeat process slots target
    traces          spans of runs, where OpenTelemetry is wanted     job
    worker          PROCESS claims and runs  db queue job heartbeat pipelines process slots run migrations probe traces
    census          what a keeper shows of the workers               db process slots stats
    keeper          PROCESS leases of the silent, jobs of the dead   db queue job process slots migrations census
    reaper          PROCESS what is due or lost in the cluster       db queue process migrations stats
    supervisor      PROCESS forks and ends; no SQL                   process slots
    api             PROCESS (gunicorn) HTTP            db queue batch job migrations producer stats operate why
    embedded        a PostgreSQL of our own                          -
    probe           is a session direct, does it hear a NOTIFY       db
    check           what keeps a farm from working, reported         check_database db pipelines
    check_database  the same for the databases                       db migrations probe
    settings_doc    docs/settings.md and .env.example                -
    new             a pipeline and its test, to begin with           -
    testing         for the tests of pipelines                       anything below cli

Other programs import `Client` (docs/client.md), `NewJob`, `enqueue` and `enqueue_many` (docs/producers.md) from here.

Only `db` opens connections; only `queue`, `batch`, `operate`, `stats`, `migrations` and `drift` execute SQL on the
queue's tables; only `api` imports flask; no process imports another. `bench` alone goes around `db` and `queue`, in
schemas of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloader.client import Client
    from dataloader.producer import enqueue, enqueue_many
    from dataloader.queue import NewJob

__all__ = ["Client", "NewJob", "enqueue", "enqueue_many"]
# The name that pip knows. On the public index `dataloader` is another project, so no text of ours may install it.
DISTRIBUTION = "dataloader-farm"


def version() -> str:
    """The version of what is installed; "unknown" in a checkout that was never installed."""
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version(DISTRIBUTION))
    except metadata.PackageNotFoundError:
        return "unknown"


def __getattr__(name: str) -> Any:
    # On first use, for every process of a farm imports this package and few of them need pydantic or a driver.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("dataloader.client" if name == "Client" else "dataloader.producer"), name)
