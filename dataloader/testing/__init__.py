"""For the tests of pipelines: run one as a worker would, and see what would become of its job.

    from dataloader.testing import run

    result = run(load_customers, {"region": "north"}, cancel_at=3)
    assert result.status == "canceled"

The run goes through the code of a worker (`run`, `job.decide`): every form of function, the context, progress,
transactions in a database where one is given. Cancellations, drains and crashes happen at the safe point that a test
names, so nothing waits and nothing is left to chance. The fixtures are in `dataloader.testing.plugin`, examples in
docs/pipelines.md. May import anything below the command line; nothing of the package imports it.
"""

from __future__ import annotations

from dataloader.testing.database import NoPostgres
from dataloader.testing.farm import NoDatabase, NotReached, Result, Run, run

__all__ = ["NoDatabase", "NoPostgres", "NotReached", "Result", "Run", "run"]
