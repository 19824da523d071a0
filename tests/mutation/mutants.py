"""The guards of the SQL, and how each is taken away.

An entry names a file, a place in it (a text that begins the statement, function or trigger; it occurs once), the old
text (once in that place) and the new one. A guard that no test can miss says why in `equivalent`: then nothing must go
red, and when something does the reason is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

QUEUE, TARGET, OPERATE, RIGHTS, STATS = "queue.sql", "target.sql", "operate.sql", "rights.sql", "stats.sql"
ALERTS = "alerts.sql"
JOURNAL, STEP, INSERTS = (f"migrations/{name}.sql" for name in ("0004_journal", "0019_one_claim", "0021_inserts"))
ORDERED = "migrations/0023_ordered.sql"
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


def _of_the_claims(name: str) -> list[Mutant]:
    """Of a statement for all jobs of a run."""
    return _statement(
        name,
        ("any attempt", " AND j.attempt = run.attempt"),
        ("any worker", " AND claimed_by = %(claimed_by)s"),
        ("any status", " AND status::text = 'running'\n", "\n"),
    )


# No test can step in between two statements of a function that wait for nothing. Were it missing, a row that has just
# left the queue would get a mark or a time that mean nothing there.
WITHIN = "a row would have to leave within the microseconds between the look and the lock, and no harm would come of it"
COSTS = "the function finds that there is nothing to do; the condition saves the call"
LOCK = "FOR NO KEY UPDATE SKIP LOCKED"
WAIT = "FOR NO KEY UPDATE"
LIVE = "lease_expires_at > now()"
HOLDS = "(status::text = 'queued' AND available_at > clock_timestamp() OR status::text IN ('failed', 'lost'))"
IN_ORDER = "ORDER BY queue, lock_key, status, least(attempt, 1), score, created_at, job_id"
SAID_ALONE = "unfinished, canceled, locked, backoffs, look_again, due_in, from_time, batch, in_order, passed_over"
SAID = SAID_ALONE.split(", ")
STEP_BEGINS = "  p_queue text, p_worker text, p_backend_start timestamptz, p_backoff_sec float8, p_most int,"

# What dl_enqueue_one does for a job without an idempotency key and, two spaces further, for one with a key.
OF_TASK = "FROM (VALUES (p_task)) AS new (task) LEFT JOIN %1$I.dl_tasks said"
IN_ENQUEUE_ONE = [
    ("not as the pipeline says", "     coalesce(p_max_attempts, said.max_attempts,", "     coalesce(p_max_attempts,"),
    (
        "no place",
        "     coalesce(p_score, (SELECT extract(epoch FROM at) FROM %1$I.dl_queues WHERE queue",
        "     coalesce(p_score, (SELECT NULL FROM %1$I.dl_queues WHERE queue",
    ),
    (
        "no affinity key",
        "     p_producer, p_consumer_group, coalesce(p_affinity_key, %1$I.dl_affinity(said.affinity, p_args)), at,",
        "     p_producer, p_consumer_group, p_affinity_key, at,",
    ),
    (
        "not the producer's affinity key",
        "     p_producer, p_consumer_group, coalesce(p_affinity_key, ",
        "     p_producer, p_consumer_group, coalesce(",
    ),
    ("starts future jobs", "     CASE WHEN p_available_at > now() THEN 'time' END, 2", "     NULL, 2"),
    ("only of tasks that say something", OF_TASK, OF_TASK.replace("LEFT ", "")),
    ("as any pipeline says", f"{OF_TASK} USING (task)", f"{OF_TASK} ON true"),
]

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
        ("only of tasks that say something", "LEFT JOIN dl_tasks", "JOIN dl_tasks"),
        ("as any pipeline says", "USING (task)", "ON true"),
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
    *_of_the_claim("leap"),
    *_statement(
        "tell_stuck",
        ("any attempt", "attempt = %(attempt)s AND "),
        ("any worker", "claimed_by = %(claimed_by)s AND "),
        ("any status", " AND status = 'running'"),
    ),
    *_of_the_claim("keep_results"),
    *_statement(
        "keep_results",
        (
            "keeps that of a dead run",
            "DO UPDATE SET claim = excluded.claim, result = excluded.result\n WHERE dl_results.claim < excluded.claim",
            "DO NOTHING",
        ),
        ("replaces a later one", "\n WHERE dl_results.claim < excluded.claim"),
        ("writes it again", "dl_results.claim < excluded.claim", "dl_results.claim <= excluded.claim"),
        ("under the old number", "SET claim = excluded.claim, ", "SET "),
    ),
    *_in(
        STATS,
        "-- name: result\n",
        ("of any claim", " AND r.claim = j.claims"),
        ("of any status", " AND j.status = 'succeeded'"),
        ("of any job", " WHERE j.job_id = %(job_id)s"),
    ),
    *(mutant for name in ("beat", "keep") for mutant in _of_the_claims(name)),
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
    *_statement(
        "beat",
        ("journals every renewal", "WHERE %(journal)s AND", "WHERE"),
        ("journals every job of a run", " AND job_id = (%(job_ids)s::uuid[])[1])", ")"),
        (
            "progress of every job of a run",
            "CASE WHEN j.job_id = (%(job_ids)s::uuid[])[1] THEN coalesce(",
            "CASE WHEN true THEN coalesce(",
        ),
        ("counts more than its own", "SELECT count(*), coalesce", "SELECT cardinality(%(job_ids)s::uuid[]), coalesce"),
    ),
    *_statement(
        "cancellations",
        ("any status", "status = 'running' AND "),
        ("not asked", " AND cancel_requested"),
    ),
    *_statement(
        "take_back",
        ("any status", " AND status::text = 'running' AND claimed_by", " AND claimed_by"),
        ("another worker's", " AND claimed_by = %(worker)s"),
        ("what has run", " AND heartbeat_at IS NULL"),
        ("waits for a locked row", LOCK, WAIT),
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
        ("behind a run that may be over", f"{LIVE}\n       FOR SHARE SKIP LOCKED", LIVE),
        ("waits for a running row", f"{LIVE}\n       FOR SHARE SKIP LOCKED", f"{LIVE}\n       FOR SHARE"),
        (
            "holds it against its key's readers",
            f"{LIVE}\n       FOR SHARE SKIP LOCKED",
            f"{LIVE}\n       FOR UPDATE SKIP LOCKED",
        ),
        ("behind a holder that may leave", f"{HOLDS}\n       FOR SHARE SKIP LOCKED", HOLDS),
        ("waits for a holder", f"{HOLDS}\n       FOR SHARE SKIP LOCKED", f"{HOLDS}\n       FOR SHARE"),
        (
            "behind a holder whose time has come",
            "status::text = 'queued' AND available_at > clock_timestamp() OR",
            "status::text = 'queued' OR",
            "the time would have to come within the microseconds between the look and the lock",
        ),
        ("behind a holder that has left", f"\n       AND {HOLDS}", "", WITHIN),
        ("behind a dead job only", "status::text = 'queued' AND available_at > clock_timestamp() OR ", ""),
        ("not behind a dead job", " OR status::text IN ('failed', 'lost'))", ")"),
        ("not behind a holder", " OR lock_key = ANY (held)"),
        ("rows of every queue", "queue = p_queue AND "),
        ("rows of every key", "WHERE hashtext(lock_key) = ANY (busy) OR lock_key = ANY (held)", "WHERE true"),
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
        ("of one queue and key only", "(queue, lock_key) > (place.queue, place.lock_key)", "false"),
        (
            "of one queue only",
            "(queue, lock_key) > (place.queue, place.lock_key)",
            "queue = place.queue AND lock_key > place.lock_key",
        ),
        ("of one key of a hash only", "(queue, lock_key) > (place.queue, place.lock_key)", "queue > place.queue"),
        ("the first of any key of a hash", " AND (score IS NULL OR lock_key = this.lock_key)"),
        (
            "the first of each key where there is no order",
            "(score IS NULL OR lock_key = this.lock_key)",
            "lock_key = this.lock_key",
            "two keys of one hash in a queue without order: one row more is ready, and a claim parks it again",
        ),
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
        ("no word of an old snapshot", "PERFORM pg_notify('dl_jobs', queue)  -- not", "PERFORM queue  -- not"),
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
        ("a row that may start", " AND (becomes IS NOT NULL OR place IS NOT NULL)"),
        ("a row that has no place", " OR place IS NOT NULL"),
        ("no place", "score = coalesce(score, place)", "score = score"),
        (
            "another place",
            "WHEN score IS NULL THEN (SELECT extract",
            "WHEN true THEN (SELECT extract",
            "coalesce keeps the score that is there",
        ),
        ("a place in any queue", "q.queue = dl_jobs.queue AND ordered", "q.queue = dl_jobs.queue"),
        (
            "an end not counted as journaled",
            "WHEN becomes <> 'queued' THEN 1 ELSE 0 END",
            "WHEN becomes <> 'queued' THEN 0 ELSE 0 END",
        ),
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
        "dl_most_wanted",
        ("rows of other queues", "queue = p_queue AND "),
        ("rows that wait", " AND blocked_on IS NULL"),
        ("looks at all", " LIMIT (p_prefer ->> 'lookahead')::int)", ")"),
        ("what is warm", "NOT IN (SELECT json_array_elements_text(p_prefer -> 'warm'))", "IS NOT NULL"),
        ("of every priority", "\n       AND priority = (SELECT min(priority) FROM near)", ""),
        (
            "what siblings have",
            "affinity_key IN (SELECT json_array_elements_text(p_prefer -> 'elsewhere')), count",
            "count",
        ),
        ("of fewest jobs", "count(*) DESC", "count(*)"),
        ("the youngest of equals", "min(created_at)\n", "min(created_at) DESC\n"),
    ),
    *_function(
        "dl_left_out",
        ("rows of other queues", "queue = p_queue AND "),
        ("rows that wait", " AND blocked_on IS NULL"),
        ("looks at all", " LIMIT p_rows)", ")"),
        ("any task", "task IN (SELECT json_array_elements_text(p_without))", "p_without IS NOT NULL"),
        (
            "the last one",
            " ORDER BY priority, created_at LIMIT 1\n",
            " ORDER BY priority DESC, created_at DESC LIMIT 1\n",
        ),
        ("due since its creation", "greatest(created_at, available_at)", "created_at"),
    ),
    *_function(
        "dl_take_keys",
        ("looks for a warm one at all", " OR rows > last", ""),
        ("a warm one of a worse priority", "near.priority <> class OR ", ""),
        ("the queue's order has one priority", "wanted IS NOT NULL AND (near", "(near"),
        ("no affinity", "near.affinity_key <> ALL (wanted) AND", "false AND"),
        ("nothing is overdue", " AND near.created_at >= overdue;", ";"),
        ("overdue in another class", "->> class::text", "->> '100'"),
        ("no room", "near.task = ANY (without) OR", ""),
        ("never what most want", "ELSE dl_most_wanted(p_queue, p_prefer) END", "END"),
        ("prefers to the last", " AND p_turn < 2 THEN", " THEN"),
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
            "\n       WHERE e.job_id <> ALL (done)),",
            "),",
            "an ended row is nobody's any more: it would be read once more, and left alone",
        ),
        ("forgets what it has ended before", "SELECT done || array_agg(job_id)", "SELECT array_agg(job_id)"),
        ("forgets their keys", "key_hashes || array_agg(hashtext(lock_key)),", "array_agg(hashtext(lock_key)),"),
        ("forgets their cancellations", "canceled || array_agg", "array_agg"),
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
        ("counts a hand-back", "least(j.attempt, greatest(max_attempts, 1)) - 1\n", "j.attempt\n"),
        ("spends the attempts by a hand-back", "least(j.attempt, greatest(max_attempts, 1)) - 1\n", "j.attempt - 1\n"),
        ("a restart keeps the attempts", "WHEN 'restart' THEN 0 ELSE", "WHEN 'restart' THEN j.attempt ELSE"),
        ("a restart keeps its time", " WHEN 'restart' THEN 0 END AS wait_sec", " END AS wait_sec"),
        ("a hand-back waits", "THEN coalesce(delay_sec, 0)", "THEN coalesce(delay_sec, dl_retry_delay(e.attempt))"),
        ("a hand-back keeps its time", "WHEN 'hand_back' THEN coalesce(delay_sec, 0) "),
        (
            "a restart says nothing",
            "WHEN 'restart' THEN 'the first job of its key is dead' ELSE",
            "ELSE",
        ),
        ("a retry is due at once", "WHEN wait_sec > 0 AND NOT", "WHEN false AND NOT"),
        ("a retry at once waits", "WHEN wait_sec > 0 AND NOT", "WHEN wait_sec IS NOT NULL AND NOT"),
        ("a canceled one waits", " AND NOT cancel_requested THEN 'time'", " THEN 'time'"),
        ("no delay of its own", "coalesce(delay_sec, dl_retry_delay(e.attempt))", "coalesce(delay_sec, 0)"),
        ("keeps the lease", "lease_expires_at = NULL", "lease_expires_at = lease_expires_at"),
        ("forgets its progress", "coalesce(e.progress::jsonb, j.progress)", "e.progress::jsonb"),
        ("tells nobody of what comes back", "PERFORM pg_notify('dl_jobs', queue) FROM", "PERFORM queue FROM"),
        ("tells of every end", "FILTER (WHERE status = 'queued')", "FILTER (WHERE true)"),
        ("keeps the keys", "IF pg_advisory_unlock_all() IS NULL THEN END IF;", "NULL;"),
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
        "FUNCTION dl_step(\n  p_queues text[]",
        ("holds on to keys when nothing has ended", "PERFORM pg_advisory_unlock_all();\n  ELSIF", "NULL;\n  ELSIF"),
        ("a paused queue too", "IF is_paused THEN", "IF false THEN"),
        ("wakes nobody", "dl_wake(this, 100) = 100", "false"),
        (
            "no word of more due rows",
            "look_again := dl_wake(this, 100) = 100 OR look_again",
            "PERFORM dl_wake(this, 100)",
        ),
        ("forgets the freed keys", "PERFORM dl_unpark_freed()", "NULL"),
        ("never looks at the rows themselves", "      looks := true;\n", ""),
        ("back-offs go on after a start", "backoffs = 0,", "backoffs = backoffs,"),
        ("no token", "claims = claims + 1", "claims = claims"),
        ("not counted as journaled", "                 journaled = journaled + 1,", ""),
        (
            "the last of a key",
            "queue, priority, created_at LIMIT 1)\n",
            "queue, priority DESC, created_at DESC LIMIT 1)\n",
        ),
        (
            "no parked rows",
            "(blocked_on IS NULL OR blocked_on = 'key')\n                              AND "
            "hashtext(lock_key) = key_hash",
            "blocked_on IS NULL\n                              AND hashtext(lock_key) = key_hash",
        ),
        ("any key", "AND hashtext(lock_key) = key_hash AND queue = this", "AND queue = this"),
        ("any queue", "AND hashtext(lock_key) = key_hash AND queue = this", "AND hashtext(lock_key) = key_hash"),
        ("no look at the running rows", "AND lease_expires_at > now() LIMIT 1) IS NULL", "AND false LIMIT 1) IS NULL"),
        (
            "a lease that is over",
            "\n                              AND lease_expires_at > now() LIMIT 1) IS NULL",
            " LIMIT 1) IS NULL",
        ),
        ("any status", "             AND status::text = 'queued'\n", "", WITHIN),
        (
            "a row that waits for its time",
            "blocked_on IS DISTINCT FROM 'time' AND available_at",
            "available_at",
            WITHIN,
        ),
        ("too early", " AND available_at <= at_once\n", "\n"),
        (
            "a canceled row",
            "AND NOT cancel_requested AND attempt < greatest(max_attempts, 1))\n",
            "AND attempt < greatest(max_attempts, 1))\n",
        ),
        ("spent attempts", " AND attempt < greatest(max_attempts, 1))\n", ")\n"),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f"\n             {LOCK}"),
        (
            "what is claimed ahead looks begun",
            "CASE WHEN job_id = coalesce(in_order[1], (\n"
            "                                            SELECT free_id FROM free ORDER BY priority, "
            "created_at, free_id LIMIT 1))\n"
            "                                     THEN at_once END",
            "at_once",
        ),
        (
            "what is begun looks claimed ahead",
            "FROM free ORDER BY priority, created_at, free_id LIMIT 1",
            "FROM free ORDER BY priority DESC, created_at DESC LIMIT 1",
        ),
        (
            "journaled at the claim's begin",
            "SELECT job_id, this, at_once, 'picked'",
            "SELECT job_id, this, now(), 'picked'",
        ),
        ("keeps the key of a row that did not start", "IF started < cardinality(took.mine) OR", "IF"),
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
        ("leaves after it has set rows aside", "        CONTINUE WHEN off > 0 AND started = 0;\n"),
        ("no bookmark", "IF started > 0 AND past + took.rows - started > 64", "IF false"),
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
            "EXIT WHEN (p_priority, p_from) = (0, '-infinity');\n        p_priority",
            "EXIT;\n        p_priority",
        ),
        (
            "parks nothing",
            "parked := dl_park(this, took.others, holders, p_priority, p_from, past + took.rows)",
            "parked := 0",
        ),
        ("leaves after it has parked", "      CONTINUE WHEN parked > 0;\n"),
        (
            "puts nothing off",
            "off := dl_put_off(this, took.others, p_backoff_sec)",
            "off := 0",
        ),
        ("leaves after it has put off", "      CONTINUE WHEN off IS NULL OR off > 0;\n"),
        ("no second look", "IF NOT looked_twice", "IF false"),
        (
            "looks no further than locked rows",
            "EXIT WHEN NOT took.more AND (p_priority, p_from) = (0, '-infinity')",
            "EXIT",
        ),
        (
            "forgets the keys that it has passed",
            "      passed := took.others;\n",
            "",
            "the keys' first rows are locked, so the start refuses them; the list saves a round for each row of a key",
        ),
        ("no word of a time", "extract(epoch FROM next.at - clock_timestamp())", "NULL::float8"),
        (
            "no word of locked rows",
            "CASE WHEN past > 0 THEN least(1, greatest(0.1, past / 1000.0)) END",
            "NULL::float8",
        ),
        ("comes back at once to many locked rows", "least(1, greatest(0.1, past / 1000.0))", "0.1"),
        ("no word of freed keys", "is_freed OR is_late", "is_late"),
        ("no word of locked due rows", "is_freed OR is_late", "is_freed"),
        ("order without its settings", "coalesce(ordered, false)", "false"),
        ("merges without its settings", "CASE WHEN merge THEN coalesce(merge_limit, 1000) END", "NULL"),
        ("any number in a delivery", "coalesce(merge_limit, 1000)", "1000"),
        ("no dead job holds", "on_dead = 'hold',", "false,"),
        ("the best by priority has begun", "coalesce(in_order[1], (", "coalesce(NULL, ("),
        *[(f"no word of {name}", f"'{name}', {name}", f"'{name}', NULL") for name in SAID],
        ("forgets what is warm in the second queue", "    turn := 0;\n"),
        ("never the queue's order", "started = 0 AND turn < 2", "started = 0 AND turn < 1"),
        (
            "turns without what is warm",
            "AND turn < 2 AND p_prefer -> 'warm' IS NOT NULL THEN",
            "AND turn < 2 THEN",
            "a claim that prefers nothing looks twice more, and finds the same",
        ),
        ("names what it has passed over for nothing", " AND took.rows > started\n", "\n"),
        (
            "parks beside what is warm",
            "        EXIT WHEN turn < 2 AND started > 0 AND took.odd IS NULL;\n",
            "",
            "what it parks has a busy key in any case; the line saves the time for it",
        ),
        (
            "reads on for what fits",
            "          due_in := least(due_in, 1);\n          EXIT;\n",
            "          due_in := least(due_in, 1);\n",
        ),
        ("sleeps on where room is missing", "          due_in := least(due_in, 1);\n", ""),
        *[
            (f"no word of {name} alone", f"({SAID_ALONE})\n", f"({SAID_ALONE.replace(name, 'NULL')})\n")
            for name in SAID
            if name != "backoffs"
        ],
        (
            "no word of backoffs alone",
            f"({SAID_ALONE})\n",
            f"({SAID_ALONE.replace('backoffs', 'NULL')})\n",
            "a claim that puts keys off starts nothing, so there is a due_in: unless a key becomes free just then, when"
            " a line of the log is missing",
        ),
        ("the order of another queue", "    in_order := NULL;\n"),
        ("another queue's settings", "    is_ordered := false;\n"),
        ("another queue's batch", "    batch := NULL;\n"),
        (
            "another queue's head",
            "    p_priority := 0;\n    p_from := '-infinity';\n    is_ordered",
            "    is_ordered",
            "a look that finds nothing ends at the head, but for one that has taken a second",
        ),
        (
            "a paused queue's head",
            "        p_priority := 0;\n        p_from := '-infinity';\n        CONTINUE",
            "        CONTINUE",
        ),
        ("a head of any queue by lag", "IF p_queues[1] <> named", "IF false"),
        ("no head by lag", "IF p_queues[1] <> named", "IF true"),
        (
            "looks with care at another queue",
            "    looks := false;\n",
            "",
            "a look that need not ask may, and takes longer",
        ),
        ("passes the keys of another queue", "    past := 0;\n    passed := '{}';\n  END LOOP", "  END LOOP"),
        (
            "a paused queue",
            "        CONTINUE;\n      END IF;\n      SELECT",
            "        EXIT;\n      END IF;\n      SELECT",
        ),
        ("one queue", "    EXIT WHEN started > 0;\n    is_late", "    is_late"),
        ("the last queue says when", "SELECT least(due_in, extract", "SELECT least(extract"),
        ("of a delivery only what is due", "is_ordered OR blocked_on", "blocked_on"),
        (
            "keeps the key of a head that did not start",
            "IF started < cardinality(took.mine) OR is_ordered THEN",
            "IF started < cardinality(took.mine) THEN",
        ),
        (
            "leaves a head that may not start",
            "CASE WHEN is_ordered THEN odd_heads ELSE",
            "CASE WHEN is_ordered THEN '{}' ELSE",
        ),
    ),
    *_function(
        "dl_by_lag",
        ("by the oldest job", "SELECT greatest(created_at, available_at) FROM", "SELECT created_at FROM"),
        ("the newest first", "paused_at IS NOT NULL, since, nth", "paused_at IS NOT NULL, since DESC, nth"),
        ("a paused one first", "ORDER BY paused_at IS NOT NULL, since", "ORDER BY since"),
        ("nobody has woken it", "AND blocked_on = 'time'\n", "AND false\n"),
    ),
    *_function(
        "dl_give_back",
        (
            "forgets the cancellation",
            "status = CASE WHEN cancel_requested THEN 'canceled'\n",
            "status = CASE WHEN false THEN 'canceled'\n",
        ),
        ("for ever", "is_spent := p_end <> 'drain' AND job.attempt >= most", "is_spent := false"),
        ("a drain may end it", "p_end <> 'drain' AND job.attempt", "job.attempt"),
        ("by the most attempts", "min(max_attempts)", "max(max_attempts)"),
        ("what comes back at once waits", " AND delay_sec > 0 THEN 'time' END", " THEN 'time' END"),
        ("a canceled one waits", "CASE WHEN NOT cancel_requested AND NOT is_spent AND", "CASE WHEN NOT is_spent AND"),
        (
            "one job of a delivery",
            " OR lock_key = job.lock_key AND queue = job.queue AND claimed_by = job.claimed_by)",
            ")",
        ),
        ("another worker's of the key", " AND claimed_by = job.claimed_by)", ")"),
        ("another queue's of the key", " AND queue = job.queue AND claimed_by", " AND claimed_by"),
        ("another key's of the hash", "OR lock_key = job.lock_key AND queue", "OR queue"),
        ("waits for a locked row", LOCK, WAIT),
        (
            "the last one is dead",
            "ORDER BY score, created_at, job_id) FILTER",
            "ORDER BY score DESC, created_at DESC, job_id DESC) FILTER",
        ),
        ("a canceled one is dead in its place", " FILTER (WHERE NOT cancel_requested)"),
        ("all are dead", "WHEN NOT is_spent OR job_id <> first THEN 'queued'", "WHEN NOT is_spent THEN 'queued'"),
        ("the others keep their attempts", "WHEN is_spent AND job_id <> first THEN 0 ELSE", "WHEN false THEN 0 ELSE"),
        ("the others wait", "CASE WHEN is_spent THEN 0 ELSE delay_sec END", "delay_sec"),
        ("the others have ended", "OR is_spent AND job_id = first THEN now()", "OR is_spent THEN now()"),
        ("a word of one job only", " OR cardinality(delivery) > 1 THEN", " THEN"),
        ("tells nobody", "PERFORM pg_notify('dl_jobs', job.queue)", "NULL"),
        ("a drain counts", "greatest(least(attempt, max_attempts) - 1, 0)", "attempt"),
        ("spends the attempts by a drain", "least(attempt, max_attempts) - 1", "attempt - 1"),
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
        ("what was not begun counts", "IF claimed <> ALL (p_running)", "IF false"),
        ("what ran does not count", "IF claimed <> ALL (p_running)", "IF true"),
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
        (
            "each job of a delivery by its own heartbeat",
            "     AND NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running'",
            "     AND NOT EXISTS (SELECT FROM dl_jobs WHERE false",
        ),
        ("not begun for ever", "payload ->> 'reason' = not_begun", "false"),
    ),
    *_body(
        "FUNCTION dl_retake(p_job_id uuid[]",
        ("any attempt", "attempt = p_attempt[array_position(p_job_id, job_id)] AND "),
        ("any worker", "claimed_by = p_worker\n       AND ", ""),
        ("any status", "AND status::text = 'running' ORDER", "ORDER"),
        ("no row lock", " FOR NO KEY UPDATE\n", "\n"),
        ("some of its jobs", "IF cardinality(key_hashes) < cardinality(p_job_id) THEN", "IF key_hashes = '{}' THEN"),
        ("leaves the old session", "PERFORM dl_end_session(held.claimed_pid, held.claimed_backend_start)", "NULL"),
        ("no key", "IF NOT pg_try_advisory_lock(key_hash)", "IF false"),
        ("a key of several jobs several times", "SELECT DISTINCT unnest(key_hashes)", "SELECT unnest(key_hashes)"),
        ("no look at the running rows", "ELSIF EXISTS (", "ELSIF false AND EXISTS ("),
        ("a lease that is over", "lease_expires_at > now() AND "),
        ("is in its own way", " AND job_id <> ALL (p_job_id))", ")"),
        (
            "keeps a refused key",
            "      PERFORM pg_advisory_unlock_all();\n      RETURN false;\n",
            "      RETURN false;\n",
        ),
        (
            "keeps what it got beside a refused key",
            "        PERFORM pg_advisory_unlock_all();\n        RETURN false;\n",
            "        RETURN false;\n",
        ),
        (
            "believes that the old session has it",
            "IF NOT dl_session_has_key(held.claimed_pid, held.claimed_backend_start, key_hash)",
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
        ("in no order", " ORDER BY job_id\n", "\n"),
    ),
    *_in(
        TARGET,
        "-- name: end_older\n",
        ("its own sessions too", "::bigint < run.claim", "::bigint <= run.claim"),
        ("those of any job", "name[1] = run.job_id::text AND "),
        ("leaves them", "pg_terminate_backend(pid, 2000)", "NULL"),
        ("does not wait", "pg_terminate_backend(pid, 2000)", "pg_terminate_backend(pid)"),
        ("another role's are an error", "\n         WHERE usename = current_user"),
    ),
    *_in(
        TARGET,
        "-- name: in_the_way\n",
        ("what has been raised", "f.claim > run.claim\n", "true\n"),
        ("not what stands higher", "f.claim > run.claim\n", "false\n"),
        ("not another's of the same number", "OR f.claim = run.claim AND (", "OR false AND ("),
        (
            "another's of any number",
            "OR f.claim = run.claim AND (",
            "OR (",
            "the raise before has raised all that stood lower, and they are this run's",
        ),
        ("its own of the same number", "OR f.claim = run.claim AND (", "OR f.claim = run.claim AND (true OR "),
        ("no look at the owner", "f.owner IS DISTINCT FROM %(owner)s OR "),
        ("an owner of before", " OR f.owned_at IS DISTINCT FROM f.raised_at"),
    ),
    *_in(
        TARGET,
        "-- name: hold\n",
        ("any claim", "f.claim = run.claim AND "),
        ("some of its jobs", "count(*) = cardinality(%(job_ids)s::uuid[])", "count(*) > 0"),
        (
            "any owner",
            " AND owner = %(owner)s",
            "",
            "raise lets no other owner have the fence at this number",
        ),
        ("an owner of before", " AND owned_at = raised_at"),
        ("no row lock", " FOR SHARE OF f"),
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
        ("its result stays when it comes back", "(is_back OR NEW.status = 'succeeded'", "(NEW.status = 'succeeded'"),
        ("that of a dead run stays", "is_back OR NEW.status = 'succeeded' AND OLD.status <> 'succeeded'", "is_back"),
        ("its result goes at any change", " AND OLD.status <> 'succeeded'"),
        ("before there are results", "to_regclass(%3$L) IS NOT NULL", "true"),
        ("all results", "DELETE FROM %1$I.dl_results WHERE job_id = NEW.job_id", "DELETE FROM %1$I.dl_results"),
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
        ("after a parked row too", "(OLD.blocked_on IS NULL OR OLD.score IS NOT NULL) AND OLD.status", "OLD.status"),
        (
            "not after a row of an ordered queue that waited",
            "(OLD.blocked_on IS NULL OR OLD.score IS NOT NULL)",
            "OLD.blocked_on IS NULL",
        ),
        ("no place", "score = coalesce(j.score, place.score)", "score = j.score"),
        (
            "another place",
            "CASE WHEN score IS NULL AND status",
            "CASE WHEN status",
            "coalesce keeps the score that is there",
        ),
        ("a place of what has ended", " AND status IN ('queued', 'running') THEN (\n", " THEN (\n"),
        ("no place if nothing else changes", " OR place.score IS NOT NULL\n", "\n"),
        ("a place in any queue", "q.queue = dl_jobs.queue AND ordered)", "q.queue = dl_jobs.queue)"),
        ("after a start", " AND (NEW.status <> 'running' OR has_moved) THEN", " THEN"),
        ("not after a run has moved", "(NEW.status <> 'running' OR has_moved)", "NEW.status <> 'running'"),
        ("after any step", "AND OLD.status IN ('queued', 'running')\n", "\n"),
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
        ("all journals", "dl_job_events WHERE job_id IN (SELECT job_id FROM gone)", "dl_job_events"),
        ("all results", "dl_results WHERE job_id IN (SELECT job_id FROM gone)", "dl_results"),
        ("before there are results", "to_regclass(%4$L) IS NOT NULL", "true"),
        ("with the caller's rights", "LANGUAGE plpgsql SECURITY DEFINER", "LANGUAGE plpgsql"),
        ("on any table", "IF TG_RELID <> %2$L::regclass", "IF false"),
        ("makes nobody ready", "PERFORM %1$I.dl_unpark(", "PERFORM ("),
        ("after a run only", "status = 'running' OR status = 'queued' AND blocked_on IS NULL", "status = 'running'"),
        ("after a ready row only", "status = 'running' OR status", "status"),
        ("after a parked row too", " AND blocked_on IS NULL"),
        (
            "not after a row of an ordered queue",
            "\n                          OR score IS NOT NULL AND status IN ('queued', 'failed', 'lost')",
            "",
        ),
        ("not after a dead one", "status IN ('queued', 'failed', 'lost')", "status IN ('queued')"),
        ("not after one that waited", "status IN ('queued', 'failed', 'lost')", "status IN ('failed', 'lost')"),
        (
            "after any end",
            "OR score IS NOT NULL AND status IN ('queued', 'failed', 'lost')",
            "OR score IS NOT NULL",
            COSTS,
        ),
    ),
    *_body(
        "FUNCTION dl_jobs_score()",
        ("on any table", "IF TG_RELID <> %2$L::regclass", "IF false"),
        ("with the caller's rights", "LANGUAGE plpgsql SECURITY DEFINER", "LANGUAGE plpgsql"),
        ("in any queue", " AND ordered)", ")"),
        ("in every queue", "WHERE queue = NEW.queue AND ordered)", "WHERE ordered)"),
    ),
    *_in(
        ORDERED,
        "TRIGGER dl_jobs_score_ins",
        ("not for code of before", "NEW.journaled <> 2", "NEW.journaled NOT IN (1, 2)"),
        ("another than its producer gave", " AND NEW.score IS NULL"),
        ("for our own inserts too", "NEW.journaled <> 2 AND NEW.score", "NEW.score", COSTS),
    ),
    *_function(
        "dl_give_scores",
        ("every queue", "queue = p_queue AND status = 'queued'", "status = 'queued'"),
        ("any status", "status = 'queued' AND available_at", "available_at"),
        ("from the begin again", "available_at >= p_after AND ", "", "what has got its score is not looked at again"),
        ("another than it has", "p_after AND score IS NULL\n", "p_after\n"),
        ("waits for a locked row", "LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED", "LIMIT p_limit FOR NO KEY UPDATE"),
        ("not those that run", "rows || ARRAY(", "rows || ARRAY(SELECT NULL::tid WHERE false)); PERFORM (ARRAY("),
        (
            "those that run in every queue",
            "status = 'running' AND queue = p_queue AND score",
            "status = 'running' AND score",
        ),
        ("all at once", "LIMIT p_limit FOR", "FOR"),
    ),
    *_function(
        "dl_lock_heads",
        *(
            (f"{which} {name}", f"{old} AND least(attempt, 1) = {tried}\n           ORDER", new)
            for tried, which in enumerate(("new rows", "tried rows"))
            for name, old, new in (
                (
                    "of every queue",
                    "queue = p_queue AND lock_key = name",
                    f"lock_key = name AND least(attempt, 1) = {tried}\n           ORDER",
                ),
                (
                    "of every key",
                    "queue = p_queue AND lock_key = name",
                    f"queue = p_queue AND least(attempt, 1) = {tried}\n           ORDER",
                ),
                ("are no heads", "lock_key = name", "lock_key = name AND false\n           ORDER"),
            )
        ),
        *(
            (f"{name} {which}", f"{IN_ORDER} LIMIT 1){end}", f"ORDER BY {new} LIMIT 1){end}")
            for which, end in (("new row", "\n         UNION"), ("tried row", ") two"))
            for name, new in (
                ("the last", "score DESC, created_at DESC, job_id DESC"),
                ("by the time of creation the first", "created_at, job_id"),
                ("of equal scores any", "score, created_at DESC"),
            )
        ),
        ("the last of a key", "ORDER BY score, created_at, job_id LIMIT 1) head", "ORDER BY score DESC LIMIT 1) head"),
        (
            "by the time of creation",
            "ORDER BY score, created_at, job_id LIMIT 1) head",
            "ORDER BY created_at LIMIT 1) head",
        ),
        (
            "equal scores in any order",
            "ORDER BY score, created_at, job_id LIMIT 1) head",
            "ORDER BY score, created_at DESC LIMIT 1) head",
        ),
        (
            "a head before its time",
            "WHEN p_merge_limit IS NULL AND head.available_at > clock_timestamp() THEN head.job_id END",
            "END",
        ),
        ("a delivery waits for its head", "WHEN p_merge_limit IS NULL AND head.available_at", "WHEN head.available_at"),
        (
            "a new job hastens its key",
            "WHEN tried.available_at > clock_timestamp() THEN tried.job_id",
            "WHEN false THEN tried.job_id",
        ),
        ("a tried job holds whatever does not merge", "WHERE p_merge_limit IS NOT NULL AND score", "WHERE score"),
        (
            "any row holds a merged key",
            "AND lock_key = name AND least(attempt, 1) = 1\n         ORDER",
            "AND lock_key = name\n         ORDER",
        ),
        ("the tried of every queue", "status = 'queued' AND queue = p_queue\n", "status = 'queued'\n"),
        (
            "the last retry of a key",
            f"{IN_ORDER} LIMIT 1) tried",
            "ORDER BY score DESC, created_at DESC, job_id DESC LIMIT 1) tried",
        ),
        ("a dead job holds everywhere", "WHERE p_holds AND score", "WHERE score"),
        ("a failed job does not hold", "IN ('failed', 'lost')", "IN ('lost')"),
        ("a lost job does not hold", "IN ('failed', 'lost')", "IN ('failed')"),
        ("a dead job without a place holds", "p_holds AND score IS NOT NULL AND status", "p_holds AND status"),
        (
            "the dead of every queue",
            "AND queue = p_queue AND lock_key = name\n         LIMIT 1) dead",
            "AND lock_key = name\n         LIMIT 1) dead",
        ),
        (
            "the dead of every key",
            "AND queue = p_queue AND lock_key = name\n         LIMIT 1) dead",
            "AND queue = p_queue\n         LIMIT 1) dead",
        ),
        (
            "no look at the running rows",
            "WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE status = 'running'",
            "WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE false",
        ),
        (
            "a lease that is over",
            "AND (lease_expires_at > now() OR queue = p_queue AND lock_key = name)",
            "AND lease_expires_at > now()",
        ),
        ("any lease that is over", "AND (lease_expires_at > now() OR queue = p_queue AND lock_key = name)", ""),
        ("another queue's lease that is over", "OR queue = p_queue AND lock_key = name)", "OR lock_key = name)"),
        (
            "the run of another queue",
            "(lease_expires_at > now() OR queue = p_queue AND lock_key = name)",
            "queue = p_queue AND lock_key = name",
        ),
        ("the keys in any order", "     ORDER BY nth\n", "     ORDER BY nth DESC\n"),
        ("no word of what holds", "holders := holders || coalesce(key.dead_id, key.early_id)", "NULL"),
        ("starts what is held", "    ELSIF key.is_odd THEN\n", "    END IF;\n    IF key.is_odd THEN\n"),
        (
            "starts what may not start",
            "    ELSE\n      due",
            "    END IF;\n    IF key.dead_id IS NULL AND key.early_id IS NULL THEN\n      due",
        ),
        ("no word of what may not start", "odd := odd || key.job_id", "NULL"),
        ("a canceled head", "cancel_requested OR attempt >=", "attempt >="),
        ("a spent head", "cancel_requested OR attempt >= greatest(max_attempts, 1) AS", "cancel_requested AS"),
        ("no run for max_attempts 0", "attempt >= greatest(max_attempts, 1)", "attempt >= max_attempts"),
        ("more than the head where nothing merges", "CASE WHEN p_merge_limit IS NULL THEN", "CASE WHEN false THEN"),
        ("no more than the head", "CASE WHEN p_merge_limit IS NULL THEN", "CASE WHEN true THEN"),
        (
            "large claims without end",
            "    EXIT WHEN cardinality(due) >= 1000;  -- one claim carries so many jobs, and those of the last key\n",
        ),
    ),
    *_function(
        "dl_lock_delivery",
        *(
            (f"{which} {name}", f"{old}\n            AND least(attempt, 1) = {tried}\n", new)
            for tried, which in enumerate(("new rows", "tried rows"))
            for name, old, new in (
                (
                    "of every queue",
                    "queue = p_queue AND lock_key = p_lock_key",
                    f"lock_key = p_lock_key AND least(attempt, 1) = {tried}\n",
                ),
                (
                    "of every key",
                    "queue = p_queue AND lock_key = p_lock_key",
                    f"queue = p_queue AND least(attempt, 1) = {tried}\n",
                ),
                (
                    "of any status",
                    "status = 'queued' AND queue = p_queue AND lock_key = p_lock_key",
                    f"queue = p_queue AND lock_key = p_lock_key AND least(attempt, 1) = {tried}\n",
                ),
                ("are left out", "lock_key = p_lock_key", "lock_key = p_lock_key AND false\n"),
            )
        ),
        (
            "the last new rows",
            f"{IN_ORDER} LIMIT p_limit)\n        UNION",
            "ORDER BY score DESC, created_at DESC, job_id DESC LIMIT p_limit)\n        UNION",
        ),
        (
            "the last tried rows",
            f"{IN_ORDER} LIMIT p_limit)) of_key",
            "ORDER BY score DESC, created_at DESC, job_id DESC LIMIT p_limit)) of_key",
        ),
        (
            "the last of a key",
            "ORDER BY score, created_at, job_id LIMIT p_limit) first",
            "ORDER BY score DESC, created_at DESC, job_id DESC LIMIT p_limit) first",
        ),
        ("as many as there are", "job_id LIMIT p_limit) first", "job_id) first"),
        (
            "in any order",
            "NOT is_odd ORDER BY score, created_at, job_id)",
            "NOT is_odd ORDER BY score DESC, created_at DESC, job_id DESC)",
        ),
        ("several tasks", "WHERE is_same_task AND NOT is_odd", "WHERE NOT is_odd"),
        (
            "every job of its task",
            "bool_and(task = p_task) OVER (ORDER BY score, created_at, job_id)",
            "task = p_task",
        ),
        ("ends before what may not start", "SELECT cancel_requested OR attempt >=", "SELECT attempt >="),
        ("a spent job", "cancel_requested OR attempt >= greatest(max_attempts, 1) AS", "cancel_requested AS"),
        ("no run for max_attempts 0", "attempt >= greatest(max_attempts, 1)", "attempt >= max_attempts"),
        ("what may not start", "WHERE is_same_task AND NOT is_odd", "WHERE is_same_task"),
        ("any status", "status::text = 'queued' AND NOT cancel_requested", "NOT cancel_requested", WITHIN),
        ("a canceled row", " AND NOT cancel_requested\n", "\n", WITHIN),
        ("waits for a locked row", LOCK, WAIT),
        ("no row lock", f"\n                         {LOCK}"),
        ("jobs behind a locked one", "IF cardinality(free) < cardinality(listed) THEN", "IF false THEN"),
        (
            "all but the locked",
            "listed := listed[1:(SELECT min(nth) - 1 FROM unnest(listed) WITH ORDINALITY AS jobs (id, nth)"
            " WHERE id <> ALL (free))]",
            "listed := free",
        ),
        ("the fewest attempts", "SELECT max(attempt) AS attempt", "SELECT min(attempt) AS attempt"),
        ("each row its own attempt", " AND dl_jobs.attempt < most.attempt", " AND false"),
        ("the attempts of any job", "FROM dl_jobs WHERE job_id = ANY (listed)) most", "FROM dl_jobs) most"),
    ),
    *_body(
        "FUNCTION dl_prune(",
        (
            "what holds its key",
            "       AND NOT (score IS NOT NULL AND status::text IN ('failed', 'lost')\n                AND EXISTS",
            "       AND NOT (false\n                AND EXISTS",
        ),
        (
            "keeps what has ended well",
            "(score IS NOT NULL AND status::text IN ('failed', 'lost')\n",
            "(score IS NOT NULL\n",
        ),
        ("keeps what has no place", "(score IS NOT NULL AND status::text", "(status::text"),
        ("keeps the dead of every queue", "WHERE q.queue = dl_jobs.queue AND ordered AND", "WHERE ordered AND"),
        ("keeps the dead of a queue without order", " AND ordered AND on_dead = 'hold'", " AND on_dead = 'hold'"),
        ("keeps the dead that do not hold", " AND on_dead = 'hold'"),
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
        ("not as the pipeline says", "dl_enqueue.max_attempts, said.max_attempts, 5)", "dl_enqueue.max_attempts, 5)"),
        (
            "no affinity key",
            "coalesce(dl_enqueue.affinity_key, %1$I.dl_affinity(said.affinity, dl_enqueue.args))",
            "dl_enqueue.affinity_key",
        ),
        ("not the producer's affinity key", "coalesce(dl_enqueue.affinity_key, ", "coalesce("),
        ("any affinity key", "length(dl_enqueue.affinity_key) NOT BETWEEN 1 AND 200", "false"),
        ("only of tasks that say something", "LEFT JOIN %1$I.dl_tasks", "JOIN %1$I.dl_tasks"),
        ("as any pipeline says", "USING (task)", "ON true"),
        ("with the caller's rights", "SECURITY DEFINER"),
        ("with others' operators", "search_path = pg_catalog", "search_path = %1$I"),
    ),
    *_function(
        "dl_affinity",
        ("of any type", "jsonb_typeof(p_args -> name) = 'string' AND "),
        ("of an empty text", "BETWEEN 1 AND 200", "<= 200"),
        ("of a long text", "BETWEEN 1 AND 200", "> 0"),
        ("of a task that names no args", " STRICT"),
    ),
    *_in(
        OPERATE,
        "-- name: tell_tasks\n",
        ("keeps the first attempts", "max_attempts = excluded.max_attempts", "max_attempts = dl_tasks.max_attempts"),
        ("keeps the first args", "affinity = excluded.affinity", "affinity = dl_tasks.affinity"),
        ("writes what is there", "EXCEPT SELECT task, max_attempts, affinity, memory_mb, cpus FROM dl_tasks "),
    ),
    *_function(
        "dl_enqueue_many",
        ("no affinity key", "IF array_position(p_affinity_key, NULL) IS NOT NULL", "IF false"),
        ("asks where all keys are given", "IF array_position(p_affinity_key, NULL) IS NOT NULL", "IF true", COSTS),
        ("asks where no task names args", " AND affinity IS NOT NULL", "", COSTS),
        ("not the producer's affinity key", "coalesce(given, %1$I.dl_affinity(", "coalesce(%1$I.dl_affinity("),
        ("only of tasks that say something", "LEFT JOIN %1$I.dl_tasks", "JOIN %1$I.dl_tasks"),
        ("as any pipeline says", "USING (task) ORDER BY nth", "ON true ORDER BY nth"),
        ("another job's affinity key", "USING (task) ORDER BY nth", "USING (task) ORDER BY nth DESC"),
    ),
    *_function(
        "dl_enqueue_one",
        ("with the caller's rights", "SECURITY DEFINER"),
        ("with others' operators", "search_path = pg_catalog", "search_path = %1$I"),
        ("all of a transaction at one time", "at timestamptz := clock_timestamp()", "at timestamptz := now()"),
        *(
            (what + keys, f"\n{indent}{old}", f"\n{indent}{new}")
            for keys, indent in (("", " " * 6), (" with keys", " " * 8))
            for what, old, new in IN_ENQUEUE_ONE
        ),
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
        ("needs of the longest", "(0.95) WITHIN GROUP (ORDER BY peak)", "(1) WITHIN GROUP (ORDER BY peak)"),
        ("processors of the busiest", "(0.95) WITHIN GROUP (ORDER BY share)", "(1) WITHIN GROUP (ORDER BY share)"),
        ("processors of short runs", "FILTER (WHERE seconds >= 1) AS shares", "AS shares"),
        ("needs of no task", "WHERE peak_mb IS NOT NULL AND task <> ''", "WHERE peak_mb IS NOT NULL"),
        ("needs of runs that tell none", "WHERE peak_mb IS NOT NULL AND task <> ''", "WHERE task <> ''"),
        ("forgets the peaks", "used.peaks || n.peaks", "used.peaks"),
        ("forgets the shares", "used.shares || n.shares", "used.shares"),
        ("keeps all peaks", "(used.peaks || n.peaks)[1:200]", "used.peaks || n.peaks"),
        ("keeps all shares", "(used.shares || n.shares)[1:200]", "used.shares || n.shares"),
        ("counts the latest runs only", "used.runs + coalesce(n.runs, 0)", "used.runs"),
    ),
    *_in(
        QUEUE,
        "-- name: status\n",
        ("memory that would do", "need.mb > live.room_mb AND live.bounded", "live.room_mb > 0 AND live.bounded"),
        ("hosts without a bound", " AND live.bounded = live.workers", ""),
        ("the smallest host", "max(w.host_memory_mb)", "min(w.host_memory_mb)"),
        (
            "learned before declared",
            "coalesce((SELECT t.memory_mb FROM dl_tasks t WHERE t.task = j.task),",
            "coalesce(",
        ),
    ),
    *_function(
        "dl_figure",
        ("any text", "CASE WHEN jsonb_typeof(p_told) = 'number' THEN", "CASE WHEN true THEN"),
        ("below 0", "greatest(0, least(p_told::numeric, 1000000000))", "least(p_told::numeric, 1000000000)"),
        ("beyond a real", "greatest(0, least(p_told::numeric, 1000000000))", "greatest(0, p_told::numeric)"),
    ),
    *_function(
        "dl_counted",
        ("small memory", "p_memory_mb >= 128", "p_memory_mb >= 0"),
        ("not 128", "p_memory_mb >= 128", "p_memory_mb > 128"),
        ("one processor", "p_cpus >= 1.5", "p_cpus >= 0"),
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
        (
            "its key keeps its time",
            "UPDATE dl_jobs SET available_at = now(), attempt = 0 WHERE",
            "UPDATE dl_jobs SET attempt = 0 WHERE",
        ),
        ("its key keeps its attempts", "available_at = now(), attempt = 0 WHERE", "available_at = now() WHERE"),
        ("what its key has not tried", " AND least(attempt, 1) = 1\n", "\n"),
        (
            "its key in any queue",
            "SELECT queue, lock_key FROM again JOIN dl_queues q USING (queue) WHERE q.merge)",
            "SELECT j.queue, lock_key FROM again WHERE true)",
        ),
        ("its key without merge", " WHERE q.merge)", ")"),
        ("every key", "(queue, lock_key) IN (SELECT queue, lock_key FROM again", "queue IN (SELECT queue FROM again"),
        (
            "what runs with its key",
            "status = 'queued' AND score IS NOT NULL AND least(attempt, 1) = 1",
            "score IS NOT NULL AND least(attempt, 1) = 1",
        ),
        ("waits for its key's locked rows", LOCK, WAIT),
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
        (
            "its key keeps its time",
            "with_them AS (\n  UPDATE dl_jobs SET available_at = now() WHERE",
            "with_them AS (\n  UPDATE dl_jobs SET available_at = available_at WHERE",
        ),
        ("what its key has not tried", " AND least(attempt, 1) = 1 AND job_id", " AND job_id"),
        ("its key without merge", " WHERE q.merge)", ")"),
        ("every key", "(queue, lock_key) IN (SELECT queue, lock_key FROM due", "queue IN (SELECT queue FROM due"),
        (
            "what runs with its key",
            "status = 'queued' AND score IS NOT NULL AND least(attempt, 1) = 1",
            "score IS NOT NULL AND least(attempt, 1) = 1",
        ),
        ("waits for its key's locked rows", LOCK, WAIT),
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
        "-- name: kill\n",
        ("another error", "coalesce(error, 'killed by ' || %(by)s::text)", "'killed by ' || %(by)s::text"),
        ("no error", "coalesce(error, 'killed by ' || %(by)s::text)", "error"),
        ("no journal", "by hand') FROM killed)", "by hand') FROM killed WHERE false)"),
        ("no time of the end", "finished_at = now(), ", "", "the trigger sets it at the commit"),
        ("waits on", "blocked_on = NULL, ", "", "the trigger sets it at the commit"),
        ("not counted as journaled", "journaled = journaled + 1", "journaled = journaled"),
        ("though it is to be canceled", "CASE WHEN cancel_requested THEN 'canceled' ELSE 'failed' END", "'failed'"),
    ),
    *_in(
        OPERATE,
        "-- name: chosen\n",
        ("what does not pass", "near WHERE passes OR nth = %(scan)s", "near"),
        ("the last row that was looked at", "looked_at.passes AND ", ""),
        ("no word of the last row", " OR nth = %(scan)s ORDER", " ORDER"),
        ("more than asked for", " LIMIT %(limit)s)", ")"),
        ("waits for a locked row", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    ),
    *_in(
        OPERATE,
        "-- name: passes\n",
        ("every task", "task = %(task)s)", "true)"),
        ("every key", "lock_key = %(lock_key)s)\n", "true)\n"),
        ("every partition", "partition_key = %(partition_key)s)", "true)"),
        ("every error", "coalesce(strpos(error, %(error)s) > 0, false)", "true"),
        ("a pattern", "strpos(error, %(error)s) > 0", "error LIKE '%%' || %(error)s || '%%'"),
    ),
    *(
        mutant
        for name, where in (
            ("dead", " AND (finished_at, job_id)"),
            ("not_due", " AND (available_at, priority, created_at, job_id)"),
            ("retried", " AND (created_at, job_id)"),
        )
        for mutant in _in(
            OPERATE,
            f"-- name: {name}\n",
            ("of every queue", "queue = %(queue)s AND "),
            ("from the begin again", f"{where} >", f"{where} IS NOT NULL OR {where.removeprefix(' AND ')} >"),
            ("all at once", " LIMIT %(scan)s"),
        )
    ),
    *_in(
        OPERATE,
        "-- name: claims_under_way\n",
        ("sees none", "l.mode = 'AccessShareLock'", "l.mode = 'ShareLock'"),
        ("sees none of before", " OR concat_ws(' ', l.virtualtransaction, a.query_start) = ANY (%(statements)s)"),
        (
            "every later statement of theirs",
            "concat_ws(' ', l.virtualtransaction, a.query_start) = ANY (%(statements)s)",
            "l.virtualtransaction = ANY (SELECT split_part(unnest(%(statements)s), ' ', 1))",
        ),
        ("only with an xid", "a.backend_xmin IS NOT NULL", "a.backend_xid IS NOT NULL"),
        ("waits for transactions that do nothing", " AND coalesce(a.state, '') NOT LIKE 'idle%%'"),
        ("blind for other roles", "coalesce(a.state, '') NOT LIKE", "a.state NOT LIKE"),
    ),
    *_in(
        OPERATE,
        "-- name: running_to_move\n",
        ("half of a delivery", "(ORDER BY lock_key) AS so_far", "(ORDER BY lock_key, job_id) AS so_far"),
        ("not a large delivery", "nth = 1 OR "),
        ("all at once", "nth = 1 OR so_far <= %(limit)s", "true"),
        ("of every queue", " AND queue = %(from)s) by_key", ") by_key"),
        ("waits for a locked row", " NOWAIT"),
    ),
    *_in(
        OPERATE,
        "-- name: queued_to_move\n",
        ("of every queue", "queue = %(from)s AND "),
        ("all at once", " LIMIT %(limit)s"),
    ),
    *_in(
        OPERATE,
        "-- name: dead_to_move\n",
        ("of every queue", "queue = %(from)s AND "),
        ("none", "IN ('failed', 'lost')", "IN ('failed', 'lost') AND false"),
    ),
    *_in(
        OPERATE,
        "-- name: move\n",
        (
            "no place",
            "SELECT extract(epoch FROM dl_jobs.created_at) FROM",
            "SELECT NULL::float8 FROM",
            "the trigger gives it at the commit",
        ),
        ("running rows left", "'queued', 'running', 'failed', 'lost');", "'queued', 'failed', 'lost');"),
        ("dead rows left", "'queued', 'running', 'failed', 'lost');", "'queued', 'running');"),
        ("what has ended", " AND status IN ('queued', 'running', 'failed', 'lost');", ";", WITHIN),
        ("a place of what has ended", "CASE WHEN status IN ('queued', 'running') THEN (", "CASE WHEN true THEN ("),
        (
            "due at once",
            "WHEN available_at > now() THEN 'time'\n",
            "WHEN false THEN 'time'\n",
            "the trigger says so at the commit",
        ),
    ),
    *_in(
        OPERATE,
        "-- name: pause_source\n",
        ("the author of before", "paused_by = %(by)s", "paused_by = coalesce(paused_by, %(by)s)"),
        ("a new time", "coalesce(paused_at, now())", "now()"),
    ),
    *_in(
        OPERATE,
        "-- name: moves_to\n",
        ("of every author", "paused_by = %(by)s", "paused_by IS NOT NULL"),
        ("one that is over", ")) IS NOT NULL", "), queue) IS NOT NULL"),
        ("only with queued jobs", "status = 'running'", "status = 'running' AND false"),
        ("without dead jobs", "status IN ('failed', 'lost')", "false"),
    ),
    *_in(
        OPERATE,
        "-- name: resume_own\n",
        ("anybody's pause", " AND paused_by = %(by)s"),
        ("wakes nobody", "SELECT pg_notify('dl_jobs', queue)", "SELECT NULL"),
    ),
    *_in(
        ALERTS,
        "-- name: begin_here\n",
        ("from the begin", "(SELECT coalesce(max(event_id), 0) FROM dl_job_events)", "last_event"),
        ("at each webhook", "WHERE NOT EXISTS (SELECT FROM dl_webhooks)", "WHERE true"),
    ),
    *_in(
        ALERTS,
        "-- name: pause\n",
        ("the time of a webhook", "coalesce(paused_at, now())", "now()"),
        ("the author for a webhook", "coalesce(paused_by, %(by)s)", "%(by)s"),
        ("every webhook", "WHERE name = %(name)s", "WHERE true"),
    ),
    *_in(ALERTS, "-- name: resume\n", ("every webhook", "WHERE name = %(name)s", "WHERE true")),
    *_in(ALERTS, "-- name: remove\n", ("every webhook", "WHERE name = %(name)s", "WHERE true")),
    *_in(
        ALERTS,
        "-- name: is_served\n",
        ("another queue", "queue = %(queue)s", "true"),
        ("a silent worker", " AND seen_at > now() - interval '30 s'"),
        ("a dead worker", " AND state <> 'dead'"),
    ),
    *_in(
        ALERTS,
        "-- name: is_firing\n",
        ("of another webhook", "webhook = %(webhook)s", "true"),
        ("of another kind", " AND kind = %(kind)s"),
        ("of another queue", " AND queue = %(queue)s"),
        ("an earlier one", " AND since = %(since)s"),
    ),
    *_in(
        ALERTS,
        "-- name: position\n",
        ("two reapers", " FOR UPDATE SKIP LOCKED"),
        ("waits for the other", " SKIP LOCKED"),
    ),
    *_in(
        ALERTS,
        "-- name: new_events\n",
        ("again", "event_id > %(after)s AND ", ""),
        ("every step", "AND kind IN ('failed', 'lost', 'stuck')", "AND kind IN ('failed', 'lost', 'stuck', 'queued')"),
        ("no lost jobs", "'lost', ", ""),
        ("in any order", " ORDER BY event_id LIMIT %(limit)s", " ORDER BY event_id DESC LIMIT %(limit)s"),
        ("without a bound", " LIMIT %(limit)s"),
        (
            "what is young",
            "SELECT min(event_id) FROM near WHERE is_young",
            "SELECT min(event_id) FROM near WHERE false",
        ),
        (
            "a clock ahead is young",
            "abs(extract(epoch FROM clock_timestamp() - ts)) < %(settle_sec)s",
            "extract(epoch FROM clock_timestamp() - ts) < %(settle_sec)s",
        ),
        ("at once", ">= %(bundle_sec)s", ">= 0 * %(bundle_sec)s"),
        ("by its last", "FROM near ORDER BY event_id LIMIT 1)", "FROM near ORDER BY event_id DESC LIMIT 1)"),
    ),
    *_in(ALERTS, "-- name: begin_anew\n", ("at each round", "WHERE dl_journal_begins_anew(last_event)", "WHERE true")),
    *_in(
        ALERTS,
        "-- name: queues\n",
        ("an old count", " OR counted_at > now() - interval '10 min'", " OR true"),
        ("no pauses", " OR paused_at IS NOT NULL"),
        ("only queues with jobs", "FULL JOIN", "LEFT JOIN"),
    ),
    *_in(ALERTS, "-- name: note_firing\n", ("for ever", "told_at = now()", "told_at = dl_alerts.told_at")),
    *_in(
        ALERTS,
        "-- name: note_resolved\n",
        ("for every webhook", "webhook = %(webhook)s AND ", ""),
        ("of every kind", " AND kind = %(kind)s"),
        ("of every queue", " AND queue = %(queue)s"),
    ),
]
