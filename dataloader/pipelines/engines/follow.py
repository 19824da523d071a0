"""A program on an engine, followed by one run of a job: order or adopt it, read its output, take its end.

The order is in the job's checkpoint before the engine gets it. So the run after a worker's death finds the id there,
asks the engine for it, and goes on with what it finds. A cancellation and a time limit stop the program. A drain and a
lost claim leave it to the next run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from dataloader.pipelines import Context, Progress
from dataloader.pipelines.engines.engine import (
    RESULT_KEPT,
    Engine,
    Order,
    Refused,
    Seen,
    State,
    Step,
    Unreachable,
    order_of,
    step_for,
)
from dataloader.pipelines.engines.lines import Lines
from dataloader.queue.job import End, to_json

SLICE_SEC = 0.1  # between two safe points
LOOK_SEC, LOOK_MOST_SEC = 0.25, 2.0  # between two looks at the engine: first, and for a program that takes long
CANCEL_SEC = 2.0  # less than DL_KILL_GRACE_SEC, after which the farm kills the worker
_UNWANTED = (End.CANCELED, End.TIMEOUT)

T = TypeVar("T")
Steps = Generator[Progress | None, None, T]


class ProgramFailed(Exception):
    """The program has ended otherwise than it should, or the engine does not know it any more."""


class EngineAway(Exception):
    """The engine has not answered for `away_sec`."""


class Cluster(NamedTuple):
    """The cluster as messages name it, and how long it may be away."""

    name: str
    away_sec: float


class Followed:
    """One run's view of its program."""

    def __init__(self, engine: Engine, cluster: Cluster, context: Context, lines: Lines) -> None:
        self._engine, self._cluster, self._context, self._lines = engine, cluster, context, lines
        self._order = Order("")
        self._is_given = False  # the engine may have the order
        self._kept: dict[str, Any] = {}  # as the checkpoint has the order

    def steps(self) -> Steps[Any]:
        """Follow the program to its end, and return its result."""
        try:
            return (yield from self._followed())
        except GeneratorExit:
            if self._context.stop_reason in _UNWANTED:
                self._cancel()
            elif self._is_given:
                self._log("%s goes on at %s: the next run of this job follows it", self._order.id, self._cluster.name)
            raise
        finally:
            self._engine.close()

    def _followed(self) -> Steps[Any]:
        before = self._context.checkpoint
        self._order = order_of(before, self._context.job_id, self._context.claim)
        if before is not None and "canceled" in before:
            return (yield from self._cleaned_up(before["canceled"]))
        if self._order.has_result:
            return self._order.result
        is_given = before is not None and self._order.id == before["id"]
        yield from self._given_again() if is_given else self._given()
        return (yield from self._to_its_end())

    def _cleaned_up(self, canceled: str) -> Steps[dict[str, str]]:
        """Stop the program of a job that was canceled while no run of it could stop the program."""
        state = yield from self._found()
        if state is State.RUNNING:
            yield from self._asked(self._stopped)
            state = State.STOPPED
        elif state is not State.ABSENT and self._engine.forgets:
            yield from self._asked(self._engine.forget)
        self._context.note(f"{self._order.id} of the canceled job {canceled} is {state} at {self._cluster.name}")
        return {"program": self._order.id, "state": state}

    def _stopped(self, order: Order) -> None:
        if not self._engine.cancel(order, time.monotonic() + CANCEL_SEC):
            raise Unreachable("it has not confirmed that the program is stopped")

    def _found(self) -> Steps[State]:
        """What has become of the order of an earlier run."""
        if not self._order.handle:
            self._order = replace(self._order, handle=(yield from self._asked(self._engine.find)) or "")
        return (yield from self._asked(self._engine.look)).state if self._order.handle else State.ABSENT

    def _given_again(self) -> Steps[None]:
        """Adopt what an earlier run has ordered; order it where the engine does not know it."""
        self._is_given = True
        state = yield from self._found()
        step = step_for(state)
        if step is Step.ADOPT:
            self._log("%s at %s is adopted: it is %s", self._order.id, self._cluster.name, state)
            return
        anew = order_of(None, self._context.job_id, self._context.claim)
        self._order = anew if step is Step.RENEW else Order(self._order.id)
        yield from self._given()

    def _given(self) -> Steps[None]:
        """Order the program, once the queue has the order's id; keep the engine's handle."""
        yield from self._saved()
        self._is_given = True
        handle = yield from self._asked(self._engine.submit)
        self._order = replace(self._order, handle=handle)
        self._keep(self._order.checkpoint())
        self._log("%s is at %s", self._order.id, self._cluster.name)

    def _to_its_end(self) -> Steps[Any]:
        began = time.monotonic()
        while True:
            seen = yield from self._asked(self._engine.look)
            self._take(seen)
            if seen.state is not State.RUNNING:
                return (yield from self._ended(seen))
            yield self._progress()
            yield from _rest(min(LOOK_MOST_SEC, max(LOOK_SEC, (time.monotonic() - began) / 30)))

    def _take(self, seen: Seen) -> None:
        self._lines.take(seen.output)
        if seen.state is not State.RUNNING:
            self._lines.end()
        self._order = replace(self._order, read=max(self._order.read, seen.read))

    def _progress(self) -> Progress | None:
        """The program's progress, with the place in its output at which the next run goes on."""
        kept = replace(self._order, read=self._order.read - self._lines.unread).checkpoint()
        said = self._lines.taken_progress()
        if said is None:
            if kept != self._kept:
                self._keep(kept)
            return None
        progress = Progress(said["processed"], checkpoint=kept)
        progress.update(said)
        return progress

    def _ended(self, seen: Seen) -> Steps[Any]:
        for line in self._lines.output.tail:
            self._context.note(line)
        if seen.state is State.SUCCEEDED:
            return (yield from self._succeeded(self._lines.result if seen.result is None else seen.result))
        if seen.state is State.ABSENT:
            raise ProgramFailed(f"{self._cluster.name} does not know {self._order.id} any more: it has started anew")
        self._order = self._order.over()
        yield from self._forgotten()
        how = ("was stopped there" if seen.state is State.STOPPED else "failed") + (f": {seen.why}" if seen.why else "")
        raise ProgramFailed(f"{self._order.id} {how}{self._lines.output.last_words()}")

    def _succeeded(self, result: Any) -> Steps[Any]:
        """Keep the result before the engine forgets it: a run after this one would find neither.

        A checkpoint takes no NaN and no odd text, so the result is kept as the run's end would write it. That end also
        judges a result of which `to_json` makes nothing.
        """
        written = json.loads(to_json({"result": result}) or "{}")
        if written and len(json.dumps(written["result"])) <= RESULT_KEPT:
            self._order = replace(self._order, has_result=True, result=written["result"])
            yield from self._forgotten()
        if (said := self._lines.taken_progress()) is not None:
            self._context.progress(said)
        return written.get("result", result)

    def _forgotten(self) -> Steps[None]:
        if not self._engine.forgets:
            self._keep(self._order.checkpoint())
            return
        yield from self._saved()
        try:
            self._engine.forget(self._order)
        except (Unreachable, Refused) as e:
            self._log("%s has not forgotten %s: %s", self._cluster.name, self._order.id, e)

    def _saved(self) -> Steps[None]:
        """Wait until the queue has the order; a run that has lost its claim ends here."""
        self._keep(self._order.checkpoint())
        while not self._context.is_saved:
            yield None
            time.sleep(0.005)
        yield None

    def _asked(self, verb: Callable[[Order], T]) -> Steps[T]:
        """The engine's answer; while it is away the verb is tried again, for `away_sec`."""
        until, is_away = time.monotonic() + self._cluster.away_sec, False
        while True:
            try:
                return verb(self._order)
            except Unreachable as e:
                if not is_away:
                    self._context.logger.warning("%s is away: %s", self._cluster.name, e)
                is_away = True
                if time.monotonic() >= until:
                    raise EngineAway(self._away(e)) from None
            yield None
            yield from _rest(min(LOOK_MOST_SEC, self._cluster.away_sec))

    def _away(self, error: Unreachable) -> str:
        text = f"{self._cluster.name} has not answered for {self._cluster.away_sec:g} s: {error}"
        return f"{text}; the next attempt goes on with {self._order.id}"

    def _cancel(self) -> None:
        """Stop the program; where the engine does not confirm it in time, say so, and let a later run adopt it."""
        if not self._is_given or self._order.is_over or self._order.has_result:
            return
        why = "it has not answered in time"
        try:
            if self._engine.cancel(self._order, time.monotonic() + CANCEL_SEC):
                self._keep(self._order.over().checkpoint())
                self._context.note(f"{self._order.id} is stopped at {self._cluster.name}")
                return
        except (Unreachable, Refused) as e:
            why = str(e)
        self._context.note(
            f"{self._cluster.name} has not confirmed that {self._order.id} is stopped ({why}): it may go on there"
        )

    def _keep(self, checkpoint: dict[str, Any]) -> None:
        self._kept = checkpoint
        self._context.save(checkpoint)

    def _log(self, text: str, *values: object) -> None:
        self._context.logger.info(text, *values)


def _rest(seconds: float) -> Steps[None]:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(SLICE_SEC, left))
        yield None
