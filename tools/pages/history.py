"""A farm's week in a database, by the product's own calls; only the times are moved afterwards.

The jobs are added, claimed, ended and parked as by producers, workers and the reaper, in a few minutes. Then one
statement a table stretches these minutes over DAYS. No statement analyses or vacuums a table: autovacuum does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID

from hands import Worker

from dataloader.queue import args_schema, db, enqueue, lifecycle, operations
from dataloader.queue.enqueue import NewJob
from dataloader.queue.job import Finish, Job
from dataloader.queue.lifecycle import Ended
from dataloader.queue.plans import backfills, new_backfill, new_schedule, schedules
from dataloader.queue.reports import errors, predictions, stats, webhooks

DAYS = 8
QUEUES = 20
TASKS = 50
GROUPS = 40  # of errors
AT_ONCE = 1_000  # jobs that are added at once
CLAIMED = 200  # and claimed
BACKOFF_SEC = 15.0
PATIENCE_SEC = 3_600.0  # for a statement that moves the times of all jobs
# Markup, quotes, templates, text from right to left, emoji, control characters, a word without an end.
HOSTILE = (
    """<img src=x onerror="window.pwned=1">"'`</textarea></title></script><script>window.pwned=2</script>"""
    "{{1234*4321}}${1234*4321}{% for %}%2f&amp;&#60;"
    "\u202eright to left \u2067עברית العربية\u2069 😀👩\u200d👩\u200d👧 \u2028\u0301"
    "\x1b[31m\x07\x01\x7f\r\n\t<svg onload=window.pwned=3>" + "unbroken" * 100
)[:1_000]
FILLED_IN = f"{1234 * 4321}"  # what a template in the text would say
PRINTABLE = "".join(
    " " if ord(each) < 32 or each in "\x7f\u2028" else each for each in HOSTILE
)  # where no other may be
NO_TEMPLATE = PRINTABLE.replace("{{", "{")  # where only the known `{{ … }}` may be
PLAIN, ORDERED, FAIR, HOSTILE_QUEUE = "load.orders", "shop.orders", "report.fair", HOSTILE[:128]
HOSTILE_TASK, TYPED_TASK = HOSTILE[:200], "load.table_07"
LIMIT = "source:oracle"
HOT_KEY = "orders/all"
OPERATOR = f"token {PRINTABLE[:90]} from 10.0.4.17"

# The clock that the product cannot turn back: whatever has happened between the first job and `until` happened over
# DAYS instead. The order of events and the shares of their durations stay.
STRETCH_JOBS = """
UPDATE dl_jobs SET created_at = {created_at}, started_at = {started_at}, finished_at = {finished_at},
                   heartbeat_at = {heartbeat_at}
 WHERE finished_at IS NOT NULL"""
STRETCH_EVENTS = "UPDATE dl_job_events SET ts = {ts}"
_STRETCHED = "%(until)s - (%(until)s - {0}) * %(factor)s"


class History:
    """The database of a farm with `jobs` jobs; `job_ids` has one of each kind."""

    def __init__(self, dsn: str, jobs: int, say: Callable[[str], None] = lambda _: None) -> None:
        self.dsn, self.jobs, self._say = dsn, jobs, say
        self.random = Random(7)
        self.job_ids: dict[str, UUID] = {}
        self._numbers = itertools.count(1)
        self.queues = [PLAIN, ORDERED, FAIR, HOSTILE_QUEUE, *(f"queue.{n:02}" for n in range(QUEUES - 4))]
        self.tasks = [HOSTILE_TASK, *(f"load.table_{n:02}" for n in range(TASKS - 1))]
        with db.connect(dsn, name="history", schema="public") as self.conn:
            self.conn.answer_within = PATIENCE_SEC
            self._settle_queues()
            since = self._now()
            self._past()
            self._backfills()
            self._stretch(since)
            self._present()
            self._plans()
            self._workers()
            self._tell_tasks()
            self._reap()

    def _settle_queues(self) -> None:
        operations.set_order(self.conn, ORDERED, OPERATOR, ordered=True)
        operations.set_order(self.conn, FAIR, OPERATOR, fair_by="producer")
        operations.set_limit(self.conn, LIMIT, OPERATOR, most=2, per_minute=60)
        operations.set_limit(self.conn, PRINTABLE[:100], OPERATOR, most=3)
        for number in range(20):
            operations.set_limit(self.conn, f"limit-{number:02}", OPERATOR, most=number)

    # Past runs ----------------------------------------------------------------------------------------------

    def _past(self) -> None:
        """Four fifths of the jobs have ended; three in a hundred of all are dead, of GROUPS errors."""
        worker = Worker(self.dsn, f"{PRINTABLE[:60]}:{1}:boot")
        for size in _bunches(self.jobs * 4 // 5, 2 * AT_ONCE):
            self._add([self._ordinary() for _ in range(size)])
            self._drain(worker, self.queues)
        self._finish_specially(worker)
        worker.conn.close()
        self._say("ended jobs")

    def _ordinary(self, **more: Any) -> NewJob:
        """One job of a week; every tenth is hostile wherever a producer can write."""
        number = next(self._numbers)
        is_hostile = number % 10 == 0
        text = HOSTILE if is_hostile else f"n{number % 97}"
        fields: dict[str, Any] = {
            "queue": HOSTILE_QUEUE if number % 50 == 0 else self.queues[number % TASKS % QUEUES],
            "task": self.tasks[0 if is_hostile else number % TASKS],
            "lock_key": f"{text[:100]}/{number % 4_999}",
            "args": {text: text, "day": f"2026-11-{number % 28 + 1:02}", "list": [number, text], "password": "canary"},
            "partition_key": text[:255],
            "producer": HOSTILE[:255] if is_hostile else ("airflow", "shop", "crm")[number % 3],
            "consumer_group": text[:255],
            "idempotency_key": f"{number}{text}"[:255] if number % 5 == 0 else None,
            "affinity_key": text[:200] if number % 3 == 0 else None,
            "trace": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        }
        return NewJob(**fields | more)

    def _add(self, jobs: list[NewJob]) -> list[UUID]:
        return [
            job_id
            for at in range(0, len(jobs), AT_ONCE)
            for job_id, _ in enqueue.enqueue_many(self.conn, jobs[at : at + AT_ONCE])
        ]

    def _drain(self, worker: Worker, queues: list[str], most: int | None = None) -> None:
        """Run what may start, up to about `most` jobs: an end and the next claims are one step."""
        ends: list[Ended] = []
        done = 0
        while most is None or done < most:
            step = lifecycle.step(worker.session, queues, BACKOFF_SEC, CLAIMED, ends, by_lag=True)
            if not step.jobs and not step.look_again:
                return
            ends = [Ended(job, self._end_of(job), {"peak_mb": 210.5, "cpu_sec": 0.9}) for job in step.jobs]
            done += len(ends)
        lifecycle.finish_some(worker.conn, worker.name, ends)

    def _end_of(self, job: Job) -> Finish:
        number = self.random.randrange(80)
        if number < 3:
            group = self.tasks.index(job.task) % GROUPS if job.task in self.tasks else 1
            kind = HOSTILE[:90] if group == 0 else f"ValueError: column c{group} is missing"
            trace = "".join(f'\n  File "load.py", line {n}, in step' for n in range(30))
            error = f"{kind} in row {number}\n\nTraceback (most recent call last):{trace}"
            return Finish("fail", error, error_group=kind)
        progress = json.dumps({"processed": number, "total": number, "step": HOSTILE})
        return Finish("succeed", progress=progress if number < 10 else None)

    def _finish_specially(self, worker: Worker) -> None:
        """The jobs whose pages are looked at: done with a result, dead after an attempt, canceled."""
        for kind, verb in (("done", "succeed"), ("dead", "fail"), ("canceled", "cancel")):
            self.job_ids[kind] = self._one(args={HOSTILE: HOSTILE}, queue="special")
            if kind == "dead":
                worker.finish(worker.take("special"), "retry", error=HOSTILE)
            job = worker.take("special")
            if kind == "canceled":
                operations.change(self.conn, "cancel", [job.job_id], OPERATOR)
            result = json.dumps({HOSTILE: HOSTILE}) if kind == "done" else None
            end = Finish(
                verb, HOSTILE if kind == "dead" else None, progress=json.dumps({"step": HOSTILE}), result=result
            )
            if result:
                lifecycle.keep_results(worker.conn, [Ended(job, end)])
            worker.finish(job, end.verb, error=end.error, progress=end.progress)
        errors.write_note(self.conn, self.tasks[1], "ValueError: column c1 is missing", HOSTILE, OPERATOR)

    def _one(self, **more: Any) -> UUID:
        return enqueue.enqueue(self.conn, self._ordinary(**{"idempotency_key": None, **more}))[0]

    def _backfills(self) -> None:
        """Three of a hundredth of the jobs each (done, half done, paused), and one with hostile partitions."""
        size, day = max(50, self.jobs // 100), datetime(2026, 1, 1)  # noqa: DTZ001  partitions have no zone
        span = {"since": day.isoformat(), "until": (day + timedelta(hours=size - 1)).isoformat(), "step": "hour"}
        for name, of in (
            ("done", span),
            ("half", span),
            ("paused", span),
            ("hostile", {"partitions": _hostile_partitions()}),
        ):
            self._backfill(name, queue=f"backfill.{name}", **of)
        worker = Worker(self.dsn, "backfiller:1:boot")
        for name, most in (("done", None), ("half", size // 2)):
            self._drain(worker, [f"backfill.{name}"], most)
        worker.conn.close()
        backfills.pause(self.conn, "paused", OPERATOR)
        self._say("backfills")

    def _backfill(self, name: str, **fields: Any) -> None:
        wanted = {"name": name, "task": PRINTABLE[:200] if name == "hostile" else "load.rates", **fields}
        wanted |= {"args": {"hour": "{{ partition }}", NO_TEMPLATE: NO_TEMPLATE}}
        backfills.add(self.conn, new_backfill.checked(wanted), OPERATOR)
        while (left := backfills.due_in(self.conn)) is not None:
            if left <= 0 and (made := backfills.tick(self.conn)):
                assert made.error is None, made.error

    def _stretch(self, since: datetime) -> None:
        """See STRETCH_JOBS; a bunch a transaction would be no gentler, for nobody works beside it."""
        until = self._now()
        times = {"until": until, "factor": timedelta(days=DAYS) / (until - since)}
        columns = ("created_at", "started_at", "finished_at", "heartbeat_at", "ts")
        moved = {name: _STRETCHED.format(name) for name in columns}
        self.conn.execute(STRETCH_JOBS.format(**moved), times)
        self.conn.execute(STRETCH_EVENTS.format(**moved), times)
        self._say("times")

    # Present runs -------------------------------------------------------------------------------------------

    def _present(self) -> None:
        """Jobs that run, that wait for each of the reasons, and that nobody has looked at yet."""
        operations.pause(self.conn, "queue.03", OPERATOR)
        part, soon = max(1, self.jobs // 100), self._now()
        holder = Worker(self.dsn, f"host-1:{2}:boot")
        self.job_ids["running"] = self._one(queue=PLAIN, lock_key=HOT_KEY, lease_ttl_sec=86_400, priority=1)
        held = holder.take(PLAIN)
        progress = json.dumps({"processed": 640, "total": 1_000, "step": HOSTILE})
        lifecycle.beat(holder.conn, [held], progress, journal=True)
        self._add([self._ordinary(queue=PLAIN, lock_key=HOT_KEY) for _ in range(5 * part)])
        self.job_ids["waiting"] = self._one(queue=PLAIN, lock_key=HOT_KEY)
        scores = itertools.count()
        self._add([self._ordinary(queue=ORDERED, lock_key=HOT_KEY, score=next(scores)) for _ in range(5 * part)])
        self.job_ids["ordered"] = self._one(queue=ORDERED, lock_key=HOSTILE[:512], score=1.0)
        self._add([self._ordinary(queue="queue.05", limits=[LIMIT, PRINTABLE[:100]]) for _ in range(part)])
        self._add([self._ordinary(available_at=soon + timedelta(seconds=60 * n)) for n in range(1, 2 * part)])
        self.job_ids["scheduled"] = self._one(available_at=soon + timedelta(hours=3))
        self._families(part)
        self._runs()
        self._retries(holder, part // 2)
        for queue in (PLAIN, "queue.05"):  # the claims that park what cannot start
            lifecycle.step(holder.session, [queue], BACKOFF_SEC, 1, None)
        self._add([self._ordinary(queue=FAIR) for _ in range(part)])
        self._add([self._ordinary(deadline=soon + timedelta(minutes=n % 600)) for n in range(part)])
        self._add([self._ordinary() for _ in range(max(0, self.jobs - self._count()))])
        holder.conn.close()
        self._say("waiting jobs")

    def _families(self, count: int) -> None:
        parent = self.job_ids["parent"] = self._one(queue="family")
        self._add([self._ordinary(queue="family", depends_on=[parent], idempotency_key=None) for _ in range(count)])
        parents = [self._one(queue="family") for _ in range(20)]
        self.job_ids["child"] = self._one(queue="family", depends_on=[parent, *parents])

    def _runs(self) -> None:
        """Forty runs on ten hosts, each of a worker of its own."""
        for number in range(40):
            self._one(queue="busy", lease_ttl_sec=86_400)
            worker = Worker(self.dsn, _worker(number))
            worker.take("busy")
            worker.conn.close()  # the row holds its key on

    def _retries(self, worker: Worker, count: int) -> None:
        self._add([self._ordinary(queue="retried") for _ in range(count)])
        self.job_ids["retry"] = self._one(queue="retried")
        while jobs := lifecycle.step(worker.session, ["retried"], BACKOFF_SEC, CLAIMED, None).jobs:
            ends = [Ended(job, Finish("retry", "ConnectionError: no answer", 36_000.0)) for job in jobs]
            lifecycle.finish_some(worker.conn, worker.name, ends)

    def _plans(self) -> None:
        for number in range(50):
            fields = {"name": f"nightly-{number:02}", "task": self.tasks[number] if number else PRINTABLE[:200]}
            fields |= {
                "cron": f"{number} 3 * * *",
                "args": {NO_TEMPLATE: NO_TEMPLATE, "day": "{{ date }}"},
                "queue": PLAIN,
            }
            schedules.add(self.conn, new_schedule.checked(fields, "UTC"), OPERATOR)
            schedules.run(self.conn, str(fields["name"]), OPERATOR)
        schedules.pause(self.conn, "nightly-07", OPERATOR)
        for number in range(10):
            url = f"https://hooks.example/{number}?<svg/onload=window.pwned=4>'\"{{{{1234*4321}}}}"
            webhooks.put(self.conn, f"ops-{number}", url, OPERATOR, queues=self.queues)

    def _workers(self) -> None:
        for host in range(10):
            shown = [self._shown(number) for number in range(40) if number % 10 == host]
            stats.show_workers(self.conn, f"farm-{host}", f"host-{host}" if host else HOSTILE, shown, 32_000.0)

    def _shown(self, number: int) -> dict[str, Any]:
        busy = self.conn.execute(
            "SELECT job_id FROM dl_jobs WHERE status = 'running' AND claimed_by = %s", (_worker(number),)
        )
        row = busy.fetchone()
        return {
            "worker": _worker(number),
            "pid": 4_000 + number,
            "queue": self.queues[number % QUEUES],
            "queues": [self.queues[number % QUEUES], "busy"],
            "state": "busy" if row else "idle",
            "job_id": str(row[0]) if row else None,
            "memory_bytes": 312_000_000,
            "cpu_percent": 97.0 if row else 0.0,
            "jobs": 12 * number,
            "started_at": datetime.now(UTC) - timedelta(hours=2),
        }

    def _tell_tasks(self) -> None:
        """Two tasks as workers publish them: the schema of one has a hostile text wherever a pipeline may have one."""
        field = {"type": "string", "title": PRINTABLE[:60], "description": HOSTILE, "default": HOSTILE}
        hostile = {"type": "object", "properties": {HOSTILE[:200]: field, "mode": {"enum": ["full", HOSTILE]}}}
        typed = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
        said = {HOSTILE_TASK: hostile, TYPED_TASK: typed}
        operations.publish_tasks(
            self.conn, {task: {"args_schema": args_schema.written(schema)} for task, schema in said.items()}
        )

    def _reap(self) -> None:
        """The rounds of a reaper: the journal's sums, the counts of queues, predictions."""
        while stats.aggregate(self.conn):
            pass
        stats.note_lengths(self.conn, 0.0)
        after = ""
        while noted := predictions.note(self.conn, after):
            after = noted[0]
        self._say("the reaper's sums")

    def _count(self) -> int:
        (count,) = self.conn.execute("SELECT count(*) FROM dl_jobs").fetchone() or (0,)
        return int(count)

    def _now(self) -> datetime:
        (at,) = self.conn.execute("SELECT clock_timestamp()").fetchone() or (None,)
        assert at is not None
        return at


def _worker(number: int) -> str:
    return f"{PRINTABLE[:80] if number == 0 else f'host-{number % 10}'}:{4_000 + number}:boot"


def _hostile_partitions() -> list[str]:
    return [f"{number} {PRINTABLE}"[:150] for number in range(20)]


def _bunches(count: int, most: int) -> Iterator[int]:
    for at in range(0, count, most):
        yield min(most, count - at)
