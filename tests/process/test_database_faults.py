"""PostgreSQL fails under a working farm: it restarts, is replaced by a standby, refuses sessions, says nothing."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psutil
import psycopg
import pytest
from farming import Farm, LongJob, farm_on, on_all, status, until
from servers import FAST, IMMEDIATE, Database, given_programs

from dataloader import embedded
from dataloader.queue import db, migrations
from dataloader.queue.reports import alerts, stats

NEVER = 600  # seconds: no poll comes to the help of a lost notification


@pytest.fixture
def served(database: Database, tmp_path: Path) -> Iterator[Farm]:
    with farm_on(database.dsn, tmp_path) as farm:
        yield farm


def reconnect(farm: Farm) -> None:
    """Give the test itself a new session, once that is possible."""
    farm.conn.close()
    farm.conn = db.patiently(lambda: db.connect(farm.dsn, name="test", schema="public"), sleep=time.sleep)


def goes_on(farm: Farm, job: LongJob, beats: int) -> None:
    """The job's lease is renewed so many times from now on."""
    wanted = beats + [kind for kind, _ in farm.journal(job.job_id)].count("heartbeat")
    until(lambda: [kind for kind, _ in farm.journal(job.job_id)].count("heartbeat") >= wanted, "heartbeats")


def test_h4_a9_a_long_job_lives_through_three_restarts(database: Database, served: Farm) -> None:
    """It runs for longer than its lease, and once; idle workers are back after each restart; no job is missing."""
    program = served.ready(workers=3, dl_claim_backoff_sec=NEVER)
    served.start("reaper")
    job = LongJob(served, "long", lease_ttl_sec=12)
    jobs: list[UUID] = []
    for how in (FAST, IMMEDIATE, FAST):
        before = len(program.events("farm.database.back"))
        jobs += [served.enqueue("noop", lock_key=f"small-{number}") for number in range(7)]
        database.restart(how)
        reconnect(served)
        until(lambda before=before: len(program.events("farm.database.back")) > before, "the run's new session")
        served.works()
        goes_on(served, job, beats=4)
    job.ends_well()
    served.succeeds(*jobs)


def test_a7_an_outage_longer_than_the_leases_costs_no_living_worker_its_job(database: Database, served: Farm) -> None:
    """Though it was the last attempt: the reaper waits until they have handed back what they had to stop."""
    program = served.ready(workers=8, debug=1)
    reaper = served.reaper()
    jobs = [LongJob(served, f"job-{n}", lease_ttl_sec=2, max_attempts=1) for n in range(8)]
    database.end(FAST)
    failed = "worker.session.lost"
    until(lambda: len({line["worker"] for line in program.events(failed)}) == 8, "all runs to be over")
    workers = program.workers()
    on_all(psutil.Process.suspend, workers)
    database.start_again()
    reconnect(served)
    reaper.logged("reaper.patient")
    on_all(psutil.Process.resume, workers)
    for job in jobs:
        job.go.touch()
        assert served.wait(job.job_id, "succeeded", "lost")["attempt"] == 1
        assert served.job(job.job_id)["status"] == "succeeded", served.journal(job.job_id)
    assert not reaper.events("reaper.job.taken")


def test_a_database_restored_to_the_past_is_served_by_the_same_workers(database: Database, served: Farm) -> None:
    """Claims that it does not know are dropped with a line, and the runs of its own past are made again."""
    folder = database.server.root
    program = served.ready(workers=2, pg_connect_timeout=1)
    workers = {worker.pid for worker in program.workers()}
    known, witness = LongJob(served, "known"), LongJob(served, "witness")
    database.end(FAST)
    shutil.copytree(folder / "data", folder / "copy")
    database.start_again()
    reconnect(served)
    known.ends_well()
    unknown = LongJob(served, "unknown", lock_key="u")
    database.end(IMMEDIATE)
    shutil.rmtree(folder / "data")
    (folder / "copy").rename(folder / "data")
    database.start_again()
    reconnect(served)
    until(lambda: len(served.sessions("dl-worker")) == 2, "both workers to be back")
    lost = program.logged("worker.ownership.lost")
    assert [line["job_id"] for line in lost] == [str(unknown.job_id)]
    assert served.rows("SELECT FROM dl_jobs WHERE job_id = %s", unknown.job_id) == []
    known.has_begun(times=2)
    served.succeeds(known.job_id)
    witness.ends_well()
    LongJob(served, "again", lock_key="u").ends_well()
    assert {worker.pid for worker in program.workers()} == workers
    assert program.stop() == 0


def spend_ids(database: Database) -> None:
    """Start the server again so near a wraparound that it assigns no transaction ids; its autovacuum sleeps."""
    database.admin("ALTER SYSTEM SET autovacuum_naptime = '1d'")
    ((oldest,),) = database.admin("SELECT min(datfrozenxid::text::bigint) FROM pg_database")
    database.end(FAST)
    data, of_a_file = database.server.root / "data", 32 * 4 * 8192  # the ids of which a file of pg_xact has the states
    file = (oldest + 2**31 - 3_000_000) // of_a_file + 1
    owner = data.stat()
    command = [embedded.find_programs(data, given_programs()) / "pg_resetwal", "-f", "-D", data]
    command += ["-u", str(oldest), "-x", str(file * of_a_file)]
    subprocess.run(command, check=True, cwd="/", user=owner.st_uid, group=owner.st_gid, stdout=subprocess.DEVNULL)
    (data / "pg_xact" / f"{file:04X}").write_bytes(bytes(of_a_file // 4))
    os.chown(data / "pg_xact" / f"{file:04X}", owner.st_uid, owner.st_gid)
    database.start_again()


def test_h3_a_server_that_refuses_writes_is_waited_for(database: Database, served: Farm, free_port: int) -> None:
    """25006 and 54000 mark nothing failed here: runs go on, and their ends and new claims are written when it is over.

    The API says why it refuses work.
    """
    program, reaper = served.ready(workers=2, debug=1), served.reaper()
    served.api(free_port)
    long, short = LongJob(served, "long"), LongJob(served, "short")
    database.admin("ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    reaper.logged("farm.database.lost")  # by now the other sessions have read the setting, too
    short.go.touch()
    program.logged("worker.session.lost")
    program.logged("farm.database.lost")
    assert served.rows("SELECT DISTINCT status::text FROM dl_jobs") == [("running",)]
    database.admin("ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()")
    short.ends_well()
    served.works()
    reaper.logged("farm.database.back")

    short = LongJob(served, "another")
    spend_ids(database)
    reconnect(served)
    until(lambda: status(free_port, "/ready") == 503, "the API to refuse work")
    until(lambda: status(free_port) == 200, "the API")
    assert "no transaction ids left" in next(alerts.unfit(stats.fitness(served.conn))).text
    short.go.touch()
    until(lambda: any("transaction ID" in line["error"] for line in program.events("worker.session.lost")), "a refusal")
    assert {served.job(job.job_id)["status"] for job in (long, short)} == {"running"}
    database.admin("ALTER SYSTEM SET autovacuum_naptime = '1s'", "SELECT pg_reload_conf()")
    short.ends_well()
    served.works()
    long.ends_well()
    until(lambda: status(free_port, "/ready") == 200, "the API to be content")
    events = ("worker.end.refused", "heartbeat.failed", "worker.ownership.lost", "keeper.settle.failed")
    assert not any(program.events(each) for each in events)
    assert not reaper.events("reaper.roll.failed")


def test_h2_a_run_whose_session_answers_nothing_goes_on_in_a_new_one(database: Database, served: Farm) -> None:
    """The heartbeat gives up on its own clock. The old session cannot end and keeps the key for us, until it can."""
    program = served.ready(workers=1, dl_claim_backoff_sec=NEVER)
    job = LongJob(served, "long", lock_key="k")
    old = database.backend("dl-worker")
    backend = psutil.Process(old)
    backend.suspend()  # its kernel still takes what it is sent
    try:
        (lost,) = program.logged("farm.database.lost")
        assert lost["error"].startswith("no answer from the database within")
        program.logged("farm.database.back")
        goes_on(served, job, beats=2)
        assert key_holders(served) == [old]
    finally:
        on_all(psutil.Process.resume, [backend])
    until(
        lambda: key_holders(served) == served.sessions("dl-worker", f"pid <> {old}"), "the new session to have the key"
    )
    job.ends_well()


def key_holders(farm: Farm) -> list[int]:
    """The sessions that have the lock of the key k; the keeper and others take locks of their own now and then."""
    holders = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = hashtext('k')::oid"
    return [pid for (pid,) in farm.rows(holders)]


def test_an_outage_is_one_line_for_the_whole_farm(database: Database, served: Farm) -> None:
    """Two workers are idle, two run jobs, and the keeper looks after all: each of them loses its session.

    Before, none of them loses it by idle_session_timeout (D9), as an idle session of anybody else does.
    """
    database.admin("ALTER DATABASE postgres SET idle_session_timeout = '300ms'")
    program = served.ready(workers=4, debug=1, dl_claim_backoff_sec=NEVER)
    jobs = [LongJob(served, f"job-{n}") for n in range(2)]
    with psycopg.connect(database.dsn, application_name="other", autocommit=True):
        until(lambda: not database.admin("SELECT 1 FROM pg_stat_activity WHERE application_name = 'other'"))
    served.works()
    assert not program.events("farm.database.lost")
    database.end(FAST)

    def have_failed() -> set[str]:
        names = ("farm.database.lost", "worker.session.lost", "keeper.session.lost")
        return {line.get("worker", "keeper") for name in names for line in program.events(name)}

    until(lambda: len(have_failed()) == 5, "all processes to notice")
    (lost,) = program.events("farm.database.lost")
    assert re.search("terminating connection|server closed the connection", lost["error"]), "by who notices first"
    assert lost["level"] == "warning"
    database.start_again()
    reconnect(served)
    program.logged("farm.database.back")
    for job in jobs:
        job.ends_well()
    (back,) = program.events("farm.database.back")
    assert back["failures"] >= 5
    assert len(program.events("farm.database.lost")) == 1


def test_h5_too_many_connections_end_no_run_and_pass(database: Database, served: Farm) -> None:
    """A run keeps its lease by the session that it has; who has none tries again, with pauses."""
    database.admin("CREATE ROLE farm LOGIN")
    migrations.grant(database.dsn, "public", [("farm", "farm")])
    program = served.ready(workers=2, dl_db_dsn=f"{database.dsn} user=farm", dl_claim_backoff_sec=NEVER, debug=1)
    job = LongJob(served, "long", lease_ttl_sec=3)
    database.admin("ALTER ROLE farm CONNECTION LIMIT 1", END_IDLE)
    until(lambda: any("too many" in line["error"] for line in program.events("worker.session.lost")), "a refusal")
    goes_on(served, job, beats=4)
    waiting = served.enqueue("noop")
    database.admin("ALTER ROLE farm CONNECTION LIMIT -1")
    served.succeeds(waiting)
    (back,) = program.logged("farm.database.back")
    assert 1 < back["failures"] < 50, "pauses between the attempts"
    job.ends_well()


END_IDLE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND application_name LIKE 'dl-worker%'
   AND pid NOT IN (SELECT claimed_pid FROM dl_jobs WHERE status = 'running')
"""
