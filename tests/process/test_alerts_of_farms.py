"""Built-in pipelines on real farms: `alert.webhook` from a death to its receiver, and `llm.generate`."""

from contextlib import closing

from click.testing import CliRunner
from fake_node import WORDS, FakeNode
from farming import Farm, until
from receiver import KEY, Receiver, is_signed

from dataloader.cli.main import main

CANARY = "canary-5f2c"


def test_a_job_dies_and_the_message_arrives_signed_and_once(farm: Farm, receiver: Receiver) -> None:
    """Beside three reapers; the receiver is ill at first."""
    receiver.answers = [(503, {"Retry-After": "1"})]
    secrets = {"dl_webhook_key": KEY, "dl_webhook_ops": f"{receiver.url}/{CANARY}"}
    words = ("webhook", "add", "ops", "${DL_WEBHOOK_OPS}", "--signed-by", "DL_WEBHOOK_KEY", "--dsn", farm.dsn)
    assert CliRunner().invoke(main, words).exit_code == 0
    programs = [farm.ready(workers=2, workers_json='[{"queue": "q"}, {"queue": "alerts"}]', **secrets)]
    programs += [farm.reaper(dl_alerts_bundle_sec=1, **secrets) for _ in range(3)]
    jobs = [farm.enqueue("no such task", max_attempts=1) for _ in range(3)]
    for job in jobs:
        farm.wait(job, "failed")

    def told(number: int = 0) -> list[str]:
        """The dead jobs of all requests but the first ones."""
        return [job["job_id"] for got in receiver.got[number:] for job in got.document.get("jobs", ())]

    until(lambda: len(set(told())) == 3, "the messages")
    until(lambda: not farm.rows("SELECT FROM dl_jobs WHERE queue = 'alerts' AND status <> 'succeeded'"), "their ends")
    refused, *taken = receiver.got  # a second message may come before the first one is tried again
    ids = [got.headers["webhook-id"] for got in taken]
    assert ids.count(refused.headers["webhook-id"]) == 1, "the same message, tried again"
    assert len(set(ids)) == len(ids)
    assert all(is_signed(got) for got in receiver.got)
    assert sorted(told(1)) == sorted(map(str, jobs))
    assert refused.path == f"/{CANARY}"
    stored = str(farm.rows("SELECT row_to_json(j) FROM dl_jobs j UNION ALL SELECT row_to_json(w) FROM dl_webhooks w"))
    for text in (stored, *(program.log.read_text() for program in programs)):
        assert CANARY not in text
        assert KEY not in text


def test_the_places_of_a_node_count_for_all_workers_and_a_killed_one_leaves_its_place(farm: Farm) -> None:
    with closing(FakeNode()) as node, closing(FakeNode("mlx", ("mlx-community/Llama-3.2-3B",))) as mlx:
        mlx.behave = "hangs"
        nodes = {"ollama_api_url": node.url, "mlx_api_url": mlx.url, "ollama_base_url": "", "dl_llm_busy_percent": 100}
        farm.ready(workers=2, dl_llm_mlx_concurrent=1, dl_llm_categories='{"default": ["mlx*", "*"]}', **nodes)
        first = farm.enqueue("llm.generate", args={"prompt": "Why?"})
        assert mlx.silent.wait(60)
        second = farm.wait(farm.enqueue("llm.generate", args={"prompt": "Why?"}), "succeeded")["progress"]
        assert (second["node"], second["text"]) == (node.url, " ".join(WORDS))
        reason = "this machine has 1 of 1 requests in flight there"
        assert second["passed_over"] == [{"node": mlx.url, "reason": reason}]
        mlx.behave = "answers"
        farm.worker(first).kill()
        assert farm.wait(first, "succeeded")["progress"]["node"] == mlx.url
