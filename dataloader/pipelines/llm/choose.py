"""PURE: the arguments of a job, which node is asked for which model, when a node is busy, what is no answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Kind = Literal["ollama", "mlx"]  # the protocol of a node: Ollama's own, or OpenAI's as servers of MLX models speak it
Category = Literal["reasoning", "coding", "fast", "default"]

HEAVY_FROM = 32  # billions of parameters
HEAVY_FACTOR = 1.5
_BILLIONS = re.compile(r"(?<![\d.])(\d{1,4}(?:\.\d{1,3})?)b(?![a-z0-9])", re.IGNORECASE)
# A name as nodes give them: qwen2.5-coder:32b, mlx-community/Qwen2.5-7B-Instruct-4bit. No part begins with a dot.
_MODEL = re.compile(r"[a-z0-9][\w.:-]*(/[a-z0-9_][\w.:-]*){0,3}", re.ASCII | re.IGNORECASE)
_NO_SPEAKER = re.compile("embed|rerank|(^|/)bge-", re.IGNORECASE)  # models that turn text into numbers
# What a node may say about its load; the first name that it uses counts.
_FIGURES = {
    "queue": ("queue_percent", "queue"),
    "RAM": ("ram_percent", "memory_percent", "ram"),
    "CPU": ("cpu_percent", "cpu"),
}


class PassedOver(Exception):
    """A node is not asked, or its answer is not taken. The text is the reason, without a secret."""


class Passed(NamedTuple):
    """A node that was passed over, by its name, and why."""

    node: str
    reason: str


class Options(BaseModel):
    """How a model samples; a node gets those that the job names, under the names of its protocol."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    temperature: float | None = Field(default=None, ge=0, le=5)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=100_000)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] | None = Field(default=None, max_length=16)
    repeat_penalty: float | None = Field(default=None, ge=0, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    num_ctx: int | None = Field(default=None, ge=1, le=2**24)

    @model_validator(mode="before")
    @classmethod
    def _are_known(cls, given: Any) -> Any:
        # The complaint about an unknown argument would list the job's arguments, not the options.
        if isinstance(given, dict) and (unknown := sorted(map(str, set(given) - set(cls.model_fields)))):
            raise ValueError(f"there is no option {unknown[0][:63]!r}; there are {', '.join(cls.model_fields)}")
        return given


class Arguments(BaseModel):
    """The `args` of `llm.generate`; docs/llm.md explains each."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    prompt: str = Field(max_length=1_000_000)
    system: str | None = Field(default=None, max_length=1_000_000)
    model: str | None = Field(default=None, max_length=200)
    category: Category | None = None
    options: Options = Options()
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)

    @field_validator("prompt")
    @classmethod
    def _says_something(cls, prompt: str) -> str:
        if not prompt.strip():
            raise ValueError("should not be blank")
        return prompt

    @field_validator("model")
    @classmethod
    def _is_a_name(cls, model: str | None) -> str | None:
        if model is not None and not _MODEL.fullmatch(model):
            raise ValueError("should be a model's name such as qwen2.5-coder:32b or mlx-community/Qwen2.5-7B-4bit")
        return model

    @field_validator("category")
    @classmethod
    def _is_alone(cls, category: Category | None, info: ValidationInfo) -> Category | None:
        if category is not None and info.data.get("model") is not None:
            raise ValueError("should not stand beside model: name one of them")
        return category


@dataclass(frozen=True, slots=True)
class Node:
    """A server of models, with what its last scan has found there."""

    kind: Kind
    url: str = field(repr=False)  # may hold a password: only requests get it
    models: tuple[str, ...] = ()
    loaded: frozenset[str] = frozenset()  # the models that are in its memory, as far as it says so
    status_path: str | None = None  # where it says how busy it is; None: it does not

    @property
    def name(self) -> str:
        """The URL without user and password, for people."""
        return shown(self.url)


def shown(url: str) -> str:
    """The URL without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def patterns(wanted: Arguments, categories: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The patterns of names that the job asks for, the best first; Ollama's tag `latest` may be left out."""
    if wanted.model is not None:
        return (wanted.model, f"{wanted.model}:latest")
    return categories[wanted.category or "default"]


def candidates(nodes: Iterable[Node], names: Sequence[str]) -> list[tuple[Node, str]]:
    """Each node that has a model of such a name, with its best one, in the order in which they are asked.

    An earlier pattern outweighs a model that is in memory already, and this outweighs the order of the nodes.
    """
    chosen = []
    for node in nodes:
        ranked = [
            ((rank, model not in node.loaded), model)
            for rank, pattern in enumerate(names)
            for model in node.models
            if _is_meant(model, pattern)
        ]
        if ranked:
            rank, model = min(ranked, key=lambda each: each[0])
            chosen.append((rank, node, model))
    return [(node, model) for _, node, model in sorted(chosen, key=lambda each: each[0])]


def _is_meant(model: str, pattern: str) -> bool:
    if "*" in pattern and _NO_SPEAKER.search(model):
        return False
    return fnmatchcase(model.casefold(), pattern.casefold())


def busy(status: Any, most_percent: float) -> str | None:
    """Why a node with this status is too busy to be asked; None where it is not, or does not say."""
    numbers = _numbers(status)
    for resource, names in _FIGURES.items():
        value = next((numbers[name] for name in names if name in numbers), 0)
        if value > most_percent:
            return f"its {resource} is at {value:.0f} %, above {most_percent:g} %"
    active, most = numbers.get("active_requests"), numbers.get("max_concurrency")
    if active is not None and most is not None and active >= most:
        return f"it has {active:g} of {most:g} requests in flight"
    return None


def tells_load(status: Any) -> bool:
    """True for a document in which `busy` finds something to judge by."""
    names = set(_numbers(status))
    return not names.isdisjoint(chain(*_FIGURES.values())) or {"active_requests", "max_concurrency"} <= names


def _numbers(status: Any) -> dict[str, float]:
    items = status.items() if isinstance(status, dict) else ()
    return {name: value for name, value in items if isinstance(value, int | float) and not isinstance(value, bool)}


def is_echo(answer: str, prompt: str, system: str | None = None) -> bool:
    """True for an answer that says the prompt, also several times or after the system text, and nothing else."""
    said, asked, instructed = _words(answer), _words(prompt), _words(system or "")
    if not asked or asked not in said:
        return False
    rest = said.replace(asked, " ")
    return not _words(rest.replace(instructed, " ") if instructed else rest)


def _words(text: str) -> str:
    """The words with one space between them; a text without letters and digits keeps its marks."""
    words = " ".join(re.findall(r"\w+", text.casefold()))
    return words or "".join(text.split())


def timeout_factor(model: str | None) -> float:
    """How many times as long a model takes as others: 1.5 from 32 billion parameters on, else 1.

    The largest number with a b in the name counts; a name without one, or no name, is 1.
    """
    sizes = [float(size) for size in _BILLIONS.findall(model or "")]
    return HEAVY_FACTOR if max(sizes, default=0.0) >= HEAVY_FROM else 1.0
