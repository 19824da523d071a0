"""Shared by all commands: their classes and types of arguments, the refusal, and the DSN of the queue.

A command has one or more `examples`, which its help shows as they would be typed. No help text is cut. The
answer to a mistyped word offers the right ones that are most like it; it is short and holds no secret.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dataloader.exits import EXIT_CANNOT_START, EXIT_FAILED

# Settings, logs and masking are imported on first use: `dataloader --version` and `--help` need none of them.
if TYPE_CHECKING:
    from dataloader.config import Settings

SUMMARY_MOST = 1_000  # characters of a command's line in a list: click would cut it to its 80 columns
WRONG_MOST = 1_000  # characters of the answer to a mistyped command line, which quotes its words
LIKE_MOST = 3  # names that are offered in the place of a mistyped one
_UNITS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}  # of spans of time, in seconds
_SPAN = re.compile(r"(\d{1,9}(?:\.\d+)?) ?(s|sec|m|min|h|d|)")
EXAMPLE_ID = "01890a5d-ac96-774b-bcce-b302099a8057"


class Command(click.Command):
    """A command with `examples`, each a line for a shell, which its help does not fold: they can be copied."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.examples = tuple(examples)
        self.short_help = self.get_short_help_str(SUMMARY_MOST)  # click does not cut this one

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Group(Command, click.Group):
    """A group of commands. With `default`, a first word that is none of its commands belongs to this command.

    With `is_short` the options of this command, and no word at all, belong to it too.
    """

    command_class = Command
    group_class = type

    def __init__(self, *args: Any, default: str | None = None, is_short: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self._default, self._is_short = default, is_short

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self._is_short and (not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)):
            args = [str(self._default), *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command in `args`, else the default one; raises NoSuchCommand with similar names."""
        is_mistyped = len(args) == 1 and like(args[0], self.commands)  # the default one always needs another word
        if self._default and args[0] not in self.commands and not is_mistyped:
            args = [self._default, *args]
        return super().resolve_command(ctx, args)


class Choice(click.Choice[str]):
    """One of some words; a mistyped one gets the right one that is most like it."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        text = super().get_invalid_choice_message(value, ctx)
        meant = like(str(value), list(map(str, self.choices)))
        return f"{text} {did_you_mean(meant)}" if meant else text


class Number(click.FloatRange):
    """A finite number in a range; for click, `nan` is in every range and `inf` in most."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail(f"{str(value)!r} should be a finite number", param, ctx)
        return number


def like(word: str, names: Iterable[str]) -> list[str]:
    """The names most like a mistyped one, the best first: at most LIKE_MOST."""
    return get_close_matches(word[:200], list(names), LIKE_MOST)


def did_you_mean(names: Sequence[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, names))}?"


@contextmanager
def harmless_errors() -> Iterator[None]:
    """Make the answer to a mistyped command line one that may be shown: it quotes what was typed."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as e:
        if type(e) is click.BadParameter:  # masked without the name of the option, which may be --token-file
            raise click.BadParameter(_harmless(e.message), e.ctx, e.param, e.param_hint) from None
        raise click.UsageError(_harmless(e.format_message()), e.ctx) from None


def _harmless(text: str) -> str:
    from dataloader import log
    from dataloader.log.masking import clipped

    text = log.masked(text)
    return text if len(text) <= WRONG_MOST else " ".join(clipped(text, WRONG_MOST).split())


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def arguments(text: str) -> Any:
    """The JSON object of --args; raises click.BadParameter."""
    try:
        if text.startswith("@"):
            text = sys.stdin.read() if text == "@-" else Path(text[1:]).read_text("utf-8")
        args = json.loads(text)
    except OSError as e:
        raise click.BadParameter(f"{text[1:]} cannot be read: {e.strerror}", param_hint="--args") from None
    except (ValueError, RecursionError) as e:
        raise click.BadParameter(f"should be a JSON object: {e}", param_hint="--args") from None
    if not isinstance(args, dict):
        raise click.BadParameter("should be a JSON object", param_hint="--args")
    return args


def pair(text: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE; a value that is no JSON is a text."""
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise click.BadParameter("should be NAME=VALUE, such as limit=10", param_hint="--arg")
    try:
        return name, json.loads(value, parse_constant=int)  # JSON cannot say NaN and Infinity: they are texts
    except (ValueError, RecursionError):
        return name, value


def span(text: str) -> float | None:
    """The seconds of a span such as 30s, 15min, 2h or 1d; None for any other text."""
    match = _SPAN.fullmatch(text.strip())
    return float(match[1]) * _UNITS[match[2]] if match else None


def instant(text: str, zone: tzinfo, flag: str) -> datetime:
    """A time, or so long ago; without an offset it is in the zone of the people."""
    if (seconds := span(text)) is not None and text.strip()[-1].isalpha():
        return datetime.now(UTC) - timedelta(seconds=seconds)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} should be 15min, 2h, 3d or a time such as 2026-01-31T06:30"
        raise click.BadParameter(message, param_hint=flag) from None
    return at if at.tzinfo else at.replace(tzinfo=zone)


def refuse(message: str, status: int) -> NoReturn:
    """Print `message` to stderr, each line with the program's name and masked secrets, and exit with `status`."""
    from dataloader import log

    for line in message.splitlines():
        click.echo(f"dataloader: {log.masked(line)}", err=True)
    sys.exit(status)


@contextmanager
def refusing(failed: str = "database", *kinds: type[Exception]) -> Iterator[None]:
    """Refuse in one line what fails here, also errors of `kinds`; `failed` begins the line of the database's errors."""
    import psycopg

    from dataloader import config
    from dataloader.queue import migrations

    try:
        yield
    except (migrations.SchemaError, config.ConfigError) as e:
        refuse(str(e), EXIT_CANNOT_START)
    except kinds as e:
        refuse(str(e), EXIT_FAILED)
    except psycopg.Error as e:
        refuse(f"{failed}: {str(e).strip()}", EXIT_FAILED)


def settings() -> Settings:
    """The settings, by which this process logs from now on; refuses where they are wrong."""
    from dataloader import config, log

    try:
        loaded = config.load()
    except config.ConfigError as e:
        refuse(str(e), EXIT_CANNOT_START)
    log.configure(loaded)
    return loaded


def dsn(settings: Settings) -> str:
    """The queue's DSN: the configured one, or that of a running embedded server; refuses without either."""
    queue_dsn = settings.queue_dsn
    if queue_dsn is None:
        from dataloader import embedded

        queue_dsn = embedded.running(settings.dl_home / "postgres")
    if queue_dsn is None:
        refuse(
            "no database is configured: set DL_DB_DSN or PG_HOST and PG_DATABASE, or run `dataloader up`",
            EXIT_CANNOT_START,
        )
    return queue_dsn
