"""Logs: one line per event, JSON or (LOCAL) for people, with the job's context and without secrets.

There are three streams: `application`, `metric` and `audit`; a logger named `metric` or `audit` writes to its stream.
Events of structlog and of the standard library's logging look the same. A process calls `configure` once, and again
after a fork. A log call never waits for the reader or the storage of the lines. The modules:

    masking    `masked` removes secrets from log lines, errors, journals and answers
    record     an event as one line of at most 4,000 bytes
    channel    the bounded queue and its thread; it counts lost lines
    sinks      a shared pipe; a shared file and its rotation
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from functools import partial
from time import monotonic
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from zoneinfo import ZoneInfo

from dataloader.log import record, sinks
from dataloader.log.channel import Channel, Counting
from dataloader.log.masking import MASK as MASK
from dataloader.log.masking import learn_configured, masked_text
from dataloader.log.masking import learn_job as learn_job
from dataloader.log.masking import learn_secret as learn_secret
from dataloader.log.masking import masked as masked
from dataloader.log.masking import without_known as without_known

if TYPE_CHECKING:
    from dataloader.config import Settings

FLUSH_SEC = 1.0
STREAMS = ("application", "metric", "audit")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@dataclass
class _Outputs:
    people: Channel | None = None  # stdout, if LOCAL is set
    colors: bool = False
    zone: tzinfo = UTC
    stdout: Channel | None = None
    files: dict[str, Channel] = field(default_factory=dict)
    echoes: list[Channel] = field(default_factory=list)
    is_threaded: bool = False

    def channels(self) -> list[Channel]:
        return [*filter(None, (self.people, self.stdout)), *self.files.values(), *self.echoes]


_outputs = _Outputs()
_context: dict[str, Any] = {}
_level = logging.NOTSET  # of the lines that are written; NOTSET before `configure`
_diverted: Callable[[str, Mapping[str, Any]], None] | None = None


def configure(settings: Settings, *, threaded: bool = False, output: int = 1) -> None:
    """Send every log line of this process to the file descriptor `output` and to the configured files.

    With `threaded`, only for a process that does not fork, a thread writes the lines, and each crash of the process
    or of a thread becomes a line. The call closes the previous outputs. An output that cannot be written loses lines;
    no OSError reaches the caller.
    """
    import structlog  # not at the top: a program that asks the API writes no logs

    close()
    learn_configured(settings)
    _open(settings, output)
    if threaded:
        _outputs.is_threaded = True
        for channel in _outputs.channels():
            channel.start()
        sys.excepthook, threading.excepthook = _crashed, _thread_crashed
        logging.captureWarnings(True)
    global _level
    level = _level = logging.DEBUG if settings.debug else logging.INFO
    logging.basicConfig(handlers=[_Handler()], level=level, force=True)
    # psycopg's warning of an abandoned COPY quotes rows, and those of its pool say less than the API's own 503.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, _emitted],
        logger_factory=_Logger,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


def of_runs(name: str) -> logging.Logger:
    """The logger of a pipeline's runs, also where a logging configuration of the user's would silence it."""
    logger = logging.getLogger(name)
    logger.disabled = False
    if not logger.isEnabledFor(_level) and logger.level == logging.NOTSET:
        logger.setLevel(_level)
    if _level and not logger.handlers and not any(isinstance(each, _Handler) for each in logging.getLogger().handlers):
        logger.addHandler(_Handler())
    return logger


class context:
    """Add these fields to every line of every thread while the block runs."""

    # No generator: a worker enters such a block for each job.
    __slots__ = ("_before", "_fields")

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        global _context
        self._before, _context = _context, {**_context, **self._fields}

    def __exit__(self, *_: object) -> None:
        global _context
        _context = self._before


def metric(event: str, **fields: Any) -> None:
    """Write a line to the metric stream: a counted or measured event."""
    _emit("metric", logging.INFO, {**_bound(), **fields, "event": event})


def audit(event: str, **fields: Any) -> None:
    """Write a line to the audit stream: a client's request and its outcome."""
    _emit("audit", logging.INFO, {**_bound(), **fields, "event": event})


class Template:
    """An info line that a worker writes for each job, without the context's fields, at half of the cost of a line.

    The names of the fields are the caller's own, so they tell of no secret. Texts are masked. Numbers are finite; words
    of our own and ids hold no secret and nothing to be escaped.
    """

    _FORMS: Mapping[type, str] = {str: "%({})s", int: "%({})s", float: "%({})s", NoneType: "null"}

    def __init__(self, logger: str, event: str, kinds: Mapping[str, type]) -> None:
        """`kinds` are the fields' types: str (masked), int, float, NoneType; values of UUID and StrEnum get quotes."""
        self._stream, self._event = _stream(logger), event
        self._stamped = partial(record.stamped, level="info", logger=logger, stream=self._stream)
        known = self._stamped({"event": event})
        fields = [f'"{name}": {record.encoded(value)}' for name, value in known.items() if name != "timestamp"]
        fields += [f'"{name}": ' + self._FORMS.get(kind, '"%({})s"').format(name) for name, kind in kinds.items()]
        self._format = '{"timestamp": "%(timestamp)s", ' + ", ".join(fields) + "}\n"
        self._texts = [name for name, kind in kinds.items() if kind is str]

    def write(self, fields: Mapping[str, Any]) -> None:
        """Write the line; `fields` are all those of the template."""
        known = {**fields, "timestamp": record.now()}
        for name in self._texts:
            known[name] = record.quoted(masked_text(known[name]))
        line = self._format % known
        if _outputs.people or not line.isascii() or len(line) > record.CAP:
            _send(self._stamped({"event": self._event, **fields}), self._stream)
            return
        for channel in _channels(self._stream):
            channel.put(line.encode(), urgent=False)


def divert(taker: Callable[[str, Mapping[str, Any]], None] | None) -> None:
    """From now on also give each event of the application's stream to `taker`, with its level; None ends this."""
    global _diverted
    _diverted = taker


def as_lines(event: Mapping[str, Any]) -> str:
    """An event as masked lines for people: its text with its further fields, and its whole exception."""
    return record.as_lines(event, frozenset(_context))


def echo(fd: int) -> Callable[[bytes], None]:
    """A function that writes a line, which ends in a newline, to this descriptor; nobody waits, as with log lines."""
    try:
        lost = b"[%d lines of output were lost]\n"
        channel = Channel(sinks.Stream(fd), lambda line, dropped: lost % dropped + line, lambda error: None)
    except OSError:
        return lambda line: None
    _outputs.echoes.append(channel)
    is_threaded = _outputs.is_threaded

    def write(line: bytes) -> None:
        if is_threaded and not channel.is_threaded:  # most workers never write such a line, and save a thread
            channel.start()
        for at in range(0, len(line), record.CAP):
            channel.put(line[at : at + record.CAP], urgent=False)

    return write


def keeps_metrics() -> bool:
    """True when the metric stream has a file of its own."""
    return "metric" in _outputs.files


def flush(within: float = FLUSH_SEC) -> bool:
    """Wait at most `within` seconds until all lines so far are written; True when they are. Raises nothing."""
    until = monotonic() + within
    return all([channel.drain(max(0.0, until - monotonic())) for channel in _outputs.channels()])


def close(within: float = FLUSH_SEC) -> None:
    """Write the waiting lines, in at most `within` seconds per output, end the threads and close the files.

    The process logs no more until the next `configure`.
    """
    global _outputs
    outputs, _outputs = _outputs, _Outputs()
    for channel in outputs.channels():
        channel.close(within)
    if sys.excepthook is _crashed:
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        logging.captureWarnings(False)


def _open(settings: Settings, output: int) -> None:
    with suppress(OSError):  # a daemon may have no stdout
        channel = _channel(
            sinks.Stream(output), "stdout", _counting(b" dropped=%d\n", 1) if settings.local else _IN_JSON
        )
        if settings.local:
            _outputs.people, _outputs.zone = channel, ZoneInfo(settings.timezone)
            _outputs.colors = os.isatty(output) and not os.environ.get("NO_COLOR")  # https://no-color.org
        else:
            _outputs.stdout = channel
    rule = sinks.rule(settings.log_rotation, ZoneInfo(settings.timezone))
    names = (settings.log_file_name, settings.metric_file_name, settings.audit_log_file_name)
    folders = (settings.log_path, settings.metric_path, settings.audit_log_path)
    for stream, folder, name in zip(STREAMS, folders, names, strict=True):
        if folder is not None:
            _outputs.files[stream] = _channel(sinks.File(folder / name, rule), str(folder / name), _IN_JSON)


def _channel(sink: sinks.Stream | sinks.File, name: str, counting: Counting) -> Channel:
    def on_trouble(error: OSError) -> None:
        _emit("log", logging.WARNING, {"event": "log.write.failed", "to": name, "error": str(error)})

    return Channel(sink, counting, on_trouble)


def _counting(end: bytes, length: int) -> Counting:
    """Adds the number of lost lines to a line, by another end in the place of its last bytes."""
    return lambda line, dropped: line[:-length] + end % dropped


_IN_JSON = _counting(b', "dropped": %d}\n', 2)


def _bound() -> dict[str, Any]:
    """The fields that somebody has bound to this thread's context by structlog."""
    contextvars = sys.modules.get("structlog.contextvars")
    return dict(contextvars.get_contextvars()) if contextvars else {}


def _emit(logger: str, level: int, event: dict[str, Any]) -> None:
    stream = _stream(logger)
    whole = record.stamped({**_context, **event}, logging.getLevelName(level).lower(), logger, stream)
    if _diverted is not None and stream == "application":
        _diverted(whole["level"], whole)
    _send(whole, stream, urgent=level >= logging.ERROR)


def _stream(logger: str) -> str:
    return logger if logger in STREAMS else "application"


def _send(whole: dict[str, Any], stream: str, urgent: bool = False) -> None:
    if plain := _channels(stream):
        line = record.as_json(whole)
        for channel in plain:
            channel.put(line, urgent)
    if _outputs.people and _is_at_stdout(stream):
        for piece in record.as_texts(whole, _outputs.colors, _outputs.zone):
            _outputs.people.put(piece, urgent)


def _channels(stream: str) -> list[Channel]:
    """The channels of JSON lines: the application's go to stdout and their file, others to their file or to stdout."""
    stdout = _outputs.stdout if _is_at_stdout(stream) else None
    return [channel for channel in (stdout, _outputs.files.get(stream)) if channel]


def _is_at_stdout(stream: str) -> bool:
    return stream == "application" or stream not in _outputs.files


class _Logger(NamedTuple):
    """A logger of structlog, which has no methods: its events end in `_emitted`."""

    name: str = "dataloader"


def _emitted(logger: _Logger, method: str, event: Any) -> NoReturn:
    from structlog import DropEvent

    _emit(logger.name, logging.getLevelNamesMapping()[method.upper()], event)
    raise DropEvent


class _Handler(logging.Handler):
    """The handler of the standard library's logging. It has no lock, for `_emit` needs none."""

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        try:
            text: object = record.getMessage()
        except (Exception, SystemExit):  # the arguments do not fit the format
            text = record.msg
        event = {**_bound(), **extra, "event": text}
        if record.exc_info:
            event["exc_info"] = record.exc_info
        if record.stack_info:
            event["stack"] = record.stack_info
        _emit(record.name, record.levelno, event)


def _crashed(kind: type[BaseException], error: BaseException, _trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    _emit("process", logging.CRITICAL, {"event": "process.crashed", "exc_info": error, "pid": os.getpid()})
    flush()


def _thread_crashed(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else ""
    _emit("process", logging.CRITICAL, {"event": "thread.crashed", "thread": name, "exc_info": args.exc_value})


atexit.register(flush)
os.register_at_fork(after_in_child=lambda: list(map(Channel.after_fork, _outputs.channels())))
