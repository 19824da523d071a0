"""The columns of text: their types, by a guess that loses nothing, and their values as PostgreSQL reads them.

Each type of PostgreSQL has a kind. The values of a kind that PostgreSQL reads in one way only pass as they are. The
others are converted by the words of the job (`decimal`, `date_format`), or refused with the argument that would help.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from dataloader.pipelines import Arguments
from dataloader.pipelines.csv_table import visible

_KINDS = {
    **dict.fromkeys(("smallint", "int2", "integer", "int", "int4", "bigint", "int8"), "integer"),
    **dict.fromkeys(("numeric", "decimal", "real", "float4", "double precision", "float8", "money"), "number"),
    **{"boolean": "boolean", "bool": "boolean", "date": "date", "timestamp": "timestamp"},
    **{"timestamp without time zone": "timestamp", "timestamp with time zone": "timestamptz"},
    **{"timestamptz": "timestamptz", "time": "time", "time without time zone": "time"},
    **{"timetz": "timetz", "time with time zone": "timetz"},
}
CUTTING = ("date", "timestamp", "time", "timetz")  # PostgreSQL drops parts of a text that these types lack
OF_TIME = (*CUTTING, "timestamptz")
_TEXTS = ("character", "character varying", "bit varying")
_BOOLEANS = {"t", "true", "y", "yes", "on", "1", "f", "false", "n", "no", "off", "0"}
# The form of a number that PostgreSQL gives back unchanged: without zeros in front, a plus, an exponent.
_INTEGER = "-?(?!0[0-9])[0-9]++"
_NUMBER = rf"{_INTEGER}(?:\.[0-9]++)?+"
_TWO = "[0-9][0-9]"  # matched in half the time of [0-9]{2}
_DAY = f"{_TWO}{_TWO}-{_TWO}-{_TWO}"
_TIME = rf"{_DAY}[ T]{_TWO}:{_TWO}(?::{_TWO}(?:\.[0-9]{{1,6}}0*+)?)?"
_ZONE = f" ?(?:Z|UTC|[+-]{_TWO}(?::?{_TWO})?)"
_CLOCK = rf"[0-9]?[0-9]:{_TWO}(?::[0-5][0-9](?:\.[0-9]{{1,6}}0*+)?)?(?: ?[AaPp][Mm])?"
_MIDNIGHT = re.compile(rf"({_DAY})[ T]00:00(?::00(?:\.0*)?)?")
# What PostgreSQL reads in one way only, by kind, in a column whose type was declared.
_PLAIN = {
    "integer": r"[-+]?[0-9]+",
    "number": r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?i:nan|inf|infinity)",
    "boolean": "[tf]|true|false",
    "date": f"{_DAY}|[0-9]{{8}}|-?infinity",
    "timestamp": f"{_TIME}|{_DAY}|-?infinity",
    "timestamptz": f"{_TIME}{_ZONE}|-?infinity",
    **{"time": _CLOCK, "timetz": f"{_CLOCK}{_ZONE}"},
}
_ISO = [f"%Y-%m-%d{time}" for time in ("", " %H:%M:%S", " %H:%M:%S.%f", " %H:%M:%S%z", " %H:%M:%S.%f%z")]
_SPACES, _APOSTROPHES = " \u00a0\u2007\u2009\u202f", "'\u2019"
_FIRST_SERIAL = 61  # Excel has a 29 February 1900, so earlier serial days are one day later
_MOMENT = datetime(2026, 11, 23, 22, 47, 58, 123_456, UTC)  # no two parts are equal
_EXCEL_EPOCH = datetime(1899, 12, 30)  # noqa: DTZ001 - without a zone, as in Excel
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BESIDE = re.compile("%[YymdHIMSjf]%[YymdHIMSjf]")  # where a digit is missing, strptime takes one of the next number
_EPOCHS = {"epoch": 10**6, "epoch_ms": 10**3, "epoch_us": 1}  # formats that count from there, in microseconds


def _type(text: str) -> str:
    known = "|".join([*_KINDS, *_TEXTS])
    one_word = r"(?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*"
    size = r"(?: ?\( ?\d+(?:, ?-?\d+)? ?\))?"
    # Further words would be clauses of CREATE TABLE.
    if not re.fullmatch(
        rf"(?:timestamp{size} with(?:out)? time zone|(?:{known}|{one_word}){size})(?:\[\])*", text, re.I
    ):
        raise ValueError('should be a type of PostgreSQL such as "numeric(12,2)", "date" or "text"')
    return text


def _formats(given: str | list[str]) -> str | list[str]:
    for text in [given] if isinstance(given, str) else given:
        if text == "excel" or text in _EPOCHS:
            continue
        try:
            written = _MOMENT.strftime(text)
            read = datetime.strptime(written, text)  # noqa: DTZ007
        except ValueError:
            known = '"excel", "epoch", "epoch_ms", "epoch_us"'
            raise ValueError(f'should be {known} or a format such as "%d.%m.%Y", with directives of strptime') from None
        # strptime invents the year 1900, and passes over a zone's name, a week without its day and %p without %I.
        if read.year != _MOMENT.year or read.strftime(text) != written or ("%I" in text) != ("%p" in text):
            raise ValueError(
                "should have a year (%Y), %I only with %p, %W only with a weekday, and %z for a zone; where all values"
                " have the same zone, its name can be in the format, and timezone says it"
            )
    return given


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        raise ValueError('should be the name of a time zone such as "Europe/Berlin"') from None
    return name


def _separator(text: str) -> str:
    if len(text) != 1 or text.isalnum() or text in '+-"\r\n\0':
        raise ValueError("should be one character that is no letter, digit, sign or quote")
    return text


Type = Annotated[str, AfterValidator(_type)]
Formats = Annotated[str | list[str], AfterValidator(_formats)]
Separator = Annotated[str, AfterValidator(_separator)]


class Values(Arguments):
    """The arguments that say how values are written; docs/loaders.md explains each."""

    decimal: Separator = "."
    thousands: Separator | None = None
    date_format: Formats = Field(default_factory=list)
    null: list[str] = Field(default_factory=list)
    true: list[str] = Field(default_factory=list)
    false: list[str] = Field(default_factory=list)
    timezone: Annotated[str, AfterValidator(_zone)] | None = None

    @field_validator("thousands")
    @classmethod
    def _differs(cls, mark: str | None, info: ValidationInfo) -> str | None:
        if mark == info.data.get("decimal"):
            raise ValueError('should differ from decimal, which is "." unless it is given')
        return mark

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The formats of dates, in the order in which they are tried."""
        return (self.date_format,) if isinstance(self.date_format, str) else tuple(self.date_format)

    @cached_property
    def takes_iso(self) -> bool:
        """Whether 2026-12-31 has one reading: a format that begins with a year may read it in another way."""
        return not any(name.startswith(("%Y", "%y", "%G")) for name in self.formats)

    @cached_property
    def exact(self) -> Values:
        """How values are written that are no texts: in a workbook, JSON or Parquet a number has its point."""
        formats = [*self.formats] if self.takes_iso else [*_ISO, *self.formats]
        return Values(decimal=".", date_format=formats, true=self.true, false=self.false, timezone=self.timezone)

    @cached_property
    def number(self) -> Callable[[str], re.Match[str] | None]:
        """Matches a number of this dialect: minus before, parenthesis, whole part, fraction, exponent, minus behind."""
        grouped = ""
        if self.thousands:
            mark = next((kind for kind in (_SPACES, _APOSTROPHES) if self.thousands in kind), self.thousands)
            mark = f"[{re.escape(mark)}]"
            grouped = rf"[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{2,3}})*{mark}[0-9]{{3}}|"
        whole = rf"({grouped}[0-9]+|(?={re.escape(self.decimal)}[0-9]))(?:{re.escape(self.decimal)}([0-9]*))?"
        return re.compile(rf"\s*(\(|[-+\u2212]\s?)?{whole}([eE][-+]?[0-9]+)?(\)|\s?[-\u2212])?\s*").fullmatch


def kind_of(type_: str) -> str:
    """PURE: the kind of a type: integer, number, boolean, one of OF_TIME, or "" for others."""
    return _KINDS.get(re.sub(r" ?\(.*?\)", "", type_).lower(), "")


def would_cut(given: str, stored: str) -> bool:
    """PURE: whether a column of the second type would lose a day, a time or a zone of values of the first type."""
    kinds = kind_of(given), kind_of(stored)
    is_cut = kinds[0] in OF_TIME and kinds[1] in CUTTING and kinds[0] != kinds[1]
    return is_cut and kinds != ("date", "timestamp")


def plain(kind: str, values: Values, is_guess: bool) -> str:
    """PURE: a pattern of the values that pass as they are; a guessed type takes only what loses nothing."""
    if kind in ("integer", "number"):
        canonical = _INTEGER if kind == "integer" or values.decimal != "." else _NUMBER
        return canonical if is_guess or values.decimal != "." or values.thousands else _PLAIN[kind]
    if kind in _NO_CLOCK:
        return _PLAIN[kind]
    if (values.formats and not values.takes_iso) or (kind == "boolean" and (values.true or values.false)):
        return "(?!)"
    if kind == "timestamp" and is_guess:
        return _TIME
    return _DAY if kind == "date" and (is_guess or values.formats) else _PLAIN[kind]


class Reader:
    """Reads the values of one column that are not plain."""

    def __init__(self, kind: str, values: Values, is_guess: bool = False) -> None:
        self.kind, self._values, self._is_guess = kind, values, is_guess
        self.is_of_time = kind in OF_TIME
        self._is_plain = re.compile(plain(kind, values, is_guess)).fullmatch
        self._known = lru_cache(4_096)(self._read)

    def read(self, text: str) -> str:
        """The value as PostgreSQL reads it; raises ValueError, with the remedy, where it has no single reading."""
        return self._known(text) if len(text) <= 64 else self._read(text)

    def _read(self, text: str) -> str:
        if self._is_plain(text):
            return text
        if self.kind in ("integer", "number"):
            return self._number(text)
        if self.kind in _NO_CLOCK:
            if self._is_plain(text.strip()):
                return text
            raise ValueError(_NO_CLOCK[self.kind])
        if self.kind != "boolean":
            return self._moment(text.strip())
        if self._is_guess:
            raise ValueError(_GUESSED.format("not a boolean"))
        for is_true, words in ((True, self._values.true), (False, self._values.false)):
            if text in words:
                return str(is_true).lower()
        if (word := text.strip().lower()) in _BOOLEANS:
            return word
        raise ValueError("not a boolean; true and false can list its words")

    def _number(self, text: str) -> str:
        match = self._values.number(text)
        if match is None or (match[1] == "(") != (match[5] == ")") or (match[1] and match[5] and match[5] != ")"):
            raise ValueError(self._number_fault(text))
        before, whole, fraction, exponent, behind = match.groups("")
        digits = re.sub("[^0-9]", "", whole)
        form = before.strip() + digits + "." * bool(fraction) + exponent + behind
        if self._is_guess and not re.fullmatch(r"0|-?[1-9][0-9]*|-?(?:0|[1-9][0-9]*)?\.", form):
            raise ValueError(_GUESSED.format("a number in a form that it would lose, such as zeros in front"))
        if self.kind == "integer" and (fraction or exponent):
            if fraction == "000" and len(digits) <= 3 and not {"decimal", "thousands"} & self._values.model_fields_set:
                raise ValueError(_TWO_NUMBERS)
            if exponent or fraction.strip("0") or self._is_guess:
                fault = "a number with a fraction or an exponent"
                raise ValueError(_GUESSED.format(fault) if self._is_guess else f"{fault}; {_NO_INTEGER}")
            fraction = ""
        sign = "-" if behind or before[:1] in ("-", "\u2212") else ""
        return sign + (digits or "0") + (f".{fraction}" if fraction else "") + exponent

    def _number_fault(self, text: str) -> str:
        ways = [
            f'decimal "{decimal}"' + (f' with thousands "{thousands}"' if thousands else "")
            for decimal, thousands in ((",", None), (",", "."), (".", ","), (",", " "), (".", " "), (".", "'"))
            if Values(decimal=decimal, thousands=thousands).number(text)
        ]
        if ways:
            return f"not a number as the job says; it would be one by {' or by '.join(ways[:2])}"
        if self._is_guess:
            return _GUESSED.format("not a number")
        mark = re.search(r"[^\w .,'()+-]", text.strip())
        reason = f" because of the character {visible(mark[0]).strip('<>') or mark[0]}" if mark else ""
        return f"not a number{reason}; {_OTHERWISE}"

    def _moment(self, text: str) -> str:
        for form in self._values.formats:
            if form == "excel" or form in _EPOCHS:
                moment = None if self._is_guess else _serial(text) if form == "excel" else _since_1970(text, form)
            else:
                moment = _parsed(text, form)
            if moment is not None:
                return self._typed(moment)
        if not self._values.formats or self._values.takes_iso:
            if self.kind == "date" and not self._is_guess and (match := _MIDNIGHT.fullmatch(text)):
                return match[1]
            if self.kind == "timestamptz" and self._values.timezone and re.fullmatch(f"{_TIME}|{_DAY}", text):
                return self._in_zone(text)
            if self._is_plain(text):
                return text
        raise ValueError(self._moment_fault(text))

    def _typed(self, moment: datetime) -> str:
        """The moment as text of this type; raises ValueError where the type would lose a part of it."""
        if self.kind == "date":
            if moment.time() != datetime.min.time():
                raise ValueError(_TIME_IN_DATE)
            return moment.date().isoformat()
        if self.kind == "timestamp" and moment.tzinfo:
            raise ValueError(_ZONE_IN_TIMESTAMP)
        if self.kind == "timestamptz" and not moment.tzinfo:
            if not self._values.timezone:
                raise ValueError(_NO_ZONE)
            return self._in_zone(moment.isoformat(" "))
        return moment.isoformat(" ")

    def _in_zone(self, text: str) -> str:
        """The time with its zone; raises ValueError where the clocks there show it twice, or never."""
        name = str(self._values.timezone)
        readings = set[timedelta | None]()
        with suppress(ValueError):  # PostgreSQL decides about 24:00:00
            moment = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(name))
            readings = {moment.replace(fold=fold).utcoffset() for fold in (0, 1)}
        if len(readings) > 1:
            raise ValueError(_CLOCK_CHANGES)
        return f"{text} {name}"

    def _moment_fault(self, text: str) -> str:
        if re.fullmatch(f"(?:{_TIME}|{_DAY})(?:{_ZONE})?", text) and (
            not self._values.formats or self._values.takes_iso
        ):
            if self.kind == "date":
                return _TIME_IN_DATE
            return _ZONE_IN_TIMESTAMP if self.kind == "timestamp" else _NO_ZONE
        if self._is_guess:
            return _GUESSED.format("not such a date or time as the ones before it")
        if self._values.formats:
            names = " by English names of months" * bool(re.search("%[aAbB]", "".join(self._values.formats)))
            return f"a date or time that no format of date_format reads{names}; {_OTHERWISE}"
        if re.match(rf"{_TIME}[0-9]", text):
            return (
                "a time of more than six digits behind its second, which PostgreSQL has; %f in date_format cuts further"
                " ones, and types can make the column text"
            )
        if re.fullmatch(r"-?[0-9]+(?:\.[0-9]*)?", text):
            forms = '"epoch" or "epoch_ms" since 1970, "%Y%m%d%H%M%S", or "excel" for serial days'
            return f"a number, not a date; date_format should say how it is read, such as {forms}, or types bigint"
        if two := re.match(r"([0-9]{1,2})([./-])([0-9]{1,2})[./-][0-9]{2,4}(?![0-9])", text):
            mark = two[2]
            forms = " or ".join(f'"%{a}{mark}%{b}{mark}%Y"' for a, b in (("d", "m"), ("m", "d")))
            if max(int(two[1]), int(two[3])) <= 12:
                return f"a date that two formats read differently; date_format should say which, such as {forms}"
            return f"a date that is not written as 2026-12-31; date_format should say how, such as {forms}"
        forms = '"%Y/%m/%d" or "%d %b %Y"'
        return f"not a date as 2026-12-31; date_format should say how it is written, such as {forms}, or types text"


_OTHERWISE = "null can list the words for a missing value, and types can make the column text"
_TWO_NUMBERS = 'a number with two readings; decimal "." should say one, or decimal "," with thousands "." the other'
_NO_INTEGER = "types or the table should have numeric, and max_errors rejects rows"
_GUESSED = "{}, but the rows before had only values of this type, so it is a guess; types should say it, such as text"
TEXT_IN_GUESS = _GUESSED.format("a text")
_TIME_IN_DATE = "a time of day that the type date would lose; types or the table should have timestamp"
_ZONE_IN_TIMESTAMP = "a time zone that the type timestamp would lose; types or the table should have timestamptz"
_CLOCK_CHANGES = (
    "a time that the clocks of timezone show twice, or never; types can make it timestamp, and max_errors rejects rows"
)
_NO_CLOCK = {
    "time": "not a time of day alone, as 23:59:59; the type time would lose a day, a zone or digits; types can make it"
    " text",
    "timetz": "not a time of day with its zone, as 23:59:59+01; types can make it time or text",
}
_NO_ZONE = 'a time without its zone; timezone should name it, such as "Europe/Berlin"'


@lru_cache(4_096)
def _parsed(text: str, form: str) -> datetime | None:
    before = form.partition("%f")[0]
    if before != form and (mark := before[-1:]) in (".", ","):  # PostgreSQL has six digits, and would round
        text = re.sub(rf"^((?:[^{mark}]*{re.escape(mark)}){{{before.count(mark)}}}[0-9]{{6}})[0-9]+", r"\1", text)
    try:
        moment = datetime.strptime(text, form)  # noqa: DTZ007 - a zone is in the text, or there is none
    except ValueError:
        return None
    is_whole = not _BESIDE.search(form) or text.lower().startswith(moment.strftime(re.split("%[fz]", form)[0]).lower())
    return moment if is_whole else None


def _serial(text: str) -> datetime | None:
    """The moment of a serial day of Excel, to the millisecond."""
    if not re.fullmatch(r"[0-9]{1,7}(?:\.[0-9]*)?", text) or not _FIRST_SERIAL <= Decimal(text) < 2_958_466:
        return None
    return _EXCEL_EPOCH + timedelta(milliseconds=int((Decimal(text) * 86_400_000).to_integral_value()))


def _since_1970(text: str, form: str) -> datetime | None:
    if re.fullmatch(r"-?[0-9]{1,18}(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?", text):
        with suppress(OverflowError):
            return _EPOCH + timedelta(microseconds=int(Decimal(text) * _EPOCHS[form]))
    return None


# --- inference ---


_GUESSES = ("bigint", "numeric", "date", "timestamp", "timestamp with time zone")
_BIGINT = range(-(2**63), 2**63)


def inferred(names: Sequence[str], rows: Iterable[Sequence[str | None]], values: Values) -> dict[str, str]:
    """PURE: the type of each column, by its values in these rows: a guess that loses nothing, else text.

    A number with zeros in front, an exponent or a plus would not be written back as it was read, so it makes a text.
    Stamps with and without a zone in one column make a text too. Booleans, times and serial days are never guessed.
    """
    guesses = [type_ for type_ in _GUESSES if not (values.timezone and type_ == "timestamp")]
    readers = {type_: Reader(kind_of(type_), values, is_guess=True).read for type_ in guesses}
    left: list[list[str] | None] = [None] * len(names)
    for row in rows:
        for at, text in enumerate(row[: len(names)]):
            if text and (candidates := guesses if left[at] is None else left[at]):
                left[at] = [type_ for type_ in candidates if _fits(text, type_, readers[type_])]
    return {name: types[0] if types else "text" for name, types in zip(names, left, strict=True)}


def _fits(text: str, type_: str, read: Callable[[str], str]) -> bool:
    try:
        value = read(text)
        if type_ in ("bigint", "numeric"):
            return value != "-0" and (type_ == "numeric" or int(value) in _BIGINT)
        moment = re.match(f"{_TIME}|{_DAY}", value)
        return bool(moment and datetime.fromisoformat(moment[0]))
    except ValueError:
        return False
