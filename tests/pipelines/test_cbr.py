"""The promises of `load.cbr.rates`, against a server with answers of the Bank of Russia."""

import datetime as dt
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, Decimal, localcontext
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from judging import Rows, Run
from serving import Handler, Server

from dataloader.pipelines import PermanentError, cbr, http

ANSWERS = Path(__file__).parent.parent / "data" / "cbr"
DAY = "2021-03-17"
Refused = Callable[..., str]
HEAD = '<?xml version="1.0" encoding="windows-1251"?><ValCurs Date="17.03.2021" name="x">'


@dataclass
class Bank:
    base: str = ""
    status: int = 200
    body: bytes | None = None  # replaces the file of the requested day
    headers: dict[str, str] = field(default_factory=dict)
    moved: str = ""  # the target of a redirect from an address with /moved
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def answer(self, path: str) -> bytes:
        if self.body is not None:
            return self.body
        day, month, year = parse_qs(urlsplit(path).query)["date_req"][0].split("/")
        return (ANSWERS / f"XML_daily_{year}-{month}-{day}.xml").read_bytes()


@pytest.fixture
def bank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bank]:
    """A server on a free port, with CBR_BASE_URL set to it."""
    bank = Bank()

    class Answers(Handler):
        def do_GET(self) -> None:
            bank.asked.append((self.path, self.headers["User-Agent"]))
            if "/moved" in self.path:
                self.answer(302, headers={"Location": bank.moved})
            else:
                self.answer(bank.status, bank.answer(self.path), bank.headers)

    with closing(Server(Answers)) as server:
        bank.base = f"{server.url}/scripts"
        monkeypatch.setenv("CBR_BASE_URL", bank.base)
        yield bank


@pytest.fixture
def permanent(run: Run, bank: Bank) -> Refused:
    def permanent(**args: Any) -> str:
        with pytest.raises(PermanentError) as caught:
            run("load.cbr.rates", **({"date": DAY} | args))
        return str(caught.value)

    return permanent


def valute(code: str = "USD", nominal: str = "1", value: str = "1,0") -> bytes:
    fields = f"<CharCode>{code}</CharCode><Nominal>{nominal}</Nominal><Value>{value}</Value>"
    return f"{HEAD}<Valute>{fields}</Valute></ValCurs>".encode("cp1251")


@pytest.mark.parametrize(("date", "asked"), [("2021-03-17", "17/03/2021"), ("2022-02-04", "04/02/2022")])
def test_a_day(date: str, asked: str, run: Run, rows: Rows, bank: Bank) -> None:
    assert run("load.cbr.rates", date=date)[-1] == {"processed": 34, "total": 34}
    assert rows("SELECT count(*), min(date)::text, max(date)::text FROM cbr_rates") == [(34, date, date)]
    assert rows("SELECT count(*) FROM cbr_rates WHERE rate * nominal = value") == [(34,)]
    [(path, agent)] = bank.asked
    assert path == f"/scripts/XML_daily.asp?date_req={asked}"
    assert agent
    assert agent.startswith("dataloader")


def test_nominals_are_divided_exactly(run: Run, rows: Rows, bank: Bank) -> None:
    bank.body = valute("AMD", "100", "15,8597")
    run("load.cbr.rates", date=DAY)
    query = "SELECT currency, nominal, value, rate FROM cbr_rates"
    assert rows(query) == [("AMD", 100, Decimal("15.8597"), Decimal("0.158597"))]
    bank.body = valute("AMD", "10000", "15,8597")
    run("load.cbr.rates", date=DAY)
    assert rows(query) == [("AMD", 10_000, Decimal("15.8597"), Decimal("0.00158597"))]


def test_a_second_run_rewrites_only_what_changed(run: Run, rows: Rows, bank: Bank) -> None:
    run("load.cbr.rates", date=DAY)
    versions = rows("SELECT currency, xmin, updated_at FROM cbr_rates ORDER BY 1")
    run("load.cbr.rates", date=DAY)
    assert rows("SELECT currency, xmin, updated_at FROM cbr_rates ORDER BY 1") == versions
    rows("UPDATE cbr_rates SET value = 0 WHERE currency = 'USD'")
    run("load.cbr.rates", date=DAY)
    after = rows("SELECT currency, xmin, updated_at FROM cbr_rates ORDER BY 1")
    assert [new[0] for old, new in zip(versions, after, strict=True) if old[2] != new[2]] == ["USD"]


def test_chosen_currencies(run: Run, rows: Rows, bank: Bank) -> None:
    run("load.cbr.rates", date=DAY, currencies=["USD", "AMD", "USD"])
    assert rows("SELECT currency, nominal FROM cbr_rates ORDER BY 1") == [("AMD", 100), ("USD", 1)]


def test_rates_are_stored_under_the_documents_date(run: Run, rows: Rows, bank: Bank) -> None:
    bank.body = valute()
    run("load.cbr.rates", date="2021-03-21")
    assert rows("SELECT date::text FROM cbr_rates") == [(DAY,)]


def test_a_base_that_names_the_script(run: Run, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBR_BASE_URL", f"{bank.base}/other.asp")
    run("load.cbr.rates", date=DAY)
    monkeypatch.setenv("CBR_BASE_URL", f"{bank.base}/")
    run("load.cbr.rates", date=DAY)
    assert [path.split("?")[0] for path, _ in bank.asked] == ["/scripts/other.asp", "/scripts/XML_daily.asp"]


@pytest.mark.parametrize(("kind", "status"), [(http.Unreachable, 429), (http.Unreachable, 500), (PermanentError, 404)])
def test_which_statuses_are_tried_again(kind: type[Exception], status: int, run: Run, bank: Bank) -> None:
    bank.status = status
    with pytest.raises(kind, match=str(status)):
        run("load.cbr.rates", date=DAY)


def test_answers_that_were_cut_off(run: Run, bank: Bank, rows: Rows) -> None:
    whole = (ANSWERS / f"XML_daily_{DAY}.xml").read_bytes()
    for size in (0, 3, 60, len(whole) // 2, len(whole) - 1):
        bank.body = whole[:size]
        with pytest.raises(http.Unreachable, match="cut off"):
            run("load.cbr.rates", date=DAY)
        bank.headers = {"Content-Length": str(len(whole))}
        with pytest.raises(http.Unreachable, match=f"broke the connection after {size} of {len(whole)} bytes"):
            run("load.cbr.rates", date=DAY)
        bank.headers = {}
    assert rows("SELECT to_regclass('cbr_rates')") == [(None,)]


def test_another_server_is_not_asked(permanent: Refused, bank: Bank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.2)
        port = other.getsockname()[1]
        another, no_url = "to another server", "to what is no plain URL of http or https"
        hosts = {f"127.0.0.1:{port}": another, f"localhost:{port}": another}
        hosts |= {f"u:p@127.0.0.1:{port}": no_url, "127.0.0.1:x": no_url, bank.base[7:]: "more than 5 times"}
        for host, reason in hosts.items():
            bank.status, bank.body, bank.headers = 302, b"", {"Location": f"http://{host}/XML_daily.asp"}
            assert f"{reason}; CBR_BASE_URL should name the right one" in permanent()
        with pytest.raises(TimeoutError):
            other.accept()


def test_a_redirect_within_the_server_is_followed(run: Run, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBR_BASE_URL", bank.base + "/moved")
    bank.moved = "/scripts/XML_daily.asp?date_req=17/03/2021"
    assert run("load.cbr.rates", date=DAY)[-1] == {"processed": 34, "total": 34}
    assert [path for path, _ in bank.asked] == ["/scripts/moved/XML_daily.asp?date_req=17/03/2021", bank.moved]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html><body>Sorry</body></html>", "should be a ValCurs document"),
        (b"Sorry", "should be a ValCurs document"),
        (b'<?xml version="1.0" encoding="no-such"?><ValCurs></ValCurs>', "should be a ValCurs document"),
        (b'<ValCurs Date="" name="x">Error in parameters</ValCurs>', "Date should be DD.MM.YYYY"),
        (b"<ValCurs></ValCurs>", "Date should be DD.MM.YYYY"),
        (b'<ValCurs Date="17.03.2021"/>', "no rates"),
        (b'<!DOCTYPE x [<!ENTITY a "aa">]><ValCurs Date="17.03.2021">&a;</ValCurs>', "no DOCTYPE"),
        (valute(code=""), "code of three letters"),
        (valute(nominal="0"), "Nominal of USD"),
        (valute(nominal="1.5"), "Nominal of USD"),
        (valute(value="1.5"), "Value of USD"),
        (valute(value="1 000,5"), "Value of USD"),
        (valute(value="NaN"), "Value of USD"),
        (b" " * (2**20 + 1), "has answered with more than 1048576 bytes; CBR_BASE_URL should name the right one"),
    ],
)
def test_documents_that_are_not_understood(
    body: bytes, reason: str, permanent: Refused, bank: Bank, rows: Rows
) -> None:
    bank.body = body
    assert reason in permanent()
    assert rows("SELECT to_regclass('cbr_rates')") == [(None,)]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"date": "17.03.2021"}, "date: should be a date of the calendar, as YYYY-MM-DD"),
        ({"date": "2021-02-30"}, "date: should be a date of the calendar"),
        ({"date": 20210317}, "date: should be a date of the calendar, as YYYY-MM-DD"),
        ({"currencies": "USD"}, "currencies: "),
        ({"currencies": ["usd"]}, "currencies.0: "),
        ({"colour": 1}, "colour: there is no such argument; there are date, currencies"),
        ({"currencies": ["USD", "XXX"]}, "currencies: XXX should be among the rates of 2021-03-17"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], reason: str, permanent: Refused) -> None:
    assert permanent(**args).startswith(reason)


def test_a_changed_decimal_context_rounds_no_rate() -> None:
    rate = cbr.Rate(dt.date(2026, 1, 31), "CNY", 10, Decimal("112.4567"))
    with localcontext(prec=4, rounding=ROUND_DOWN):
        assert rate.rate == Decimal("11.24567")
