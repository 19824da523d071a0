"""`capacity`: what one primary bears, from costs measured on the user's own database."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dataloader.cli import base


@click.group(cls=base.Group)
def commands() -> None:
    """Forecasts."""


@commands.command(examples=["dataloader capacity", "dataloader capacity --jobs-per-day 50000 --run-sec 90 --check"])
@click.option("--jobs-per-day", type=base.Number(0, 1e9, min_open=True), help="default: of the farm's last week")
@click.option("--run-sec", type=base.Number(0, 1e6), help="mean seconds of a run; default: of the farm's last week")
@click.option(
    "--peak", type=base.Number(1, 10_000), help="the busiest hour's rate beside the mean; default: as above, or 4"
)
@click.option("--in-batches", is_flag=True, help="jobs are triggered and claimed many at a time")
@click.option("--workers-per-host", type=click.IntRange(1), help="default: those of WORKERS_JSON")
@click.option("--retention-days", type=base.Number(0, 36_500), help="default: DL_RETENTION_DAYS, or 30")
@click.option("--cores", type=click.IntRange(1), help="processors of the server, where it is not on this machine")
@click.option("--check", is_flag=True, help="also compare predictions with runs: some three minutes more")
@click.option("--costs", "costs_path", metavar="FILE", help="take the costs of a former --json instead of measuring")
@click.option("--json", "json_path", metavar="FILE", help="also write the forecast as JSON; - is stdout")
@click.option("--dsn", help="a database to measure in; default: the configured one, or an embedded PostgreSQL")
@click.option("--scale", type=base.Number(0, 100, min_open=True), default=1.0, help="multiplies all sizes")
def capacity(
    jobs_per_day: float | None,
    run_sec: float | None,
    peak: float | None,
    in_batches: bool,
    workers_per_host: int | None,
    retention_days: float | None,
    cores: int | None,
    check: bool,
    costs_path: str | None,
    json_path: str | None,
    dsn: str | None,
    scale: float,
) -> None:
    """Say what one primary bears, and what breaks first at 10, 100 and 1,000 times the load.

    The costs come from a bench of a minute in schemas of its own, which are dropped at the end.
    """
    from dataloader.bench import forecast

    base.check_writable(json_path)
    settings = base.settings_with(dsn)
    try:
        found = forecast.read_file(Path(costs_path)) if costs_path else None
    except (OSError, ValueError) as e:
        raise click.BadParameter(f"{costs_path}: {e}", param_hint="--costs") from None
    wish = forecast.Wish(jobs_per_day, run_sec, peak, in_batches, workers_per_host, retention_days)
    sys.exit(forecast.run(settings, wish, cores, check, found, scale, json_path))
