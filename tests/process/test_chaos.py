"""A minute of chaos, and that its checker bites."""

from __future__ import annotations

from dataclasses import replace
from random import SystemRandom

import pytest
from farming import keeps_its_promises

from tools.chaos.checker import check
from tools.chaos.history import Answer, Event, History, Row, Sign, Stop, Trigger, Written

SUCCEEDS = frozenset({"succeeded"})


# --- the run ---


@pytest.mark.long
@pytest.mark.longest
@pytest.mark.parametrize(("seed", "seconds"), [pytest.param(7, 30, marks=pytest.mark.slow), (None, 15)])
def test_a_farm_keeps_its_promises_under_faults(seed: int | None, seconds: int) -> None:
    """So many seconds of faults; without a seed these differ each time, and the output names the seed."""
    seed = SystemRandom().randrange(1_000_000) if seed is None else seed
    print(keeps_its_promises("chaos", "--seconds", str(seconds), "--seed", str(seed), patience=360))


# --- the checker ---


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
    """Several histories as one."""
    return History(**{name: [thing for h in histories for thing in getattr(h, name)] for name in vars(History())})


def changed(history: History, **row: object) -> History:
    """The history with another row in the end."""
    history.rows = [replace(history.rows[0], **row)]
    return history


def rules(history: History) -> set[str]:
    """Which rules the history breaks."""
    return {violation.rule for violation in check(history)}


def run_again(history: History, claim: int, at: float, pid: int = 200) -> None:
    """Add signs of another run of the history's first job."""
    row = history.rows[0]
    history.signs += [Sign(row.job_id, claim, row.lock_key, pid, "farm-1", "alive", at + n) for n in range(2)]


def test_a_good_history_passes() -> None:
    """Two jobs of one key, one after the other, and one of another key at the same time."""
    assert check(joined(job("a"), job("b", claim_at=13), job("c", key="other"))) == []


def test_a_lost_job_is_seen() -> None:
    assert rules(replace(job("a"), rows=[], events=[], signs=[], written=[])) == {"V1 lost"}
    waiting = changed(job("a"), status="queued", attempt=0, claims=0)
    waiting.answers, waiting.signs, waiting.written = [], [], []
    waiting.events = waiting.events[:1]
    assert rules(waiting) == {"V1 lost"}
    assert rules(joined(job("a"), History(answers=[Answer("a", "status", 20.0, None)]))) == {"V1 lost"}


def test_an_end_that_its_kind_does_not_allow_is_seen() -> None:
    history = job("a")
    history.triggers = [replace(history.triggers[0], may_end=frozenset({"failed"}))]
    assert rules(history) == {"V1 end"}


def test_a_second_job_of_an_idempotency_key_is_seen() -> None:
    twin = job("b", claim_at=13)
    twin.triggers = [replace(twin.triggers[0], key="key-a")]
    twin.rows = [replace(twin.rows[0], key="key-a")]
    assert rules(joined(job("a"), twin)) == {"V10 key"}
    assert rules(joined(job("a"), replace(job("b", claim_at=13), triggers=[]))) == {"V10 key"}


def test_a_job_finished_twice_is_seen() -> None:
    twice = job("a")
    twice.events.append(Event("a", "done", 13.0, 1))
    assert "V3 twice" in rules(twice)
    undone = job("a")
    undone.answers.append(Answer("a", "status", 13.0, "lost"))
    assert rules(undone) == {"V3 twice"}
    going_on = job("a")
    going_on.events.append(Event("a", "heartbeat", 13.0, 1))
    assert "V3 twice" in rules(going_on)


@pytest.mark.parametrize("row", [{"attempt": 2}, {"claims": 2}, {"max_attempts": 0}])
def test_a_wrong_count_of_attempts_is_seen(row: dict[str, int]) -> None:
    assert "V4 attempts" in rules(changed(job("a"), **row))


def test_an_attempt_that_was_given_back_does_not_count() -> None:
    history = changed(job("a"), claims=2, max_attempts=1)
    history.events[1:1] = [Event("a", "picked", 9.1, 1), Event("a", "requeue", 9.2, 0, "drain")]
    history.written = [Written("a", 2)]
    assert rules(history) == set()
    history.events[2] = Event("a", "requeue", 9.2, 1, "worker killed")
    assert rules(history) == {"V4 attempts"}


def test_an_illegal_journal_is_seen() -> None:
    history = job("a")
    history.events[1:1] = [Event("a", "heartbeat", 9.5, 0)]
    assert rules(history) == {"V9 journal"}
    assert "V9 journal" in rules(changed(job("a"), status="failed"))


def test_a_cancelled_job_that_goes_on_is_seen() -> None:
    told = job("a")
    told.answers.append(Answer("a", "cancel", 11.0, "running", cancel_requested=True))
    assert rules(told) == {"V12 cancel"}
    queued = changed(job("a"), status="canceled")
    queued.answers = [Answer("a", "cancel", 9.5, "canceled", cancel_requested=True)]
    assert "V12 cancel" in rules(queued)


def test_a_start_before_its_time_is_seen() -> None:
    history = job("a")
    history.triggers = [replace(history.triggers[0], not_before=10.5)]
    assert rules(history) == {"early"}


def test_overlapping_runs_of_a_key_are_seen() -> None:
    assert rules(joined(job("a"), job("b", claim_at=11.5))) == {"V5 overlap"}
    assert rules(joined(job("a"), job("b", claim_at=11.5, key="other"))) == set()


def test_a_run_without_an_end_overlaps_by_its_last_sign_of_life() -> None:
    killed = job("a")
    killed.signs = killed.signs[:2]
    assert rules(joined(killed, job("b", claim_at=11.2))) == set()
    assert rules(joined(killed, job("b", claim_at=10.8))) == {"V5 overlap"}


def test_a_stopped_process_is_not_blamed_for_the_moment_in_which_it_is_ended() -> None:
    """But for more than a moment, and after a stop that was too short to lose the lease, it is."""
    stopped = job("a")
    stopped.signs = [replace(sign, at=at) for sign, at in zip(stopped.signs, [10.0, 10.1, 18.2], strict=True)]
    history = joined(stopped, replace(job("b", claim_at=17)))
    assert rules(history) == {"V5 overlap"}
    assert rules(joined(history, History(stops=[Stop("farm-0", "worker", 100, 10.2, 18.0)]))) == set()
    assert rules(joined(history, History(stops=[Stop("farm-0", "worker", 100, 10.2, 11.0)]))) == {"V5 overlap"}
    assert rules(joined(history, History(stops=[Stop("farm-0", "worker", 100, 6.2, 14.0)]))) == {"V5 overlap"}
    assert rules(joined(history, History(stops=[Stop("farm-0", "supervisor", 1, 10.2, 18.0)]))) == {"V5 overlap"}


def test_a_claim_that_runs_twice_or_without_a_start_is_seen() -> None:
    twice = job("a")
    run_again(twice, claim=1, at=13.0)
    assert rules(twice) == {"V2 claim"}
    unknown = job("a")
    run_again(unknown, claim=2, at=13.0)
    assert rules(unknown) == {"V2 claim"}


def test_a_zombies_row_is_seen() -> None:
    """It was committed after the newer run had looked."""
    history = changed(job("a"), claims=2, attempt=2)
    history.events[1:1] = [Event("a", "picked", 9.1, 1), Event("a", "requeue", 9.2, 1, "lease expired")]
    history.events[-2:] = [replace(event, attempt=2) for event in history.events[-2:]]
    history.written = [Written("a", 2)]
    assert rules(history) == set()
    history.written = [Written("a", 1), Written("a", 2, older=1)]  # committed, then its worker died
    assert rules(history) == set()
    history.written = [Written("a", 1), Written("a", 2)]
    assert rules(history) == {"A8 target"}


@pytest.mark.parametrize("written", [[], [Written("a", 1), Written("a", 1)], [Written("a", 2)]])
def test_a_success_that_has_not_written_exactly_once_is_seen(written: list[Written]) -> None:
    assert rules(replace(job("a"), written=written)) == {"A8 target"}


def test_what_is_left_over_and_what_the_api_should_not_say_are_seen() -> None:
    assert rules(History(left=["a process"])) == {"left over"}
    assert rules(History(surprises=["500"])) == {"API"}


def test_the_story_of_a_job_is_told_in_order() -> None:
    story = joined(job("a"), job("b")).story("a")
    assert [line.split()[1] for line in story if line[0].isdigit()] == [
        "event",
        "event",
        "sign",
        "event",
        "sign",
        "API",
    ]
