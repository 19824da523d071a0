"""Logs: one line per event, JSON or (LOCAL) for people, with the job's context and without secrets.

Three streams: `application`, `metric` and `audit` (also what loggers of these names write). Events come from
structlog or from the standard library's logging and look the same. Call `configure` once per process, after a fork
again; logging never waits for whoever reads or stores the lines. May import nothing of the package; its modules:

    masking    `masked`: secrets leave by no way out
    record     an event as one line of at most 4,000 bytes
    outage     `Outage`: a failure that lasts, in few lines
    channel    the bounded queue and its thread; what is lost is counted
    sinks      a shared pipe; a file that many processes append to, and its rotation
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from pathlib import Path
from time import monotonic
from typing import Any, Protocol
from zoneinfo import ZoneInfo

import structlog

from dataloader.log import record, sinks
from dataloader.log.channel import Channel, Sink
from dataloader.log.masking import MASK, learn_configured, learn_job, masked
from dataloader.log.outage import Outage

__all__ = ["MASK", "Outage", "audit", "close", "configure", "context", "flush", "learn_job", "masked", "metric"]

FLUSH_SEC = 1.0
STREAMS = ("application", "metric", "audit")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Settings(Protocol):
    """What `configure` reads of config.Settings; it also learns the values of its SecretStr."""

    local: bool
    debug: bool
    timezone: str
    log_path: Path | None
    log_file_name: str
    log_rotation: str
    metric_path: Path | None
    metric_file_name: str
    audit_log_path: Path | None
    audit_log_file_name: str


@dataclass
class _Ways:
    """Where the lines of each stream go, and in which form."""

    people: Channel | None = None  # stdout, where LOCAL is set
    colors: bool = False
    zone: tzinfo = UTC
    stdout: Channel | None = None
    files: dict[str, Channel] = field(default_factory=dict)

    def channels(self) -> list[Channel]:
        return [*filter(None, (self.people, self.stdout)), *self.files.values()]


_ways = _Ways()
_context: dict[str, Any] = {}


def configure(settings: Settings, *, threaded: bool = False, output: int = 1) -> None:
    """Send every log line of this process to the file descriptor `output` and to the configured files.

    With `threaded`, for a process that does not fork, a thread writes them, and a crash of any thread becomes a line
    too. What was configured before is closed. A file that cannot be written costs lines, not the process.
    """
    close()
    learn_configured(settings)
    _open(settings, output)
    if threaded:
        for channel in _ways.channels():
            channel.start()
        sys.excepthook, threading.excepthook = _crashed, _thread_crashed
        logging.captureWarnings(True)
    level = logging.DEBUG if settings.debug else logging.INFO
    logging.basicConfig(handlers=[_Handler()], level=level, force=True)
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # the API answers 503 and says so itself
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, _as_argument],
        logger_factory=_Logger,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


@contextmanager
def context(**fields: Any) -> Iterator[None]:
    """Add these fields to every line of the process, whichever thread logs it, while the block runs."""
    global _context
    before, _context = _context, {**_context, **fields}
    try:
        yield
    finally:
        _context = before


def metric(event: str, **fields: Any) -> None:
    """Write a line to the metric stream: something that is counted or measured has happened."""
    _emit("metric", logging.INFO, {**structlog.contextvars.get_contextvars(), **fields, "event": event})


def audit(event: str, **fields: Any) -> None:
    """Write a line to the audit stream: somebody has asked for something, and what came of it."""
    _emit("audit", logging.INFO, {**structlog.contextvars.get_contextvars(), **fields, "event": event})


def flush(within: float = FLUSH_SEC) -> bool:
    """Wait at most so many seconds until the lines so far are written; True when they are. Raises nothing."""
    until = monotonic() + within
    return all([channel.drain(max(0.0, until - monotonic())) for channel in _ways.channels()])


def close(within: float = FLUSH_SEC) -> None:
    """Write what can be written in this time, end the threads, close the files: nothing is logged any more."""
    global _ways
    ways, _ways = _ways, _Ways()
    for channel in ways.channels():
        channel.close(within)
    if sys.excepthook is _crashed:
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        logging.captureWarnings(False)


def _open(settings: Settings, output: int) -> None:
    with suppress(OSError):  # a daemon may have no stdout
        channel = _channel(sinks.Stream(output), "stdout", _told_people if settings.local else _told)
        if settings.local:
            _ways.people, _ways.colors, _ways.zone = channel, os.isatty(output), ZoneInfo(settings.timezone)
        else:
            _ways.stdout = channel
    rule = sinks.rule(settings.log_rotation, ZoneInfo(settings.timezone))
    names = (settings.log_file_name, settings.metric_file_name, settings.audit_log_file_name)
    folders = (settings.log_path, settings.metric_path, settings.audit_log_path)
    for stream, folder, name in zip(STREAMS, folders, names, strict=True):
        if folder is not None:
            _ways.files[stream] = _channel(sinks.File(folder / name, rule), str(folder / name), _told)


def _channel(sink: Sink, name: str, tell: Any) -> Channel:
    def on_trouble(error: OSError) -> None:
        _emit("log", logging.WARNING, {"event": "log.write.failed", "to": name, "error": str(error)})

    return Channel(sink, tell, on_trouble)


def _told(line: bytes, count: int) -> bytes:
    return line[:-2] + b', "dropped": %d}\n' % count


def _told_people(line: bytes, count: int) -> bytes:
    return line[:-1] + b" dropped=%d\n" % count


def _emit(logger: str, level: int, event: dict[str, Any]) -> None:
    """Put one event on its ways: application lines to stdout and their file, others to their file or to stdout."""
    stream = logger if logger in STREAMS else "application"
    file = _ways.files.get(stream)
    at_stdout = stream == "application" or file is None
    whole = record.stamped({**_context, **event}, logging.getLevelName(level).lower(), logger, stream)
    urgent = level >= logging.ERROR
    plain = [channel for channel in (_ways.stdout if at_stdout else None, file) if channel]
    if plain:
        line = record.as_json(whole)
        for channel in plain:
            channel.put(line, urgent)
    if _ways.people and at_stdout:
        _ways.people.put(record.as_text(whole, _ways.colors, _ways.zone), urgent)


class _Logger:
    """What structlog hands its events to."""

    def __init__(self, name: str = "dataloader") -> None:
        self._name = name

    def debug(self, event: dict[str, Any]) -> None:
        _emit(self._name, logging.DEBUG, event)

    def info(self, event: dict[str, Any]) -> None:
        _emit(self._name, logging.INFO, event)

    def warning(self, event: dict[str, Any]) -> None:
        _emit(self._name, logging.WARNING, event)

    def error(self, event: dict[str, Any]) -> None:
        _emit(self._name, logging.ERROR, event)

    def critical(self, event: dict[str, Any]) -> None:
        _emit(self._name, logging.CRITICAL, event)

    exception, warn, fatal = error, warning, critical


def _as_argument(_logger: Any, _method: str, event: Any) -> Any:
    return (event,), {}


class _Handler(logging.Handler):
    """What the standard library's logging hands its records to. It has no lock: nothing here needs one."""

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        event = {**structlog.contextvars.get_contextvars(), **extra, "event": _message(record)}
        if record.exc_info:
            event["exc_info"] = record.exc_info
        if record.stack_info:
            event["stack"] = record.stack_info
        _emit(record.name, record.levelno, event)


def _message(record: logging.LogRecord) -> object:
    try:
        return record.getMessage()
    except Exception:  # arguments that do not fit the format
        return record.msg


def _crashed(kind: type[BaseException], error: BaseException, _trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    _emit("process", logging.CRITICAL, {"event": "process.crashed", "exc_info": error, "pid": os.getpid()})
    flush()


def _thread_crashed(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else ""
    _emit("process", logging.CRITICAL, {"event": "thread.crashed", "thread": name, "exc_info": args.exc_value})


def _after_fork() -> None:
    for channel in _ways.channels():
        channel.after_fork()


atexit.register(flush)
os.register_at_fork(after_in_child=_after_fork)
