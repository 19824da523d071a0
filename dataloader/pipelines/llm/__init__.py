"""`llm.generate`: the answer of a language model, from the first of the settings' nodes that gives one.

    choose.py   PURE: the arguments, the order of the nodes, when one is too busy, what is no answer
    nodes.py    which nodes there are, their models, their load
    speech.py   the two protocols

The pipeline is a coroutine: a look at its safe point every 0.1 s cancels whatever it awaits, which closes the
connection to the node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dataloader import config
from dataloader.config import Settings
from dataloader.pipelines import Context, PermanentError, Retry, absent, register, retries, validated
from dataloader.pipelines.llm.choose import (
    Arguments,
    Node,
    Passed,
    PassedOver,
    candidates,
    is_echo,
    patterns,
)
from dataloader.pipelines.llm.choose import timeout_factor as timeout_factor

if TYPE_CHECKING:
    import httpx

TASK = "llm.generate"
TIMEOUT_SEC = 600.0  # of a run, where the job names no other limit
_MODELS_NAMED = 50  # at most, in an error


async def generate(args: dict[str, Any], context: Context) -> dict[str, Any]:
    """Ask the nodes in turn until one has answered; return its text, model, node and tokens, and who was passed over.

    A node is passed over when it is down, too busy, silent for too long, breaks off, refuses, or says nothing but the
    prompt. With none left the job is tried again. Wrong arguments raise PermanentError, and so does a model that no
    node has while all nodes answer.
    """
    # Not at the top: httpx costs a worker 7 MB and half a second, and most farms have no such jobs.
    from dataloader.pipelines.llm import nodes

    wanted, settings = validated(Arguments, args), config.load()
    async with nodes.client(settings) as http:
        return await _Search(wanted, context, settings, http).answer()


@dataclass
class _Search:
    """One run's way from node to node."""

    wanted: Arguments
    context: Context
    settings: Settings
    http: httpx.AsyncClient
    passed: list[Passed] = field(default_factory=list)

    async def answer(self) -> dict[str, Any]:
        """The first answer; raises Retry, which names each node and its reason, where there is none."""
        for node, model in await self._chosen():
            try:
                return await self._answer_of(node, model)
            except PassedOver as e:
                self._pass(Passed(node.name, str(e)))
        what = self.wanted.model or f"category {self.wanted.category or 'default'}"
        reasons = "; ".join(f"{node}: {reason}" for node, reason in self.passed) or "no node has such a model"
        # The next attempt is due as after other errors, but this text needs no stack.
        raise Retry(retries.linear()(self.context.attempt), f"no node has answered ({what}): {reasons}")

    async def _chosen(self) -> list[tuple[Node, str]]:
        """The nodes to ask, each with its model. Before there are none, all nodes are scanned anew."""
        from dataloader.pipelines.llm import nodes

        names = patterns(self.wanted, self.settings.dl_llm_categories)
        found, down = await nodes.scan(self.http, self.settings)
        if not candidates(found, names):
            found, down = await nodes.scan(self.http, self.settings, anew=True)
        for each in down:
            self._pass(each)
        chosen = candidates(found, names)
        if not chosen and self.wanted.model and not down:
            have = ", ".join(sorted({model for node in found for model in node.models})[:_MODELS_NAMED])
            raise PermanentError(f"model: no node has {self.wanted.model}; there are {have or 'none'}")
        return chosen

    def _pass(self, passed: Passed) -> None:
        self.passed.append(passed)
        self.context.note(f"{passed.node} passed over: {passed.reason}")
        self.context.logger.warning("node passed over: %s: %s", *passed, extra=passed._asdict())

    async def _answer_of(self, node: Node, model: str) -> dict[str, Any]:
        """The node's answer as the pipeline's result; raises PassedOver where there is none."""
        from dataloader.pipelines.llm import nodes, speech

        said: dict[str, Any] = {"tokens": 0, "node": node.name, "model": model}
        said["passed_over"] = [each._asdict() for each in self.passed]
        silence_sec = self.settings.dl_llm_silence_sec * timeout_factor(model)
        texts: list[str] = []
        await nodes.check_load(self.http, node, self.settings.dl_llm_busy_percent)
        with nodes.place(node, self.settings.dl_llm_mlx_concurrent):
            self.context.progress(said)
            async for piece in speech.spoken(self.http, node, model, self.wanted, silence_sec):
                texts.append(piece.text)
                said["tokens"] = said["tokens"] + piece.tokens if piece.total is None else piece.total
                self.context.progress(said)
        return {"text": _accepted("".join(texts), self.wanted), **said}


def _accepted(text: str, wanted: Arguments) -> str:
    if not text.strip():
        raise PassedOver("its answer is empty")
    if is_echo(text, wanted.prompt, wanted.system):
        raise PassedOver("its answer only repeats the prompt")
    return text


def _factor(args: dict[str, Any]) -> float:
    model = args.get("model")
    return timeout_factor(model if isinstance(model, str) else None)


if find_spec("httpx"):
    register(TASK, timeout_sec=TIMEOUT_SEC, timeout_factor=_factor, affinity=("model", "category"))(generate)
else:
    absent(TASK, "it needs httpx: pip install 'dataloader-farm[llm]'")
