"""What unit tests share."""

from __future__ import annotations

import pytest

from dataloader import pipelines
from dataloader.pipelines import hooks, registry


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines and hooks that a test registers go with it; the built-in pipelines are there."""
    pipelines.load(())  # before: a module is imported once, and would register its pipeline in what goes with the test
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    for hook in hooks.ALL:
        monkeypatch.setattr(hook, "_functions", {})
