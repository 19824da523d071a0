"""The alert rules of deploy/prometheus, evaluated by promtool: each fires in its case, and in no other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROMTOOL = shutil.which("promtool")
ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DONE = 'dl_job_steps_total{queue="q",task="t",step="done"}'
LEASE = 'dl_job_steps_total{queue="q",task="t",step="lease"}'
BACKOFF = 'dl_job_steps_total{queue="q",task="t",step="backoff"}'
FAILED = 'dl_job_steps_total{queue="q",task="t",step="failed"}'
OK_200 = 'dl_http_requests_total{instance="farm1:8081",pid="1",method="GET",route="/",status="200"}'
ERROR_503 = 'dl_http_requests_total{instance="farm1:8081",pid="1",method="GET",route="/",status="503"}'
Q, QT = {"queue": "q"}, {"queue": "q", "task": "t"}
# A healthy farm: a sample a minute for six hours.
WELL = {
    'up{job="dataloader",instance="farm1:8081"}': "1x360",
    "dl_scrape_error": "0x360",
    'dl_jobs{queue="q",status="queued"}': "10x360",
    'dl_jobs{queue="q",status="dead"}': "3x360",
    'dl_jobs_scheduled{queue="q"}': "2x360",
    'dl_queue_lag_seconds{queue="q"}': "5x360",
    'dl_queue_paused{queue="q"}': "0x360",
    'dl_queue_max_length{queue="q"}': "1000x360",
    'dl_workers{queue="q",state="idle"}': "1x360",
    DONE: "0+60x360",
    FAILED: "0+1x360",
    LEASE: "0x360",
    BACKOFF: "0+1x360",
    'dl_worker_memory_bytes{queue="q",host="vm",pid="7"}': "1e8x360",
    "dl_postgres_vacuum_held_back": "1x360",
    "dl_postgres_oldest_transaction_seconds": "20000x360",
    "dl_postgres_vacuum_slows_claims": "0x360",
    "dl_postgres_notify_usage_ratio": "0x360",
    "dl_postgres_connections": "20x360",
    "dl_postgres_max_connections": "100x360",
    OK_200: "0+100x360",
    ERROR_503: "0+1x360",
}
# Per alert: the differences to WELL from the second hour on, the time when the alert has to fire, and its labels.
ILL: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "ApiDown": ({'up{job="dataloader",instance="farm1:8081"}': "1x60 0x60"}, "65m",
                {"job": "dataloader", "instance": "farm1:8081"}),
    "DatabaseNotReadable": ({"dl_scrape_error": "0x60 1x60"}, "65m", {}),
    "JobsWait": ({'dl_queue_lag_seconds{queue="q"}': "5x60 700x60"}, "70m", Q),
    "NoWorker": ({'dl_workers{queue="q",state="idle"}': "1x60 _x60"}, "72m", Q),
    "PausedForLong": ({'dl_queue_paused{queue="q"}': "0x60 1x300"}, "305m", Q),
    "QueueNearlyFull": ({'dl_jobs{queue="q",status="queued"}': "10x60 950x60"}, "65m", Q),
    "ManyFailures": ({FAILED: "0+1x60 80+20x60"}, "90m", Q),
    "DeadJobs": ({'dl_jobs{queue="q",status="dead"}': "3x60 20x60"}, "65m", Q),
    "LeasesLost": ({LEASE: "0x60 1x60"}, "62m", QT),
    "KeysHeldByOthers": ({BACKOFF: "0+1x60 70+10x100"}, "120m", QT),
    "WorkerLarge": ({'dl_worker_memory_bytes{queue="q",host="vm",pid="7"}': "1e8x60 5e9x60"}, "75m",
                    {"host": "vm", "pid": "7"}),
    "VacuumHeldBack": ({"dl_postgres_vacuum_slows_claims": "0x60 1x60"}, "63m", {}),
    "NotificationsPileUp": ({"dl_postgres_notify_usage_ratio": "0x60 0.3x60"}, "62m", {}),
    "ConnectionsNearlyUsed": ({"dl_postgres_connections": "20x60 95x60"}, "70m", {}),
    "ApiFails": ({ERROR_503: "0+1x60 70+50x60"}, "80m", {"instance": "farm1:8081"}),
}  # fmt: skip
pytestmark = pytest.mark.skipif(not PROMTOOL, reason="promtool (Debian package prometheus) is not installed")


NAMES = re.findall(r"- alert: (\w+)", RULES.read_text())


def promtool(*words: str | Path) -> str:
    done = subprocess.run([str(PROMTOOL), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _case(series: dict[str, str], at: str, expected: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": at, "alertname": name, "exp_alerts": alerts} for name, alerts in expected.items()
        ],
    }


def test_the_rules_are_rules() -> None:
    assert f"{len(NAMES)} rules found" in promtool("check", "rules", RULES)


def test_each_alert_fires_when_it_should_and_no_other_does(tmp_path: Path) -> None:
    """No alert fires on a healthy farm. An alert without a case here fails the test."""
    assert sorted(NAMES) == sorted(ILL)
    well = _case(WELL, "120m", {name: [] for name in ILL})
    ill = [
        _case(WELL | changes, at, {name: [{"exp_labels": labels}] if name == alert else [] for name in ILL})
        for alert, (changes, at, labels) in ILL.items()
    ]
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [well, *ill]}
    (tmp_path / "tests.yml").write_text(json.dumps(document))
    promtool("test", "rules", tmp_path / "tests.yml")


def test_the_page_names_every_alert() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8").partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == NAMES
