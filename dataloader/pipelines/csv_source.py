"""The file of `load.csv`: its arguments, and the file as records with their line numbers.

Reading a file of any size takes bounded memory: one record, or one block of the decoder.
"""

from __future__ import annotations

import codecs
import csv
import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dataloader.pipelines import PermanentError

LONGEST_RECORD = 16 * 2**20  # characters: an unmatched quote must not read the rest of a large file into memory
QUEUE_TABLES = {"dl_jobs", "dl_job_events", "dl_migrations", "dl_fence", "dl_queues", "dl_workers", "dl_tasks"}
QUEUE_TABLES |= {"dl_totals", "dl_pace", "dl_rolled", "dl_lengths", "dl_freed", "dl_results", "dl_needs"}
QUEUE_TABLES |= {"dl_schedules", "dl_parents", "dl_waiting", "dl_limits", "dl_checkpoints"}
QUEUE_TABLES |= {"dl_webhooks", "dl_alerts", "dl_alerted", "dl_backfills", "dl_partitions"}
QUEUE_TABLES |= {"dl_durations", "dl_predictions", "dl_error_notes", "dl_pace_long", "dl_job_logs", "dl_job_logs_rest"}
QUEUE_TABLES |= {"dl_spans", "dl_cleanups", "dl_messages"}
_LOGS_OF_A_DAY = re.compile(r"dl_job_logs_\d{8}")
_HEAD = 2**16  # bytes by which a file is known again
_UNDECODABLE = "\udcff"  # stands for an invalid byte; no encoding yields this character
_COUNTED_AT_ONCE = 250_000  # records between two safe points of the first pass


def _encoding(name: str) -> str:
    try:
        # Try both directions: some codecs are not for text, and some take no error handler.
        codecs.getincrementaldecoder(name)(_mark_undecodable.__name__).decode("ab".encode(name))
    except (LookupError, ValueError):
        raise ValueError("should be the name of a text encoding such as utf-8, cp1251 or utf-16") from None
    return name


def _delimiter(character: str) -> str:
    if len(character) != 1 or not character.isascii() or character.isalnum() or character in '"\r\n\0':
        raise ValueError("should be one ASCII punctuation mark, tab or space, and not the quote")
    return character


def identifier(name: str) -> str:
    if not name or "\0" in name or len(name.encode("utf-8", "replace")) > 63:
        raise ValueError("should be a name of 1 to 63 bytes")
    return name


def table(name: str) -> str:
    parts = name.split(".")
    if len(parts) > 2 or not all(part and "\0" not in part and len(part.encode()) <= 63 for part in parts):
        raise ValueError("should be name or schema.name, each of 1 to 63 bytes")
    if parts[-1] in QUEUE_TABLES or _LOGS_OF_A_DAY.fullmatch(parts[-1]):
        raise ValueError("should not be a table of the queue itself")
    if len(parts) == 2 and (parts[0].startswith("pg_") or parts[0] == "information_schema"):
        raise ValueError("should not be in a schema of PostgreSQL itself")
    return name


def unique(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("should name each column once")
    return names


class Arguments(BaseModel):
    """The `args` of `load.csv`; docs/loaders.md explains each."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)
    names_columns: ClassVar[str] = "header"
    hint: ClassVar[str] = "; is the delimiter right?"

    path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    table: Annotated[str, AfterValidator(table)]
    key: Annotated[list[Annotated[str, AfterValidator(identifier)]], Field(min_length=1), AfterValidator(unique)]
    delimiter: Annotated[str, AfterValidator(_delimiter)] = ","
    encoding: Annotated[str, AfterValidator(_encoding)] = "utf-8"
    batch_rows: int = Field(default=5_000, ge=1, le=1_000_000)

    @property
    def origin(self) -> str:
        """Where the records come from, for people."""
        return self.path


def open_file(folder: Path, wanted: Arguments) -> io.TextIOWrapper:
    """Open the file for reading as text; raises PermanentError unless it is a regular file below `folder`."""
    descriptor = opened(folder, wanted.path)
    return open(descriptor, encoding=wanted.encoding, errors=_mark_undecodable.__name__, newline="")


def opened(folder: Path, path: str) -> int:
    """The file, open for reading; raises PermanentError unless it is a regular file below `folder`."""
    root = os.path.realpath(folder)
    real = os.path.realpath(os.path.join(root, path))
    if not Path(real).is_relative_to(root):
        raise PermanentError(f"path: {path} should be a file below the data folder")
    try:
        # NONBLOCK: opening a FIFO would wait for its writer. NOFOLLOW: links are resolved above.
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise _unopenable(e, path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PermanentError(f"path: {path} should be a regular file")
    return descriptor


def _unopenable(error: OSError, path: str) -> Exception:
    reasons = {
        errno.ENOENT: "there is no such file below the data folder",
        errno.ENOTDIR: "there is no such file below the data folder",
        errno.EACCES: "the worker may not read this file",
        errno.ELOOP: "its symbolic links form a loop",
        errno.ENAMETOOLONG: "the name is too long",
        errno.ENXIO: "should be a regular file",
    }
    reason = reasons.get(error.errno or 0)
    return PermanentError(f"path: {path}: {reason}") if reason else error


def _mark_undecodable(error: UnicodeError) -> tuple[str, int]:
    if isinstance(error, UnicodeDecodeError):
        return _UNDECODABLE, error.end
    raise error


codecs.register_error(_mark_undecodable.__name__, _mark_undecodable)


class Place(NamedTuple):
    """Where a record begins: a mark of its source, and how many lines, records and literal quotes are before it.

    The mark of a file is that of its text stream (its `tell`). See `Source` for the quotes.
    """

    mark: Any = 0
    line: int = 0
    records: int = 0
    literal_quotes: int = 0


def _separated(field: str, mark: str) -> re.Pattern[str]:
    return re.compile(f"{field}(?:{mark}{field})*+[\r\n]*+")


class Source:
    """The file as records; a record ends with a line end outside quotes.

    A quote at the start of a field encloses it. Any other quote is literal, as for Python's csv module. For COPY each
    quote would be special, and lines with one quote each would become one row. So COPY gets a field with a literal
    quote enclosed in quotes.
    """

    def __init__(self, wanted: Arguments, stream: io.TextIOWrapper) -> None:
        self.path, self.delimiter, self.encoding = wanted.path, wanted.delimiter, wanted.encoding
        self._stream = stream
        self._version = self._stat()
        self._line = self._count = self._literal_quotes = 0  # of the records that were read
        self._begin = Place()
        mark = re.escape(wanted.delimiter)
        plain, enclosed = f'[^"{mark}\r\n]*+', '"[^"]*+(?:""[^"]*+)*+"'
        # A record without literal quotes, and text that does not end within a quoted field.
        self._is_plain = _separated(f"(?:{enclosed}|{plain})", mark).fullmatch
        self._is_whole = _separated(f'(?:{enclosed}[^{mark}]*+|(?!")[^{mark}]*+)', mark).fullmatch
        # A field that begins with a quote, and one that has a quote within.
        self._field = re.compile(f'(?:\\A|(?<={mark}))(?:({enclosed})([^{mark}]*+)|[^"{mark}]++"[^{mark}]*+)')

    def columns(self) -> list[str]:
        """The names in the header, which has to be read first; raises PermanentError for a wrong header."""
        self._rewind()
        line, text = next(self._records(), (1, ""))
        self._begin = self.place()._replace(records=0)
        try:
            names = next(csv.reader([text], delimiter=self.delimiter, strict=True), [])
            if not names or not all(names):
                raise ValueError("should be a header that names every column")
            return unique([identifier(name) for name in names])
        except (csv.Error, ValueError) as e:
            raise self.error(line, f"header: {e}") from None

    def count(self) -> Generator[None, None, int]:
        """The number of records; raises PermanentError at invalid text and at a broken record."""
        count = 0
        for count, _ in enumerate(self.records(), start=1):
            if not count % _COUNTED_AT_ONCE:
                yield None
        return count

    def records(self, begin: Place | None = None) -> Iterator[tuple[int, str]]:
        """The records from there on, by default after the header: the number of the first line, and the text.

        The text is without its line end.
        """
        mark, self._line, self._count, self._literal_quotes = begin or self._begin
        self._stream.seek(mark)
        return self._records()

    def place(self) -> Place:
        """Where the next record begins, blank lines included."""
        return Place(self._stream.tell(), self._line, self._count, self._literal_quotes)

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self._version[0]

    @property
    def expected(self) -> int:
        """How many records there will be, if the others are as long as those that were read."""
        return max(self._count, self._count * self.size // max(1, self.bytes_read))

    @property
    def bytes_read(self) -> int:
        """Where reading has come in the file, in bytes, some thousand of them ahead of the records."""
        return os.lseek(self._stream.fileno(), 0, os.SEEK_CUR)

    def identity(self) -> list[int | str]:
        """What tells this version of the file from others: its size, its time, and a hash of its first bytes."""
        head = hashlib.sha256(os.pread(self._stream.fileno(), _HEAD, 0)).hexdigest()
        return [*self._version, head]

    def unchanged(self) -> bool:
        """False when a program has written to the file since it was opened."""
        return self._stat() == self._version

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        """The error of a record; it names the file and the line."""
        to = f" to {line + extra_lines}" if extra_lines else ""
        return PermanentError(f"{self.path}, line {line}{to}: {reason}")

    def located(self, begin: Place, reported: int) -> tuple[int, int]:
        """The place of PostgreSQL's error: the record's first line in the file, and the number of its further lines.

        `reported` is the line in COPY's data, where line 1 replaces the header; `begin` is where that COPY began.
        PostgreSQL counts LF in quotes, but not CR.
        """
        at, line = 1, 0
        for line, text in self.records(begin):
            at += 1 + text.count("\n")
            if at >= reported:
                return line, len(re.findall("\r\n?|\n", text))
        return line, 0

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._stream.fileno())
        return found.st_size, found.st_mtime_ns

    def _records(self) -> Iterator[tuple[int, str]]:
        # This loop runs once per line of the file, so the cheap tests come first and calls are few.
        readline = partial(self._stream.readline, LONGEST_RECORD)
        line = self._line
        for text in iter(readline, ""):
            line = first = line + 1
            if '"' in text and not self._is_plain(text):
                text, lines = self._irregular(text, first)
                line += lines
            if len(text) >= LONGEST_RECORD:
                raise self.error(first, f"longer than {LONGEST_RECORD} characters")
            text = text.rstrip("\r\n")
            if not text:
                continue
            if not text.isascii():
                self._check(text, first)
            self._line = line
            self._count += 1
            yield first, text

    def _rewind(self) -> None:
        self._stream.seek(0)
        try:
            if self._stream.read(1) != "\ufeff":
                self._stream.seek(0)
        except UnicodeError:  # UTF-16 and UTF-32 without their byte order mark
            raise self.error(1, f"should begin with the byte order mark of {self.encoding}") from None

    def _irregular(self, text: str, first: int) -> tuple[str, int]:
        """The record that begins with this line, for COPY, and the number of its further lines.

        The record has several lines, or a literal quote.
        """
        record, rest = io.StringIO(), text
        length, lines = record.write(text), 0
        while not self._is_whole(rest):
            more = self._stream.readline(LONGEST_RECORD) if length < LONGEST_RECORD else ""
            if not more:
                raise self.error(first, "unterminated quote")
            rest = f'"{more}'  # the line begins within quotes
            length += record.write(more)
            lines += 1
        text = record.getvalue()
        if self._is_plain(text):
            return text, lines
        try:
            return self._field.sub(self._enclosed, text.rstrip("\r\n")), lines
        except ValueError as e:
            raise self.error(first, str(e), lines) from None

    def _enclosed(self, field: re.Match[str]) -> str:
        """The field for COPY; raises ValueError where its quote may belong to another line."""
        enclosed, behind = field.groups()
        if enclosed is None:
            text, literal = "", field[0]
        elif behind and re.search("[\r\n]", enclosed):
            raise ValueError("a field of several lines has text behind the closing quote")
        else:
            text, literal = enclosed[1:-1], behind
        if not (count := literal.count('"')):
            return field[0]
        self._literal_quotes += count
        literal = literal.replace('"', '""')
        return f'"{text}{literal}"'

    def _check(self, text: str, first: int) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as e:
            line = first + len(re.findall("\r\n?|\n", text[: e.start]))
            raise self.error(line, f"a byte that is not {self.encoding} text") from None
