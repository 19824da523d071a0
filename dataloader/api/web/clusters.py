"""The clusters behind this API: the sessions of each, which of them a queue or a job is in, and which is away.

Without DL_CLUSTERS there is one without a name, and nothing to choose. Else a thread asks each cluster once a second,
while requests come, which queues it knows: a request to a cluster that is away fails at once, and the answers of the
others do not wait for it. The last answer of a cluster that is away still counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Condition, Thread
from time import monotonic
from typing import Any, TypeVar
from uuid import UUID

import psycopg
import structlog
from flask import current_app, g, request

from dataloader import periods
from dataloader.api.web import gate
from dataloader.api.web.long_poll import LongPolls
from dataloader.api.web.problems import RETRY_AFTER_SEC, Fault, Problem, invalid
from dataloader.api.web.sessions import Sessions
from dataloader.config import Settings, cluster_tag
from dataloader.queue import clusters, db, enqueue, lifecycle, migrations

PERIOD_SEC = 1.0  # between two looks at a cluster
OUTDATED_SEC = 2.0  # an answer of this age waits for the next one
WAIT_SEC = 1.0  # and for so long
IDLE_SEC = periods.seconds("CLUSTERS_IDLE_SEC", 10.0)  # without a request, the looks end
T = TypeVar("T")
_log = structlog.get_logger("api")


class Away(Problem):
    """The 503 Problem of a cluster that does not answer."""

    def __init__(self, names: Sequence[str], what: str = "Nothing is confirmed: send the request again.") -> None:
        one = len(names) == 1
        which = f"The cluster {names[0]} does" if one else f"The clusters {', '.join(names)} do"
        faults = [Fault("", "away", f"the cluster {name} is away") for name in names]
        super().__init__(503, f"{which} not answer. {what}", faults, {"Retry-After": str(RETRY_AFTER_SEC)})
        self.names = tuple(names)


class Clusters:
    """Every cluster's sessions, long polls and queues."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError when no database is configured; opens nothing yet."""
        self.names = tuple(settings.dl_clusters)
        self.own = settings.cluster or ""
        dsns = {name: dsn.get_secret_value() for name, dsn in settings.dl_clusters.items()}
        self._sessions = {name: Sessions(settings, dsn, cluster_tag(name)) for name, dsn in dsns.items()}
        if not self.names:
            self._sessions = {"": Sessions(settings)}
        self._tags = {cluster_tag(name): name for name in self.names}
        self._watches = {name: _Watch(name, self._sessions[name]) for name in self.names}
        self._polls = {name: LongPolls(_versions(sessions)) for name, sessions in self._sessions.items()}

    def sessions(self, name: str) -> Sessions:
        """The sessions of this cluster."""
        return self._sessions[name]

    def polls(self, name: str) -> LongPolls:
        """The requests that wait for jobs of this cluster."""
        return self._polls[name]

    def share(self, threads: int) -> None:
        """Half of the threads may hold long polls, two stay free, the others may use the databases."""
        for name in self._sessions:
            self._polls[name].allow(threads // 2 // len(self._sessions))
            self._sessions[name].allow(threads - threads // 2 - 2)

    def stop(self) -> None:
        """End all long polls, now and later."""
        for polls in self._polls.values():
            polls.stop()

    def close(self) -> None:
        """Close all sessions, for good."""
        for watch in self._watches.values():
            watch.close()
        for sessions in self._sessions.values():
            sessions.close()

    @contextmanager
    def borrow(self, name: str) -> Iterator[db.Connection]:
        """A session of this cluster, as Sessions.borrow has it; raises Away in the place of passing errors."""
        if not self.names:
            with self._sessions[name].borrow() as conn:
                yield conn
            return
        if self.is_away(name):
            raise Away([name])
        try:
            with self._sessions[name].borrow() as conn:
                yield conn
        except Exception as error:
            if gate.is_away(error):
                self._watches[name].failed()
            if db.is_passing(error):
                raise Away([name]) from error
            raise

    @contextmanager
    def borrow_all(self, names: Sequence[str]) -> Iterator[dict[str, db.Connection]]:
        """A session of each of these clusters; raises Away in the place of passing errors, for those that are to blame.

        Where a statement took too long, which ends no session, any of them may be.
        """
        with ExitStack() as sessions:
            lent = {name: sessions.enter_context(self.borrow(name)) for name in dict.fromkeys(names)}
            try:
                yield lent
            except psycopg.Error as error:
                if not db.is_passing(error):
                    raise
                # Not left to the blocks of the sessions: the innermost would take it for its own.
                raise Away([name for name in lent if lent[name].closed] or list(lent)) from error

    def is_away(self, name: str) -> bool:
        """Whether this cluster did not answer when it was asked last."""
        return bool(self.names) and self._watches[name].is_away()

    def home(self, queue: str, new_in: str | None = None) -> str:
        """The cluster in which a queue lives (clusters.home); one that nobody knows: `new_in`, by default this host's.

        Raises Away while a cluster that has not answered this process yet may be the one.
        """
        if not self.names:
            return self.own
        for watch in self._watches.values():
            watch.start()  # all of them, before the first one is waited for
        said = {name: watch.look() for name, watch in self._watches.items()}
        known = [(name, queues) for name, queues in said.items() if queues is not None]
        if not any(queue in queues for _, queues in known):
            known = [(name, {queue: None} if self._has_jobs(name, queue) else {}) for name, _ in known]
        silent = [name for name, queues in said.items() if queues is None]
        if silent and not any(queue in queues for _, queues in known):
            raise Away(silent, f"The queue {queue} may live there.")
        return self._named(clusters.home(queue, known, new_in or self.own), queue)

    def left(self, queue: str, to: str) -> list[str]:
        """The clusters that say now that the queue has moved from them to this one."""
        found = []
        for name in self.names:
            with suppress(Away), self.borrow(name) as conn:
                found += [name] if clusters.placed_at(conn, queue) == to else []
        return found

    def of_key(self, new: enqueue.NewJob, asker: enqueue.Asker | None) -> tuple[UUID, str] | None:
        """The job of this idempotency key in another cluster than the queue's, and its status; None: there is none.

        A cluster that is away is not asked. Raises KeyTaken, as enqueue does.
        """
        if (key := new.idempotency_key) is None or not self.names:
            return None
        home = self.home(new.queue, asked())
        for name in (each for each in self.names if each != home):
            with suppress(Away), self.borrow(name) as conn:
                if found := enqueue.of_key(conn, key, asker):
                    return found
        return None

    def of_job(self, job_id: UUID) -> list[str]:
        """All clusters, the one first that the id names, else this host's."""
        hinted = self._tags.get(enqueue.tag_of(job_id), self.own)
        return [hinted, *(name for name in self.names if name != hinted)]

    def by_hint(self, job_ids: Collection[UUID]) -> list[tuple[str, list[UUID]]]:
        """Clusters, each with the jobs to ask it for: first those whose ids name it, then any that were not found."""
        hinted: dict[str, list[UUID]] = {name: [] for name in self.names or (self.own,)}
        for job_id in dict.fromkeys(job_ids):
            hinted[self.of_job(job_id)[0]].append(job_id)
        each = list(dict.fromkeys(job_ids))
        return [*hinted.items(), *((name, each) for name in self.names)]

    @contextmanager
    def adding(self, queues: Collection[str]) -> Iterator[db.Connection]:
        """A session in a transaction in the cluster where these queues live, which they do not leave meanwhile.

        Raises a 409 Problem for queues of several clusters, for no transaction spans two, and for queues of another
        cluster than the address names.
        """
        name = self._common(queues)
        seen = {name}
        while True:
            g.cluster = name
            with self.borrow(name) as conn, conn.transaction():
                moved = clusters.moved_away(conn, queues)
                if not set(moved.values()) - seen:  # those seen have pointed here
                    _require_asked(name, queues)
                    yield conn
                    return
            queue, cluster = next(iter(moved.items()))
            if len(set(moved.values())) > 1 or len(moved) < len(queues):
                raise _several({each: moved.get(each, name) for each in queues})
            name = self._named(cluster, queue)
            seen.add(name)

    @contextmanager
    def adding_beside(self, queue: str) -> Iterator[db.Connection]:
        """A session of the request's cluster, to which a job of this queue may be added beside another job.

        The queue lives there, or has moved from there, so that the reaper will carry the job. Raises a 409 Problem for
        any other.
        """
        here = chosen()
        home = self.home(queue, here)
        with self.borrow(here) as conn:
            if home != here and clusters.placed_at(conn, queue) is None:
                where = f"the queue {queue} lives in the cluster {home}, and the job that ended is in {here}"
                raise Problem(409, f"{where}, where it is run again: trigger a job in its place")
            yield conn

    def _common(self, queues: Collection[str]) -> str:
        homes = {queue: self.home(queue, asked()) for queue in queues}
        if len(set(homes.values())) > 1:
            raise _several(homes)
        return next(iter(homes.values()), self.own)

    def _has_jobs(self, name: str, queue: str) -> bool:
        try:
            with self.borrow(name) as conn:
                return clusters.has_jobs(conn, queue)
        except Away:
            return False

    def _named(self, name: str, queue: str) -> str:
        if name in self.names:
            return name
        raise Problem(
            409, f"the queue {queue} has moved to the cluster {name}, which this API's DL_CLUSTERS does not name"
        )


class _Watch:
    """A cluster's answer of its queues; a thread renews it while somebody asks."""

    def __init__(self, name: str, sessions: Sessions) -> None:
        self._name, self._sessions = name, sessions
        self._renewed = Condition()
        self._queues: dict[str, str | None] | None = None
        self._at = self._asked_at = float("-inf")  # monotonic instants: of the answer, of the last question
        self._is_away = self._is_told = self._runs = self._is_over = False

    def look(self) -> dict[str, str | None] | None:
        """The queues that the cluster knows, each with where it has moved to; None: it has never answered."""
        self.start()
        with self._renewed:
            if not self._is_away and self._at < monotonic() - OUTDATED_SEC:
                since = self._at
                self._is_away = not self._renewed.wait_for(lambda: self._at > since or self._is_away, WAIT_SEC)
            return self._queues

    def is_away(self) -> bool:
        """Whether the cluster did not answer when it was asked last."""
        self.look()
        return self._is_away

    def failed(self) -> None:
        """A request could not reach the cluster."""
        self._is_away = True

    def close(self) -> None:
        """Look no more."""
        with self._renewed:
            self._is_over = True
            self._renewed.notify_all()

    def start(self) -> None:
        """Look from now on, unless the looks go on already: the first one has to be waited for."""
        with self._renewed:
            self._asked_at = monotonic()
            if not self._runs and not self._is_over:
                self._runs, self._is_away, self._at = True, False, float("-inf")
                Thread(target=self._run, name=f"dl-cluster-{self._name}", daemon=True).start()

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            queues = self._ask()
            with self._renewed:
                if queues is not None:
                    self._queues, self._at = queues, monotonic()
                self._is_away = queues is None
                self._renewed.notify_all()
                self._renewed.wait_for(lambda: self._is_over, PERIOD_SEC)
                goes_on = self._runs = not self._is_over and monotonic() - self._asked_at < IDLE_SEC

    def _ask(self) -> dict[str, str | None] | None:
        try:
            with self._sessions.borrow() as conn:
                queues = clusters.placed(conn)
            self._is_told = False
            return queues
        except Exception as error:
            if self._queues is not None and db.is_passing(error) and not gate.is_away(error):
                return self._queues  # too slow just now
            if not self._is_told:
                self._is_told = True
                why = str(error) if isinstance(error, migrations.SchemaError) else type(error).__name__
                _log.warning("api.cluster.away", cluster=self._name, error=why)
            return None


def _require_asked(name: str, queues: Collection[str]) -> None:
    """Raise a 409 Problem where the address names another cluster than the one where these queues live."""
    if (wanted := asked()) not in (None, name):
        which = ", ".join(sorted(queues)[:10])
        live = f"the queue {which} lives" if len(queues) == 1 else f"the queues {which} live"
        raise Problem(409, f"{live} in the cluster {name}, not in {wanted}, which `cluster` names")


def _several(homes: dict[str, str]) -> Problem:
    where = ", ".join(f"{queue} in {name}" for queue, name in sorted(homes.items())[:10])
    return Problem(
        409, f"the queues live in several clusters: {where}. No transaction spans two: send one request each"
    )


def _versions(sessions: Sessions) -> Callable[[Collection[UUID]], dict[UUID, str]]:
    def ask(job_ids: Collection[UUID]) -> dict[UUID, str]:
        with sessions.borrow() as conn:
            return lifecycle.versions(conn, job_ids)

    return ask


def of_app() -> Clusters:
    """The clusters of this application."""
    found: Clusters = current_app.extensions["clusters"]
    return found


def chosen() -> str:
    """The cluster of this request; this host's where nothing has chosen another."""
    return str(g.get("cluster", of_app().own))


def asked() -> str | None:
    """The cluster that the address names; None: it names none, or there is one cluster only. Raises a 400 Problem."""
    names, given = of_app().names, request.args.get("cluster")
    if not names or given is None:
        return None
    if given not in names:
        raise invalid("/cluster", "cluster", f"cluster should be one of {', '.join(names)}")
    return given


def each(question: Callable[[db.Connection], T]) -> tuple[list[tuple[str, T]], list[str]]:
    """The answer of each cluster that answers, with its name; and the names of those that are away.

    Raises Away where all are.
    """
    every, found, away = of_app(), list[tuple[str, T]](), list[str]()
    for name in every.names or (every.own,):
        try:
            with every.borrow(name) as conn:
                found.append((name, question(conn)))
        except Away as problem:
            away += problem.names
    if not found:
        raise Away(away)
    return found, away


def choose_answering() -> None:
    """Let this request be for the cluster that it has chosen, or where that is away, for the first that is not."""
    every = of_app()
    answering = [name for name in every.names if not every.is_away(name)]
    if answering and chosen() not in answering:
        g.cluster = answering[0]


def kept(name: str, make: Callable[[], T]) -> T:
    """The object that this process keeps for the request's cluster under a name; made at the first use."""
    cluster = chosen()
    found: Any = current_app.extensions.setdefault(f"{name} of {cluster}" if cluster else name, make())
    return found  # type: ignore[no-any-return]
