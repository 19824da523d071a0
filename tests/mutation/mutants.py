"""The guards of the SQL, and how each is taken away.

An entry names a file, a place in it (a text that begins the statement, function or trigger; it occurs once), the old
text (once in that place) and the new one. A guard that no test can miss says why in `equivalent`: then nothing must go
red, and when something does the reason is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

QUEUE, TARGET, OPERATE, RIGHTS = "queue.sql", "target.sql", "operate.sql", "rights.sql"
JOURNAL, STEP, INSERTS = (f"migrations/{name}.sql" for name in ("0004_journal", "0019_one_claim", "0021_inserts"))
ROOT = Path(__file__).parent.parent.parent
_BEGIN = re.compile(r"^ *(-- name: |CREATE )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard, and the SQL without it."""

    file: str
    place: str
    name: str
    old: str
    new: str = ""
    equivalent: str | None = None

    def __str__(self) -> str:
        words = self.place.split("(")[0].removesuffix(" BEFORE").removesuffix(" AFTER").split()
        return f"{words[-1]}: {self.name}"


class Gone(Exception):
    """The SQL has changed, and the list has not."""


def mutated(text: str, mutant: Mutant) -> str:
    """The file's text with this guard taken away; raises Gone unless it is there exactly once."""
    if text.count(mutant.place) != 1:
        raise Gone(f"{mutant.file}: {mutant.place!r} is not there any more, or not once")
    start = text.index(mutant.place)
    following = _BEGIN.search(text, start + len(mutant.place))
    end = following.start() if following else len(text)
    if text.count(mutant.old, start, end) != 1:
        raise Gone(f"{mutant}: this guard is not there any more, or not once: {mutant.old!r}")
    return text[:start] + text[start:end].replace(mutant.old, mutant.new) + text[end:]


def apply(folder: Path, mutant: Mutant) -> None:
    """Take the guard away in this copy of the sql folder."""
    path = folder / mutant.file
    path.write_text(mutated(path.read_text("utf-8"), mutant), "utf-8")


def _in(file: str, place: str, *changes: tuple[str, ...]) -> list[Mutant]:
    return [Mutant(file, place, *change) for change in changes]


def _statement(name: str, *changes: tuple[str, ...]) -> list[Mutant]:
    return _in(QUEUE, f"-- name: {name}\n", *changes)


def _body(place: str, *changes: tuple[str, ...]) -> list[Mutant]:
    """In the file of functions/ that has this place."""
    texts = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "sql" / "functions").glob("*.sql"))}
    name = next((name for name, text in texts.items() if place in text), "claim.sql")
    return _in(f"functions/{name}", place, *changes)


def _function(name: str, *changes: tuple[str, ...]) -> list[Mutant]:
    return _body(f"FUNCTION {name}(", *changes)


def _of_the_claim(name: str) -> list[Mutant]:
    return _statement(
        name,
        ("any attempt", "attempt = %(attempt)s AND "),
        ("any worker", "claimed_by = %(claimed_by)s AND "),
        ("any status", " AND status = 'running'\n", "\n"),
    )


# No test can step in between two statements of a function that wait for nothing. Were it missing, a row that has just
# left the queue would get a mark or a time that mean nothing there.
WITHIN = "a row would have to leave within the microseconds between the look and the lock, and no harm would come of it"
COSTS = "the function finds that there is nothing to do; the condition saves the call"
LOCK = "FOR NO KEY UPDATE SKIP LOCKED"
WAIT = "FOR NO KEY UPDATE"
STEP_BEGINS = "  p_queue text, p_worker text, p_backend_start timestamptz, p_backoff_sec float8, p_most int,"

MUTANTS: list[Mutant] = [
    *_statement(
        "enqueue",
        ("not counted as journaled", "THEN 'time' END, 2,", "THEN 'time' END, 0,"),
        ("all of a transaction at one time", "clock_timestamp()", "now()"),
        ("starts future jobs", "CASE WHEN %(available_at)s::timestamptz > now() THEN 'time' END", "NULL"),
        ("tells nobody", "SELECT pg_notify('dl_jobs', queue) FROM added", "SELECT queue FROM added"),
        ("into a full queue", "dl_is_full(%(queue)s)", "false"),
        ("limits whoever did not ask", "%(limited)s AND "),
        ("fails on a twin", "ON CONFLICT (idempotency_key) DO NOTHING\n"),
    ),
    *_statement(
        "request_cancel",
        ("any status", "status = 'running'\n         AND (NOT", "status <> 'queued'\n         AND (NOT"),
        ("not of a queued job", "(status = 'queued' OR status", "(status"),
        ("asks twice", "NOT cancel_requested OR %(force)s AND NOT cancel_forced", "true"),
        ("cannot force later", " OR %(force)s AND NOT cancel_forced"),
        ("forces twice", "%(force)s AND NOT cancel_forced", "%(force)s"),
        ("forgets an earlier force", "cancel_forced OR %(force)s", "%(force)s"),
        (
            "leaves a queued job queued",
            "CASE status WHEN 'queued' THEN 'canceled' ELSE status END,\n         f",
            "status, f",
        ),
        ("no word to a running job", "SELECT pg_notify('dl_cancel', job_id::text)", "SELECT NULL"),
        ("word of a queued job", "FROM asked WHERE status = 'running'", "FROM asked"),
        ("not counted as journaled", "journaled = journaled + 1", "journaled = journaled"),
        ("locks in no order", "ORDER BY job_id FOR NO KEY UPDATE", "FOR NO KEY UPDATE"),
    ),
    *(mutant for name in ("beat", "keep", "leap") for mutant in _of_the_claim(name)),
    *_statement(
        "leap",
        ("no farther than the fence", "greatest(claims, %(fence)s) + 1", "greatest(claims, %(fence)s)"),
        ("backwards", "greatest(claims, %(fence)s)", "%(fence)s"),
    ),
    *_statement(
        "keep",
        ("revives a lease", "   AND lease_expires_at > now()"),
        ("does not say that it was begun", "coalesce(heartbeat_at, now())", "heartbeat_at"),
    ),
    *_statement("beat", ("journals every renewal", " WHERE %(journal)s")),
    *_statement(
        "cancellations",
        ("any status", "status = 'running' AND "),
        ("not asked", " AND cancel_requested"),
    ),
    *_statement(
        "take_back",
        ("any run", " AND begun.claimed_by = %(worker)s"),
        ("another worker's", " AND j.claimed_by = %(worker)s"),
        ("what has run", "j.job_id) > (begun", "j.job_id) <> (begun"),
    ),
    *_statement("reap", ("a row of nulls", " WHERE job_id IS NOT NULL")),
    *_function(
        "dl_is_running",
        ("any status", "status = 'running' AND "),
        ("a lease that is over", " AND lease_expires_at > now()"),
    ),
    *_function(
        "dl_end_session",
        ("its own session", "p_pid <> pg_backend_pid()\n     AND ", ""),
        ("any backend of that number", " WHERE backend_start = p_backend_start"),
        ("does not wait", "pg_terminate_backend(p_pid, 2000)", "pg_terminate_backend(p_pid)"),
        ("another role's session is an error", "EXCEPTION WHEN insufficient_privilege THEN\n  NULL;\n"),
    ),
    *_function(
        "dl_wake",
        ("every queue", "queue = p_queue AND "),
        ("any status", "status = 'queued' AND "),
        ("not blocked", "blocked_on = 'time' AND "),
        ("too early", " AND available_at <= now()"),
        ("waits for a locked row", LOCK, WAIT),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', p_queue)", "NULL"),
        ("tells of nothing", "IF woken > 0", "IF true"),
    ),
    *_function(
        "dl_park",
        ("behind what does not run", "status = 'running' AND hashtext(lock_key) = ANY", "hashtext(lock_key) = ANY"),
        ("behind a lease that is over", " AND lease_expires_at > now()"),
        ("behind a run that may be over", "\n       FOR SHARE SKIP LOCKED", ""),
        ("waits for a running row", "FOR SHARE SKIP LOCKED", "FOR SHARE"),
        ("holds it against its key's readers", "FOR SHARE SKIP LOCKED", "FOR UPDATE SKIP LOCKED"),
        ("rows of every queue", "queue = p_queue AND "),
        ("rows of every key", "WHERE key_hash = ANY (held)", "WHERE true"),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f"\n         {LOCK}"),
        ("a row that has left", "\n         AND status::text = 'queued' AND blocked_on IS NULL\n", "\n", WITHIN),
        ("all rows", "LIMIT p_rows", "", "a claim parks what it has passed; more would be parked by the next one"),
    ),
    *_body(
        "FUNCTION dl_unpark(p_key_hashes",
        (
            "plans as on a short table",
            "SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off ",
            "",
            "on tables of 0, 10 and 600 rows the planner chose the same without it; it may not always",
        ),
        ("of one queue only", "queue > place.queue", "false"),
        (
            "the last of a key",
            "queue, priority, created_at LIMIT 1) near",
            "queue, priority DESC, created_at DESC LIMIT 1) near",
        ),
        ("waits for a locked row", LOCK, WAIT),
        ("forgets a key whose rows are locked", "INSERT INTO %1$I.dl_freed (key_hash) VALUES (this.key_hash)", "NULL"),
        ("a row of its own for each", "ELSIF NOT EXISTS (SELECT", "ELSIF true OR EXISTS (SELECT"),
        ("trusts a row that is about to go", " FOR SHARE SKIP LOCKED) THEN", ") THEN"),
        ("trusts an old snapshot", "current_setting('transaction_isolation') <> 'read committed'", "false"),
        ("no word of an old snapshot", "PERFORM pg_notify('dl_jobs', queue) FROM", "PERFORM queue FROM"),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', this.queue)", "NULL"),
    ),
    *_function(
        "dl_unpark_stranded",
        ("never goes on", "p_after := this", "NULL"),
        ("though a run goes on", "IF NOT EXISTS (SELECT", "IF true OR EXISTS (SELECT"),
        ("leaves them", "PERFORM dl_unpark(ARRAY[this])", "NULL"),
    ),
    *_function(
        "dl_unpark_freed",
        ("at once again", "WHERE since < clock_timestamp() - interval '1 s' LIMIT", "LIMIT"),
        ("waits for another's try", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
        ("forgets them", "PERFORM dl_unpark(freed)", "NULL"),
    ),
    *_function(
        "dl_set_aside",
        ("leaves a canceled row", "WHEN cancel_requested THEN 'canceled'", "WHEN false THEN 'canceled'"),
        ("leaves a spent one", "WHEN attempt >= greatest(max_attempts, 1) THEN 'lost'", "WHEN false THEN 'lost'"),
        ("no run for max_attempts 0", "greatest(max_attempts, 1)", "max_attempts"),
        ("leaves one before its time", "WHEN available_at > clock_timestamp() THEN", "WHEN false THEN"),
        ("any status", " AND status::text = 'queued' FOR", " FOR", WITHIN),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f" {LOCK}"),
        ("a row that may start", " AND becomes IS NOT NULL"),
        ("an end not counted as journaled", "WHEN 'queued' THEN 0 ELSE 1 END", "WHEN 'queued' THEN 0 ELSE 0 END"),
        ("an end of every row in the journal", "\n     WHERE becomes <> 'queued')", ")"),
        (
            "an end without a time",
            "CASE WHEN becomes <> 'queued' THEN now() END",
            "NULL",
            "the trigger sets it at the commit",
        ),
    ),
    *_function(
        "dl_put_off",
        ("no patience", "ARRAY[0, 0.001, 0.005, 0.025]", "ARRAY[0]"),
        (
            "what is free too",
            "NOT (SELECT CASE WHEN pg_try_advisory_lock(k) THEN pg_advisory_unlock(k) ELSE false END)\n"
            "                        AND",
        ),
        ("keeps what it gets", "THEN pg_advisory_unlock(k)", "THEN true"),
        ("what runs too", " AND NOT dl_is_running(k)", ""),
        (
            "no word of what has become free",
            "      RETURN NULL;\n",
            "      NULL;\n",
            "the claim looks once more in any case, and then comes back after 0.1 s",
        ),
        ("every queue", "\n           AND queue = p_queue"),
        (
            "ready rows only",
            "(blocked_on IS NULL OR blocked_on = 'key') AND hashtext",
            "blocked_on IS NULL AND hashtext",
        ),
        (
            "a row that has left",
            "\n       AND status::text = 'queued' AND blocked_on IS DISTINCT FROM 'time' FOR",
            " FOR",
            WITHIN,
        ),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f" {LOCK}"),
        ("not longer each time", "backoffs = refusals.number + 1", "backoffs = refusals.number"),
        ("each row for another time", "max(backoffs) OVER (PARTITION BY key_hash)", "backoffs"),
        ("by the refusals of any key", "OVER (PARTITION BY key_hash)", "OVER ()"),
        (
            "no bound of the back-off",
            "least(p_most_sec, 0.1 * 2.0 ^ least(refusals.number, 20))",
            "0.1 * 2.0 ^ least(refusals.number, 20)",
        ),
        ("a line for each row", "SELECT DISTINCT ON (key_hash) job_id", "SELECT job_id"),
    ),
    *_function(
        "dl_is_taken",
        ("waits for a locked row", LOCK, WAIT),
        ("no look at the row", "RETURN NOT FOUND OR ", "RETURN "),
        (
            "no look at the running rows",
            " OR dl_is_running(p_key_hash)",
            "",
            "the start looks too; this look saves a round for each such key",
        ),
    ),
    *_function(
        "dl_take_keys",
        ("no key", "NOT pg_try_advisory_lock(near.key_hash)", "false"),
        ("keeps the key of what is taken", "PERFORM pg_advisory_unlock(near.key_hash)", "NULL"),
        ("a key twice", "near.key_hash <> ALL (mine) AND ", ""),
        ("a later job of a refused key", " AND near.key_hash <> ALL (others) THEN", " THEN"),
        (
            "a later job of a passed key",
            "others := p_passed;",
            "others := '{}';",
            "the key's first row is locked, so the start refuses it; the list saves a round for each row of the key",
        ),
        ("a canceled row", "cancel_requested OR attempt", "attempt"),
        ("a spent one", " OR attempt >= greatest(max_attempts, 1)"),
        ("no run for max_attempts 0", "greatest(max_attempts, 1)", "max_attempts"),
        ("one before its time", " OR available_at > clock_timestamp()"),
        ("rows of other queues", "queue = p_queue AND "),
        ("rows that wait", " AND blocked_on IS NULL"),
        ("few candidates", "LIMIT 1000 + p_most OFFSET", "LIMIT p_most OFFSET"),
        ("does not look behind", " OFFSET p_past\n", "\n"),
        ("more than asked for", "more := cardinality(mine) = p_most OR ", "more := "),
        ("reads on for a few keys more", "behind * cardinality(mine) > 500", "false"),
        ("no look at locked rows", "p_looks AND dl_is_taken(near.at, near.key_hash)", "false"),
        ("takes every key", "spared := (cardinality(mine) + 8) / 16", "spared := 0"),
        (
            "keeps the keys that it leaves",
            "PERFORM pg_advisory_unlock(k) FROM unnest(mine[",
            "PERFORM k FROM unnest(mine[",
        ),
        ("leaves keys that nobody waits behind", "IF behind > 0 THEN", "IF true THEN"),
        ("no word of what is behind", "more := more OR rows = 1000 + p_most", "more := more"),
    ),
    *_body(
        "FUNCTION dl_finish(\n  p_worker text, p_let_go boolean, p_job_id",
        ("any attempt", "WHERE j.ctid = e.at AND j.attempt = e.attempt", "WHERE j.ctid = e.at"),
        (
            "any worker",
            "e.attempt AND claimed_by = p_worker AND status::text = 'running'\n      RETURNING",
            "e.attempt AND status::text = 'running'\n      RETURNING",
        ),
        ("any status", " AND status::text = 'running'\n      RETURNING", "\n      RETURNING"),
        ("waits for a locked row", f"e.job_id {LOCK}", f"e.job_id {WAIT}"),
        ("no patience", "ARRAY[0.001, 0.005, 0.025, 0]", "ARRAY[0]"),
        (
            "tries again what is ended",
            "\n       WHERE e.job_id <> ALL (ended)),",
            "),",
            "an ended row is nobody's any more: it would be read once more, and left alone",
        ),
        ("calls locked what it has written since", "    locked := NULL;\n"),
        ("no word of a locked row", "FILTER (WHERE is_ours),", "FILTER (WHERE false),"),
        ("calls a lost one locked", "AND claimed_by = p_worker\n                                 AND", "AND"),
        ("no word of what is not ours", "FILTER (WHERE is_ours IS NULL)", "FILTER (WHERE false)"),
        (
            "no word of a cancellation",
            "FILTER (WHERE status = 'canceled' AND verb <> 'cancel')",
            "FILTER (WHERE false)",
        ),
        ("forgets the cancellation", "status = CASE WHEN cancel_requested", "status = CASE WHEN false"),
        ("not counted as journaled", "journaled = journaled + 1", "journaled = journaled"),
        ("counts a hand-back", "j.attempt - 1 ELSE", "j.attempt ELSE"),
        (
            "a retry is due at once",
            "AND coalesce(delay_sec, dl_retry_delay(j.attempt)) > 0 THEN 'time'",
            "AND false THEN 'time'",
        ),
        ("a retry at once waits", "AND coalesce(delay_sec, dl_retry_delay(j.attempt)) > 0 THEN 'time'", "THEN 'time'"),
        ("a canceled one waits", "WHEN verb = 'retry' AND NOT cancel_requested\n", "WHEN verb = 'retry'\n"),
        (
            "no delay of its own",
            "make_interval(secs => coalesce(delay_sec, dl_retry_delay(j.attempt)))",
            "make_interval(secs => coalesce(delay_sec, 0))",
        ),
        ("keeps the lease", "lease_expires_at = NULL", "lease_expires_at = lease_expires_at"),
        ("forgets its progress", "coalesce(e.progress::jsonb, j.progress)", "e.progress::jsonb"),
        ("tells nobody of what comes back", "PERFORM pg_notify('dl_jobs', queue) FROM", "PERFORM queue FROM"),
        ("tells of every end", "FILTER (WHERE status = 'queued')", "FILTER (WHERE true)"),
        ("keeps the keys", "PERFORM pg_advisory_unlock_all()", "NULL"),
        ("keeps its key", "PERFORM pg_advisory_unlock(key_hash) FROM", "PERFORM key_hash FROM"),
        ("lets go of all keys", "IF p_let_go", "IF true"),
        ("takes the key of the next run", "WHERE status = 'running' AND hashtext(lock_key) = key_hash", "WHERE false"),
        ("makes nobody ready", "PERFORM dl_unpark(key_hashes)", "NULL"),
        (
            "looks for parked rows though there are none",
            "IF (SELECT true FROM dl_jobs",
            "IF true OR (SELECT true FROM dl_jobs",
            "it saves the call",
        ),
    ),
    *_function(
        "dl_retry_delay",
        ("without end", "least(30.0 * p_attempt, 86400)", "30.0 * p_attempt"),
    ),
    *_body(
        "FUNCTION dl_finish(\n  p_worker text, p_ends json, p_let_go boolean, p_waits",
        ("never waits", "IF p_waits THEN", "IF false THEN"),
        (
            "waits in no order",
            "ORDER BY job_id FOR NO KEY UPDATE",
            "FOR NO KEY UPDATE",
            "a worker's session finds rows by their ids in this order, for it has no plan but the index",
        ),
    ),
    *_body(
        "FUNCTION dl_finish(\n  p_worker text, p_ends json, p_let_go boolean, OUT",
        ("of before does not wait", "p_let_go, true)", "p_let_go, false)"),
    ),
    *_body(
        f"FUNCTION dl_step(\n{STEP_BEGINS} p_ends json)",
        ("of before does not wait", "p_ends, true)", "p_ends, false)"),
    ),
    *_body(
        f"FUNCTION dl_step(\n{STEP_BEGINS}\n  p_priority int",
        ("holds on to keys when nothing has ended", "PERFORM pg_advisory_unlock_all();\n  ELSIF", "NULL;\n  ELSIF"),
        ("a paused queue too", "(SELECT paused_at FROM dl_queues WHERE queue = p_queue) IS NULL", "true"),
        ("wakes nobody", "dl_wake(p_queue, 100) = 100", "false"),
        ("no word of more due rows", "look_again := dl_wake(p_queue, 100) = 100", "PERFORM dl_wake(p_queue, 100)"),
        ("forgets the freed keys", "PERFORM dl_unpark_freed()", "NULL"),
        ("never looks at the rows themselves", "    looks := true;\n", ""),
        ("back-offs go on after a start", "backoffs = 0,", "backoffs = backoffs,"),
        ("no token", "claims = claims + 1", "claims = claims"),
        ("not counted as journaled", "               journaled = journaled + 1,", ""),
        (
            "the last of a key",
            "queue, priority, created_at LIMIT 1)\n",
            "queue, priority DESC, created_at DESC LIMIT 1)\n",
        ),
        (
            "no parked rows",
            "(blocked_on IS NULL OR blocked_on = 'key')\n                            AND hashtext(lock_key) = key_hash",
            "blocked_on IS NULL\n                            AND hashtext(lock_key) = key_hash",
        ),
        ("any key", "AND hashtext(lock_key) = key_hash AND queue = p_queue", "AND queue = p_queue"),
        ("any queue", "AND hashtext(lock_key) = key_hash AND queue = p_queue", "AND hashtext(lock_key) = key_hash"),
        ("no look at the running rows", "AND lease_expires_at > now() LIMIT 1) IS NULL", "AND false LIMIT 1) IS NULL"),
        (
            "a lease that is over",
            "\n                            AND lease_expires_at > now() LIMIT 1) IS NULL",
            " LIMIT 1) IS NULL",
        ),
        ("any status", "status::text = 'queued' AND blocked_on IS DISTINCT", "blocked_on IS DISTINCT", WITHIN),
        ("a row that waits for its time", " AND blocked_on IS DISTINCT FROM 'time'", "", WITHIN),
        ("too early", " AND available_at <= at_once\n           AND NOT", "\n           AND NOT"),
        (
            "a canceled row",
            "NOT cancel_requested AND attempt < greatest(max_attempts, 1)\n           FOR",
            "attempt < greatest(max_attempts, 1)\n           FOR",
        ),
        ("spent attempts", " AND attempt < greatest(max_attempts, 1)\n           FOR", "\n           FOR"),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f"\n           {LOCK}"),
        (
            "what is claimed ahead looks begun",
            "CASE WHEN job_id = (SELECT free_id FROM free ORDER BY priority, created_at, free_id LIMIT 1)\n"
            "                                   THEN at_once END",
            "at_once",
        ),
        (
            "what is begun looks claimed ahead",
            "FROM free ORDER BY priority, created_at, free_id LIMIT 1",
            "FROM free ORDER BY priority DESC, created_at DESC LIMIT 1",
        ),
        (
            "journaled at the claim's begin",
            "SELECT job_id, p_queue, at_once, 'picked'",
            "SELECT job_id, p_queue, now(), 'picked'",
        ),
        ("keeps the key of a row that did not start", "IF started < cardinality(took.mine)", "IF false"),
        (
            "lets go of the keys of those that did",
            "AND claimed_by = p_worker AND claimed_pid",
            "AND claimed_by = 'nobody' AND claimed_pid",
        ),
        (
            "keeps the key of an earlier run",
            "AND lease_expires_at = at_once + make_interval(secs => lease_ttl_sec)));",
            "));",
        ),
        ("leaves what may not start", "off := dl_set_aside(took.odd)", "off := 0"),
        ("leaves after it has set rows aside", "      CONTINUE WHEN off > 0 AND started = 0;\n"),
        ("no bookmark", "IF started > 0 AND looks AND past + took.rows - started > 64", "IF false"),
        ("a bookmark behind few rows", "past + took.rows - started > 64 THEN", "true THEN"),
        (
            "parks beside no start",
            "EXIT WHEN started > 0 AND took.rows - started < 2 * p_most + 64",
            "EXIT WHEN started > 0",
        ),
        (
            "parks beside every start",
            "EXIT WHEN started > 0 AND took.rows - started < 2 * p_most + 64",
            "EXIT WHEN false",
        ),
        (
            "never again from the head",
            "EXIT WHEN (p_priority, p_from) = (0, '-infinity');\n      p_priority",
            "EXIT;\n      p_priority",
        ),
        ("parks nothing", "parked := dl_park(p_queue, busy, p_priority, p_from, past + took.rows)", "parked := 0"),
        ("leaves after it has parked", "    CONTINUE WHEN parked > 0;\n"),
        (
            "puts nothing off",
            "off := dl_put_off(p_queue, busy, p_backoff_sec)",
            "off := 0",
        ),
        ("leaves after it has put off", "    CONTINUE WHEN off IS NULL OR off > 0;\n"),
        ("no second look", "IF NOT looked_twice", "IF false"),
        (
            "looks no further than locked rows",
            "EXIT WHEN NOT took.more AND (p_priority, p_from) = (0, '-infinity')",
            "EXIT",
        ),
        ("forgets the keys that it has passed", "    passed := busy;\n"),
        ("no word of a time", "extract(epoch FROM next.at - clock_timestamp())", "NULL::float8"),
        (
            "no word of locked rows",
            "CASE WHEN past > 0 THEN least(1, greatest(0.1, past / 1000.0)) END",
            "NULL::float8",
        ),
        ("comes back at once to many locked rows", "least(1, greatest(0.1, past / 1000.0))", "0.1"),
        ("no word of freed keys", "is_freed OR is_late", "is_late"),
        ("no word of locked due rows", "is_freed OR is_late", "is_freed"),
    ),
    *_function(
        "dl_give_back",
        (
            "forgets the cancellation",
            "CASE WHEN job.cancel_requested THEN 'canceled'\n                     WHEN",
            "CASE WHEN",
        ),
        ("for ever", "job.attempt < job.max_attempts OR p_end = 'drain'", "true"),
        ("a drain may end it", " OR p_end = 'drain' THEN 'queued'", " THEN 'queued'"),
        ("what comes back at once waits", "job.status = 'queued' AND delay_sec > 0 THEN", "job.status = 'queued' THEN"),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', job.queue)", "NULL"),
        ("a drain counts", "job.attempt := greatest(job.attempt - 1, 0)", "NULL"),
        ("not counted as journaled", "journaled = journaled + 1", "journaled = journaled"),
        ("keeps the lease", "lease_expires_at = NULL", "lease_expires_at = lease_expires_at"),
        ("makes nobody ready", "PERFORM dl_unpark(ARRAY[hashtext(job.lock_key)])", "NULL"),
    ),
    *_body(
        "FUNCTION dl_settle(p_worker text, p_running",
        ("any status", "status = 'running' AND claimed_by", "claimed_by", "looked at again under the lock"),
        ("any worker", " AND claimed_by = p_worker LOOP", " LOOP", "looked at again under the lock"),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f" {LOCK}"),
        ("no second look at the status", "held.status <> 'running' OR ", ""),
        ("no second look at the worker", " OR held.claimed_by IS DISTINCT FROM p_worker"),
        ("leaves the session", "PERFORM dl_end_session(held.claimed_pid, held.claimed_backend_start)", "NULL"),
        ("what was not begun counts", "IF claimed <> p_running", "IF false"),
        ("what ran does not count", "IF claimed <> p_running", "IF true"),
        ("hides a locked row", "    RETURN NEXT;", "    IF FOUND THEN RETURN NEXT; END IF;"),
    ),
    *_body(
        "FUNCTION dl_reap(\n",
        ("no patience", "p_up_sec > p_patience_sec + lease_ttl_sec / 3.0", "true"),
        ("no time for a heartbeat", " + lease_ttl_sec / 3.0", ""),
        ("patience for ever", "p_up_sec > p_patience_sec + lease_ttl_sec / 3.0", "false"),
        ("patience with the silent", "heartbeat_at, created_at) >= back", "heartbeat_at, created_at) >= 'infinity'"),
        (
            "no look at the keeper's renewals",
            "greatest(lease_expires_at - make_interval(secs => lease_ttl_sec), ",
            "greatest(",
        ),
        ("no look at heartbeats", ", heartbeat_at, created_at)", ", created_at)"),
        ("no look at the start", ", heartbeat_at, created_at)", ", heartbeat_at)"),
        ("any status", "status = 'running'\n     AND ", ""),
        (
            "a live lease",
            "make_interval(secs => lease_ttl_sec)) < now()",
            "make_interval(secs => lease_ttl_sec)) < 'infinity'",
        ),
        (
            "not without a lease",
            "coalesce(lease_expires_at,\n                  coalesce(heartbeat_at, started_at, created_at)"
            " + make_interval(secs => lease_ttl_sec))",
            "lease_expires_at",
        ),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f" {LOCK}"),
        ("leaves the session", "PERFORM dl_end_session(held.claimed_pid, held.claimed_backend_start)", "NULL"),
        ("counts what was not begun", "IF held.heartbeat_at IS NULL", "IF false"),
        ("another service's run as not begun", " AND held.claimed_by IS NOT NULL"),
        ("not begun for ever", "payload ->> 'reason' = not_begun", "false"),
    ),
    *_function(
        "dl_retake",
        ("any attempt", "attempt = p_attempt AND "),
        ("any worker", "claimed_by = p_worker AND "),
        ("any status", " AND status = 'running'\n     FOR", "\n     FOR"),
        ("no row lock", "\n     FOR NO KEY UPDATE"),
        ("leaves the old session", "PERFORM dl_end_session(held.claimed_pid, held.claimed_backend_start)", "NULL"),
        ("no key", "IF NOT pg_try_advisory_lock(hashtext(held.lock_key))", "IF false"),
        ("no look at the running rows", "IF EXISTS (", "IF false AND EXISTS ("),
        ("a lease that is over", "lease_expires_at > now() AND "),
        ("is in its own way", " AND job_id <> p_job_id"),
        ("keeps a refused key", "PERFORM pg_advisory_unlock(hashtext(held.lock_key))", "NULL"),
        (
            "believes that the old session has it",
            "IF NOT dl_session_has_key(held.claimed_pid, held.claimed_backend_start, hashtext(held.lock_key))",
            "IF false",
        ),
    ),
    *_function(
        "dl_session_has_key",
        (
            "any key",
            "AND classid::bigint = (p_key_hash >> 32) & 4294967295 AND objid::bigint = p_key_hash & 4294967295",
        ),
        ("any session", "AND pid = p_pid "),
    ),
    *_in(
        TARGET,
        "-- name: raise\n",
        (
            "lowers the fence",
            "f.claim < excluded.claim OR f.claim = excluded.claim",
            "true OR f.claim = excluded.claim",
        ),
        ("once a claim", " OR f.claim = excluded.claim AND f.owner = excluded.owner AND f.owned_at = f.raised_at"),
        ("anybody's of the same number", " AND f.owner = excluded.owner AND f.owned_at = f.raised_at"),
        ("any number of its own", "f.claim = excluded.claim AND f.owner", "f.owner"),
        ("an owner of before", " AND f.owned_at = f.raised_at"),
        ("keeps the owner", "owner = excluded.owner, owned_at = now()", "owned_at = now()"),
        ("forgets that it is the owner", "owner = excluded.owner, owned_at = now()", "owner = excluded.owner"),
    ),
    *_in(
        TARGET,
        "-- name: end_older\n",
        ("its own sessions too", "::bigint < %(claim)s", "::bigint <= %(claim)s"),
        ("leaves them", "pg_terminate_backend(pid, 2000)", "NULL"),
        ("does not wait", "pg_terminate_backend(pid, 2000)", "pg_terminate_backend(pid)"),
        ("another role's are an error", "usename = current_user AND "),
    ),
    *_in(
        TARGET,
        "-- name: hold\n",
        ("any claim", " AND claim = %(claim)s"),
        ("any job", "job_id = %(job_id)s AND "),
        (
            "any owner",
            " AND owner = %(owner)s",
            "",
            "raise lets no other owner have the fence at this number",
        ),
        ("an owner of before", " AND owned_at = raised_at"),
        ("no row lock", " FOR SHARE"),
        (
            "a stopped commit holds for ever",
            ", set_config('idle_in_transaction_session_timeout', '5s', true)",
            ", NULL",
        ),
    ),
    *_in(
        TARGET,
        "-- name: forget\n",
        ("young ones", " WHERE raised_at < now() - interval '30 days'"),
        ("waits for a locked row", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    ),
    *_body(
        "CREATE OR REPLACE FUNCTION dl_jobs_place()",
        ("blocks rows of any status", "CASE WHEN NEW.status = 'queued' AND ", "CASE WHEN "),
        ("blocks nothing", "NEW.status = 'queued' AND NEW.available_at > now()", "false"),
        ("no time of an end", "coalesce(NEW.finished_at, now())", "NEW.finished_at"),
        ("another time of an end", "coalesce(NEW.finished_at, now())", "now()"),
        ("an end for every row", "IF NEW.status NOT IN ('queued', 'running') THEN", "IF true THEN"),
    ),
    *_body(
        "FUNCTION dl_jobs_step()",
        ("on any table", "IF TG_RELID <> %2$L::regclass", "IF false"),
        ("with the caller's rights", "LANGUAGE plpgsql SECURITY DEFINER", "LANGUAGE plpgsql"),
        ("keeps the plan of a short table", " SET enable_seqscan = off"),
        ("no fresh budget", "CASE WHEN is_back AND j.attempt = OLD.attempt THEN 0 ELSE j.attempt END", "j.attempt"),
        ("a fresh budget whatever is said", "WHEN is_back AND j.attempt = OLD.attempt THEN 0", "WHEN is_back THEN 0"),
        (
            "a fresh budget for those that ran",
            "OLD.status NOT IN ('queued', 'running');",
            "OLD.status NOT IN ('queued');",
        ),
        ("stays cancelled", " AND NOT (is_back AND OLD.cancel_requested)"),
        ("never cancelled when it comes back", "(is_back AND OLD.cancel_requested)", "is_back"),
        ("stays forced", " AND NOT is_back,", ","),
        ("blocks ended rows", "CASE WHEN status <> 'queued' THEN NULL\n", "CASE WHEN false THEN NULL\n"),
        ("no look at the time", "WHEN available_at > now() THEN 'time'", "WHEN false THEN 'time'"),
        ("waits on though its time has come", "WHEN blocked_on = 'time' OR blocked_on", "WHEN blocked_on"),
        ("parked where it has moved", " OR blocked_on = 'key' AND has_moved"),
        ("ready wherever it stands", "blocked_on = 'key' AND has_moved", "blocked_on = 'key'"),
        (
            "forgets other reasons",
            "                                  ELSE blocked_on END",
            "                                  ELSE NULL END",
        ),
        ("another queue is no move", "NEW.queue <> OLD.queue OR ", ""),
        ("another key is no move", " OR NEW.lock_key <> OLD.lock_key"),
        ("keeps the claim's name", "OR j.status <> 'running' AND j.claimed_by IS NOT NULL\n", ""),
        ("no time of an end", "coalesce(j.finished_at, now())", "j.finished_at"),
        ("another time of an end", "coalesce(j.finished_at, now())", "now()"),
        (
            "leaves an end without a time",
            "\n          OR j.status NOT IN ('queued', 'running') AND j.finished_at IS NULL",
            "",
        ),
        ("no time of an end that came back", "CASE WHEN NOT is_back THEN j.finished_at END", "j.finished_at"),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', NEW.queue)", "NULL"),
        ("tells of every row", "IF NEW.status = 'queued' THEN", "IF true THEN"),
        ("journals what is no step", "NEW.status <> OLD.status AND NEW.journaled", "NEW.journaled"),
        (
            "our own steps too",
            " AND NEW.journaled = OLD.journaled",
            "",
            "the function finds our row, of the same transaction, and adds none",
        ),
        (
            "a deleted job",
            "FROM %1$I.dl_jobs WHERE job_id = NEW.job_id  --",
            "FROM (SELECT NEW.job_id job_id, '' queue) j WHERE true  --",
        ),
        ("repeats what a service told", "AND NOT EXISTS (", "AND true OR false AND EXISTS ("),
        ("no look at the instant", "e.ts = now() OR "),
        ("no look at the transaction", " OR e.xmin = pg_current_xact_id()::xid"),
        ("makes nobody ready", "PERFORM %1$I.dl_unpark(ARRAY[hashtext(OLD.lock_key)])", "NULL"),
        ("after a parked row too", "OLD.blocked_on IS NULL AND OLD.status", "OLD.status"),
        ("after a start", " AND (NEW.status <> 'running' OR has_moved) THEN", " THEN"),
        ("not after a run has moved", "(NEW.status <> 'running' OR has_moved)", "NEW.status <> 'running'"),
        ("after any step", "OLD.status IN ('queued', 'running') AND (NEW", "(NEW"),
    ),
    *_in(
        INSERTS,
        "TRIGGER dl_jobs_place_ins",
        ("not for code of before", "NEW.journaled <> 2", "NEW.journaled NOT IN (1, 2)"),
        ("not for copies", "NEW.journaled <> 2", "NEW.journaled < 2"),
        ("for our own inserts too", "NEW.journaled <> 2", "true", COSTS),
    ),
    *_in(
        INSERTS,
        "TRIGGER dl_jobs_notify_ins",
        ("not for code of before", "NEW.journaled <> 2", "NEW.journaled NOT IN (1, 2)"),
        ("not for copies", "NEW.journaled <> 2", "NEW.journaled < 2"),
        ("for our own inserts too", "NEW.journaled <> 2", "true", COSTS),
    ),
    *_body(
        "FUNCTION notify_job_ready()",
        ("tells of every row", "NEW.status = 'queued'", "true"),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', NEW.queue)", "NULL"),
    ),
    *_body(
        "FUNCTION dl_jobs_gone()",
        ("all journals", " WHERE job_id IN (SELECT job_id FROM gone)"),
        ("with the caller's rights", "LANGUAGE plpgsql SECURITY DEFINER", "LANGUAGE plpgsql"),
        ("on any table", "IF TG_RELID <> %2$L::regclass", "IF false"),
        ("makes nobody ready", "PERFORM %1$I.dl_unpark(", "PERFORM ("),
        ("after a run only", "status = 'running' OR status = 'queued' AND blocked_on IS NULL", "status = 'running'"),
        ("after a ready row only", "status = 'running' OR status", "status"),
        ("after a parked row too", " AND blocked_on IS NULL"),
    ),
    *_in(
        STEP,
        "CREATE CONSTRAINT TRIGGER dl_jobs_notify_upd",
        ("no look at the time", "OF status, available_at,", "OF status,"),
        ("no look at the status", "OF status, available_at", "OF available_at"),
        ("no look at the queue", "available_at, queue, lock_key", "available_at, lock_key"),
        ("no look at the key", ", queue, lock_key", ", queue"),
        ("at once", "\n  DEFERRABLE INITIALLY DEFERRED\n", "\n"),
        (
            "our own steps too",
            "WHEN (NEW.journaled = OLD.journaled OR NEW.claimed_by IS NOT DISTINCT FROM OLD.claimed_by)\n",
            "\n",
            COSTS,
        ),
        ("not an end that clears the claim", "NEW.journaled = OLD.journaled OR "),
        ("not an operator's step", " OR NEW.claimed_by IS NOT DISTINCT FROM OLD.claimed_by"),
    ),
    *_body(
        "FUNCTION dl_jobs_journal()",
        ("on any table", "IF TG_RELID <> %2$L::regclass", "IF false"),
        ("with the caller's rights", "LANGUAGE plpgsql SECURITY DEFINER", "LANGUAGE plpgsql"),
        ("a deleted job", "FROM %1$I.dl_jobs WHERE", "FROM (SELECT NEW.job_id job_id, '' queue) j WHERE"),
        ("repeats what a service told", "AND NOT EXISTS (", "AND true OR false AND EXISTS ("),
        ("keeps the plan of a short journal", " SET enable_seqscan = off"),
        ("no look at the instant", "e.ts = now() OR "),
        ("no look at the transaction", " OR e.xmin = pg_current_xact_id()::xid"),
    ),
    *_in(
        JOURNAL,
        "CREATE CONSTRAINT TRIGGER dl_jobs_journal_ins",
        ("our own inserts too", "WHEN (NEW.journaled = 0) ", ""),
    ),
    *_body(
        "FUNCTION dl_enqueue(",
        ("with the caller's rights", "SECURITY DEFINER"),
        ("with others' operators", "search_path = pg_catalog", "search_path = %1$I"),
    ),
    *_function(
        "dl_enqueue_one",
        ("with the caller's rights", "SECURITY DEFINER"),
        ("with others' operators", "search_path = pg_catalog", "search_path = %1$I"),
        ("all of a transaction at one time", "clock_timestamp(),\n", "now(),\n"),
        ("all of a transaction at one time, with keys", "clock_timestamp(), CASE", "now(), CASE"),
        ("starts future jobs", "CASE WHEN p_available_at > now() THEN 'time' END, 2);", "NULL, 2);"),
        ("starts future jobs with keys", "CASE WHEN p_available_at > now() THEN 'time' END, 2)\n", "NULL, 2)\n"),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', p_queue)", "NULL"),
        ("fails on a twin", "\n      ON CONFLICT (idempotency_key) DO NOTHING"),
    ),
    *_function(
        "dl_job_status",
        ("of any job", "session_user = (SELECT", "true OR session_user = (SELECT"),
        ("with the caller's rights", "SECURITY DEFINER"),
    ),
    *_function(
        "dl_set_trace",
        ("of any role's jobs", " AND e.payload ->> 'user' = session_user"),
        ("of any transaction's jobs", "e.ts = now() AND "),
        ("with the caller's rights", "SECURITY DEFINER"),
    ),
    *_in(
        RIGHTS,
        "-- name: producer\n",
        ("a producer says what runs", "INSERT ({columns})", "INSERT (status, {columns})"),
        ("a producer says what is journaled", "INSERT ({columns})", "INSERT (journaled, {columns})"),
    ),
    *_in(
        RIGHTS,
        "-- name: spread\n",
        ("functions are for everybody", "EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', all_functions);"),
        ("other services' ends fail", "EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO PUBLIC', harmless);"),
        ("nothing for producers", "IF role.adds", "IF false"),
        ("nothing for readers", "IF role.reads", "IF false"),
        ("nothing for farms", "IF role.claims", "IF false"),
        (
            "other services are farms",
            "is_ours AND bool_or(privilege_type = 'UPDATE'",
            "bool_or(privilege_type = 'UPDATE'",
        ),
    ),
    *_function(
        "dl_is_full",
        ("counts one more", ">= most", "> most"),
        ("counts all states", " AND status = 'queued' LIMIT", " LIMIT"),
        ("without a limit", "most IS NOT NULL\n     AND", "true AND"),
    ),
    *_function(
        "dl_journal_begins_anew",
        (
            "after a deletion",
            "coalesce(pg_sequence_last_value(sequence), 0)",
            "coalesce((SELECT max(event_id) FROM dl_job_events), 0)",
        ),
    ),
    *_function(
        "dl_roll",
        ("past a gap", "> 1\n                     AND ts", "> 1 AND false\n                     AND ts"),
        ("never past a gap", "AND ts > clock_timestamp() - interval '10 s'\n"),
        ("waits for the future", "\n                     AND ts < clock_timestamp() + interval '10 s' AS", " AS"),
        ("waits for numbers of before", "IF dl_journal_begins_anew(since) THEN", "IF false THEN"),
        ("stays where it was", "UPDATE dl_rolled SET last_event = coalesce", "PERFORM coalesce"),
        ("two at once", "FOR UPDATE SKIP LOCKED", ""),
        ("counts again", "UPDATE dl_rolled SET last_event = upto", "UPDATE dl_rolled SET last_event = since"),
        ("forgets the earlier", "count = t.count + excluded.count", "count = excluded.count"),
        ("any earlier start", "ORDER BY p.event_id DESC LIMIT 1", "ORDER BY p.event_id LIMIT 1"),
    ),
    *_in(
        OPERATE,
        "-- name: pause\n",
        ("a new time", "coalesce(q.paused_at, excluded.paused_at)", "excluded.paused_at"),
        ("a new author", "coalesce(q.paused_by, excluded.paused_by)", "excluded.paused_by"),
    ),
    *_in(
        OPERATE,
        "-- name: resume\n",
        ("wakes nobody", "SELECT pg_notify('dl_jobs', queue)", "SELECT NULL"),
        ("wakes for nothing", " AND paused_at IS NOT NULL"),
    ),
    *_in(
        OPERATE,
        "-- name: requeue\n",
        ("what has not ended", "AND status IN ('succeeded', 'failed', 'canceled', 'lost')", ""),
        ("with spent attempts", "attempt = 0, error", "attempt = attempt, error"),
        ("locks in no order", "ORDER BY job_id FOR NO KEY UPDATE", "FOR NO KEY UPDATE"),
        (
            "not counted as journaled",
            "journaled = journaled + 1",
            "journaled = journaled",
            "the trigger finds our row, of the same transaction, and adds none",
        ),
    ),
    *_in(
        OPERATE,
        "-- name: run_now\n",
        ("what is not queued", " AND status = 'queued' AND (", " AND ("),
        ("locks in no order", "ORDER BY job_id FOR NO KEY UPDATE", "FOR NO KEY UPDATE"),
        (
            "not counted as journaled",
            "journaled = journaled + 1",
            "journaled = journaled",
            "the status stays, so no trigger looks at the count",
        ),
    ),
    *_in(
        OPERATE,
        "-- name: delete\n",
        ("what runs", " AND status <> 'running'"),
        ("locks in no order", "ORDER BY job_id FOR UPDATE", "FOR UPDATE"),
    ),
    *_in(
        OPERATE,
        "-- name: dead\n",
        ("of every queue", "queue = %(queue)s AND "),
        ("all that ended", "status IN ('failed', 'lost')", "finished_at IS NOT NULL"),
    ),
    *_in(OPERATE, "-- name: not_due\n", ("of every queue", "queue = %(queue)s AND ")),
]
