"""A Spark master of one worker, as far as `run.spark` asks it. It answers as Spark 4.3 does."""

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from serving import Handler, Server

WORKER = "worker-1"


@dataclass
class Driver:
    id: str
    request: dict[str, Any]
    state: str = "RUNNING"
    stdout: bytes = b""
    message: str = ""
    has_worker: bool = True
    reads: int = 0  # how often its stdout was asked for

    def stderr(self) -> bytes:
        """Its head, as Spark's worker writes it."""
        options = [f'"-D{name}={value}"' for name, value in self.request["sparkProperties"].items()]
        return f'Launch Command: "java" {" ".join(options)} "DriverWrapper"\n{"=" * 40}\n\n'.encode()


@dataclass
class FakeSpark:
    """The cluster; `loses` answers of submissions are lost behind their work, `state` is the master's."""

    loses: int = 0
    refuses: bool = False
    state: str = "ALIVE"
    begins: dict[str, Any] = field(default_factory=dict)  # the fields that a new driver has at once
    drivers: dict[str, Driver] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        fake = self

        class Answers(Handler):
            def do_GET(self) -> None:
                fake.requests.append(("GET", self.path, self.headers["Authorization"]))
                parts = urlsplit(self.path)
                if parts.path == "/log/":
                    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                    return self.answer(200, fake.log(query))
                document = fake.page() if parts.path == "/json/" else fake.status(parts.path)
                return self.answer(200, json.dumps(document).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append(("POST", self.path, self.headers["Authorization"]))
                answer = fake.create(body) if self.path.endswith("/create") else fake.kill(self.path)
                if answer is not None:
                    self.answer(200, json.dumps(answer).encode())

        self._server = Server(Answers)
        self.address = self._server.url.removeprefix("http://")
        self.close = self._server.close

    def create(self, request: dict[str, Any]) -> dict[str, Any] | None:
        if self.refuses:
            return {"action": "CreateSubmissionResponse", "success": False, "message": "Current state is not alive"}
        driver = Driver(f"driver-{len(self.drivers) + 1}", request, **self.begins)
        self.drivers[driver.id] = driver
        self.loses -= 1
        return None if self.loses >= 0 else {"success": True, "submissionId": driver.id, "message": "submitted"}

    def status(self, path: str) -> dict[str, Any]:
        if self.state != "ALIVE":
            error = f"java.lang.Exception: {self.not_alive()}Can only request driver status in ALIVE state."
            return {"success": False, "message": f"Exception from the cluster:\n{error}\n\torg.apache.spark"}
        driver = self.drivers.get(path.rpartition("/")[2])
        if driver is None:
            return {"action": "SubmissionStatusResponse", "success": False}
        worker = {"workerId": WORKER, "workerHostPort": "127.0.0.1:1"} if driver.has_worker else {}
        message = {"message": driver.message} if driver.message else {}
        return {"success": True, "driverState": driver.state, "submissionId": driver.id} | worker | message

    def kill(self, path: str) -> dict[str, Any]:
        if self.state != "ALIVE":
            return {"success": False, "message": f"{self.not_alive()}Can only kill drivers in ALIVE state."}
        driver = self.drivers.get(path.rpartition("/")[2])
        if driver is None or driver.state != "RUNNING":
            return {"success": False, "message": "has already finished or does not exist"}
        driver.state = "KILLED"
        return {"success": True}

    def not_alive(self) -> str:
        """How a master says that it is not the one to ask now."""
        return f"Current state is not alive: {self.state}. "

    def page(self) -> dict[str, Any]:
        shown: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for number, driver in enumerate(self.drivers.values()):
            worker = WORKER if driver.has_worker else "None"
            facts = {"id": driver.id, "starttime": str(number), "mainclass": driver.request["mainClass"]}
            shown[driver.state == "RUNNING"].append(facts | {"worker": worker})
        workers = [{"id": WORKER, "webuiaddress": f"http://{self.address}"}]
        drivers = {"activedrivers": shown[True], "completeddrivers": shown[False]}
        return {"workers": workers, "status": self.state} | drivers

    def log(self, query: dict[str, str]) -> bytes:
        driver = self.drivers[query["driverId"]]
        whole = driver.stdout if query["logType"] == "stdout" else driver.stderr()
        driver.reads += query["logType"] == "stdout"
        begin = min(int(query["offset"]), len(whole))
        end = min(begin + int(query["byteLength"]), len(whole))
        return f"==== Bytes {begin}-{end} of {len(whole)} of /opt/spark/{driver.id} ====\n".encode() + whole[begin:end]
