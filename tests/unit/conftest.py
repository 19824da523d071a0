"""Fixtures of the unit tests."""

from pathlib import Path

import pytest

from dataloader import config, pipelines
from dataloader.pipelines import hooks, registry


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines and hooks that a test registers go with it; the built-in pipelines are there."""
    pipelines.load(())  # before: a module is imported once, and would register its pipeline in what goes with the test
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    for hook in hooks.ALL:
        monkeypatch.setattr(hook, "_functions", {})


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting in the environment, and no .env."""
    for name in config.Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)
