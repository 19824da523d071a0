"""config: what is read, what is refused, and that a refusal never shows a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataloader import config
from dataloader.config import ConfigError, WorkerSpec, load


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in config.Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_contracts_defaults() -> None:
    settings = load()
    assert (settings.app_host, settings.app_port, settings.timezone) == ("0.0.0.0", 8081, "Europe/Moscow")
    assert (settings.dl_heartbeat_sec, settings.dl_default_lease_ttl_sec, settings.dl_reaper_period_sec) == (10, 60, 10)
    assert (settings.dl_claim_backoff_sec, settings.dl_drain_sec, settings.dl_kill_grace_sec) == (15, 30, 5)
    assert settings.dl_stall_sec == 900
    assert [spec.queue for spec in settings.workers] == ["etl.default"]
    assert settings.queue_dsn is None


def test_the_environment_wins_over_dotenv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("APP_PORT=9000\nENVIRONMENT=stage\n")
    monkeypatch.setenv("APP_PORT", "9001")
    assert (load().app_port, load().environment) == (9001, "stage")


def test_workers_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKERS_JSON", '[{"queue":"load.cbr","concurrency":2},{"queue":"b"}]')
    assert load().workers == (WorkerSpec(queue="load.cbr", concurrency=2), WorkerSpec(queue="b", concurrency=1))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("APP_PORT", "s3cret", "APP_PORT: Input should be a valid integer"),
        ("APP_PORT", "70000", "APP_PORT: Input should be less than or equal to 65535"),
        ("TIMEZONE", "s3cret", "TIMEZONE: should be a time zone such as Europe/Moscow"),
        ("DL_HEARTBEAT_SEC", "nan", "DL_HEARTBEAT_SEC: "),
        ("DL_DRAIN_SEC", "-1", "DL_DRAIN_SEC: Input should be greater than or equal to 0"),
        ("DL_DB_DSN", "s3cret s3cret", "DL_DB_DSN: should be postgresql://"),
        ("WORKERS_JSON", "s3cret", "WORKERS_JSON: should be JSON such as"),
        ("WORKERS_JSON", '[{"queue":"q","concurrency":0}]', "WORKERS_JSON[0].concurrency: Input should be greater"),
        ("WORKERS_JSON", '[{"queue":"q","workers":"s3cret"}]', "WORKERS_JSON[0].workers: Extra inputs"),
        ("PG_SCHEMA_QUEUE", 'a"b; s3cret', "PG_SCHEMA_QUEUE: String should match"),
    ],
)
def test_a_wrong_value_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load()
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_all_wrong_variables_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APP_PORT", "x")
    monkeypatch.setenv("DL_STALL_SEC", "x")
    with pytest.raises(ConfigError) as caught:
        load()
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["APP_PORT", "DL_STALL_SEC"]


def test_where_the_queue_and_the_target_are(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_target_defaults_to_the_queues_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL_DB_DSN", "host=q dbname=queue")
    assert load().target_dsn == "host=q dbname=queue"
