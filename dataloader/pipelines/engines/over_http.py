"""Ray and Spark by HTTP with JSON; their addresses are the operator's, and no redirect is followed.

Ray's job submission API is served by its dashboard; the id of a job there is our own. Ray refuses a second submission
of an id, and knows a job until it is deleted or the head node has gone with its memory. It has no way to read a log
from a place on: each poll reads all of it, so a long one is read less often.

Spark's is the REST server of a standalone master; the id of a driver there is the master's, ours is its app's name. The
master cannot be asked for our id. Where a run has died before it could keep the master's id, the next one looks for
ours in the command of each driver of this class: the worker that runs a driver writes it at the head of its stderr.
"""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from pydantic import SecretStr

from dataloader.config import RayCluster, RayCommand, SparkApplication, SparkCluster
from dataloader.pipelines import http
from dataloader.pipelines.engines import Engine, Order, Refused, Report, State
from dataloader.pipelines.http import TooLong, Unreachable

ANSWER_SEC = 3.0  # for an answer; with CANCEL_SEC it ends before DL_KILL_GRACE_SEC does
OUTPUT_SEC = 60.0  # for a program's output, which may be long: while its bytes come
ANSWER_MOST = 64 * 2**20  # bytes of an answer
_WORDS_MOST = 500  # characters of a refusal that an error shows
_PASSING = (408, 425, 429, 502, 503, 504)

RAY_SUBMIT_SEC = 5.0  # Ray answers once it has begun to start the job; asked again, it knows the id
_RAY = {"SUCCEEDED": State.SUCCEEDED, "FAILED": State.FAILED, "STOPPED": State.STOPPED}  # others run, or wait
_PAUSE_TIMES = 10  # the pause before a read of the log, as a multiple of the duration of the last read
_TOO_LONG = f"\n[the output has more than {ANSWER_MOST} bytes: its rest is not read, nor a result in it]\n".encode()

SPARK_SUBMIT_SEC = 10.0
PIECE = 2**20  # bytes of the output that one poll reads
COMMAND_MOST = 2**16  # bytes at the head of stderr in which the command is
_SPARK = {"FINISHED": State.SUCCEEDED, "KILLED": State.STOPPED, "FAILED": State.FAILED, "ERROR": State.FAILED}
_NOT_ALIVE = ("not alive", "Exception from the cluster")  # the former in each answer, the latter around a status
_HEAD = re.compile(rb"==== Bytes (\d+)-(\d+) of (\d+) of [^\n]* ====\n")


class Answer(NamedTuple):
    """The answer of a server."""

    server: str
    status: int
    content: bytes

    def json(self) -> Any:
        """The document of a good answer; raises as `require_good`, and Refused where it is no JSON."""
        self.require_good()
        try:
            return json.loads(self.content)
        except ValueError:
            raise Refused(f"{self.server} has answered with something else than JSON") from None

    def require_good(self) -> None:
        """Raise Refused for a refusal, Unreachable for one that passes."""
        if self.status in _PASSING:
            raise Unreachable(f"{self.server} has answered {self.status}")
        if not 200 <= self.status < 300:
            # The last line of a Python traceback has the error.
            words = self.content.decode("utf-8", "replace").strip()[-_WORDS_MOST:]
            raise Refused(f"{self.server} has answered {self.status}: {words}".rstrip(": "))


class Server:
    """One server of a cluster. Its address may have a user and a password."""

    def __init__(self, address: str, token: SecretStr | None = None) -> None:
        """`address` is http:// or https://; `token` is sent as a bearer's."""
        base = http.Address.of(address)
        self._base = base._replace(name=f"{base.host}:{base.port}", target=base.target.rstrip("/"))
        self._headers = {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}

    def ask(
        self, method: str, path: str, body: Any = None, within: float = ANSWER_SEC, *, whole: float | None = None
    ) -> Answer:
        """The answer to one request, whatever its status.

        Raises Unreachable where nothing comes for `within` seconds, or where the answer is not complete in `whole`
        seconds, by default `within`. The way to the server may take `within` besides.
        """
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        sent = None if body is None else json.dumps(body).encode()
        to = self._base._replace(target=self._base.target + path)
        times = http.Times(within, within, within if whole is None else whole)
        with http.exchange(to, times, method, headers, sent) as answer:
            return Answer(self._base.name, answer.status, answer.content(ANSWER_MOST))


class OnRay(Engine):
    """One job on one Ray cluster."""

    def __init__(self, cluster: RayCluster, command: RayCommand, args: str) -> None:
        self._server = Server(cluster.address.get_secret_value(), cluster.token)
        self._command, self._args = command, args
        self._log_at = 0.0  # when the log may be read again

    def submit(self, order: Order) -> str:
        """The args are in the environment: no shell reads them."""
        ours = {"DATALOADER_ARGS": self._args, "DATALOADER_ORDER": order.id}
        env = self._command.runtime_env | {"env_vars": self._command.runtime_env.get("env_vars", {}) | ours}
        memory = None if self._command.memory_mb is None else self._command.memory_mb * 2**20
        given = {
            "entrypoint": self._command.command,
            "submission_id": order.id,
            "runtime_env": env,
            "metadata": {"dataloader_order": order.id},
            "entrypoint_num_cpus": self._command.cpus,
            "entrypoint_num_gpus": self._command.gpus,
            "entrypoint_memory": memory,
        }
        body = {name: value for name, value in given.items() if value is not None}
        answer = self._server.ask("POST", "/api/jobs/", body, RAY_SUBMIT_SEC)
        if answer.status != 200:  # also where Ray has it already
            (answer if (job := self._job(order)).status == 404 else job).require_good()
        return order.id

    def poll(self, order: Order) -> Report:
        answer = self._job(order)
        if answer.status == 404:
            return Report(State.ABSENT)
        job = answer.json()
        state = _ray_state(job)
        output = self._output(order, state)
        why = str(job.get("message") or "") if state is State.FAILED else ""
        return Report(state, output, order.read + len(output), why.partition(", last available logs")[0])

    def cancel(self, order: Order, until: float) -> None:
        """Ray sends SIGTERM to the command's processes before it answers, and SIGKILL 3 s later."""
        answer = self._server.ask("POST", f"/api/jobs/{order.id}/stop", None, max(0.1, until - time.monotonic()))
        is_stopped = answer.status == 404 or answer.json().get("stopped")
        if not is_stopped and _ray_state(self._job(order).json()) is State.RUNNING:  # else it has ended before
            raise Unreachable(f"{answer.server} has not stopped it")

    def _job(self, order: Order) -> Answer:
        return self._server.ask("GET", f"/api/jobs/{order.id}")

    def _output(self, order: Order, state: State) -> bytes:
        began = time.monotonic()
        if state is State.RUNNING and began < self._log_at:
            return b""
        try:
            answer = self._server.ask("GET", f"/api/jobs/{order.id}/logs", whole=OUTPUT_SEC)
        except TooLong:
            self._log_at = math.inf
            return b"" if state is State.RUNNING else _TOO_LONG
        if answer.status == 500:  # the node of the command is gone, or has not begun
            if state is State.SUCCEEDED:  # its result may be there
                raise Unreachable(f"{answer.server} cannot read the output of {order.id}")
            return b""
        output = str(answer.json().get("logs") or "").encode("utf-8", "replace")[order.read :]
        self._log_at = time.monotonic() + (time.monotonic() - began) * _PAUSE_TIMES
        return output


def _ray_state(job: dict[str, Any]) -> State:
    return _RAY.get(str(job.get("status")), State.RUNNING)


class OnSpark(Engine):
    """One driver on one Spark cluster."""

    def __init__(self, cluster: SparkCluster, application: SparkApplication, args: str) -> None:
        self._rest = Server(cluster.address.get_secret_value(), cluster.token)
        self._master = Server(cluster.master.get_secret_value(), cluster.token)
        self._application, self._args = application, args
        self._worker: Server | None = None  # that runs the driver
        self._is_in_doubt = False  # the master may have taken the order, and its answer was lost

    def submit(self, order: Order) -> str:
        """Where an answer was lost, the master may have the order already."""
        if self._is_in_doubt and (driver := self.find(order)) is not None:
            return driver
        application = self._application
        environment = {"SPARK_ENV_LOADED": "1", "DATALOADER_ARGS": self._args, "DATALOADER_ORDER": order.id}
        ours = {"spark.app.name": order.id, "spark.submit.deployMode": "cluster"}
        ours |= {"spark.driver.supervise": "false"}  # the farm decides whether it runs again
        request = {
            "action": "CreateSubmissionRequest",
            "clientSparkVersion": application.spark_version,
            "appResource": application.file,
            "mainClass": application.main_class,
            "appArgs": application.arguments,
            "environmentVariables": environment | application.environment,
            "sparkProperties": {"spark.jars": application.file} | application.properties | ours,
        }
        self._is_in_doubt = True
        answer = self._rest.ask("POST", "/v1/submissions/create", request, SPARK_SUBMIT_SEC).json()
        self._is_in_doubt = False
        if not answer.get("success"):
            raise Refused(f"the master has not taken {order.id}: {answer.get('message')}")
        return str(answer["submissionId"])

    def poll(self, order: Order) -> Report:
        status = _answered(self._rest.ask("GET", f"/v1/submissions/status/{quote(order.handle)}"))
        if not status.get("success"):
            return Report(State.ABSENT)
        state = _SPARK.get(str(status.get("driverState")), State.RUNNING)
        try:
            output, read, is_whole = self._output(order, str(status.get("workerId") or ""))
        except (Unreachable, Refused):
            if state is State.SUCCEEDED:
                raise  # its result may be there
            output, read, is_whole = b"", order.read, True
        why = str(status.get("message") or "")[:500] or f"the driver is {status.get('driverState')}"
        return Report(state if is_whole else State.RUNNING, output, read, why if state is State.FAILED else "")

    def find(self, order: Order) -> str | None:
        """Raises Unreachable while a driver without output may be ours: this cannot be decided."""
        master = self._master.ask("GET", "/json/").json()
        if (state := master.get("status", "ALIVE")) != "ALIVE":
            raise Unreachable(f"the master is {state}, and may not show each driver")
        workers = {each["id"]: each["webuiaddress"] for each in master.get("workers", ())}
        for kind in ("activedrivers", "completeddrivers"):
            for driver in master.get(kind, ()):
                if driver.get("mainclass") != self._application.main_class:
                    continue
                try:
                    if self._is_ours(order, driver, workers):
                        return str(driver["id"])
                except (Unreachable, Refused):
                    if kind == "activedrivers":
                        raise
                    # The worker of a completed driver is gone, so this will never be known.
        return None

    def cancel(self, order: Order, until: float) -> None:
        """Spark ends the driver's process by SIGTERM."""
        handle = order.handle or self.find(order)
        while handle:
            if (left := until - time.monotonic()) <= 0:
                raise Unreachable(f"the master has not ended {handle} in time")
            _answered(self._rest.ask("POST", f"/v1/submissions/kill/{quote(handle)}", {}, left))
            status = _answered(self._rest.ask("GET", f"/v1/submissions/status/{quote(handle)}", None, left))
            if not status.get("success") or status.get("driverState") in _SPARK:
                return
            time.sleep(0.1)

    def _is_ours(self, order: Order, driver: dict[str, Any], workers: dict[str, str]) -> bool:
        """Whether the driver's command has our id; raises Unreachable where there is no command to read yet."""
        address = workers.get(str(driver.get("worker")))
        if address is None:
            raise Unreachable(f"no worker has {driver['id']} yet, which may be {order.id}")
        command, end, _ = self._piece(Server(address), driver["id"], "stderr", 0, COMMAND_MOST).partition(b"\n")
        if not end:
            raise Unreachable(f"{driver['id']} has not begun, and may be {order.id}")
        return f'"-Dspark.app.name={order.id}"'.encode() in command

    def _output(self, order: Order, worker: str) -> tuple[bytes, int, bool]:
        """The next piece of what the driver has written, the place behind it, and whether there is no more now."""
        if not worker or worker == "None":  # no worker has it yet
            return b"", order.read, True
        if self._worker is None:
            workers = {each["id"]: each for each in self._master.ask("GET", "/json/").json()["workers"]}
            if worker not in workers:
                raise Unreachable(f"the worker {worker} is gone, and the output with it")
            self._worker = Server(workers[worker]["webuiaddress"])  # no token: the address is a stranger's word
        output = self._piece(self._worker, order.handle, "stdout", order.read, PIECE, OUTPUT_SEC)
        return output, order.read + len(output), len(output) < PIECE

    @staticmethod
    def _piece(worker: Server, driver: str, log: str, offset: int, length: int, whole: float | None = None) -> bytes:
        query = urlencode({"driverId": driver, "logType": log, "offset": offset, "byteLength": length})
        answer = worker.ask("GET", f"/log/?{query}", whole=whole)
        answer.require_good()
        head = _HEAD.match(answer.content)
        if head is None or int(head[1]) != offset:
            return b""
        return answer.content[head.end() :][: int(head[2]) - int(head[1])]


def _answered(answer: Answer) -> dict[str, Any]:
    """The master's answer about a driver; raises Unreachable where this master is not alive.

    A master that is standby or recovers answers about a driver that runs as about one that it does not know. Only its
    message tells the two apart.
    """
    status: dict[str, Any] = answer.json()
    message = str(status.get("message") or "")
    if not status.get("success") and any(words in message for words in _NOT_ALIVE):
        raise Unreachable(f"the master: {' '.join(message.split())[:200]}")
    return status
