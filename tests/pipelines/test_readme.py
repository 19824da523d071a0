"""The README's pipeline, with the README's text."""

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dataloader import testing

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def load_customers() -> Any:
    (text,) = re.findall(r"```python\n(# my_loaders\.py\n.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "my_loaders"}
    exec(text, names)
    return names["load_customers"]


@pytest.mark.parametrize("point", [1, 2, 3, "end"])
def test_the_readmes_pipeline_leaves_no_doubles(point: Any, load_customers: Any, dsn: str) -> None:
    result = testing.run(load_customers, {"region": "north"}, dsn=dsn, crash_at=point)
    assert (result.status, result.attempts) == ("succeeded", 2), result.error
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT count(*), min(region) FROM customers").fetchone() == (1000, "north")


def test_the_readmes_pipeline_stops_at_a_yield_and_names_what_is_missing(load_customers: Any, dsn: str) -> None:
    assert testing.run(load_customers, {"region": "north"}, dsn=dsn, cancel_at=2).status == "canceled"
    assert testing.run(load_customers, {}, dsn=dsn).error == "region is missing"
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT to_regclass('customers')").fetchone() == (None,)
