"""What a token is: made here, known elsewhere only by its SHA-256. May import `config`.

256 random bits need no slow hash: nobody finds them by trying.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Iterable
from hashlib import sha256

from pydantic import ValidationError

from dataloader.config import ApiToken

SCOPES = ("read", "trigger", "operate")
_PREFIX = "dl_"


def new() -> str:
    """A token that nobody has seen before."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """Its SHA-256, which is all that the service keeps of it."""
    return sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def entry(token: str, name: str, scopes: Iterable[str]) -> str:
    """What stands for it in DL_API_TOKENS: one object of that list. ValueError for a name that would be refused."""
    made = {"name": name, "scopes": list(dict.fromkeys(scopes)), "sha256": digest(token)}
    try:
        ApiToken.model_validate(made)
    except ValidationError:
        raise ValueError("should be up to 64 letters, digits and . _ @ -, and not anonymous") from None
    return json.dumps(made)


def holder(token: str, known: Iterable[ApiToken]) -> ApiToken | None:
    """The entry of this token. All are compared, each in constant time: the answer's delay tells nothing."""
    given, found = digest(token), None
    for one in known:
        if hmac.compare_digest(given, one.sha256.get_secret_value()):
            found = one
    return found
