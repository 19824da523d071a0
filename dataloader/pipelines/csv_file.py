"""Files of text as CSV records, for `load.files` and `load.csv`.

PostgreSQL's own rules for CSV apply to the records, except that a quote within a field is literal. A file of another
encoding is read as UTF-8. Reading takes bounded memory: one record, or one chunk. Chunks that Arrow reads as PostgreSQL
does pass as a binary COPY, and other records that COPY reads as we do pass in blocks, by one match of a pattern.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

from pydantic import AfterValidator, Field

from dataloader.pipelines import Arguments, PermanentError
from dataloader.pipelines.csv_table import LONGEST_RECORD, Batch, Block, FileSource, Item, Place, Rejected

if TYPE_CHECKING:
    from dataloader.pipelines.arrow_block import Copied
    from dataloader.pipelines.files import Shape

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


class _Utf8:
    """A text as its bytes in UTF-8. To go back is to read from the begin."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text, self._at, self._next = text, 0, b""

    def read(self, size: int) -> bytes:
        """The next bytes, about so many; none at the end."""
        data = self._next or self._text.read(size).encode("utf-8", "surrogatepass")
        self._at, self._next = self._at + len(data), b""
        return data

    def seek(self, offset: int) -> None:
        """Go to this byte."""
        if offset < self._at:
            self._text.seek(0)
            self._at, self._next = 0, b""
        while self._at < offset and (data := self.read(_CHUNK)):
            behind = max(0, self._at - offset)
            self._at, self._next = self._at - behind, data[len(data) - behind :]


def as_utf8(stream: BinaryIO, encoding: str) -> Any:
    """The stream's text in UTF-8, to be read and sought; what is no text of its encoding becomes what is none there."""
    if _is_utf8(encoding):
        return stream
    return _Utf8(io.TextIOWrapper(stream, encoding=encoding, errors=_mark_undecodable.__name__, newline=""))


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


class _Chunk(NamedTuple):
    mark: int  # where its bytes begin
    text: bytes  # whole lines
    line: int  # before it
    copied: Copied | None  # the same, if a record begins here
    end: int  # where reading has come in the file


class CsvFile(FileSource):
    """The file as records, which people know by the number of their first line; a line end outside quotes ends one.

    A quote at the start of a field encloses it. Any other quote is literal, as for Python's csv module. For COPY each
    quote would be special, and lines with one quote each would become one row. So COPY gets a field with a literal
    quote enclosed in quotes. A record of another layout is cut into its fields, and written anew for COPY.
    """

    is_typed = False

    def __init__(self, path: str, descriptor: int, file: Any, layout: Layout) -> None:
        """Read the header; `file` has the text `as_utf8`."""
        super().__init__(path, descriptor)
        self._file, self._layout, self._encoding = file, layout, layout.encoding or "utf-8"
        codec = codecs.lookup(self._encoding).name
        self._errors = "surrogateescape" if _is_utf8(codec) else "surrogatepass"  # how invalid text is kept
        self._has_controls, self._may_be_utf8 = not codec.startswith("utf"), codec.startswith(_ONE_BYTE)
        self._line = self._literal_quotes = self._repeated_headers = 0  # of the records that were read
        self._header: str | None = None
        self._last: int | None = None  # the number of the last record above the footer
        self._names: list[str] = []
        self._one = self._many = re.compile("(?!)")  # match one record, and many of them, that may pass in a block
        self._copied: Callable[[bytes, int], Copied | None] | None = None
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

    def take(self, shape: Shape) -> bool:
        """`items` gives records of these patterns in blocks, and chunks of such records alone as Arrow's rows."""
        comment, self._fitted, self._copied = self._layout.comment, shape.fitted, None
        # Lines that COPY or this reader take for something else than a record.
        other = "|".join(["[\r\n]", r"(?:\\\.|\x1a)[\r\n]", *filter(None, [re.escape(comment or "")])])
        record = f"(?!{other})(?:{'|'.join(map(re.escape(self._delimiter).join, shape.passing))})\r?\n"
        self._one, self._many = re.compile(record), re.compile(f"(?:{record})*+")
        with suppress(ImportError):
            from dataloader.pipelines import arrow_block

            if shape.is_usual and not self._has_controls:
                others = [comment] if comment else []
                given = shape.words, shape.stored, shape.added, shape.lines, others
                self._copied = arrow_block.reader(self._delimiter, *given)
        return bool(shape.passing)

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
        self._mark, self._line, self._count, self._literal_quotes, self._repeated_headers = begin
        self._file.seek(self._mark)
        self._show("")
        self._chunks = self._chunked(self._mark, self._line, most)
        if most and self._copied:
            from dataloader.pipelines.binary_copy import ahead

            self._chunks = self._reading = ahead(self._chunks)

    def _chunked(self, mark: int, line: int, most: int) -> Iterator[_Chunk]:
        """The file from there on, with copies of up to `most` records; behind its end come empty chunks."""
        data, size, marks = b"", _CHUNK, ((self._header or "\0").encode(), codecs.BOM_UTF8)
        while True:
            while more := self._file.read(max(size, len(data), 1)):
                data += more
                end = data.rfind(b"\n") + 1 or data.rfind(b"\r", 0, -1) + 1
                if end or len(data.decode(errors=self._errors)) > LONGEST_RECORD:
                    break
            end = end if more and end else len(data)
            if not (most and self._copied):
                yield _Chunk(mark, data[:end], line, None, self._read_to())
            else:
                end = _end_of_records(data, end) or end
                text, copied = data[:end], None
                if text and end <= 2 * _COPIED_CHUNK and not any(odd in text for odd in marks):
                    copied = self._copied(text, line)
                if copied:
                    size = min(_COPIED_CHUNK, end * most * 9 // (copied.records * 10))
                is_fit = copied and copied.records <= most
                yield _Chunk(mark, text, line, copied if is_fit else None, self._read_to())
                line += copied.lines if copied else len(re.findall(b"\r\n?|\n", text))
            mark, data = mark + end, data[end:]

    def _show(self, text: str) -> None:
        """Make this text the chunk that is read."""
        self._chunk, self._lines = text, io.StringIO(text, newline="")

    def _advance(self, may_copy: bool = False) -> tuple[int, Batch] | None:
        """Go to the next chunk; behind the last record it may be copied as a whole, and then these are its rows."""
        self._mark, data, line, copied, self._end = next(self._chunks)
        if may_copy and copied and line == self._line:
            self._mark += len(data)
            self._show("")
            self._count += copied.records
            self._line += copied.lines

            def singles(number: int) -> Iterator[tuple[int, str]]:
                block = Block(_ends_by_lf(data.decode()), copied.records)
                return self._fitted(number, block).singles(number)

            return line + 1, Batch(copied.records, len(data), copied.binary, singles)
        try:
            text, is_valid = data.decode(), True
        except UnicodeDecodeError:
            text, is_valid = data.decode(errors=self._errors), False
        self._show(text)
        self._is_utf8 = self._may_be_utf8 and not text.isascii() and self._reads_as_utf8(text)
        # In a chunk with one of these each record is examined.
        has_controls = self._has_controls and _CONTROLS.search(text)
        odd = "\0" in text or "\ufeff" in text or bool(self._header and self._header in text) or bool(has_controls)
        self._is_clean = is_valid and not odd and not self._is_utf8 and len(text) < LONGEST_RECORD
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
        """Where the next record begins, blank lines included."""
        read = self._chunk[: self._lines.tell()].encode("utf-8", self._errors)
        return Place(self._mark + len(read), self._line, self._count, self._literal_quotes, self._repeated_headers)

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        to = f" to {line + extra_lines}" if extra_lines else ""
        return PermanentError(f"{self.origin}, line {line}{to}: {reason}")

    def _skip_to_header(self) -> None:
        try:
            self._seek(Place(3 * self._file.read(3).startswith(codecs.BOM_UTF8)))
            self._advance()
        except UnicodeError:  # UTF-16 and UTF-32 without their byte order mark
            raise self.error(1, f"should begin with the byte order mark of {self._encoding}") from None
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
        quote, comment, is_copy = self._quote, self._layout.comment, self._is_copy
        for text in iter(self._readline, ""):
            self._line = first = self._line + 1
            if comment and text.startswith(comment):
                continue
            fault = ""
            if is_copy:
                text = self._continued(text)
            if text[0] == "\ufeff":
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
            if not text.isascii() or "\0" in text:
                record = self._readable(text)
                text = record if isinstance(record, str) else text
            # Programs that put files together repeat the header; those of DOS end a file with Ctrl-Z.
            if text == self._header or text == "\x1a":
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

    def _readable(self, text: str) -> str | Rejected:
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
            if "\0" in text:
                fault, at = _ZERO_BYTE, text.find("\0")
            elif self._is_utf8 and self._reads_as_utf8(text):
                at = next(n for n, character in enumerate(text) if not character.isascii())
                fault = _OTHER_UTF8.format(self._encoding)
            elif self._has_controls and (control := _CONTROLS.search(text)):
                fault, at = _CONTROL.format(ord(control[0])), control.start()
        if not fault:
            return text
        return Rejected(fault.format(self._within(text, at)), re.sub("[\0\ud800-\udfff]", "\ufffd", text))

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
            if not fault and behind.strip():
                fault = _BEHIND.format(self._within(text, cell.start(1)))
            self._literal_quotes += (behind or bare).count(self._quote)
        return text if self._is_foreign else self._as_csv(text), lines, fault


def text_pattern(delimiter: str) -> str:
    """PURE: a pattern of any field without a literal quote."""
    return f'(?>[^"{re.escape(delimiter)}\r\n]++|"[^"]*+(?:""[^"]*+)*+"|)'


def _end_of_records(data: bytes, end: int) -> int:
    """PURE: where the last record ends before `end`, which is the end of a line: not within quotes; else 0."""
    is_open = data.count(b'"', 0, end) & 1
    while is_open and end:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        is_open ^= data.count(b'"', begin, end) & 1
        end = begin
    return end


def _ends_by_lf(records: str) -> str:
    """PURE: the records with the line end that COPY expects; those within quotes stay."""
    if "\r" not in records:
        return records
    parts = records.split('"')
    parts[::2] = [part.replace("\r\n", "\n") for part in parts[::2]]
    return '"'.join(parts)


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
