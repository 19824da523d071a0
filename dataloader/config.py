"""Settings: read from the environment and `.env` once, checked, frozen.

The names are the contract's (docs/architecture.md); each is declared here once with its type, default and
meaning. May import nothing of the package.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError


class ConfigError(Exception):
    """A setting is wrong. The message names the variable and what would be right, never its value."""


class WorkerSpec(BaseModel):
    """One entry of WORKERS_JSON: so many worker processes for one queue."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    queue: str = Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")
    concurrency: int = Field(default=1, ge=1, le=1024)


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError) as e:
        raise ValueError("should be a time zone such as Europe/Moscow") from e
    return name


def _conninfo(dsn: SecretStr) -> SecretStr:
    try:
        conninfo_to_dict(dsn.get_secret_value())
    except Exception:
        # The parser's own message quotes parts of the text, which may hold the password.
        raise ValueError("should be postgresql://user:password@host:port/database or key=value pairs") from None
    return dsn


def _rotation(text: str) -> str:
    size = re.fullmatch(r"[1-9]\d{0,9} ?([KMG]?B)", text.strip(), re.IGNORECASE)
    time = re.fullmatch(r"midnight|[1-9]\d{0,3} ?(hour|day|week)s?", text.strip(), re.IGNORECASE)
    if not (size or time):
        raise ValueError('should be a size such as "10 MB" or a time such as "1 day" or "midnight"')
    return text.strip()


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))


def default_home() -> Path:
    """Where this machine's data live unless DL_HOME says otherwise."""
    if os.geteuid() == 0:
        return Path("/var/lib/dataloader")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "dataloader"


Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Schema = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z_][A-Za-z0-9_$-]*$")]
Dsn = Annotated[SecretStr, AfterValidator(_conninfo)]
Folder = Annotated[Path, AfterValidator(_absolute)]
FileName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^/\x00-\x1f]+$")]


class Settings(BaseSettings):
    """Every setting of the farm; a field `pg_host` is the variable PG_HOST."""

    model_config = SettingsConfigDict(
        env_file=".env",
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
    )

    app_host: str = "0.0.0.0"  # noqa: S104  the contract's default
    app_port: Port = 8081
    timezone: Annotated[str, AfterValidator(_zone)] = "Europe/Moscow"
    environment: str = "development"
    debug: bool = False
    local: bool = False

    log_path: Folder | None = None
    log_file_name: FileName = "dataloader.log"
    log_rotation: Annotated[str, AfterValidator(_rotation)] = "10 MB"
    metric_path: Folder | None = None
    metric_file_name: FileName = "metrics.log"
    audit_log_path: Folder | None = None
    audit_log_file_name: FileName = "audit.log"

    pg_host: str | None = None
    pg_port: Port = 5432
    pg_user: str | None = None
    pg_password: SecretStr | None = None
    pg_database: str | None = None
    pg_schema: Schema = "public"
    pg_schema_queue: Schema = "public"
    pg_use_pool: bool = True
    pg_pool_size: int = Field(default=5, ge=1, le=1000)
    pg_max_overflow: int = Field(default=10, ge=0, le=1000)
    pg_pool_recycle: Seconds = 1800
    pg_connect_timeout: Seconds = 5
    pg_command_timeout: Seconds = 2

    dl_db_dsn: Dsn | None = None
    dl_target_dsn: Dsn | None = None
    workers_json: tuple[WorkerSpec, ...] = ()
    dl_heartbeat_sec: Seconds = 10
    dl_default_lease_ttl_sec: int = Field(default=60, ge=1, le=86_400)
    dl_reaper_period_sec: Seconds = 10
    dl_claim_backoff_sec: Seconds = 15
    dl_drain_sec: float = Field(default=30, ge=0, le=86_400, allow_inf_nan=False)
    dl_kill_grace_sec: float = Field(default=5, ge=0, le=3600, allow_inf_nan=False)
    dl_stall_sec: Seconds = 900
    dl_max_jobs: int | None = Field(default=None, ge=1)
    dl_max_rss_mb: int | None = Field(default=None, ge=16)
    dl_home: Folder = Field(default_factory=default_home)
    dl_data_dir: Folder | None = None
    dl_pipelines: str = ""
    dl_preload: str = ""
    dl_pg_bin: Folder | None = None
    cbr_base_url: str = Field(default="https://www.cbr.ru/scripts", pattern=r"^https?://")

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """What WORKERS_JSON wishes; by default one worker per core on `etl.default`."""
        cores = len(os.sched_getaffinity(0))
        return self.workers_json or (WorkerSpec(queue="etl.default", concurrency=cores),)

    @property
    def data_dir(self) -> Path:
        """The only folder that file loaders read from."""
        return self.dl_data_dir or self.dl_home / "data"

    @property
    def pipeline_modules(self) -> list[str]:
        """DL_PIPELINES: the users' modules, imported by each worker after its fork."""
        return _names(self.dl_pipelines)

    @property
    def preload_modules(self) -> list[str]:
        """DL_PRELOAD: modules imported once, before the workers are forked."""
        return _names(self.dl_preload)

    @property
    def queue_dsn(self) -> str | None:
        """Where the queue is: DL_DB_DSN, else PG_*; None when no database is configured."""
        return self.dl_db_dsn.get_secret_value() if self.dl_db_dsn else self._pg_dsn()

    @property
    def target_dsn(self) -> str | None:
        """Where pipelines write: DL_TARGET_DSN, else PG_*, else the queue's database."""
        if self.dl_target_dsn:
            return self.dl_target_dsn.get_secret_value()
        return self._pg_dsn() or self.queue_dsn

    def _pg_dsn(self) -> str | None:
        if not (self.pg_host or self.pg_database):
            return None
        return make_conninfo(
            host=self.pg_host,
            port=self.pg_port,
            user=self.pg_user,
            password=self.pg_password.get_secret_value() if self.pg_password else None,
            dbname=self.pg_database,
        )


def load(**overrides: Any) -> Settings:
    """Read and check the settings; `overrides` win over the environment.

    Raises ConfigError with one line per wrong variable.
    """
    try:
        return Settings(**overrides)
    except ValidationError as e:
        raise ConfigError("\n".join(_complaint(error) for error in e.errors(include_input=False))) from None
    except SettingsError as e:
        raise ConfigError(_unreadable(e)) from None


def _complaint(error: Any) -> str:
    variable, *rest = [str(part) for part in error["loc"]]
    where = variable.upper() + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in rest)
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"


def _unreadable(error: SettingsError) -> str:
    # pydantic-settings says: error parsing value for field "workers_json" from source "..."
    named = str(error).split('"')
    variable = named[1].upper() if len(named) > 1 else "settings"
    return f'{variable}: should be JSON such as [{{"queue":"etl.default","concurrency":2}}]'


def _names(text: str) -> list[str]:
    return [name for name in text.replace(",", " ").split() if name]
