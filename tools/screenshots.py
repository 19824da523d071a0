"""The pictures in docs/screenshots, of a running farm: `python -m tools.screenshots [NAME ...]`.

The program starts a PostgreSQL of its own, and workers, reaper and API as real processes. The chart's half hour before
their start is made up. The program needs chromium, playwright and pillow.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from io import BytesIO
from typing import Any
from uuid import UUID

from farming import Farm, until
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from dataloader.queue import operations
from dataloader.queue.plans import backfills, new_backfill, new_schedule, schedules
from dataloader.queue.reports import webhooks
from tools.farms import farm
from tools.programs import CHECKOUT

OUT = CHECKOUT / "docs" / "screenshots"
PORT = 18_099
ADDRESS = f"http://127.0.0.1:{PORT}"
STATES = ("new", "paid", "packed", "sent")  # of an order; a message for each
LIMIT = 150_000  # bytes of a picture
BEFORE = """
INSERT INTO dl_pace (at, queue, processed, failed)
SELECT to_timestamp(floor(extract(epoch FROM now()) / 10) * 10 - n * 10), 'load.orders',
       greatest(0, (14 + 9 * sin(n / 14.0) + 5 * random())::int), (random() * random() * 1.4)::int
  FROM generate_series(6, 185) n ON CONFLICT DO NOTHING
"""


# Somebody has deleted the jobs of some days before their end.
DELETED = "DELETE FROM dl_jobs WHERE task = 'load.rates' AND partition_key BETWEEN '2026-11-02' AND '2026-11-08'"
FILLED = """
SELECT FROM dl_jobs WHERE task = 'load.rates'
HAVING count(*) FILTER (WHERE partition_key < '2026-10' AND finished_at IS NULL) = 0
   AND count(*) FILTER (WHERE status = 'running') = 3
"""


class Show:
    """A farm with load, and the jobs of the pictures."""

    def __init__(self, farm: Farm) -> None:
        self.farm = farm
        farm.conn.execute(BEFORE)
        # Stacks show these links in place of the paths of this checkout.
        (farm.folder / "dataloader").symlink_to(CHECKOUT / "dataloader")
        (farm.folder / "etl").symlink_to(CHECKOUT / "tools")
        how: dict[str, Any] = {
            "dl_pipelines": "screenshot_pipelines",
            "pythonpath": farm.folder / "etl",
            "cwd": farm.folder,
        }
        farm.start("reaper", **how)
        for queue, workers in (("load.orders", 4), ("load.customers", 2), ("report.daily", 1), ("load.rates", 3)):
            farm.start("workers", workers=workers, queue=queue, dl_heartbeat_sec=1, **how)
        operations.set_order(farm.conn, "shop.orders", "token anna from 10.0.4.17", ordered=True)
        farm.start("workers", workers=2, queue="shop.orders", dl_heartbeat_sec=1, **how)
        farm.start("api", app_port=PORT, app_host="127.0.0.1", environment="production", timezone="Europe/Berlin")
        self.dead = self._dead()
        self._orders()
        self.running = self.job("load.orders", rows=9_000_000, rows_a_second=60_000, key="orders/all")
        farm.begun(self.running)
        self.waiting = self.job("load.orders", rows=1_200_000, key="orders/all")
        for number in range(60):
            rows = 400_000 + 130_000 * (number % 7)
            self.job("load.orders", f"orders/part-{number:02}", rows=rows, rows_a_second=150_000)
            self.job("report.daily", f"report/{number:02}", attempts=1 if number == 4 else 4, number=number)
        for hour in range(5):
            self.job("load.customers", "customers/all", rows=4_000_000, region="all", available_at=_in(hours=hour + 1))
        for region in ("north", "east", "west"):
            self.job("load.customers", f"customers/{region}", rows=4_000_000, region=region)
        self.report = self.job("report.monthly", number=1, depends_on=[self.running, self.waiting])
        self._plans()
        operations.pause(farm.conn, "report.monthly", "token anna from 10.0.4.17")

    def job(self, task: str, key: str = "", attempts: int = 4, **args: Any) -> UUID:
        """Add a job to the queue of its task's name."""
        more = {name: args.pop(name, None) for name in ("available_at", "depends_on")}
        more |= {"max_attempts": attempts, "producer": "airflow"}
        args = {"source": f"s3://lake/{task}/", "api_key": "canary"} | args
        return self.farm.enqueue(task, task, key, args=args, partition_key="2026-11", **more)

    def _plans(self) -> None:
        """Schedules, a limit, a webhook, and a backfill with partitions of every status."""
        conn, by = self.farm.conn, "token anna from 10.0.4.17"
        for name, cron in (("report.daily", "0 3 * * MON-FRI"), ("report.monthly", "0 6 1 * *")):
            fields = {"name": name, "task": name, "queue": name, "cron": cron, "args": {"day": "{{ date }}"}}
            schedules.add(conn, new_schedule.checked(fields, "Europe/Berlin"), by)
        operations.set_limit(conn, "source:oracle", by, most=3, per_minute=60)
        webhooks.put(conn, "ops", "https://ops.example/alerts", by, kinds=["dead", "lag"])
        fields = {"name": "rates-2026", "task": "load.rates", "queue": "load.rates", "max_running": 3}
        fields |= {"since": "2026-01-01", "until": "2026-11-20", "step": "day", "priority": "{{ place }}"}
        fields |= {"args": {"date": "{{ date }}", "day": "{{ day }}", "month": "{{ month }}"}}
        backfills.add(conn, new_backfill.checked(fields), by)
        until(lambda: self.farm.rows("SELECT FROM dl_backfills WHERE made = total"), "the jobs of the backfill", 120)
        conn.execute(DELETED)

    def _orders(self) -> None:
        """Messages about orders: one waits for its retry behind a dead message, two orders run, the others wait."""
        self._messages(1042, 4)
        until(lambda: self.farm.rows("SELECT FROM dl_jobs WHERE lock_key = 'order-1042' AND attempt = 2"))
        for number in range(1043, 1064):
            self._messages(number, 1 + number % len(STATES))

    def _messages(self, order: int, count: int) -> None:
        for version, state in enumerate(STATES[:count], start=1):
            args = {"order": order, "version": version, "state": state}
            self.farm.enqueue("shop.orders", "shop.orders", f"order-{order}", args=args, score=version, producer="shop")

    def settle(self) -> None:
        """Wait until some reports have failed and the dashboard shows the workers."""
        until(lambda: self.farm.rows("SELECT FROM dl_jobs WHERE queue = 'report.daily' AND attempt > 0 AND error > ''"))
        until(lambda: self.farm.rows(FILLED), "the backfill's days before October", 120)
        time.sleep(12)  # the reaper has aggregated the throughput of these seconds

    def _dead(self) -> UUID:
        """Run a job with a first attempt that ends by SIGKILL, and a second with an error."""
        job_id = self.job("load.customers", "customers/south", attempts=2, rows=60_000, region="south")
        self.farm.wait(job_id, "failed")
        return job_id


def _in(**time_: float) -> datetime:
    return datetime.now(UTC) + timedelta(**time_)


def take(browser: Browser, show: Show, names: Collection[str]) -> None:
    """Take these pictures, or all."""
    shots = [
        ("overview", "/", {}),
        ("overview-dark", "/", {"color_scheme": "dark"}),
        ("postgres", "/postgres", {}),
        ("overview-phone", "/", {"viewport": {"width": 375, "height": 812}}),
        ("job-running", f"/jobs/{show.running}", {}),
        ("job-waiting", f"/jobs/{show.waiting}", {}),
        ("job-dead", f"/jobs/{show.dead}", {}),
        ("job-phone-dark", f"/jobs/{show.dead}", {"viewport": {"width": 375, "height": 812}, "color_scheme": "dark"}),
        ("jobs", "/jobs?queue=load.orders", {}),
        ("queue", "/queues/report.daily", {}),
        ("queue-ordered", "/queues/shop.orders", {}),
        ("backfill", "/backfills/rates-2026", {}),
        ("schedules", "/schedules", {}),
        ("limits", "/limits", {}),
        ("webhooks", "/webhooks", {}),
        ("family", f"/jobs/{show.report}", {}),
        ("key", "/key?queue=shop.orders&lock_key=order-1042", {}),
    ]
    for name, path, how in shots:
        if names and name not in names:
            continue
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | how))
        page = context.new_page()
        page.goto(ADDRESS + path)
        page.wait_for_timeout(2_500)  # one refresh
        height = page.evaluate("document.documentElement.scrollHeight")
        width = page.evaluate("innerWidth")
        page.set_viewport_size({"width": width, "height": min(height, 1_240 if width > 500 else 1_400)})
        picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
        picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE).save(
            OUT / f"{name}.png", optimize=True
        )
        size = (OUT / f"{name}.png").stat().st_size
        print(f"{name}.png {math.ceil(size / 1_000)} KB{'  TOO LARGE' if size > LIMIT else ''}")
        context.close()


def main() -> None:
    """Start the farm, wait for its jobs, take the pictures."""
    OUT.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or sys.exit("no chromium here: apt-get install chromium")
    with farm() as (running, _), sync_playwright() as driver:
        show = Show(running)
        show.settle()
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take(browser, show, sys.argv[1:])
        browser.close()


if __name__ == "__main__":
    main()
