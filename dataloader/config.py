"""Settings: read from the environment and `.env` once, checked, frozen.

Each setting is declared once, in `Settings`: type, bounds, default, and a sentence below it. `tools/settings_doc.py`
makes docs/settings.md and .env.example of the declarations.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC
from errno import EINVAL
from io import StringIO
from ipaddress import ip_address
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit
from zoneinfo import ZoneInfo

from dotenv.parser import Binding, parse_stream
from dotenv.variables import parse_variables
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

DOTENV = Path(".env")

# The prefixes of environment variables that `misspelt` checks. In .env it checks every variable.
_OURS = ("DL_", "PG_", "WORKER")

QUEUES_MOST = 32  # of one worker: its slot in the shared memory has room for their names
QueueName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
SCHEDULERS = ("lag", "sequential", "strict")
# Patterns of model names by category, the best first; the last takes what is there. A category names a wish.
CATEGORIES = {
    "reasoning": ["*deepseek-r1*", "*qwq*", "*gpt-oss*", "*magistral*", "*thinking*", "*"],
    "coding": ["*coder*", "*codestral*", "*devstral*", "*code*", "*"],
    "fast": ["*[:-][0-3].[0-9]b*", "*[:-][1-4]b", "*[:-][1-4]b[:-]*", "*mini*", "*"],  # up to 4b, and not "-4bit"
    "default": ["*instruct*", "*llama*", "*qwen*", "*"],
}
# Variables that a webhook may name, for its whole URL or for the key that signs: no other variable's value is sent.
WEBHOOK_SECRETS = "DL_WEBHOOK_"
# Variables that hold the URLs of the sources that loaders may read, by the name that a job gives.
SOURCES = "DL_SOURCE_"
SOURCE_NAME = r"^[a-z][a-z0-9_]{0,62}$"
SECRETS = "DL_SECRET_"  # variables that hold the secrets of pipelines
Scope = Literal["read", "trigger", "operate"]  # of a token, and of an operation
AUTOMATIC_PREFETCH = 100  # the most jobs that a worker claims at once, where WORKERS_JSON does not say


class ConfigError(Exception):
    """A setting is wrong. The message names the variable and what would be right, never its value."""


def is_zone(name: str) -> bool:
    """Whether this machine knows a time zone of this name."""
    with suppress(KeyError, ValueError, OSError):
        return bool(ZoneInfo(name))
    return False


def _fitting(is_right: Callable[[Any], object], right: str) -> AfterValidator:
    """A check of a value after its type; `right` is the refusal, which says what the value should be."""

    def checked(value: Any) -> Any:
        if not is_right(value.get_secret_value() if isinstance(value, SecretStr) else value):
            raise ValueError(right)
        return value

    return AfterValidator(checked)


def _names(given: Any) -> Any:
    return tuple(given.replace(",", " ").split()) if isinstance(given, str) else given


def _scheduler(given: Any) -> Any:
    is_weights = isinstance(given, dict) and all(type(each) is int and 1 <= each <= 1_000 for each in given.values())
    if is_weights or given in SCHEDULERS:
        return given
    raise ValueError('should be "lag", "sequential", "strict", or weights from 1 to 1000 as {"orders": 3, "stock": 1}')


class _Entry(BaseModel):
    """An object in a setting's JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class WorkerSpec(_Entry):
    """One entry of WORKERS_JSON: `concurrency` processes for a queue or for several.

    Each claims up to `prefetch` jobs at once; how many a worker claims in fact depends on how long its jobs take.
    """

    queue: QueueName | None = None
    queues: Annotated[list[QueueName], Field(min_length=1, max_length=QUEUES_MOST)] | None = None
    scheduler: Annotated[str | dict[str, int] | None, BeforeValidator(_scheduler)] = None  # None: "lag"
    concurrency: int = Field(default=1, ge=1, le=1024)
    prefetch: int = Field(default=AUTOMATIC_PREFETCH, ge=1, le=1000)
    ordered: bool | None = None  # whether the queue is ordered, unless it is set in the database; None: not set here
    merge: bool | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> WorkerSpec:
        names = self.queues or []
        if self.merge and not self.ordered:
            raise ValueError('should have "ordered": true where it has "merge": true')
        if (self.queue is None) == (self.queues is None):
            raise ValueError('should have either "queue", or "queues": ["orders", "stock"]')
        if len(set(names)) < len(names):
            raise ValueError('should name each queue once in "queues"')
        if self.scheduler is not None and not names:
            raise ValueError('should have "queues" where it has "scheduler"')
        if isinstance(self.scheduler, dict) and set(self.scheduler) != set(names):
            raise ValueError('should have a weight in "scheduler" for each of its "queues", and for no other')
        return self

    @property
    def served(self) -> tuple[str, ...]:
        """The queues of these workers, in the order given; workers of the same queues are of one kind."""
        return tuple(self.queues or [self.queue or ""])

    @property
    def is_automatic(self) -> bool:
        """True where the entry names no `prefetch`."""
        return "prefetch" not in self.model_fields_set


class ApiToken(_Entry):
    """One entry of DL_API_TOKENS: a client's name and scopes. The farm knows only the SHA-256 of the token."""

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"),
        _fitting("anonymous".__ne__, "should not be anonymous: this is the name of clients without a token"),
    ]
    scopes: tuple[Scope, ...] = Field(min_length=1)
    sha256: Annotated[
        SecretStr,
        _fitting(
            re.compile(r"[0-9a-f]{64}").fullmatch,
            "should be the token's SHA-256 as 64 hex digits in lower case, not the token",
        ),
    ]

    @model_validator(mode="before")
    @classmethod
    def _nothing_else(cls, given: Any) -> Any:
        # pydantic's own refusal would quote the name of a field, and that may be a token in the wrong place.
        if not isinstance(given, dict) or not set(given) <= set(cls.model_fields):
            raise ValueError("should be an object of name, scopes and sha256, as `dataloader token` prints it")
        return given


def _conninfo(dsn: SecretStr) -> SecretStr:
    from psycopg.conninfo import conninfo_to_dict  # not at the top: a program that asks the API needs no driver

    try:
        dsn = SecretStr(dsn.get_secret_value().strip())  # libpq takes white space at the end for a part of the name
        parts = conninfo_to_dict(dsn.get_secret_value())
    except Exception:
        # The parser's own message quotes parts of the text, which may hold the password.
        raise ValueError(
            "should be postgresql://user:password@host:port/database or key=value pairs, with libpq's options"
        ) from None
    if any("@" in str(parts.get(name, ""))[1:] for name in ("host", "dbname", "port")):  # a host may begin with @
        # libpq takes the end of such a password for the host, and logs show hosts.
        raise ValueError("should have @ : / and % in its password percent-encoded, as %40 %3A %2F %25")
    if not re.fullmatch(r"\d{0,5}(,\d{0,5})*", str(parts.get("port", ""))):
        raise ValueError("should have a number for the port")
    return dsn


def _own_modules(names: tuple[str, ...]) -> tuple[str, ...]:
    """Modules of users: a name of Python's own would be imported without a word."""
    if own := [name for name in names if name.partition(".")[0] in sys.stdlib_module_names]:
        raise ValueError(f"{own[0]} is a module of Python itself: give yours another name")
    return names


def _rotation(text: str) -> str:
    from dataloader.log import sinks  # not at the top: a producer imports this module and needs no logging

    sinks.rule(text, UTC)
    return text.strip()


def _absolute(path: Path) -> Path:
    try:
        return Path(os.path.abspath(path.expanduser()))
    except RuntimeError:
        raise ValueError("should be a folder; this machine knows no user of the name after ~") from None


Folder = Annotated[Path, AfterValidator(_absolute)]
Argument = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # of a program


def _json(example: str) -> BeforeValidator:
    """Decode a variable's JSON. After a failure of its own decoding the library checks no other variable."""

    def decoded(given: Any) -> Any:
        try:
            return json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            raise ValueError(f"should be JSON such as {example}") from None

    return BeforeValidator(decoded)


def _is_address(address: str, *schemes: str) -> bool:
    with suppress(ValueError):  # of the port, or of brackets
        parts = urlsplit(address)
        return parts.scheme in ("http", "https", *schemes) and bool(parts.hostname) and parts.port != 0
    return False


def _is_plain(url: str) -> bool:
    # An @ in the path is the end of a password with a slash, and paths are shown.
    return url.isprintable() and not {*"?# "} & {*url} and _is_address(url) and "@" not in urlsplit(url).path


def _categories(given: Any) -> Any:
    """The table with the categories that are given in place of the default's."""
    if not isinstance(given, dict) or not set(given) <= set(CATEGORIES):
        raise ValueError(f"should be an object with names among {', '.join(CATEGORIES)}")
    return CATEGORIES | given


class Command(_Entry):
    """One entry of DL_COMMANDS: a program that jobs of `run.command` may start, and its limits."""

    argv: Annotated[
        list[Argument],
        Field(min_length=1),
        _fitting(
            lambda argv: os.path.isabs(argv[0]), "should begin with the program's whole path, such as /usr/bin/dbt"
        ),
    ]
    env: tuple[str, ...] = ()
    folder: Folder | None = None
    timeout_sec: float | None = Field(default=None, gt=0, le=31_536_000, allow_inf_nan=False)
    memory_mb: int | None = Field(default=None, ge=1, le=2**30)
    output_kb: int = Field(default=256, ge=0, le=2**20)

    @field_validator("env")
    @classmethod
    def _names_none_of_ours(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        ours = {field.upper() for field in Settings.model_fields}
        if wrong := [name for name in names if name.upper().startswith("DL_") or name.upper() in ours]:
            raise ValueError(f"should name no variable of the farm itself: {', '.join(wrong)}")
        return names


def _listened(host: str) -> str:
    host = re.sub(r"^\[(.*)\]$", r"\1", host.strip())
    with suppress(ValueError):
        return str(ip_address(host))
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?", host):
        raise ValueError("should be an address or a name of this machine such as 127.0.0.1, ::1 or localhost, alone")
    return host


Address = Annotated[
    SecretStr,
    _fitting(
        lambda address: _is_address(address, "tcp", "tls"),
        "should be an address such as tcp://dask:8786, http://ray:8265 or http://spark:6066",
    ),
]
Bearer = Annotated[
    SecretStr,
    _fitting(
        re.compile(r"[\x21-\x7e]+").fullmatch,
        "should be printable ASCII without spaces and line ends, as a header of HTTP takes it",
    ),
]


def _short(kind: type, field: str) -> BeforeValidator:
    """An entry that is no object but of this kind is this field of the object."""
    return BeforeValidator(lambda given: {field: given} if isinstance(given, kind) else given)


class DaskFunction(_Entry):
    """A function that takes the dict of a job's args, as the Dask workers import it."""

    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    is_driver: bool = False  # it waits for tasks of its own, and leaves its thread to them


class RayCommand(_Entry):
    """A shell command that the Ray cluster runs."""

    command: str = Field(min_length=1, pattern=r"^[^\x00]*$")
    runtime_env: dict[str, Any] = {}
    cpus: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    gpus: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    memory_mb: int | None = Field(default=None, ge=1)


class SparkApplication(_Entry):
    """An application that the Spark master starts on one of its workers."""

    file: str = Field(min_length=1, pattern=r"^[^\x00]*$")
    main_class: str = Field(min_length=1, pattern=r"^[\w.$]+$")
    arguments: list[Argument] = []
    properties: dict[str, str] = {}
    environment: dict[str, str] = {}
    spark_version: str = "3.5.0"


EntryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Cluster(_Entry):
    """One entry of DL_ENGINES: a cluster on which jobs of `run.dask`, `run.ray` or `run.spark` start programs."""

    address: Address
    away_sec: float = Field(default=60, ge=0, le=86_400, allow_inf_nan=False)
    output_kb: int = Field(default=256, ge=0, le=2**20)

    @property
    def secrets(self) -> dict[str, Any]:
        """The texts that no log may show: token, passwords of addresses; in `entries` those under secrets' names."""
        given = {name: value.get_secret_value() for name, value in self if isinstance(value, SecretStr)}
        token = given.pop("token", "")  # the others are addresses
        secrets = [token, *(unquote(urlsplit(address).password or "") for address in given.values())]
        return {"secrets": list(filter(None, secrets)), "entries": self.model_dump()["entrypoints"]}


class DaskCluster(Cluster):
    """The address is the scheduler's; the files are for tls://."""

    engine: Literal["dask"]
    entrypoints: dict[EntryName, Annotated[DaskFunction, _short(str, "function")]] = Field(min_length=1)
    ca_file: Folder | None = None
    cert_file: Folder | None = None
    key_file: Folder | None = None


class RayCluster(Cluster):
    """The address is that of the dashboard, which takes jobs."""

    engine: Literal["ray"]
    entrypoints: dict[EntryName, Annotated[RayCommand, _short(str, "command")]] = Field(min_length=1)
    token: Bearer | None = None


class SparkCluster(Cluster):
    """The address is that of the master's REST server; `master` that of its web page."""

    engine: Literal["spark"]
    entrypoints: dict[EntryName, SparkApplication] = Field(min_length=1)
    master: Address
    token: Bearer | None = None


def _have_one_scheduler(workers: tuple[WorkerSpec, ...]) -> bool:
    pairs = {(spec.served, json.dumps(spec.scheduler or "lag", sort_keys=True)) for spec in workers}
    return len(pairs) == len({served for served, _ in pairs})


def _above_the_heartbeat(stall: float, info: ValidationInfo) -> float:
    # Otherwise a healthy worker counts as stuck between two heartbeats.
    if 0 < stall <= info.data.get("dl_heartbeat_sec", 0):
        raise ValueError("should be more than DL_HEARTBEAT_SEC, or 0 for never")
    return stall


def machine_zone(root: Path = Path("/")) -> str:
    """The time zone of this machine: the first valid one of TZ, /etc/localtime and /etc/timezone, else UTC."""
    names = [os.environ.get("TZ", "").removeprefix(":")]
    names.append(os.path.realpath(root / "etc/localtime").partition("/zoneinfo/")[2])
    with suppress(OSError, UnicodeDecodeError):
        names.append((root / "etc/timezone").read_text("utf-8").strip())
    return next((name for name in names if is_zone(name)), "UTC")


def default_home() -> Path:
    """The default of DL_HOME, the folder of this machine's data."""
    if os.geteuid() == 0:
        return Path("/var/lib/dataloader")
    return Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")) / "dataloader"


Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Patience = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Schema = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z_][A-Za-z0-9_$-]*$")]
Dsn = Annotated[SecretStr, AfterValidator(_conninfo)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Modules = Annotated[Names, AfterValidator(_own_modules)]
Zone = Annotated[str, _fitting(is_zone, "should be a time zone such as Europe/Moscow")]
Rotation = Annotated[str, AfterValidator(_rotation)]
Stall = Annotated[Patience, AfterValidator(_above_the_heartbeat)]
HostMemory = Annotated[
    str,
    BeforeValidator(lambda given: str(given).strip()),
    _fitting(
        re.compile(r"(100(\.0+)?|\d{1,2}(\.\d+)?)%?|\d{1,7}(\.\d+)? ?[MG]B").fullmatch,
        "should be percent from 0 to 100, or a size such as 600MB or 12GB",
    ),
]
Workers = Annotated[
    tuple[WorkerSpec, ...],
    _json('[{"queue":"etl.default","concurrency":2}]'),
    _fitting(_have_one_scheduler, 'should have one "scheduler" for the same "queues"'),
]
Tokens = Annotated[
    tuple[ApiToken, ...],
    _json('[{"name":"airflow","scopes":["trigger"],"sha256":"<64 hex digits>"}]'),
    _fitting(
        lambda tokens: len({token.sha256.get_secret_value() for token in tokens}) == len(tokens),
        "should have each sha256 once: a token has one name",
    ),
]
Urls = Annotated[
    Names,
    _fitting(
        lambda urls: all(map(_is_plain, urls)),
        "should be URLs such as http://localhost:11434, separated by commas, without ? # and spaces",
    ),
]
Hosts = Annotated[
    tuple[Annotated[str, StringConstraints(to_lower=True)], ...],
    BeforeValidator(_names),
    _fitting(
        lambda hosts: all(re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:.]+", host) for host in hosts),
        "should be hosts such as files.example.com, separated by commas, without scheme and port",
    ),
]
PublicUrl = Annotated[
    str,
    _fitting(_is_plain, "should be a URL such as https://dataloader.example.com, without ? # and spaces"),
    _fitting(
        lambda url: urlsplit(url).username is None, "should have no user and no password: links in alerts show it"
    ),
    AfterValidator(lambda url: url.rstrip("/")),
]
Pattern = Annotated[str, Field(min_length=1, max_length=200)]
Categories = Annotated[
    dict[str, Annotated[list[Pattern], Field(min_length=1)]],
    BeforeValidator(_categories),
    _json('{"coding": ["qwen2.5-coder*", "*"]}'),
]
Commands = Annotated[
    dict[EntryName, Annotated[Command, _short(list, "argv")]],
    _json('{"dbt": ["/opt/dbt/bin/dbt", "run"]}'),
]
AnyCluster = Annotated[DaskCluster | RayCluster | SparkCluster, Field(discriminator="engine")]
Engines = Annotated[
    dict[EntryName, AnyCluster],
    _json(
        '{"nightly": {"engine": "ray", "address": "http://ray:8265", "entrypoints": {"resize": "python -m resize"}}}'
    ),
]
FileName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^/\x00-\x1f]+$")]


class Settings(BaseSettings):
    """Every setting of the farm; a field `pg_host` is the variable PG_HOST."""

    model_config = SettingsConfigDict(
        env_file=DOTENV,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        enable_decoding=False,  # the types decode their JSON
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
    )

    app_host: Annotated[str, AfterValidator(_listened)] = "0.0.0.0"  # noqa: S104
    """Address that the API listens on; `::` for all addresses, also those of IPv6."""
    app_port: Port = 8081
    """Port that the API listens on."""
    timezone: Zone = "Europe/Moscow"
    """Time zone of times for people, and of schedules that name none; the database stores UTC. The default holds for
    servers: without this setting the dashboard, `up` and the commands for people take this machine's zone."""
    environment: str = "development"
    """Name of the installation, shown by `/info`."""
    dl_api_tokens: Tokens = ()
    """The API's clients, as `[{"name": "airflow", "scopes": ["trigger"], "sha256": "..."}]`; scopes are `read`,
    `trigger` and `operate`. `dataloader token` makes a token and its entry. Without tokens every client may read, and
    only clients on this machine may change anything."""
    dl_allow_anonymous: bool = False
    """Without tokens: accept changes from every address. With tokens: no effect."""
    dl_trusted_proxies: int = Field(0, ge=0, le=10)
    """Number of reverse proxies in front of the API: it believes as many values, counted from the last, of
    X-Forwarded-For, -Proto and -Host, and the last of -Prefix."""
    dl_secrets_dir: Folder | None = None
    """Folder with a file for each secret, named as its variable in small letters: `pg_password`, `dl_api_tokens`,
    `dl_webhook_slack`; a pipeline's secret by its own name. The environment and .env win over it."""
    debug: bool = False
    """Log debug events too."""
    local: bool = False
    """Log lines for people instead of JSON; on by default for `up` on a terminal."""

    log_path: Folder | None = None
    """Folder of the log file; without it logs go to stdout."""
    log_file_name: FileName = "dataloader.log"
    """Name of the log file in LOG_PATH."""
    log_rotation: Rotation = "10 MB"
    """When the log files rotate: at a size (`10 MB`), after a time (`1 day`) or at `midnight`."""
    metric_path: Folder | None = None
    """Folder of the metrics file; without it metrics go to stdout, with `up` on a terminal to DL_HOME/log."""
    metric_file_name: FileName = "metrics.log"
    """Name of the metrics file in METRIC_PATH."""
    audit_log_path: Folder | None = None
    """Folder of the audit log; without it the audit log goes to stdout, with `up` on a terminal to DL_HOME/log."""
    audit_log_file_name: FileName = "audit.log"
    """Name of the audit log in AUDIT_LOG_PATH."""

    pg_host: str | None = None
    """PostgreSQL's host, or several hosts separated by commas."""
    pg_port: Port = 5432
    """PostgreSQL's port."""
    pg_user: str | None = None
    """Role to connect as; by default the system user's name."""
    pg_password: SecretStr | None = None
    """The role's password."""
    pg_database: str | None = None
    """Database of the queue and of the pipelines' data."""
    pg_schema: Schema = "public"
    """Schema that pipelines write to."""
    pg_schema_queue: Schema = "public"
    """Schema of the queue's tables."""
    dl_db_dsn: Dsn | None = None
    """The queue's database, in place of PG_HOST and the like."""
    dl_target_dsn: Dsn | None = None
    """Database that pipelines write to; by default that of PG_*, else the queue's."""
    pg_use_pool: bool = True
    """Pool the API's sessions; `false`: a session per request."""
    pg_pool_size: int = Field(5, ge=1, le=1000)
    """Sessions that each API process keeps open."""
    pg_max_overflow: int = Field(10, ge=0, le=1000)
    """Further sessions that each API process may open."""
    pg_pool_recycle: Seconds = 1800
    """Longest life of a pooled session, in seconds."""
    pg_connect_timeout: Seconds = 5
    """Longest time to connect to one host, in seconds."""
    pg_command_timeout: Seconds = 2
    """Longest statement of the API, in seconds."""

    workers_json: Workers = ()
    """Worker processes per queue, as `[{"queue": "load.cbr", "concurrency": 2}]`; entries of one queue add up; by
    default one worker per core on `etl.default`, and one on DL_ALERTS_QUEUE. `queues` with `scheduler` in place of
    `queue`: each worker serves several, see docs/machines.md. `prefetch` (1 to 1000, default 100) is the most short
    jobs that a worker claims at once; it claims long ones one by one in any case, see docs/processes.md. `ordered` and
    `merge` (true or false) make the queue so where nobody has set it; a farm that contradicts the queue's settings does
    not start, see docs/ordered.md."""
    dl_heartbeat_sec: Seconds = 10
    """Seconds between renewals of a lease; never more than a third of the lease."""
    dl_default_lease_ttl_sec: int = Field(60, ge=1, le=86_400)
    """Lease of a job that names none, in seconds."""
    dl_reaper_period_sec: Seconds = 10
    """Seconds between rounds of the reaper."""
    dl_retention_days: float | None = Field(None, gt=0, le=36_500, allow_inf_nan=False)
    """Days from a job's end until the reaper deletes the job with its journal; `0.5` is twelve hours. By default the
    reaper deletes no job."""
    dl_claim_backoff_sec: Seconds = 15
    """Longest back-off of a busy key, and the poll interval of an idle worker, in seconds."""
    dl_drain_sec: Patience = 30
    """Seconds that running jobs have to finish after SIGTERM."""
    dl_kill_grace_sec: Patience = 5
    """Seconds that a run has to stop after a timeout or a drain, until its worker is killed."""
    dl_cancel_grace_sec: Patience | None = None
    """Seconds that a canceled job has to reach a safe point; then the farm forces the cancellation. By default the farm
    never does."""
    dl_stall_sec: Stall = Field(900, validate_default=True)
    """Seconds after which a run that has reported nothing (no yield, progress, check) counts as stuck, where its
    pipeline has no `stall_sec`; and without a heartbeat, or in an import or hook at its start, until the farm kills a
    worker. Above DL_HEARTBEAT_SEC; 0: never."""
    dl_affinity: bool = True
    """Whether claims prefer jobs whose `affinity_key` is warm in the worker; `off`: the queue's order."""
    dl_warm: int = Field(2, ge=0, le=64)
    """Prepared resources that a worker keeps for jobs of the same `affinity_key`."""
    dl_lookahead: int = Field(50, ge=1, le=1000)
    """The number of a queue's first jobs in which a claim searches for a warm one."""
    dl_affinity_wait_sec: Seconds = 60
    """How long a worker may pass a job over for others whose resources are warm."""
    dl_host_memory: HostMemory = "85"
    """How much of this host's memory, or of its cgroup's, may be in use while the farm begins another run whose need is
    known, in percent; `"12GB"` or `"600MB"`: how much such runs may use together. 0: any."""
    dl_host_cpu: float = Field(100, ge=0, le=1_000)
    """How many of this host's processors runs may need together, in percent; 0: any number."""
    dl_reserve_sec: Patience = 60
    """How long claims pass over a job for which the host has no room, until room gathers for it; 0: for no job."""
    dl_host_temperature: float = Field(80, ge=0, le=200)
    """Degrees Celsius of the host's hottest sensor from which on no run begins whose need is known; 0: at any."""
    dl_max_jobs: int | None = Field(None, ge=1)
    """Jobs after which the farm replaces a worker."""
    dl_max_rss_mb: int | None = Field(None, ge=16)
    """Memory after a job, in MB, above which the farm replaces a worker."""

    dl_alerts_queue: QueueName = "alerts"
    """Queue of the messages to webhooks. Some WORKERS_JSON should name it; without WORKERS_JSON a worker of its own
    serves it. See docs/alerts.md."""
    dl_alerts_bundle_sec: float = Field(60, ge=1, le=3_600, allow_inf_nan=False)
    """Seconds from the first dead job or stuck run until a message tells of it, with all that came meanwhile."""
    dl_alerts_paused_sec: Seconds = 14_400
    """Seconds that a queue is paused until a message tells of it."""
    dl_public_url: PublicUrl | None = None
    """Address at which people reach the dashboard, for links in alerts; without it there are none. Without tokens the
    API answers requests to this host too."""

    # Above 976 KB a text may be longer than the limit of masking for one text.
    dl_result_kb: int = Field(256, ge=1, le=976)
    """Largest result of a job, in KB of JSON; a run whose pipeline returns more has failed."""

    dl_job_log_kb: int = Field(256, ge=0, le=65_536)
    """Most that the queue keeps of what a run writes, in KB; of a larger log the middle is left out. 0: the farm keeps
    no logs of jobs."""

    dl_pipelines: Modules = ()
    """Your pipelines' modules; each worker imports them."""
    dl_hooks: Modules = ()
    """Modules with hooks; the workers, the API and `dataloader trigger --direct` import them; see
    docs/hooks.md."""
    dl_preload: Names = ()
    """Heavy modules that the farm imports once, before it forks."""
    dl_home: Folder = Field(default_factory=default_home)
    """Folder of this machine's data; by default `/var/lib/dataloader` for root, otherwise
    `~/.local/share/dataloader`."""
    dl_data_dir: Folder | None = None
    """The only folder that file loaders read from; by default `data` in DL_HOME."""
    dl_commands: Commands = {}
    """Programs that jobs of `run.command` may start, as `{"dbt": ["/opt/dbt/bin/dbt", "run"]}`; by default none. An
    object in place of the list has `argv`, and limits; see docs/commands.md."""
    dl_engines: Engines = {}
    """Clusters of Dask, Ray and Spark on which jobs may start programs, and which programs, as `{"nightly": {"engine":
    "ray", "address": "http://ray:8265", "entrypoints": {"resize": "python -m resize"}}}`; by default none; see
    docs/engines.md."""
    dl_http_private_hosts: Hosts = ()
    """Hosts of private networks, or of this machine, from which `load.http` may fetch files, separated by commas; by
    default it fetches from public addresses alone."""
    dl_http_max_mb: int = Field(10_240, ge=1, le=2**30)
    """Largest file that `load.http` fetches, in MB (1,048,576 bytes)."""
    dl_pg_bin: Folder | None = None
    """Folder of the embedded PostgreSQL's programs; by default the newest found."""
    cbr_base_url: str = Field("https://www.cbr.ru/scripts", pattern=r"^https?://")
    """URL from which `load.cbr.rates` requests the rates."""

    ollama_api_url: Urls = ()
    """Ollama nodes that `llm.generate` asks, as URLs separated by commas. Where this and the next two are unset: port
    11434 of this machine, and as a node of MLX_API_URL port 11435; in a container this machine is
    `host.docker.internal`."""
    ollama_base_url: Urls = ()
    """More Ollama nodes, after those of OLLAMA_API_URL."""
    mlx_api_url: Urls = ()
    """Nodes with MLX models that speak OpenAI's protocol, asked after those of Ollama."""
    dl_llm_categories: Categories = CATEGORIES
    """Patterns of model names by category, the best first. A category that is given here replaces the default's, the
    others stay; see docs/llm.md."""
    dl_llm_silence_sec: Seconds = 120
    """Seconds without a byte after which a node is passed over; half as many again for a model of 32 billion parameters
    or more."""
    dl_llm_busy_percent: float = Field(90, ge=1, le=100)
    """Percent of queue, RAM or CPU above which a node is passed over; 100 never passes one over for it."""
    dl_llm_mlx_concurrent: int = Field(4, ge=1, le=1000)
    """Requests that the workers of a machine have in flight at one MLX node."""

    dl_url: str | None = None
    """API of the command line and the Python client; by default this machine's."""
    dl_token: SecretStr | None = None
    """Token that both send to this API."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: Any, **sources: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources of settings, the strongest first."""
        # The library's own sources expand ${NAME} within single quotes too, and wait for the writer of a pipe.
        values = _dotenv_values() if getattr(sources["dotenv_settings"], "env_file", None) else {}
        folder = _secrets_dir()
        files = {name: text for name in settings_cls.model_fields if folder and (text := _secret_of(folder, name))}
        given = files | {name.lower(): value for name, value in values.items() if value}
        return sources["init_settings"], sources["env_settings"], InitSettingsSource(settings_cls, given)

    @property
    def people_zone(self) -> str:
        """The time zone for people at this machine: TIMEZONE if set, else the machine's."""
        return self.timezone if "timezone" in self.model_fields_set else machine_zone()

    @property
    def own_url(self) -> str:
        """The URL of this machine's API, for programs of this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.app_host, self.app_host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.app_port}"

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """The entries of WORKERS_JSON; by default a worker per core on `etl.default`, and one on DL_ALERTS_QUEUE."""
        etl = WorkerSpec(queue="etl.default", concurrency=len(os.sched_getaffinity(0)))
        return self.workers_json or (etl, WorkerSpec(queue=self.dl_alerts_queue))

    @property
    def ends_within(self) -> float:
        """Seconds from an order to drain until a worker that is still there is killed."""
        return self.dl_drain_sec + self.dl_kill_grace_sec

    @property
    def data_dir(self) -> Path:
        """The only folder that file loaders read from: DL_DATA_DIR, else `data` in DL_HOME."""
        return self.dl_data_dir or self.dl_home / "data"

    @property
    def queue_dsn(self) -> str | None:
        """The DSN of the queue's database: DL_DB_DSN, else PG_*; None without any."""
        return self.dl_db_dsn.get_secret_value() if self.dl_db_dsn else self._pg_dsn()

    @property
    def target_dsn(self) -> str | None:
        """The DSN that pipelines write to: DL_TARGET_DSN, else PG_*, else the queue's database."""
        return self.dl_target_dsn.get_secret_value() if self.dl_target_dsn else self._pg_dsn() or self.queue_dsn

    def _pg_dsn(self) -> str | None:
        if not (self.pg_host or self.pg_database):
            return None
        from psycopg.conninfo import make_conninfo

        return make_conninfo(
            host=self.pg_host,
            port=self.pg_port,
            user=self.pg_user,
            password=self.pg_password.get_secret_value() if self.pg_password else None,
            dbname=self.pg_database,
        )


def load(**overrides: Any) -> Settings:
    """Read and check the settings; `overrides` win over the environment, the environment over .env, that over files.

    Raises ConfigError with one line per wrong variable, or when .env or a file of DL_SECRETS_DIR cannot be read.
    """
    _dotenv()  # the library reads the file as well, without a look at what it is
    try:
        return Settings(**overrides)
    except ValidationError as e:
        raise ConfigError("\n".join(_complaint(error) for error in e.errors(include_input=False))) from None


def webhook_secret(name: str) -> str | None:
    """The value of a variable that a webhook names, from the environment or else .env; None where it is not set.

    Raises ValueError for a name without the prefix WEBHOOK_SECRETS, ConfigError when .env cannot be read.
    """
    if not name.startswith(WEBHOOK_SECRETS):
        raise ValueError(f"{name} should begin with {WEBHOOK_SECRETS}")
    return _variable(name)


def secret(name: str) -> str | None:
    """A secret of a pipeline: DL_SECRET_<NAME> of the environment or else .env, else the file <name> in DL_SECRETS_DIR.

    None where it is not set. Raises ValueError for a name that is not like SOURCE_NAME, ConfigError when .env or the
    file cannot be read.
    """
    if not re.fullmatch(SOURCE_NAME, name):
        raise ValueError("the name of a secret should be lower-case letters, digits and _")
    return _variable(SECRETS + name.upper(), name)


def source_dsn(name: str) -> str | None:
    """The DSN of a source of `load.postgres`, from the environment or else .env; None where it is not set.

    Raises ValueError for a name that is not like SOURCE_NAME, ConfigError when the variable holds no DSN or .env cannot
    be read.
    """
    dsn = source_url(name)
    try:
        return dsn and _conninfo(SecretStr(dsn)).get_secret_value()
    except ValueError as e:
        raise ConfigError(f"{SOURCES}{name.upper()} {e}") from None


def source_url(name: str) -> str | None:
    """The URL of a source of files, from the environment or else .env; None where it is not set.

    Raises ValueError for a name that is not like SOURCE_NAME, ConfigError when .env cannot be read.
    """
    if not re.fullmatch(SOURCE_NAME, name):
        raise ValueError(f"{name} should be lower-case letters, digits and _")
    return _variable(SOURCES + name.upper())


def _variable(name: str, file: str = "") -> str | None:
    """A variable's value, else the content of a file in DL_SECRETS_DIR, by default of its name in small letters."""
    folder = _secrets_dir()
    return _given(name) or (_secret_of(folder, file or name.lower()) if folder else "") or None


def _given(name: str) -> str | None:
    return os.environ.get(name) or _dotenv_values().get(name) or None


def _text(path: Path) -> str:
    """The text of a regular file: to open a pipe or a device may take for ever."""
    if not S_ISREG(path.stat().st_mode):
        raise OSError(EINVAL, "should be a regular file", path)
    return path.read_text("utf-8")


def _secrets_dir() -> Path | None:
    """The folder of DL_SECRETS_DIR; ConfigError where that is none."""
    given = _given("DL_SECRETS_DIR")
    if given and not Path(given).is_dir():
        raise ConfigError(f"DL_SECRETS_DIR: {given} should be a folder with a file for each secret, as pg_password")
    return Path(given) if given else None


def _secret_of(folder: Path, name: str) -> str:
    """The content of a file of DL_SECRETS_DIR, empty without the file; ConfigError where it cannot be read."""
    try:
        return _text(folder / name).strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "should be text in UTF-8"
        raise ConfigError(f"DL_SECRETS_DIR: {name} in {folder} cannot be read: {reason}") from None


def misspelt() -> list[tuple[str, str]]:
    """Variables whose names are close to a setting's, each with the setting probably meant, sorted.

    The environment is searched only for names with our prefixes. Raises ConfigError when .env cannot be read.
    """
    names = {name for name in os.environ if name.upper().startswith(_OURS)}
    names |= {binding.key for binding in _dotenv() if binding.key}
    names = {name for name in names if not name.upper().startswith(SECRETS)}  # close to DL_SECRETS_DIR
    settings = [field.upper() for field in Settings.model_fields]
    close = {name: difflib.get_close_matches(name.upper(), settings, 1, 0.8) for name in names}
    return sorted((name, near[0]) for name, near in close.items() if near and name.upper() not in settings)


def _dotenv_values() -> dict[str, str]:
    """The variables of .env; ${NAME} is expanded but for values in single quotes, as in a shell."""
    values: dict[str, str] = {}
    for binding in _dotenv():
        if binding.key and binding.value is not None:
            value, known = binding.value, {**os.environ, **values}
            if not re.match(r"[^=]*=\s*'", binding.original.string):
                value = "".join(part.resolve(known) for part in parse_variables(value))
            values[binding.key] = value
    return values


def _dotenv() -> list[Binding]:
    """The assignments of .env, none without the file; ConfigError when the file or a line of it cannot be read."""
    try:
        bindings = list(parse_stream(StringIO(_text(DOTENV))))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise ConfigError(f".env cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(".env cannot be read: should be text in UTF-8") from None
    # The library only logs an unreadable line, and goes on without its setting.
    if wrong := [binding.original.line for binding in bindings if binding.error]:
        raise ConfigError("\n".join(f".env, line {line}: should be NAME=value" for line in wrong))
    return bindings


def _complaint(error: Any) -> str:
    variable, *rest = [str(part) for part in error["loc"]]
    name = variable.upper() + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in rest)
    if variable == "dl_api_tokens" and not rest:
        name += " as a whole"  # masking would take the text after "..._TOKENS:" for a secret
    if error["type"] == "extra_forbidden" and variable == "workers_json":
        return f"{name}: there is no such word; there are {', '.join(WorkerSpec.model_fields)}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"
