"""The methods of the clients, made from dataloader/ops by `python -m tools.client`: change them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack
from uuid import UUID

from dataloader.client.wire import arguments, awaited, iterated
from dataloader.model.farm import Database, Names, Tested, Webhook, Webhooks, Worker, Workers
from dataloader.model.jobs import (
    BulkChanged,
    BulkOutcome,
    BulkOutcomes,
    Deleted,
    Event,
    Family,
    FarmEvent,
    FarmEvents,
    Job,
    JobEvents,
    JobLogs,
    JobPrediction,
    Jobs,
    ListedJob,
    LogLine,
    Preview,
    QueuePrediction,
    Result,
    Status,
    Suggestions,
    Tally,
    Triggered,
)
from dataloader.model.kinds import Gone, OrderName, Removed
from dataloader.model.plans import (
    Backfill,
    BackfillPreview,
    BackfillRetried,
    Backfills,
    Partition,
    Partitions,
    Schedule,
    Schedules,
)
from dataloader.model.queues import Changed, Key, Keys, Limit, Limits, Moved, Overview, Queue, Queues, QueueState
from dataloader.model.runs import ArgsSchema, Bucket, ErrorGroups, ErrorNote, Pace, QueueRuns, Task, TaskRuns, Tasks
from dataloader.queue.typed_args import Model


class Queued(TypedDict, total=False):
    """Which jobs of a queue a change is for. Filters that are given must all hold."""

    task: str | None
    lock_key: str | None
    partition_key: str | None


class Tried(Queued, total=False):
    """The same for jobs that have run: dead ones, and retries."""

    error: str | None
    error_group: str | None


class Order(TypedDict, total=False):
    """The order of a queue's jobs (docs/ordered.md)."""

    ordered: bool
    merge: bool
    merge_limit: int
    batch: int | None
    on_dead: Literal["continue", "hold"]
    fair_by: Literal["partition_key", "producer"] | None


class JobWords(TypedDict, total=False):
    """The fields of the jobs; null is the default of a job."""

    queue: str | None
    args: Mapping[str, Any] | Model | None
    lock_key: str | None
    partition_key: str | None
    affinity_key: str | None
    max_attempts: int | None
    lease_ttl_sec: int | None
    timeout_sec: int | None


class Filters(Queued, total=False):
    """Which jobs a list has. Filters that are given must all hold."""

    queue: str | None
    producer: str | None
    consumer_group: str | None
    q: str | None
    status: (
        Literal[
            "queued",
            "running",
            "succeeded",
            "failed",
            "canceled",
            "lost",
            "ready",
            "scheduled",
            "blocked",
            "fresh",
            "retries",
            "dead",
        ]
        | None
    )
    error_group: str | None
    since: datetime | str | None
    until: datetime | str | None


class ScheduleWords(JobWords, total=False):
    """When a schedule is due, and the fields of its jobs; null is the default (docs/schedules.md)."""

    cron: str | None
    interval_sec: int | None
    timezone: str | None
    catch_up: Literal["none", "last", "all"] | None
    overlap: Literal["skip", "queue", "cancel_old"] | None
    jitter_sec: float | None
    priority: int | None
    deadline: str | None
    deadline_sec: int | None


class BackfillWords(JobWords, total=False):
    """A range (since, until, step) or a list of partitions, and the fields of the job of each (docs/backfills.md)."""

    since: str | None
    until: str | None
    step: str | None
    partitions: Sequence[str] | None
    max_running: int | None
    skip_done: bool | None
    code_version: str | None
    priority: int | str | None
    limits: Sequence[str] | None


class ScheduleChange(ScheduleWords, total=False):
    """The changes of a schedule: a field that is left out stays, null is its default."""

    task: str


class TriggerFields(TypedDict, total=False):
    """The fields of a new job (docs/api.md)."""

    queue: str | None
    lock_key: str | None
    args: Mapping[str, Any] | Model | None
    idempotency_key: str | None
    partition_key: str | None
    priority: int | None
    available_at: datetime | str | None
    max_attempts: int | None
    lease_ttl_sec: int | None
    timeout_sec: int | None
    score: float | None
    producer: str | None
    consumer_group: str | None
    affinity_key: str | None
    limits: Sequence[str] | None
    deadline: datetime | str | None
    depends_on: Sequence[UUID | str | int] | None
    on_parent_failure: Literal["cancel", "hold", "run"] | None


class Operations:
    """The operations of a farm, a method each. Every method may raise ClientError."""

    _call: Any  # carries out the operation of a route; returns its answer, or one field of that
    _pages: Any  # the rows of all pages of a list
    _total: Any  # repeats an operation until the end; the sum of a field of its answers

    def again(
        self,
        job_id: UUID | str,
        *,
        args: Mapping[str, Any] | Model | None = None,
        without: Sequence[str] | None = None,
        queue: str | None = None,
        lock_key: str | None = None,
        priority: int | None = None,
        idempotency_key: str | None = None,
    ) -> Triggered:
        """Add a job with the fields of one that has ended, with changes. The journals of the two jobs name each other.

        A masked arg keeps its value. The new job takes over no time, deadline, score, parents or idempotency key.
        """
        return self._call("POST /jobs/{job_id}/again", Triggered, arguments(locals()))

    def jobs(
        self, *, sort: Literal["changed", "key"] | None = None, limit: int | None = None, **words: Unpack[Filters]
    ) -> Iterator[ListedJob]:
        """List the jobs that pass all filters, the newest change first (or by key)."""
        return self._pages("GET /jobs", Jobs, arguments(locals()), "jobs", limit, 200)

    def tally(self, **words: Unpack[Filters]) -> Tally:
        """Count the jobs of a list: each job counts as one kind."""
        return self._call("GET /tally", Tally, arguments(locals()))

    def suggest(self, q: str) -> list[str]:
        """How the text of a search box may go on: up to 8 each of fields, statuses, tasks, queues and keys."""
        return self._call("GET /suggestions", Suggestions, arguments(locals()), "suggestions")

    def job(self, job_id: UUID | str) -> Job:
        """One job with all that is known of it; secrets in its args are masked."""
        return self._call("GET /jobs/{job_id}", Job, arguments(locals()))

    def status(self, job_id: UUID | str) -> Status:
        """One job as it is now, without its args and keys."""
        return self._call("GET /jobs/{job_id}/status", Status, arguments(locals()))

    def result(self, job_id: UUID | str) -> Any:
        """The value that a job's pipeline has returned; null before the job has succeeded, or where that is None."""
        return self._call("GET /jobs/{job_id}/result", Result, arguments(locals()), "result")

    def family(self, job_id: UUID | str) -> Family:
        """The first 50 jobs that this one waits for, or has waited for, and the first 50 that wait for this one."""
        return self._call("GET /jobs/{job_id}/family", Family, arguments(locals()))

    def predict(self, job_id: UUID | str) -> JobPrediction:
        """When a job will end, the range of that, and how right such predictions were in its queue."""
        return self._call("GET /jobs/{job_id}/prediction", JobPrediction, arguments(locals()))

    def job_events(self, job_id: UUID | str, *, after: int | None = None, limit: int | None = None) -> Iterator[Event]:
        """The journal of one job, the oldest event first."""
        return self._pages("GET /jobs/{job_id}/events", JobEvents, arguments(locals()), "events", limit, 200)

    def logs(
        self, job_id: UUID | str, *, after: str | None = None, attempt: int | None = None, limit: int | None = None
    ) -> Iterator[LogLine]:
        """Show the lines that the runs of one job have written, the oldest first."""
        return self._pages("GET /jobs/{job_id}/logs", JobLogs, arguments(locals()), "lines", limit, 1000)

    def cancel(self, job_id: UUID | str, *, force: bool | None = None) -> Status:
        """Cancel a queued job, ask a running one to stop, leave a finished one; the answer is its status.

        A running job stops at its next safe point, with `force` wherever it is.
        """
        return self._call("POST /jobs/{job_id}/cancel", Status, arguments(locals()))

    def requeue(self, job_id: UUID | str) -> Status:
        """Queue an ended job again, with a fresh budget of attempts; any other job is a conflict."""
        return self._call("POST /jobs/{job_id}/requeue", Status, arguments(locals()), once=True)

    def run_now(self, job_id: UUID | str) -> Status:
        """Make a queued job due now, before its time; a job that is not queued is a conflict."""
        return self._call("POST /jobs/{job_id}/run-now", Status, arguments(locals()), once=True)

    def delete(self, job_id: UUID | str) -> Deleted:
        """Delete a job that is not running, and its journal; one that runs is a conflict."""
        return self._call("DELETE /jobs/{job_id}", Deleted, arguments(locals()), once=True)

    def cancel_jobs(self, job_ids: Sequence[UUID | str], *, force: bool | None = None) -> list[BulkOutcome]:
        """Cancel up to 1,000 jobs."""
        return self._call("POST /jobs/bulk/cancel", BulkOutcomes, arguments(locals()), "jobs", once=True)

    def change_jobs(
        self, verb: Literal["requeue", "start-over", "run-now", "delete"], job_ids: Sequence[UUID | str]
    ) -> list[BulkOutcome]:
        """Change up to 1,000 jobs, each as the order to a single job does.

        `start-over` requeues jobs, which begin at the start and not at their checkpoints.
        """
        return self._call("POST /jobs/bulk/{verb}", BulkOutcomes, arguments(locals()), "jobs", once=True)

    def preview(
        self, order: OrderName, *, matching: Filters | None = None, job_ids: Sequence[UUID | str] | None = None
    ) -> Preview:
        """Count what an order would change, and what it would leave alone and why; changes nothing.

        The order is for the jobs of a list (`matching`), or for up to 1,000 named ones.
        """
        return self._call("POST /jobs/bulk/preview", Preview, arguments(locals()))

    def order_jobs(
        self,
        order: OrderName,
        confirmation: str,
        *,
        matching: Filters | None = None,
        job_ids: Sequence[UUID | str] | None = None,
    ) -> int:
        """Change up to 1,000 of the jobs that a preview has counted; a job that has changed since stays as it is.

        A list that has more jobs for the order than its preview had is a conflict.
        """
        return self._total("POST /jobs/bulk", BulkChanged, arguments(locals()), "changed")

    def queues(self) -> list[Queue]:
        """Every queue that has jobs, a pause, a limit or a worker."""
        return self._call("GET /queues", Queues, {}, "queues")

    def overview(self) -> Overview:
        """Length, dead, lag and more, for each queue and in total, and what does not work."""
        return self._call("GET /stats", Overview, {})

    def keys(self, queue: str, *, limit: int | None = None) -> Iterator[Key]:
        """List the keys of an ordered queue that have queued jobs: how many, and what the first job of each waits for.

        A queue that is not ordered is a conflict.
        """
        return self._pages("GET /queues/{queue}/keys", Keys, arguments(locals()), "keys", limit, 200)

    def predict_queue(self, queue: str) -> QueuePrediction:
        """When all jobs that run or are due now will have ended, the range, and how right such predictions were."""
        return self._call("GET /queues/{queue}/prediction", QueuePrediction, arguments(locals()))

    def queue_runs(self, queue: str, *, range: Literal["1h", "24h", "7d"] | None = None) -> QueueRuns:
        """How long the runs of a queue were: counts, failures, percentiles, a histogram, and the period before."""
        return self._call("GET /queues/{queue}/runs", QueueRuns, arguments(locals()))

    def pause(self, queue: str) -> QueueState:
        """Start no job of a queue any more, on any host; what runs goes on."""
        return self._call("POST /queues/{queue}/pause", QueueState, arguments(locals()))

    def resume(self, queue: str) -> QueueState:
        """Start jobs of a paused queue again."""
        return self._call("POST /queues/{queue}/resume", QueueState, arguments(locals()))

    def limit(self, queue: str, max_length: int | None) -> QueueState:
        """Refuse to trigger jobs (429) while `max_length` of a queue wait; `none` removes the limit."""
        return self._call("PUT /queues/{queue}/limit", QueueState, arguments(locals(), "max_length"))

    def set_queue(self, queue: str, **words: Unpack[Order]) -> QueueState:
        """Change the order of a queue's jobs, while jobs run; what is not named stays."""
        return self._call("PUT /queues/{queue}", QueueState, arguments(locals()))

    def requeue_dead(self, queue: str, **words: Unpack[Tried]) -> int:
        """Queue the failed and lost jobs of a queue again, each with a fresh budget of attempts."""
        return self._total("POST /queues/{queue}/requeue-dead", Changed, arguments(locals()), "changed")

    def delete_dead(self, queue: str, **words: Unpack[Tried]) -> int:
        """Delete the failed and lost jobs of a queue, with their journal."""
        return self._total("POST /queues/{queue}/delete-dead", Changed, arguments(locals()), "changed")

    def run_all(self, queue: str, **words: Unpack[Queued]) -> int:
        """Make jobs of a queue that wait for their time due now."""
        return self._total("POST /queues/{queue}/run-all", Changed, arguments(locals()), "changed")

    def kill_retries(self, queue: str, **words: Unpack[Tried]) -> int:
        """Mark the jobs of a queue that wait for a retry as failed."""
        return self._total("POST /queues/{queue}/kill-retries", Changed, arguments(locals()), "changed")

    def move(self, queue: str, to: str) -> int:
        """Move the queued, running and dead jobs of a queue to another, in their order; running jobs go on.

        Both queues are paused until the last job has moved; the first one stays paused.
        """
        return self._total("POST /queues/{queue}/move", Moved, arguments(locals()), "moved")

    def limits(self) -> list[Limit]:
        """List the limits: what each allows, how many of its jobs run, and how many wait for it."""
        return self._call("GET /limits", Limits, {}, "limits")

    def get_limit(self, limit: str) -> Limit:
        """One limit."""
        return self._call("GET /limits/{limit}", Limit, arguments(locals()))

    def set_limit(
        self, limit: str, *, most: int | None = None, per_minute: float | None = None, burst: int | None = None
    ) -> Limit:
        """Make a limit, or replace what it allows, on all hosts at once; jobs that run go on."""
        return self._call("PUT /limits/{limit}", Limit, arguments(locals()))

    def remove_limit(self, limit: str) -> Gone:
        """Remove a limit; its jobs keep its name, and any number of them may run."""
        return self._call("DELETE /limits/{limit}", Gone, arguments(locals()))

    def workers(self) -> list[Worker]:
        """The workers of all hosts that were seen in the last ten minutes, and what they run."""
        return self._call("GET /workers", Workers, {}, "workers")

    def tasks(self, *, range: Literal["1h", "24h", "7d"] | None = None) -> list[Task]:
        """The memory and the processors that the runs of each task need; with `range` also what its runs have used.

        A task is listed that workers have pipelines for, or that has run.
        """
        return self._call("GET /tasks", Tasks, arguments(locals()), "tasks")

    def task_runs(self, task: str, *, range: Literal["1h", "24h", "7d"] | None = None) -> TaskRuns:
        """How long the runs of a task were: counts, failures, percentiles, a histogram, and the period before."""
        return self._call("GET /tasks/{task}", TaskRuns, arguments(locals()))

    def args_schema(self, task: str) -> ArgsSchema:
        """The JSON Schema of a task's args, as the worker that started last has shown it; null: any object will do."""
        return self._call("GET /tasks/{task}/schema", ArgsSchema, arguments(locals()))

    def names(self, *, queue: str | None = None, task: str | None = None) -> Names:
        """Whether the farm knows a queue and a task, before a mistyped name makes a new one; with similar names."""
        return self._call("GET /names", Names, arguments(locals()))

    def pace(self, *, minutes: int | None = None) -> list[Bucket]:
        """How many jobs ended in each ten seconds of the last minutes."""
        return self._call("GET /pace", Pace, arguments(locals()), "pace")

    def events(
        self, *, after: int | None = None, queue: str | None = None, limit: int | None = None
    ) -> list[FarmEvent]:
        """The journal of all jobs, the oldest first; without `after` the newest rows."""
        return self._call("GET /events", FarmEvents, arguments(locals()), "events")

    def database(self) -> Database:
        """The queue's database: size, sessions, dead rows, the oldest transaction, and what holds back its vacuum."""
        return self._call("GET /database", Database, {})

    def errors(
        self, *, queue: str | None = None, task: str | None = None, since: datetime | str | None = None
    ) -> ErrorGroups:
        """The groups of dead and retrying jobs, the largest first: up to 50 by queue, task and error group."""
        return self._call("GET /errors", ErrorGroups, arguments(locals()))

    def write_error_note(self, task: str, error_group: str, note: str) -> ErrorNote:
        """Write a note about a group of a task, in the place of an earlier one; an empty note removes that."""
        return self._call("PUT /errors/note", ErrorNote, arguments(locals()))

    def webhooks(self) -> Webhooks:
        """The receivers of alerts, and whether a worker serves the queue of their messages."""
        return self._call("GET /webhooks", Webhooks, {})

    def put_webhook(
        self,
        webhook: str,
        url: str,
        *,
        shape: Literal["json", "alertmanager", "slack"] | None = None,
        signed_by: str | None = None,
        kinds: Sequence[Literal["dead", "stuck", "deadline", "lag", "paused"]] | None = None,
        queues: Sequence[str] | None = None,
        lag_sec: float | None = None,
    ) -> Webhook:
        """Add a receiver of alerts, or change the one of this name; what the request leaves out has its default."""
        return self._call("PUT /webhooks/{webhook}", Webhook, arguments(locals()))

    def remove_webhook(self, webhook: str) -> Gone:
        """Remove a receiver of alerts; messages that wait for it are not sent any more."""
        return self._call("DELETE /webhooks/{webhook}", Gone, arguments(locals()))

    def pause_webhook(self, webhook: str) -> Webhook:
        """Send a receiver no more messages; those of the pause are never sent."""
        return self._call("POST /webhooks/{webhook}/pause", Webhook, arguments(locals()))

    def resume_webhook(self, webhook: str) -> Webhook:
        """Send messages to a paused receiver again, also if its answer 410 has paused it."""
        return self._call("POST /webhooks/{webhook}/resume", Webhook, arguments(locals()))

    def test_webhook(self, webhook: str) -> Tested:
        """Send a receiver a test message, also while it is paused; the answer has the job that sends it."""
        return self._call("POST /webhooks/{webhook}/test", Tested, arguments(locals()), once=True)

    def schedules(self, *, next: int | None = None) -> list[Schedule]:
        """List the schedules: when they are due, their last jobs, what is wrong with them."""
        return self._call("GET /schedules", Schedules, arguments(locals()), "schedules")

    def schedule(self, name: str, *, next: int | None = None) -> Schedule:
        """Show a schedule with its next due times."""
        return self._call("GET /schedules/{name}", Schedule, arguments(locals()))

    def add_schedule(self, name: str, task: str, **words: Unpack[ScheduleWords]) -> Schedule:
        """Add a schedule of a task; its first due time is the next one from now on."""
        return self._call("POST /schedules", Schedule, arguments(locals()), once=True)

    def change_schedule(self, name: str, **words: Unpack[ScheduleChange]) -> Schedule:
        """Change a schedule; what is not named stays, null is the default. From then on code changes it no more.

        A new timing counts from now on.
        """
        return self._call("PUT /schedules/{name}", Schedule, arguments(locals()))

    def remove_schedule(self, name: str) -> Removed:
        """Remove a schedule; its jobs stay. One that a pipeline names comes back when a worker starts."""
        return self._call("DELETE /schedules/{name}", Removed, arguments(locals()), once=True)

    def pause_schedule(self, name: str) -> Schedule:
        """Make no jobs of a schedule until it is resumed; those that are made stay."""
        return self._call("POST /schedules/{name}/pause", Schedule, arguments(locals()))

    def resume_schedule(self, name: str) -> Schedule:
        """End a schedule's pause; the due times of the pause get no job."""
        return self._call("POST /schedules/{name}/resume", Schedule, arguments(locals()))

    def run_schedule(self, name: str) -> Triggered:
        """Add a job of a schedule now, paused or not; now is its due time."""
        return self._call("POST /schedules/{name}/run", Triggered, arguments(locals()), once=True)

    def backfills(self) -> list[Backfill]:
        """List the newest backfills, up to 100: how far they are, what is wrong with them."""
        return self._call("GET /backfills", Backfills, {}, "backfills")

    def backfill(self, backfill: str) -> Backfill:
        """Show a backfill: its progress, when it will be done, its partitions by status."""
        return self._call("GET /backfills/{backfill}", Backfill, arguments(locals()))

    def partitions(
        self,
        backfill: str,
        *,
        status: Literal["missing", "queued", "running", "succeeded", "failed", "lost", "canceled", "skipped"]
        | None = None,
        after: int | None = None,
        limit: int | None = None,
    ) -> Iterator[Partition]:
        """List the partitions of a backfill in their order, each with its job; `missing` ones have none."""
        return self._pages(
            "GET /backfills/{backfill}/partitions", Partitions, arguments(locals()), "partitions", limit, 1000
        )

    def add_backfill(self, name: str, task: str, **words: Unpack[BackfillWords]) -> Backfill:
        """Add a backfill of a task. Its jobs are made after the answer, some hundred at once."""
        return self._call("POST /backfills", Backfill, arguments(locals()), once=True)

    def try_backfill(self, name: str, task: str, **words: Unpack[BackfillWords]) -> BackfillPreview:
        """Show how a backfill would go: how many partitions, how many are done already, some of the jobs."""
        return self._call("POST /backfills/dry-run", BackfillPreview, arguments(locals()))

    def set_backfill(self, backfill: str, max_running: int | None) -> Backfill:
        """Let so many jobs of a backfill run at once, from now on; those that run go on."""
        return self._call("PUT /backfills/{backfill}", Backfill, arguments(locals(), "max_running"))

    def remove_backfill(self, backfill: str) -> Removed:
        """Remove a backfill whose jobs have all ended, with its ledger; its jobs stay."""
        return self._call("DELETE /backfills/{backfill}", Removed, arguments(locals()), once=True)

    def pause_backfill(self, backfill: str) -> Backfill:
        """Make and start no jobs of a backfill until it is resumed; those that run go on."""
        return self._call("POST /backfills/{backfill}/pause", Backfill, arguments(locals()))

    def resume_backfill(self, backfill: str) -> Backfill:
        """End a backfill's pause."""
        return self._call("POST /backfills/{backfill}/resume", Backfill, arguments(locals()))

    def cancel_backfill(self, backfill: str) -> Backfill:
        """Start no more jobs of a backfill; the reaper then cancels those that have not ended."""
        return self._call("POST /backfills/{backfill}/cancel", Backfill, arguments(locals()))

    def retry_backfill(self, backfill: str) -> int:
        """Queue the failed and lost jobs of a backfill again, each with a fresh budget of attempts."""
        return self._total("POST /backfills/{backfill}/retry", BackfillRetried, arguments(locals()), "changed")


class AsyncOperations:
    """The same operations, awaited."""

    again = awaited(Operations.again)
    jobs = iterated(Operations.jobs)
    tally = awaited(Operations.tally)
    suggest = awaited(Operations.suggest)
    job = awaited(Operations.job)
    status = awaited(Operations.status)
    result = awaited(Operations.result)
    family = awaited(Operations.family)
    predict = awaited(Operations.predict)
    job_events = iterated(Operations.job_events)
    logs = iterated(Operations.logs)
    cancel = awaited(Operations.cancel)
    requeue = awaited(Operations.requeue)
    run_now = awaited(Operations.run_now)
    delete = awaited(Operations.delete)
    cancel_jobs = awaited(Operations.cancel_jobs)
    change_jobs = awaited(Operations.change_jobs)
    preview = awaited(Operations.preview)
    order_jobs = awaited(Operations.order_jobs)
    queues = awaited(Operations.queues)
    overview = awaited(Operations.overview)
    keys = iterated(Operations.keys)
    predict_queue = awaited(Operations.predict_queue)
    queue_runs = awaited(Operations.queue_runs)
    pause = awaited(Operations.pause)
    resume = awaited(Operations.resume)
    limit = awaited(Operations.limit)
    set_queue = awaited(Operations.set_queue)
    requeue_dead = awaited(Operations.requeue_dead)
    delete_dead = awaited(Operations.delete_dead)
    run_all = awaited(Operations.run_all)
    kill_retries = awaited(Operations.kill_retries)
    move = awaited(Operations.move)
    limits = awaited(Operations.limits)
    get_limit = awaited(Operations.get_limit)
    set_limit = awaited(Operations.set_limit)
    remove_limit = awaited(Operations.remove_limit)
    workers = awaited(Operations.workers)
    tasks = awaited(Operations.tasks)
    task_runs = awaited(Operations.task_runs)
    args_schema = awaited(Operations.args_schema)
    names = awaited(Operations.names)
    pace = awaited(Operations.pace)
    events = awaited(Operations.events)
    database = awaited(Operations.database)
    errors = awaited(Operations.errors)
    write_error_note = awaited(Operations.write_error_note)
    webhooks = awaited(Operations.webhooks)
    put_webhook = awaited(Operations.put_webhook)
    remove_webhook = awaited(Operations.remove_webhook)
    pause_webhook = awaited(Operations.pause_webhook)
    resume_webhook = awaited(Operations.resume_webhook)
    test_webhook = awaited(Operations.test_webhook)
    schedules = awaited(Operations.schedules)
    schedule = awaited(Operations.schedule)
    add_schedule = awaited(Operations.add_schedule)
    change_schedule = awaited(Operations.change_schedule)
    remove_schedule = awaited(Operations.remove_schedule)
    pause_schedule = awaited(Operations.pause_schedule)
    resume_schedule = awaited(Operations.resume_schedule)
    run_schedule = awaited(Operations.run_schedule)
    backfills = awaited(Operations.backfills)
    backfill = awaited(Operations.backfill)
    partitions = iterated(Operations.partitions)
    add_backfill = awaited(Operations.add_backfill)
    try_backfill = awaited(Operations.try_backfill)
    set_backfill = awaited(Operations.set_backfill)
    remove_backfill = awaited(Operations.remove_backfill)
    pause_backfill = awaited(Operations.pause_backfill)
    resume_backfill = awaited(Operations.resume_backfill)
    cancel_backfill = awaited(Operations.cancel_backfill)
    retry_backfill = awaited(Operations.retry_backfill)
