"""A check of the promises: from a history to its violations. Pure: no database, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from judge import illegal

from .history import FINAL, Event, History, Row, Sign, Stop, by_job

# From the moment a stopped process goes on to the end of its run, at its next safe point or by the supervisor. No queue
# can prevent the run's work in this time; the table `written` shows that the run could not commit.
ZOMBIE_SEC = 1.5
GIVEN_BACK = (
    "drain",
    "not started",
    "the session was lost",
    "the lease ran out",
    "the claim",
    "heartbeat failed",
)  # reasons for which a run is no attempt
WITHOUT_HELP = {"chaos.holds_the_gil"}  # only the supervisor fences these


@dataclass(frozen=True)
class Violation:
    """A broken promise: the rule, the words, and the jobs concerned."""

    rule: str
    text: str
    job_ids: tuple[str, ...] = ()


def check(history: History) -> list[Violation]:
    """All violations, in the order of the rules."""
    return [violation for rule in RULES for violation in rule(history)]


def lost(history: History) -> Iterator[Violation]:
    """V1: every acknowledged job exists and has come to an end that its kind allows."""
    rows = {row.job_id: row for row in history.rows}
    canceled = {answer.job_id for answer in history.answers if answer.asked == "cancel"}
    for trigger in history.triggers:
        if trigger.job_id is None:
            continue
        row = rows.get(trigger.job_id)
        allowed = trigger.may_end | ({"canceled"} if trigger.job_id in canceled else set())
        if row is None:
            yield Violation("V1 lost", f"{trigger} was acknowledged and has no row", (trigger.job_id,))
        elif row.status not in FINAL:
            yield Violation("V1 lost", f"the job is {row.status} in the end", (row.job_id,))
        elif row.status not in allowed:
            yield Violation("V1 end", f"a job {trigger.kind!r} ended {row.status}, not {allowed}", (row.job_id,))
    for answer in history.answers:
        if answer.status is None:
            yield Violation("V1 lost", "an acknowledged job was answered 404", (answer.job_id,))


def one_key_one_job(history: History) -> Iterator[Violation]:
    """V10: an idempotency key has one job, always the same, and no job came from nowhere."""
    answered = defaultdict(set)
    for trigger in history.triggers:
        answered[trigger.key] |= {trigger.job_id} - {None}
    stored = defaultdict(set)
    for row in history.rows:
        stored[row.key].add(row.job_id)
    for key, ids in stored.items():
        if key not in answered:
            yield Violation("V10 key", f"nobody has triggered {key}", tuple(ids))
    for key, ids in answered.items():
        both = ids | stored[key]
        if len(both) > 1:
            yield Violation("V10 key", f"{key} has {len(both)} jobs", tuple(sorted(both)))


def finished_twice(history: History) -> Iterator[Violation]:
    """V3: a job has at most one end, no event after it, and a status that was final in the API stays."""
    rows = {row.job_id: row for row in history.rows}
    for job_id, events in by_job(history.events).items():
        ends = [event.kind for event in events if event.kind in FINAL.values()]
        if len(ends) > 1:
            yield Violation("V3 twice", f"finished {len(ends)} times: {ends}", (job_id,))
        elif ends and events[-1].kind != ends[0]:
            yield Violation("V3 twice", f"{events[-1].kind} after {ends[0]}", (job_id,))
    for answer in history.answers:
        row = rows.get(answer.job_id)
        if row and answer.status in FINAL and row.status != answer.status:
            yield Violation("V3 twice", f"was {answer.status} by the API, is {row.status}", (row.job_id,))


def attempts(history: History) -> Iterator[Violation]:
    """V4, V6: a start adds one attempt, a hand-back removes one, and no attempt is above max_attempts."""
    events = by_job(history.events)
    for row in history.rows:
        for text in _miscounted(row, events[row.job_id]):
            yield Violation("V4 attempts", text, (row.job_id,))


def _miscounted(row: Row, events: list[Event]) -> Iterator[str]:
    attempt = 0
    for event in events:
        if event.kind == "picked":
            attempt += 1
            if attempt > row.max_attempts:
                yield f"attempt {attempt} was started, of {row.max_attempts}"
        elif event.kind in ("requeue", "canceled") and (event.reason or "").startswith(GIVEN_BACK):
            attempt -= 1
        if event.attempt is not None and event.attempt != attempt:
            yield f"{event.kind} as attempt {event.attempt}, expected {attempt}"
    if row.attempt != attempt:
        yield f"the row has attempt {row.attempt}, the journal {attempt}"
    starts = sum(event.kind == "picked" for event in events)
    if row.claims != starts:
        yield f"the row has {row.claims} claims, the journal {starts} starts"


def journal(history: History) -> Iterator[Violation]:
    """V9: each journal is a legal story with the row's end."""
    events = by_job(history.events)
    for row in history.rows:
        kinds = [event.kind for event in events[row.job_id]]
        # A cancellation that is forced later leaves two events.
        told = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if (kind, before) != (_ASKED, _ASKED)]
        if why := illegal(told, row.status):
            yield Violation("V9 journal", why, (row.job_id,))


_ASKED = "cancel_requested"


def cancellations(history: History) -> Iterator[Violation]:
    """V12: a job whose cancellation was acknowledged ends canceled, and never starts when it was queued."""
    rows = {row.job_id: row for row in history.rows}
    starts = by_job(event for event in history.events if event.kind == "picked")
    signs = by_job(history.signs)
    for answer in history.answers:
        if answer.asked != "cancel" or not answer.cancel_requested:
            continue
        row = rows.get(answer.job_id)
        if row and row.status != "canceled":
            yield Violation("V12 cancel", f"the cancellation was acknowledged, the job {row.status}", (row.job_id,))
        if answer.status != "canceled":
            continue
        if any(start.at > answer.at for start in starts[answer.job_id]):
            yield Violation("V12 cancel", "started after it was canceled", (answer.job_id,))
        never_ran = not starts[answer.job_id]
        if never_ran and signs[answer.job_id]:
            yield Violation("V12 cancel", "ran though it was canceled while queued", (answer.job_id,))


def too_early(history: History) -> Iterator[Violation]:
    """A delayed job does not start before its time."""
    starts = by_job(event for event in history.events if event.kind == "picked")
    for trigger in history.triggers:
        for start in starts[trigger.job_id or ""][:1]:
            if start.at < trigger.not_before:
                early = trigger.not_before - start.at
                yield Violation("early", f"started {early:.3f} s before its time", (start.job_id,))


def overlaps(history: History) -> Iterator[Violation]:
    """V5: of two runs of one key, one leaves its last sign of life before the other leaves its first."""
    rows = {row.job_id: row for row in history.rows}
    by_key = defaultdict(list)
    for sign in history.signs:
        if not _is_a_zombies(sign, rows.get(sign.job_id), history.stops):
            by_key[sign.lock_key].append(sign)
    for key, signs in by_key.items():
        signs.sort(key=lambda sign: sign.at)
        last: dict[tuple[str, int, int], Sign] = {}
        for before, sign in zip([None, *signs], signs, strict=False):
            run = (sign.job_id, sign.claim, sign.pid)
            if before and run in last and (before.job_id, before.claim, before.pid) != run:
                late = sign.at - before.at
                text = f"{key}: a run shows life {late:.3f} s after another began: {before} then {sign}"
                yield Violation("V5 overlap", text, tuple(dict.fromkeys((before.job_id, sign.job_id))))
                break
            last[run] = sign


def _is_a_zombies(sign: Sign, row: Row | None, stops: list[Stop]) -> bool:
    """True for a sign between the end of a stop longer than the lease and the end of its run."""
    lease = row.lease_ttl_sec if row else 0
    helpless = row is not None and row.task in WITHOUT_HELP
    return any(
        stop.until - stop.since > lease / 2 and stop.since < sign.at < stop.until + ZOMBIE_SEC
        for stop in stops
        if stop.pid == sign.pid or (helpless and stop.farm == sign.farm and stop.role == "supervisor")
    )


def claims(history: History) -> Iterator[Violation]:
    """V2: a claim is one run in one process, and every run has its start in the journal."""
    starts = Counter(event.job_id for event in history.events if event.kind == "picked")
    pids = defaultdict(set)
    for sign in history.signs:
        pids[sign.job_id, sign.claim].add(sign.pid)
    for (job_id, claim), found in pids.items():
        if len(found) > 1:
            yield Violation("V2 claim", f"claim {claim} ran in the processes {sorted(found)}", (job_id,))
        if claim > starts[job_id]:
            yield Violation("V2 claim", f"claim {claim} ran, the journal has {starts[job_id]} starts", (job_id,))


def zombies(history: History) -> Iterator[Violation]:
    """A8: no older run commits in the target after a newer run has begun, and a success has written all its rows."""
    written = by_job(history.written)
    expected = {trigger.job_id: trigger.writes for trigger in history.triggers}
    for job_id, rows in written.items():
        for row in rows:
            older = sum(other.claim < row.claim for other in rows)
            if row.older != older:
                yield Violation("A8 target", f"{row}, but older ones have {older} rows in the end", (job_id,))
                break
    for row in history.rows:
        last = sum(found.claim == row.claims for found in written[row.job_id])
        if row.status == "succeeded" and last != expected.get(row.job_id, last):
            wanted = expected[row.job_id]
            yield Violation("A8 target", f"claim {row.claims} succeeded with {last} of {wanted} rows", (row.job_id,))
        if any(found.claim > row.claims for found in written[row.job_id]):
            yield Violation("A8 target", f"rows of claims that never were: {written[row.job_id]}", (row.job_id,))


def leftovers(history: History) -> Iterator[Violation]:
    """No process and no lock is left at the end, and the API gave only documented answers."""
    for text in history.left:
        yield Violation("left over", text)
    for text in history.surprises:
        yield Violation("API", text)


RULES: list[Callable[[History], Iterator[Violation]]] = [
    lost,
    one_key_one_job,
    finished_twice,
    attempts,
    journal,
    cancellations,
    too_early,
    overlaps,
    claims,
    zombies,
    leftovers,
]
