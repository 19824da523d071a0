"""Ray by its job submission API, which the dashboard serves by HTTP; the id of a job there is our own.

Ray refuses a second submission of an id, and knows a job until it is deleted or the head node has gone with its memory.
It has no way to read a log from a place on: each look reads it whole, so a long one is read less often.
"""

from __future__ import annotations

import math
import time
from typing import Any

from dataloader.config import RayCluster, RayCommand
from dataloader.pipelines.engines.follow import Order, Seen, State
from dataloader.pipelines.engines.rest import ANSWER_MOST, OUTPUT_SEC, Answer, Server
from dataloader.pipelines.http import TooLong, Unreachable

SUBMIT_SEC = 5.0  # Ray answers once it has begun to start the job; asked again, it knows the id
TOO_LONG = f"\n[the output has more than {ANSWER_MOST} bytes: its rest is not read, nor a result in it]\n".encode()
_STATES = {"SUCCEEDED": State.SUCCEEDED, "FAILED": State.FAILED, "STOPPED": State.STOPPED}  # others run, or wait
_PAUSE_TIMES = 10  # a look at the log waits so many times as long as the one before took


class OnRay:
    """One job on one Ray cluster."""

    forgets = False  # people look at it in Ray's dashboard

    def __init__(self, cluster: RayCluster, command: RayCommand, args: str) -> None:
        token = cluster.token.get_secret_value() if cluster.token else None
        self._server = Server(cluster.address.get_secret_value(), token)
        self._command, self._args = command, args
        self._log_at = 0.0  # when the log may be read again

    def submit(self, order: Order) -> str:
        """See Engine. The args are in the environment: no shell reads them."""
        env = dict(self._command.runtime_env)
        env["env_vars"] = {**env.get("env_vars", {}), "DATALOADER_ARGS": self._args, "DATALOADER_ORDER": order.id}
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
        answer = self._server.ask("POST", "/api/jobs/", body, SUBMIT_SEC)
        if answer.status != 200 and self.find(order) is None:
            answer.require_good()
        return order.id

    def look(self, order: Order) -> Seen:
        """See Engine."""
        answer = self._job(order)
        if answer.status == 404:
            return Seen(State.ABSENT)
        job = answer.json()
        state = _state(job)
        output = self._output(order, state)
        why = str(job.get("message") or "") if state is State.FAILED else ""
        return Seen(state, output, order.read + len(output), why.partition(", last available logs")[0])

    def find(self, order: Order) -> str | None:
        """See Engine."""
        answer = self._job(order)
        if answer.status == 404:
            return None
        answer.require_good()
        return order.id

    def cancel(self, order: Order, until: float) -> bool:
        """See Engine. Ray sends SIGTERM to the command's processes before it answers, and SIGKILL 3 s later."""
        answer = self._server.ask("POST", f"/api/jobs/{order.id}/stop", None, max(0.1, until - time.monotonic()))
        if answer.status == 404 or answer.json().get("stopped"):
            return True
        return _state(self._job(order).json()) is not State.RUNNING  # it has ended before

    def forget(self, order: Order) -> None:
        """See Engine."""

    def close(self) -> None:
        """See Engine."""

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
            return b"" if state is State.RUNNING else TOO_LONG
        if answer.status == 500:  # the node of the command is gone, or has not begun
            if state is State.SUCCEEDED:  # its result may be there
                raise Unreachable(f"{answer.server} cannot read the output of {order.id}")
            return b""
        output = str(answer.json().get("logs") or "").encode("utf-8", "replace")[order.read :]
        self._log_at = time.monotonic() + (time.monotonic() - began) * _PAUSE_TIMES
        return output


def _state(job: dict[str, Any]) -> State:
    return _STATES.get(str(job.get("status")), State.RUNNING)
