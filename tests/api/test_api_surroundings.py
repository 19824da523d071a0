"""U+0000 in an address, which no client means and every service meets."""

from __future__ import annotations

import re

from flask import Flask
from flask.testing import FlaskClient

JOB = "01890a5d-ac96-774b-bcce-b302099a8057"


def addresses(app: Flask) -> list[tuple[str, str]]:
    """Each method and address of a rule that takes a text, with U+0000 in the place of each of its texts."""
    found = []
    for rule in app.url_map.iter_rules():
        verbs = re.search(r"any\('([^']*)'", rule.rule)
        path = re.sub(r"<any\([^>]*>", verbs[1] if verbs else "", rule.rule)
        path = re.sub(r"<uuid:[^>]*>", JOB, path)
        if "<" in path:
            wrong = re.sub(r"<[^>]*>", "%00x", path)
            found += [(method, wrong) for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}]
    return sorted(found)


def test_no_address_with_a_zero_character_is_a_fault_of_the_service(app: Flask, client: FlaskClient) -> None:
    tried = addresses(app)
    assert len(tried) > 40
    for method, path in tried:
        same_site = {"Origin": "http://localhost"}
        answer = client.open(path, method=method, headers=same_site, data={} if path[:4] != "/api" else None)
        assert answer.status_code in (400, 404), (method, path, answer.status_code)
