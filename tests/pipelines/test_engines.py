"""`run.dask`, `run.ray`, `run.spark`: what is allowed, what a run decides, what it reads; Ray and Spark are fakes."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from uuid import UUID

import pytest
import serving
from fake_spark import Driver, FakeSpark
from judging import Load, fails_for_good
from patience import PATIENCE, until
from serving import Handler

from dataloader import config, log
from dataloader.pipelines import engines
from dataloader.pipelines.engines import (
    ARGS_MOST,
    LINE_MOST,
    RESULT_KEPT,
    Lines,
    Order,
    Refused,
    State,
    order_of,
    spoken,
)
from dataloader.pipelines.engines.over_http import OnRay, OnSpark, Server
from dataloader.pipelines.http import Unreachable
from dataloader.testing import Result

SECRET = "hunter2-of-the-cluster"
Allow = Callable[..., None]  # these clusters
JOB = UUID(int=7)
SPARK_ENTRY = {"file": "file:/app.jar", "main_class": "jobs.Resize", "arguments": ["--fast"]}


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Allow:
    return lambda **clusters: monkeypatch.setenv("DL_ENGINES", json.dumps(clusters))


@pytest.fixture
def spark(allow: Allow, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSpark]:
    """A cluster whose answers may take long, for a stall of this machine is no absence."""
    monkeypatch.setattr(engines, "CANCEL_SEC", PATIENCE)
    fake = FakeSpark()
    where = {"address": f"http://farm:{SECRET}@{fake.address}", "master": f"http://{fake.address}"}
    allow(it={"engine": "spark", "entrypoints": {"resize": SPARK_ENTRY}, "away_sec": PATIENCE} | where)
    yield fake
    fake.close()


def started(job: Load, spark: FakeSpark, **how: Any) -> Callable[[], Result]:
    """Begin a job, and return a function that waits for its end."""
    args = {"cluster": "it", "entrypoint": "resize", "args": {"n": "a' $(id)"}}
    thread = ThreadPoolExecutor(1)
    ending = thread.submit(job, "run.spark", args, **how)
    thread.shutdown(wait=False)
    return partial(ending.result, PATIENCE)


# Allowed engines


@pytest.mark.parametrize(
    ("task", "args", "error"),
    [
        ("run.ray", {"cluster": "no", "entrypoint": "x"}, "cluster: should be one of ray that DL_ENGINES of this"),
        ("run.spark", {"cluster": "r", "entrypoint": "x"}, "should be one of spark that DL_ENGINES of this worker"),
        ("run.ray", {"cluster": "r", "entrypoint": "rm -rf /"}, "should be one that DL_ENGINES names for r (resize)"),
        ("run.dask", {"cluster": "d", "entrypoint": "os:system"}, "should be one that DL_ENGINES names for d (resize)"),
        ("run.ray", {"cluster": "r", "entrypoint": "resize", "address": "x"}, "address: there is no such argument"),
        ("run.ray", {"cluster": "r", "entrypoint": "resize", "env": {}}, "env: there is no such argument"),
        ("run.ray", {"cluster": "r", "entrypoint": "resize", "args": [1]}, "args: Input should be a valid dictionary"),
        ("run.ray", {"cluster": "r", "entrypoint": "resize", "args": {"x": "y" * ARGS_MOST}}, "args: should be at"),
        ("run.ray", {}, "cluster: Field required"),
    ],
)
def test_what_is_not_allowed_is_refused_at_once(
    job: Load, allow: Allow, task: str, args: dict[str, Any], error: str
) -> None:
    allow(
        r={"engine": "ray", "address": "http://127.0.0.1:1", "entrypoints": {"resize": "x"}},
        d={"engine": "dask", "address": "tcp://127.0.0.1:1", "entrypoints": {"resize": "a:b"}},
    )
    fails_for_good(job(task, args), error)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"engine": "slurm"}, "does not match any of the expected tags: 'dask', 'ray', 'spark'"),
        ({"engine": "ray", "address": f"ray:{SECRET}@x", "entrypoints": {"a": "b"}}, "should be an address such as"),
        ({"engine": "ray", "address": "http://ray:8265"}, "DL_ENGINES.it.ray.entrypoints: Field required"),
        ({"engine": "dask", "address": "tcp://d:1", "entrypoints": {"a": "os.system"}}, "entrypoints.a.function"),
        ({"engine": "ray", "address": "http://r:1", "entrypoints": {"a b": "c"}}, "should match pattern"),
        ({"engine": "ray", "address": "http://r:1", "entrypoints": {"a": "c"}, "tokn": SECRET}, "tokn"),
    ],
)
def test_a_wrong_setting_is_named_without_its_value(allow: Allow, entry: Any, error: str) -> None:
    allow(it=entry)
    with pytest.raises(config.ConfigError) as refused:
        config.load()
    assert error in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("engine", ["ray", "spark"])
@pytest.mark.parametrize("token", [f"{SECRET}\n", f"{SECRET} x", f"{SECRET}\u20ac", f"\x7f{SECRET}", ""])
def test_a_token_that_no_header_can_have_is_refused_without_its_value(allow: Allow, engine: str, token: str) -> None:
    where = {"engine": engine, "address": "http://it:1"} | ({"master": "http://it:2"} if engine == "spark" else {})
    entry = SPARK_ENTRY if engine == "spark" else "x"
    allow(it=where | {"entrypoints": {"a": entry}, "token": token})
    with pytest.raises(config.ConfigError) as refused:
        config.load()
    assert f"DL_ENGINES.it.{engine}.token: should be" in str(refused.value)
    assert SECRET not in str(refused.value)
    allow(it=where | {"entrypoints": {"a": entry}, "token": "!a~"})
    assert config.load().dl_engines["it"].token.get_secret_value() == "!a~"  # type: ignore[union-attr]


def test_the_secrets_of_clusters_are_masked_wherever_they_occur(allow: Allow) -> None:
    entry = {"command": "x", "runtime_env": {"env_vars": {"AWS_SECRET_ACCESS_KEY": "key-of-the-cloud"}}}
    where = {"engine": "ray", "address": f"http://u:{SECRET}@ray:8265", "token": "token-of-ray"}
    spark = {"address": "http://u:password-of-rest@spark:6066", "master": "http://u:password%20of-page@spark:8080"}
    spark |= {"engine": "spark", "entrypoints": {"a": SPARK_ENTRY}, "token": "token-of-spark"}
    allow(it=where | {"entrypoints": {"a": entry}}, spark=spark)
    settings = config.load()
    assert SECRET not in repr(settings)
    assert "token-of-ray" not in repr(settings)
    log.masking.learn_configured(settings)
    assert log.masked(f"{SECRET} token-of-ray key-of-the-cloud ray:8265") == "*** *** *** ray:8265"
    assert log.masked("password-of-rest password of-page token-of-spark spark:8080") == "*** *** *** spark:8080"


# Decisions of a run


def test_an_order_is_named_after_its_claim_and_kept_until_its_end_is_told() -> None:
    first = order_of(None, JOB, 3)
    assert first == Order(f"dl-{JOB}-3")
    assert order_of(first.checkpoint(), JOB, 4) == first
    assert order_of(replace(first, is_over=True).checkpoint(), JOB, 4) == Order(f"dl-{JOB}-4")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"processed": 5}', {"processed": 5}),
        (b' {"processed": 5.5, "total": 9, "node": "a"}\r', {"processed": 5.5, "total": 9, "node": "a"}),
        (b'{"result": [1]}', {"result": [1]}),
        (b'{"result": null}', {"result": None}),
        (b'{"result": 1, "more": 2}', None),
        (b'{"processed": true}', None),
        (b'{"processed": NaN}', None),
        (b'{"processed": 1, "text": "' + b"x" * 5_000 + b'"}', None),
        (b'{"level": "info"}', None),
        (b"{", None),
        (b"{}", None),
        (b"{" + b"[" * 100_000 + b"}", None),
        ("Ёж".encode("cp1251"), None),
    ],
)
def test_which_lines_speak_to_the_farm(line: bytes, said: Any) -> None:
    assert spoken(line) == said


def test_lines_that_come_in_pieces_are_taken_once_and_in_bounded_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = Lines(logging.getLogger("t"), 10_000)
    for byte in b'one\n{"processed": 1}\ntw':
        lines.take(bytes([byte]))
    assert (lines.taken_progress(), lines.taken_progress(), lines.unread) == ({"processed": 1}, None, 2)
    lines.take(b"x" * LINE_MOST)
    assert lines.unread == 2
    lines.take(b'\n{"result": 7}')
    lines.end()
    assert lines.result == 7
    assert "one" in caplog.text
    assert "the rest of its output is not logged" in caplog.text


@pytest.mark.parametrize("behind", [b"", b"ends\n", b"half"])
def test_a_result_is_read_again_also_where_a_line_without_end_follows_it(behind: bytes) -> None:
    written = b'one\n{"result": 7}\n' + b"x" * (LINE_MOST + 1)
    lines = Lines(logging.getLogger("t"), 0)
    lines.take(written)
    lines.take(behind)
    assert lines.unread == len(written + behind) - len(b"one\n")


# HTTP


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100
DRIP_SEC = 0.1


@contextmanager
def dripping(at_once: int, answer: bytes = ANSWER) -> Iterator[Server]:
    """A server that answers one request: with so many bytes at once, and then with a byte each DRIP_SEC."""
    is_over = threading.Event()

    def drip() -> None:
        with suppress(OSError), listening.accept()[0] as client:
            client.recv(65_536)
            client.sendall(answer[:at_once])
            for byte in answer[at_once:]:
                client.sendall(bytes([byte]))
                if is_over.wait(DRIP_SEC):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE)
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize("at_once", [0, len(ANSWER) - 100])  # then the head drips, or the body
def test_an_answer_that_drips_is_given_up_in_time(at_once: int) -> None:
    with dripping(at_once) as server, pytest.raises(Unreachable, match=r"has not answered within 0\.5 s"):
        server.ask("GET", "/", within=0.5)


def test_an_answer_that_may_be_long_is_awaited_while_its_bytes_come() -> None:
    with dripping(len(ANSWER) - 40) as server:  # that takes 4 s
        assert server.ask("GET", "/", within=3, whole=60).content == b"x" * 100


# Dask


def test_a_scheduler_that_takes_connections_and_is_silent_is_unreachable(allow: Allow) -> None:
    from dataloader.pipelines.engines.on_dask import OnDask

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        allow(it={"engine": "dask", "address": address, "entrypoints": {"resize": "jobs:resize"}})
        cluster = config.load().dl_engines["it"]
        assert isinstance(cluster, config.DaskCluster)
        engine = OnDask(cluster, cluster.entrypoints["resize"], "{}")
        opened = []
        for _ in range(3):
            with pytest.raises(Unreachable, match="the scheduler has not answered"):
                engine.cancel(ORDER, time.monotonic() + 0.3)
            opened.append(len(os.listdir("/proc/self/fd")))
        assert opened[2] <= opened[0], "each try leaves descriptors open"
        assert not [thread for thread in threading.enumerate() if thread.name in ("dask", "IO loop")]


# Ray


class FakeRay:
    """Ray's job API with one job; `log` is what it has written, None: its node is gone."""

    def __init__(self) -> None:
        self.status: str | None = None
        self.log: str | None = ""
        self.submitted: dict[str, Any] = {}
        self.refuses = ""
        fake = self

        class Answers(Handler):
            def do_GET(self) -> None:
                if fake.status is None:
                    return self.answer(404, b"Job does not exist")
                if not self.path.endswith("/logs"):
                    return self.say({"status": fake.status, "message": "bad, last available logs: x"})
                return self.answer(500) if fake.log is None else self.say({"logs": fake.log})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                if self.path.endswith("/stop"):
                    if fake.status is None:
                        return self.answer(404, b"Job does not exist")
                    return self.say({"stopped": fake.status == "STOPPABLE"})
                if fake.refuses or fake.status:
                    return self.answer(500, fake.refuses.encode() or b"already exists")
                fake.submitted, fake.status = json.loads(body), "RUNNING"
                return self.say({})

            def say(self, document: Any) -> None:
                self.answer(200, json.dumps(document).encode())

        self.server = serving.Server(Answers)


@pytest.fixture
def ray(allow: Allow) -> Iterator[FakeRay]:
    fake = FakeRay()
    entry = {"command": "python x.py", "runtime_env": {"env_vars": {"A": "b"}}, "cpus": 2, "memory_mb": 3}
    where = {"engine": "ray", "address": fake.server.url, "away_sec": 1}
    allow(it=where | {"entrypoints": {"x": entry}})
    yield fake
    fake.server.close()


def on_ray() -> OnRay:
    cluster = config.load().dl_engines["it"]
    return OnRay(cluster, cluster.entrypoints["x"], '{"n": "a\' $(id)"}')  # type: ignore[arg-type]


ORDER = Order("dl-x-1", "dl-x-1")


def test_ray_that_refuses_is_quoted(ray: FakeRay) -> None:
    ray.refuses = "Traceback ...\nValueError: no such working_dir"
    with pytest.raises(Refused, match=r"has answered 500: Traceback ...\nValueError: no such working_dir"):
        on_ray().submit(ORDER)


@pytest.mark.parametrize(
    ("status", "state", "why"),
    [
        ("PENDING", State.RUNNING, ""),
        ("FAILED", State.FAILED, "bad"),
        ("STOPPED", State.STOPPED, ""),
        (None, State.ABSENT, ""),  # it has lost its memory
    ],
)
def test_ray_whose_output_is_gone_tells_its_state(ray: FakeRay, status: str, state: State, why: str) -> None:
    ray.status, ray.log = status, None
    assert on_ray().poll(ORDER)[:4] == (state, b"", 0, why)


def test_ray_whose_output_is_gone_is_asked_again_for_a_result(ray: FakeRay) -> None:
    ray.status, ray.log = "SUCCEEDED", None
    with pytest.raises(Unreachable, match="cannot read the output of dl-x-1"):
        on_ray().poll(ORDER)


@pytest.mark.parametrize(
    ("status", "is_confirmed"), [(None, True), ("STOPPABLE", True), ("RUNNING", False), ("SUCCEEDED", True)]
)
def test_ray_confirms_a_stop_of_what_it_can_stop_or_what_has_ended(
    ray: FakeRay, status: str | None, is_confirmed: bool
) -> None:
    ray.status = status
    with nullcontext() if is_confirmed else pytest.raises(Unreachable, match="has not stopped it"):
        on_ray().cancel(ORDER, time.monotonic() + PATIENCE)


def test_an_output_that_is_too_long_is_told_at_the_end(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloader.pipelines.engines.over_http.ANSWER_MOST", 1_000)
    ray.status, ray.log = "RUNNING", "x" * 2_000
    it = on_ray()
    assert it.poll(ORDER).output == b""
    ray.status = "SUCCEEDED"
    assert b"its rest is not read, nor a result in it" in it.poll(ORDER).output


# Spark


def test_spark_is_followed_to_its_result(job: Load, spark: FakeSpark, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ended = started(job, spark)
    driver = until(lambda: spark.drivers.get("driver-1"), "the driver")
    driver.stdout = b'begun\n{"processed": 1, "total": 2, "done": "a", "checkpoint": 1}\nhalf'
    until(lambda: driver.reads > 1, "a look at it")
    driver.stdout += b' way\n{"result": {"rows": 5}}\n'
    driver.state = "FINISHED"
    result = ended()
    assert (result.status, result.result) == ("succeeded", {"rows": 5})
    assert {"processed": 1, "total": 2, "done": "a", "checkpoint": 1} in result.progress
    said = [record.getMessage() for record in caplog.records if record.name == "pipeline.run.spark"]
    assert said[1:] == ["begun", "half way"]
    request = driver.request
    assert (request["mainClass"], request["appArgs"]) == ("jobs.Resize", ["--fast"])
    assert json.loads(request["environmentVariables"]["DATALOADER_ARGS"]) == {"n": "a' $(id)"}
    assert request["sparkProperties"]["spark.app.name"] == f"dl-{result.job_id}-1"
    assert {who for _, path, who in spark.requests if path.startswith("/v1")} == {
        "Basic ZmFybTpodW50ZXIyLW9mLXRoZS1jbHVzdGVy"
    }
    assert {who for _, path, who in spark.requests if path.startswith("/log")} == {None}


def test_spark_is_adopted_by_the_masters_id(job: Load, spark: FakeSpark) -> None:
    spark.begins = {"state": "FINISHED", "stdout": b'seen\n{"result": 5}\n'}
    spark.create({"mainClass": "jobs.Resize", "sparkProperties": {}})
    assert started(job, spark, checkpoint=Order("dl-x-1", "driver-1", read=5).checkpoint())().result == 5
    assert len(spark.drivers) == 1


@pytest.mark.parametrize("state", ["RUNNING", "FINISHED"])
def test_spark_is_adopted_by_our_id_where_the_masters_was_not_kept(job: Load, spark: FakeSpark, state: str) -> None:
    for name in ("dl-other-1", "dl-x-1", "dl-x-11"):
        spark.create({"mainClass": "jobs.Resize", "sparkProperties": {"spark.app.name": name}})
    driver = spark.drivers["driver-2"]
    driver.state, driver.stdout = state, b'{"result": 5}\n'
    ended = started(job, spark, checkpoint=Order("dl-x-1").checkpoint())
    until(lambda: driver.reads, "a look at it")
    driver.state = "FINISHED"
    assert ended().result == 5
    assert len(spark.drivers) == 3


def test_spark_gets_an_order_anew_that_it_does_not_know(job: Load, spark: FakeSpark) -> None:
    spark.begins = {"state": "FINISHED"}
    assert started(job, spark, checkpoint=Order("dl-x-1", "driver-of-before").checkpoint())().status == "succeeded"
    assert spark.drivers["driver-1"].request["sparkProperties"]["spark.app.name"] == "dl-x-1"


def test_spark_gets_a_new_order_where_the_old_one_was_stopped_while_no_run_looked(job: Load, spark: FakeSpark) -> None:
    spark.create({"mainClass": "jobs.Resize", "sparkProperties": {}})
    spark.drivers["driver-1"].state = "KILLED"
    spark.begins = {"state": "FINISHED"}
    result = started(job, spark, checkpoint=Order("dl-x-1", "driver-1").checkpoint())()
    assert spark.drivers["driver-2"].request["sparkProperties"]["spark.app.name"] == f"dl-{result.job_id}-1"


@pytest.mark.long
def test_spark_gets_no_order_twice_whose_answer_was_lost(job: Load, spark: FakeSpark) -> None:
    """While the driver has no worker nobody can tell whose it is, so the run waits."""
    spark.loses = 1
    ended = started(job, spark)
    driver = until(lambda: spark.drivers.get("driver-1"), "the driver")
    driver.has_worker = False
    until(lambda: [path for _, path, _ in spark.requests].count("/json/") > 0, "a look for the driver")
    driver.has_worker = True
    until(lambda: driver.reads, "a look at it")
    driver.state = "FINISHED"
    assert ended().status == "succeeded"
    assert len(spark.drivers) == 1


def test_spark_stops_a_driver_whose_job_is_canceled(job: Load, spark: FakeSpark, notes: list[str]) -> None:
    result = started(job, spark, cancel_at=8)()
    assert (result.status, spark.drivers["driver-1"].state) == ("canceled", "KILLED")
    assert notes == [f"dl-{result.job_id}-1 is stopped at it"]


def handed_back(spark: FakeSpark, caplog: pytest.LogCaptureFixture) -> Driver:
    """Wait for the end of a first run that is drained; its driver, which goes on."""
    caplog.set_level(logging.INFO)
    until(lambda: "the next run of this job follows it" in caplog.text, "the end of the first run")
    return spark.drivers["driver-1"]


def clean_up(job: Load, spark: FakeSpark, result: Result) -> Result:
    """The job that the reaper adds when this one is canceled between two runs."""
    kept = dict(result.runs[-1].checkpoint or {})
    assert kept.pop("on_cancel") == "stop"
    args = {"cluster": "it", "entrypoint": "resize", "args": {}}
    return job("run.spark", args, checkpoint=kept | {"canceled": str(result.job_id)})


@pytest.mark.parametrize("state", ["RUNNING", "FINISHED", "FAILED"])
def test_a_cleanup_stops_what_still_runs(
    job: Load, spark: FakeSpark, notes: list[str], state: str, caplog: pytest.LogCaptureFixture
) -> None:
    ended = started(job, spark, drain_at=8)
    driver = handed_back(spark, caplog)
    driver.state = "FINISHED"
    first = replace(ended(), runs=ended().runs[:1])
    driver.state = state
    result = clean_up(job, spark, first)
    expected = {"RUNNING": "stopped", "FINISHED": "succeeded", "FAILED": "failed"}[state]
    order = f"dl-{first.job_id}-1"
    assert (result.status, result.result) == ("succeeded", {"program": order, "state": expected})
    assert driver.state == {"RUNNING": "KILLED"}.get(state, state)
    assert notes[-1] == f"{order} of the canceled job {first.job_id} is {expected} at it"
    assert list(spark.drivers) == ["driver-1"], "nothing is started"


def statuses(spark: FakeSpark) -> int:
    return sum("/status/" in path for _, path, _ in spark.requests)


@pytest.mark.long
def test_a_master_that_recovers_leaves_its_drivers_followed(job: Load, spark: FakeSpark) -> None:
    ended = started(job, spark)
    driver = until(lambda: spark.drivers.get("driver-1"), "the driver")
    until(lambda: driver.reads, "a look at it")
    spark.state, before = "RECOVERING", statuses(spark)
    until(lambda: statuses(spark) > before + 1, "a second look after the first")
    driver.stdout, driver.state, spark.state = b'{"result": 5}\n', "FINISHED", "ALIVE"
    result = ended()
    assert (result.status, result.result, result.attempts) == ("succeeded", 5, 1)


def test_a_cleanup_waits_for_a_master_that_recovers(job: Load, spark: FakeSpark) -> None:
    spark.create({"mainClass": "jobs.Resize", "sparkProperties": {}})
    spark.state = "RECOVERING"
    ended = started(job, spark, checkpoint=asdict(Order("dl-x-1", "driver-1")) | {"canceled": str(JOB)})
    until(lambda: statuses(spark), "a look at it")
    spark.state = "ALIVE"
    assert ended().result == {"program": "dl-x-1", "state": "stopped"}
    assert spark.drivers["driver-1"].state == "KILLED"


def test_a_cancellation_that_a_master_cannot_do_is_left_to_a_cleanup(
    job: Load, spark: FakeSpark, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark, "kill", recovering_at(spark, spark.kill))
    result = started(job, spark, cancel_at=8)()
    assert result.status == "canceled"
    assert result.runs[-1].checkpoint is not None
    assert result.runs[-1].checkpoint["on_cancel"] == "stop"
    assert "Current state is not alive: RECOVERING" in notes[-1]


def recovering_at(spark: FakeSpark, verb: Callable[..., Any]) -> Callable[..., Any]:
    """The master's verb, which finds it recovering."""

    def done(*given: Any) -> Any:
        spark.state = "RECOVERING"
        return verb(*given)

    return done


def test_spark_confirms_no_stop_while_its_master_recovers(spark: FakeSpark, monkeypatch: pytest.MonkeyPatch) -> None:
    spark.create({"mainClass": "jobs.Resize", "sparkProperties": {}})
    monkeypatch.setattr(spark, "status", recovering_at(spark, spark.status))
    with pytest.raises(Unreachable, match=r"the master: .*Current state is not alive: RECOVERING"):
        on_spark().cancel(Order("dl-x-1", "driver-1"), time.monotonic() + PATIENCE)


def test_a_stop_of_a_driver_that_a_master_has_forgotten_is_confirmed(spark: FakeSpark) -> None:
    on_spark().cancel(Order("dl-x-1", "driver-of-before"), time.monotonic() + PATIENCE)


def test_nobody_can_tell_whose_the_drivers_are_while_a_master_recovers(spark: FakeSpark) -> None:
    """It learns of them from its workers one by one."""
    spark.state = "RECOVERING"
    with pytest.raises(Unreachable, match="the master is RECOVERING"):
        on_spark().find(Order("dl-x-1"))


def on_spark() -> OnSpark:
    cluster = config.load().dl_engines["it"]
    return OnSpark(cluster, cluster.entrypoints["resize"], "{}")  # type: ignore[arg-type]


def test_a_result_is_not_lost_that_a_run_has_read_before_the_program_ended(
    job: Load, spark: FakeSpark, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run reads on before it: the program may take long to end, and the run's worker may die meanwhile."""
    spark.begins = {"stdout": b'one\n{"result": 5}\nbye\n'}
    ended = started(job, spark, drain_at=8)
    handed_back(spark, caplog).state = "FINISHED"
    result = ended()
    assert [each.end for each in result.runs] == ["handed back", "done"]
    assert result.runs[0].checkpoint is not None
    assert result.runs[0].checkpoint["read"] == 4
    assert result.result == 5


@pytest.mark.parametrize("filling", [0, RESULT_KEPT])  # a longer result is not kept in the checkpoint
@pytest.mark.parametrize(
    ("said", "result"),
    [
        ('{"loss": NaN}', {"loss": None}),
        ("[1, Infinity, -1e400]", [1, None, None]),
        (r'{"a\u0000b": "\u0000"}', {"a\ufffdb": "\ufffd"}),
        (r'"\ud800"', "\ufffd"),
    ],
)
def test_a_result_that_jsonb_lacks_is_kept_as_the_end_of_a_run_writes_it(
    job: Load, spark: FakeSpark, said: str, result: Any, filling: int
) -> None:
    spark.begins = {"state": "FINISHED", "stdout": f'{{"result": [{said}, "{"x" * filling}"]}}\n'.encode()}
    found = started(job, spark)()
    assert (found.status, found.attempts, found.result) == ("succeeded", 1, [result, "x" * filling])
    assert found.runs[0].checkpoint is not None
    assert found.runs[0].checkpoint["has_result"] is not bool(filling)


@pytest.mark.parametrize(
    ("state", "message", "error"),
    [
        ("FAILED", "", "failed: the driver is FAILED; its last lines:\nhalf way"),
        ("ERROR", "java.io.IOException: no such jar", "failed: java.io.IOException: no such jar"),
        ("KILLED", "", "was stopped there"),
    ],
)
def test_spark_tells_another_end(job: Load, spark: FakeSpark, state: str, message: str, error: str) -> None:
    spark.begins = {"stdout": b"half way\n", "message": message, "state": state}
    result = started(job, spark, max_attempts=1)()
    assert result.status == "failed"
    assert error in (result.error or "")
    assert SECRET not in str(result.error)


def test_spark_that_refuses_is_quoted(job: Load, spark: FakeSpark) -> None:
    spark.refuses = True
    result = started(job, spark, max_attempts=1)()
    assert "the master has not taken dl-" in (result.error or "")
    assert "Current state is not alive" in (result.error or "")
    assert isinstance(result.exception, Refused)


@pytest.fixture
def away(allow: Allow) -> None:
    """A cluster that nobody serves."""
    where = {"address": f"http://farm:{SECRET}@127.0.0.1:1", "master": "http://127.0.0.1:1", "away_sec": 0}
    allow(it={"engine": "spark", "entrypoints": {"resize": SPARK_ENTRY}} | where)


def test_spark_that_is_gone_is_a_clear_error(job: Load, away: None) -> None:
    result = job("run.spark", {"cluster": "it", "entrypoint": "resize"}, max_attempts=1)
    assert "it has not answered for 0 s: 127.0.0.1:1 accepts no connection; the next attempt" in (result.error or "")
    assert SECRET not in str(result.error)


def test_a_result_that_was_kept_is_returned_without_the_engine(job: Load, away: None) -> None:
    """The engine may have forgotten it: the run before died between that and its end."""
    kept = Order("dl-x-1", has_result=True, result=[1, 2]).checkpoint()
    assert job("run.spark", {"cluster": "it", "entrypoint": "resize"}, checkpoint=kept).result == [1, 2]
