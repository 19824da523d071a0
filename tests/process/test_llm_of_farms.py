"""`llm.generate` on a farm: a cancellation in the middle of an answer, the journal, the places of an MLX node."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fake_node import WORDS, FakeNode
from farming import Farm, until

from dataloader.queue import lifecycle

WITHIN_SEC = 5.0  # of a cancellation, the connection is closed; a second is promised, a busy machine has more


@pytest.fixture
def node() -> Iterator[FakeNode]:
    node = FakeNode()
    yield node
    node.close()


def start(farm: Farm, *nodes: FakeNode, workers: int = 1, **settings: object) -> None:
    """A farm with these nodes alone; how busy this machine is does not count."""
    for setting, protocol in (("ollama_api_url", "ollama"), ("mlx_api_url", "mlx")):
        settings[setting] = ",".join(node.url for node in nodes if node.protocol == protocol)
    farm.ready(workers=workers, ollama_base_url="", dl_llm_busy_percent=100, **settings)


@pytest.mark.parametrize("behave", ["hangs", "slow", "mute"])
def test_a_cancellation_in_the_middle_of_an_answer_closes_the_connection_within_a_second(
    behave: str, farm: Farm, node: FakeNode
) -> None:
    """Whether the node speaks, has fallen silent, or has not said a word yet."""
    node.behave, node.pause_sec = behave, 6.0
    start(farm, node)
    job = farm.enqueue("llm.generate", args={"prompt": "Why?"})
    if behave == "slow":
        until(lambda: farm.job(job)["progress"].get("tokens"), "a token")
    else:
        assert node.silent.wait(60)
    began = time.monotonic()
    lifecycle.request_cancel(farm.conn, job)
    farm.wait(job, "canceled")  # written when the connection is closed
    assert time.monotonic() - began < WITHIN_SEC
    assert node.hung_up.wait(60)
    assert farm.story(job) == ["queued", "picked", "cancel_requested", "canceled"]


def test_the_journal_of_a_run_without_an_answer_names_each_node_and_its_reason(farm: Farm, node: FakeNode) -> None:
    node.behave = "fails"
    start(farm, node)
    job = farm.enqueue("llm.generate", args={"prompt": "Why?"})
    until(lambda: "retry" in farm.story(job) or "requeue" in farm.story(job), "the end of the attempt")
    said = str(farm.journal(job))
    assert f"no node has answered (category default): {node.url}: it answered 500" in said
    assert farm.job(job)["status"] == "queued"


def test_the_places_of_an_mlx_node_count_for_all_workers_of_the_machine_and_a_killed_one_leaves_its_place(
    farm: Farm, node: FakeNode
) -> None:
    mlx = FakeNode("mlx", ("mlx-community/Llama-3.2-3B",))
    try:
        mlx.behave = "hangs"
        start(farm, node, mlx, workers=2, dl_llm_mlx_concurrent=1, dl_llm_categories='{"default": ["mlx*", "*"]}')
        first = farm.enqueue("llm.generate", args={"prompt": "Why?"})
        assert mlx.silent.wait(60)
        second = farm.wait(farm.enqueue("llm.generate", args={"prompt": "Why?"}), "succeeded")["progress"]
        assert (second["node"], second["text"]) == (node.url, " ".join(WORDS))
        reason = "this machine has 1 of 1 requests in flight there"
        assert second["passed_over"] == [{"node": mlx.url, "reason": reason}]
        mlx.behave = "answers"
        (holder,) = (worker for worker in farm.programs[0].workers() if str(first)[:8] in " ".join(worker.cmdline()))
        holder.kill()
        assert farm.wait(first, "succeeded")["progress"]["node"] == mlx.url
    finally:
        mlx.close()
