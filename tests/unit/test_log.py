"""log: one valid line per event, whatever its fields hold; no secrets; no caller waits; lost lines are counted."""

import base64
import errno
import fcntl
import json
import logging
import logging.config
import os
import random
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import psutil
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from secret_texts import OWN, TEXTS, TOKENS

from dataloader import log
from dataloader.config import Settings
from dataloader.log import channel, masking, record, sinks

Lines = Callable[[], list[dict[str, Any]]]
ZONE = UTC


def settings(**given: Any) -> Any:
    return Settings.model_construct(**{"timezone": "UTC", "log_file_name": "app.log", **given})


def parsed(data: bytes) -> list[dict[str, Any]]:
    """The documents in `data`; each has to be whole, and one line for every reader."""
    assert data.endswith(b"\n") or not data
    lines = data.decode().splitlines()
    assert len(lines) == data.count(b"\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


@pytest.fixture
def output(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "stdout", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield fd
    os.close(fd)


@pytest.fixture
def lines(output: int) -> Lines:
    log.configure(settings(), output=output)
    return lambda: parsed(os.pread(output, 10_000_000, 0))


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.sampled_from([Hostile(), object(), "x" * 100_000, b"\xff" * 50_000, float("nan"), "\u2028", "\ud800"])
    | st.integers(2_000, 20_000).map(lambda digits: 10**digits)
    | st.datetimes(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner) | st.tuples(inner, inner)
    ),
    max_leaves=30,
)


@given(anything, st.dictionaries(st.text(st.characters()), anything))
def test_j5_whatever_is_logged_is_one_line_of_valid_json(message: Any, fields: dict[str, Any]) -> None:
    line = record.as_json(record.stamped({**fields, "event": message}, "info", "x", "application"))
    assert len(line) <= record.CAP
    (document,) = parsed(line)
    assert document["event"] is not None or message is None


@given(anything)
def test_for_people_too_no_event_is_longer_or_writes_to_the_terminal(value: Any) -> None:
    event = record.stamped({"event": "e", "value": value, "exception": value}, "info", "x", "application")
    pieces = record.as_texts(event, colors=False)
    assert max(map(len, pieces)) <= record.CAP
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028]", b"".join(pieces).decode())


def test_what_is_too_large_is_cut_and_the_line_says_so(lines: Lines) -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = [loop]
    log_of_x = structlog.get_logger("x")
    log_of_x.info("e", text="first " + "x" * 1_000_000 + " last", more=list(range(10_000)), itself=loop)
    log_of_x.info("e", job_id="1", **{f"f{n}": "я" * 3_000 for n in range(100)})
    value, fields = lines()
    assert re.fullmatch(r"(?s)first.*\d+ characters.*last", value["text"])
    assert (fields["event"], fields["job_id"], fields["truncated"]) == ("e", "1", "too large")


def test_lines_of_libraries_and_of_threads_have_the_jobs_context(lines: Lines) -> None:
    with log.context(job_id="1"):
        logging.getLogger("pipeline.x").warning("read %s rows", 5, extra={"rows": 5})
        thread = threading.Thread(target=lambda: structlog.get_logger("x").info("e"))
        thread.start()
        thread.join()
    wrong = {"name": "pipeline.x", "levelno": logging.WARNING, "msg": "read %s rows", "args": ("one", "too many")}
    log._Handler().handle(logging.makeLogRecord(wrong))
    of_library, of_thread, outside = lines()
    assert (of_library["event"], of_library["logger"], of_library["rows"]) == ("read 5 rows", "pipeline.x", 5)
    assert (of_library["job_id"], of_thread["job_id"]) == ("1", "1")
    assert (outside["event"], "job_id" in outside) == ("read %s rows", False)


@pytest.mark.parametrize(
    "given",
    [
        {"root": {"level": "WARNING", "handlers": ["theirs"]}},
        {"root": {"level": "ERROR"}},
        {"disable_existing_loggers": True},
    ],
)
def test_a_logging_configuration_of_the_users_does_not_silence_the_loggers_of_runs(
    lines: Lines, given: dict[str, Any]
) -> None:
    old, new = (f"pipeline.{uuid4().hex}" for _ in range(2))  # a logger lasts as long as its process
    log.of_runs(old)
    logging.config.dictConfig({"version": 1, "handlers": {"theirs": {"class": "logging.NullHandler"}}, **given})
    for name in (old, new, new):
        log.of_runs(name).info("logged by %s", name)
    events = [line["event"] for line in lines() if line["event"].startswith("logged")]
    assert events == [f"logged by {name}" for name in (old, new, new)]


def test_exceptions_are_part_of_the_line(lines: Lines) -> None:
    for logger in (structlog.get_logger("x"), logging.getLogger("x")):
        try:
            raise ValueError("password=s3cret")
        except ValueError:
            logger.exception("failed")
    by_structlog, by_logging = (line["exception"] for line in lines())
    for text in (by_structlog, by_logging):
        assert "ValueError" in text
        assert "test_log.py" in text
        assert "s3cret" not in text


def test_people_read_texts_of_several_lines_as_lines_that_no_other_line_can_be_taken_for(output: int) -> None:
    log.configure(settings(local=True, timezone="Asia/Tokyo"), output=output)
    forged = "2026-01-01 00:00:00 [info] all is well"
    message = f"wrong\n{forged}\x1b[2J"
    try:
        raise ValueError(message)
    except ValueError:
        structlog.get_logger("x").exception("it\nfailed", error=f"head\n\n{forged}", rows=5)
    text = os.pread(output, 10_000, 0).decode()
    first, *rest = text.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\+09:00 \[error", first)
    assert "it " in first
    assert "error=head" in first
    assert "rows=5" in first
    assert [line.strip() for line in rest].count(forged) == 1
    assert "    Traceback (most recent call last):" in rest
    assert all(line.startswith("    ") or not line for line in rest)
    assert "\x1b" not in text
    assert "\\n" not in text


def test_a_crash_of_a_process_or_thread_is_a_line(output: int) -> None:
    log.configure(settings(), threaded=True, output=output)
    thread = threading.Thread(target=lambda: [][0], name="mine")
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("token=s3cret"), None)
    first, second = parsed(os.pread(output, 100_000, 0))
    assert (first["event"], first["thread"], second["event"]) == ("thread.crashed", "mine", "process.crashed")
    assert "s3cret" not in second["exception"]


FINISHED = {"worker": str, "job_id": UUID, "task": str, "attempt": int, "outcome": StrEnum, "cpu_sec": float}


@pytest.mark.parametrize(
    "task", ["t", 'a"b\\c', "tab\tend", "\u00fc", "\u202e", "x" * 5_000, "password=s3cret", "%(task)s %s"]
)
def test_a_template_writes_what_the_long_way_writes(task: str, output: int, tmp_path: Path) -> None:
    template = log.Template("worker", "worker.job.finished", FINISHED | {"error": NoneType})
    fields = {"worker": "host:1:abc", "job_id": uuid4(), "task": task, "attempt": 3, "outcome": "done", "cpu_sec": 0.25}
    log.configure(settings(log_path=tmp_path), output=output)
    template.write(fields)
    log._emit("worker", logging.INFO, {"event": "worker.job.finished", **fields, "error": None})
    briefly, at_length = parsed(os.pread(output, 100_000, 0))
    assert list(briefly)[:5] == ["timestamp", "level", "event", "logger", "stream"]
    at_length["timestamp"] = briefly["timestamp"]
    assert {"error": None, **briefly} == at_length
    assert "s3cret" not in str(briefly)
    log.flush()
    assert [line["event"] for line in parsed((tmp_path / "app.log").read_bytes())] == ["worker.job.finished"] * 2


@pytest.mark.parametrize("text", TEXTS)
def test_j4_secrets_are_masked_in_texts(text: str) -> None:
    assert "s3cret" not in log.masked(text)
    assert OWN[:40] not in log.masked(text)
    assert log.MASK in log.masked(text)


@pytest.mark.parametrize("user", ["ann@example.com", "ann.lee", "79161234567", "ann lee", "CN=ann", ""])
@pytest.mark.parametrize("flag", ["-u", "-U", "--user", "--proxy-user"])
def test_the_password_of_every_login_in_a_command_is_masked(flag: str, user: str) -> None:
    assert log.masked(["curl", flag, f"{user}:12345678"]) == ["curl", flag, f"{user}:***"]
    if " " not in user and "=" not in user:
        assert log.masked(f"curl {flag} {user}:12345678 h") == f"curl {flag} {user}:*** h"
    assert log.masked(["docker", flag, "1000:1000"]) == ["docker", flag, "1000:1000"]


@pytest.mark.parametrize("key", ["api", "access", "private", "auth"])
@pytest.mark.parametrize("joint", ["", "-", "_"])
def test_each_kind_of_key_is_masked(key: str, joint: str) -> None:
    assert log.masked(f"--{key}{joint}key canary") == f"--{key}{joint}key ***"
    assert log.masked(f"{key}{joint}KEY: canary") == f"{key}{joint}KEY: ***"


# Texts that only speak of secrets, or that look like a place or a form of a secret.
INNOCENT = [
    "send a bearer token", "bearer authentication", 'relation "dl_job_events" does not exist: dl_jobs_forget',
    "cannot reach http://h:8081", "cannot reach http://h:8081/a/b", "it's fine",
    "private.key: Permission denied", "the rows identified by 'id'", "the user is identified by 'id'", "-url:jdbc:x",
    "mysql -h h -p db", "mkdir -p/a/mysql", "a.c:12:a:b:c", "arn:aws:logs:*:1:group:x", "o:5432:a:b",
    "0a1b" * 8 + "-use", "the machine login needs a password then", "path.0a1b", "pass: 2\nfail: 3",
    "SHA1:" + "AA" * 20, "auth=None", "use_auth=true", "first_pass: done", "-user:ann",
    "Basic Authentication", "the basic plan2024", 'index "dl_job_events_2026_11_28_job_id_event_id_idx"',
    "usage: login <password> FILE", "token.json: not found", "pass: 2 of 3", "add user/name@host",
    "took 5: fine", "lock_key=a",
    "docker run -u 1000:1000 x", "python -u x.py:12", "redis-cli -p 6379", "a token value: 5", "mkdir -P a/zip",
    "cache-key-" + "0a1b" * 8, "tar -a x", "name: x\n  value: y", "psql -U ann -p 5432",
    "token_alg: HS256", "signature_algorithm=x", "redis-cli -h redis-a ping", "sqlplus ended with 1: see /var/log/x",
    "columns: token, name", "of this token\n        :param name: of it", "git add -u :/",
    "https://host:80/a?b=c", "a@b.de", "primary key: id",
    "tokens: 5", "max_tokens=4096", "{'usage': {'input_tokens': 120000}}", "primary_key=id", "key: value",
    "?key=orders&page=2", "/jobs?key=3f2504e0-4f89-41d3-9a0c-0305e82c3301", "AUTH failed for user ann", "AUTH required",
    "250-AUTH LOGIN PLAIN CRAM-MD5",
    '{"p": 0.5, "q": 0.7, "d": "2026-01-01"}', "columns = ['token', 'created_at']", "?code=404", "SMTP_AUTH=login",
    "docker login -p", "ssh -p 2222 h", "mongod -p 27017", "set token bucket size", "on > 5 rows", "sk-learn",
    "r8_", "EAAG", "re_2026_report", "fc-barcelona-2026", "secret_santa_2026_gifts_for_all_employees", "the v1.0-beta",
    "10.0.0.1:5432", "curl -b cookies-off", "https -a", "sha256:" + "0a1b" * 16, "task_daily_aggregation_2026_01_01",
    "<max_tokens>5</max_tokens>", '{"tokens": "5"}.', "ffmpeg -i a.mp4 -pass 1 b.mp4", "(AUTH required)",
]  # fmt: skip


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_speaks_of_secrets_or_looks_like_one_stays(text: str) -> None:
    assert log.masked(text) == text


def test_j4_secrets_are_masked_by_name_in_any_structure() -> None:
    jwk = {"kty": "EC", "crv": "P-256", "x": "public", "d": "private"}
    assert log.masked({"keys": [jwk]}) == {"keys": [jwk | {"d": "***"}]}
    assert log.masked({"d": "2026-01-01"}) == {"d": "2026-01-01"}
    secret = {
        "password": "s3cret",
        "db": [{"apiKey": "s3cret", "credentials": {"user": "s3cret"}}, ("postgresql://u:s3cret@h/d",)],
        "token": SecretStr("s3cret"),
        "other": SecretStr("s3cret"),
        "env": [{"name": "DB_PASSWORD", "value": "s3cret"}],
        "shown": {"lock_key": "a", "tokens": 5, "password": None, "n": 1.5, "name": "token_type", "value": "a"},
    }
    before = repr(secret)
    masked = log.masked(secret)
    assert "s3cret" not in repr(masked)
    assert masked["shown"] == secret["shown"]
    assert repr(secret) == before, "the value itself is as it was"


@pytest.mark.parametrize(
    "password", ["a-canary", "p@ss w/rd", "it's mine", 'back\\slash"quote', "мой пароль", "a%b+c%d+e"]
)
@pytest.mark.parametrize("shape", [str, repr, json.dumps, lambda p: json.dumps(p, ensure_ascii=False)])
def test_j4_configured_secrets_are_known_wherever_they_occur(
    password: str, shape: Callable[[str], str], output: int
) -> None:
    from urllib.parse import quote

    dsn = SecretStr(f"postgresql://u:{quote(password, safe='')}@h/db")
    log.configure(settings(dl_db_dsn=dsn), output=output)
    structlog.get_logger("x").info(f"cannot log in: {shape(password)}!", value=shape(password))
    structlog.get_logger("x").info("e", dsn_text=[quote(password, safe="")], key={shape(password): 1})
    raw = os.pread(output, 100_000, 0).decode()
    texts = [
        text for line in parsed(raw.encode()) for text in (line["event"], line.get("value", ""), *line.get("key", {}))
    ]
    assert not [text for text in texts if shape(password).strip("'\"") in text]
    assert json.dumps(password)[1:-1] not in raw
    assert quote(password, safe="") not in raw


def test_j4_the_environments_secrets_are_known_however_a_url_encodes_them(
    monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setenv("BANK_API_KEY", "a-canary+of/a@key")
    monkeypatch.setenv("TOKEN_STYLE", "short")
    monkeypatch.setenv("DL_WEBHOOK_OPS", "https://h/a-canary-of-a-path")
    monkeypatch.setenv("DL_WEBHOOK_AM", "https://u:a-canary-of-a-login@h/")
    monkeypatch.setenv("DL_SOURCE_CRM", "postgresql://reader:a-canary-of-a-source@h/d")
    masking.learn_configured(settings(pg_password=SecretStr("abc")))
    structlog.get_logger("x").info(
        "a-canary+of/a@key https://h/a-canary-of-a-path a-canary-of-a-login a-canary-of-a-source short abc"
    )
    masked = f"{log.MASK} {log.MASK} {log.MASK} {log.MASK} short abc"
    assert lines()[0]["event"] == masked, "too short to look for: abc is everywhere"
    for form in ("a-canary%2Bof/a%40key", "a-canary%2bof%2fa%40key", "a-canary%2Bof%2Fa%40key"):
        assert log.masked(f"GET /x/{form}/y") == "GET /x/***/y"


@pytest.mark.parametrize(
    "args",
    [
        {"tokens": ["a-canary"]},
        {"credentials": {"a": [{"b": "a-canary"}]}},
        {"source": ["ftp://u:a-canary@h/x"]},
        {"source": "ftp://u:a-can%61ry@h/x"},
        {"authorization": "Bearer a-canary"},
        {"auth": ["u", "a-canary"]},
        {"connection_string": "a-canary"},
        {"db": [{"password": "a-canary"}]},
        {"dsn": "postgresql://u:a-canary@h/d"},
    ],
)
def test_j4_a_jobs_secrets_are_known_until_the_next_job_however_they_are_given(args: dict[str, Any]) -> None:
    log.learn_job(args)
    assert log.masked("it is a-canary, not a-canary-bird or ba-canary") == "it is ***, not ***-bird or ba-canary", args
    log.learn_job({})
    assert log.masked("it is a-canary") == "it is a-canary"


class Shown(NamedTuple):
    label: str
    text: str


def test_a_tuple_keeps_its_names_beside_a_jobs_secrets() -> None:
    (button,) = log.masked({"args": {"password": "a-canary"}, "buttons": [Shown("Run", "with a-canary")]})["buttons"]
    assert (type(button), button.text) == (Shown, f"with {log.MASK}")


def test_what_stands_beside_a_secret_is_shown() -> None:
    log.learn_job({"credentials": {"region": "north", "port": 5432, "password": 12345678}, "max_tokens": 12345679})
    assert log.masked("north 5432 12345678 12345679") == f"north 5432 {log.MASK} 12345679"


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("text", ["{}", "the call with {}: refused", '{{"a": "{}"}}', "GET /x/{}/y"])
def test_tokens_of_known_services_are_masked_by_their_form(token: str, text: str) -> None:
    assert token[-10:] not in log.masked(text.format(token))
    assert token[-10:] not in json.dumps(log.masked({"any": [text.format(token)]}))


@pytest.mark.parametrize(
    "name",
    ["password", "passwd", "passphrase", "passcode", "pass", "pwd", "secret", "Token", "AUTHORIZATION", "cookie",
     "credential", "\u017fecret", "to\u212aen",
     "sessionid", "database_url", "pin", "signature", "ssh_key", "otp", "license_key", "accountKey", "sas",
     "webhook_url", "userPassword", "PGPASSWORD", "client_secret",
     "secretKey", "db_pass", "x-api-key", "password_old", "refreshToken"],
)  # fmt: skip
def test_names_of_secrets_are_known_in_any_style(name: str) -> None:
    """Case does not matter, also for letters that only `re.IGNORECASE` equates with ours."""
    assert log.masked({name: "canary"}) == {name: "***"}
    if not name.endswith("_url"):  # in a text a URL is masked where it has a secret
        assert log.masked(f"{name}=canary") == f"{name}=***"


@pytest.mark.parametrize(
    "name",
    ["secretary", "tokenizer", "compass", "passenger", "keyboard", "lock_key", "primary_key", "password_length",
     "token_type", "tokenCount", "secret_name", "SECRETS_DIR", "author", "spin", "design", "token_url",
     "passwordChangedAt", "cookie_policy", "url"],
)  # fmt: skip
def test_other_names_are_known_from_them(name: str) -> None:
    assert log.masked({name: "canary"}) == {name: "canary"}
    assert (
        log.masked(f"{name}=canary, {name}: canary --{name} canary") == f"{name}=canary, {name}: canary --{name} canary"
    )


# The secrets of these settings: one that is too short to be masked as a word, and one that is not.
FARM = settings(pg_password=SecretStr("farm"), dl_db_dsn=SecretStr("postgresql://u:farmyard@h/d"))
WORDS = re.findall(
    r"\S+",
    "customer order secretary monkey keyboard passenger compass tokenizer author key keys lock primary foreign user"
    " zip of is turkey sequence design signal spin pinned session bypass passed authority authentic accounts account"
    " api client url shared database path host port rate date created_at status note the and a farmer's farmyards",
)


def plain_value(rng: random.Random) -> Any:
    """A value as rows of tables have it, without a secret."""
    word = partial(rng.choice, WORDS)
    makers: list[Callable[[], Any]] = [
        lambda: rng.randrange(10 ** rng.randrange(1, 12)), lambda: round(rng.random() * 1e6, 2), rng.random,
        lambda: str(UUID(int=rng.getrandbits(128))), lambda: rng.randbytes(20).hex(),
        lambda: base64.b64encode(rng.randbytes(rng.randrange(6, 40))).decode(), lambda: f"{word()}@{word()}.com",
        lambda: f"https://{word()}.com/{word()}?{word()}={rng.randrange(999)}#x",
        lambda: rng.choice([True, False, None]),
        lambda: " ".join(rng.choices(WORDS, k=9)), lambda: f"{word()}: {word()}, {word()}={word()} --{word()} {word()}",
        lambda: f"SELECT {word()} FROM {word()} WHERE {word()} = '{word()}'", lambda: {word(): plain_value(rng)},
        lambda: [plain_value(rng) for _ in range(rng.randrange(4))],
    ]  # fmt: skip
    return rng.choice(makers)()


def test_ten_thousand_values_that_are_no_secrets_stay() -> None:
    masking.learn_configured(FARM)
    rng = random.Random(7)
    for _ in range(10_000):
        value = {rng.choice(WORDS): plain_value(rng), "client_key": rng.randrange(10**9)}
        assert log.masked(value) == value


def test_flags_in_lists_and_a_jobs_own_secrets_are_masked() -> None:
    shown = log.masked({
        "args": {"password": "hunter-22", "command": ["psql", "--password", "x", "-u", "ann:pw", "login hunter-22"]},
        "error": "cannot log in with hunter-22 as hunter-222",
    })  # fmt: skip
    assert shown["args"] == {
        "password": "***",
        "command": ["psql", "--password", "***", "-u", "ann:***", "login ***"],
    }
    assert shown["error"] == "cannot log in with *** as hunter-222"
    assert log.masked("curl -u ann:pw https://h/?a=1&sig=pw%2B") == "curl -u ann:*** https://h/?a=1&sig=***"
    basic = "as Basic dTpzM2NyZXQ= and ('Authorization', 'basic dTpzM2NyZXQ')"
    assert log.masked(basic) == "as Basic *** and ('Authorization', 'basic ***')"
    assert log.masked("as Basic dTpww6Rzc3fDtnJk") == "as Basic ***", "its password is not ASCII"


def test_a_known_secret_is_masked_as_a_whole_word_of_eight_characters() -> None:
    masking.learn_configured(FARM)
    data = {"name": "the farmer's farmyards", "note": "a farm"}
    assert log.masked(data) == data
    assert log.masked("farmyard, u%3Afarmyard%40h and a\\nfarmyard") == "***, u%3A***%40h and a\\n***"
    assert masking.too_short(FARM) == ["pg_password"]


@pytest.mark.parametrize(
    "piece",
    ["password", "password=", "password='", 'password="\\', "://a:", "://a", "://", "a" * 50, "token: \\'", "cookie:",
     "dl_", "dl_" + "a" * 40, "bearer ", "https://a@", "password '", "password: [", "PRIVATE KEY-----", "token%3D", "-",
     "token---", "--token-", "--a", "--password ", "://" * 70 + " @ ", "://u:", "://a:b@ ", "password=[ ",
     "password={,", "-eyJ", "mysql ", "a.*-", '"a:5432:', "machine a ", "user: a\n", "sshpass -p", "0a1b", "pat0a1b",
     "password" + " " * 39, "ldapsearch -a ", "redis-cli -p ", "zip -P", "sql -p 7z ",
     "token</name> <", "-u 1.1:1", "key-0a", "AUTH a ", "SETUSER a ", "set token-", "?key=a1", "http -a ",
     "_connect(a,", "login -p", "--pass ", "'token', '", "\"kty\" \"d\":\"", "a_auth="],
)  # fmt: skip
@pytest.mark.long
def test_no_text_takes_much_longer_than_others_of_its_length(piece: str) -> None:
    """The bound compares CPU times with those of a usual log line, so that it holds on any machine.

    Other programs use the machine too: it is enough that one of three maskings is quick.
    """
    hostile = "password= :// bearer -- PRIVATE KEY " + piece * (100_000 // len(piece))
    assert any(took(hostile) < 20 * usual() for _ in range(3))


@cache
def usual() -> float:
    """The CPU seconds that a usual text of this length takes."""
    line = "2026-01-31 GET https://host/path?x=1 key: value, took=3 ms -- it's fine, the password was left out "
    return min(took(line * (100_000 // len(line))) for _ in range(3))


def took(text: str) -> float:
    """The CPU seconds of a masking."""
    before = time.thread_time()
    log.masked(text)
    return time.thread_time() - before


def test_passwords_of_urls_are_found_wherever_one_may_begin() -> None:
    assert log.masked("://://u:a://b@h x://y z://u:p@q r") == "://:***@h x://y z://u:***@q r"
    assert log.masked("http://h:5432/x " + "://u:p:" * 200 + "@h end") == "http://h:5432/x " + "://u:p:" * 157 + (
        "://u:***@h end"
    )
    assert log.masked("://u:" + "p" * 300 + "@h") == "://u:***@h"
    assert log.masked("://u:" + "p" * 301 + "@h") == "://u:" + "p" * 301 + "@h"
    assert log.masked("cut off at ://u:pass") == "cut off at ://u:***"
    assert log.masked("a port at ://h:5432") == "a port at ://h:5432"


def test_g5_a_text_of_many_megabytes_and_what_is_nested_without_end_are_masked() -> None:
    text = log.masked("password=s3cret " + "x y " * 10_000_000 + " token=s3cret")
    assert len(text) < 1_100_000
    deep: Any = "s3cret"
    for _ in range(500):
        deep = [deep]
    assert "s3cret" not in text + repr(log.masked(deep))


def test_streams_without_a_file_go_to_stdout(lines: Lines) -> None:
    log.metric("counted")
    structlog.get_logger("audit").info("asked")
    structlog.get_logger("x").info("a\nb", text="c\n\x1b[31m\u2028d")
    found = [(line["event"], line["stream"], line["level"]) for line in lines()]
    assert found == [("counted", "metric", "info"), ("asked", "audit", "info"), ("a\nb", "application", "info")]


def test_a_file_that_cannot_be_written_or_locked_costs_its_lines_only(
    tmp_path: Path, output: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks")))
    (tmp_path / "file").write_text("")
    given = {"audit_log_path": tmp_path, "audit_log_file_name": "audit.log", "log_path": tmp_path / "file"}
    log.configure(settings(**given), output=output)
    for _ in range(2):
        structlog.get_logger("x").info("one")
        log.audit("asked")
    found = parsed(os.pread(output, 10_000, 0))
    assert sorted(line["event"] for line in found) == ["log.write.failed", "log.write.failed", "one", "one"]
    errors = {line["to"]: line["error"] for line in found if line["event"] == "log.write.failed"}
    assert "log files need a file system with flock" in errors[str(tmp_path / "audit.log")]


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [("10 MB", 10_000_001, True), ("10 MB", 10_000_000, False), ("1KB", 1_001, True), ("1 KiB", 1_024, False)],
)
def test_rotation_by_size(text: str, size: int, expected: bool) -> None:
    assert sinks.rule(text, ZONE)(os.stat_result((0, 0, 0, 0, 0, 0, size, 0, 0, 0)), 0) is expected


@pytest.mark.parametrize(
    ("text", "one", "other", "same"),
    [
        ("midnight", "2026-01-31T00:00", "2026-01-31T23:59", True),
        ("1 day", "2026-01-31T23:59", "2026-02-01T00:00", False),
        ("1 hour", "2026-01-31T22:59", "2026-01-31T23:00", False),
        ("6 hours", "2026-01-31T18:00", "2026-01-31T23:00", True),
        ("1 week", "2026-02-01T23:00", "2026-02-02T00:00", False),  # a Sunday, a Monday
        ("1 week", "2026-02-02T00:00", "2026-02-08T23:00", True),
    ],
)
def test_rotation_by_time(text: str, one: str, other: str, same: bool) -> None:
    number = sinks.period(text, ZONE)
    numbers = {number(datetime.fromisoformat(at + "+00:00").timestamp()) for at in (one, other)}
    assert (len(numbers) == 1) is same


def test_a_file_of_yesterday_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    path.write_text("old\n")
    os.utime(path, (0, 0))
    sinks.File(path, sinks.rule("midnight", ZONE)).write([b"new\n"])
    assert path.read_text() == "new\n"
    (aside,) = set(tmp_path.iterdir()) - {path}
    assert aside.read_text() == "old\n"
    assert re.fullmatch(r"app\.\d{8}T\d{6}\.\d{6}Z\.log", aside.name)


@pytest.mark.parametrize("text", ["", "10", "MB", "0 days", "1 month", "-1 MB", "0 MB", "0.5 B", "1 iB", "9" * 5_000])
def test_a_wrong_rotation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="should be a size"):
        sinks.rule(text, ZONE)


def test_a_file_moved_by_another_program_is_left_to_it_and_nobody_holds_one_that_is_not_written(
    tmp_path: Path,
) -> None:
    """Otherwise a deleted file keeps its space until every process of the machine has logged a line."""
    path = tmp_path / "app.log"
    file = sinks.File(path, sinks.rule("1 MB", ZONE))
    file.write([b"one\n"])
    path.rename(tmp_path / "moved")
    file.write([b"two\n"])
    assert (path.read_text(), (tmp_path / "moved").read_text()) == ("two\n", "one\n")
    assert not [file for file in psutil.Process().open_files() if "app.log" in file.path]


def test_a_lock_that_is_held_delays_lines_but_loses_none(tmp_path: Path) -> None:
    """The case of a process that was stopped (SIGSTOP) during a rotation: the lines wait in their queue."""
    path = tmp_path / "app.log"
    path.write_text("x" * 100 + "\n")
    way = channel.Channel(sinks.File(path, sinks.rule("1 MB", ZONE)), log._counting, pytest.fail)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        way.put(b"one\n", urgent=False)
        assert not way.drain(0.05)
    way.put(b"two\n", urgent=False)
    assert path.read_text().endswith("x\none\ntwo\n")


@contextmanager
def room(size: int) -> Iterator[None]:
    """This process can make no file larger than `size` bytes: its writes end as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    path.write_text("first\n")
    file = sinks.File(path, sinks.rule("1 MB", ZONE))
    with room(20):
        assert file.write([b"second\n", b"is too long\n"]) == 1
        with pytest.raises(OSError, match="no room for a line"):
            file.write([b"is too long\n"])
    assert path.read_text() == "first\nsecond\n"


def test_the_documentation_names_every_event() -> None:
    root = Path(log.__file__).parents[2]
    source = "\n".join(path.read_text("utf-8") for path in (root / "dataloader").rglob("*.py"))
    method = r"\.(?:debug|info|warning|error|exception|metric|audit|failed|_log_start)"
    call = rf"(?:{method}|\blog)\(\s*\"([a-z_]+(?:\.[a-z_]+)+)\""
    before = r"\"event\": |going_on\(conn, [a-z_]+, |Template\(\s*\"[a-z]+\",\s*"
    before += r"|_users_code\(f?\"[^\"]*\", "
    others = rf"(?:{before})\"([a-z_.]+)\""
    events = {*re.findall(call, source), *re.findall(others, source)}
    events |= set(re.findall(r"\"([a-z]+\.session\.lost)\"", source))
    of_reaper = (root / "dataloader/farm/reaper.py").read_text("utf-8")
    duties = set(re.findall(r"(?:^            \(|self\._do\()\"([a-z_]+)\", ", of_reaper, re.MULTILINE))
    events |= {f"reaper.{duty}.failed" for duty in duties}
    assert {"worker.claim.backoff", "worker.claim.unheard", "reaper.requeued", "api.error"} <= events
    listed = (root / "docs/events.md").read_text("utf-8").split("## All events")[1]
    documented = set(re.findall(r"(?:^- |, |; |  )`([a-z_]+(?:\.[a-z_]+)+)`(?=,|:)", listed, re.MULTILINE))
    assert events - documented == set()
    assert documented - events <= {"worker.job.finished", "worker.ownership.lost"}, "chosen by a condition"


def test_people_see_a_long_exception_whole_in_lines_that_fit() -> None:
    exception = "\n".join(f'  File "load.py", line {number}, in step_{number}' for number in range(300))
    event = record.stamped({"event": "failed", "exception": f"{exception}\nevil \x1b[2J"}, "error", "x", "application")
    pieces = record.as_texts(event, colors=False)
    assert len(pieces) < 6  # lines of other processes come between two pieces
    assert all(len(piece) <= record.CAP and piece.endswith(b"\n") for piece in pieces)
    text = b"".join(pieces).decode()
    assert all(f"in step_{number}\n" in text for number in range(300))
    assert all(line.startswith("    ") for line in text.splitlines()[1:])
    assert "\x1b" not in text


def test_a_long_exception_for_people_waits_for_no_reader() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4_096)
    log.configure(settings(local=True), threaded=True, output=writing)
    began = time.monotonic()
    structlog.get_logger("x").error("failed", exception="\n".join(f"line {number}" + "x" * 40 for number in range(300)))
    waited = time.monotonic() - began
    log.close(0)
    os.close(reading)
    os.close(writing)
    assert waited < 1
