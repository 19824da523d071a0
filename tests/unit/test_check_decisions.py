"""check: the findings from given facts, without a database."""

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dataloader import check, config
from dataloader.check import database
from dataloader.config import WorkerSpec
from dataloader.queue import probe

DSN = "host=db user=u password=s3cret dbname=d"
pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.mark.parametrize(
    ("number", "level"),
    [(140_012, "error"), (150_000, "ok"), (150_018, "ok"), (180_004, "ok"), (190_000, "warning")],
)
def test_the_versions_that_are_served(number: int, level: str) -> None:
    assert database.version(number).level == level


@pytest.mark.parametrize(
    ("free", "level"), [({"max_connections": 40}, "ok"), ({"max_connections": 39}, "warning"), ({"x": 13}, "error")]
)
def test_whether_there_are_connections_enough(free: dict[str, int], level: str) -> None:
    found = database.connections(14, 40, {"max_connections": 97, **free})
    assert (found.level, next(iter(free)) in found.what) == (level, True)


def of(concurrency: int, prefetch: int | None = None, queue: str = "a") -> WorkerSpec:
    return WorkerSpec(queue=queue, concurrency=concurrency, **({"prefetch": prefetch} if prefetch else {}))


FITS = "may hold 400 keys"


@pytest.mark.parametrize(
    ("workers", "of_others", "level", "at_most", "automatic", "what", "advice"),
    [
        ([of(1, 1)], 0, "ok", 1, None, "", ""),
        ([of(4, 100)], 0, "ok", 100, None, FITS, ""),
        ([of(4, 101)], 0, "warning", 100, None, "", "lower prefetch in WORKERS_JSON to 100, or raise max_locks_per_tr"),
        ([of(9, 999)], 0, "warning", 44, None, "", "lower prefetch in WORKERS_JSON to 44, or raise max_locks_per_tra"),
        ([of(500, 1)], 0, "ok", 1, None, "", ""),
        ([of(4, 100)], 400, "ok", 100, None, "", ""),
        ([of(4, 100)], 401, "warning", 100, None, "", "raise max_locks_per_transaction to 65 "),
        ([of(1, 200), of(100, queue="b")], 0, "ok", 200, None, "", ""),
        # Those without a prefetch divide what the others leave.
        ([of(4)], 0, "ok", None, 100, FITS, ""),
        (
            [of(5)],
            0,
            "ok",
            None,
            80,
            f"{FITS}, others hold 0; the server has room for 1600 locks: a worker without",
            "",
        ),
        ([of(5)], 401, "warning", None, 80, "claims 80 jobs at once at most", ""),
        ([of(5), of(1, 300, "b")], 0, "ok", None, 20, FITS, ""),
        ([of(5), of(1, 400, "b")], 0, "warning", None, 1, "may hold 405 keys", ""),
        ([of(500)], 0, "ok", None, 1, "may hold 500 keys", ""),
    ],
)
def test_whether_the_lock_table_has_room_for_the_keys(
    workers: list[WorkerSpec], of_others: int, level: str, at_most: int | None, automatic: int | None, what: str,
    advice: str,
) -> None:  # fmt: skip
    table = probe.LockTable(64, 25)
    assert at_most is None or probe.most_at_once(table, workers) == at_most
    assert automatic is None or probe.most_at_once(table, workers, is_automatic=True) == automatic
    found = database.locks(table, workers, of_others)
    assert (found.level, what in found.what, found.advice.startswith(advice)) == (level, True, True)
    assert "room for 1600 locks" in found.what


def test_how_many_connections_a_machine_wants() -> None:
    settings = config.load(workers_json='[{"queue":"a","concurrency":3},{"queue":"a"}]', pg_pool_size=2)
    assert database.wanted_connections(settings, same_server=False) == (4 + 2 + 2 * 2, 4 + 2 + 2 * 12 + 1)
    assert database.wanted_connections(settings, same_server=True) == (4 + 2 + 2 * 2, 4 + 2 + 2 * 12 + 1 + 4)
    single = config.load(workers_json='[{"queue":"a"}]', pg_use_pool=False)
    assert database.wanted_connections(single, same_server=False) == (3, 1 + 2 + 2 * 15 + 1)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("FATAL:  unsupported startup parameter: options", "PostgreSQL itself"),
        ("FATAL:  sorry, too many clients already", "raise max_connections"),
        ('FATAL:  too many connections for role "u"', "CONNECTION LIMIT"),
        ('FATAL:  password authentication failed for user "u"', "PG_PASSWORD"),
        ('FATAL:  database "d" does not exist', "create it"),
        ("session is read-only", "name the primary"),
        ('server certificate for "db.example.com" does not match host name "db"', "as the certificate does"),
        ('root certificate file "/r.crt" does not exist', "sslrootcert"),
        ("SSL error: certificate verify failed", "renew an old one"),
        ("failed: server does not support SSL, but SSL was required", "sslmode"),
        ("failed: FATAL:  Passwort-Authentifizierung für Benutzer »u« fehlgeschlagen", "password"),
        ('failed: ВАЖНО:  база данных "d" не существует', "database"),
        ('failed: FATAL:  no pg_hba.conf entry for host "h"', "pg_hba.conf"),
        ("failed: FATAL:  the database system is starting up", "wait"),
        ("connection refused\n\tis it running?", "lets this machine in"),
    ],
)
def test_what_helps_against_no_session(message: str, advice: str) -> None:
    found = database.unreachable("database", DSN, psycopg.OperationalError(message))
    assert found.level == "error"
    assert advice in found.advice
    assert "\n" not in found.what + found.advice
    assert "s3cret" not in found.what


def test_the_folders_of_files_and_of_logs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check.data_folder(tmp_path, given=True).level == "ok"
    assert [check.data_folder(tmp_path / "none", given=given).level for given in (True, False)] == ["error", "warning"]
    assert "is no folder" in check.data_folder(tmp_path / "file", given=True).what
    assert check.written_folder("LOG_PATH", tmp_path / "to" / "be" / "made").level == "ok"
    assert check.written_folder("LOG_PATH", tmp_path / "file" / "x").level == "error"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_folder_whose_files_have_no_locks_is_no_folder_of_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks")))
    found = check.written_folder("AUDIT_LOG_PATH", tmp_path)
    assert (found.level, "No locks" in found.what, "flock" in found.advice) == ("error", True, True)


def test_settings_without_effect_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_USER", "u")
    found = list(check.settings_findings(config.load(), [("DL_HOMES", "DL_HOME")]))
    assert [finding.what for finding in found if finding.level == "warning"] == [
        "DL_HOMES is no setting",
        "without effect: PG_USER",
    ]


def test_settings_are_shown_without_their_secrets() -> None:
    engines = {"address": "http://u:s3cret@ray:8265", "token": "s3cret", "entrypoints": {"total": "python total.py"}}
    given: dict[str, Any] = {
        "_env_file": None,
        "dl_engines": json.dumps({"lab": {"engine": "ray", **engines}}),
        "dl_commands": json.dumps({"hello": {"argv": ["/bin/echo", "hello"]}}),
        "workers_json": '[{"queue": "q", "concurrency": 2}]',
        **{"dl_db_dsn": "postgresql://u:s3cret@db/q", "pg_password": "s3cret", "dl_target_dsn": DSN},
        "cbr_base_url": "https://u:s3cret@example.org/x",
    }
    shown = check.shown(config.load(**given))
    assert "s3cret" not in str(shown)
    assert (shown["PG_PASSWORD"], shown["DL_TARGET_DSN"]) == ("***", "user=u dbname=d host=db")
    assert json.loads(shown["DL_ENGINES"])["lab"]["entrypoints"]["total"]["command"] == "python total.py"
    assert json.loads(shown["DL_COMMANDS"])["hello"]["argv"] == ["/bin/echo", "hello"]
    assert json.loads(shown["WORKERS_JSON"])[0]["queue"] == "q"
    assert list(shown) == [name.upper() for name in config.Settings.model_fields]
