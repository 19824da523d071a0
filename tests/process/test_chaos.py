"""A minute of chaos, and that its checker bites."""

from dataclasses import replace
from random import SystemRandom

import pytest
from farming import keeps_its_promises

from tools.chaos.checker import check
from tools.chaos.history import Answer, Event, History, Row, Sign, Stop, Trigger, Written

SUCCEEDS = frozenset({"succeeded"})


@pytest.mark.long
@pytest.mark.longest
@pytest.mark.parametrize(("seed", "seconds"), [pytest.param(7, 30, marks=pytest.mark.slow), (None, 15)])
def test_a_farm_keeps_its_promises_under_faults(seed: int | None, seconds: int) -> None:
    """So many seconds of faults; without a seed these differ each time, and the output names the seed."""
    seed = SystemRandom().randrange(1_000_000) if seed is None else seed
    print(keeps_its_promises("chaos", "--seconds", str(seconds), "--seed", str(seed), patience=360))


def job(number: str, claim_at: float = 10.0, key: str = "k") -> History:
    """A job that was triggered, claimed once, wrote into the target and succeeded within 2 s."""
    row = Row(number, f"key-{number}", key, "chaos.writes", "succeeded", 1, 3, 1, 4)
    signs = [
        Sign(number, 1, key, 100, "farm-0", what, claim_at + n) for n, what in enumerate(["start", "alive", "end"])
    ]
    return History(
        triggers=[Trigger(row.key, "writes", SUCCEEDS, writes=1, job_id=number)],
        answers=[Answer(number, "status", claim_at + 3, "succeeded")],
        rows=[row],
        events=[
            Event(number, "queued", 9.0),
            Event(number, "picked", claim_at, 1),
            Event(number, "done", claim_at + 2, 1),
        ],
        signs=signs,
        written=[Written(number, 1)],
    )


def joined(*histories: History) -> History:
    return History(**{name: [thing for h in histories for thing in getattr(h, name)] for name in vars(History())})


def changed(**row: object) -> History:
    """The history of a job with another row in the end."""
    history = job("a")
    return replace(history, rows=[replace(history.rows[0], **row)])


def triggered(**more: object) -> History:
    history = job("a")
    return replace(history, triggers=[replace(history.triggers[0], **more)])


def beside(*histories: History, **more: object) -> History:
    """The job with further events, answers or signs, or beside other jobs."""
    return joined(job("a"), *histories, History(**more))


def journal(*events: Event, **row: object) -> History:
    """The job with another row and these events between its first and its others."""
    history = changed(**row)
    return replace(history, events=[history.events[0], *events, *history.events[1:]])


def rules(history: History) -> set[str]:
    return {violation.rule for violation in check(history)}


def again(claim: int) -> list[Sign]:
    """Signs of another run of the job."""
    return [Sign("a", claim, "k", 200, "farm-1", "alive", at) for at in (13.0, 14.0)]


def at(*seconds: float) -> History:
    """The job whose signs came at these times."""
    history = job("a")
    return replace(history, signs=[replace(sign, at=at) for sign, at in zip(history.signs, seconds, strict=False)])


TWIN = job("b", claim_at=13)
HANDED_BACK, KILLED = (Event("a", "requeue", 9.2, spent, why) for spent, why in ((0, "drain"), (1, "worker killed")))
FIRST = Event("a", "picked", 9.1, 1)
STOPPED = joined(at(10.0, 10.1, 18.2), job("b", claim_at=17))
ZOMBIE = journal(FIRST, Event("a", "requeue", 9.2, 1, "lease expired"), claims=2, attempt=2)
ZOMBIE.events[-2:] = [replace(event, attempt=2) for event in ZOMBIE.events[-2:]]
HISTORIES: dict[str, tuple[History, str]] = {
    "jobs of one key one after the other, and one of another key": (beside(TWIN, job("c", key="other")), ""),
    "a job that is gone": (replace(job("a"), rows=[], events=[], signs=[], written=[]), "V1 lost"),
    "an end that its kind does not allow": (triggered(may_end=frozenset({"failed"})), "V1 end"),
    "a start before its time": (triggered(not_before=10.5), "early"),
    "a second job of an idempotency key": (
        beside(
            replace(TWIN, triggers=[replace(TWIN.triggers[0], key="key-a")], rows=[replace(TWIN.rows[0], key="key-a")])
        ),
        "V10 key",
    ),
    "two ends": (beside(events=[Event("a", "done", 13.0, 1)]), "V3 twice, V9 journal"),
    "too many claims": (changed(claims=2), "V4 attempts, A8 target"),
    "an attempt that was handed back": (
        replace(journal(FIRST, HANDED_BACK, claims=2, max_attempts=1), written=[Written("a", 2)]),
        "",
    ),
    "an attempt that was spent": (
        replace(journal(FIRST, KILLED, claims=2, max_attempts=1), written=[Written("a", 2)]),
        "V4 attempts",
    ),
    "a canceled run that goes on": (
        beside(answers=[Answer("a", "cancel", 11.0, "running", cancel_requested=True)]),
        "V12 cancel",
    ),
    "a canceled job that starts": (
        replace(changed(status="canceled"), answers=[Answer("a", "cancel", 9.5, "canceled", cancel_requested=True)]),
        "V12 cancel, V9 journal",
    ),
    "runs of a key side by side": (beside(job("b", claim_at=11.5)), "V5 overlap"),
    "a run before the last sign of one without an end": (joined(at(10, 11), job("b", claim_at=10.8)), "V5 overlap"),
    "a process that sleeps": (STOPPED, "V5 overlap"),
    "a process that was stopped": (joined(STOPPED, History(stops=[Stop("farm-0", "worker", 100, 10.2, 18.0)])), ""),
    "a stop of another process": (
        joined(STOPPED, History(stops=[Stop("farm-0", "supervisor", 1, 10.2, 18.0)])),
        "V5 overlap",
    ),
    "a claim that runs twice": (beside(signs=again(claim=1)), "V2 claim"),
    "a lost run that has not written": (replace(ZOMBIE, written=[Written("a", 2)]), ""),
    "a lost run that wrote late": (replace(ZOMBIE, written=[Written("a", 1), Written("a", 2)]), "A8 target"),
    "a success that has not written": (replace(job("a"), written=[]), "A8 target"),
    "what is left over": (History(left=["a process"]), "left over"),
    "what the API should not say": (History(surprises=["500"]), "API"),
}


@pytest.mark.parametrize(("history", "broken"), HISTORIES.values(), ids=HISTORIES)
def test_the_checker_sees_what_breaks_a_promise_and_nothing_else(history: History, broken: str) -> None:
    assert rules(history) == set(filter(None, broken.split(", ")))
