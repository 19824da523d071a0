"""The faults of a chaos run, chosen by one random generator: the same seed gives the same order of faults.

Their targets depend on the moment, so two runs with one seed are similar, not equal.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import psutil
import psycopg

from .history import Stop
from .world import FARMS, Program, World, title_of

PAUSE_SEC = (0.1, 1.2)  # between two faults
SHORT_SEC = (0.3, 2.0)  # stops within a lease of 4 to 6 s
LONG_SEC = (5.0, 9.0)  # and beyond
_TERMINATE = """
SELECT pg_terminate_backend(pid) FROM (
  SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s ORDER BY random() LIMIT %s) chosen"""
_BACKEND = """
SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND backend_type = 'client backend'
 ORDER BY random() LIMIT 1"""

_WRITER = """
SELECT r.pid, r.farm FROM runs r JOIN dl_jobs j USING (job_id)
 WHERE j.status = 'running' AND j.task = 'chaos.writes_often' AND r.claim = j.claims ORDER BY r.at DESC LIMIT 1"""


@dataclass(frozen=True)
class Stopped:
    """A stopped process, and the time at which it may go on."""

    process: psutil.Process
    farm: str
    role: str
    since: float
    until: float


class Nemesis:
    """Makes faults in the world; `tend` ends those whose time is over."""

    def __init__(self, world: World, random: Random) -> None:
        self.count: Counter[str] = Counter()
        self.stops: list[Stop] = []
        self._world = world
        self._random = random
        self._stopped: list[Stopped] = []
        self._cuts: dict[str, float] = {}  # the farms that are cut off, and the end of each cut
        world.tenders.append(self.tend)
        self._faults: dict[str, tuple[int, Callable[[], bool]]] = {
            "kill worker": (12, lambda: self._kill("worker")),
            "kill keeper": (4, lambda: self._kill("keeper")),
            "kill supervisor": (3, lambda: self._kill("supervisor")),
            "kill reaper": (2, lambda: self._kill("reaper")),
            "kill api": (1, lambda: self._kill("api")),
            "stop worker": (6, lambda: self._stop("worker", SHORT_SEC)),
            "stop worker long": (5, lambda: self._stop("worker", LONG_SEC)),
            "stop writer long": (4, self._stop_writer),
            "stop keeper": (2, lambda: self._stop("keeper", SHORT_SEC)),
            "stop keeper long": (2, lambda: self._stop("keeper", LONG_SEC)),
            "stop supervisor": (2, lambda: self._stop("supervisor", SHORT_SEC)),
            "stop supervisor long": (1, lambda: self._stop("supervisor", LONG_SEC)),
            "stop reaper long": (1, lambda: self._stop("reaper", LONG_SEC)),
            "stop farm": (2, lambda: self._stop("farm", SHORT_SEC)),
            "stop farm long": (2, lambda: self._stop("farm", LONG_SEC)),
            "cut link": (3, lambda: self._cut(SHORT_SEC)),
            "cut link long": (4, lambda: self._cut(LONG_SEC)),
            "end sessions": (6, self._end_sessions),
            "stop backend": (2, self._stop_backend),
            "kill backend": (1, self._kill_backend),
            "restart fast": (2, lambda: self._restart(signal.SIGINT)),
            "restart immediate": (2, lambda: self._restart(signal.SIGQUIT)),
            "kill server": (2, lambda: self._restart(signal.SIGKILL)),
            "drain farm": (3, lambda: self._order(signal.SIGTERM)),
            "quit farm": (1, lambda: self._order(signal.SIGQUIT)),
            "drain worker": (2, lambda: self._signal("worker", signal.SIGTERM)),
            "reload farm": (3, lambda: self._order(signal.SIGHUP)),
        }

    def pause(self) -> float:
        """Seconds until the next fault."""
        return self._random.uniform(*PAUSE_SEC)

    def strike(self) -> None:
        """Make a fault of a random kind, and count it if it had a target."""
        (name,) = self._random.choices(list(self._faults), [weight for weight, _ in self._faults.values()])
        with suppress(psutil.Error, psycopg.Error, ProcessLookupError):
            if self._faults[name][1]():
                self.count[name] += 1

    def tend(self) -> None:
        """End the stops and cuts whose time is over."""
        for stopped in [stopped for stopped in self._stopped if stopped.until <= time.time()]:
            self._resume(stopped)
        for farm in [farm for farm, until in self._cuts.items() if until <= time.time()]:
            self._heal_link(farm)

    def heal(self) -> None:
        """End all stops and cuts."""
        for stopped in list(self._stopped):
            self._resume(stopped)
        for farm in list(self._cuts):
            self._heal_link(farm)

    # --- targets ---

    def _victims(self, role: str) -> list[tuple[str, psutil.Process]]:
        """The processes of a role, with their farm."""
        return [(p.farm, process) for p in self._world.programs for process in _processes(p, role)]

    def _victim(self, role: str) -> tuple[str, psutil.Process] | None:
        # Drawn first, so that the generator's state does not depend on the present processes.
        chance = self._random.random()
        victims = self._victims(role)
        return victims[int(chance * len(victims))] if victims else None

    # --- faults ---

    def _signal(self, role: str, number: signal.Signals) -> bool:
        victim = self._victim(role)
        if victim:
            victim[1].send_signal(number)
        return victim is not None

    def _kill(self, role: str) -> bool:
        return self._signal(role, signal.SIGKILL)

    def _order(self, number: signal.Signals) -> bool:
        return self._signal("supervisor", number)

    def _stop(self, role: str, sec: tuple[float, float]) -> bool:
        until = time.time() + self._random.uniform(*sec)
        if role == "farm":
            farm = self._random.choice(FARMS)
            roles = ("supervisor", "worker", "keeper", "reaper")
            victims = [(name, *victim) for name in roles for victim in self._victims(name) if victim[0] == farm]
        else:
            victim = self._victim(role)
            victims = [(role, *victim)] if victim else []
        for name, farm, process in victims:
            self._suspend(process, farm, name, until)
        return bool(victims)

    def _stop_writer(self) -> bool:
        """Stop a worker during a transaction in the target, for longer than its lease."""
        until = time.time() + self._random.uniform(*LONG_SEC)
        for pid, farm in self._world.query(_WRITER):
            process = psutil.Process(pid)
            if "dataloader: worker" in title_of(process):
                self._suspend(process, farm, "worker", until)
                return True
        return False

    def _suspend(self, process: psutil.Process, farm: str, role: str, until: float) -> None:
        if any(stopped.process == process for stopped in self._stopped):
            return
        with suppress(psutil.Error):
            process.suspend()
            self._stopped.append(Stopped(process, farm, role, time.time(), until))

    def _resume(self, stopped: Stopped) -> None:
        self._stopped.remove(stopped)
        with suppress(psutil.Error):
            stopped.process.resume()
        self.stops.append(Stop(stopped.farm, stopped.role, stopped.process.pid, stopped.since, time.time()))

    def _cut(self, sec: tuple[float, float]) -> bool:
        """Cut a farm off from the server; the farm's pipelines still reach their target."""
        until = time.time() + self._random.uniform(*sec)
        farm = self._random.choice(FARMS)
        self._cuts[farm] = max(until, self._cuts.get(farm, 0.0))
        self._world.links[farm].cut()
        return True

    def _heal_link(self, farm: str) -> None:
        del self._cuts[farm]
        self._world.links[farm].heal()

    def _end_sessions(self) -> bool:
        name = self._random.choice(["dl-worker%", "dl-worker%", "dl-keeper%", "dl-reaper%", "dl-job%", "dl-api%"])
        return bool(self._world.query(_TERMINATE, name, self._random.randint(1, 3)))

    def _backend(self) -> int | None:
        name = self._random.choice(["dl-worker%", "dl-worker%", "dl-job%", "dl-keeper%"])
        rows = self._world.query(_BACKEND, name)
        return rows[0][0] if rows else None

    def _stop_backend(self) -> bool:
        """Stop one backend: the server is silent to one client, and the backend's locks hold up the others."""
        until = time.time() + self._random.uniform(1, 6)
        pid = self._backend()
        if pid is not None:
            self._suspend(psutil.Process(pid), "server", "backend", until)
        return pid is not None

    def _kill_backend(self) -> bool:
        """The server ends all sessions and recovers, as after a crash."""
        pid = self._backend()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    def _restart(self, number: signal.Signals) -> bool:
        """Stop and start the server; sometimes it is away for longer than the leases."""
        away = self._random.choice([0.0, 0.0, 1.0, 3.0, 8.0])
        for stopped in [stopped for stopped in self._stopped if stopped.role == "backend"]:
            self._resume(stopped)  # a fast stop would wait for it
        self._world.restart_server(number, away)
        return True


def _processes(program: Program, role: str) -> list[psutil.Process]:
    """The processes of a program with this role."""
    if role in ("worker", "keeper"):
        return program.children(f"dataloader: {role}")
    names = {"supervisor": "workers", "reaper": "reaper", "api": "api"}
    if names.get(role) != program.name:
        return []
    own = psutil.Process(program.process.pid)
    return [own, *own.children()] if role == "api" else [own]
