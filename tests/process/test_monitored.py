"""A real Prometheus scrapes a farm: every panel of the Grafana dashboard has figures, every alert rule is evaluated."""

import json
import math
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from farming import Farm, free_port, until

from dataloader.queue import operations

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = shutil.which("prometheus")
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dataloader.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {f"{panel['title']}: {target['expr']}": target["expr"] for panel in PANELS for target in panel["targets"]}
# What Grafana puts in for its variables.
VARIABLES = {"$queue": ".*", "$__rate_interval": "1m"}
pytestmark = pytest.mark.skipif(not PROMETHEUS, reason="prometheus (Debian package prometheus) is not installed")


class Prometheus:
    """A Prometheus with the shipped configuration and rules; only times and ports are the test's."""

    def __init__(self, folder: Path, target: int) -> None:
        self.port = free_port()
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
        (job,) = config["scrape_configs"]
        job |= {
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "static_configs": [{"targets": [f"localhost:{target}"]}],
        }
        config["global"] = {"evaluation_interval": "1s"}
        (folder / "prometheus.yaml").write_text(json.dumps(config))
        shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", folder)
        command = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb"]
        with (folder / "prometheus.log").open("wb") as out:
            self.process = subprocess.Popen(
                [str(PROMETHEUS), *command, f"--web.listen-address=127.0.0.1:{self.port}"], stdout=out, stderr=out
            )

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        try:
            return bool(self.ask("query", query="up")["result"])
        except OSError:
            return False

    def has_figures(self, expression: str) -> bool:
        """Whether the answer has a series with a number that is one."""
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        return any(math.isfinite(float(each["value"][1])) for each in self.ask("query", query=expression)["result"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@pytest.fixture
def prometheus(farm: Farm, tmp_path: Path) -> Iterator[Prometheus]:
    port = free_port()
    farm.start("api", app_port=port)
    farm.start("reaper")
    farm.ready(workers=2)
    (tmp_path / "monitor").mkdir()
    made = Prometheus(tmp_path / "monitor", port)
    yield made
    made.stop()


@pytest.mark.long
def test_every_panel_has_figures_and_no_rule_fails(farm: Farm, prometheus: Prometheus) -> None:
    until(prometheus.is_ready, "Prometheus and its first scrape")
    operations.set_limit(farm.conn, "source", by="test", most=1)
    missing = dict(EXPRESSIONS)

    def all_have_figures() -> bool:
        """Ask again for those without, while jobs come and end: a rate has to see them come."""
        farm.enqueue("noop", limits=["source"])
        for name in [name for name, expression in missing.items() if prometheus.has_figures(expression)]:
            del missing[name]
        return not missing

    try:
        until(all_have_figures, "figures in every panel")
    except AssertionError:
        raise AssertionError(f"without figures: {missing}") from None
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(re.findall("- alert: ", (DEPLOY / "prometheus" / "alerts.yaml").read_text()))
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
