"""Rows that a producer, a farm or an attacker might write: odd values for every column of every table of the queue."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

QUEUE = "hostile"
COLUMNS = """
SELECT table_name, column_name, CASE data_type WHEN 'ARRAY' THEN substr(udt_name, 2) || '[]' ELSE udt_name END
  FROM information_schema.columns
 WHERE table_schema = current_schema() AND table_name LIKE 'dl\\_%' ORDER BY 1, 2
"""
LONG = 40_000  # characters, far above what an index row holds
TEXTS = ["", " ", "a" * LONG, "{}\"'\\%s%", "\x01\x1b[31m\x7f", "\u202e\U0001f4a3" * 60, "<script>alert(1)</script>",
         "NaN", "[]", "null", "limit:a", "a\nb", "parent", "time", "key"]  # fmt: skip
TIMES = ["infinity", "-infinity", "4713-01-02 00:00+00 BC", "294276-12-31 23:59:59+00", "0001-01-01 00:00+00",
         "9999-12-31 23:59:59.999999+00", "2000-01-01 00:00+00", "10000-01-01 00:00+00", "now", "tomorrow"]  # fmt: skip
INTS = [-(2**31), -1, 0, 1, 2, 999, 86_400, 1_000_000_000, 2**31 - 2, 2**31 - 1]
FLOATS = ["NaN", "Infinity", "-Infinity", "0", "-1", "0.5", "5e-324", "1e-300", "1e300", "1.7e308", "-1.7e308"]
JSONS = ["null", "1", '"text"', "[]", "{}", "[" * 400 + "]" * 400, '{"a":' * 3_000 + "1" + "}" * 3_000,
         "[" * 2_000 + "]" * 2_000, "1e400", '{"a": ' + "9" * 5_000 + "}", '{"": null, "a": [1, {"b": NULL}]}'.lower(),
         '{"processed": "x", "total": -1}', '{"processed": 1e300, "total": 1e-300}', '{"attempt": {}, "worker": []}',
         '{"peak_mb": "x", "cpu_sec": [1], "error": {"a": 1}, "notes": 7, "delay_sec": "soon", "by": null}',
         '{"' + '": 1, "'.join(map(str, range(3_000))) + '": 1}', '{"task": 5, "queue": null}',
         '{"task": "t", "queue": "hostile", "args": 5}', '{"password": "s", "token": {"a": []}}']  # fmt: skip
LISTS = ["{}", "{NULL}", "{a,NULL}", "{{a,b},{c,d}}", "[5:6]={a,b}", "{a,a}", '{""}', "{a,b,c,d,e,f,g,h,i}",
         "{" + ",".join(f"n{n}" for n in range(3_000)) + "}", "{" + "x" * LONG + "}", "{a}"]  # fmt: skip
NUMBERS = ["{}", "{NULL}", "{1,NULL,2}", "{{1,2},{3,4}}", "{-1,0}", "{32767}", "{" + ",".join(["1"] * 3_000) + "}"]


@dataclass
class Rows:
    """Adds rows, each with one to three odd values, and counts what became of them."""

    conn: psycopg.Connection[Any]
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    jobs: list[UUID] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._columns: dict[str, dict[str, str]] = {}
        for table, column, kind in self.conn.execute(COLUMNS).fetchall():
            self._columns.setdefault(table, {})[column] = kind
        for table in ("dl_migrations", "dl_served", "dl_rolled", "dl_alerted"):
            self._columns.pop(table, None)  # no rows of producers or farms, or one row that the reaper owns
        self._columns = {name: of for name, of in self._columns.items() if not name.startswith("dl_job_logs_")}

    def add(self, number: int, tables: Sequence[str] = ()) -> None:
        """Try so many rows; half of them are jobs."""
        self.jobs.clear()
        others = [table for table in self._columns if table != "dl_jobs"]
        for _ in range(number):
            choice = [*tables] or ["dl_jobs" if self.chance.random() < 0.5 else self.chance.choice(others)]
            self._add(self.chance.choice(choice))

    def _add(self, table: str) -> None:
        columns = self._columns[table]
        odd = self.chance.sample(sorted(columns), min(len(columns), self.chance.choice([1, 1, 1, 2, 3])))
        row = self._sound(table) | {name: self._odd(columns[name]) for name in odd}
        if table == "dl_jobs" and row.get("status") not in (None, "queued"):
            row.setdefault("finished_at", "now")
        self.counts["tried"] += 1
        try:
            self.conn.execute(
                sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
                    sql.Identifier(table),
                    sql.SQL(", ").join(map(sql.Identifier, row)),
                    sql.SQL(", ").join(
                        sql.SQL("%s::{}").format(sql.SQL(columns[name]))  # type: ignore[arg-type]
                        for name in row
                    ),
                ),
                list(row.values()),
            )
        except psycopg.Error as e:
            self.counts[f"refused {e.sqlstate}"] += 1
            return
        self.counts["added"] += 1
        if table == "dl_jobs" and row["job_id"]:
            self.jobs.append(UUID(str(row["job_id"])))

    def _sound(self, table: str) -> dict[str, Any]:
        """Values for the columns that need one, so that the odd ones decide."""
        name = f"h{self.chance.randrange(10**9)}"
        some_job = str(self.chance.choice(self.jobs)) if self.jobs and self.chance.random() < 0.7 else self._id()
        common: dict[str, Any] = {
            "job_id": some_job, "parent_id": self._id(), "queue": QUEUE, "task": name, "name": name, "kind": "done",
            "claim": 1, "result": "{}", "place": 1, "parents": 1, "available_at": "now", "on_failure": "cancel",
            "target_claim": 0, "target_number": 0, "spares_attempt": False, "checkpoint": '{"on_cancel": 1}',
            "worker": name, "farm": name, "host": name, "pid": 1, "state": "idle", "most": 3, "memory_mb": 1,
            "runs": 1, "learned_at": "now", "peaks": "{1}", "seconds": "{1}", "origin": "people", "interval_sec": 60,
            "timezone": "UTC", "catch_up": "last", "overlap": "queue", "jitter_sec": 0, "next_due": "now",
            "job": '{"task": "t", "queue": "hostile"}', "created_by": name, "code_version": "", "skip_done": False,
            "total": 3, "next_at": "now", "backfill": name, "partition": name, "count": 1,
            "buckets": "{0,0,0,0,0,0,0,0,0,0,0,0}",
            "at": "now", "processed": 1, "failed": 1, "minutes": 5, "figure": "succeeded", "largest": 1, "slots": "{1}",
            "counts": "{1}", "length": 1, "scheduled": 0, "retries": 0, "dead": 0, "lag_sec": 1, "error_group": name,
            "note": name, "by": name, "attempt": 1, "line": 1, "level": "info", "source": "log", "text": name,
            "url": "https://example.com/a", "shape": "json", "webhook": name, "since": "now", "key_hash": 1,
        }  # fmt: skip
        if table == "dl_jobs":
            return {"job_id": self._id(), "queue": QUEUE, "task": "t", "lock_key": name}
        if table == "dl_totals":
            common["seconds"] = 1
        if table == "dl_job_events":
            common["payload"] = "{}"
            common["kind"] = self.chance.choice(
                ["queued", "picked", "done", "failed", "requeue", "deadline", "stuck", "lost"]
            )
        return {column: common[column] for column in self._columns[table] if column in common}

    def _id(self) -> str:
        return str(UUID(int=self.chance.getrandbits(128)))

    def _odd(self, kind: str) -> Any:
        chance = self.chance
        odd: dict[str, Sequence[Any]] = {
            "text": [*TEXTS, "".join(map(chr, chance.choices(range(33, 0x2FFF), k=3_000)))], "timestamptz": TIMES,
            "int4": INTS, "int2": [-1, 0, 60, 32_767], "int8": [*INTS, 10**15, 2**63 - 1, -(2**63)], "float8": FLOATS,
            "float4": ["NaN", "Infinity", "-1", "1e30", "0"], "jsonb": JSONS, "text[]": LISTS, "bool": [True, False],
            "dl_status": ["queued", "running", "succeeded", "failed", "canceled", "lost"],
            "uuid": [str(UUID(int=0)), str(UUID(int=2**128 - 1)), self._id()],
        }  # fmt: skip
        return chance.choice([*odd.get(kind, NUMBERS), None])
