"""Spark by the REST server of a standalone master; the id of a driver there is the master's, ours is its app's name.

The master cannot be asked for our id. Where a run has died before it could keep the master's id, the next one looks for
ours in the command of each driver of this class: the worker that runs a driver writes it at the head of its stderr.
"""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import quote, urlencode

from dataloader.config import SparkApplication, SparkCluster
from dataloader.pipelines.engines.follow import Order, Seen, State
from dataloader.pipelines.engines.rest import OUTPUT_SEC, Answer, Server
from dataloader.pipelines.http import Refused, Unreachable

SUBMIT_SEC = 10.0
PIECE = 2**20  # bytes of the output that one look reads
COMMAND_MOST = 2**16  # bytes at the head of stderr in which the command is
_STATES = {"FINISHED": State.SUCCEEDED, "KILLED": State.STOPPED, "FAILED": State.FAILED, "ERROR": State.FAILED}
_NOT_ALIVE = ("not alive", "Exception from the cluster")  # the former in each answer, the latter around a status
_HEAD = re.compile(rb"==== Bytes (\d+)-(\d+) of (\d+) of [^\n]* ====\n")


class OnSpark:
    """One driver on one Spark cluster."""

    forgets = False  # people look at it on the master's page

    def __init__(self, cluster: SparkCluster, application: SparkApplication, args: str) -> None:
        token = cluster.token.get_secret_value() if cluster.token else None
        self._rest = Server(cluster.address.get_secret_value(), token)
        self._master = Server(cluster.master.get_secret_value(), token)
        self._application, self._args = application, args
        self._worker: Server | None = None  # that runs the driver
        self._is_in_doubt = False  # the master may have taken the order, and its answer was lost

    def submit(self, order: Order) -> str:
        """See Engine. Where an answer was lost, the master may have the order already."""
        if self._is_in_doubt and (found := self.find(order)) is not None:
            return found
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
        answer = self._rest.ask("POST", "/v1/submissions/create", request, SUBMIT_SEC).json()
        self._is_in_doubt = False
        if not answer.get("success"):
            raise Refused(f"the master has not taken {order.id}: {answer.get('message')}")
        return str(answer["submissionId"])

    def look(self, order: Order) -> Seen:
        """See Engine."""
        status = _answered(self._rest.ask("GET", f"/v1/submissions/status/{quote(order.handle)}"))
        if not status.get("success"):
            return Seen(State.ABSENT)
        state = _STATES.get(str(status.get("driverState")), State.RUNNING)
        try:
            output, read, is_whole = self._output(order, str(status.get("workerId") or ""))
        except (Unreachable, Refused):
            if state is State.SUCCEEDED:
                raise  # its result may be there
            output, read, is_whole = b"", order.read, True
        why = str(status.get("message") or "")[:500] or f"the driver is {status.get('driverState')}"
        return Seen(state if is_whole else State.RUNNING, output, read, why if state is State.FAILED else "")

    def find(self, order: Order) -> str | None:
        """See Engine. While a driver that may be ours has written nothing, nobody can tell: Unreachable."""
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
                    # The worker of a completed driver is gone: nobody will ever tell.
        return None

    def cancel(self, order: Order, until: float) -> bool:
        """See Engine. Spark ends the driver's process by SIGTERM."""
        handle = order.handle or self.find(order)
        while handle and (left := until - time.monotonic()) > 0:
            _answered(self._rest.ask("POST", f"/v1/submissions/kill/{quote(handle)}", {}, left))
            status = _answered(self._rest.ask("GET", f"/v1/submissions/status/{quote(handle)}", None, left))
            if not status.get("success") or status.get("driverState") in _STATES:
                return True
            time.sleep(0.1)
        return not handle

    def forget(self, order: Order) -> None:
        """See Engine."""

    def close(self) -> None:
        """See Engine."""

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
