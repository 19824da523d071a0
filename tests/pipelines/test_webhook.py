"""The promises of `alert.webhook`, against a receiver that speaks HTTP over real sockets."""

import json
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from judging import Load, fails_for_good
from receiver import KEY, Receiver, is_signed

from dataloader.config import Settings
from dataloader.pipelines import PermanentError, Retry, http, webhook
from dataloader.queue import db
from dataloader.queue.reports import messages, webhooks
from dataloader.testing import Result

RULES = Settings.model_construct(
    dl_alerts_bundle_sec=60.0,
    dl_alerts_paused_sec=3_600.0,
    environment="prod <1>",
    dl_public_url="https://farm.example.com",
)
NOW = datetime(2026, 1, 31, 6, 30, tzinfo=UTC)
CANARY = "canary-5f2c"
Send = Callable[..., Result]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A proxy of the environment, which nothing may use."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("DL_WEBHOOK_KEY", KEY)
    return monkeypatch


@pytest.fixture
def send(job: Load, conn: db.Connection, receiver: Receiver) -> Send:
    """Send a message to a webhook with these fields; one attempt."""

    def send(message: dict[str, Any] | None = None, max_attempts: int = 1, **fields: Any) -> Result:
        webhooks.put(conn, "ops", **({"url": f"{receiver.url}/a"} | fields), by="test")
        job_id = stored(conn, message or messages.test("ops", RULES, NOW))
        return job("alert.webhook", job_id=job_id, max_attempts=max_attempts)

    return send


def stored(conn: db.Connection, message: dict[str, Any], webhook: str = "ops") -> UUID:
    """The id of a job for which the farm has stored this message."""
    job_id = uuid4()
    conn.execute("INSERT INTO dl_messages VALUES (%s, %s, %s)", (job_id, webhook, json.dumps(message)))
    return job_id


def dead(number: int = 2, error: str = "no") -> dict[str, Any]:
    rows = [
        {"event_id": n, "kind": "failed", "ts": NOW, "job_id": n, "queue": "q<&>", "task": f"t{n % 2}", "error": error,
         "silent_sec": None} for n in range(1, number + 1)
    ]  # fmt: skip
    webhook = {"name": "ops", "paused_at": None, "kinds": None, "queues": None, "lag_sec": 1.0, "shape": "json"}
    (message,) = messages.due(webhook, rows, [], [], RULES, NOW + timedelta(minutes=1))
    return json.loads(json.dumps(message))


def condition(state: str) -> dict[str, Any]:
    webhook = {"name": "ops", "paused_at": None, "kinds": None, "queues": None, "lag_sec": 60.0, "shape": "json"}
    told = [messages.Firing("lag", "q", NOW, NOW)] if state == "resolved" else []
    queue = {"queue": "q", "lag_sec": 0.0 if told else 720.0, "paused_at": None, "paused_by": None}
    (message,) = messages.due(webhook, [], [queue], told, RULES, NOW + timedelta(minutes=12))
    return message


def test_a_message_arrives_signed(send: Send, receiver: Receiver) -> None:
    message = dead()
    result = send(message, signed_by="DL_WEBHOOK_KEY")
    assert (result.status, result.result) == ("succeeded", {"sent": True, "status": 204})
    (got,) = receiver.got
    assert got.path == "/a"
    assert got.document == message
    assert got.headers["content-type"] == "application/json"
    assert got.headers["webhook-id"] == message["id"]
    assert abs(int(got.headers["webhook-timestamp"]) - time.time()) < 30
    assert is_signed(got)
    assert not is_signed(got._replace(body=got.body + b" "))
    assert not is_signed(got, "whsec_" + "A" * 32)


def test_the_example_of_the_specification(environment: pytest.MonkeyPatch) -> None:
    """Of the library at github.com/standard-webhooks/standard-webhooks."""
    body = b'{"test": 2432232314}'
    headers = webhook.signed("DL_WEBHOOK_KEY", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_secret_address_comes_from_the_environment(
    send: Send, receiver: Receiver, environment: pytest.MonkeyPatch
) -> None:
    url = receiver.url.replace("http://", f"http://user:{CANARY}%40%2F:@")
    environment.setenv("DL_WEBHOOK_OPS", f"{url}/s/T0/B0/{CANARY}%20?a={CANARY}%26b")
    assert send(url="${DL_WEBHOOK_OPS}").status == "succeeded"
    (got,) = receiver.got
    assert got.path == f"/s/T0/B0/{CANARY}%20?a={CANARY}%26b"
    assert got.headers["authorization"] == "Basic dXNlcjpjYW5hcnktNWYyY0AvOg=="


@pytest.mark.parametrize("url", ["/x?s=${DL_WEBHOOK_CANARY}", "/${DL_WEBHOOK_CANARY}", "/?k=${DL_WEBHOOK_KEY}"])
def test_no_secret_goes_to_a_host_that_it_does_not_name(
    job: Load, conn: db.Connection, receiver: Receiver, environment: pytest.MonkeyPatch, url: str
) -> None:
    """Also from a row that an older version has stored, or somebody with the right to write it."""
    environment.setenv("DL_WEBHOOK_CANARY", CANARY)
    webhooks.put(conn, "ops", receiver.url, "test")
    for wrong in (receiver.url + url, receiver.url.replace("http://", "http://user:${DL_WEBHOOK_CANARY}@")):
        conn.execute("UPDATE dl_webhooks SET url = %s", (wrong,))
        result = job("alert.webhook", job_id=stored(conn, dead()), max_attempts=5)
        fails_for_good(result, "should hold the whole URL", CANARY)
        assert receiver.got == []


@pytest.mark.parametrize(
    "wrong", [KEY, CANARY, f"ftp://a/{CANARY}", f"http://{CANARY} x/", f"http://a/{CANARY}#b", f"https://ä/{CANARY}",
              f"http://a/${{DL_WEBHOOK_KEY}}/{CANARY}", "${DL_WEBHOOK_KEY}"],
)  # fmt: skip
def test_a_variable_that_holds_no_url_is_refused_and_not_shown(
    send: Send, environment: pytest.MonkeyPatch, wrong: str
) -> None:
    environment.setenv("DL_WEBHOOK_OPS", wrong)
    result = send(url="${DL_WEBHOOK_OPS}", max_attempts=5)
    fails_for_good(result, "DL_WEBHOOK_OPS should hold the whole URL")
    assert CANARY not in str(result)
    assert KEY not in str(result)


def test_alertmanagers_shape_of_dead_jobs(send: Send, receiver: Receiver) -> None:
    send(dead(3), shape="alertmanager")
    alerts = receiver.got[0].document
    assert [(alert["labels"]["task"], alert["annotations"]["summary"]) for alert in alerts] == [
        ("t1", "2 jobs are dead in queue q<&>."),
        ("t0", "1 job is dead in queue q<&>."),
    ]
    assert alerts[0] == {
        "labels": {"alertname": "DataloaderDeadJobs", "severity": "critical", "environment": "prod <1>",
                   "queue": "q<&>", "task": "t1"},
        "annotations": {"summary": "2 jobs are dead in queue q<&>.", "description": "1 failed: no\n3 failed: no"},
        "startsAt": "2026-01-31T06:30:00Z",
        "endsAt": "2026-01-31T07:31:00Z",
        "generatorURL": "https://farm.example.com/jobs?status=dead",
    }  # fmt: skip


def test_alertmanagers_shape_of_a_condition_that_begins_and_ends(send: Send, receiver: Receiver) -> None:
    for state in ("firing", "resolved"):
        message = condition(state) | {"state": "event" if state == "firing" else state}
        send(message, shape="alertmanager")
    (begun,), (over,) = (got.document for got in receiver.got)
    assert begun["labels"] == over["labels"] == {
        "alertname": "DataloaderQueueLate", "severity": "warning", "environment": "prod <1>", "queue": "q",
    }  # fmt: skip
    assert begun["annotations"]["summary"] == "The oldest due job of queue q has waited 12 min."
    assert begun["startsAt"] == over["startsAt"] == "2026-01-31T06:30:00Z"
    assert over["endsAt"] == "2026-01-31T06:42:00Z"
    assert begun["endsAt"] > over["endsAt"]


def test_slacks_shape(send: Send, receiver: Receiver, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DL_WEBHOOK_SLACK", f"{receiver.url}/services/T0/B0/x")
    send(dead(15, error="<!channel> & <https://evil|x>"), shape="slack", url="${DL_WEBHOOK_SLACK}")
    document = receiver.got[0].document
    assert document["text"] == "15 jobs are dead in queue q&lt;&amp;&gt;."
    head, lines = (block["text"]["text"] for block in document["blocks"])
    assert head == (
        ":red_circle: *prod &lt;1&gt;*: <https://farm.example.com/jobs?status=dead|"
        "15 jobs are dead in queue q&lt;&amp;&gt;.>"
    )
    assert "• <https://farm.example.com/jobs/1|t1 1> failed: &lt;!channel&gt; &amp; &lt;https://evil|x&gt;" in lines
    assert lines.endswith("\nand 5 more")
    assert all(len(block["text"]["text"]) <= 3_000 for block in document["blocks"])


def test_what_may_pass_is_tried_again_after_growing_pauses(send: Send, receiver: Receiver) -> None:
    receiver.answers = [(503, {})] * 4
    result = send(max_attempts=4)
    assert (result.status, result.attempts, result.error) == ("failed", 4, "127.0.0.1 answered 503")
    pauses = [run.exception.in_sec for run in result.runs if isinstance(run.exception, Retry)]
    assert 2.5 <= pauses[0] <= 5
    assert 20 <= pauses[3] <= 40


@pytest.mark.parametrize("status", [429, 503])
def test_a_receiver_says_when_it_is_to_be_asked_again(send: Send, receiver: Receiver, status: int) -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=300), usegmt=True)
    answers = [{"Retry-After": "17"}, {"Retry-After": later}, {"Retry-After": "9999999"}, {"Retry-After": "soon"}]
    receiver.answers = [(status, headers) for headers in answers]
    result = send(max_attempts=4)
    pauses = [run.exception.in_sec for run in result.runs if isinstance(run.exception, Retry)]
    assert pauses[0] == 17
    assert 200 < pauses[1] <= 300
    assert pauses[2] == 86_400
    assert pauses[3] <= 40


def test_another_4xx_is_for_good(send: Send, receiver: Receiver) -> None:
    receiver.answers = [(404, {})]
    fails_for_good(send(max_attempts=5), "127.0.0.1 answered 404")


def test_a_receiver_that_is_gone_pauses_its_webhook(send: Send, receiver: Receiver, conn: db.Connection) -> None:
    receiver.answers = [(410, {})]
    fails_for_good(send(max_attempts=5), "127.0.0.1 answered 410")
    found = webhooks.find(conn, "ops")
    assert found is not None
    assert found["paused_by"] == "its receiver, which answered 410 Gone"
    assert send(dead()).result == {"sent": False, "why": "the webhook is paused"}
    assert len(receiver.got) == 1
    assert send().status == "succeeded", "a test is sent all the same"


def test_no_redirect_is_followed(send: Send, receiver: Receiver) -> None:
    other = Receiver()
    receiver.answers = [(307, {"Location": f"{other.url}/?{CANARY}"})]
    result = send(max_attempts=5)
    other.close()
    fails_for_good(result, "redirects are not followed", CANARY)
    assert other.got == []


def test_a_silent_receiver_is_tried_again(send: Send, environment: pytest.MonkeyPatch) -> None:
    environment.setattr(webhook, "POST_SEC", 0.2)
    silent = Receiver(silent=True)
    result = send(url=silent.url)
    silent.close()
    assert isinstance(result.exception, Retry)
    assert str(result.error).startswith("127.0.0.1 has not answered within 0.2 s")


def test_a_receiver_that_breaks_off_or_is_down_is_tried_again(
    send: Send, receiver: Receiver, environment: pytest.MonkeyPatch
) -> None:
    def unknown_here(*_: Any, **__: Any) -> None:
        raise socket.gaierror  # a name server that is away takes its time

    receiver.answers = [(0, {})]
    broke = send()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        down = send(url=f"http://127.0.0.1:{probe.getsockname()[1]}/{'x' * 30}")
    environment.setattr(http, "getaddrinfo", unknown_here)
    unknown = send(url="http://no-such-host.invalid/")
    for result in (broke, down, unknown):
        assert isinstance(result.exception, Retry), result.error
        assert "xxxx" not in str(result.error)


def test_nothing_is_sent_to_a_metadata_service(send: Send) -> None:
    fails_for_good(send(url="http://169.254.169.254/latest/meta-data/", max_attempts=5), "nothing is sent there")


def test_a_condition_that_is_over_by_now_is_not_sent(send: Send, receiver: Receiver, conn: db.Connection) -> None:
    message = condition("firing")
    assert send(message).result == {"sent": False, "why": "it is over by now"}
    conn.execute(
        "INSERT INTO dl_alerts (webhook, kind, queue, since) VALUES ('ops', 'lag', 'q', %s)", (message["since"],)
    )
    assert send(message).result == {"sent": True, "status": 204}
    assert len(receiver.got) == 1


def test_a_message_to_a_removed_webhook_ends_well(job: Load, conn: db.Connection) -> None:
    result = job("alert.webhook", job_id=stored(conn, dead(), "gone"))
    assert result.result == {"sent": False, "why": "the webhook has been removed"}


def test_a_variable_that_is_missing_may_be_set_on_another_machine(send: Send) -> None:
    for fields in ({"url": "${DL_WEBHOOK_NONE}"}, {"signed_by": "DL_WEBHOOK_NONE"}):
        result = send(**fields)
        assert isinstance(result.exception, Retry)
        assert "the variable DL_WEBHOOK_NONE is not set" in str(result.error)
        assert socket.gethostname() in str(result.error)


@pytest.mark.parametrize(
    "key", [CANARY, f"whsec_{CANARY}", "whsec_c2hvcnQ=", "whsec_", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]
)
def test_a_key_of_another_form_is_refused_and_not_shown(
    send: Send, receiver: Receiver, environment: pytest.MonkeyPatch, key: str
) -> None:
    environment.setenv("DL_WEBHOOK_KEY", key)
    result = send(signed_by="DL_WEBHOOK_KEY", max_attempts=5)
    fails_for_good(result, "the variable DL_WEBHOOK_KEY should hold whsec_")
    assert receiver.got == []
    assert key.removeprefix("whsec_") not in str(result.error) or key == "whsec_"


def test_an_error_shows_no_more_of_the_address_than_its_host(
    send: Send, receiver: Receiver, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("DL_WEBHOOK_OPS", f"{receiver.url}/{CANARY}")
    for answer in ((500, {}), (404, {}), (302, {"Location": f"/{CANARY}"}), (0, {})):
        receiver.answers = [answer]
        result = send(url="${DL_WEBHOOK_OPS}")
        assert result.status == "failed"
        assert CANARY not in str(result)


def test_a_job_that_the_farm_has_not_added_sends_nothing(job: Load, conn: db.Connection, receiver: Receiver) -> None:
    """Its args make no difference, nor do other messages that are under way."""
    webhooks.put(conn, "ops", receiver.url, "test", signed_by="DL_WEBHOOK_KEY")
    stored(conn, dead())
    for args in ({}, {"webhook": "ops", "message": dead()}, {"webhook": "ops", "message": {"kind": "test"}}):
        result = job("alert.webhook", args, max_attempts=5)
        assert isinstance(result.exception, PermanentError)
        assert "the farm has not added this job" in str(result.error)
    assert receiver.got == []


def test_the_args_of_a_job_do_not_change_its_message(job: Load, conn: db.Connection, receiver: Receiver) -> None:
    """Another service may have the right to change rows of jobs."""
    webhooks.put(conn, "ops", receiver.url, "test")
    message = dead()
    job("alert.webhook", {"webhook": "ops", "message": message | {"text": "FORGED"}}, job_id=stored(conn, message))
    assert [got.document for got in receiver.got] == [message]
