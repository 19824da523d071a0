"""The pages that show one task of loading each: their code, run as it stands there."""

import json
import re
import shlex
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from judging import Command, Load, Rows
from psycopg.conninfo import make_conninfo

from dataloader.pipelines import register

pytestmark = pytest.mark.usefixtures("own_registry")
DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def words(line: str) -> list[str]:
    """The words behind `dataloader` of a line of a shell."""
    program, *words = shlex.split(line.replace("\\\n", ""))
    assert program == "dataloader"
    return words


def args_of(page: str) -> dict[str, Any]:
    args: dict[str, Any] = json.loads(blocks(page, "json")[0])
    return args


def defined(text: str, **names: Any) -> dict[str, Any]:
    """The names of a block of Python, with `names` as what it does not define itself."""
    exec(text, names := {"__name__": "page"} | names)
    return names


def test_what_is_new_in_another_database(
    job: Load, rows: Rows, command: Command, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DL_SOURCE_CRM", make_conninfo(dsn, options="-c search_path=crm"))
    rows("CREATE SCHEMA crm")
    rows("CREATE TABLE crm.customers (id int, name text, changed_at timestamptz)")
    rows("INSERT INTO crm.customers VALUES (1, 'Ann', '2026-01-31 12:00Z'), (2, 'Bob', '2026-01-31 12:04Z')")
    args = args_of("incremental.md")
    assert job("load.postgres", args).result["processed"] == 2
    rows("INSERT INTO crm.customers VALUES (3, 'Eve', '2026-01-31 12:03Z'), (4, 'Old', '2026-01-30 12:00Z')")
    assert job("load.postgres", args).result["processed"] == 3
    listing, setting, reset = blocks("incremental.md", "bash")[0].splitlines()
    assert "crm:customers" in command(*words(listing)).output
    assert command(*words(setting)).exit_code == 0
    assert job("load.postgres", args).result["processed"] == 3
    assert command(*words(reset)).exit_code == 0
    assert job("load.postgres", args).result["processed"] == 4


def test_a_pipelines_own_state(job: Load, rows: Rows) -> None:
    class Shop:
        def prices(self, since: int | None) -> tuple[list[int], int]:
            return [since or 0], (since or 0) + 1

    def insert(conn: Any, prices: list[int]) -> None:
        conn.execute("CREATE TABLE IF NOT EXISTS prices (n int)")
        conn.execute("INSERT INTO prices VALUES (%s)", prices)

    [text] = blocks("incremental.md", "python")
    load_prices = defined(text, register=register, shop=Shop(), insert=insert)["load_prices"]
    assert [job(load_prices).status for _ in range(2)] == ["succeeded", "succeeded"]
    assert rows("SELECT n FROM prices ORDER BY n") == [(0,), (1,)]


def test_an_api_with_pages_and_429(job: Load, rows: Rows) -> None:
    pipeline, test = blocks("paged-api.md", "python")
    assert len(pipeline.splitlines()) <= 25
    load_orders = defined(pipeline)["load_orders"]
    names = defined(test, load_orders=load_orders)
    names["test_orders_are_loaded"](job)
    assert rows("SELECT id, created FROM orders ORDER BY id") == [
        (n, datetime(2026, 1, 31, 12, tzinfo=UTC)) for n in (1, 2)
    ]
    asked: list[str] = []

    def busy(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["page"])
        assert request.headers["Authorization"] == "Bearer x"
        is_busy = len(asked) in (1, 3)
        return httpx.Response(429, headers={"Retry-After": "9"}) if is_busy else names["answer"](request)

    result = job(load_orders, http=busy, secrets={"shop_token": "x"})
    assert (result.status, asked) == ("succeeded", ["1", "1", "2", "2", "3"])
    assert result.attempts == 2  # the run that had loaded a page has spent none
    assert result.runs[0].error == "shop.example answered 429 and asks for 9 s"


def test_a_dirty_file(job: Load, rows: Rows, command: Command, tmp_path: Path) -> None:
    [report] = blocks("dirty-file.md", "text")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "report.csv").write_text(report, "cp1252")
    [line] = blocks("dirty-file.md", "bash")
    shown = command(*words(line))
    assert shown.exit_code == 0, shown.output
    assert '"Betrag" text' in shown.output
    assert rows("SELECT to_regclass('report')") == [(None,)]
    result = job("load.files", args_of("dirty-file.md"))
    assert result.status == "succeeded", result.error
    got = [(1, Decimal("1234.50"), date(2026, 3, 5)), (2, Decimal("17.00"), None)]
    assert rows("SELECT nr, amount, day FROM report ORDER BY nr") == got


def test_a_folder_of_csv_every_night(
    job: Load, rows: Rows, command: Command, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DL_DB_DSN", dsn)
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "1.csv").write_text("id,price\n1,5\n2,6\n")
    (tmp_path / "orders" / "2.csv").write_text("price,id\n7,2\n8,3\n")
    schedule, backfill = blocks("nightly-files.md", "bash")
    made = command(*(scheduled := words(schedule)), "--direct", "--new")
    assert made.exit_code == 0, made.output
    assert rows("SELECT name FROM dl_schedules") == [("nightly",)]
    assert job("load.files", json.loads(scheduled[scheduled.index("--args") + 1])).status == "succeeded"
    got = [(1, 5, "orders/1.csv"), (2, 7, "orders/2.csv"), (3, 8, "orders/2.csv")]
    assert rows("SELECT id, price, source_file FROM orders ORDER BY id") == got
    filled = words(backfill[backfill.index("dataloader") :])
    made = command(*filled, "--direct", "--new", input="1.csv\n2.csv\n")
    assert made.exit_code == 0, made.output
    rows("TRUNCATE orders")
    each = json.loads(filled[filled.index("--args") + 1])
    for name in ("1.csv", "2.csv"):
        assert job("load.files", each | {"path": f"orders/{name}"}).status == "succeeded"
    assert rows("SELECT id, price FROM orders ORDER BY id") == [(1, 5), (2, 7), (3, 8)]
