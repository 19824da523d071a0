"""A run is a guest in its worker: children are plain, changed workers are replaced; prepared resources stay warm."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any
from uuid import UUID

import psutil
import pytest
from farming import Farm, Program, ended_lines, family, until
from guest_pipelines import CHANGES, GUESTS

from dataloader.queue import operations
from dataloader.queue.reports import stats

MODULES = "farm_pipelines,guest_pipelines"
ENDS = {"done": "succeeded", "cancel": "canceled", "timeout": "failed", "kill": "lost"}


def ready(farm: Farm, modules: str = MODULES, **settings: Any) -> Program:
    return farm.ready(workers=1, dl_pipelines=modules, **settings)


def result(farm: Farm, task: str, **args: Any) -> Any:
    job = farm.enqueue(task, args=args)
    farm.succeeds(job)
    return farm.result(job)


def test_a_child_of_a_run_is_a_plain_process_and_only_the_one_that_claimed_the_job_writes_its_end(farm: Farm) -> None:
    program = ready(farm)
    for how in ("returns", "raises", "exits", "yields", "awaits", "in_a_transaction"):
        task = "child_ends" if how in ("returns", "raises", "exits") else f"child_{how}"
        job = farm.enqueue(task, args={"how": how}, max_attempts=1)
        until(lambda job=job: farm.story(job)[2:], "its first end")
        assert farm.job(job)["status"] == "succeeded", (how, farm.journal(job))
        assert farm.result(job) == "parent"
        result(farm, "tells_its_process")
        assert farm.story(job) == ["queued", "picked", "done"], how
    child = result(farm, "child_describes_itself")
    assert (child["handled"], child["mask"], child["wakeup"]) == ([], [], -1)
    assert "worker" not in child["title"]
    assert result(farm, "terminates_a_child") == -15
    assert farm.wait(farm.enqueue("child_in_async_generator"), "succeeded")["progress"] == {"is_child": False}
    assert result(farm, "child_logs", times=30) == "parent"
    failed = farm.enqueue("child_in_a_callback", max_attempts=1)
    assert farm.wait(failed, "failed", "lost")["status"] == "failed"
    outcomes = result(farm, "child_uses_the_context")  # it has no claim, and gives up none of its parent
    assert len(outcomes) == 7
    assert {re.match(r"RuntimeError: .* forked", text) is not None for text in outcomes.values()} == {True}, outcomes
    result(farm, "tells_its_process")
    assert len(program.workers()) == 1
    assert program.stop() == 0
    assert [line["level"] for line in program.events("logged by child 29")] == ["info"]
    assert not program.events("worker.ownership.lost")
    assert not program.events("worker.fenced")
    assert len(program.events("worker.stopped")) == 1


def test_a_worker_that_a_run_has_changed_is_replaced(farm: Farm) -> None:
    program = ready(farm)
    first = result(farm, "tells_its_process")
    for number, (what, (fact, _)) in enumerate(CHANGES.items(), 1):
        pid = result(farm, "changes", what=what)
        after = result(farm, "tells_its_process")
        assert after["pid"] != pid, what
        assert {**after, "pid": 0} == {**first, "pid": 0}, what
        *before, last = program.logged("worker.changed", number)
        assert (len(before), last["task"], last["changed"]) == (number - 1, "changes", [fact]), what
    assert not program.events("supervisor.worker.killed")
    assert {row["exit_status"] for row in program.events("supervisor.worker.exited")} == {75}
    ((payload,),) = farm.rows(
        "SELECT payload FROM dl_job_events WHERE kind = 'done' AND payload ? 'changed' ORDER BY event_id LIMIT 1"
    )
    assert payload["changed"] == ["timers"]
    shown = {row["task"]: row["replaces"] for row in stats.tasks(farm.conn)}
    assert (shown["changes"]["runs"], shown["changes"]["replaced"]) == (len(CHANGES), len(CHANGES))
    assert shown["tells_its_process"] is None


def test_no_run_of_a_claim_works_in_what_another_has_changed(farm: Farm) -> None:
    after = []
    for what in CHANGES:
        farm.enqueue("changes", args={"what": what})
        after.append(farm.enqueue("tells_its_process"))
    program = ready(farm, workers_json='[{"queue": "q", "concurrency": 1, "prefetch": 50}]')
    farm.succeeds(*after)
    assert len({(seen["folder"], seen["variables"]) for seen in map(farm.result, after)}) == 1
    assert len(program.logged("worker.changed", len(CHANGES))) == len(CHANGES)


OF_ANOTHER_USER = """
import os, subprocess, sys
from dataloader.config import Settings
from dataloader.farm import guest, supervisor

inspection, of_farm = guest.Inspection(), supervisor.Supervisor(None, Settings(), None, None)
inspection.begin()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
os.setresuid(65534, 65534, 65534)
print(*inspection.changed("task", (), may_open=True))
of_farm._kill_orphans()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes users")
def test_a_child_that_sudo_has_given_to_another_user_costs_no_end_of_a_run() -> None:
    """Its worker leaves, and the supervisor goes on."""
    done = subprocess.run([sys.executable, "-c", OF_ANOTHER_USER], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("user children\n", "")


def test_what_grows_run_by_run_is_a_difference_and_what_a_library_leaves_at_its_first_use_is_none(farm: Farm) -> None:
    program = ready(farm)
    assert len({result(farm, "adds_once") for _ in range(5)}) == 1
    assert not program.events("worker.changed")
    for what in ("descriptors", "threads", "environment"):
        pids = [result(farm, "adds_each_time", what=what) for _ in range(6)]
        assert len(set(pids)) == 3, (what, pids)
        assert [what] in [line["changed"] for line in program.events("worker.changed")]


def test_what_exits_in_a_callback_neither_ends_the_worker_nor_hides_the_error(farm: Farm) -> None:
    program = ready(farm)
    (worker,) = program.workers()
    errors = {
        "exits_when_exhausted": "ValueError: the pipeline's own",
        "exits_in_retry_in": "ValueError: the pipeline's own",
        "rude_error": "guest_pipelines.Rude: <exception str() failed>",
        "error_with_a_note": "ValueError: amount is negative: -5",
    }
    for task, error in errors.items():
        job = farm.enqueue(task, max_attempts=2 if task == "exits_in_retry_in" else 1)
        until(lambda job=job: farm.story(job)[2:], "its first end")
        assert farm.job(job)["error"].partition("\n")[0] == error
    assert result(farm, "resource_exits") == "resource"
    assert result(farm, "tells_its_process")["pid"] == worker.pid
    # An alarm or a watchdog that a run leaves behind does not end the next run.
    for task, what in (("changes", "alarm"), ("leaves_a_watchdog", "")):
        farm.succeeds(farm.enqueue(task, args={"what": what}), farm.enqueue("outlasts_an_alarm", max_attempts=1))


def test_a_pool_that_a_module_makes_at_its_import_serves_all_runs(farm: Farm) -> None:
    program = ready(farm, modules=f"{MODULES},pool_pipelines")
    results = [result(farm, "pool_of_the_module") for _ in range(4)]
    assert [each[:2] for each in results] == [[30, 0]] * 4
    assert len({each[2] for each in results}) == 1
    assert program.stop() == 0


ALL = [name for name in GUESTS if importlib.util.find_spec(name.split()[0]) or " by " in name]
HEAVY = [pytest.mark.slow, pytest.mark.timeout(3_600)]
VISITS = [  # the guests whose libraries are installed, and how often each visits
    pytest.param([name for name in ALL if name != "torch"], 1, marks=pytest.mark.timeout(300), id="each once"),
    *(pytest.param([name], 50, marks=HEAVY, id=f"{name} fifty times") for name in ALL),
]


@pytest.mark.parametrize(("names", "times"), VISITS)
def test_libraries_are_good_guests_however_their_runs_end(farm: Farm, names: list[str], times: int) -> None:
    """Innocent jobs run between theirs; afterwards no child is left."""
    program = farm.ready(workers=2, dl_pipelines=MODULES)

    def job_of(name: str, how: str) -> UUID:
        more = {"timeout_sec": 1} if how == "timeout" else {}
        return farm.enqueue("guest", args={"name": name, "goes_on": how != "done"}, max_attempts=1, **more)

    for name in names:
        jobs = {how: [job_of(name, how) for _ in range(times)] for how in ENDS}
        innocent = [farm.enqueue("tells_its_process", max_attempts=1) for _ in range(times)]
        for job in (*jobs["cancel"], *jobs["kill"]):
            until(lambda job=job: farm.job(job)["progress"], "its progress", patience=900)
            if job in jobs["kill"]:
                farm.worker(job).kill()
            else:
                operations.change(farm.conn, "cancel", [job], "test")
        for how, status in ENDS.items():
            for job in jobs[how]:
                ended = farm.wait(job, "succeeded", "failed", "canceled", "lost", patience=900)
                assert (ended["status"], name, how) == (status, name, how), farm.journal(job)
        assert {farm.result(job) for job in jobs["done"]} == {30}, name
        for job in innocent:
            assert farm.wait(job, "succeeded", "lost", "failed")["status"] == "succeeded", name
    until(lambda: all(map(is_farms, family(program.process.pid))), "the last child to end")


def is_farms(process: psutil.Process) -> bool:
    """Whether this is one of the farm's own processes, and no child of a run."""
    try:
        return bool(re.match("dataloader: (keeper|worker)", " ".join(process.cmdline())))
    except psutil.NoSuchProcess:
        return True


class Warm:
    """A farm of one worker whose resources take a while to prepare; `notes` are theirs, in words without the pid."""

    def __init__(self, farm: Farm) -> None:
        self.farm, self.file = farm, farm.folder / "notes"
        self.file.touch()

    def ready(self, **settings: Any) -> Program:
        return self.farm.ready(workers=1, dl_pipelines="warm_pipelines", notes=self.file, **settings)

    @property
    def notes(self) -> list[str]:
        return [line.rpartition(" ")[0] for line in ended_lines(self.file)]

    def ask(self, key: str | None, task: str = "ask", **more: Any) -> UUID:
        return self.farm.enqueue(task, affinity_key=key, **more)


@pytest.fixture
def warm(farm: Farm) -> Warm:
    return Warm(farm)


def test_a_resource_is_prepared_once_for_its_key_and_the_least_recently_used_one_makes_room(warm: Warm) -> None:
    """A worker keeps no resource of a job without a key."""
    program = warm.ready()
    for key in (None, "a", "b", "a", "c"):
        warm.farm.succeeds(warm.ask(key))
    assert warm.notes[:3] == ["load None", "ask None", "release None"]
    assert warm.notes[3:] == ["load a", "ask a", "load b", "ask b", "ask a", "release b", "load c", "ask c"]
    assert program.stop() == 0
    assert sorted(warm.notes[11:]) == ["release a", "release c"]


def test_which_runs_cost_the_resource_and_how_long_it_may_be_prepared(warm: Warm) -> None:
    """A run costs it that had to stop, or says so; an error leaves it warm. Its time is not that of the run."""
    warm.ready()
    hows: dict[str, dict[str, Any]] = {
        "fail": {"args": {"fail": True}},
        "drop": {"args": {"drop": True}},
        "stop": {"args": {"sec": 60}, "timeout_sec": 1},
    }
    for key, how in hows.items():
        warm.farm.wait(warm.ask(key, max_attempts=1, **how), "succeeded", "failed")
        warm.farm.wait(warm.ask(key), "succeeded")
    loads = Counter(warm.notes)
    assert [loads[f"load {key}"] for key in hows] == [1, 2, 2]
    warm.farm.succeeds(warm.ask("a", args={"load_sec": 1.5}, timeout_sec=1))
    late = warm.ask("b", "impatient", args={"load_sec": 60}, max_attempts=1)
    assert warm.farm.wait(late, "failed")["error"] == "timeout: prepare took more than 0.5 s"
    assert "load b" not in warm.notes


def test_a_process_of_a_resource_outlives_its_runs_and_others_do_not(warm: Warm) -> None:
    program = warm.ready()

    def seen(**args: Any) -> dict[str, Any]:
        return dict(warm.farm.wait(warm.ask("a", "asks_a_server", args=args), "succeeded")["progress"])

    first, second, last = seen(), seen(), seen(stray=True)
    assert second == first == {"server": first["server"], "alive": True}
    assert last["server"] == first["server"]
    assert not psutil.pid_exists(last["stray"])
    until(lambda: not psutil.pid_exists(last["server"]), "the server to end with the worker that the stray has cost")
    assert program.stop() == 0


def test_a_job_is_passed_over_for_so_long_and_no_longer(warm: Warm) -> None:
    """Others whose resource is warm would all go before it."""
    for key in ["a"] * 3 + ["b"] + ["a"] * 100:
        warm.ask(key, args={"sec": 0.1})
    warm.ready(dl_lookahead=400, dl_affinity_wait_sec=2)
    until(lambda: "ask b" in warm.notes, "the job that was passed over")
    before = warm.notes.index("ask b")
    assert 5 < before < 60, "it went by the order of the queue, or waited for all others"
