"""HUP brings new settings, code and queues, TTIN tells where everybody is, recycling; workers of several queues."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from farming import Farm, Program, free_port, until

from dataloader.farm.supervisor import SLOTS_LEAST, TICK_SEC
from dataloader.queue import lifecycle
from dataloader.queue.reports import alerts, stats

VERSIONED = """
import time
from dataloader.pipelines import register

time.sleep({importing})  # what large libraries cost

@register("versioned")
def versioned(args):
    end = time.monotonic() + args.get("sec", 0)
    while time.monotonic() < end:
        time.sleep(0.01)
        yield
    return {{"version": {version}}}
"""


HANGS_ONCE = """
import pathlib
import time
begun = pathlib.Path(__file__).with_name("begun")
if not begun.exists():
    begun.touch()
    time.sleep(3600)
"""


def wish(**queues: int) -> str:
    return json.dumps([{"queue": queue, "concurrency": number} for queue, number in queues.items()])


def version(farm: Farm) -> int:
    return int(farm.wait(farm.enqueue("versioned"), "succeeded")["progress"]["version"])


class Code:
    """The module `mine`, in versions. It is not compiled: a change within a second would go unseen."""

    def __init__(self, farm: Farm) -> None:
        self.file = farm.folder / "mine.py"
        self.version = 0
        self.change()

    def change(self, importing: float = 0.0) -> None:
        self.version += 1
        self.file.write_text(VERSIONED.format(version=self.version, importing=importing))


def reloadable(farm: Farm, workers: int = 2, **settings: object) -> tuple[Program, Code]:
    """A farm with that module."""
    code = Code(farm)
    return farm.ready(workers=workers, dl_pipelines="farm_pipelines,mine", **settings), code


def under_load(farm: Farm, program: Program, seconds: float, orders: dict[float, Callable[[], None]]) -> float:
    """Give orders at these seconds beside jobs in a rhythm that makes none wait; how late the latest job started."""
    jobs, most, start = [], 0, time.monotonic()
    for number in range(int(seconds / 0.25)):
        jobs.append(farm.enqueue("versioned", args={"sec": (0.05, 0.2, 0.1, 0.15)[number % 4]}))
        while (passed := time.monotonic() - start) < (number + 1) * 0.25:
            for at in [at for at in orders if at < passed]:
                orders.pop(at)()
            most = max(most, len(program.workers()))
            time.sleep(0.01)  # the rhythm of the load
    assert most <= 2
    for job in jobs:
        assert farm.wait(job, "succeeded")["attempt"] == 1
        assert farm.story(job) == ["queued", "picked", "done"]
    late = "SELECT max(extract(epoch FROM started_at - available_at))::float8 FROM dl_jobs WHERE job_id = ANY (%s)"
    return float(farm.rows(late, jobs)[0][0])


def test_hup_loses_and_delays_nothing_under_load(farm: Farm) -> None:
    """Measured are 0.05 s, the rest is for a busy machine. Without a successor it was 2.1 to 4.4 s, each time."""
    program, code = reloadable(farm, workers=1)

    def hup() -> None:
        code.change(importing=1.5)
        program.signal(signal.SIGHUP)

    late = []
    while not late or (min(late) >= 2 and len(late) < 3):
        late.append(under_load(farm, program, 7, dict.fromkeys((0.5, 0.7, 4), hup)))
        until(lambda: version(farm) == code.version, "the last code")
    assert min(late) < 2


def test_a_successor_waits_for_its_place(farm: Farm) -> None:
    """While the worker of before is at its job, the queue's concurrency is not exceeded; then there is no gap."""
    program, code = reloadable(farm, workers=1, dl_claim_backoff_sec=600)
    first = farm.enqueue("recorded", args={"sec": 600})
    farm.begun(first)
    code.change()
    program.signal(signal.SIGHUP)
    until(lambda: program.children("waits to claim"))
    second = farm.enqueue("versioned")
    # A round trip of the successor, in which it could have claimed: it hears of the next reload and makes way for it.
    code.change()
    program.signal(signal.SIGHUP)
    until(lambda: len(program.events("worker.started")) == 3 and program.children("waits to claim"))
    assert farm.job(second)["status"] == "queued"
    assert lifecycle.request_cancel(farm.conn, first)["cancel_requested"]
    end = farm.wait(second, "succeeded")
    assert (end["started_at"] - farm.job(first)["finished_at"]).total_seconds() < 60
    until(lambda: version(farm) == 3)
    until(lambda: len(program.workers()) == 1)


def test_a_long_job_does_not_hold_up_the_other_workers_successors(farm: Farm) -> None:
    """The first worker to finish its run leaves first; the one at the long job goes on with the old code.

    They leave one by one: there is one successor at a time beside them.
    """
    program, code = reloadable(farm, workers=2)
    before = {worker.pid for worker in program.workers()}
    long = farm.enqueue("recorded", args={"sec": 600})
    farm.begun(long)
    short = farm.enqueue("versioned", args={"sec": 2})
    farm.wait(short, "running", "succeeded")
    code.change()
    program.signal(signal.SIGHUP)
    most = 0

    def short_is_over() -> bool:
        nonlocal most
        most = max(most, len(program.workers()))
        return bool(farm.job(short)["status"] == "succeeded")

    until(short_is_over, "the short job")
    assert most <= 3
    until(lambda: version(farm) == 2, "a job of the new code")
    assert (farm.job(short)["status"], farm.job(long)["status"]) == ("succeeded", "running")
    until(lambda: len(before & {worker.pid for worker in program.workers()}) == 1, "one of before to leave")
    assert lifecycle.request_cancel(farm.conn, long)["cancel_requested"]
    until(lambda: len(now := {worker.pid for worker in program.workers()}) == 2 and not now & before)
    assert farm.job(long)["attempt"] == 1


SENDS = """
import os, signal, sys
numbers = (signal.SIGHUP, signal.SIGUSR1, signal.SIGTTIN) if "api" in sys.argv else (signal.SIGTTIN, signal.SIGHUP)
for number in () if "gunicorn" in sys.modules else numbers:
    os.kill(os.getpid(), number)
"""


def test_orders_in_a_start_neither_end_nor_stop_a_program(farm: Farm, tmp_path: Path) -> None:
    (tmp_path / "sends_orders.py").write_text(SENDS)
    program = farm.start(workers=1, dl_preload="sends_orders", before=["env"])
    api = farm.api(free_port(), dl_hooks="sends_orders", before=["env"])
    program.logged("worker.started")
    program.logged("supervisor.reloaded")
    until(lambda: "Hang up" in api.log.read_text(), "gunicorn to reload")
    farm.works()
    assert (program.stop(), api.stop(40)) == (0, 0)


def shown_refusals(farm: Farm) -> list[str]:
    """The words of doctor and of the overview about refused reloads."""
    found = alerts.farm_alerts({"queues": []}, stats.workers(farm.conn), None, ())
    return [alert.text for alert in found if "The latest reload of the farm on" in alert.text]


def test_hup_with_broken_code_leaves_the_workers_of_before(farm: Farm) -> None:
    """An error says so, again and again; jobs are done by the old code; the next HUP with good code heals."""
    program, code = reloadable(farm)
    before = {worker.pid for worker in program.workers()}
    for text, word in (("import no_such_module", "no_such_module"), ("def broken(:", "SyntaxError")):
        told = len(program.events("supervisor.start.failed"))
        code.file.write_text(text)
        program.signal(signal.SIGHUP)
        program.logged("supervisor.start.failed", told + 2)
        assert word in str(program.events("worker.pipelines.failed")[-1])
        assert before <= {worker.pid for worker in program.workers()}, "beside them there may be the next try"
        assert version(farm) == 1
    until(lambda: "a new worker ended in the import of" in str(shown_refusals(farm)), "the overview to say so")
    code.change()
    program.signal(signal.SIGHUP)
    until(lambda: shown_refusals(farm) == [], "them to be content again")
    until(lambda: len(now := {worker.pid for worker in program.workers()}) == 2 and not now & before)
    assert version(farm) == 2
    assert program.stop() == 0


def test_a_worker_whose_import_hangs_is_killed_and_replaced(farm: Farm) -> None:
    program, code = reloadable(farm, 1, dl_stall_sec=4)
    code.file.write_text(f"{HANGS_ONCE}\n{VERSIONED.format(version=2, importing=0)}")
    program.workers()[0].kill()
    assert version(farm) == 2
    assert [line["why"] for line in program.events("supervisor.worker.killed")] == ["stalled"]
    assert program.events("supervisor.start.failed")[-1]["calling"] == "import of mine"


def test_hup_brings_other_queues_and_with_wrong_settings_changes_nothing(farm: Farm) -> None:
    """They are wrong, or wish for more workers than there is room for."""
    program, reload = with_dotenv(farm, wish(q=2, a=1))
    program.logged("worker.started", 3)
    before = {worker.pid for worker in program.workers()}
    reload(wish(q=1, other=SLOTS_LEAST))
    (refused,) = program.logged("supervisor.reload.refused")
    assert f"{SLOTS_LEAST + 1} workers" in refused["error"]
    reload("nonsense")
    assert "WORKERS_JSON" in program.logged("supervisor.reload.refused", 2)[1]["error"]
    until(lambda: "did not succeed: WORKERS_JSON" in str(shown_refusals(farm)), "doctor and the overview to say so")
    assert {worker.pid for worker in program.workers()} == before
    reload(json.dumps([{"queue": "q"}, {"queues": ["a", "b"], "concurrency": 2}]))
    farm.succeeds(farm.enqueue("noop", "b"))
    workers = {"q": 1, "a": 0, "a, b": 2}
    until(lambda: {queue: len(program.children(f"worker {queue}#")) for queue in workers} == workers)
    farm.works()
    (reloaded,) = program.logged("supervisor.reloaded")
    assert reloaded["workers"] == {"q": 1, "a, b": 2}
    shown = "SELECT FROM dl_workers WHERE queue = 'a' AND queues = ARRAY['a', 'b'] AND state <> 'dead'"
    until(lambda: len(farm.rows(shown)) == 2, "the keeper to show their queues")
    until(lambda: shown_refusals(farm) == [], "doctor and the overview to be content again")


def test_ttin_logs_the_stacks_even_of_a_worker_that_holds_the_gil_and_quit_ends_at_once(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_drain_sec=600)
    job = farm.running("holds_the_gil", args={"sec": 3600})
    program.signal(signal.SIGTTIN)
    first = program.logged("supervisor.worker.stacks", 2)[0]  # a line for each thread
    assert "holds_the_gil" in first["stacks"], "the main thread comes first"
    program.signal(signal.SIGQUIT)
    assert program.process.wait(60) == 0
    assert (farm.job(job)["status"], farm.job(job)["attempt"]) == ("queued", 0)


def test_a_worker_is_replaced_after_dl_max_jobs_and_when_it_has_grown(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_max_jobs=3, dl_max_rss_mb=200)
    for _ in range(7):
        farm.wait(farm.enqueue("recorded", args={"sec": 0}), "succeeded")
    assert farm.rows("SELECT count(*) FROM runs GROUP BY pid ORDER BY min(started)") == [(3,), (3,), (1,)]
    farm.wait(farm.enqueue("grows", args={"mb": 300}), "succeeded")
    assert [event["jobs"] for event in program.logged("worker.recycled", 3)] == [3, 3, 2]
    farm.works()


def entry(*queues: str, **more: Any) -> str:
    return json.dumps([{"queues": queues, **more}])


def with_dotenv(farm: Farm, workers_json: str, **settings: Any) -> tuple[Program, Callable[[str], None]]:
    """A program with these workers, and what lets it read others from its .env."""
    folder = farm.folder / "settings"
    folder.mkdir()
    dotenv = folder / ".env"
    dotenv.write_text(f"WORKERS_JSON='{workers_json}'\n")
    program = farm.start(cwd=folder, workers_json="", **settings)
    program.logged("worker.started")

    def reload(workers_json: str) -> None:
        dotenv.write_text(f"WORKERS_JSON='{workers_json}'\n")
        program.signal(signal.SIGHUP)

    return program, reload


def test_workers_of_several_queues_run_the_jobs_of_each_in_turn_and_wake_for_any(farm: Farm) -> None:
    program = farm.ready(workers=1, workers_json=entry("a", "b", "c", scheduler="lag"), dl_claim_backoff_sec=600)
    jobs = [farm.enqueue("noop", queue) for _ in range(30) for queue in ("a", "b")]
    farm.succeeds(*jobs)
    assert all(" ".join(worker.cmdline()).startswith("dataloader: worker a, b, c#") for worker in program.workers())
    by_queue = {line["job_id"]: line["queue"] for line in program.logged("worker.job.finished", len(jobs))}
    assert [by_queue[str(job)] for job in jobs] == ["a", "b"] * 30
    for queue in ("c", "a", "b"):
        until(lambda: program.children("idle"), "the worker to be idle")
        farm.wait(farm.enqueue("noop", queue), "succeeded")


def test_an_entry_speaks_for_its_queues_to_all_workers_of_the_farm(farm: Farm) -> None:
    """Else a worker of another entry would run jobs of the queue without their order."""
    both = [{"queue": "a", "ordered": True}, {"queues": ["a", "b"]}]
    program = farm.start(workers_json=json.dumps([both[1], both[0]]))
    program.logged("worker.started", 2)
    assert farm.rows("SELECT ordered FROM dl_queues WHERE queue = 'a'") == [(True,)]
    program.signal(signal.SIGTERM)
    program.process.wait(60)
    farm.conn.execute("UPDATE dl_queues SET ordered = false")
    refused = farm.start(workers_json=json.dumps(both))
    assert refused.process.wait(60) == 78
    assert {each["error"].partition(" the queue")[0] for each in refused.events("worker.schema.refused")} == {
        'WORKERS_JSON says "ordered": true of'
    }
    assert len(refused.events("worker.started")) == 0


def test_workers_that_are_refused_late_end_the_farm_too(farm: Farm) -> None:
    """A worker is ready once it has a session, also where the database answers slowly."""
    farm.conn.execute("INSERT INTO dl_queues (queue, ordered) VALUES ('q', false)")
    with psycopg.connect(farm.dsn) as operator:
        operator.execute("LOCK TABLE dl_queues IN ACCESS EXCLUSIVE MODE")
        program = farm.start(workers_json='[{"queue": "q", "ordered": true}]')
        until(lambda: farm.sessions("dl-worker", "wait_event_type = 'Lock'"), "the worker to ask for its queue")
        time.sleep(3 * TICK_SEC)  # the supervisor has seen its workers meanwhile
    assert program.process.wait(60) == 78


def test_a_reload_with_another_scheduler_starts_no_second_set_of_workers(farm: Farm) -> None:
    """A drain ends the successors too, which wait for their places."""
    program, reload = with_dotenv(farm, entry("a", "b"), dl_drain_sec=1)
    long = farm.enqueue("recorded", "a", args={"sec": 600})
    farm.begun(long)
    reload(entry("a", "b", scheduler={"a": 3, "b": 1}))
    until(lambda: program.children("waits to claim"), "the successor to wait for its place")
    other = farm.enqueue("noop", "b")
    # A round trip of the successor, in which it could have claimed: it hears of the next reload and makes way for it.
    program.signal(signal.SIGHUP)
    until(lambda: len(program.events("worker.started")) == 3 and program.children("waits to claim"), "the next one")
    assert program.stop() == 0
    assert [(farm.job(job)["status"], farm.job(job)["attempt"]) for job in (long, other)] == [("queued", 0)] * 2
    assert farm.story(other) == ["queued"]
