"""Searches, tallies and bulk orders on real rows: each answer is compared with a slow filter over all of them."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from hands import Conn, enqueue, plain, quietly, value
from psycopg.rows import dict_row
from secret_texts import TEXTS, TOKENS

from dataloader.log import masked
from dataloader.queue import db, operations
from dataloader.queue.job import STATUSES, TALLIED
from dataloader.queue.reports import bulk, search, stats, tallies
from dataloader.queue.reports.bulk import Target
from dataloader.queue.reports.stats import Wanted

GROUPS = ["ValueError: row #", "OSError: away"]
TASKS, QUEUES = ["load.csv", "Load.Parquet", "cbr.rates"], ["etl.default", "orders"]
SOME = 300


def filled(conn: Conn, seed: int, count: int = SOME) -> list[dict[str, Any]]:
    """Random rows of every kind, written without triggers; all of them."""
    rng = random.Random(seed)
    with conn.transaction():
        conn.execute("SET LOCAL session_replication_role = replica")
        now = value(conn, "SELECT now()")
        for n in range(count):
            kind = rng.choice(TALLIED)
            status = "queued" if kind in ("ready", "scheduled", "blocked") else kind
            is_limited = kind == "blocked" and rng.random() < 0.3
            blocked_on = {"scheduled": "time", "blocked": "limit:l" if is_limited else rng.choice(["key", "parent"])}
            made = {
                "job_id": UUID(f"{rng.choice(['0190a5d0', 'deadbeef', '20240501'])}-{str(uuid4())[9:]}"),
                "queue": rng.choice(QUEUES),
                "task": rng.choice(TASKS),
                "lock_key": rng.choice(["orders:17", "orders_17", "50% off", "deadbeef1", 'a "b" c', f"k{n % 7}"]),
                "args": json.dumps({"n": rng.choice([1, "1", 2.0, None, True]), "in": {"day": rng.choice("ab")}}),
                "status": status,
                "blocked_on": blocked_on.get(kind),
                "attempt": rng.choice([0, 1]),
                "limits": ["l"] if is_limited else None,
                "error_group": rng.choice(GROUPS) if kind in ("failed", "lost") else None,
                "partition_key": "x" if n % 2 else "",
                "producer": "p" if n % 3 else None,
                "consumer_group": "g" if n % 5 else None,
            }
            at = now - timedelta(seconds=rng.randrange(10_000) // 200 * 200)  # many have one time
            ends = {"running": "started_at", "queued": "created_at"}.get(status, "finished_at")
            job_id = plain(conn, **made | {"created_at": at, ends: at})
            if blocked_on.get(kind) == "parent":
                conn.execute("INSERT INTO dl_waiting VALUES (%s, 1, now(), 'hold')", (job_id,))
        conn.execute("INSERT INTO dl_limits (name, most, burst, changed_by) VALUES ('l', 0, 1, 't')")
    return everything(conn)


def everything(conn: Conn) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute("SELECT * FROM dl_jobs").fetchall()


def kind_of(row: dict[str, Any]) -> str:
    return stats.kind(row["status"], row["blocked_on"])


def slow(rows: Sequence[dict[str, Any]], text: str) -> set[UUID]:
    """The ids that a search should find, by another reading of it: words and fields without spaces in them."""
    return {row["job_id"] for row in rows if all(_holds(row, term) for term in text.split())}


def _holds(row: dict[str, Any], term: str) -> bool:
    name, colon, wanted = term.partition(":") if not term.startswith('"') else (term.strip('"'), "", "")
    if not colon:
        texts = [row[field].lower() for field in ("task", "queue", "lock_key")]
        is_part = any(name.lower() in text for text in texts)
        job_id = str(row["job_id"])
        looks = len(name) >= 8 and not set(name) - set("0123456789abcdef") and not term.startswith('"')
        return is_part or (looks and (job_id.startswith(name) or job_id.endswith(name)))
    if name == "id":
        return str(row["job_id"]).startswith(wanted)
    if name == "status":
        groups = {
            "dead": row["status"] in ("failed", "lost"),
            "fresh": row["status"] == "queued" and row["attempt"] == 0,
            "retries": row["status"] == "queued" and row["attempt"] > 0,
        }
        return groups.get(wanted, wanted in (row["status"], kind_of(row)))
    if name.startswith("args."):
        found: Any = row["args"]
        for part in name[5:].split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if wanted.startswith('"'):
            return bool(found == wanted.strip('"'))
        is_json = wanted in ("true", "null") or wanted.isdigit()
        return (type(found) is str and found == wanted) or (is_json and _same(found, json.loads(wanted)))
    return bool(row[search.FIELDS[name]] == wanted)


def _same(found: Any, wanted: Any) -> bool:
    return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)


def pages(conn: Conn, wanted: Wanted, limit: int = 50, scan: int | None = None) -> list[dict[str, Any]]:
    """The jobs of all pages, in their order; with `scan` a page reads only so many jobs of each source."""
    found: list[dict[str, Any]] = []
    after = None
    while True:
        page = stats.jobs(conn, wanted, limit, after, scan)
        assert len(page.rows) <= limit
        assert page.next is None or page.next != after
        found += page.rows
        if (after := page.next) is None:
            return found


def listed(conn: Conn, wanted: Wanted, limit: int = 50) -> list[UUID]:
    return [row["job_id"] for row in pages(conn, wanted, limit)]


def both_lists(conn: Conn, text: str, limit: int = 50, scan: int | None = None) -> list[UUID]:
    """The ids of the list by change, which has the same jobs as that by key; each is in its order."""
    by_change, by_key = pages(conn, Wanted(q=text), limit, scan), pages(conn, Wanted(q=text, sort="key"), limit)
    times = [row["changed_at"] for row in by_change]
    found, other = ([row["job_id"] for row in rows] for rows in (by_change, by_key))
    assert times == sorted(times, reverse=True), text
    in_order = "SELECT array_agg(lock_key ORDER BY lock_key) FROM dl_jobs WHERE job_id = ANY (%s)"
    assert [row["lock_key"] for row in by_key] == (value(conn, in_order, found) or []), text
    assert sorted(found) == sorted(other), text
    return found


# The filters of a list, too.
OF_FIELDS = [
    "",
    "queue:orders",
    "key:k3",
    "producer:p task:cbr.rates",
    "partition:x group:g",
    "status:dead queue:orders",
    "status:retries queue:orders task:load.csv",
    *(f"status:{status}" for status in STATUSES),
]
SEARCHES = [
    *OF_FIELDS,
    "load",
    "LOAD.c",
    "load orders",
    "orders_1",
    "50%",
    "deadbeef",
    '"deadbeef"',
    "20240501",
    "id:0190a5d0",
    "id:0190a5d0 task:cbr.rates",
    "orders status:dead",
    "args.n:1",
    'args.n:"1"',
    "args.n:true args.in.day:a",
    "args.n:null",
    "args.n:2.00",
    "queue:orders key:orders_17",
    "nothing.has.it",
]


@pytest.fixture(params=[False, True])
def has_index(conn: Conn, request: pytest.FixtureRequest) -> Iterator[bool]:
    """With the index for arguments, and without it, as all other tests have their database."""
    if request.param:
        assert stats.create_args_index(conn)
    assert (stats.jobs(conn, Wanted(q="args.n:1")).advice is None) == request.param
    yield request.param
    stats.drop_args_index(conn)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.long
def test_a_search_finds_what_a_slow_filter_does_and_its_tally_adds_up(conn: Conn, seed: int, has_index: bool) -> None:
    rows = filled(conn, seed)
    for text in SEARCHES:
        wanted, expected = Wanted(q=text), slow(rows, text.replace("2.00", "2"))
        if text.startswith("args.n:2"):
            expected = {row["job_id"] for row in rows if row["args"]["n"] == 2.0}
        assert sorted(both_lists(conn, text)) == sorted(expected), text
        tally = tallies.tally(conn, wanted)
        assert not tally["at_least"], text
        assert +Counter(tally["counts"]) == Counter(kind_of(row) for row in rows if row["job_id"] in expected), text
        for kind in TALLIED:
            if tally["counts"][kind] and "status:" not in text:
                assert len(listed(conn, Wanted(q=text, status=kind))) == tally["counts"][kind], (text, kind)


def test_small_looks_find_the_same_and_a_tally_says_so(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = filled(conn, 3)
    monkeypatch.setattr(stats, "FOUND", 5)
    for text in ("", "queue:orders", "status:dead queue:orders", "deadbeef", "args.in.day:a", "status:retries 50%"):
        assert sorted(both_lists(conn, text, 7, scan=13)) == sorted(slow(rows, text)), text
    monkeypatch.setattr(tallies, "SCAN", 5)
    for text in ("load", "queue:orders load", "status:dead load"):
        tally = tallies.tally(conn, Wanted(q=text))
        counts, whole = tally["counts"], Counter(kind_of(row) for row in rows if row["job_id"] in slow(rows, text))
        assert tally["at_least"]
        assert all(counts[kind] <= whole[kind] for kind in TALLIED), text
        assert all(counts[kind] == whole[kind] for kind in TALLIED if kind not in tally["at_least"]), text


def test_a_tally_of_a_queue_reads_no_more_of_the_history_of_others(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has the finished jobs of a queue, so those of a queue with few of them are not looked for on and on."""
    for queue, age in (("rare", 2), *(("busy", 1) for _ in range(5))):
        plain(conn, queue=queue, status="succeeded", finished_at=datetime.now(UTC) - timedelta(hours=age))
    assert tallies.tally(conn, Wanted(queue="rare"))["counts"]["succeeded"] == 1
    monkeypatch.setattr(tallies, "SCAN", 5)
    tally = tallies.tally(conn, Wanted(queue="rare"))
    assert (tally["counts"]["succeeded"], tally["at_least"]) == (0, ["succeeded", "canceled"])


SECRETS = [
    "postgresql://u:{}@h/db",
    "https://{}@h/x",
    "password={}",
    "my-token: {}",
    "--api-key {}",
    "Authorization: Bearer {}",
    '{{"secret": "{}"}}',
    "pwd%3D{}",
    "Bearer abc1{}",
]


def test_a_part_of_what_is_masked_finds_nothing(conn: Conn) -> None:
    secret = "canary7f3bhunter2canary7f3b"
    first, second, *_ = filled(conn, 4, 5)
    for text in SECRETS:
        key = text.format(secret)
        assert secret not in masked(key)
        conn.execute("UPDATE dl_jobs SET lock_key = %s WHERE job_id = %s", (key, first["job_id"]))
        conn.execute("UPDATE dl_jobs SET task = %s WHERE job_id = %s", (key, second["job_id"]))
        for part in ("canary7", "hunter2", "7f3b", "b1337", secret):
            assert listed(conn, Wanted(q=part)) == []
            assert tallies.tally(conn, Wanted(q=part))["total"] == 0
    assert first["job_id"] in listed(conn, Wanted(q=f"queue:{first['queue']} {first['task'][:4]}"))


# Pieces of texts: secrets stand in them, or beside them.
PIECES = [
    *("pass", "pwd", "secret", "token", "Authorization", "cookie", "bearer", "jwt", "api_key", "access-key", "--"),
    *("://", "http://", "s3://", "user", "host", "80", "5432", "a1b2c3d4", "xxxxxxxxxxxx", "@", ":", "/", "=", "=>"),
    *("%3d", "%3A", "'", '"', "\\", "?", "#", "&", ",", "{", "}", "-", "_", ".", "é", "dl_", "account.key.acme"),
    *("/pw@//", "thin:ann/pw@h", "</", "password>x</", ">", "-uann", "--user=", "\\n", '"auth"', "_auth=", "?auth="),
    *("pin", "пароль", "Fernet_Key", "HMAC-KEY", "h:5432:db:u:", "</name><value>", '"""', "a1", '"kty"'),
    *('"d":"abcdefghij', "connect.sid", "$a['", "']", "dl_" + "aB" * 15, "AKIA" + "A1" * 8, "?key=" + "a1" * 12),
    *("pata1B2a1B2a1B2a1." + "0a1b" * 16, "0a1b" * 8 + "-us12", "a.webhook.office.com/webhookb2/0a1b2c3d-0a1b-0a"),
    *("PRIVATE KEY-----", "Bearer ", " ", "\n", "\u00a0", "\u2003", "\x1c", "\x85", "identified by "),
    *("Basic dTpwdw== ", "-u ", "IDENTIFIED BY '", "mysql ", " -ppw", " machine h login u ", "sshpass -p"),
    *("user: u\n pass: ", "redis-cli ", "ldapadd ", "sqlcmd ", "7z ", " -w pw", " -P pw", " -a pw", "sqlplus ann/pw"),
    *("masterauth ", "docker login ", "value: ", "-U ", "-storepass pw", "AUTH ", "SETUSER u >", "user u on >"),
    *("setx ", "SET ", "curl ", " -b a=", " -E c:", "http ", " -a u:p", "pg_connect(h,u,'", "new PDO(h,u,'"),
    *("--from-literal=a=b", "mongosh ", "login ", " -p pw", "--pass ", "Private-Lines: 1", "', 'B c')"),
]


def test_every_text_that_answers_mask_is_known_as_one(conn: Conn) -> None:
    rng = random.Random(5)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(2, 9))) for _ in range(6_000)]
    texts += [*TEXTS, *TOKENS, "postgresql://u:hun/ter2@h/db", "postgresql://u:hun/ter2", "http://h:80/a@b"]
    hidden = [text for text in texts if masked(text) != text]
    statement = stats.spliced(
        "SELECT t FROM unnest(%(texts)s::text[]) t"
        ' WHERE (lower(t COLLATE "C") LIKE ANY ({secret_words})'
        " OR t ~ '[!-~]{20}' AND lower(t COLLATE \"C\") LIKE ANY ({token_words})) AND t ~* {secret}"
    )
    assert set(hidden) == {text for (text,) in conn.execute(statement, {"texts": hidden})}
    assert len(hidden) > 1_000
    harmless = ["http://h:80/a", "http://h:5432", "s3://b/a:b", "load:2024-05", "passengers", "monkey:7", "auth:17"]
    harmless += ["task_daily_aggregation_2026_01", "store_of_the_customers_of_2026"]
    assert not conn.execute(statement, {"texts": harmless}).fetchall()


def states(conn: Conn) -> dict[UUID, tuple[str, str, str | None]]:
    return {row["job_id"]: (kind_of(row), row["status"], row["queue"]) for row in everything(conn)}


def changed(conn: Conn, before: dict[UUID, Any]) -> set[UUID]:
    """Whose status is another now; a parked job of a key may have become ready meanwhile."""
    after = states(conn)
    canceled = {row["job_id"] for row in everything(conn) if row["cancel_requested"]}
    return {job_id for job_id in before if job_id not in after or after[job_id][1:] != before[job_id][1:]} | canceled


ORDERED = [
    ("requeue", Wanted(q="load", error_group=GROUPS[0])),
    ("requeue", Wanted(q=f'orders error_group:"{GROUPS[1]}"', queue="etl.default")),
    ("start-over", Wanted(status="succeeded", q="deadbeef")),
    ("cancel", Wanted(q="args.in.day:a", queue="orders")),
    ("delete", Wanted(q="load", status="dead")),
    ("delete", Wanted(q="id:dead")),
    ("run-now", Wanted(task="load.csv")),
]


@pytest.mark.parametrize(("order", "wanted"), ORDERED)
@pytest.mark.long
def test_an_order_changes_the_jobs_of_its_list_and_no_other(conn: Conn, order: str, wanted: Wanted) -> None:
    filled(conn, 5)
    kinds = set(TALLIED) - bulk.ORDERS[order].keys()
    before = states(conn)
    expected = {job_id for job_id in listed(conn, wanted) if before[job_id][0] in kinds}
    preview = bulk.preview(conn, order, Target(wanted))
    assert expected
    assert (preview["count"], preview["is_exact"]) == (len(expected), True)
    assert sum(left["count"] for left in preview["leaves"]) == len(listed(conn, wanted)) - len(expected)
    assert all(left["reason"] for left in preview["leaves"])
    assert given(conn, order, Target(wanted), preview["confirmation"], 7) == len(expected)
    left = states(conn)
    touched = changed(conn, before) if order != "run-now" else expected
    assert touched == expected
    again = given(conn, order, Target(wanted), preview["confirmation"], 7)
    assert again == 0 or order == "cancel"  # of running jobs, which were asked to stop before
    assert states(conn) == left


def test_an_order_leaves_a_named_job_that_its_preview_leaves(conn: Conn) -> None:
    """A child has a far time, for it waits for its parents."""
    target = Target(Wanted(), (enqueue(conn, depends_on=[enqueue(conn)]),))
    preview = bulk.preview(conn, "run-now", target)
    assert given(conn, "run-now", target, preview["confirmation"]) == preview["count"] == 0


def given(conn: Conn, order: str, target: Target, confirmation: str, limit: int = 1_000) -> int:
    """Give an order to its end; how many jobs it has changed."""
    total, after = 0, None
    while True:
        step = bulk.change(conn, order, target, confirmation, "ann", after, limit)
        total, after = total + step.changed, step.next
        if after is None:
            return total


def test_what_changes_after_the_preview_stays_as_it_is(conn: Conn) -> None:
    """A job that has left the list, one that is changed since, and one that comes to it."""
    filled(conn, 6)
    wanted = Wanted(q="load", status="failed")
    jobs = listed(conn, wanted)
    preview = bulk.preview(conn, "requeue", Target(wanted))
    left, again = jobs[0], jobs[1]
    conn.execute("UPDATE dl_jobs SET task = 'x', queue = 'x', lock_key = 'x' WHERE job_id = %s", (left,))
    operations.change(conn, "requeue", [again], "bob")
    conn.execute("UPDATE dl_jobs SET status = 'failed', finished_at = clock_timestamp() WHERE job_id = %s", (again,))
    assert given(conn, "requeue", Target(wanted), preview["confirmation"]) == len(jobs) - 2
    assert [states(conn)[job_id][0] for job_id in (left, again)] == ["failed", "failed"]


def test_a_job_that_leaves_the_list_meanwhile_is_spared(conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the lock another session changes what the order looks at."""
    filled(conn, 7)
    wanted = Wanted(q="load", error_group=GROUPS[0])
    jobs = listed(conn, wanted)
    changes = ["error_group = 'other'", "status = 'running', finished_at = NULL"]
    changes += ["task = 'x', queue = 'x', lock_key = 'x'", "finished_at = now() + interval '1 min'"]
    target, look, change = Target(wanted), stats.chosen, operations.change
    preview = bulk.preview(conn, "delete", target)

    def disturbed(*args: Any) -> Any:
        found = look(*args)
        with db.connect(dsn, name="other", schema="public") as other, quietly(other):
            for change, job_id in zip(changes, jobs, strict=False):
                other.execute(f"UPDATE dl_jobs SET {change} WHERE job_id = '{job_id}'")
        return found

    def held(conn: Conn, order: str, job_ids: list[UUID], by: str) -> Any:
        with db.connect(dsn, name="other", schema="public") as other:
            free = "SELECT FROM dl_jobs WHERE job_id = ANY (%s) FOR UPDATE SKIP LOCKED"
            assert other.execute(free, (job_ids,)).fetchall() == []
        return change(conn, order, job_ids, by)

    monkeypatch.setattr(operations, "change", held)
    monkeypatch.setattr(stats, "chosen", disturbed)
    assert bulk.change(conn, "delete", target, preview["confirmation"], "ann").changed == len(jobs) - len(changes)
    assert set(jobs[: len(changes)]) <= states(conn).keys()
