"""`load.csv`: a CSV file into a table, by key, all of it or nothing.

PostgreSQL's own rules for CSV and for its types apply to the records, except that a quote within a field is literal. A
file of up to PART_BYTES is read twice, first to count the records. A larger one is read once, in parts. Reading takes
bounded memory: one record, or one block of the decoder.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections.abc import Generator, Iterator
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator

from dataloader.pipelines import Context, PermanentError, Progress, csv_table, register, validated
from dataloader.pipelines.csv_table import LONGEST_RECORD, FileArguments, FileSource, Place, Target, identifier, unique

_UNDECODABLE = "\udcff"  # stands for an invalid byte; no encoding yields this character


def _mark_undecodable(error: UnicodeError) -> tuple[str, int]:
    if isinstance(error, UnicodeDecodeError):
        return _UNDECODABLE, error.end
    raise error


codecs.register_error(_mark_undecodable.__name__, _mark_undecodable)


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


class Wanted(Target, FileArguments):
    """The `args` of `load.csv`; docs/loaders.md explains each."""

    delimiter: Annotated[str, AfterValidator(_delimiter)] = ","
    encoding: Annotated[str, AfterValidator(_encoding)] = "utf-8"


@register("load.csv", spares_attempts=True)
def load_csv(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress | None]:
    """Make the rows of `table` with the file's keys equal to the file's, in one transaction.

    A second run changes nothing. The last of several records with the same key counts. A wrong argument, a bad
    record or a table that does not fit raises PermanentError and leaves the table unchanged. A run after another one
    that ended in the middle of a large file goes on there, unless the file has changed. The result is None, or the
    progress with the number of the quotes that were read literally.
    """
    wanted = validated(Wanted, args)
    descriptor = csv_table.opened(context.data_dir, wanted.path)
    with open(descriptor, encoding=wanted.encoding, errors=_mark_undecodable.__name__, newline="") as stream:
        source = CsvFile(wanted, stream)
        is_large = source.size > csv_table.PART_BYTES
        if not is_large:
            source.total = sum(1 for _ in source.records(source.begin))
        end = yield from csv_table.load(context, wanted, source, in_parts=is_large)
    if not end.literal_quotes:
        return None
    context.logger.warning("%s: %s quotes within fields were read literally", wanted.path, end.literal_quotes)
    return Progress(end.records, end.records, literal_quotes=end.literal_quotes)


def _separated(field: str, mark: str) -> re.Pattern[str]:
    return re.compile(f"{field}(?:{mark}{field})*+[\r\n]*+")


class CsvFile(FileSource):
    """The file as records, which people know by the number of their first line; a line end outside quotes ends one.

    A quote at the start of a field encloses it. Any other quote is literal, as for Python's csv module. For COPY each
    quote would be special, and lines with one quote each would become one row. So COPY gets a field with a literal
    quote enclosed in quotes.
    """

    names_columns = "header"
    hint = "; is the delimiter right?"

    def __init__(self, wanted: Wanted, stream: io.TextIOWrapper) -> None:
        """Read the header; raises PermanentError for a wrong one."""
        super().__init__(wanted.path, stream.fileno())
        self.delimiter, self.total = wanted.delimiter, 0
        self._encoding, self._stream = wanted.encoding, stream
        self._line = self._literal_quotes = 0  # of the records that were read
        mark = re.escape(wanted.delimiter)
        plain, enclosed = f'[^"{mark}\r\n]*+', '"[^"]*+(?:""[^"]*+)*+"'
        # A record without literal quotes, and text that does not end within a quoted field.
        self._is_plain = _separated(f"(?:{enclosed}|{plain})", mark).fullmatch
        self._is_whole = _separated(f'(?:{enclosed}[^{mark}]*+|(?!")[^{mark}]*+)', mark).fullmatch
        # A field that begins with a quote, and one that has a quote within.
        self._field = re.compile(f'(?:\\A|(?<={mark}))(?:({enclosed})([^{mark}]*+)|[^"{mark}]++"[^{mark}]*+)')
        self.columns = dict.fromkeys(self._header(), "text")

    @property
    def bytes_read(self) -> int:
        """Where reading has come in the file, some thousand bytes ahead of the records."""
        return os.lseek(self._stream.fileno(), 0, os.SEEK_CUR)

    @property
    def expected(self) -> int:
        """How many records there are; without a count, if the others are as long as those that were read."""
        return self.total or max(self._count, self._count * self.size // max(1, self.bytes_read))

    def records(self, begin: Place) -> Iterator[tuple[int, str]]:
        """See Source; raises PermanentError at invalid text and at a broken record."""
        mark, self._line, self._count, self._literal_quotes = begin
        self._stream.seek(mark)
        return self._records()

    def place(self) -> Place:
        """Where the next record begins, blank lines included; its mark is that of the text stream (its `tell`)."""
        return Place(self._stream.tell(), self._line, self._count, self._literal_quotes)

    def located(self, begin: Place, reported: int) -> tuple[int, int]:
        """See Source. PostgreSQL counts LF in quotes, but not CR."""
        at, line = 1, 0
        for line, text in self.records(begin):
            at += 1 + text.count("\n")
            if at >= reported:
                return line, len(re.findall("\r\n?|\n", text))
        return line, 0

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        """See Source."""
        to = f" to {line + extra_lines}" if extra_lines else ""
        return PermanentError(f"{self.origin}, line {line}{to}: {reason}")

    def _header(self) -> list[str]:
        self._stream.seek(0)
        try:
            if self._stream.read(1) != "\ufeff":
                self._stream.seek(0)
        except UnicodeError:  # UTF-16 and UTF-32 without their byte order mark
            raise self.error(1, f"should begin with the byte order mark of {self._encoding}") from None
        line, text = next(self._records(), (1, ""))
        self._count = 0
        self.begin = self.place()
        try:
            names = next(csv.reader([text], delimiter=self.delimiter, strict=True), [])
            if not names or not all(names):
                raise ValueError("should be a header that names every column")
            return unique([identifier(name) for name in names])
        except (csv.Error, ValueError) as e:
            raise self.error(line, f"header: {e}") from None

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
            raise self.error(line, f"a byte that is not {self._encoding} text") from None
