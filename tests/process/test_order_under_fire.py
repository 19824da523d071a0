"""Order under fire: an ordered queue's promises beside failures, crashes, drains, cancellations, database restarts."""

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import psutil
import psycopg
import pytest
from farming import Farm, Program, farm_on, until
from judge import side_by_side
from servers import FAST, IMMEDIATE, Database
from test_database_faults import reconnect

from dataloader import enqueue
from dataloader.queue import db, operations

SECONDS = float(os.environ.get("DL_TEST_FIRE_SEC", "12"))
KEYS, FARMS, PRODUCERS = 200, 3, 4
pytestmark = [pytest.mark.long, pytest.mark.timeout(600 + 3 * SECONDS)]

# A start of a job while an earlier one of its key, which was there a second before, had not ended, and did not
# start with it. The claim takes its own time before it looks; a job's end has that of its transaction's begin.
OUT_OF_ORDER = """
SELECT j.lock_key, j.score, o.score AS earlier, e.ts, o.finished_at, o.status::text
  FROM dl_job_events e JOIN dl_jobs j USING (job_id)
  JOIN dl_jobs o ON o.lock_key = j.lock_key AND (o.score, o.created_at, o.job_id) < (j.score, j.created_at, j.job_id)
 WHERE e.kind = 'picked' AND o.created_at < e.ts - interval '1 s' AND (o.finished_at IS NULL OR o.finished_at > e.ts)
   AND NOT EXISTS (SELECT FROM dl_job_events same
                    WHERE same.job_id = o.job_id AND same.kind = 'picked' AND same.ts = e.ts)
"""
AFTER_SUCCESS = """
SELECT job_id FROM dl_job_events d JOIN dl_job_events p USING (job_id)
 WHERE d.kind = 'done' AND p.kind = 'picked' AND p.event_id > d.event_id
"""


class Fire:
    """One run: its database, its farms, its producers, and what these were told."""

    def __init__(self, database: Database, farm: Farm, seed: int) -> None:
        self.database, self.farm = database, farm
        self.notes = farm.folder / "notes"
        self.chance = random.Random(seed)
        self.acknowledged: list[UUID] = []
        self.is_over = threading.Event()

    def start_farm(self) -> Program:
        wish = [{"queue": "fire", "concurrency": 2}]
        settings = {"dl_pipelines": "fire_pipelines", "fire_notes": self.notes, "dl_drain_sec": 1}
        return self.farm.start(workers_json=json.dumps(wish), **settings)

    def produce(self, number: int) -> None:
        """Add jobs until the end; a tenth with a score before all others of their keys."""
        chance, sent = random.Random(number), 0
        while not self.is_over.is_set():
            with (
                suppress(psycopg.OperationalError),
                db.connect(self.farm.dsn, name="producer", schema="public") as conn,
            ):
                while not self.is_over.is_set():
                    sent += 1
                    score = -time.time() if chance.random() < 0.1 else None
                    args = {"n": f"{number}-{sent}"}
                    key = f"key-{chance.randrange(KEYS)}"
                    new = {"queue": "fire", "task": "fire.sync", "lock_key": key, "args": args, "score": score}
                    self.acknowledged.append(enqueue(conn, **new, max_attempts=4, schema="public")[0])
                    time.sleep(chance.uniform(0, 0.02))

    def fan(self, farms: list[Program]) -> None:
        """Some fault, at random: a killed worker, a farm that drains and starts again, cancellations, a restart."""
        fault = self.chance.choice(["kill", "kill", "drain", "cancel", "cancel", "cancel", "restart"])
        if fault == "kill":
            with suppress(IndexError, psutil.Error):
                self.chance.choice(self.chance.choice(farms).workers()).send_signal(signal.SIGKILL)
        elif fault == "drain":
            farms.pop(0).signal(signal.SIGTERM)
            farms.append(self.start_farm())
        elif fault == "cancel":
            with suppress(psycopg.OperationalError):
                operations.change(self.farm.conn, "cancel", self.chance.sample(self.acknowledged, 3), "test")
        else:
            self.database.restart(self.chance.choice([FAST, IMMEDIATE]))
            reconnect(self.farm)

    def rage(self) -> None:
        """Farms, producers and faults for SECONDS and 20 jobs for each; then farms alone until every job has ended."""
        farms = [self.start_farm() for _ in range(FARMS)]
        self.farm.start("reaper")
        with ThreadPoolExecutor(PRODUCERS) as threads:
            producers = [threads.submit(self.produce, number) for number in range(PRODUCERS)]
            try:
                until(lambda: len(self.acknowledged) > 10, "jobs")
                ends = time.monotonic() + SECONDS
                while time.monotonic() < ends or len(self.acknowledged) < 20 * SECONDS:
                    time.sleep(self.chance.uniform(0.1, 1.0))
                    self.fan(farms)
            finally:
                self.is_over.set()
        for each in producers:
            each.result()
        until(self._is_drained, "every job to end", patience=120)

    def _is_drained(self) -> bool:
        operations.change_queue(self.farm.conn, "run-all", "fire", "test")  # the delays after crashes are long
        return self.farm.rows("SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')")[0][0] == 0


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "ordered"])
def test_the_order_of_each_key_stands_whatever_fails(database: Database, tmp_path: Path, merge: bool) -> None:
    with farm_on(database.dsn, tmp_path) as farm:
        operations.set_order(farm.conn, "fire", "test", ordered=True, merge=merge)
        fire = Fire(database, farm, seed=random.randrange(10**6))
        fire.rage()
        ended = {job_id: status for job_id, status in farm.rows("SELECT job_id, status::text FROM dl_jobs")}
        assert [job_id for job_id in fire.acknowledged if job_id not in ended] == []
        assert "succeeded" in ended.values()
        assert farm.rows(OUT_OF_ORDER) == []
        assert farm.rows(AFTER_SUCCESS) == []
        calls = map(json.loads, fire.notes.read_text().splitlines())
        assert side_by_side((call["key"], call["began"], call["ended"]) for call in calls) == []
