"""The files of deploy/: units that systemd takes, manifests that fit Kubernetes' schemas, times that fit the drain."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    """The seconds that each program may take to stop, with the default settings."""
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
    said = analyze(root, "verify", "--man=no", *map(instance, UNITS))
    assert said == ""


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_units_have_few_rights(unit: Path, root: Path) -> None:
    said = analyze(root, "security", "--offline=true", "--no-pager", instance(unit))
    (score,) = re.findall(r"exposure level for \S+: ([\d.]+)", said)
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


def named(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


@pytest.mark.parametrize("document", MANIFESTS, ids=named)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_manifest_fits_the_schema(document: dict[str, Any], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(document, version, strict=True)


def test_the_kustomization_names_every_manifest() -> None:
    folder = DEPLOY / "kubernetes"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert {*kustomization["resources"], "kustomization.yaml"} == {file.name for file in folder.glob("*.yaml")}


def test_pods_have_the_time_that_a_stop_needs() -> None:
    hooks = {name: pod["containers"][0].get("lifecycle", {}).get("preStop") for name, pod in PODS.items()}
    assert {name for name, hook in hooks.items() if hook} == {"api"}
    before = {"api": float(hooks["api"]["exec"]["command"][1])}
    assert [
        name
        for name, least in stop_needs().items()
        if PODS[name]["terminationGracePeriodSeconds"] <= least + before.get(name, 0)
    ] == []


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


def test_the_map_has_settings_alone() -> None:
    (settings,) = (each["data"] for each in MANIFESTS if each["kind"] == "ConfigMap")
    assert {name.lower() for name in settings} <= set(Settings.model_fields)
    assert "PG_PASSWORD" not in settings
