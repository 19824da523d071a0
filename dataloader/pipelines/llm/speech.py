"""How nodes speak: a question in the protocol of a node, and its answer piece by piece.

Ollama streams a JSON document a line (/api/generate). Servers of MLX models stream OpenAI's server-sent events
(/v1/chat/completions), with comments as signs of life.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx

from dataloader.pipelines.llm.choose import Arguments, Node, PassedOver
from dataloader.pipelines.llm.nodes import CONNECT_SEC, trouble

_PATH = {"ollama": "/api/generate", "mlx": "/v1/chat/completions"}
_LONGEST_ANSWER = 2**25  # bytes of a stream; a token takes some 200 with its frame
_LONGEST_REASON = 200  # characters of a node's own words
_BUSY = (429, 503)  # 503 is Ollama's answer when its queue (OLLAMA_MAX_QUEUE) is full


class Piece(NamedTuple):
    """A part of an answer."""

    text: str = ""
    tokens: int = 0  # of the text, or of what a model thinks before it answers
    total: int | None = None  # how many tokens the whole answer has, where the node says it
    is_last: bool = False


async def spoken(
    http: httpx.AsyncClient, node: Node, model: str, wanted: Arguments, silence_sec: float
) -> AsyncIterator[Piece]:
    """Ask the node, and give its answer piece by piece, the last one with `is_last`.

    Raises PassedOver when the node refuses, is silent for `silence_sec`, says an error, or ends before the end. Where
    the iteration is given up, closing the connection tells the node to stop.
    """
    timeout = httpx.Timeout(silence_sec, connect=CONNECT_SEC)
    try:
        async with http.stream(
            "POST", node.url + _PATH[node.kind], json=question(node, model, wanted), timeout=timeout
        ) as response:
            if response.status_code != httpx.codes.OK:
                raise PassedOver(await _refusal(response))
            async for line in _lines(response):
                piece = read(line)
                yield piece
                if piece.is_last:
                    return
    except httpx.HTTPError as e:
        raise trouble(e, silence_sec) from None
    raise PassedOver("it ended its answer in the middle")


def question(node: Node, model: str, wanted: Arguments) -> dict[str, Any]:
    """PURE: the body of the request, in the protocol of the node. What the job has not named, the node decides."""
    options = wanted.options.model_dump(exclude_none=True)
    body = _to_ollama(wanted, options) if node.kind == "ollama" else _to_mlx(wanted, options)
    return {"model": model, "stream": True} | body


def _to_ollama(wanted: Arguments, options: dict[str, Any]) -> dict[str, Any]:
    limit = {} if wanted.max_tokens is None else {"num_predict": wanted.max_tokens}
    system = {} if wanted.system is None else {"system": wanted.system}
    return {"prompt": wanted.prompt, "options": options | limit} | system


def _to_mlx(wanted: Arguments, options: dict[str, Any]) -> dict[str, Any]:
    options.pop("num_ctx", None)  # such a server has it from its own start
    if "repeat_penalty" in options:
        options["repetition_penalty"] = options.pop("repeat_penalty")
    limit = {} if wanted.max_tokens is None else {"max_tokens": wanted.max_tokens}
    said = [("system", wanted.system), ("user", wanted.prompt)]
    messages = [{"role": role, "content": text} for role, text in said if text is not None]
    return {"messages": messages, "stream_options": {"include_usage": True}} | options | limit


def read(line: bytes) -> Piece:
    """PURE: what a line of either protocol says; raises PassedOver for an error and for what is none of both."""
    text = line.strip()
    if text == b"data: [DONE]":
        return Piece(is_last=True)
    if not text or text.startswith((b":", b"event:", b"id:", b"retry:")):
        return Piece()
    try:
        document = json.loads(text.removeprefix(b"data:"))
        if "error" in document:
            raise PassedOver(f"it broke off: {_words(document['error'])}")
        return _ollama(document) if "done" in document else _openai(document)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        raise PassedOver("its answer is not in its protocol") from None


def _ollama(document: dict[str, Any]) -> Piece:
    text = str(document.get("response") or "")
    is_token = bool(text or document.get("thinking"))
    return Piece(text, is_token, _count(document.get("eval_count")), document["done"] is True)


def _openai(document: dict[str, Any]) -> Piece:
    delta = document["choices"][0].get("delta", {}) if document["choices"] else {}
    text = str(delta.get("content") or "")
    is_token = bool(text or delta.get("reasoning") or delta.get("reasoning_content"))
    return Piece(text, is_token, _count((document.get("usage") or {}).get("completion_tokens")))


def _count(number: Any) -> int | None:
    return number if isinstance(number, int) else None


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream. httpx's own `aiter_lines` also ends a line at U+2028, which JSON may hold."""
    rest, size = b"", 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > _LONGEST_ANSWER:
            raise PassedOver(f"its answer is longer than {_LONGEST_ANSWER} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


async def _refusal(response: httpx.Response) -> str:
    """Why the node has not answered: the status, and its own words from the first piece of the body."""
    body = await anext(response.aiter_bytes(2**16), b"")
    try:
        said = _words(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError, RecursionError):
        said = ""
    what = "it is overloaded: it answered" if response.status_code in _BUSY else "it answered"
    return f"{what} {response.status_code}" + (f", {said}" if said else "")


def _words(error: Any) -> str:
    """A node's error in one line: a text, or OpenAI's object with a message."""
    text = error.get("message", "") if isinstance(error, dict) else error
    return " ".join(str(text).split())[:_LONGEST_REASON]
