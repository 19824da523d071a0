"""`load.csv`: a CSV file into a table, by key, all of it or nothing.

PostgreSQL's own rules for CSV and for its types apply to the records, except that a quote within a field is literal.
Reading takes bounded memory: one record, or one chunk. Records that COPY reads as we do pass in blocks, by one match of
a pattern.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

from pydantic import AfterValidator, Field

from dataloader.pipelines import Arguments, Context, PermanentError, Progress, csv_table, register, validated
from dataloader.pipelines.csv_table import (
    LONGEST_RECORD,
    Batch,
    Block,
    FileArguments,
    FileSource,
    Item,
    Place,
    Rejected,
    Target,
    identifier,
    unique,
)

if TYPE_CHECKING:
    from dataloader.pipelines.arrow_block import Copied

_OF_COPY = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}  # behind its backslash
_IS_OPEN = re.compile(r"(?<!\\)(?:\\\\)*\\\r?\n\Z").search  # the line end behind a backslash is within a text
_LINE_ENDS = re.compile("\r\n?|\n")
_LINE_END = re.compile("(?:\r\n?|\n)\\Z").sub
_CHUNK = 2**16  # characters that are read at once, and one line
_COPIED_CHUNK = 2**21  # bytes of a binary COPY, of which each is a statement
WHITESPACE = "whitespace"  # the delimiter of columns that are set apart by blanks
_DELIMITERS = "\t|;,"  # those that are recognized; the earlier ones are rarer in texts
_QUOTED = re.compile(r'(?m)(?:^|(?<=[\t|;,]))"(?:[^"]|"")*+"')
_NO_QUOTE = "\udbff"  # no encoding yields this character
_SEP_LINE = re.compile('"?sep=(.)"?\\s*', re.IGNORECASE)  # for Excel
_RECOGNIZED_BY = 20  # lines
_RECOGNIZED_CHARACTERS = 2**14  # of each of them
_CONTROLS = re.compile("[\x80-\x9f]")  # no text has them
_CONTROL = "the control character U+{:04X}{{}}; encoding may be another one, such as cp1252"
_OTHER_UTF8 = "is utf-8 text{{}}; encoding should be utf-8, not {}; where a file mixes both, max_errors rejects rows"
_EMOJI = re.compile(b"\xf0\x9f[\x80-\xbf]{2}")  # in UTF-8: no text of _ONE_BYTE has such neighbours
_ONE_BYTE = ("cp125", "iso8859", "koi8", "mac")  # encodings whose texts are hardly UTF-8 by chance, as those of DOS are
_BEHIND = (
    "text behind the closing quote{}; quotes within quotes should be doubled, or escape should name the mark before"
    " them, and max_errors rejects rows"
)
_ZERO_BYTE = (
    'a zero byte (0x00{}), which PostgreSQL cannot hold: is the encoding "utf-16-le"? max_errors rejects such rows'
)
# The encodings that a message may guess, the more frequent ones first.
_GUESSES = (
    *("cp1252", "cp1251", "cp1250", "koi8-r", "cp866", "cp850", "cp1253"),
    *("shift_jis", "gb18030", "big5", "euc-kr"),
)


def _mark_undecodable(error: UnicodeError) -> tuple[str, int]:
    """Each invalid byte becomes a lone surrogate that holds it, as by "surrogateescape", but for any encoding."""
    if isinstance(error, UnicodeDecodeError):
        return "".join(chr(0xDC00 | byte) for byte in error.object[error.start : error.end]), error.end
    raise error


codecs.register_error(_mark_undecodable.__name__, _mark_undecodable)


def _encoding(name: str) -> str:
    try:
        # Try both directions: some codecs are not for text, and some take no error handler.
        codecs.getincrementaldecoder(name)(_mark_undecodable.__name__).decode("ab".encode(name))
    except (LookupError, ValueError):
        raise ValueError("should be the name of a text encoding such as utf-8, cp1251 or utf-16") from None
    return name


def _mark(character: str) -> str:
    if len(character) != 1 or not character.isascii() or character.isalnum() or character in '"\r\n\0':
        raise ValueError("should be one ASCII punctuation mark, tab or space, and not the quote")
    return character


def _delimiter(text: str) -> str:
    if text != WHITESPACE and (len(text) != 1 or text.isalnum() or text in '"\r\n\0'):
        raise ValueError(f'should be one punctuation mark, tab ("\\t" in JSON) or space, or "{WHITESPACE}"')
    return text


class Layout(Arguments):
    """The arguments that say how the records of a text file are written; docs/loaders.md explains each."""

    delimiter: Annotated[str, AfterValidator(_delimiter)] | None = None
    encoding: Annotated[str, AfterValidator(_encoding)] | None = None
    header: bool | Annotated[list[str], Field(min_length=1)] = True
    skip_rows: int = Field(default=0, ge=0)
    skip_footer: int = Field(default=0, ge=0)
    quote: Annotated[str, Field(max_length=1, pattern=r"^[^\w\r\n]?$")] = '"'
    escape: Annotated[str, AfterValidator(_mark)] | None = None
    comment: Annotated[str, Field(min_length=1)] | None = None
    widths: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None


class Wanted(Target, FileArguments):
    """The `args` of `load.csv`; docs/loaders.md explains each."""

    delimiter: Annotated[str, AfterValidator(_mark)] = ","
    encoding: Annotated[str, AfterValidator(_encoding)] = "utf-8"


@register("load.csv", spares_attempts=True)
def load_csv(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress]:
    """Make the rows of `table` with the file's keys equal to the file's, in one transaction.

    A second run changes nothing. The last of several records with the same key counts. A wrong argument, a bad
    record or a table that does not fit raises PermanentError and leaves the table unchanged. A run after another one
    that ended in the middle of a large file goes on there, unless the file has changed. The result is
    what `csv_table.load` has counted, with the number of the quotes that were read literally.
    """
    wanted = validated(Wanted, args)
    descriptor = csv_table.opened(context.data_dir, wanted.path)
    layout = Layout(delimiter=wanted.delimiter, encoding=wanted.encoding)
    with opened_text(open(descriptor, "rb"), wanted.encoding) as stream:
        source = CsvFile(wanted.path, descriptor, stream, layout)
        source.require_names()
        counts = yield from csv_table.load(context, wanted, source)
    if literal := counts.get("literal_quotes"):
        context.logger.warning("%s: %s quotes within fields were read literally", wanted.path, literal)
    return counts


def opened_text(stream: BinaryIO, encoding: str) -> io.TextIOWrapper:
    """The stream's text, with its line ends; what is no text of this encoding is marked."""
    return io.TextIOWrapper(stream, encoding=encoding, errors=_mark_undecodable.__name__, newline="")


class _Chunk(NamedTuple):
    mark: Any  # of the text stream, where the chunk begins
    text: str | bytes  # whole lines
    line: int = 0  # before it
    copied: Copied | None = None  # the same, if a record begins here
    end: int | None = None  # where the thread that reads ahead has come in the file


class CsvFile(FileSource):
    """The file as records, which people know by the number of their first line; a line end outside quotes ends one.

    A quote at the start of a field encloses it. Any other quote is literal, as for Python's csv module. For COPY each
    quote would be special, and lines with one quote each would become one row. So COPY gets a field with a literal
    quote enclosed in quotes. A record of another layout is cut into its fields, and written anew for COPY.
    """

    names_columns = "header"
    hint = "; is the delimiter right?"
    is_typed = False

    def __init__(
        self, path: str, descriptor: int, stream: io.TextIOWrapper, layout: Layout, is_checked: bool = False
    ) -> None:
        """Read the header; `is_checked` refuses text that cannot be meant, and yields refused records as Rejected."""
        super().__init__(path, descriptor)
        self._descriptor, self._stream, self._encoding = descriptor, stream, layout.encoding or "utf-8"
        self._layout, self._is_checked = layout, is_checked
        codec = codecs.lookup(self._encoding).name
        self._has_controls = is_checked and not codec.startswith("utf")
        self._is_utf8_file = codec == "utf-8"
        self._may_be_utf8 = is_checked and codec.startswith(_ONE_BYTE)
        self._line = self._literal_quotes = self._repeated_headers = 0  # of the records that were read
        self._header: str | None = None
        self._last: int | None = None  # the number of the last record above the footer
        self._names: list[str] = []
        self._one = self._many = re.compile("(?!)")  # match one record, and many of them, that may pass in a block
        self._skip_to_header()
        mark = "," if layout.widths else layout.delimiter or self._recognized()
        self._is_cut = is_cut = bool(layout.widths or mark == WHITESPACE)
        self._delimiter, self._quote = mark, _NO_QUOTE if is_cut else layout.quote or _NO_QUOTE
        self._is_foreign = bool(is_cut or layout.quote != '"' or layout.escape or not mark.isascii())
        self._is_copy = layout.quote == "" and layout.escape == "\\"  # the text form of COPY, and of MySQL
        self.delimiter = "," if is_cut or not mark.isascii() else mark
        self.dialect = {"delimiter": mark, "encoding": self._encoding}
        self._compile(re.escape(mark[0]), re.escape(self._quote), re.escape(layout.escape or ""))
        self._read_header()

    def _compile(self, mark: str, quote: str, escape: str) -> None:
        plain, enclosed = f"[^{quote}{mark}\r\n]*+", f"{quote}[^{quote}]*+(?:{quote}{quote}[^{quote}]*+)*+{quote}"
        text = f"[^{mark}]*+"
        if escape:
            plain = f"(?:[^{quote}{mark}{escape}\r\n]|{escape}[^\r\n])*+"
            enclosed = f"{quote}(?:[^{quote}{escape}]|{quote}{quote}|{escape}.)*+{quote}"
            text = f"(?:[^{mark}{escape}]|{escape}(?:.|\\Z))*+"
        # A record without literal quotes, and text that does not end within a quoted field.
        fields = f"(?:{enclosed}|{plain})", f"(?:{enclosed}{text}|(?!{quote}){text})"
        records = (re.compile(f"{field}(?:{mark}{field})*+[\r\n]*+", re.DOTALL) for field in fields)
        self._is_plain, self._is_whole = (record.fullmatch for record in records)
        # A field: in quotes, with what is behind these, or bare.
        self._cut = re.compile(f"(?:\\A|{mark})(?:({enclosed})({text})|({text}))", re.DOTALL).finditer
        escaped = f"{escape}(?=[{quote}{mark}{escape}])" if escape else "(?!)"
        escaped = f"{escape}(?!N\\Z)" if self._is_copy else escaped
        self._unescaped = re.compile(f"{escaped}(.)", re.DOTALL).sub
        self._unquoted = re.compile(f"(?:{quote}(?={quote})|{escaped})(.)", re.DOTALL).sub

    @property
    def names(self) -> list[str]:
        return self._names

    @property
    def bytes_read(self) -> int:
        return self.position

    def records(self, begin: Place) -> Iterator[tuple[int, str | Rejected]]:
        """Raises PermanentError at invalid text and at a broken record."""
        if self._layout.skip_footer and self._last is None:
            self._last = max(0, sum(1 for _ in self._from(self.begin)) - self._layout.skip_footer)
        left = None if self._last is None else max(0, self._last - begin.records)
        return islice(self._from(begin), left)

    def _from(self, begin: Place) -> Iterator[tuple[int, str | Rejected]]:
        self._seek(begin)
        return self._records()

    def items(self, begin: Place, size: int) -> Iterator[tuple[int, Item]]:
        if self._is_foreign or self._layout.skip_footer:
            return self.records(begin)
        self._seek(begin, size)
        return self._in_blocks(self._records(), size)

    def _in_blocks(self, records: Iterator[tuple[int, Item]], size: int) -> Iterator[tuple[int, Item]]:
        left = size
        while (item := self._block(left) or next(records, None)) is not None:
            left -= item[1].records if isinstance(item[1], Block) else 1
            left = left if left > 0 else size
            yield item

    def pass_in_blocks(
        self,
        *kinds: Sequence[str],
        fitted: Callable[[int, Block], Block] | None = None,
        copied: Callable[[bytes, int], Copied | None] | None = None,
    ) -> None:
        """Take the kinds of records, a pattern for each column, that `items` gives in blocks; others come one by one.

        `fitted` gets the number of a block's first record, and returns the block as COPY gets it. A thread calls
        `copied` ahead, as `arrow_block.reader` makes it, for records of these kinds alone.
        """
        # Lines that COPY or this reader take for something else than a record.
        other = "|".join(["[\r\n]", r"(?:\\\.|\x1a)[\r\n]", *filter(None, [re.escape(self._layout.comment or "")])])
        record = f"(?!{other})(?:{'|'.join(map(re.escape(self._delimiter).join, kinds))})\r?\n"
        self._fitted, self._copied = fitted or (lambda number, block: block), copied
        self._one, self._many = re.compile(record), re.compile(f"(?:{record})*+")

    def _block(self, most: int) -> tuple[int, Block | Batch] | None:
        """The records from here on that COPY reads as we do, at most so many; None where the next one is none."""
        begin = self._lines.tell()
        if begin == len(self._chunk):
            if batch := self._advance(may_copy=True):
                return batch
            begin = 0
        if not self._is_clean or (end := self._many.match(self._chunk, begin).end()) == begin:  # type: ignore[union-attr]
            return None
        text = self._chunk[begin:end]
        count = "".join(text.split('"')[::2]).count("\n")  # the line ends that are not in quotes
        if count > most:
            last = deque(islice(self._one.finditer(self._chunk, begin), most), 1).pop().end()
            count, text = most, self._chunk[begin:last]
        self._lines.seek(begin + len(text))
        first = self._line + 1
        self._count += count
        self._line += len(_LINE_ENDS.findall(text)) if "\r" in text else text.count("\n")
        return first, self._fitted(first, Block(_ends_by_lf(text), count))

    def _seek(self, begin: Place, most: int = 0) -> None:
        """Go to a place; a thread reads ahead, where chunks of up to so many records may be copied."""
        self.close()
        mark, self._line, self._count, self._literal_quotes, skipped, self._repeated_headers = begin
        self._stream.seek(mark)
        self._stream.read(skipped)
        self._mark, self._chunk, self._lines = self._stream.tell(), "", io.StringIO()
        self._chunks, self._end = self._texts(), None
        if most and self._copied and self._is_utf8_file:
            from dataloader.pipelines.binary_copy import ahead

            self._stream.seek(self._mark)  # and so its buffer
            self._reading = ahead(self._copies(self._stream.buffer, most))
            self._chunks = chain(self._reading, self._chunks)

    def _texts(self) -> Iterator[_Chunk]:
        while True:
            mark = self._stream.tell()
            yield _Chunk(mark, self._stream.read(_CHUNK) + self._stream.readline(LONGEST_RECORD))

    def _copies(self, file: Any, most: int) -> Iterator[_Chunk]:
        """The chunks with their copies; the stream goes on behind them."""
        line, size = self._line, _CHUNK
        header = (self._header or "\0").encode()
        while True:
            mark, copied = file.tell(), None
            text = file.read(size) + file.readline(LONGEST_RECORD)
            is_open = text.count(b'"') & 1
            while is_open and len(text) < size + 2 * _CHUNK and (more := file.readline(LONGEST_RECORD)):
                text += more
                is_open ^= more.count(b'"') & 1
            if not text or (len(text) > LONGEST_RECORD and not text.endswith(b"\n")):
                break
            is_odd = len(text) > 2 * _COPIED_CHUNK or header in text or (b"\xef" in text and codecs.BOM_UTF8 in text)
            if self._copied and not is_odd and (copied := self._copied(text, line)):
                size = min(_COPIED_CHUNK, len(text) * most * 9 // (copied.records * 10))
                copied = copied if copied.records <= most else None
            yield _Chunk(mark, text, line, copied, self._read_to())
            line += copied.lines if copied else len(re.findall(b"\r\n?|\n", text))
        self._stream.seek(mark)

    def _advance(self, may_copy: bool = False) -> tuple[int, Batch] | None:
        """Go to the next chunk; behind the last record it may be copied as a whole, and then these are its rows."""
        self._mark, text, line, copied, self._end = next(self._chunks)
        if may_copy and copied and line == self._line:
            self._mark, self._chunk, self._lines = self._mark + len(text), "", io.StringIO()
            self._count += copied.records
            self._line += copied.lines

            def singles(number: int) -> Iterator[tuple[int, str]]:
                block = Block(_ends_by_lf(str(text, "utf-8")), copied.records)  # type: ignore[arg-type]
                return self._fitted(number, block).singles(number)

            return line + 1, Batch(copied.records, len(text), copied.binary, singles)
        text = self._chunk = text if isinstance(text, str) else text.decode("utf-8", _mark_undecodable.__name__)
        self._lines = io.StringIO(text, newline="")
        self._is_utf8 = self._may_be_utf8 and not text.isascii() and self._reads_as_utf8(text)
        # In a chunk with one of these each record is examined.
        self._is_clean = not (
            "\0" in text
            or "\ufeff" in text
            or (self._header and self._header in text)
            or (self._has_controls and _CONTROLS.search(text))
            or self._is_utf8
            or len(text) >= LONGEST_RECORD
            or not _is_unicode(text)
        )
        return None

    def _reads_as_utf8(self, text: str) -> bool:
        """Whether the text is UTF-8, or has an emoji in UTF-8."""
        try:
            raw = text.encode(self._encoding, "surrogateescape")
            return bool(_EMOJI.search(raw) or raw.decode())
        except UnicodeError:
            return False

    def _readline(self, limit: int = LONGEST_RECORD) -> str:
        if not (line := self._lines.readline(limit)):
            self._advance()
            line = self._lines.readline(limit)
        return line

    def place(self) -> Place:
        """Where the next record begins, blank lines included: so many characters behind a mark of the text stream."""
        odd = self._literal_quotes, self._lines.tell(), self._repeated_headers
        return Place(self._mark, self._line, self._count, *odd)

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        to = f" to {line + extra_lines}" if extra_lines else ""
        return PermanentError(f"{self.origin}, line {line}{to}: {reason}")

    def require_names(self) -> None:
        """Take the names of the header for the columns; raises PermanentError where they cannot be."""
        try:
            if not self.names or not all(self.names):
                raise ValueError("should be a header that names every column")
            self.columns = dict.fromkeys(unique([identifier(name) for name in self.names]), "text")
            self.pass_in_blocks([text_pattern(self._delimiter)] * len(self.names))
        except ValueError as e:
            raise self.error(self.header_line, f"header: {e}") from None

    def _skip_to_header(self) -> None:
        self._stream.seek(0)
        try:
            if self._stream.read(1) != "\ufeff":
                self._stream.seek(0)
        except UnicodeError:  # UTF-16 and UTF-32 without their byte order mark
            raise self.error(1, f"should begin with the byte order mark of {self._encoding}") from None
        self._chunks = self._texts()
        self._advance()
        self._sep = _SEP_LINE.fullmatch(self._lines.readline(_RECOGNIZED_BY))
        self._line = max(self._layout.skip_rows, int(self._sep is not None))
        self._lines.seek(0)
        for _ in range(self._line):
            while (text := self._readline()) and text[-1] not in "\r\n":
                pass
        self.begin = self.place()

    def _recognized(self) -> str:
        """The delimiter: the one that the header has, and that most lines have as often.

        Below a title without any it is one that most lines have as often, so that the load refuses these lines.
        """
        if self._sep:
            return self._sep[1]
        text = "".join(self._readline(_RECOGNIZED_CHARACTERS) for _ in range(_RECOGNIZED_BY))
        lines = _LINE_ENDS.split(_QUOTED.sub("", text))  # a quoted name may have several lines
        is_comment = self._layout.comment or _NO_QUOTE
        lines = [line for line in lines if line.strip() and not line.startswith(is_comment)]

        def likelihood(mark: str) -> tuple[bool, bool, float, int]:
            counts = [line.count(mark) for line in lines] or [0]
            [(usual, times)] = Counter(counts).most_common(1)
            is_below_title = counts[0] == 0 < usual and 2 * times > len(counts)
            return counts[0] > 0, is_below_title, counts.count(counts[0]) / len(counts), counts[0]

        return max(_DELIMITERS, key=likelihood)

    def _read_header(self) -> None:
        self.header_line, text = next(self._from(self.begin), (1, ""))
        if isinstance(text, Rejected):
            raise self.error(self.header_line, "header: " * (self._layout.header is True) + text.reason)
        if isinstance(self._layout.header, list):
            self._names = self._layout.header
            return
        try:
            first = next(csv.reader([text], delimiter=self.delimiter, strict=True), [])
        except csv.Error as e:
            raise self.error(self.header_line, f"header: {e}") from None
        if self._layout.header is True:
            self._names, self._count = first, 0
            self._header = text if len(first) > 1 else None
            self.begin = self.place()
        else:
            self._names = [f"column_{number}" for number in range(1, len(first) + 1)]

    def _records(self) -> Iterator[tuple[int, str | Rejected]]:
        # This loop runs once per line of the file, so the cheap tests come first and calls are few.
        quote, comment, is_checked, is_copy = self._quote, self._layout.comment, self._is_checked, self._is_copy
        for text in iter(self._readline, ""):
            self._line = first = self._line + 1
            if comment and text.startswith(comment):
                continue
            fault = ""
            if is_copy:
                text = self._continued(text)
            if is_checked and text[0] == "\ufeff":
                text = text.lstrip("\ufeff")  # of a file that a program has put behind another one
            if quote in text and not self._is_plain(text):
                text, lines, fault = self._irregular(text, first)
                self._line += lines
            if len(text) >= LONGEST_RECORD:
                raise self.error(first, f"longer than {LONGEST_RECORD} characters; is it text, and quote right?")
            # An escaped line end before the record's own belongs to a value.
            text = _LINE_END("", text) if is_copy else text.rstrip("\r\n")
            if not text:
                continue
            record: str | Rejected = Rejected(fault, text) if fault else text
            if not text.isascii() or (is_checked and "\0" in text):
                record = self._readable(text, first)
                text = record if isinstance(record, str) else text
            # Programs that put files together repeat the header; those of DOS end a file with Ctrl-Z.
            if is_checked and (text == self._header or text == "\x1a"):
                self._repeated_headers += text == self._header
                continue
            if self._is_foreign and record is text and not (record := self._rewritten(text)):
                continue
            self._count += 1
            yield first, record

    def _continued(self, text: str) -> str:
        """The record in the text form of COPY that begins with this line; a line end behind a backslash is its own."""
        lines, length = [text], len(text)
        while _IS_OPEN(lines[-1]) and length < LONGEST_RECORD and (more := self._readline()):
            lines.append(more)
            length += len(more)
        self._line += len(lines) - 1
        return "".join(lines)

    def _readable(self, text: str, first: int) -> str | Rejected:
        """The text, or the reason why it cannot be meant."""
        fault, at = "", -1
        try:
            text.encode()
        except UnicodeEncodeError as e:
            fault, at = f"a byte that is not {self._encoding} text (0x{ord(text[e.start]) & 0xFF:02X}{{}})", e.start
            if guess := self._guessed(text):
                fault += f"; it reads as {guess}, so encoding may be {guess.split()[0]}"
            else:
                fault += "; encoding should name another one, or the file is cut or no text"
        else:
            if self._is_checked and "\0" in text:
                fault, at = _ZERO_BYTE, text.find("\0")
            elif self._is_utf8 and self._reads_as_utf8(text):
                at = next(n for n, character in enumerate(text) if not character.isascii())
                fault = _OTHER_UTF8.format(self._encoding)
            elif self._has_controls and (control := _CONTROLS.search(text)):
                fault, at = _CONTROL.format(ord(control[0])), control.start()
        if not fault:
            return text
        reason = fault.format(self._within(text, at))
        if self._is_checked:
            return Rejected(reason, re.sub("[\0\ud800-\udfff]", "\ufffd", text))
        raise self.error(first + len(_LINE_ENDS.findall(text[:at])), reason)

    def _guessed(self, text: str) -> str | None:
        """The encoding as which this record and the lines behind it read well."""
        at = self._lines.tell()
        texts = [text, *(self._lines.readline(_RECOGNIZED_CHARACTERS) for _ in range(_RECOGNIZED_BY))]
        self._lines.seek(at)
        try:
            return guessed_encoding("\n".join(texts).encode(self._encoding, "surrogateescape"))
        except UnicodeError:
            return None

    def _within(self, text: str, at: int) -> str:
        """The column of the character, for a message; without a delimiter the line alone has to do."""
        number = sum(field.end() <= at for field in self._cut(text))
        return f", column {self.names[number]}" if not self._is_cut and number < len(self.names) else ""

    def _rewritten(self, text: str) -> str | Rejected:
        """The record as CSV with COPY's quotes, or nothing where it is blank."""
        if widths := self._layout.widths:
            ends = list(accumulate(widths))
            if "\t" in text:
                return Rejected("a tab, which hides where the columns of widths are; expand it into blanks", text)
            if text[ends[-1] :].strip():
                return Rejected(f"longer than the {ends[-1]} characters of widths", text)
            values = [text[end - width : end].strip() for end, width in zip(ends, widths, strict=True)]
            return self.delimiter.join(field(value, self.delimiter) for value in values) if any(values) else ""
        if self._delimiter == WHITESPACE:
            words = re.findall(r'"([^"]*)"(?!\S)|(\S+)', text)
            return ",".join(field(bare or quoted, ",", not bare) for quoted, bare in words)
        return "" if self._is_copy and text == "\\." else self._as_csv(text)

    def _as_csv(self, text: str) -> str:
        fields = []
        for enclosed, behind, bare in (cell.groups("") for cell in self._cut(text)):
            if self._is_copy:
                value = self._unescaped(lambda match: _OF_COPY.get(match[1], match[1]), bare)
                fields.append(field(value, self.delimiter, value != bare))  # in quotes \\N is no null
                continue
            value = self._unquoted(r"\1", enclosed[1:-1]) + self._unescaped(r"\1", behind or bare)
            fields.append(field(value, self.delimiter, bool(enclosed)))
        return self.delimiter.join(fields)

    def _irregular(self, text: str, first: int) -> tuple[str, int, str]:
        """The record that begins with this line, for COPY, the number of its further lines, and why it cannot be meant.

        The record has several lines, or a literal quote.
        """
        record, rest = io.StringIO(), text
        length, lines = record.write(text), 0
        while not self._is_whole(rest):
            more = self._readline() if length < LONGEST_RECORD else ""
            if not more:
                text = record.getvalue()
                begins = (cell.start(3) for cell in self._cut(text) if (cell[3] or "").startswith(self._quote))
                at = next(begins, len(text))
                cut = "the file may be cut: fetch it again, whole; or the argument quote should name another one"
                raise self.error(first, f"unterminated quote{self._within(text, at)}; {cut}")
            rest = f"{self._quote}{more}"  # the line begins within quotes
            length += record.write(more)
            lines += 1
        text, fault = record.getvalue().rstrip("\r\n"), ""
        if self._is_plain(text):
            return text, lines, fault
        for cell in self._cut(text):
            enclosed, behind, bare = cell.groups("")
            if behind and re.search("[\r\n]", enclosed):
                raise self.error(first, "a field of several lines has text behind the closing quote", lines)
            if self._is_checked and not fault and behind.strip():
                fault = _BEHIND.format(self._within(text, cell.start(1)))
            self._literal_quotes += (behind or bare).count(self._quote)
        return text if self._is_foreign else self._as_csv(text), lines, fault


def text_pattern(delimiter: str) -> str:
    """PURE: a pattern of any field without a literal quote."""
    return f'(?>[^"{re.escape(delimiter)}\r\n]++|"[^"]*+(?:""[^"]*+)*+"|)'


def _ends_by_lf(records: str) -> str:
    """PURE: the records with the line end that COPY expects; those within quotes stay."""
    if "\r" not in records:
        return records
    parts = records.split('"')
    parts[::2] = [part.replace("\r\n", "\n") for part in parts[::2]]
    return '"'.join(parts)


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def field(value: str | None, delimiter: str, is_quoted: bool = False) -> str:
    """PURE: the value as a field of CSV for COPY; an empty text that is not quoted means nothing, as None does."""
    if value and (is_quoted or any(mark in value for mark in (delimiter, '"', "\n", "\r"))):
        return '"' + value.replace('"', '""') + '"'
    return value or ('""' if is_quoted and value is not None else "")


def guessed_encoding(raw: bytes) -> str | None:
    """PURE: the encodings as which these bytes read best, or None: a guess for a message, by what words have."""
    scores: dict[str, float] = {}
    for name in _GUESSES:
        with suppress(UnicodeError):
            scores[name] = _readability(raw.decode(name))
    best = max(scores.values(), default=0)
    return " or ".join(name for name, score in scores.items() if score == best) if best > 0 else None


def _readability(text: str) -> float:
    """PURE: how many of the characters beyond ASCII are those of words; mixed scripts and symbols count against."""
    score = 0.0
    for word in re.findall(r"\w+", text):
        foreign = [letter for letter in word if not letter.isascii()]
        is_latin = all(letter < "\u0250" for letter in foreign)
        # Most letters of a Latin word have no accent; a word of another script has no Latin letter.
        is_odd = len(foreign) > max(3, len(word) * 0.6) if is_latin else len(foreign) < len(word)
        # A letter of two bytes counts as two; kana and words of hangul, which few encodings have, a little more.
        score += sum(1 if letter.islower() else 0.6 if letter < "\u2e80" else 1.2 for letter in foreign)
        is_hangul = all("\uac00" <= letter <= "\ud7a3" for letter in word)
        score += 0.1 * (len(word) if is_hangul else len(re.findall("[\u3040-\u30ff]", word)))
        score -= 1.2 * len(re.findall("[\uff61-\uff9f]", word))
        score -= 2 * len(foreign) * is_odd + 3 * sum(not letter.isalpha() for letter in foreign)
        score -= 2 * sum(a.islower() and b.isupper() and not (a + b).isascii() for a, b in pairwise(word))
    symbols = re.findall(r"[^\w\s“”‘’„–—…«»€°№§\x00-\x7f]", text)
    return score - 2 * len(symbols)
