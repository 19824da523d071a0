"""Both clients against a service with given answers: retries, time limits, long polls, and secrets, which stay here."""

import inspect
import pickle
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from typing import Any
from unittest.mock import create_autospec
from uuid import UUID

import anyio
import pytest
from answering import ID, STARTED, TOKEN, Answer, Service, problem, shown, state
from anyio.from_thread import BlockingPortal, start_blocking_portal
from both_clients import Blocking

from dataloader.client import (
    AsyncClient,
    Client,
    ClientError,
    Conflict,
    Forbidden,
    JobFailed,
    NotFound,
    QueueFull,
    Refused,
    Unauthorized,
    Unavailable,
    Unexpected,
    WaitTimeout,
    wire,
)
from dataloader.model import reading
from dataloader.model.farm import Fault
from dataloader.model.jobs import Status
from dataloader.model.queues import Limit, QueueState


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread of its own, for the tests of AsyncClient."""
    with start_blocking_portal() as made:
        yield made


@pytest.fixture(params=["Client", "AsyncClient"])
def make(request: pytest.FixtureRequest, portal: BlockingPortal) -> Iterator[Callable[..., Any]]:
    """Makes clients of either kind; every test that asks for it runs for both."""
    made: list[Any] = []

    def new(*args: Any, **kwargs: Any) -> Any:
        is_async = request.param == "AsyncClient"
        made.append(Blocking(AsyncClient(*args, **kwargs), portal) if is_async else Client(*args, **kwargs))
        return made[-1]

    yield new
    for client in made:
        client.close()


@pytest.fixture
def client(service: Service, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.01)
    return make(service.url, TOKEN, timeout=5, patience=5)


def test_a_trigger_says_all_fields_and_makes_a_key_that_its_retries_share(service: Service, client: Any) -> None:
    service.answers = [problem(503, "unavailable"), Answer(close=True), Answer(document=STARTED | {"new": 1})]
    at = datetime(2026, 1, 31, 6, tzinfo=UTC)
    started = client.trigger("t", queue="q", args={"a": "ü"}, priority=0, available_at=at, trace="00-ab-cd-01")
    assert (started.job_id, started.status) == (UUID(ID), "queued")
    assert len(service.asked) == 3
    assert len({asked.body["idempotency_key"] for asked in service.asked}) == 1
    last = service.asked[-1]
    assert (last.method, last.path) == ("POST", "/api/v1/jobs/trigger")
    assert last.headers["authorization"] == f"Bearer {TOKEN}"
    assert last.headers["traceparent"] == "00-ab-cd-01"
    assert last.body.pop("idempotency_key").startswith("client-")
    assert last.body == {
        "task": "t",
        "queue": "q",
        "lock_key": "t",
        "args": {"a": "ü"},
        "priority": 0,
        "available_at": "2026-01-31T06:00:00+00:00",
    }


def test_many_jobs_are_sent_by_the_thousand_each_with_a_key_and_a_last_one_beside_them(
    service: Service, client: Any
) -> None:
    service.answers = [Answer(document={"jobs": [STARTED] * 1000}), Answer(document={"jobs": [STARTED]})]
    found = client.trigger_many([{"task": "t", "idempotency_key": "mine"}, *[{"task": "t", "queue": "q"}] * 1000])
    assert len(found) == 1001
    first, second = (asked.body["jobs"] for asked in service.asked)
    assert (len(first), len(second)) == (1000, 1)
    assert first[0] == {"task": "t", "queue": "etl.default", "lock_key": "t", "idempotency_key": "mine"}
    assert len({job["idempotency_key"] for job in first + second}) == 1001
    for jobs in ([{"task": "t"}], []):
        service.answers = [Answer(document={"jobs": [STARTED] * (len(jobs) + 1)})]
        assert len(client.trigger_many(jobs, on_done={"task": "report"})) == len(jobs) + 1
        last = service.asked[-1].body["on_done"]
        assert (last["task"], last["lock_key"], bool(last["idempotency_key"])) == ("report", "report", True)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(400, "invalid-input"), Refused),
        (problem(413, "too-large"), Refused),
        (problem(401, "unauthorized"), Unauthorized),
        (problem(403, "forbidden"), Forbidden),
        (problem(404, "not-found"), NotFound),
        (problem(409, "conflict"), Conflict),
        (problem(500, "internal-error"), Unexpected),
        (Answer(302, headers={"Location": "http://elsewhere.invalid/"}), Unexpected),
        (Answer(raw=b"<html>"), Unexpected),
        (Answer(raw=b"[" * 100_000), Unexpected),
        (Answer(document=[]), Unexpected),
        (Answer(document={"job_id": "x", "status": "queued"}), Unexpected),
        (Answer(document={"job_id": ID}), Unexpected),
        (Answer(document={"job_id": ID, "status": 7}), Unexpected),
    ],
)
def test_what_does_not_pass_is_a_typed_error_at_once(
    service: Service, client: Any, answer: Answer, kind: type[ClientError]
) -> None:
    service.answers = [answer]
    with pytest.raises(ClientError) as caught:
        client.trigger("t")
    assert type(caught.value) is kind
    assert len(service.asked) == 1


def test_a_refusal_has_the_fields_of_the_problem(service: Service, client: Any) -> None:
    fault = {"pointer": "/queue", "code": "too_short", "message": "at least 1 character"}
    service.answers = [problem(400, "invalid-input", "one field", errors=[fault, "odd", {"pointer": 1}])]
    with pytest.raises(Refused) as caught:
        client.trigger("t")
    error = caught.value
    assert (error.status, error.kind, error.detail, error.request_id) == (400, "invalid-input", "one field", "r1")
    assert error.faults[0] == Fault(**fault)
    assert str(error) == "title invalid-input: one field\n  /queue: at least 1 character"


def test_a_pause_is_as_long_as_the_service_says_and_not_begun_where_patience_is_shorter(
    service: Service, client: Any
) -> None:
    service.answers = [problem(429, "queue-full", headers={"Retry-After": "1"}), Answer(document=STARTED, delay=0.02)]
    begun = time.monotonic()
    client.trigger("t")
    assert time.monotonic() - begun > 1
    with ThreadPoolExecutor(8) as threads:  # which share the client
        assert len([*threads.map(lambda _: client.trigger("t"), range(40))]) == 40
    in_an_hour = format_datetime(datetime.now(UTC) + timedelta(seconds=3_600), usegmt=True)
    for given, least, most in (("60", 60, 60), (in_an_hour, 3_000, 3_600), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0)):
        assert least <= (wire.seconds(given) or 0) <= most
        service.answers = [problem(429, "queue-full", headers={"Retry-After": given})]
        begun = time.monotonic()
        if least:
            with pytest.raises(QueueFull) as caught:
                client.trigger("t")
            assert least <= caught.value.retry_after <= most
            assert time.monotonic() - begun < 30
    assert [wire.seconds(text) for text in ("soon", "", None)] == [None, None, None]


def test_what_means_something_else_twice_is_sent_once(service: Service, client: Any) -> None:
    service.answers = [Answer(close=True), Answer(document=state("queued"))]
    with pytest.raises(Unavailable):
        client.requeue(ID)
    assert len(service.asked) == 1
    assert client.requeue(ID).status == "queued"
    service.answers = [Answer(document={"job_id": ID, "deleted": True})]
    client.delete(ID)
    assert service.asked[-1][:2] == ("DELETE", f"/api/v1/jobs/{ID}")


def test_a_connection_is_kept_and_a_closed_one_is_seen(service: Service, client: Any) -> None:
    service.answers = [Answer(document=state("queued"))]
    for _ in range(3):
        client.status(ID)
    service.answers = [Answer(document=state("queued"), headers={"Connection": "close"})]
    client.status(ID)
    assert len({asked.connection for asked in service.asked}) == 1
    client.status(ID)
    assert len({asked.connection for asked in service.asked}) == 2


def test_every_wait_ends_and_half_an_answer_or_too_much_of_one_is_none(
    service: Service, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answers = [Answer(document=STARTED, delay=30)]
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="timed out"):
        make(service.url, timeout=0.2, patience=0).status(ID)
    silent = socket.create_server(("127.0.0.1", 0))  # the service accepts the connection and does not answer
    with silent, pytest.raises(Unavailable, match="timed out"):
        make(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2, patience=0).status(ID)
    assert time.monotonic() - begun < 20
    service.answers = [Answer(raw=b'{"job_id"', headers={"Content-Length": "50", "Connection": "close"})]
    with pytest.raises(Unavailable, match="no whole HTTP answer"):
        make(service.url, patience=0).status(ID)
    monkeypatch.setattr(wire, "ANSWER_LIMIT", 1 << 20)
    service.answers = [Answer(raw=b'"' + b"x" * (2 << 20) + b'"')]
    with pytest.raises(Unexpected, match="too large"):
        make(service.url, patience=0).status(ID)


def test_a_wait_polls_with_what_it_knows_and_tells_of_changes(service: Service, client: Any) -> None:
    service.answers = [
        Answer(document=state("queued"), headers={"ETag": 'W/"1"'}),
        Answer(304, headers={"ETag": 'W/"1"', "Retry-After": "1"}),  # the service has too many long polls
        problem(503, "unavailable"),
        Answer(close=True),
        Answer(document=state("running", progress={"processed": 1, "total": 4}), headers={"ETag": 'W/"2"'}),
        Answer(document=state("running", progress={"processed": 1, "total": 4}), headers={"ETag": 'W/"3"'}),
        Answer(document=state("succeeded"), headers={"ETag": 'W/"4"'}),
    ]
    seen: list[Status] = []
    begun = time.monotonic()
    assert client.wait(ID, 60, seen.append).status == "succeeded"
    assert time.monotonic() - begun > 1
    assert [(job.status, job.fraction) for job in seen] == [("queued", None), ("running", 0.25), ("succeeded", None)]
    assert [asked.path.partition("?")[2] for asked in service.asked[:2]] == ["", "wait=25"]
    known = [asked.headers.get("if-none-match") for asked in service.asked]
    assert known == [None, 'W/"1"', 'W/"1"', 'W/"1"', 'W/"1"', 'W/"2"', 'W/"3"']


def test_a_wait_ends_in_time_whatever_the_service_does(service: Service, client: Any) -> None:
    service.answers = [Answer(document=state("running"))]  # an older service, without long polls
    with pytest.raises(WaitTimeout) as caught:
        client.wait(ID, 1)
    assert (caught.value.job.status, isinstance(caught.value, TimeoutError)) == ("running", True)
    assert len(service.asked) <= 8
    service.answers = [problem(503, "unavailable")]
    with pytest.raises(WaitTimeout):
        client.wait(ID, 0.2)
    with pytest.raises(Unavailable):
        client.wait(ID, patience=0.2)


def test_run_returns_a_success_and_raises_any_other_end(service: Service, client: Any) -> None:
    done = Answer(document=state("succeeded"))
    for value in ({"a": 1}, [], "", 0, False, None):  # a result may be any JSON
        returned = Answer(document={"job_id": ID, "status": "succeeded", "result": value})
        service.answers = [Answer(document=STARTED), done, returned]
        assert client.run("t", args={"a": 1}).result == value == client.result(ID)
        assert service.asked[-1].path == f"/api/v1/jobs/{ID}/result"
    service.answers = [Answer(document=STARTED), done, problem(404, "not-found")]
    assert client.run("t").result is None, "an older service has no results"
    with pytest.raises(NotFound):
        client.result(ID)
    service.answers = [Answer(document=STARTED), Answer(document=state("failed", error="boom"))]
    with pytest.raises(JobFailed, match="ended failed") as caught:
        client.run("t")
    assert caught.value.job.error == "boom"


def test_pages_are_asked_for_as_they_are_taken(service: Service, client: Any) -> None:
    pages = [([state("failed")] * 2, "c 1"), ([], "c2"), ([state("lost")], None)]
    service.answers = [Answer(document={"jobs": jobs, "next": after}) for jobs, after in pages]
    found = client.jobs(queue="q", status="dead", since=datetime(2026, 1, 1, tzinfo=UTC))
    assert next(found).status == "failed"
    assert len(service.asked) == 1
    assert [job.status for job in found] == ["failed", "lost"]
    paths = [asked.path for asked in service.asked]
    assert paths[0] == "/api/v1/jobs?queue=q&status=dead&since=2026-01-01T00%3A00%3A00%2B00%3A00&limit=200"
    assert paths[1].endswith("&limit=200&after=c+1")
    service.answers = [Answer(document={"jobs": [state("failed")] * 2, "next": "x"})]
    assert len(list(client.jobs(limit=4))) == 4
    assert service.asked[-1].path.endswith("limit=2&after=x")


def test_names_of_queues_are_quoted_in_addresses(service: Service, client: Any) -> None:
    service.answers = [Answer(document=shown(QueueState, queue="a/b ?"))]
    assert client.pause("a/b ?").queue == "a/b ?"
    assert service.asked[-1].path == "/api/v1/queues/a%2Fb%20%3F/pause"
    client.pause("..")  # proxies would remove these from the path
    assert service.asked[-1].path == "/api/v1/queues/-/pause?name=.."
    client.limit(".", None)
    assert service.asked[-1].path == "/api/v1/queues/-/limit?name=."
    client.set_queue("warehouse/move é&", ordered=True)  # in the path it would be another address
    assert service.asked[-1][:2] == ("PUT", "/api/v1/queues/-?name=warehouse%2Fmove+%C3%A9%26")


def test_an_answer_ignores_what_it_does_not_know() -> None:
    """A newer service has added it."""
    limit = {"name": "n", "most": 3, "running": 2, "waiting": 1, "room": 1, "changed_at": "2026-01-01T00:00:00Z"}
    found = reading.read(Limit, limit | {"news": 1})
    assert found.changed_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert found.per_minute is None, "an older service does not have it, and it may be null"
    with pytest.raises(reading.NotUnderstood, match="Limit: name is missing"):
        reading.read(Limit, {"most": 3})
    with pytest.raises(reading.NotUnderstood, match="changed_at: it is of another kind"):
        reading.read(Limit, limit | {"changed_at": 5})
    assert reading.read(Status, state("running", progress=["any", "JSON"])).fraction is None


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "x", "http://", "http://u:geheim@x", "http://x:port", "http://x/?a=1", "http://x/\r\nA: b", "//x"],
)
def test_an_address_that_is_none_is_refused_without_its_password(url: str, make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="the URL should") as caught:
        make(url)
    assert "geheim" not in str(caught.value)


def test_the_token_is_nowhere_to_be_seen(service: Service, make: Callable[..., Any]) -> None:
    client = make(service.url, TOKEN, patience=0)
    service.answers = [problem(400, "invalid-input", f"the header was Bearer {TOKEN}")]
    with pytest.raises(Refused) as caught:
        client.status(ID)
    texts = [repr(client), str(caught.value), repr(caught.value), caught.value.detail]
    texts += [repr(vars(client._transport)), repr(vars(client._service))]
    with pytest.raises(ValueError, match="printable") as refused:
        make(service.url, f"{TOKEN}\nX-Evil: 1")
    texts += [str(refused.value), repr(client._service._token)]
    assert not any("canary" in text for text in texts), texts
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(client._service)


def test_the_environments_token_goes_to_the_environments_address_only(
    service: Service, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> None:
    monkeypatch.setenv("DL_URL", service.url)
    monkeypatch.setenv("DL_TOKEN", TOKEN)
    service.answers = [Answer(document=state("queued"))]
    make().status(ID)
    make(service.url).status(ID)
    assert ["authorization" in asked.headers for asked in service.asked] == [True, False]


def test_bad_arguments_are_refused_before_anything_is_sent(service: Service, client: Any) -> None:
    with pytest.raises(ValueError, match="time zone"):
        client.trigger("t", available_at=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(ValueError, match="JSON compliant"):
        client.trigger("t", args={"a": float("nan")})
    with pytest.raises(ValueError, match="up to 1000 jobs: name their ids in the depends_on of another job"):
        client.trigger_many([{"task": "t"}] * 1001, on_done={"task": "report"})
    assert not service.asked


def test_the_span_under_way_goes_along(service: Service, client: Any) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    service.answers = [Answer(200, STARTED), Answer(200, {"jobs": [STARTED]}), Answer(200, STARTED)]
    with TracerProvider().get_tracer("t").start_as_current_span("s") as span:
        client.trigger("t")
        client.trigger_many([{"task": "t"}])
    client.trigger("t")
    one, many, outside = service.asked
    assert f"{span.get_span_context().trace_id:032x}" in one.headers["traceparent"]
    assert many.headers["traceparent"] == one.headers["traceparent"]
    assert "traceparent" not in outside.headers


PUBLIC = sorted(name for name in dir(Client) if not name.startswith("_"))


def test_both_clients_have_the_same_methods_and_signatures() -> None:
    assert sorted(name for name in dir(AsyncClient) if not name.startswith("_")) == PUBLIC
    for name in PUBLIC:
        blocking, waiting = getattr(Client, name), getattr(AsyncClient, name)
        if not callable(blocking):
            continue
        assert inspect.signature(blocking).parameters == inspect.signature(waiting).parameters, name
        is_iterator = str(inspect.signature(blocking).return_annotation).startswith("Iterator")
        assert inspect.iscoroutinefunction(waiting) is not is_iterator, name
        assert not inspect.iscoroutinefunction(inspect.unwrap(blocking)), name  # as unittest.mock of Python 3.13 asks


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_mocks_pickles_and_subclasses_take_a_method_for_a_function(kind: Any) -> None:
    mocked = create_autospec(kind, instance=True)
    answers = mocked.status(ID), mocked.wait(ID, 5), mocked.jobs(queue="q")
    for each in answers:
        if inspect.iscoroutine(each):
            each.close()
    with pytest.raises(TypeError, match="job_id"):
        mocked.status()
    assert pickle.loads(pickle.dumps(Client.status)) is Client.status

    class Own(kind):
        def status(self, job_id: str) -> str:
            return f"my {job_id}"

    class Owner(Own):
        pass

    assert Owner("http://farm").status("job") == "my job"
    assert Owner.jobs is kind.jobs


def test_a_wrong_argument_names_the_method(client: Any) -> None:
    for wrong in (client.status, client.move, partial(client.keys, "q", 1)):
        with pytest.raises(TypeError, match=r"^Operations\.\w+\(\) "):
            wrong()


def test_an_asynchronous_wait_tells_coroutines_and_ends_when_it_is_cancelled(service: Service) -> None:
    seen: list[str] = []

    async def show(job: Status) -> None:
        await anyio.sleep(0)
        seen.append(job.status)

    async def use() -> None:
        async with AsyncClient(service.url) as client:
            assert (await client.wait(ID, 60, show)).status == "succeeded"
            service.answers = [Answer(document=state("running"))]
            with anyio.move_on_after(0.3) as scope:
                await client.wait(ID)
            assert scope.cancelled_caught

    service.answers = [Answer(document=state("running")), Answer(document=state("succeeded"))]
    anyio.run(use)
    assert seen == ["running", "succeeded"]


def test_an_asynchronous_client_goes_on_in_another_event_loop(service: Service) -> None:
    service.answers = [Answer(document=state("queued"))]
    code = f"""
import asyncio
from dataloader import AsyncClient
client = AsyncClient({service.url!r})
for _ in range(3):
    print(asyncio.run(client.status("{ID}")).status)
asyncio.run(client.close())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("queued\n" * 3, "")


def test_without_httpx_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['httpx'] = None; from dataloader import AsyncClient"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "AsyncClient needs it; install 'dataloader-farm[async]'" in failed.stderr
