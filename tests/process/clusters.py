"""Clusters of Dask, Ray and Spark for tests: from their packages, on free ports of this host, without telemetry."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from farming import family, free_port, on_all, titled, until

HERE = Path(__file__).parent
START_SEC = 90.0


class Cluster:
    """Programs that are started, suspended and killed together."""

    engine = ""
    port = 0

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"dl-{self.engine}-", dir="/tmp"))  # sockets need short paths
        self.programs: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str, **env: str) -> None:
        with (self.folder / "log").open("ab") as out:
            given = os.environ | {"PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"} | env
            self.programs.append(subprocess.Popen(command, stdout=out, stderr=out, env=given, cwd=self.folder))

    def entry(self, address: str, **more: Any) -> dict[str, Any]:
        """The cluster as an entry of DL_ENGINES."""
        return {"engine": self.engine, "address": address, "away_sec": 30} | more

    def processes(self) -> list[psutil.Process]:
        processes = []
        for program in self.programs:
            with suppress(psutil.NoSuchProcess):
                processes += [psutil.Process(program.pid), *family(program.pid)]
        return processes

    def suspend(self, title: str) -> list[psutil.Process]:
        """Stop the programs whose command line has this text: connections are accepted, and nothing is answered."""
        processes = titled(self.processes(), title)
        assert processes, f"no {title} among {[each.cmdline() for each in self.processes()]}"
        on_all(psutil.Process.suspend, processes)
        return processes

    def kill(self) -> None:
        on_all(psutil.Process.kill, self.processes())
        for program in self.programs:
            program.wait()
        self.programs.clear()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Dask(Cluster):
    engine = "dask"

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Start them, at the same address each time."""
        registered = self.registered()
        dask = [sys.executable, "-m", "dask"]
        self.run(*dask, "scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard")
        self.run(*dask, "worker", self.address, "--nthreads", "3", "--no-dashboard", "--no-nanny")
        until(lambda: self.registered() > registered, "a Dask worker", START_SEC)

    def registered(self) -> int:
        """How often a worker has found its scheduler."""
        log = self.folder / "log"
        return log.read_text().count("Registered to") if log.exists() else 0

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def setting(self, **more: Any) -> str:
        names = {name: f"engine_jobs:{name}" for name in ("counts", "fails", "missing")}
        entrypoints = names | {"spreads": {"function": "engine_jobs:spreads", "is_driver": True}}
        return json.dumps({"it": self.entry(self.address, entrypoints=entrypoints, **more)})


class Ray(Cluster):
    engine = "ray"

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Start it, at the same address each time."""
        ports = {"dashboard-port": self.port, "ray-client-server-port": free_port(), "port": free_port()}
        ports |= {"dashboard-agent-listen-port": free_port(), "min-worker-port": 0, "max-worker-port": 0}
        sizes = {"num-cpus": 2, "object-store-memory": 80_000_000}
        options = [f"--{name}={value}" for name, value in (ports | sizes).items()]
        options += ["--dashboard-host=127.0.0.1", "--include-dashboard=true", f"--temp-dir={self.folder / 'r'}"]
        ray = str(Path(sys.executable).parent / "ray")
        self.run(ray, "start", "--head", "--block", "--disable-usage-stats", *options, RAY_USAGE_STATS_ENABLED="0")
        until(self.answers, "Ray's dashboard", START_SEC)

    def answers(self) -> bool:
        """Whether it takes jobs: its agent comes last."""
        with suppress(OSError, ValueError):
            with urllib.request.urlopen(f"{self.address}/api/jobs/", timeout=5) as answer:
                json.load(answer)
            return "dashboard_agent" in str([each.cmdline() for each in self.processes()])
        return False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def setting(self, **more: Any) -> str:
        entrypoints = {name: f"{sys.executable} -m engine_jobs {name}" for name in ("counts", "fails", "missing")}
        return json.dumps({"it": self.entry(self.address, entrypoints=entrypoints, **more)})


def spark_home() -> Path | None:
    """Where Spark is: SPARK_HOME, or the package pyspark; None: nowhere, or there is no Java."""
    found = find_spec("pyspark")
    given = os.environ.get("SPARK_HOME") or (found and Path(str(found.origin)).parent)
    return Path(given) if given and shutil.which("java") else None


class Spark(Cluster):
    """A standalone master with its REST server, and a worker."""

    engine = "spark"

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home = home
        self.port, self.rest, self.page = free_port(), free_port(), free_port()
        self.start()

    def start(self) -> None:
        """Start them, at the same addresses each time."""
        settings = {"spark.master.rest.enabled": "true", "spark.master.rest.port": self.rest}
        (self.folder / "conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        spark = [str(self.home / "bin" / "spark-class"), "org.apache.spark.deploy.{0}.{1}", "--host", "127.0.0.1"]
        here = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(self.home)}
        master = [each.format("master", "Master") for each in spark]
        ports = ["--port", str(self.port), "--webui-port", str(self.page)]
        self.run(*master, *ports, "--properties-file", str(self.folder / "conf"), **here)
        worker = [each.format("worker", "Worker") for each in spark]
        size = ["--webui-port", "0", "--cores", "2", "--memory", "2g", "--work-dir", str(self.folder / "work")]
        self.run(*worker, *size, f"spark://127.0.0.1:{self.port}", **here)
        until(lambda: '"ALIVE"' in self._shown().partition('"aliveworkers"')[0], "a Spark worker", START_SEC)

    def _shown(self) -> str:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.page}/json/", timeout=5) as answer:
            return str(answer.read().decode())
        return ""

    def setting(self, **more: Any) -> str:
        (jar,) = (self.home / "jars").glob("spark-core_*.jar")
        entry = {
            "file": jar.as_uri(),
            "main_class": "org.apache.spark.deploy.PythonRunner",
            "properties": {"spark.master": f"spark://127.0.0.1:{self.port}", "spark.driver.memory": "512m"},
            "environment": {"PYTHONPATH": str(HERE), "PYSPARK_PYTHON": sys.executable},
        }
        jobs = str(HERE / "engine_jobs.py")
        entrypoints = {name: entry | {"arguments": [jobs, "", name]} for name in ("counts", "fails")}
        where = {"entrypoints": entrypoints, "master": f"http://127.0.0.1:{self.page}"}
        return json.dumps({"it": self.entry(f"http://127.0.0.1:{self.rest}", **where, **more)})
