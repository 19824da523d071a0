"""job: the pure decisions, as tables and properties."""

import json
import math
import re
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from claimed import job
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr

from dataloader.farm.slots import fence_margin
from dataloader.queue.job import (
    PROGRESS_LIMIT,
    TEXT_LIMIT,
    Delivery,
    End,
    Finish,
    Job,
    Outcome,
    Status,
    beat_interval,
    checkpoint_json,
    clip,
    decide,
    plain,
    result_json,
    to_json,
)


@pytest.mark.parametrize(
    ("attempt", "outcome", "finish"),
    [
        (1, Outcome(End.DONE), Finish("succeed")),
        (1, Outcome(End.DONE, progress='{"n": 1}'), Finish("succeed", progress='{"n": 1}')),
        (1, Outcome(End.ERROR, "e"), Finish("retry", "e")),
        (2, Outcome(End.ERROR, "e"), Finish("retry", "e")),
        (3, Outcome(End.ERROR, "e"), Finish("fail", "e")),
        (4, Outcome(End.ERROR, "e"), Finish("fail", "e")),
        (1, Outcome(End.PERMANENT, "e"), Finish("fail", "e")),
        (1, Outcome(End.CANCELED), Finish("cancel")),
        (3, Outcome(End.HANDED_BACK, "drain"), Finish("hand_back", "drain")),
        (1, Outcome(End.GONE, "taken"), None),
    ],
)
def test_every_end_has_its_finish(attempt: int, outcome: Outcome, finish: Finish | None) -> None:
    assert decide(Delivery((job(attempt=attempt, max_attempts=3),)), outcome) == [finish]


def of_key(key: str, *attempts: tuple[int, int]) -> tuple[Job, ...]:
    """The jobs of a key in a delivery, by attempt and max_attempts."""
    return tuple(job(key, attempt=attempt, max_attempts=most) for attempt, most in attempts)


@pytest.mark.parametrize(
    ("jobs", "outcome", "verbs"),
    [
        (of_key("k", (1, 3), (1, 3)), Outcome(End.DONE, progress='{"n": 1}'), "succeed succeed"),
        (of_key("k", (1, 3), (1, 3)), Outcome(End.ERROR, "e"), "retry retry"),
        (of_key("k", (3, 3), (3, 3), (3, 3)), Outcome(End.ERROR, "e"), "fail restart restart"),
        (of_key("k", (1, 3), (1, 1)), Outcome(End.TIMEOUT, "e"), "fail restart"),  # the fewest attempts count
        (of_key("k", (1, 3), (1, 3)), Outcome(End.PERMANENT, "e"), "fail restart"),
        (of_key("k", (1, 3), (1, 3)), Outcome(End.CANCELED), "hand_back hand_back"),
        (of_key("k", (1, 3)) + of_key("l", (1, 3)), Outcome(End.CANCELED), "hand_back hand_back"),
        (of_key("k", (1, 3), (1, 3)), Outcome(End.HANDED_BACK, "drain"), "hand_back hand_back"),
        (of_key("k", (1, 3), (1, 3)), Outcome(End.GONE, "taken"), "None None"),
        (of_key("k", (3, 3)) + of_key("l", (1, 3)), Outcome(End.ERROR, "e"), "fail retry"),  # each by its own attempts
        (
            of_key("k", (1, 3)) + of_key("l", (1, 3), (1, 3)) + of_key("m", (1, 3)),
            Outcome(End.DONE, by_key={"l": Outcome(End.ERROR, "e", delay_sec=7.0), "m": Outcome(End.HANDED_BACK)}),
            "succeed retry retry hand_back",
        ),
        (
            of_key("k", (1, 3)) + of_key("l", (1, 3)),
            Outcome(End.ERROR, "e", by_key={"l": Outcome(End.DONE)}),
            "retry succeed",
        ),
    ],
)
def test_every_end_of_a_delivery_has_its_finishes(jobs: tuple[Job, ...], outcome: Outcome, verbs: str) -> None:
    finishes = decide(Delivery(jobs), outcome)
    assert [str(finish and finish.verb) for finish in finishes] == verbs.split()
    assert all(finish is None or finish.progress is None for finish in finishes[1:])
    delays = [finish.delay_sec for finish in finishes if finish and finish.verb == "retry"]
    assert set(delays) <= {None, 7.0}


def test_a_delivery_has_the_shortest_of_its_jobs_limits_and_a_success_alone_has_results() -> None:
    jobs = tuple(job(lease_ttl_sec=lease, timeout_sec=timeout) for lease, timeout in ((60, None), (20, 9), (30, 5)))
    assert (Delivery(jobs).lease_ttl_sec, Delivery(jobs).timeout_sec) == (20, 5)
    assert Delivery(jobs[:1]).timeout_sec is None
    delivery = Delivery(of_key("k", (1, 3), (1, 3)))
    for end in End:
        found = [finish and finish.result for finish in decide(delivery, Outcome(end, result="1"))]
        assert found == (["1", "1"] if end is End.DONE else [None, None]), end


@given(st.floats(min_value=0.1, max_value=1e4), st.integers(min_value=1, max_value=86_400))
def test_a_lease_is_renewed_well_before_it_must_be_given_up(heartbeat: float, ttl: int) -> None:
    interval = beat_interval(heartbeat, ttl)
    assert interval <= heartbeat
    assert 2 * interval <= ttl - fence_margin(ttl)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), anything))
@pytest.mark.long
def test_g2_progress_of_any_kind_becomes_json_that_jsonb_accepts(value: dict[str, Any]) -> None:
    accepted_by_jsonb(to_json(value))


def accepted_by_jsonb(text: str) -> None:
    text.encode("utf-8")
    assert "\\u0000" not in text.replace("\\\\", "")
    json.loads(text, parse_constant=lambda name: pytest.fail(name))


def test_g2_progress_that_cannot_be_json_is_none_and_odd_numbers_are_null() -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    assert to_json(cycle) is None
    assert to_json({"x": "y" * (PROGRESS_LIMIT + 1)}) is None
    for odd in (math.nan, Double(math.inf), OfNumpy(-math.inf)):
        assert to_json({"x": odd}) == result_json({"x": odd}, 256) == '{"x": null}'


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.recursive(st.none() | st.booleans() | st.integers() | finite | st.text(), st.lists, max_leaves=9))
def test_a_result_of_any_json_is_json_that_jsonb_accepts(value: Any) -> None:
    accepted_by_jsonb(result_json(value, 1_000))


class Colour(Enum):
    RED = "red"
    BOTH = ("red", 2)


class Size(IntEnum):
    LARGE = 3


@dataclass
class Row:
    total: Any
    seen: Any = None


class Model(BaseModel):
    number: int = Field(alias="n")
    row: Row


class OfNumpy:
    """A number or an array of numpy, as far as it is asked."""

    def __init__(self, value: Any, kind: str = "i") -> None:
        self.value = value
        self.dtype = SimpleNamespace(kind=kind)

    def astype(self, kind: type) -> "OfNumpy":
        return OfNumpy(kind(self.value), "U")

    def tolist(self) -> Any:
        return self.value

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other)

    def __hash__(self) -> int:
        return hash(self.value)


class Double(float):
    """As numpy's float64."""

    def __repr__(self) -> str:
        return f"np.float64({float(self)})"


OBVIOUS = [
    (OfNumpy(5), 5),
    (OfNumpy(True), True),
    (OfNumpy(0.5), 0.5),
    (OfNumpy([1, [2.5]]), [1, [2.5]]),
    (OfNumpy(date(2026, 1, 31), "M"), "2026-01-31"),
    (Double(2.5), 2.5),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", "a"}), ["a", "b"]),
    ({1: 2}.keys(), [1]),
    ((1, (2,)), [1, [2]]),
    (Colour.RED, "red"),
    (Colour.BOTH, ["red", 2]),
    (Size.LARGE, 3),
    (Status.QUEUED, "queued"),
    (Row(OfNumpy(7), {Colour.RED}), {"total": 7, "seen": ["red"]}),
    (Model(n=1, row=Row(2)), {"n": 1, "row": {"total": 2, "seen": None}}),
    (MappingProxyType({OfNumpy: 1, Colour.RED: 2}), {"<class 'test_job.OfNumpy'>": 1, "red": 2}),
    (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    (Decimal("1.50"), "1.50"),
    (date(2026, 1, 31), "2026-01-31"),
    (Path("/a"), "/a"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "found"), OBVIOUS)
def test_what_has_an_obvious_form_in_json_gets_it_everywhere(value: Any, found: Any) -> None:
    around = {"rows": [{"total": value}, value]}
    expected = {"rows": [{"total": found}, found]}
    assert json.loads(result_json(around, 9)) == json.loads(to_json(around) or "") == plain(around, "args") == expected
    assert json.loads(result_json(value, 9)) == found


class Odd:
    pass


class Rude:
    def __str__(self) -> str:
        raise SystemError("canary-91")


NESTED: list[Any] = []
NESTED.append(NESTED)
NO_JSON = [
    (Odd(), "is of the type test_job.Odd"),
    (b"x", "is of the type builtins.bytes"),
    (1j, "is of the type builtins.complex"),
    (Row, "is of the type builtins.type"),
    (OfNumpy(5, "m"), "is of the type test_job.OfNumpy"),
    (SecretStr("canary-91"), "is of the type pydantic.types.SecretStr"),
    (math.nan, "is nan"),
    (Double(math.inf), "is inf"),
    (OfNumpy(-math.inf), "is -inf"),
    pytest.param(10**5_000, "has more than 4,300 digits", id="long"),
    ({Rude(): 1}, "cannot be read (SystemError)"),
]


@pytest.mark.parametrize(("value", "why"), NO_JSON)
@pytest.mark.parametrize(
    ("around", "place"),
    [
        (lambda value: value, ""),
        (lambda value: {"rows": [{}, {"total": value}]}, ".rows[1].total"),
        (lambda value: {"odd key": (0, Row(value))}, "['odd key'][1].total"),
    ],
)
def test_an_error_names_the_place_of_what_is_not_json(value: Any, why: str, around: Any, place: str) -> None:
    for name, made in (
        ("result", lambda: result_json(around(value), 256)),
        ("args", lambda: plain(around(value), "args")),
        ("checkpoint", lambda: checkpoint_json({"a": around(value)})),
    ):
        if name == "result" and why in ("is nan", "is inf", "is -inf"):
            continue  # null
        with pytest.raises(
            ValueError, match=re.escape(f"{name}{'.a' * (name == 'checkpoint')}{place} {why}")
        ) as raised:
            made()
        assert "canary-91" not in str(raised.value)
    assert (to_json({"a": 1, "b": around(value)}) is None) == ("cannot be read" in why)  # progress fails no job


def test_what_is_nested_too_deep_is_no_json() -> None:
    with pytest.raises(
        ValueError, match=r"^what the pipeline returned is not JSON: result\[0\].* is nested too deep, or"
    ):
        result_json(NESTED, 256)
    with pytest.raises(ValueError, match="is nested too deep, or holds itself"):
        checkpoint_json({"a": NESTED})


@pytest.mark.parametrize(
    "value",
    [
        *({"a": odd} for odd in ([0, {"b": (1, 2)}], {1}, {1: 2}, Colour.RED, "\0", date(2026, 1, 31), OfNumpy([1]))),
        *({1: 2}, [1], "x"),
    ],
)
def test_a_checkpoint_that_would_not_come_back_as_it_is_is_refused(value: Any) -> None:
    assert checkpoint_json({"id": OfNumpy(5), "at": [Double(0.5)]}) == '{"id": 5, "at": [0.5]}'
    with pytest.raises(ValueError, match="checkpoint would not come back as it is"):
        checkpoint_json(value)


def test_a_result_has_so_many_bytes_of_json_and_no_more() -> None:
    most = "ü" * 511
    assert len(result_json(most, 1).encode()) == 1_024
    with pytest.raises(ValueError, match=r"returned 1,025 bytes of JSON, and DL_RESULT_KB=1 allows 1,024: write large"):
        result_json(most + "x", 1)


@given(st.text(max_size=3 * TEXT_LIMIT))
def test_g5_errors_are_bounded_and_storable(text: str) -> None:
    short = clip(text)
    assert len(short) <= TEXT_LIMIT + 64
    short.encode("utf-8")
    assert "\x00" not in short
