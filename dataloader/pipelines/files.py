"""`load.files`: files as people have them, into a table: one file, a folder or a pattern, packed or not, in any format.

A format is a function that opens an entry as a Source of CSV records. `Shaped` gives the records of all entries the
names, the order and the types of the table's columns. A record that fits already passes unparsed; only the others are
cut into their fields.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import unicodedata
import zipfile
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from fnmatch import fnmatch
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, cast
from urllib.parse import unquote

from psycopg import sql
from pydantic import AfterValidator, Field

from dataloader import config
from dataloader.pipelines import (
    Context,
    FilePath,
    PermanentError,
    Progress,
    columns,
    csv_file,
    csv_table,
    parquet,
    register,
    register_with,
    remote,
    validated,
)
from dataloader.pipelines.columns import Reader, Type, Values, inferred, kind_of
from dataloader.pipelines.csv_file import CsvFile, Layout, as_utf8, text_pattern
from dataloader.pipelines.csv_table import (
    UNSEEN,
    Block,
    Item,
    Place,
    Rejected,
    Source,
    Target,
    identifier,
    unique,
    visible,
)
from dataloader.pipelines.rows import common_type
from dataloader.queue.job import End

_HEAD = 2**16  # bytes by which a file is recognized
_SAMPLE_ROWS = 10_000  # of all files together, by which types are inferred
_SAMPLE_OF_A_FILE = 200  # rows at least
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # stands for a null
_MAX_FILES = 10_000
_COUNTED = ("records", "literal_quotes", "repeated_headers")  # of all files together, in a place
_BYTE_ORDER_MARKS = {  # the longer ones first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_MOST_COLUMNS = 1_600  # of a table of PostgreSQL
_SYSTEM_COLUMNS = ("ctid", "xmin", "xmax", "cmin", "cmax", "tableoid")
# The remedies of errors of PostgreSQL.
_REMEDIES = {
    "invalid input syntax|out of range|overflow|too long|malformed": "types or the table should have a type for it, or"
    " null the word, and max_errors rejects rows",
    "row is too big": "select can choose some columns",
    "duplicate key|conflicting key": "the table or the file has such a row already, which mode merge would update",
    "no partition": "the table should have one",
    "": "max_errors rejects such rows",
}
_TOO_MANY = "a delimiter in a text needs quotes around it, without a blank before, skip_rows leaves out titles above"
# The kinds of files that a text may turn out to be, by their first bytes.
_NO_TEXT = {
    b"PK\x03\x04": 'a zip archive or a workbook; format should be "excel", or its name should end with .zip, or'
    " unpack it or save it as .csv",
    b"PAR1": 'a Parquet file; format should be "parquet"',
    b"ARROW1": "an Arrow file, which no loader reads; save it as Parquet",
    b"Obj\x01": "an Avro file, which no loader reads; save it as Parquet",
    b"SQLite format 3\0": "an SQLite database; load.database reads it",
    b"\x1f\x8b": "packed twice by gzip; unpack it first",
    b"7z\xbc\xaf": "packed by 7-Zip; unpack it first, or pack it by zip",
    b"Rar!": "packed by RAR; unpack it first, or pack it by zip",
    b"BZh": "packed by bzip2; unpack it first, or pack it by gzip",
    b"\xfd7zXZ": "packed by xz; unpack it first, or pack it by gzip",
    b"\x28\xb5\x2f\xfd": "packed by zstd; unpack it first, or pack it by gzip",
    b"\x04\x22\x4d\x18": "packed by lz4; unpack it first, or pack it by gzip",
    b"\x1f\x9d": "packed by compress; unpack it first, or pack it by gzip",
    b"%PDF": "a PDF document, which no loader reads",
    b"\xd0\xcf\x11\xe0": "a workbook of an old Excel; save it as .xlsx or .csv",
}


class Files(Target, Layout, Values):
    """The `args` of `load.files`; docs/files.md explains each."""

    path: FilePath

    source: Annotated[str, Field(pattern=config.SOURCE_NAME)] | None = None
    format: str | None = None
    member: Annotated[str, Field(min_length=1)] | None = None
    sheet: str | int | None = None
    records: Annotated[str, Field(min_length=1)] | None = None
    infer: bool = True
    types: dict[str, Type] = Field(default_factory=dict)
    columns: dict[str, Annotated[str, AfterValidator(identifier)]] = Field(default_factory=dict)
    names: Literal["snake"] | None = None
    select: Annotated[list[str], Field(min_length=1), AfterValidator(unique)] | None = None
    add: dict[Annotated[str, AfterValidator(identifier)], Literal["now", "file", "line"]] = Field(default_factory=dict)


class Plan(NamedTuple):
    """The columns, the DDL and the first rows of a load, by a sample of its files."""

    columns: dict[str, str]  # with the types of the table, or of a new one
    ddl: str  # that makes a new table; empty where there is one
    rows: list[list[str | None]]  # five of them
    dialect: dict[str, Any]  # what was recognized: the files, the delimiter, the encoding


@register("load.files", spares_attempts=True)
def load_files(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress]:
    """Load the files of `path` into `table`, all of them or nothing.

    The promises are those of `load.csv`. A file or an argument that does not fit raises PermanentError, which names
    the place and a remedy, and leaves the table unchanged.
    """
    wanted = validated(Files, args)
    if (counts := csv_table.appended(context, wanted)) is not None:  # before a download keeps a checkpoint of its own
        return counts
    try:
        wanted, here = yield from _fetched(wanted, context)
        with closing(Shaped(wanted, here)) as source:
            counts = yield from csv_table.load(here, wanted, source)
        if literal := counts.get("literal_quotes"):
            context.logger.warning("%s: %s quotes within fields were read literally", wanted.path, literal)
    except BaseException as e:
        if isinstance(e, PermanentError) or context.stop_reason == End.CANCELED:  # no later run needs the copies
            remote.drop(context)
        raise
    remote.drop(context)
    return counts


@register("load.csv", spares_attempts=True)
def load_csv(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress]:
    """Load as `load.files` does, with commas; a new table has columns of text, and PostgreSQL reads the values."""
    return (yield from load_files({"format": "text", "delimiter": ",", "infer": False} | args, context))


@register_with("pyarrow", "parquet", "load.parquet", spares_attempts=True)
def load_parquet(args: dict[str, Any], context: Context) -> Generator[Progress | None, None, Progress]:
    """Load as `load.files` does, and take files of any name for Parquet."""
    return (yield from load_files(args | {"format": "parquet"}, context))


def _fetched(wanted: Files, context: Context) -> Generator[Progress | None, None, tuple[Files, Context]]:
    """The arguments and the context of the load of copies, where the files are on other machines."""
    if not remote.is_remote(wanted.path, wanted.source):
        return wanted, context
    here = replace(context, data_dir=remote.folder_of(context))
    path = yield from remote.fetched(wanted.path, wanted.source, here)
    return wanted.model_copy(update={"path": path}), here


def plan(wanted: Files, context: Context) -> Plan:
    """What `load.files` would do, by a sample alone; it changes nothing. Raises PermanentError as the load would."""
    steps = _fetched(wanted, context)
    try:
        while True:
            next(steps)
    except StopIteration as e:
        return _planned(*e.value)
    finally:
        remote.drop(context)


def _planned(wanted: Files, context: Context) -> Plan:
    with closing(Shaped(wanted, context)) as source:
        cut = _cutter(source.delimiter)
        rows: list[list[str | None]] = []
        for seen, (number, text) in enumerate(source.records(source.begin)):
            if isinstance(text, str):
                rows.append([value_of(cell) if cell else None for cell in cut(text)])
            elif seen - len(rows) == wanted.max_errors:
                raise source.error(number, text.reason)
            if len(rows) == 5:
                break
        parts = [sql.SQL("{} ").format(sql.Identifier(name)) + sql.SQL(kind) for name, kind in source.columns.items()]
        if wanted.key:
            parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, wanted.key))))
        table = sql.Identifier(*wanted.table.split("."))
        ddl = sql.SQL("CREATE TABLE {} ({})").format(table, sql.SQL(", ").join(parts))
        return Plan(dict(source.columns), "" if source.existing else ddl.as_string(), rows, source.dialect)


# --- the files ---


@dataclass
class Entry:
    """One file of a load, or one member of an archive."""

    folder: Path  # the data folder
    path: str
    member: str | None = None
    partition: dict[str, str] = field(default_factory=dict)  # columns by the names of folders, as `day=2026-03-01`
    is_alone: bool = False  # whether it is the only member
    archive: zipfile.ZipFile | None = None  # open, for its directory may be long
    # Once the header is read:
    version: list[Any] = field(default_factory=list)
    begin: int = 0  # of its bytes in the packed file
    size: int = 0  # in bytes as they are packed
    is_typed: bool = False  # whether its source has types

    @property
    def name(self) -> str:
        """The entry's name for people."""
        return f"{self.path}: {self.member}" if self.member and not self.is_alone else self.path

    @property
    def suffix(self) -> str:
        """The suffix that says the format, in lower case."""
        name = Path((self.member or self.path).lower())
        return Path(name.stem).suffix if name.suffix in (".gz", ".zst") else name.suffix

    def opened(self, stack: ExitStack) -> tuple[int, BinaryIO]:
        """The descriptor of the file, and its unpacked bytes, which can be read from any position."""
        if self.archive and self.archive.fp and self.member:
            return self.archive.fp.fileno(), stack.enter_context(self.archive.open(self.member))  # type: ignore[return-value]
        descriptor = csv_table.opened(self.folder, self.path)
        stream: Any = stack.enter_context(open(descriptor, "rb"))  # noqa: SIM115
        mark = os.pread(descriptor, 4, 0)
        # These streams can seek, and unpack all frames.
        if mark.startswith(b"\x1f\x8b"):
            stream = stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=stream, mode="rb"), _HEAD))
        elif mark == b"\x28\xb5\x2f\xfd" or mark[1:] == b"\x2a\x4d\x18":  # a note of pzstd may be before the data
            zstd = _library("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
            stream = stack.enter_context(zstd.open(stream))
        return descriptor, stream


def entries(wanted: Files, context: Context, stack: ExitStack) -> list[Entry]:
    """The files of `path`, in the order of their names, with their archives open; raises PermanentError without one."""
    root = os.path.realpath(context.data_dir)
    base = os.path.normpath(os.path.join(root, wanted.path))
    parts = Path(os.path.relpath(base, root)).parts
    fixed = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    if os.path.isdir(base):
        found = [os.path.relpath(os.path.join(at, name), base) for at, _, names in os.walk(base) for name in names]
    elif fixed < len(parts) and not os.path.exists(base):
        base = os.path.join(root, *parts[:fixed])
        found = glob.glob(os.path.join(*parts[fixed:]), root_dir=base, recursive=True)
        found = [name for name in found if os.path.isfile(os.path.join(base, name))]
    else:
        alone = Entry(context.data_dir, wanted.path, None, _partition(os.path.realpath(base), root, wanted.null))
        return _members(alone, wanted, stack)
    # Programs mark what is no data by the first characters: _SUCCESS, .part-0.crc, ~$ of an open workbook.
    names = [os.path.join(base, name) for name in sorted(found) if not re.search(r"(?:^|/)(?:[._]|~\$)", name)]
    paths = [*dict.fromkeys(map(os.path.realpath, names))]  # a link and its file are one
    if not all(Path(path).is_relative_to(root) for path in paths):
        raise PermanentError(f"path: {wanted.path} should be below the data folder")
    if not 0 < len(paths) <= _MAX_FILES:
        raise PermanentError(f"path: {wanted.path} has {len(paths) or 'no'} files; there should be 1 to {_MAX_FILES}")
    folder, nulls = context.data_dir, wanted.null
    each = (Entry(folder, os.path.relpath(path, root), None, _partition(path, root, nulls)) for path in paths)
    return [member for entry in each for member in _members(entry, wanted, stack)]


def _partition(path: str, root: str, nulls: Sequence[str]) -> dict[str, str]:
    """PURE: the columns that the names of folders hold, as Spark writes them: `day=2026-03-01/part-0.parquet`."""
    pairs = (part.partition("=") for part in Path(os.path.relpath(path, root)).parts[:-1])
    values = {name: unquote(value) for name, mark, value in pairs if mark and name}
    return {name: "" if value in (_NO_PARTITION, *nulls) else value for name, value in values.items()}


def _members(entry: Entry, wanted: Files, stack: ExitStack) -> list[Entry]:
    """The entry, or the members of its archive: those of `member`, else all that are data."""
    if wanted.format == "excel" or entry.suffix != ".zip":
        return [entry]
    with undamaged(entry.name):
        archive = stack.enter_context(zipfile.ZipFile(entry.opened(stack)[1]))
    members = [info for info in archive.infolist() if not info.is_dir()]
    names = [info.filename for info in members if not re.search(r"(^|/)(\.|__MACOSX/)", info.filename)]
    if wanted.member:
        names = [name for name in names if name == wanted.member or fnmatch(name, wanted.member)]
    if not names:
        listed = ", ".join(info.filename for info in members[:5]) or "nothing"
        raise PermanentError(f"{entry.name} has no such member; it has {listed}")
    if len(names) > _MAX_FILES:
        raise PermanentError(f"{entry.name} has {len(names)} members; there should be 1 to {_MAX_FILES}")
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise PermanentError(f"{entry.name} has two members of the name {twice}; pack it again, or choose by member")
    if any(info.flag_bits & 1 for info in members if info.filename in names):
        raise PermanentError(f"{entry.name} is encrypted, and no loader has its password; unpack it first")
    return [replace(entry, member=name, is_alone=len(names) == 1, archive=archive) for name in names]


@contextmanager
def undamaged(name: str) -> Iterator[None]:
    """Raise PermanentError for an archive that cannot be unpacked."""
    try:
        yield
    except Exception as e:
        known = (EOFError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, NotImplementedError)
        if not isinstance(e, known) and type(e).__name__ != "ZstdError":
            raise
        fault = "ends too early" if isinstance(e, EOFError) else f"cannot be unpacked ({e})"
        raise PermanentError(
            f"{name}: the packed file {fault}; if it is cut or damaged, fetch it again, whole"
        ) from None


# --- the formats ---


def _text(entry: Entry, wanted: Files, stack: ExitStack) -> Source:
    """A file of text; raises PermanentError for one that is none."""
    descriptor, stream = entry.opened(stack)
    head = stream.read(_HEAD)
    stream.seek(0)
    if re.match(rb'\s*(\[\s*[\[{]|\{\s*["}])', head.removeprefix(codecs.BOM_UTF8)):
        where = 'where it is data, format should be "json"; a pattern in path can leave it out'
        raise PermanentError(f"{entry.name} is JSON, not CSV; open it: {where}")
    if fault := no_data(head):
        raise PermanentError(f"{entry.name} {fault}")
    marked = next((name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), None)
    layout = wanted.model_copy(update={"encoding": wanted.encoding or marked or "utf-8"})
    if marked and not codecs.lookup(str(layout.encoding)).name.startswith(marked):
        raise PermanentError(
            f"{entry.name}, line 1: begins with the byte order mark of {marked}; encoding should be it"
        )
    text = as_utf8(stream, str(layout.encoding))
    return stack.enter_context(closing(CsvFile(entry.name, descriptor, text, layout)))


def no_data(head: bytes) -> str | None:
    """PURE: what the file is that begins so, if it is no text with data."""
    if not head.strip(codecs.BOM_UTF8 + b" \r\n\t"):
        return f"is empty ({len(head)} bytes), without even a header: its source may have failed; ask the source again"
    if b"application/vnd.oasis.opendocument" in head[:100]:
        return "is a document of LibreOffice; save it as .xlsx or .csv"
    if kind := next((kind for mark, kind in _NO_TEXT.items() if head.startswith(mark)), None):
        return f"is {kind}"
    if head[257:262] == b"ustar":
        return "is a tar archive; unpack it first, or pack its files by zip"
    begin = head.lstrip(codecs.BOM_UTF8 + b" \r\n\t")[:200].lower()
    if re.match(rb"<[!?a-z](?![^<>]*>[\t|;,])", begin):  # MetaTrader writes headers as <TICKER>,<PER>
        kind = "a page of HTML, perhaps the error of a server" if b"html" in begin else "XML, which no loader reads"
        return f"is {kind}; open it, look what it says, and download it again, or save its table as .csv"
    return None


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise PermanentError(f"format: needs {name}: pip install 'dataloader-farm[files]'") from None


def _by(module: str, reader: str, library: str = "json") -> Callable[[Entry, Files, ExitStack], Source]:
    """A format that a module of ours reads, with this library. Both are imported by the first file."""

    def opened(entry: Entry, wanted: Files, stack: ExitStack) -> Source:
        _library(library)
        types = {name: type_ for name, type_ in wanted.types.items() if name not in entry.partition}
        make = getattr(import_module(f"dataloader.pipelines.{module}"), reader)
        source: Source = make(entry.name, *entry.opened(stack), wanted.model_copy(update={"types": types}))
        return stack.enter_context(closing(source))

    return opened


# How each format opens an entry. A Source that is not typed has text, whose types are inferred.
FORMATS: dict[str, Callable[[Entry, Files, ExitStack], Source]] = {
    **dict.fromkeys(("text", "csv"), _text),
    "json": _by("json_file", "JsonFile"),
    "excel": _by("excel", "Sheet", "python_calamine"),
    "parquet": _by("parquet", "ParquetFile", "pyarrow"),
    "orc": _by("parquet", "OrcFile", "pyarrow"),
}
SUFFIXES = {
    **dict.fromkeys((".csv", ".tsv", ".tab", ".txt", ".psv", ".dat", ".log", ".prn", ".asc", ""), "text"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".geojson"), "json"),
    **{".xlsx": "excel", ".xlsm": "excel"},
    **{".parquet": "parquet", ".pq": "parquet", ".orc": "orc"},
}


def opener(entry: Entry, wanted: Files, stack: ExitStack) -> Source:
    """The entry's records, by the argument `format` or the suffix; `stack` closes it."""
    name = wanted.format or SUFFIXES.get(entry.suffix, "text")
    if name not in FORMATS:
        raise PermanentError(f"format: {name} should be one of {', '.join(FORMATS)}")
    return FORMATS[name](entry, wanted, stack)


# --- the names of columns ---


def named(raw: Sequence[str], wanted: Files, place: Callable[[str], PermanentError]) -> list[str]:
    """The names of a file's columns in the table; raises the error of `place` where they cannot be."""
    raw = [name.strip() for name in raw]
    if unknown := [name for name in wanted.columns if name not in raw]:
        has = visible(", ".join(raw[:20]))
        raise place(f"columns: {', '.join(unknown)} should be in the header, which has {has}")
    names: dict[str, int] = {}  # with their places: a file may have 100,000
    faults: list[str] = []
    for number, name in enumerate(raw, 1):
        final = wanted.columns.get(name, name)
        if wanted.names and name not in wanted.columns:
            base = final = snake(name) or f"column_{number}"
            copies = (f"{base}_{copy}" for copy in count(2))
            while final in names:
                final = next(copies)
        wrong = {
            f"column {number} has no name": not final,
            f'columns {names.get(final)} and {number} are named "{final}"': final in names,
            f"the name of column {number} has over 63 bytes": len(final.encode()) > 63,
            f'column {number} is named "{final}", as one of PostgreSQL itself': final in _SYSTEM_COLUMNS,
            f'column {number} has a zero byte in its name: is the encoding "utf-16-le"?': "\0" in final,
        }
        found = [fault for fault, is_so in wrong.items() if is_so][:1]
        if found and final not in (wanted.select or [final]):  # nobody needs the column
            found, final = [], f"(column {number})"
        faults += found
        names[final] = number
    if faults or not names:
        remedy = 'names "snake" makes names, columns can rename one, select can do without the column, skip_rows leaves'
        remedy += " out titles above, and a list in header gives the names, with skip_rows where the file has some"
        raise place(f"header: {'; '.join(faults[:3]) or 'there is none'}; {remedy}")
    return [*names]


def snake(name: str) -> str:
    """PURE: a name as one writes it in SQL: `Orders placed (EUR)` is orders_placed_eur, `netAmount` is net_amount."""
    name = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", unicodedata.normalize("NFC", name))
    name = re.sub(r"\W+", "_", name.lower()).strip("_")
    name = name.encode()[:60].decode(errors="ignore")
    return f"_{name}" if name[:1].isdigit() else name


# --- the records ---


def _cutter(delimiter: str) -> Callable[[str], list[str]]:
    """PURE: a function that cuts a record into its fields as they are written, with their quotes."""
    mark = re.escape(delimiter)
    return re.compile(f'(?:\\A|{mark})("(?:[^"]|"")*+"|[^"{mark}]*+)').findall


class Shape:
    """How the records of one entry become those of the table."""

    def __init__(
        self, source: Source, names: list[str], whole: Shaped, constants: dict[str, str], added: Sequence[Any] = ()
    ) -> None:
        """`added` are the constants as values of their columns' types."""
        self._delimiter, self._names, self._whole = source.delimiter, names, whole
        self.added, self.stored, self.width = added, whole.stored, len(whole.columns)
        self.guessed = {
            raw for raw, name in zip(source.columns, names, strict=False) if whole.kinds.get(name, ("", False))[1]
        }
        mark = re.escape(source.delimiter)
        self._cut = _cutter(source.delimiter)
        wanted, out = whole.wanted, whole.delimiter
        given = [word for word in wanted.null if word]  # an empty field is null anyway
        if source.is_typed:  # its quotes enclose every text
            given += [csv_file.field(word, source.delimiter, True) for word in wanted.null]
        words = "|".join(map(re.escape, given))
        no_word = f'(?!"(?:{words})")' if words else ""
        self._nulls = frozenset([*wanted.null, *given])
        self._order: list[tuple[str, int | None, Reader | None, Reader | None]] = []  # for texts, for other values
        of_texts = [not isinstance(source, parquet.ArrowFile) or kind == "text" for kind in source.columns.values()]
        bare, quoted, with_words = [], [], []
        # Constants are behind the columns of the file.
        for name in whole.columns:
            if name in constants or name in whole.lines:
                continue
            kind, is_guess = whole.kinds.get(name, ("", False))
            at = names.index(name) if name in names else None
            reader = exact = Reader(kind, wanted, is_guess) if kind else None
            takes_texts = not (is_guess and source.is_typed)  # the values behind such a guess were no texts
            if kind and source.is_typed:
                exact = Reader(kind, wanted.exact, is_guess and kind == "boolean")
                reader = (reader if at is None or of_texts[at] else exact) if takes_texts else None
            self._order.append((name, at, reader, exact))
            value = columns.plain(kind, wanted, is_guess and takes_texts) if kind else ""
            is_null = f"(?!(?:{words})(?:{mark}|[\r\n]|\\Z))" if words else ""
            bare.append(is_null + (f"(?:{value})?+" if kind else f"[^{mark}]*+"))
            typed = f"(?:{value})|"
            typed += f'{no_word}"(?:{value})"|' * takes_texts  # a quoted number may be a word for null too
            text = text_pattern(source.delimiter)
            quoted.append(is_null + (f"(?:{typed})" if kind else text))
            with_words.append(f"(?:(?:{words})(?=[{mark}\r\n])|(?:{value})?+)" if kind else text)
        is_same = [at for _, at, *_ in self._order] == list(range(len(names))) and out == source.delimiter
        # Most records have no quotes, and are matched in half the time.
        self.is_plain, self.is_plain_quoted = (
            re.compile(mark.join(patterns)).fullmatch if is_same else lambda text: None for patterns in (bare, quoted)
        )
        self.tail = "".join(out + csv_file.field(constants[name], out) for name in whole.columns if name in constants)
        self.lines = len(whole.lines)  # columns behind the added ones, with the number of each row
        self.has_added_alone = not self._order
        # The columns of a file of Arrow, if their values pass as they are.
        self.places = [at for _, at, reader, _ in self._order if at is not None and not (reader or '"' in words)]
        # The words that blocks may have, and how they are found behind these marks.
        are_bare = mark != r"\\" and all(csv_file.field(word, source.delimiter) == word for word in given)
        self.words, marks = given if are_bare else [], (source.delimiter, "\n")
        self._drops = [(each, re.compile(f"{re.escape(each)}(?:{words})(?=[{mark}\n])").sub) for each in marks]
        # The records that may pass in blocks; one with words for null has no quotes that `shaped` would drop.
        passing = [with_words, quoted] if self.words else [quoted]
        others = wanted.thousands or wanted.date_format or wanted.true or wanted.false
        # Values are as PostgreSQL writes them.
        self.is_usual = whole.has_parts and are_bare and wanted.decimal == "." and not others
        self.passing = passing if is_same and not re.search("[\r\n]", self.tail) else []

    def fitted(self, number: int, block: Block) -> Block:
        """The block as the table's columns have it: without words for null, and with the added columns."""
        text, tail, out, lines = block.text, self.tail, self._delimiter, self.lines
        if any(word in text for word in self.words):
            parts = f"\n{text}".split('"')  # every other one is within quotes
            bare = '"'.join(parts[::2])
            for each, dropped in self._drops:
                bare = dropped(each, bare)
            parts[::2] = bare.split('"')
            text = '"'.join(parts)[1:]
        if tail or lines:
            singles = Block(text, block.records).singles(number)
            text = "".join([f"{single}{tail}{f'{out}{at}' * lines}\n" for at, single in singles])
        return Block(text, block.records)

    def cells(self, text: str) -> list[str]:
        """The fields of a record as they are written, with their quotes."""
        return self._cut(text) if '"' in text else text.split(self._delimiter)

    def values(self, text: str) -> list[str | None]:
        """The values of a record, for inference: a word for null is None, quoted or not."""
        raw = [(cell, value_of(cell)) for cell in self.cells(text)]
        return [None if not cell or value in self._nulls else value for cell, value in raw]

    def shaped(self, text: str) -> str | Rejected:
        """The record with the table's columns, or the reason why it has none."""
        cells, expected = self.cells(text), len(self._names)
        while len(cells) > expected and not cells[-1]:
            cells.pop()  # a separator at the end of the row
        if len(cells) != expected:
            lacks = f"; missing data for column {self._names[len(cells)]}" if len(cells) < expected else ""
            remedy = "is the delimiter right? " if 1 in (len(cells), expected) else ""
            remedy += "skip_footer and comment leave out what is no row" if lacks else _TOO_MANY
            reason = f"{len(cells)} fields, but the header has {expected}{lacks}; {remedy}, and max_errors rejects rows"
            return Rejected(reason, text)
        fields, out = [], self._whole.delimiter
        for name, at, reader, exact in self._order:
            cell = cells[at] if at is not None else ""
            if not cell or cell in self._nulls:
                fields.append("")
                continue
            is_quoted = cell[0] == '"'
            if exact is None:
                fields.append(cell if out == self._delimiter else csv_file.field(value_of(cell), out, is_quoted))
                continue
            value = value_of(cell)
            if not value or value in self._nulls:  # a quoted one is null too
                fields.append("")
                continue
            if is_quoted and reader is None:
                return Rejected(f"column {name}: {columns.TEXT_IN_GUESS}", text)
            try:
                fields.append(csv_file.field((reader if reader and is_quoted else exact).read(value), out))
            except ValueError as e:
                return Rejected(f"column {name}: {e}", text)
        return out.join(fields)


def value_of(cell: str) -> str:
    """PURE: the value of a field as it is written."""
    return cell[1:-1].replace('""', '"') if cell[:1] == '"' else cell


class Shaped(Source):
    """The records of all files of a load, in the shape of its table; their numbers go on from file to file."""

    def __init__(self, wanted: Files, context: Context) -> None:
        """Read the header and a sample of each file; raises PermanentError where they do not fit each other."""
        super().__init__(wanted.path)
        self.wanted, self._now = wanted, datetime.now(UTC).isoformat()
        self._stack = ExitStack()
        with context.transaction() as conn:
            table = csv_table.Table(conn, context, wanted, Source(""))
            self.existing, self._base_types = table.columns(), table.columns(types="base_types")
        self.columns: dict[str, str] = {}
        self.lines: list[str] = []  # the columns of the line numbers
        self._at = self._most = 0
        self._opened: tuple[Source, list[str]] | None = None
        self._bases: list[tuple[int, Source]] = []
        self.kinds: dict[str, tuple[str, bool]] = {}  # the kind of each column that has one; and whether it is a guess
        self._declared = {*wanted.types, *self.existing}  # the columns whose types are no guesses
        self._done = self.begin = Place()
        with ExitStack() as archives:  # an error closes them
            archives.callback(lambda: self._stack.close())
            self._entries = entries(wanted, context, archives)
            self._inspect()
            self._archives = archives.pop_all()

    def close(self) -> None:
        """Close all files."""
        self._stack.close()
        self._archives.close()

    @property
    def bytes_read(self) -> int:
        return self._before + (self._inner.bytes_read if self._bases else 0)

    @property
    def expected(self) -> int | None:
        """How many records there are; without a count, if the others are as long as those that were read."""
        if not self._bases:
            return None
        read, inner = self.place().records, cast(csv_table.FileSource, self._inner)
        if inner.total and len(self._entries) == 1:
            return inner.total
        # In the packed file, whose size is known: a reader may count unpacked bytes.
        entry = self._entries[self._at]
        packed = self._before + max(0, min(inner.position - entry.begin, entry.size))
        return max(read, read * self.size // max(1, packed))

    def require_unchanged(self) -> None:
        if self._bases:
            self._inner.require_unchanged()

    @property
    def _before(self) -> int:
        """The bytes of the entries before this one."""
        return sum(entry.size for entry in self._entries[: self._at])

    @property
    def _inner(self) -> Source:
        return self._bases[-1][1]

    def _open(self, entry: Entry, stack: ExitStack) -> tuple[Source, list[str]]:
        with undamaged(entry.name):
            source = opener(entry, self.wanted, stack)
        if entry.version:
            source.version = entry.version
            source.require_unchanged()
        if source.is_typed and not source.columns:  # a page of an API without rows
            return source, []
        names = named(source.names, self.wanted, lambda reason: source.error(source.header_line, reason))
        self._fit(source, names)
        return source, names

    def _fit(self, source: Source, names: list[str]) -> None:
        types = self.columns | self.wanted.types | self.existing
        if source.is_typed:
            source.fit({raw: types[name] for raw, name in zip(source.columns, names, strict=True) if name in types})

    def _inspect(self) -> None:
        """Find the columns of all files, and their types."""
        wanted, entries = self.wanted, self._entries
        given: dict[str, str] = {}  # the types of sources that have types
        headers: list[list[str]] = []
        unsure: list[list[str]] = []  # names that the arguments alone give to files without rows
        self.dialect: dict[str, Any] = {"files": [entry.name for entry in entries[:5]], "count": len(entries)}
        for at, entry in enumerate(entries):
            with ExitStack() as stack:
                source, names = self._open(entry, stack)
                if source.is_typed:
                    for name, type_ in zip(names, source.columns.values(), strict=True):
                        kinds = [kind for kind in (given.get(name, UNSEEN), type_) if kind is not UNSEEN]
                        given[name] = common_type({*kinds})
                    self._declared |= {*names} if isinstance(source, parquet.ArrowFile) else set()
                if at == 0:  # it is not read for its columns again
                    self._opened, self._stack = (source, [*names]), stack.pop_all()
            entry.version, entry.size, entry.is_typed = source.version, source.size, source.is_typed
            if entry.archive:
                member = entry.archive.getinfo(entry.member or "")
                entry.begin, entry.size = member.header_offset, member.compress_size
            self.size += entry.size
            self.dialect = dict(source.dialect) | self.dialect
            self.delimiter = source.delimiter if at == 0 else self.delimiter
            if not source.has_columns:
                unsure += [names] if names else []
                continue
            names += [name for name in entry.partition if name not in names]
            if headers and wanted.schema_change == "refuse" and (others := set(names) ^ set(headers[0])):
                differ = ", ".join(sorted(others)[:5])
                chosen = "member chooses one of them" if entry.member else "path can choose some of them"
                reason = f"have different columns: {differ} is only in one of them"
                remedy = f'schema_change "add" takes the columns of all, and {chosen}'
                raise PermanentError(f"{entries[0].name} and {entry.name} {reason}; {remedy}")
            headers.append(names)
        if not (headers := headers or unsure):
            raise PermanentError(f"{wanted.path}: has no objects, so no columns: name these in `types`")
        versions = [[entry.name, entry.version] for entry in entries]
        self.version = ["utf-8", hashlib.sha256(json.dumps(versions).encode()).hexdigest()]
        names = list(dict.fromkeys(name for header in headers for name in header))
        nested = [name for name, type_ in given.items() if type_ == "jsonb" and source.total == 1]
        hint = f"; records should name the one that has the rows: {', '.join(nested[:5])}" if nested else ""
        self._require_known(names, hint)
        partitions = {name for entry in entries for name in entry.partition}
        # Constants come behind the columns of the files.
        names = sorted((name for name in wanted.select or names if name not in wanted.add), key=partitions.__contains__)
        self._settle_types(names, given)

    def _require_known(self, names: list[str], hint: str) -> None:
        """Raise PermanentError for an argument that names a column which the files lack, or have already."""
        wanted, is_typed = self.wanted, any(entry.is_typed for entry in self._entries)
        for argument, chosen in {"select": wanted.select or [], "types": wanted.types, "key": wanted.key}.items():
            among = wanted.select if wanted.select and argument == "key" else names
            if unknown := [name for name in chosen if name not in among and name not in wanted.add]:
                has = visible(", ".join(among[:20]))
                hint = "; is the delimiter right, and skip_rows?" if len(names) == 1 and not is_typed else hint
                place = f"the columns of {self._entries[0].name}" if among is names else "those of select"
                raise PermanentError(f"{argument}: {', '.join(unknown)} should be among {place}: {has}{hint}")
        if taken := [name for name in wanted.add if name in names]:
            raise PermanentError(f"add: the files have {', '.join(taken)}; it should be a new name")

    def _settle_types(self, names: list[str], given: dict[str, str]) -> None:
        """Give each column the type of the arguments, the table or the source, else one that loses no value."""
        wanted = self.wanted
        if len(names) > _MOST_COLUMNS:
            reason = f"{len(names)} columns, and a table has at most {_MOST_COLUMNS}; select can choose some"
            raise PermanentError(f"{wanted.path}: {reason}")
        known = given | (self.existing if wanted.schema_change != "widen" else {}) | wanted.types
        unknown = [name for name in names if name not in known]
        if unknown:
            known |= (
                inferred(unknown, self._sample(unknown), wanted) if wanted.infer else dict.fromkeys(unknown, "text")
            )
        self.lines = [name for name, what in wanted.add.items() if what == "line"]
        constants = [name for name in wanted.add if name not in self.lines]
        added = {"now": "timestamp with time zone", "file": "text", "line": "bigint"}
        self.columns = {name: known[name] for name in names}
        self.columns |= {name: added[wanted.add[name]] for name in constants + self.lines}
        are_typed = all(entry.is_typed for entry in self._entries)
        if not wanted.infer and not (Values.model_fields.keys() - {"null"}) & wanted.model_fields_set:
            return  # PostgreSQL alone reads the values
        for name in names:
            stored = self.existing.get(name)
            is_widened = wanted.schema_change == "widen" and stored and csv_table.wider(stored, self.columns[name])
            kind = kind_of(self.columns[name] if is_widened or not stored else self._base_types[name])
            is_guess = name not in self._declared
            if kind and (is_guess or not (are_typed and kind_of(given.get(name, "")) == kind)):
                self.kinds[name] = kind, is_guess

    def _sample(self, names: list[str]) -> Iterator[list[str | None]]:
        """Rows of all files, the same number of each."""
        share = max(_SAMPLE_OF_A_FILE, _SAMPLE_ROWS // len(self._entries))
        for entry in self._entries:
            if entry.is_typed and not entry.partition:
                continue
            with ExitStack() as stack, undamaged(entry.name):
                source, header = self._open(entry, stack)
                shape = Shape(source, header, self, {})
                places = [header.index(name) if name in header else None for name in names]
                for number, text in islice(source.records(source.begin), share):
                    fit = text if isinstance(text, Rejected) else shape.shaped(text)
                    if isinstance(fit, Rejected):
                        if not self.wanted.max_errors:
                            raise source.error(number, fit.reason)
                        continue
                    row = dict(enumerate(shape.values(str(text))))
                    yield [
                        entry.partition.get(name) if at is None else row.get(at)
                        for name, at in zip(names, places, strict=True)
                    ]

    def records(self, begin: Place) -> Iterator[tuple[int, str | Rejected]]:
        """The records from there on; the next file is opened behind the end of one."""
        return cast(Iterator[tuple[int, str | Rejected]], self.items(begin, 0))

    def items(self, begin: Place, size: int) -> Iterator[tuple[int, Item]]:
        """The same records, in blocks of up to `size` where they fit already."""
        self._most = size
        at, base, mark = begin.mark or (0, 0, None)
        inner = Place(*mark) if mark else Place()
        opened = self._opened if self._at == at else None
        self._bases = []
        self._done = Place(**{name: getattr(begin, name) - getattr(inner, name) for name in _COUNTED})
        return self._all(self._entered(at, base, inner if mark else None, opened))

    def _entered(
        self, at: int, base: int, place: Place | None, opened: tuple[Source, list[str]] | None = None
    ) -> Iterator[tuple[int, Item]]:
        if opened is None:
            self._stack.close()
            opened = self._open(self._entries[at], self._stack)
        self._at, self._opened = at, opened
        source, names = opened
        self._fit(source, names)
        self._bases.append((base, source))
        entry = self._entries[at]
        words = {"now": self._now, "file": entry.name}
        constants = {name: self._folder_value(entry, name) for name in entry.partition if name not in names}
        constants |= {name: words[what] for name, what in self.wanted.add.items() if what != "line"}
        added = [self._typed_value(name, constants[name]) for name in self.columns if name in constants]
        self._shape = Shape(source, names, self, constants, added)
        take = source.items if self._most and source.take(self._shape) else None
        begin = place or source.begin
        return take(begin, self._most) if take else source.records(begin)

    def _folder_value(self, entry: Entry, name: str) -> str:
        """The value of a folder's column; raises PermanentError where it has no single reading."""
        value, (kind, is_guess) = entry.partition[name], self.kinds.get(name, ("", False))
        try:
            return Reader(kind, self.wanted, is_guess).read(value) if kind and value else value
        except ValueError as e:
            raise PermanentError(f"{entry.name}: column {name}: {e}") from None

    def _typed_value(self, name: str, value: str) -> Any:
        """A constant as a value of its column's type, where PostgreSQL reads the text in one way."""
        kind = kind_of(self.existing.get(name) or self.columns[name])
        with suppress(ValueError):
            if kind == "integer" and re.fullmatch("-?[0-9]{1,18}", value):
                return int(value)
            if kind == "date" and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
                return date.fromisoformat(value)
        return datetime.fromisoformat(value) if kind == "timestamptz" and value is self._now else value or None

    def _all(self, records: Iterator[tuple[int, Item]]) -> Iterator[tuple[int, Item]]:
        while True:
            base, shape, number = self._bases[-1][0], self._shape, 0
            is_plain, is_plain_quoted, tail, lines = shape.is_plain, shape.is_plain_quoted, shape.tail, shape.lines
            begin = len(self.delimiter) * shape.has_added_alone
            with undamaged(self._entries[self._at].name):
                for number, text in records:
                    if isinstance(text, str):
                        if not (is_plain_quoted if '"' in text else is_plain)(text):
                            text = shape.shaped(text)
                        if (tail or lines) and isinstance(text, str):
                            text = (text + tail + f"{self.delimiter}{number}" * lines)[begin:]
                    yield base + number, text
            self._inner.require_unchanged()
            if self._at + 1 == len(self._entries):
                return
            end, done = self._inner.place(), self.place()
            self._done = done._replace(mark=None)
            records = self._entered(self._at + 1, base + max(number, end.line, end.records), None)

    def place(self) -> Place:
        """The place of the next record: its file, the numbers before that, and its place in the file."""
        if not self._bases:
            return Place()
        inner = self._inner.place()
        counts = {name: getattr(self._done, name) + getattr(inner, name) for name in _COUNTED}
        return Place([self._at, self._bases[-1][0], list(inner)], inner.line, **counts)

    def where(self, number: int) -> tuple[str, int]:
        base, source = self._base(number)
        return source.where(number - base)

    def error(self, line: int, reason: str, extra_lines: int = 0) -> PermanentError:
        """The error of a record; it names the file and the place there."""
        base, source = self._base(line)
        if ";" not in reason:
            reason += f"; {next(remedy for fault, remedy in _REMEDIES.items() if re.search(fault, reason))}"
        return source.error(line - base, reason, extra_lines)

    def _base(self, number: int) -> tuple[int, Source]:
        """The file of the record of this number, and the numbers before that file."""
        return self._bases[bisect_right(self._bases, number - 1, key=lambda pair: pair[0]) - 1]
