"""pipelines: the registry, the steps of each form of function; args by a model, its schema, the check of args by it."""

import asyncio
import json
import math
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from time import process_time
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from dataloader import pipelines
from dataloader.pipelines import Context, Pipeline, UnknownTask, register, registry, resolve, steps
from dataloader.queue import args_schema, fields, typed_args


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", {})


def pipeline_of(function: Callable[..., Any]) -> Pipeline:
    registry._registry.pop("t", None)
    register("t")(function)
    return resolve("t")


def plain(args: dict[str, Any], context: Context) -> Any:
    return {"n": context.attempt}


def test_a_waiting_coroutine_offers_safe_points_and_is_cancelled_when_closed() -> None:
    cleaned = []

    async def waits(args: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append(True)

    running = steps(pipeline_of(waits), {}, None)
    assert next(running) is None
    running.close()
    assert cleaned == [True]


def test_an_unknown_task_names_the_known_ones_and_the_one_that_may_be_meant() -> None:
    register("load.customers")(plain)
    with pytest.raises(UnknownTask, match=r"no pipeline 'b' is registered here; known: load.customers"):
        resolve("b")
    with pytest.raises(UnknownTask, match=r"no pipeline .* here \(did you mean 'load.customers'\?\); k"):
        resolve("laod.customers")


def test_a_name_belongs_to_one_function() -> None:
    register("a")(plain)
    register("a")(plain)
    with pytest.raises(ValueError, match="'a' is registered twice"):
        register("a")(lambda args: None)


@pytest.mark.parametrize("function", [lambda: None, lambda a, b, c: None, lambda a, *, b: None])
def test_what_cannot_be_called_as_a_pipeline_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"f\(args\) or f\(args, context\)"):
        register("a")(function)
    with pytest.raises(TypeError, match=r"^pipeline 't \(prepare\)' should be callable as f"):
        register("t", prepare=function)


@pytest.mark.parametrize(
    ("affinity", "kept"),
    [(None, None), ("model", ("model",)), (["model"], ("model",)), (("model", "Раздел 2"), ("model", "Раздел 2"))],
)
def test_what_a_pipeline_says_of_its_jobs(affinity: Any, kept: Any) -> None:
    limits = ("source:oracle", "раздел 2")
    register("ask", max_attempts=3, affinity=affinity, cpus=2, limits=[*limits])(plain)
    register("silent")(plain)
    assert resolve("ask").affinity == kept
    silent = dict.fromkeys(("max_attempts", "affinity", "limits", "memory_mb", "cpus", "args_schema"))
    assert pipelines.declarations() == {
        "ask": silent | {"max_attempts": 3, "affinity": kept, "cpus": 2, "limits": limits},
        "silent": silent,
    }
    assert (registry.LIMITS_MOST, registry.LIMIT_NAME) == (fields.LIMITS_MOST, fields.LIMIT_NAME)


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *(("limits", bad) for bad in ("oracle", 7, {"m"}, [""], ["m", 7], ["m", "m"], ["a\0"], ["m" * 101])),
        ("limits", list("abcdefghi")),
        *(("affinity", bad) for bad in ("", 7, b"m", {"m"}, [], ["m", ""], ["m", 7], "a\0", "\ud800", "api_key")),
        *(("timeout_factor", bad) for bad in ({"*": 0}, {1: 2}, 1.5)),
        *(("prepare", 3), ("prepare_sec", 0), ("timeout_sec", math.inf), ("stall_sec", -1), ("stall_sec", math.nan)),
        *(("on_stall", "kill"), ("batch_size", 0), ("batch_size", 1.0), ("logs", 1), ("cpus", "1"), ("args", dict)),
    ],
)
def test_a_wrong_option_is_refused(option: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"^pipeline 't': {option}: "):
        register("t", **{option: bad})(plain)
    assert pipelines.tasks() == []


def test_a_number_of_another_kind_becomes_a_plain_one() -> None:
    pipeline = register("t", timeout_sec=Decimal(3), timeout_factor={"*": Decimal("1.5")})
    assert pipeline.timeout_of({}, "a") == 4.5


def test_a_stop_iteration_of_a_plain_function_is_called_the_pipelines() -> None:
    def empty(args: dict[str, Any]) -> Any:
        return next(iter(()))

    with pytest.raises(RuntimeError, match=r"^pipeline raised StopIteration$"):
        next(pipelines.steps(pipeline_of(empty), {}, None))


class Source(BaseModel):
    host: str
    port: int = Field(default=5432, ge=1, le=65_535)


class Load(BaseModel):
    model_config = ConfigDict(extra="forbid")
    day: date
    at: datetime | None = None
    limit: int = Field(default=10, ge=1, le=100, description="rows")
    share: float | None = None
    mode: Literal["full", "delta"] = "full"
    password: str = "hunter2hunter2"
    tags: list[str] = []
    source: Source | None = None


SCHEMA = args_schema.written(Load.model_json_schema())


def faults(args: Any, schema: str = SCHEMA) -> list[str]:
    return [str(fault) for fault in args_schema.Allowance().faults(schema, args)]


def test_the_queue_gets_the_schema_without_the_defaults_and_examples_of_secrets() -> None:
    class Login(BaseModel):
        default: str = "hunter1hunter1"

    class Given(BaseModel):
        password: Annotated[str, Field(examples=["hunter2hunter2"])] | None = None
        tokens: list[Annotated[str, Field(examples=["hunter3hunter3"])]] = []

    register("load", args=Load)(lambda args: None)
    register("plain")(lambda args: None)
    declared = {name: said["args_schema"] for name, said in registry.declarations().items()}
    assert declared == {"load": SCHEMA, "plain": None}
    assert list(json.loads(SCHEMA)["properties"])[:3] == ["day", "at", "limit"]  # a form has them in this order
    written = args_schema.written(Given.model_json_schema() | {"$defs": {"secret": Login.model_json_schema()}})
    assert "hunter" not in SCHEMA + written
    assert list(json.loads(written)["$defs"]["secret"]["properties"]) == ["default"]


def test_a_model_without_a_schema_or_with_a_large_one_is_refused() -> None:
    class Odd(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        what: Callable[[], None]

    class Large(BaseModel):
        mode: str = Field(description="x" * 70_000)

    for model, why in ((Odd, "has no JSON Schema"), (Large, "should have at most 65536")):
        with pytest.raises(ValueError, match=why):
            register("load", args=model)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"day": "2026-01-31"}, []),
        ({"day": "2026-01-31", "at": "2026-01-31T06:30:00Z", "share": 0.5, "tags": ["a"]}, []),
        ({"day": "2026-01-31", "at": None, "share": None, "source": {"host": "h"}}, []),
        ({}, ["day is required"]),
        ({"day": "31.01.2026"}, ["day should be a date such as 2026-01-31"]),
        ({"day": "20260131"}, ["day should be a date such as 2026-01-31"]),
        ({"day": "2026-01-31", "at": "soon"}, ["at should be a time such as 2026-01-31T06:30:00+03:00"]),
        ({"day": "2026-01-31", "limit": "5"}, ["limit should be a whole number"]),
        ({"day": "2026-01-31", "limit": 0}, ["limit should be 1 or more"]),
        ({"day": "2026-01-31", "share": "x"}, ["share should be a number or null"]),
        ({"day": "2026-01-31", "mode": "half"}, ["mode should be one of full, delta"]),
        ({"day": "2026-01-31", "tags": ["a", 1]}, ["tags.1 should be a text"]),
        ({"day": "2026-01-31", "source": 1}, ["source should be a JSON object or null"]),
        ({"day": "2026-01-31", "source": {"port": 0}}, ["source.host is required", "source.port should be 1 or more"]),
        ([], ["args should be a JSON object"]),
    ],
)
def test_a_fault_names_the_arg_and_what_would_be_right(args: Any, words: list[str]) -> None:
    assert sorted(faults(args)) == words


def test_each_missing_arg_is_named_once_and_an_unknown_one_with_the_known_and_no_value_is_quoted() -> None:
    schema = '{"type":"object","properties":{"a":{},"b":{}},"required":["a","b"],"additionalProperties":false}'
    assert sorted(faults({"c": 1}, schema)) == ["a is required", "b is required", "c is not known; known are: a, b"]
    many = json.dumps({"anyOf": [{"required": [f"n{n}" for n in range(7_000)]}]})
    assert len(faults({}, many)) == args_schema.FAULTS
    secret = "s3cret-s3cret"
    wrong = {"day": secret, "at": secret, "limit": secret, "share": secret, "mode": secret, "password": [secret]}
    found = faults(wrong | {"tags": secret, "source": {"host": [secret]}})
    assert len(found) == 8
    assert secret not in str(found)


def bomb(depth: int = 60) -> str:
    """Each definition asks twice for the next one."""
    defs: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(depth)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": defs | {f"d{depth}": {"type": "object"}}})


HOSTILE = {
    "doubled references": bomb(),
    "itself": '{"$ref":"#"}',
    "nowhere": '{"$ref":"#/$defs/x"}',
    "a pattern": '{"properties":{"a":{"type":"string","pattern":"^(a+)+$"}}}',
    "a pattern in another language": json.dumps(
        {"properties": {"a": {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "^(a+)+$"}}}
    ),
    "a pattern of names": '{"patternProperties":{"^(a+)+$":{}},"additionalProperties":false}',
    "many choices": json.dumps({"properties": {"c": {"items": {"enum": list(range(8_000))}}}}),
    "unique items": '{"properties":{"b":{"uniqueItems":true}}}',
    "another file": '{"$ref":"file:///etc/passwd"}',
    "another server": '{"$ref":"http://127.0.0.1:9/x"}',
    "another name": '{"properties":{"a":{"$id":"http://127.0.0.1:9/x","$ref":"y"}}}',
    "no schema": '{"properties":{"a":{"type":"strnig"}}}',
    "no bounds": '{"properties":{"a":{"minLength":"x"}}}',
    "no object": "[]",
    "no JSON": "{",
    "deep": '{"not":' * 9_000 + "{}" + "}" * 9_000,
    "large": json.dumps({"description": "x" * 70_000}),
    "many schemas": '{"allOf":[' + ",".join(["{}"] * 21_000) + "]}",
    "many wrong names": json.dumps({"required": [*range(12_000), "a"]}),
    "many refusals of one large value": json.dumps({"properties": {"b": {"anyOf": [{"type": "null"}] * 600}}}),
    "many looks at all items": json.dumps({"properties": {"c": {"allOf": [{"items": {}}] * 600}}}),
    "many looks at all names": json.dumps({"properties": {"d": {"allOf": [{"additionalProperties": True}] * 600}}}),
    "many comparisons of one large value": json.dumps(
        {
            "$defs": {"e": {"const": [[0] * 15_000]}},
            "properties": {"e": {"allOf": [{"$ref": "#/$defs/e"}] * 600}},
        }
    ),
    "large unique items": '{"properties":{"f":{"uniqueItems":true}}}',
    "many references by name": json.dumps(
        {
            "$defs": {"n": {"$anchor": "n"}} | {f"d{n}": {"type": "string"} for n in range(500)},
            "properties": {"a": {"allOf": [{"$ref": "#n"}] * 1_000}},
        }
    ),
    "a list without a rule for its items": '{"properties":{"h":{"items":{}}}}',
    "few large items to compare": '{"properties":{"i":{"uniqueItems":true}}}',
    "a share of a large number": '{"properties":{"g":{"multipleOf":0.5}}}',
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.long
def test_a_hostile_schema_costs_little_and_asks_nobody(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a schema leads out of itself")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    args_schema.Allowance().faults('{"type":"object"}', {})  # the library is imported
    began = process_time()
    args = {"a": "a" * 40 + "!", "b": [[n, {}] for n in range(20_000)], "c": [7_999] * 20_000, "a" * 40 + "!": 1}
    args |= {"d": {str(n): 0 for n in range(20_000)}, "e": [[0] * 15_000], "g": 10**400}
    args |= {"f": [[*range(40), n, {}] for n in range(1_000)]}
    args |= {"h": [0] * 500_000, "i": [{"z": [*range(1_000)], "n": n} for n in range(200)]}
    args_schema.readable(schema)
    read = process_time()
    assert args_schema.Allowance().faults(schema, args) == []
    assert read - began < 5
    assert process_time() - read < 1.5


@pytest.mark.long
def test_a_model_of_many_fields_is_checked() -> None:
    fields = {f"f{n}": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": f"F{n}"} for n in range(700)}
    assert faults({"f1": 1}, json.dumps({"properties": fields})) == ["f1 should be a text or null"]


@pytest.mark.parametrize("name", ["another server", "no schema"])
def test_a_schema_that_cannot_be_checked_is_not_shown(name: str) -> None:
    assert args_schema.readable(HOSTILE[name]) is None


def test_the_jobs_of_a_request_share_an_allowance() -> None:
    none = args_schema.Allowance(0)
    assert none.faults(SCHEMA, {}) == []  # the check was not finished
    allowance = args_schema.Allowance()
    assert [str(fault) for fault in allowance.faults(SCHEMA, {})] == ["day is required"]
    allowance.faults(HOSTILE["doubled references"], {})
    assert allowance.left < args_schema.CHECKS_SEC - args_schema.CHECK_SEC / 2


def test_a_model_is_given_as_json_with_its_secrets() -> None:
    class Deep(BaseModel):
        key: SecretStr

    class Given(BaseModel):
        day: date = Field(alias="Day")
        token: SecretStr
        inner: Deep
        many: list[Deep] = []

    args = {"Day": "2026-01-31", "token": "t0", "inner": {"key": "k0"}, "many": [{"key": "k1"}]}
    assert typed_args.plain(Given.model_validate(args)) == args
    assert typed_args.plain({"a": 1}) == {"a": 1}
