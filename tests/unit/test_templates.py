"""Templates: what fills `{{ name }}`, and which names are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dataloader.queue.plans.words import filled, filled_text

FACTS = {"due": "2026-03-02T03:00:00+03:00", "year": 2026, "none": None, "names": ["a", 1]}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("{{ due }}", FACTS["due"]),
        ("{{year}}", 2026),
        ("{{ none }}", None),
        ("{{ names }}", ["a", 1]),
        ("year {{ year }}, due {{due}}", "year 2026, due 2026-03-02T03:00:00+03:00"),
        ("{{ year }}{{ year }}", "20262026"),
        ("{{ names }} and {{ none }}", '["a", 1] and null'),
        ({"{{ year }}": [{"deep": "{{ year }}"}, 5, True, None]}, {"{{ year }}": [{"deep": 2026}, 5, True, None]}),
        ("no { place } }}", "no { place } }}"),
    ],
)
def test_a_place_is_filled(value: Any, found: Any) -> None:
    assert filled(value, FACTS) == found


def test_a_text_stays_one() -> None:
    assert filled_text("{{ year }}", FACTS) == "2026"


@pytest.mark.parametrize("text", ["{{ dew }}", "a {{ dew }} b", "{{ }}", "{{ due.year }}"])
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not known; known are \{\{ due \}\}, \{\{ year \}\}"):
        filled([text], FACTS)
