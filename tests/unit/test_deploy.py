"""The files of deploy/: units that systemd takes, manifests that fit Kubernetes' schemas, times that fit the drain;
locked libraries, and alert rules of which each fires in its case."""

import configparser
import json
import re
import shutil
import subprocess
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dataloader.config import Settings
from dataloader.farm.supervisor import KEEPER_STOP_SEC

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
GRACEFUL_TIMEOUT = 30  # seconds, of gunicorn
MOST_EXPOSED = 2.0  # of 10, by systemd-analyze security
# Units of systemd itself that ours, and a service as such, name.
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "multi-user")
VERSIONS = ("1.29", "1.37")  # of Kubernetes, the oldest and the newest that the manifests are checked for
needs_systemd = pytest.mark.skipif(not ANALYZE, reason="systemd-analyze (Debian package systemd) is not installed")


def stop_needs() -> dict[str, float]:
    default = {name: field.default for name, field in Settings.model_fields.items()}
    drain = default["dl_drain_sec"] + default["dl_kill_grace_sec"] + KEEPER_STOP_SEC
    return {"workers": drain, "reaper": 30, "api": GRACEFUL_TIMEOUT}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine on which the units are installed, with the programs and targets that they name."""
    units = tmp_path / "etc/systemd/system"
    shutil.copytree(DEPLOY / "systemd", units)
    for target in TARGETS:
        (units / f"{target}.target").write_text("[Unit]\n")
    for program in ("opt/dataloader/.venv/bin/dataloader", "bin/kill"):
        file = tmp_path / program
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    return tmp_path


def instance(unit: Path) -> str:
    return unit.name.replace("@", "@main")


def analyze(root: Path, *words: str) -> str:
    done = subprocess.run(
        [str(ANALYZE), f"--root={root}", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_systemd
def test_systemd_takes_the_units(root: Path) -> None:
    output = analyze(root, "verify", "--man=no", *map(instance, UNITS))
    assert output == ""


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_units_have_few_rights(unit: Path, root: Path) -> None:
    output = analyze(root, "security", "--offline=true", "--no-pager", instance(unit))
    (score,) = re.findall(r"exposure level for \S+: ([\d.]+)", output)
    assert float(score) <= MOST_EXPOSED


def test_the_units_wait_for_a_stop() -> None:
    waits = {}
    for unit in UNITS:
        read = configparser.ConfigParser(strict=False, interpolation=None)
        read.optionxform = str  # type: ignore[assignment,method-assign]
        read.read(unit)
        waits[unit.stem.removeprefix("dataloader-").rstrip("@")] = read["Service"].get("TimeoutStopSec", "0")
    assert [name for name, least in stop_needs().items() if float(waits[name]) <= least] == []
    common = (DEPLOY / "systemd" / "dataloader-.service.d" / "common.conf").read_text()
    assert "\nKillMode=mixed\n" in common, "the parent alone is told: it tells its children once"


MANIFESTS = [
    document
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    if file.name != "kustomization.yaml"
    for document in yaml.safe_load_all(file.read_text())
]
PODS = {each["metadata"]["name"].removeprefix("dataloader-"): each["spec"]["template"]["spec"]
        for each in MANIFESTS if "template" in each.get("spec", {})}  # fmt: skip


@pytest.mark.parametrize("document", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_manifest_fits_the_schema(document: dict[str, Any], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(document, version, strict=True)


def test_the_kustomization_names_every_manifest_and_the_map_has_settings_alone() -> None:
    folder = DEPLOY / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert {*kustomization["resources"], "kustomization.yaml"} == {file.name for file in folder.glob("*.yaml")}
    (settings,) = (each["data"] for each in MANIFESTS if each["kind"] == "ConfigMap")
    assert {name.lower() for name in settings} <= set(Settings.model_fields)
    assert "PG_PASSWORD" not in settings


def test_pods_have_the_time_that_a_stop_needs() -> None:
    hooks = {name: pod["containers"][0].get("lifecycle", {}).get("preStop") for name, pod in PODS.items()}
    assert {name for name, hook in hooks.items() if hook} == {"api"}
    before = {"api": float(hooks["api"]["exec"]["command"][1])}
    for name, least in stop_needs().items():
        assert PODS[name]["terminationGracePeriodSeconds"] > least + before.get(name, 0), name


@pytest.mark.parametrize("name", sorted(PODS))
def test_pods_have_few_rights(name: str) -> None:
    """Those that the Pod Security Standard `restricted` asks for, and a root that cannot be written to."""
    pod = PODS[name]
    (container,) = pod["containers"]
    assert container["args"][0] == name
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {pod['securityContext']['runAsUser']} " in (DEPLOY.parent / "Dockerfile").read_text()
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "deploy" / "requirements.lock").read_text()
ENTRIES = re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)(?: ;[^\\\n]*)?( ?\\\n +--hash=sha256:)?", LOCK, re.MULTILINE)
PINNED = {canonicalize_name(name): version for name, version, _ in ENTRIES}


def asked_for() -> list[Requirement]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return [Requirement(line) for line in setup["options"]["install_requires"].split("\n") if line]


def needed(requirement: Requirement, found: dict[str, Requirement]) -> dict[str, Requirement]:
    """The requirement and all that it needs here, as the installed distributions say."""
    key = f"{canonicalize_name(requirement.name)}[{','.join(sorted(requirement.extras))}]"
    if key not in found:
        found[key] = requirement
        for line in requires(requirement.name) or []:
            further = Requirement(line)
            environments = [{**default_environment(), "extra": extra} for extra in ("", *requirement.extras)]
            if not further.marker or any(further.marker.evaluate(environment) for environment in environments):
                needed(further, found)
    return found


def test_the_lock_names_every_library_that_setup_cfg_needs_with_its_hash_and_no_other() -> None:
    """`python tools/lock.py` makes it anew."""
    found: dict[str, Requirement] = {}
    for each in asked_for():
        assert each.specifier.contains(PINNED.get(canonicalize_name(each.name), "0.dev0"), prereleases=False), each
        needed(each, found)
    names = {canonicalize_name(each.name) for each in found.values()}
    assert names - set(PINNED) == set()
    # A line with a marker may be for another platform or Python.
    everywhere = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+).*==\S+ \\$", LOCK, re.MULTILINE)}
    assert everywhere - names == set()
    assert len(ENTRIES) == len(re.findall(r"^\w", LOCK, re.MULTILINE)) > 20
    assert [name for name, _, hashes in ENTRIES if not hashes] == []


PROMTOOL = shutil.which("promtool")
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
NAMES = re.findall(r"- alert: (\w+)", RULES.read_text())


@pytest.mark.skipif(not PROMTOOL, reason="promtool (Debian package prometheus) is not installed")
@pytest.mark.long
def test_each_alert_fires_when_it_should_and_no_other_does(tmp_path: Path) -> None:
    """No alert fires on a healthy farm. An alert without a case here fails the test."""

    def case(series: dict[str, str], at: str, fires: dict[str, Any]) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [
                {"eval_time": at, "alertname": name, "exp_alerts": [fires[name]] if name in fires else []}
                for name in ILL
            ],
        }

    assert sorted(NAMES) == sorted(ILL)
    ill = [case(WELL | changes, at, {name: {"exp_labels": labels}}) for name, (changes, at, labels) in ILL.items()]
    tests = [case(WELL, "120m", {}), *ill]
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(document))
    command = [str(PROMTOOL), "test", "rules", str(tmp_path / "tests.yml")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_the_page_names_every_alert() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8").partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == NAMES
