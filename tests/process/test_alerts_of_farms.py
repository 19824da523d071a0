"""From a job that dies to the message at a receiver, by a real farm with its reapers; the command line for it."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner
from farming import Farm, until
from receiver import KEY, Receiver, is_signed

from dataloader.cli.main import main

CANARY = "canary-5f2c"
WISH = json.dumps([{"queue": "q"}, {"queue": "alerts"}])


def ask(farm: Farm, *words: str) -> Any:
    done = CliRunner().invoke(main, [*words, "--dsn", farm.dsn])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def add(farm: Farm, receiver: Receiver, *more: str) -> None:
    assert (
        ask(farm, "webhook", "add", "ops", "${DL_WEBHOOK_OPS}", "--signed-by", "DL_WEBHOOK_KEY", *more).exit_code == 0
    )


def secrets(receiver: Receiver) -> dict[str, str]:
    """The variables of the workers."""
    return {"dl_webhook_key": KEY, "dl_webhook_ops": f"{receiver.url}/{CANARY}"}


def dead_jobs(receiver: Receiver) -> list[str]:
    return [job["job_id"] for got in receiver.got if got.document["kind"] == "dead" for job in got.document["jobs"]]


def test_a_job_dies_and_the_message_arrives_signed_and_once(farm: Farm, receiver: Receiver) -> None:
    """Beside three reapers; the receiver is ill at first."""
    receiver.answers = [(503, {"Retry-After": "1"})]
    add(farm, receiver)
    programs = [farm.ready(workers=2, workers_json=WISH, **secrets(receiver))]
    programs += [farm.start("reaper", dl_alerts_bundle_sec=1, **secrets(receiver)) for _ in range(3)]
    for reaper in programs[1:]:
        until(lambda reaper=reaper: reaper.events("reaper.started"), "the reapers")
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


def test_a_reaper_that_is_killed_and_replaced_tells_each_death_once(farm: Farm, receiver: Receiver) -> None:
    add(farm, receiver)
    farm.ready(workers=2, workers_json=WISH, **secrets(receiver))
    jobs = []
    for _ in range(3):
        reaper = farm.start("reaper", dl_alerts_bundle_sec=1)
        until(lambda reaper=reaper: reaper.events("reaper.started"), "the reaper")
        jobs.append(farm.enqueue("no such task", max_attempts=1))
        farm.wait(jobs[-1], "failed")
        if len(jobs) < 3:
            reaper.process.kill()
            reaper.process.wait()
    until(lambda: len(dead_jobs(receiver)) >= 3, "the messages")
    assert sorted(dead_jobs(receiver)) == sorted(map(str, jobs))


def test_doctor_says_that_nobody_sends_the_messages_and_a_test_arrives_once_somebody_does(
    farm: Farm, receiver: Receiver
) -> None:
    add(farm, receiver)
    asked = ask(farm, "webhook", "test", "ops", "--json")
    assert json.loads(asked.stdout)["advice"].endswith('add {"queue": "alerts"} to WORKERS_JSON.')
    said = ask(farm, "doctor").stdout
    assert "No worker serves the queue alerts, so webhooks are told nothing" in said
    assert "Queue alerts has 1 due and no worker." in said
    assert ask(farm, "webhook", "list").stdout.split("\n")[1].split()[:2] == ["ops", "json"]
    farm.ready(workers=2, workers_json=WISH, **secrets(receiver))
    until(lambda: receiver.got, "the test message")
    assert receiver.got[0].document["kind"] == "test"
    until(
        lambda: "worker" not in ask(farm, "doctor").stdout.replace("lost workers", ""), "the keeper to show its workers"
    )
