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
CLAIMS, JOURNAL, OWNERS, ENDS = (
    f"migrations/{name}.sql" for name in ("0002_claims", "0004_journal", "0014_owners_rights", "0015_ends")
)
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
        ("not counted as journaled", "clock_timestamp(), 1,", "clock_timestamp(), 0,"),
        ("all of a transaction at one time", "clock_timestamp(), 1,", "now(), 1,"),
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
    *_statement("reap", ("a row of nulls", " WHERE job_id IS NOT NULL")),
    *_function(
        "dl_slot_is_busy",
        ("any status", "status = 'running' AND "),
        ("a lease that is over", " AND lease_expires_at > now()"),
    ),
    *_function(
        "dl_take_slot",
        ("no lock", "pg_try_advisory_lock(p_slot)", "true"),
        ("no second look", "IF NOT dl_slot_is_busy(p_slot)", "IF true"),
        ("keeps a busy key_hash's lock", "PERFORM pg_advisory_unlock(p_slot)", "NULL"),
        ("no look at whose lock it is", "    END IF;\n    IF dl_slot_is_busy(p_slot)", "    END IF;\n    IF false"),
        ("no patience", "ARRAY[0.001, 0.005, 0.025, 0]", "ARRAY[0]"),
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
        ("any status", "status = 'queued' AND ", "", "the trigger blocks queued rows only; it names the index"),
        ("not blocked", "blocked_on = 'time' AND "),
        ("too early", " AND available_at <= now()"),
        ("waits for a locked row", LOCK, WAIT),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', p_queue)", "NULL"),
        ("tells of nothing", "IF woken > 0", "IF true"),
    ),
    *_function(
        "dl_near_of_slot",
        ("every key_hash's cold rows", "       WHERE hashtext(lock_key) = p_slot\n"),
        ("every key_hash's hot rows", " AND hot AND hashtext(lock_key) = p_slot", " AND hot"),
        ("waits for a locked row", LOCK, WAIT),
        ("a row that has left", "\n       AND status::text = 'queued' AND blocked_on IS NULL", "", WITHIN),
    ),
    *_function(
        "dl_try",
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f" {LOCK}"),
        ("any status", "job.status IS DISTINCT FROM 'queued' OR "),
        ("a blocked row", " OR job.blocked_on IS NOT NULL"),
        ("too early", "job.available_at > clock_timestamp()", "false"),
        ("a canceled row", "job.cancel_requested OR job.attempt", "job.attempt"),
        ("spent attempts", " OR job.attempt >= greatest(job.max_attempts, 1)"),
        ("no run for max_attempts 0", "greatest(job.max_attempts, 1)", "job.max_attempts"),
        ("no key", "outcome := dl_take_slot(hashtext(job.lock_key))", "outcome := 'taken'"),
        (
            "no mark on a busy row",
            "SET hot = true",
            "SET hot = hot",
            "the next look sees what the row waits for, and passes over it or marks it: the mark saves that look",
        ),
        ("no look for an older row", "IF outcome = 'taken' AND (", "IF false AND ("),
        ("keeps the older one's key", "    PERFORM pg_advisory_unlock(hashtext(job.lock_key));\n", ""),
        ("gives way to later rows", " AND (priority, created_at) < (job.priority, job.created_at)", ""),
        ("an end not counted as journaled", "journaled = journaled + 1, finished_at", "finished_at"),
        ("one row a refusal", "dl_near_of_slot(job.queue, hashtext(job.lock_key)) || job.job_id", "ARRAY[job.job_id]"),
        ("no bound of the back-off", "least(p_backoff_sec, 0.1 * 2.0 ^ least(backoffs, 20))", "0.1 * 2.0 ^ backoffs"),
    ),
    *_function(
        "dl_start",
        ("back-offs go on after a start", "backoffs = 0,", "backoffs = backoffs,"),
        ("no token", "claims = claims + 1", "claims = claims"),
        ("not counted as journaled", "           journaled = journaled + 1,\n", ""),
        ("any status", "status::text = 'queued' AND blocked_on", "blocked_on"),
        ("a blocked row", " AND blocked_on IS NULL", "", WITHIN),
        ("too early", "       AND available_at <= clock_timestamp() AND NOT", "       AND NOT"),
        ("a canceled row", " AND NOT cancel_requested", "", WITHIN),
        ("spent attempts", " AND attempt < greatest(max_attempts, 1)", "", WITHIN),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f"\n       {LOCK}"),
        (
            "what is claimed ahead looks begun",
            "CASE WHEN free_id = (SELECT free_id FROM free ORDER BY p, c, free_id LIMIT 1) THEN started END",
            "started",
        ),
        ("what is begun looks claimed ahead", "ORDER BY p, c, free_id LIMIT 1", "ORDER BY p DESC, c DESC LIMIT 1"),
    ),
    *_function(
        "dl_locked_ahead",
        ("of every queue", "FROM dl_jobs WHERE queue = p_queue AND", "FROM dl_jobs WHERE"),
        ("waits for a locked row", LOCK, WAIT),
        ("counts free rows too", "EXIT WHEN candidate = first_free;", ""),
        ("forgets the keys", "slots := slots || its_key_hash;", "NULL;"),
    ),
    *_function(
        "dl_take_keys",
        ("no key", "pg_try_advisory_lock(its_key_hash)", "true"),
        ("a key twice", "IF its_key_hash = ANY (slots) THEN", "IF false THEN"),
        ("a later job of a refused key", "ELSIF its_key_hash <> ALL (refused) THEN", "ELSE"),
        (
            "passes over a canceled row",
            "hashtext(lock_key), cancel_requested OR attempt",
            "hashtext(lock_key), attempt",
        ),
        (
            "passes over a canceled hot row",
            "job_id, key_hash, cancel_requested OR attempt",
            "job_id, key_hash, attempt",
        ),
        ("passes over a spent one", " OR attempt >= greatest(max_attempts, 1) FROM dl_jobs", " FROM dl_jobs"),
        ("passes over a spent hot one", " OR attempt >= greatest(max_attempts, 1) FROM (", " FROM ("),
        ("no run for max_attempts 0", "greatest(max_attempts, 1) FROM dl_jobs", "max_attempts FROM dl_jobs"),
        ("few candidates", "LIMIT 1000 + p_most OFFSET p_past;", "LIMIT 2 * p_most + 16 OFFSET p_past;"),
        ("does not look behind", "LIMIT 1000 + p_most OFFSET p_past;", "LIMIT 1000 + p_most;"),
        ("does not look behind, beside hot rows", "LIMIT 1000 + p_most OFFSET p_past)", "LIMIT 1000 + p_most)"),
        ("a later job of a passed key", "refused int[] := p_passed;", "refused int[] := '{}';"),
        ("reads on for a few keys more", "behind * cardinality(slots) > 500", "false", "it saves reading, no more"),
        ("takes every key", "spared := (cardinality(slots) + 8) / 16", "spared := 0"),
        (
            "keeps the keys that it leaves",
            "PERFORM pg_advisory_unlock(key_hash) FROM unnest(slots[",
            "PERFORM key_hash FROM unnest(slots[",
        ),
        ("leaves keys that nobody waits behind", "IF keys_are_few AND cardinality", "IF cardinality"),
        ("leaves keys though it has what it asked for", " AND cardinality(slots) < p_most", ""),
        ("no look behind the lock", "WHERE key_hash <> ALL (busy)", "WHERE true"),
        ("no look for an older row", "coalesce(older.job_id, taken.job_id)", "taken.job_id"),
        ("a later row instead", "WHERE (first.priority, first.created_at) < (chosen.priority, chosen.created_at)", ""),
        ("only when a key is busy", "IF has_hot OR cardinality", "IF cardinality"),
        ("a lease that is over", " AND lease_expires_at > now()),", "),"),
        ("any status", "WHERE status = 'running' AND ", "WHERE "),
        ("keeps a busy key_hash's lock", "PERFORM pg_advisory_unlock(key_hash) FROM unnest(busy) key_hash;", ""),
        ("no hot rows", "IF (SELECT true FROM dl_jobs", "IF (SELECT false FROM dl_jobs"),
        ("more than asked for", "EXIT WHEN cardinality(slots) = p_most;", ""),
    ),
    *_body(
        "FUNCTION dl_finish(\n  p_worker text, p_ends json, p_let_go boolean, p_waits",
        ("any attempt", "WHERE j.ctid = e.at AND j.attempt = e.attempt", "WHERE j.ctid = e.at"),
        (
            "any worker",
            "e.attempt AND claimed_by = p_worker AND status::text = 'running'\n",
            "e.attempt AND status::text = 'running'\n",
        ),
        ("waits for a locked row", f"e.job_id {LOCK}", f"e.job_id {WAIT}"),
        ("no patience", "ARRAY[0.001, 0.005, 0.025, 0]", "ARRAY[0]"),
        ("never waits", "IF p_waits THEN", "IF false THEN"),
        ("waits in no order", "ORDER BY job_id FOR NO KEY UPDATE", "FOR NO KEY UPDATE"),
        (
            "tries again what is ended",
            "\n       WHERE e.job_id <> ALL (ended)),",
            "),",
            "an ended row is nobody's any more: it would be read once more, and left alone",
        ),
        ("calls locked what it has written since", "    locked := NULL;\n"),
        ("no word of a locked row", "FILTER (WHERE is_ours),", "FILTER (WHERE false),"),
        ("calls a lost one locked", "AND claimed_by = p_worker\n                                 AND", "AND"),
        ("takes the key of the next run", "WHERE status = 'running' AND hashtext(lock_key) = key_hash", "WHERE false"),
        ("hides a retry at once", " OR verb = 'retry' AND delay_sec <= 0"),
        ("any status", " AND status::text = 'running'\n", "\n"),
        ("forgets the cancellation", "status = CASE WHEN cancel_requested", "status = CASE WHEN false"),
        ("not counted as journaled", "journaled = journaled + 1", "journaled = journaled"),
        ("counts a hand-back", "j.attempt - 1 ELSE", "j.attempt ELSE"),
        ("hides a hand-back", "hot = hot OR verb = 'hand_back'", "hot = hot"),
        ("keeps the lease", "lease_expires_at = NULL", "lease_expires_at = lease_expires_at"),
        ("keeps the keys", "PERFORM pg_advisory_unlock_all()", "NULL"),
        ("keeps its key", "PERFORM pg_advisory_unlock(key_hash) FROM", "PERFORM key_hash FROM"),
        ("lets go of all keys", "IF p_let_go", "IF true"),
        ("tells no waiters", "PERFORM dl_tell_waiters(key_hashes)", "NULL"),
        (
            "no word of what is not ours",
            "FILTER (WHERE is_ours IS NULL)",
            "FILTER (WHERE false)",
        ),
        (
            "no word of a cancellation",
            "FILTER (WHERE status = 'canceled' AND verb <> 'cancel')",
            "FILTER (WHERE false)",
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
    *_function(
        "dl_tell_waiters",
        ("any key", "hashtext(lock_key) = ANY (p_slots)", "true"),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', waiting)", "NULL"),
        ("rows of other queues too", "queue = waiting AND hashtext", "hashtext"),
    ),
    *_body(
        f"FUNCTION dl_step(\n{STEP_BEGINS} p_ends json,\n",
        ("looks no further than locked rows", "EXIT WHEN started > 0 OR past > 0;", "EXIT;"),
        ("holds on to keys when nothing has ended", "PERFORM pg_advisory_unlock_all();\n  ELSIF", "NULL;\n  ELSIF"),
        ("wakes nobody", "PERFORM dl_wake(p_queue, 100)", "NULL"),
        ("keeps the key of a row that did not start", "IF started < cardinality(taken.slots)", "IF false"),
        ("lets go of the keys of those that did", "AND claimed_by = p_worker);", "AND claimed_by = 'nobody');"),
        ("never looks more closely", "IF started = 0", "IF false"),
        ("never says to look again", "look_again := looked.look_again;", ""),
    ),
    *_function(
        "dl_claim",
        ("wakes nobody", "woken := dl_wake(p_queue, 100)", "NULL"),
        (
            "tries hot rows of busy keys",
            "= hashes.key_hash\n                     AND r.lease_expires_at > now() LIMIT 1) IS NULL)",
            "= hashes.key_hash AND false LIMIT 1) IS NULL)",
        ),
        (
            "waits behind a lock that is held on to",
            "IF marked = 0 AND cardinality(near) >= 1000 THEN",
            "IF false THEN",
        ),
        ("tells nobody of its marks", "IF marks THEN\n          PERFORM", "IF false THEN\n          PERFORM"),
        ("goes on with a refused key_hash", "        EXIT;  -- most", "        NULL;  -- most"),
        ("busy rows are no marks", "        marks := true;", "        NULL;"),
        ("passes a locked row of its key", "ELSIF tried.outcome IS NULL", "ELSIF false"),
        ("never looks again", "    look_again := changed;", "    look_again := false;"),
        ("leaves after a change", "    CONTINUE WHEN changed;\n"),
        ("marks wait for a locked row", f"(near) {LOCK}", f"(near) {WAIT}"),
        (
            "marks a row that has left",
            " AND status::text = 'queued' AND blocked_on IS NULL AND NOT hot\n",
            "\n",
            WITHIN,
        ),
        ("marks past a row that is being marked", "AND hashtext(lock_key) <> ALL (left_alone);", ";"),
        ("counts unmarked rows as marked", " AND left_alone = '{}'"),
        (
            "marks nothing",
            "UPDATE dl_jobs SET hot = true\n       WHERE",
            "UPDATE dl_jobs SET hot = true\n       WHERE false AND",
        ),
        ("marks are not told of", "marks := marks OR marked > 0;", "NULL;"),
        ("leaves after a thousand", "      look_again := true;\n      EXIT;", "      EXIT;"),
        (
            "gives up on its marks untold",
            "  IF marks THEN\n    PERFORM pg_notify",
            "  IF false THEN\n    PERFORM pg_notify",
        ),
        ("tells though nothing is free", "      marks := false;\n"),
        ("holds no running row", "           FOR SHARE OF r SKIP LOCKED"),
        ("waits for a running row", "FOR SHARE OF r SKIP LOCKED", "FOR SHARE OF r"),
        ("holds it against its key's readers", "FOR SHARE OF r SKIP LOCKED", "FOR UPDATE OF r SKIP LOCKED"),
        (
            "counts a lease that is over",
            " AND r.lease_expires_at > now()\n           FOR SHARE",
            "\n           FOR SHARE",
        ),
        (
            "counts rows that do not run",
            "r.status = 'running' AND hashtext(r.lock_key) = ANY",
            "hashtext(r.lock_key) = ANY",
        ),
        ("leaves without an account", "IF waiting <@ held AND", "IF"),
        ("no word of a contention", "contended := look = 10 OR", "contended := false AND"),
        (
            "looks again and again at many locked rows",
            "    EXIT WHEN contended AND look < 10;\n",
            "",
            "it saves looks that find the same; the last one leaves as this one does",
        ),
        ("looks no further than locked rows", "      EXIT WHEN contended;\n      CONTINUE;", "      EXIT;"),
        (
            "does not look behind them",
            "LIMIT 1000 OFFSET past) near\n         WHERE",
            "LIMIT 1000) near\n         WHERE",
        ),
        ("starts a later job of a passed key", "passed := past_key_hashes;", "passed := '{}';"),
        ("comes back at once to many locked rows", "least(1, greatest(0.1,", "least(0.1, greatest(0.1,"),
        ("no word of more due rows", " OR woken = 100"),
        (
            "plans as statistics say",
            "SET enable_sort = off ",
            "",
            "a sort would have to look cheaper than an index in its order; no statistics of these tests make it so",
        ),
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
        ("hides what comes back at once", "hot = hot OR delay_sec = 0", "hot = hot"),
        ("a drain counts", "job.attempt := greatest(job.attempt - 1, 0)", "NULL"),
        ("not counted as journaled", "journaled = journaled + 1", "journaled = journaled"),
        ("keeps the lease", "lease_expires_at = NULL", "lease_expires_at = lease_expires_at"),
        ("tells no waiters", "PERFORM dl_tell_waiters(ARRAY[hashtext(job.lock_key)])", "NULL"),
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
            "IF NOT dl_session_has_slot(held.claimed_pid, held.claimed_backend_start, hashtext(held.lock_key))",
            "IF false",
        ),
    ),
    *_function(
        "dl_session_has_slot",
        ("any key", "AND classid::bigint = (p_slot >> 32) & 4294967295 AND objid::bigint = p_slot & 4294967295"),
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
        ("no fresh budget", "CASE WHEN NEW.attempt = OLD.attempt THEN 0 ELSE NEW.attempt END", "NEW.attempt"),
        ("a fresh budget whatever is said", "CASE WHEN NEW.attempt = OLD.attempt THEN 0 ELSE NEW.attempt END", "0"),
        ("stays cancelled", "NEW.cancel_requested AND NOT OLD.cancel_requested", "NEW.cancel_requested"),
        (
            "a fresh budget for those that ran",
            "OLD.status NOT IN ('queued', 'running')",
            "OLD.status NOT IN ('queued')",
        ),
        ("blocks rows of any status", "CASE WHEN NEW.status = 'queued' AND ", "CASE WHEN "),
        ("blocks nothing", "NEW.status = 'queued' AND NEW.available_at > now()", "false"),
        ("keeps the claim's name", "NEW.status <> 'running'", "false"),
        ("no time of an end", "coalesce(NEW.finished_at, now())", "NEW.finished_at"),
        ("another time of an end", "coalesce(NEW.finished_at, now())", "now()"),
    ),
    *_in(
        ENDS,
        "TRIGGER dl_jobs_place BEFORE",
        ("no look at the time", "OF status, available_at", "OF status"),
        ("no look at the status", "OF status, available_at", "OF available_at"),
        ("nothing for a row that comes back", "NEW.status = 'queued' OR "),
        ("leaves a canceled row blocked", "NEW.blocked_on IS NOT NULL", "false"),
        ("leaves an ended row its claim", "NEW.claimed_by IS NOT NULL OR ", ""),
        ("leaves an end without a time", " OR NEW.finished_at IS NULL", ""),
    ),
    *_in(
        ENDS,
        "TRIGGER dl_jobs_place_ins",
        ("no look at the time", "NEW.available_at > now()", "false"),
        ("no look at an end", " AND NEW.finished_at IS NULL", " AND false"),
        ("calls for every row", "NEW.status = 'queued' AND NEW.available_at > now()", "true", COSTS),
    ),
    *_body(
        "FUNCTION notify_job_ready()",
        ("tells of every row", "NEW.status = 'queued'", "true", COSTS),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', NEW.queue)", "NULL"),
        ("tells of every new row", " WHERE status = 'queued'"),
        ("tells nobody of new rows", "PERFORM pg_notify('dl_jobs', queue) FROM", "PERFORM FROM"),
    ),
    *_body(
        "FUNCTION dl_jobs_forget()",
        ("all journals", " WHERE job_id IN (SELECT job_id FROM gone)"),
        ("with the caller's rights", "LANGUAGE plpgsql SECURITY DEFINER", "LANGUAGE plpgsql"),
        ("on any table", "IF TG_RELID <> %2$L::regclass", "IF false"),
    ),
    *_in(
        CLAIMS,
        "CREATE TRIGGER dl_jobs_notify_upd",
        ("no look at the time", "OF status, available_at", "OF status"),
        ("no look at the status", "OF status, available_at", "OF available_at"),
        ("calls for every row", "WHEN (NEW.status = 'queued') ", "", COSTS),
    ),
    *_in(
        OWNERS,
        "TRIGGER dl_jobs_notify_key AFTER",
        ("after any step", "OLD.status = 'running' AND "),
        ("after a start", " AND NEW.status <> 'running'", "", COSTS),
        ("after our own steps too", " AND NEW.journaled = OLD.journaled", "", COSTS),
    ),
    *_body(
        "FUNCTION dl_jobs_notify_key()",
        ("tells nobody", "PERFORM dl_tell_waiters(ARRAY[hashtext(NEW.lock_key)])", "NULL"),
        ("in the caller's search_path", " SET search_path FROM CURRENT"),
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
        ("our own inserts too", "WHEN (NEW.journaled = 0) ", "", COSTS),
    ),
    *_in(
        JOURNAL,
        "CREATE CONSTRAINT TRIGGER dl_jobs_journal_upd",
        ("steps that are none", "NEW.status <> OLD.status AND "),
        ("our own steps too", " AND NEW.journaled = OLD.journaled", "", COSTS),
    ),
    *_body(
        "FUNCTION dl_enqueue(",
        ("with the caller's rights", "SECURITY DEFINER"),
        ("with others' operators", "search_path = pg_catalog", "search_path = %1$I"),
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
        "dl_is_paused",
        ("never", "IS NOT NULL", "IS NOT NULL AND false"),
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
