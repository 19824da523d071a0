"""`load.cbr.rates`: the Bank of Russia's daily exchange rates into `cbr_rates`.

The pipeline requests a day's rates over HTTP (CBR_BASE_URL), reads the XML, and upserts the rates in one transaction.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Annotated, Any, NamedTuple
from xml.etree import ElementTree as ET

from pydantic import BeforeValidator, Field

from dataloader import config
from dataloader.pipelines import Arguments, Context, PermanentError, http, register, state, validated
from dataloader.pipelines.csv_table import permanent
from dataloader.pipelines.http import Refused, Unreachable
from dataloader.queue import db

_DECIMALS = decimal.Context(prec=28, rounding=decimal.ROUND_HALF_EVEN)  # whatever other code makes of the current one
TIMEOUT = 10.0  # seconds without a byte from the server
_DEADLINE = 60.0  # seconds for the whole answer
_LARGEST_ANSWER = 2**20  # bytes; a day's rates take some 5,000
_AGENT = "dataloader (load.cbr.rates)"

_SQL = db.statements("cbr.sql")


def _day(text: object) -> dt.date:
    # fromisoformat alone would also accept 20210317 and 2021-W11-3.
    if isinstance(text, str) and re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        with suppress(ValueError):
            return dt.date.fromisoformat(text)
    raise ValueError("should be a date of the calendar, as YYYY-MM-DD")


class Wanted(Arguments):
    """The `args` of `load.cbr.rates`; docs/fetch.md explains each."""

    date: Annotated[dt.date, BeforeValidator(_day)]
    currencies: list[Annotated[str, Field(pattern="^[A-Z]{3}$")]] | None = Field(default=None, min_length=1)


class Rate(NamedTuple):
    """One currency on one day: `nominal` units of it cost `value` roubles."""

    day: dt.date
    currency: str
    nominal: int
    value: Decimal

    @property
    def rate(self) -> Decimal:
        """Roubles for one unit: exact where the nominal is a power of ten, else to 28 digits."""
        return _DECIMALS.divide(self.value, self.nominal)


@register("load.cbr.rates")
def load_cbr_rates(args: dict[str, Any], context: Context) -> Iterator[dict[str, Any] | None]:
    """Write the rates in force on `date` into `cbr_rates`, under the date in the bank's answer.

    A second run changes nothing. After a timeout, a lost connection, 429, 5xx or a cut-off answer the farm tries
    again. A wrong argument, any other refusal and any other document raise PermanentError.
    """
    wanted = validated(Wanted, args)
    base = config.load().cbr_base_url.rstrip("/")
    script = base if base.endswith(".asp") else f"{base}/XML_daily.asp"
    rates = read(_fetched(f"{script}?date_req={wanted.date:%d/%m/%Y}", context))
    if wanted.currencies is not None:
        if unknown := sorted(set(wanted.currencies) - {rate.currency for rate in rates}):
            raise PermanentError(f"currencies: {', '.join(unknown)} should be among the rates of {rates[0].day}")
        rates = [rate for rate in rates if rate.currency in wanted.currencies]
    with permanent("cbr_rates", "cbr_rates"), context.transaction() as conn:
        [found] = _SQL.rows(conn, "is_there")
        if not found["is_there"]:
            state.create(conn, _SQL["create"])
        conn.cursor().executemany(_SQL["upsert"].encode(), [(*rate, rate.rate) for rate in rates])
        yield {"processed": len(rates), "total": len(rates)}


def read(document: bytes) -> list[Rate]:
    """The rates in one answer of the bank.

    Raises Unreachable for a document that was cut off, PermanentError for a document that is no list of rates.
    """
    # Entities could make a small document grow without bounds. Without its zero bytes UTF-16 reads as ASCII here.
    if b"<!DOCTYPE" in document.replace(b"\0", b""):
        raise PermanentError("the answer should have no DOCTYPE")
    try:
        root = ET.fromstring(document)  # noqa: S314  see above
    except (ET.ParseError, LookupError, ValueError):
        begun = b"<?xml".startswith(document[:5]) or b"<ValCurs" in document
        if begun and not document.rstrip().endswith(b"</ValCurs>"):
            raise Unreachable("the answer was cut off") from None
        root = ET.Element("")
    if root.tag != "ValCurs":
        raise PermanentError("the answer should be a ValCurs document")
    try:
        day = dt.datetime.strptime(root.get("Date", ""), "%d.%m.%Y").date()  # noqa: DTZ007  a day has no zone
    except ValueError:
        raise PermanentError("the answer's Date should be DD.MM.YYYY; are there rates for this day?") from None
    if rates := [_rate(day, element) for element in root.iter("Valute")]:
        return rates
    raise PermanentError("the answer has no rates")


def _rate(day: dt.date, element: ET.Element) -> Rate:
    code, nominal, value = (element.findtext(tag, "").strip() for tag in ("CharCode", "Nominal", "Value"))
    if not re.fullmatch("[A-Z]{3}", code):
        raise PermanentError("the answer has a currency without its code of three letters")
    if not re.fullmatch("0*[1-9][0-9]{0,8}", nominal):
        raise PermanentError(f"the answer's Nominal of {code} should be a whole number")
    if not re.fullmatch("[0-9]{1,15}(,[0-9]{1,10})?", value):
        raise PermanentError(f"the answer's Value of {code} should be a number with a decimal comma")
    return Rate(day, code, int(nominal), Decimal(value.replace(",", ".")))


def _fetched(url: str, context: Context) -> bytes:
    times = http.Times(TIMEOUT, TIMEOUT, _DEADLINE)
    try:
        with http.get(url, times, {"User-Agent": _AGENT}, check=context.check, is_one_server=True) as answer:
            if answer.status == 200:
                return answer.content(_LARGEST_ANSWER)
            answer.require_final()
            raise PermanentError(f"{answer.name} answered {answer.status}")
    except Refused as e:
        raise PermanentError(f"{e}; CBR_BASE_URL should name the right one") from None
