"""Attacks by hostile roles on the queue's database; the schema has to refuse each.

    python -m tools.attack 'host=... user=postgres'        # a server on which databases and roles may be made

The script makes a database with the queue of the code that it imports, and two roles: a stranger, who may only connect,
and a producer (`migrate --roles`), who may also create in the schema. It prints a line for each attack, and drops what
it made. The exit status is 1 when an attack succeeded. `tests/sql/test_rights.py` runs the same attacks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from dataloader.queue import migrations

Attack = Callable[[psycopg.Connection, str], str]

# The attacker's code. It notes the role that runs it; every role may write to the table, for this may be the owner.
EVIL = """
CREATE TEMP TABLE ran_as (who text);
GRANT INSERT ON ran_as TO PUBLIC;
CREATE FUNCTION pg_temp.evil() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO pg_temp.ran_as VALUES (current_user);
  RETURN NULL;
END
$$;
"""
# Temporary tables with the names of the queue's. Their schema comes first in a search_path that does not name it.
SHADOWS = """
CREATE TEMP TABLE dl_jobs (
  job_id uuid DEFAULT gen_random_uuid(), queue text, task text, args jsonb, idempotency_key text UNIQUE, lock_key text,
  partition_key text, priority int, available_at timestamptz, max_attempts int, lease_ttl_sec int, timeout_sec int,
  producer text, consumer_group text, created_at timestamptz, journaled int, status text DEFAULT 'queued', attempt int,
  started_at timestamptz, finished_at timestamptz, heartbeat_at timestamptz, error text, progress jsonb, trace text,
  cancel_requested boolean, blocked_on text);
CREATE TEMP TABLE dl_job_events (event_id bigserial, job_id uuid, queue text, kind text, payload jsonb, ts timestamptz);
GRANT ALL ON dl_jobs, dl_job_events TO PUBLIC;
CREATE TRIGGER evil BEFORE INSERT OR UPDATE OR DELETE ON dl_jobs FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.evil();
CREATE TRIGGER evil BEFORE INSERT OR UPDATE OR DELETE ON dl_job_events
  FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.evil();
"""


def _ran_as(conn: psycopg.Connection) -> str:
    """A text that names the other role that ran the attacker's code; "" if none did."""
    found = conn.execute("SELECT who FROM pg_temp.ran_as WHERE who <> session_user LIMIT 1").fetchone()
    return f"became the owner {found[0]}" if found else ""


JOB = {
    "queue": "q",
    "task": "t",
    "lock_key": "k",
    "args": "{}",
    "partition_key": "",
    "priority": 1,
    "max_attempts": 1,
    "lease_ttl_sec": 60,
}


def _one(conn: psycopg.Connection, idempotency_key: str | None) -> str:
    """A call that adds one job."""
    values = JOB | {"job_id": str(uuid4()), "idempotency_key": idempotency_key}
    return _call(conn, "dl_enqueue_one", {f"p_{name}": value for name, value in values.items()}, None)


def _many(conn: psycopg.Connection, idempotency_key: str | None) -> str:
    """A call that adds a batch of one job."""
    values = JOB | {"job_id": str(uuid4()), "idempotency_key": idempotency_key}
    arrays = {f"p_{name}": f"{{{json.dumps(value)}}}" for name, value in values.items()}
    return _call(conn, "dl_enqueue_many", arrays | {"p_place": None, "p_since": None}, "{null}")


def _call(conn: psycopg.Connection, function: str, values: Mapping[str, object], default: str | None) -> str:
    """A call of the function with its parameters of today: a field that is added later gets the default."""
    found = conn.execute(
        "SELECT proargnames[:pronargs] FROM pg_catalog.pg_proc"
        " WHERE proname = %s AND pronamespace = 'public'::regnamespace",
        (function,),
    ).fetchone()
    assert found, function
    given = sql.SQL(", ").join(
        sql.SQL("{} => {}").format(sql.Identifier(name), values.get(name, default)) for name in found[0]
    )
    return sql.SQL("SELECT public.{}({})").format(sql.Identifier(function), given).as_string(conn)


def _refused() -> NoReturn:
    raise psycopg.errors.InsufficientPrivilege("the attacker's code never ran as the owner")


def gone_on_a_table_of_its_own(conn: psycopg.Connection, job_id: str) -> str:
    """dl_jobs_gone deletes the journal of its trigger's rows with the owner's rights."""
    return _delete(conn, job_id, "dl_jobs_gone")


def _delete(conn: psycopg.Connection, job_id: str, function: str) -> str:
    """Call the trigger's function from a table of the attacker's, who puts a journal of his own first."""
    conn.execute(EVIL + SHADOWS)
    conn.execute("CREATE TEMP TABLE bait (job_id uuid, lock_key text, status public.dl_status, blocked_on text)")
    conn.execute(
        "CREATE TRIGGER bite AFTER DELETE ON bait REFERENCING OLD TABLE AS gone"  # type: ignore[call-overload]
        f" FOR EACH STATEMENT EXECUTE FUNCTION public.{function}()"
    )
    conn.execute("INSERT INTO bait VALUES (%s, 'k', 'queued')", (job_id,))
    conn.execute("DELETE FROM bait")
    return _ran_as(conn) or _refused()


def step_on_a_table_of_its_own(conn: psycopg.Connection, job_id: str) -> str:
    """dl_jobs_step changes its trigger's job with the owner's rights: the attack puts a job back, and journals that."""
    conn.execute(
        "CREATE TEMP TABLE bait (job_id uuid, queue text, lock_key text, status public.dl_status, attempt int,"
        " journaled int, available_at timestamptz, blocked_on text, cancel_requested bool)"
    )
    conn.execute("CREATE TRIGGER bite AFTER UPDATE ON bait FOR EACH ROW EXECUTE FUNCTION public.dl_jobs_step()")
    conn.execute("INSERT INTO bait VALUES (%s, 'q', 'k', 'failed', 1, 0, now())", (job_id,))
    conn.execute("UPDATE bait SET status = 'queued'")
    return "forged a row of the journal: another's job came back"


def journal_on_a_table_of_its_own(conn: psycopg.Connection, job_id: str) -> str:
    """dl_jobs_journal writes its trigger's row with the owner's rights: the attack calls it from a table of its own."""
    conn.execute("CREATE TEMP TABLE bait (job_id uuid, status public.dl_status, attempt int)")
    conn.execute("CREATE TRIGGER bite AFTER INSERT ON bait FOR EACH ROW EXECUTE FUNCTION public.dl_jobs_journal()")
    conn.execute("INSERT INTO bait VALUES (%s, 'succeeded', 7)", (job_id,))
    return "forged a row of the journal: another's job is 'done'"


def score_on_a_table_of_its_own(conn: psycopg.Connection, job_id: str) -> str:
    """dl_jobs_score reads the settings of its row's queue with the owner's rights: the attack asks which is ordered."""
    conn.execute("CREATE TEMP TABLE bait (queue text, created_at timestamptz, score float8)")
    conn.execute("CREATE TRIGGER bite BEFORE INSERT ON bait FOR EACH ROW EXECUTE FUNCTION public.dl_jobs_score()")
    conn.execute("INSERT INTO bait VALUES ('q', now())")
    return "read another's settings: whether the queue q is ordered"


def internal_on_a_table_of_its_own(conn: psycopg.Connection, job_id: str) -> str:
    """dl_jobs_internal reads the farm's messages with the owner's rights: the attack asks whether a job sends one."""
    conn.execute("CREATE TEMP TABLE bait (job_id uuid, task text)")
    conn.execute("CREATE TRIGGER bite BEFORE INSERT ON bait FOR EACH ROW EXECUTE FUNCTION public.dl_jobs_internal()")
    conn.execute("INSERT INTO bait VALUES (%s, 't')", (job_id,))
    return "learned whether a job sends a message of the farm"


def shadows_of_the_tables(conn: psycopg.Connection, job_id: str) -> str:
    """Functions with the owner's rights must not use tables of the caller."""
    conn.execute(EVIL + SHADOWS + "SET search_path = pg_temp, public")
    for statement in (
        "SELECT public.dl_enqueue('q', 't', 'k', idempotency_key => 'a')",
        _one(conn, "a"),
        _one(conn, None),
        _many(conn, None),
        _many(conn, "b"),
        f"SELECT public.dl_job_status('{job_id}')",
        f"SELECT public.dl_set_trace('t', '{{{job_id}}}')",
        "INSERT INTO public.dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 't', 'k')",
    ):
        conn.execute(statement)  # type: ignore[call-overload]
    return _ran_as(conn) or _refused()


def an_operator_that_fits_better(conn: psycopg.Connection, job_id: str) -> str:
    """A role that may create in the queue's schema adds code that an owner's function takes for PostgreSQL's own."""
    conn.execute(EVIL)
    for name, kind in (("evil_eq", "public.dl_status"), ("evil_text_eq", "text")):
        conn.execute(
            f"CREATE FUNCTION public.{name}({kind}, {kind}) RETURNS bool LANGUAGE plpgsql AS"  # type: ignore
            " 'BEGIN INSERT INTO pg_temp.ran_as VALUES (current_user); RETURN true; END'"
        )
        conn.execute(f"CREATE OPERATOR public.= (LEFTARG = {kind}, RIGHTARG = {kind}, FUNCTION = public.{name})")  # type: ignore
    conn.execute(
        "CREATE FUNCTION public.evil_concat(text, public.dl_status) RETURNS text LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO pg_temp.ran_as VALUES (current_user); RETURN $1; END'"
    )
    conn.execute(
        "CREATE OPERATOR public.|| (LEFTARG = text, RIGHTARG = public.dl_status, FUNCTION = public.evil_concat)"
    )
    conn.execute("SELECT public.dl_enqueue('q', 't', 'k', idempotency_key => 'a')")
    conn.execute("SELECT public.dl_enqueue('q', 't', 'k', idempotency_key => 'a')")
    conn.execute(_one(conn, "a"))  # type: ignore[call-overload]
    conn.execute("SELECT public.dl_job_status(%s)", (job_id,))
    return _ran_as(conn) or _refused()


def a_type_that_fits_better(conn: psycopg.Connection, job_id: str) -> str:
    """A session keeps the types of a trigger's variables: the first insert looks for them in the producer's schema."""
    conn.execute(EVIL)
    conn.execute(
        "CREATE FUNCTION pg_temp.evil_check(text) RETURNS bool LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO pg_temp.ran_as VALUES (current_user); RETURN true; END'"
    )
    conn.execute("CREATE DOMAIN pg_temp.text AS text CHECK (pg_temp.evil_check(VALUE))")
    conn.execute("SET search_path = pg_temp, pg_catalog")
    conn.execute("INSERT INTO public.dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 't', 'k')")
    conn.execute("SELECT public.dl_enqueue('q', 't', 'k')")
    return _ran_as(conn) or _refused()


OF_STRANGERS: tuple[Attack, ...] = (
    gone_on_a_table_of_its_own,
    journal_on_a_table_of_its_own,
    step_on_a_table_of_its_own,
    score_on_a_table_of_its_own,
    internal_on_a_table_of_its_own,
)
OF_PRODUCERS: tuple[Attack, ...] = (
    *OF_STRANGERS,
    shadows_of_the_tables,
    an_operator_that_fits_better,
    a_type_that_fits_better,
)


def tried(attack: Attack, dsn: str, job_id: str) -> tuple[bool, str]:
    """True when an attack by the role of `dsn` succeeded, and the result in words; other errors are raised."""
    try:
        with psycopg.connect(dsn, autocommit=True) as conn:
            return True, attack(conn, job_id)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.RaiseException) as e:
        return False, str(e).splitlines()[0]


@contextmanager
def prey(server: str) -> Iterator[tuple[str, str, str]]:
    """A database with a queue of the role of `server`, a stranger and a producer: the three DSNs."""
    mark = f"dl_attack_{os.getpid()}"
    roles = [f"{mark}_stranger", f"{mark}_producer"]
    with psycopg.connect(server, autocommit=True) as admin:
        _run(admin, "CREATE DATABASE {}", mark)
        try:
            dsn = make_conninfo(server, dbname=mark)
            for role in roles:
                _run(admin, "CREATE ROLE {} LOGIN PASSWORD 'p'", role)
            migrations.migrate(dsn, "public")
            with psycopg.connect(dsn, autocommit=True) as owner:
                _run(owner, "GRANT CREATE ON SCHEMA public TO {}", roles[1])  # an operator should not do this
            migrations.grant(dsn, "public", [("producer", roles[1])])
            stranger, producer = (make_conninfo(dsn, user=role, password="p") for role in roles)
            yield dsn, stranger, producer
        finally:
            _run(admin, "DROP DATABASE {} WITH (FORCE)", mark)
            for role in roles:
                _run(admin, "DROP ROLE IF EXISTS {}", role)


def _run(conn: psycopg.Connection, text: str, *names: str) -> None:
    conn.execute(sql.SQL(text).format(*map(sql.Identifier, names)))


def main(server: str) -> int:
    """Try all attacks, and print the result of each."""
    succeeded = 0
    with prey(server) as (owner, stranger, producer):
        with psycopg.connect(owner, autocommit=True) as conn:
            (version,) = conn.execute("SHOW server_version").fetchone() or ("",)
            (job_id,) = conn.execute("SELECT dl_enqueue('q', 't', 'k')").fetchone() or ("",)
        print(f"PostgreSQL {version}")
        for who, dsn, attacks in (("stranger", stranger, OF_STRANGERS), ("producer", producer, OF_PRODUCERS)):
            for attack in attacks:
                done, words = tried(attack, dsn, str(job_id))
                succeeded += done
                print(f"{who:9}{attack.__name__:32}{'SUCCEEDED' if done else 'refused'}: {words}")
    return 1 if succeeded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
