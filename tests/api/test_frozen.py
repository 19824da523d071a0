"""What users see is what tests/frozen says: the answers of the API and of the command line, helps, names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_answer_is_as_it_was_frozen() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TEST_DATABASE_URL", "DL_TEST"))}
    done = subprocess.run([sys.executable, "-m", "tools.freeze"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}\nIf these changes are meant: `python -m tools.freeze --write`,"
        " and their reasons in tests/frozen/differences.md"
    )
