"""`run.dask`, `run.ray`, `run.spark`: a program on a cluster that is there already. docs/engines.md is the page.

This module follows a program by one run of a job, for every engine: order or adopt it, read its output, take its end.
The order is in the job's checkpoint before the engine gets it. So the run after a worker's death finds the id there,
asks the engine for it, and goes on with it. A cancellation and a time limit stop the program. A drain and a lost claim
leave it to the next run.

on_dask     a Dask scheduler, by its client; driver.py is what runs on the Dask worker
over_http   Ray's job submission and the REST server of a Spark master
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from logging import Logger
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from pydantic import Field

from dataloader import config, pipelines
from dataloader.pipelines import Context, PermanentError, register, register_with, rest, validated
from dataloader.pipelines.command import Output
from dataloader.pipelines.http import Unreachable
from dataloader.queue.job import End, to_json

ARGS_MOST = 64 * 1024  # bytes of JSON: an environment variable of Linux holds twice as much
RESULT_KEPT = 48 * 1024  # characters of JSON that a checkpoint can hold beside its own words
PROGRESS_MOST = 4_096  # bytes of a line of progress
LINE_MOST = 2**20  # bytes of a line that is kept until its end has come: a result may be as long
POLL_SEC, POLL_MAX_SEC = 0.25, 2.0  # between two polls of the engine: at first, and for a long program
CANCEL_SEC = 2.0  # less than DL_KILL_GRACE_SEC, after which the farm kills the worker

T = TypeVar("T")
Steps = Generator[dict[str, Any] | None, None, T]


class Refused(Exception):
    """The engine refuses this request, or has answered something else than its protocol has."""


class ProgramFailed(Exception):
    """The program has ended otherwise than it should, or the engine does not know it any more."""


class EngineAway(Exception):
    """The engine has not answered for `away_sec`."""


class State(StrEnum):
    """The state of a program on its engine."""

    ABSENT = "absent"  # the engine knows no such program
    RUNNING = "running"  # or it waits for its place there
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # by us, or by a person at the engine


class Report(NamedTuple):
    """The result of one poll: the state of a program, and its new output."""

    state: State
    output: bytes = b""
    read: int = 0  # bytes of the output so far; the next poll reads from there
    why: str = ""  # the failure in the words of the engine
    result: Any = None  # if the engine returns results itself


@dataclass(frozen=True, slots=True)
class Order:
    """A program that a job has ordered, as its checkpoint keeps it; the id is ours, the handle is the engine's."""

    id: str
    handle: str = ""
    read: int = 0
    is_over: bool = False  # its end is reported: the next run of the job submits a new program
    has_result: bool = False  # it has succeeded with this `result`
    result: Any = None

    def checkpoint(self) -> dict[str, Any]:
        """The order as a checkpoint of the job; one that lives on at the engine asks for a cleanup (queue/cleanups)."""
        lives_on = not (self.is_over or self.has_result)
        return asdict(self) | ({"on_cancel": "stop"} if lives_on else {})


class Engine:
    """One program on one cluster. Each verb raises Unreachable or Refused."""

    forgets = False  # True if the engine should forget a program whose result is safe; else people can inspect it there

    def submit(self, order: Order) -> str:
        """Start the program and return the handle of the engine; a program with a known id is not started again."""
        raise NotImplementedError

    def poll(self, order: Order) -> Report:
        """Report the state of the program, and its output from `order.read` on."""
        raise NotImplementedError

    def find(self, order: Order) -> str | None:
        """The handle of the engine for the program with this id, or None; by default our own id is the handle."""
        return order.id

    def cancel(self, order: Order, until: float) -> None:
        """Stop it; raises Unreachable unless the engine confirms this before that monotonic instant."""
        raise NotImplementedError

    def forget(self, order: Order) -> None:
        """Let the engine forget a program that has ended."""

    def close(self) -> None:
        """End the connections; the program goes on."""


def order_of(checkpoint: dict[str, Any] | None, job_id: UUID, claim: int) -> Order:
    """PURE: the order that a run goes on with: that of its checkpoint, or a new one where that is over.

    The number in the id is the claim of the run that gave the order. It grows with each start of the job, so no two
    orders of a job have one id, also where the checkpoint is gone after a success.
    """
    if checkpoint and not checkpoint.get("is_over"):
        return Order(**{each.name: checkpoint[each.name] for each in fields(Order) if each.name in checkpoint})
    return Order(f"dl-{job_id}-{claim}")


class Lines(Output):
    """The output of one program line by line: progress, a result, or a line for the job's log."""

    longest = LINE_MOST

    def __init__(self, logger: Logger, logged_most: int) -> None:
        """`logged_most` is how many bytes of the output are logged."""
        super().__init__(logger, logged_most)
        self.result: Any = None
        self._progress: dict[str, Any] | None = None  # the newest that was not taken
        self._from_result = 0  # bytes from the begin of the newest result on

    @property
    def unread(self) -> int:
        """The bytes at the end that the next run is to read again: from the newest result on, or of a line begun."""
        return self._from_result + len(self._begun)

    def taken_progress(self) -> dict[str, Any] | None:
        """The newest progress, once; None: there is none."""
        newest, self._progress = self._progress, None
        return newest

    def _add(self, line: bytes, size: int) -> None:
        message = spoken(line)
        if message is None:
            super()._add(line, size)
        elif set(message) == {"result"}:
            self.result, self._from_result = message["result"], size
            return
        else:
            self._progress = message
        if self._from_result:
            self._from_result += size


def spoken(line: bytes) -> dict[str, Any] | None:
    """PURE: the message to the farm in a line, {"processed": 5, "total": 9, ...} or {"result": ...}; None without."""
    text = line.strip()
    if not (text.startswith(b"{") and text.endswith(b"}")):
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if set(message) == {"result"}:
        return dict(message)
    done = message.get("processed")
    is_number = type(done) is int or (isinstance(done, float) and math.isfinite(done))
    return dict(message) if is_number and len(text) <= PROGRESS_MOST else None


class Followed:
    """One run's view of its program."""

    def __init__(self, engine: Engine, name: str, away_sec: float, context: Context, lines: Lines) -> None:
        """`name` is the cluster's in messages, `away_sec` how long it may be away."""
        self._engine, self._name, self._away_sec, self._context, self._lines = engine, name, away_sec, context, lines
        self._order = Order("")
        self._is_given = False  # the engine may have the order
        self._kept: dict[str, Any] = {}  # as the checkpoint has the order

    def steps(self) -> Steps[Any]:
        """Follow the program to its end, and return its result."""
        try:
            return (yield from self._followed())
        except GeneratorExit:
            if self._context.stop_reason in (End.CANCELED, End.TIMEOUT):
                self._cancel()
            elif self._is_given:
                self._context.logger.info(
                    "%s goes on at %s: the next run of this job follows it", self._order.id, self._name
                )
            raise
        finally:
            self._engine.close()

    def _followed(self) -> Steps[Any]:
        before, began = self._context.checkpoint, time.monotonic()
        self._order = order_of(before, self._context.job_id, self._context.claim)
        if before is not None and "canceled" in before:
            return (yield from self._cleaned_up(before["canceled"]))
        if self._order.has_result:
            return self._order.result
        is_given = before is not None and self._order.id == before["id"]
        yield from self._given_again() if is_given else self._given()
        while True:
            report = yield from self._asked(self._engine.poll)
            self._lines.take(report.output)
            self._order = replace(self._order, read=max(self._order.read, report.read))
            if report.state is not State.RUNNING:
                self._lines.end()
                return (yield from self._ended(report))
            # The place in the output at which the next run goes on.
            kept = replace(self._order, read=self._order.read - self._lines.unread).checkpoint()
            if kept != self._kept:
                self._keep(kept)
            yield self._lines.taken_progress()
            yield from rest(min(POLL_MAX_SEC, max(POLL_SEC, (time.monotonic() - began) / 30)))

    def _cleaned_up(self, canceled: str) -> Steps[dict[str, str]]:
        """Stop the program of a job that was canceled while no run of it could stop the program."""
        state = yield from self._state()
        if state is State.RUNNING:
            yield from self._asked(lambda order: self._engine.cancel(order, time.monotonic() + CANCEL_SEC))
            state = State.STOPPED
        elif state is not State.ABSENT and self._engine.forgets:
            yield from self._asked(self._engine.forget)
        self._context.note(f"{self._order.id} of the canceled job {canceled} is {state} at {self._name}")
        return {"program": self._order.id, "state": state}

    def _state(self) -> Steps[State]:
        """The state of the program that an earlier run submitted."""
        if not self._order.handle:
            self._order = replace(self._order, handle=(yield from self._asked(self._engine.find)) or "")
        return (yield from self._asked(self._engine.poll)).state if self._order.handle else State.ABSENT

    def _given_again(self) -> Steps[None]:
        """Adopt the order of an earlier run, or give it where the engine does not know it.

        An absent order keeps its id, so that the engine starts one program if two runs of the job do this at once. A
        program that was stopped without a report of its end is submitted under a new id.
        """
        self._is_given = True
        state = yield from self._state()
        if state not in (State.ABSENT, State.STOPPED):
            self._context.logger.info("%s at %s is adopted: it is %s", self._order.id, self._name, state)
            return
        anew = order_of(None, self._context.job_id, self._context.claim)
        self._order = anew if state is State.STOPPED else Order(self._order.id)
        yield from self._given()

    def _given(self) -> Steps[None]:
        """Order the program, once the queue has the order's id; keep the engine's handle."""
        yield from self._saved()
        self._is_given = True
        handle = yield from self._asked(self._engine.submit)
        self._order = replace(self._order, handle=handle)
        self._keep(self._order.checkpoint())
        self._context.logger.info("%s is at %s", self._order.id, self._name)

    def _ended(self, report: Report) -> Steps[Any]:
        for line in self._lines.tail:
            self._context.note(line)
        if report.state is State.ABSENT:
            raise ProgramFailed(f"{self._name} does not know {self._order.id} any more: it has started anew")
        if report.state is not State.SUCCEEDED:
            self._order = replace(self._order, is_over=True)
            yield from self._forgotten()
            reason = "was stopped there" if report.state is State.STOPPED else "failed"
            reason += f": {report.why}" if report.why else ""
            raise ProgramFailed(f"{self._order.id} {reason}{self._lines.last_words()}")
        result = self._lines.result if report.result is None else report.result
        # The result is kept before the engine forgets it: a run after this one would find neither. A checkpoint takes
        # no NaN and no odd text, so the result is kept as the run's end would write it. That end also judges a result
        # of which `to_json` makes nothing.
        written = json.loads(to_json({"result": result}) or "{}")
        if written and len(json.dumps(written["result"])) <= RESULT_KEPT:
            self._order = replace(self._order, has_result=True, result=written["result"])
            yield from self._forgotten()
        if (news := self._lines.taken_progress()) is not None:
            self._context.progress(news)
        return written.get("result", result)

    def _forgotten(self) -> Steps[None]:
        if not self._engine.forgets:
            self._keep(self._order.checkpoint())
            return
        yield from self._saved()
        try:
            self._engine.forget(self._order)
        except (Unreachable, Refused) as e:
            self._context.logger.info("%s has not forgotten %s: %s", self._name, self._order.id, e)

    def _saved(self) -> Steps[None]:
        """Wait until the queue has the order; a run that has lost its claim ends here."""
        self._keep(self._order.checkpoint())
        while not self._context.is_saved:
            yield None
            time.sleep(0.005)
        yield None

    def _asked(self, verb: Callable[[Order], T]) -> Steps[T]:
        """The engine's answer; while it is away the verb is tried again, for `away_sec`."""
        until, is_away = time.monotonic() + self._away_sec, False
        while True:
            try:
                return verb(self._order)
            except Unreachable as e:
                if not is_away:
                    self._context.logger.warning("%s is away: %s", self._name, e)
                is_away = True
                if time.monotonic() >= until:
                    text = f"{self._name} has not answered for {self._away_sec:g} s: {e}"
                    raise EngineAway(f"{text}; the next attempt goes on with {self._order.id}") from None
            yield None
            yield from rest(min(POLL_MAX_SEC, self._away_sec))

    def _cancel(self) -> None:
        """Stop the program; if the engine does not confirm this in time, note it; a later run adopts the program."""
        if not self._is_given or self._order.is_over or self._order.has_result:
            return
        try:
            self._engine.cancel(self._order, time.monotonic() + CANCEL_SEC)
        except (Unreachable, Refused) as e:
            unsure = f"{self._name} has not confirmed that {self._order.id} is stopped"
            self._context.note(f"{unsure} ({e}): it may go on there")
            return
        self._keep(replace(self._order, is_over=True).checkpoint())
        self._context.note(f"{self._order.id} is stopped at {self._name}")

    def _keep(self, checkpoint: dict[str, Any]) -> None:
        self._kept = checkpoint
        self._context.save(checkpoint)


class Arguments(pipelines.Arguments):
    """The `args` of the three tasks; docs/engines.md explains each."""

    cluster: str = Field(min_length=1, max_length=64)
    entrypoint: str = Field(min_length=1, max_length=64)
    args: dict[str, Any] = Field(default={})


def _task_of(kind: str, module: str, name: str) -> Callable[[dict[str, Any], Context], Steps[Any]]:
    """The pipeline for clusters of this kind, whose Engine is the class of this name; a run imports it."""

    def run(args: dict[str, Any], context: Context) -> Steps[Any]:
        """Run a program on a cluster, and return its result.

        Cluster and program are those that DL_ENGINES allows; another one raises PermanentError. A worker's death and a
        drain leave the program running: the next run of the job goes on with it. A cancellation and the time limit stop
        it. Its output is logged. A program that fails, or that the cluster loses, raises ProgramFailed; a cluster that
        is away for too long EngineAway.
        """
        wanted = validated(Arguments, args)
        clusters = {name: each for name, each in config.load().dl_engines.items() if each.engine == kind}
        rule = f"cluster: should be one of {kind} that DL_ENGINES of this worker names"
        cluster = _named(clusters, wanted.cluster, rule)
        rule = f"entrypoint: should be one that DL_ENGINES names for {wanted.cluster}"
        entry = _named(cluster.entrypoints, wanted.entrypoint, rule)
        text = json.dumps(wanted.args)
        if len(text) > ARGS_MOST:
            raise PermanentError(f"args: should be at most {ARGS_MOST} bytes of JSON, not {len(text)}")
        engine = getattr(importlib.import_module(f"{__name__}.{module}"), name)(cluster, entry, text)
        lines = Lines(context.logger, cluster.output_kb * 1024)
        return (yield from Followed(engine, wanted.cluster, cluster.away_sec, context, lines).steps())

    return run


def _named(known: dict[str, Any], name: str, should: str) -> Any:
    if name not in known:
        raise PermanentError(f"{should} ({', '.join(sorted(known)) or 'none'})")
    return known[name]


register("run.ray")(_task_of("ray", "over_http", "OnRay"))
register("run.spark")(_task_of("spark", "over_http", "OnSpark"))
register_with("distributed", "dask", "run.dask")(_task_of("dask", "on_dask", "OnDask"))
