"""Logs: one JSON line per event on stdout, lines for people where LOCAL is set, with the job's context.

structlog over the standard library's logging, so that pipelines and libraries that log the ordinary way come
out the same. Call `configure` once per process, after a fork again. May import nothing of the package.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?$|secret|token|authorization|cookie|dsn|api_?key|credential", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"(://[^\s:/@]*:)[^\s@/]+(@)")
_KEYWORD_PASSWORD = re.compile(
    r"(\b(?:password|passwd|secret|token)\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,;&]+)", re.IGNORECASE
)
MASK = "***"


def configure(*, local: bool, debug: bool, stream: TextIO | None = None) -> None:
    """Send every log record of this process to `stream`, by default stdout; earlier handlers are replaced."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_shared(),
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_last(local)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # the API answers 503 and says so itself
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def masked(text: str) -> str:
    """`text` without the passwords of URLs and of key=value pairs."""
    return _KEYWORD_PASSWORD.sub(rf"\g<1>{MASK}", _URL_PASSWORD.sub(rf"\g<1>{MASK}\g<2>", text))


def _mask(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if _SECRET_NAME.search(name):
            event[name] = MASK
        elif isinstance(value, str):
            event[name] = masked(value)
    return event


def _shared() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _last(local: bool) -> list[Any]:
    if local:
        return [_mask, structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())]
    return [
        structlog.processors.format_exc_info,
        _mask,
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]
