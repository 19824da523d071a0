"""`run.dask`, `run.ray` and `run.spark` on a farm, each against a real cluster: what becomes of the program."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from clusters import Cluster, Dask, Ray, Spark, spark_home
from farming import Farm, Program, have_ended, on_all, until

from dataloader.queue import lifecycle, logs, operations

pytestmark = pytest.mark.long
CANCEL_MOST_SEC = 10.0  # 2 s are promised; a busy machine has more
ENGINES = ("dask", "ray", "spark")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "spark":
        if (home := spark_home()) is None:
            pytest.skip("neither SPARK_HOME nor pyspark with java")
        made: Cluster = Spark(home)
    else:
        made = Dask() if request.param == "dask" else Ray()
    yield made
    made.close()


def on(*engines: str, quick: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Test a promise on these engines; it is slow on those that are not `quick`."""
    params = [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in engines]
    return pytest.mark.parametrize("cluster", params, indirect=True, scope="module")


class Engaged:
    """A farm with a cluster, and the starts of one job's program."""

    def __init__(self, farm: Farm, cluster: Cluster, name: str = "starts", **settings: Any) -> None:
        self.farm, self.cluster = farm, cluster
        self.file = farm.folder / name
        self.settings = {"dl_engines": cluster.setting(), "dl_kill_grace_sec": 5, "dl_heartbeat_sec": 1} | settings

    def ready(self, **more: Any) -> Program:
        return self.farm.ready(workers=1, **(self.settings | more))

    def enqueue(self, entrypoint: str = "counts", args: dict[str, Any] | None = None, **more: Any) -> UUID:
        """Add a job whose program notes its starts in our file."""
        given = {"starts": str(self.file)} | (args or {})
        named = {"cluster": "it", "entrypoint": entrypoint, "args": given}
        return self.farm.enqueue(f"run.{self.cluster.engine}", args=named, **more)

    def starts(self) -> list[int]:
        return [int(pid) for pid in self.file.read_text().split()] if self.file.exists() else []

    def begun(self, number: int = 1) -> int:
        """Wait for the start of this number, and return its process."""
        until(lambda: len(self.starts()) >= number, f"start {number}")
        return self.starts()[-1]

    def go(self) -> None:
        Path(f"{self.file}.go").touch()

    def hurry(self, job: UUID) -> None:
        """Make the job due, for a crash or an error delays its next run."""
        self.farm.conn.execute("UPDATE dl_jobs SET available_at = now() WHERE job_id = %s", (job,))

    def under_way(self, job: UUID) -> int:
        """Wait until the job's program and its run have begun; the program's process."""
        pid = self.begun()
        self.farm.begun(job)
        return pid

    def notes(self, job: UUID) -> list[str]:
        return [note for _, payload in self.farm.journal(job) for note in payload.get("notes", [])]

    def succeeded(self, job: UUID) -> dict[str, Any]:
        status = self.farm.wait(job, "succeeded")
        ((result,),) = self.farm.rows("SELECT result FROM dl_results WHERE job_id = %s", job)
        assert (result["counted"], result["order"].startswith(f"dl-{job}-")) == (True, True)
        return status

    def ends_well(self, job: UUID) -> dict[str, Any]:
        """Let the program come to its end, and wait for the job's success."""
        self.go()
        return self.succeeded(job)


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return not have_ended([psutil.Process(pid)])
    return False


@on(*ENGINES, quick=("dask", "ray"))
def test_a_program_survives_the_death_of_its_worker_and_runs_once(farm: Farm, cluster: Cluster) -> None:
    it = Engaged(farm, cluster)
    program = it.ready()
    job = it.enqueue()
    pid = it.begun()
    until(lambda: farm.job(job)["progress"].get("processed", 0) > 5, "progress")
    program.workers()[0].kill()
    until(lambda: farm.job(job)["attempt"] == 2, "the next attempt")
    assert is_alive(pid)
    assert it.ends_well(job)["attempt"] == 2
    assert it.starts() == [pid]


ORDERED = "SELECT FROM dl_checkpoints WHERE job_id = %s AND checkpoint ? 'id'"


@on(*ENGINES, quick=("dask",))
def test_a_worker_that_dies_at_the_order_makes_no_second_start(farm: Farm, cluster: Cluster) -> None:
    """The worker is killed as soon as the queue has the order: the engine has it, or gets it from the next run."""
    Engaged(farm, cluster).ready()
    for number in range(3):
        it = Engaged(farm, cluster, f"starts-{number}")
        job = it.enqueue()
        until(lambda job=job: farm.rows(ORDERED, job), "the order in the queue")
        farm.worker(job).kill()
        until(lambda job=job: farm.job(job)["attempt"] == 2, "the next attempt")
        it.begun()
        it.ends_well(job)
        assert len(it.starts()) == 1


@on(*ENGINES, quick=("dask", "ray"))
def test_a_cancellation_ends_the_program_in_time(farm: Farm, cluster: Cluster) -> None:
    """The program ends soon after the order to cancel, at one of two starts: the other may meet a busy machine."""
    it = Engaged(farm, cluster)
    it.ready()
    job = it.enqueue()
    first = is_canceled(it, job, 1)
    operations.change(farm.conn, "requeue", [job], "test")
    second = is_canceled(it, job, 2)  # what was stopped is ordered anew
    assert min(first, second) < CANCEL_MOST_SEC
    operations.change(farm.conn, "requeue", [job], "test")
    it.begun(3)
    it.ends_well(job)


def is_canceled(it: Engaged, job: UUID, number: int) -> float:
    """Cancel the start of this number; the seconds until the program has ended, which `pytest -s` shows."""
    pid = it.begun(number)
    it.farm.begun(job)
    began = time.monotonic()
    lifecycle.request_cancel(it.farm.conn, job)
    until(lambda: not is_alive(pid), "the program to end")
    seconds = time.monotonic() - began
    print(f"{it.cluster.engine}: {seconds:.2f} s from the order to cancel to the program's end")
    it.farm.wait(job, "canceled")
    assert it.notes(job)[-1].endswith("is stopped at it")
    return seconds


@on(*ENGINES, quick=("dask", "ray"))
def test_a_cancellation_between_two_attempts_ends_the_program(farm: Farm, cluster: Cluster) -> None:
    """The workers drain, and somebody cancels the job then: the reaper adds a job that stops the program."""
    it = Engaged(farm, cluster)
    first = it.ready(dl_drain_sec=0)
    job = it.enqueue()
    pid = it.under_way(job)
    assert first.stop() == 0
    lifecycle.request_cancel(farm.conn, job)
    assert (farm.job(job)["status"], is_alive(pid)) == ("canceled", True)
    it.ready()
    is_cleaned_up(it, job, pid)
    operations.change(farm.conn, "requeue", [job], "test")
    it.begun(2)  # what was stopped is ordered anew
    it.ends_well(job)


def is_cleaned_up(it: Engaged, job: UUID, pid: int) -> None:
    """The reaper adds a job that stops the program of the canceled one."""
    it.farm.start("reaper", dl_reaper_period_sec=1)
    find = "SELECT job_id FROM dl_jobs WHERE lock_key = %s"
    ((cleanup,),) = until(lambda: it.farm.rows(find, f"cleanup of {job}"), "the cleanup")
    it.farm.wait(cleanup, "succeeded")
    until(lambda: not is_alive(pid), "the program to end")
    assert it.notes(cleanup) == [f"dl-{job}-1 of the canceled job {job} is stopped at it"]


@on(*ENGINES, quick=("dask",))
def test_a_drain_leaves_the_program_to_the_next_worker(farm: Farm, cluster: Cluster) -> None:
    it = Engaged(farm, cluster)
    first = it.ready(dl_drain_sec=0)
    job = it.enqueue()
    pid = it.under_way(job)
    assert first.stop() == 0
    status = farm.job(job)
    assert (status["status"], status["attempt"], is_alive(pid)) == ("queued", 0, True)
    it.ready()
    until(lambda: farm.job(job)["status"] == "running", "the next run")
    assert it.ends_well(job)["attempt"] == 1
    assert it.starts() == [pid]


@on("dask", "ray")
def test_a_farm_that_has_lost_its_claim_leaves_the_program_alone(farm: Farm, cluster: Cluster) -> None:
    """A farm that stands still loses its claim. Awake again, and told to stop, it leaves the program alone."""
    it = Engaged(farm, cluster)
    first = it.ready()
    job = it.enqueue(lease_ttl_sec=3, timeout_sec=600)
    pid = it.under_way(job)
    still = first.family()
    on_all(psutil.Process.suspend, still)
    it.ready()
    farm.start("reaper")
    until(lambda: farm.job(job)["attempt"] == 2, "the next owner")
    on_all(psutil.Process.resume, still)
    ends = ("worker.ownership.lost", "worker.fenced", "supervisor.worker.killed")
    until(lambda: any(map(first.events, ends)), "the first to know it")
    assert is_alive(pid)
    it.ends_well(job)
    assert it.starts() == [pid]


@on("dask", "ray")
def test_a_silent_engine_is_waited_for_and_an_unconfirmed_cancellation_is_noted(farm: Farm, cluster: Cluster) -> None:
    """The job ends in time, and says that the program may go on; once the engine answers, the program is stopped."""
    it = Engaged(farm, cluster)
    program = it.ready()
    job = it.enqueue()
    pid = it.under_way(job)
    # The engine accepts connections, and answers nothing.
    silent = cluster.suspend("scheduler" if cluster.engine == "dask" else "dashboard")
    try:
        until(lambda: "is away" in program.log.read_text(), "the worker to know it")
        on_all(psutil.Process.resume, silent)
        before = farm.job(job)["progress"]
        until(lambda: farm.job(job)["progress"] != before, "the program's progress")
        on_all(psutil.Process.suspend, silent)
        lifecycle.request_cancel(farm.conn, job)
        began = time.monotonic()
        farm.wait(job, "canceled")
        seconds = time.monotonic() - began
    finally:
        on_all(psutil.Process.resume, silent)
    assert it.starts() == [pid]
    is_cleaned_up(it, job, pid)
    assert seconds < 15
    (unconfirmed,) = [note for note in it.notes(job) if "has not confirmed" in note]
    assert unconfirmed.startswith(f"it has not confirmed that dl-{job}-1 is stopped (")
    assert unconfirmed.endswith("it may go on there")


@on(*ENGINES)
def test_what_the_end_of_a_program_means_for_its_job(farm: Farm, cluster: Cluster) -> None:
    """Each attempt starts the program anew. Spark writes the standard error of a program to its own log."""
    late, fails, done = (Engaged(farm, cluster, name) for name in ("late", "fails", "done"))
    late.ready()
    job = late.enqueue(timeout_sec=8)
    pid = late.begun()
    until(lambda: not is_alive(pid), "the program to end")
    until(lambda: "requeue" in farm.story(job) or "retry" in farm.story(job), "the end of the attempt")
    assert "timeout: the run took more than 8 s" in str(farm.journal(job))
    late.hurry(job)
    late.begun(2)
    late.ends_well(job)

    job = fails.enqueue("fails", max_attempts=2)
    until(lambda: farm.job(job)["error"], "the error")
    fails.hurry(job)
    error = str(farm.wait(job, "failed")["error"])
    words = ["the driver is FAILED; its last lines:\nhalf way"]
    words = words if cluster.engine == "spark" else ["ProgramFailed", "half way", "ValueError: bad luck"]
    assert [word for word in words if word not in error] == []
    assert len(fails.starts()) == 2

    job = done.enqueue(args={"sec": 2})
    done.succeeded(job)
    if cluster.engine != "spark":
        log = [line["text"] for line in logs.page(farm.conn, job).rows]
        assert log.count("counted 3") == 1
        assert not [line for line in log if "processed" in line or '"result"' in line], "these are no lines of it"
    operations.change(farm.conn, "requeue", [job], "test")
    done.begun(2)  # a job that has succeeded begins anew
    done.succeeded(job)


@on("dask")
def test_a_driver_spreads_its_work_over_the_cluster_which_forgets_what_has_ended(farm: Farm, cluster: Dask) -> None:
    it = Engaged(farm, cluster)
    it.ready()
    job = it.enqueue("spreads")
    farm.wait(job, "succeeded")
    assert farm.result(job) == 55
    code = f"from distributed import Client; print(Client({cluster.address!r}).list_datasets())"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (listed.returncode, str(job) in listed.stdout) == (0, False)  # other tests may have left theirs


@on("dask")
def test_a_cluster_that_starts_anew_gets_the_order_anew(farm: Farm, cluster: Dask) -> None:
    """It has lost its memory, so the function begins again: at least once."""
    it = Engaged(farm, cluster)
    it.ready(dl_engines=cluster.setting(away_sec=1))
    job = it.enqueue()
    pid = it.under_way(job)
    cluster.kill()
    until(lambda: not is_alive(pid), "the function to die with its cluster")
    until(lambda: farm.job(job)["error"], "the error")
    cluster.start()
    it.hurry(job)
    it.begun(2)
    it.ends_well(job)
    assert len(it.starts()) == 2


@on("dask")
def test_a_function_that_waits_for_its_turn_is_canceled_before_it_begins(farm: Farm, cluster: Dask) -> None:
    """The cluster has three threads."""
    it = Engaged(farm, cluster)
    farm.ready(workers=4, **it.settings)
    jobs = [it.enqueue() for _ in range(3)]
    it.begun(3)
    last = it.enqueue()
    until(lambda: farm.rows("SELECT 1 FROM dl_checkpoints WHERE checkpoint ->> 'handle' <> '' OFFSET 3"), "its order")
    lifecycle.request_cancel(farm.conn, last)
    farm.wait(last, "canceled")
    it.go()
    for job in jobs:
        it.succeeded(job)
    assert len(it.starts()) == 3
