"""Programs for developers: see README.md. They share helpers with the tests, which this package makes importable."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(_TESTS / name) for name in (".", "process", "api", "sql", "browser")]
