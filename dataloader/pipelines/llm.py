"""`llm.generate`: the answer of a language model, from the first of the settings' nodes that gives one.

A node speaks Ollama's protocol, which streams a JSON document a line, or OpenAI's as servers of MLX models do, which
stream server-sent events. The addresses come from the settings alone.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from errno import EADDRINUSE
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import psutil
from pydantic import Field, ValidationInfo, field_validator

from dataloader import config, pipelines
from dataloader.config import Settings
from dataloader.pipelines import Context, PermanentError, Retry, http, register, retries, validated
from dataloader.pipelines.http import TooLong, Unreachable

TIMEOUT_SEC = 600.0  # of a run, where the job names no other limit
KEPT_SEC = 60.0  # for how long a scan's answer counts
CONNECT_SEC = 3.0
HEAVY_FROM, HEAVY_FACTOR = 32, 1.5  # billions of parameters
_SCAN_SEC = 5.0  # for one question of a scan
_MEASURE_SEC = 0.2  # the time over which the CPU of this machine is measured
_MODELS_NAMED = 50  # at most, in an error
_LONGEST_LIST = 2**22  # bytes of a node's answer about itself
_LONGEST_ANSWER = 2**25  # bytes of a stream; a token takes some 200 with its frame
_LONGEST_REASON = 200  # characters of a node's own words
_STATUS = ("/status", "/health")
_CONTAINER = (".dockerenv", "run/.containerenv")  # files that Docker and Podman leave in a container
_BUSY = (429, 503)  # 503 is Ollama's answer when its queue (OLLAMA_MAX_QUEUE) is full
_BILLIONS = re.compile(r"(?<![\d.])(\d{1,4}(?:\.\d{1,3})?)b(?![a-z0-9])", re.IGNORECASE)
# A name as nodes give them: qwen2.5-coder:32b, mlx-community/Qwen2.5-7B-Instruct-4bit. No part begins with a dot.
_MODEL = re.compile(r"[a-z0-9][\w.:-]*(/[a-z0-9_][\w.:-]*){0,3}", re.ASCII | re.IGNORECASE)
_NO_SPEAKER = re.compile("embed|rerank|(^|/)bge-", re.IGNORECASE)  # models that turn text into numbers
_LINE_END = re.compile(rb"\r\n|\r|\n")
# The names that nodes use for the figures of their load, in percent.
_FIGURES = {
    **dict.fromkeys(("queue_percent", "queue"), "queue"),
    **dict.fromkeys(("ram_percent", "memory_percent", "ram"), "RAM"),
    **dict.fromkeys(("cpu_percent", "cpu"), "CPU"),
}

_JSON = {"Content-Type": "application/json"}

Kind = Literal["ollama", "mlx"]
Category = Literal["reasoning", "coding", "fast", "default"]
_MODELS: dict[Kind, str] = {"ollama": "/api/tags", "mlx": "/v1/models"}
_PATH: dict[Kind, str] = {"ollama": "/api/generate", "mlx": "/v1/chat/completions"}

_scanned: dict[tuple[Kind, str], tuple[float, Node]] = {}  # by this process: when, and the node's answer


class PassedOver(Exception):
    """A node is not asked, or its answer is not taken. The text is the reason, without a secret."""


_FAULTS = (PassedOver, Unreachable, TooLong)  # of a node


class Options(pipelines.Arguments):
    """How a model samples; a node gets those that the job names, under the names of its protocol."""

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


class Arguments(pipelines.Arguments):
    """The `args` of `llm.generate`; docs/llm.md explains each."""

    prompt: str = Field(max_length=1_000_000)
    system: str | None = Field(default=None, max_length=1_000_000)
    model: str | None = Field(default=None, max_length=200)
    category: Category | None = None
    options: Options = Options()
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)

    @field_validator("prompt")
    @classmethod
    def _is_not_blank(cls, prompt: str) -> str:
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
    """A server of models, with its answers to the last scan."""

    kind: Kind
    url: str = field(repr=False)  # may hold a password: only requests get it
    models: tuple[str, ...] = ()
    loaded: frozenset[str] = frozenset()  # the models in its memory, if the node reports them
    status_path: str | None = None  # the path of its load report; None: it has none

    @property
    def name(self) -> str:
        """The URL without user and password, for people."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def address(self, path: str) -> http.Address:
        """Where a request to the node goes; errors call the node "it"."""
        return http.Address.of(self.url + path)._replace(name="it")


@register(
    "llm.generate",
    timeout_sec=TIMEOUT_SEC,
    timeout_factor=lambda args: timeout_factor(args.get("model")),
    affinity=("model", "category"),
)
def generate(args: dict[str, Any], context: Context) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Ask the nodes in turn until one has answered; return its text, model, node and tokens, and who was passed over.

    A node is passed over when it is down, too busy, silent for too long, breaks off, refuses, or says nothing but the
    prompt. With none left the job is tried again. Wrong arguments raise PermanentError, and so does a model that no
    node has while all nodes answer.
    """
    wanted, settings = validated(Arguments, args), config.load()
    names = patterns(wanted, settings.dl_llm_categories)
    passed: list[dict[str, str]] = []  # the nodes that were passed over, and why

    def pass_over(node: Node, reason: object) -> None:
        passed.append({"node": node.name, "reason": str(reason)})
        context.note(f"{node.name} passed over: {reason}")
        context.logger.warning("node passed over: %s: %s", node.name, reason, extra=passed[-1])

    known, down = scan(settings, context.check)
    if not candidates(known, names):  # an earlier scan may be out of date
        known, down = scan(settings, context.check, anew=True)
    for node, why in down:
        pass_over(node, why)
    chosen = candidates(known, names)
    if not chosen and wanted.model and not down:
        models = ", ".join(sorted({model for node in known for model in node.models})[:_MODELS_NAMED])
        raise PermanentError(f"model: no node has {wanted.model}; there are {models or 'none'}")
    for node, model in chosen:
        result = {"tokens": 0, "node": node.name, "model": model, "passed_over": [*passed]}
        try:
            check_load(node, settings.dl_llm_busy_percent, context.check)
            with place(node, settings.dl_llm_mlx_concurrent):
                silence_sec = settings.dl_llm_silence_sec * timeout_factor(model)
                return (yield from _answer_of(node, wanted, result, silence_sec, context.check))
        except _FAULTS as e:
            pass_over(node, e)
    target = wanted.model or f"category {wanted.category or 'default'}"
    reasons = "; ".join(f"{each['node']}: {each['reason']}" for each in passed) or "no node has such a model"
    # The next attempt is due as after other errors, but this text needs no stack.
    raise Retry(retries.linear()(context.attempt), f"no node has answered ({target}): {reasons}")


# --- which node is asked for which model ---


def patterns(wanted: Arguments, categories: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The patterns of names that the job asks for, the best first; Ollama's tag `latest` may be left out."""
    if wanted.model is not None:
        return (wanted.model, f"{wanted.model}:latest")
    return categories[wanted.category or "default"]


def candidates(nodes: Sequence[Node], names: Sequence[str]) -> list[tuple[Node, str]]:
    """Each node that has a model of such a name, with its best one, in the order in which they are asked.

    An earlier pattern outweighs a model that is in memory already, and this outweighs the order of the nodes.
    """
    ranked = [
        ((rank, model not in node.loaded), node, model)
        for rank, pattern in enumerate(names)
        for node in nodes
        for model in node.models
        if fnmatchcase(model.casefold(), pattern.casefold()) and not ("*" in pattern and _NO_SPEAKER.search(model))
    ]
    best: dict[Node, str] = {}
    for _, node, model in sorted(ranked, key=lambda each: each[0]):
        best.setdefault(node, model)
    return [*best.items()]


def timeout_factor(model: object) -> float:
    """How many times as long a model takes as others: 1.5 from 32 billion parameters on, else 1.

    The largest number with a b in the name counts; a name without one, or no name, is 1.
    """
    sizes = [float(size) for size in _BILLIONS.findall(model if isinstance(model, str) else "")]
    return HEAVY_FACTOR if max(sizes, default=0.0) >= HEAVY_FROM else 1.0


def addresses(settings: Settings, root: Path = Path("/")) -> list[tuple[Kind, str]]:
    """The nodes of the settings in their order, Ollama's first; where no setting names one, those of this machine.

    In a container this machine is `host.docker.internal`, for `localhost` is the container itself.
    """
    ollamas = (*settings.ollama_api_url, *settings.ollama_base_url)
    by_kind: dict[Kind, tuple[str, ...]] = {"ollama": ollamas, "mlx": settings.mlx_api_url}
    # Without the end that some programs want in these variables, as in http://localhost:11434/api.
    named = dict.fromkeys(
        (kind, url.rstrip("/").removesuffix("/api").removesuffix("/v1").rstrip("/"))
        for kind, urls in by_kind.items()
        for url in urls
    )
    if named:
        return list(named)
    host = "host.docker.internal" if any((root / name).exists() for name in _CONTAINER) else "localhost"
    return [("ollama", f"http://{host}:11434"), ("mlx", f"http://{host}:11435")]


def scan(
    settings: Settings, check: Callable[[], None], anew: bool = False
) -> tuple[list[Node], list[tuple[Node, Exception]]]:
    """The nodes that answer, with their models, and those that do not, with the reason.

    An answer is kept for KEPT_SEC in this process, unless `anew`; that a node is down is not kept.
    """

    def scanned(place: tuple[Kind, str]) -> Node | tuple[Node, Exception]:
        at, known = _scanned.get(place, (0.0, None))
        if known and not anew and time.monotonic() < at + KEPT_SEC:
            return known
        node = Node(*place)

        def optional(path: str) -> Any:
            with suppress(*_FAULTS):
                return _asked(node, path, check)

        try:
            models = _names(_asked(node, _MODELS[node.kind], check))
        except _FAULTS as e:
            return node, e
        loaded = _names(optional("/api/ps")) if node.kind == "ollama" else ()
        # Ollama and mlx_lm's server have no document about their load.
        paths = [path for path in _STATUS if reports_load(optional(path))]
        node = replace(node, models=models, loaded=frozenset(loaded), status_path=next(iter(paths), None))
        _scanned[place] = time.monotonic(), node
        return node

    places = addresses(settings)
    with ThreadPoolExecutor(len(places)) as pool:
        results = [*pool.map(scanned, places)]
    return [each for each in results if isinstance(each, Node)], [each for each in results if isinstance(each, tuple)]


def _names(document: Any) -> tuple[str, ...]:
    """The models' names in a list of Ollama ({"models": [{"name": ...}]}) or of OpenAI ({"data": [{"id": ...}]})."""
    entries = (document.get("models") or document.get("data") or []) if isinstance(document, dict) else []
    names = [entry.get("name") or entry.get("id") for entry in entries if isinstance(entry, dict)]
    return tuple(name for name in names if isinstance(name, str))


def _asked(node: Node, path: str, check: Callable[[], None]) -> Any:
    """The JSON document at this path of a node; raises one of _FAULTS where it has none."""
    times = http.Times(CONNECT_SEC, _SCAN_SEC, _SCAN_SEC)
    with http.exchange(node.address(path), times, check=check) as answer:
        if answer.status != 200:
            raise PassedOver(f"it answered {answer.status} to {path}")
        try:
            return json.loads(answer.content(_LONGEST_LIST))
        except (ValueError, RecursionError):
            raise PassedOver(f"its answer to {path} is no JSON") from None


# --- the load of a node ---


def check_load(node: Node, most_percent: float, check: Callable[[], None]) -> None:
    """Raise PassedOver for a node that is too busy: by its own word, or as a node on this machine by a measurement.

    With `most_percent` 100 nothing is measured, because nothing would be above it.
    """
    status = _asked(node, node.status_path, check) if node.status_path else None
    why = busy(status, most_percent)
    if why is None and most_percent < 100 and _is_here(node.url):
        psutil.cpu_percent()  # the next call measures from here on
        time.sleep(_MEASURE_SEC)
        load = {"ram_percent": psutil.virtual_memory().percent, "cpu_percent": psutil.cpu_percent()}
        why = busy(load, most_percent)
    if why:
        raise PassedOver(why)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in {"localhost", "::1", socket.gethostname()} or host.startswith("127.")


def busy(status: Any, most_percent: float) -> str | None:
    """The reason why a node with this status is too busy; None if it is not, or if that is not known."""
    numbers = _numbers(status)
    for name, resource in _FIGURES.items():
        if (value := numbers.get(name, 0)) > most_percent:
            return f"its {resource} is at {value:.0f} %, above {most_percent:g} %"
    active, most = numbers.get("active_requests"), numbers.get("max_concurrency")
    if active is not None and most is not None and active >= most:
        return f"it has {active:g} of {most:g} requests in flight"
    return None


def reports_load(status: Any) -> bool:
    """True if the document has a figure that `busy` uses."""
    names = _numbers(status).keys()
    return not names.isdisjoint(_FIGURES) or names >= {"active_requests", "max_concurrency"}


def _numbers(status: Any) -> dict[str, float]:
    items = status.items() if isinstance(status, dict) else ()
    return {name: value for name, value in items if isinstance(value, int | float) and not isinstance(value, bool)}


@contextmanager
def place(node: Node, most: int) -> Iterator[None]:
    """Hold one of the `most` places that an MLX node has for the workers of this machine; Ollama has a queue itself.

    Raises PassedOver when all are taken. A place is a socket with a name in Linux's abstract namespace: a lock that all
    workers of the machine see, and that the kernel frees when its worker dies.
    """
    if node.kind != "mlx":
        yield
        return
    mark = hashlib.sha256(node.url.encode()).hexdigest()[:32]
    for number in range(most):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
            try:
                held.bind(f"\0dataloader.llm.{mark}.{number}")
            except OSError as e:
                if e.errno == EADDRINUSE:
                    continue
                raise
            yield
            return
    raise PassedOver(f"this machine has {most} of {most} requests in flight there")


# --- a question, and its answer piece by piece ---


def question(node: Node, model: str, wanted: Arguments) -> dict[str, Any]:
    """PURE: the body of the request, in the protocol of the node. What the job has not named, the node decides."""
    options = wanted.options.model_dump(exclude_none=True)
    body: dict[str, Any] = {"model": model, "stream": True}
    name = "num_predict" if node.kind == "ollama" else "max_tokens"
    limit = {} if wanted.max_tokens is None else {name: wanted.max_tokens}
    if node.kind == "ollama":
        system = {} if wanted.system is None else {"system": wanted.system}
        return body | {"prompt": wanted.prompt, "options": options | limit} | system
    options.pop("num_ctx", None)  # such a server has it from its own start
    if "repeat_penalty" in options:
        options["repetition_penalty"] = options.pop("repeat_penalty")
    texts = [("system", wanted.system), ("user", wanted.prompt)]
    messages = [{"role": role, "content": text} for role, text in texts if text is not None]
    return body | {"messages": messages, "stream_options": {"include_usage": True}} | options | limit


def _answer_of(
    node: Node, wanted: Arguments, result: dict[str, Any], silence_sec: float, check: Callable[[], None]
) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Ask the node; its answer as the pipeline's result, whose other parts are reported with each piece.

    Raises one of _FAULTS when the node refuses, is silent for `silence_sec`, says an error, ends before the end, or
    says nothing new. Where the run has to stop, closing the connection tells the node to stop.
    """
    answer = Answer()

    def in_silence() -> None:
        check()
        if answer.is_whole:  # behind the last word come the number of tokens and the end; some servers send neither
            raise PassedOver("it does not end its answer")

    body = json.dumps(question(node, result["model"], wanted)).encode()
    times, address = http.Times(CONNECT_SEC, silence_sec), node.address(_PATH[node.kind])
    yield {**result}
    try:
        with http.exchange(address, times, "POST", _JSON, body, check=in_silence) as reply:
            if reply.status != 200:
                raise PassedOver(_refusal(reply))
            for line in _lines(reply):
                answer.read(line)
                result["tokens"] = answer.tokens
                yield {**result}
                if answer.is_over:
                    break
    except _FAULTS:
        if not answer.is_whole:
            raise
    text = "".join(answer.texts)
    if not answer.is_whole:
        raise PassedOver("it ended its answer in the middle")
    if not text.strip():
        raise PassedOver("its answer is empty")
    if is_echo(text, wanted.prompt, wanted.system):
        raise PassedOver("its answer only repeats the prompt")
    return {"text": text, **result}


def _lines(reply: http.Answer) -> Iterator[bytes]:
    rest, size = b"", 0
    while piece := reply.read(2**16):
        size += len(piece)
        if size > _LONGEST_ANSWER:
            raise PassedOver(f"its answer is longer than {_LONGEST_ANSWER} bytes")
        *lines, rest = _LINE_END.split(rest + piece)
        yield from lines
    yield rest


class Answer:
    """An answer in either protocol, line by line. A document is one line, as every such server writes it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens = 0  # of the texts, and of what a model thinks before it answers
        self.is_whole = False  # all words have come; the number of tokens may follow
        self.is_over = False  # its end has come

    def read(self, line: bytes) -> None:
        """Take a line; raises PassedOver for an error, and for a line that is of neither protocol."""
        text = line.strip().removeprefix(codecs.BOM_UTF8)
        name, _, value = text.partition(b":")
        if re.fullmatch(rb"[\w-]*", name):  # a field of an event, or a comment, which has no name
            text = value.strip() if name == b"data" else b""
        if text == b"[DONE]":
            self.is_whole = self.is_over = True
        elif text:
            try:
                self._take(json.loads(text))
            except (ValueError, TypeError, AttributeError, RecursionError):
                raise PassedOver("its answer is not in its protocol") from None

    def _take(self, document: dict[str, Any]) -> None:
        if error := document.get("error"):
            raise PassedOver(f"it broke off: {_words(error)}")
        if "done" in document:  # of Ollama
            self.is_whole = self.is_over = document["done"] is True
            words, thoughts, total = map(document.get, ("response", "thinking", "eval_count"))
        else:
            choice = (document.get("choices") or [None])[0] or {}
            self.is_whole = self.is_whole or bool(choice.get("finish_reason"))
            words, *more = map((choice.get("delta") or {}).get, ("content", "reasoning", "reasoning_content"))
            thoughts, total = any(more), (document.get("usage") or {}).get("completion_tokens")
        self.texts.append(str(words or ""))
        self.tokens = total if isinstance(total, int) else self.tokens + bool(words or thoughts)


def _refusal(reply: http.Answer) -> str:
    """Why the node has not answered: the status, and its own words from the first piece of the body."""
    try:
        words = f", {_words(json.loads(reply.read(2**16))['error'])}"
    except (ValueError, TypeError, KeyError, RecursionError):
        words = ""
    overload = "it is overloaded: " if reply.status in _BUSY else ""
    return f"{overload}it answered {reply.status}{words}"


def _words(error: Any) -> str:
    """A node's error in one line: a text, or OpenAI's object with a message."""
    text = error.get("message", "") if isinstance(error, dict) else error
    return " ".join(str(text).split())[:_LONGEST_REASON]


def is_echo(answer: str, prompt: str, system: str | None = None) -> bool:
    """True if the answer only repeats the prompt, perhaps several times or after the system text."""
    given, asked, instructed = _plain(answer), _plain(prompt), _plain(system or "")
    rest = given.replace(asked, " ")
    return asked in given and not (rest.replace(instructed, " ") if instructed else rest).strip()


def _plain(text: str) -> str:
    """The words with one space between them; a text without letters and digits keeps its marks."""
    words = " ".join(re.findall(r"\w+", text.casefold()))
    return words or "".join(text.split())
