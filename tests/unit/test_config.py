"""config: its sources, its refusals, which never show a value."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import settings_doc

import dataloader
from dataloader import check, config
from dataloader.config import ConfigError, load

TOKEN = '{"name":"a","scopes":["read"],"sha256":"' + 64 * "0" + '"}'
PROJECT = Path(dataloader.__file__).parent.parent
pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.mark.parametrize(
    ("tz", "localtime", "timezone", "zone"),
    [
        (":Asia/Tokyo", "Europe/Berlin", "Europe/Paris\n", "Asia/Tokyo"),
        ("JST-9", "Europe/Berlin", "Europe/Paris\n", "Europe/Berlin"),
        ("", "Etc/UTC", "Europe/Paris\n", "Etc/UTC"),
        ("../../etc/passwd", None, "Europe/Paris\n", "Europe/Paris"),
        ("", None, None, "UTC"),
        ("", "no/such", "none\n", "UTC"),
    ],
)
def test_the_machines_zone(
    tz: str,
    localtime: str | None,
    timezone: str | None,
    zone: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", tz)
    (tmp_path / "etc").mkdir()
    if localtime:
        (tmp_path / "etc/localtime").symlink_to(f"/usr/share/zoneinfo/{localtime}")
    if timezone:
        (tmp_path / "etc/timezone").write_text(timezone)
    assert config.machine_zone(tmp_path) == zone


@pytest.mark.parametrize("given", [{}, {"TIMEZONE": ""}, {"TIMEZONE": "Europe/Moscow"}])
def test_servers_have_the_contracts_zone_and_people_their_machines(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIMEZONE", raising=False)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = config.load()
    assert settings.timezone == "Europe/Moscow"
    assert settings.people_zone == (given.get("TIMEZONE") or "Asia/Tokyo")


NO_HOSTS = ("http://127.0.0.1", "127.0.0.1:80", "[::1]:80", "a b", "[::1", "unix:/run/x", "x" * 64)
NO_SCHEDULER = 'scheduler: should be "lag", "sequential", "strict"'
WRONG_WORKERS = [
    ("s3cret", "WORKERS_JSON: should be JSON such as"),
    ("[" * 100_000, "WORKERS_JSON: should be JSON such as"),
    ('[{"queue":"q","concurrency":0}]', "WORKERS_JSON[0].concurrency: Input should be greater"),
    ('[{"queue":"q","workers":"s3cret"}]', "WORKERS_JSON[0].workers: there is no such word; there are queue, "),
    ("[{}]", 'WORKERS_JSON[0]: should have either "queue", or "queues": ["orders", "stock"]'),
    ('[{"queue":"a","queues":["b"]}]', 'WORKERS_JSON[0]: should have either "queue", or "queues"'),
    ('[{"queues":[]}]', "WORKERS_JSON[0].queues: List should have at least 1 item"),
    ('[{"queues":["a","a"]}]', 'WORKERS_JSON[0]: should name each queue once in "queues"'),
    ('[{"queue":"a","scheduler":"lag"}]', 'WORKERS_JSON[0]: should have "queues" where it has "sc'),
    ('[{"queues":["a"],"scheduler":"s3cret"}]', NO_SCHEDULER),
    ('[{"queues":["a"],"scheduler":{"a":0}}]', NO_SCHEDULER),
    ('[{"queues":["a","b"],"scheduler":{"a":2}}]', 'should have a weight in "scheduler" for each'),
    ('[{"queue":"a"},{"queues":["a"],"scheduler":"strict"}]', 'should have one "scheduler" for the s'),
]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("APP_PORT", "s3cret", "APP_PORT: Input should be a valid integer"),
        ("TIMEZONE", "s3cret", "TIMEZONE: should be a time zone such as Europe/Moscow"),
        ("DL_HEARTBEAT_SEC", "nan", "DL_HEARTBEAT_SEC: "),
        ("DL_DB_DSN", "s3cret s3cret", "DL_DB_DSN: should be postgresql://"),
        ("DL_DB_DSN", "postgresql://u:p@s3cret@h/d", "DL_DB_DSN: should have @ : / and % in its password"),
        ("DL_DB_DSN", "postgresql://u:p/s3cret@h/d", "DL_DB_DSN: should have @ : / and % in its password"),
        ("DL_TARGET_DSN", "postgresql://u:s3cret@h:5x9/d", "DL_TARGET_DSN: should have a number for the port"),
        ("PG_SCHEMA_QUEUE", 'a"b; s3cret', "PG_SCHEMA_QUEUE: String should match"),
        ("LOG_ROTATION", "s3cret", 'LOG_ROTATION: should be a size such as "10 MB" or a time'),
        ("LOG_PATH", "~s3cret/x", "LOG_PATH: should be a folder"),
        ("DL_API_TOKENS", "s3cret", "DL_API_TOKENS as a whole: should be JSON such as"),
        ("DL_API_TOKENS", '[{"s3cret": ["read"]}]', "DL_API_TOKENS[0]: should be an object of name, scopes and sha256"),
        (
            "DL_API_TOKENS",
            '[{"name":"a","scopes":["all"],"sha256":"s3cret"}]',
            "DL_API_TOKENS[0].sha256: should be the",
        ),
        ("DL_API_TOKENS", '[{"name":"a","scopes":["s3cret"]}]', "DL_API_TOKENS[0].scopes[0]: Input should be 'read',"),
        ("DL_API_TOKENS", '[{"name":"anonymous"}]', "DL_API_TOKENS[0].name: should not be anonymous"),
        ("DL_API_TOKENS", f"[{TOKEN},{TOKEN}]", "DL_API_TOKENS as a whole: should have each sha256 once"),
        ("OLLAMA_API_URL", "http://u:s3cret@h:1,h:2", "OLLAMA_API_URL: should be URLs such as http://localhost:11434,"),
        ("MLX_API_URL", "http://h/?key=s3cret", "MLX_API_URL: should be URLs such as"),
        ("DL_PUBLIC_URL", "farm.example.com", "DL_PUBLIC_URL: should be a URL such as https://dataloader"),
        ("DL_PUBLIC_URL", "https://u:s3cret@h/", "DL_PUBLIC_URL: should have no user and no password"),
        ("MLX_API_URL", "file:///s3cret", "MLX_API_URL: should be URLs such as"),
        ("DL_LLM_CATEGORIES", "s3cret", "DL_LLM_CATEGORIES: should be JSON such as"),
        ("DL_LLM_CATEGORIES", '{"s3cret": ["*"]}', "DL_LLM_CATEGORIES: should be an object with names among reasoning"),
        ("DL_STALL_SEC", "10", "DL_STALL_SEC: should be more than DL_HEARTBEAT_SEC"),
        ("DL_HEARTBEAT_SEC", "900", "DL_STALL_SEC: should be more than DL_HEARTBEAT_SEC"),
        ("DL_PIPELINES", "my_jobs, queue", "DL_PIPELINES: queue is a module of Python itself: give yours another name"),
        *(("APP_HOST", value, "APP_HOST: should be an address or a name of this machine") for value in NO_HOSTS),
        *(
            ("DL_HOST_MEMORY", value, "DL_HOST_MEMORY: should be percent from 0 to 100, or a size such as 600MB")
            for value in ("101", "-1", "much", "600", "5TB", "1e2")
        ),
        *(("WORKERS_JSON", value, message) for value, message in WRONG_WORKERS),
    ],
)
def test_a_wrong_value_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load()
    assert message in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_the_environment_wins_over_dotenv_and_all_wrong_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("APP_PORT=9000\nENVIRONMENT=stage\n")
    monkeypatch.setenv("APP_PORT", "9001")
    assert (load().app_port, load().environment) == (9001, "stage")
    wrong = ["APP_PORT", "WORKERS_JSON", "DL_STALL_SEC"]
    for name in wrong:
        monkeypatch.setenv(name, "x")
    with pytest.raises(ConfigError) as caught:
        load()
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == wrong


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"APP_PORT=1\nthis is s3cret\n"), ".env, line 2: should be NAME=value"),
        (lambda path: path.write_bytes(b"APP_PORT=\xff\xfes3cret\n"), ".env cannot be read: should be text in UTF-8"),
        (os.mkfifo, ".env cannot be read: should be a regular file"),
        (Path.mkdir, ".env cannot be read: should be a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), ".env cannot be read: should be a regular file"),
    ],
    ids=["line", "bytes", "pipe", "folder", "device"],
)
def test_a_dotenv_that_cannot_be_read(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / ".env")
    for ask in (load, config.misspelt):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert str(caught.value) == message


def test_a_dotenv_expands_variables_but_in_single_quotes(tmp_path: Path) -> None:
    lines = (
        "A=x",
        "PG_PASSWORD='p${A}w'",
        'ENVIRONMENT="is ${A}"',
        "DL_WEBHOOK_A=https://h/${A}",
        "PG_HOST=${A}.example",
        """DL_URL="http://${A}/?a='b'\"""",
    )
    (tmp_path / ".env").write_text("\n".join(lines))
    settings = load()
    assert settings.pg_password is not None
    assert settings.pg_password.get_secret_value() == "p${A}w"
    assert (settings.environment, settings.pg_host) == ("is x", "x.example")
    assert settings.dl_url == "http://x/?a='b'"
    assert config.webhook_secret("DL_WEBHOOK_A") == "https://h/x"
    assert load(_env_file=None).environment == "development"


def test_a_dotenv_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / ".env").write_text("APP_PORT=1\n")
    monkeypatch.setattr(Path, "read_text", refused)  # root may read any file, so the error is simulated
    with pytest.raises(ConfigError, match=r"^\.env cannot be read: Permission denied$"):
        load()


def test_a_misspelt_variable_is_found_and_no_setting_counts_as_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("TIME_ZONE=UTC\nCOMPOSE_PROJECT_NAME=x\nexport APP_PORT=1\n")
    wrong = ("DL_HEARTBEAT_SECS", "PG_PASWORD", "WORKER_JSON", "DL_UNRELATED", "APP_PORTS", "PG_VERSION")
    for name in (*wrong, *(name.upper() for name in config.Settings.model_fields)):
        monkeypatch.setenv(name, "x")
    assert config.misspelt() == [
        ("DL_HEARTBEAT_SECS", "DL_HEARTBEAT_SEC"),
        ("PG_PASWORD", "PG_PASSWORD"),
        ("TIME_ZONE", "TIMEZONE"),
        ("WORKER_JSON", "WORKERS_JSON"),
    ]


@pytest.mark.parametrize(
    ("path", "made"), [("docs/settings.md", settings_doc.markdown), (".env.example", settings_doc.dotenv)]
)
def test_the_files_made_from_the_settings_are_up_to_date(path: str, made: Callable[[], str]) -> None:
    assert (PROJECT / path).read_text("utf-8") == made(), "make it anew with: python tools/settings_doc.py"


def test_every_setting_says_what_it_means_and_the_example_has_its_default(tmp_path: Path) -> None:
    fields = config.Settings.model_fields
    sentences = settings_doc.sentences()
    assert [name for name in fields if not sentences.get(name, "").endswith(".")] == []
    assert next(iter(fields)) in settings_doc.GROUPS
    assert set(settings_doc.GROUPS) <= set(fields)
    lines = settings_doc.dotenv().splitlines()
    (tmp_path / ".env").write_text("\n".join(line.removeprefix("#") for line in lines if not line.startswith("# ")))
    assert load() == config.Settings(_env_file=None)
    assert len(load().model_fields_set) > 20


def test_where_the_queue_and_the_target_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().queue_dsn is None
    monkeypatch.setenv("DL_DB_DSN", " postgresql://u@h/jobs \n")
    assert load().queue_dsn == load().target_dsn == "postgresql://u@h/jobs", "no white space is a part of it"
    monkeypatch.delenv("DL_DB_DSN")
    monkeypatch.setenv("PG_HOST", "db")
    monkeypatch.setenv("PG_DATABASE", "target")
    monkeypatch.setenv("PG_PASSWORD", "s3cret")
    assert load().queue_dsn == load().target_dsn
    assert "s3cret" not in repr(load())
    monkeypatch.setenv("DL_DB_DSN", "host=q dbname=queue")
    assert load().queue_dsn == "host=q dbname=queue"
    assert "target" in (load().target_dsn or "")
    monkeypatch.setenv("DL_TARGET_DSN", "host=t")
    assert load().target_dsn == "host=t"


def test_what_a_setting_of_several_values_becomes_and_how_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_API_URL", "http://gpu1:11434, https://u:s3cret@gpu2/ollama,")
    monkeypatch.setenv("DL_LLM_CATEGORIES", '{"coding": ["starcoder*"]}')
    monkeypatch.setenv("DL_API_TOKENS", f"[{TOKEN}]")
    settings = load()
    shown = check.shown(settings)
    assert settings.ollama_api_url == ("http://gpu1:11434", "https://u:s3cret@gpu2/ollama")
    assert shown["OLLAMA_API_URL"] == "http://gpu1:11434,https://u:***@gpu2/ollama"
    assert settings.dl_llm_categories == config.CATEGORIES | {"coding": ["starcoder*"]}, "the others stay"
    assert '"coding": ["starcoder*"]' in shown["DL_LLM_CATEGORIES"]
    (token,) = settings.dl_api_tokens
    assert (token.name, token.scopes, token.sha256.get_secret_value()) == ("a", ("read",), 64 * "0")
    assert 8 * "0" not in repr(settings) + str(shown)


def test_secrets_come_from_the_environment_else_the_dotenv_else_a_file_of_their_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path(".env").write_text("DL_WEBHOOK_A=of the dotenv\nDL_WEBHOOK_B=too\nDL_WEBHOOK_EMPTY=\n")
    (tmp_path / "pg_password").write_text("from the file\n")
    (tmp_path / "pg_user").write_text("file")
    (tmp_path / "dl_webhook_c").write_text("https://hooks.slack.com/services/T1/B2\n")
    monkeypatch.setenv("DL_SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("PG_USER", "environment")
    monkeypatch.setenv("DL_WEBHOOK_A", "of the environment")
    settings = load()
    assert (settings.pg_password.get_secret_value(), settings.pg_user) == ("from the file", "environment")
    found = [config.webhook_secret(f"DL_WEBHOOK_{name}") for name in ("A", "B", "C", "EMPTY", "NONE")]
    assert found == ["of the environment", "too", "https://hooks.slack.com/services/T1/B2", None, None]
    with pytest.raises(ValueError, match="PG_PASSWORD should begin with DL_WEBHOOK_"):
        config.webhook_secret("PG_PASSWORD")
    os.mkfifo(tmp_path / "dl_webhook_pipe")
    with pytest.raises(ConfigError, match=r"dl_webhook_pipe in .* cannot be read: should be a regular file"):
        config.webhook_secret("DL_WEBHOOK_PIPE")


def test_a_farm_without_a_wish_serves_the_queue_of_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_ALERTS_QUEUE", "calls")
    assert [spec.served for spec in load().workers] == [("etl.default",), ("calls",)]
    monkeypatch.setenv("WORKERS_JSON", '[{"queue":"a"}]')
    assert [spec.served for spec in load().workers] == [("a",)]


def test_a_folder_of_secrets_that_cannot_be_read_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DL_SECRETS_DIR", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^DL_SECRETS_DIR: .*/none should be a folder with a file for each secret"):
        load()
    monkeypatch.setenv("DL_SECRETS_DIR", str(tmp_path))
    (tmp_path / "pg_password").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^DL_SECRETS_DIR: pg_password in .*: should be text in UTF-8$"):
        load()
    (tmp_path / "workers_json").write_text("no JSON, hunter2")
    (tmp_path / "pg_password").unlink()
    with pytest.raises(ConfigError, match=r"^WORKERS_JSON: should be JSON") as caught:
        load()
    assert "hunter2" not in str(caught.value)
