"""`llm.generate`: the answer of a language model, from the first of the settings' nodes that gives one.

    choose.py   PURE: the arguments, the order of the nodes, when one is too busy, what is no answer
    nodes.py    which nodes there are, their models, their load
    speech.py   the two protocols

The pipeline is a coroutine: a look at its safe point every 0.1 s cancels whatever it awaits, which closes the
connection to the node.
"""

from __future__ import annotations

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
    names = patterns(wanted, settings.dl_llm_categories)
    passed: list[Passed] = []

    def pass_over(each: Passed) -> None:
        passed.append(each)
        context.note(f"{each.node} passed over: {each.reason}")
        context.logger.warning("node passed over: %s: %s", *each, extra=each._asdict())

    async with nodes.client(settings) as http:
        known, down = await nodes.scan(http, settings)
        if not candidates(known, names):  # an earlier scan may be out of date
            known, down = await nodes.scan(http, settings, anew=True)
        for each in down:
            pass_over(each)
        chosen = candidates(known, names)
        if not chosen and wanted.model and not down:
            models = ", ".join(sorted({model for node in known for model in node.models})[:_MODELS_NAMED])
            raise PermanentError(f"model: no node has {wanted.model}; there are {models or 'none'}")
        for node, model in chosen:
            try:
                return await _answer_of(node, model, wanted, passed, context, settings, http)
            except PassedOver as e:
                pass_over(Passed(node.name, str(e)))
    target = wanted.model or f"category {wanted.category or 'default'}"
    reasons = "; ".join(f"{node}: {reason}" for node, reason in passed) or "no node has such a model"
    # The next attempt is due as after other errors, but this text needs no stack.
    raise Retry(retries.linear()(context.attempt), f"no node has answered ({target}): {reasons}")


async def _answer_of(
    node: Node,
    model: str,
    wanted: Arguments,
    passed: list[Passed],
    context: Context,
    settings: Settings,
    http: httpx.AsyncClient,
) -> dict[str, Any]:
    """The node's answer as the pipeline's result; raises PassedOver where there is none."""
    from dataloader.pipelines.llm import nodes, speech

    result: dict[str, Any] = {"tokens": 0, "node": node.name, "model": model}
    result["passed_over"] = [each._asdict() for each in passed]
    texts: list[str] = []
    await nodes.check_load(http, node, settings.dl_llm_busy_percent)
    with nodes.place(node, settings.dl_llm_mlx_concurrent):
        context.progress(result)
        silence_sec = settings.dl_llm_silence_sec * timeout_factor(model)
        async for piece in speech.spoken(http, node, model, wanted, silence_sec):
            texts.append(piece.text)
            result["tokens"] = result["tokens"] + piece.tokens if piece.total is None else piece.total
            context.progress(result)
    text = "".join(texts)
    if not text.strip():
        raise PassedOver("its answer is empty")
    if is_echo(text, wanted.prompt, wanted.system):
        raise PassedOver("its answer only repeats the prompt")
    return {"text": text, **result}


def _factor(args: dict[str, Any]) -> float:
    model = args.get("model")
    return timeout_factor(model if isinstance(model, str) else None)


if find_spec("httpx"):
    register(TASK, timeout_sec=TIMEOUT_SEC, timeout_factor=_factor, affinity=("model", "category"))(generate)
else:
    absent(TASK, "it needs httpx: pip install 'dataloader-farm[llm]'")
