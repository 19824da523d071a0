"""A farm as an operator runs it: real processes, started by the command line, watched through the database."""

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import forkserver
import patience
import psutil
from farm_pipelines import RUNS
from forkserver import Forked
from judge import illegal
from patience import PATIENCE as PATIENCE

from dataloader.config import Settings
from dataloader.queue import db, enqueue, lifecycle, operations
from dataloader.queue.reports import stats

CHECKOUT = Path(__file__).parents[2]
until = partial(patience.until, pause=0.02)

# Below the ports that the kernel gives to connections, for one of those could take a port before its server starts.
# Each process of a run has a thousand of its own, and begins somewhere among them, for another run may be beside it.
_first = 12_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 20 * 1_000
_ports = itertools.islice(itertools.cycle(range(_first, _first + 1_000)), os.getpid() % 1_000, None)

# The tables of the queue, without those in which the programs keep what they write only once.
EMPTIED = """
SELECT oid::regclass::text FROM pg_class
 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
   AND relname NOT IN ('dl_migrations', 'dl_workers', 'dl_tasks', 'dl_rolled', 'dl_alerted')
"""


def keeps_its_promises(module: str, *arguments: str, patience: float) -> str:
    """Run `python -m tools.MODULE` and return its output; it fails with the promise that was broken."""
    command = [sys.executable, "-m", f"tools.{module}", *arguments]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            output, _ = run.communicate(timeout=patience)
        except BaseException:
            run.terminate()  # it cleans up behind itself
            raise
    assert run.returncode == 0, output
    return output


def ended_lines(file: Path) -> list[str]:
    """The file's lines without the last if it has no end yet: a reader may see half of what is being written."""
    return file.read_bytes().rpartition(b"\n")[0].decode().splitlines()


def call(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of the API at this port of this machine; with a body by POST."""
    data, headers = json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def status(port: int, path: str = "/health", host: str = "127.0.0.1") -> int:
    """The status with which a server at this port answers; 0 where nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def answers(port: int, path: str = "/health", host: str = "127.0.0.1") -> bool:
    """Whether a server at this port answers 200."""
    return status(port, path, host) == 200


def free_port() -> int:
    """A port of this machine for the server of a test."""
    while True:
        port = next(_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment() -> dict[str, str]:
    """The environment without the settings and the periods of a farm; DL_PG_BIN stays."""
    settings = {name.upper() for name in Settings.model_fields} - {"DL_PG_BIN"} | {"DL_PERIODS"}
    return {name: value for name, value in os.environ.items() if name not in settings}


def executed(command: Sequence[str], env: dict[str, str], cwd: Path | None, out: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=cwd)


def family(pid: int) -> list[psutil.Process]:
    """A program's processes below the first."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def titled(processes: Iterable[psutil.Process], text: str) -> list[psutil.Process]:
    """The processes with this text in their command line."""
    matching = []
    for process in processes:
        with suppress(psutil.Error):
            if text in " ".join(process.cmdline()):
                matching.append(process)
    return matching


def have_ended(processes: Iterable[psutil.Process]) -> bool:
    """Whether none of these processes runs; one whose parent was killed may stay a zombie until process 1 looks."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def on_all(act: Callable[[psutil.Process], None], processes: Iterable[psutil.Process]) -> None:
    """Suspend, resume or kill these processes in their order, as far as they are there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            act(process)


class Program:
    """One `dataloader` process under test: forked, or executed by the command `before`."""

    def __init__(
        self, name: str, env: dict[str, str], log: Path, cwd: Path | None = None, before: Sequence[str] = ()
    ) -> None:
        self.log = log
        self._read: list[dict[str, Any]] = []
        self._upto = 0  # so many bytes of the log have been read
        with log.open("ab") as out:
            self.process: subprocess.Popen[bytes] | Forked = (
                executed([*before, sys.executable, "-m", "dataloader", *name.split()], env, cwd, out.fileno())
                if before
                else forkserver.start(name.split(), env, cwd, out.fileno(), out.fileno())
            )

    def children(self, title: str = "") -> list[psutil.Process]:
        """Its children whose process title contains `title`."""
        return titled(psutil.Process(self.process.pid).children(), title)

    def workers(self) -> list[psutil.Process]:
        return self.children("dataloader: worker")

    def family(self) -> list[psutil.Process]:
        """Itself and all that it has started, parents first."""
        return [psutil.Process(self.process.pid), *family(self.process.pid)]

    def events(self, name: str) -> list[dict[str, Any]]:
        with self.log.open("rb") as file:
            file.seek(self._upto)
            more = file.read().rpartition(b"\n")[0]
        if more:
            self._upto += len(more) + 1
            self._read += [json.loads(line) for line in more.decode().splitlines() if line.startswith("{")]
        return [line for line in self._read if line["event"] == name]

    def logged(self, name: str, times: int = 1) -> list[dict[str, Any]]:
        """Wait for so many lines of this event, and return all that there are: a worker's thread writes them late."""
        until(lambda: len(self.events(name)) >= times, f"{times} lines of {name}")
        return self.events(name)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self, patience: float = PATIENCE) -> int:
        """SIGTERM, and its exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.process.wait(patience)


class Farm:
    """The queue of one test and the programs that serve it."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.programs: list[Program] = []
        self.executes = False  # True: programs are executed, not forked
        self.before: Sequence[str] = ()  # a command that executes the programs, for example in another namespace
        self.conn = db.connect(dsn, name="test", schema="public")
        self.conn.execute(RUNS)

    def start(
        self,
        name: str = "workers",
        workers: int = 2,
        queue: str = "q",
        cwd: Path | None = None,
        before: Sequence[str] = (),
        prefetch: int | None = None,
        **settings: Any,
    ) -> Program:
        """Start a program with these settings over quick defaults, executed by the command `before` if there is one."""
        entry = {"queue": queue, "concurrency": workers} | ({"prefetch": prefetch} if prefetch else {})
        defaults = {
            "DL_DB_DSN": self.dsn,
            "DL_HOME": str(self.folder),
            "DL_PIPELINES": "farm_pipelines",
            "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{self.folder}",  # a test writes its own modules there
            "PYTHONDONTWRITEBYTECODE": "1",  # a .pyc names its source by second and size: it would hide a test's change
            "WORKERS_JSON": json.dumps([entry]),
            "APP_HOST": "127.0.0.1",
            "DL_HEARTBEAT_SEC": "1",
            "DL_REAPER_PERIOD_SEC": "0.5",
            "DL_CLAIM_BACKOFF_SEC": "2",
            "DL_DRAIN_SEC": "5",
            "DL_KILL_GRACE_SEC": "1",
        }
        given = {key.upper(): str(value) for key, value in settings.items()}
        program = Program(
            name,
            os.environ | defaults | given,
            self.folder / f"{name.split()[0]}-{len(self.programs)}.log",
            cwd,
            # A forked program has the fork server's libraries and periods.
            before or self.before or (["env"] if self.executes or {"LD_PRELOAD", "DL_PERIODS"} & given.keys() else ()),
        )
        self.programs.append(program)
        return program

    def ready(self, workers: int = 2, **settings: Any) -> Program:
        """Start a farm and wait until all its workers listen."""
        program = self.start(workers=workers, **settings)
        program.logged("worker.started", workers)
        return program

    def reaper(self, **settings: Any) -> Program:
        """Start a reaper and wait until it works."""
        reaper = self.start("reaper", **settings)
        reaper.logged("reaper.started")
        return reaper

    def api(self, port: int, **settings: Any) -> Program:
        """Start an API of one process at this port and wait until it answers with the database."""
        api = self.start("api --processes 1", app_port=port, **settings)
        until(lambda: answers(port, "/ready"), "the API")
        return api

    def enqueue(self, task: str, queue_name: str = "q", lock_key: str = "", **more: Any) -> UUID:
        """Add a job; by default with a key of its own."""
        args = more.pop("args", {})
        new = enqueue.NewJob(queue_name, task, lock_key or f"key-{time.monotonic_ns()}", args, **more)
        return enqueue.enqueue(self.conn, new)[0]

    def job(self, job_id: UUID) -> dict[str, Any]:
        found = lifecycle.status(self.conn, job_id)
        assert found is not None
        return found

    def result(self, job_id: UUID) -> Any:
        found = stats.result(self.conn, job_id)
        assert found is not None
        return found["result"]

    def wait(self, job_id: UUID, *status: str, patience: float = PATIENCE) -> dict[str, Any]:
        """Wait until the job is in one of these states."""
        try:
            until(lambda: self.job(job_id)["status"] in status, f"{status}", patience)
        except AssertionError:
            raise AssertionError(f"not {status} but {self.job(job_id)}; {self.story(job_id)}") from None
        return self.job(job_id)

    def succeeds(self, *job_ids: UUID) -> None:
        """Wait for the success of each of these jobs; one attempt has counted, and its journal is legal."""
        for job_id in job_ids:
            assert self.wait(job_id, "succeeded")["attempt"] == 1, self.journal(job_id)
            assert illegal([kind for kind, _ in self.journal(job_id)], "succeeded") is None, self.journal(job_id)

    def works(self) -> None:
        """A new job succeeds at its first attempt."""
        self.succeeds(self.enqueue("noop"))

    def running(self, task: str, **more: Any) -> UUID:
        """Add a job of a pipeline that notes its start, and wait for the start."""
        job_id = self.enqueue(task, **more)
        until(lambda: self.rows("SELECT FROM runs WHERE job_id = %s", job_id), f"{task} to begin")
        return job_id

    def worker(self, job_id: UUID) -> psutil.Process:
        """The worker that runs this job."""
        ((name,),) = self.rows("SELECT claimed_by FROM dl_jobs WHERE job_id = %s", job_id)
        return psutil.Process(int(name.split(":")[-2]))

    def begun(self, job_id: UUID) -> None:
        """Wait until the job runs: its row says so already when its worker may still hand it back."""
        until(lambda: self.job(job_id)["progress"], "its first progress")

    def story(self, job_id: UUID) -> list[str]:
        """The kinds of the job's journal, without heartbeats."""
        return [kind for kind, _ in self.journal(job_id) if kind != "heartbeat"]

    def journal(self, job_id: UUID) -> list[tuple[str, dict[str, Any]]]:
        rows = self.conn.execute(
            "SELECT kind, payload FROM dl_job_events WHERE job_id = %s ORDER BY event_id", (job_id,)
        )
        return rows.fetchall()

    def insert(self, number: int = 1, **columns: str) -> list[UUID]:
        """Insert so many rows by plain SQL, as another service does: an expression for each column; n counts them."""
        known = {"job_id": "gen_random_uuid()", "queue": "'q'", "task": "'noop'", "lock_key": "'key ' || n"} | columns
        source = f"SELECT {', '.join(known.values())} FROM generate_series(1, {number}) n RETURNING job_id"
        return [job_id for (job_id,) in self.rows(f"INSERT INTO dl_jobs ({', '.join(known)}) {source}")]

    def rows(self, statement: str, *parameters: Any) -> list[Any]:
        return self.conn.execute(statement, parameters).fetchall()

    def sessions(self, name: str = "dl-", condition: str = "true") -> list[int]:
        """The backends of this database's sessions whose names begin so; other tests use the same server and role."""
        ours = "datname = current_database() AND starts_with(application_name, %s)"
        return [pid for (pid,) in self.rows(f"SELECT pid FROM pg_stat_activity WHERE {ours} AND {condition}", name)]

    def end_sessions(self, name: str = "dl-") -> None:
        """End these sessions."""
        self.rows("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) pid", self.sessions(name))

    def no_sessions(self, name: str = "dl-") -> None:
        """Wait until there is none of these sessions: a backend ends a little after its client."""
        until(lambda: not self.sessions(name), "the sessions to end")

    def empty(self) -> None:
        """End all jobs and empty the tables, so that the next test on this farm finds no job, name or setting."""

        def is_idle() -> bool:
            self.conn.execute("DELETE FROM dl_jobs WHERE status <> 'running'")
            running = [job_id for (job_id,) in self.rows("SELECT job_id FROM dl_jobs")]
            operations.change(self.conn, "cancel", running, "test")
            return not running

        until(is_idle, "the jobs to end")
        with self.conn.transaction():
            self.conn.execute("SET LOCAL session_replication_role = replica")  # no trigger writes into another table
            for (table,) in self.rows(EMPTIED):
                self.conn.execute(f"DELETE FROM {table}")

    def close(self) -> None:
        """End everything: by a drain where that is quick, which also lets coverage be written, else at once."""
        running = [program.process for program in self.programs if program.process.poll() is None]
        families = [family(process.pid) for process in running]
        for process in running:
            process.terminate()
        gone_by = time.monotonic() + 2
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, gone_by - time.monotonic()))
        for member in itertools.chain(*families):
            with suppress(psutil.Error):
                member.kill()
        for process in running:
            process.kill()
            process.wait()
        self.conn.close()


# A row whose worker is on a machine that is gone; its lease is over.
LOST = {
    **{"status": "'running'", "attempt": "1", "claimed_by": "'far:1:away'", "lease_ttl_sec": "1"},
    **{"started_at": "now()", "heartbeat_at": "now()", "lease_expires_at": "now() - interval '1 s'"},
}


@contextmanager
def farm_on(dsn: str, folder: Path) -> Iterator[Farm]:
    """A farm whose programs have this DSN."""
    farm = Farm(dsn, folder)
    try:
        yield farm
    finally:
        farm.close()


class LongJob:
    """A job that runs until it is let go, and asks nothing of the database meanwhile."""

    def __init__(self, farm: Farm, name: str = "go", queue: str = "q", waits: bool = True, **more: Any) -> None:
        self.farm = farm
        self.go = farm.folder / name
        self.job_id = farm.enqueue("waits_for_a_file", queue, args={"go": str(self.go)}, **more)
        if waits:
            self.has_begun()

    def has_begun(self, times: int = 1) -> None:
        """Wait until it has begun so many times."""
        until(lambda: len(self.runs) >= times, "the long job to begin")

    @property
    def runs(self) -> list[str]:
        file = self.go.with_suffix(".runs")
        return file.read_text().split() if file.exists() else []

    def ends_well(self) -> None:
        """It is let go; it has run once, counted once, and its journal is legal."""
        self.go.touch()
        self.farm.succeeds(self.job_id)
        assert self.runs == ["1"]
