"""A kit for tests of pipelines: `run` runs a pipeline as a worker does, and returns the end of its job.

    from dataloader.testing import run

    result = run(load_customers, {"region": "north"}, cancel_at=3)
    assert result.status == "canceled"

The run uses the worker's own code (`farm.runner`, `job.decide`): every form of function, the context, progress, and
transactions if the test gives a database. A cancellation, a drain or a crash happens at the safe point that the test
names, so a test never waits and always has the same course. The fixtures are in `dataloader.testing.plugin`, examples
in docs/testing.md. No other room imports this one.
"""

from __future__ import annotations

from dataloader.testing.database import NoPostgres
from dataloader.testing.farm import Deadlocked, NoDatabase, NotReached, Result, Run, run

__all__ = ["Deadlocked", "NoDatabase", "NoPostgres", "NotReached", "Result", "Run", "run"]
