"""PURE: what an engine is to its jobs: five verbs, the states of what it runs, what a run does with what it finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple, Protocol
from uuid import UUID

ARGS_MOST = 64 * 1024  # bytes of JSON: an environment variable of Linux holds twice as much
RESULT_KEPT = 48 * 1024  # characters of JSON that a checkpoint can hold beside its own words


class Unreachable(Exception):
    """The engine has not answered this time."""


class Refused(Exception):
    """The engine has answered, and does not do it; another attempt may meet another engine."""


class State(StrEnum):
    """What has become of a program on its engine."""

    ABSENT = "absent"  # the engine knows no such program
    RUNNING = "running"  # or it waits for its place there
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # on order: ours, or that of a person at the engine


class Step(StrEnum):
    """What a run does with an order that it has not given itself."""

    SUBMIT = "submit"  # under its id
    RENEW = "renew"  # under a new one
    ADOPT = "adopt"


class Seen(NamedTuple):
    """One look at a program: its state, and what it has written since the look before."""

    state: State
    output: bytes = b""
    read: int = 0  # bytes of the output up to here; the next look goes on there
    why: str = ""  # the engine's words for a failure
    result: Any = None  # where the engine itself hands a result over


@dataclass(frozen=True, slots=True)
class Order:
    """A program that a job has ordered, as its checkpoint keeps it; the id is ours, the handle is the engine's."""

    id: str
    handle: str = ""
    read: int = 0
    is_over: bool = False  # its end has been told: another run of the job orders anew
    has_result: bool = False  # it has succeeded with this `result`
    result: Any = None

    def checkpoint(self) -> dict[str, Any]:
        """The order as a checkpoint of the job; one that lives on at the engine asks for a cleanup (queue/cleanups)."""
        lives_on = not (self.is_over or self.has_result)
        return asdict(self) | ({"on_cancel": "stop"} if lives_on else {})

    def over(self) -> Order:
        """The order, once its end has been told."""
        return replace(self, is_over=True)


class Engine(Protocol):
    """The five verbs. Each raises Unreachable or Refused."""

    forgets: bool  # whether it is to forget a program whose result is safe

    def submit(self, order: Order) -> str:
        """Start the program, and return the engine's handle for it; where the engine knows the id, it starts none."""

    def look(self, order: Order) -> Seen:
        """Its state, and its output from `order.read` on."""

    def find(self, order: Order) -> str | None:
        """The engine's handle for a program of this id; None where there is none."""

    def cancel(self, order: Order, until: float) -> bool:
        """Stop it; whether the engine has confirmed this before that monotonic instant."""

    def forget(self, order: Order) -> None:
        """Let the engine forget a program that has ended."""

    def close(self) -> None:
        """End the connections; the program goes on."""


def order_of(checkpoint: dict[str, Any] | None, job_id: UUID, claim: int) -> Order:
    """PURE: the order that a run goes on with: that of its checkpoint, or a new one where that is over.

    The number in the id is the claim of the run that gave the order. It grows with each start of the job, so no two
    orders of a job have one id, also where the checkpoint is gone after a success.
    """
    kept = {each.name for each in fields(Order)} & (checkpoint or {}).keys()
    before = Order(**{name: checkpoint[name] for name in kept}) if checkpoint else None
    if before is None or before.is_over:
        return Order(f"dl-{job_id}-{claim}")
    return before


def step_for(state: State) -> Step:
    """PURE: what a run does with an order of a run before, which it finds in this state.

    What is absent keeps its id: where two runs of the job believe so, the engine starts one program for both. What was
    stopped although nobody has told its end was stopped for a run that could not write it, or while no run looked.
    """
    return {State.ABSENT: Step.SUBMIT, State.STOPPED: Step.RENEW}.get(state, Step.ADOPT)
