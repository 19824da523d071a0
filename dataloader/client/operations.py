"""The methods of the clients, made from dataloader/ops by `python -m tools.client`: change them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack
from uuid import UUID

from dataloader.client.methods import call, pages, total
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


class TriggerFields(JobWords, total=False):
    """The fields of a new job (docs/api.md)."""

    idempotency_key: str | None
    priority: int | None
    available_at: datetime | str | None
    score: float | None
    producer: str | None
    consumer_group: str | None
    limits: Sequence[str] | None
    deadline: datetime | str | None
    depends_on: Sequence[UUID | str | int] | None
    on_parent_failure: Literal["cancel", "hold", "run"] | None


class Operations:
    """The operations of a farm, a method each. Every method may raise ClientError."""

    @call("POST /jobs/{job_id}/again", Triggered)
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

    @pages("GET /jobs", Jobs, "jobs", 200)
    def jobs(
        self, *, sort: Literal["changed", "key"] | None = None, limit: int | None = None, **words: Unpack[Filters]
    ) -> Iterator[ListedJob]:
        """List the jobs that pass all filters, the newest change first (or by key)."""

    @call("GET /tally", Tally)
    def tally(self, **words: Unpack[Filters]) -> Tally:
        """Count the jobs of a list: each job counts as one kind."""

    @call("GET /suggestions", Suggestions, "suggestions")
    def suggest(self, q: str) -> list[str]:
        """How the text of a search box may go on: up to 8 each of fields, statuses, tasks, queues and keys."""

    @call("GET /jobs/{job_id}", Job)
    def job(self, job_id: UUID | str) -> Job:
        """One job with all that is known of it; secrets in its args are masked."""

    @call("GET /jobs/{job_id}/status", Status)
    def status(self, job_id: UUID | str) -> Status:
        """One job as it is now, without its args and keys."""

    @call("GET /jobs/{job_id}/result", Result, "result")
    def result(self, job_id: UUID | str) -> Any:
        """The value that a job's pipeline has returned; null before the job has succeeded, or where that is None."""

    @call("GET /jobs/{job_id}/family", Family)
    def family(self, job_id: UUID | str) -> Family:
        """The first 50 jobs that this one waits for, or has waited for, and the first 50 that wait for this one."""

    @call("GET /jobs/{job_id}/prediction", JobPrediction)
    def predict(self, job_id: UUID | str) -> JobPrediction:
        """When a job will end, the range of that, and how right such predictions were in its queue."""

    @pages("GET /jobs/{job_id}/events", JobEvents, "events", 200)
    def job_events(self, job_id: UUID | str, *, after: int | None = None, limit: int | None = None) -> Iterator[Event]:
        """The journal of one job, the oldest event first."""

    @pages("GET /jobs/{job_id}/logs", JobLogs, "lines", 1000)
    def logs(
        self, job_id: UUID | str, *, after: str | None = None, attempt: int | None = None, limit: int | None = None
    ) -> Iterator[LogLine]:
        """Show the lines that the runs of one job have written, the oldest first."""

    @call("POST /jobs/{job_id}/cancel", Status)
    def cancel(self, job_id: UUID | str, *, force: bool | None = None) -> Status:
        """Cancel a queued job, ask a running one to stop, leave a finished one; the answer is its status.

        A running job stops at its next safe point, with `force` wherever it is.
        """

    @call("POST /jobs/{job_id}/requeue", Status, once=True)
    def requeue(self, job_id: UUID | str) -> Status:
        """Queue an ended job again, with a fresh budget of attempts; any other job is a conflict."""

    @call("POST /jobs/{job_id}/run-now", Status, once=True)
    def run_now(self, job_id: UUID | str) -> Status:
        """Make a queued job due now, before its time; a job that is not queued is a conflict."""

    @call("DELETE /jobs/{job_id}", Deleted, once=True)
    def delete(self, job_id: UUID | str) -> Deleted:
        """Delete a job that is not running, and its journal; one that runs is a conflict."""

    @call("POST /jobs/bulk/cancel", BulkOutcomes, "jobs", once=True)
    def cancel_jobs(self, job_ids: Sequence[UUID | str], *, force: bool | None = None) -> list[BulkOutcome]:
        """Cancel up to 1,000 jobs."""

    @call("POST /jobs/bulk/{verb}", BulkOutcomes, "jobs", once=True)
    def change_jobs(
        self, verb: Literal["requeue", "start-over", "run-now", "delete"], job_ids: Sequence[UUID | str]
    ) -> list[BulkOutcome]:
        """Change up to 1,000 jobs, each as the order to a single job does.

        `start-over` requeues jobs, which begin at the start and not at their checkpoints.
        """

    @call("POST /jobs/bulk/preview", Preview)
    def preview(
        self, order: OrderName, *, matching: Filters | None = None, job_ids: Sequence[UUID | str] | None = None
    ) -> Preview:
        """Count what an order would change, and what it would leave alone and why; changes nothing.

        The order is for the jobs of a list (`matching`), or for up to 1,000 named ones.
        """

    @total("POST /jobs/bulk", BulkChanged, "changed")
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

    @call("GET /queues", Queues, "queues")
    def queues(self) -> list[Queue]:
        """Every queue that has jobs, a pause, a limit or a worker."""

    @call("GET /stats", Overview)
    def overview(self) -> Overview:
        """Length, dead, lag and more, for each queue and in total, and what does not work."""

    @pages("GET /queues/{queue}/keys", Keys, "keys", 200)
    def keys(self, queue: str, *, limit: int | None = None) -> Iterator[Key]:
        """List the keys of an ordered queue that have queued jobs: how many, and what the first job of each waits for.

        A queue that is not ordered is a conflict.
        """

    @call("GET /queues/{queue}/prediction", QueuePrediction)
    def predict_queue(self, queue: str) -> QueuePrediction:
        """When all jobs that run or are due now will have ended, the range, and how right such predictions were."""

    @call("GET /queues/{queue}/runs", QueueRuns)
    def queue_runs(self, queue: str, *, range: Literal["1h", "24h", "7d"] | None = None) -> QueueRuns:
        """How long the runs of a queue were: counts, failures, percentiles, a histogram, and the period before."""

    @call("POST /queues/{queue}/pause", QueueState)
    def pause(self, queue: str) -> QueueState:
        """Start no job of a queue any more, on any host; what runs goes on."""

    @call("POST /queues/{queue}/resume", QueueState)
    def resume(self, queue: str) -> QueueState:
        """Start jobs of a paused queue again."""

    @call("PUT /queues/{queue}/limit", QueueState)
    def limit(self, queue: str, max_length: int | None) -> QueueState:
        """Refuse to trigger jobs (429) while `max_length` of a queue wait; `none` removes the limit."""

    @call("PUT /queues/{queue}", QueueState)
    def set_queue(self, queue: str, **words: Unpack[Order]) -> QueueState:
        """Change the order of a queue's jobs, while jobs run; what is not named stays."""

    @total("POST /queues/{queue}/requeue-dead", Changed, "changed")
    def requeue_dead(self, queue: str, **words: Unpack[Tried]) -> int:
        """Queue the failed and lost jobs of a queue again, each with a fresh budget of attempts."""

    @total("POST /queues/{queue}/delete-dead", Changed, "changed")
    def delete_dead(self, queue: str, **words: Unpack[Tried]) -> int:
        """Delete the failed and lost jobs of a queue, with their journal."""

    @total("POST /queues/{queue}/run-all", Changed, "changed")
    def run_all(self, queue: str, **words: Unpack[Queued]) -> int:
        """Make jobs of a queue that wait for their time due now."""

    @total("POST /queues/{queue}/kill-retries", Changed, "changed")
    def kill_retries(self, queue: str, **words: Unpack[Tried]) -> int:
        """Mark the jobs of a queue that wait for a retry as failed."""

    @total("POST /queues/{queue}/move", Moved, "moved")
    def move(self, queue: str, to: str) -> int:
        """Move the queued, running and dead jobs of a queue to another, in their order; running jobs go on.

        Both queues are paused until the last job has moved; the first one stays paused.
        """

    @call("GET /limits", Limits, "limits")
    def limits(self) -> list[Limit]:
        """List the limits: what each allows, how many of its jobs run, and how many wait for it."""

    @call("GET /limits/{limit}", Limit)
    def get_limit(self, limit: str) -> Limit:
        """One limit."""

    @call("PUT /limits/{limit}", Limit)
    def set_limit(
        self, limit: str, *, most: int | None = None, per_minute: float | None = None, burst: int | None = None
    ) -> Limit:
        """Make a limit, or replace what it allows, on all hosts at once; jobs that run go on."""

    @call("DELETE /limits/{limit}", Gone)
    def remove_limit(self, limit: str) -> Gone:
        """Remove a limit; its jobs keep its name, and any number of them may run."""

    @call("GET /workers", Workers, "workers")
    def workers(self) -> list[Worker]:
        """The workers of all hosts that were seen in the last ten minutes, and what they run."""

    @call("GET /tasks", Tasks, "tasks")
    def tasks(self, *, range: Literal["1h", "24h", "7d"] | None = None) -> list[Task]:
        """The memory and the processors that the runs of each task need; with `range` also what its runs have used.

        A task is listed that workers have pipelines for, or that has run.
        """

    @call("GET /tasks/{task}", TaskRuns)
    def task_runs(self, task: str, *, range: Literal["1h", "24h", "7d"] | None = None) -> TaskRuns:
        """How long the runs of a task were: counts, failures, percentiles, a histogram, and the period before."""

    @call("GET /tasks/{task}/schema", ArgsSchema)
    def args_schema(self, task: str) -> ArgsSchema:
        """The JSON Schema of a task's args, as the worker that started last has shown it; null: any object will do."""

    @call("GET /names", Names)
    def names(self, *, queue: str | None = None, task: str | None = None) -> Names:
        """Whether the farm knows a queue and a task, before a mistyped name makes a new one; with similar names."""

    @call("GET /pace", Pace, "pace")
    def pace(self, *, minutes: int | None = None) -> list[Bucket]:
        """How many jobs ended in each ten seconds of the last minutes."""

    @call("GET /events", FarmEvents, "events")
    def events(
        self, *, after: int | None = None, queue: str | None = None, limit: int | None = None
    ) -> list[FarmEvent]:
        """The journal of all jobs, the oldest first; without `after` the newest rows."""

    @call("GET /database", Database)
    def database(self) -> Database:
        """The queue's database: size, sessions, dead rows, the oldest transaction, and what holds back its vacuum."""

    @call("GET /errors", ErrorGroups)
    def errors(
        self, *, queue: str | None = None, task: str | None = None, since: datetime | str | None = None
    ) -> ErrorGroups:
        """The groups of dead and retrying jobs, the largest first: up to 50 by queue, task and error group."""

    @call("PUT /errors/note", ErrorNote)
    def write_error_note(self, task: str, error_group: str, note: str) -> ErrorNote:
        """Write a note about a group of a task, in the place of an earlier one; an empty note removes that."""

    @call("GET /webhooks", Webhooks)
    def webhooks(self) -> Webhooks:
        """The receivers of alerts, and whether a worker serves the queue of their messages."""

    @call("PUT /webhooks/{webhook}", Webhook)
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

    @call("DELETE /webhooks/{webhook}", Gone)
    def remove_webhook(self, webhook: str) -> Gone:
        """Remove a receiver of alerts; messages that wait for it are not sent any more."""

    @call("POST /webhooks/{webhook}/pause", Webhook)
    def pause_webhook(self, webhook: str) -> Webhook:
        """Send a receiver no more messages; those of the pause are never sent."""

    @call("POST /webhooks/{webhook}/resume", Webhook)
    def resume_webhook(self, webhook: str) -> Webhook:
        """Send messages to a paused receiver again, also if its answer 410 has paused it."""

    @call("POST /webhooks/{webhook}/test", Tested, once=True)
    def test_webhook(self, webhook: str) -> Tested:
        """Send a receiver a test message, also while it is paused; the answer has the job that sends it."""

    @call("GET /schedules", Schedules, "schedules")
    def schedules(self, *, next: int | None = None) -> list[Schedule]:
        """List the schedules: when they are due, their last jobs, what is wrong with them."""

    @call("GET /schedules/{name}", Schedule)
    def schedule(self, name: str, *, next: int | None = None) -> Schedule:
        """Show a schedule with its next due times."""

    @call("POST /schedules", Schedule, once=True)
    def add_schedule(self, name: str, task: str, **words: Unpack[ScheduleWords]) -> Schedule:
        """Add a schedule of a task; its first due time is the next one from now on."""

    @call("PUT /schedules/{name}", Schedule)
    def change_schedule(self, name: str, **words: Unpack[ScheduleChange]) -> Schedule:
        """Change a schedule; what is not named stays, null is the default. From then on code changes it no more.

        A new timing counts from now on.
        """

    @call("DELETE /schedules/{name}", Removed, once=True)
    def remove_schedule(self, name: str) -> Removed:
        """Remove a schedule; its jobs stay. One that a pipeline names comes back when a worker starts."""

    @call("POST /schedules/{name}/pause", Schedule)
    def pause_schedule(self, name: str) -> Schedule:
        """Make no jobs of a schedule until it is resumed; those that are made stay."""

    @call("POST /schedules/{name}/resume", Schedule)
    def resume_schedule(self, name: str) -> Schedule:
        """End a schedule's pause; the due times of the pause get no job."""

    @call("POST /schedules/{name}/run", Triggered, once=True)
    def run_schedule(self, name: str) -> Triggered:
        """Add a job of a schedule now, paused or not; now is its due time."""

    @call("GET /backfills", Backfills, "backfills")
    def backfills(self) -> list[Backfill]:
        """List the newest backfills, up to 100: how far they are, what is wrong with them."""

    @call("GET /backfills/{backfill}", Backfill)
    def backfill(self, backfill: str) -> Backfill:
        """Show a backfill: its progress, when it will be done, its partitions by status."""

    @pages("GET /backfills/{backfill}/partitions", Partitions, "partitions", 1000)
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

    @call("POST /backfills", Backfill, once=True)
    def add_backfill(self, name: str, task: str, **words: Unpack[BackfillWords]) -> Backfill:
        """Add a backfill of a task. Its jobs are made after the answer, some hundred at once."""

    @call("POST /backfills/dry-run", BackfillPreview)
    def try_backfill(self, name: str, task: str, **words: Unpack[BackfillWords]) -> BackfillPreview:
        """Show how a backfill would go: how many partitions, how many are done already, some of the jobs."""

    @call("PUT /backfills/{backfill}", Backfill)
    def set_backfill(self, backfill: str, max_running: int | None) -> Backfill:
        """Let so many jobs of a backfill run at once, from now on; those that run go on."""

    @call("DELETE /backfills/{backfill}", Removed, once=True)
    def remove_backfill(self, backfill: str) -> Removed:
        """Remove a backfill whose jobs have all ended, with its ledger; its jobs stay."""

    @call("POST /backfills/{backfill}/pause", Backfill)
    def pause_backfill(self, backfill: str) -> Backfill:
        """Make and start no jobs of a backfill until it is resumed; those that run go on."""

    @call("POST /backfills/{backfill}/resume", Backfill)
    def resume_backfill(self, backfill: str) -> Backfill:
        """End a backfill's pause."""

    @call("POST /backfills/{backfill}/cancel", Backfill)
    def cancel_backfill(self, backfill: str) -> Backfill:
        """Start no more jobs of a backfill; the reaper then cancels those that have not ended."""

    @total("POST /backfills/{backfill}/retry", BackfillRetried, "changed")
    def retry_backfill(self, backfill: str) -> int:
        """Queue the failed and lost jobs of a backfill again, each with a fresh budget of attempts."""
