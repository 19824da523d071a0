"""API tokens: 256 random bits, stored as their SHA-256. A slow hash is not needed: nobody can guess 256 bits."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Iterable
from hashlib import sha256

from pydantic import ValidationError

from dataloader.config import ApiToken

_PREFIX = "dl_"


def new() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """The token's SHA-256 in hex; the service stores only this hash."""
    return sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def entry(token: str, name: str, scopes: Iterable[str]) -> str:
    """The token's entry in the list DL_API_TOKENS, as JSON. Raises ValueError for a name that is not valid."""
    fields = {"name": name, "scopes": list(dict.fromkeys(scopes)), "sha256": digest(token)}
    try:
        ApiToken.model_validate(fields)
    except ValidationError:
        raise ValueError("should be up to 64 letters, digits and . _ @ -, and not anonymous") from None
    return json.dumps(fields)


def holder(token: str, known: Iterable[ApiToken]) -> ApiToken | None:
    """The token's entry, or None. All entries are compared in constant time, so the response time reveals no token."""
    wanted, match = digest(token), None
    for candidate in known:
        if hmac.compare_digest(wanted, candidate.sha256.get_secret_value()):
            match = candidate
    return match
