"""/metrics for Prometheus: the farm's figures from the database, and the requests of this process.

Every process answers the same figures of the farm. A process reads them at most every CACHED_SEC and for at most a
twentieth of the time, in one session for at most READ_SEC. If a reading fails, the answer repeats the last figures with
dl_scrape_error 1. The number of series is bounded, whatever the names of queues and tasks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from operator import add, itemgetter
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

import structlog
from flask import Blueprint, Response, current_app, request
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dataloader import log, periods
from dataloader.api.server import audit, health
from dataloader.api.web import auth
from dataloader.api.web.sessions import Sessions
from dataloader.queue.reports import stats

CACHED_SEC = periods.seconds("METRICS_CACHED_SEC", 5.0)
PAUSE_FACTOR = 20  # the pause after a reading, as a multiple of its duration
READ_SEC = 2.0  # the limit of one reading
MAX_NAMES = 200  # of queues, and of pairs of queue and task, that have series of their own
MAX_WORKERS = 1_000
MAX_LABEL = 200  # characters
OTHER = "(other)"  # the name of the sum of the rest
# The steps of a job that the journal sums up (see stats.totals). ENDS are the steps that end a run.
ENDS = ("done", "failed", "canceled", "lost", "retry", "crash", "lease")
STEPS = (*ENDS, "queued", "picked", "backoff", "handed_back", "requeue", "cancel_requested")
# Steps for alerts: series from a queue's first step on, because increase() does not count a series' first sample.
WATCHED = ("failed", "lost", "retry", "crash", "lease", "backoff")
STATUSES = {"queued": "length", "running": "busy", "dead": "dead"}
blueprint = Blueprint("metrics", __name__)
Row = dict[str, Any]
Labels = tuple[str, ...]
Values = Iterable[tuple[Labels, float]]
Join = Callable[[float, float], float]
_log = structlog.get_logger("api")


@blueprint.get("/metrics")
@auth.require("read")
def metrics() -> Response:
    """Figures in Prometheus' text format, or in OpenMetrics where that is asked for."""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    registry: CollectorRegistry = current_app.extensions["metrics"].registry
    return Response(encode(registry), content_type=content_type)


class Reading(NamedTuple):
    """The figures of one reading, and its time."""

    at: float
    overview: Row
    workers: list[Row]
    totals: list[Row]
    limits: list[Row]
    postgres: Row


class Metrics(Collector):
    """A registry with one collector, which collects at each scrape."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._read_lock = Lock()
        self._next_at = 0.0
        self._has_failed = True
        self._latest: Reading | None = None
        self._names = Names()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All metrics: of this process, of the farm, and of the requests."""
        yield _family(GaugeMetricFamily, "dl_build_info", "What runs here", ("version",), [((health.VERSION,), 1.0)])
        yield from self._farm_metrics()
        pid, text = str(os.getpid()), "Requests that a process has answered"
        answers = [((pid, *of, str(status)), float(count)) for (*of, status), count in audit.responses().items()]
        yield _family(CounterMetricFamily, "dl_http_requests", text, ("pid", "method", "route", "status"), answers)
        for family in audit.DURATIONS.collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family

    def _farm_metrics(self) -> Iterator[Metric]:
        reading = self._renewed()
        text = "1: the database's figures are old or missing"
        yield GaugeMetricFamily("dl_scrape_error", text, float(self._has_failed))
        if reading:
            yield GaugeMetricFamily("dl_scrape_age_seconds", "Age of the database's figures", monotonic() - reading.at)
            yield from _queue_metrics(reading.overview["queues"], self._names)
            yield from _step_metrics(reading.totals, self._names)
            yield from _worker_metrics(reading.workers, self._names)
            yield from _limit_metrics(reading.limits[:MAX_NAMES])
            yield from _postgres_metrics(reading.postgres)
            slowed = stats.slows_claims(reading.postgres, reading.overview["total"]["lag_sec"]) is not None
            text = "1 while a session holds back vacuum and claims are slow because of it"
            yield GaugeMetricFamily("dl_postgres_vacuum_slows_claims", text, float(slowed))

    def _renewed(self) -> Reading | None:
        """The last reading; one thread at a time renews an old one."""
        began = monotonic()
        if began >= self._next_at and self._read_lock.acquire(blocking=False):
            try:
                self._latest, self._has_failed = self._read(began), False
            except Exception as e:
                self._has_failed = True
                _log.warning("api.scrape_failed", error=type(e).__name__)
            finally:
                self._next_at = max(began + CACHED_SEC, monotonic() + PAUSE_FACTOR * (monotonic() - began))
                self._read_lock.release()
        return self._latest

    def _read(self, at: float) -> Reading:
        with self._sessions.borrow() as conn, conn.transaction():
            conn.answer_by = monotonic() + READ_SEC
            conn.execute("SELECT set_config('statement_timeout', %s, true)", (f"{READ_SEC * 1_000:.0f}",))
            totals, limits = stats.totals(conn), stats.limits(conn)
            return Reading(at, stats.overview(conn), stats.workers(conn), totals, limits, stats.server(conn))


class Names:
    """The first MAX_NAMES names of a kind have series of their own; the series OTHER is the sum of the rest."""

    def __init__(self) -> None:
        self._known: dict[int, set[Labels]] = {}

    def labels(self, *names: str) -> Labels:
        labels = tuple(log.masked(name)[:MAX_LABEL] for name in names)
        known = self._known.setdefault(len(labels), set())
        if labels not in known and len(known) >= MAX_NAMES:
            return (OTHER,) * len(labels)
        known.add(labels)
        return labels


# The figures of a queue: the metric, its text, the value in the row (None: no series), and how values are joined.
QUEUE_METRICS: tuple[tuple[str, str, Callable[[Row], float | None], Join], ...] = (
    ("dl_jobs_scheduled", "Queued jobs that are not due yet", itemgetter("scheduled"), add),
    ("dl_jobs_fresh", "Queued jobs that were never run", itemgetter("fresh"), add),
    ("dl_jobs_retries", "Queued jobs that were run before", itemgetter("retries"), add),
    ("dl_queue_keys", "Keys of an ordered queue that have queued jobs", itemgetter("keys"), add),
    ("dl_queue_lag_seconds", "How long the oldest due job has waited", itemgetter("lag_sec"), max),
    ("dl_queue_paused", "1 while the queue is paused", lambda row: row["paused_at"] is not None, max),
    ("dl_queue_max_length", "The queue refuses new jobs at so many queued jobs", itemgetter("max_length"), add),
)


def _queue_metrics(queues: list[Row], names: Names) -> Iterator[Metric]:
    rows = [(names.labels(row["queue"]), row) for row in queues]
    by_status = [((*name, status), float(row[key])) for name, row in rows for status, key in STATUSES.items()]
    yield _family(GaugeMetricFamily, "dl_jobs", "Jobs; dead: failed and lost", ("queue", "status"), by_status)
    for metric, text, value_of, join in QUEUE_METRICS:
        values = [(name, float(value)) for name, row in rows if (value := value_of(row)) is not None]
        yield _family(GaugeMetricFamily, metric, text, ("queue",), values, join)


def _step_metrics(totals: list[Row], names: Names) -> Iterator[Metric]:
    rows = [(names.labels(row["queue"], row["task"]), row) for row in totals]
    steps = [((*name, step), 0.0) for name, _ in rows for step in WATCHED]
    steps += [((*name, row["kind"] if row["kind"] in STEPS else OTHER), float(row["count"])) for name, row in rows]
    text = "Steps of jobs: picked (claims), done, failed, lost, retry, backoff, lease (lost leases) and more"
    yield _family(CounterMetricFamily, "dl_job_steps", text, ("queue", "task", "step"), steps)
    runs = HistogramMetricFamily("dl_run_duration_seconds", "Duration of runs", labels=("queue", "task"))
    ended = [(name, row) for name, row in rows if row["kind"] in ENDS]
    for name in dict.fromkeys(name for name, _ in ended):
        task_rows = [row for other, row in ended if other == name]
        buckets = [sum(column) for column in zip(*(row["buckets"] for row in task_rows), strict=True)]
        bounds = [*map(floatToGoString, stats.BUCKETS_SEC), "+Inf"]
        cumulative = list(zip(bounds, map(float, accumulate(buckets)), strict=True))
        runs.add_metric(name, cumulative, sum(row["seconds"] for row in task_rows))
    yield runs


def _worker_metrics(workers: list[Row], names: Names) -> Iterator[Metric]:
    states = [((*names.labels(queue), row["state"]), 1.0) for row in workers for queue in row["queues"]]
    yield _family(GaugeMetricFamily, "dl_workers", "Workers seen in the last ten minutes", ("queue", "state"), states)
    live = [
        ((*names.labels(row["queue"]), str(row["host"])[:MAX_LABEL], str(row["pid"])), row)
        for row in [each for each in workers if each["is_live"]][:MAX_WORKERS]
    ]
    texts = {"memory_bytes": "Memory of a worker and what it has started"}
    texts |= {"cpu_percent": "CPU of a worker; 100 is one core"}
    for name, text in texts.items():
        values = [(labels, float(row[name])) for labels, row in live if row[name] is not None]
        yield _family(GaugeMetricFamily, f"dl_worker_{name}", text, ("queue", "host", "pid"), values)


def _limit_metrics(limits: list[Row]) -> Iterator[Metric]:
    """The first MAX_NAMES limits; the sum of different limits has no meaning."""
    texts = {
        "running": "Jobs of the limit that run",
        "most": "Jobs of the limit that may run at once",
        "waiting": "Due jobs that the limit holds back, counted up to 1,000",
        "per_minute": "Jobs of the limit that may start in a minute",
    }
    for name, text in texts.items():
        values = [((log.masked(each["name"])[:MAX_LABEL],), each[name]) for each in limits if each[name] is not None]
        yield _family(GaugeMetricFamily, f"dl_limit_{name}", text, ("limit",), values)


def _postgres_metrics(row: Row) -> Iterator[Metric]:
    oldest, vacuumed = row["oldest_transaction"], row["last_autovacuum"]
    for name, text, value in (
        ("size_bytes", "Size of the queue's database", row["size_bytes"]),
        ("queue_tables_bytes", "Size of the queue's tables with their indexes", row["queue_tables_bytes"]),
        ("connections", "Connections to the server", row["connections"]),
        ("max_connections", "Connections that the server allows", row["max_connections"]),
        ("dead_tuples", "Dead rows of the queue's tables", row["dead_tuples"]),
        ("live_tuples", "Live rows of the queue's tables", row["live_tuples"]),
        ("jobs_dead_tuples", "Dead rows of dl_jobs, which claims have to pass", row["jobs_dead_tuples"]),
        ("notify_usage_ratio", "How full the server's notification queue is", row["notify_usage"]),
        ("in_recovery", "1 on a standby", row["in_recovery"]),
        ("oldest_transaction_seconds", "Age of the oldest transaction", oldest["age_sec"] if oldest else 0),
        ("vacuum_held_back", "1 while that transaction holds back vacuum", oldest and oldest["holds_back_vacuum"]),
        ("last_autovacuum_timestamp_seconds", "When a table of the queue was last vacuumed, 0: never",
         vacuumed.timestamp() if vacuumed else 0),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"dl_postgres_{name}", text, float(value or 0))


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: Labels,
    values: Values,
    join: Join = add,
) -> Metric:
    """A family of these values; `join` makes one value of those with the same labels."""
    joined: dict[Labels, float] = {}
    for key, value in values:
        joined[key] = join(joined[key], value) if key in joined else value
    family = kind(name, text, labels=labels)
    for key, value in joined.items():
        family.add_metric(key, value)
    return family
