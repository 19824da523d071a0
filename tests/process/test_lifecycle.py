"""The farm's life: drain, lost sessions, silence, orphans, workers that die, pruning. Real processes and signals."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import psutil
import psycopg
import pytest
from farming import LOST, Farm, LongJob, Program, family, have_ended, on_all, until
from judge import illegal
from psycopg import sql

from dataloader.farm.slots import State
from dataloader.queue import lifecycle


def test_i8_a_drain_hands_back_uncounted_what_it_has_to_end(farm: Farm) -> None:
    """At a safe point, or by a kill where the run has none (I2) or took the signals (E7). A crash counts (E1)."""
    program = farm.ready(workers=5, dl_drain_sec=6, dl_kill_grace_sec=0.5)
    has_safe_points = farm.enqueue("recorded", args={"sec": 60})
    farm.begun(has_safe_points)
    has_none = farm.running("spins")
    hears_nothing = farm.running("takes_the_signals", args={"how": "ignore", "sec": 600})
    ends_in_time = farm.running("takes_the_signals", args={"how": "ignore", "sec": 3})
    crashes = farm.running("kills_itself", max_attempts=1, args={"after_sec": 2})
    later = farm.enqueue("noop")
    assert program.stop() == 0
    for job in (has_safe_points, has_none, hears_nothing):
        assert (farm.job(job)["status"], farm.job(job)["attempt"]) == ("queued", 0), farm.journal(job)
        assert farm.story(job) == ["queued", "picked", "requeue"]
    assert farm.job(has_safe_points)["waiting_for"]["reason"] == "no_worker"
    handed_back = farm.journal(has_safe_points)[-1][1]
    assert (handed_back["attempt"], handed_back["reason"]) == (0, "drain")
    assert handed_back["worker"] == farm.journal(has_safe_points)[1][1]["worker"]
    assert (farm.job(ends_in_time)["status"], farm.job(ends_in_time)["attempt"]) == ("succeeded", 1)
    assert (farm.job(crashes)["status"], farm.story(crashes)) == ("lost", ["queued", "picked", "lost"])
    assert farm.story(later) == ["queued"], "no other begins"
    farm.no_sessions()


def test_i8_a_run_that_needs_longer_than_its_lease_to_leave_in_a_drain_keeps_it(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_drain_sec=0.1, dl_kill_grace_sec=20)
    job = farm.enqueue("leaves_slowly", args={"sec": 4}, lease_ttl_sec=2)
    farm.begun(job)
    assert program.stop() == 0
    assert (farm.job(job)["status"], farm.job(job)["attempt"]) == ("queued", 0)
    assert not program.events("worker.fenced")


def test_term_to_one_worker_brings_another_in_its_place_and_i9_a_storm_of_signals_is_one_drain(farm: Farm) -> None:
    program = farm.ready(workers=2, dl_drain_sec=60)
    before = program.workers()
    job = farm.enqueue("recorded", args={"sec": 1})
    farm.begun(job)
    farm.worker(job).send_signal(signal.SIGTERM)
    farm.succeeds(job)
    until(lambda: len(now := program.workers()) == 2 and now != before, "another worker")
    job = LongJob(farm)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        program.signal(number)
        for worker in program.workers():
            with suppress(psutil.NoSuchProcess):  # the idle one leaves at once
                worker.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    job.ends_well()
    assert program.stop() == 0


def test_a_cancelled_job_stops_at_its_next_yield(farm: Farm) -> None:
    farm.ready(workers=1, dl_heartbeat_sec=20)
    job = farm.enqueue("recorded", args={"sec": 60})
    farm.wait(job, "running")
    assert lifecycle.request_cancel(farm.conn, job)["cancel_requested"]
    end = farm.wait(job, "canceled", patience=15)  # heard at once, not at the next heartbeat
    assert end["finished_at"] is not None
    assert farm.story(job) == ["queued", "picked", "cancel_requested", "canceled"]


@pytest.mark.long
def test_i1_a_lease_is_kept_although_what_people_see_cannot_be_written(farm: Farm, own_db: str) -> None:
    """A call holds the GIL for more than two leases, and a table that only people read is locked.

    The keeper renews all the same, and settles, in its one session.
    """
    program = farm.ready(workers=2)
    until(lambda: farm.rows("SELECT FROM dl_workers WHERE state <> 'starting'"), "the keeper")
    job = farm.enqueue("holds_the_gil", lease_ttl_sec=2, args={"sec": 5})
    crashes = farm.enqueue("recorded", args={"sec": 60})
    farm.begun(crashes)
    with psycopg.connect(own_db) as other:
        other.execute("LOCK TABLE dl_workers IN EXCLUSIVE MODE")
        farm.worker(crashes).kill()
        until(lambda: "requeue" in farm.story(crashes), "the keeper to settle it")
        end = farm.wait(job, "succeeded")
        assert (end["finished_at"] - end["started_at"]).total_seconds() > 3, "too quick to show anything"
        assert not program.events("farm.database.lost")
    assert farm.story(job) == ["queued", "picked", "done"]
    until(lambda: farm.rows("SELECT FROM dl_workers WHERE jobs > 0"), "the keeper to show them again")


def test_a_worker_that_fails_between_two_runs_writes_the_end_of_the_first(farm: Farm) -> None:
    """Its role has lost a right, say; the job, which is done, must not run again."""
    program = farm.ready(workers=1, dl_periods='{"LEARN_SEC": 0.1}')
    job = LongJob(farm)
    farm.conn.execute("ALTER TABLE dl_needs RENAME TO gone")
    until(lambda: farm.rows("SELECT FROM dl_jobs WHERE started_at < now() - interval '0.5 s'"), "LEARN_SEC to pass")
    job.go.touch()
    (died,) = program.logged("supervisor.worker.exited")[:1]
    assert died["exit_status"] > 0
    farm.conn.execute("ALTER TABLE gone RENAME TO dl_needs")
    job.ends_well()


def test_a_stuck_worker_is_killed_after_dl_stall_sec(farm: Farm) -> None:
    program = farm.ready(workers=1, dl_stall_sec=1.5, dl_heartbeat_sec=0.5)
    job = farm.enqueue("holds_the_gil", max_attempts=1, args={"sec": 3600})
    end = farm.wait(job, "lost")
    assert end["error"] == "worker killed: no heartbeat for DL_STALL_SEC on attempt 1"
    assert program.events("supervisor.worker.killed")[0]["why"] == "stalled"
    farm.works()


def test_neither_a_locked_table_of_logs_nor_a_lost_commit_of_lines_hurts(farm: Farm, own_db: str) -> None:
    """A run whose output cannot be written keeps its session; when its worker dies, its job comes back at once."""
    farm.conn.execute(DIES_AT_ITS_COMMIT)
    program = farm.ready(workers=1, dl_stall_sec=3)
    job = farm.enqueue("prints_on")
    until(lambda: farm.rows("SELECT FROM dl_job_logs"), "its first lines, which the next session writes")
    assert farm.rows("SELECT min(line), last_value > 1 FROM dl_job_logs, commits GROUP BY last_value") == [(1, True)]
    lost = program.logged("farm.database.lost")
    beats = set()
    with psycopg.connect(own_db) as operator:
        operator.execute("LOCK TABLE dl_job_logs IN SHARE MODE")
        until(lambda: beats.update(farm.rows("SELECT heartbeat_at FROM dl_jobs")) or len(beats) > 5, "five beats")
        assert not program.events("supervisor.worker.killed")
        assert program.events("farm.database.lost") == lost
        program.workers()[0].kill()
        until(lambda: "requeue" in farm.story(job), "the keeper")


DIES_AT_ITS_COMMIT = """
CREATE SEQUENCE commits;
GRANT USAGE ON commits TO PUBLIC;
CREATE FUNCTION dies_first() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF nextval('commits') = 1 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER dies_first AFTER INSERT ON dl_job_logs DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION dies_first()"""


def test_a_locked_row_costs_its_run_no_session(farm: Farm, own_db: str) -> None:
    """Not while beats wait for it, and not while a new session does."""
    program = farm.ready(workers=1)
    job = LongJob(farm)
    with psycopg.connect(own_db) as operator:
        operator.execute("SELECT FROM dl_jobs FOR UPDATE")
        time.sleep(4)  # two beats, each with its wait for the row and a second of rest
        assert not program.events("farm.database.lost")
        ended = {*farm.sessions("dl-worker")}
        farm.end_sessions("dl-worker")
        until(lambda: {*farm.sessions("dl-worker", "wait_event_type = 'Lock'")} - ended, "the new session to wait")
        later = {*farm.sessions("dl-worker")} - ended
        time.sleep(7)  # its wait for the row, a second of rest, and the begin of the next wait
        assert {*farm.sessions("dl-worker")} == later
    job.ends_well()


def test_i4_workers_of_a_killed_supervisor_drain_and_the_keeper_leaves_last(farm: Farm) -> None:
    program = farm.ready(workers=2, dl_drain_sec=4, dl_kill_grace_sec=0.5)
    stuck, quick = farm.running("spins"), farm.running("recorded", args={"sec": 0.5})
    members = family(program.process.pid)
    program.signal(signal.SIGKILL)
    program.process.wait()
    until(lambda: have_ended(members), "all to leave")
    assert farm.job(quick)["status"] == "succeeded"
    assert (farm.job(stuck)["status"], farm.job(stuck)["attempt"]) == ("queued", 0)


@contextmanager
def unreachable(farm: Farm) -> Iterator[None]:
    """In the block the database refuses sessions."""
    name = sql.Identifier(farm.conn.info.dbname)
    with psycopg.connect(farm.dsn, dbname="postgres", autocommit=True) as admin:
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        yield
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))


KILLED_EARLY = """
import os, sys, time
from dataloader.config import Settings
from dataloader.farm import keeper, process
from dataloader.farm.slots import SharedSlots

dsn, title = sys.argv[1:]
settings = Settings(dl_db_dsn=dsn, dl_drain_sec=0.1, dl_kill_grace_sec=0.1)
shared = SharedSlots(1)
process.adopt_orphans()
if os.fork() == 0:  # the supervisor
    shared.supervisor = os.getpid()
    shared.slots[0].take(0)
    pid = process.fork(lambda: keeper.main(settings, dsn, shared))
    while title not in open(f"/proc/{pid}/cmdline").read():
        time.sleep(0.002)
    os._exit(0)
os.wait()
print(os.waitstatus_to_exitcode(os.wait()[1]), shared.slots[0].state)
"""


@pytest.mark.parametrize("title", ["", "dataloader: keeper"], ids=["at the keeper's start", "later"])
def test_i4_a_keeper_outlives_a_supervisor_that_was_killed_before_a_worker_had_its_pid(own_db: str, title: str) -> None:
    """The slot is taken, then the supervisor forks. The keeper, which must not kill itself, frees the slot."""
    done = subprocess.run([sys.executable, "-c", KILLED_EARLY, own_db, title], capture_output=True, text=True)
    assert done.stdout == f"0 {State.FREE.value}\n", done.stderr


def test_h4_orphans_of_a_database_that_does_not_come_back_leave_all_the_same(farm: Farm, own_db: str) -> None:
    """Supervisor killed, database gone while a job runs: the worker gives up after the drain."""
    program = farm.ready(workers=1, dl_drain_sec=1, dl_kill_grace_sec=0.5, dl_db_dsn=own_db + " connect_timeout=2")
    job = LongJob(farm)
    members, workers = family(program.process.pid), program.workers()
    with unreachable(farm):
        program.signal(signal.SIGKILL)
        program.process.wait()
        farm.end_sessions()
        job.go.touch()
        until(lambda: have_ended(workers), "the worker to leave")
    until(lambda: have_ended(members), "the keeper to leave")
    assert farm.wait(job.job_id, "queued")["attempt"] == 0


NO_ROOM = """
import os

def patched(call, number):
    def call_if_there_is_room(*arguments):
        if os.path.exists({folder!r} + "/no_room_for_" + call.__name__):
            raise OSError(number, os.strerror(number))
        return call(*arguments)
    setattr(os, call.__name__, call_if_there_is_room)

patched(os.fork, {processes})
patched(os.memfd_create, {files})
"""


def test_a_supervisor_that_can_start_no_child_keeps_its_workers_and_tries_again(farm: Farm) -> None:
    """The host, or the limit of its container, has no room for another process, or for another open file."""
    code = NO_ROOM.format(folder=str(farm.folder), processes=errno.EAGAIN, files=errno.ENFILE)
    (farm.folder / "no_room.py").write_text(code)
    program = farm.ready(workers=2, dl_preload="no_room")
    job = LongJob(farm)
    busy = farm.worker(job.job_id)
    for title, call in (("worker", "fork"), ("keeper", "fork"), ("worker", "memfd_create")):
        no_room, before = farm.folder / f"no_room_for_{call}", len(program.events("supervisor.start.failed"))
        no_room.touch()
        next(child for child in program.children(f"dataloader: {title}") if child != busy).kill()
        program.logged("supervisor.start.failed", before + 1)
        no_room.unlink()
        until(lambda: len(program.children("dataloader: ")) == 3, f"another {title}")
    job.ends_well()
    assert program.stop() == 0


def test_an_unfinished_schema_is_refused_in_one_line(farm: Farm) -> None:
    farm.conn.execute("DELETE FROM dl_migrations WHERE number = 0")
    for name in ("workers", "reaper", "api"):
        program = farm.start(name)
        assert program.process.wait(60) == 78, name
        assert "run `dataloader migrate`" in program.log.read_text()
        assert len(program.log.read_text().splitlines()) == 1


def test_a4_a_run_that_holds_the_gil_is_ended_before_its_unrenewed_lease_is(farm: Farm) -> None:
    """The database is away for longer than the lease: nobody else starts the key while the first run goes on."""
    farm.ready(workers=2)
    farm.start("reaper")
    first = farm.running("holds_the_gil", lock_key="k", lease_ttl_sec=2, args={"sec": 3600})
    ((pid,),) = farm.rows("SELECT pid FROM runs")
    second = farm.enqueue("recorded", lock_key="k", priority=1)
    with unreachable(farm):
        farm.end_sessions()
        until(lambda: not psutil.pid_exists(pid), "the run to be ended")
    farm.wait(second, "succeeded")
    assert farm.programs[0].logged("supervisor.worker.killed")[0]["why"] == "fenced"
    until(lambda: "requeue" in farm.story(first))


def test_b1_a_run_whose_key_was_taken_meanwhile_is_ended(farm: Farm, own_db: str) -> None:
    """A foreign session gets the key when ours is lost; the run cannot go on, safe point or not."""
    farm.ready(workers=1)
    job = farm.running("sleeps", lock_key="k", lease_ttl_sec=60, args={"sec": 600})
    ((pid,),) = farm.rows("SELECT pid FROM runs")
    with psycopg.connect(own_db, autocommit=True) as foreign:
        waiting = threading.Thread(target=foreign.execute, args=["SELECT pg_advisory_lock(hashtext('k'))"])
        waiting.start()
        pid_waits = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = %s"
        until(lambda: farm.rows(pid_waits, foreign.info.backend_pid), "the foreign session to wait")
        farm.end_sessions("dl-worker")
        waiting.join()
        until(lambda: not psutil.pid_exists(pid), "the run to be ended", patience=45)
    assert farm.wait(job, "running", "queued")["attempt"] <= 1


def test_g4_a_row_that_python_cannot_read_and_an_exit_in_a_pipeline_fail_alone(farm: Farm) -> None:
    program = farm.ready(workers=1)
    (worker,) = program.workers()
    (bad,) = farm.insert(args="""('{"n": 1' || repeat('0', 5000) || '}')::jsonb""", max_attempts="1")
    assert "ValueError" in farm.wait(bad, "failed")["error"]
    farm.works()
    assert program.workers() == [worker]
    exits = farm.enqueue("exits", max_attempts=1)
    assert "SystemExit: 3" in farm.wait(exits, "failed")["error"]
    until(lambda: program.workers() not in ([worker], []), "a new worker")
    farm.works()


LOCKED = "wait_event_type = 'Lock'"


def test_a_claim_that_outlives_its_killed_worker_is_settled_too(farm: Farm) -> None:
    """The worker is killed while its claim is under way: the backend goes on, commits, and nobody would run the job."""
    program = farm.ready(workers=1)
    with psycopg.connect(farm.dsn) as blocker:
        # A lock in the claim's way, taken before the row exists.
        blocker.execute("LOCK TABLE dl_job_events IN ACCESS EXCLUSIVE MODE")
        # As a producer that keeps the journal itself: the trigger that does it for others would block here.
        (job,) = farm.insert(task="'recorded'", journaled="1")
        (pid,) = until(lambda: farm.sessions("dl-worker", LOCKED), "the claim to be under way")
        program.workers()[0].kill()
        program.logged("supervisor.worker.exited")
        until(lambda: pid not in farm.sessions("dl-worker", LOCKED), "the keeper to end the claim")
    assert farm.wait(job, "succeeded", patience=45)["attempt"] == 1


def killed(*programs: Program) -> None:
    """End all processes of these programs, so that none can do anything about the end of another."""
    members = [member for program in programs for member in program.family()]
    for act in (psutil.Process.suspend, psutil.Process.kill):
        on_all(act, members)
    for program in programs:
        program.process.wait(60)


def test_a_farm_that_starts_recovers_at_once_what_the_killed_farm_of_its_host_had_claimed(farm: Farm) -> None:
    """A run that had begun has spent an attempt; jobs that were claimed ahead have not. The leases are of a minute."""
    settings = {"prefetch": 10, "dl_pipelines": "farm_pipelines doubling"}
    program = farm.ready(workers=2, **settings)
    long = LongJob(farm)
    begun = long.job_id
    until(lambda: farm.journal(begun)[-1][0] == "heartbeat", "a renewal")
    (keeper,) = program.children("dataloader: keeper")
    keeper.suspend()  # it would hand back what waits behind a run that holds the GIL
    with farm.conn.transaction():
        for _ in range(7):
            farm.enqueue("noop", priority=0)  # short jobs: the worker's next claim takes several
        holding = farm.enqueue("holds_the_gil", priority=1, args={"sec": 600, "claims": 1})
        ahead = [farm.enqueue("noop", priority=2) for _ in range(5)]
    claimed = "SELECT FROM dl_jobs WHERE job_id = ANY(%s) AND status = 'running'"
    until(lambda: len(farm.rows(claimed, [holding, *ahead])) > 2, "some to be claimed ahead")
    killed(program)
    was_ahead = [job for job in ahead if farm.job(job)["status"] == "running"]
    assert len(was_ahead) >= 2
    started = time.monotonic()
    again = farm.start(**settings)
    for job in (holding, *ahead):
        farm.wait(job, "succeeded", patience=30)
    long.has_begun(times=2)
    assert time.monotonic() - started < 30, "far less than the leases"
    assert {farm.job(job)["attempt"] for job in ahead} == {1}
    long.go.touch()
    assert farm.wait(begun, "succeeded")["attempt"] == 2
    for job in (begun, holding, *ahead):
        assert illegal([kind for kind, _ in farm.journal(job)], "succeeded") is None
    settled = {event["job_id"] for event in again.events("keeper.settled")}
    assert settled >= set(map(str, (begun, holding, *was_ahead)))


IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


ANOTHER_ID = 'mount --bind "$BOOT_ID" /proc/sys/kernel/random/boot_id; exec "$@"'
AFTER_A_BOOT = ["unshare", "--mount", "sh", "-c", ANOTHER_ID, "-"]


def may_be(elsewhere: list[str], env: dict[str, str] | None = None) -> None:
    """Skip the test where this user may not make such namespaces."""
    if subprocess.run([*elsewhere, "true"], env=env, capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here: they need root")


def test_a_farm_that_starts_leaves_alone_what_others_of_its_host_name_hold(farm: Farm) -> None:
    """The workers of a living farm of this host, and those of another pid namespace or boot, living or not."""
    boot_id = farm.folder / "boot_id"
    boot_id.write_text("00000000-0000-4000-8000-000000000000\n")
    env = os.environ | {"BOOT_ID": str(boot_id)}
    may_be(IN_A_CONTAINER, env)
    may_be(AFTER_A_BOOT, env)

    def held_by(queue: str, before: list[str]) -> tuple[Program, UUID, str]:
        """A farm that runs a job, and the name of the worker."""
        farm.before = before
        program = farm.ready(workers=1, queue=queue, boot_id=boot_id)
        job = LongJob(farm, queue=queue, lease_ttl_sec=600).job_id
        until(lambda: farm.journal(job)[-1][0] == "heartbeat", "a renewal")
        return program, job, farm.rows("SELECT claimed_by FROM dl_jobs WHERE job_id = %s", job)[0][0]

    living, dead = held_by("living", []), held_by("dead", [])
    contained, booted = held_by("contained", IN_A_CONTAINER), held_by("booted", AFTER_A_BOOT)
    assert len({name.split(":")[0] for *_, name in (living, contained, booted, dead)}) == 1, "one host name"
    killed(contained[0], booted[0], dead[0])
    farm.before = []
    farm.ready(workers=1, queue="dead")
    until(lambda: farm.rows("SELECT FROM dl_jobs WHERE job_id = %s AND attempt = 2", dead[1]), "the dead one's job")
    names = dict(farm.rows("SELECT job_id, claimed_by FROM dl_jobs WHERE status = 'running'"))
    assert {job: names[job] for _, job, _ in (living, contained, booted)} == {
        job: name for _, job, name in (living, contained, booted)
    }
    (farm.folder / "go").touch()
    farm.succeeds(living[1])


def test_i16_as_process_1_it_buries_orphans_and_stops_on_term(farm: Farm) -> None:
    may_be(IN_A_CONTAINER)
    program = farm.ready(workers=1, before=IN_A_CONTAINER)
    (first,) = psutil.Process(program.process.pid).children()
    inside = ["nsenter", "--target", str(first.pid), "--pid", "--mount"]
    subprocess.run([*inside, "sh", "-c", "sleep 600 >/dev/null 2>&1 &"], check=True)
    orphan = until(lambda: next((child for child in first.children() if child.name() == "sleep"), None), "the orphan")
    farm.works()
    orphan.kill()
    until(lambda: not psutil.pid_exists(orphan.pid), "the orphan to be buried")
    running = farm.enqueue("noop", args={"sleep1": 1})
    farm.begun(running)
    first.terminate()
    assert program.process.wait(60) == 0
    assert farm.job(running)["status"] == "succeeded"
    assert program.events("supervisor.stopped")[0]["exit_status"] == 0


def finished(farm: Farm, number: int, hours_ago: int) -> None:
    """Jobs that ended so long ago, each with a row in the journal."""
    finished_at = f"now() - make_interval(hours => {hours_ago})"
    jobs = farm.insert(number, status="'succeeded'", finished_at=finished_at, journaled="1")
    event = "INSERT INTO dl_job_events (job_id, queue, kind) SELECT unnest(%s::uuid[]), 'q', 'done'"
    farm.conn.execute(event, (jobs,))


EXPIRED = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, lease_expires_at)
SELECT gen_random_uuid(), 'q', 't', n::text, 'running', 1, now() - interval '1 h' FROM generate_series(1, 300) n"""
DUE = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)
SELECT gen_random_uuid(), 'q', 't', n::text, now() + interval '0.1 s' FROM generate_series(1, 5000) n"""
SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.1); RETURN NULL; END $$;
CREATE TRIGGER slow AFTER UPDATE ON dl_jobs FOR EACH STATEMENT EXECUTE FUNCTION slow()"""


@pytest.mark.parametrize(
    ("backlog", "period"),
    [(EXPIRED, 600), (DUE, 600), (EXPIRED, 1e-9)],
    ids=["leases that have run out", "due jobs", "rounds that are shorter than an answer"],
)
def test_a_reaper_works_on_a_backlog_and_stops_in_its_middle(
    farm: Farm, own_db: str, backlog: str, period: float
) -> None:
    left = "SELECT count(*) FROM dl_jobs WHERE status = 'running' OR blocked_on = 'time'"
    with psycopg.connect(own_db, autocommit=True) as other:
        other.execute(SLOW)  # type: ignore[arg-type]
        other.execute(backlog)  # type: ignore[arg-type]
    ((before,),) = farm.rows(left)
    reaper = farm.reaper(dl_reaper_period_sec=period)
    until(lambda: farm.rows(left)[0][0] < before, "the first of them")
    assert reaper.stop() == 0
    assert farm.rows(left)[0][0] > 0


# A full lock table, a limit on temporary files, a block that cannot be read: each for one duty alone.
LIMITED = """
CREATE SEQUENCE met;
CREATE FUNCTION limited() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  RAISE EXCEPTION 'a limit' USING ERRCODE = (ARRAY['53200', '53400', '58030'])[nextval('met') % 3 + 1];
END $$;
CREATE TRIGGER limited BEFORE UPDATE ON dl_rolled FOR EACH ROW EXECUTE FUNCTION limited();
GRANT USAGE ON met TO PUBLIC; COMMIT"""
SOME_DAYS: dict[str, float] = {"dl_retention_days": 0.5}
TROUBLES = {
    "a lock": ("LOCK TABLE dl_rolled IN EXCLUSIVE MODE", SOME_DAYS),
    "a column that is gone": ("ALTER TABLE dl_totals DROP COLUMN buckets; COMMIT", SOME_DAYS),
    "limits of the server, without a retention": (LIMITED, {}),
}


@pytest.mark.parametrize(("trouble", "retention"), TROUBLES.values(), ids=TROUBLES)
def test_c7_leases_end_and_old_jobs_go_although_the_journal_cannot_be_summed_up(
    farm: Farm, own_db: str, trouble: str, retention: dict[str, float]
) -> None:
    """They go over several batches, and the reaper says how many; younger ones stay, and all without a retention."""
    reaper = farm.reaper(**retention)
    old = 1_200 if retention else 0
    with psycopg.connect(own_db) as other:
        other.execute(trouble)  # type: ignore[arg-type]
        finished(farm, 3, hours_ago=11)  # behind the trouble: the reaper would sum up earlier ones
        reaper.logged("reaper.roll.failed", 3)
        finished(farm, 1_200, hours_ago=13)
        farm.insert(**LOST)
        reaper.logged("reaper.requeued")
        for event in ("reaper.pruned", "jobs.pruned"):  # the log, the metrics
            until(lambda event=event: sum(line["count"] for line in reaper.events(event)) == old, "the old ones to go")
        assert farm.rows("SELECT count(*) FROM dl_jobs") == [(1_204 - old,)]
    assert not reaper.events("farm.database.lost")
    assert reaper.stop() == 0
