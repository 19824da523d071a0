"""Built-in pipelines on real farms: `alert.webhook` from a death to its receiver, and `llm.generate`."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from fake_node import WORDS, FakeNode
from farming import Farm, until
from receiver import KEY, Receiver, is_signed

from dataloader.cli.main import main

CANARY = "canary-5f2c"
WISH = json.dumps([{"queue": "q"}, {"queue": "alerts"}])


def ask(farm: Farm, *words: str) -> Any:
    done = CliRunner().invoke(main, [*words, "--dsn", farm.dsn])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def add(farm: Farm) -> None:
    added = ask(farm, "webhook", "add", "ops", "${DL_WEBHOOK_OPS}", "--signed-by", "DL_WEBHOOK_KEY")
    assert added.exit_code == 0


def secrets(receiver: Receiver) -> dict[str, str]:
    return {"dl_webhook_key": KEY, "dl_webhook_ops": f"{receiver.url}/{CANARY}"}


def dead_jobs(receiver: Receiver) -> list[str]:
    return [job["job_id"] for got in receiver.got if got.document["kind"] == "dead" for job in got.document["jobs"]]


def test_a_job_dies_and_the_message_arrives_signed_and_once(farm: Farm, receiver: Receiver) -> None:
    """Beside three reapers; the receiver is ill at first."""
    receiver.answers = [(503, {"Retry-After": "1"})]
    add(farm)
    programs = [farm.ready(workers=2, workers_json=WISH, **secrets(receiver))]
    programs += [farm.reaper(dl_alerts_bundle_sec=1, **secrets(receiver)) for _ in range(3)]
    jobs = [farm.enqueue("no such task", max_attempts=1) for _ in range(3)]
    for job in jobs:
        farm.wait(job, "failed")
    until(lambda: len(set(dead_jobs(receiver))) == 3, "the messages")
    until(lambda: not farm.rows("SELECT FROM dl_jobs WHERE queue = 'alerts' AND status <> 'succeeded'"), "their ends")
    refused, *taken = receiver.got  # a second message may come before the first one is tried again
    ids = [got.headers["webhook-id"] for got in taken]
    assert ids.count(refused.headers["webhook-id"]) == 1, "the same message, tried again"
    assert len(set(ids)) == len(ids)
    assert all(is_signed(got) for got in receiver.got)
    assert sorted(dead_jobs(receiver)[len(refused.document["jobs"]) :]) == sorted(map(str, jobs))
    assert refused.path == f"/{CANARY}"
    for program in programs:
        assert CANARY not in program.log.read_text()
        assert KEY not in program.log.read_text()
    stored = str(farm.rows("SELECT row_to_json(j) FROM dl_jobs j UNION ALL SELECT row_to_json(w) FROM dl_webhooks w"))
    assert CANARY not in stored
    assert KEY not in stored


def test_doctor_says_that_nobody_sends_the_messages_and_a_test_arrives_once_somebody_does(
    farm: Farm, receiver: Receiver
) -> None:
    add(farm)
    asked = ask(farm, "webhook", "test", "ops", "--json")
    assert json.loads(asked.stdout)["advice"].endswith('add {"queue": "alerts"} to WORKERS_JSON.')
    advice = ask(farm, "doctor").stdout
    assert "The webhook ops does not receive its messages: no worker serves the queue alerts." in advice
    assert "Queue alerts has 1 due job and no worker." in advice
    assert ask(farm, "webhook", "list").stdout.split("\n")[1].split()[:2] == ["ops", "json"]
    farm.ready(workers=2, workers_json=WISH, **secrets(receiver))
    until(lambda: receiver.got, "the test message")
    assert receiver.got[0].document["kind"] == "test"
    until(lambda: "worker" not in ask(farm, "doctor").stdout.replace("lost workers", ""), "doctor to know the workers")


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
        farm.worker(first).kill()
        assert farm.wait(first, "succeeded")["progress"]["node"] == mlx.url
    finally:
        mlx.close()
