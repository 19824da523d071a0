"""How nodes speak: a question in the protocol of a node, and its answer piece by piece.

Ollama streams a JSON document a line (/api/generate). Servers of MLX models stream OpenAI's server-sent events
(/v1/chat/completions), with comments as signs of life. Both are read as widely as their standards allow, because
gateways and other servers write them in other ways.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx

from dataloader.pipelines.llm.choose import Arguments, Node, PassedOver
from dataloader.pipelines.llm.nodes import CONNECT_SEC, trouble

_PATH = {"ollama": "/api/generate", "mlx": "/v1/chat/completions"}
_LONGEST_ANSWER = 2**25  # bytes of a stream; a token takes some 200 with its frame
_LONGEST_REASON = 200  # characters of a node's own words
_REST_SEC = 2.0  # that a node has for the end of its answer behind its last word
_LINE_END = re.compile(rb"\r\n|\r|\n")
_FIELD = re.compile(rb"([\w-]*)(?::(.*))?", re.DOTALL)  # of an event: a name, or a comment, which has none
_DONE = b"[DONE]"
_BUSY = (429, 503)  # 503 is Ollama's answer when its queue (OLLAMA_MAX_QUEUE) is full


class Piece(NamedTuple):
    """A part of an answer."""

    text: str = ""
    tokens: int = 0  # of the text, or of what a model thinks before it answers
    total: int | None = None  # how many tokens the whole answer has, where the node says it


async def spoken(
    http: httpx.AsyncClient, node: Node, model: str, wanted: Arguments, silence_sec: float
) -> AsyncIterator[Piece]:
    """Ask the node, and give its answer piece by piece.

    Raises PassedOver when the node refuses, is silent for `silence_sec`, says an error, or ends before the end. Where
    the iteration is given up, closing the connection tells the node to stop.
    """
    timeout = httpx.Timeout(silence_sec, connect=CONNECT_SEC)
    answer = Answer()
    try:
        async with http.stream(
            "POST", node.url + _PATH[node.kind], json=question(node, model, wanted), timeout=timeout
        ) as response:
            if response.status_code != httpx.codes.OK:
                raise PassedOver(await _refusal(response))
            lines = _lines(response)
            while not answer.is_over:
                # Behind the last word comes the number of tokens, or the end, or from some servers nothing more.
                async with asyncio.timeout(_REST_SEC if answer.is_whole else None):
                    line = await anext(lines, None)
                if line is None:
                    break
                yield answer.read(line)
    except TimeoutError:
        return  # the answer is whole
    except httpx.HTTPError as e:
        if not answer.is_whole:
            raise trouble(e, silence_sec) from None
    if not answer.is_whole:
        raise PassedOver("it ended its answer in the middle")


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


class Answer:
    """PURE: an answer in either protocol, line by line."""

    def __init__(self) -> None:
        self.is_whole = False  # its last word has been said; the number of its tokens may follow
        self.is_over = False  # its end has come
        self._data: list[bytes] = []  # the lines of an event that has not ended

    def read(self, line: bytes) -> Piece:
        """What the line says; raises PassedOver for an error, and for what is of none of both protocols."""
        text = line.strip().removeprefix(codecs.BOM_UTF8)
        found = _FIELD.fullmatch(text)
        if not found:
            return self._said(text)
        if found[1] == b"data":
            self._data.append(found[2] or b"")
            # An event is mostly one line, and some servers end it with this line.
            if len(self._data) > 1 or not _is_document(self._data[0]):
                return Piece()
        elif text or not self._data:
            return Piece()  # another field, a comment, or the end of an event without data
        data = b"\n".join(self._data)
        self._data.clear()
        return self._said(data.strip())

    def _said(self, text: bytes) -> Piece:
        if text == _DONE:
            self.is_whole = self.is_over = True
        if text in (b"", _DONE):
            return Piece()
        try:
            document = json.loads(text)
            if error := document.get("error"):
                raise PassedOver(f"it broke off: {_words(error)}")
            return self._ollama(document) if "done" in document else self._openai(document)
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise PassedOver("its answer is not in its protocol") from None

    def _ollama(self, document: dict[str, Any]) -> Piece:
        self.is_whole = self.is_over = document["done"] is True
        text = str(document.get("response") or "")
        return Piece(text, bool(text or document.get("thinking")), _count(document.get("eval_count")))

    def _openai(self, document: dict[str, Any]) -> Piece:
        choice = (document.get("choices") or [None])[0] or {}
        delta = choice.get("delta") or {}
        self.is_whole = self.is_whole or bool(choice.get("finish_reason"))
        text = str(delta.get("content") or "")
        is_token = bool(text or delta.get("reasoning") or delta.get("reasoning_content"))
        return Piece(text, is_token, _count((document.get("usage") or {}).get("completion_tokens")))


def _is_document(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return data.strip() == _DONE
    return True


def _count(number: Any) -> int | None:
    return number if isinstance(number, int) else None


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream, and an empty one, which ends an event that has no end.

    httpx's own `aiter_lines` also ends a line at U+2028, which JSON may hold.
    """
    rest, size, ended_with_cr = b"", 0, False
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > _LONGEST_ANSWER:
            raise PassedOver(f"its answer is longer than {_LONGEST_ANSWER} bytes")
        more = piece.removeprefix(b"\n") if ended_with_cr else piece
        ended_with_cr = piece.endswith(b"\r")
        *lines, rest = _LINE_END.split(rest + more)
        for line in lines:
            yield line
    yield rest
    yield b""


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
