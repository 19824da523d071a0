"""PURE: what a job is and what may become of it. Values of a run are tuples, which cost a third of dataclasses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import PurePath
from typing import Any, NamedTuple
from uuid import UUID

TEXT_LIMIT = 8_192  # characters of an error that are kept: its first and last half
PROGRESS_LIMIT = 65_536  # characters of a progress document
CHECKPOINT_KB = 64
RETRY_SEC = 30.0  # for each attempt, as dl_retry_delay
WAIT_MOST_SEC = 366 * 86_400  # that a pipeline may let its job wait
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class Status(StrEnum):
    """The states of dl_status; the last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    LOST = "lost"


FINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELED, Status.LOST})
ON_FAILURE = ("cancel", "hold", "run")  # the action on a job whose parent has not succeeded
DEAD = frozenset({Status.FAILED, Status.LOST})
# Groups of jobs that lists are filtered by as by a status, and their meaning.
GROUPS = {
    "ready": "queued, and nothing holds it back",
    "scheduled": "its time has not come",
    "blocked": "it waits for its key, for other jobs or for a limit",
    "fresh": "queued and never run",
    "retries": "queued again after a run",
    "dead": "failed or lost",
}
STATUSES = (*map(str, Status), *GROUPS)
# Each job counts as one of these, in every status.
TALLIED = ("ready", "scheduled", "blocked", "running", "succeeded", "failed", "lost", "canceled")
# The journal's kind of the step into a state; a step into `queued` is also a "queued".
KINDS = {status: str(status) for status in Status} | {
    Status.QUEUED: "requeue",
    Status.RUNNING: "picked",
    Status.SUCCEEDED: "done",
}


class Job(NamedTuple):
    """A claimed job as its worker sees it; `args_json` is unparsed, for wrong args are the job's own failure.

    `attempt` and `claimed_by` are the claim's identity, named by every later write; `claim` grows with each start.
    """

    job_id: UUID
    queue: str
    task: str
    args_json: str
    idempotency_key: str | None
    lock_key: str
    partition_key: str
    attempt: int
    max_attempts: int
    lease_ttl_sec: int
    timeout_sec: int | None
    claim: int
    claimed_by: str
    affinity_key: str | None = None


class Checkpoint(NamedTuple):
    """The progress of a job's runs as JSON of its pipeline; None: the next run begins at the start.

    `claim` and `number` name the newest checkpoint in the target. `spares_attempt`: a failed run with a new one is
    free.
    """

    text: str | None = None
    claim: int = 0
    number: int = 0
    spares_attempt: bool = False

    @property
    def mark(self) -> tuple[int, int]:
        """The order of a job's checkpoints: the one with the larger mark is the later one."""
        return self.claim, self.number

    @property
    def value(self) -> Any:
        """The value that the pipeline has saved, or None."""
        return None if self.text is None else json.loads(self.text)


class Delivery:
    """The jobs of one run, in their order: usually one. `first` stands for the run, `place` is its in the claim."""

    __slots__ = ("first", "jobs", "place")  # read ten times in a short run

    def __init__(self, jobs: tuple[Job, ...], place: int = 0) -> None:
        self.jobs = jobs
        self.place = place
        self.first = jobs[0]

    @property
    def lease_ttl_sec(self) -> int:
        """The shortest lease of the jobs."""
        return min([job.lease_ttl_sec for job in self.jobs])

    @property
    def timeout_sec(self) -> int | None:
        """The shortest limit that a job names for the run; None when no job names one."""
        return min([job.timeout_sec for job in self.jobs if job.timeout_sec], default=None)

    def keys(self) -> dict[str, list[Job]]:
        """The jobs by their key."""
        by_key: dict[str, list[Job]] = {}
        for job in self.jobs:
            by_key.setdefault(job.lock_key, []).append(job)
        return by_key


class End(StrEnum):
    """How a run ended."""

    DONE = "done"
    ERROR = "error"
    PERMANENT = "permanent"
    TIMEOUT = "timeout"
    CANCELED = "canceled"
    HANDED_BACK = "handed back"  # a drain, or a key that could not be held: the attempt is not counted
    GONE = "gone"  # the claim is no longer ours, so no write is allowed


class Verb(StrEnum):
    """The next step of a job at the end of its run: the word of dl_finish."""

    SUCCEED = "succeed"
    RETRY = "retry"
    FAIL = "fail"
    CANCEL = "cancel"
    HAND_BACK = "hand_back"
    RESTART = "restart"


LEADS_TO: dict[str, Status] = {  # unless a cancellation was asked for
    Verb.SUCCEED: Status.SUCCEEDED,
    Verb.RETRY: Status.QUEUED,
    Verb.FAIL: Status.FAILED,
    Verb.CANCEL: Status.CANCELED,
    Verb.HAND_BACK: Status.QUEUED,
    Verb.RESTART: Status.QUEUED,
}


class Outcome(NamedTuple):
    """The outcome of a run. `by_key` has the differences for keys of a batch, `raised` is the exception, for hooks.

    `delay_sec` None leaves the pause to dl_retry_delay; `is_free`: the failed run does not count; `error_group` None
    leaves it to the database. `progress` and `result` are JSON; `notes` and `changed` are for the journal.
    """

    end: End
    error: str | None = None
    progress: str | None = None
    worker_is_sound: bool = True
    delay_sec: float | None = None
    by_key: Mapping[str, Outcome] = {}
    raised: BaseException | None = None
    result: str | None = None
    notes: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None
    is_free: bool = False
    error_group: str | None = None
    changed: tuple[str, ...] = ()


class Finish(NamedTuple):
    """The write at the end of a run: a Verb and the parameters of dl_finish; `result` is kept before."""

    verb: str
    error: str | None = None
    delay_sec: float | None = None
    progress: str | None = None
    result: str | None = None
    error_group: str | None = None


def wait_sec(wait: Any, name: str) -> float:
    """A number of seconds or a timedelta as seconds; raises ValueError unless they are from 0 to WAIT_MOST_SEC."""
    seconds = math.nan
    with suppress(Exception):  # the value's own methods may raise any exception
        if not isinstance(wait, str | bytes):
            seconds = float(wait.total_seconds() if isinstance(wait, timedelta) else wait)
    if not 0 <= seconds <= WAIT_MOST_SEC:
        shown = f"{wait!r:.100}" if isinstance(wait, int | float | str | timedelta) else type(wait).__name__
        raise ValueError(f"{name} should be from 0 to {WAIT_MOST_SEC:,} seconds or a timedelta, not {shown}")
    return seconds


def decide(delivery: Delivery, outcome: Outcome) -> list[Finish | None]:
    """The finish of each job by `outcome`; None if no write is allowed any more.

    The jobs of a key go back together, with the fewest `max_attempts`; when spent, the first fails and the others start
    over (Lowkiq's rule).
    """
    if len(delivery.jobs) == 1 and not outcome.by_key:
        return [_decide(delivery.first, outcome)]
    if outcome.end is End.CANCELED:  # dl_finish ends those canceled that somebody has canceled
        outcome = outcome._replace(end=End.HANDED_BACK, error="a job of the run was canceled")
    finishes: list[Finish | None] = []
    for key, jobs in delivery.keys().items():
        of_key = outcome.by_key.get(key, outcome)
        finishes += _decide_key(jobs, of_key if of_key.progress else of_key._replace(progress=outcome.progress))
    return finishes


def _decide_key(jobs: list[Job], outcome: Outcome) -> list[Finish | None]:
    """The finishes of jobs of one key that have run together; the progress is the first one's."""
    weakest = jobs[0]._replace(max_attempts=min([job.max_attempts for job in jobs]))
    first = _decide(weakest, outcome)
    if first is None:
        return [None] * len(jobs)
    verb = Verb.RESTART if first.verb == Verb.FAIL else first.verb
    other = first._replace(verb=verb, progress=None)
    return [first, *[other] * (len(jobs) - 1)]


def _decide(job: Job, outcome: Outcome) -> Finish | None:
    progress = outcome.progress
    error = clip(outcome.error) if outcome.error is not None else None
    match outcome.end:
        case End.DONE:  # the first, for it is most of them
            return Finish(Verb.SUCCEED, None, progress=progress, result=outcome.result)
        case End.GONE:
            return None
        case End.CANCELED:
            return Finish(Verb.CANCEL, error, progress=progress)
        case End.HANDED_BACK:
            return Finish(Verb.HAND_BACK, error, outcome.delay_sec, progress)
        case End.ERROR | End.TIMEOUT if outcome.is_free:
            delay_sec = RETRY_SEC * job.attempt if outcome.delay_sec is None else outcome.delay_sec
            return Finish(Verb.HAND_BACK, error, delay_sec, progress)
        case End.ERROR | End.TIMEOUT if job.attempt < job.max_attempts:
            return Finish(Verb.RETRY, error, outcome.delay_sec, progress, error_group=outcome.error_group)
        case End.ERROR | End.TIMEOUT | End.PERMANENT:
            return Finish(Verb.FAIL, error, progress=progress, error_group=outcome.error_group)


def beat_interval(heartbeat_sec: float, lease_ttl_sec: float) -> float:
    """Seconds between heartbeats: DL_HEARTBEAT_SEC, but never more than a third of the lease."""
    return min(heartbeat_sec, lease_ttl_sec / 3)


def clip(text: str) -> str:
    """`text` as PostgreSQL can store it, shortened in the middle to TEXT_LIMIT characters."""
    if len(text) > TEXT_LIMIT:
        half = TEXT_LIMIT // 2 - 16
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return storable(text)


class NotJson(ValueError):
    """A value has no form in JSON; `place` leads to it, such as `.rows[3].total`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.place = ""

    def at(self, place: str) -> NotJson:
        """This error with the place inside the containing value."""
        self.place = place + self.place
        return self

    def __str__(self) -> str:
        place = self.place if len(self.place) <= _PLACE_MOST else f"{self.place[:_PLACE_MOST]}…"
        return f"{place.lstrip('.')} {self.args[0]}"


def plain(value: Any, name: str) -> Any:
    """`value` in JSON's own types, with known others converted and NUL replaced; else raises NotJson with its place."""
    return _item(name, value, _refuse)


def to_json(document: Mapping[str, Any], hide: Callable[[Any], Any] = lambda plain: plain) -> str | None:
    """The document as JSON that jsonb accepts, with null for odd numbers and text for all else.

    `hide` gets the document in JSON's own types, and returns it without secrets. The result is None where the document
    has no such form, and for more than PROGRESS_LIMIT characters.
    """
    try:
        text = _encode(hide(_plain(dict(document), _shown)))
    except (Exception, SystemExit):  # whatever a value's own methods raise, or the pipeline changes meanwhile
        return None
    return text if len(text) <= PROGRESS_LIMIT else None


def result_json(value: Any, most_kb: int) -> str:
    """A pipeline's result as JSON for jsonb, with null for NaN and infinities, as in SQL and spreadsheets.

    Raises ValueError, for people, for what JSON lacks and above `most_kb`.
    """
    try:
        text = _encode(_item("result", value, lambda odd, why: None if isinstance(odd, float) else _refuse(odd, why)))
    except (NotJson, RecursionError) as e:
        raise ValueError(_NO_RESULT.format(e)) from None
    if (size := len(text.encode())) > most_kb * 1_024:
        raise ValueError(
            f"the pipeline returned {size:,} bytes of JSON, and DL_RESULT_KB={most_kb} allows {most_kb * 1_024:,}:"
            " write large results to the target or to a file, and return their place"
        )
    return text


def checkpoint_json(value: Any) -> str:
    """A checkpoint as JSON that comes back as it was given; raises ValueError else, and above CHECKPOINT_KB."""
    try:
        document = plain(value, "checkpoint")
        if not isinstance(value, dict) or not _are_same(document, value):
            raise NotJson("would not come back as it is").at(".checkpoint")
        text = _encode(document)
    except (NotJson, RecursionError) as e:
        raise ValueError(_NO_CHECKPOINT.format(e)) from None
    if (size := len(text.encode())) > CHECKPOINT_KB * 1_024:
        raise ValueError(
            f"the checkpoint has {size:,} bytes of JSON, and {CHECKPOINT_KB * 1_024:,} are the most: save a position,"
            " and write what it stands for to the target or to a file"
        )
    return text


def _plain(value: Any, instead: Callable[[Any, str], Any]) -> Any:
    match value:
        case Enum():
            return _plain(value.value, instead)
        case None | bool():
            return value
        case int():
            return int(value) if abs(value) < _LARGEST else instead(value, "has more than 4,300 digits")
        case float():
            return float(value) if math.isfinite(value) else instead(value, f"is {float(value)}")
        case str():
            return storable(value)
        case Mapping():
            return {
                storable(str(name.value if isinstance(name, Enum) else name)): _item(name, item, instead)
                for name, item in value.items()
            }
        case list() | tuple():
            return [_item(place, item, instead) for place, item in enumerate(value)]
        case Set():
            items = [_plain(item, instead) for item in value]
            try:
                return sorted(items)
            except TypeError:  # they are of several types
                return items
        case date() | time() | timedelta() | Decimal() | UUID() | PurePath():
            return storable(str(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _item(each.name, getattr(value, each.name), instead) for each in fields(value)}
    # Types of pydantic and numpy are recognized by their methods: the pipeline may not have imported them.
    kind = type(value)
    if hasattr(kind, "model_dump"):
        return _plain(value.model_dump(mode="json", by_alias=True), instead)
    of_numpy = getattr(getattr(value, "dtype", None), "kind", "")
    if hasattr(kind, "tolist") and of_numpy != "m":  # a span of time would lose its unit
        converted = (value.astype(str) if of_numpy == "M" else value).tolist()
        if type(converted) is not kind:
            return _plain(converted, instead)
    return instead(value, f"is of the type {kind.__module__}.{kind.__qualname__}")


def _item(place: Any, item: Any, instead: Callable[[Any, str], Any]) -> Any:
    if type(item) in _AS_IT_IS:
        return item
    try:
        return _plain(item, instead)
    except NotJson as e:
        raise e.at(_place(place)) from None
    except RecursionError:
        raise NotJson("is nested too deep, or holds itself").at(_place(place)) from None
    except (Exception, SystemExit) as e:  # whatever a value's own methods raise, or the pipeline changes meanwhile
        raise NotJson(f"cannot be read ({type(e).__name__})").at(_place(place)) from None


def _place(place: Any) -> str:
    return f".{place}" if isinstance(place, str) and place.isidentifier() else f"[{place!r}]"


def _refuse(value: Any, why: str) -> Any:
    raise NotJson(why)


def _shown(value: Any, why: str) -> Any:
    return None if isinstance(value, int | float) else storable(str(value))


def _are_same(document: Any, value: Any) -> bool:
    """Whether a value has the lists, dicts and other values of its JSON; an array of numpy is no list."""
    if isinstance(document, dict) and isinstance(value, dict):
        return document.keys() == value.keys() and all(_are_same(document[name], value[name]) for name in document)
    if isinstance(document, list) and isinstance(value, list):
        return all(map(_are_same, document, value))
    return not isinstance(document, dict | list) and bool(document == value)


_NO_RESULT = (
    "what the pipeline returned is not JSON: {}; return dicts, lists, texts, numbers, booleans and None (sets,"
    " dataclasses, Enums, numpy's numbers, times, decimals, UUIDs and paths have a form too)"
)
_NO_CHECKPOINT = (
    "a checkpoint should be a dict of JSON: with texts as keys, and with dicts, lists, texts without NUL, finite"
    " numbers, booleans and None as values; {}"
)
_PLACE_MOST = 100
_AS_IT_IS = frozenset({bool, type(None)})
_LARGEST = 10**4_300  # json writes no longer int
# Made once: to make an encoder costs as much as to use it.
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def storable(text: str) -> str:
    """Without what PostgreSQL refuses in text: NUL and lone surrogates become U+FFFD."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNSTORABLE.sub("\ufffd", text)
