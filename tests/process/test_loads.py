"""Real files through the HTTP API into tables: what a data engineer does on the first day."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from farming import Farm, until

DATA = Path(__file__).parent.parent / "data"
Api = Callable[..., dict[str, Any]]


class Bank(BaseHTTPRequestHandler):
    """Answers as the Bank of Russia does, from the files."""

    def do_GET(self) -> None:
        day, month, year = parse_qs(urlsplit(self.path).query)["date_req"][0].split("/")
        document = (DATA / "cbr" / f"XML_daily_{year}-{month}-{day}.xml").read_bytes()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(document)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@pytest.fixture
def bank() -> Iterator[str]:
    """The address of a bank."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bank)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/scripts"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def api(farm: Farm, bank: str, free_port: int) -> Api:
    """`dataloader up` on the test's database; call(method, path, body)."""
    farm.start(
        "up",
        app_port=free_port,
        dl_data_dir=DATA,
        cbr_base_url=bank,
        workers_json='[{"queue": "etl.default", "concurrency": 2}]',
    )

    def call(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{free_port}{path}", method=method)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def answers() -> bool:
        try:
            return call("GET", "/health") == {"status": "healthy"}
        except OSError:
            return False

    until(answers, "the API")
    return call


def load(api: Api, task: str, args: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trigger and follow a job; its last status, and the progress that was seen while it ran."""
    body = {"queue": "etl.default", "task": task, "lock_key": task, "args": args}
    job_id = api("POST", "/api/v1/jobs/trigger", body)["job_id"]
    seen, deadline = [], time.monotonic() + 60
    while (status := api("GET", f"/api/v1/jobs/{job_id}/status"))["status"] in ("queued", "running"):
        assert time.monotonic() < deadline, status
        if status["status"] == "running" and status["progress"]:
            seen.append(status["progress"])
    return status, seen


def test_csv_files_are_loaded_twice_and_leave_the_same_rows(farm: Farm, api: Api) -> None:
    wanted = {"runways": (48_184, "id"), "countries": (None, "code")}
    for table, (rows, key) in wanted.items():
        args = {"path": f"ourairports/{table}.csv", "table": table, "key": [key]}
        counts = []
        for _ in range(2):
            status, seen = load(api, "load.csv", args)
            assert status["status"] == "succeeded", status["error"]
            counts.append(farm.rows(f"SELECT count(*) FROM {table}")[0][0])
            assert status["progress"] == {"processed": counts[-1], "total": counts[-1]}
            if rows:
                assert seen, "progress while it runs"
                assert 0 < seen[0]["processed"] <= seen[0]["total"] == rows
        assert counts[0] == counts[1] > 0
        assert rows in (None, counts[0])


def test_rates_are_loaded_to_the_last_digit(farm: Farm, api: Api) -> None:
    for date in ("2021-03-17", "2022-02-04"):
        for _ in range(2):
            assert load(api, "load.cbr.rates", {"date": date})[0]["status"] == "succeeded"
        assert farm.rows("SELECT count(*) FROM cbr_rates WHERE date = %s", date) == [(34,)]
    assert farm.rows("SELECT nominal, value, rate FROM cbr_rates WHERE date = '2022-02-04' AND currency = 'AMD'") == [
        (100, Decimal("15.8597"), Decimal("0.158597"))
    ]


def test_a_bad_file_fails_with_its_line_and_leaves_the_table_alone(farm: Farm, api: Api, tmp_path: Path) -> None:
    status, _ = load(api, "load.csv", {"path": "../process/farming.py", "table": "t", "key": ["id"]})
    assert (status["status"], status["attempt"]) == ("failed", 1)
    assert "below the data folder" in status["error"]
    assert farm.rows("SELECT to_regclass('t')") == [(None,)]
