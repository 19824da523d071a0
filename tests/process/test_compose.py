"""deploy/compose.yaml: the services' commands, environment and secrets, as plain processes on a PostgreSQL."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from farming import PATIENCE, call, free_port, until
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from test_supervisord import GRACEFUL_TIMEOUT

from dataloader import embedded
from dataloader.config import Settings
from dataloader.embedded import find_programs
from dataloader.farm.supervisor import KEEPER_STOP_SEC

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = re.sub(r"\\\n", " ", (DEPLOY.parent / "Dockerfile").read_text())
OURS = ("migrate", "reaper", "workers", "api")
BIN = Path(sys.executable).parent
HBA = "local all postgres trust\nlocal all all scram-sha-256\n"  # the passwords have to be right


STATUS = "SELECT status::text FROM queue.dl_jobs WHERE job_id = %s"


def interpolated(value: Any) -> Any:
    """The value with the default of each `${NAME:-default}` in it, as for an operator who has set nothing."""
    if isinstance(value, dict):
        return {key: interpolated(each) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each) for each in value]
    return re.sub(r"\$\{\w+:-((?:[^{}]|\{[^{}]*\})*)\}", r"\1", value) if isinstance(value, str) else value


COMPOSE: dict[str, Any] = interpolated(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def of_image(word: str) -> str:
    """The arguments of an instruction of the Dockerfile's last stage."""
    return re.findall(rf"^{word} (.*)$", DOCKERFILE, re.MULTILINE)[-1]


def grace_of(service: str) -> float:
    return float(SERVICES[service]["stop_grace_period"].removesuffix("s"))


class Containers:
    """The services of the file, as processes with files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        folder.chmod(0o711)  # the user of PostgreSQL has to enter it
        self.server = embedded.Server.start(folder / "postgres", {"fsync": "off"}, initdb=["--no-sync"])
        self.host = str(conninfo_to_dict(self.server.dsn)["host"])
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "home" / "data").mkdir(parents=True)

    def secrets(self, service: str) -> Path:
        folder = self.folder / f"secrets-{service}"
        folder.mkdir()
        for each in SERVICES[service]["secrets"]:
            source, target = (each, each) if isinstance(each, str) else (each["source"], each["target"])
            assert source in COMPOSE["secrets"]
            (folder / target).write_text(f"password of {source}'s\n")
        return folder

    def make_database(self) -> None:
        """Do what the image of PostgreSQL does when its volume is empty: run the mounted script."""
        (script,) = (volume.split(":")[0] for volume in SERVICES["postgres"]["volumes"] if "initdb.d" in volume)
        programs = find_programs(self.server.root / "data", None)
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "PGHOST": self.host}
        env["SECRETS_DIR"] = str(self.secrets("postgres"))
        subprocess.run([DEPLOY / script], env=env, check=True, capture_output=True)
        (self.server.root / "data" / "pg_hba.conf").write_text(HBA)
        with psycopg.connect(self.server.dsn, user="postgres", autocommit=True) as conn:
            conn.execute("SELECT pg_reload_conf()")

    def environment(self, service: str) -> dict[str, str]:
        """The image's environment and the service's; of this machine only what is in a container by itself."""
        given = dict(each.split("=", 1) for each in shlex.split(of_image("ENV")))
        given |= {name: str(value) for name, value in SERVICES[service]["environment"].items()}
        assert (given["PG_HOST"], given["DL_SECRETS_DIR"]) == ("postgres", "/run/secrets")
        return given | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PG_HOST": self.host,
            "APP_PORT": str(self.port),
            "DL_HOME": str(self.folder / "home"),
            "DL_SECRETS_DIR": str(self.secrets(service)),
        }

    def run(self, service: str) -> None:
        (program,) = json.loads(of_image("ENTRYPOINT"))
        command, home = [str(BIN / program), *SERVICES[service]["command"]], self.folder / "home"
        with (self.folder / f"{service}.log").open("wb") as out:
            environment = self.environment(service)
            self.started[service] = subprocess.Popen(command, env=environment, cwd=home, stdout=out, stderr=out)

    def is_healthy(self, service: str) -> bool:
        kind, *command = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        here = [word.replace("127.0.0.1:8081", f"127.0.0.1:{self.port}") for word in command]
        program = sys.executable if here[0] == "python3" else here[0]
        return subprocess.run([program, *here[1:]], capture_output=True, check=False).returncode == 0

    def stop(self, service: str) -> int:
        """End a service as `docker stop` does; its exit status, an AssertionError where the grace is not enough."""
        process = self.started[service]
        process.send_signal(signal.Signals[SERVICES[service].get("stop_signal", of_image("STOPSIGNAL"))])
        grace = grace_of(service)
        since = time.monotonic()
        status = process.wait(grace)
        assert time.monotonic() - since < grace / 2
        return status

    def trigger(self, task: str, **args: Any) -> str:
        new = {"queue": "etl.default", "task": task, "lock_key": task, "args": args}
        return str(call(self.port, "/api/v1/jobs/trigger", new)["job_id"])

    def row(self, statement: str, *parameters: Any) -> Any:
        with psycopg.connect(make_conninfo(self.server.dsn, user="postgres", dbname="dataloader")) as conn:
            return conn.execute(statement, parameters).fetchone()

    def close(self) -> None:
        for service, process in self.started.items():
            process.kill()
            process.wait()
            print(service, (self.folder / f"{service}.log").read_text())  # shown where a test fails
        self.server.stop()
        shutil.rmtree(self.folder)


@pytest.fixture
def containers() -> Iterator[Containers]:
    """A PostgreSQL of its own: the roles of the file belong to a whole server."""
    made = Containers(Path(tempfile.mkdtemp(prefix="dl-test-compose-")))
    yield made
    made.close()


@pytest.mark.long
def test_the_services_come_up_in_order_run_a_job_and_stop_in_time(containers: Containers) -> None:
    containers.make_database()
    containers.run("migrate")
    assert containers.started["migrate"].wait(PATIENCE) == 0
    for service in ("reaper", "workers", "api"):
        containers.run(service)
    until(lambda: containers.is_healthy("api"), "the API's health check")
    assert [name for name, process in containers.started.items() if process.poll() is not None] == ["migrate"]

    (containers.folder / "home" / "data" / "few.csv").write_text("code,name\n1,one\n2,two\n")
    loaded = containers.trigger("load.csv", path="few.csv", table="few", key=["code"])
    until(lambda: containers.row(STATUS, loaded) == ("succeeded",), "the load")
    assert containers.row("SELECT count(*) FROM data.few") == (2,)

    drained = containers.trigger("noop", sleep1=5)
    until(lambda: containers.row(STATUS, drained) != ("queued",), "the job to run")
    assert containers.stop("workers") == 0
    assert containers.row(STATUS, drained) == ("succeeded",), "the grace is enough for a drain"
    assert (containers.stop("api"), containers.stop("reaper")) == (0, 0)
    assert containers.row("SELECT usesuper FROM pg_user WHERE usename = 'dl_owner'") == (False,)


def test_the_graces_exceed_what_a_stop_may_take() -> None:
    default = {name: field.default for name, field in Settings.model_fields.items()}
    drain = float(SERVICES["workers"]["environment"]["DL_DRAIN_SEC"])
    assert drain == default["dl_drain_sec"]
    needed = {"workers": drain + default["dl_kill_grace_sec"] + KEEPER_STOP_SEC, "api": GRACEFUL_TIMEOUT, "reaper": 30}
    assert [name for name, least in needed.items() if grace_of(name) <= least] == []


@pytest.mark.parametrize("name", OURS)
def test_our_services_have_few_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["user"].split(":")[0] == re.findall(r"--uid (\d+)", DOCKERFILE)[0]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"cpus", "memory"} <= set(service["deploy"]["resources"]["limits"])
    given = service["environment"]
    assert not [key for key, value in given.items() if "PASSWORD" in key or "password" in str(value)]
    assert {key for key in given if key.upper() not in {field.upper() for field in Settings.model_fields}} == set()
